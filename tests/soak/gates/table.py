"""The results as Markdown: budgets, detection, power, and other tools' rules on the same kind of data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from scipy.special import ndtri

from kvtier_evidence.plan import planned_variance
from tests.soak.gates import contrast
from tests.soak.gates.claims import ENOUGH, FULL_SIZE, claims, quantile_of, upper
from tests.soak.gates.ledger import Row, contrast_name
from tests.soak.gates.scenarios import BY_NAME, G2, GUARDED, POWER_ROWS
from tests.soak.gates.walk import End, Scenario

_ALPHA, _POWER = 0.04, 0.9


def markdown(rows: Mapping[str, Row], *, seed: int, machine: str) -> str:
    parts = [
        f"{sum(row.rollouts for row in rows.values()):,} rollouts, seed {seed}, "
        f"{sum(row.seconds for row in rows.values()):,.0f} CPU seconds on {machine}.\n",
        _budgets(rows),
        _detection(rows),
        _power(rows),
        _contrast(rows),
        _claimed(rows),
    ]
    return "\n".join(part for part in parts if part)


def _budgets(rows: Mapping[str, Row]) -> str:
    head = (
        "| candidate and traffic | rollouts | falsely promoted | 99 % bound | rolled back | 99 % bound | "
        "held | completed |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    lines = []
    for name, row in rows.items():
        scenario = BY_NAME.get(name)
        if scenario is None or scenario.group in ("detect", "power") or not row.rollouts:
            continue
        n = row.rollouts
        back, wrong = row.ends[End.ROLLED_BACK], row.ends[End.PROMOTED]
        lines.append(
            f"| {name} | {n:,} | {_share(wrong, n)} | {upper(wrong, n):.2%} | {_share(back, n)} | "
            f"{'-' if scenario.harms else f'{upper(back, n):.2%}'} | {_share(row.ends[End.HELD], n)} | "
            f"{_share(row.ends[End.COMPLETED], n)} |"
        )
    return "\n".join(["## Whole rollouts\n", head, *lines, "", _sizes(rows)]) if lines else ""


def _sizes(rows: Mapping[str, Row]) -> str:
    """How many rollouts stand behind the rows of whole rollouts, and which of them claim nothing."""
    sizes = {
        name: row.rollouts
        for name, row in rows.items()
        if name in BY_NAME and BY_NAME[name].group not in ("detect", "power") and row.rollouts
    }
    full = sum(n >= FULL_SIZE for n in sizes.values())
    few = [name for name, n in sizes.items() if n < ENOUGH]
    silent = f" Fewer than {ENOUGH}, and so no claim, have {len(few)}: {'; '.join(few)}." if few else ""
    return (
        f"{full} of these {len(sizes)} rows have {FULL_SIZE:,} rollouts or more; half have "
        f"{statistics.median(sizes.values()):,.0f} or fewer, the smallest {min(sizes.values()):,}.{silent}\n"
    )


def _claimed(rows: Mapping[str, Row]) -> str:
    found = claims(rows)
    if not found:
        return ""
    missed = [f"- missed: {claim.name}: {claim.value}." for claim in found if not claim.held]
    held = f"{len(found) - len(missed)} of {len(found)} claims hold in this run."
    return "\n".join(["## What is claimed\n", held, *([""] if missed else []), *missed, ""])


def _detection(rows: Mapping[str, Row]) -> str:
    head = (
        "| harm | rollouts | found | candidate units, median | 95 % | goal | goal of the median guard | "
        "planned requests for 5 % |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    lines = []
    for name, row in rows.items():
        scenario = BY_NAME.get(name)
        if scenario is None or scenario.group != "detect" or not row.rollouts:
            continue
        units = quantile_of(row, End.ROLLED_BACK, 0.95)
        lines.append(
            f"| {name.removeprefix('detect: ')} | {row.rollouts:,} | "
            f"{_share(row.ends[End.ROLLED_BACK], row.rollouts)} | "
            f"{_count(quantile_of(row, End.ROLLED_BACK, 0.5))} | {_count(units)} | "
            f"{_goal(units, G2.get(name))} | {_goal(units, GUARDED.get(name))} | {_count(20 * units)} |"
        )
    return "\n".join(["## Units until Fail\n", head, *lines, ""]) if lines else ""


def _power(rows: Mapping[str, Row]) -> str:
    head = (
        "| candidate | rollouts | passed | units until Pass, median | 90 % | one look, 90 % power |\n"
        "|---|---|---|---|---|---|"
    )
    lines = []
    for scenario in POWER_ROWS:
        row = rows.get(scenario.name)
        if row is None or not row.rollouts:
            continue
        lines.append(
            f"| {scenario.name.removeprefix('power: ')} | {row.rollouts:,} | "
            f"{_share(row.ends[End.COMPLETED], row.rollouts)} | "
            f"{_count(quantile_of(row, End.COMPLETED, 0.5))} | "
            f"{_count(quantile_of(row, End.COMPLETED, 0.9))} | {_count(fixed_horizon(scenario))} |"
        )
    return "\n".join(["## Units until Pass\n", head, *lines, ""]) if lines else ""


def fixed_horizon(scenario: Scenario) -> float:
    """Candidate units of a one-look test at the same alpha with 90 % power, by the normal approximation."""
    truth, za, zb = scenario.truths[0], float(-ndtri(_ALPHA)), float(ndtri(_POWER))
    if scenario.gates == ("output",):
        m, q = 0.01, truth.output
        return math.ceil(((za * math.sqrt(m * (1 - m)) + zb * math.sqrt(q * (1 - q))) / (m - q)) ** 2)
    if scenario.gates == ("stall",):
        # 60 % zeros, the others 1 to 10 units of which the mean holds 2.2.
        unit = truth.stall / 2.2
        variance = 0.4 * 38.5 * unit**2 - truth.stall**2
        n = math.ceil((za + zb) ** 2 * variance / (0.02 - truth.stall) ** 2)
        # Of so few the normal approximation says nothing.
        return n if n >= 100 else math.nan
    if scenario.traffic.heavy:
        return math.nan
    f, margin = scenario.steps[0].fraction, math.log(float(scenario.tail_limit) / truth.tail)
    return math.ceil((za + zb) ** 2 * planned_variance(0.99) / ((1 - f) * margin**2))


def _contrast(rows: Mapping[str, Row]) -> str:
    present = [share for share in contrast.SHARES if rows.get(contrast_name(share), Row()).tallies]
    if not present:
        return ""
    n = min(sum(_of(rows, share, contrast.OURS)) for share in present)
    head = [
        "## Other rules on the same units\n",
        f"One p99 gate, limit 1 % above, {contrast.LOOKS} looks of {contrast.PER_LOOK} units, at least {n:,} "
        "runs a column: promoted / rolled back, %.\n",
        "| share truly above | " + " | ".join(f"{share:.2%}" for share in present) + " |",
        "|---|" + "---|" * len(present),
    ]
    lines = []
    for rule in (*contrast.RULES, contrast.OURS):
        cells = []
        for share in present:
            promoted, back, held = _of(rows, share, rule)
            total = promoted + back + held
            cells.append(f"{100 * promoted / total:.3g} / {100 * back / total:.3g}")
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    means = []
    for share in present:
        tally = rows[contrast_name(share)].tallies[contrast.OURS]
        means.append(f"{tally.units / (tally.promoted + tally.rolled_back + tally.held):,.0f}")
    lines.append(f"| {contrast.OURS}: mean units | " + " | ".join(means) + " |")
    return "\n".join([*head, *lines, ""])


def _of(rows: Mapping[str, Row], share: float, rule: str) -> tuple[int, int, int]:
    tally = rows[contrast_name(share)].tallies[rule]
    return tally.promoted, tally.rolled_back, tally.held


def _goal(units: float, goal: int | None) -> str:
    return "-" if goal is None else f"{goal:,}" if units <= goal else f"{goal:,}, missed"


def _share(count: int, n: int) -> str:
    return "0" if not count else f"{count / n:.2%}"


def _count(x: float) -> str:
    return "-" if math.isnan(x) else "never" if math.isinf(x) else f"{x:,.0f}"
