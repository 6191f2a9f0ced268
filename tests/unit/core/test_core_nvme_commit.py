"""Group commit against a plain model: who is told what, how often the device is flushed, what the frontier
says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.groupcommit import GroupCommit

LIMIT = 5


@dataclass(eq=False)
class Writer:
    weight: int
    group: int
    told: list[CoreError | None] = field(default_factory=list)

    def committed(self, error: CoreError | None) -> None:
        self.told.append(error)


class Commits(RuleBasedStateMachine):
    """Writers are expected, then stamped, then arrive or give up; flushes may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = False
        self.flushes = 0
        self.commit = GroupCommit(self.flush, self.flushed, LIMIT, frontier=10)
        self.expected = 0
        self.stamped: list[Writer] = []
        self.arrived: list[Writer] = []
        self.doubted: list[int] = []
        self.frontiers: list[int] = []

    def flush(self) -> None:
        self.flushes += 1
        if self.failing:
            raise CoreError(Reason.STORAGE_UNAVAILABLE, "no")

    def flushed(self, frontier: int, blocks: int) -> None:
        assert blocks > 0
        self.frontiers.append(frontier)

    @rule(count=st.integers(1, 3))
    def expect(self, count: int) -> None:
        self.commit.expect(count)
        self.expected += count

    @precondition(lambda self: self.expected > len(self.stamped))
    @rule(weight=st.integers(1, 3))
    def stamp(self, weight: int) -> None:
        self.stamped.append(Writer(weight, self.commit.stamp()))

    @precondition(lambda self: self.stamped)
    @rule(data=st.data(), failing=st.booleans())
    def arrive(self, data: st.DataObject, failing: bool) -> None:
        writer = self.stamped.pop(data.draw(st.integers(0, len(self.stamped) - 1)))
        self.failing, before = failing, self.flushes
        self.expected -= 1
        self.arrived.append(writer)
        waiting = [one for one in self.arrived if not one.told]
        due = self.expected == 0 or sum(one.weight for one in waiting) >= LIMIT
        self.commit.arrive(writer, writer.group)
        assert self.flushes - before == due, "one flush, when nobody else is expected or the limit is reached"
        for one in waiting:
            assert [error is not None for error in one.told] == ([failing] if due else [])

    @precondition(lambda self: self.stamped)
    @rule(data=st.data(), failed=st.booleans())
    def give_up(self, data: st.DataObject, failed: bool) -> None:
        writer = self.stamped.pop(data.draw(st.integers(0, len(self.stamped) - 1)))
        self.failing = False
        if failed:
            self.commit.doubt(writer.group)
            self.doubted.append(writer.group)
        self.commit.drop(writer.group)
        self.commit.withdraw()
        self.expected -= 1
        self.commit.lead()

    @precondition(lambda self: self.expected > len(self.stamped))
    @rule()
    def never_begin(self) -> None:
        self.failing = False
        self.commit.withdraw()
        self.expected -= 1
        self.commit.lead()

    @invariant()
    def the_frontier_promises_only_what_was_flushed(self) -> None:
        frontier = self.commit.frontier
        unflushed = [one.group for one in self.stamped]
        unflushed += [one.group for one in self.arrived if not one.told]
        failed = [one.group for one in self.arrived if one.told and one.told[0] is not None]
        assert all(frontier < group for group in (*unflushed, *failed, *self.doubted))
        assert self.frontiers == sorted(self.frontiers)

    @invariant()
    def nobody_waits_when_nobody_is_expected(self) -> None:
        if self.expected == 0:
            assert all(len(one.told) == 1 for one in self.arrived)
        assert all(len(one.told) <= 1 for one in self.arrived)


Commits.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGroupCommit = Commits.TestCase


def test_the_frontier_moves_with_each_flush() -> None:
    commit = GroupCommit(lambda: None, lambda frontier, blocks: None, LIMIT, frontier=10)
    for expected in (11, 12, 13):
        commit.expect(1)
        commit.arrive(Writer(1, 0), commit.stamp())
        assert commit.frontier == expected


class Broken(Writer):
    def committed(self, error: CoreError | None) -> None:
        super().committed(error)
        raise ZeroDivisionError("a defect")


@pytest.mark.parametrize("where", ["flush", "writer"])
def test_who_came_during_a_defect_is_flushed_all_the_same(where: str) -> None:
    later: list[Writer] = []

    def flush() -> None:
        if later:
            return
        commit.expect(1)
        later.append(Writer(1, commit.stamp()))
        commit.arrive(later[0], later[0].group)
        if where == "flush":
            raise ZeroDivisionError("a defect")

    commit = GroupCommit(flush, lambda _frontier, _blocks: None, LIMIT, frontier=10)
    commit.expect(1)
    first = Broken(1, commit.stamp()) if where == "writer" else Writer(1, commit.stamp())
    with pytest.raises(ZeroDivisionError):
        commit.arrive(first, first.group)
    assert later[0].told == [None]
    (told,) = first.told
    assert (told is None) if where == "writer" else (told is not None and told.reason is Reason.INTERNAL)
    assert commit.frontier == (12 if where == "writer" else 10), "what failed is not proven"
