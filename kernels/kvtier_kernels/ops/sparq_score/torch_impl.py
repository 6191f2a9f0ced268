"""SparQ on the CPU (Ribar et al., "SparQ Attention", 2024, algorithm 1), grouped for GQA.

It exists to rank rows by a few channels of their keys, read from a copy that lies channel by channel. It
must not know which rows are mandatory nor how many may be read. A score is a ranking: when the deciding
logit lives in the channels that were dropped, it ranks wrongly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores, check_heads, check_lens, want
from kvtier_kernels.state import AttentionState, FrameMismatch

_TINY = torch.finfo(torch.float32).tiny


def sparq_dims(q: Tensor, hk: int, r: int) -> Tensor:
    """The r channels that carry most of a group's queries: largest sum of |q| over the query heads of a KV
    head, ties to the lowest channel, ascending. q: [B,Hq,d]; returns int32 [B,Hk,r]. Raises ShapeError."""
    group = check_heads(q, hk)
    batch, _, d = q.shape
    want(1 <= r <= d, f"r = {r} channels of {d}")
    size = q.float().abs().view(batch, hk, group, d).sum(2)
    order = torch.sort(size, dim=-1, descending=True, stable=True).indices[..., :r]
    return torch.sort(order, dim=-1).values.to(torch.int32)


def check_sparq(q: Tensor, k_t: Tensor, dims: Tensor) -> int:
    """Query heads a KV head. Raises ShapeError."""
    want(k_t.dim() == 4 and k_t.is_floating_point(), f"want k_t [B,Hk,d,N] of floats, got {tuple(k_t.shape)}")
    group = check_heads(q, k_t.shape[1])
    batch, hk, d, _ = k_t.shape
    want(
        q.shape[0] == batch and q.shape[2] == d,
        f"q {tuple(q.shape)} and k_t {tuple(k_t.shape)} disagree on requests or head dim",
    )
    want(
        dims.dtype == torch.int32 and dims.dim() == 3 and dims.shape[:2] == (batch, hk) and dims.shape[2] > 0,
        f"want dims int32 [{batch},{hk},r], got {dims.dtype} {tuple(dims.shape)}",
    )
    if dims.device.type == "cpu" and dims.numel():
        want(int(dims.max()) < d, f"dims must lie below the head dim {d}; a negative one is padding")
    return group


def _queries(q: Tensor, dims: Tensor, hk: int, scale: float) -> Tensor:
    """float32 [B,Hk,G,r]: the chosen channels times scale / sqrt(coverage); zero for padding."""
    batch, hq, d = q.shape
    wide = q.float().view(batch, hk, hq // hk, d)
    at = dims.long().clamp_min(0).unsqueeze(2).expand(-1, -1, hq // hk, -1)
    chosen = wide.gather(3, at) * (dims >= 0).unsqueeze(2)
    covered, total = chosen.abs().sum(-1), wide.abs().sum(-1)
    # Nothing covered: every chosen channel of the query is 0, and so is every logit.
    factor = torch.where(covered > 0, torch.sqrt(total / torch.where(covered > 0, covered, 1.0)), 0.0)
    return chosen * (factor * scale).unsqueeze(-1)


def sparq_score_torch(q: Tensor, k_t: Tensor, dims: Tensor, seq_lens: Tensor, *, scale: float) -> Scores:
    """Approximate logits of every row, summed over the query heads of a KV head.

    q: [B,Hq,d]; k_t: keys channel by channel [B,Hk,d,N]; dims: int32 [B,Hk,r], distinct, negative is
    padding; seq_lens: int32 [B], rows past it are not looked at. Formula per query head:
    s_i = q[I].k_i[I] scale / sqrt(|q[I]|_1 / |q|_1), 0 for a query that is 0 on I; score_i = sum of s_i
    over the group (the authors' code sums logits, not probabilities). Raises ShapeError.
    """
    group = check_sparq(q, k_t, dims)
    batch, hk, _, capacity = k_t.shape
    check_lens(seq_lens, batch, capacity)
    hq = hk * group
    score = torch.full((batch, hk, capacity), -math.inf, device=q.device)
    lse = torch.full((batch, hq), -math.inf, device=q.device)
    few = _queries(q, dims, hk, scale)
    for b, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        logits = torch.empty(hk, group, n, device=q.device)
        for h in range(hk):
            # A padded channel is left out rather than weighed 0: 0 * NaN is NaN.
            used = dims[b, h] >= 0
            rows = k_t[b, h, :, :n].index_select(0, dims[b, h][used])
            torch.mm(few[b, h][:, used], rows.float(), out=logits[h])
        score[b, :, :n] = logits.sum(1)
        lse[b] = torch.logsumexp(logits, -1).flatten()
    return Scores(score, lse)


def check_selection(indptr: Tensor, ids: Tensor, segments: int) -> None:
    """indptr: int32 [segments + 1]; ids: int32. Raises ShapeError."""
    want(
        indptr.dtype == ids.dtype == torch.int32 and indptr.shape == (segments + 1,) and ids.dim() == 1,
        f"want indptr int32 [{segments + 1}] and ids int32 [nnz], got {indptr.dtype} {tuple(indptr.shape)}, "
        f"{ids.dtype} {tuple(ids.shape)}",
    )


def sparq_alpha_torch(
    q: Tensor, k_t: Tensor, dims: Tensor, lse: Tensor, indptr: Tensor, ids: Tensor, *, scale: float
) -> Tensor:
    """Share of the approximate softmax that the selected rows hold: alpha = sum exp(s_i - lse), at most 1.

    lse: float32 [B,Hq] of sparq_score; indptr: int32 [B*Hk+1]; ids: int32, ascending inside a segment; an
    id that repeats counts once, a negative one is padding. Returns float32 [B,Hq]. Raises ShapeError.
    """
    group = check_sparq(q, k_t, dims)
    batch, hk, _, _ = k_t.shape
    check_selection(indptr, ids, batch * hk)
    want(lse.shape == q.shape[:2], f"want lse {tuple(q.shape[:2])}, got {tuple(lse.shape)}")
    few = _queries(q, dims, hk, scale)
    alpha = torch.zeros(batch, hk, group, device=q.device)
    bounds = indptr.tolist()
    for r in range(batch * hk):
        b, h = divmod(r, hk)
        rows = torch.unique_consecutive(ids[bounds[r] : bounds[r + 1]]).long()
        rows = rows[rows >= 0]
        if not rows.numel():
            continue
        used = dims[b, h] >= 0
        keys = k_t[b, h][dims[b, h][used].long()[:, None], rows[None, :]].float()
        heads = lse[b, h * group : (h + 1) * group, None]
        alpha[b, h] = torch.exp(few[b, h][:, used] @ keys - heads).sum(-1)
    return alpha.view(batch, hk * group).clamp_max_(1.0)


def sparq_remainder(state: AttentionState, alpha: Tensor, lse: Tensor, v_mean: Tensor) -> AttentionState:
    """The rows that were not read, as a state of their mean value: merged with the exact state it gives
    alpha o + (1 - alpha) v_mean.

    state: exact over the selected rows [B,Hq]; alpha, lse: float32 [B,Hq]; v_mean: float32 [B,Hk,d], mean
    of V over all rows. Formula: (m + ln l + ln(1 - alpha) - ln alpha, 1, v_mean), which does not overflow
    for a small alpha as l (1 - alpha) / alpha would. Nothing selected: the whole approximate mass stands on
    the mean. Flagged estimated. Raises ShapeError, and ValueError SPARQ_MASS for an alpha outside [0, 1].
    """
    hq, hk = state.m.shape[-1], v_mean.shape[1]
    want(alpha.shape == lse.shape == state.m.shape, "alpha, lse and the state disagree on [B,Hq]")
    want(hk > 0 and hq % hk == 0, f"{hq} query heads do not divide over {hk} KV heads")
    if state.frame.key_shift_id:
        raise FrameMismatch("a mean of V stands for raw keys")
    if not bool(((alpha >= 0) & (alpha <= 1)).all()):
        raise ValueError("SPARQ_MASS: alpha must lie in [0, 1]")
    chosen = state.l > 0
    exact = state.m + torch.log(torch.where(chosen, state.l, 1.0))
    point = torch.where(chosen, exact + torch.log1p(-alpha) - torch.log(alpha.clamp_min(_TINY)), lse)
    some = point > -math.inf
    return AttentionState(
        m=point,
        l=some.float(),
        u=v_mean.float().repeat_interleave(hq // hk, 1) * some.unsqueeze(-1),
        frame=state.frame,
        estimated=True,
    )
