"""What every selector answers: logical rows with the evidence for them, never K/V and never slots.

Why it exists: families differ in units, evidence and guarantees; a step only needs the rows. Rows that are
always read (sink, recent, the open page) are added here and never count as a selector's success. It must not
know tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import NO_EVIDENCE, ONLY_QUERIES, Evidence, Need
from kvtier_core.selectors.contract import SelectionReceipt, Shape
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_crds.manifest import Selector
from kvtier_kernels.state import AttentionState


@dataclass(frozen=True, slots=True)
class Selection:
    """positions: sorted rows to read per KV head or per query head, persistent rows included. chosen_units:
    what the selector chose by score, ascending, likewise. chosen_rows: rows of those units beyond the
    persistent ones, of the list with most. threshold and runner_up: the worst score chosen and the best not
    chosen (-inf: none). index_generation: of the index that was asked. log_weight: added to the logits of
    `positions`. complete: makes the answer's state of that of the rows read, where something stands for the
    others. receipt: the family's own evidence. certified: a sound lower bound on the share of the attention
    that was read, one a query head, from the state of the rows read; None without one. widened: doublings of
    the budget that led to it. limits: largest omitted mass and least confidence of its gate, NaN for none;
    uncertain: it fails them."""

    positions: tuple[NDArray[np.int64], ...]
    chosen_units: tuple[NDArray[np.int64], ...]
    chosen_rows: int
    threshold: tuple[float, ...]
    runner_up: tuple[float, ...]
    index_generation: int
    covered: int
    log_weight: tuple[NDArray[np.float32], ...] | None = None
    complete: Callable[[AttentionState], AttentionState] | None = None
    receipt: SelectionReceipt | None = None
    certified: Callable[[AttentionState], tuple[float, ...] | None] | None = None
    widened: int = 0
    limits: tuple[float, float] = (math.nan, math.nan)
    uncertain: bool = False

    @property
    def omitted_mass(self) -> float:
        """The estimated mass left out, of the query head with most; NaN without an estimator."""
        if self.receipt is None or not self.receipt.omitted_mass:
            return math.nan
        return max(self.receipt.omitted_mass)


class LayerIndex(Protocol):
    """One layer's index of one session. `covered` rows are in it; it is bound to one source."""

    @property
    def source_digest(self) -> bytes: ...

    @property
    def selector_digest(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def covered(self) -> int: ...

    def append(self, first: int, k: Tensor, v: Tensor, evidence: Evidence = NO_EVIDENCE) -> None:
        """Takes rows k, v [n, Hk, d] at [first, first + n). SUPPORT_GAP unless first is `covered`."""

    def select(
        self,
        q: Tensor,
        rows: int,
        scale: float,
        tail: Tensor | None = None,
        hidden: Tensor | None = None,
        hidden_layer: int | None = None,
        may_widen: bool = False,
    ) -> Selection:
        """Rows for the queries `q` [1, Hq, d] over rows [0, rows). scale: the session's factor on q.k. tail:
        keys [n, Hk, d] of the last rows. hidden: [1, d_model], the input of layer `hidden_layer`, None: not
        said. may_widen: whether more may be read than the budget pays when the gate fails. Typed refusals
        when the index is stale, late or absent, and of the gate."""

    def end_rows(self) -> None:
        """All rows of a step are here."""

    def decode(self) -> None:
        """A decode step asks of the session: what came until now is its prompt."""

    def caught_up(self, seconds: float) -> bool:
        """As if a decode step asked; then waits, at most for `seconds`, until the whole session's indexes are
        those of the rows that came. Whether they are."""

    def close(self) -> None:
        """Ends the whole session's indexes. Idempotent."""


class SelectorFamily(Protocol):
    """A family with its parameters. `digest` names parameters and budget; an index of another is stale."""

    @property
    def digest(self) -> str: ...

    @property
    def dense_layers(self) -> frozenset[int]: ...

    def omits(self, rows: int) -> bool:
        """Whether a query over `rows` rows would leave some unread: the same for all layers."""

    def indexes(
        self, source_digest: bytes, layers: int, scale: float | None = None
    ) -> Sequence[LayerIndex | None]:
        """Of a new session of a model of `layers` layers; None for those that read every row. scale: the
        session's factor on q.k, None: 1/sqrt(d). Whoever asks closes them."""

    def forked(
        self, indexes: Sequence[LayerIndex | None], source_digest: bytes
    ) -> Sequence[LayerIndex | None]:
        """Of a session of the same rows under another source, from those of its parent. Whoever asks closes
        them."""

    def truncated(
        self, indexes: Sequence[LayerIndex | None], source_digest: bytes, rows: int
    ) -> Sequence[LayerIndex | None] | None:
        """Of a session's first `rows` rows under another source, from those of all; None where they must be
        built from the rows themselves. Whoever asks closes them."""


def close_indexes(indexes: Sequence[LayerIndex | None]) -> None:
    """Of a session that ends, or whose rows are others now."""
    for index in indexes:
        if index is not None:
            index.close()


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


def build_family(
    selector: Selector,
    *,
    page_tokens: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    given: frozenset[Need] = ONLY_QUERIES,
    works: IndexWorks | None = None,
    cache: str = "",
) -> SelectorFamily:
    """The family a manifest names. given: what the engine sends. works: where indexes are built, None: where
    they are asked; cache: whose they are. MANIFEST_INVALID with the legal families, UNSUPPORTED with what the
    engine does not send and the family needs."""
    from kvtier_core.selectors.live import LiveFamily

    shape = Shape(query_heads, kv_heads, head_dim, head_dim**-0.5)
    return LiveFamily(selector, shape, page_tokens, given, works, cache)
