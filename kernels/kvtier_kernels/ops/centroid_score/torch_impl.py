"""Centroid scores on the CPU, and the state that stands for clusters nobody reads (RetroInfer, 2025).

It exists to rank clusters by their centre, and to answer for the tail by count and sum of V instead of
dropping it. It must not know how clusters are made nor how many are read. Both are approximations: a centre
says nothing of a cluster's largest key, and by Jensen's inequality n exp(q.c) is at most the sum that it
stands for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores, check_heads, want
from kvtier_kernels.state import AttentionState, LogitFrame


def check_clusters(q: Tensor, cent: Tensor, counts: Tensor) -> int:
    """Query heads a KV head. Raises ShapeError."""
    want(
        cent.dim() == 4 and cent.is_floating_point(),
        f"want cent [B,Hk,C,d] of floats, got {tuple(cent.shape)}",
    )
    group = check_heads(q, cent.shape[1])
    want(
        q.shape[0] == cent.shape[0] and q.shape[2] == cent.shape[3],
        f"q {tuple(q.shape)} and cent {tuple(cent.shape)} disagree on requests or head dim",
    )
    want(
        counts.dtype == torch.int32 and counts.shape == cent.shape[:3],
        f"want counts int32 {tuple(cent.shape[:3])}, got {counts.dtype} {tuple(counts.shape)}",
    )
    if counts.device.type == "cpu" and counts.numel():
        want(int(counts.min()) >= 0, "CENTROID_MASS: a cluster of fewer than no rows")
    return group


def check_estimate(q: Tensor, cent: Tensor, counts: Tensor, v_sum: Tensor, take: Tensor) -> int:
    """Query heads a KV head. Raises ShapeError."""
    group = check_clusters(q, cent, counts)
    want(
        v_sum.dim() == 4 and v_sum.is_floating_point() and v_sum.shape[:3] == counts.shape,
        f"want v_sum [B,Hk,C,dv] with {tuple(counts.shape)}, got {tuple(v_sum.shape)}",
    )
    want(
        take.dtype == torch.bool and take.shape == counts.shape,
        f"want take bool {tuple(counts.shape)}, got {take.dtype} {tuple(take.shape)}",
    )
    return group


def _logits(q: Tensor, cent: Tensor, there: Tensor, scale: float) -> Tensor:
    """float32 [B,Hk,G,C]; -inf where there is no cluster, whatever its memory holds."""
    batch, hk, _, d = cent.shape
    groups = q.float().view(batch, hk, q.shape[1] // hk, d)
    s = torch.matmul(groups, cent.float().transpose(-1, -2)).mul_(scale)
    return s.masked_fill_(~there.unsqueeze(2), -math.inf)


def centroid_score_torch(
    q: Tensor, cent: Tensor, counts: Tensor, *, scale: float, by_rows: bool = False
) -> Scores:
    """Softmax over clusters per query head, summed over the query heads of a KV head.

    q: [B,Hq,d]; cent: [B,Hk,C,d]; counts: int32 [B,Hk,C], rows a cluster; a cluster of 0 rows is not there:
    its score is -inf and it is in no denominator. by_rows: the denominator counts each row of a cluster
    (SqueezedAttention), so that lse estimates the one over all rows. Formula: s_c = q.cent_c scale;
    score_c = sum_g exp(s_c - lse_g); lse = ln sum_c w_c exp(s_c), w_c = count_c or 1. Raises ShapeError.
    """
    check_clusters(q, cent, counts)
    there = counts > 0
    s = _logits(q, cent, there, scale)
    weighted = s + torch.log(counts.float()).unsqueeze(2) if by_rows else s
    lse = torch.logsumexp(weighted, -1, keepdim=True)
    score = torch.exp(s - lse.clamp_min(torch.finfo(torch.float32).min)).sum(2)
    return Scores(score.masked_fill_(~there, -math.inf), lse.flatten(1))


def centroid_estimate_torch(
    q: Tensor, cent: Tensor, counts: Tensor, v_sum: Tensor, take: Tensor, *, scale: float
) -> AttentionState:
    """The state of the taken clusters as if each row lay at its cluster's centre; flagged estimated.

    v_sum: [B,Hk,C,dv], sum of V over a cluster; take: bool [B,Hk,C]. Formula, over taken clusters with
    rows: m = max s_c; l = sum count_c exp(s_c - m); u = sum exp(s_c - m) v_sum_c. None taken: identity.
    Raises ShapeError.
    """
    check_estimate(q, cent, counts, v_sum, take)
    there = take & (counts > 0)
    s = _logits(q, cent, there, scale)
    m = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    w = torch.exp(s - m.clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1))
    l = torch.matmul(w, counts.float().unsqueeze(-1)).squeeze(-1)
    u = torch.matmul(w, torch.where(there.unsqueeze(-1), v_sum.float(), 0.0))
    return AttentionState(
        m=m.flatten(1),
        l=l.flatten(1),
        u=u.flatten(1, 2),
        frame=LogitFrame(scale),
        estimated=True,
    )
