"""What every selector answers: logical rows with the evidence for them, never K/V and never slots.

Why it exists: families differ in units, evidence and guarantees; a step only needs the rows. Rows that are
always read (sink, recent, the open page) are added here and never count as a selector's success. It must not
know tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import Selector


@dataclass(frozen=True, slots=True)
class Selection:
    """positions: sorted rows to read per KV head, persistent rows included. chosen_units: what the selector
    chose by score, ascending, per KV head. chosen_rows: rows of those units beyond the persistent ones, of
    the head with most. threshold and runner_up: the worst score chosen and the best not chosen, per KV head
    (-inf: none). index_generation: of the index that was asked."""

    positions: tuple[NDArray[np.int64], ...]
    chosen_units: tuple[NDArray[np.int64], ...]
    chosen_rows: int
    threshold: tuple[float, ...]
    runner_up: tuple[float, ...]
    index_generation: int
    covered: int


class LayerIndex(Protocol):
    """One layer's index of one session. `covered` rows are in it; it is bound to one source."""

    source_digest: bytes
    selector_digest: str
    generation: int

    @property
    def covered(self) -> int: ...

    def append(self, first: int, k: Tensor) -> None:
        """Takes rows `k` [n, Hk, d] at [first, first + n). SUPPORT_GAP unless first is `covered`."""

    def select(self, q: Tensor, rows: int) -> Selection:
        """Rows for the queries `q` [1, Hq, d] over rows [0, rows). Typed refusal when the index is stale."""


class SelectorFamily(Protocol):
    """A family with its parameters. `digest` names parameters and budget; an index of another is stale."""

    @property
    def digest(self) -> str: ...

    @property
    def dense_layers(self) -> frozenset[int]: ...

    def omits(self, rows: int) -> bool:
        """Whether a query over `rows` rows would leave some unread: the same for all layers."""

    def index(self, source_digest: bytes) -> LayerIndex: ...


def check_fresh(index: LayerIndex, family: SelectorFamily, source_digest: bytes) -> None:
    """GENERATION_STALE: the index was built for other parameters. IDENTITY_MISMATCH: for another source."""
    if index.selector_digest != family.digest:
        raise CoreError(
            Reason.GENERATION_STALE,
            "the session's index was built for another selector",
            {"index": index.selector_digest, "asked": family.digest},
        )
    if index.source_digest != source_digest:
        raise CoreError(Reason.IDENTITY_MISMATCH, "the index belongs to another source of rows")


def build_family(selector: Selector, *, page_tokens: int, kv_heads: int, head_dim: int) -> SelectorFamily:
    """The family a manifest names. MANIFEST_INVALID with the legal families."""
    from kvtier_core.selectors.quest import QuestFamily

    families: dict[str, type[QuestFamily]] = {"quest": QuestFamily}
    family = families.get(selector.family)
    if family is None:
        raise CoreError(
            Reason.MANIFEST_INVALID,
            f"selector family {selector.family!r} cannot run here; legal: {', '.join(sorted(families))}",
        )
    return family.from_manifest(selector, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=head_dim)


def merge_rows(rows: int, ranges: Sequence[tuple[int, int]], mask: NDArray[np.bool_]) -> None:
    """Marks row ranges in a mask of `rows` rows, clipped to it."""
    for first, last in ranges:
        mask[max(0, first) : max(0, min(rows, last))] = True
