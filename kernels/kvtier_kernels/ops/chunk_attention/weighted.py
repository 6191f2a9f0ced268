"""State of one query over rows whose logits carry an importance weight.

It exists for estimators that sample rows: a row that was drawn with probability u stands for 1/u rows, so
ln(1/u) is added to its logit. The state is an estimate, whose l bounds nothing. It must not know how rows
were drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention.torch_impl import ShapeError
from kvtier_kernels.state import AttentionState, LogitFrame, identity

_LOWEST = torch.finfo(torch.float32).min


def weighted_state(q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, frame: LogitFrame) -> AttentionState:
    """m = max(s + w), l = sum exp(s + w - m), u likewise with v, for s = scale q.k.

    q: float32 [1, G, d] of query heads that share a KV head; k: float32 [n, d]; v: float32 [n, dv]; w:
    float32 [n], natural log. No rows: the identity. Flagged estimated. Raises ShapeError.
    """
    if q.dim() != 3 or q.shape[0] != 1 or k.dim() != 2 or v.dim() != 2 or k.shape[1] != q.shape[2]:
        raise ShapeError(
            f"want q [1,G,d], k [n,d] and v [n,dv], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not (len(k) == len(v) == len(log_weight)) or log_weight.dim() != 1:
        raise ShapeError(f"{len(k)} keys, {len(v)} values and {tuple(log_weight.shape)} weights")
    if not len(k):
        return identity((1, q.shape[1]), v.shape[1], frame)
    s = (q[0] * frame.scale) @ k.T + log_weight
    m = s.amax(-1)
    p = torch.exp(s - m.clamp_min(_LOWEST).unsqueeze(-1))
    return AttentionState(
        m=m.unsqueeze(0), l=p.sum(-1).unsqueeze(0), u=(p @ v).unsqueeze(0), frame=frame, estimated=True
    )
