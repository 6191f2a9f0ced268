"""Joining attention states, one signature in three implementations (ref, torch, triton).

merge_states(m, l [B,S,H], u [B,S,H,d], counts int32 [B,H] or None, *, frame, estimated) -> AttentionState
[B,H]: the left fold over S, ascending, of the first counts[b,h] states (all without counts); the others are
not read. estimated: whether any of them is, which tensors do not say; the answer then is.
merge_state_(m, l [...], u [...,d], other_m, other_l, other_u) -> (m, l, u): in place in the first three. They
may not overlap the others.
finalize_state(m, l [R], u [R,d], *, dtype) -> Finalized(o [R,d] of dtype, lse [R] float32, natural log);
no rows: (0, -inf).
States are float32 with natural m; no states give the identity (-inf, 0, 0).
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.merge_states.ref import finalize_state_ref, merge_state_ref, merge_states_ref
from kvtier_kernels.ops.merge_states.torch_impl import (
    Finalized,
    finalize_state_torch,
    merge_state_torch_,
    merge_states_torch,
)

__all__ = [
    "Finalized",
    "finalize_state_ref",
    "finalize_state_torch",
    "merge_state_ref",
    "merge_state_torch_",
    "merge_states_ref",
    "merge_states_torch",
]
