"""The certified scan over int8 keys on the CPU, and the choice of units for several drafts of one query.

It exists because it is the one cheap scan whose bound is tight enough to certify a selection: each key lies
within half a step of its int8 image. It must not know what a unit is, nor read a full key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import check_lens, seen, want

MAX_DRAFTS = 31
_BLOCK = 1024
_FLOOR = 2.0**-100


class Bounds(NamedTuple):
    """float32 [B,K,Hq,C]: lower <= q.k <= upper, unscaled; -inf in both where there is no unit; +inf and
    -inf where the key or the product was not finite, so that such a unit is read and not dropped."""

    upper: Tensor
    lower: Tensor


class Sieve(NamedTuple):
    """Units for all drafts of a request at once, as segments (b, KV head).

    indptr: int32 [B*Hk+1]; units: int32 [B*Hk*cap], ascending inside a segment, -1 from indptr[-1] on;
    member: int32 of the same places, bit j when the unit is one of draft j's k best; dropped: int32
    [B,Hk,K], how many of a draft's k best did not fit; kth: float32 [B,Hk,K], its k-th best score, +inf
    without any; runner_up: float32 [B,Hk,K], its best score among units that were not chosen, -inf when all
    were: no such unit's q.k is above it.
    """

    indptr: Tensor
    units: Tensor
    member: Tensor
    dropped: Tensor
    kth: Tensor
    runner_up: Tensor


def int8_rows(k: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [...,d], step float32 [...]) of keys [...,d]: symmetric, step = max|k| / 127.

    |k - step image| <= step / 2 (1 + 2^-15) in each channel. The step is at least 2^-100, far above what
    a float32 loses; a key that is not finite gets an infinite step, and so an infinite bound.
    """
    wide = k.float()
    largest = wide.abs().amax(-1)
    step = (largest / 127).clamp_min(_FLOOR)
    known = torch.isfinite(largest)
    image = torch.round(wide / step.unsqueeze(-1)).clamp_(-127, 127)
    image = torch.where(known.unsqueeze(-1), image, 0.0).to(torch.int8)
    return image, torch.where(known, step, math.inf)


def radius_factor(d: int) -> float:
    """Half a step, plus what float32 may lose: (d + 8) 2^-16 bounds 127 times the error of a sum of d
    products in any order, of the image's division and of the last additions, twice over for tensor cores
    that truncate."""
    return 0.5 + (d + 8) / 2**16


def check_scan(q: Tensor, cq: Tensor, scale: Tensor, seq_lens: Tensor) -> int:
    """Query heads a KV head. Raises ShapeError."""
    want(q.dim() == 4 and q.is_floating_point(), f"want q [B,K,Hq,d] of floats, got {tuple(q.shape)}")
    want(
        cq.dim() == 4 and cq.dtype == torch.int8, f"want cq int8 [B,Hk,C,d], got {cq.dtype} {tuple(cq.shape)}"
    )
    batch, hk, units, d = cq.shape
    want(q.shape[0] == batch and q.shape[3] == d, f"q {tuple(q.shape)} and cq {tuple(cq.shape)} disagree")
    want(hk > 0 and q.shape[2] % hk == 0, f"{q.shape[2]} query heads do not divide over {hk} KV heads")
    want(
        scale.dtype == torch.float32 and scale.shape == cq.shape[:3],
        f"want scale float32 {tuple(cq.shape[:3])}, got {scale.dtype} {tuple(scale.shape)}",
    )
    check_lens(seq_lens, batch, units)
    return int(q.shape[2] // hk)


def int8_scan_torch(q: Tensor, cq: Tensor, scale: Tensor, seq_lens: Tensor) -> Bounds:
    """Sound bounds on q.k of every unit from its int8 image.

    q: [B,K,Hq,d], K drafts; cq: int8 [B,Hk,C,d] and scale: float32 [B,Hk,C] of int8_rows; seq_lens: int32
    [B], units past it are not looked at. Formula: s (q.image) +- (s (|q|_1 radius_factor(d) + 2^-100) +
    2^-100), which covers rounding in float32 and numbers flushed to 0. Not scaled by 1/sqrt(d). Raises
    ShapeError.
    """
    group = check_scan(q, cq, scale, seq_lens)
    batch, hk, units, d = cq.shape
    drafts, hq = q.shape[1], q.shape[2]
    upper = torch.full((batch, drafts, hq, units), -math.inf, device=q.device)
    lower = torch.full_like(upper, -math.inf)
    for b, n in enumerate(seq_lens.tolist()):
        # [Hk, K*G, d]: the images are read once for all drafts.
        x = q[b].float().view(drafts, hk, group, d).transpose(0, 1).reshape(hk, drafts * group, d)
        reach = x.abs().sum(-1, keepdim=True) * radius_factor(d) + _FLOOR
        middle = torch.empty(hk, drafts * group, n, device=q.device)
        for lo in range(0, n, _BLOCK):
            middle[:, :, lo : lo + _BLOCK] = torch.bmm(
                x, cq[b, :, lo : min(n, lo + _BLOCK)].float().transpose(1, 2)
            )
        step = scale[b, :, None, :n]
        middle *= step
        radius = step * reach + _FLOOR
        known = torch.isfinite(middle) & torch.isfinite(radius)
        for out, bound, worst in ((upper, middle + radius, math.inf), (lower, middle - radius, -math.inf)):
            found = torch.where(known, bound, worst).view(hk, drafts, group, n)
            out[b, :, :, :n] = found.transpose(0, 1).reshape(drafts, hq, n)
    return Bounds(upper, lower)


def check_select(upper: Tensor, seq_lens: Tensor, candidates: Tensor, hk: int, k: int, cap: int) -> int:
    """Query heads a KV head. Raises ShapeError."""
    want(
        upper.dim() == 4 and upper.dtype == torch.float32,
        f"want upper float32 [B,K,Hq,C], got {upper.dtype} {tuple(upper.shape)}",
    )
    batch, drafts, hq, units = upper.shape
    want(1 <= drafts <= MAX_DRAFTS, f"{drafts} drafts, 1 to {MAX_DRAFTS} fit a mask")
    want(hk > 0 and hq % hk == 0, f"{hq} query heads do not divide over {hk} KV heads")
    want(k >= 0 and cap >= 1, f"k = {k} units a draft, at most {cap} in all")
    want(batch * hk * cap < 2**31, f"{batch * hk} lists of {cap} units pass int32")
    check_lens(seq_lens, batch, units)
    check_lens(candidates, batch, drafts, "candidates")
    return hq // hk


def int8_select_torch(
    upper: Tensor, seq_lens: Tensor, candidates: Tensor, *, hk: int, k: int, cap: int
) -> Sieve:
    """The union of each draft's best units, at most cap of them, the same ones every time.

    upper: float32 [B,K,Hq,C]; seq_lens: int32 [B]; candidates: int32 [B], how many of the K drafts a request
    has. A draft's score of a unit is the maximum over the query heads of a KV head; ties go to the lowest
    id, NaN counts as largest. k' is the largest number up to k such that the union of each draft's k' best
    fits the cap; the rest of the cap goes to the best maximum over drafts. (The k best of the maximum alone
    would starve a draft whose scores are small.) Raises ShapeError.
    """
    group = check_select(upper, seq_lens, candidates, hk, k, cap)
    batch, drafts, _, units = upper.shape
    at = upper.device
    scores = upper.reshape(batch, drafts, hk, group, units).amax(3).transpose(1, 2)
    scores = torch.where(scores.isnan(), math.inf, scores)
    indptr, chosen_all, member_all = [0], [], []
    dropped = torch.zeros(batch, hk, drafts, dtype=torch.int32, device=at)
    kth = torch.full((batch, hk, drafts), math.inf, device=at)
    runner_up = torch.full((batch, hk, drafts), -math.inf, device=at)
    for b, (n, live) in enumerate(zip(seq_lens.tolist(), candidates.tolist(), strict=True)):
        for h in range(hk):
            score = scores[b, h, :live, :n]
            own = min(k, n)
            best = torch.full((n,), own, device=at)
            mine = torch.zeros(live, n, dtype=torch.bool, device=at)
            for j in range(live):
                ranked = _ranked(score[j], own)
                best[ranked] = torch.minimum(best[ranked], torch.arange(own, device=at))
                mine[j, ranked] = True
                if own:
                    kth[b, h, j] = score[j, ranked[-1]]
            within = torch.cumsum(torch.bincount(best, minlength=own + 1)[:own], 0) <= cap
            chosen = best < within.sum() if live else torch.zeros(n, dtype=torch.bool, device=at)
            left = min(cap, n) - int(chosen.sum())
            if live and left > 0:
                others = torch.nonzero(~chosen).flatten()
                chosen[others[_ranked(score.amax(0)[others], left)]] = True
            units_here = torch.nonzero(chosen).flatten()
            bit = torch.tensor([1 << j for j in range(live)], dtype=torch.int32, device=at)
            chosen_all.append(units_here.to(torch.int32))
            member_all.append((mine[:, units_here] * bit[:, None]).sum(0).to(torch.int32))
            indptr.append(indptr[-1] + units_here.numel())
            if live:
                dropped[b, h, :live] = (mine & ~chosen).sum(1)
                if n:
                    runner_up[b, h, :live] = score.masked_fill(chosen, -math.inf).amax(1)
    room = batch * hk * cap
    return Sieve(
        torch.tensor(indptr, dtype=torch.int32, device=at),
        _padded(chosen_all, room, -1, at),
        _padded(member_all, room, 0, at),
        dropped,
        kth,
        runner_up,
    )


def _ranked(score: Tensor, k: int) -> Tensor:
    """Ids of the k best, best first, ties to the lowest id. Only what can be chosen is sorted."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    cut = torch.topk(score, k).values[-1]
    ids = torch.nonzero(score >= cut).flatten()
    return ids[torch.sort(score[ids], descending=True, stable=True).indices[:k]]


def _padded(parts: list[Tensor], room: int, fill: int, device: torch.device) -> Tensor:
    out = torch.full((room,), fill, dtype=torch.int32, device=device)
    if parts:
        joined = torch.cat(parts)
        out[: joined.numel()] = joined
    return out


def certified_mass(lse: Tensor, upper: Tensor, chosen: Tensor, seq_lens: Tensor, *, scale: float) -> Tensor:
    """A sound lower bound on the share of softmax that the chosen rows hold; one row a unit.

    lse: float32 [B,Hq] of the exact state over the chosen rows; upper: float32 [B,Hq,C] of int8_scan, one
    draft; chosen: bool [B,Hk,C]; scale: positive factor on q.k in lse. Formula: 1 / (1 + sum over rows not
    chosen of exp(upper scale - lse)), with lse lowered by the gate that attention is held to, 2e-5 (1 +
    |lse|). Returns float64 [B,Hq]; 0 where nothing is known, 1 when every row was chosen. Raises ShapeError.
    """
    batch, hq, units = upper.shape
    want(lse.shape == (batch, hq), f"want lse {(batch, hq)}, got {tuple(lse.shape)}")
    want(
        chosen.dtype == torch.bool and chosen.dim() == 3 and chosen.shape[::2] == (batch, units),
        f"want chosen bool [{batch},Hk,{units}], got {chosen.dtype} {tuple(chosen.shape)}",
    )
    want(
        chosen.shape[1] > 0 and hq % chosen.shape[1] == 0 and scale > 0, "heads that divide, a positive scale"
    )
    check_lens(seq_lens, batch, units)
    unread = (seen(seq_lens, units).unsqueeze(1) & ~chosen).repeat_interleave(hq // chosen.shape[1], 1)
    low = lse.double() - 2e-5 * (1 + lse.double().abs())
    over = upper.double().masked_fill(~unread, -math.inf) * scale
    rest = torch.exp(torch.logsumexp(over, -1) - low)
    return torch.where(unread.any(-1), torch.nan_to_num(1 / (1 + rest), nan=0.0), 1.0)
