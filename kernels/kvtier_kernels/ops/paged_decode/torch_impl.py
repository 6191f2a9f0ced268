"""Paged decode on the CPU: one state per aligned chunk, merged ascending, each row read once, where it is.

It gives the bits of the chunk path, whatever the page table. Pages that cannot be read in place (of half
precision, or not whole blocks of 16 tokens) are gathered a chunk at a time. It must not know who filled the
pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.crew import Crew, Listed
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job, PageWord
from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.chunk_attention.jobs import Integers, readable
from kvtier_kernels.state import AttentionState, LogitFrame, States, fold

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library


def _check_shapes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, split_tokens: int
) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ShapeError(
            f"want q [B,Hq,d], caches [N,P,Hk,d], got {tuple(q.shape)}, {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)}"
        )
    batch, hq, d = q.shape
    _, page, hk, kd = k_cache.shape
    if kd != d or hk == 0 or hq % hk:
        raise ShapeError(f"q has {hq} heads of {d}, the cache {hk} of {kd}")
    if page_table.shape[0] != batch or seq_lens.shape != (batch,):
        raise ShapeError(f"{batch} requests, page_table {tuple(page_table.shape)}, {tuple(seq_lens.shape)}")
    if page_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ShapeError(f"page_table and seq_lens are int32, got {page_table.dtype}, {seq_lens.dtype}")
    if split_tokens < 1 or split_tokens % page:
        raise ShapeError(f"a split of {split_tokens} tokens is not whole pages of {page}")


def check_inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, split_tokens: int
) -> None:
    """Shapes, dtypes, lengths and page ids of every implementation. Raises ShapeError.

    Lengths and ids on a GPU are not looked at: that would wait for the device on every call.
    """
    _check_shapes(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    batch, page = q.shape[0], k_cache.shape[1]
    if (
        batch
        and seq_lens.device.type == "cpu"
        and (int(seq_lens.min()) < 0 or int(seq_lens.max()) > page_table.shape[1] * page)
    ):
        raise _wrong_lengths(page_table.shape[1] * page)
    if batch and seq_lens.device.type == page_table.device.type == "cpu":
        # Pages are read by their addresses, and one that is none would be foreign memory.
        mapped = torch.arange(page_table.shape[1]) * page < seq_lens.unsqueeze(1)
        ids = page_table[mapped]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= k_cache.shape[0]):
            raise _wrong_pages(k_cache.shape[0])


def _wrong_lengths(most: int) -> ShapeError:
    return ShapeError(f"seq_lens must lie in [0, {most}]")


def _wrong_pages(pool: int) -> ShapeError:
    return ShapeError(f"page ids of rows must lie in [0, {pool})")


@torch.no_grad()
def paged_decode_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    split_tokens: int = 256,
    crew: Crew | None = None,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather.

    crew: threads that attend chunks of a request beside the caller's, where it is free; the bits are the
    same, and whoever does not come in time is not waited for."""
    _check_shapes(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    batch, hq, d = q.shape
    page = k_cache.shape[1]
    compiled = library()
    m, l = (torch.empty((batch, hq), dtype=torch.float32) for _ in range(2))
    u = torch.empty((batch, hq, d), dtype=torch.float32)
    totals = m, l, u
    if (
        compiled is None
        or page % LANES
        or not (readable(k_cache) and readable(v_cache) and q.is_cpu)
        or not (page_table.is_cpu and seq_lens.is_cpu)
    ):
        check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
        scaled = q.float() * scale
        for b, n in enumerate(seq_lens.tolist()):
            into = _no_rows(totals, b)
            if n:
                pages = page_table[b, : -(-n // page)].long()
                _gathered(scaled[b : b + 1], (k_cache, v_cache), pages, (n, split_tokens), into)
        return AttentionState(*totals, frame=LogitFrame(scale))
    lengths, most = seq_lens.tolist(), page_table.shape[1] * page
    if lengths and (min(lengths) < 0 or max(lengths) > most):
        raise _wrong_lengths(most)
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    # Nothing is read before all ids are known to be pages.
    requests = [
        _Chunks(compiled, k_cache, v_cache, page_table, b, n, split_tokens) if n else None
        for b, n in enumerate(lengths)
    ]
    heads = k_cache.shape[2]
    given = q.float().contiguous()
    for b, chunks in enumerate(requests):
        if (
            chunks is not None
            and chunks.count > 1
            and crew is not None
            and crew.attend(given[b], scale, heads, chunks.listed, (m[b], l[b], u[b]))
        ):
            continue
        into = _no_rows(totals, b)
        if chunks is not None:
            only = np.zeros(chunks.count, np.int64)
            query = (given[b] * scale).view(1, heads, hq // heads, d)
            totals_of = into[0][None], into[1][None], into[2][None]
            compiled.attend(query, chunks.jobs, only, only, chunks.seen, totals_of)
    return AttentionState(*totals, frame=LogitFrame(scale))


def _no_rows(totals: States, request: int) -> States:
    """One request's part of the totals, over no rows yet."""
    m, l, u = (total[request] for total in totals)
    return m.fill_(-torch.inf), l.zero_(), u.zero_()


class _Chunks:
    """Chunks of one request of n rows, read where its pages lie."""

    def __init__(
        self, compiled: Library, k: Tensor, v: Tensor, page_table: Tensor, request: int, n: int, split: int
    ) -> None:
        """ShapeError for an id that is no page."""
        pool, page, _, _ = k.shape
        count, blocks = -(-n // split), split // LANES
        jobs_from = 2 * count * blocks + AHEAD
        seen_from = jobs_from + count * len(Job)
        # Tables, jobs, how many rows each has, and what is said of them: in one piece, with one address.
        words_from = seen_from + count
        memory = self._memory = np.empty(words_from + PageWord.SIZE, np.int64)
        at = int(memory.ctypes.data)
        self.count, self._jobs_from, self._seen_from = count, jobs_from, seen_from
        self.listed = Listed(count, min(n, split), at + 8 * jobs_from, at + 8 * seen_from)
        # In the order of PageWord.
        memory[words_from:] = (
            page_table.data_ptr() + 4 * request * page_table.stride(0),
            -(-n // page),
            pool,
            page // LANES,
            count,
            blocks,
            split,
            n - (count - 1) * split,
            at,
            self.listed.jobs,
            0,
            self.listed.seen,
            k.data_ptr(),
            *(4 * step for step in k.stride()[:3]),
            v.data_ptr(),
            *(4 * step for step in v.stride()[:3]),
        )
        compiled.pages(at + 8 * words_from)
        if memory[words_from + PageWord.WRONG]:
            raise _wrong_pages(pool)

    @property
    def jobs(self) -> Integers:
        return self._memory[self._jobs_from : self._seen_from].reshape(self.count, len(Job))

    @property
    def seen(self) -> Integers:
        return self._memory[self._seen_from : self._seen_from + self.count]


def _gathered(
    q: Tensor, caches: tuple[Tensor, Tensor], pages: Tensor, lengths: tuple[int, int], totals: States
) -> None:
    """One request of n rows, in chunks of `split`, from copies: q [1, Hq, d] times the scale."""
    n, split = lengths
    page = caches[0].shape[1]
    for lo in range(0, n, split):
        hi = min(n, lo + split)
        chosen = pages[lo // page : -(-hi // page)]
        k, v = (x[chosen].flatten(0, 1)[: hi - lo].float() for x in caches)
        state = chunk_state(q, k, v, scale=1.0, q_pos0=n - 1, row_pos0=lo)
        fold(totals, (state.m, state.l, state.u))
