"""Runs lint and the test suites one after the other, each in a process of its own, and sums up.

Own processes, since suites need different environments (Triton's interpreter is chosen at import) and none
should inherit what another left in memory. Every step has a deadline. Exit status 0 only if all passed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REPORTS = REPOSITORY / "build" / "reports"


@dataclass(frozen=True)
class Step:
    """One command. `deadline_s` is far above what it takes; it ends what hangs."""

    name: str
    argv: tuple[str, ...]
    deadline_s: float
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    step: Step
    passed: bool
    seconds: float
    tests: int = 0
    failures: int = 0
    note: str = ""


def suite(name: str, deadline_s: float, *folders: str, **environment: str) -> Step:
    """A pytest process over some folders; no test at all is a failure."""
    report = REPORTS / f"{name}.xml"
    argv = (sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *folders)
    return Step(name, argv, deadline_s, tuple(environment.items()))


STEPS = (
    Step("lint", ("hack/lint",), 600),
    suite("unit", 600, "tests/unit"),
    suite("kernels", 900, "tests/kernels", TRITON_INTERPRET="1"),
    suite("engine", 1200, "tests/engine"),
    suite("cluster", 900, "tests/cluster"),
    suite("e2e", 1500, "tests/e2e"),
)


def run(step: Step) -> Result:
    print(f"\n=== {step.name}: {' '.join(step.argv)}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(step.environment)
    report = REPORTS / f"{step.name}.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    process = subprocess.Popen(step.argv, cwd=REPOSITORY, env=environment, process_group=0)
    note = ""
    try:
        code = process.wait(step.deadline_s)
    except subprocess.TimeoutExpired:
        note, code = f"ended after its deadline of {step.deadline_s:g} s", 1
    finally:
        _end(process)
    tests, failures = _counts(report) if report.exists() else (0, 0)
    if code == 5:
        note = "no tests were found"
    return Result(step, code == 0, time.monotonic() - started, tests, failures, note or f"status {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the step: an interrupt first, so that fixtures can clean up."""
    for number, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _counts(report: Path) -> tuple[int, int]:
    tests = failures = 0
    for one in ElementTree.parse(report).getroot().iter("testsuite"):
        tests += int(one.get("tests", 0))
        failures += int(one.get("failures", 0)) + int(one.get("errors", 0))
    return tests, failures


def summarize(results: list[Result]) -> str:
    lines = ["", "=== summary"]
    for result in results:
        outcome = "passed" if result.passed else f"FAILED ({result.note})"
        tests = f"{result.tests:5d} tests" if result.tests else " " * 11
        lines.append(f"{result.step.name:10s} {tests} {result.seconds:6.0f} s  {outcome}")
    total = sum(result.tests for result in results)
    failed = sum(result.failures for result in results)
    others = sum(not result.passed and result.failures == 0 for result in results)
    lines.append(f"all        {total:5d} tests {sum(one.seconds for one in results):6.0f} s")
    lines.append("")
    lines.append(f"{total - failed} passed, {failed + others} failed")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="steps to run; all when absent")
    names = parser.parse_args().names
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; known: {', '.join(s.name for s in STEPS)}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    try:
        results = [run(step) for step in STEPS if not names or step.name in names]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(summarize(results))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
