"""Locality-sensitive hashing of keys on the CPU (Chen et al., "MagicPIG", 2024): hash, tables, collisions.

It exists to sample rows with a known probability instead of ranking them, so that a state over them can be
corrected by -log p. It must not know which rows are mandatory. Keys are centred by the caller with one mean
for all of them; queries are not. The probability is over the random planes: with planes that are drawn once
and kept, as every index does, the estimate is not unbiased for one query.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import check_heads, check_lens, seen, want

MAX_BITS = 16
MAX_HITS = 16
# With at most MAX_HITS wanted and no more than that many expected, terms past 32 are below 1e-9 of the first.
TAIL_TERMS = 32
_LOG_HALF = math.log(0.5)


class Collisions(NamedTuple):
    """Rows that share at least min_hits buckets with a query head, as segments (b, query head).

    indptr: int32 [B*Hq+1]; ids: int32 [B*Hq*cap], ascending inside a segment, -1 from indptr[-1] on; log_p:
    float32 [B*Hq*cap], ln of the probability that such a row is found, to be subtracted from its logit, 0
    from indptr[-1] on; total: int32 [B*Hq] before the cap. total > cap: rows past the cap are missing (the
    kept ones have the lowest ids), and the caller falls back.
    """

    indptr: Tensor
    ids: Tensor
    log_p: Tensor
    total: Tensor


def check_hash(x: Tensor, planes: Tensor, bits: int) -> int:
    """Number of tables. Raises ShapeError."""
    want(1 <= bits <= MAX_BITS, f"{bits} bits a code, at most {MAX_BITS}")
    want(
        x.dim() >= 1 and x.is_floating_point() and planes.dtype == torch.float32 and planes.dim() == 2,
        f"want x [...,d] of floats and planes float32 [d,L*bits], got {tuple(x.shape)}, "
        f"{planes.dtype} {tuple(planes.shape)}",
    )
    want(
        planes.shape[0] == x.shape[-1] and planes.shape[1] > 0 and planes.shape[1] % bits == 0,
        f"planes {tuple(planes.shape)} do not give whole codes of {bits} bits for vectors of {x.shape[-1]}",
    )
    return int(planes.shape[1] // bits)


def lsh_hash_torch(x: Tensor, planes: Tensor, *, bits: int) -> Tensor:
    """Sides of random planes, `bits` of them a table.

    x: [...,d]; planes: float32 [d, L*bits], column t*bits + b is bit b of table t. Returns uint16 [...,L]:
    bit b is set where x . plane > 0. A product within rounding of 0 may fall on either side, so an index is
    hashed and searched by one implementation. Raises ShapeError.
    """
    tables = check_hash(x, planes, bits)
    side = x.reshape(-1, x.shape[-1]).float() @ planes > 0
    # A code is below 2^16, so float32 holds it.
    place = torch.tensor([float(1 << b) for b in range(bits)], device=x.device)
    codes = side.view(-1, bits).float() @ place
    return codes.to(torch.int32).to(torch.uint16).view(*x.shape[:-1], tables)


def lsh_tables(codes: Tensor, seq_lens: Tensor, *, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, ends int32 [B,Hk,L,2^bits], content int32 [B,Hk,L,N]): rows of each bucket, ascending.

    codes: uint16 [B,Hk,N,L] of keys; rows past seq_lens int32 [B] are in no bucket. Each row is in one
    bucket a table. Raises ShapeError.
    """
    want(codes.dtype == torch.uint16 and codes.dim() == 4, f"want codes uint16 [B,Hk,N,L], got {codes.dtype}")
    batch, hk, n, tables = codes.shape
    check_lens(seq_lens, batch, n)
    gone = ~seen(seq_lens, n)[:, None, None]
    by_table = codes.to(torch.int64).transpose(2, 3).masked_fill(gone, 1 << bits)
    sorted_codes, order = torch.sort(by_table, dim=-1, stable=True)
    edges = torch.arange((1 << bits) + 1, device=codes.device).expand(batch, hk, tables, -1).contiguous()
    at = torch.searchsorted(sorted_codes.contiguous(), edges).to(torch.int32)
    content = order.to(torch.int32).masked_fill_(sorted_codes == 1 << bits, -1)
    return at[..., :-1].contiguous(), at[..., 1:].contiguous(), content


def check_collide(
    q: Tensor,
    q_codes: Tensor,
    keys: Tensor,
    starts: Tensor,
    ends: Tensor,
    content: Tensor,
    min_hits: int,
    cap: int,
) -> tuple[int, int]:
    """(query heads a KV head, bits of a code). Raises ShapeError."""
    want(
        keys.dim() == 4 and keys.is_floating_point(),
        f"want keys [B,Hk,N,d] of floats, got {tuple(keys.shape)}",
    )
    group = check_heads(q, keys.shape[1])
    batch, hk, _, d = keys.shape
    want(q.shape[0] == batch and q.shape[2] == d, f"q {tuple(q.shape)} and keys {tuple(keys.shape)} disagree")
    want(
        content.dtype == torch.int32 and content.dim() == 4 and content.shape[:2] == (batch, hk),
        f"want content int32 [{batch},{hk},L,N], got {content.dtype} {tuple(content.shape)}",
    )
    tables = content.shape[2]
    want(
        q_codes.dtype == torch.uint16 and q_codes.shape == (batch, q.shape[1], tables),
        f"want q_codes uint16 [{batch},{q.shape[1]},{tables}], got {q_codes.dtype} {tuple(q_codes.shape)}",
    )
    buckets = starts.shape[-1] if starts.dim() else 0
    want(
        starts.dtype == ends.dtype == torch.int32
        and starts.shape == ends.shape == (batch, hk, tables, buckets)
        and buckets >= 2
        and buckets & (buckets - 1) == 0
        and buckets <= 1 << MAX_BITS,
        f"want starts, ends int32 [{batch},{hk},{tables},2^bits], got {starts.dtype} {tuple(starts.shape)}",
    )
    want(
        1 <= min_hits <= min(tables, MAX_HITS),
        f"COLLISION_RULE: {min_hits} hits of {tables} tables, at most {MAX_HITS}",
    )
    want(cap >= 1, f"a list of at most {cap} rows")
    want(batch * q.shape[1] * cap < 2**31, f"{batch * q.shape[1]} lists of {cap} rows pass int32")
    return group, (buckets - 1).bit_length()


def _log_p(same: Tensor, bits: int, tables: int, min_hits: int) -> Tensor:
    """ln P(X >= min_hits), X binomial(tables, same^bits), float32, accurate at both ends.

    1 minus the terms below min_hits where those are less than half; else, since that cancels, the sum of the
    terms from min_hits on. Either sum is taken relative to its term next to min_hits, whose logarithm is
    known, so that nothing underflows.
    """
    log_r = bits * torch.log(same)
    r = torch.exp(log_r)
    certain = r >= 1
    r = torch.where(certain, 0.5, r)
    log_miss = torch.log1p(-r)
    odds = r / (1 - r)

    def log_term(j: int) -> Tensor:
        return log_choose(tables, j) + j * log_r + (tables - j) * log_miss

    down = term = torch.ones_like(r)
    for j in range(min_hits - 1, 0, -1):
        term = term * (j / (tables - j + 1)) / odds
        down = down + term
    up = term = torch.ones_like(r)
    for j in range(min_hits, min(tables, min_hits + TAIL_TERMS)):
        term = term * odds * ((tables - j) / (j + 1))
        up = up + term
    below = log_term(min_hits - 1) + torch.log(down)
    likely = torch.log1p(-torch.exp(below.clamp_max(_LOG_HALF)))
    found = torch.where(below < _LOG_HALF, likely, log_term(min_hits) + torch.log(up))
    return torch.where(certain, 0.0, found)


def log_choose(n: int, k: int) -> float:
    """ln of the binomial coefficient."""
    return math.log(math.comb(n, k))


def lsh_collide_torch(
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
    """Rows that fall into a query's bucket in at least min_hits tables, and how probable that was.

    q: [B,Hq,d]; q_codes: uint16 [B,Hq,L]; keys: [B,Hk,N,d] as they were hashed (centred); starts, ends,
    content: of lsh_tables (content -1 is padding; a row at most once a table). Formula: w = 1 - angle(q, k)
    / pi; r = w^bits; p = P(binomial(L, r) >= min_hits), for 2 hits 1 - (1-r)^L - L r (1-r)^(L-1). A row of
    log_p -inf is a row that cannot have been found: refuse it (ZERO_PROBABILITY). Raises ShapeError,
    COLLISION_RULE.
    """
    group, bits = check_collide(q, q_codes, keys, starts, ends, content, min_hits, cap)
    batch, hq, d = q.shape
    hk, n, tables = keys.shape[1], keys.shape[2], content.shape[2]
    lists = batch * hq
    heads = torch.arange(lists, device=q.device) // group  # b * Hk + KV head
    bucket = q_codes.to(torch.int64).view(lists, tables, 1)
    lo = starts.view(batch * hk, tables, -1)[heads].gather(2, bucket).flatten().long()
    size = ends.view(batch * hk, tables, -1)[heads].gather(2, bucket).flatten().long() - lo
    width = content.shape[3]
    origin = (heads[:, None] * tables + torch.arange(tables, device=q.device)) * width
    ahead = torch.cumsum(size, 0) - size
    at = torch.repeat_interleave(origin.flatten() + lo - ahead, size)
    at += torch.arange(at.numel(), device=q.device)
    rows = content.flatten()[at].long()
    owner = torch.repeat_interleave(torch.arange(lists, device=q.device), size.view(lists, tables).sum(1))
    named = (rows >= 0) & (rows < n)
    hits = torch.bincount((owner * n + rows)[named], minlength=lists * n).view(lists, n)

    found = hits >= min_hits
    total = found.sum(1)
    kept = total.clamp_max(cap)
    segment, row = torch.nonzero(found & (found.cumsum(1) <= cap), as_tuple=True)
    indptr = torch.zeros(lists + 1, dtype=torch.int32, device=q.device)
    indptr[1:] = kept.cumsum(0)
    ids = torch.full((lists * cap,), -1, dtype=torch.int32, device=q.device)
    log_p = torch.zeros(lists * cap, device=q.device)
    ids[: row.numel()] = row.to(torch.int32)
    a = _unit(q.float().view(lists, d))[segment]
    k = _unit(keys.flatten(0, 1)[heads[segment], row].float())
    apart, along = (a - k).norm(dim=1), (a + k).norm(dim=1)
    same = torch.where(apart + along == 0, 1.0, torch.atan2(along, apart) * (2 / math.pi))
    log_p[: row.numel()] = _log_p(same, bits, tables, min_hits)
    return Collisions(indptr, ids, log_p, total.to(torch.int32))


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays one."""
    length = x.norm(dim=1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)
