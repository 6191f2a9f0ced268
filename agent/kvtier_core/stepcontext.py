"""What a session's steps need besides its rows: its indexes, what they wait for, and what frames have seen.

Why it exists: a step hands rows on to whatever follows them. In which order that happens decides what an
index learns from, so it is one place's. It must not know how an answer is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvtier_core.appends import Append, Session
from kvtier_core.receipts import StepRequest
from kvtier_core.resident import ResidentLayer
from kvtier_core.rowevidence import Need
from kvtier_core.selectors.audit import SessionAudit
from kvtier_core.selectors.base import LayerIndex, SelectorFamily, close_indexes
from kvtier_core.selectors.fixedcontext import FixedContext
from kvtier_core.selectors.lateevidence import LateEvidence
from kvtier_core.selectors.live import FROM_FRAMES, LiveFamily, LiveIndex
from kvtier_core.selectors.wanted import wanted_by


@dataclass(slots=True)
class StepContext:
    """What a session's steps need besides its rows. indexes: per layer, None where there is none. resident:
    what frames on the short way keep, per layer. due: step and layer of what is to be promised when an answer
    has left. late: for a family that needs surprisals; fixed: for one
    whose index takes no rows behind its context. audit: grades some of its selections."""

    session: Session
    source_digest: bytes
    family: SelectorFamily | None
    indexes: list[LayerIndex | None]
    resident: list[ResidentLayer | None] = field(default_factory=list)
    due: tuple[int, int] | None = None
    late: LateEvidence | None = None
    fixed: FixedContext | None = None
    audit: SessionAudit | None = None

    def __post_init__(self) -> None:
        self.forget_views()

    @classmethod
    def opened(
        cls,
        session: Session,
        source_digest: bytes,
        family: SelectorFamily | None,
        indexes: list[LayerIndex | None],
    ) -> StepContext:
        """Of a new session, with what its family needs besides rows."""
        made = cls(session, source_digest, family, indexes)
        if family is not None:
            wanted = wanted_by(family, len(session.layers))
            context = session.spec.fixed_context or 0
            made.fixed = FixedContext(context, len(session.layers)) if wanted.fixed else None
        if isinstance(family, LiveFamily):
            spec, layers = session.spec, len(session.layers)
            if Need.SURPRISAL in family.family.facts.needs:
                made.late = LateEvidence(layers, family.works)
            digest = spec.candidate_digest or ""
            made.audit = family.audit(session.session_id, source_digest, layers, digest, spec.audit)
        return made

    def forked(self, child: Session, source_digest: bytes, indexes: list[LayerIndex | None]) -> StepContext:
        """Of a session of the same rows."""
        made = StepContext(child, source_digest, self.family, indexes)
        made.fixed = None if self.fixed is None else self.fixed.fork()
        if self.late is not None:
            made.late, fits = self.late.fork()
            if not fits:
                made._over()
        return made

    def forget_views(self) -> None:
        """Lets go of what frames on the short way keep."""
        self.resident = [None] * len(self.session.layers)

    def forget_line(self, line: int) -> None:
        """As `forget_views`, of the layer whose chunk that line is; a line of none changes nothing."""
        for layer, kept in enumerate(self.resident):
            if kept is not None and kept.stamp.covers(line):
                self.resident[layer] = None

    def begin(self, request: StepRequest) -> None:
        """A frame comes. Surprisals that come with it are taken, and rows that waited for them go to the
        layer's index: they are of tokens and not of the frame, so they stay when it is refused. A frame of
        another layer or step says that the rows before are complete, the first decode step that could leave
        rows out says that the prompt is. EVENT_BOUNDARY."""
        late, layer, session = self.late, request.layer, self.session
        index = self.indexes[layer]
        if late is not None:
            if request.surprisal is not None:
                rows = max(state.frontier for state in session.layers)
                coming = request.first_row_position + int(request.k.shape[0])
                late.take(request.surprisal, max(rows, coming))
            if index is not None:
                late.deliver(layer, index.append)
        if (request.step, layer) != (session.step, session.layer):
            before = self.indexes[session.layer] if session.step >= 0 else None
            if before is not None:
                before.end_rows()
        visible = request.first_query_position + 1
        whole = self.fixed is None or self.fixed.complete
        if self.family is not None and whole and decodes(session, request) and self.family.omits(visible):
            for one in self.indexes:
                if one is not None:
                    one.decode()
                    break

    def take(self, append: Append, request: StepRequest) -> None:
        """Hands rows that were committed to the layer's index."""
        index = self.indexes[append.layer]
        if self.audit is not None and append.k.shape[0]:
            self.audit.append(append.layer, append.first, append.k)
        k, v, evidence = append.k, append.v, request.evidence
        if self.fixed is not None:
            # Of layers without an index, too: a context is complete when it is in all of them.
            inside = self.fixed.within(append.layer, request.step, append.first, int(k.shape[0]))
            k, v, evidence = k[:inside], v[:inside], evidence.first(inside)
        if index is None or not k.shape[0]:
            return
        if self.late is None:
            index.append(append.first, k, v, evidence)
        elif self.late.hold(append.layer, append.first, k, v, evidence):
            self.late.deliver(append.layer, index.append)
        elif isinstance(index, LiveIndex):
            index.over()

    def lacking(self) -> frozenset[Need]:
        """What the family learns from and rows that no frame brought do not have."""
        if not isinstance(self.family, LiveFamily):
            return frozenset()
        return self.family.family.facts.needs & FROM_FRAMES

    def adopt(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Hands over rows [first, first + n) of a layer that no frame brings."""
        if self.audit is not None:
            self.audit.append(layer, first, k)
        inside = int(k.shape[0])
        if self.fixed is not None:
            inside = self.fixed.adopt(layer, first, inside)
        index = self.indexes[layer]
        if index is not None and inside:
            index.append(first, k[:inside], v[:inside])

    def begin_anew(self) -> None:
        """As of a session that has no rows; it is not audited."""
        family, session = self.family, self.session
        layers = len(session.layers)
        close_indexes(self.indexes)
        self.end_audit()
        if family is not None:
            self.indexes[:] = family.indexes(self.source_digest, layers, session.spec.score_scale)
        if self.fixed is not None:
            self.fixed = FixedContext(self.fixed.tokens, layers)

    def _over(self) -> None:
        for index in self.indexes:
            if isinstance(index, LiveIndex):
                index.over()
                return

    def close(self) -> None:
        """Ends its indexes."""
        close_indexes(self.indexes)
        if self.late is not None:
            self.late.close()
        self.end_audit()

    def end_audit(self) -> None:
        """Its scans are of rows that are others now, or will never be read."""
        if self.audit is not None:
            self.audit.close()
            self.audit = None


def decodes(session: Session, request: StepRequest) -> bool:
    """Whether the step is one query. A single query that ends a prefill's last block is none: a prefill is
    read whole wherever its blocks end."""
    first = request.first_query_position
    return (
        request.q.shape[0] == 1 and (session.step_first if request.step == session.step else first) == first
    )
