"""What moves need to know and to charge, and cannot know themselves: injected, with plain defaults.

Why it exists: the machine is the same for a session's private rows and for shared blocks; who pays for a
slot, what binds a block and whether a request still lives differ. It must not know the machine.
"""

from __future__ import annotations

from typing import Protocol

from kvtier_core.credits import CreditLedger
from kvtier_core.directory import Directory
from kvtier_core.transactions.moves import NO_BINDING, Binding


class SlotPurse(Protocol):
    """Pays for slots. A token stands for one paid slot; 0 for none that needs one."""

    def take(self, line: int, tier: int) -> int:
        """Pays for a slot of `tier`. Raises CoreError: NO_DESTINATION_CAPACITY, QUOTA_EXCEEDED,
        CREDIT_PRESSURE."""
        ...

    def settle(self, line: int, tier: int, source: int, token: int) -> int:
        """`token` pays for the published copy in `tier` from now on; returns what pays for the copy in
        `source`."""
        ...

    def give(self, line: int, tier: int, token: int) -> None:
        """A slot of `tier` is free again."""
        ...


class LinkCredits(Protocol):
    """Pays for bytes in flight: link, queue slot, staging (specification D2, P1)."""

    def acquire(self, source: int, tier: int, size: int, namespace: int) -> int:
        """All or nothing; returns a token. Raises CoreError: CREDIT_PRESSURE, QUOTA_EXCEEDED."""
        ...

    def release(self, token: int) -> None:
        """Gives it back, once."""
        ...


class LiveState(Protocol):
    """What is true now of blocks and requests."""

    def binding(self, line: int) -> Binding: ...

    def request_generation(self, request: int) -> int: ...

    def trusted(self, line: int, tier: int) -> bool:
        """Whether the tier may hold this block's bytes (trust and tenant boundary, A.7)."""
        ...

    def seconds(self, source: int, tier: int, size: int) -> float:
        """Predicted duration of a copy, waiting included."""
        ...


class LedgerPurse:
    """Slots as grants of a ledger; the directory's column names the grant that pays for a line's copy. For
    sessions: a chunk has one copy, and two only while it moves."""

    def __init__(self, ledger: CreditLedger, directory: Directory) -> None:
        self._ledger = ledger
        self._directory = directory

    def take(self, line: int, tier: int) -> int:
        return self._ledger.acquire({tier: 1})

    def settle(self, line: int, tier: int, source: int, token: int) -> int:
        old = int(self._directory.credit[line])
        self._directory.credit[line] = token
        return old

    def give(self, line: int, tier: int, token: int) -> None:
        self._ledger.release(token)


class FreeLink:
    """Bytes in flight cost nothing."""

    def acquire(self, source: int, tier: int, size: int, namespace: int) -> int:
        return 0

    def release(self, token: int) -> None:
        return None


class QuietState:
    """Nothing is bound, every tier is trusted, copies take no time and requests do not end."""

    def binding(self, line: int) -> Binding:
        return NO_BINDING

    def request_generation(self, request: int) -> int:
        return 0

    def trusted(self, line: int, tier: int) -> bool:
        return True

    def seconds(self, source: int, tier: int, size: int) -> float:
        return 0.0
