"""Decode attention over a paged cache, one signature in three implementations (ref, torch, triton).

paged_decode(q [B,Hq,d], k_cache, v_cache [N,P,Hk,d], page_table [B,X] i32, seq_lens [B] i32, *, scale,
split_tokens=256) -> AttentionState with m, l [B,Hq], u [B,Hq,d] float32, natural log.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.paged_decode.ref import paged_decode_ref
from kvtier_kernels.ops.paged_decode.torch_impl import paged_decode_torch

__all__ = ["paged_decode_ref", "paged_decode_torch"]
