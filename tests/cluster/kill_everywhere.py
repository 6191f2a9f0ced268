"""`make soak ARGS=--kills`: SIGKILL of the operator at every external write of a completing, a returning and
an adopting rollout, before it is sent and after the server accepted it.

Points come from a run without a death. Writes build/kills.json after each; `--resume` keeps what is there
without a problem and tries the others. With `--stops` the operator is stopped there in place of killed,
another takes over, and the first goes on when that has finished; with `--api` the API server is killed and
started on the same store. Exit status 1 when a run does not end as the undisturbed one, or never came to its
point.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.kill_harness import (
    SCENARIOS,
    STEP_SECONDS,
    KillHarness,
    Scenario,
    certain,
    differs,
    kill_harness,
    points,
)
from tests.cluster.kvtier_localplane import EventuallyError, LocalControlPlane

REPORT = Path(__file__).resolve().parents[2] / "build" / "kills.json"
Row = dict[str, object]


class Report:
    """What was tried, in a file that is whole after each point."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        kept: list[Row] = json.loads(path.read_text(encoding="utf-8")) if resume and path.exists() else []
        self.rows = [row for row in kept if not row["problem"]]

    def has(self, scenario: Scenario, point: str) -> bool:
        wanted = (scenario.name, point)
        return any((row["scenario"], row["point"]) == wanted for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")
        fresh.replace(self._path)


def walk(harness: KillHarness, scenario: Scenario, step: int, report: Report) -> None:
    """One row for each point tried."""
    reference = harness.run(scenario)
    found = points(reference)
    print(f"{scenario.name}: {reference.cost} writes of its own, {len(found)} points", flush=True)
    for number in range(0, len(found), step):
        point, began = found[number], time.monotonic()
        if report.has(scenario, str(point)):
            continue
        try:
            ran = harness.run(scenario, point)
        except EventuallyError as error:
            problem, died, cost = str(error)[:400], False, 0
        else:
            problem, died, cost = differs(reference, ran), ran.died, ran.cost
        if not died and not problem and certain(point):
            problem = "this run never came to the point"
        taken = time.monotonic() - began
        print(f"{number:4d} {point}: {problem or 'same'} ({cost} writes, {taken:.1f} s)", flush=True)
        where: Row = {"scenario": scenario.name, "number": number, "point": str(point)}
        report.add({**where, "reached": died, "writes": cost, "problem": problem})


def overtake(harness: KillHarness, scenario: Scenario, step: int, report: Report) -> None:
    """One row for each point at which a leader was stopped before it sends a write, and overtaken."""
    reference = harness.run(scenario)
    found = [point for point in points(reference) if not point.after and certain(point)]
    print(f"{scenario.name}: {len(found)} writes to be stopped at", flush=True)
    for number in range(0, len(found), step):
        point, began = found[number], time.monotonic()
        name = f"stopped {point}"
        if report.has(scenario, name):
            continue
        try:
            ran = harness.overtake(scenario, point)
        except EventuallyError as error:
            problem, stopped = str(error)[:400], False
        else:
            problem, stopped = "", True
            if ran.outcome != reference.outcome:
                problem = f"ended as {ran.outcome}, not {reference.outcome}"
            elif ran.accepted or not ran.unchanged:
                problem = f"the first wrote {ran.accepted} when it went on"
        print(f"{number:4d} {name}: {problem or 'same'} ({time.monotonic() - began:.1f} s)", flush=True)
        where: Row = {"scenario": scenario.name, "number": number, "point": name}
        report.add({**where, "reached": stopped, "writes": 0, "problem": problem})


def restart(
    harness: KillHarness, scenario: Scenario, step: int, report: Report, interrupt: Callable[[], None]
) -> None:
    """One row for each write after which the API server was killed and started on the same store."""
    reference = harness.run(scenario)
    found = [point.write for point in points(reference) if point.after and certain(point)]
    print(f"{scenario.name}: {len(found)} writes after which the API server is killed", flush=True)
    for number in range(0, len(found), step):
        name, began = f"API server killed after {found[number]}", time.monotonic()
        if report.has(scenario, name):
            continue
        try:
            ran = harness.interrupted(scenario, found[number], interrupt)
        except EventuallyError as error:
            problem, cost = str(error)[:400], 0
        else:
            # Leases may have ended meanwhile, and steps were opened again.
            late = dataclasses.replace(ran, gap=STEP_SECONDS)
            problem, cost = differs(reference, late), ran.cost
        taken = time.monotonic() - began
        print(f"{number:4d} {name}: {problem or 'same'} ({cost} writes, {taken:.1f} s)", flush=True)
        where: Row = {"scenario": scenario.name, "number": number, "point": name}
        report.add({**where, "reached": cost > 0, "writes": cost, "problem": problem})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenario", choices=names, action="append", help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep what the report has without a problem")
    parser.add_argument("--every", type=int, default=1, help="try each n-th point only")
    parser.add_argument("--stops", action="store_true", help="stop the operator there, and let it go on")
    parser.add_argument("--api", action="store_true", help="kill the API server in place of the operator")
    options = parser.parse_args(argv)
    wanted = [one for one in SCENARIOS if one.name in (options.scenario or names)]
    kind = "api" if options.api else "stops" if options.stops else "kills"
    path = REPORT.with_name(f"{kind}.json")
    report = Report(path, options.resume)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-kills-") as folder,
        LocalControlPlane(restarts=options.api) as plane,
        kill_harness(plane.cluster, Path(folder), "kills") as harness,
    ):
        for scenario in wanted:
            if options.api:
                restart(harness, scenario, options.every, report, plane.restart_api_server)
            elif options.stops:
                overtake(harness, scenario, options.every, report)
            else:
                walk(harness, scenario, options.every, report)
    for name in names:
        tried = [row for row in report.rows if row["scenario"] == name]
        reached, wrong = (sum(bool(row[what]) for row in tried) for what in ("reached", "problem"))
        print(f"{name}: {len(tried)} points, {reached} reached, {wrong} with another end")
    bad = [row for row in report.rows if row["problem"]]
    print(f"{len(report.rows)} points, {len(bad)} with another end; report: {path}")
    return 1 if bad or not report.rows else 0


if __name__ == "__main__":
    sys.exit(main())
