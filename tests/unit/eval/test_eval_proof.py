"""A head that is redone: what a run says of it otherwise is refused, and a run redoes some of its heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier_core.receiptcheck.outcomes import OutcomeReason, OutcomeRefused
from kvtier_core.selectors.contract import (
    Budget,
    Guarantee,
    Scope,
    Selection,
    SelectionReceipt,
    Shape,
    Source,
    Unit,
)
from kvtier_eval import metrics
from kvtier_eval.metrics import Collector, persistent_mask
from kvtier_eval.outcomes import Measured
from kvtier_eval.proof import EVERY, Asked, Step
from kvtier_eval.replay import attend_rows
from kvtier_kernels.state import finalize

ROWS, PAGE, SHAPE = 40, 8, Shape(4, 2, 16, 0.25)
SOURCE = Source(b"rows of a prompt", 3)
SINK, RECENT = 2, 3


def selection(unit: Unit, **change: object) -> Selection:
    """One list a KV head: page 1 and page 3, or the rows of the same."""
    persistent = persistent_mask(ROWS, SINK, RECENT).numpy()
    pages = np.array([1, 3])
    chosen = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
    read = np.union1d(chosen, np.flatnonzero(persistent))
    count = (len(pages),) * 2
    receipt = SelectionReceipt(
        "test", "", "", "", 5, SOURCE, Guarantee.HEURISTIC, Scope.KV_HEAD, Budget(tokens=16),
        count, (16, 16), count, (0, 0), 5, 640, (0.0,) * 2, (0.0,) * 2, (0,) * 2, 0,
    )  # fmt: skip
    units = pages if unit is Unit.PAGE else chosen
    made = Selection(Scope.KV_HEAD, (read, read), (units, units), receipt)
    return dataclasses.replace(made, **change)  # type: ignore[arg-type]


class Run:
    """A measured step, with what may be said of it wrongly."""

    def __init__(self, unit: Unit = Unit.PAGE) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.unit, self.selection = unit, selection(unit)
        self.q = torch.randn(4, 16, generator=drawn)
        self.k, self.v = torch.randn(2, ROWS, 2, 16, generator=drawn)
        self.asked = Asked(SOURCE, 5, self.q, ROWS)
        self.layer = 3
        self.collector = Collector(4, SHAPE, (), (), hot=16, page=PAGE)

    def observe(self) -> None:
        chosen = self.selection
        state = attend_rows(self.q, self.k, self.v, chosen, SHAPE)
        answer, persistent = finalize(state)[0][0], persistent_mask(ROWS, SINK, RECENT)
        self.collector.observe(
            self.asked, self.layer, self.q, self.k, self.v, chosen, state, answer, persistent, self.unit
        )


@pytest.mark.parametrize("unit", [Unit.PAGE, Unit.ROW, Unit.CLUSTER])
def test_what_a_run_measures_is_what_its_inputs_give(unit: Unit) -> None:
    run = Run(unit)
    for _ in range(4 * EVERY):
        run.observe()


def of_another(name: str, value: object) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.asked = dataclasses.replace(run.asked, **{name: value})

    return change


def units(run: Run, *pages: int) -> None:
    run.selection = dataclasses.replace(run.selection, units=(np.array(pages),) * 2)


def moved(run: Run) -> None:
    run.asked = dataclasses.replace(run.asked, source=dataclasses.replace(SOURCE, position_epoch=1))


def poisoned(run: Run) -> None:
    run.k[20, 0, 3] = torch.nan


def a_row_out(run: Run) -> None:
    read = run.selection.positions[0]
    run.selection = dataclasses.replace(run.selection, positions=(read[read != 9],) * 2)


def a_row_more(run: Run) -> None:
    read = np.union1d(run.selection.positions[0], [20])
    run.selection = dataclasses.replace(run.selection, positions=(read,) * 2)


Why = OutcomeReason
WRONG: dict[str, tuple[Callable[[Run], None], OutcomeReason]] = {
    "1 another position epoch": (moved, Why.REQUEST_STALE),
    "2 fewer rows": (of_another("rows", ROWS - 1), Why.STALE_CACHE_GENERATION),
    "3 another index": (of_another("epoch", 4), Why.INDEX_STALE),
    "4 another query": (of_another("q", torch.zeros(4, 16)), Why.QUERY_MISMATCH),
    "5 another layer": (lambda run: setattr(run, "layer", 2), Why.QUERY_IDENTITY_MISMATCH),
    "8 another source": (
        of_another("source", dataclasses.replace(SOURCE, digest=b"others")),
        Why.TENANT_MISMATCH,
    ),
    "12 a key that is none": (poisoned, Why.STATE_INVALID),
    "25 a page that was not read whole": (a_row_out, Why.UNIT_PARTITION),
    "26 a page that is none": (lambda run: units(run, 1, 5), Why.CANDIDATE_OUT_OF_RANGE),
    "28 a page twice": (lambda run: units(run, 1, 3, 3), Why.DUPLICATE_POSITION),
    "30 a row of no page": (a_row_more, Why.SUPPORT_OVERLAP),
}


@pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_step_that_is_not_what_it_says_ends_the_run(
    wrong: Callable[[Run], None], reason: OutcomeReason
) -> None:
    run = Run()
    wrong(run)
    with pytest.raises(OutcomeRefused) as refused:
        run.observe()
    assert refused.value.reason is reason, refused.value


@pytest.mark.parametrize("name", ["mass", "recall8", "outError"])
def test_a_slip_in_measuring_all_heads_at_once_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = metrics.head_metrics

    def slipped(*args: object, **named: object) -> tuple[object, ...]:
        values, needle, delta, best = right(*args, **named)  # type: ignore[arg-type]
        if name == "outError":
            return values, needle, delta * 2, best
        return {**values, name: values[name] * 0.875}, needle, delta, best

    monkeypatch.setattr(metrics, "head_metrics", slipped)
    with pytest.raises(OutcomeRefused) as refused:
        Run().observe()
    assert refused.value.reason is OutcomeReason.METRIC_CONTRACT


def test_every_head_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(asked: Asked, step: Step, shape: Shape, head: int, stated: Measured) -> None:
        seen.append(head)

    monkeypatch.setattr(metrics, "prove_head", noted)
    run = Run()
    for _ in range(4 * EVERY):
        run.observe()
    assert seen == [0, 1, 2, 3]
