"""The simulator: equal to the longest path through tasks and streams, never below its floor, repeatable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.exact_placements import PlacementReason, PlacementRefused
from kvtier_core.placements.events import NANOSECONDS, Program, Simulated, Span, nanoseconds, simulate

STREAMS = ("link", "gpu", "cpu")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    for index in range(draw(st.integers(0, 24))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        program.add(
            f"t{index}", draw(st.sampled_from(STREAMS)), draw(st.integers(0, 50)) / NANOSECONDS, after
        )
    return program


def longest_paths(program: Program) -> list[Span]:
    """An oracle without events: a task begins when its stream's last task and all before it have ended."""
    spans: list[Span] = []
    free = dict.fromkeys(STREAMS, 0)
    for task in program.tasks:
        begin = max([free[task.stream], *(spans[before].end for before in task.after)])
        spans.append(Span(begin, begin + task.took))
        free[task.stream] = begin + task.took
    return spans


@given(programs())
def test_every_task_runs_at_its_longest_path(program: Program) -> None:
    assert list(simulate(program).spans) == longest_paths(program)


@given(programs())
def test_it_is_never_faster_than_its_floor_and_never_slower_than_one_after_the_other(
    program: Program,
) -> None:
    done = simulate(program)
    assert done.floor <= done.makespan <= sum(task.took for task in program.tasks)
    for stream in done.busy:
        assert 0 <= done.waited(stream) <= done.makespan
    assert simulate(program) == done


def overlap() -> tuple[Program, Simulated]:
    program = Program()
    first = program.add("fetch a", "link", 3.0)
    program.add("attend a", "gpu", 2.0, (first,))
    second = program.add("fetch b", "link", 3.0)
    program.add("attend b", "gpu", 2.0, (second, None))
    return program, simulate(program)


def test_two_streams_overlap_and_one_waits() -> None:
    _, done = overlap()
    assert [(span.begin, span.end) for span in done.spans] == [
        (0, 3 * NANOSECONDS),
        (3 * NANOSECONDS, 5 * NANOSECONDS),
        (3 * NANOSECONDS, 6 * NANOSECONDS),
        (6 * NANOSECONDS, 8 * NANOSECONDS),
    ]
    assert (done.seconds, done.floor, done.waited("gpu")) == (8.0, 6 * NANOSECONDS, 4 * NANOSECONDS)


def test_an_empty_program_takes_no_time() -> None:
    done = simulate(Program())
    assert (done.makespan, done.floor) == (0, 0)


@pytest.mark.parametrize("after", [(0,), (5,), (-1,)], ids=["itself", "later", "before-all"])
def test_a_task_waits_only_for_tasks_before_it(after: tuple[int, ...]) -> None:
    with pytest.raises(PlacementRefused) as refused:
        Program().add("a", "link", 1.0, after)
    assert refused.value.reason is PlacementReason.TIME_MODEL


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e10])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(PlacementRefused):
        nanoseconds(seconds)
