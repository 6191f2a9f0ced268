"""Quest: a box per page of keys, and the largest logit a page could hold for a query."""

from kvtier_kernels.ops.quest.ref import quest_boxes_ref, quest_score_ref
from kvtier_kernels.ops.quest.torch_impl import quest_boxes, quest_score

__all__ = ["quest_boxes", "quest_boxes_ref", "quest_score", "quest_score_ref"]
