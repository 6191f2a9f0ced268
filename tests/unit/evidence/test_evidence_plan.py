"""What gates will need, against the tables of the specification."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from kvtier_evidence import metrics
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.metrics import METRICS, Scope
from kvtier_evidence.plan import min_prompts, need, planned_variance

ALPHA = 0.04
LOW_SAMPLE = 0.05


def gate(metric: str, limit: str, quantile: int | None = None, **more: object) -> GateSpec:
    percent = None if quantile is None else Decimal(quantile)
    return GateSpec("g", METRICS[metric], Decimal(limit), percent, **more)  # type: ignore[arg-type]


TAIL = gate(metrics.TPOT_RATIO, "1.05", 99)


def test_the_light_tail_has_the_variance_of_the_tables() -> None:
    assert planned_variance(0.99) == pytest.approx(1.7, abs=0.01)


@pytest.mark.parametrize(
    ("limit", "fraction", "units"),
    [
        ("1.05", 0.05, 18_000), ("1.05", 0.25, 16_800), ("1.05", 0.5, 22_500), ("1.10", 0.05, 4_720),
        ("1.10", 0.25, 4_950), ("1.25", 0.05, 1_900), ("1.25", 0.5, 1_820),
    ],
)  # fmt: skip
def test_tail_before_any_data_is_planned_as_the_table_says(limit: str, fraction: float, units: int) -> None:
    found = need(gate(metrics.TPOT_RATIO, limit, 99), fraction=fraction, sample=LOW_SAMPLE, alpha=ALPHA)
    assert found.units == pytest.approx(units, rel=0.2)
    assert found.requests == pytest.approx(found.units / (fraction * 0.95))


@pytest.mark.parametrize(
    ("spec", "units", "per_request"),
    [
        pytest.param(gate(metrics.OUTPUT_RELATIVE_ERROR, "0.05", 99), 1465, 0.05, id="output"),
        pytest.param(gate(metrics.EXPOSED_STALL_FRACTION, "0.02"), 539, 0.095, id="stall"),
        pytest.param(gate(metrics.ILLEGAL_FALLBACKS, "0"), 500, 0.145, id="zero-tolerance"),
        pytest.param(gate(metrics.TASK_SCORE_DROP, "0.01"), 527, None, id="population-of-prompts"),
        pytest.param(
            gate(metrics.TASK_SCORE_DROP, "0.01", scope=Scope.PROBE_SET, probe_set_size=40),
            40,
            None,
            id="set",
        ),
    ],
)
def test_needs_by_kind_at_a_tenth_of_the_traffic(
    spec: GateSpec, units: int, per_request: float | None
) -> None:
    found = need(spec, fraction=0.1, sample=LOW_SAMPLE, alpha=ALPHA)
    assert found.units == pytest.approx(units, rel=0.15)
    assert found.per_request == pytest.approx(per_request)


def test_prompts_that_never_change_score_need_what_the_vector_says() -> None:
    assert min_prompts(0.01, ALPHA) == 527


def test_a_declared_design_effect_multiplies_and_a_floor_of_samples_holds() -> None:
    plain = need(TAIL, fraction=0.25, sample=0.0, alpha=ALPHA)
    shaken = gate(metrics.TPOT_RATIO, "1.05", 99, design_effect=Decimal(3))
    assert need(shaken, fraction=0.25, sample=0.0, alpha=ALPHA).units == pytest.approx(3 * plain.units)
    patient = gate(metrics.TPOT_RATIO, "1.05", 99, min_samples=90_000)
    assert need(patient, fraction=0.25, sample=0.0, alpha=ALPHA).units == 90_000


@pytest.mark.parametrize(
    ("limit", "fraction"),
    [("1.002", 0.25), ("1.05", 1.0)],
    ids=["limit-inside-a-bin", "no-concurrent-baseline"],
)
def test_a_gate_that_can_never_pass_needs_for_ever(limit: str, fraction: float) -> None:
    found = need(gate(metrics.TPOT_RATIO, limit, 99), fraction=fraction, sample=0.0, alpha=ALPHA)
    assert math.isinf(found.requests)
