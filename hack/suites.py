"""Runs lint and the test suites, each in a process of its own, and sums up.

Own processes, since suites need different environments (Triton's interpreter is chosen at import) and none
should inherit what another left in memory. Every step has a deadline. Exit status 0 only if all passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REPORTS = REPOSITORY / "build" / "reports"


@dataclass(frozen=True)
class Step:
    """One command. `deadline_s` is far above what it takes; it ends what hangs. `cores`: about how many
    processors it keeps busy."""

    name: str
    argv: tuple[str, ...]
    deadline_s: float
    environment: tuple[tuple[str, str], ...] = ()
    cores: float = 1.0


@dataclass(frozen=True)
class Result:
    """cpu_s: what the step and all that it waited for have computed; the rest of its `seconds` it waited, for
    others or for a core."""

    step: Step
    passed: bool
    seconds: float
    cpu_s: float
    tests: int = 0
    failures: int = 0
    note: str = ""


def suite(name: str, deadline_s: float, *folders: str, cores: float = 1.0, **environment: str) -> Step:
    """A pytest process over some folders; no test at all is a failure."""
    report = REPORTS / f"{name}.xml"
    argv = (sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *folders)
    return Step(name, argv, deadline_s, tuple(environment.items()), cores)


# The unit suites are two, each for one core and under two minutes: the core's tests compute, the others
# are many and short. What computes more than that runs with others of its kind (kernels, selectors and their
# evaluation, walks of rollouts), and what starts programs or reads the whole repository is the house's.
_CORE = ("tests/unit/core",)
_EVALUATING = tuple(f"tests/unit/house/test_bench_{name}.py" for name in ("selectors", "selectors_anchor"))
_HOUSE = (
    *("tests/unit/house", "tests/unit/crds", "tests/unit/kubectl"),
    *(f"--ignore={name}" for name in _EVALUATING),  # they import the evaluation, and that transformers
)
_APART = ("core", "kernels", "selectors", "eval", "rollout", "house", "crds", "kubectl", "__pycache__")
_OTHERS = tuple(
    f"tests/unit/{folder.name}"
    for folder in sorted((REPOSITORY / "tests" / "unit").iterdir())
    if folder.is_dir() and folder.name not in _APART
)
_SELECTING = tuple(
    f"tests/unit/core/test_core_{name}.py"
    for name in (
        "candidate",
        "evidence_families",
        "hotunits",
        "live_audit",
        "live_families",
        "live_lifecycle",
        "selected_reads",
    )
)

# What runs the operator under its shipped rights stays together, since a test at its end compares what it
# asked for with those rights; the other cluster tests have an API server of their own, and run beside it.
_BESIDE = tuple(
    f"tests/cluster/test_{name}.py"
    for name in (
        "chart_helm",
        "controllers",
        "crds_apiserver",
        "kubectl_plugin",
        "localplane_identity",
        "localplane_lifecycle",
        "operator_api_faults",
        "rollout_api_restarts",
    )
)

# Agents by themselves, without a model; what has one runs beside them.
_AGENTS = tuple(
    f"tests/engine/{file.name}"
    for pattern in ("test_agent_*.py", "test_wire_*.py")
    for file in sorted((REPOSITORY / "tests" / "engine").glob(pattern))
)

# Of the end-to-end tests those that time nothing run beside the others. The demo has the machine for itself,
# since it times requests.
_OWN = tuple(f"tests/e2e/test_{name}.py" for name in ("demo_own_cluster", "tiers_candidates"))

# Half a core more than two: what computes waits now and then for a file or for a process that it has started.
CORES = 2.5

# Groups run one after the other. The steps of a group are started in this order, each when there is room
# for it: the longest first. What waits for clusters, agents and leases leaves a part of its core to others.
GROUPS: tuple[tuple[Step, ...], ...] = (
    (
        suite("cluster", 2700, "tests/cluster", *(f"--ignore={name}" for name in _BESIDE), cores=0.25),
        suite("cluster-beside", 2700, *_BESIDE, cores=0.5),
        suite("engine", 2700, "tests/engine", *(f"--ignore={name}" for name in _AGENTS), cores=0.75),
        suite("unit-core", 1800, *_CORE, *(f"--ignore={name}" for name in _SELECTING)),
        suite("unit", 1800, *_OTHERS),
        suite("engine-agents", 2700, *_AGENTS, cores=0.5),
        suite("kernels", 1800, "tests/kernels", TRITON_INTERPRET="1", cores=0.75),
        suite("rollout", 1800, "tests/unit/rollout"),
        suite("eval", 1800, "tests/unit/eval", *_EVALUATING),
        suite("house", 1800, *_HOUSE),
        suite("selectors", 1800, "tests/unit/selectors", *_SELECTING),
        suite("kernels-cpu", 1800, "tests/unit/kernels", cores=0.75),
        Step("lint", ("hack/lint",), 1800),
        suite("demo-own", 1800, *_OWN, cores=0.5),
        suite("simulation", 1800, "tests/simulation", cores=0.5),
    ),
    (suite("e2e", 2700, "tests/e2e", *(f"--ignore={name}" for name in _OWN)),),
)


class Runner:
    """Runs steps and can end all that are running. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run_group(self, steps: list[Step]) -> list[Result]:
        """Results in the order of the steps. The output of a step appears at once when it is the only one,
        else when it has ended."""
        waiting, running = list(steps), dict[Future[Result], Step]()
        results: dict[str, Result] = {}
        with ThreadPoolExecutor(max(1, len(steps))) as pool:
            try:
                while waiting or running:
                    for step in startable(waiting, list(running.values())):
                        waiting.remove(step)
                        running[pool.submit(self._run, step, len(steps) == 1)] = step
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        results[running.pop(future).name] = future.result()
                    if self._stopped:
                        waiting.clear()
            except KeyboardInterrupt:
                # Before the pool is left, which waits for its threads.
                self.stop()
                raise
        return [results[step.name] for step in steps if step.name in results]

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process)

    def _run(self, step: Step, alone: bool) -> Result:
        title = f"\n=== {step.name}: {' '.join(step.argv)}"
        print(title if alone else f"{step.name}: started", flush=True)
        # CI: Hypothesis tries the same examples every time, so that what fails can be repeated.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "true"} | dict(step.environment)
        report = REPORTS / f"{step.name}.xml"
        report.unlink(missing_ok=True)
        started = time.monotonic()
        with (REPORTS / f"{step.name}.log").open("w+b") as log:
            out = None if alone else log
            process = subprocess.Popen(
                step.argv, cwd=REPOSITORY, env=environment, stdout=out, stderr=out, process_group=0
            )
            with self._lock:
                self._running.add(process)
            note = ""
            late = not _ended(process, step.deadline_s)
            if late:
                note = f"ended after its deadline of {step.deadline_s:g} s"
                _end(process)
            with self._lock:
                self._running.discard(process)
            code, cpu_s = _reap(process)
            log.seek(0)
            text = log.read().decode(errors="replace")
        if not alone:
            print(f"{title}\n{text}", end="", flush=True)
        tests, failures = _counts(report) if report.exists() else (0, 0)
        if code == 5:
            note = "no tests were found"
        passed, seconds = code == 0 and not late, time.monotonic() - started
        return Result(step, passed, seconds, cpu_s, tests, failures, note or f"status {code}")


def startable(waiting: list[Step], running: list[Step]) -> list[Step]:
    """Which steps to start now beside those that run: in order, those that still fit, and at least one."""
    taken, chosen = sum(step.cores for step in running), list[Step]()
    for step in waiting:
        if taken + step.cores <= CORES or not (running or chosen):
            chosen.append(step)
            taken += step.cores
    return chosen


def _ended(process: subprocess.Popen[bytes], patience: float) -> bool:
    """Waits for the end and leaves the status to `_reap`, so that nobody loses what was computed."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], patience)[0])
    finally:
        os.close(descriptor)


def _reap(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Exit status, and processor seconds of a process that has ended and of its children."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the step: an interrupt first, so that fixtures can clean up. Of what that does not end, pytest
    then prints the stacks of all threads."""
    steps = ((os.killpg, signal.SIGINT, 20), (os.kill, signal.SIGABRT, 5), (os.killpg, signal.SIGKILL, 10))
    aborted = False
    for send, number, patience in steps:
        if _ended(process, 0) and not aborted:
            return
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)
        aborted = number == signal.SIGABRT
        _ended(process, patience)


def _counts(report: Path) -> tuple[int, int]:
    tests = failures = 0
    for one in ElementTree.parse(report).getroot().iter("testsuite"):
        tests += int(one.get("tests", 0))
        failures += int(one.get("failures", 0)) + int(one.get("errors", 0))
    return tests, failures


def summarize(results: list[Result], seconds: float) -> str:
    lines = ["", "=== summary", f"{'':14s} {'':11s} {'time':>8s} {'computed':>10s}"]
    for result in results:
        outcome = "passed" if result.passed else f"FAILED ({result.note})"
        tests = f"{result.tests:5d} tests" if result.tests else " " * 11
        spent = f"{result.seconds:6.0f} s {result.cpu_s:6.0f} cpu s"
        lines.append(f"{result.step.name:14s} {tests} {spent}  {outcome}")
    total = sum(result.tests for result in results)
    failed = sum(result.failures for result in results)
    others = sum(not result.passed and result.failures == 0 for result in results)
    computed = sum(result.cpu_s for result in results)
    lines.append(f"{'all':14s} {total:5d} tests {seconds:6.0f} s {computed:6.0f} cpu s")
    lines.append("")
    lines.append(f"{total - failed} passed, {failed + others} failed")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="steps to run; all when absent")
    names = parser.parse_args().names
    known = [step.name for group in GROUPS for step in group]
    if unknown := set(names) - set(known):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner()
    started = time.monotonic()
    results: list[Result] = []
    try:
        for group in GROUPS:
            chosen = [step for step in group if not names or step.name in names]
            if chosen:
                results += runner.run_group(chosen)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(summarize(results, time.monotonic() - started))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
