"""Drops and repositions in an engine: what they leave alone to the bit, what goes stale with them, and what
an answer over an edited history says of itself."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_core.edits.history import edit_digest
from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest, Move, Operation, Reposition, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.positions import UNEDITED
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode
from kvtier_core.rope import RopeTable
from kvtier_kernels.ops.segment_decode.torch_impl import rotate
from tests.unit.core import builders
from tests.unit.core.builders import (
    CANDIDATE,
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SCALE,
    Driver,
    Rows,
    cpu,
    engine,
    gpu,
    nvme,
    quest,
)
from tests.unit.core.editing import edit, fork

TOKENS = 4 * CHUNK
WIDE = [gpu(64)]
NARROW = [gpu(2 * LAYERS), cpu(3), nvme(64)]


def begun(built: CacheEngine, have: int, seed: int = 0, **terms: object) -> Driver:
    driver = Driver.open(built, Rows.random(TOKENS, seed), **terms)  # type: ignore[arg-type]
    driver.forward(have)
    return driver


NOTHING = [
    pytest.param(lambda at: [Drop(())], id="drop-nothing"),
    pytest.param(lambda at: [Reposition()], id="close-no-gap"),
    pytest.param(lambda at: [Reposition((Move(3, 9, 3), Move(9, at, 9)))], id="delta-0"),
    pytest.param(
        lambda at: [Reposition((Move(0, at, 7),)), Reposition((Move(7, at + 7, 0),))], id="and-back"
    ),
    pytest.param(lambda at: [Truncate(at)], id="truncate-to-the-end"),
]


@pytest.mark.parametrize("operations", NOTHING)
def test_what_changes_nothing_is_no_edit_and_no_bit(
    tmp_path: Path, operations: Callable[[int], list[Operation]]
) -> None:
    at = 2 * CHUNK + 9
    with engine(tmp_path / "a", NARROW) as built:
        plain = begun(built, at)
        wanted = plain.forward(5)
    with engine(tmp_path / "b", NARROW) as built:
        driver = begun(built, at)
        answers = [edit(driver, operation) for operation in operations(at)]
        session = built._sessions[driver.handle.session_id]
        assert session.positions == UNEDITED and not session.edits
        # Only what was done and undone has been an epoch.
        assert answers[-1].position_epoch == 1 + sum(answer.changed for answer in answers)
        assert torch.equal(driver.forward(5), wanted)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.EXACT
        assert driver.answers[-1].receipt.support_digest == plain.answers[-1].receipt.support_digest


def test_rows_around_a_drop_have_the_bits_of_their_chunks(tmp_path: Path) -> None:
    """A whole chunk is dropped: what is left is attended by the states of before, so that dropping the same
    rows in another way, or elsewhere, changes no bit."""
    outs = []
    for tiers, ranges in (
        (WIDE, [((CHUNK, 2 * CHUNK),)]),
        (NARROW, [((CHUNK, 2 * CHUNK),)]),
        (NARROW, [((CHUNK, CHUNK + 30), (CHUNK + 30, 2 * CHUNK))]),
        (WIDE, [((CHUNK + 30, 2 * CHUNK),), ((CHUNK, CHUNK + 40),)]),
    ):
        with engine(tmp_path / str(len(outs)), tiers) as built:
            driver = begun(built, 3 * CHUNK + 5)
            for part in ranges:
                edit(driver, Drop(part))
            outs.append((driver.forward(7), driver.answers[-1].receipt))
    for out, receipt in outs[1:]:
        assert torch.equal(out, outs[0][0])
        assert receipt.support_digest == outs[0][1].support_digest
    # Of one cache; the tiers are part of the baseline, and so of every history.
    producers = [receipt.producer_digest for _, receipt in outs]
    assert producers[0] == producers[3] != producers[1] == producers[2]
    assert outs[0][1].rows_attended == 2 * CHUNK + 12


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_moved_rows_are_attended_where_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    """Against float64 with every key turned one by one, as complex numbers."""
    given = builders.manifest

    def declared(*terms: Any) -> Any:
        found = given(*terms)
        rope = found.model.rope.model_copy(update={"interleaved": interleaved})
        return found.model_copy(update={"model": found.model.model_copy(update={"rope": rope})})

    monkeypatch.setattr(builders, "manifest", declared)
    with engine(tmp_path, NARROW) as built:
        driver = Driver.open(built, Rows.random(1200))
        driver.forward(2 * CHUNK)
        edit(driver, Drop(((30, 90),)))
        edit(driver, Reposition((Move(90, 2 * CHUNK, 1040),)))
        first, rows = driver.position, driver.rows
        assert first == 1040 + 2 * CHUNK - 90
        # The driver takes rows by position; these come next.
        new = Rows.random(first + 1, 5)
        driver.rows = new
        out = driver.forward(1)
    seen = [*range(30), *range(90, 2 * CHUNK)]
    shifts = [0] * 30 + [950] * (2 * CHUNK - 90) + [0]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + HEAD_DIM // 2) for i in range(HEAD_DIM // 2)]
    for layer in range(LAYERS):
        keys = torch.cat((rows.k[layer, seen], new.k[layer, first:])).double()
        values = torch.cat((rows.v[layer, seen], new.v[layer, first:])).double()
        for row, shift in enumerate(shifts):
            for i, (a, b) in enumerate(pairs):
                plane = torch.complex(keys[row, :, a], keys[row, :, b])
                plane = plane * cmath.exp(1j * shift * 10000 ** (-2 * i / HEAD_DIM))
                keys[row, :, a], keys[row, :, b] = plane.real, plane.imag
        for head in range(QUERY_HEADS):
            of = head * KV_HEADS // QUERY_HEADS
            weights = (keys[:, of] @ new.q[layer, first, head].double() * SCALE).softmax(0)
            assert (out[layer, 0, head].double() - weights @ values[:, of]).abs().max() < 2e-6


def test_forty_moves_one_after_another_have_the_bits_of_one(tmp_path: Path) -> None:
    """D.1.2: a shift is taken against the rotation that a key was stored with. Chained, forty of 96 would
    cost six times the accuracy of one."""
    outs = []
    for shifts in ((40 * 96,), (96,) * 40):
        with engine(tmp_path / str(len(outs)), [gpu(200)]) as built:
            driver = Driver.open(built, Rows.random(4200))
            driver.forward(2 * CHUNK + 10)
            at = 50
            for shift in shifts:
                edit(driver, Reposition((Move(at, driver.position, at + shift),)))
                at += shift
            assert driver.position == 2 * CHUNK + 10 + 40 * 96
            outs.append((driver.forward(3), driver.answers[-1].receipt))
    assert torch.equal(outs[0][0], outs[1][0])
    assert outs[0][1].producer_digest == outs[1][1].producer_digest


HELD = [
    pytest.param(WIDE, float("nan"), id="nan"),
    pytest.param(WIDE, float("inf"), id="inf"),
    pytest.param(NARROW, 1e30, id="as-large-as-can-be-over-three-tiers"),
]


@pytest.mark.parametrize(("tiers", "held"), HELD)
def test_what_a_dropped_span_held_changes_no_bit(
    tmp_path: Path, tiers: list[builders.TierBudget], held: float
) -> None:
    """D.1.1: 0 added to a logit hides nothing, and a weight of 0 does not hide what is not finite."""
    outs = []
    for value in (None, held):
        rows = Rows.random(TOKENS)
        if value is not None:
            rows.k[:, 10 : CHUNK + 9] = rows.v[:, 10 : CHUNK + 9] = value
        with engine(tmp_path / str(value), tiers) as built:
            driver = Driver.open(built, rows)
            driver.forward(2 * CHUNK + 5)
            edit(driver, Drop(((10, CHUNK + 9),)))
            hidden = driver.forward(7)
            edit(driver, Reposition())
            outs.append((hidden, driver.forward(7)))
    for plain, poisoned in zip(*outs, strict=True):
        assert torch.isfinite(plain).all()
        assert torch.equal(plain, poisoned)


def test_two_moves_side_by_side_are_one(tmp_path: Path) -> None:
    outs = []
    for moves in ((Move(20, 100, 50),), (Move(20, 60, 50), Move(60, 100, 90))):
        with engine(tmp_path / str(len(outs)), WIDE) as built:
            driver = begun(built, 100)
            edit(driver, Reposition(moves))
            assert driver.position == 130
            driver.rows = Rows(
                *(torch.cat((x, x), dim=1) for x in (driver.rows.k, driver.rows.v, driver.rows.q))
            )
            outs.append(driver.forward(3))
    assert torch.equal(outs[0], outs[1])


def test_the_core_turns_queries_as_the_kernel_does() -> None:
    frequencies = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(3))
    for interleaved in (False, True):
        table = RopeTable(frequencies, interleaved)
        for delta in (-2500, -1, 0, 7, 1_000_000):
            kernel = rotate(q.unsqueeze(0), torch.tensor([delta]), frequencies, interleaved=interleaved)[0]
            assert torch.equal(table.turned(q, -delta), kernel)


def test_an_edited_history_says_so_and_has_a_producer_of_its_own(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 100)
        baseline = driver.answers[-1].receipt.producer_digest
        edit(driver, Drop(((10, 40),)))
        edit(driver, Reposition())
        assert driver.position == 70
        driver.forward(2)
        receipt = driver.answers[-1].receipt
        assert receipt.exactness is ExactnessClass.EXACT_OVER_EDITED_HISTORY
        assert (receipt.frontier, receipt.position_epoch, receipt.rows_attended) == (72, 3, 72)
        # Both edits at one point of the stream are one, of which the digest is canonical.
        view = UNEDITED.drop(100, ((10, 40),)).compact(100)
        assert receipt.producer_digest == edit_digest(baseline, 100, view)
        edit(driver, Drop(((0, 5),)))
        driver.forward(1)
        chained = driver.answers[-1].receipt.producer_digest
        assert len({baseline, receipt.producer_digest, chained}) == 3
        # Back behind the second edit the first one counts; behind both, none does.
        edit(driver, Truncate(71))
        driver.forward(1)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.EXACT_OVER_EDITED_HISTORY
        edit(driver, Truncate(5))
        assert driver.position == 5


def test_a_cut_below_every_drop_gives_the_exact_history_back(tmp_path: Path) -> None:
    with engine(tmp_path / "a", WIDE) as built:
        driver = begun(built, 100)
        edit(driver, Drop(((60, 80),)))
        edit(driver, Reposition())
        driver.forward(3)
        edit(driver, Truncate(50))
        out = driver.forward(4)
        receipt = driver.answers[-1].receipt
        assert receipt.exactness is ExactnessClass.EXACT
        assert receipt.producer_digest == driver.answers[0].receipt.producer_digest
    with engine(tmp_path / "b", WIDE) as built:
        assert torch.equal(begun(built, 50).forward(4), out)


def test_a_candidate_reads_everything_after_an_edit_and_says_why(tmp_path: Path) -> None:
    mode = StepMode(PublishArm.CANDIDATE, selector=quest(), candidate_digest=CANDIDATE)
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 3 * CHUNK, selector=quest())
        driver.forward(1, mode)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.APPROXIMATE
        child = fork(driver)
        for each in (driver, child):
            edit(each, Truncate(3 * CHUNK))
            edit(each, Drop(((CHUNK, CHUNK + 9),)))
            each.forward(1)
            each.forward(1, mode)
            receipt = each.answers[-1].receipt
            assert receipt.fallback == Reason.INDEX_STALE.value
            assert receipt.exactness is ExactnessClass.EXACT_OVER_EDITED_HISTORY
        # Taken back to before the drop, the rows have an index again.
        edit(driver, Truncate(CHUNK))
        driver.forward(1)
        driver.forward(1, mode)
        assert driver.answers[-1].receipt.exactness is ExactnessClass.APPROXIMATE


def test_an_approximate_history_is_not_whitewashed_by_an_edit(tmp_path: Path) -> None:
    mode = StepMode(PublishArm.CANDIDATE, selector=quest(), candidate_digest=CANDIDATE)
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 3 * CHUNK, selector=quest())
        driver.forward(1, mode)
        edit(driver, Drop(((0, 9),)))
        driver.forward(1)
        receipt = driver.answers[-1].receipt
        assert receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY


def test_chunks_of_an_edited_history_are_listed_to_nobody(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 3 * CHUNK)
        edit(driver, Truncate(3 * CHUNK - 1))
        edit(driver, Drop(((CHUNK, 2 * CHUNK),)))
        edit(driver, Reposition())
        driver.forward(CHUNK)
        listed = built.list_chunks(driver.handle.session_id, driver.handle.generation)
        assert {info.chunk for info in listed} == {0}
        for chunk in (1, 2):
            with pytest.raises(CoreError) as refused:
                built.read_chunk(driver.handle.session_id, driver.handle.generation, 0, chunk, 1)
            assert refused.value.reason is Reason.NOT_VISIBLE


def test_the_same_edit_sent_again_is_answered_again(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 100)
        for operation, epoch in ((Drop(((10, 40),)), 1), (Reposition(), 2), (Truncate(30), 3)):
            first, again = (edit(driver, operation, epoch) for _ in range(2))
            assert first == again and first.position_epoch == epoch + 1
        driver.forward(1)
        # No longer the last thing that happened: it may have been meant for what is there now, or not.
        with pytest.raises(CoreError) as refused:
            edit(driver, Truncate(30), 3)
        assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH


def test_frames_behind_an_edit_or_of_another_epoch_are_refused(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 100)
        stale = driver.request(0, 100, 101)
        edit(driver, Drop(((10, 40),)))
        edit(driver, Reposition())
        cases = (
            (driver.request(0, 70, 71, position_epoch=2), "position_epoch 2 is not the session's 3"),
            (driver.request(0, 60, 61), "position 60 is behind the session's last edit; legal: 70"),
            (stale, "rows start at"),
        )
        for request, message in cases:
            with pytest.raises(CoreError, match=message) as refused:
                built.step(request)
            assert refused.value.reason in (Reason.POSITION_CONTRACT_MISMATCH, Reason.FRONTIER_MISMATCH)
        assert driver.forward(2).shape[1] == 2


def test_what_was_dropped_makes_room_for_more(tmp_path: Path) -> None:
    """max_tokens bounds what the model sees, and chunks of which nothing is seen are given up."""
    with engine(tmp_path, [gpu(2 * LAYERS), cpu(LAYERS)]) as built:
        driver = Driver.open(built, Rows.random(3 * CHUNK))
        for _ in range(4):
            driver.forward(2 * CHUNK - driver.position + 3)
            edit(driver, Drop(((0, 2 * CHUNK),)))
            edit(driver, Reposition())
            assert driver.position == 3
            assert built.stats().chunks == LAYERS


REFUSED = [
    pytest.param(Drop(((5, 5),)), r"drop\.ranges\[0\] is \[5, 5\)", id="empty"),
    pytest.param(
        Drop(((0, 1), (90, 101))), r"drop\.ranges\[1\] is \[90, 101\); legal: .*<= 100", id="beyond"
    ),
    pytest.param(Drop(((-1, 1),)), r"drop\.ranges\[0\]", id="negative"),
    pytest.param(Drop(((0, 1),) * 5000), "5000 long; legal: at most 4096", id="too-many"),
    pytest.param(Reposition((Move(9, 9, 0),)), r"reposition\.moves\[0\]", id="empty-move"),
    pytest.param(Reposition((Move(0, 9, 0), Move(5, 20, 5))), r"moves\[1\] is .*legal: 9 <=", id="overlap"),
    pytest.param(Reposition((Move(0, 9, -1),)), r"moves\[0\]\.to is -1", id="negative-target"),
    pytest.param(Reposition((Move(50, 60, 45),)), "position 45 is taken", id="taken-below"),
    pytest.param(Reposition((Move(0, 9, 95),)), "position 9 is taken", id="taken-above"),
]


@pytest.mark.parametrize(("operation", "message"), REFUSED)
def test_a_wrong_edit_names_its_field_and_changes_nothing(
    tmp_path: Path, operation: Operation, message: str
) -> None:
    with engine(tmp_path / "a", WIDE) as built:
        driver = begun(built, 100)
        session = built._sessions[driver.handle.session_id]
        source, stats = session.source, built.stats()
        with pytest.raises(CoreError, match=message) as refused:
            edit(driver, operation)
        assert refused.value.reason is Reason.BAD_ARGUMENT
        assert (session.source, session.positions, session.position_epoch) == (source, UNEDITED, 1)
        assert built.stats() == stats
        out = driver.forward(3)
    with engine(tmp_path / "b", WIDE) as built:
        assert torch.equal(begun(built, 100).forward(3), out)


def test_edits_stand_between_steps(tmp_path: Path) -> None:
    with engine(tmp_path, WIDE) as built:
        driver = begun(built, 20)
        built.step(driver.request(0, 20, 21))
        for operation in (Drop(((0, 5),)), Reposition()):
            with pytest.raises(CoreError) as refused:
                edit(driver, operation)
            assert refused.value.reason is Reason.STEP_ORDER
        built.step(driver.request(1, 20, 21))
        name, generation = driver.handle.session_id, driver.handle.generation
        assert built.edit_session(EditRequest(name, generation, Drop(((0, 5),)))).rows == 16


def test_a_fork_takes_the_view_along_and_then_has_its_own(tmp_path: Path) -> None:
    with engine(tmp_path, NARROW) as built:
        driver = begun(built, 60)
        edit(driver, Drop(((10, 40),)))
        edit(driver, Reposition())
        handle = built.fork_session(ForkRequest(driver.handle.session_id, driver.handle.generation))
        child, parent = built._sessions[handle.session_id], built._sessions[driver.handle.session_id]
        assert (child.positions, child.edits, child.turning) == (
            parent.positions,
            parent.edits,
            parent.turning,
        )
        built.edit_session(EditRequest(handle.session_id, handle.generation, Truncate(5)))
        assert child.positions == UNEDITED != parent.positions
        assert parent.position_epoch == 3
