"""What an edit asks for and what it answers.

Why it exists: edits cross the wire and are retried, so they are data. It must not know how they are done.
Positions are those that the session's rows have now, ranges half-open. Operations: specification systems.md,
D.2.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANGES = 4096


@dataclass(frozen=True, slots=True)
class Truncate:
    """Rows at positions `to` and beyond are gone; the next row stands at `to`. anew: a change also where no
    row goes, so that frames that were sent before are refused and the next one begins a step."""

    to: int
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Rows within the ranges are seen by no query any more, for good. Nobody moves."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Rows at [first, last) stand at `to` onwards."""

    first: int
    last: int
    to: int


@dataclass(frozen=True, slots=True)
class Reposition:
    """Moves rows that are seen, in one step; positions must still ascend afterwards. None: every gap is
    closed. The next row then stands behind the last one that is seen."""

    moves: tuple[Move, ...] | None = None


Operation = Truncate | Drop | Reposition


@dataclass(frozen=True, slots=True)
class EditRequest:
    """position_epoch: of the session as the caller knows it; 0: not stated. With it, the same edit asked
    again is answered again. deadline: seconds on the engine's clock; None: none."""

    session_id: str
    generation: int
    operation: Operation
    position_epoch: int = 0
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class EditAnswer:
    """changed: False when the operation asked for nothing, and then nothing changed. position_epoch: of the
    session from now on. next_position: where its next row stands. rows: rows that a query sees. chunks: that
    the session holds, over all layers."""

    changed: bool
    position_epoch: int
    next_position: int
    rows: int
    chunks: int


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """child_id empty: the engine names it. position_epoch and deadline as of an edit."""

    session_id: str
    generation: int
    child_id: str = ""
    position_epoch: int = 0
    deadline: float | None = None
