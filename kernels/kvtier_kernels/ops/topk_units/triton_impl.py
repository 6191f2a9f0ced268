# mypy: disable-error-code="import-untyped,no-untyped-def"
"""The best units of each row on a GPU: a packed sort up to 8k scores, a histogram select beyond.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know what a unit is.

Scores become int32 keys of the same order (both zeros equal, every NaN largest). Sort: key and id in
one int64, no two equal. Histogram: four passes, one a digit of 8 bits from the top; each program sums all
blocks' counts for the cut of the digit before and counts its own block's next digit. The last pass knows
from the counts how many units lie before its block, so ids ascend without atomics.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.topk_units.torch_impl import TopkUnits, check_inputs

SORT_WIDTH = 8192
TILE = 4096
TILE_WARPS = 8
# Blocks whose counts are summed in one go: [CHUNK, 256] int32 in registers.
CHUNK = 16
DIGITS = 4


@triton.jit
def _key(x):
    """int32 in the order of the floats; integer arithmetic only, so nothing flushes small numbers."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, ~size, size)
    key = tl.where(size == 0, 0, key)
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, key)


@triton.jit
def _value(key):
    """The float of a key; -inf for a key below all floats."""
    negative = tl.where(key < -0x7F800001, -0x7F800001, key)
    bits = tl.where(key < 0, (~negative) + (-0x7FFFFFFF - 1), key)
    bits = tl.where(key == 0x7FFFFFFF, 0x7FC00000, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _take(valid_ptr, k_ptr, rows, most):
    """How many units rows take (a tile); 0 beyond the last row."""
    n = tl.load(valid_ptr + rows, mask=rows >= 0, other=0)
    return tl.maximum(tl.minimum(tl.minimum(tl.load(k_ptr + rows, mask=rows >= 0, other=0), n), most), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _packed(score, ids, n, X: tl.constexpr):
    """Key and id in one int64: larger is better, and of equal scores the lowest id is the largest."""
    key = tl.where(ids < n, _key(score), -0x7FFFFFFF - 1)
    return (tl.cast(key, tl.int64) << 32) | (X - 1 - ids)


@triton.jit  # type: ignore[untyped-decorator]
def _before(valid_ptr, k_ptr, row, most, ROWS: tl.constexpr):
    """Units of all rows before this one: where its list starts."""
    total = tl.zeros([ROWS], tl.int32)
    for start in range(0, row, ROWS):
        rows = start + tl.arange(0, ROWS)
        total += _take(valid_ptr, k_ptr, tl.where(rows < row, rows, -1), most)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def sort_kernel(
    score_ptr,
    valid_ptr,
    k_ptr,
    indptr_ptr,
    units_ptr,
    kth_ptr,
    runner_ptr,
    most,
    stride_r,
    X: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a row of at most X scores, of which fewer than K are taken."""
    row = tl.program_id(0)
    ids = tl.arange(0, X)
    n = tl.load(valid_ptr + row)
    take = tl.maximum(tl.minimum(tl.minimum(tl.load(k_ptr + row), n), most), 0)
    at = score_ptr + row.to(tl.int64) * stride_r + ids
    packed = _packed(tl.load(at, mask=ids < n, other=0.0), ids, n, X)
    ordered = tl.topk(packed, K) if K < X else tl.sort(packed, descending=True)
    rank = tl.arange(0, K)
    last = tl.sum(tl.where(rank == take - 1, ordered, 0), 0)
    behind = tl.sum(tl.where(rank == take, ordered, 0), 0)
    chosen = packed >= tl.where(take > 0, last, 0x7FFFFFFFFFFFFFFF)
    start = _before(valid_ptr, k_ptr, row, most, ROWS)
    place = start + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(units_ptr + place, ids, mask=chosen)
    tl.store(indptr_ptr + row + 1, start + take)
    tl.store(indptr_ptr, 0, mask=row == 0)
    tl.store(kth_ptr + row, tl.where(take > 0, _value((last >> 32).to(tl.int32)), float("inf")))
    tl.store(runner_ptr + row, tl.where(take < n, _value((behind >> 32).to(tl.int32)), float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def _cut(hist_ptr, blocks, need, CHUNK_: tl.constexpr):
    """(digit of the cut, what is still to be taken among equals of it) from all blocks' counts."""
    bins = tl.arange(0, 256)
    part = tl.arange(0, CHUNK_)
    counts = tl.zeros([256], tl.int32)
    for start in range(0, blocks, CHUNK_):
        at = start + part
        tile = tl.load(hist_ptr + at[:, None] * 256 + bins[None, :], mask=(at < blocks)[:, None], other=0)
        counts += tl.sum(tile, 0)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(at_least >= need, bins, 0), 0)
    return digit, need - tl.sum(tl.where(bins > digit, counts, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def histogram_kernel(
    score_ptr,
    valid_ptr,
    k_ptr,
    hist_ptr,
    above_ptr,
    prefix_ptr,
    need_ptr,
    most,
    stride_r,
    LEVEL: tl.constexpr,
    T: tl.constexpr,
    CHUNK_: tl.constexpr,
):
    """Counts of digit LEVEL in block `program_id(1)`, among scores that share the cut's digits so far.

    hist [R,4,N,256]; above [R,4,N], a block's scores above the cut by their digit LEVEL - 1;
    prefix, need [R,4].
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    n = tl.load(valid_ptr + row)
    bins = tl.arange(0, 256)
    hist = hist_ptr + row.to(tl.int64) * (4 * blocks * 256)
    prefix = 0
    if LEVEL > 0:
        if LEVEL == 1:
            need = tl.maximum(tl.minimum(tl.minimum(tl.load(k_ptr + row), n), most), 0)
        else:
            need = tl.load(need_ptr + row * 4 + LEVEL - 2)
            prefix = tl.load(prefix_ptr + row * 4 + LEVEL - 2)
        level = hist + (LEVEL - 1) * blocks * 256
        digit, need = _cut(level, blocks, need, CHUNK_)
        prefix = prefix * 256 + digit - (128 if LEVEL == 1 else 0)
        own = tl.load(level + block * 256 + bins)
        tl.store(
            above_ptr + (row * 4 + LEVEL - 1) * blocks + block, tl.sum(tl.where(bins > digit, own, 0), 0)
        )
        tl.store(prefix_ptr + row * 4 + LEVEL - 1, prefix, mask=block == 0)
        tl.store(need_ptr + row * 4 + LEVEL - 1, need, mask=block == 0)
    ids = block * T + tl.arange(0, T)
    score = tl.load(score_ptr + row.to(tl.int64) * stride_r + ids, mask=ids < n, other=0.0)
    key = _key(score)
    if LEVEL == 0:
        counts = tl.histogram((key >> 24) + 128, 256, mask=ids < n)
    else:
        counts = tl.histogram(
            (key >> (24 - 8 * LEVEL)) & 255, 256, mask=(ids < n) & ((key >> (32 - 8 * LEVEL)) == prefix)
        )
    tl.store(hist + (LEVEL * blocks + block) * 256 + bins, counts)


@triton.jit  # type: ignore[untyped-decorator]
def write_kernel(
    score_ptr,
    valid_ptr,
    k_ptr,
    hist_ptr,
    above_ptr,
    prefix_ptr,
    need_ptr,
    indptr_ptr,
    units_ptr,
    kth_ptr,
    left_ptr,
    most,
    stride_r,
    T: tl.constexpr,
    CHUNK_: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Block `program_id(1)` of a row's list, and the largest key that it leaves: left [R,N]."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    n = tl.load(valid_ptr + row)
    take = tl.maximum(tl.minimum(tl.minimum(tl.load(k_ptr + row), n), most), 0)
    level = hist_ptr + (row.to(tl.int64) * 4 + 3) * blocks * 256
    digit, need = _cut(level, blocks, tl.load(need_ptr + row * 4 + 2), CHUNK_)
    cut = tl.load(prefix_ptr + row * 4 + 2) * 256 + digit

    bins = tl.arange(0, 256)
    part = tl.arange(0, CHUNK_)
    above = tl.zeros([CHUNK_], tl.int32)
    tied = tl.zeros([CHUNK_], tl.int32)
    for start in range(0, block, CHUNK_):
        at = start + part
        seen = at < block
        tile = tl.load(level + at[:, None] * 256 + bins[None, :], mask=seen[:, None], other=0)
        above += tl.sum(tl.where((bins > digit)[None, :], tile, 0), 1)
        tied += tl.sum(tl.where((bins == digit)[None, :], tile, 0), 1)
        for digits in tl.static_range(3):
            above += tl.load(above_ptr + (row * 4 + digits) * blocks + at, mask=seen, other=0)
    tied_before = tl.sum(tied, 0)
    before = tl.sum(above, 0) + tl.minimum(tied_before, need)

    ids = block * T + tl.arange(0, T)
    score = tl.load(score_ptr + row.to(tl.int64) * stride_r + ids, mask=ids < n, other=0.0)
    key = _key(score)
    valid = ids < n
    equal = valid & (key == cut)
    chosen = (valid & (key > cut)) | (equal & (tied_before + tl.cumsum(equal.to(tl.int32), 0) <= need))
    start = _before(valid_ptr, k_ptr, row, most, ROWS)
    place = start + before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(units_ptr + place, ids, mask=chosen)
    tl.store(left_ptr + row * blocks + block, tl.max(tl.where(valid & ~chosen, key, -0x7FFFFFFF - 1), 0))
    first = block == 0
    tl.store(indptr_ptr + row + 1, start + take, mask=first)
    tl.store(indptr_ptr, 0, mask=first & (row == 0))
    tl.store(kth_ptr + row, tl.where(take > 0, _value(cut), float("inf")), mask=first)


@triton.jit  # type: ignore[untyped-decorator]
def runner_kernel(left_ptr, runner_ptr, blocks, T: tl.constexpr):
    """runner_up of a row from what its blocks left."""
    row = tl.program_id(0)
    best = tl.full([T], -0x7FFFFFFF - 1, tl.int32)
    for start in range(0, blocks, T):
        at = start + tl.arange(0, T)
        best = tl.maximum(
            best, tl.load(left_ptr + row * blocks + at, mask=at < blocks, other=-0x7FFFFFFF - 1)
        )
    tl.store(runner_ptr + row, _value(tl.max(best, 0)))


def topk_units_triton(score: Tensor, valid_len: Tensor, k: Tensor, *, max_k: int | None = None) -> TopkUnits:
    """See the package. One launch up to 8,192 scores a row, six beyond. Raises ShapeError."""
    most = check_inputs(score, valid_len, k, max_k)
    rows, width = score.shape
    if rows * -(-width // TILE) * DIGITS * 256 >= 2**31 or rows * most >= 2**31:
        raise ShapeError(f"{rows} rows of {width} scores need counts past int32")
    device = score.device
    units = torch.full((rows * most,), -1, dtype=torch.int32, device=device)
    indptr = torch.empty(rows + 1, dtype=torch.int32, device=device)
    kth = torch.empty(rows, dtype=torch.float32, device=device)
    runner_up = torch.empty(rows, dtype=torch.float32, device=device)
    answer = TopkUnits(indptr, units, kth, runner_up)
    if rows == 0:
        indptr.zero_()
    elif width <= SORT_WIDTH:
        wide = max(16, triton.next_power_of_2(width))
        sort_kernel[(rows,)](
            score,
            valid_len,
            k,
            indptr,
            units,
            kth,
            runner_up,
            most,
            score.stride(0),
            X=wide,
            K=min(wide, max(16, triton.next_power_of_2(most + 1))),
            ROWS=64,
            num_warps=8 if width > 1024 else 4,
        )
    else:
        _by_histogram(score, valid_len, k, most, answer)
    return answer


def _by_histogram(score: Tensor, valid_len: Tensor, k: Tensor, most: int, answer: TopkUnits) -> None:
    rows, width = score.shape
    blocks = -(-width // TILE)
    hist, above, prefix, need, left = (
        torch.empty(shape, dtype=torch.int32, device=score.device)
        for shape in (
            (rows, DIGITS, blocks, 256),
            (rows, DIGITS, blocks),
            (rows, 4),
            (rows, 4),
            (rows, blocks),
        )
    )
    grid = (rows, blocks)
    given = (score, valid_len, k, hist, above, prefix, need)
    for level in range(DIGITS):
        histogram_kernel[grid](
            *given, most, score.stride(0), LEVEL=level, T=TILE, CHUNK_=CHUNK, num_warps=TILE_WARPS
        )
    write_kernel[grid](
        *given,
        answer.indptr,
        answer.units,
        answer.kth,
        left,
        most,
        score.stride(0),
        T=TILE,
        CHUNK_=CHUNK,
        ROWS=64,
        num_warps=TILE_WARPS,
    )
    runner_kernel[(rows,)](left, answer.runner_up, blocks, T=256, num_warps=1)
