"""Forks whose rows lie on storage, of a whole engine over real files: what they share is read once a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import StepAnswer
from kvtier_core.tiers.nvme.tier import NvmeTier
from kvtier_core.tiers.transfer import TransferItem
from tests.unit.core.builders import CHUNK, LAYERS, SLOT, Driver, Rows, cpu, engine, nvme
from tests.unit.core.editing import fork, spliced
from tests.unit.core.test_core_ragged import same
from tests.unit.core.test_core_streamed import FAULTS, Flaw, general_frames

COMMON = 3 * CHUNK + 5
TOKENS = COMMON + 2 * CHUNK
STORED = [cpu(8 * LAYERS), nvme(64)]


@cache
def rows(own: int) -> Rows:
    """A common beginning, and rows of its own behind it."""
    return spliced(Rows.random(TOKENS), COMMON, Rows.random(TOKENS, 1 + own))


@cache
def want(own: int) -> torch.Tensor:
    with TemporaryDirectory() as folder, engine(Path(folder), [cpu(64)]) as built:
        return Driver.open(built, rows(own)).forward(TOKENS)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of storage as they are read."""
    found: list[int] = []
    submit = NvmeTier.submit_read

    def counted(tier: NvmeTier, items: Sequence[TransferItem], *given: object) -> None:
        submit(tier, items, *given)  # type: ignore[arg-type]
        found.extend(item.ref.slot for item in items)

    monkeypatch.setattr(NvmeTier, "submit_read", counted)
    return found


def family(built: CacheEngine, count: int) -> list[Driver]:
    """A session and its forks, all of which stand at the end of what they have in common."""
    parent = Driver.open(built, rows(0))
    parent.forward(COMMON)
    send_down(parent)
    return [parent, *(fork(parent, rows(number)) for number in range(1, count))]


def send_down(driver: Driver) -> None:
    """All sealed chunks that are this session's alone."""
    driver.engine.demote_session(driver.handle.session_id, driver.handle.generation, 64)


def layer_of_a_token(
    built: CacheEngine, drivers: Sequence[Driver], layer: int, **changes: object
) -> list[StepAnswer | CoreError]:
    return built.step_many([one.request(layer, one.position, one.position + 1, **changes) for one in drivers])


def a_token(
    built: CacheEngine, drivers: Sequence[Driver], owns: Sequence[int], follows: bool = False
) -> None:
    """Of which every answer is that of the session's rows alone."""
    for layer in range(LAYERS):
        given = layer_of_a_token(built, drivers, layer, next_layer_follows=follows and layer + 1 < LAYERS)
        for driver, own, answer in zip(drivers, owns, given, strict=True):
            assert isinstance(answer, StepAnswer)
            assert same(answer.out, want(own)[layer, driver.position : driver.position + 1])
            driver.answers.append(answer)
    for driver in drivers:
        driver.position += 1
        driver.step += 1


def all_back(built: CacheEngine) -> None:
    assert not built._store.directory.readers.any()
    assert built._plans.buffers.available == built._plans.buffers.limit


@pytest.mark.parametrize("follows", [False, True], ids=["unpromised", "promised"])
def test_forks_in_one_call_read_each_block_once(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    with engine(tmp_path, STORED) as built:
        drivers = family(built, 4)
        a_token(built, drivers, range(4), follows)
        general = general_frames(built, monkeypatch)
        for _ in range(3):
            reads.clear()
            a_token(built, drivers, range(4), follows)
            assert len(reads) == len(set(reads)) == LAYERS * 3
            for driver in drivers:
                for answer in driver.answers[-LAYERS:]:
                    receipt = answer.receipt
                    assert receipt.bytes_by_tier["flash"] == 3 * SLOT
                    first = driver is drivers[0]
                    assert receipt.shared_bytes_by_tier == (None if first else {"flash": 3 * SLOT})
                    assert receipt.failed_plans == ()
                assert driver.answers[-1].receipt.promised_bytes == (3 * SLOT if follows else 0)
        assert general == []
        all_back(built)


def test_a_promise_that_forks_were_given_is_kept_for_each_whether_they_come_together_or_not(
    tmp_path: Path, reads: list[int]
) -> None:
    with engine(tmp_path, STORED) as built:
        drivers = family(built, 3)
        a_token(built, drivers, range(3))
        reads.clear()
        layer_of_a_token(built, drivers, 0, next_layer_follows=True)
        assert len(reads) == LAYERS * 3
        for number, driver in enumerate(drivers):
            at = driver.position
            answer = built.step(driver.request(1, at, at + 1))
            assert same(answer.out, want(number)[1, at : at + 1])
            receipt = answer.receipt
            assert receipt.promised_bytes == receipt.bytes_by_tier["flash"] == 3 * SLOT
            assert receipt.shared_bytes_by_tier == ({"flash": 3 * SLOT} if number else None)
        assert len(reads) == LAYERS * 3
        all_back(built)


def test_forks_that_went_on_by_themselves_share_what_they_still_have_in_common(
    tmp_path: Path, reads: list[int]
) -> None:
    with engine(tmp_path, STORED) as built:
        drivers = family(built, 3)
        other = Driver.open(built, rows(9))
        other.forward(COMMON)
        for driver in drivers[1:]:
            # Into a chunk behind the one that was open, so that this is on storage too.
            driver.forward(CHUNK)
        for driver in [*drivers[1:], other]:
            send_down(driver)
        company, owns = [drivers[1], other, drivers[0], drivers[2]], [1, 9, 0, 2]
        a_token(built, company, owns)
        reads.clear()
        a_token(built, company, owns)
        # Three blocks in common, one more of each of two forks, and three of a session of its own.
        assert len(reads) == len(set(reads)) == LAYERS * (3 + 2 + 3)
        shared = [one.answers[-1].receipt.shared_bytes_by_tier for one in company]
        assert shared == [None, None, {"flash": 3 * SLOT}, {"flash": 3 * SLOT}]
        all_back(built)


@pytest.mark.parametrize("fault", FAULTS.keys())
def test_a_shared_block_that_fails_once_costs_its_frames_another_plan_and_no_other_frame_anything(
    tmp_path: Path, fault: str
) -> None:
    files = Flaw()
    with engine(tmp_path, STORED, files=files) as built:
        drivers = family(built, 3)
        other = Driver.open(built, rows(9))
        other.forward(COMMON)
        send_down(other)
        company, owns = [drivers[0], other, drivers[1], drivers[2]], [0, 9, 1, 2]
        a_token(built, company, owns)
        files.of(drivers[0], 0, fault, 1)
        a_token(built, company, owns)
        failed = [one.answers[-LAYERS].receipt.failed_plans for one in company]
        mine = (("supportPartition", FAULTS[fault].value),)
        assert failed == [mine, (), mine, mine]
        a_token(built, company, owns)
        all_back(built)


@pytest.mark.parametrize("fault", FAULTS.keys())
def test_a_block_that_goes_on_failing_is_refused_to_each_of_its_frames_and_harms_no_other(
    tmp_path: Path, fault: str
) -> None:
    files = Flaw()
    with engine(tmp_path, STORED, files=files) as built:
        drivers = family(built, 3)
        drivers[2].forward(CHUNK)
        send_down(drivers[2])
        a_token(built, drivers, range(3))
        files.of(drivers[0], 0, fault, 1 << 20)
        why = FAULTS[fault]
        for answer in layer_of_a_token(built, drivers, 0):
            assert isinstance(answer, CoreError) and answer.reason is why
            attempted = f"supportPartition:{why.value},allRowsMoved:{why.value}"
            assert answer.facts["attempted"] == attempted
        files.times = 0
        a_token(built, drivers, range(3))
        all_back(built)


@pytest.mark.parametrize("fault", FAULTS.keys())
def test_a_block_of_one_fork_that_goes_on_failing_is_that_forks_refusal(tmp_path: Path, fault: str) -> None:
    files = Flaw()
    with engine(tmp_path, STORED, files=files) as built:
        drivers = family(built, 3)
        drivers[2].forward(CHUNK)
        send_down(drivers[2])
        a_token(built, drivers, range(3))
        files.of(drivers[2], 0, fault, 1 << 20, chunk=3)
        first, second, third = layer_of_a_token(built, drivers, 0)
        assert isinstance(third, CoreError) and third.reason is FAULTS[fault]
        for number, answer in enumerate((first, second)):
            at = drivers[number].position
            assert isinstance(answer, StepAnswer)
            assert answer.receipt.failed_plans == ()
            assert same(answer.out, want(number)[0, at : at + 1])
        files.times = 0
        again = layer_of_a_token(built, drivers[2:], 0)
        assert isinstance(again[0], StepAnswer)
        at = drivers[2].position
        assert same(again[0].out, want(2)[0, at : at + 1])
        all_back(built)


def test_a_late_fork_costs_no_other_its_answer(tmp_path: Path) -> None:
    with engine(tmp_path, STORED) as built:
        drivers = family(built, 3)
        a_token(built, drivers, range(3))
        deadlines = [None, 1.0, None]
        frames = [
            one.request(0, one.position, one.position + 1, deadline=deadline)
            for one, deadline in zip(drivers, deadlines, strict=True)
        ]
        first, late, third = built.step_many(frames)
        assert isinstance(late, CoreError) and late.reason is Reason.DEADLINE
        for number, answer in ((0, first), (2, third)):
            at = drivers[number].position
            assert isinstance(answer, StepAnswer)
            assert same(answer.out, want(number)[0, at : at + 1])
        [again] = layer_of_a_token(built, drivers[1:2], 0)
        assert isinstance(again, StepAnswer)
        assert same(again.out, want(1)[0, drivers[1].position : drivers[1].position + 1])
        all_back(built)
