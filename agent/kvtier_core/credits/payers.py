"""Who pays for a block's slots and transfers: the tenant of its namespace.

Why it exists: ten million resident blocks cannot hold a grant each, so a grant pays for a slot only until its
copy is published; from then on the slot counts as resident for the block's namespace. It must not know
transactions.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_core.credits.ledger import Ledger
from kvtier_core.credits.resources import QUEUE, Release, Resource, slots
from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason


class BlockSlots:
    """Tokens are grant ids; 0 stands for a resident slot, which needs none. A line's namespace is its
    tenant."""

    def __init__(self, ledger: Ledger, directory: Directory) -> None:
        self._ledger = ledger
        self._directory = directory

    def _tenant(self, line: int) -> int:
        return int(self._directory.namespace[line])

    def take(self, line: int, tier: int) -> int:
        """Pays for a slot of `tier`. CREDIT_PRESSURE, QUOTA_EXCEEDED."""
        return self._ledger.acquire({slots(tier): 1}, self._tenant(line)).id

    def settle(self, line: int, tier: int, source: int, token: int) -> int:
        """The copy in `tier` is published: its slot is resident. Returns what pays for the source's: 0."""
        _expect(self._ledger.settle(token, slots(tier)), f"grant {token} pays for no slot of tier {tier}")
        _expect(self._ledger.release(token), f"grant {token} is not open")
        return 0

    def give(self, line: int, tier: int, token: int) -> None:
        """A slot of `tier` is free again: paid by `token`, or resident when that is 0. Before the line is
        removed."""
        if token:
            done = self._ledger.release(token)
        else:
            done = self._ledger.vacate(slots(tier), 1, self._tenant(line))
        _expect(done, f"the slot of line {line} in tier {tier} was given back already")


class LinkPayer:
    """One queue slot for a transfer, and its bytes on each stage it passes. stages: by (source tier, tier); a
    pair that is not there costs only the queue slot."""

    def __init__(self, ledger: Ledger, stages: Mapping[tuple[int, int], tuple[Resource, ...]]) -> None:
        self._ledger = ledger
        self._stages = dict(stages)

    def route(self, stages: Mapping[tuple[int, int], tuple[Resource, ...]]) -> None:
        """Other stages, for transfers from now on."""
        self._stages = dict(stages)

    def acquire(self, source: int, tier: int, size: int, namespace: int) -> int:
        """All or nothing; returns a token. CREDIT_PRESSURE, QUEUE_FULL, QUOTA_EXCEEDED."""
        want = dict.fromkeys(self._stages.get((source, tier), ()), size)
        want[QUEUE] = 1
        return self._ledger.acquire(want, namespace).id

    def release(self, token: int) -> None:
        """Gives it back, once; a second time is counted by the ledger and does nothing."""
        self._ledger.release(token)


def _expect(done: Release, message: str) -> None:
    if done is Release.DOUBLE:
        raise CoreError(Reason.INTERNAL, message)
