"""Sessions, puts, fetches, pins and deletions in any order, against a model that knows only names.

The model: a session's answers are those it gives alone, bit for bit; a block that was stored and not deleted
is found unless it may be lost, and is its bytes; a deleted one is not found; every slot is somebody's.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.pinned import Pinned
from kvtier_core.transactions import MoveReason
from tests.unit.core.blockpump import (
    LATER,
    NAMESPACE,
    delete,
    fetched,
    key_rows,
    payload,
    put,
    stored,
    until,
)
from tests.unit.core.builders import (
    BLOCK,
    CHUNK,
    LAYERS,
    SLOT,
    Driver,
    Rows,
    Unsynced,
    cpu,
    engine,
    gpu,
    keeping,
    nvme,
)

TOKENS = 4 * CHUNK
SESSIONS = 2
BLOCKS = 10
# Rows fill memory and spill; blocks are many more than it holds; flash takes all of both.
TIERS = [gpu(LAYERS * SESSIONS + 1), cpu(4), nvme(64)]

numbers = st.integers(0, BLOCKS - 1)


@cache
def answers(seed: int) -> torch.Tensor:
    """A session's outputs [layers, TOKENS, Hq, d] when it has a cache to itself."""
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder), [gpu(64)]) as built:
        return Driver.open(built, Rows.random(TOKENS, seed)).forward(TOKENS)


class SessionsAndBlocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.start()
        self.sessions: dict[int, Driver] = {}
        self.kept: set[int] = set()
        self.losable: set[int] = set()
        self.pins: list[tuple[list[int], Pinned]] = []

    def start(self) -> None:
        self.engine = self.stack.enter_context(
            engine(self.folder, TIERS, files=Unsynced(), capabilities=keeping())
        )

    # Sessions.

    @rule(seed=st.integers(0, SESSIONS - 1))
    def open(self, seed: int) -> None:
        if seed not in self.sessions:
            self.sessions[seed] = Driver.open(self.engine, Rows.random(TOKENS, seed))

    @precondition(lambda self: self.sessions)
    @rule(
        seed=st.integers(0, SESSIONS - 1),
        tokens=st.sampled_from([1, 7, CHUNK, CHUNK + 3]),
        block=st.sampled_from([5, 20, 200]),
    )
    def step(self, seed: int, tokens: int, block: int) -> None:
        driver = self.sessions.get(seed)
        if driver is None or driver.position + tokens > TOKENS:
            return
        first = driver.position
        out = driver.forward(tokens, block=block)
        assert torch.equal(out, answers(seed)[:, first : first + tokens])

    @rule(seed=st.integers(0, SESSIONS - 1))
    def close(self, seed: int) -> None:
        driver = self.sessions.pop(seed, None)
        if driver is not None:
            assert driver.close() == driver.position

    # Blocks.

    @rule(which=st.lists(numbers, min_size=1, max_size=4, unique=True), droppable=st.booleans())
    def put(self, which: list[int], droppable: bool) -> None:
        for number, each in zip(which, put(self.engine, which, droppable=droppable), strict=True):
            if each.outcome is PutOutcome.STORED:
                (self.losable if droppable else self.kept).add(number)
                (self.kept if droppable else self.losable).discard(number)
            elif each.outcome is PutOutcome.EXISTED:
                assert number in self.kept | self.losable
            else:
                # Rows or pins hold all of the memory that blocks land in.
                full = (MoveReason.NO_DESTINATION_CAPACITY, MoveReason.WOULD_EVICT_PINNED)
                assert each.outcome is PutOutcome.REFUSED and each.reason in full
                assert number not in self.kept

    @rule(which=st.lists(numbers, min_size=1, max_size=4, unique=True))
    def fetch(self, which: list[int]) -> None:
        bodies = fetched(self.engine, which)
        assert bodies == [payload(self.engine, number) for number in which[: len(bodies)]]
        assert set(which[: len(bodies)]) <= self.kept | self.losable

    @rule(which=st.lists(numbers, min_size=1, max_size=3, unique=True))
    def pin(self, which: list[int]) -> None:
        if len(self.pins) < 2:
            self.pins.append((which, self.engine.blocks.store.pin(key_rows(which), NAMESPACE, LATER)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        _, pinned = self.pins.pop(0)
        pinned.close()

    @rule(which=st.lists(numbers, min_size=1, max_size=3, unique=True))
    def delete(self, which: list[int]) -> None:
        for _, pinned in self.pins:
            pinned.close()
        self.pins.clear()
        delete(self.engine, which)
        self.kept.difference_update(which)
        self.losable.difference_update(which)
        assert stored(self.engine, which) == set()

    @rule()
    def pump(self) -> None:
        self.engine.blocks.store.pump()

    @rule()
    def restart(self) -> None:
        """Only what lies on flash is found again, and no session."""
        for _, pinned in self.pins:
            pinned.close()
        self.pins.clear()
        store = self.engine.blocks.store
        until(self.engine, lambda: not store.moves.open_moves())
        on_flash = store.parts.storage[0]
        lines = [store.directory.find(bytes(key)) for key in key_rows(range(BLOCKS))]
        kept = {
            number
            for number, line in enumerate(lines)
            if line >= 0 and store.directory.counts(line, on_flash)
        }
        self.stack.close()
        self.sessions.clear()
        self.start()
        assert stored(self.engine, range(BLOCKS)) == kept
        self.kept &= kept
        self.losable &= kept

    # Always.

    @invariant()
    def pinned_bytes_stay(self) -> None:
        for which, pinned in self.pins:
            for index in range(len(pinned)):
                assert bytes(pinned.body(index)) == payload(self.engine, which[index])

    @invariant()
    def blocks_are_where_the_model_says(self) -> None:
        found = stored(self.engine, range(BLOCKS))
        assert self.kept <= found <= self.kept | self.losable

    @invariant()
    def every_slot_is_somebodys(self) -> None:
        self.engine.blocks.store.check()
        stats = self.engine.stats()
        for tier in stats.tiers:
            size = BLOCK if tier.medium == "nvme" else SLOT
            parts = tier.bytes.rows + tier.bytes.blocks + tier.bytes.quarantined + tier.bytes.free
            assert parts == tier.capacity_bytes // size * size
        rows = sum(-(-driver.position // CHUNK) * LAYERS for driver in self.sessions.values())
        assert stats.chunks == rows

    def teardown(self) -> None:
        for _, pinned in self.pins:
            pinned.close()
        self.stack.close()
        shutil.rmtree(self.folder)


TestSessionsAndBlocks = SessionsAndBlocks.TestCase
TestSessionsAndBlocks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
