"""Bucketed LRU without a total order, vectorised over rows.

It exists so that a step's units find slots in time linear in slots and units. It must not know what a
unit's bytes are, who copies them or when a copy is done: the pin is all it is told.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError

BUCKETS = 256
# Ages are int16; the epoch is rebased before it leaves them.
EPOCH_LIMIT = 2**15 - 1


class BucketLru(NamedTuple):
    """hit_slot int32 [R,W]: by position of want, -1 for padding and misses. miss: missing units in the order
    of want, once each; victim: the slot of each, -1 without one; evicted: the unit that was in it, -1 if it
    was free; all int32 [R,W], -1 behind the last. n_miss, shortfall int32 [R]: units missing, and those of
    them that got no slot. The state after the call follows."""

    hit_slot: Tensor
    victim: Tensor
    miss: Tensor
    evicted: Tensor
    n_miss: Tensor
    shortfall: Tensor
    slot_tok: Tensor
    age: Tensor
    loc: Tensor
    epoch: Tensor


def check_inputs(
    want: Tensor, slot_tok: Tensor, age: Tensor, loc: Tensor, pin: Tensor, epoch: Tensor
) -> tuple[int, int, int, int]:
    """(R, W, HOT, U). Values on a GPU are not looked at: that would wait for it. Raises ShapeError."""
    if any(x.dim() != 2 for x in (want, slot_tok, loc)):
        raise ShapeError("want [R,W], slot_tok [R,HOT] and loc [R,U] have two dimensions")
    rows, width = want.shape
    hot, units = slot_tok.shape[1], loc.shape[1]
    for name, x, shape, dtype in (
        ("want", want, (rows, width), torch.int32),
        ("slot_tok", slot_tok, (rows, hot), torch.int32),
        ("age", age, (rows, hot), torch.int16),
        ("loc", loc, (rows, units), torch.int32),
        ("pin", pin, (rows, hot), torch.bool),
        ("epoch", epoch, (rows,), torch.int32),
    ):
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ShapeError(f"want {name} {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")
        if x.numel() and x.stride(-1) != 1:
            raise ShapeError(f"the last dimension of {name} must be contiguous")
    if hot < 1 or units < 1:
        raise ShapeError(f"{hot} slots and {units} units: at least one of each")
    if rows and want.device.type == "cpu":
        if width and int(want.max()) >= units:
            raise ShapeError(f"unit {int(want.max())} of {units}")
        if int(epoch.min()) < 1 or bool((age > epoch[:, None]).any()):
            raise ShapeError("an epoch is at least 1 and at least every age of its row")
    return rows, width, hot, units


def bucket_lru_torch(
    want: Tensor, slot_tok: Tensor, age: Tensor, loc: Tensor, pin: Tensor, epoch: Tensor
) -> BucketLru:
    """See the package."""
    rows, width, *_ = check_inputs(want, slot_tok, age, loc, pin, epoch)
    lists = want.new_full((4, rows, width), -1)
    hit_slot, victim, miss, evicted = lists
    if rows == 0 or width == 0:
        _rebase(age, epoch)
        none = epoch.new_zeros(rows)
        return BucketLru(hit_slot, victim, miss, evicted, none, none.clone(), slot_tok, age, loc, epoch)
    _rebase(age, epoch)
    valid = want >= 0
    unit = want.clamp_min(0).long()
    slot = loc.gather(1, unit)
    held = valid & (slot >= 0) & (slot_tok.gather(1, slot.clamp_min(0).long()) == want)
    hit_slot.copy_(torch.where(held, slot, -1))
    row = torch.arange(rows, device=want.device)[:, None].expand(rows, width)
    now = epoch.to(age.dtype)
    age[row[held], slot[held].long()] = now[row[held]]

    first = _first(unit, valid & ~held)
    order = first.cumsum(1) - 1
    n_miss = first.sum(1).to(torch.int32)
    bucket = torch.where(slot_tok >= 0, (epoch[:, None] - age).clamp_max(BUCKETS - 2), BUCKETS - 1)
    bucket = bucket.masked_fill(pin, 0)
    chosen, taken = _victims(bucket, n_miss)

    at, slots = chosen.nonzero(as_tuple=True)
    rank = (chosen.cumsum(1) - 1)[chosen]
    old = slot_tok[chosen]
    victim[at, rank] = slots.to(torch.int32)
    evicted[at, rank] = old
    miss[row[first], order[first]] = want[first]
    gone = old >= 0
    loc[at[gone], old[gone].long()] = -1
    new = miss[at, rank]
    slot_tok[at, slots] = new
    loc[at, new.long()] = slots.to(torch.int32)
    age[at, slots] = now[at]
    return BucketLru(hit_slot, victim, miss, evicted, n_miss, n_miss - taken, slot_tok, age, loc, epoch)


def _rebase(age: Tensor, epoch: Tensor) -> None:
    """Distances up to BUCKETS - 1 stay what they are, longer ones become that: buckets end before."""
    back = torch.where(epoch > EPOCH_LIMIT, epoch - (BUCKETS - 1), 0)
    age.copy_((age - back[:, None]).clamp_min(0))
    epoch -= back


def _first(unit: Tensor, missing: Tensor) -> Tensor:
    """Of equal missing units of a row, the first."""
    keyed, order = torch.where(missing, unit, -1).sort(dim=1, stable=True)
    new = torch.ones_like(missing)
    new[:, 1:] = keyed[:, 1:] != keyed[:, :-1]
    return torch.zeros_like(missing).scatter_(1, order, new & (keyed >= 0))


def _victims(bucket: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(slots chosen bool [R,HOT], how many int32 [R]): highest buckets first, then the lowest slots."""
    rows = bucket.shape[0]
    flat = bucket + BUCKETS * torch.arange(rows, device=bucket.device)[:, None]
    counts = torch.bincount(flat.view(-1), minlength=rows * BUCKETS).view(rows, BUCKETS)
    at_least = counts.flip(1).cumsum(1).flip(1)
    take = torch.minimum(wanted, at_least[:, 1].to(torch.int32))
    enough = at_least[:, 1:] >= take[:, None]
    cut = enough.sum(1, keepdim=True)
    room = take - (at_least - counts).gather(1, cut)[:, 0]
    tied = bucket == cut
    return (bucket > cut) | (tied & (tied.cumsum(1) <= room[:, None])), take
