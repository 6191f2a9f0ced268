"""Choosing the best units of each row on the CPU, the same ones every time.

It exists because ties decide which rows are read, and a receipt must be reproducible. It must not know
what a unit is.

A long row is first thinned: of its blocks' largest scores the (k+1)-th largest is a lower bound of the
(k+1)-th largest score, so everything that can be chosen, tied with the cut or first behind it is at
least that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError

# A loop over rows costs 25 us a row, all rows together 3 us an operation and no thinning.
LONG_ROW = 1024
FEW_ROWS = 8
_BLOCKS_PER_UNIT = 4

Array = np.ndarray[Any, Any]


class TopkUnits(NamedTuple):
    """Lists of units by row, and what stood at the cut.

    indptr: int32 [R+1]. units: int32 [R * max_k], row r's ascending in units[indptr[r]:indptr[r+1]], -1
    from indptr[R] on. kth: float32 [R], the smallest score chosen, +inf where nothing was. runner_up:
    float32 [R], the largest score not chosen, -inf where none was left; equal to kth when ties were cut.
    """

    indptr: Tensor
    units: Tensor
    kth: Tensor
    runner_up: Tensor


def check_inputs(score: Tensor, valid_len: Tensor, k: Tensor, max_k: int | None) -> int:
    """The most units a row may take. Values on a GPU are not looked at: that would wait for the device."""
    if score.dim() != 2 or score.dtype != torch.float32 or (score.numel() and score.stride(1) != 1):
        raise ShapeError(f"want score float32 [R,X], rows contiguous, got {score.dtype} {tuple(score.shape)}")
    rows, width = score.shape
    for name, x in (("valid_len", valid_len), ("k", k)):
        if x.shape != (rows,) or x.dtype != torch.int32:
            raise ShapeError(f"want {name} int32 [{rows}], got {x.dtype} {tuple(x.shape)}")
    if k.device.type != "cpu":
        if max_k is None:
            raise ShapeError("max_k is needed where k is on a device")
    elif rows and (min(k.tolist()) < 0 or not 0 <= min(n := valid_len.tolist()) <= max(n) <= width):
        raise ShapeError(f"want k >= 0 and valid_len in [0,{width}]")
    if max_k is not None and max_k < 0:
        raise ShapeError(f"want max_k >= 0, got {max_k}")
    return max([0, *k.tolist()]) if max_k is None else max_k


def topk_units_torch(score: Tensor, valid_len: Tensor, k: Tensor, *, max_k: int | None = None) -> TopkUnits:
    """See the package. Long or few rows go one by one on the CPU, others together on any device."""
    most = check_inputs(score, valid_len, k, max_k)
    rows, width = score.shape
    if score.device.type == "cpu" and (found := _alike(score, valid_len, k, most)) is not None:
        return found
    take = torch.minimum(k, valid_len).clamp_max(most)
    if rows == 0 or width == 0:
        none = score.new_empty(rows)
        return TopkUnits(
            indptr=take.new_zeros(rows + 1),
            units=take.new_full((rows * most,), -1),
            kth=none.new_full((rows,), torch.inf),
            runner_up=none.new_full((rows,), -torch.inf),
        )
    if score.device.type == "cpu" and (width > LONG_ROW or rows <= FEW_ROWS):
        return _one_by_one(score, valid_len, take, most)
    return _together(score, valid_len, take, most)


def _alike(score: Tensor, valid_len: Tensor, k: Tensor, most: int) -> TopkUnits | None:
    """Full rows of which as many are taken, without ties at a cut or NaN: a few calls for all. None for
    others; what is common is the cheapest."""
    rows, width = score.shape
    takes = {min(x, most) for x in k.tolist()}
    if rows == 0 or width > LONG_ROW or len(takes) > 1 or set(valid_len.tolist()) != {width}:
        return None
    (wanted,) = takes
    values = score.numpy()
    if not 0 < wanted < width or np.isnan(values.max()):
        return None
    ordered = np.partition(values, (width - wanted - 1, width - wanted), axis=1)
    kth = ordered[:, width - wanted]
    ids = np.flatnonzero(values >= kth[:, None])
    if ids.size != rows * wanted:
        return None
    units = np.full(rows * most, -1, np.int32)
    units[: ids.size] = ids % width
    return TopkUnits(
        indptr=torch.arange(0, ids.size + 1, wanted, dtype=torch.int32),
        units=torch.from_numpy(units),
        kth=torch.from_numpy(kth.copy()),
        runner_up=torch.from_numpy(ordered[:, width - wanted - 1].copy()),
    )


def _one_by_one(score: Tensor, valid_len: Tensor, take: Tensor, most: int) -> TopkUnits:
    rows = score.shape[0]
    units = torch.full((rows * most,), -1, dtype=torch.int32)
    indptr = torch.zeros(rows + 1, dtype=torch.int32)
    torch.cumsum(take, 0, out=indptr[1:])
    kth, runner_up = torch.full((rows,), torch.inf), torch.full((rows,), -torch.inf)
    written, every = units.numpy(), score.numpy()
    for r, (n, wanted, at) in enumerate(
        zip(valid_len.tolist(), take.tolist(), indptr.tolist(), strict=False)
    ):
        if n == 0:
            continue
        ids, last, behind = _row(every[r, :n], wanted)
        written[at : at + wanted] = ids
        if ids.size:
            kth[r] = float(last)
        runner_up[r] = float(behind)
    return TopkUnits(indptr, units, kth, runner_up)


def _row(values: Array, wanted: int) -> tuple[Array, Any, Any]:
    """(ids ascending, smallest chosen, largest not chosen) of one row that is not empty."""
    if np.isnan(values.max()):
        keys = _keys(torch.from_numpy(values)).numpy()
        ids, *cut = _row_of_ordered(keys, wanted, np.iinfo(np.int32).min)
        last, behind = _values(torch.tensor(cut, dtype=torch.int32)).tolist()
        return ids, last, behind
    return _row_of_ordered(values, wanted, np.float32(-np.inf))


def _row_of_ordered(values: Array, wanted: int, nothing: Any) -> tuple[Array, Any, Any]:
    n = values.size
    if wanted == 0:
        return np.empty(0, np.int64), nothing, values.max()
    if wanted == n:
        return np.arange(n), values.min(), nothing
    blocks = _BLOCKS_PER_UNIT * (wanted + 1)
    near = None
    if blocks * 4 <= n:
        deep = n // blocks
        tops = values[: deep * blocks].reshape(deep, blocks).max(0)
        bound = np.partition(tops, blocks - wanted - 1)[blocks - wanted - 1]
        near = np.flatnonzero(values >= bound)
        values = values[near]
    size = values.size
    ordered = np.partition(values, (size - wanted - 1, size - wanted))
    behind, last = ordered[size - wanted - 1], ordered[size - wanted]
    at = np.flatnonzero(values >= last)
    if at.size > wanted:
        tied = values[at] == last
        at = at[~tied | (np.cumsum(tied) <= wanted - (at.size - np.count_nonzero(tied)))]
    return (at if near is None else near[at]), last, behind


def _together(score: Tensor, valid_len: Tensor, take: Tensor, most: int) -> TopkUnits:
    rows, width = score.shape
    column = torch.arange(width, device=score.device)
    valid = column < valid_len[:, None]
    values = score.masked_fill(~valid, -torch.inf)
    unknown = bool(values.isnan().any()) if score.device.type == "cpu" else True
    keys = _keys(values).masked_fill_(~valid, torch.iinfo(torch.int32).min) if unknown else values
    best = torch.topk(keys, min(width, most + 1), dim=1).values
    at_cut = best.gather(1, (take - 1).clamp_min(0)[:, None].long())
    above, tied = keys > at_cut, (keys == at_cut) & valid
    room = take[:, None] - above.sum(1, keepdim=True)
    chosen = (above | (tied & (tied.cumsum(1) <= room))) & (take > 0)[:, None]
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=score.device)
    indptr[1:] = take.cumsum(0)
    units = torch.full((rows * most + 1,), -1, dtype=torch.int32, device=score.device)
    place = indptr[:-1, None] + chosen.cumsum(1) - 1
    units[place.masked_fill(~chosen, rows * most)] = column.to(torch.int32).expand(rows, width)
    behind = best.gather(1, take.clamp_max(best.shape[1] - 1)[:, None].long())
    kth, runner_up = ((_values(x) if unknown else x)[:, 0] for x in (at_cut, behind))
    return TopkUnits(
        indptr=indptr,
        units=units[:-1],
        kth=kth.masked_fill(take == 0, torch.inf),
        runner_up=runner_up.masked_fill(take == valid_len, -torch.inf),
    )


def _keys(values: Tensor) -> Tensor:
    """int32 in the order of the floats: -inf first, both zeros equal, every NaN last."""
    bits = values.contiguous().view(torch.int32)
    size = bits & 0x7FFFFFFF
    ordered = torch.where(bits < 0, ~size, size)
    ordered = torch.where(size == 0, 0, ordered)
    return torch.where(size > 0x7F800000, 0x7FFFFFFF, ordered)


def _values(keys: Tensor) -> Tensor:
    """The floats of `_keys`; -inf for what is below all."""
    negative = torch.where(keys < -0x7F800001, -0x7F800001, keys)
    bits = torch.where(keys < 0, ~negative | -(2**31), keys)
    return torch.where(keys == 0x7FFFFFFF, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
