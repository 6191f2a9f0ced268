"""Locality-sensitive hashing: codes, tables, and the rows that collide with a query with their probability.

lsh_hash(x [...,d], planes [d,L*bits], *, bits) -> uint16 [...,L];
lsh_collide(q, q_codes, keys, starts, ends, content, *, min_hits=2, cap) -> Collisions.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.lsh.ref import collision_probability, lsh_collide_ref, lsh_hash_ref
from kvtier_kernels.ops.lsh.torch_impl import Collisions, lsh_collide_torch, lsh_hash_torch, lsh_tables

__all__ = [
    "Collisions",
    "collision_probability",
    "lsh_collide_ref",
    "lsh_collide_torch",
    "lsh_hash_ref",
    "lsh_hash_torch",
    "lsh_tables",
]
