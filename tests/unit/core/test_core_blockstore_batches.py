"""Blocks stored many at a time by machine code are what they are when stored one by one: the same outcomes,
the same directory to the last cell, the same slots and credits, whatever stands in the way."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.reservation import Reservation
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.credits import slots as slots_of
from kvtier_core.directory import NO_LINE
from kvtier_core.directory.compiled import steps
from kvtier_core.errors import CoreError
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.slots import SlotTable

LAYOUT = ChunkLayout(1, 4, 8)
SPACES = (b"a" * 32, b"b" * 32)
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(48)]
# Keys whose hashes fall into one shard's first places, so that entries probe and shards grow.
CROWDED = [i.to_bytes(4, "little") + bytes(4) + bytes([i]) * 24 for i in range(48)]


class Twin:
    """One store, and what a sequence of calls makes of it."""

    def __init__(self, compiled: bool, slots: int, capacity: int, kept: int | None) -> None:
        self.now = 0.0
        # Few segments of many slots: each is a descriptor.
        options = ArenaOptions(segment_bytes=max(8, slots // 32) * 4096)
        self.ram = CpuTier("ram", LAYOUT, slots, clock=lambda: self.now, options=options)
        self.store = BlockStore([self.ram], lambda: self.now, capacity=capacity, compiled=compiled)
        if kept is not None:
            self.store.writes._kept_limit = kept
        self.open: list[Reservation] = []

    def reserve(self, keys: list[bytes], space: int, droppable: bool, rows: int, cost: float) -> list[Any]:
        try:
            scope = self.store.reserve(
                keys,
                namespace=SPACES[space],
                deadline=self.now + 10,
                droppable=droppable,
                rows=rows,
                cost=cost,
            )
        except CoreError as error:
            return [error.reason]
        self.open.append(scope)
        return [scope.outcome(index) for index in range(len(scope))]

    def fill(self, at: int) -> None:
        scope = self.open[at % len(self.open)]
        for index, key in enumerate(scope.keys):
            target = scope.landing(index)
            if target is not None:
                target[:] = (key * (len(target) // 32 + 1))[: len(target)]

    def publish(self, at: int, stated: int | None) -> list[Stored]:
        """stated: None, or which block's checksum is stated wrongly (beyond the end: none is)."""
        self.fill(at)
        scope = self.open.pop(at % len(self.open))
        sums = None
        if stated is not None:
            sums = [self.seal(key) + (index == stated) for index, key in enumerate(scope.keys)]
        made = scope.publish(sums)
        scope.close()
        return made

    def seal(self, key: bytes) -> int:
        size = LAYOUT.payload_bytes
        return self.store.writes.digests([memoryview((key * (size // 32 + 1))[:size])])[0]

    def close(self, at: int) -> None:
        self.open.pop(at % len(self.open)).close()

    def delete(self, keys: list[bytes]) -> list[str]:
        orders = self.store.delete(keys)
        self.store.pump()
        return [order.state.name for order in orders]

    def late(self) -> None:
        self.now += 20
        self.store.pump()

    def state(self) -> dict[str, Any]:
        """Every number there is, in an order that says who comes next."""
        directory, table = self.store.directory, self.ram.slots
        lines = directory._lines
        found: dict[str, Any] = {
            name: column.array[: lines.used].tolist()
            for name in lines.__dict__
            if hasattr(column := getattr(lines, name), "array") and name != "key"
        }
        copies = directory.replicas.tiers[0]
        for name in copies.__slots__:
            cells = getattr(copies, name).cells
            found[f"copy.{name}"] = [cells[line] for line in range(lines.used)]
        found |= {
            "keys": [lines.key.raw[32 * line : 32 * line + 32] for line in range(lines.used)],
            "found": [directory.locate(key) for key in (*KEYS, *CROWDED)],
            "numbers": (lines.used, lines.live, lines.free, directory._issued, directory.kept),
            "generation": directory.directory_generation,
            "counts": list(directory.replicas.counts),
            "resident": dict(directory.resident),
            "entries": directory._index._entries[:4096].tolist(),
            "slots": (table._state.tolist(), table._generation.tolist(), table.used),
            "free": {space: self.ram.arena.free_slots(space) for space in SPACES},
            "credits": {str(key.label): use for key, use in self.store.ledger.use().items()},
            "open": self.store.writes.open_blocks,
        }
        return found


keys_of = st.lists(st.sampled_from(KEYS + CROWDED), min_size=1, max_size=20)
calls = st.one_of(
    st.tuples(
        st.just("reserve"),
        keys_of,
        st.integers(0, 1),
        st.booleans(),
        st.sampled_from((0, 7, (1 << 31) - 1, 1 << 31, -1)),
        st.sampled_from((0.0, 0.1, 1e9)),
    ),
    st.tuples(st.just("publish"), st.integers(0, 7), st.none() | st.integers(0, 24)),
    st.tuples(st.just("close"), st.integers(0, 7)),
    st.tuples(st.just("delete"), keys_of),
    st.tuples(st.just("late")),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(calls, max_size=24),
    st.sampled_from((24, 64)),
    st.sampled_from((16, 256)),
    st.none() | st.integers(0, 20),
)
def test_a_batch_does_what_its_blocks_one_by_one_do(
    sequence: list[tuple[Any, ...]], slots: int, capacity: int, kept: int | None
) -> None:
    many, plain = (Twin(compiled, slots, capacity, kept) for compiled in (True, False))
    for name, *arguments in sequence:
        if name in ("publish", "close") and not plain.open:
            continue
        results = [getattr(twin, name)(*arguments) for twin in (many, plain)]
        assert results[0] == results[1], name
        assert many.state() == plain.state(), name
        many.store.check()
    for twin in (many, plain):
        while twin.open:
            twin.close(0)
        twin.store.check()
    assert many.state() == plain.state()


def test_machine_code_takes_a_whole_batch() -> None:
    """Or the tests above compare the plain way with itself."""
    assert steps() is not None
    twin = Twin(True, 64, 256, None)

    def nobody(*_: object) -> int:
        raise AssertionError("one by one")

    twin.reserve(KEYS[:20], 0, True, 1, 0.0)
    twin.publish(0, None)
    assert set(twin.delete(KEYS[:20])) == {"DONE"}
    # Shards and columns have grown by now.
    twin.store.directory.begin_store = nobody  # type: ignore[method-assign]
    twin.store.directory.publish_store = nobody  # type: ignore[method-assign]
    assert twin.reserve(KEYS[:16], 0, False, 1, 0.0) == [None] * 16
    assert {each.outcome for each in twin.publish(0, None)} == {PutOutcome.STORED}


@pytest.mark.parametrize("done", [0, 1], ids=["at the first block", "behind some"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_what_ends_a_batch_halfway_leaves_nothing(compiled: bool, done: int) -> None:
    twin = Twin(compiled, 64, 256, None)
    twin.reserve(KEYS[:5], 0, True, 0, 0.0)
    twin.publish(0, None)
    index = twin.store.directory._index
    make_room, left = index._make_room, done

    def no_memory(shard: int, count: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        make_room(shard, count)

    index._make_room = no_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        # These share a shard, which must grow for the 13th.
        twin.reserve(CROWDED[:40], 0, True, 0, 0.0)
    index._make_room = make_room  # type: ignore[method-assign]
    assert (twin.ram.slots.used, twin.store.writes.open_blocks, len(twin.store.directory)) == (5, 0, 5)
    twin.store.check()
    assert twin.store.ledger.resident(slots_of(0)) == 5
    assert twin.reserve(CROWDED[:40], 0, True, 0, 0.0) == [None] * 40


def test_a_batch_beyond_the_directory_is_refused_where_it_ends() -> None:
    twin = Twin(True, 64, 1, None)
    lines = twin.store.directory.capacity
    keys = [hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(lines)]
    twin.store.directory.restore_blocks(
        np.frombuffer(b"".join(keys[30:]), dtype=np.uint8).reshape(-1, 32),
        tier=0,
        slots=np.zeros(lines - 30, dtype=np.int64),
        slot_generations=np.zeros(lines - 30, dtype=np.int64),
    )
    held = twin.reserve([*keys[:30], *KEYS[:10]], 0, True, 0, 0.0)
    assert [each is None for each in held] == [index < 30 for index in range(40)]
    assert {each.outcome for each in held[30:]} == {PutOutcome.REFUSED}
    assert twin.ram.slots.used == 30


def test_a_slot_table_gives_many_as_it_gives_one_by_one() -> None:
    one, many = (CpuTier("ram", LAYOUT, 40, options=ArenaOptions(segment_bytes=8 * 4096)) for _ in range(2))
    for space in (*SPACES, SPACES[0]):
        expected = [one.slots.begin(space) for _ in range(10)]
        assert many.slots.begin_many(space, 10) == expected
    # A namespace has 16 slots of each two segments; the fifth segment is the last.
    assert len(many.slots.begin_many(SPACES[1], 99)) == 6
    assert (one.slots.used, many.slots.used) == (30, 36)


def test_plain_tables_give_as_many_as_there_are() -> None:
    table = SlotTable(3)
    assert len(table.begin_many(b"", 5)) == 3 == table.used


def test_lookups_of_many_keys_find_what_single_ones_do() -> None:
    twin = Twin(True, 64, 256, None)
    twin.reserve(KEYS[:30], 0, True, 0, 0.0)
    twin.publish(0, None)
    batches = twin.store.writes._batches
    assert batches is not None
    asked = [*KEYS[20:40], *CROWDED[:5]]
    locate = twin.store.directory.locate
    assert batches.locate(asked) == [locate(key) for key in asked]
    assert batches.locate(asked)[10:] == [NO_LINE] * 15
    assert np.unique(batches.locate(KEYS[:30])).size == 30


@pytest.mark.parametrize("count", [2100])
def test_a_call_that_lets_other_threads_run_does_the_same(count: int) -> None:
    keys = [hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(count)]
    twins = [Twin(compiled, count, 4096, None) for compiled in (True, False)]
    for twin in twins:
        twin.reserve(keys, 0, True, 0, 0.0)
        twin.publish(0, None)
    assert twins[0].state() == twins[1].state()
