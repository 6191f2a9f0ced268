"""Quest: a box per page of keys, and the largest logit a page could hold for a query.

quest_boxes(k [R,Hk,d], page_tokens) and quest_score(q [Hq,d], kmin, kmax [P,Hk,d]) serve one sequence whose
rows lie one behind the other. quest_score_paged serves a batch over a pool, in three implementations (ref,
torch, triton) of one signature:

quest_score_paged(q [B,Hq,d], kmin, kmax [N,Hk,d], page_table i32 [B,X], n_pages i32 [B], *, reduce="max")
-> float32 [B,Hk,X] (reduce "max": the largest of a group's query heads, which keeps the bound) or [B,Hq,X]
(reduce "none"). Unscaled upper bounds of q.k over each page, for finite boxes:
sum_c max(q_c kmin_c, q_c kmax_c) = relu(q).kmax - relu(-q).kmin, up to rounding. -inf at and behind n_pages
and where the table's id is below 0; no box is read there. A NaN in a box makes the score NaN, which
topk_units takes for the largest. The bound is loose: a score is a ranking, never a certificate.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.quest.paged import quest_score_paged_torch
from kvtier_kernels.ops.quest.ref import quest_boxes_ref, quest_score_paged_ref, quest_score_ref
from kvtier_kernels.ops.quest.torch_impl import quest_boxes, quest_score

__all__ = [
    "quest_boxes",
    "quest_boxes_ref",
    "quest_score",
    "quest_score_paged_ref",
    "quest_score_paged_torch",
    "quest_score_ref",
]
