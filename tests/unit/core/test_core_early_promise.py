"""Layers on their way that nobody promised: the first of the next token, and those behind the next one."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier_core import stepplans
from kvtier_core.appends import Append
from kvtier_core.arrivals import Block, BufferPool
from kvtier_core.edits.requests import Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.placements.preference import PlacementPreference, PlanKind
from kvtier_core.promises import AHEAD, EARLY_SECONDS, PROMISED_SECONDS, IdentifiedRows, Promise, Promises
from kvtier_core.receipts import PublishArm, StepMode
from kvtier_core.stepplans import WINDOW, Tried
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.transactions import MoveKind
from kvtier_kernels.state import LogitFrame
from tests.unit.core.builders import (
    BLOCK,
    CANDIDATE,
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    Driver,
    FakeClock,
    Rows,
    cpu,
    engine,
    nvme,
)
from tests.unit.core.editing import edit, fork
from tests.unit.core.tierdoubles import LAYOUT, ScriptedTier

TOKENS, DECODE = 3 * CHUNK + 5, 16
STORED = [cpu(LAYERS), nvme(64)]
LANE = "lane-1"
PARTITION = PlacementPreference("partition", prefer=PlanKind.SUPPORT_PARTITION)
WAIT_SECONDS = 30.0


@cache
def rows() -> Rows:
    return Rows.random(TOKENS + DECODE)


@cache
def want() -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder), [cpu(64)]) as built:
        return Driver.open(built, rows()).play(TOKENS, DECODE, block=200)


def token(driver: Driver, kept: bool = True, mode: StepMode | None = None) -> None:
    """One token with the bits it has to have. kept: what is due is begun after each answer."""
    at, built, name = driver.position, driver.engine, driver.handle.session_id
    for layer in range(LAYERS):
        request = driver.request(layer, at, at + 1, next_layer_follows=layer + 1 < LAYERS, promise_later=True)
        answer = built.step(request, mode)
        driver.answers.append(answer)
        assert torch.equal(answer.out, want()[layer, at : at + 1])
        if kept and built.owes_promise(name):
            built.keep_promise(name, driver.handle.generation)
    driver.position, driver.step = at + 1, driver.step + 1


def begun(built: CacheEngine) -> dict[str, list[Promise]]:
    """Early promises by session, the nearest first."""
    found = built._plans._promises._open.items()
    early = {name: [one for one in promises if one.early] for name, promises in found}
    return {name: promises for name, promises in early.items() if promises}


def all_came_back(pool: BufferPool) -> bool:
    """Reads that nobody waits for end on threads of their own."""
    until = time.monotonic() + WAIT_SECONDS
    while pool.available != pool.limit:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def started(built: CacheEngine, mode: StepMode | None = None, **spec: object) -> Driver:
    """A session whose next token's first layer is on its way."""
    driver = Driver.open(built, rows(), **spec)
    driver.forward(TOKENS, mode, block=200)
    demoted(driver)
    for _ in range(2):
        token(driver, mode=mode)
    assert set(begun(built)) == {driver.handle.session_id}
    return driver


def test_the_first_layer_of_the_next_token_is_on_its_way_before_its_frame_comes(tmp_path: Path) -> None:
    with engine(tmp_path, STORED) as built:
        driver = started(built)
        for _ in range(DECODE - 2):
            [promises] = begun(built).values()
            assert [one.place for one in promises] == [
                (driver.step, 0),
                (driver.step, 1),
                (driver.step + 1, 0),
            ]
            token(driver)
            first = driver.answers[-LAYERS].receipt
            assert first.promised_bytes == first.bytes_by_tier["flash"] > 0
        pool = built._plans.buffers
        driver.close()
        assert begun(built) == {}
        assert all_came_back(pool)


def test_a_promise_goes_back_when_no_time_is_left_for_another_plan(tmp_path: Path) -> None:
    """Between two ways of one frame, of which the first has not used it."""
    with engine(tmp_path, STORED) as built:
        driver = started(built)
        session = built._sessions[driver.handle.session_id]
        assert begun(built)[session.session_id][0].place == (driver.step, 0)
        row = torch.zeros(1, KV_HEADS, HEAD_DIM)
        query = Query(
            torch.zeros(1, QUERY_HEADS, HEAD_DIM),
            driver.position,
            LogitFrame(scale=0.25),
            built._clock() - 1.0,
        )
        first = CoreError(Reason.STORAGE_UNAVAILABLE, "the device is gone")
        with pytest.raises(CoreError) as late:
            built._plans.exact(
                Append(session, 0, driver.position, row, row),
                query,
                driver.position + 1,
                step=driver.step,
                tried=Tried(PlanKind.SUPPORT_PARTITION, first),
            )
        assert late.value.reason is Reason.DEADLINE
        assert all(one.place != (driver.step, 0) for one in begun(built)[session.session_id])
        driver.close()
        assert all_came_back(built._plans.buffers)


def test_nothing_is_begun_for_a_token_whose_engine_waits_for_no_answers(tmp_path: Path) -> None:
    with engine(tmp_path, STORED) as built:
        driver = Driver.open(built, rows())
        driver.forward(TOKENS, block=200)
        for at in range(TOKENS, TOKENS + 3):
            for layer in range(LAYERS):
                follows = layer + 1 < LAYERS
                built.step(driver.request(layer, at, at + 1, next_layer_follows=follows))
                assert not built.owes_promise(driver.handle.session_id)
                assert begun(built) == {}
            driver.position, driver.step = at + 1, driver.step + 1


def truncate(driver: Driver) -> None:
    edit(driver, Truncate(driver.position - 1))


def closed(driver: Driver) -> None:
    driver.close()


def demoted(driver: Driver) -> None:
    driver.engine.demote_session(driver.handle.session_id, driver.handle.generation, 64)


def drained(driver: Driver) -> None:
    driver.engine.stop()


def placed(driver: Driver) -> None:
    driver.engine.prefer(PARTITION)


@pytest.mark.parametrize("what", [truncate, closed, demoted, placed, drained], ids=lambda one: one.__name__)
def test_it_ends_with(tmp_path: Path, what: Callable[[Driver], None]) -> None:
    with engine(tmp_path, STORED) as built:
        driver, pool = started(built), built._plans.buffers
        what(driver)
        assert begun(built) == {}
        assert all_came_back(pool)
        if what in (truncate, demoted, placed):
            for _ in range(2):
                token(driver)


def test_a_session_that_is_taken_out_of_its_lane_loses_what_was_begun_by_the_lanes_plans(
    tmp_path: Path,
) -> None:
    mode = StepMode(publish=PublishArm.CANDIDATE, candidate_digest=CANDIDATE, lane=LANE)
    with engine(tmp_path, STORED) as built:
        built.prepare_lane(LANE, PARTITION)
        driver = started(built, mode, lane=LANE)
        # A frame of the baseline takes it out.
        answer = built.step(driver.request(0, driver.position, driver.position + 1))
        assert torch.equal(answer.out, want()[0, driver.position : driver.position + 1])
        assert built._plans.lane_of(driver.handle.session_id) == ""
        assert answer.receipt.promised_bytes == 0
        assert begun(built) == {}


def test_a_fork_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(2 * LAYERS), nvme(64)]) as built:
        driver = started(built)
        name, child = driver.handle.session_id, fork(driver)
        nearest = begun(built)[name][0]
        token(child, kept=False)
        assert begun(built)[name][0] is nearest
        token(driver)
        first = driver.answers[-LAYERS].receipt
        assert first.promised_bytes == first.bytes_by_tier["flash"]
        child.close()


class Tokens(RuleBasedStateMachine):
    """Sessions of the same rows in any order: each answer has its bits whatever has been begun for it."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stack, self.clock = ExitStack(), FakeClock()
        # Fewer buffers than the sessions have blocks.
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(stepplans, "BUFFER_BYTES", 20 * BLOCK)
        tiers = [cpu(4 * LAYERS), nvme(64)]
        self.engine = self.stack.enter_context(engine(self.folder, tiers, clock=self.clock))
        driver = Driver.open(self.engine, rows())
        driver.forward(TOKENS, block=200)
        self.sessions = [driver]
        demoted(driver)

    @rule(which=st.integers(0, 2), kept=st.booleans())
    def token(self, which: int, kept: bool) -> None:
        driver = self.sessions[which % len(self.sessions)]
        if driver.position < TOKENS + DECODE:
            token(driver, kept)

    @rule(which=st.integers(0, 2))
    def half_a_token(self, which: int) -> None:
        """Whose other layers never come: the next step is refused, and an edit begins anew."""
        driver = self.sessions[which % len(self.sessions)]
        if driver.position < TOKENS + DECODE:
            at = driver.position
            out = self.engine.step(driver.request(0, at, at + 1, promise_later=True)).out
            assert torch.equal(out, want()[0, at : at + 1])
            edit(driver, Truncate(at))
            driver.step += 1

    @rule(seconds=st.sampled_from([0.1, EARLY_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(which=st.integers(0, 2))
    def truncate(self, which: int) -> None:
        driver = self.sessions[which % len(self.sessions)]
        if driver.position > TOKENS:
            truncate(driver)
            assert driver.handle.session_id not in begun(self.engine)

    @rule(which=st.integers(0, 2))
    def fork(self, which: int) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(fork(self.sessions[which % len(self.sessions)]))

    @rule(which=st.integers(0, 2))
    def close(self, which: int) -> None:
        if len(self.sessions) > 1:
            self.sessions.pop(which % len(self.sessions)).close()

    @rule(
        which=st.integers(0, 2), layer=st.integers(0, LAYERS - 1), chunk=st.integers(0, 2), up=st.booleans()
    )
    def move(self, which: int, layer: int, chunk: int, up: bool) -> None:
        store = self.engine._store
        name = self.sessions[which % len(self.sessions)].handle.session_id
        line = self.engine._contexts[name].session.layers[layer].lines[chunk]
        with self.engine._lock, suppress(CoreError):
            store.transactions.run(*((MoveKind.PROMOTE, line, 0) if up else (MoveKind.DEMOTE, line, 1)))

    @rule(which=st.integers(0, 2))
    def demote(self, which: int) -> None:
        demoted(self.sessions[which % len(self.sessions)])

    @invariant()
    def what_is_begun_is_of_a_session_and_leaves_frames_their_buffers(self) -> None:
        known = {one.handle.session_id: one for one in self.sessions}
        for name, promises in begun(self.engine).items():
            places = [one.place for one in promises]
            assert places == sorted(set(places))
            assert len(places) <= AHEAD
            assert name in known
        assert self.engine._plans.buffers.available >= WINDOW

    def teardown(self) -> None:
        pool = self.engine._plans.buffers
        self.stack.close()
        shutil.rmtree(self.folder)
        assert all_came_back(pool)


TestTokens = Tokens.TestCase
TestTokens.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)


class Office:
    """Promises over storage whose reads end when told."""

    def __init__(self, buffers: int) -> None:
        self.tier, self.clock = ScriptedTier(slots=16), FakeClock()
        self.pool = BufferPool(LAYOUT, buffers)
        self.promises = Promises(cast(IdentifiedRows, None), self.pool, self.clock, None, reserve=2)

    def blocks(self, count: int, life: int = 1) -> list[Block]:
        """life: of their slots; those of another life are other blocks."""
        return [Block(self.tier, SlotRef(slot, life), self.tier.identity(slot)) for slot in range(count)]

    def end_reads(self) -> None:
        for read in self.tier.reads:
            if not read.sink.over:
                read.end()


def test_what_is_here_for_a_token_that_may_never_come_goes_when_another_session_is_promised() -> None:
    office = Office(buffers=10)
    promises = office.promises
    assert promises.begin_blocks("idle", 4, 0, office.blocks(6), True) == 6
    office.end_reads()
    # One that may never come either takes nothing from it.
    assert promises.begin_blocks("also idle", 9, 0, office.blocks(6, 2), True) == 2
    office.end_reads()
    assert promises.begin_blocks("busy", 3, 1, office.blocks(3, 3)) == 3
    assert promises.take("idle", 4, 0) is None
    kept = promises.take("also idle", 9, 0)
    assert kept is not None
    kept.leave()
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit


def slots(office: Office) -> list[tuple[int, int]]:
    return [(read.item.ref.generation, read.item.ref.slot) for read in office.tier.reads]


@pytest.mark.parametrize("early", [False, True])
def test_what_is_on_its_way_to_one_session_is_promised_to_another_without_a_read_or_a_buffer(
    early: bool,
) -> None:
    office = Office(buffers=8)
    promises = office.promises
    mine, theirs = office.blocks(5), office.blocks(5)
    theirs[2] = office.blocks(3, 2)[2]
    assert promises.begin_blocks("one", 4, 1, mine, early) == 5
    # One block is another one, for which there is a buffer.
    assert promises.begin_blocks("two", 9, 1, theirs, early) == 5
    assert slots(office) == [(1, slot) for slot in range(5)] + [(2, 2)]
    assert office.pool.available == 2
    # Another layer's are none of these, whatever they are called, and for them there is no buffer.
    assert promises.begin_blocks("three", 9, 2, theirs, True) == 0
    office.end_reads()
    first = promises.take("one", 4, 1)
    assert first is not None
    first.leave()
    assert office.pool.available == 3
    second = promises.take("two", 9, 1)
    assert second is not None
    assert [one.is_of(block) and one.over for one, block in zip(second.arrivals, theirs, strict=True)] == [
        True
    ] * 5
    second.leave()
    second.leave()
    assert office.pool.available == office.pool.limit


def test_a_hold_on_a_read_is_let_go_of_where_those_before_it_cannot_begin() -> None:
    office = Office(buffers=12)
    promises = office.promises
    mine, theirs = office.blocks(5), office.blocks(5)
    theirs[2] = office.blocks(3, 2)[2]
    assert promises.begin_blocks("one", 4, 1, mine) == 5
    office.tier.depth = 5
    assert promises.begin_blocks("two", 9, 1, theirs) == 2
    promises.forget("one")
    office.end_reads()
    assert office.pool.limit - office.pool.available == 2
    # Said again it begins the rest, which is on its way to nobody else now.
    assert promises.begin_blocks("two", 9, 1, theirs) == 5
    assert slots(office)[5:] == [(2, 2), (1, 3), (1, 4)]
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit


def test_what_is_further_ahead_goes_before_what_comes_next_lacks_a_buffer() -> None:
    office = Office(buffers=10)
    promises = office.promises
    assert promises.begin_blocks("one", 4, 1, office.blocks(3)) == 3
    assert promises.further("one", 4, 2, office.blocks(3))
    # Said again it is there; of what does not fit as a whole nothing is begun.
    assert promises.further("one", 4, 2, office.blocks(3))
    assert not promises.further("one", 4, 3, office.blocks(3))
    assert office.pool.available == 4
    office.end_reads()
    first = promises.take("one", 4, 1)
    assert first is not None
    first.leave()
    assert promises.begin_blocks("one", 4, 2, office.blocks(3)) == 3
    assert promises.further("one", 4, 3, office.blocks(4))
    office.end_reads()
    assert promises.begin_blocks("one", 4, 2, office.blocks(8)) == 8
    assert promises.take("one", 4, 3) is None
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit


def test_sessions_of_one_message_lose_no_buffer_to_what_one_of_them_could_read_further_ahead() -> None:
    office = Office(buffers=24)
    promises = office.promises
    began = []
    for layer in range(1, 5):
        # All of a message are answered before any of them is promised something.
        for name in ("one", "two"):
            found = promises.take(name, 4, layer)
            if found is not None:
                found.leave()
        office.end_reads()
        for life, name in enumerate(("one", "two"), 1):
            began.append(promises.begin_blocks(name, 4, layer + 1, office.blocks(8, life)))
            promises.further(name, 4, layer + 2, office.blocks(8, life))
    # Nobody knew of the other when the first was first asked.
    assert began[2:] == [8] * 6
    office.end_reads()
    promises.forget("two")
    assert promises.further("one", 4, 6, office.blocks(8))
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit


def test_beside_another_sessions_promise_nothing_further_is_begun_and_no_more_than_so_many_layers() -> None:
    office = Office(buffers=40)
    promises = office.promises
    promises.begin_blocks("one", 4, 1, office.blocks(1))
    began = [promises.further("one", 4, 1 + more, office.blocks(1)) for more in range(1, AHEAD + 1)]
    assert began == [True] * (AHEAD - 1) + [False]
    promises.begin_blocks("two", 9, 1, office.blocks(1, 2))
    office.end_reads()
    for layer in range(1, 1 + AHEAD):
        taken = promises.take("one", 4, layer)
        assert taken is not None
        assert len(taken.arrivals) == 1
        taken.leave()
    promises.begin_blocks("one", 4, 1 + AHEAD, office.blocks(1))
    assert not promises.further("one", 4, 2 + AHEAD, office.blocks(1))
    assert not promises.further("two", 9, 2, office.blocks(1))
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit


@pytest.mark.parametrize(
    ("place", "taken", "left"),
    [
        pytest.param((4, 1), 3, [(4, 2), (5, 0)], id="the-nearest"),
        pytest.param((4, 2), 3, [(5, 0)], id="one-behind-it"),
        pytest.param((4, 0), 0, [(4, 1), (4, 2), (5, 0)], id="a-layer-in-several-frames"),
        pytest.param((5, 1), 0, [], id="another-step"),
        pytest.param((3, 0), 0, [], id="two-steps-before"),
    ],
)
def test_a_frame_takes_its_own_and_lets_go_of_what_does_not_follow_it(
    place: tuple[int, int], taken: int, left: list[tuple[int, int]]
) -> None:
    office = Office(buffers=40)
    promises = office.promises
    promises.begin_blocks("one", 4, 1, office.blocks(3))
    for further in ((4, 2), (5, 0)):
        assert promises.further("one", *further, office.blocks(3))
    found = promises.take("one", *place)
    assert (0 if found is None else len(found.arrivals)) == taken
    assert [one.place for one in promises._open.get("one", [])] == left
    office.end_reads()
    assert office.pool.limit - office.pool.available == taken + 3 * len(left)
    if found is not None:
        found.leave()
    promises.close()
    assert office.pool.available == office.pool.limit


def test_buffers_that_bytes_may_still_reach_are_not_given_away() -> None:
    office = Office(buffers=8)
    promises = office.promises
    assert promises.begin_blocks("idle", 4, 0, office.blocks(6), True) == 6
    assert promises.begin_blocks("busy", 3, 1, office.blocks(6, 2)) == 0
    assert office.pool.available == 2
    office.end_reads()
    assert promises.begin_blocks("busy", 3, 1, office.blocks(6, 2)) == 6
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit


@pytest.mark.parametrize(
    ("early", "seconds", "left"),
    [
        pytest.param(True, 0.9 * EARLY_SECONDS, 6, id="early-in-time"),
        pytest.param(True, EARLY_SECONDS, 0, id="early-late"),
        pytest.param(False, 0.9 * PROMISED_SECONDS, 6, id="promised-in-time"),
        pytest.param(False, PROMISED_SECONDS, 0, id="promised-late"),
    ],
)
def test_a_promise_whose_frame_does_not_come_ends_in_its_time_with_another(
    early: bool, seconds: float, left: int
) -> None:
    office = Office(buffers=20)
    promises = office.promises
    promises.begin_blocks("idle", 4, 0, office.blocks(6), early)
    office.end_reads()
    office.clock.now += seconds
    promises.begin_blocks("busy", 3, 1, [])
    assert office.pool.limit - office.pool.available == left
    promises.close()
    assert office.pool.available == office.pool.limit


def test_an_early_promise_becomes_one_when_its_frame_is_promised() -> None:
    office = Office(buffers=9)
    promises = office.promises
    promises.begin_blocks("one", 4, 1, office.blocks(6), True)
    office.end_reads()
    assert promises.begin_blocks("one", 4, 1, office.blocks(6)) == 6
    assert promises.begin_blocks("two", 3, 1, office.blocks(6, 2)) == 1
    office.clock.now += EARLY_SECONDS
    found = promises.take("one", 4, 1)
    assert found is not None
    assert len(found.arrivals) == 6
    found.leave()
    office.end_reads()
    promises.close()
    assert office.pool.available == office.pool.limit
