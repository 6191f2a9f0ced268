"""Frames of many sessions in one call answer as one at a time, whatever moved, forked or failed in between.

Every answer is compared bit for bit with that of the same rows in a cache of their own. Whenever chunks move,
the memory that they leave is filled with NaN, so that a view or a plan of before cannot go unnoticed.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtier_core import resident, sharedreads
from kvtier_core.edits.requests import Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import StepAnswer, StepMode, StepRequest
from kvtier_core.tiers.base import PoolTier, SlotState
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.transactions import MoveKind, MoveRefused
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.kept import KeptBatch
from tests.unit.core.builders import (
    CHUNK,
    LAYERS,
    Driver,
    FakeClock,
    Rows,
    cpu,
    engine,
    gpu,
    nvme,
    quest,
)
from tests.unit.core.editing import edit, fork

TOKENS = 3 * CHUNK
SESSIONS = 5


@cache
def answers(seed: int) -> torch.Tensor:
    """A sequence's outputs [layers, TOKENS, Hq, d] in a cache of its own."""
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder), [gpu(64)]) as built:
        return Driver.open(built, Rows.random(TOKENS, seed)).forward(TOKENS)


def poison(built: CacheEngine) -> None:
    """Nothing of what lay in free memory can be read again."""
    for tier in built._store.tiers:
        if isinstance(tier, PoolTier):
            for slot in range(tier.slots.capacity):
                free = int(tier.slots._state[slot]) == SlotState.FREE
                # Memory that was never handed out is not mapped.
                if free and (
                    not isinstance(tier, CpuTier) or slot // tier.arena.segment_slots in tier._views
                ):
                    tier.payload(slot).fill_(torch.nan)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


class Ragged(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.sessions: list[tuple[int, Driver]] = []

    @initialize(
        tiers=st.sampled_from(
            [[cpu(64)], [gpu(5), cpu(64)], [gpu(11), cpu(3), nvme(64)], [gpu(LAYERS * SESSIONS), nvme(64)]]
        )
    )
    def start(self, tiers: list[object]) -> None:
        # Chunks are small here, and all that sessions begin with is to be read once.
        self.stack.enter_context(mock.patch.object(sharedreads, "PAYS_FROM_BYTES", 1))
        self.engine = self.stack.enter_context(engine(self.folder, tiers))  # type: ignore[arg-type]

    @rule(seed=st.integers(0, 2), tokens=st.sampled_from([1, 5, CHUNK - 2, CHUNK + 3]))
    def open(self, seed: int, tokens: int) -> None:
        if len(self.sessions) < SESSIONS:
            driver = Driver.open(self.engine, Rows.random(TOKENS, seed))
            assert same(driver.forward(tokens), answers(seed)[:, :tokens])
            self.sessions.append((seed, driver))

    @precondition(lambda self: self.sessions)
    @rule(
        chosen=st.lists(st.integers(0, SESSIONS - 1), min_size=1, max_size=SESSIONS, unique=True),
        wrong=st.lists(st.tuples(st.integers(0, SESSIONS), st.sampled_from(["gap", "nobody"])), max_size=2),
        steps=st.integers(1, 3),
        blocks=st.sampled_from([1, 1, 1, 4]),
        promised=st.booleans(),
    )
    def decode(
        self, chosen: list[int], wrong: list[tuple[int, str]], steps: int, blocks: int, promised: bool
    ) -> None:
        """Some sessions go on by a token (or the first by several), among frames that are refused. promised:
        each layer's frames say that the next one's follow, the last one's too."""
        for _ in range(steps):
            going = [
                (self.sessions[index], blocks if at == 0 else 1)
                for at, index in enumerate(chosen)
                if index < len(self.sessions) and self.sessions[index][1].position + blocks <= TOKENS
            ]
            for layer in range(LAYERS):
                frames: list[tuple[StepRequest, torch.Tensor | Reason]] = [
                    (
                        driver.request(
                            layer,
                            driver.position,
                            driver.position + count,
                            next_layer_follows=promised,
                        ),
                        answers(seed)[layer, driver.position : driver.position + count],
                    )
                    for (seed, driver), count in going
                ]
                for place, kind in wrong:
                    frames.insert(place, self.wrong(layer, kind))
                given = self.engine.step_many([request for request, _ in frames])
                self.compare(given, [want for _, want in frames])
            for (_, driver), count in going:
                driver.position += count
                driver.step += 1

    def wrong(self, layer: int, kind: str) -> tuple[StepRequest, Reason]:
        driver = self.sessions[0][1]
        at = driver.position
        if kind == "nobody":
            return driver.request(layer, at, at + 1, session_id="nobody"), Reason.SESSION_UNKNOWN
        return driver.request(layer, at, at + 1, generation=77), Reason.GENERATION_STALE

    @staticmethod
    def compare(given: list[StepAnswer | CoreError], wanted: list[torch.Tensor | Reason]) -> None:
        for got, want in zip(given, wanted, strict=True):
            if isinstance(want, Reason):
                assert isinstance(got, CoreError)
                assert got.reason is want
            else:
                assert isinstance(got, StepAnswer)
                assert same(got.out, want)

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 99), tier=st.integers(0, 2))
    def move(self, number: int, tier: int) -> None:
        store = self.engine._store
        count = len(store.tiers)
        lines = [int(line) for at in range(count) if at != tier for line in store.directory.sealed_in(at)]
        if lines and tier < count:
            line = lines[number % len(lines)]
            kind = MoveKind.DEMOTE if tier > int(store.directory.tier[line]) else MoveKind.PROMOTE
            try:
                store.transactions.run(kind, line, tier)
            except MoveRefused:
                return
            poison(self.engine)

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 9), back=st.sampled_from([1, 7, CHUNK, CHUNK + 9]))
    def truncate(self, which: int, back: int) -> None:
        _, driver = self.sessions[which % len(self.sessions)]
        edit(driver, Truncate(max(0, driver.position - back)))
        poison(self.engine)

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        seed, driver = self.sessions[which % len(self.sessions)]
        if len(self.sessions) < SESSIONS:
            self.sessions.append((seed, fork(driver)))

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        self.sessions.pop(which % len(self.sessions))[1].close()
        poison(self.engine)

    def teardown(self) -> None:
        self.stack.close()
        shutil.rmtree(self.folder)


TestRagged = Ragged.TestCase
TestRagged.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_shared_prefix_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked sessions: one reading of their common chunks for all of them, and each answer's bits its own.
    What is read is made up once for the same frames."""
    monkeypatch.setattr(sharedreads, "PAYS_FROM_BYTES", 1)
    seen: list[list[tuple[int, int]]] = []

    class Watched(KeptBatch):
        def __init__(
            self, compiled: Any, room: Any, readings: Sequence[Reading], scales: Any, states: int
        ) -> None:
            seen.append([(reading.run.count, len(reading.queries)) for reading in readings])
            super().__init__(compiled, room, readings, scales, states)

    with engine(tmp_path, [cpu(64)]) as built:
        parent = Driver.open(built, Rows.random(TOKENS, 0))
        parent.forward(2 * CHUNK + 5)
        drivers = [parent, fork(parent), fork(parent)]
        for driver in drivers:
            driver.forward(1)
        monkeypatch.setattr(resident, "KeptBatch", Watched)
        for at in range(parent.position, parent.position + 3):
            for layer in range(LAYERS):
                for answer in built.step_many([driver.request(layer, at, at + 1) for driver in drivers]):
                    assert isinstance(answer, StepAnswer)
                    assert same(answer.out, answers(0)[layer, at : at + 1])
                    assert answer.receipt.bytes_by_tier == {"ram": (at + 1) * built.layout.row_bytes}
            for driver in drivers:
                driver.step += 1
    assert seen == [[(2, 3), (1, 1), (1, 1), (1, 1)]] * LAYERS


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_frames_in_one_call_go_on_over_chunks_that_fill_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Sessions that are not equally far, one leaving and coming back, over the end of a chunk."""
    if not compiled:
        from kvtier_kernels import state
        from kvtier_kernels.ops.chunk_attention import decode, torch_impl

        for module in (resident, decode, torch_impl, state):
            monkeypatch.setattr(module, "library", lambda: None)
    with engine(tmp_path, [cpu(64)]) as built:
        drivers = [Driver.open(built, Rows.random(TOKENS, seed)) for seed in range(4)]
        for far, driver in enumerate(drivers):
            driver.forward(CHUNK - 4 + far)
        for token in range(8):
            # The third one is away for a while.
            some = [(n, one) for n, one in enumerate(drivers) if n != 2 or token not in (2, 3)]
            for layer in range(LAYERS):
                got = built.step_many([one.request(layer, one.position, one.position + 1) for _, one in some])
                want = [answers(n)[layer, one.position : one.position + 1] for n, one in some]
                Ragged.compare(got, list(want))
            for _, one in some:
                one.position += 1
                one.step += 1


def test_frames_in_one_call_keep_no_chunk_of_each_other(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(64)]) as built:
        drivers = [Driver.open(built, Rows.random(TOKENS, seed)) for seed in range(2)]
        for driver in drivers:
            driver.forward(3)
        built.step_many([driver.request(0, 3, 4) for driver in drivers])
        contexts = [built._contexts[driver.handle.session_id] for driver in drivers]
        first, second = (context.resident[0] for context in contexts)
        assert first is not None and first.together is not None and second is not None
        assert [layer() for layer in first.together.layers] == [first, second]
        kept = weakref.ref(second)
        contexts[1].forget_views()
        del second
        gc.collect()
        assert kept() is None


def test_two_frames_of_a_session_follow_each_other(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(64)]) as built:
        driver = Driver.open(built, Rows.random(TOKENS, 1))
        driver.forward(9)
        frames = [driver.request(layer, 9, 10) for layer in range(LAYERS)]
        driver.step += 1
        frames += [driver.request(layer, 10, 11) for layer in range(LAYERS)]
        got = built.step_many(frames)
        want = [answers(1)[layer, at : at + 1] for at in (9, 10) for layer in range(LAYERS)]
        Ragged.compare(got, list(want))


def test_a_late_frame_costs_no_other_its_answer(tmp_path: Path) -> None:
    clock = FakeClock(tick=1.0)
    with engine(tmp_path, [cpu(64)], clock=clock) as built:
        drivers = [Driver.open(built, Rows.random(TOKENS, seed)) for seed in (0, 1)]
        for driver in drivers:
            driver.forward(CHUNK + 3)
        at = CHUNK + 3
        late = drivers[0].request(0, at, at + 1, deadline=clock.now)
        Ragged.compare(
            built.step_many([late, drivers[1].request(0, at, at + 1)]),
            [Reason.DEADLINE, answers(1)[0, at : at + 1]],
        )
        again = built.step_many([drivers[0].request(0, at, at + 1), drivers[1].request(1, at, at + 1)])
        Ragged.compare(again, [answers(0)[0, at : at + 1], answers(1)[1, at : at + 1]])


def test_each_frame_has_its_own_mode(tmp_path: Path) -> None:
    """A candidate's frame, an exact one and one that asks for what there is no permission for."""
    from kvtier_core.receipts import PublishArm
    from tests.unit.core.builders import CANDIDATE

    with engine(tmp_path, [cpu(64)]) as built:
        plain = Driver.open(built, Rows.random(TOKENS, 0))
        chosen = Driver.open(built, Rows.random(TOKENS, 1), selector=quest(24))
        for driver in (plain, chosen):
            driver.forward(CHUNK)
        candidate = StepMode(PublishArm.CANDIDATE, selector=quest(24), candidate_digest=CANDIDATE)
        got = built.step_many(
            [plain.request(0, CHUNK, CHUNK + 1), chosen.request(0, CHUNK, CHUNK + 1)], [None, candidate]
        )
        arms = [answer.receipt.arm for answer in got if isinstance(answer, StepAnswer)]
        assert arms == [PublishArm.EXACT, PublishArm.CANDIDATE]
        refused = built.step_many([plain.request(1, CHUNK, CHUNK + 1)], [StepMode(PublishArm.CANDIDATE)])
        Ragged.compare(refused, [Reason.NO_CANDIDATE])
        with pytest.raises(CoreError, match="2 modes for 1 frames"):
            built.step_many([plain.request(1, CHUNK, CHUNK + 1)], [None, None])
        assert built.step_many([]) == []
