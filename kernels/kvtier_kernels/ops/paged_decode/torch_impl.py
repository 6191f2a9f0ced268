"""Paged decode on the CPU: one state per aligned chunk, merged ascending, each row read once, where it is.

It gives the bits of the chunk path, whatever the page table. Pages that cannot be read in place (of half
precision, or not whole blocks of 16 tokens) are gathered a chunk at a time, as is the one chunk that a
window cuts, whose first row may be any of its page. The compiled kernels do not cap logits: with a cap all is
done by plain operations. It must not know who filled the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.crew import Crew, Listed
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job, PageWord
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.jobs import Integers, jobs_of, readable, tables
from kvtier_kernels.ops.paged_decode.arguments import (
    check_inputs,
    check_shapes,
    gathered,
    oldest_row,
    room,
    spans,
    wrong_lengths,
    wrong_pages,
)
from kvtier_kernels.ops.paged_decode.plain_impl import paged_decode_plain
from kvtier_kernels.state import AttentionState, LogitFrame, States, fold

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library


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
    window: int | None = None,
    softcap: float | None = None,
    out: States | None = None,
    crew: Crew | None = None,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather.

    crew: threads that attend chunks of a request beside the caller's, where it is free; the bits are the
    same, and whoever does not come in time is not waited for. It is not asked where logits are capped."""
    if softcap is not None:
        return paged_decode_plain(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            scale=scale,
            split_tokens=split_tokens,
            window=window,
            softcap=softcap,
            out=out,
        )
    check_shapes(q, k_cache, v_cache, page_table, seq_lens, split_tokens, window, None)
    hq, d = q.shape[1:]
    page = k_cache.shape[1]
    compiled = library()
    totals = m, l, u = room(out, q)
    if (
        compiled is None
        or page % LANES
        or not (readable(k_cache) and readable(v_cache) and q.is_cpu)
        or not (page_table.is_cpu and seq_lens.is_cpu)
    ):
        check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens, window)
        scaled = q.float() * scale
        for b, n in enumerate(seq_lens.tolist()):
            into = _no_rows(totals, b)
            for lo, hi in spans(n, split_tokens, window):
                keys, values = (gathered(x, page_table[b], lo, hi) for x in (k_cache, v_cache))
                state = chunk_state(scaled[b : b + 1], keys, values, scale=1.0, q_pos0=n - 1, row_pos0=lo)
                fold(into, (state.m, state.l, state.u))
        return AttentionState(m, l, u, frame=LogitFrame(scale))
    lengths, most = seq_lens.tolist(), page_table.shape[1] * page
    if lengths and (min(lengths) < 0 or max(lengths) > most):
        raise wrong_lengths(most)
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    # Nothing is written before all ids are known to be pages.
    requests = [
        _chunks(compiled, (k_cache, v_cache), (page_table, b), n, split_tokens, window)
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
    return AttentionState(m, l, u, frame=LogitFrame(scale))


def _no_rows(totals: States, request: int) -> States:
    """One request's part of the totals, over no rows yet."""
    m, l, u = (total[request] for total in totals)
    return m.fill_(-torch.inf), l.zero_(), u.zero_()


def _chunks(
    compiled: Library,
    caches: tuple[Tensor, Tensor],
    request: tuple[Tensor, int],
    n: int,
    split: int,
    window: int | None,
) -> _Chunks | None:
    """Of one request of n rows, those that its query sees some row of; None: it sees none. request: a line of
    the page table, whose last dimension is contiguous. ShapeError for an id that is no page."""
    oldest = oldest_row(n, window)
    if oldest == n:
        return None
    (table, b), page = request, caches[0].shape[1]
    first = oldest // split * split
    if first == oldest:
        ids = table.data_ptr() + 4 * (b * table.stride(0) + first // page)
        return _Chunks(compiled, *caches, ids, n - first, split)
    own = table[b, first // page : -(-n // page)].clone()
    # The chunk's pages before the window need not be there: whatever stands for them is not read.
    before = (oldest - first) // page
    own[:before] = own[before]
    chunks = _Chunks(compiled, *caches, own.data_ptr(), n - first, split)
    end = min(split, n - first)
    chunks.begin_with(*(gathered(x, own, oldest - first, end).contiguous() for x in caches))
    return chunks


class _Chunks:
    """Chunks of one request of n rows, read where its pages lie."""

    def __init__(self, compiled: Library, k: Tensor, v: Tensor, ids: int, n: int, split: int) -> None:
        """ids: the address of the pages' int32 ids. ShapeError for an id that is no page."""
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
            ids,
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
            raise wrong_pages(pool)

    def begin_with(self, keys: Tensor, values: Tensor) -> None:
        """The first chunk's rows are these instead, [R,Hk,d] and contiguous, at most as many."""
        rows = len(keys)
        strides = (4 * keys.stride(0), 4 * keys.stride(1), 4 * values.stride(0), 4 * values.stride(1))
        at = np.array([keys.data_ptr()]), np.array([values.data_ptr()])
        table = tables(*at, strides[0], strides[2], rows)
        self.jobs[0] = jobs_of(table, 1, -(-rows // LANES), strides, rows)[0]
        self.seen[0] = rows
        self._copied = keys, values, table

    @property
    def jobs(self) -> Integers:
        return self._memory[self._jobs_from : self._seen_from].reshape(self.count, len(Job))

    @property
    def seen(self) -> Integers:
        return self._memory[self._seen_from : self._seen_from + self.count]
