"""Homes of chunks by a placement policy: shares that any run of chunks keeps, sessions that stay whole."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.placements.homes import ByRecency, SharedHomes, WholeHomes
from kvtier_core.placements.preference import TierShare

SHARES = (TierShare(0, 0.3), TierShare(1, 0.6), TierShare(3, 0.1))


def test_without_a_policy_no_chunk_has_a_home() -> None:
    rule_ = ByRecency()
    assert (rule_.opened(1, 10), rule_.home(1, 0)) == (None, None)
    rule_.closed(1)


def test_the_first_hundred_chunks_follow_the_shares() -> None:
    homes = SharedHomes(SHARES)
    assert Counter(homes.home(1, chunk) for chunk in range(100)) == {0: 29, 1: 61, 3: 10}


@given(st.integers(0, 10_000), st.integers(1, 500), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_any_run_of_chunks_follows_any_shares_to_within_a_few(
    first: int, count: int, parts: list[int]
) -> None:
    total = sum(parts)
    if not total:
        return
    homes = SharedHomes([TierShare(tier, part / total) for tier, part in enumerate(parts)])
    found = Counter(homes.home(1, chunk) for chunk in range(first, first + count))
    for tier, part in enumerate(parts):
        assert abs(found[tier] - count * part / total) <= 5.0
        assert part or not found[tier]


def test_all_in_one_tier_is_one_home() -> None:
    homes = SharedHomes([TierShare(2, 1.0)])
    assert {homes.home(session, chunk) for session in (1, 2) for chunk in range(50)} == {2}


@pytest.mark.parametrize("shares", [[], [TierShare(0, 0.0)]], ids=["none", "nothing"])
def test_shares_of_nothing_are_refused(shares: list[TierShare]) -> None:
    with pytest.raises(ValueError, match="share"):
        SharedHomes(shares)


def test_a_session_lies_whole_in_the_first_tier_that_can_hold_all_of_it() -> None:
    homes = WholeHomes({0: 10, 1: 20})
    assert [homes.opened(number, slots) for number, slots in enumerate([8, 4, 2, 16, 1])] == [
        0,
        1,
        0,
        1,
        None,
    ]
    assert [homes.home(number, 7) for number in range(5)] == [0, 1, 0, 1, None]
    homes.closed(0)
    assert (homes.home(0, 7), homes.opened(5, 8)) == (None, 0)


CAPACITY = {0: 7, 1: 12}


class WholeSessions(RuleBasedStateMachine):
    """Whatever opens and closes, no tier is promised beyond what it has, and no side changes."""

    def __init__(self) -> None:
        super().__init__()
        self.homes = WholeHomes(CAPACITY)
        self.open: dict[int, tuple[int | None, int]] = {}

    @rule(session=st.integers(0, 6), slots=st.integers(1, 9))
    def opens(self, session: int, slots: int) -> None:
        before = {key: value for key, value in self.open.items() if key != session}
        free = {tier: self.left(before, tier) for tier in CAPACITY}
        expected = next((tier for tier in CAPACITY if slots <= free[tier]), None)
        assert self.homes.opened(session, slots) == expected
        self.open[session] = (expected, slots)

    @rule(session=st.integers(0, 6))
    def closes(self, session: int) -> None:
        self.homes.closed(session)
        self.open.pop(session, None)

    def left(self, sessions: dict[int, tuple[int | None, int]], tier: int) -> int:
        return CAPACITY[tier] - sum(slots for side, slots in sessions.values() if side == tier)

    @invariant()
    def every_session_keeps_its_side_within_what_there_is(self) -> None:
        for tier in CAPACITY:
            assert self.left(self.open, tier) >= 0
        for session in range(7):
            side = self.open.get(session, (None, 0))[0]
            assert {self.homes.home(session, chunk) for chunk in range(3)} == {side}


TestWholeSessions = WholeSessions.TestCase
TestWholeSessions.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
