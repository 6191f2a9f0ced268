"""The block store of one cache on one node: put, find, pin, fetch, delete, explain.

Why it exists: the face of the machines below for everyone who brings or wants keyed blocks. Metadata steps
are short and under one lock; bytes move outside of it. It must not know gRPC, clocks of its own or
Kubernetes.

Nothing here waits but `put` and `wait_for`, which say until when. `pump` is what moves everything on: a
driver thread calls it whenever `wake` was called, a test calls it by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier_core.blockstore.outcomes import Explanation, Found, PutOutcome, ReplicaFacts, Stored
from kvtier_core.blockstore.parts import BoundBlocks, Parts
from kvtier_core.blockstore.reads import Fetch, Pinned, Reads, leading
from kvtier_core.blockstore.reclaim import Reclaim
from kvtier_core.blockstore.writes import Reservation, Writes
from kvtier_core.credits import BlockSlots, Ledger, Limit, LinkPayer, slots
from kvtier_core.credits.resources import QUEUE
from kvtier_core.directory import NO_LINE, NO_PRODUCER, ChunkState, Directory, ReplicaState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.transfer import move_bytes
from kvtier_core.transactions import MoveReason, Transactions
from kvtier_core.transactions.flights import Asker


class BlockStore:
    """Shared blocks over `tiers`, fastest first. Raises CoreError and holds nothing then."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        clock: Callable[[], float],
        *,
        directory: Directory | None = None,
        ledger: Ledger | None = None,
        lock: threading.RLock | None = None,
        wake: Callable[[], None] | None = None,
        max_flights: int = 4096,
        max_tickets: int = 4096,
        capacity: int = 1 << 22,
        high: float = 0.95,
        low: float = 0.90,
    ) -> None:
        """wake: called from tiers' threads when `pump` has work; must not block. high, low: fractions of a
        tier above which room is made, and down to which."""
        self.directory = directory or Directory(tiers=max(1, len(tiers)), capacity=capacity)
        self.ledger = ledger or _own_ledger(tiers, max_flights, high, low)
        memory = tuple(
            index for index, tier in enumerate(tiers) if tier.host_memory and tier.capability.kernel_readable
        )
        storage = tuple(index for index in range(len(tiers)) if index not in memory)
        if not memory:
            raise CoreError(Reason.TIER_INCAPABLE, "a block store needs one tier with host memory")
        self.parts = Parts(
            lock=lock or threading.RLock(),
            clock=clock,
            directory=self.directory,
            tiers=tiers,
            memory=memory,
            storage=storage,
            home=memory[-1],
        )
        self.moves = Transactions(
            self.directory,
            None,
            tiers,
            self.parts.identity_of,
            lambda line, identity: None,
            purse=BlockSlots(self.ledger, self.directory),
            link=LinkPayer(self.ledger, {}),
            live=BoundBlocks(self.directory),
            wake=wake,
        )
        self.reclaim = Reclaim(self.parts, self.moves, self.ledger)
        self.writes = Writes(self.parts, self.moves, self.reclaim.make_room)
        self.reads = Reads(
            self.parts, self.moves, self.reclaim.make_room, max_flights=max_flights, max_tickets=max_tickets
        )

    # Storing.

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        deadline: float,
        rows: int = 0,
        cost: float = 0.0,
        producer: int = NO_PRODUCER,
    ) -> Reservation:
        """Slots that only the writer sees, one for each key that is not stored yet. rows: per block. cost:
        seconds of recomputing one, for eviction. QUEUE_FULL, DEADLINE; all else is told block by block."""
        return self.writes.reserve(
            keys, namespace=namespace, rows=rows, cost=cost, producer=producer, deadline=deadline
        )

    def put(
        self,
        keys: Sequence[bytes],
        payloads: Sequence[memoryview | bytes],
        *,
        namespace: bytes,
        deadline: float,
        rows: int = 0,
        cost: float = 0.0,
    ) -> list[Stored]:
        """Reserves, copies once, publishes. A key that exists with other bytes is REFUSED with
        IDENTITY_MISMATCH: its identity leaves something out."""
        with self.reserve(keys, namespace=namespace, deadline=deadline, rows=rows, cost=cost) as scope:
            for index, payload in enumerate(payloads):
                target = scope.landing(index)
                if target is not None:
                    move_bytes(target, memoryview(payload).cast("B"))
            return scope.publish()

    # Finding.

    def lookup(self, keys: NDArray[np.uint8], namespace: bytes) -> list[Found]:
        """The leading published blocks of keys [n, 32], without pinning them: they may be gone when used."""
        directory = self.directory
        with self.parts.lock:
            lines = directory.published_prefix(keys)
            owner = self.parts.namespaces.known(namespace)
            same = directory.namespace[lines] == (-2 if owner is None else owner)
            return [self._found(line) for line in lines[: leading(same)].tolist()]

    def _found(self, line: int) -> Found:
        tier = self.parts.readable(line)
        if tier < 0:
            tier = int(self.directory.tier[line])
        return Found(tier, self.directory.replica(line, tier).generation, int(self.directory.checksum[line]))

    def pin(self, keys: NDArray[np.uint8], namespace: bytes, deadline: float) -> Pinned:
        """What of the leading blocks is in memory, pinned in the step that found it."""
        return self.reads.pin(keys, namespace, deadline)

    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        deadline: float,
        priority: int = 0,
        request: int = 0,
        request_generation: int = 0,
    ) -> Fetch:
        """Brings the leading blocks into memory: one read for each, whoever else asks for it. DEADLINE,
        QUEUE_FULL."""
        asker = Asker(request, request_generation, namespace, priority, deadline)
        return self.reads.fetch(keys, asker)

    # Moving on.

    def pump(self) -> None:
        """Takes what tiers reported, wakes who waited for it, lets the late go, makes room. Never blocks."""
        with self.parts.lock:
            now = self.parts.clock()
            self.reads.pins.reap()
            for settled in self.moves.reap():
                if not self.reads.on_settled(settled):
                    self.reclaim.on_settled(settled)
            for settled in self.moves.expire(now):
                if not self.reads.on_settled(settled):
                    self.reclaim.on_settled(settled)
            self.reads.flights.expire(now)
            self.writes.expire(now)
            self.reclaim.run()

    # Looking.

    def explain(self, key: bytes) -> Explanation:
        """Why a lookup of this key hits or misses now."""
        directory = self.directory
        with self.parts.lock:
            self.reads.pins.reap()
            line = directory.locate(key)
            if line == NO_LINE:
                return self.reclaim.obituary(key)
            state = ChunkState(int(directory.state[line]))
            replicas = tuple(self._facts(line, tier) for tier in directory.replicas.held_in(line))
            facts = {
                "rows": str(directory.rows[line]),
                "epoch": str(directory.epoch[line]),
                "reuse": str(directory.reuse[line]),
                "cost_seconds": f"{float(directory.cost[line]):.6f}",
            }
            if state is ChunkState.TOMBSTONED:
                return Explanation(
                    key, "deleted", MoveReason.TOMBSTONED, "it is being deleted", replicas, facts
                )
            if directory.readable(line):
                moving = bool(directory.write_txn[line])
                what = "moving" if moving else "published"
                return Explanation(key, what, MoveReason.READY, "a lookup finds it", replicas, facts)
            return Explanation(
                key, "storing", MoveReason.WRITE_TXN_BUSY, "no copy is published yet", replicas, facts
            )

    def _facts(self, line: int, tier: int) -> ReplicaFacts:
        copy = self.directory.replica(line, tier)
        return ReplicaFacts(
            tier=self.parts.tiers[tier].name,
            state=ReplicaState(copy.state).name,
            slot=copy.slot,
            slot_generation=copy.slot_generation,
            generation=copy.generation,
            counts=self.directory.counts(line, tier),
            authority=int(self.directory.tier[line]) == tier,
            readers=copy.leases,
        )

    def check(self) -> None:
        """Invariants of directory and ledger; raises AssertionError."""
        with self.parts.lock:
            self.directory.check()
            self.ledger.check()


def _own_ledger(tiers: Sequence[Tier], queue: int, high: float, low: float) -> Ledger:
    limits = {slots(index): Limit(tier.slots.capacity, high, low) for index, tier in enumerate(tiers)}
    limits[QUEUE] = Limit(queue)
    return Ledger(limits)


__all__ = ["BlockStore", "Fetch", "Pinned", "PutOutcome", "Reservation", "Stored"]
