"""Fork and truncate: the same bits as sessions that never were edited, and every slot accounted for once."""

from __future__ import annotations

import dataclasses
import errno
import threading
from pathlib import Path

import pytest
import torch

from kvtier_core.appends import Session
from kvtier_core.edits.branching import Branch, Branching, Patience
from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest, Reposition, Truncate
from kvtier_core.engine import MAX_SESSIONS, CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode
from tests.unit.core.builders import (
    CANDIDATE,
    CHUNK,
    LAYERS,
    Driver,
    FakeClock,
    Fault,
    FaultyFiles,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    nvme,
    quest,
)
from tests.unit.core.editing import edit, fork, spliced

TOKENS = 3 * CHUNK + 20
WIDE = [gpu(64)]
# Two open chunks a layer; what is sealed goes down.
NARROW = [gpu(2 * LAYERS), cpu(3), nvme(64)]


def alone(folder: Path, rows: Rows, tokens: int) -> torch.Tensor:
    with engine(folder, WIDE) as built:
        return Driver.open(built, rows).forward(tokens, block=CHUNK)


@pytest.mark.parametrize("tiers", [WIDE, NARROW], ids=["one-tier", "three-tiers"])
@pytest.mark.parametrize("at", [3, CHUNK, CHUNK + 10], ids=lambda at: f"at-{at}")
def test_a_fork_and_its_parent_answer_as_two_runs(tmp_path: Path, tiers: list[TierBudget], at: int) -> None:
    first, second = Rows.random(TOKENS, 1), Rows.random(TOKENS, 2)
    other = spliced(first, at, second)
    with engine(tmp_path / "forked", tiers) as built:
        parent = Driver.open(built, first)
        parent.forward(at)
        child = fork(parent, other)
        outs = [torch.cat([driver.forward(1) for _ in range(20)], dim=1) for driver in (parent, child)]
        rest = TOKENS - parent.position
        # Turn by turn, so that each seals chunks while the other has its own.
        for driver in (child, parent):
            outs.append(driver.forward(rest))
    wanted = [alone(tmp_path / str(n), rows, TOKENS)[:, at:] for n, rows in enumerate((first, other))]
    assert torch.equal(torch.cat((outs[0], outs[3]), dim=1), wanted[0])
    assert torch.equal(torch.cat((outs[1], outs[2]), dim=1), wanted[1])


def test_sealed_chunks_are_shared_and_the_open_one_is_copied(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        parent = Driver.open(built, Rows.random(TOKENS))
        parent.forward(2 * CHUNK + 10)
        before = built.stats()
        assert before.chunks == 3 * LAYERS
        child = fork(parent)
        after = built.stats()
        assert after.chunks == before.chunks + LAYERS
        # One open chunk a layer was reserved when the parent opened, and one for the child.
        assert after.tiers[0].bytes.rows - before.tiers[0].bytes.rows == LAYERS * (
            before.tiers[0].capacity_bytes // 64
        )
        grandchild = fork(child)
        assert built.stats().chunks == 5 * LAYERS
        parent.close()
        assert built.stats().chunks == 4 * LAYERS
        child.close()
        assert built.stats().chunks == 3 * LAYERS
        grandchild.forward(1)
        grandchild.close()
        assert built.stats().chunks == 0


@pytest.mark.parametrize("first_to_go", ["parent", "child"])
def test_closing_one_side_never_frees_the_others_rows(tmp_path: Path, first_to_go: str) -> None:
    rows = Rows.random(TOKENS)
    wanted = alone(tmp_path / "alone", rows, TOKENS)
    with engine(tmp_path / "forked", NARROW) as built:
        parent = Driver.open(built, rows)
        parent.forward(2 * CHUNK + 1)
        child = fork(parent)
        gone, stays = (parent, child) if first_to_go == "parent" else (child, parent)
        assert gone.close() == 2 * CHUNK + 1
        # Somebody else's rows take every slot that may have come free.
        other = Driver.open(built, Rows.random(TOKENS, 9))
        other.forward(3 * CHUNK)
        assert torch.equal(stays.forward(TOKENS - stays.position), wanted[:, 2 * CHUNK + 1 :])


def test_a_shared_chunk_moves_for_all_its_owners(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    wanted = alone(tmp_path / "alone", rows, TOKENS)
    with engine(tmp_path / "forked", [gpu(4 * LAYERS), nvme(64)]) as built:
        parent = Driver.open(built, rows)
        parent.forward(CHUNK + 1)
        child = fork(parent)
        other = Driver.open(built, Rows.random(4 * CHUNK, 9))
        other.forward(4 * CHUNK)
        for driver in (parent, child):
            driver.forward(1)
            chunks = built.list_chunks(driver.handle.session_id, driver.handle.generation)
            assert {info.tier_class for info in chunks} == {"flash"}
            assert torch.equal(driver.forward(5), wanted[:, CHUNK + 2 : CHUNK + 7])


@pytest.mark.parametrize("tiers", [WIDE, NARROW], ids=["one-tier", "three-tiers"])
@pytest.mark.parametrize("have", [2 * CHUNK, 2 * CHUNK + 17], ids=lambda have: f"of-{have}")
@pytest.mark.parametrize(
    "to", [0, 1, CHUNK - 1, CHUNK, CHUNK + 9, 2 * CHUNK - 1, 2 * CHUNK], ids=lambda to: f"to-{to}"
)
def test_what_follows_a_cut_is_what_follows_the_prefix(
    tmp_path: Path, tiers: list[TierBudget], have: int, to: int
) -> None:
    first, second = Rows.random(TOKENS, 1), Rows.random(TOKENS, 2)
    rows = spliced(first, to, second)
    with engine(tmp_path / "cut", tiers) as built:
        driver = Driver.open(built, first)
        driver.forward(have)
        answer = edit(driver, Truncate(to))
        assert (answer.changed, answer.next_position, answer.rows) == (have != to, to, to)
        assert answer.position_epoch == (2 if have != to else 1)
        assert built.stats().chunks == -(-to // CHUNK) * LAYERS
        driver.rows = rows
        out = torch.cat((driver.forward(1), driver.forward(TOKENS - to - 1)), dim=1)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.EXACT
    assert torch.equal(out, alone(tmp_path / "alone", rows, TOKENS)[:, to:])


def test_a_cut_inside_a_shared_chunk_leaves_it_to_the_other(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    changed = spliced(rows, 10, Rows.random(TOKENS, 3))
    wanted, other = alone(tmp_path / "a", rows, TOKENS), alone(tmp_path / "b", changed, TOKENS)
    with engine(tmp_path / "forked", NARROW) as built:
        parent = Driver.open(built, rows)
        parent.forward(2 * CHUNK + 5)
        child = fork(parent, changed)
        # The same chunks by number, sealed again with other bytes: on both sides.
        edit(child, Truncate(10))
        assert torch.equal(child.forward(TOKENS - 10), other[:, 10:])
        edit(parent, Truncate(10))
        assert torch.equal(parent.forward(TOKENS - 10), wanted[:, 10:])


def test_names_of_lines_are_spent_only_where_lines_go(tmp_path: Path) -> None:
    """An engine that takes a few rows back at each token must not run out of them."""
    with engine(tmp_path, WIDE) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        driver.forward(CHUNK + 20)
        spent = built._opened
        for _ in range(5):
            edit(driver, Truncate(CHUNK + 10))
            driver.forward(8)
        assert built._opened == spent
        edit(driver, Truncate(CHUNK))
        assert built._opened == spent + 1
        edit(driver, Truncate(CHUNK - 1))
        assert built._opened == spent + 2


@pytest.mark.parametrize("way", ["open", "fork", "cut"])
def test_once_all_numbers_are_spent_nothing_is_named_like_another_and_sessions_go_on(
    tmp_path: Path, way: str
) -> None:
    """F.1.1: identifiers have so many bits, and one that is given again names other bytes."""
    rows = Rows.random(2 * CHUNK)
    with engine(tmp_path / "spent", WIDE) as built:
        driver = Driver.open(built, rows)
        driver.forward(CHUNK + 20)
        built._opened = MAX_SESSIONS - 2
        last = Driver.open(built, rows)
        assert last.handle.generation == MAX_SESSIONS - 1
        last.forward(3)
        held = built.stats()
        calls = {
            "open": lambda: Driver.open(built, rows),
            "fork": lambda: fork(driver),
            "cut": lambda: edit(driver, Truncate(CHUNK - 1)),
        }
        for _ in range(2):
            with pytest.raises(CoreError, match="numbers of sessions are spent") as refused:
                calls[way]()
            assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
        assert built.stats() == held
        # What needs no new name is still done.
        edit(driver, Truncate(CHUNK + 5))
        out = driver.forward(CHUNK - 5)
        assert last.forward(2).shape[1] == 2
    assert torch.equal(out, alone(tmp_path / "alone", rows, 2 * CHUNK)[:, CHUNK + 5 :])


def test_a_cut_heals_a_step_that_stopped_half_way(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    with engine(tmp_path / "cut", WIDE) as built:
        driver = Driver.open(built, rows)
        driver.forward(20)
        built.step(driver.request(0, 20, 40))
        with pytest.raises(CoreError, match="between steps") as refused:
            fork(driver)
        assert refused.value.reason is Reason.STEP_ORDER
        assert edit(driver, Truncate(20)).changed
        driver.step += 1
        assert torch.equal(driver.forward(30), alone(tmp_path / "alone", rows, 50)[:, 20:])


@pytest.mark.parametrize("edited", [False, True], ids=["as-computed", "over-a-drop"])
def test_a_cut_anew_takes_no_row_and_refuses_what_was_sent_before(tmp_path: Path, edited: bool) -> None:
    """What a client needs whose frame of layer 0 was refused or not answered: it may still be on its way."""
    rows = Rows.random(60)
    outs = []
    for cuts in (False, True):
        with engine(tmp_path / f"{cuts}", WIDE) as built:
            driver = Driver.open(built, rows)
            driver.forward(20)
            if edited:
                edit(driver, Drop(((3, 9),)))
            epoch, chunks = 2 if edited else 1, built.stats().chunks
            if cuts:
                assert not edit(driver, Truncate(20), epoch).changed
                held = dataclasses.replace(driver.request(0, 20, 21), position_epoch=epoch)
                for again in range(2):
                    answer = edit(driver, Truncate(20, anew=True), epoch)
                    assert (answer.changed, answer.position_epoch) == (True, epoch + 1), again
                assert (answer.next_position, built.stats().chunks) == (20, chunks)
                with pytest.raises(CoreError) as refused:
                    built.step(held)
                assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
                driver.step += 5
            outs.append(driver.forward(40))
            receipt = driver.answers[-1].receipt
            outs.append(receipt.producer_digest)
            assert receipt.exactness is (
                ExactnessClass.EXACT_OVER_EDITED_HISTORY if edited else ExactnessClass.EXACT
            )
    assert torch.equal(outs[0], outs[2])
    assert outs[1] == outs[3]


CASES = [
    pytest.param(-1, 0, Reason.BAD_ARGUMENT, "truncate.to is -1; legal: 0 to 20", id="below"),
    pytest.param(21, 0, Reason.BAD_ARGUMENT, "truncate.to is 21; legal: 0 to 20", id="beyond"),
    pytest.param(
        5, 7, Reason.POSITION_CONTRACT_MISMATCH, "position_epoch 7 is not the session's 1", id="epoch"
    ),
]


@pytest.mark.parametrize(("to", "epoch", "reason", "message"), CASES)
def test_a_refused_cut_changes_nothing(
    tmp_path: Path, to: int, epoch: int, reason: Reason, message: str
) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = Driver.open(built, Rows.random(40))
        driver.forward(20)
        with pytest.raises(CoreError, match=message) as refused:
            edit(driver, Truncate(to), epoch)
        assert refused.value.reason is reason
        assert torch.equal(driver.forward(20), alone(tmp_path / "alone", driver.rows, 40)[:, 20:])


def test_a_retry_with_the_epoch_of_before_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = Driver.open(built, Rows.random(40))
        driver.forward(20)
        assert edit(driver, Truncate(10), epoch=1).position_epoch == 2
        with pytest.raises(CoreError) as refused:
            edit(driver, Truncate(5), epoch=1)
        assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
        assert refused.value.facts["position_epoch"] == "2"


class _Late(FakeClock):
    """Past every deadline from the `after`-th reading on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __call__(self) -> float:
        self.left -= 1
        return self.now if self.left >= 0 else self.now + 1e6


def _held(built: CacheEngine) -> tuple[int, int, int]:
    """Chunks, open ones and slots that rows pay for, wherever they are: room that was made stays made."""
    stats = built.stats()
    paid = sum(built._parts.ledger.granted(tier) for tier in range(len(stats.tiers)))
    return stats.chunks, stats.open_chunks, paid


def _session(built: CacheEngine, have: int) -> Driver:
    driver = Driver.open(built, Rows.random(TOKENS))
    driver.forward(have)
    return driver


@pytest.mark.parametrize("after", [0, 1], ids=["before-the-first-layer", "between-layers"])
def test_a_late_edit_leaves_all_as_it_was(tmp_path: Path, after: int) -> None:
    clock = _Late(10**9)
    wanted = alone(tmp_path / "alone", Rows.random(TOKENS), TOKENS)
    with engine(tmp_path / "late", NARROW, clock=clock) as built:
        driver = _session(built, 2 * CHUNK + 3)
        before = _held(built)
        name, generation = driver.handle.session_id, driver.handle.generation
        clock.left = after
        with pytest.raises(CoreError) as cut:
            built.edit_session(EditRequest(name, generation, Truncate(CHUNK + 1), deadline=clock.now))
        clock.left = after
        with pytest.raises(CoreError) as forked:
            built.fork_session(ForkRequest(name, generation, deadline=clock.now))
        clock.left = 10**9
        assert cut.value.reason is forked.value.reason is Reason.DEADLINE
        assert _held(built) == before
        assert torch.equal(driver.forward(TOKENS - driver.position), wanted[:, 2 * CHUNK + 3 :])


def test_a_fork_that_is_late_behind_its_last_layer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked has given up, and would not know of it."""
    clock = _Late(10**9)
    prepare = Branching.prepare_branch

    def slow(branching: Branching, parent: Session, child: Session, patience: Patience) -> Branch:
        made = prepare(branching, parent, child, patience)
        clock.left = 0
        return made

    with engine(tmp_path, NARROW, clock=clock) as built:
        driver = _session(built, 2 * CHUNK + 3)
        before = _held(built)
        name, generation = driver.handle.session_id, driver.handle.generation
        with monkeypatch.context() as patched:
            patched.setattr(Branching, "prepare_branch", slow)
            with pytest.raises(CoreError) as forked:
                built.fork_session(ForkRequest(name, generation, deadline=clock.now))
        clock.left = 10**9
        assert forked.value.reason is Reason.DEADLINE
        assert _held(built) == before
        driver.forward(TOKENS - driver.position)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("kind", ["flip", errno.EIO], ids=["flipped-bit", "EIO"])
def test_a_cut_through_a_block_that_cannot_be_read_changes_nothing(
    tmp_path: Path, layer: int, kind: int | str
) -> None:
    files = FaultyFiles()
    wanted = alone(tmp_path / "alone", Rows.random(TOKENS), TOKENS)
    with engine(tmp_path / "cut", [gpu(LAYERS), nvme(64)], files=files) as built:
        driver = _session(built, 2 * CHUNK + 3)
        before = _held(built)
        files.faults.append(Fault("read", files.calls.get("read", 0) + layer, kind))
        with pytest.raises(CoreError) as refused:
            edit(driver, Truncate(CHUNK + 1))
        assert refused.value.reason in (
            Reason.STORAGE_UNAVAILABLE,
            Reason.CHECKSUM_MISMATCH,
            Reason.IDENTITY_MISMATCH,
            Reason.SHORT_COPY,
            Reason.RECYCLED_DESTINATION,
        )
        assert _held(built) == before
        assert torch.equal(driver.forward(TOKENS - driver.position), wanted[:, 2 * CHUNK + 3 :])


def test_edits_of_one_side_on_another_thread_reach_no_bit_of_the_other(tmp_path: Path) -> None:
    """Frames of the parent come between forks, drops, cuts and closings of its children."""
    rows = Rows.random(TOKENS)
    wanted = alone(tmp_path / "alone", rows, TOKENS)
    with engine(tmp_path / "forked", NARROW) as built:
        parent = Driver.open(built, rows)
        parent.forward(CHUNK + 9)
        begun, done = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def branch() -> None:
            try:
                number = 0
                while number < 3 or not done.is_set():
                    try:
                        child = fork(parent, spliced(rows, CHUNK + 9, Rows.random(TOKENS, number)))
                    except CoreError as error:
                        if error.reason is not Reason.STEP_ORDER:
                            raise
                        # It came in the middle of the parent's step.
                        continue
                    number += 1
                    edit(child, Drop(((3, CHUNK // 2),)))
                    edit(child, Reposition())
                    edit(child, Truncate(20 + number % 7))
                    child.forward(3)
                    child.close()
                    begun.set()
            except BaseException as error:
                failures.append(error)
            finally:
                begun.set()

        other = threading.Thread(target=branch)
        other.start()
        assert begun.wait(60)
        outs = [parent.forward(1) for _ in range(60)]
        done.set()
        other.join(60)
        assert not failures
        assert torch.equal(torch.cat(outs, dim=1), wanted[:, CHUNK + 9 : CHUNK + 69])
        assert built.stats().sessions == 1


def test_a_fork_without_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(2 * LAYERS + 1)]) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        driver.forward(CHUNK + 3)
        before = built.stats()
        with pytest.raises(CoreError, match="open chunks wanted") as refused:
            fork(driver)
        assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
        assert built.stats() == before


@pytest.mark.parametrize("kind", ["fork", "truncate"])
def test_an_index_follows_the_history(tmp_path: Path, kind: str) -> None:
    """Page boxes are built again from the rows: the approximate answers are those of a session that has only
    these rows, and its exact ones stay exact."""
    rows = Rows.random(TOKENS)
    mode = StepMode(PublishArm.CANDIDATE, selector=quest(), candidate_digest=CANDIDATE)
    at = CHUNK + 13

    def run(built: CacheEngine, have: int) -> Driver:
        driver = Driver.open(built, rows, quest())
        driver.forward(have)
        return driver

    with engine(tmp_path / "edited", WIDE) as built:
        driver = run(built, at if kind == "fork" else 2 * CHUNK)
        if kind == "fork":
            driver = fork(driver)
        else:
            edit(driver, Truncate(at))
        driver.forward(1)
        out = torch.cat([driver.forward(1, mode) for _ in range(20)], dim=1)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.APPROXIMATE
    with engine(tmp_path / "plain", WIDE) as built:
        plain = run(built, at)
        plain.forward(1)
        wanted = torch.cat([plain.forward(1, mode) for _ in range(20)], dim=1)
        assert plain.answers[-1].receipt.exactness is ExactnessClass.APPROXIMATE
    assert torch.equal(out, wanted)


def test_a_cut_below_approximate_rows_gives_an_exact_history_back(tmp_path: Path) -> None:
    mode = StepMode(PublishArm.CANDIDATE, selector=quest(), candidate_digest=CANDIDATE)
    with engine(tmp_path, WIDE) as built:
        driver = Driver.open(built, Rows.random(TOKENS), quest())
        driver.forward(CHUNK)
        driver.forward(3, None)
        first = driver.position
        driver.forward(1, mode)
        assert driver.forward(1) is not None
        assert driver.answers[-1].receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
        edit(driver, Truncate(first + 1))
        driver.forward(1)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
        edit(driver, Truncate(first))
        driver.forward(1)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.EXACT
