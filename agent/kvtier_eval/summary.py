"""From results to one row a cell: rates with intervals, paired tests, means, and a verdict or none.

Why it exists: the definitions of what a report says stand in one place, apart from how it looks. It must not
run anything.

`conditional` counts only prompts that full attention answers; `rate` counts all. The test is McNemar's over
all prompts, selector against full attention, with Holm's adjustment over the cells of the plan that ask. A
cell holds when the lower bound of `conditional` is at least 1 - margin, and fails when the upper one is below
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvtier_eval.plan import ENOUGH_PROMPTS, CellPlan, Missing, NotRun, Plan
from kvtier_eval.statistics import Paired, Proportion, holm, mcnemar, mean, quantile, wilson

_SUMMARISED = ("mass", "excess", "outError", "woError", "valueMass", "support", "needle", "certified")
_RECALLS = ("recall8", "recall32", "recall128")
_BYTES = ("indexBytes", "rowBytes", "fetchedBytes")


class Verdict(StrEnum):
    """HOLDS, FAILS and OPEN are of the registered margin; the others say why there is no verdict."""

    HOLDS = "Holds"
    FAILS = "Fails"
    OPEN = "Open"
    QUICK = "NoVerdictQuick"
    TOO_FEW = "NoVerdictTooFewPrompts"
    NOT_ASKED = "NoVerdictNoAnswer"


@dataclass(frozen=True, slots=True)
class CellSummary:
    """prompts: that were run. full: how many of them full attention answers. needle and others: means over
    prompts, absent where not defined. excess_p10, excess_min: over heads, each a mean over prompts."""

    cell: CellPlan
    prompts: int
    rate: Proportion | None
    conditional: Proportion | None
    full: Proportion | None
    paired: Paired | None
    adjusted_p: float | None
    verdict: Verdict
    matched: float | None
    kl_mean: float
    kl_p95: float
    kl_max: float
    top1: float
    means: dict[str, float]
    worst: dict[str, float]
    excess_p10: float
    excess_min: float
    loss_growth: float | None
    long_range_growth: float | None
    long_range_tokens: int
    reprefill_matched: float | None
    bound_violations: int


@dataclass(frozen=True, slots=True)
class Report:
    """complete: every prompt of every cell of the plan was run or refused."""

    plan: Plan
    cells: tuple[CellSummary, ...]
    not_run: tuple[NotRun, ...]
    complete: bool


def summarise(plan: Plan, results: Sequence[dict[str, Any]]) -> Report:
    """Every cell of the plan is in the report: with numbers, or named as not run and why."""
    of_cell: dict[str, list[dict[str, Any]]] = {cell.id: [] for cell in plan.cells}
    for result in results:
        of_cell[result["cell"]].append(result)
    cells: list[CellSummary] = []
    missing = list(plan.not_run)
    for cell in plan.cells:
        found = of_cell[cell.id]
        refused = [one for one in found if "refused" in one]
        there = sorted((one for one in found if "refused" not in one), key=lambda one: int(one["prompt"]))
        if refused:
            words = f"{len(refused)} prompts: {refused[0]['refused']}: {refused[0]['message']}"
            missing.append(NotRun(cell=cell.id, why=Missing.REFUSED_AT_RUN, detail=words))
        if len(found) < plan.settings.prompts:
            words = f"{len(found)} of {plan.settings.prompts} prompts"
            missing.append(NotRun(cell=cell.id, why=Missing.NOT_FINISHED, detail=words))
        if there:
            cells.append(_summary(plan, cell, there))
    complete = all(len(found) == plan.settings.prompts for found in of_cell.values())
    return Report(plan, _adjusted(cells), tuple(missing), complete)


def _summary(plan: Plan, cell: CellPlan, results: list[dict[str, Any]]) -> CellSummary:
    alpha = plan.settings.alpha
    rate = conditional = full = None
    paired = None
    if cell.task.asks:
        answers = [bool(one["answers"]) for one in results]
        of_full = [bool(one["fullAnswers"]) for one in results]
        rate = wilson(sum(answers), len(answers), alpha)
        full = wilson(sum(of_full), len(of_full), alpha)
        both = sum(one and other for one, other in zip(answers, of_full, strict=True))
        conditional = wilson(both, sum(of_full), alpha)
        paired = mcnemar(answers, of_full)
    kl = [value for one in results for value in one["kl"]]
    heads = _by_head([one["excessByHead"] for one in results])
    far = [one["longRangeGrowth"] for one in results if one.get("longRangeGrowth") is not None]
    return CellSummary(
        cell=cell,
        prompts=len(results),
        rate=rate,
        conditional=conditional,
        full=full,
        paired=paired,
        adjusted_p=None,
        verdict=_verdict(plan, len(results), conditional),
        matched=_mean_of(results, "matched") if cell.task.asks else None,
        kl_mean=mean(kl),
        kl_p95=quantile(kl, 0.95),
        kl_max=max(kl),
        top1=mean([one["top1"] for one in results]),
        means=_means(results),
        worst=_worst(results),
        excess_p10=quantile(heads, 0.1),
        excess_min=min(heads, default=math.nan),
        loss_growth=_mean_of(results, "lossGrowth"),
        long_range_growth=mean(far) if far else None,
        long_range_tokens=sum(int(one.get("longRangeTokens", 0)) for one in results),
        reprefill_matched=_mean_of(results, "reprefillMatched"),
        bound_violations=sum(int(one["boundViolations"]) for one in results),
    )


def _verdict(plan: Plan, prompts: int, conditional: Proportion | None) -> Verdict:
    if plan.quick:
        return Verdict.QUICK
    if conditional is None:
        return Verdict.NOT_ASKED
    if prompts < max(ENOUGH_PROMPTS, plan.settings.prompts):
        return Verdict.TOO_FEW
    floor = 1 - plan.settings.margin
    if conditional.low >= floor:
        return Verdict.HOLDS
    return Verdict.FAILS if conditional.high < floor else Verdict.OPEN


def _adjusted(cells: list[CellSummary]) -> tuple[CellSummary, ...]:
    at = [i for i, one in enumerate(cells) if one.paired is not None]
    values = holm([one.paired.p for one in cells if one.paired is not None])
    for i, p in zip(at, values, strict=True):
        cells[i] = replace(cells[i], adjusted_p=p)
    return tuple(cells)


def _means(results: list[dict[str, Any]]) -> dict[str, float]:
    made = {}
    for name in (*_SUMMARISED, *_RECALLS):
        values = [one[name]["mean"] for one in results if name in one]
        if values:
            made[name] = mean(values)
    for name in (*_BYTES, "stability"):
        values = [float(one[name]) for one in results if name in one]
        if values:
            made[name] = mean(values)
    return made


def _worst(results: list[dict[str, Any]]) -> dict[str, float]:
    """The mean over prompts of the worst head's value, and of the 90th percentile of errors."""
    made = {}
    for name in ("needle", "support", "recall32", "certified"):
        values = [one[name]["min"] for one in results if name in one]
        if values:
            made[f"{name}Min"] = mean(values)
    for name in ("outError", "woError"):
        values = [one[name]["p90"] for one in results if name in one]
        if values:
            made[f"{name}P90"] = mean(values)
    return made


def _by_head(lists: list[list[float | None]]) -> list[float]:
    columns = ([value for value in column if value is not None] for column in zip(*lists, strict=True))
    return [mean(column) for column in columns if column]


def _mean_of(results: list[dict[str, Any]], name: str) -> float | None:
    values = [float(one[name]) for one in results if one.get(name) is not None]
    return mean(values) if values else None
