"""A writer's scope over blocks that it is about to store, and what it holds.

Why it exists: whoever has the scope may go at any time, so what it holds must not need it. It must not know
how blocks are begun, sealed or taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from kvtier_core.blockstore.outcomes import Stored


class Ends(Protocol):
    """What a scope asks of the store's writes."""

    @property
    def abandoned(self) -> Abandoned: ...

    def body(self, slot: int) -> memoryview: ...
    def publish(self, held: Held, stated: Sequence[int] | None) -> list[Stored]: ...
    def close(self, held: Held) -> None: ...


class Abandoned(Protocol):
    def append(self, held: Held, /) -> None: ...


class Held:
    """What a reservation holds, block by block; no reference to the reservation itself, or it could never be
    collected. lines[i]: NO_LINE when block i needs no bytes. slots: (slot, generation) of those that do.
    late: its slots are quarantined until the writer is gone."""

    __slots__ = ("claim", "deadline", "ended", "keys", "late", "lines", "namespace", "slots", "waiting")

    def __init__(self, keys: tuple[bytes, ...], claim: int, deadline: float, namespace: int) -> None:
        self.keys = keys
        self.claim = claim
        self.deadline = deadline
        self.namespace = namespace
        self.lines: list[int] = []
        self.slots: list[tuple[int, int]] = []
        self.ended: list[Stored | None] = []
        self.waiting = 0
        self.late = False


class Reservation:
    """A writer's scope over some blocks, in the order of its keys. Leaving it gives back what is not
    published.

    Not for several threads at once; other reservations are independent of it."""

    __slots__ = ("_held", "_writes", "keys")

    def __init__(self, writes: Ends, keys: Sequence[bytes], held: Held) -> None:
        self._writes = writes
        self._held = held
        self.keys = keys

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._held.lines)

    def __del__(self) -> None:
        # A scope that was never left, from the collector: nothing here may take a lock.
        if self._held.waiting or self._held.late:
            self._writes.abandoned.append(self._held)

    def outcome(self, index: int) -> Stored | None:
        """How block `index` ended; None while it waits for its bytes."""
        return self._held.ended[index]

    def landing(self, index: int) -> memoryview | None:
        """Where block `index` is to be written, exactly a payload long; None when it needs no bytes. Writing
        to it after the scope ended is the writer's defect: the slot may be another's."""
        held = self._held
        return None if held.ended[index] is not None else self._writes.body(held.slots[index][0])

    def publish(self, stated: Sequence[int] | None = None) -> list[Stored]:
        """Seals every block by the XXH3-64 of what lies in its slot and makes it readable. stated: what the
        writer says the checksums are; a difference is CHECKSUM_MISMATCH and that block is not published, or
        IDENTITY_MISMATCH when other bytes of that key are there."""
        return self._writes.publish(self._held, stated)

    def close(self) -> None:
        """Gives back what is not published. A second call has no effect."""
        held = self._held
        if held.waiting or held.late:
            self._writes.close(held)
