"""Centroid scores, and the state that stands for clusters nobody reads.

centroid_score(q [B,Hq,d], cent [B,Hk,C,d], counts [B,Hk,C] i32, *, scale, by_rows=False) -> Scores;
centroid_estimate(q, cent, counts, v_sum [B,Hk,C,dv], take bool [B,Hk,C], *, scale) -> AttentionState,
flagged estimated.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.centroid_score.ref import centroid_estimate_ref, centroid_score_ref
from kvtier_kernels.ops.centroid_score.torch_impl import centroid_estimate_torch, centroid_score_torch

__all__ = [
    "centroid_estimate_ref",
    "centroid_estimate_torch",
    "centroid_score_ref",
    "centroid_score_torch",
]
