"""Host memory of one cache: sealed segments, each of one tenancy namespace, that clients may map read-only.

Why it exists: a client that maps K/V must never see another tenant's bytes nor write ours, and a copy that
is not made costs nothing. A namespace's arena is a list of segments of equal size: a sealed memfd cannot
give single pages back, so the segment is what passes from one namespace to another, and always as a new,
zeroed memfd. It must not know blocks, identities or attention.
"""

from __future__ import annotations

import errno
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.hostmemory import HUGE_PAGE, HostMemory
from kvtier_core.tiers.slots import SlotTable

SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 128
HEIR_PATIENCE = 256


class HugePages(StrEnum):
    """OFF; TRANSPARENT: asked for, the kernel decides; EXPLICIT: reserved ones, else as TRANSPARENT."""

    OFF = "off"
    TRANSPARENT = "transparent"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """segment_bytes: at least this much of one namespace's memory is handed out at a time (None: 64 MiB, or
    1/128 of the arena). commit: take all pages of a segment when it is claimed, so that a machine without
    memory refuses then. numa_node: that of the device that reads the arena; None leaves it to the
    kernel."""

    segment_bytes: int | None = None
    huge_pages: HugePages = HugePages.TRANSPARENT
    numa_node: int | None = None
    commit: bool = False


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """What a client needs to map a segment: send `descriptor` over a socket; it can only be read.
    `generation` grows each time the segment passes to another namespace."""

    namespace: bytes
    segment: int
    generation: int
    descriptor: int
    length: int
    seals: str


@dataclass(frozen=True, slots=True)
class SharedSlot:
    """Where a published slot's payload lies in a segment: bytes [offset, offset + length)."""

    segment: SharedSegment
    offset: int
    length: int
    slot_generation: int


@dataclass(slots=True)
class _Segment:
    generation: int = 0
    namespace: bytes | None = None
    used: int = 0
    memory: mmap.mmap | None = None
    descriptor: int = -1
    seals: str = ""


@dataclass(slots=True)
class _Arena:
    free: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)


class Arena:
    """`slots` slots of `stride` bytes over segments. `on_map(segment)` is told when a segment has new memory.

    The caller holds the metadata lock."""

    def __init__(
        self,
        name: str,
        slots: int,
        stride: int,
        host: HostMemory,
        options: ArenaOptions,
        on_map: Callable[[int], None],
    ) -> None:
        self.name = name
        self.slots = slots
        self.stride = stride
        self.probes: dict[str, str] = {"numa_nodes": host.nodes()}
        self._host = host
        self._options = options
        self._on_map = on_map
        wanted = options.segment_bytes or max(SEGMENT_BYTES, -(-slots * stride // MAX_SEGMENTS))
        self.segment_slots = max(1, min(max(1, slots), wanted // stride))
        count = -(-slots // self.segment_slots)
        self._segments = [_Segment() for _ in range(count)]
        # Of one that is dropped without a close; its maps go with it by themselves.
        weakref.finalize(self, _close_descriptors, host, self._segments).atexit = False
        self._arenas: dict[bytes, _Arena] = {}
        self._unclaimed = list(range(count - 1, -1, -1))
        self._retired: int | None = None
        self._retired_free: list[int] = []
        self._promised, self._heir, self._patience = -1, b"", 0

    @property
    def namespaces(self) -> int:
        return len(self._arenas)

    def free_in(self, namespace: bytes) -> int:
        """Slots that `namespace` can still take: its own free ones and those of segments without an owner or
        without a used slot."""
        own = self._arenas.get(namespace)
        idle = sum(
            self._size(index)
            for index, segment in enumerate(self._segments)
            if segment.namespace != namespace
            and not segment.used
            and not self._is_kept_from(index, namespace)
        )
        return (len(own.free) if own else 0) + idle

    def free_slots(self, namespace: bytes) -> tuple[int, ...]:
        """Slots of the namespace's own memory that are free, and may hold what their last owner left."""
        arena = self._arenas.get(namespace)
        return tuple(arena.free) if arena else ()

    def held_by_others(self, namespace: bytes) -> dict[int, int]:
        """Used slots by segment, of segments that belong to another namespace and are not idle."""
        return {
            index: segment.used
            for index, segment in enumerate(self._segments)
            if segment.used and segment.namespace != namespace
        }

    def retire(self, segment: int, heir: bytes) -> None:
        """Its owner gets no more slots of it; when the last that is taken comes back, it is kept for `heir`,
        until others have asked for it in vain HEIR_PATIENCE times. One at a time."""
        owner = self._segments[segment].namespace
        if owner is None or self._retired is not None:
            return
        arena = self._arenas[owner]
        self._retired_free = [slot for slot in arena.free if slot // self.segment_slots == segment]
        arena.free = [slot for slot in arena.free if slot // self.segment_slots != segment]
        self._retired = segment
        self._promised, self._heir, self._patience = segment, heir, HEIR_PATIENCE

    @property
    def retiring(self) -> int | None:
        """The segment that is being emptied for another; its owner has it until then."""
        return self._retired

    def keep(self) -> None:
        """The retired segment stays its owner's after all, for what is left there cannot go."""
        if self._retired is None:
            return
        owner = self._segments[self._retired].namespace
        assert owner is not None
        self._arenas[owner].free += self._retired_free
        self._retired, self._retired_free, self._promised = None, [], -1

    def _is_kept_from(self, segment: int, namespace: bytes) -> bool:
        return segment == self._promised and namespace != self._heir and self._patience > 0

    def _unclaimed_for(self, namespace: bytes) -> int | None:
        for at in range(len(self._unclaimed) - 1, -1, -1):
            if self._is_kept_from(self._unclaimed[at], namespace):
                self._patience -= 1
                continue
            if self._unclaimed[at] == self._promised:
                self._promised = -1
            return self._unclaimed.pop(at)
        return None

    def take(self, namespace: bytes) -> int:
        """A slot in memory of `namespace`. NO_DESTINATION_CAPACITY: no free slot and no idle segment."""
        arena = self._arenas.get(namespace)
        if arena is None or not arena.free:
            arena = self._claim(namespace)
        slot = arena.free.pop()
        self._segments[slot // self.segment_slots].used += 1
        return slot

    def take_many(self, namespace: bytes, count: int) -> list[int]:
        """As many of `count` slots as there are now, in the order in which `take` gives them."""
        taken: list[int] = []
        while len(taken) < count:
            arena = self._arenas.get(namespace)
            if arena is None or not arena.free:
                try:
                    arena = self._claim(namespace)
                except CoreError:
                    break
            free, wanted = arena.free, count - len(taken)
            some = free[: -wanted - 1 : -1]
            del free[-len(some) :]
            for segment, mine in groupby(some, self._segment_of):
                self._segments[segment].used += len(tuple(mine))
            taken += some
        return taken

    def _segment_of(self, slot: int) -> int:
        return slot // self.segment_slots

    def give(self, slot: int) -> None:
        """Returns a slot to its namespace."""
        segment = self._segments[slot // self.segment_slots]
        segment.used -= 1
        index = slot // self.segment_slots
        if index == self._retired:
            self._retired_free.append(slot)
            if not segment.used:
                self._retired, self._retired_free = None, []
                self._disown(index)
                self._unclaimed.append(index)
        elif segment.namespace is not None:
            self._arenas[segment.namespace].free.append(slot)

    def memory(self, segment: int) -> mmap.mmap:
        found = self._segments[segment].memory
        if found is None:
            raise CoreError(Reason.NOT_VISIBLE, f"segment {segment} of {self.name} has no memory")
        return found

    def shared(self, segment: int) -> SharedSegment:
        """A segment as clients map it. NOT_VISIBLE when it belongs to nobody."""
        entry = self._segments[segment]
        if entry.namespace is None or entry.descriptor < 0:
            raise CoreError(Reason.NOT_VISIBLE, f"segment {segment} of {self.name} belongs to no namespace")
        return SharedSegment(
            namespace=entry.namespace,
            segment=segment,
            generation=entry.generation,
            descriptor=entry.descriptor,
            length=self._bytes(segment),
            seals=entry.seals,
        )

    def segments_of(self, namespace: bytes) -> tuple[SharedSegment, ...]:
        arena = self._arenas.get(namespace)
        return tuple(self.shared(index) for index in (arena.segments if arena else ()))

    def close(self) -> None:
        """Drops descriptors and maps; what still views a map keeps its memory, and nobody else gets it."""
        for segment in self._segments:
            self._drop(segment)
        self._arenas.clear()
        self._unclaimed.clear()

    def _claim(self, namespace: bytes) -> _Arena:
        found = self._unclaimed_for(namespace)
        index = self._idle(namespace) if found is None else found
        segment = self._segments[index]
        try:
            self._map(index)
        except OSError as error:
            self._unclaimed.append(index)
            code = errno.errorcode.get(error.errno or 0, "unknown")
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"arena {self.name}: {self._bytes(index)} bytes of host memory cannot be had: {code}",
                {"bytes": self._bytes(index), "errno": code},
            ) from error
        segment.namespace = namespace
        arena = self._arenas.setdefault(namespace, _Arena())
        arena.segments.append(index)
        first = index * self.segment_slots
        arena.free.extend(range(first + self._size(index) - 1, first - 1, -1))
        return arena

    def _idle(self, namespace: bytes) -> int:
        """Takes a segment without a used slot from the namespace that has it."""
        for index, segment in enumerate(self._segments):
            owner = segment.namespace
            if owner is None or owner == namespace or segment.used:
                continue
            self._disown(index)
            return index
        used = sum(segment.used for segment in self._segments)
        raise CoreError(
            Reason.NO_DESTINATION_CAPACITY,
            f"arena {self.name}: {used} of {self.slots} slots are taken and no segment is idle",
            {
                "capacity_slots": self.slots,
                "used_slots": used,
                "segment_slots": self.segment_slots,
                "namespaces": len(self._arenas),
            },
        )

    def _disown(self, index: int) -> None:
        """Takes a segment without a used slot from whoever has it."""
        segment = self._segments[index]
        assert segment.namespace is not None
        arena = self._arenas[segment.namespace]
        arena.segments.remove(index)
        arena.free = [slot for slot in arena.free if slot // self.segment_slots != index]
        if not arena.segments:
            del self._arenas[segment.namespace]
        self._drop(segment)

    def _map(self, index: int) -> None:
        segment, size = self._segments[index], self._bytes(index)
        fd, memory = self._create(size)
        try:
            if self._options.numa_node is not None:
                self._bind(memory, self._options.numa_node)
            if self._options.commit:
                self._host.commit(fd, size)
            # The writable map exists already, which is why it stays one under the seal against writers to
            # come.
            segment.seals = self._host.seal(fd)
            segment.descriptor = self._host.readonly(fd)
        except OSError:
            memory.close()
            raise
        finally:
            self._host.close(fd)
        self.probes["seals"] = segment.seals
        segment.memory = memory
        segment.generation += 1
        self._on_map(index)

    def _create(self, size: int) -> tuple[int, mmap.mmap]:
        name = f"kvtier-{self.name}"[:200]
        refused = ""
        if self._options.huge_pages is HugePages.EXPLICIT:
            try:
                fd = self._host.create(name, size, huge=True)
                try:
                    memory = self._host.map(fd, size)
                except OSError:
                    self._host.close(fd)
                    raise
            except OSError as error:
                refused = f" (explicit refused: {errno.errorcode.get(error.errno or 0, 'unknown')})"
            else:
                self.probes["huge_pages"] = "explicit"
                return fd, memory
        fd = self._host.create(name, size, huge=False)
        try:
            memory = self._host.map(fd, size)
        except OSError:
            self._host.close(fd)
            raise
        state = "off"
        if self._options.huge_pages is not HugePages.OFF:
            try:
                state = self._host.advise_huge(memory)
            except OSError as error:
                state = f"none ({errno.errorcode.get(error.errno or 0, 'unknown')})"
        self.probes["huge_pages"] = state + refused
        return fd, memory

    def _bind(self, memory: mmap.mmap, node: int) -> None:
        try:
            self._host.bind(memory, node)
        except OSError as error:
            self.probes["numa"] = f"node {node} refused: {errno.errorcode.get(error.errno or 0, 'unknown')}"
        else:
            self.probes["numa"] = f"node {node} preferred"

    def _drop(self, segment: _Segment) -> None:
        if segment.descriptor >= 0:
            self._host.close(segment.descriptor)
        segment.descriptor, segment.memory, segment.namespace = -1, None, None

    def _size(self, index: int) -> int:
        return min(self.segment_slots, self.slots - index * self.segment_slots)

    def _bytes(self, index: int) -> int:
        size = self._size(index) * self.stride
        if self._options.huge_pages is HugePages.EXPLICIT:
            size = -(-size // HUGE_PAGE) * HUGE_PAGE
        return size


def _close_descriptors(host: HostMemory, segments: Sequence[_Segment]) -> None:
    for segment in segments:
        if segment.descriptor >= 0:
            host.close(segment.descriptor)
            segment.descriptor = -1


class ArenaSlots(SlotTable):
    """A slot table whose free slots are the arena's, namespace by namespace."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena.slots)
        self.arena = arena
        self._free.clear()
        self._taken = 0

    @property
    def used(self) -> int:
        return self._taken

    def _take(self, namespace: bytes) -> int:
        slot = self.arena.take(namespace)
        self._taken += 1
        return slot

    def take_many(self, namespace: bytes, count: int) -> list[int]:
        taken = self.arena.take_many(namespace, count)
        self._taken += len(taken)
        return taken

    def _give(self, slot: int) -> None:
        self._taken -= 1
        self.arena.give(slot)
