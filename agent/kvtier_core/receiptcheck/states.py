"""Attention states of one frame that several producers formed, checked before they become one answer (E.5).

Why it exists: where rows of one query are attended in several places, what comes back has the right shape
also when it is of another query, of rows twice, or of rows short. Each receipt repeats whose it is, and is
validated against the query being reduced, never by its order of arrival. It must not know tiers, tensors'
producers or how states are merged.

A receipt holds one state per support range, of all queries and heads of the frame.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding, digest

STATE_SCHEMA = "fp32-m-l-u-v1"

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StateReceipt:
    """support: half-open ranges of rows, ascending; empty when the producer has none, which is declared with
    one state (-inf, 0, 0). query_heads, kv_heads: half-open; None is not named. m, l: float32 [n, Nq, Hq]; u:
    float32 [n, Nq, Hq, value_dim], n the number of ranges (1 for none); None: not there. completed: seconds
    on the engine's clock, None while no event orders the state before its use."""

    tenant_namespace: str
    request_id: str
    request_generation: int
    checkpoint_generation: str
    layer: int
    query_heads: tuple[int, int] | None
    kv_heads: tuple[int, int] | None
    query_to_kv: tuple[int, ...]
    first_query_position: int
    queries: int
    query_sha256: bytes
    support: Ranges
    support_sha256: bytes
    mask_sha256: bytes
    position_contract_sha256: bytes
    position_epoch: int
    score_scale: float
    state_schema: str
    m: NDArray[np.float32] | None
    l: NDArray[np.float32] | None
    u: NDArray[np.float32]
    producer: str
    producer_generation: int
    merge_revision: str | None
    checksum: int
    completed: float | None


@dataclass(frozen=True, slots=True)
class Producer:
    """receipts: how many are due from it."""

    name: str
    generation: int
    receipts: int = 1


@dataclass(frozen=True, slots=True)
class StateTerms:
    """What is being reduced. visible: rows [0, visible) are the required support. deadline: seconds on the
    engine's clock, None for none."""

    binding: SourceBinding
    request_id: str
    layer: int
    query_to_kv: tuple[int, ...]
    kv_heads: int
    value_dim: int
    first_query_position: int
    queries: int
    query_sha256: bytes
    mask_sha256: bytes
    position_epoch: int
    score_scale: float
    merge_revision: str
    producers: tuple[Producer, ...]
    visible: int
    deadline: float | None = None

    @property
    def state_bytes(self) -> int:
        """F29: one state of all queries and heads, m, l and u in float32."""
        return self.queries * len(self.query_to_kv) * (2 + self.value_dim) * 4


@lru_cache(maxsize=1024)
def ranges_digest(support: Ranges) -> bytes:
    """Kept for some ranges: all layers and tokens have the same, and both ends of a receipt digest them."""
    flat = np.array([edge for one in support for edge in one], dtype=np.int64)
    return digest("support", [("scope", "ranges"), ("ranges", flat)])


def states_checksum(
    m: NDArray[np.float32] | None, l: NDArray[np.float32] | None, u: NDArray[np.float32]
) -> int:
    """XXH3-64 over the bytes of m, l and u; what is missing is left out."""
    running = xxhash.xxh3_64()
    for part in (m, l, u):
        if part is not None:
            running.update(np.ascontiguousarray(part).data)
    return running.intdigest()


def check_state(terms: StateTerms, receipt: StateReceipt) -> None:
    """One receipt: PARTIAL_RECEIPT_INCOMPLETE, STATE_SCHEMA_MISMATCH, CHECKSUM_MISMATCH; TENANT_MISMATCH,
    QUERY_IDENTITY_MISMATCH (another request), REQUEST_STALE, MODEL_MISMATCH; HEAD_AMBIGUOUS,
    QUERY_IDENTITY_MISMATCH, HEAD_MAPPING_MISMATCH; MASK_MISMATCH, POSITION_CONTRACT_MISMATCH,
    SCORE_SCALE_MISMATCH; SUPPORT_DIGEST_MISMATCH; NO_NORMALISATION_MASS, EMPTY_SUPPORT, STATE_INVALID;
    STATE_SHAPE; PARTIAL_RECEIPT_STALE."""
    binding = terms.binding
    if receipt.merge_revision is None:
        raise _refused(Reason.PARTIAL_RECEIPT_INCOMPLETE, receipt)
    arrays = [part for part in (receipt.m, receipt.l, receipt.u) if part is not None]
    query = (receipt.layer, receipt.query_heads, receipt.kv_heads, receipt.first_query_position)
    asked = (terms.layer, (0, len(terms.query_to_kv)), (0, terms.kv_heads), terms.first_query_position)
    same_query = (receipt.queries, receipt.query_sha256) == (terms.queries, terms.query_sha256)
    guards: tuple[tuple[bool, Reason], ...] = (
        (
            receipt.state_schema != STATE_SCHEMA or any(part.dtype != np.float32 for part in arrays),
            Reason.STATE_SCHEMA_MISMATCH,
        ),
        (
            receipt.checksum != states_checksum(receipt.m, receipt.l, receipt.u),
            Reason.CHECKSUM_MISMATCH,
        ),
        (receipt.tenant_namespace != binding.tenant_namespace, Reason.TENANT_MISMATCH),
        (receipt.request_id != terms.request_id, Reason.QUERY_IDENTITY_MISMATCH),
        (receipt.request_generation != binding.request_generation, Reason.REQUEST_STALE),
        (receipt.checkpoint_generation != binding.checkpoint_generation, Reason.MODEL_MISMATCH),
        (receipt.query_heads is None or receipt.kv_heads is None, Reason.HEAD_AMBIGUOUS),
        (query != asked or not same_query, Reason.QUERY_IDENTITY_MISMATCH),
        (receipt.query_to_kv != terms.query_to_kv, Reason.HEAD_MAPPING_MISMATCH),
        (receipt.mask_sha256 != terms.mask_sha256, Reason.MASK_MISMATCH),
        (
            receipt.position_contract_sha256 != binding.position_contract_sha256
            or receipt.position_epoch != terms.position_epoch,
            Reason.POSITION_CONTRACT_MISMATCH,
        ),
        (receipt.score_scale != terms.score_scale, Reason.SCORE_SCALE_MISMATCH),
        (receipt.support_sha256 != ranges_digest(receipt.support), Reason.SUPPORT_DIGEST_MISMATCH),
    )
    for failed, reason in guards:
        if failed:
            raise _refused(reason, receipt)
    _check_numbers(terms, receipt)
    due = {(producer.name, producer.generation) for producer in terms.producers}
    if (
        receipt.merge_revision != terms.merge_revision
        or (receipt.producer, receipt.producer_generation) not in due
    ):
        raise _refused(Reason.PARTIAL_RECEIPT_STALE, receipt)


def _check_numbers(terms: StateTerms, receipt: StateReceipt) -> None:
    if receipt.m is None or receipt.l is None:
        raise _refused(Reason.NO_NORMALISATION_MASS, receipt)
    shape = (max(1, len(receipt.support)), terms.queries, len(terms.query_to_kv))
    if receipt.m.shape != shape or receipt.l.shape != shape:
        raise _refused(Reason.STATE_SHAPE, receipt)
    # u may hold what V held, also what is not finite; m and l weigh it.
    seen = _seen(terms, receipt.support)
    m, l = receipt.m, receipt.l
    if seen is None:
        # Least and greatest are NaN where one is: every comparison with those is false.
        sound = bool(-np.inf < m.min() and m.max() < np.inf and l.min() > 0.0)
        empty = not sound and bool((l == 0.0).any())
    else:
        m_seen, l_seen = m[seen], l[seen]
        sound = bool(np.isfinite(m_seen).all() and (l_seen > 0.0).all())
        sound = sound and bool((m[~seen] == -np.inf).all() and (l[~seen] == 0.0).all())
        empty = bool((l_seen == 0.0).any())
    if not sound or not l.max() < np.inf:
        raise _refused(Reason.EMPTY_SUPPORT if empty else Reason.STATE_INVALID, receipt)
    if receipt.u.shape != (*shape, terms.value_dim):
        raise _refused(Reason.STATE_SHAPE, receipt)
    if seen is not None and receipt.u[~seen].any():
        # Its weight is 0, which does not hide what is not finite.
        raise _refused(Reason.STATE_INVALID, receipt)


def _seen(terms: StateTerms, support: Ranges) -> NDArray[np.bool_] | None:
    """[n, Nq]: which queries see a row of which range; None when all see all."""
    if not support:
        return np.zeros((1, terms.queries), dtype=np.bool_)
    starts = [first for first, _ in support]
    if max(starts) <= terms.first_query_position:
        return None
    positions = terms.first_query_position + np.arange(terms.queries)
    return np.asarray(np.array(starts)[:, None] <= positions[None, :], dtype=np.bool_)


def _refused(reason: Reason, receipt: StateReceipt) -> CoreError:
    return CoreError(reason, f"a state of producer {receipt.producer} is refused")


@dataclass(slots=True)
class StateMerge:
    """All receipts of one frame, as they come. `take` each before its states are merged; nothing is published
    before `close`."""

    terms: StateTerms
    _taken: dict[str, int] = field(default_factory=dict)
    _known: set[tuple[str, bytes]] = field(default_factory=set)
    _ranges: list[tuple[int, int]] = field(default_factory=list)
    _states: int = 0
    _ends: list[tuple[str, float | None]] = field(default_factory=list)
    _over: bool = False

    def take(self, receipt: StateReceipt) -> None:
        """`check_state`, then LATE_RECEIPT once it was closed: the answer, or that of a fallback, is out;
        DUPLICATE_RECEIPT (looked for before an overlap, which it always is too), SUPPORT_OVERLAP,
        SUPPORT_OUT_OF_RANGE."""
        check_state(self.terms, receipt)
        if self._over:
            raise CoreError(
                Reason.LATE_RECEIPT, f"the frame was answered before the state of {receipt.producer} came"
            )
        name = (receipt.producer, receipt.support_sha256)
        if name in self._known:
            raise _refused(Reason.DUPLICATE_RECEIPT, receipt)
        self._known.add(name)
        for one in receipt.support:
            self._add(one, receipt.producer)
        self._taken[receipt.producer] = self._taken.get(receipt.producer, 0) + 1
        self._states += max(1, len(receipt.support))
        self._ends.append((receipt.producer, receipt.completed))

    def own(self, one: tuple[int, int]) -> None:
        """Rows [first, last) that the coordinator attends itself: they need no receipt, and nobody else may
        have them. SUPPORT_OVERLAP, SUPPORT_OUT_OF_RANGE."""
        self._add(one, "the coordinator")

    def _add(self, one: tuple[int, int], who: str) -> None:
        at = bisect_left(self._ranges, one)
        before = self._ranges[at - 1][1] if at else 0
        after = self._ranges[at][0] if at < len(self._ranges) else one[1]
        if (at and one[0] < before) or one[1] > after:
            raise CoreError(Reason.SUPPORT_OVERLAP, f"rows {one} of {who} are another's too")
        if not 0 <= one[0] < one[1] <= self.terms.visible:
            raise CoreError(Reason.SUPPORT_OUT_OF_RANGE, f"rows {one} of {who} are not of the support")
        insort(self._ranges, one)

    def close(self, returned_bytes: int) -> None:
        """SUPPORT_GAP, EMPTY_SUPPORT, RECEIPT_COUNT, TRAFFIC_MISMATCH (states of F29), NOT_VISIBLE,
        LATE_RECEIPT: a state's, or all of them where the frame was answered already."""
        terms, answered = self.terms, self._over
        self._over = True
        missing = terms.visible - sum(last - first for first, last in self._ranges)
        if missing:
            raise CoreError(
                Reason.SUPPORT_GAP, f"{missing} required rows are in no support", {"missing": missing}
            )
        if not terms.visible:
            raise CoreError(Reason.EMPTY_SUPPORT, "no rows at all: there is no answer")
        due = {producer.name: producer.receipts for producer in terms.producers if producer.receipts}
        if self._taken != due:
            raise CoreError(Reason.RECEIPT_COUNT, f"receipts {self._taken}, due are {due}")
        if returned_bytes != self._states * terms.state_bytes:
            raise CoreError(
                Reason.TRAFFIC_MISMATCH,
                f"{self._states} states of {terms.state_bytes} bytes, not {returned_bytes}",
            )
        if any(end is None for _, end in self._ends):
            raise CoreError(Reason.NOT_VISIBLE, "no event orders a state before its use")
        late = [
            name for name, end in self._ends if terms.deadline is not None and (end or 0.0) > terms.deadline
        ]
        if late or answered:
            raise CoreError(
                Reason.LATE_RECEIPT, f"after the deadline or the answer: {', '.join(late) or 'all'}"
            )
