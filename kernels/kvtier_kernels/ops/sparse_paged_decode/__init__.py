"""Decode attention over chosen units of a paged cache, one signature in three implementations.

sparse_paged_decode(q [B,Hq,d], k_cache, v_cache [N,P,Hk,d], page_table [B,X] i32, indptr i32 [B*S+1],
units i32 [nnz], last_unit_len i32 [B*S], log_weight f32 [nnz] or None, *, scale, unit_tokens,
max_units=None, split_tokens=256) -> AttentionState with m, l [B,Hq], u [B,Hq,d] float32, natural log.

List b*S + s of units serves one query head (S = Hq), one KV head's group (S = Hk) or the request (S = 1).
Unit i is the tokens [i * unit_tokens, (i+1) * unit_tokens) of the request, where page_table says. The unit at
a list's last place counts only last_unit_len of its tokens, any other all. An id below 0 is padding and
attends nothing; an id that is there twice counts twice. log_weight is added to the logits of a unit's
tokens (an importance correction: MagicPIG), which makes the state an estimated one. An empty list gives the
identity. max_units bounds a list's length; without it the longest is looked up, which on a GPU waits for
the device. A list that is longer is refused on the CPU and cut on a GPU.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.sparse_paged_decode.ref import sparse_paged_decode_ref
from kvtier_kernels.ops.sparse_paged_decode.torch_impl import sparse_paged_decode_torch

__all__ = ["sparse_paged_decode_ref", "sparse_paged_decode_torch"]
