"""The block store of one cache on one node: put, find, pin, fetch, delete, explain.

Why it exists: the face of the machines below for everyone who brings or wants keyed blocks. Metadata steps
are short and under one lock; bytes move outside of it. It must not know gRPC, clocks of its own or
Kubernetes.

Nothing here waits but `put` and `wait_for`, which say until when. `pump` is what moves everything on: a
driver thread calls it whenever `wake` was called, a test calls it by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier_core.admission import AdmissionTerms
from kvtier_core.blockstore.admitting import READ, UNLIMITED, WRITE, set_limits, totals
from kvtier_core.blockstore.keeping import Keeping
from kvtier_core.blockstore.keptnotes import KeptNotes
from kvtier_core.blockstore.lasting import Lasting, WriteThrough
from kvtier_core.blockstore.outcomes import Explanation, Found, PutOutcome, ReplicaFacts, Stored, compared
from kvtier_core.blockstore.parts import BoundBlocks, Parts
from kvtier_core.blockstore.pinned import Keys, MemoryPins, Pinned
from kvtier_core.blockstore.reads import Fetch, Reads, leading
from kvtier_core.blockstore.reclaim import Reclaim
from kvtier_core.blockstore.recovery import Recovers, restore
from kvtier_core.blockstore.reservation import Reservation
from kvtier_core.blockstore.writes import Writes
from kvtier_core.checksums import checksum
from kvtier_core.credits import PINNED, STAGING, BlockSlots, Ledger, Limit, LinkPayer, slots
from kvtier_core.credits.resources import QUEUE, Resource
from kvtier_core.directory import NO_LINE, NO_PRODUCER, ChunkState, Directory, ReplicaState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_core.tiers.transfer import move_bytes
from kvtier_core.transactions import MoveReason, MoveRefused, Transactions
from kvtier_core.transactions.deletion import Deletion, DeletionJournal, Deletions, JournalEntry
from kvtier_core.transactions.erasing import TierEraser
from kvtier_core.transactions.eviction import Watermarks
from kvtier_core.transactions.flights import Asker
from kvtier_core.transactions.transfers import Settled

# The journal of deletions is cut when none is open and it is larger than this.
JOURNAL_BYTES = 1 << 20
# A segment of storage is this share of it, as of memory.
KEPT_SEGMENTS = 128


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
        policy: str = "greedyDual",
        watermarks: Watermarks | None = None,
        journal: DeletionJournal | None = None,
        notes: Mapping[int, KeptNotes] | None = None,
        homes: Sequence[int] | None = None,
        spare: int = 0,
        compiled: bool = True,
    ) -> None:
        """wake: called from tiers' threads when `pump` has work; must not block. policy: greedyDual, lru or
        arc. watermarks: shares of a tier above which room is made, and down to which. journal: of deletions;
        None keeps them in memory, for tiers that do not outlive the process. notes: by tier, where a stronger
        promise about a block outlives the process; without, it ends with it. homes: indexes of tiers where
        blocks may lie; None: all. Device memory that the CPU cannot read holds none. spare: slots of memory
        that blocks which may not be lost leave to others, where no storage takes them; see `kept_limit`.
        compiled: False stores block by block even where machine code could take many."""
        if directory is None:
            directory = Directory(tiers=max(1, len(tiers)), capacity=capacity)
        self.directory = directory
        self.ledger = ledger or _own_ledger(tiers, max_flights)
        may_hold = range(len(tiers)) if homes is None else sorted(homes)
        readable = [index for index in may_hold if tiers[index].capability.kernel_readable]
        memory = tuple(index for index in readable if tiers[index].host_memory)
        storage = tuple(index for index in may_hold if index not in readable)
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
            durable=bool(storage) and all(tiers[index].persistent for index in storage),
            wake=wake or (lambda: None),
        )
        self._links = LinkPayer(self.ledger, {})
        self._max_tickets = max_tickets
        self._undeclared: dict[Resource, int] = {}
        self.moves = Transactions(
            self.directory,
            None,
            tiers,
            self.parts.identity_of,
            self._published,
            purse=BlockSlots(self.ledger, self.directory),
            link=self._links,
            live=BoundBlocks(self.directory),
            wake=wake,
        )
        self.reclaim = Reclaim(
            self.parts, self.moves, self._reap, self._free, policy=policy, watermarks=watermarks
        )
        make_room, make_memory = self.reclaim.make_room, self.reclaim.make_memory
        # Only this policy learns from what is stored; a call for each block would cost the others a tenth.
        told = self._stored if policy == "arc" else None
        self.kept_limit = kept_limit(tiers, memory, storage, spare)
        self.keeping = Keeping(self.parts, notes or {})
        self.writes = Writes(
            self.parts,
            self.ledger,
            self.reclaim.make_room_for,
            make_memory,
            told,
            self.keeping.keep,
            kept_limit=self.kept_limit,
            compiled=compiled,
        )
        self.reads = Reads(
            self.parts, self.moves, make_room, make_memory, max_flights=max_flights, max_tickets=max_tickets
        )
        self.through = WriteThrough(self.parts, self.moves, make_room, self._free)
        self.deletions = Deletions(
            self.directory,
            self.moves,
            TierEraser(tiers),
            journal or MemoryJournal(),
            [tier.name for tier in tiers],
            flights=self.reads.flights,
            wake=wake,
        )
        self.writes.forbidden = self.deletions.keys
        self.directory.keep_resident(self.parts.home)
        self.pins = MemoryPins(self.parts)
        self._recover(journal)

    def _free(self, tier: int) -> int:
        return self.ledger.offered(slots(tier))

    def _stored(self, line: int) -> None:
        self.reclaim.evictor.stored(line, self.parts.home)

    def _published(self, line: int, identity: BlockIdentity) -> None:
        for move in self.moves.moves_of(identity.logical):
            if move.identity is identity:
                self.reclaim.evictor.stored(line, move.tier)

    _journal: Remembers | None = None

    def _recover(self, journal: DeletionJournal | None) -> None:
        """Takes over what storage kept of earlier processes, and goes on with the deletions they began: their
        blocks are found by nobody from here."""
        resident: dict[tuple[int, Resource], int] = {}
        for index in self.parts.storage:
            tier = self.parts.tiers[index]
            if isinstance(tier, Recovers):
                for namespace, count in restore(self.parts, index, tier.recovered(), self.keeping).items():
                    resident[(namespace, slots(index))] = count
        if resident:
            self.ledger.rebuild(resident)
        if isinstance(journal, Remembers):
            self._journal = journal
            if not self.deletions.resume(journal.entries, self.parts.namespaces.index):
                journal.trim(0)

    def admit(self, terms: AdmissionTerms) -> None:
        """What transfers may take from now on, all of it or nothing: CREDIT_PRESSURE while more is in flight,
        ADMISSION_PINNED when the tiers pin more, STAGING_TOO_SMALL when not one block could be read."""
        with self.parts.lock:
            self._undeclared = self._undeclared or totals(self.ledger)
            set_limits(self.ledger, self._links, self.parts, terms, self._undeclared)
            self.reads.by(terms.policy)
            self.reads.flights.bound(terms.queue or self._max_tickets)

    # Storing.

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        deadline: float,
        rows: int = 0,
        cost: float = 0.0,
        droppable: bool = False,
        producer: int = NO_PRODUCER,
    ) -> Reservation:
        """Slots that only the writer sees, one for each key that is not stored yet. rows: per block. cost:
        seconds of recomputing one, for eviction. droppable: the last copy may make room, since its loss is
        only a recomputation. QUEUE_FULL, DEADLINE; TOMBSTONED while the namespace is being deleted; all else
        is told block by block."""
        # One step: a deletion that begins between the two would not know of the blocks.
        with self.parts.lock:
            if self.deletions.refuses(namespace):
                raise MoveRefused(MoveReason.TOMBSTONED, "the namespace is being deleted")
            return self.writes.reserve(
                keys,
                namespace=namespace,
                rows=rows,
                cost=cost,
                producer=producer,
                droppable=droppable,
                deadline=deadline,
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
        droppable: bool = False,
    ) -> list[Stored]:
        """Reserves, copies once, publishes. A key that exists with other bytes is REFUSED with
        IDENTITY_MISMATCH: its identity leaves something out. BAD_ARGUMENT unless each key has one payload of
        the right length; nothing is stored then."""
        size = self.parts.block_bytes
        if len(payloads) != len(keys) or any(memoryview(each).nbytes != size for each in payloads):
            raise CoreError(
                Reason.BAD_ARGUMENT, f"{len(keys)} keys need as many payloads of {size} bytes each"
            )
        with self.reserve(
            keys, namespace=namespace, deadline=deadline, rows=rows, cost=cost, droppable=droppable
        ) as scope:
            for index, payload in enumerate(payloads):
                target = scope.landing(index)
                if target is not None:
                    move_bytes(target, memoryview(payload).cast("B"))
            stored = scope.publish()
        for index, each in enumerate(stored):
            if each.outcome is PutOutcome.EXISTED:
                found = checksum("xxh3", memoryview(payloads[index]).cast("B"))
                stored[index] = compared(each, found)
        return stored

    def persist(self, keys: Sequence[bytes], *, namespace: bytes, deadline: float) -> Lasting:
        """Durable copies of blocks that are stored, for a writer that waits until they are; see
        `WriteThrough.ask`. Goes on with `pump`."""
        with self.parts.lock:
            self._reap()
            scope = self.through.ask(keys, namespace, deadline)
        self.parts.wake()
        return scope

    def through_with(self, scope: Lasting) -> None:
        """The writer waits no more for what is not durable yet."""
        if not scope.over:
            with self.parts.lock:
                self.through.leave(scope)

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

    def pin(self, keys: Keys, namespace: bytes, deadline: float) -> Pinned:
        """What of the leading blocks is in memory, pinned in the step that found it."""
        return self.pins.pin(keys, namespace, deadline)

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

    # Deleting.

    def delete(self, keys: Sequence[bytes]) -> list[Deletion]:
        """Deletes blocks: from here no lookup finds them, and nothing that is on its way brings them back.
        One order for all of them (for each 1024), and those of others that have some of them already. Each
        goes on with `pump` until it is DONE: erased in every tier, durably where the tier is durable."""
        with self.parts.lock:
            self.parts.waiting = True
            return self.deletions.delete_many(keys)

    def delete_namespace(self, namespace: bytes) -> Deletion:
        """Deletes every block of a namespace, and refuses new ones until that is done."""
        with self.parts.lock:
            self.parts.waiting = True
            return self.deletions.delete_namespace(namespace, self.parts.namespaces.index(namespace))

    # Moving on.

    def pump(self) -> None:
        """Takes what tiers reported, wakes who waited for it, lets the late go, makes room. Never blocks."""
        with self.parts.lock:
            self._reap()
            now = self.parts.clock()
            for settled in self.moves.expire(now):
                self._on_settled(settled)
            self.reads.flights.expire(now)
            self.writes.expire(now)
            self.keeping.pump()
            self.through.pump(now)
            self.reads.retry()
            self.reclaim.relieve()
            ended = self.deletions.pump(now)
            for done in ended:
                for key in done.keys:
                    self.reclaim.note(key, "deleted", MoveReason.MISS, "it was deleted, in every tier")
            if ended and self._journal is not None and not self.deletions.open():
                self._journal.trim(JOURNAL_BYTES)
            self.parts.waiting = bool(
                self.reads.parked or self.moves.leaving or self.deletions.open() or len(self.through)
            )

    def _reap(self) -> None:
        self.pins.reap()
        self.reads.reap()
        for settled in self.moves.reap():
            self._on_settled(settled)

    def _on_settled(self, settled: Settled) -> None:
        if settled.lost:
            name = self.parts.tiers[settled.move.source_tier].name
            self.reclaim.note(
                settled.move.identity.chunk_digest,
                "lost",
                settled.reason,
                f"its only copy, in tier {name}, was found bad",
            )
        if not self.reads.on_settled(settled) and not self.through.on_settled(settled):
            self.reclaim.on_settled(settled)

    def next_deadline(self) -> float | None:
        """When `pump` is next worth calling though nothing was reported."""
        with self.parts.lock:
            waits = (self.reads.flights.next_deadline(), self.through.next_deadline())
            return min((due for due in waits if due is not None), default=None)

    # Looking.

    def explain(self, key: bytes) -> Explanation:
        """Why a lookup of this key hits or misses now."""
        directory = self.directory
        with self.parts.lock:
            self.pins.reap()
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
            if any(copy.state == ReplicaState.INVALID.name for copy in replicas):
                return Explanation(
                    key, "lost", MoveReason.CHECKSUM_MISMATCH, "its copies were found bad", replicas, facts
                )
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


def kept_limit(tiers: Sequence[Tier], memory: Sequence[int], storage: Sequence[int], spare: int) -> int:
    """How many blocks may be stored whose last copy may not be lost: as many as the first storage tier holds,
    less one segment, so that memory can be emptied for others at any time and copies have where to move;
    without storage, all of the home tier but `spare` slots."""
    if not storage:
        return max(0, tiers[memory[-1]].slots.capacity - spare)
    capacity = tiers[storage[0]].slots.capacity
    return capacity - max(1, capacity // KEPT_SEGMENTS)


@runtime_checkable
class Remembers(Protocol):
    """A journal that knows what earlier processes wrote into it."""

    @property
    def entries(self) -> tuple[JournalEntry, ...]: ...

    def trim(self, limit: int) -> None: ...


class MemoryJournal:
    """Deletions of blocks that a restart ends anyway."""

    def append(self, entry: JournalEntry, done: Callable[[CoreError | None], None]) -> None:
        done(None)


def _own_ledger(tiers: Sequence[Tier], queue: int) -> Ledger:
    limits = {slots(index): Limit(tier.slots.capacity) for index, tier in enumerate(tiers)}
    limits[QUEUE] = Limit(queue)
    limits.update(dict.fromkeys((PINNED, STAGING, READ, WRITE), Limit(UNLIMITED)))
    return Ledger(limits)


__all__ = ["BlockStore", "Fetch", "Pinned", "PutOutcome", "Reservation", "Stored"]
