"""Paged decode on the CPU: one state per aligned chunk, merged ascending, each row read once, where it is.

It gives the bits of the chunk path, whatever the page table. Pages that cannot be read in place (of half
precision, or not whole blocks of 16 tokens) are gathered a chunk at a time. It must not know who filled the
pages.
"""

from __future__ import annotations

from concurrent.futures import Executor, wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job, PageWord
from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.chunk_attention.decode import no_rows
from kvtier_kernels.ops.chunk_attention.jobs import one_each, readable
from kvtier_kernels.state import AttentionState, LogitFrame, States, fold

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library

_SHARES = 4


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
    workers: Executor | None = None,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather.

    workers: threads that attend shares of a request's chunks beside the caller's; the bits are the same. What
    they have not begun when the caller is through is cancelled, and in their queue until they come by."""
    _check_shapes(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    batch, hq, d = q.shape
    page = k_cache.shape[1]
    compiled = library()
    totals = no_rows(batch, hq, d)
    scaled = q.float() * scale
    if (
        compiled is None
        or page % LANES
        or not (readable(k_cache) and readable(v_cache) and readable(scaled))
        or not (page_table.is_cpu and seq_lens.is_cpu)
    ):
        check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
        for b, n in enumerate(seq_lens.tolist()):
            if n:
                pages = page_table[b, : -(-n // page)].long()
                into = totals[0][b], totals[1][b], totals[2][b]
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
    queries = scaled.contiguous().view(batch, k_cache.shape[2], hq // k_cache.shape[2], d)
    for b, chunks in enumerate(requests):
        if chunks is not None:
            m, l, u = (total[b : b + 1] for total in totals)
            _attend(compiled, queries[b : b + 1], chunks, (m, l, u), workers)
    return AttentionState(*totals, frame=LogitFrame(scale))


class _Chunks:
    """Chunks of one request of n rows, read where its pages lie."""

    def __init__(
        self, compiled: Library, k: Tensor, v: Tensor, page_table: Tensor, request: int, n: int, split: int
    ) -> None:
        """ShapeError for an id that is no page."""
        pool, page = k.shape[:2]
        count, blocks = -(-n // split), split // LANES
        at = 2 * count * blocks + AHEAD
        # Tables and jobs in one piece.
        memory = np.empty(at + count * len(Job), np.int64)
        self.jobs = memory[at:].reshape(count, len(Job))
        sides = [(x.data_ptr(), *(4 * x.stride(i) for i in range(3))) for x in (k, v)]
        given: dict[int, int] = {
            PageWord.PAGES: page_table.data_ptr() + 4 * request * page_table.stride(0),
            PageWord.USED: -(-n // page),
            PageWord.POOL: pool,
            PageWord.PER_PAGE: page // LANES,
            PageWord.CHUNKS: count,
            PageWord.BLOCKS: blocks,
            PageWord.SPLIT: split,
            PageWord.LAST: n - (count - 1) * split,
            PageWord.TABLE: memory.ctypes.data,
            PageWord.JOBS: self.jobs.ctypes.data,
            PageWord.WRONG: 0,
            **{PageWord.KEYS + i: x for i, x in enumerate(sides[0])},
            **{PageWord.VALUES + i: x for i, x in enumerate(sides[1])},
        }
        words = np.array([given[i] for i in range(PageWord.SIZE)], np.int64)
        compiled.pages(words.ctypes.data)
        if words[PageWord.WRONG]:
            raise _wrong_pages(pool)


def _attend(compiled: Library, q: Tensor, chunks: _Chunks, totals: States, workers: Executor | None) -> None:
    """One request: q [1, Hk, G, d] times the scale, into totals of [1, ...]."""
    jobs = chunks.jobs
    count = len(jobs)
    only = np.zeros(count, np.int64)
    if workers is None or count < 2:
        compiled.attend(q, jobs, only, only, jobs[:, Job.VISIBLE].copy(), totals)
        return
    states = no_rows(count, *totals[2].shape[1:])
    share = -(-count // _SHARES)
    firsts = SimpleQueue[int]()
    for first in range(0, count, share):
        firsts.put(first)

    def attend() -> None:
        while True:
            try:
                first = firsts.get_nowait()
            except Empty:
                return
            last = min(count, first + share)
            work = one_each(jobs[first:last], np.arange(first, last))
            compiled.attend(q, work.jobs, work.queries, work.slots, work.seen, states)

    # The caller attends what no worker has begun: waking one may take as long as a share does.
    beside = [workers.submit(attend) for _ in range(firsts.qsize() - 1)]
    try:
        attend()
    finally:
        # Nobody may write to these states once they are left.
        wait([one for one in beside if not one.cancel()])
    for one in beside:
        if not one.cancelled():
            one.result()
    m, l, u = totals
    fold((m[0], l[0], u[0]), states)


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
