"""Steps of a session in an exact candidate's lane: which of them may use what is kept, and how they are
planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier_core.placements.preference import PlacementPreference, PlanKind
from kvtier_core.receipts import PublishArm, StepMode
from tests.unit.core.builders import CANDIDATE, CHUNK, Driver, Rows, cpu, engine, gpu, nvme

LANE = "lane-1"
PARTITION = PlacementPreference("partition", prefer=PlanKind.SUPPORT_PARTITION)
PREFILL = 2 * CHUNK + 2


def mode(**changes: object) -> StepMode:
    fields = {"publish": PublishArm.CANDIDATE, "candidate_digest": CANDIDATE, "lane": LANE}
    return StepMode(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "ran"),
    [
        pytest.param(None, PlanKind.SUPPORT_PARTITION, id="the-lanes-own"),
        pytest.param(PlanKind.ALL_ROWS_MOVED, PlanKind.ALL_ROWS_MOVED, id="a-forced-one"),
        pytest.param(PlanKind.HEAD_GROUPS, PlanKind.HEAD_GROUPS, id="another-forced-one"),
    ],
)
def test_a_step_that_names_its_plan_is_run_by_that_one(
    tmp_path: Path, asked: PlanKind | None, ran: PlanKind
) -> None:
    rows = Rows.random(PREFILL + 6)
    with engine(tmp_path / "alone", [gpu(64)]) as built:
        want = Driver.open(built, rows).play(PREFILL, 6)
    with engine(tmp_path / "lane", [gpu(4), cpu(64)]) as built:
        built.prepare_lane(LANE, PARTITION)
        driver = Driver.open(built, rows, lane=LANE)
        parts = [driver.forward(PREFILL, mode())]
        # The first of them leaves what the short way keeps. An exact answer would take it out of the lane.
        parts += [driver.forward(1, mode()) for _ in range(3)]
        before = len(driver.answers)
        parts += [driver.forward(1, mode(plan=None if asked is None else asked.value)) for _ in range(3)]
    assert {answer.receipt.plan_kind for answer in driver.answers[before:]} == {ran.value}
    assert {answer.receipt.arm for answer in driver.answers[before:]} == {PublishArm.CANDIDATE}
    assert torch.equal(torch.cat(parts, dim=1), want)


def test_the_lanes_frames_go_the_short_way_while_they_name_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, [cpu(64)]) as built:
        built.prepare_lane(LANE, PARTITION)
        driver = Driver.open(built, Rows.random(PREFILL + 4), lane=LANE)
        driver.forward(PREFILL, mode())
        driver.forward(1, mode())
        general: list[str] = []
        run: Callable[..., object] = built._runner.run

        def counted(*given: object) -> object:
            general.append("frame")
            return run(*given)

        monkeypatch.setattr(built._runner, "run", counted)
        driver.forward(1, mode())
        assert not general
        driver.forward(1, mode(plan=PlanKind.SUPPORT_PARTITION.value))
        assert general


def test_a_chunk_that_moves_costs_its_own_layer_what_was_kept(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(64), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(PREFILL + 3))
        driver.forward(PREFILL)
        driver.forward(1)
        context = built._contexts[driver.handle.session_id]
        before = list(context.resident)
        assert all(kept is not None and kept.resident for kept in before)
        line = context.session.layers[1].lines[0]
        with built._lock:
            built._store.placement._demote(line, 1)
        assert context.resident[1] is None
        others = [layer for layer in range(len(before)) if layer != 1]
        assert [context.resident[layer] for layer in others] == [before[layer] for layer in others]
