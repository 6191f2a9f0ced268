"""`make soak ARGS=--kills`: SIGKILL of the operator at every external write of a completing, a returning and
an adopting rollout, before it is sent and after the server accepted it.

Points come from a run without a death. Writes build/kills.json after each; `--from N` goes on. Exit status 1
when a run does not end as the undisturbed one, or never came to its point.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.kill_harness import (
    SCENARIOS,
    KillHarness,
    Scenario,
    certain,
    differs,
    kill_harness,
    points,
)
from tests.cluster.kvtier_localplane import EventuallyError, open_cluster

REPORT = Path(__file__).resolve().parents[2] / "build" / "kills.json"
Row = dict[str, object]


def walk(harness: KillHarness, scenario: Scenario, start: int, step: int) -> list[Row]:
    """One row for each point tried."""
    reference = harness.run(scenario)
    found = points(reference)
    print(f"{scenario.name}: {reference.cost} writes of its own, {len(found)} points", flush=True)
    rows: list[Row] = []
    for number in range(start, len(found), step):
        point, began = found[number], time.monotonic()
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
        rows.append({**where, "reached": died, "writes": cost, "problem": problem})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenario", choices=names, action="append", help="default: all")
    parser.add_argument("--from", dest="start", type=int, default=0, help="number of the first point")
    parser.add_argument("--every", type=int, default=1, help="try each n-th point only")
    options = parser.parse_args(argv)
    wanted = [one for one in SCENARIOS if one.name in (options.scenario or names)]
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-kills-") as folder,
        open_cluster(None) as cluster,
        kill_harness(cluster, Path(folder), "kills") as harness,
    ):
        for scenario in wanted:
            rows += walk(harness, scenario, options.start, options.every)
            REPORT.parent.mkdir(parents=True, exist_ok=True)
            REPORT.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    bad = [row for row in rows if row["problem"]]
    print(f"{len(rows)} points, {len(bad)} with another end; report: {REPORT}")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
