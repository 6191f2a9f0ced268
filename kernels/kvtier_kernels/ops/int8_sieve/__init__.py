"""The certified scan over int8 keys, and the choice of units for several drafts of one query.

int8_scan(q [B,K,Hq,d], cq int8 [B,Hk,C,d], scale f32 [B,Hk,C], seq_lens [B] i32) -> Bounds;
int8_select(upper f32 [B,K,Hq,C], seq_lens, candidates [B] i32, *, hk, k, cap) -> Sieve.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.int8_sieve.ref import int8_scan_ref, int8_select_ref
from kvtier_kernels.ops.int8_sieve.torch_impl import (
    Bounds,
    Sieve,
    certified_mass,
    int8_rows,
    int8_scan_torch,
    int8_select_torch,
    radius_factor,
)

__all__ = [
    "Bounds",
    "Sieve",
    "certified_mass",
    "int8_rows",
    "int8_scan_ref",
    "int8_scan_torch",
    "int8_select_ref",
    "int8_select_torch",
    "radius_factor",
]
