"""The limits that a run of the release bench is held to: 1.2 times the mean of runs of the same sizes.

`python -m tests.bench.release_range REPORT...` writes them from reports of runs of one size; a run that ended
early makes none. A run of sizes that nobody has measured is held to none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.rows import Row

FILE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "release-range.json"
FACTOR = 1.2
HELD = ("event_to_status.p", "operator_rss.max", "writes_per_", "idle_writes.", "lateness.p", "rollback.")
"""What rows begin with that have a limit; the others say how much was done."""
ENDED = "parts_ended"
"""The row that says how many of the parts were measured to their end; its floor: how many were asked for."""
Ranges = dict[str, dict[str, dict[str, float]]]


def name_of(caches: int, agents: int, pool_size: int) -> str:
    return f"caches={caches} agents={agents} pool={pool_size}"


def read(file: Path = FILE) -> Ranges:
    """By the name of sizes, then by row: mean and limit, in the row's unit."""
    found: Ranges = json.loads(file.read_text(encoding="utf-8"))
    return found


def held(rows: Iterable[Row], ranges: Ranges, name: str) -> list[Row]:
    """The rows with their limits as floors, where there are some."""
    limits = ranges.get(name, {})
    return [
        dataclasses.replace(row, floor=limits[row.id]["limit"]) if row.id in limits else row for row in rows
    ]


def limits_of(reports: Sequence[Sequence[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """From the rows of one report or more, each as JSON."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for row in report:
            if str(row["id"]).startswith(HELD):
                values.setdefault(str(row["id"]), []).append(float(row["value"]))
    return {
        name: {"mean": round(mean, 6), "limit": round(mean * FACTOR, 6)}
        for name, found in sorted(values.items())
        if (mean := statistics.fmean(found)) >= 0
    }


def _ended(report: Sequence[dict[str, Any]]) -> bool:
    return all(row["value"] >= row["floor"] for row in report if row["id"] == ENDED)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.release_range", description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="build/bench/release.json of each run")
    parser.add_argument("--caches", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--pool-size", type=int, default=5)
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(argv)
    ranges = read(options.file) if options.file.exists() else {}
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in options.reports]
    for file, report in zip(options.reports, reports, strict=True):
        if not _ended(report):
            print(f"{file}: the run ended early, so it makes no limits", file=sys.stderr)
            return 1
    # A report may be of one part: what it does not tell of keeps its limit.
    name = name_of(options.caches, options.agents, options.pool_size)
    ranges[name] = ranges.get(name, {}) | limits_of(reports)
    options.file.write_text(json.dumps(ranges, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
