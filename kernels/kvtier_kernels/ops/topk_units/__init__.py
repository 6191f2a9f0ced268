"""The k best units of each row, ties to the lowest id, ids ascending.

topk_units(score float32 [R,X], valid_len int32 [R], k int32 [R], *, max_k=None) -> TopkUnits. A row takes
min(k, valid_len, max_k) of its first valid_len scores; max_k (the largest k where it is not given) fixes the
capacity of the list. NaN counts as largest: a unit whose score is unknown is read, not dropped; both
zeros are equal. Raises ShapeError. The Triton module is imported by who runs it, since Triton is an optional
dependency.
"""

from kvtier_kernels.ops.topk_units.ref import topk_units_ref
from kvtier_kernels.ops.topk_units.torch_impl import TopkUnits, topk_units_torch

topk_units = topk_units_torch

__all__ = ["TopkUnits", "topk_units", "topk_units_ref", "topk_units_torch"]
