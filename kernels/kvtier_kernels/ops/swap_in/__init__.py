"""Bringing missing units from host rows into slots: a plan, and its application, which layers replay.

swap_in_plan(miss int32 [R,W], victim int32 [R,W], host_row int32 [R,U], *, slots) -> SwapPlan. miss and
victim as bucket_lru gives them: unit miss[r,i] goes into slot victim[r,i] of row r; entries with either
below 0 are nothing to do. host_row: where a unit of a row lies in the host's pool, below 0 nowhere; slots:
slots a row, so slot s of row r is row r * slots + s of the pool of slots. No slot is written twice in one
plan: within a row victims must ascend, and an entry that does not (or names a slot or unit that does not
exist) is refused, not planned.

swap_in_apply(host [N,...], pool [M,...], src int32 [L], dst int32 [L], copies int32 [1]) -> pool copies
pool[dst[i]] = host[src[i]] for i < copies, bit for bit, in place; layers that share units apply one plan to
their own pools. Both raise ShapeError; src and dst outside the pools are refused on the CPU and not copied on
a GPU.
"""

from kvtier_kernels.ops.swap_in.ref import swap_in_apply_ref, swap_in_plan_ref
from kvtier_kernels.ops.swap_in.torch_impl import SwapPlan, swap_in_apply_torch, swap_in_plan_torch

swap_in_plan = swap_in_plan_torch
swap_in_apply = swap_in_apply_torch

__all__ = [
    "SwapPlan",
    "swap_in_apply",
    "swap_in_apply_ref",
    "swap_in_apply_torch",
    "swap_in_plan",
    "swap_in_plan_ref",
    "swap_in_plan_torch",
]
