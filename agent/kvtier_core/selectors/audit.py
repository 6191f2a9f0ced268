"""Grades a sample of other families' selections by a bound that holds: how much of the attention they surely
read.

Why it exists: most families can say nothing sound of what they leave out, and comparing with the exact answer
costs a second answer. A scan of keys in int8 bounds every logit from both sides, so that the share of the
attention that a selection read has a sound lower bound. It is computed behind the answer, where indexes are
built, and never changes one. It must not know how a selection was made.

Bound (selectors_kernels 2.1, 5.4): with kept = ln of the sum of e^logit over the rows read, exact, or by
lower bounds where the answer's state is an estimate, and left = ln of the sum of e^upper over all others, 1 /
(1 + e^(left - kept)) is at most the share of the attention over the rows that was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import NO_EVIDENCE
from kvtier_core.selectors.contract import Budget, Shape, Source
from kvtier_core.selectors.families.certified_scan import CertifiedScan, CodedKeys
from kvtier_core.selectors.lifecycle.life import Block, LayerLife, Published
from kvtier_core.selectors.lifecycle.works import IndexWorks, Name
from kvtier_crds.manifest import PersistentRows
from kvtier_evidence.assignment import sampled, step_sampled
from kvtier_kernels.state import AttentionState

AUDIT = "audit"
"""What an audit's own indexes are counted as."""
STEP_SHARE = 0.25
"""Of the decode steps of an audited session, those of which one layer is graded."""
BEHIND_ROWS = 1024
"""Rows behind a scan whose keys wait with a selection; with more, one that leaves some of them out is not
graded."""
_ROUNDED = 2.0**-16
"""What the logarithm of a state's float32 sum may be off by."""


def scan_of(shape: Shape) -> CertifiedScan:
    """The scan that bounds logits; its own budget is never asked."""
    return CertifiedScan(
        digest=AUDIT,
        shape=shape,
        budget=Budget(tokens=1),
        persistent=PersistentRows(),
        dense_layers=frozenset(),
        max_omitted=1.0,
    )


class SessionAudit:
    """One session's scans, one a layer that selects, and which of its steps are graded. Its memory and its
    builds are counted with those of all indexes; where there is no room for them the session is not graded,
    and answered as it would be."""

    def __init__(
        self,
        works: IndexWorks,
        name: Name,
        shape: Shape,
        session_id: str,
        source_digest: bytes,
        layers: Sequence[int],
        block: int = 16,
    ) -> None:
        """name: of the selector that is graded. layers: those that select. block: rows of one append."""
        self._works, self._book, self._name = works, works.audits, name
        self._session_id = session_id
        self._layers = list(layers)
        self._scan = scan_of(shape)
        lives = [LayerLife(self._scan, Source(source_digest, layer), block) for layer in layers]
        self._lives = dict(zip(layers, lives, strict=True))
        self._session = works.open(Name(name.cache, AUDIT, AUDIT), lives, spare=True)

    def append(self, layer: int, first: int, k: Tensor) -> None:
        """Keys [n, Hk, d] of rows at [first, first + n) of a layer."""
        life = self._lives.get(layer)
        if life is not None and not life.ended:
            # A scan is of keys alone.
            self._works.arrive(life, Block(first, k.clone(), k.new_empty(k.shape[0], 0, 0), NO_EVIDENCE))

    def wants(self, step: int, layer: int) -> bool:
        """Whether the selection of this step and layer is graded: by hash, never by load."""
        if not self._layers or not step_sampled(AUDIT, self._session_id, step, STEP_SHARE):
            return False
        return self._layers[step % len(self._layers)] == layer

    def grade(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        rows: int,
        positions: Sequence[NDArray[np.int64]],
        read: AttentionState | None,
    ) -> None:
        """Grades a selection later. q [1, Hq, d]; positions: read of rows [0, rows), a list a query head or a
        KV head; read: the state of those rows, None or an estimate: it is bounded, too."""
        if not self._book.begin():
            self._book.failed(self._name, Reason.QUEUE_FULL.value)
            return
        life = self._lives[layer]
        try:
            held, behind = self._works.take_lease(life, BEHIND_ROWS)
        except CoreError as error:
            self._book.end()
            self._book.failed(self._name, error.reason.value)
            return
        size = 0 if behind is None else behind.numel() * behind.element_size()
        if not self._works.reserve(size):
            self._works.end_lease(life, held)
            self._book.end()
            self._book.failed(self._name, Reason.QUOTA_EXCEEDED.value)
            return
        kept = None
        if read is not None and not read.estimated:
            kept = (read.m[0].double() + read.l[0].double().log()).numpy() - _ROUNDED
        query = q[0].detach().to("cpu").float().numpy().copy()

        def work() -> None:
            try:
                self._book.graded(self._name, self._share(held, behind, query, scale, rows, positions, kept))
            except CoreError as error:
                self._book.failed(self._name, error.reason.value)
            except Exception:
                # It may run in a step's own time, and no audit may cost an answer.
                self._book.failed(self._name, Reason.INTERNAL.value)
            finally:
                self._works.give_back(size)
                self._works.end_lease(life, held)
                self._book.end()

        self._works.offer(work)

    def _share(
        self,
        held: Published,
        behind: Tensor | None,
        q: NDArray[np.float32],
        scale: float,
        rows: int,
        positions: Sequence[NDArray[np.int64]],
        kept: NDArray[np.float64] | None,
    ) -> float:
        """The least certified share of any query head. behind: keys of rows that wait for the scan.
        INDEX_FRONTIER_LAG: rows that were left out are in neither, so that nothing bounds them."""
        index = held.index
        assert isinstance(index, CodedKeys)
        scan = replace(self._scan, shape=replace(self._scan.shape, scale=scale))
        lower, upper = scan.bounds(index, q)
        if behind is not None:
            exact = _logits(q, behind.float().numpy(), scan.shape)
            known = np.isfinite(exact)
            lower = np.hstack([lower, np.where(known, exact - _ROUNDED, -np.inf)])
            upper = np.hstack([upper, np.where(known, exact + _ROUNDED, np.inf)])
        covered = min(rows, upper.shape[1])
        group = len(q) // len(positions)
        least = 1.0
        for head in range(len(q)):
            mask = np.zeros(rows, dtype=np.bool_)
            mask[positions[head // group]] = True
            if not mask[covered:].all():
                raise CoreError(
                    Reason.INDEX_FRONTIER_LAG,
                    f"keys are known up to row {covered} of {rows}, and rows behind it were left out",
                )
            inside = mask[:covered]
            left = _log_sum(upper[head, :covered][~inside])
            mine = _log_sum(lower[head, :covered][inside]) if kept is None else float(kept[head])
            least = min(least, _certified(left, mine))
        return least

    def close(self) -> None:
        """Ends its scans; what waits to be graded is graded."""
        self._works.close(self._session)


def audited(candidate_digest: str, session_id: str, share: float) -> bool:
    """Whether a session's selections are graded: by hash, monotone in the share."""
    return sampled(f"{AUDIT}/{candidate_digest}", session_id, share)


def _logits(q: NDArray[np.float32], k: NDArray[np.float32], shape: Shape) -> NDArray[np.float64]:
    """[Hq, n], in float64."""
    grouped = q.reshape(shape.kv_heads, shape.group, shape.head_dim).astype(np.float64)
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = np.einsum("hgd,nhd->hgn", grouped, k.astype(np.float64)) * shape.scale
    return found.reshape(len(q), -1)


def _log_sum(values: NDArray[np.float64]) -> float:
    """ln of the sum of e^values; -inf of none, inf where one is."""
    top = float(values.max(initial=-np.inf))
    return top if not np.isfinite(top) else top + float(np.log(np.exp(values - top).sum()))


def _certified(left: float, kept: float) -> float:
    if left == -np.inf:
        return 1.0
    if kept == -np.inf or left == np.inf:
        return 0.0
    return float(1.0 / (1.0 + np.exp(min(700.0, left - kept))))
