# mypy: disable-error-code="import-untyped,no-untyped-def"
"""Bucketed LRU on a GPU: one program a row, histogram and running counts instead of an order of all slots.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know what a unit's bytes are.

Hazards: threads of a program talk through global memory, and several may hold the same element, so a
barrier stands between a write and any read of it, before as after. Which of equal missing units is the first
is decided by an atomic minimum over positions, left in loc until the unit has its slot: the least position
wins in any order, so the answer is the same.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.bucket_lru.torch_impl import BUCKETS, EPOCH_LIMIT, BucketLru, check_inputs
from kvtier_kernels.ops.chunk_attention import ShapeError

MAX_WANT = 4096
MAX_SLOTS = 8192


@triton.jit  # type: ignore[untyped-decorator]
def lru_kernel(
    want_ptr,
    tok_ptr,
    age_ptr,
    loc_ptr,
    pin_ptr,
    epoch_ptr,
    hit_ptr,
    victim_ptr,
    miss_ptr,
    evicted_ptr,
    n_miss_ptr,
    shortfall_ptr,
    width,
    hot,
    units,
    stride_want,
    stride_tok,
    stride_age,
    stride_loc,
    stride_pin,
    W: tl.constexpr,
    H: tl.constexpr,
    NB: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """W and H: width and hot, rounded up to powers of two."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, W)
    s = tl.arange(0, H)
    in_want = i < width
    in_hot = s < hot
    tok = tok_ptr + row * stride_tok
    age_at = age_ptr + row * stride_age
    loc = loc_ptr + row * stride_loc
    out = row * width

    epoch = tl.load(epoch_ptr + row)
    back = tl.where(epoch > LIMIT, epoch - (NB - 1), 0)
    epoch -= back
    age = tl.load(age_at + s, mask=in_hot, other=0).to(tl.int32)
    tl.debug_barrier()
    tl.store(epoch_ptr + row, epoch)
    tl.store(age_at + s, tl.maximum(age - back, 0).to(tl.int16), mask=in_hot)

    unit = tl.load(want_ptr + row * stride_want + i, mask=in_want, other=-1)
    valid = (unit >= 0) & (unit < units)
    slot = tl.load(loc + unit, mask=valid, other=-1)
    held = valid & (slot >= 0) & (tl.load(tok + slot, mask=valid & (slot >= 0), other=-1) == unit)
    tl.store(hit_ptr + out + i, tl.where(held, slot, -1), mask=in_want)
    missing = valid & ~held
    tl.debug_barrier()
    # Whatever a unit without a slot had in loc, if only below every mark, must not win the minimum.
    tl.store(loc + unit, unit * 0 - 1, mask=missing)
    mark = i - W - 1
    tl.debug_barrier()
    tl.atomic_min(loc + unit, mark, mask=missing)
    tl.debug_barrier()
    tl.store(age_at + slot, (slot * 0 + epoch).to(tl.int16), mask=held)
    first = missing & (tl.load(loc + unit, mask=missing, other=0) == mark)
    rank = tl.cumsum(first.to(tl.int32), 0) - 1
    n_miss = tl.sum(first.to(tl.int32), 0)
    tl.debug_barrier()

    age = tl.load(age_at + s, mask=in_hot, other=0).to(tl.int32)
    old = tl.load(tok + s, mask=in_hot, other=-1)
    pinned = tl.load(pin_ptr + row * stride_pin + s, mask=in_hot, other=1) != 0
    # An age past its epoch is a broken state: it must not become a bin that is not there.
    bucket = tl.where(old >= 0, tl.maximum(tl.minimum(epoch - age, NB - 2), 0), NB - 1)
    bucket = tl.where(pinned, 0, bucket)
    counts = tl.histogram(bucket, NB, mask=in_hot)
    bins = tl.arange(0, NB)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    take = tl.minimum(n_miss, tl.sum(tl.where(bins == 1, at_least, 0), 0))
    cut = tl.max(tl.where((bins >= 1) & (at_least >= take), bins, 0), 0)
    room = take - tl.sum(tl.where(bins == cut, at_least - counts, 0), 0)
    tied = in_hot & (bucket == cut)
    chosen = (in_hot & (bucket > cut)) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(victim_ptr + out + place, s, mask=chosen)
    tl.store(evicted_ptr + out + place, old, mask=chosen)
    tl.store(loc + old, s * 0 - 1, mask=chosen & (old >= 0))
    tl.store(victim_ptr + out + i, i * 0 - 1, mask=in_want & (i >= take))
    tl.store(evicted_ptr + out + i, i * 0 - 1, mask=in_want & (i >= take))
    tl.store(miss_ptr + out + rank, unit, mask=first)
    tl.store(miss_ptr + out + i, i * 0 - 1, mask=in_want & (i >= n_miss))
    tl.store(n_miss_ptr + row, n_miss)
    tl.store(shortfall_ptr + row, n_miss - take)
    tl.debug_barrier()

    served = first & (rank < take)
    new = tl.load(victim_ptr + out + rank, mask=served, other=-1)
    tl.store(loc + unit, new, mask=first)
    tl.store(tok + new, unit, mask=served)
    tl.store(age_at + new, (new * 0 + epoch).to(tl.int16), mask=served)


def bucket_lru_triton(
    want: Tensor, slot_tok: Tensor, age: Tensor, loc: Tensor, pin: Tensor, epoch: Tensor
) -> BucketLru:
    """See the package. One launch. At most 4,096 units and 8,192 slots a row. Raises ShapeError."""
    rows, width, hot, units = check_inputs(want, slot_tok, age, loc, pin, epoch)
    if width > MAX_WANT or hot > MAX_SLOTS:
        raise ShapeError(f"{width} units and {hot} slots a row, at most {MAX_WANT} and {MAX_SLOTS}")
    hit_slot, victim, miss, evicted = (
        torch.empty_like(want, memory_format=torch.contiguous_format) for _ in range(4)
    )
    n_miss, shortfall = torch.empty_like(epoch), torch.empty_like(epoch)
    if rows:
        lru_kernel[(rows,)](
            want,
            slot_tok,
            age,
            loc,
            pin,
            epoch,
            hit_slot,
            victim,
            miss,
            evicted,
            n_miss,
            shortfall,
            width,
            hot,
            units,
            want.stride(0),
            slot_tok.stride(0),
            age.stride(0),
            loc.stride(0),
            pin.stride(0),
            W=max(16, triton.next_power_of_2(width)),
            H=max(16, triton.next_power_of_2(hot)),
            NB=BUCKETS,
            LIMIT=EPOCH_LIMIT,
            num_warps=4 if hot <= 1024 else 8,
        )
    return BucketLru(hit_slot, victim, miss, evicted, n_miss, shortfall, slot_tok, age, loc, epoch)
