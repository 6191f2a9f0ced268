"""Sessions that start from published blocks: the same bits as if they had computed the rows, in place, and
everything given back."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode
from kvtier_core.rowevidence import Need
from kvtier_core.sessions import RowStore
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import DeletionState
from kvtier_crds.manifest import Selector
from tests.unit.core.blockpump import LATER, NAMESPACE, until
from tests.unit.core.builders import CANDIDATE, CHUNK, LAYERS, SLOT, Driver, Rows, cpu, engine, nvme, quest
from tests.unit.core.nvme_files import Gate, ScriptedFiles
from tests.unit.core.test_core_live_families import selector as family_of

CHUNKS = 3
PREFIX = CHUNKS * CHUNK
TAIL = 30


def key(layer: int, chunk: int) -> bytes:
    return hashlib.sha256(f"{layer}/{chunk}".encode()).digest()


def keys(chunks: int = CHUNKS, shift: int = 0) -> list[bytes]:
    """In the order of chunks and, of each, of layers. shift: of other prompts."""
    return [key(layer, chunk + shift) for chunk in range(chunks) for layer in range(LAYERS)]


def publish(built: CacheEngine, driver: Driver, chunks: int = CHUNKS, shift: int = 0, **more: Any) -> None:
    handle = driver.handle
    for chunk in range(chunks):
        for layer in range(LAYERS):
            payload = built.prefixes.payload(handle.session_id, handle.generation, layer, chunk)

            def attempt(payload: bytes = payload, layer: int = layer, chunk: int = chunk) -> bool:
                (stored,) = built.blocks.store.put(
                    [key(layer, chunk + shift)], [payload], namespace=NAMESPACE, deadline=LATER, **more
                )
                assert stored.reason in (MoveReason.READY, MoveReason.CREDIT_PRESSURE), stored
                return stored.outcome in (PutOutcome.STORED, PutOutcome.EXISTED)

            until(built, attempt)


def computed(built: CacheEngine) -> Driver:
    """A session whose first chunks are committed."""
    driver = Driver.open(built, ROWS)
    driver.forward(PREFIX)
    driver.forward(1)
    return driver


def start(built: CacheEngine, driver: Driver, chunks: int = CHUNKS, shift: int = 0) -> int:
    store = built.blocks.store
    # What still moves takes slots in which blocks would be brought into memory.
    until(built, lambda: not store.moves.open_moves())
    with store.fetch(keys(chunks, shift), namespace=NAMESPACE, deadline=LATER) as fetch:
        until(built, lambda: fetch.over)
        rows = built.prefixes.start(driver.handle.session_id, driver.handle.generation, fetch)
    driver.position = rows
    return rows


def ask(built: CacheEngine, driver: Driver, asked: bytes, chunks: int = CHUNKS) -> int:
    """As `start`, by a call that names what it asks for."""
    handle = driver.handle
    with built.blocks.store.fetch(keys(chunks), namespace=NAMESPACE, deadline=LATER) as fetch:
        until(built, lambda: fetch.over)
        return built.prefixes.start(handle.session_id, handle.generation, fetch, asked)


def tail(driver: Driver, tokens: int = TAIL, mode: StepMode | None = None) -> torch.Tensor:
    """A prefill of the rest, then token by token."""
    parts = [driver.forward(tokens - 4, mode, committed_frontier=driver.position)]
    parts += [driver.forward(1, mode) for _ in range(4)]
    return torch.cat(parts, dim=1)


def leases(built: CacheEngine) -> list[int]:
    return [int(part.leases.array.sum()) for part in built.blocks.store.directory.replicas.tiers]


def unleased(built: CacheEngine) -> None:
    """Waits until nobody holds a copy: a read gives its own back when the tier has told that it is over."""
    until(built, lambda: leases(built) == [0, 0])


ROWS = Rows.random(PREFIX + TAIL + 8, seed=5)
LEARNS = family_of("infLlm", {"unitTokens": 6, "representatives": 2})


def own(folder: Path, tiers: list[Any]) -> torch.Tensor:
    """What a session that computed everything itself answers."""
    with engine(folder, tiers) as built:
        driver = Driver.open(built, ROWS)
        driver.forward(PREFIX)
        return tail(driver)


@pytest.mark.parametrize("down", [False, True], ids=["in-memory", "on-flash"])
def test_a_session_that_starts_from_blocks_answers_the_same_bits(tmp_path: Path, down: bool) -> None:
    tiers = [cpu(24), nvme(32)]
    want = own(tmp_path / "a", tiers)
    with engine(tmp_path / "b", tiers) as built:
        first = computed(built)
        publish(built, first)
        first.close()
        if down:
            built.blocks.store.reclaim.make_room(0, 24)
            until(built, lambda: not built.blocks.store.moves.open_moves())
            assert built.stats().tiers[0].bytes.blocks == 0
        second = Driver.open(built, ROWS)
        used = built.stats().tiers[0].bytes
        assert start(built, second) == PREFIX
        assert built.stats().tiers[0].bytes.rows == used.rows, "not a slot is the session's"
        assert torch.equal(tail(second), want)
        assert {answer.receipt.exactness for answer in second.answers} == {ExactnessClass.EXACT}
        assert second.answers[-1].receipt.frontier == PREFIX + TAIL
        second.close()
        unleased(built)


def test_a_borrowed_block_stays_where_it_is_until_the_last_session_over_it_ends(tmp_path: Path) -> None:
    tiers = [cpu(16), nvme(32)]
    want = own(tmp_path / "a", tiers)
    with engine(tmp_path / "b", tiers) as built:
        first = computed(built)
        publish(built, first, droppable=True)
        first.close()
        session = Driver.open(built, ROWS)
        start(built, session)
        handle = built.fork_session(ForkRequest(session.handle.session_id, session.handle.generation))
        forked = Driver(built, ROWS, handle, session.position)
        assert torch.equal(tail(session), want)
        session.close()
        store = built.blocks.store
        store.reclaim.make_room(0, 16)
        until(built, lambda: not store.moves.open_moves())
        assert built.stats().tiers[0].bytes.held == CHUNKS * LAYERS * SLOT, "the fork holds them"
        (order,) = store.delete(keys())
        store.pump()
        assert order.state is not DeletionState.DONE, "somebody attends them"
        assert torch.equal(tail(forked), want)
        forked.close()
        until(built, lambda: order.state is DeletionState.DONE)
        unleased(built)
        assert built.stats().tiers[0].bytes.blocks == 0


def test_sessions_hold_half_of_memory_by_blocks_and_no_more(tmp_path: Path) -> None:
    """What they start from is held for as long as they live, so others could find no slot for their rows."""
    with engine(tmp_path, [cpu(14), nvme(32)]) as built:
        first = computed(built)
        publish(built, first)
        # Two prompts of one chunk each.
        publish(built, first, 1, shift=10)
        publish(built, first, 1, shift=20)
        first.close()
        short, second, third, last = (Driver.open(built, ROWS) for _ in range(4))
        assert start(built, short, 1, shift=10) == CHUNK
        assert start(built, second) == (CHUNKS - 1) * CHUNK, "as many whole chunks as fit"
        assert start(built, third) == (CHUNKS - 1) * CHUNK, "a block that is held already costs nothing more"
        third.close()
        with pytest.raises(CoreError) as refused:
            start(built, last, 1, shift=20)
        assert refused.value.reason is Reason.CREDIT_PRESSURE
        second.close()
        assert start(built, last, 1, shift=20) == CHUNK
        short.close()
        last.close()


def test_only_whole_chunks_of_all_layers_are_started_from(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        first = computed(built)
        publish(built, first)
        built.blocks.store.delete([key(1, 1)])
        until(built, lambda: not built.blocks.store.deletions.open())
        second = Driver.open(built, ROWS)
        assert start(built, second) == CHUNK
        third = Driver.open(built, ROWS)
        assert start(built, third, chunks=0) == 0
        assert leases(built)[0] == LAYERS
        for driver in (first, second, third):
            driver.close()


def test_a_cut_inside_a_borrowed_chunk_goes_on_in_a_copy(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        first = computed(built)
        publish(built, first)
        second = Driver.open(built, ROWS)
        start(built, second)
        second.forward(2, committed_frontier=PREFIX)
        for driver in (first, second):
            handle = driver.handle
            built.edit_session(EditRequest(handle.session_id, handle.generation, Truncate(PREFIX - 10)))
            driver.position = PREFIX - 10
        answers = [driver.forward(5, committed_frontier=PREFIX - 10) for driver in (first, second)]
        assert torch.equal(*answers)
        first.close()
        second.close()
        unleased(built)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param("rows", Reason.STEP_ORDER, id="it-has-rows"),
        pytest.param("learns", Reason.UNSUPPORTED, id="its-selector-learns-from-queries"),
        pytest.param("short", Reason.BAD_ARGUMENT, id="it-may-not-be-so-long"),
        pytest.param("stale", Reason.GENERATION_STALE, id="another-generation"),
        pytest.param("unknown", Reason.SESSION_UNKNOWN, id="no-such-session"),
    ],
)
def test_who_may_not_start_from_blocks_has_none_afterwards(tmp_path: Path, case: str, reason: Reason) -> None:
    with engine(tmp_path, [cpu(32), nvme(32)]) as built:
        first = computed(built)
        publish(built, first)
        rows = Rows.random(CHUNK, seed=1) if case == "short" else ROWS
        learns = {"selector": LEARNS, "given": frozenset(Need)} if case == "learns" else {}
        driver = Driver.open(built, rows, **learns)
        if case == "rows":
            driver.forward(3)
        handle = driver.handle
        session_id = "nobody" if case == "unknown" else handle.session_id
        generation = handle.generation + (case == "stale")
        fetch = built.blocks.store.fetch(keys(), namespace=NAMESPACE, deadline=LATER)
        with fetch, pytest.raises(CoreError) as refused:
            built.prefixes.start(session_id, generation, fetch)
        assert refused.value.reason is reason
        unleased(built)
        first.close()
        driver.close()


@pytest.mark.parametrize(
    "chosen",
    [
        quest(sink=2, recent=4),
        family_of("pqcache", {"subspaces": 2, "bits": 2}),
        family_of("squeezedAttention", {"clusters": 10, "threshold": "0.004"}),
    ],
    ids=["quest", "pqcache", "squeezedAttention"],
)
def test_a_session_that_starts_from_blocks_selects_as_one_that_computed_them(
    tmp_path: Path, chosen: Selector
) -> None:
    """The same rows of the same rows, so the same bits, with an audit of every step beside."""
    mode = StepMode(PublishArm.CANDIDATE, False, chosen, CANDIDATE)
    spec = {"audit": 1.0, "fixed_context": PREFIX}
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        plain = computed(built)
        publish(built, plain)
        plain.close()
        first = Driver.open(built, ROWS, chosen, **spec)
        first.forward(PREFIX)
        second = Driver.open(built, ROWS, chosen, **spec)
        assert start(built, second) == PREFIX
        second.step = first.step
        outs = []
        for driver in (first, second):
            driver.forward(TAIL - 4, committed_frontier=driver.position)
            outs.append(torch.cat([driver.forward(1, mode) for _ in range(4)], dim=1))
        assert torch.equal(*outs)
        for mine, theirs in zip(first.answers[-8:], second.answers[-8:], strict=True):
            assert mine.receipt.exactness is theirs.receipt.exactness is ExactnessClass.APPROXIMATE
            one, other = mine.receipt.selection, theirs.receipt.selection
            assert one is not None and other is not None
            assert (one.index_covered, one.threshold) == (other.index_covered, other.threshold)
        for driver in (first, second):
            driver.close()
        unleased(built)


def test_a_session_with_a_selector_that_could_not_start_from_blocks_computes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that took some of the rows would have no place for them any more."""
    chosen = quest(sink=2, recent=4)
    mode = StepMode(PublishArm.CANDIDATE, False, chosen, CANDIDATE)
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        first = computed(built)
        publish(built, first)
        driver = Driver.open(built, ROWS, chosen, audit=1.0)
        read, calls = RowStore.read_rows, []

        def failing(self: RowStore, line: int, deadline: float | None = None) -> torch.Tensor:
            calls.append(line)
            if len(calls) == CHUNKS + 1:
                raise CoreError(Reason.DEADLINE, "late")
            return read(self, line, deadline)

        with monkeypatch.context() as patch:
            patch.setattr(RowStore, "read_rows", failing)
            with pytest.raises(CoreError) as refused:
                start(built, driver)
        assert refused.value.reason is Reason.DEADLINE
        unleased(built)
        driver.forward(PREFIX)
        driver.forward(1, mode)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.APPROXIMATE
        first.close()
        driver.close()


def test_a_prefix_whose_scope_is_left_in_the_middle_is_none(tmp_path: Path) -> None:
    tiers = [cpu(24), nvme(32)]
    want = own(tmp_path / "a", tiers)
    with engine(tmp_path / "b", tiers) as built:
        first = computed(built)
        publish(built, first)
        first.close()
        driver = Driver.open(built, ROWS)
        fetch = built.blocks.store.fetch(keys(), namespace=NAMESPACE, deadline=LATER)
        until(built, lambda: fetch.over)

        class Left:
            """Its call is given up when the first layer is done."""

            ready, of = fetch.ready, fetch.of

            def place(self, index: int) -> Any:
                if index == 1:
                    fetch.close()
                return fetch.place(index)

        with pytest.raises(CoreError) as refused:
            built.prefixes.start(driver.handle.session_id, driver.handle.generation, cast(Fetch, Left()))
        assert refused.value.reason is Reason.NOT_VISIBLE
        unleased(built)
        assert start(built, driver) == PREFIX
        assert torch.equal(tail(driver), want)
        driver.close()


def test_blocks_of_another_engine_are_refused_before_their_numbers_mean_others_bytes(tmp_path: Path) -> None:
    """A session may move to another engine of its cache while blocks of the first one are read for it."""
    want = own(tmp_path / "a", [cpu(64)])
    with engine(tmp_path / "b", [cpu(64)]) as one, engine(tmp_path / "c", [cpu(64)]) as other:
        for built, rows in ((one, ROWS), (other, Rows.random(PREFIX + TAIL, seed=99))):
            first = Driver.open(built, rows)
            first.forward(PREFIX)
            first.forward(1)
            publish(built, first)
            first.close()
        driver = Driver.open(other, ROWS)
        with one.blocks.store.fetch(keys(), namespace=NAMESPACE, deadline=LATER) as fetch:
            until(one, lambda: fetch.over)
            assert fetch.ready == CHUNKS * LAYERS
            with pytest.raises(CoreError) as refused:
                other.prefixes.start(driver.handle.session_id, driver.handle.generation, fetch)
        assert refused.value.reason is Reason.NOT_VISIBLE
        assert leases(other) == [0]
        driver.forward(PREFIX)
        assert torch.equal(tail(driver), want)
        driver.close()


def test_a_session_that_moved_before_its_first_frame_still_says_where_it_started(tmp_path: Path) -> None:
    with engine(tmp_path / "b", [cpu(64)]) as one, engine(tmp_path / "c", [cpu(64)]) as other:
        first = computed(one)
        publish(one, first)
        first.close()
        driver = Driver.open(one, ROWS)
        handle = driver.handle
        assert ask(one, driver, b"these") == PREFIX
        state = one.carriage.state(handle.session_id, handle.generation)
        rows = one.carriage.rows(handle.session_id, handle.generation)
        moved = replace(driver, engine=other, handle=other.carriage.receive(state, rows))
        driver.close()
        assert ask(other, moved, b"these") == PREFIX
        with pytest.raises(CoreError) as refused:
            ask(other, moved, b"those")
        assert refused.value.reason is Reason.STEP_ORDER
        moved.close()


def test_storage_that_hangs_holds_a_publication_no_longer_than_its_deadline(tmp_path: Path) -> None:
    files = ScriptedFiles()
    with engine(tmp_path, [cpu(6), nvme(32)], files=files, clock=time.monotonic) as built:
        driver = computed(built)
        handle = driver.handle
        listed = built.list_chunks(handle.session_id, handle.generation)
        cold = next(one for one in listed if one.tier_class == "flash")
        gate = files.script = Gate("read")
        timer = threading.Timer(60.0, gate.opened.set)
        timer.start()
        try:
            with pytest.raises(CoreError) as refused:
                built.prefixes.payload(
                    handle.session_id, handle.generation, cold.layer, cold.chunk, time.monotonic() + 0.05
                )
            assert refused.value.reason is Reason.DEADLINE
            assert not gate.opened.is_set()
        finally:
            gate.opened.set()
            timer.cancel()
        driver.close()


def test_rows_of_an_own_history_are_not_published(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        driver = computed(built)
        handle = driver.handle
        for layer, chunk in ((0, CHUNKS), (LAYERS, 0), (0, -1)):
            with pytest.raises(CoreError) as refused:
                built.prefixes.payload(handle.session_id, handle.generation, layer, chunk)
            assert refused.value.reason is Reason.NOT_VISIBLE
        assert built.prefixes.payload(handle.session_id, handle.generation, 0, 0)
        built.edit_session(EditRequest(handle.session_id, handle.generation, Drop(((5, 9),))))
        with pytest.raises(CoreError) as edited:
            built.prefixes.payload(handle.session_id, handle.generation, 0, 0)
        assert edited.value.reason is Reason.UNCOMMITTED_ROWS


def test_a_row_whose_query_was_answered_approximately_apart_from_it_is_not_published(tmp_path: Path) -> None:
    """Rows of later layers come of that answer, though the frame that asked for it brought no row."""
    selector = quest()
    mode = StepMode(
        publish=PublishArm.CANDIDATE, selector=selector, candidate_digest=CANDIDATE, may_publish=lambda: True
    )
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        driver = Driver.open(built, ROWS, selector)
        driver.forward(PREFIX - 1)
        last = driver.position
        for layer in range(LAYERS):
            built.step(driver.request(layer, last, last + 1), StepMode())
            again = driver.request(layer, last + 1, last + 1, first_query_position=last)
            answer = built.step(replace(again, q=ROWS.q[layer, last : last + 1]), mode)
        assert answer.receipt.exactness is ExactnessClass.APPROXIMATE
        driver.position, driver.step = last + 1, driver.step + 1
        driver.forward(1)
        handle = driver.handle
        built.edit_session(EditRequest(handle.session_id, handle.generation, Truncate(PREFIX)))
        with pytest.raises(CoreError) as refused:
            built.prefixes.payload(handle.session_id, handle.generation, LAYERS - 1, CHUNKS - 1)
        assert refused.value.reason is Reason.UNCOMMITTED_ROWS
        # Without that row the history is exact again.
        built.edit_session(
            EditRequest(handle.session_id, handle.generation, Truncate(PREFIX - 1), position_epoch=2)
        )
        assert built.prefixes.payload(handle.session_id, handle.generation, LAYERS - 1, 0)
        driver.close()


class PrefixMachine(RuleBasedStateMachine):
    """Sessions that start from what is published, among evictions and deletions: each answers as one that
    computed all of it, and when all have ended nothing is held."""

    folder: Path
    want: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.context = engine(self.folder, [cpu(48)])
        self.built = self.context.__enter__()
        self.source = computed(self.built)
        self.open: list[Driver] = []

    @rule(chunks=st.integers(1, CHUNKS))
    def publish(self, chunks: int) -> None:
        for chunk in range(chunks):
            for layer in range(LAYERS):
                handle = self.source.handle
                payload = self.built.prefixes.payload(handle.session_id, handle.generation, layer, chunk)
                self.built.blocks.store.put(
                    [key(layer, chunk)], [payload], namespace=NAMESPACE, deadline=LATER, droppable=True
                )

    @precondition(lambda self: len(self.open) < 3)
    @rule()
    def begin(self) -> None:
        driver = Driver.open(self.built, ROWS)
        self.open.append(driver)
        if rows := start(self.built, driver):
            assert rows % CHUNK == 0
        if driver.position < PREFIX:
            driver.forward(PREFIX - driver.position, committed_frontier=driver.position)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        driver = data.draw(st.sampled_from(self.open))
        if driver.position == PREFIX:
            assert torch.equal(tail(driver), self.want)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        driver = data.draw(st.sampled_from(self.open))
        self.open.remove(driver)
        driver.close()

    @rule(count=st.integers(1, 8))
    def make_room(self, count: int) -> None:
        self.built.blocks.store.reclaim.make_room(0, count)

    @rule(layer=st.integers(0, LAYERS - 1), chunk=st.integers(0, CHUNKS - 1))
    def delete(self, layer: int, chunk: int) -> None:
        self.built.blocks.store.delete([key(layer, chunk)])
        self.built.blocks.store.pump()

    @rule()
    def pump(self) -> None:
        self.built.blocks.store.pump()

    @invariant()
    def books_add_up(self) -> None:
        self.built.blocks.store.check()

    def teardown(self) -> None:
        for driver in (*self.open, self.source):
            driver.close()
        until(self.built, lambda: not self.built.blocks.store.deletions.open())
        assert leases(self.built) == [0]
        self.built.blocks.store.reclaim.make_room(0, 48)
        assert self.built.stats().tiers[0].bytes.free == self.built.stats().tiers[0].capacity_bytes
        self.context.__exit__(None, None, None)


def test_any_order_of_sessions_evictions_and_deletions_keeps_bits_and_books(tmp_path: Path) -> None:
    PrefixMachine.folder, PrefixMachine.want = tmp_path, own(tmp_path / "own", [cpu(48)])
    case = PrefixMachine.TestCase()
    case.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
    case.runTest()


def test_a_start_whose_answer_was_lost_is_answered_again_until_the_first_frame(tmp_path: Path) -> None:
    tiers = [cpu(24), nvme(32)]
    want = own(tmp_path / "a", tiers)
    with engine(tmp_path / "b", tiers) as built:
        first = computed(built)
        publish(built, first)
        first.close()
        session = Driver.open(built, ROWS)
        assert [ask(built, session, b"these") for _ in range(3)] == [PREFIX] * 3
        assert sum(leases(built)) == CHUNKS * LAYERS, "borrowed once"
        with pytest.raises(CoreError) as other:
            ask(built, session, b"others", 1)
        assert other.value.reason is Reason.STEP_ORDER
        session.position = PREFIX
        assert torch.equal(tail(session), want)
        with pytest.raises(CoreError) as late:
            ask(built, session, b"these")
        assert late.value.reason is Reason.STEP_ORDER
        session.close()
        unleased(built)


def test_a_start_that_found_nothing_may_find_more_when_it_is_repeated(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        session = Driver.open(built, ROWS)
        assert ask(built, session, b"these") == 0
        publish(built, computed(built))
        assert ask(built, session, b"these") == PREFIX
        session.close()
