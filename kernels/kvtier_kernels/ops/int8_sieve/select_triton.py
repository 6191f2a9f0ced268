# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""The union of drafts' choices on a GPU: thresholds by digits, ranks among the few, places from counts.

Five kernels, none with atomics, so the list is the same every time. They are made for up to some ten
thousand units (clusters, pages): a segment's last two steps are one program each. Scores become int32
keys of the same order (both zeros equal, NaN largest), widened to int64 and shifted to be positive, so that
digits can be cut off them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.int8_sieve.torch_impl import Sieve, check_select
from kvtier_kernels.ops.scoring import want

MAX_K = 256
BLOCK = 512
LOWEST = tl.constexpr(-0x7FFFFFFF - 1)


@triton.jit
def _key(x):
    """int32 in the order of float32; NaN as +inf. Integers only, so that no small number can be flushed."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where((bits < 0) & (nan == 0), -size, size)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return tl.where(key < 0, (-key) ^ (-0x7FFFFFFF - 1), key).to(tl.float32, bitcast=True)


@triton.jit
def keys_kernel(
    upper_ptr, lens_ptr, live_ptr, key_ptr, top_ptr, units,
    HK: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """key [B, HK, K, units] of a draft's maximum over its group; top [B, HK, units] over live drafts."""
    segment = tl.program_id(0).to(tl.int64)
    b = segment // HK
    kv_head = segment % HK
    at = tl.program_id(1) * BN + tl.arange(0, BN)
    there = at < tl.load(lens_ptr + b)
    live = tl.load(live_ptr + b)
    top = tl.full([BN], -0x7FFFFFFF - 1, tl.int32)
    for j in range(K):
        own = tl.full([BN], -0x7FFFFFFF - 1, tl.int32)
        for g in range(G):
            row = ((b * K + j) * HK + kv_head) * G + g
            x = tl.load(upper_ptr + row * units + at, mask=there, other=0.0)
            own = tl.maximum(own, _key(x))
        tl.store(key_ptr + (segment * K + j) * units + at, own, mask=there)
        top = tl.where(j < live, tl.maximum(top, own), top)
    tl.store(top_ptr + segment * units + at, top, mask=there)


@triton.jit
def _cut(key_ptr, best_ptr, level, n, need, WITH_BEST: tl.constexpr, BN: tl.constexpr):
    """(key of the need-th largest, how many of that key to take) of key[:n]; need >= 1 and there are as many.

    WITH_BEST: only units with best >= level count. Digits of 8 bits from the top, each from a histogram.
    """
    lane = tl.arange(0, BN)
    digits = tl.arange(0, 256)
    prefix = tl.cast(0, tl.int64)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        hist = tl.zeros([256], tl.int32)
        for start in range(0, n, BN):
            at = start + lane
            u = tl.load(key_ptr + at, mask=at < n, other=0).to(tl.int64) + 0x80000000
            count = (at < n) & ((u >> (shift + 8)) == prefix)
            if WITH_BEST:
                count &= tl.load(best_ptr + at, mask=at < n, other=0) >= level
            hist += tl.histogram(((u >> shift) & 255).to(tl.int32), 256, mask=count)
        above = tl.sum(hist, 0) - tl.cumsum(hist, 0)
        here = (above < need) & (above + hist >= need)
        prefix = prefix * 256 + tl.sum(tl.where(here, digits, 0), 0)
        need -= tl.sum(tl.where(here, above, 0), 0)
    return (prefix - 0x80000000).to(tl.int32), need


@triton.jit
def list_kernel(
    key_ptr, lens_ptr, live_ptr, ids_ptr, keys_ptr, kth_ptr, units, k,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The k best of draft `program_id(0)`, ascending by id: ids, keys [B * HK * K, KP], -1 behind; kth."""
    row = tl.program_id(0).to(tl.int64)
    b = row // (HK * K)
    n = tl.load(lens_ptr + b)
    own = tl.minimum(k, n)
    own = tl.where(row % K < tl.load(live_ptr + b), own, 0)
    slot = tl.arange(0, KP)
    tl.store(ids_ptr + row * KP + slot, tl.full([KP], -1, tl.int32), mask=slot >= own)
    kth = tl.cast(0x7F800000, tl.int32)
    if own > 0:
        mine = key_ptr + row * units
        kth, ties = _cut(mine, mine, 0, n, own, False, BN)
        done = 0
        tied = 0
        for start in range(0, n, BN):
            at = start + tl.arange(0, BN)
            key = tl.load(mine + at, mask=at < n, other=0)
            equal = ((at < n) & (key == kth)).to(tl.int32)
            nth = tied + tl.cumsum(equal, 0)
            take = ((at < n) & (key > kth)) | ((equal > 0) & (nth <= ties))
            place = done + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(ids_ptr + row * KP + place, at, mask=take)
            tl.store(keys_ptr + row * KP + place, key, mask=take)
            tied += tl.sum(equal, 0)
            done += tl.sum(take.to(tl.int32), 0)
    tl.store(kth_ptr + row, _value(kth))


@triton.jit
def rank_kernel(ids_ptr, keys_ptr, rank_ptr, units, KP: tl.constexpr):
    """rank [B * HK * K, units] of the listed units, best 0; the rest is left as it is (k)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, KP)
    ids = tl.load(ids_ptr + row * KP + slot)
    keys = tl.load(keys_ptr + row * KP + slot)
    rank = tl.zeros([KP], tl.int32)
    for start in range(0, KP, 16):
        other = row * KP + start + tl.arange(0, 16)
        i = tl.load(ids_ptr + other)[None, :]
        x = tl.load(keys_ptr + other)[None, :]
        better = (x > keys[:, None]) | ((x == keys[:, None]) & (i < ids[:, None]))
        rank += tl.sum((better & (i >= 0)).to(tl.int32), 1)
    tl.store(rank_ptr + row * units + ids, rank, mask=ids >= 0)


@triton.jit
def level_kernel(
    rank_ptr, lens_ptr, best_ptr, level_ptr, left_ptr, units, k, cap,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """best [B, HK, units], the best rank over drafts; level: k' of each segment; left: how many more fit."""
    segment = tl.program_id(0).to(tl.int64)
    n = tl.load(lens_ptr + segment // HK)
    hist = tl.zeros([KP], tl.int32)
    for start in range(0, n, BN):
        at = start + tl.arange(0, BN)
        best = tl.full([BN], 0x7FFFFFFF, tl.int32)
        for j in range(K):
            rank = tl.load(rank_ptr + (segment * K + j) * units + at, mask=at < n, other=0x7FFFFFFF)
            best = tl.minimum(best, rank)
        tl.store(best_ptr + segment * units + at, best, mask=at < n)
        hist += tl.histogram(tl.where(best < k, best, 0), KP, mask=(at < n) & (best < k))
    united = tl.cumsum(hist, 0)
    slot = tl.arange(0, KP)
    within = (slot < k) & (united <= cap)
    tl.store(level_ptr + segment, tl.sum(within.to(tl.int32), 0))
    tl.store(left_ptr + segment, tl.minimum(cap, n) - tl.max(tl.where(within, united, 0), 0))


@triton.jit
def choose_kernel(
    key_ptr, top_ptr, rank_ptr, best_ptr, level_ptr, left_ptr, lens_ptr, live_ptr, indptr_ptr, units_ptr,
    member_ptr, dropped_ptr, runner_ptr, units, k,
    HK: tl.constexpr, K: tl.constexpr, KL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Units of a segment: best rank below its level, then the best tops; masks, losses and runners-up."""
    segment = tl.program_id(0).to(tl.int64)
    b = segment // HK
    live = tl.load(live_ptr + b)
    n = tl.where(live > 0, tl.load(lens_ptr + b), 0)
    level = tl.load(level_ptr + segment)
    left = tl.load(left_ptr + segment)
    top = top_ptr + segment * units
    best_at = best_ptr + segment * units
    cut = tl.cast(0x7FFFFFFF, tl.int32)
    ties = tl.cast(0, tl.int32)
    if (left > 0) & (n > 0):
        cut, ties = _cut(top, best_at, level, n, left, True, BN)
    lane = tl.arange(0, KL)
    lost = tl.zeros([KL], tl.int32)
    runner = tl.full([KL], -0x7FFFFFFF - 1, tl.int32)
    done = tl.load(indptr_ptr + segment)
    tied = 0
    for start in range(0, n, BN):
        at = start + tl.arange(0, BN)
        there = at < n
        best = tl.load(best_at + at, mask=at < n, other=0x7FFFFFFF)
        key = tl.load(top + at, mask=at < n, other=0)
        open_ = there & (best >= level)
        equal = (open_ & (key == cut)).to(tl.int32)
        nth = tied + tl.cumsum(equal, 0)
        take = (there & (best < level)) | (open_ & (key > cut)) | ((equal > 0) & (nth <= ties))
        left_out = there & (take == 0)
        member = tl.zeros([BN], tl.int32)
        for j in range(K):
            row = segment * K + j
            rank = tl.load(rank_ptr + row * units + at, mask=at < n, other=0x7FFFFFFF)
            mine = tl.load(key_ptr + row * units + at, mask=at < n, other=0)
            own = rank < k
            member |= tl.where(own, 1 << j, 0)
            gone = tl.sum((own & left_out).to(tl.int32), 0)
            over = tl.max(tl.where(left_out, mine, -0x7FFFFFFF - 1), 0)
            lost += tl.where(lane == j, gone, 0)
            runner = tl.where((lane == j) & (j < live), tl.maximum(runner, over), runner)
        place = done + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(units_ptr + place, at, mask=take)
        tl.store(member_ptr + place, member, mask=take)
        tied += tl.sum(equal, 0)
        done += tl.sum(take.to(tl.int32), 0)
    none = runner == (-0x7FFFFFFF - 1)
    tl.store(dropped_ptr + segment * K + lane, lost, mask=lane < K)
    tl.store(runner_ptr + segment * K + lane, tl.where(none, float("-inf"), _value(runner)), mask=lane < K)


def int8_select_triton(
    upper: Tensor, seq_lens: Tensor, candidates: Tensor, *, hk: int, k: int, cap: int
) -> Sieve:
    """See int8_select_torch. k at most 256. Nothing waits for the device. Raises ShapeError."""
    group = check_select(upper, seq_lens, candidates, hk, k, cap)
    want(k <= MAX_K, f"k = {k} units a draft, at most {MAX_K}")
    batch, drafts, _, units = upper.shape
    upper = upper.contiguous()
    segments = batch * hk
    size = torch.where(candidates > 0, seq_lens.clamp_max(cap), 0).repeat_interleave(hk)
    indptr = torch.zeros(segments + 1, dtype=torch.int32, device=upper.device)
    indptr[1:] = size.cumsum(0)

    def ints(fill: int, *shape: int) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=upper.device)

    chosen, member = ints(-1, segments * cap), ints(0, segments * cap)
    dropped = ints(0, batch, hk, drafts)
    kth = torch.empty(batch, hk, drafts, dtype=torch.float32, device=upper.device)
    runner_up = torch.empty_like(kth)
    if not segments:
        return Sieve(indptr, chosen, member, dropped, kth, runner_up)
    rows, width = segments * drafts, max(16, triton.next_power_of_2(k + 1))
    key, rank = ints(0, rows, max(units, 1)), ints(k, rows, max(units, 1))
    top, best = ints(0, segments, max(units, 1)), ints(k, segments, max(units, 1))
    ids, keys, level, left = ints(-1, rows, width), ints(0, rows, width), ints(0, segments), ints(0, segments)
    sizes = {"HK": hk, "K": drafts}
    wide = {"BN": BLOCK, "num_warps": 4}
    keys_kernel[(segments, max(1, -(-units // BLOCK)))](
        upper, seq_lens, candidates, key, top, units, G=group, **sizes, **wide
    )
    list_kernel[(rows,)](key, seq_lens, candidates, ids, keys, kth, units, k, KP=width, **sizes, **wide)
    rank_kernel[(rows,)](ids, keys, rank, units, KP=width, num_warps=4)
    level_kernel[(segments,)](rank, seq_lens, best, level, left, units, k, cap, KP=width, **sizes, **wide)
    choose_kernel[(segments,)](
        key,
        top,
        rank,
        best,
        level,
        left,
        seq_lens,
        candidates,
        indptr,
        chosen,
        member,
        dropped,
        runner_up,
        units,
        k,
        KL=triton.next_power_of_2(drafts),
        **sizes,
        **wide,
    )
    return Sieve(indptr, chosen, member, dropped, kth, runner_up)
