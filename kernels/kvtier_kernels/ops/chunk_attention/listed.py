"""One query over rows that lists name, read where they are: a list for each query head, KV head or for all.

Why it exists: a selection is a few rows out of many, one list a head, and to gather them costs more than to
attend them. Bits are those of `chunk_state` over the same rows, gathered. It must not know how rows were
chosen, nor whether they lie in chunks or in pages: it gets an address for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job
from kvtier_kernels.ops.chunk_attention.jobs import Integers, readable
from kvtier_kernels.ops.chunk_attention.plain import state_plain
from kvtier_kernels.ops.chunk_attention.torch_impl import ShapeError, check_uncapped
from kvtier_kernels.state import AttentionState, LogitFrame, States, fold, identity

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Lists:
    """Rows that query heads read, list after list. offsets: int64 [n], of each row from the first one, in
    elements, of keys and of values; counts: int64 [lists]. bias: float32 [n], added to logits, or None.
    split: rows of a state; states of a list are merged in its order."""

    keys: Integers
    values: Integers
    counts: Integers
    bias: Floats | None
    split: int


def listed_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Sequence[NDArray[np.int64]],
    log_weight: Sequence[Floats] | None,
    frame: LogitFrame,
    first: int = 0,
) -> AttentionState:
    """The state of one query over rows of one chunk, those of each list for its query heads.

    q: float32 [1, Hq, d]; k, v: float32 [R, Hk, d], CPU, of rows that count from `first`; lists: rows of the
    chunk, in the order in which they are summed, one list for each KV head or query head, or one for all.
    log_weight: added to their logits,
    natural log; the state is then an estimate: m = max(s + w), l = sum exp(s + w - m), u likewise with v, for
    s = scale q.k. Returns m, l [1, Hq], u [1, Hq, d]; the identity where a list is empty. Raises ShapeError.
    """
    if q.dim() != 3 or q.shape[0] != 1 or k.dim() != 3 or k.shape != v.shape or k.shape[2] != q.shape[2]:
        raise ShapeError(
            f"want q [1,Hq,d], k and v [R,Hk,d], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not (q.dtype == k.dtype == v.dtype == torch.float32 and q.is_cpu and k.is_cpu and v.is_cpu):
        raise ShapeError(f"want float32 in the CPU's memory, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_uncapped(frame)
    hq, d = q.shape[1:]
    heads, count = k.shape[1], len(lists)
    if not heads or hq % heads or count not in (1, heads, hq):
        raise ShapeError(f"{count} lists for {hq} query heads over {heads} KV heads")
    sizes = [len(one) for one in lists]
    if log_weight is not None and [len(one) for one in log_weight] != sizes:
        raise ShapeError(f"weights of {[len(one) for one in log_weight]} rows for {sizes}")
    # Offsets are products of these: in a narrower type one that wraps around would be foreign memory.
    chosen = np.concatenate(lists).astype(np.int64, copy=False) - first
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= k.shape[0]):
        # Rows are read by their addresses, and one that is none would be foreign memory.
        raise ShapeError(f"rows must lie in [{first}, {first + k.shape[0]})")
    spare = -d % LANES
    state = identity((hq,), d + spare, frame)
    if len(chosen):
        scaled = q[0] * frame.scale
        if spare:
            scaled, k, v = pad(scaled, (0, spare)), pad(k, (0, spare)), pad(v, (0, spare))
        k, v = (x if readable(x) else x.contiguous() for x in (k, v))
        work = Lists(
            keys=chosen * k.stride(0),
            values=chosen * v.stride(0),
            counts=np.array(sizes, np.int64),
            bias=None if log_weight is None else np.concatenate(log_weight),
            split=max(sizes),
        )
        attend_lists(scaled.contiguous(), k, v, work, (state.m, state.l, state.u))
    u = state.u[None, :, :d] if spare else state.u[None]
    return AttentionState(state.m[None], state.l[None], u, frame, estimated=log_weight is not None)


def attend_lists(scaled: Tensor, k: Tensor, v: Tensor, lists: Lists, totals: States) -> None:
    """Merges into totals m, l [Hq], u [Hq, d] the states of one query over its lists, `split` rows each.

    scaled: float32 [Hq, d], times the scale, contiguous. k, v: `readable` [..., Hk, d], of which offsets
    count from the first element and the last stride but one is that from head to head."""
    compiled = library()
    if compiled is None:
        _plain(scaled, k, v, lists, totals)
        return
    hq, d = scaled.shape
    count, heads = len(lists.counts), k.shape[-2]
    # A list of its own for each head: each is then the only head of its job.
    one = heads if count == 1 else 1
    group = hq // (count * one)
    tables, bias = _tables(k, v, lists, heads if count > 1 else 1)
    jobs, work = _jobs(tables, bias, lists, (k, v))
    q = scaled.view(count, one, group, d)
    m, l, u = totals
    into = m.view(count, one * group), l.view(count, one * group), u.view(count, one * group, d)
    compiled.attend(q, jobs, work, work, np.ascontiguousarray(jobs[:, Job.VISIBLE]), into, listed=True)


def _tables(k: Tensor, v: Tensor, lists: Lists, heads: int) -> tuple[Integers, Floats | None]:
    """int64 [2, n + spare]: addresses of keys and values, list after list; and the bias, as long."""
    total, spare = len(lists.keys), AHEAD * LANES
    table = np.empty((2, total + spare), np.int64)
    per_head = len(lists.counts) // heads
    for row, x, offsets in ((0, k, lists.keys), (1, v, lists.values)):
        np.multiply(offsets, 4, out=table[row, :total])
        if heads > 1:
            own = np.repeat(np.arange(heads), per_head) * (4 * x.stride(-2))
            table[row, :total] += np.repeat(own, lists.counts)
        table[row, :total] += x.data_ptr()
        # Hints for what comes behind.
        table[row, total:] = x.data_ptr()
    if lists.bias is None:
        return table, None
    bias = np.zeros(total + LANES, np.float32)
    bias[:total] = lists.bias
    return table, bias


def _jobs(
    table: Integers, bias: Floats | None, lists: Lists, caches: tuple[Tensor, Tensor]
) -> tuple[Integers, Integers]:
    """A job for each part of a list, and of which list it is."""
    starts = np.cumsum(lists.counts) - lists.counts
    if lists.counts.max() <= lists.split:
        which = lists.counts.nonzero()[0]
        first, visible = starts[which], lists.counts[which]
    else:
        parts = -(-lists.counts // lists.split)
        which = np.repeat(np.arange(len(parts)), parts)
        before = lists.split * (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts))
        first, visible = starts[which] + before, np.minimum(lists.split, lists.counts[which] - before)
    jobs = np.zeros((len(which), len(Job)), np.int64)
    jobs[:, Job.KEYS] = table.ctypes.data + 8 * first
    jobs[:, Job.VALUES] = jobs[:, Job.KEYS] + table.strides[0]
    jobs[:, Job.VISIBLE] = visible
    jobs[:, Job.FIRST] = np.arange(len(which))
    jobs[:, Job.COUNT] = 1
    for x, row, head in (
        (caches[0], Job.KEY_ROW, Job.KEY_HEAD),
        (caches[1], Job.VALUE_ROW, Job.VALUE_HEAD),
    ):
        # Of rows that lie anywhere this only says whether heads lie within them.
        jobs[:, row] = 4 * max(x.stride()[:-1])
        jobs[:, head] = 4 * x.stride(-2)
    if bias is not None:
        jobs[:, Job.BIAS] = bias.ctypes.data + 4 * first
    return jobs, which


def _plain(scaled: Tensor, k: Tensor, v: Tensor, lists: Lists, totals: States) -> None:
    """`attend_lists` with tensor operations."""
    hq, count, heads = len(scaled), len(lists.counts), k.shape[-2]
    group, per_head = hq // count, max(1, count // heads)
    span = slice(0, heads) if count == 1 else None
    at = 0
    for index, size in enumerate(lists.counts.tolist()):
        own = slice(index * group, (index + 1) * group)
        head = span or slice(index // per_head, index // per_head + 1)
        into = totals[0][own], totals[1][own], totals[2][own]
        for lo in range(at, at + size, lists.split):
            hi = min(at + size, lo + lists.split)
            keys, values = (
                _rows(x, offsets[lo:hi], head) for x, offsets in ((k, lists.keys), (v, lists.values))
            )
            bias = None if lists.bias is None else torch.from_numpy(lists.bias[lo:hi])
            m, l, u = state_plain(scaled[None, own], keys, values, torch.tensor([hi - lo]), bias)
            fold(into, (m, l, u))
        at += size


def _rows(x: Tensor, offsets: Integers, heads: slice) -> Tensor:
    """[n, heads, d] from a row's offset each."""
    d = x.shape[-1]
    inside = torch.arange(heads.start, heads.stop)[:, None] * x.stride(-2) + torch.arange(d)
    flat = x.as_strided((x.untyped_storage().nbytes() // 4 - x.storage_offset(),), (1,))
    return flat[torch.from_numpy(offsets)[:, None, None] + inside]
