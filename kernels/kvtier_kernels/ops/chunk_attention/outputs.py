"""Queries over all of their chunks, down to their outputs: what decode frames are.

Why it exists: the same as `run_states`, `merge_queries` and the division, with the bits of these, but a frame
over a thousand rows is as much calls as arithmetic, and numpy's cost a third of torch's. What rounds
(products, exp, sums) is done by whom it is done there. It must not know where chunks live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import products
from kvtier_kernels.ops.chunk_attention.decode import Reading, run_states
from kvtier_kernels.ops.chunk_attention.products import Floats
from kvtier_kernels.ops.chunk_attention.torch_impl import ROW_PAD

_LOWEST = np.float32(torch.finfo(torch.float32).min)
_STRETCH = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """States in the order of `run_states`: maxima m [T, Hq]; sums [T, Hq, w] hold u, then l, then zeros.
    queries: of each state."""

    m: Floats
    sums: Floats
    queries: tuple[int, ...]


def attend(scaled: Tensor, readings: Sequence[Reading]) -> Tensor:
    """Outputs [B, Hq, d] of queries [B, Hq, d] times their scale, each over its readings in ascending order;
    rows as in `run_states`. Every query has a reading; 0 where all of its logits are -inf."""
    return outputs([parts(scaled, readings)], scaled.shape[0], scaled.shape[2])


def parts(scaled: Tensor, readings: Sequence[Reading]) -> Parts:
    """The states of `attend`, not merged yet."""
    heads, rows, d = readings[0].run.keys[0].shape
    group = scaled.shape[1] // heads
    fast = group > 1 and all(products.agrees(len(each.queries) * group, rows, d) for each in readings)
    queries = tuple(q for each in readings for _ in range(each.run.count) for q in each.queries)
    if fast:
        with np.errstate(all="ignore"):
            return Parts(*_states(scaled, readings, len(queries)), queries)
    m, l, u = run_states(scaled, readings)
    sums = np.zeros((*l.shape, products.fold_width(d)), np.float32)
    sums[..., :d], sums[..., d] = u.numpy(), l.numpy()
    return Parts(m.numpy(), sums, queries)


def outputs(found: Sequence[Parts], batch: int, d: int) -> Tensor:
    """Outputs [B, Hq, d]: for each query its states of all parts, merged in their order."""
    m, sums = found[0].m, found[0].sums
    queries = found[0].queries
    if len(found) > 1:
        m = np.concatenate([part.m for part in found])
        sums = np.concatenate([part.sums for part in found])
        queries = tuple(query for part in found for query in part.queries)
    with np.errstate(all="ignore"):
        if batch == 1:
            merged = _merge(m, sums)[None]
        else:
            of: list[list[int]] = [[] for _ in range(batch)]
            for state, query in enumerate(queries):
                of[query].append(state)
            merged = np.stack([_merge(m[states], sums[states]) for states in of])
        l = merged[..., d : d + 1]
        if not l.all():
            l = np.where(l == 0, np.float32(1), l)
        return torch.from_numpy(merged[..., :d] / l)


def _states(scaled: Tensor, readings: Sequence[Reading], total: int) -> tuple[Floats, Floats]:
    heads, rows, d = readings[0].run.keys[0].shape
    batch, hq, _ = scaled.shape
    group = hq // heads
    room = max(products.key_width(rows, group), products.padded(group))
    wide = np.zeros((batch, heads, room, d), np.float32)
    wide[:, :, :group] = scaled.numpy().reshape(batch, heads, group, d)
    s = torch.empty(total, heads, group, rows)
    logits: Floats = s.numpy()
    at = 0
    for each in readings:
        end = at + each.run.count * len(each.queries)
        if each.visible < rows:
            _part(wide[each.queries[0]], each, logits[at], group)
        elif len(each.queries) == 1:
            own = wide[each.queries[0]]
            if room <= products.at_once(rows, d):
                found = np.matmul(each.run.key_array, own.transpose(0, 2, 1))
            else:
                found = products.key_products(own[:, :group], each.run.key_array)
            logits[at:end] = found[..., :group].transpose(0, 1, 3, 2)
        else:
            _shared_logits(wide[list(each.queries), :, :group], each, logits[at:end])
        at = end
    m: Floats = logits.max(-1)
    np.subtract(logits, np.maximum(m, _LOWEST)[..., None], out=logits)
    s.exp_()
    width = products.fold_width(d)
    sums = np.zeros((total, heads, group, width), np.float32)
    sums[..., d] = s.sum(-1).numpy()
    at = 0
    for each in readings:
        end = at + each.run.count * len(each.queries)
        seen = min(rows, -(-each.visible // products.VALUE_BLOCK) * products.VALUE_BLOCK)
        values = each.run.value_array[:, :, :seen]
        if len(each.queries) == 1:
            sums[at:end, ..., :d] = products.value_products(logits[at:end, ..., :seen], values)
        else:
            _shared_sums(logits[at:end], each, values, sums[at:end])
        at = end
    return m.reshape(total, hq), sums.reshape(total, hq, width)


def _part(wide: Floats, reading: Reading, out: Floats, group: int) -> None:
    """Logits [Hk, G, R] of a chunk of which only some rows are seen."""
    visible = reading.visible
    seen = -(-visible // ROW_PAD) * ROW_PAD
    q = torch.from_numpy(wide[:, : products.padded(group)])
    out[..., :seen] = products.torch_key_products(q, reading.run.keys[0][:, :seen]).numpy()[:, :group]
    out[..., visible:] = -np.inf


def _shared_logits(q: Floats, reading: Reading, out: Floats) -> None:
    """Logits [n * Nq, Hk, G, R] of queries [Nq, Hk, G, d] over the same full chunks."""
    queries, heads, group, d = q.shape
    packed = q.transpose(1, 0, 2, 3).reshape(heads, queries * group, d)
    found = products.key_products(packed, reading.run.key_array)
    rows = found.shape[2]
    by_query = found.reshape(-1, heads, rows, queries, group)
    out.reshape(-1, queries, heads, group, rows)[...] = by_query.transpose(0, 3, 1, 4, 2)


def _shared_sums(weights: Floats, reading: Reading, values: Floats, out: Floats) -> None:
    """Sums over the same chunks [n, Hk, R, d] by weights [n * Nq, Hk, G, R], into out [n * Nq, Hk, G, w]."""
    count, queries = reading.run.count, len(reading.queries)
    _, heads, group, rows = weights.shape
    d = values.shape[3]
    packed = weights.reshape(count, queries, heads, group, rows).transpose(0, 2, 1, 3, 4)
    u = products.value_products(packed.reshape(count, heads, queries * group, rows), values)
    by_query = u.reshape(count, heads, queries, group, d).transpose(0, 2, 1, 3, 4)
    out.reshape(count, queries, heads, group, -1)[..., :d] = by_query


def _merge(m: Floats, sums: Floats) -> Floats:
    """[H, w]: `merge_first` of maxima [n, H] and sums [n, H, w], which are written to."""
    count, heads = m.shape
    if count > 1:
        running = np.maximum.accumulate(m, 0)
        anchor = np.maximum(running, _LOWEST)
        factors = np.empty((2 * count - 1, heads), np.float32)
        np.subtract(running[:-1], anchor[1:], out=factors[: count - 1])
        np.subtract(m, anchor, out=factors[count - 1 :])
        torch.from_numpy(factors).exp_()
        _fold(factors, sums)
    last: Floats = sums[-1]
    return last


def _fold(factors: Floats, sums: Floats) -> None:
    """Leaves the sum of all in the last of sums [n, H, w]. factors [2n - 1, H]: of what was merged before,
    for states from 1, then of each state. Where no maximum changes, the former is 1 and the sum one
    product."""
    count = len(sums)
    take = factors[count - 1 :]
    changes = [*((factors[: count - 1] != 1).any(1).nonzero()[0] + 1).tolist(), count]
    products_fold = products.folds(sums.shape[2])
    columns, states = torch.from_numpy(factors).unsqueeze(-1), torch.from_numpy(sums)
    at = 1
    for change in changes:
        if products_fold and change - at >= _STRETCH:
            weights = take[at - 1 : change].T.copy()
            weights[:, 0] = 1.0
            sums[change - 1] = products.fold(weights, sums[at - 1 : change].transpose(1, 0, 2))
        else:
            for i in range(at, change):
                torch.addcmul(states[i - 1], columns[count - 1 + i], states[i], out=states[i])
        if change < count:
            kept = columns[change - 1] * states[change - 1]
            torch.addcmul(kept, columns[count - 1 + change], states[change], out=states[change])
        at = change + 1
