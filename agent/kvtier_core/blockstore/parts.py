"""What the parts of a block store share: one lock, one directory, the tiers and who owns which namespace.

Why it exists: put, find, fetch, demote and delete are separate rooms over the same machines, and each step of
metadata happens under the one lock. It must not know calls or requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_core.transactions.moves import Binding
from kvtier_core.transactions.surroundings import QuietState

MAX_NAMESPACES = 1 << 16


class Namespaces:
    """Digests of tenancy namespaces (32 bytes) by index. An index is never given to another digest."""

    def __init__(self) -> None:
        self._index: dict[bytes, int] = {}
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._digests)

    def index(self, digest: bytes) -> int:
        """The namespace's index, issued at its first use. BAD_ARGUMENT, QUEUE_FULL."""
        found = self._index.get(digest)
        if found is not None:
            return found
        if len(digest) != 32:
            raise CoreError(Reason.BAD_ARGUMENT, f"a namespace digest has 32 bytes, not {len(digest)}")
        if len(self._digests) >= MAX_NAMESPACES:
            raise CoreError(Reason.QUEUE_FULL, f"a cache holds {MAX_NAMESPACES} namespaces at most")
        self._index[digest] = len(self._digests)
        self._digests.append(digest)
        return self._index[digest]

    def known(self, digest: bytes) -> int | None:
        return self._index.get(digest)

    def digest(self, index: int) -> bytes:
        return self._digests[index] if 0 <= index < len(self._digests) else b""


@dataclass(slots=True)
class Parts:
    """lock: held for each step of metadata, never while bytes move. clock: monotonic seconds. memory: indexes
    of tiers with host memory, fastest first; storage: the others that are homes, fastest first. home: where
    puts and fetches land. wake: called when there is something to do for whoever moves the store on; must not
    block. waiting: somebody waits for copies to be let go. tick: coarse clock of uses, grows with each
    call."""

    lock: threading.RLock
    clock: Callable[[], float]
    directory: Directory
    tiers: Sequence[Tier]
    memory: tuple[int, ...]
    storage: tuple[int, ...]
    home: int
    durable: bool = False
    wake: Callable[[], None] = lambda: None
    waiting: bool = False
    namespaces: Namespaces = field(default_factory=Namespaces)
    tick: int = 0

    @property
    def block_bytes(self) -> int:
        return self.tiers[self.home].layout.payload_bytes

    def next_tick(self) -> int:
        self.tick = (self.tick + 1) & 0xFFFFFFFF
        return self.tick

    def identity_of(self, line: int, replica_generation: int) -> BlockIdentity:
        """What a copy of the line's block must be, at that replica generation."""
        directory = self.directory
        return BlockIdentity(
            chunk_digest=directory.key_of(line),
            logical=directory.logical[line],
            replica_generation=replica_generation,
            rows=int(directory.rows[line]),
            length=self.block_bytes,
            checksum=int(directory.checksum[line]),
            namespace=self.namespaces.digest(int(directory.namespace[line])),
            epoch=int(directory.epoch[line]),
            durable=self.durable,
            cost=float(directory.cost[line]),
            droppable=bool(directory.droppable[line]),
        )

    def readable(self, line: int) -> int:
        """The fastest memory tier with a copy that counts; -1 when none has one."""
        if not self.directory.readable(line):
            return -1
        for tier in self.memory:
            if self.directory.counts(line, tier):
                return tier
        return -1


class BoundBlocks(QuietState):
    """What is true of blocks: the namespace they are bound to. Requests are fenced by their tickets."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def binding(self, line: int) -> Binding:
        return Binding(namespace=int(self._directory.namespace[line]))
