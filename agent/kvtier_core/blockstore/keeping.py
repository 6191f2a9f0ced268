"""The stronger promise about a block that is there: it may not be lost any more, also after a restart.

Why it exists: what a block's first writer said lies in the header of each copy in storage. Who asks for more
is told so only when notes beside those copies are durable; until then the writer asks again. It must not know
files or who asks. The caller holds the lock of metadata.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier_core.blockstore.keptnotes import Copy, KeptNotes
from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.parts import Parts
from kvtier_core.errors import CoreError
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.reasons import refusal

_LATER = Stored(
    PutOutcome.REFUSED, reason=MoveReason.CREDIT_PRESSURE, message="that it may not be lost is being noted"
)


@dataclass(slots=True, eq=False)
class _Note:
    """left: files that have not answered. error: of one that failed."""

    left: int
    error: CoreError | None = None


class Keeping:
    """Of one store. notes: by index of the tiers that outlive the process and whose headers they add to."""

    def __init__(self, parts: Parts, notes: Mapping[int, KeptNotes]) -> None:
        self._parts = parts
        self._notes = notes
        self._open: dict[int, _Note] = {}
        self._told: deque[tuple[int, _Note, CoreError | None]] = deque()

    def keep(self, line: int) -> Stored | None:
        """From here this process gives the last copy of the block up for nothing. None once a restart will
        not either; else CREDIT_PRESSURE while that is being written down, or its copies move: ask again. Or
        why it could not be: STORAGE_UNAVAILABLE."""
        directory = self._parts.directory
        logical = int(directory.logical_of(line))
        if directory.droppable[line]:
            if self._notes and directory.write_txn[line]:
                # A copy on its way has its header already.
                return _LATER
            directory.keep(line)
            self._write(line, logical)
        self.reap()
        note = self._open.get(logical)
        if note is None:
            return None
        if note.left or note.error is None:
            return _LATER
        why = refusal(note.error)
        self._write(line, logical)
        return Stored(PutOutcome.REFUSED, reason=why.code, message=why.message)

    def _write(self, line: int, logical: int) -> None:
        copies = self._copies(line)
        if not copies:
            # What is written from now on says it by itself.
            self._open.pop(logical, None)
            return
        note = self._open[logical] = _Note(len(copies))
        for tier, copy in copies.items():
            self._notes[tier].note([copy], self._teller(logical, note))

    def _teller(self, logical: int, note: _Note) -> Callable[[CoreError | None], None]:
        def tell(error: CoreError | None) -> None:
            self._told.append((logical, note, error))
            self._parts.wake()

        return tell

    def _copies(self, line: int) -> dict[int, Copy]:
        directory = self._parts.directory
        found: dict[int, Copy] = {}
        for tier in self._notes:
            if directory.counts(line, tier):
                copy = directory.replica(line, tier)
                found[tier] = (SlotRef(copy.slot, copy.slot_generation), copy.generation)
        return found

    def reap(self) -> None:
        """Takes what files answered, and forgets blocks that have gone."""
        while self._told:
            logical, note, error = self._told.popleft()
            note.left -= 1
            note.error = note.error or error
            if not note.left and note.error is None and self._open.get(logical) is note:
                del self._open[logical]

    def pump(self) -> None:
        self.reap()
        for logical in [each for each in self._open if self._parts.directory.line_of(each) is None]:
            del self._open[logical]

    def settle(self, tier: int, kept: list[Copy]) -> None:
        """What an earlier process noted of copies that are gone is forgotten."""
        if tier in self._notes:
            self._notes[tier].settle(kept)

    def covers(self, tier: int, copy: Copy) -> bool:
        """Whether an earlier process promised that this copy's block is not lost."""
        return tier in self._notes and self._notes[tier].covers(copy)
