"""Paged decode on the CPU: one state per aligned chunk, merged ascending, each row read once, where it is.

It gives the bits of the chunk path, whatever the page table. Pages that cannot be read in place (of half
precision, or not whole blocks of 16 tokens) are gathered a chunk at a time. It must not know who filled the
pages.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job
from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.chunk_attention.decode import no_rows
from kvtier_kernels.ops.chunk_attention.jobs import Integers, Work, jobs_of, one_each, readable
from kvtier_kernels.state import AttentionState, LogitFrame, States, fold

_SHARES = 4


def check_inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, split_tokens: int
) -> None:
    """Shapes, dtypes, lengths and page ids of every implementation. Raises ShapeError.

    Lengths and ids on a GPU are not looked at: that would wait for the device on every call.
    """
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
    if (
        batch
        and seq_lens.device.type == "cpu"
        and (int(seq_lens.min()) < 0 or int(seq_lens.max()) > page_table.shape[1] * page)
    ):
        raise ShapeError(f"seq_lens must lie in [0, {page_table.shape[1] * page}]")
    if batch and seq_lens.device.type == page_table.device.type == "cpu":
        # Pages are read by their addresses, and one that is none would be foreign memory.
        mapped = torch.arange(page_table.shape[1]) * page < seq_lens.unsqueeze(1)
        ids = page_table[mapped]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= k_cache.shape[0]):
            raise ShapeError(f"page ids of rows must lie in [0, {k_cache.shape[0]})")


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
    workers: Executor | None = None,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather.

    workers: threads that attend shares of a request's chunks side by side; the bits are the same."""
    check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    batch, hq, d = q.shape
    totals = no_rows(batch, hq, d)
    scaled = q.float() * scale
    in_place = (
        library() is not None
        and k_cache.shape[1] % LANES == 0
        and readable(k_cache)
        and readable(v_cache)
        and readable(scaled)
    )
    for b, n in enumerate(seq_lens.tolist()):
        if not n:
            continue
        own = totals[0][b], totals[1][b], totals[2][b]
        pages = page_table[b, : -(-n // k_cache.shape[1])]
        if in_place:
            chunks = _Chunks(k_cache, v_cache, pages.numpy(), n, split_tokens)
            _attend(scaled[b], chunks, own, workers)
        else:
            _gathered(scaled[b : b + 1], (k_cache, v_cache), pages.long(), (n, split_tokens), own)
    return AttentionState(*totals, frame=LogitFrame(scale))


class _Chunks:
    """Chunks of one request, read where its pages lie."""

    def __init__(self, k: Tensor, v: Tensor, pages: Integers, n: int, split: int) -> None:
        self.heads = k.shape[2]
        page = k.shape[1]
        count, blocks = -(-n // split), split // LANES
        inside = np.arange(page // LANES) * LANES
        self._table = np.empty(2 * count * blocks + AHEAD, np.int64)
        by_chunk = self._table[: 2 * count * blocks].reshape(count, 2, blocks)
        for half, x in enumerate((k, v)):
            first = x.data_ptr() + 4 * x.stride(0) * pages.astype(np.int64)
            every = (first[:, None] + 4 * x.stride(1) * inside).reshape(-1)
            # What stands behind the last page is a hint only.
            padded = np.full(count * blocks, every[-1])
            padded[: len(every)] = every[: count * blocks]
            by_chunk[:, half] = padded.reshape(count, blocks)
        self._table[2 * count * blocks :] = self._table[-AHEAD - 1]
        strides = (4 * k.stride(1), 4 * k.stride(2), 4 * v.stride(1), 4 * v.stride(2))
        self.jobs = jobs_of(self._table, count, blocks, strides, split)
        self.jobs[-1, Job.VISIBLE] = n - (count - 1) * split


def _attend(q: Tensor, chunks: _Chunks, totals: States, workers: Executor | None) -> None:
    """One request: q [Hq, d] times the scale."""
    compiled = library()
    assert compiled is not None
    hq, d = q.shape
    grouped = q.contiguous().view(1, chunks.heads, hq // chunks.heads, d)

    def run(work: Work, into: States) -> None:
        compiled.attend(grouped, work.jobs, work.queries, work.slots, work.seen, into)

    count = len(chunks.jobs)
    if workers is None or count < 2:
        into = totals[0][None], totals[1][None], totals[2][None]
        run(one_each(chunks.jobs, np.zeros(count, np.int64)), into)
        return
    states = no_rows(count, hq, d)
    share = -(-count // _SHARES)

    def attend(first: int) -> None:
        last = min(count, first + share)
        run(one_each(chunks.jobs[first:last], np.arange(first, last)), states)

    for _ in workers.map(attend, range(0, count, share)):
        pass
    fold(totals, states)


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
