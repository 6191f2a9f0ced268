"""SparQ: rank rows by a few channels of their keys, and the share of softmax that a selection holds.

sparq_score(q [B,Hq,d], k_t [B,Hk,d,N], dims [B,Hk,r] i32, seq_lens [B] i32, *, scale) -> Scores;
sparq_alpha(q, k_t, dims, lse, indptr, ids, *, scale) -> float32 [B,Hq].
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.sparq_score.ref import sparq_alpha_ref, sparq_score_ref
from kvtier_kernels.ops.sparq_score.torch_impl import (
    sparq_alpha_torch,
    sparq_dims,
    sparq_remainder,
    sparq_score_torch,
)

__all__ = [
    "sparq_alpha_ref",
    "sparq_alpha_torch",
    "sparq_dims",
    "sparq_remainder",
    "sparq_score_ref",
    "sparq_score_torch",
]
