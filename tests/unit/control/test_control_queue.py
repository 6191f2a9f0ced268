"""The work queue's promises, as examples and as properties of every sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier_operator.ports import Kind, ObjectKey
from kvtier_operator.queue import EVENT_LEAD_SECONDS, Added, Backoff, QueueState


def key(name: str) -> ObjectKey:
    return ObjectKey(Kind.KV_CACHE, "serving", name)


def queue(bound: int = 100, randomness: float = 0.0) -> QueueState:
    return QueueState(bound=bound, backoff=Backoff(1.0, 60.0), randomness=lambda: randomness)


def taken(state: QueueState, now: float) -> str:
    found = state.take(now)
    return found.key.name if found else ""


def test_a_key_added_twice_is_taken_once() -> None:
    state = queue()
    assert state.add(key("a"), 0) is Added.QUEUED
    assert state.add(key("a"), 1) is Added.MERGED
    assert (taken(state, 2), taken(state, 2)) == ("a", "")


def test_keys_leave_in_the_order_in_which_they_became_due() -> None:
    state = queue()
    for name, after in (("late", 5.0), ("first", 0.0), ("second", 0.0)):
        state.add(key(name), 0, after)
    assert [taken(state, 5) for _ in range(3)] == ["first", "second", "late"]


@pytest.mark.parametrize(
    "late, order",
    [
        pytest.param(EVENT_LEAD_SECONDS - 0.1, ["event", "look"], id="a-look-that-is-a-little-late"),
        pytest.param(EVENT_LEAD_SECONDS + 0.1, ["look", "event"], id="a-look-that-is-late"),
    ],
)
def test_an_event_goes_before_looks_that_are_not_very_late(late: float, order: list[str]) -> None:
    state = queue()
    state.add(key("look"), 0)
    state.take(0)
    state.succeeded(key("look"), 0, requeue_after_seconds=10)
    now = 10 + late
    state.add(key("event"), now)
    assert state.next_due() is not None and state.next_due() <= now  # type: ignore[operator]
    assert [taken(state, now) for _ in range(3)] == [*order, ""]


def test_what_somebody_has_made_due_can_be_taken_alone() -> None:
    state = queue()
    for name in ("look", "both"):
        state.add(key(name), 0)
        state.take(0)
        state.succeeded(key(name), 0, requeue_after_seconds=10)
    assert (state.next_due(told_only=True), state.take(30, told_only=True)) == (None, None)
    state.add(key("event"), 30)
    state.add(key("both"), 31)
    assert state.next_due(told_only=True) == 10
    found = [state.take(31, told_only=True) for _ in range(3)]
    assert [one and (one.key.name, one.told) for one in found] == [("both", True), ("event", True), None]
    left = state.take(31)
    assert left is not None
    assert (left.key.name, left.told) == ("look", False)


def test_an_event_brings_a_key_that_is_late_forward_too() -> None:
    state = queue()
    for name in ("one", "two"):
        state.add(key(name), 0)
        state.take(0)
        state.succeeded(key(name), 0, requeue_after_seconds=10)
    state.add(key("two"), 12)
    found = state.take(12)
    assert found is not None
    assert (found.key.name, found.waited_seconds) == ("two", 2.0), "since it was due, not since the event"
    assert taken(state, 12) == "one"


def test_an_event_while_it_runs_goes_before_looks_and_one_that_failed_does_not() -> None:
    state = queue()
    for name in ("look", "told", "failed"):
        state.add(key(name), 0)
        state.take(0)
    state.succeeded(key("look"), 0, requeue_after_seconds=10)
    state.add(key("told"), 11)
    state.succeeded(key("told"), 12, None)
    state.add(key("failed"), 9)
    state.failed(key("failed"), 9)
    assert [taken(state, 12) for _ in range(4)] == ["told", "failed", "look", ""]


@pytest.mark.parametrize(
    "came, told",
    [
        pytest.param(1.0, True, id="while-it-ran"),
        pytest.param(2.01, True, id="just-after-it-failed"),
        pytest.param(2.5, True, id="in-its-backoff"),
        pytest.param(None, False, id="nobody"),
    ],
)
def test_who_came_as_a_run_failed_has_the_worker_that_is_kept_for_him(came: float | None, told: bool) -> None:
    """An edit makes the run fail that had read what was before it."""
    state = queue(randomness=1.0)
    state.add(key("a"), 0)
    state.take(0)
    if came is not None and came < 2.0:
        state.add(key("a"), came)
    state.failed(key("a"), 2.0)
    if came is not None and came >= 2.0:
        state.add(key("a"), came)
    found = state.take(10.0, told_only=True)
    assert (found is not None) is told


def test_a_key_that_keeps_coming_back_does_not_starve_the_others() -> None:
    state = queue()
    for name in ("busy", "quiet"):
        state.add(key(name), 0)
    assert taken(state, 0) == "busy"
    state.add(key("busy"), 0)
    state.succeeded(key("busy"), 0, None)
    assert taken(state, 0) == "quiet"


def test_a_key_added_while_it_runs_runs_again_and_never_beside_itself() -> None:
    state = queue()
    state.add(key("a"), 0)
    state.take(0)
    assert state.add(key("a"), 1) is Added.MERGED
    assert taken(state, 1) == ""
    state.succeeded(key("a"), 2, requeue_after_seconds=100)
    assert taken(state, 2) == "a"


def test_failures_wait_longer_each_time_and_success_forgets_them() -> None:
    state = queue(randomness=1.0)
    state.add(key("a"), 0)
    now, waits = 0.0, []
    for _ in range(8):
        state.take(now)
        wait = state.failed(key("a"), now)
        waits.append(wait)
        now += wait
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    state.take(now)
    state.succeeded(key("a"), now, None)
    assert state.failures(key("a")) == 0


@pytest.mark.parametrize("randomness, expected", [(0.0, 2.0), (0.5, 3.0), (1.0, 4.0)])
def test_backoff_is_jittered_downwards_by_at_most_half(randomness: float, expected: float) -> None:
    assert Backoff(1.0, 60.0).delay(3, randomness) == expected


def test_an_event_cuts_a_long_backoff_short_but_makes_no_hot_loop() -> None:
    state = queue()
    state.add(key("a"), 0)
    now = 0.0
    for _ in range(10):
        state.take(now)
        now += state.failed(key("a"), now)
    state.take(now)
    state.failed(key("a"), now)
    state.add(key("a"), now)
    assert taken(state, now) == ""  # not at once
    assert taken(state, now + 1) == "a"  # but far earlier than the 30 s


@pytest.mark.parametrize(
    "asked,waits", [(0.5, 1.0), (20.0, 20.0), (1e9, 60.0)], ids=["shorter", "longer", "absurd"]
)
def test_who_asks_to_be_left_alone_is_whatever_arrives(asked: float, waits: float) -> None:
    state = queue(randomness=1.0)
    state.add(key("a"), 0)
    state.take(0)
    assert state.failed(key("a"), 0, asked) == waits
    state.add(key("a"), 0)
    assert taken(state, min(asked, 60.0) * 0.99) == ""
    assert taken(state, waits) == "a"


def test_a_full_queue_refuses_new_keys_and_says_so() -> None:
    state = queue(bound=2)
    assert [state.add(key(name), 0) for name in "abc"] == [Added.QUEUED, Added.QUEUED, Added.REFUSED]
    state.take(0)
    assert state.add(key("c"), 0) is Added.REFUSED  # running keys count, too
    state.succeeded(key("a"), 0, None)
    assert state.add(key("c"), 0) is Added.QUEUED


NAMES = st.sampled_from("abcd")


class QueueMachine(RuleBasedStateMachine):
    """Against a model: which keys somebody still waits for, and which run."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.state = queue(bound=3, randomness=0.5)
        self.owed: set[str] = set()
        self.running: set[str] = set()
        self.again: set[str] = set()

    @rule(name=NAMES, after=st.sampled_from([0.0, 0.5, 30.0]))
    def add(self, name: str, after: float) -> None:
        result = self.state.add(key(name), self.now, after)
        full = len(self.owed) + len(self.running) >= 3
        if name in self.running:
            assert result is Added.MERGED
            self.again.add(name)
        elif name in self.owed:
            assert result is Added.MERGED
        else:
            assert result is (Added.REFUSED if full else Added.QUEUED)
            if not full:
                self.owed.add(name)

    @rule(told_only=st.booleans())
    def take(self, told_only: bool) -> None:
        found = self.state.take(self.now, told_only=told_only)
        if found is not None:
            assert found.told or not told_only
            assert found.key.name in self.owed, "a key that nobody asked for"
            assert found.waited_seconds >= 0
            self.owed.remove(found.key.name)
            self.running.add(found.key.name)

    @precondition(lambda self: self.running)
    @rule(requeue=st.sampled_from([None, 0.0, 10.0]))
    def succeed(self, requeue: float | None) -> None:
        name = sorted(self.running)[0]
        self.state.succeeded(key(name), self.now, requeue)
        self._ended(name, owed=requeue is not None)

    @precondition(lambda self: self.running)
    @rule()
    def fail(self) -> None:
        name = sorted(self.running)[-1]
        assert self.state.failed(key(name), self.now) > 0
        self._ended(name, owed=True)

    @rule(seconds=st.sampled_from([0.01, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def _ended(self, name: str, *, owed: bool) -> None:
        self.running.remove(name)
        if owed or name in self.again:
            self.owed.add(name)
        self.again.discard(name)

    @invariant()
    def nothing_is_lost_and_nothing_runs_twice(self) -> None:
        if not hasattr(self, "state"):
            return
        assert len(self.state) == len(self.owed)
        assert {one.name for one in self.state.running} == self.running
        assert (self.state.next_due() is not None) == bool(self.owed)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
