"""Bucketed LRU on the CPU: a row at a time, vectorised within it, without an order of all slots.

It exists so that a step's units find slots in time linear in slots and units. It must not know what a
unit's bytes are, who copies them or when a copy is done: the pin is all it is told.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError

BUCKETS = 256
# Ages are int16; the epoch is rebased before it leaves them.
EPOCH_LIMIT = 2**15 - 1

Array = np.ndarray[Any, Any]


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
    """See the package. Tensors on the CPU."""
    rows, width, *_ = check_inputs(want, slot_tok, age, loc, pin, epoch)
    if want.device.type != "cpu":
        raise ShapeError(f"tensors on the CPU, got {want.device}")
    lists = want.new_full((4, rows, width), -1)
    n_miss, shortfall = want.new_zeros(rows), want.new_zeros(rows)
    back = torch.where(epoch > EPOCH_LIMIT, epoch - (BUCKETS - 1), 0)
    if bool(back.any()):
        # Distances up to BUCKETS - 1 stay what they are, longer ones become that: buckets end before.
        age.copy_((age - back[:, None]).clamp_min(0))
        epoch -= back
    written, asked, tok, ages, at, pinned = (x.numpy() for x in (lists, want, slot_tok, age, loc, pin))
    for r, now in enumerate(epoch.tolist()):
        missing, served = _row(asked[r], tok[r], ages[r], at[r], pinned[r], now, written[:, r])
        n_miss[r], shortfall[r] = missing, missing - served
    hit_slot, victim, miss, evicted = lists
    return BucketLru(hit_slot, victim, miss, evicted, n_miss, shortfall, slot_tok, age, loc, epoch)


def _row(
    want: Array, tok: Array, age: Array, loc: Array, pin: Array, now: int, lists: Array
) -> tuple[int, int]:
    """(units missing, units that got a slot) of one row; writes its state and its four lists."""
    hit_slot, victim, miss, evicted = lists
    valid = want >= 0
    slot = loc[np.where(valid, want, 0)]
    held = valid & (slot >= 0)
    held &= tok[np.where(held, slot, 0)] == want
    hit_slot[held] = slot[held]
    age[slot[held]] = now
    units = _first(want[valid & ~held], loc)
    miss[: units.size] = units

    bucket = np.minimum(now - age.astype(np.int32), BUCKETS - 2)
    bucket[tok < 0] = BUCKETS - 1
    bucket[pin] = 0
    counts = np.bincount(bucket, minlength=BUCKETS)
    at_least = counts[::-1].cumsum()[::-1]
    take = min(units.size, int(at_least[1]))
    cut = int(np.count_nonzero(at_least[1:] >= take))
    chosen = bucket > cut
    room = take - int(at_least[cut] - counts[cut])
    chosen[np.flatnonzero(bucket == cut)[:room]] = True

    slots = np.flatnonzero(chosen)
    old = tok[slots]
    victim[:take], evicted[:take] = slots, old
    loc[old[old >= 0]] = -1
    loc[units] = -1
    tok[slots] = units[:take]
    loc[units[:take]] = slots
    age[slots] = now
    return int(units.size), take


def _first(missing: Array, loc: Array) -> Array:
    """Each missing unit once, in the order of its first place. Leaves marks below 0 in loc."""
    marks = np.arange(missing.size - 1, -1, -1, dtype=loc.dtype)
    # Written backwards: of equal ids the last write stays, which is that of the first place.
    loc[missing[::-1]] = -2 - marks
    first: Array = missing[loc[missing] == (-2 - marks)[::-1]]
    return first
