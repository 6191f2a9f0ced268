"""Single queries over many chunks: the states of `chunk_state`, bit for bit, in few tensor calls.

Why it exists: a decode step is bound by memory and by the number of calls, not by arithmetic. Chunks that lie
at equal distances are read in place by one product; what is element by element runs over all chunks of all
queries at once; and chunks that several queries share are read once for all of them. It must not know
where chunks live. Bit equality with `chunk_state` and `merge` is held by test_decode_states.py and
test_decode_many.py in tests/unit/kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.ops.chunk_attention import products
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs
from kvtier_kernels.ops.chunk_attention.torch_impl import ALIGN_BYTES, ROW_PAD, ShapeError
from kvtier_kernels.state import AttentionState, LogitFrame

_LOWEST = torch.finfo(torch.float32).min
_STRETCH = 4
_ONE_BY_ONE = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """A run, the queries (rows of q) that attend it, and how many rows of its last chunk they see; the
    rest of that chunk must be finite. visible < R needs a run of one chunk."""

    run: ChunkRun
    queries: tuple[int, ...]
    visible: int


def reads_in_place(rows: int, head_dim: int) -> bool:
    """Whether full chunks of `rows` rows can be given to `decode_states`: no row would need padding."""
    return rows % ROW_PAD == 0 and head_dim * 4 % ALIGN_BYTES == 0


def decode_states(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], frame: LogitFrame
) -> AttentionState:
    """States of one query over each of n chunks, all of whose rows it sees.

    q: float32 [1, Hq, d]; keys, values: n times float32 [Hk, R, d], CPU, head-major, rows contiguous and
    64-byte aligned, `reads_in_place(R, d)`. Returns a state with m, l [n, 1, Hq] and u [n, 1, Hq, d].
    Raises ShapeError.
    """
    count = len(keys)
    if not count or q.dim() != 3 or q.shape[0] != 1:
        raise ShapeError(f"want q [1,Hq,d] and at least one chunk, got {tuple(q.shape)} and {count}")
    heads, rows, d = keys[0].shape
    hq = q.shape[1]
    if hq % heads or not reads_in_place(rows, d):
        raise ShapeError(f"{hq} query heads over {heads}, chunks of {rows} rows of {d}")
    readings = [Reading(run, (0,), rows) for run in chunk_runs(keys, values)]
    m, l, u = run_states(q * frame.scale, readings)
    return AttentionState(m=m.unsqueeze(1), l=l.unsqueeze(1), u=u.unsqueeze(1), frame=frame)


def run_states(scaled: Tensor, readings: Sequence[Reading]) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [T, Hq], u [T, Hq, d]): one state for each chunk and query, T over all readings in order; in a
    reading by chunk, then by query.

    scaled: float32 [B, Hq, d], queries times their scale. Runs are of one geometry, `reads_in_place`.
    """
    heads, rows, d = readings[0].run.keys[0].shape
    batch, hq, _ = scaled.shape
    group = hq // heads
    fast = all(products.agrees(len(each.queries) * max(2, group), rows, d) for each in readings)
    width = max(2, group) if fast else products.padded(group)
    q = scaled.reshape(batch, heads, group, d)
    wide = q if width == group else pad(q, (0, 0, 0, width - group))
    total = sum(each.run.count * len(each.queries) for each in readings)

    s = torch.empty(total, heads, width, rows)
    at = 0
    for each in readings:
        states = each.run.count * len(each.queries)
        _logits(wide, each, s[at : at + states], fast=fast)
        at += states
    m = s.amax(-1)
    p = s.sub_(m.clamp_min(_LOWEST).unsqueeze(-1)).exp_()
    l = p.sum(-1)
    u = torch.empty(total, heads, width, d)
    at = 0
    for each in readings:
        states = each.run.count * len(each.queries)
        _weighted(p[at : at + states], each, u[at : at + states], fast=fast)
        at += states
    if width == group:
        return m.view(total, hq), l.view(total, hq), u.view(total, hq, d)
    return (
        m[:, :, :group].reshape(total, hq),
        l[:, :, :group].reshape(total, hq),
        u[:, :, :group].reshape(total, hq, d),
    )


def _logits(q: Tensor, reading: Reading, out: Tensor, *, fast: bool) -> None:
    """Fills out [n * queries, Hk, width, R] from q [B, Hk, width, d]; rows that are not visible get -inf."""
    run, queries = reading.run, reading.queries
    _, heads, width, d = q.shape
    rows = run.rows
    chosen = q[queries[0]] if len(queries) == 1 else q[list(queries)].transpose(0, 1)
    packed = chosen.reshape(heads, len(queries) * width, d)
    whole = reading.visible == rows
    if fast and whole:
        logits = products.key_products(packed.numpy(), run.key_array)
        spread = torch.from_numpy(logits).view(run.count, heads, rows, len(queries), width)
        out.view(run.count, len(queries), heads, width, rows).copy_(spread.permute(0, 3, 1, 4, 2))
        return
    used = packed.shape[1]
    if used % products.QUERY_PAD:
        packed = pad(packed, (0, 0, 0, products.padded(used) - used))
    seen = rows if whole else -(-reading.visible // ROW_PAD) * ROW_PAD
    into = out.view(run.count, len(queries), heads, width, rows)
    for i, k in enumerate(run.keys):
        logits_of = products.torch_key_products(packed, k[:, :seen])[:, :used]
        into[i, :, :, :, :seen] = logits_of.view(heads, len(queries), width, seen).transpose(0, 1)
    if not whole:
        out[..., reading.visible :] = -torch.inf


def _weighted(p: Tensor, reading: Reading, out: Tensor, *, fast: bool) -> None:
    """Fills out [n * queries, Hk, width, d] from weights p [n * queries, Hk, width, R]."""
    run, queries = reading.run, len(reading.queries)
    _, heads, width, rows = p.shape
    d = out.shape[3]
    if queries == 1:
        packed = p
    else:
        by_query = p.view(run.count, queries, heads, width, rows)
        packed = by_query.transpose(1, 2).reshape(run.count, heads, queries * width, rows)
    blocks = -(-reading.visible // products.VALUE_BLOCK) * products.VALUE_BLOCK
    if fast:
        seen = min(rows, blocks)
        u = torch.from_numpy(
            products.value_products(packed.numpy()[..., :seen], run.value_array[:, :, :seen])
        )
    else:
        used = queries * width
        if used % products.QUERY_PAD:
            packed = pad(packed, (0, 0, 0, products.padded(used) - used))
        u = torch.stack(
            [products.torch_value_products(packed[i], v, reading.visible) for i, v in enumerate(run.values)]
        )[:, :, :used]
    if queries == 1:
        out.copy_(u)
    else:
        into = out.view(run.count, queries, heads, width, d)
        into.copy_(u.view(run.count, heads, queries, width, d).transpose(1, 2))


def merge_queries(
    m: Tensor, l: Tensor, u: Tensor, readings: Sequence[Reading], batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [B, Hq], u [B, Hq, d]): for each query its states of `run_states`, merged in their order. Each
    query has at least one."""
    found: list[list[int]] = [[] for _ in range(batch)]
    at = 0
    for reading in readings:
        for _ in range(reading.run.count):
            for query in reading.queries:
                found[query].append(at)
                at += 1
    if batch == 1:
        merged = merge_first(m, l, u)
        return merged[0].unsqueeze(0), merged[1].unsqueeze(0), merged[2].unsqueeze(0)
    if max(map(len, found)) < _ONE_BY_ONE:
        return _merge_ragged(m, l, u, found)
    each = [merge_first(m[states], l[states], u[states]) for states in found]
    return tuple(torch.stack(part) for part in zip(*each, strict=True))  # type: ignore[return-value]


def merge_stacked(state: AttentionState) -> AttentionState:
    """Left fold of `merge` over the first dimension, in its order.

    state: m, l [n, ..., Hq], u [n, ..., Hq, d], n >= 1. Returns m, l [..., Hq], u [..., Hq, d].
    """
    m, l, u = merge_first(state.m, state.l, state.u)
    return AttentionState(m=m, l=l, u=u, frame=state.frame, estimated=state.estimated)


def merge_first(m: Tensor, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`merge_stacked` of bare tensors."""
    if m.shape[0] == 1:
        return m[0], l[0], u[0]
    running, keep, take, both = _weights(m, l, u)
    count, width = both.shape[0], both.shape[-1]
    total = _fold(keep.view(count - 1, -1), take.view(count, -1), both.view(count, -1, width))
    total = total.view(both.shape[1:])
    d = u.shape[-1]
    return running[-1], total[..., d], total[..., :d]


def _weights(m: Tensor, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of n states, over the first dimension: the running maximum [n, ...], the factor of what was merged
    before [n-1, ...], that of each state [n, ...], and u with l and zeros [n, ..., w]."""
    running = torch.cummax(m, 0).values
    anchor = running.clamp_min(_LOWEST)
    keep = torch.exp(running[:-1] - anchor[1:])
    take = torch.exp(m - anchor)
    d = u.shape[-1]
    both = u.new_zeros(*l.shape, products.fold_width(d))
    both[..., :d] = u
    both[..., d] = l
    return running, keep, take, both


def _merge_ragged(
    m: Tensor, l: Tensor, u: Tensor, found: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `merge_queries`, one call for the i-th states of all queries that have one: queries in order of how
    many they have, so that these are the first of them."""
    order = sorted(range(len(found)), key=lambda query: -len(found[query]))
    lengths = [len(found[query]) for query in order]
    most = lengths[0]
    table = torch.tensor([[*found[query], *([0] * (most - len(found[query])))] for query in order]).t()
    running, keep, take, both = _weights(m[table], l[table], u[table])
    keep, take = keep.unsqueeze(-1), take.unsqueeze(-1)
    total = both[0].clone()
    active = len(order)
    for i in range(1, most):
        while lengths[active - 1] <= i:
            active -= 1
        part = total[:active]
        part.mul_(keep[i - 1, :active]).addcmul_(take[i, :active], both[i, :active])
    last = torch.tensor([length - 1 for length in lengths])
    peak = running[last, torch.arange(len(order))]
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    total = total[back]
    d = u.shape[-1]
    return peak[back], total[..., d], total[..., :d]


def _fold(keep: Tensor, take: Tensor, both: Tensor) -> Tensor:
    """[H, w]: t = keep[i-1] t + take[i] both[i] for i from 1, t = both[0] before; keep [n-1, H], take [n, H],
    both [n, H, w], which is written to.

    Where no maximum changes, keep is 1 and the sum one product."""
    count, width = both.shape[0], both.shape[2]
    changes = (np.flatnonzero((keep.numpy() != 1.0).any(1)) + 1).tolist()
    folds = count - len(changes) > _STRETCH and products.folds(width)
    keeps, takes, parts = keep.unsqueeze(-1).unbind(0), take.unsqueeze(-1).unbind(0), both.unbind(0)
    total, at = parts[0], 1
    for change in (*changes, count):
        if folds and change - at >= _STRETCH:
            weights = take[at - 1 : change].t().contiguous()
            weights[:, 0] = 1.0
            if at > 1:
                parts[at - 1].copy_(total)
            states = both[at - 1 : change].transpose(0, 1)
            total = torch.from_numpy(products.fold(weights.numpy(), states.numpy()).copy())
        else:
            for i in range(at, change):
                total = torch.addcmul(total, takes[i], parts[i])
        if change < count:
            total = torch.addcmul(keeps[change - 1] * total, takes[change], parts[change])
        at = change + 1
    return total
