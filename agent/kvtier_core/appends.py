"""What a session's rows are while a frame is answered: records, and what a plan may ask of who keeps them.

Why it exists: a plan is made and run over rows of a session, and must not know how they are appended,
committed or given back. It must not know tiers' contents or locks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding
from kvtier_core.layout import ChunkLayout
from kvtier_core.positions import UNEDITED, PositionView
from kvtier_core.receipts import ExactnessClass, SessionSpec
from kvtier_core.rope import RopeTable
from kvtier_core.tiers.base import BlockIdentity, SlotRef, Tier
from kvtier_core.tiers.staging import StagingBuffer

NO_LINE = -1


@dataclass(slots=True)
class LayerState:
    """frontier: rows [0, frontier) exist. lines: directory lines of all chunks, ascending, the open one last
    while `open_line` is set; NO_LINE where a whole chunk was dropped from the session's view."""

    open_tier: int
    frontier: int = 0
    lines: list[int] = field(default_factory=list)
    open_line: int = NO_LINE


@dataclass(frozen=True, slots=True)
class EditPoint:
    """An edit that took effect before `row`. before: the view until then, None when it is not known whether
    rows were computed over it. producer: index of the digest of what was computed since."""

    row: int
    before: PositionView | None
    producer: int


@dataclass(slots=True)
class Session:
    """producers: (first position, index of the producer's digest), ascending; the same in all layers.
    epoch: grows with each step of any session; what is sealed in one step is equally recent, by position.
    step_first: position of the first query of the step that runs. number: names the lines that the session
    makes; a truncation that takes lines gives it another, since they may live on in a fork. position_epoch:
    grows with each edit of the history; positions: what is seen of the rows, and where; edits: points at
    which that changed, ascending; turning: how keys turn, once some were moved. last_edit: what was asked
    last and the frontier then; started: from which blocks it started, and with how many rows."""

    number: int
    session_id: str
    generation: int
    spec: SessionSpec
    source: SourceBinding
    layers: list[LayerState]
    open_grant: int
    producers: list[tuple[int, int]]
    step: int = -1
    step_first: int = 0
    layer: int = 0
    committed: int = 0
    snapshot_generation: int = 0
    epoch: int = 0
    position_epoch: int = 1
    positions: PositionView = UNEDITED
    edits: list[EditPoint] = field(default_factory=list)
    turning: RopeTable | None = None
    last_edit: tuple[object, int] | None = None
    started: tuple[bytes, int] | None = None

    def producer_at(self, position: int) -> int:
        """Of a row; most are asked of at the end."""
        for first, producer in reversed(self.producers):
            if first <= position:
                return producer
        return self.producers[0][1]

    @property
    def history(self) -> ExactnessClass:
        """What an answer over all rows that are seen is. Rows after an approximate answer are not those of an
        exact run; rows after an edit are those of the declared edited run, and of no other."""
        # Each edit has one producer; what is more than those and the first is a candidate's.
        if len(self.producers) - 1 > len(self.edits):
            return ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
        return ExactnessClass.EXACT_OVER_EDITED_HISTORY if self.edits else ExactnessClass.EXACT


def session_of(sessions: Mapping[str, Session], session_id: str, generation: int) -> Session:
    """SESSION_UNKNOWN, GENERATION_STALE."""
    session = sessions.get(session_id)
    if session is None:
        raise CoreError(Reason.SESSION_UNKNOWN, f"no session {session_id} here")
    if session.generation != generation:
        raise CoreError(
            Reason.GENERATION_STALE,
            f"session {session_id} is of generation {session.generation}, not {generation}",
            {"generation": session.generation},
        )
    return session


@dataclass(slots=True)
class SealedPart:
    """A chunk that this frame fills. `ref` None: it stays in its open slot. rows [first, last) of the frame;
    `line` is set when the chunk was open before."""

    chunk: int
    tier: int
    credit: int
    ref: SlotRef | None
    first: int
    last: int
    line: int = NO_LINE
    identity: BlockIdentity | None = None


@dataclass(slots=True)
class Append:
    """A frame's rows on their way in: [first, first + n) of one layer."""

    session: Session
    layer: int
    first: int
    k: Tensor
    v: Tensor
    sealed: list[SealedPart] = field(default_factory=list)
    open_chunk: int = NO_LINE
    open_from: int = 0
    open_ref: SlotRef | None = None

    @property
    def end(self) -> int:
        return self.first + int(self.k.shape[0])


class Rows(Protocol):
    """Where the rows of sessions lie, for who reads them."""

    @property
    def layout(self) -> ChunkLayout: ...

    @property
    def tiers(self) -> Sequence[Tier]: ...

    @property
    def directory(self) -> Directory: ...

    def ref(self, line: int) -> SlotRef:
        """The slot of a line's copy."""

    def staging_job(self, line: int) -> Callable[[StagingBuffer], None]:
        """Reads and verifies a line's copy into a buffer, when it is called."""
