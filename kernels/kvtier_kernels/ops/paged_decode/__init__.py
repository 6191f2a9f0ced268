"""Decode attention over a paged cache, one signature in three implementations (ref, torch, triton).

paged_decode(q [B,Hq,d], k_cache, v_cache [N,P,Hk,d], page_table [B,X] i32, seq_lens [B] i32, *, scale,
split_tokens=256, window=None, softcap=None, out=None) -> AttentionState with m, l [B,Hq], u [B,Hq,d] float32,
natural log.

The query of a request stands at its last row. window: it sees that one and those before it, so many in all:
none of 0, every one of as many as there are. Rows before them are not read, and where all rows of a page are
before them (or behind the last), its id may name no page, -1 for one. Splits are cut at multiples of
split_tokens of all rows, whatever the window is.
softcap: a scaled logit s becomes softcap tanh(s / softcap) before anything is masked, so a logit of -inf is
-softcap. The state's frame says so, and merges with none that was not capped alike.
out: m, l, u that the answer is written to, float32, contiguous, on q's device, apart from each other and the
inputs; the state that is returned is of these. A refusal (ShapeError) writes nothing.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.paged_decode.ref import paged_decode_ref
from kvtier_kernels.ops.paged_decode.torch_impl import paged_decode_torch

__all__ = ["paged_decode_ref", "paged_decode_torch"]
