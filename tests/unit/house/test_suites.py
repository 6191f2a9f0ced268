"""The order of `make test`: every test once, and never more at a time than the machine has room for."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

REPOSITORY = Path(__file__).resolve().parents[3]
# Measurements and long runs, which nobody waits for at every change.
ELSEWHERE = ("bench", "soak")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suites", REPOSITORY / "hack" / "suites.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["suites"] = module
    spec.loader.exec_module(module)
    return module


suites = _load()


def _files(words: tuple[str, ...]) -> set[Path]:
    """The test files that a step's pytest collects."""
    ignored = {REPOSITORY / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    named = [REPOSITORY / word for word in words if word.startswith("tests/")]
    found = {file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return found - ignored


def test_every_test_file_runs_in_one_suite() -> None:
    counts = Counter(file for group in suites.GROUPS for step in group for file in _files(step.argv))
    there = {
        file
        for file in (REPOSITORY / "tests").rglob("test_*.py")
        if file.relative_to(REPOSITORY).parts[1] not in ELSEWHERE
    }
    assert {str(file) for file in there - set(counts)} == set()
    assert {str(file): count for file, count in counts.items() if count > 1} == {}


def test_what_is_named_is_there() -> None:
    """A file that moved would otherwise run in two suites, or in none."""
    words = [
        word.removeprefix("--ignore=") for group in suites.GROUPS for step in group for word in step.argv
    ]
    assert [word for word in words if word.startswith("tests/") and not (REPOSITORY / word).exists()] == []


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1), st.data())
def test_steps_start_in_order_within_the_machine_and_always_go_on(
    cores: list[float], data: st.DataObject
) -> None:
    waiting = [suites.Step(f"step-{i}", (), 1.0, cores=size) for i, size in enumerate(cores)]
    running: list[suites.Step] = []  # type: ignore[name-defined]
    begun: list[str] = []
    while waiting or running:
        chosen = suites.startable(waiting, running)
        assert running or chosen
        for step in chosen:
            waiting.remove(step)
            running.append(step)
            begun.append(step.name)
        assert len(running) == 1 or sum(step.cores for step in running) <= suites.CORES
        left = suites.CORES - sum(step.cores for step in running)
        assert all(step.cores > left for step in waiting)
        running.remove(data.draw(st.sampled_from(running)))
    assert sorted(begun) == sorted(f"step-{i}" for i in range(len(cores)))


@pytest.mark.parametrize("group", range(len(suites.GROUPS)))
def test_a_step_is_asked_for_by_its_name(group: int) -> None:
    names = [step.name for each in suites.GROUPS for step in each]
    assert len(set(names)) == len(names)
    reports = [word for step in suites.GROUPS[group] for word in step.argv if word.startswith("--junitxml")]
    assert len(set(reports)) == len(reports)
