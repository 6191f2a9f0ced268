"""Product-quantised scores: a table of products per query, then sums of it over one-byte codes.

pq_lut(q [B,Hq,d], cent [B,Hk,m,C,d/m]) -> float32 [B,Hk,m,G,C];
pq_score(lut, codes uint8 [B,Hk,m,N], seq_lens [B] i32, *, scale) -> Scores.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.pq.ref import pq_lut_ref, pq_score_ref
from kvtier_kernels.ops.pq.torch_impl import pq_lut_torch, pq_score_torch

__all__ = ["pq_lut_ref", "pq_lut_torch", "pq_score_ref", "pq_score_torch"]
