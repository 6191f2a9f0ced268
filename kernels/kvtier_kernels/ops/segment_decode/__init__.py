"""Decode attention over re-positioned segments of a paged cache, in three implementations of one signature.

segment_decode(q [B,Hq,d], k_cache, v_cache [N,P,Hk,d], page_table i32 [B,X], seg_ptr i32 [B+1],
seg_tok i32 [NS,2], delta i32 [NS], inv_freq f32 [r/2], *, scale, interleaved, split_tokens=256)
-> AttentionState with m, l [B,Hq], u [B,Hq,d] float32, natural log.

Segments [seg_ptr[b], seg_ptr[b+1]) are request b's: tokens [first, end) in stored order, ascending and
disjoint; tokens in no segment are dropped. delta is the new position less the one K was rotated for. Since
q . R(delta) k = R(-delta) q . k, q is rotated once a segment and no key is: R turns the pair of dimension i
by delta * inv_freq[i]. The first r dimensions are rotary, the others are left alone; pairs are
(i, i + r/2), or (2i, 2i + 1) when interleaved. Angles are float64, from integer deltas; the rotated q is
rounded to q's dtype, as a model's own is. Right for any table of frequencies that does not depend on
the length (plain, linear, Llama 3, YaRN of a fixed length); wrong for dynamic NTK.

Where a segment of equal delta is cut changes no bit, and delta 0 over one segment gives the bits of
paged_decode.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.segment_decode.ref import segment_decode_ref
from kvtier_kernels.ops.segment_decode.torch_impl import join_runs, rotate, segment_decode_torch

__all__ = ["join_runs", "rotate", "segment_decode_ref", "segment_decode_torch"]
