"""The receipt of a step is held against what was read, and a selection against the rows there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvtier_core.errors import Reason
from kvtier_core.receiptcheck.step import check_step
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode, StepReceipt
from kvtier_core.selectors.base import Selection
from kvtier_core.selectors.live import LiveIndex
from tests.unit.core.builders import CANDIDATE, Driver, Rows, cpu, engine, gpu, quest
from tests.unit.core.fixture_f2 import refusal

SERVED = StepMode(publish=PublishArm.CANDIDATE, selector=quest(), candidate_digest=CANDIDATE)


def receipts(folder: Path) -> tuple[StepReceipt, StepReceipt, str]:
    """An exact and an approximate receipt of a real session, and the baseline's digest."""
    with engine(folder, [gpu(8), cpu(8)]) as built:
        driver = Driver.open(built, Rows.random(80), quest())
        driver.play(70, 1)
        exact = driver.answers[-1].receipt
        driver.forward(1, SERVED)
        return exact, driver.answers[-1].receipt, built.live_manifest().digest()


def test_a_step_receipt_with_one_wrong_field_is_refused(tmp_path: Path) -> None:
    exact, approximate, baseline = receipts(tmp_path)
    assert (exact.exactness, approximate.exactness) == (ExactnessClass.EXACT, ExactnessClass.APPROXIMATE)

    def check(receipt: StepReceipt, visible: int, histories: int = 1) -> None:
        check_step(receipt, visible=visible, baseline_digest=baseline, histories=histories)

    check(exact, 71)
    check(approximate, 72)
    wrong: list[tuple[StepReceipt, dict[str, object], int, Reason]] = [
        (exact, {"rows_attended": 70}, 71, Reason.SUPPORT_GAP),
        (exact, {"support_digest": approximate.support_digest}, 71, Reason.SUPPORT_GAP),
        (exact, {"manifest_digest": CANDIDATE}, 71, Reason.MANIFEST_MISMATCH),
        (approximate, {"exactness": ExactnessClass.EXACT}, 72, Reason.SUPPORT_GAP),
        (approximate, {"arm": PublishArm.EXACT}, 72, Reason.UNDECLARED_APPROXIMATION),
    ]
    for valid, change, visible, reason in wrong:
        mutated = dataclasses.replace(valid, **change)  # type: ignore[arg-type]
        assert refusal(lambda mutated=mutated, visible=visible: check(mutated, visible)) is reason  # type: ignore[misc]
    assert refusal(lambda: check(exact, 71, histories=2)) is Reason.UNDECLARED_APPROXIMATION
    over = dataclasses.replace(exact, exactness=ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY)
    check(over, 71, histories=2)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([0, 5, 72], Reason.CANDIDATE_OUT_OF_RANGE),
        ([0, 5, 5], Reason.DUPLICATE_POSITION),
        ([0, 9, 5], Reason.DUPLICATE_POSITION),
        ([65, 5, 9], Reason.DUPLICATE_POSITION),
    ],
    ids=["beyond the frontier", "twice", "not in order", "chunks not in order"],
)
def test_a_selection_of_rows_that_there_are_not_is_answered_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int], reason: Reason
) -> None:
    honest = LiveIndex.select

    def select(index: LiveIndex, *asked: object, may_widen: bool) -> Selection:
        found = honest(index, *asked)  # type: ignore[arg-type]
        wrong = np.array(rows, dtype=np.int64)
        return dataclasses.replace(found, positions=(*found.positions[:-1], wrong))

    with engine(tmp_path, [gpu(8), cpu(8)]) as built:
        driver = Driver.open(built, Rows.random(80), quest())
        driver.play(70, 1)
        monkeypatch.setattr(LiveIndex, "select", select)
        driver.forward(1, SERVED)
        receipt = driver.answers[-1].receipt
    assert (receipt.exactness, receipt.fallback) == (ExactnessClass.EXACT, reason.value)
