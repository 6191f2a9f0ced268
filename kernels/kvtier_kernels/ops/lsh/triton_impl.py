# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""LSH hashing and collisions on a GPU: dots with planes; counters, a scan and a compaction for collisions.

Counters are added to with atomics, whose order does not show in a sum; places in the output come from counts,
so the list is the same every time. Hazards: request, head and row times strides overflow int32, so they are
widened first; a bucket's padding and ids past the keys are masked; after a load everything is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.lsh.torch_impl import (
    TAIL_TERMS,
    Collisions,
    check_collide,
    check_hash,
    log_choose,
)
from kvtier_kernels.ops.scoring import check_strides, want

BLOCK_ROWS = 32
TABLES_A_PROGRAM = 8
BLOCK_BUCKET = 128
BLOCK_N = 512
BLOCK_FOUND = 32


@triton.jit
def hash_kernel(
    x_ptr,
    planes_ptr,
    codes_ptr,
    rows,
    stride_x,
    stride_p,
    L: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
):
    """codes [rows, L]: block `program_id(0)` of rows, tables `program_id(1)` * BT and on."""
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BD)
    bit = tl.arange(0, 16)
    x_at = x_ptr + at.to(tl.int64)[:, None] * stride_x + cols[None, :]
    x = tl.load(x_at, mask=(at < rows)[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)
    for t in range(tl.program_id(1) * BT, tl.minimum(L, tl.program_id(1) * BT + BT)):
        p_at = planes_ptr + cols.to(tl.int64)[:, None] * stride_p + (t * K + bit)[None, :]
        planes = tl.load(p_at, mask=(cols < D)[:, None] & (bit < K)[None, :], other=0.0)
        side = tl.dot(x, planes, input_precision="ieee")
        code = tl.sum(tl.where(side > 0, 1 << bit[None, :], 0), 1)
        tl.store(codes_ptr + at.to(tl.int64) * L + t, code.to(tl.uint16), mask=at < rows)


@triton.jit
def hits_kernel(
    code_ptr,
    starts_ptr,
    ends_ptr,
    content_ptr,
    hits_ptr,
    n,
    width,
    G: tl.constexpr,
    L: tl.constexpr,
    BUCKETS: tl.constexpr,
    BN: tl.constexpr,
):
    """hits [lists, n] += 1 for each row in the bucket of list `program_id(0)` in table `program_id(1)`."""
    r = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1)
    table = (r // G) * L + t
    bucket = tl.load(code_ptr + r * L + t).to(tl.int32)
    lo = tl.load(starts_ptr + table * BUCKETS + bucket)
    hi = tl.load(ends_ptr + table * BUCKETS + bucket)
    for start in range(lo, hi, BN):
        e = start + tl.arange(0, BN)
        row = tl.load(content_ptr + table * width + e, mask=e < hi, other=-1)
        tl.atomic_add(hits_ptr + r * n + row, 1, mask=(row >= 0) & (row < n))


@triton.jit
def count_kernel(hits_ptr, counts_ptr, n, min_hits, BN: tl.constexpr):
    """counts [lists, blocks]: rows of a block with enough hits."""
    r = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BN + tl.arange(0, BN)
    hits = tl.load(hits_ptr + r * n + at, mask=at < n, other=0)
    out = counts_ptr + r * tl.num_programs(1) + tl.program_id(1)
    tl.store(out, tl.sum((hits >= min_hits).to(tl.int32), 0))


@triton.jit
def indptr_kernel(counts_ptr, total_ptr, indptr_ptr, lists, blocks, cap, BN: tl.constexpr):
    """total [lists] and indptr [lists + 1] by one program: lists are few."""
    at = tl.arange(0, BN)
    end = 0
    tl.store(indptr_ptr, end)
    for r in range(lists):
        total = 0
        for start in range(0, blocks, BN):
            there = start + at < blocks
            count = tl.load(counts_ptr + tl.cast(r, tl.int64) * blocks + start + at, mask=there, other=0)
            total += tl.sum(count, 0)
        tl.store(total_ptr + r, total)
        end += tl.minimum(total, cap)
        tl.store(indptr_ptr + r + 1, end)


@triton.jit
def compact_kernel(
    hits_ptr, counts_ptr, indptr_ptr, ids_ptr, n, min_hits, cap, BN: tl.constexpr, BB: tl.constexpr
):
    """ids of block `program_id(1)` of list `program_id(0)`, ascending, behind those of the blocks before."""
    r = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    before = 0
    for start in range(0, block, BB):
        lane = start + tl.arange(0, BB)
        before += tl.sum(tl.load(counts_ptr + r * blocks + lane, mask=lane < block, other=0), 0)
    at = block * BN + tl.arange(0, BN)
    found = (tl.load(hits_ptr + r * n + at, mask=at < n, other=0) >= min_hits).to(tl.int32)
    rank = before + tl.cumsum(found, 0) - found
    lo = tl.load(indptr_ptr + r)
    tl.store(ids_ptr + lo.to(tl.int64) + rank, at, mask=(found > 0) & (rank < cap))


@triton.jit
def _atan(t):
    """atan on [0, 1] (Abramowitz and Stegun 4.4.49, error below 2e-8), relative near 0."""
    z = t * t
    poly = -0.0161657367 + z * 0.0028662257
    poly = -0.0752896400 + z * (0.0429096138 + z * poly)
    poly = -0.1420889944 + z * (0.1065626393 + z * poly)
    poly = -0.3333314528 + z * (0.1999355085 + z * poly)
    return t + t * z * poly


@triton.jit
def _log_rest(x):
    """ln(1 - x) without losing a small x: ln(y) x / (1 - y), y being 1 - x as rounded."""
    y = 1.0 - x
    return tl.where(y == 1.0, -x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, 1.0 - y)))


@triton.jit
def log_p_kernel(
    q_ptr,
    keys_ptr,
    indptr_ptr,
    ids_ptr,
    log_p_ptr,
    log_choose,
    log_below,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kn,
    HQ: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    TERMS: tl.constexpr,
):
    """log_p of entries `program_id(1)` * BN and on of list `program_id(0)`; see torch_impl._log_p."""
    r = tl.program_id(0)
    b = (r // HQ).to(tl.int64)
    head = r % HQ
    cols = tl.arange(0, BD)
    e = tl.load(indptr_ptr + r) + tl.program_id(1) * BN + tl.arange(0, BN)
    there = e < tl.load(indptr_ptr + r + 1)
    row = tl.load(ids_ptr + e, mask=there, other=0)
    q_at = q_ptr + b * stride_qb + head.to(tl.int64) * stride_qh + cols
    q = tl.load(q_at, mask=cols < D, other=0.0).to(tl.float32)
    key = keys_ptr + b * stride_kb + (head // G).to(tl.int64) * stride_kh
    k_at = key + row.to(tl.int64)[:, None] * stride_kn + cols[None, :]
    k = tl.load(k_at, mask=there[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)
    nq = tl.sqrt(tl.sum(q * q, 0))
    nk = tl.sqrt(tl.sum(k * k, 1))
    a = q / tl.where(nq > 0, nq, 1.0)
    k = k / tl.where(nk > 0, nk, 1.0)[:, None]
    diff = a[None, :] - k
    both = a[None, :] + k
    apart = tl.sqrt(tl.sum(diff * diff, 1))
    along = tl.sqrt(tl.sum(both * both, 1))
    low, high = tl.minimum(apart, along), tl.maximum(apart, along)
    share = _atan(low / tl.where(high > 0, high, 1.0)) * 0.6366197723675814
    same = tl.where(high == 0, 1.0, tl.where(along < apart, share, 1.0 - share))

    log_r = K * tl.log(same)
    chance = tl.exp(log_r)
    certain = chance >= 1.0
    chance = tl.where(certain, 0.5, chance)
    log_miss = _log_rest(chance)
    odds = chance / (1.0 - chance)
    down = tl.full([BN], 1.0, tl.float32)
    term = down
    for i in tl.static_range(1, H):
        term = term * ((H - i) / (L - H + i + 1)) / odds
        down += term
    up = tl.full([BN], 1.0, tl.float32)
    term = up
    for j in tl.static_range(H, min(L, H + TERMS)):
        term = term * odds * ((L - j) / (j + 1))
        up += term
    below = log_below + (H - 1) * log_r + (L - H + 1) * log_miss + tl.log(down)
    rare = log_choose + H * log_r + (L - H) * log_miss + tl.log(up)
    likely = _log_rest(tl.exp(tl.minimum(below, -0.6931471805599453)))
    out = tl.where(certain, 0.0, tl.where(below < -0.6931471805599453, likely, rare))
    tl.store(log_p_ptr + e, out, mask=there)


def lsh_hash_triton(x: Tensor, planes: Tensor, *, bits: int) -> Tensor:
    """See lsh_hash_torch. Raises ShapeError."""
    tables = check_hash(x, planes, bits)
    d = x.shape[-1]
    flat = x.reshape(-1, d)
    want(planes.stride(-1) == 1, "the last dimension of planes must be contiguous")
    check_strides(x=flat)
    rows = flat.shape[0]
    codes = torch.empty(rows, tables, dtype=torch.uint16, device=x.device)
    if rows:
        hash_kernel[(-(-rows // BLOCK_ROWS), -(-tables // TABLES_A_PROGRAM))](
            flat,
            planes,
            codes,
            rows,
            flat.stride(0),
            planes.stride(0),
            L=tables,
            K=bits,
            D=d,
            BD=max(16, triton.next_power_of_2(d)),
            BM=BLOCK_ROWS,
            BT=TABLES_A_PROGRAM,
            num_warps=4,
        )
    return codes.view(*x.shape[:-1], tables)


def lsh_collide_triton(
    q: Tensor,
    q_codes: Tensor,
    keys: Tensor,
    starts: Tensor,
    ends: Tensor,
    content: Tensor,
    *,
    min_hits: int = 2,
    cap: int,
) -> Collisions:
    """See lsh_collide_torch. Nothing waits for the device: lists are as long as the cap allows. Raises
    ShapeError."""
    group, bits = check_collide(q, q_codes, keys, starts, ends, content, min_hits, cap)
    want(q.stride(-1) == 1, "q's last dimension must be contiguous")
    check_strides(keys=keys)
    batch, hq, d = q.shape
    n, tables = keys.shape[2], content.shape[2]
    lists = batch * hq
    indptr, total = _zeros(q, lists + 1), _zeros(q, lists)
    ids = torch.full((lists * cap,), -1, dtype=torch.int32, device=q.device)
    log_p = torch.zeros(lists * cap, dtype=torch.float32, device=q.device)
    if not lists or not n:
        return Collisions(indptr, ids, log_p, total)
    blocks = -(-n // BLOCK_N)
    hits, counts = _zeros(q, lists, n), _zeros(q, lists, blocks)
    hits_kernel[(lists, tables)](
        q_codes.contiguous(),
        starts.contiguous(),
        ends.contiguous(),
        content.contiguous(),
        hits,
        n,
        content.shape[3],
        G=group,
        L=tables,
        BUCKETS=starts.shape[3],
        BN=BLOCK_BUCKET,
        num_warps=1,
    )
    count_kernel[(lists, blocks)](hits, counts, n, min_hits, BN=BLOCK_N, num_warps=4)
    indptr_kernel[(1,)](counts, total, indptr, lists, blocks, cap, BN=256, num_warps=4)
    compact_kernel[(lists, blocks)](
        hits, counts, indptr, ids, n, min_hits, cap, BN=BLOCK_N, BB=256, num_warps=4
    )
    log_p_kernel[(lists, -(-min(cap, n) // BLOCK_FOUND))](
        q,
        keys,
        indptr,
        ids,
        log_p,
        log_choose(tables, min_hits),
        log_choose(tables, min_hits - 1),
        *q.stride()[:2],
        *keys.stride()[:3],
        HQ=hq,
        G=group,
        K=bits,
        L=tables,
        H=min_hits,
        D=d,
        BD=max(16, triton.next_power_of_2(d)),
        BN=BLOCK_FOUND,
        TERMS=TAIL_TERMS,
        num_warps=4,
    )
    return Collisions(indptr, ids, log_p, total)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)
