"""One query over all of its chunks, down to its output: what a decode frame of one sequence is.

Why it exists: the same as `run_states`, `merge_first` and the division, with the bits of these, but a frame
over a thousand rows is as much calls as arithmetic, and numpy's cost a third of torch's. What rounds
(products, exp, sums) is done by whom it is done there. It must not know where chunks live.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import products
from kvtier_kernels.ops.chunk_attention.decode import Reading, merge_first, run_states
from kvtier_kernels.ops.chunk_attention.products import Floats
from kvtier_kernels.ops.chunk_attention.torch_impl import ROW_PAD

_LOWEST = np.float32(torch.finfo(torch.float32).min)
_STRETCH = 4


def attend_one(scaled: Tensor, readings: Sequence[Reading]) -> Tensor:
    """The output [1, Hq, d] of one query, float32 [1, Hq, d] times its scale, over readings in ascending
    order; rows as in `run_states`. 0 where it has no rows."""
    heads, rows, d = readings[0].run.keys[0].shape
    group = scaled.shape[1] // heads
    if group < 2 or not products.agrees(group, rows, d) or not products.folds(products.fold_width(d)):
        _, l, u = merge_first(*run_states(scaled, readings))
        return (u / torch.where(l == 0, 1.0, l).unsqueeze(-1)).unsqueeze(0)
    with np.errstate(all="ignore"):
        return torch.from_numpy(_attend(scaled, readings, heads, group))


def _attend(scaled: Tensor, readings: Sequence[Reading], heads: int, group: int) -> Floats:
    rows, d = readings[0].run.rows, scaled.shape[2]
    total = sum(reading.run.count for reading in readings)
    wide = np.zeros((heads, max(products.key_width(rows, group), products.padded(group)), d), np.float32)
    wide[:, :group] = scaled.numpy().reshape(heads, group, d)
    s = torch.empty(total, heads, group, rows)
    logits: Floats = s.numpy()
    at = 0
    for reading in readings:
        end = at + reading.run.count
        if reading.visible == rows:
            found = np.matmul(reading.run.key_array, wide.transpose(0, 2, 1))
            logits[at:end] = found[..., :group].transpose(0, 1, 3, 2)
        else:
            _part(wide, reading, logits[at], group)
        at = end
    m = logits.max(-1)
    np.subtract(logits, np.maximum(m, _LOWEST)[..., None], out=logits)
    s.exp_()
    width = products.fold_width(d)
    both = np.zeros((total, heads, group, width), np.float32)
    both[..., d] = s.sum(-1).numpy()
    at = 0
    for reading in readings:
        end = at + reading.run.count
        seen = min(rows, -(-reading.visible // products.VALUE_BLOCK) * products.VALUE_BLOCK)
        both[at:end, ..., :d] = products.value_products(
            logits[at:end, ..., :seen], reading.run.value_array[:, :, :seen]
        )
        at = end
    queries = heads * group
    merged = _merge(m.reshape(total, queries), both.reshape(total, queries, width))
    l = merged[:, d : d + 1]
    if not l.all():
        l = np.where(l == 0, np.float32(1), l)
    out: Floats = (merged[:, :d] / l)[None]
    return out


def _part(wide: Floats, reading: Reading, out: Floats, group: int) -> None:
    """Logits of a chunk of which only some rows are seen."""
    visible = reading.visible
    seen = -(-visible // ROW_PAD) * ROW_PAD
    q = torch.from_numpy(wide[:, : products.padded(group)])
    out[..., :seen] = products.torch_key_products(q, reading.run.keys[0][:, :seen]).numpy()[:, :group]
    out[..., visible:] = -np.inf


def _merge(m: Floats, both: Floats) -> Floats:
    """[H, w]: `merge_first` of maxima [n, H] and sums [n, H, w], which are written to."""
    count, heads = m.shape
    if count == 1:
        first: Floats = both[0]
        return first
    running = np.maximum.accumulate(m, 0)
    anchor = np.maximum(running, _LOWEST)
    factors = np.empty((2 * count - 1, heads), np.float32)
    np.subtract(running[:-1], anchor[1:], out=factors[: count - 1])
    np.subtract(m, anchor, out=factors[count - 1 :])
    torch.from_numpy(factors).exp_()
    keep, take = factors[: count - 1], factors[count - 1 :]
    changes = [*((keep != 1).any(1).nonzero()[0] + 1).tolist(), count]
    columns = torch.from_numpy(factors).unsqueeze(-1)
    sums = torch.from_numpy(both)
    at = 1
    for change in changes:
        if change - at >= _STRETCH:
            weights = take[at - 1 : change].T.copy()
            weights[:, 0] = 1.0
            both[change - 1] = products.fold(weights, both[at - 1 : change].transpose(1, 0, 2))
        else:
            for i in range(at, change):
                torch.addcmul(sums[i - 1], columns[count - 1 + i], sums[i], out=sums[i])
        if change < count:
            kept = columns[change - 1] * sums[change - 1]
            torch.addcmul(kept, columns[count - 1 + change], sums[change], out=sums[change])
        at = change + 1
    last: Floats = both[-1]
    return last
