"""How long a wait may look: within its bounds whatever happens, as long as pays, and not at all where it does
not."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.local.patience import Bounds, Patience

US = 1_000
MS = 1_000 * US
BOUNDS = Bounds(most=500 * US)

# Of a wait: how long after the one before it began, when its message comes (None: never), and after how much
# of a look the core is taken (None: not).
Wait = tuple[int, int | None, int | None]
times = st.integers(0, 2 * MS) | st.integers(0, 2_000 * MS)
waits = st.lists(st.tuples(times, st.none() | times, st.none() | st.integers(0, 2 * MS)), max_size=60)


class Thread:
    """Who waits, by a clock of its own; a look goes on one look too long, as real ones do."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self.patience = Patience(bounds)
        self.now = 0

    def wait(self, comes: int | None, taken: int | None = None) -> int:
        """What it was allowed to look."""
        patience, began = self.patience, self.now
        given = patience.look(began)
        if given and taken is not None and taken <= given and (comes is None or taken <= comes):
            self.now += taken + BOUNDS.taken
            patience.taken(self.now - began, self.now)
        elif given and comes is not None and comes <= given:
            self.now += comes
            patience.came(comes)
        elif comes is not None:
            self.now += max(comes, given)
            patience.missed(self.now - began)
        else:
            self.now += given
        return given


@settings(max_examples=300)
@example([(0, 100 * US, None)] + [(0, 400 * US, None), (0, 501 * US, None)] * 20)
@given(waits)
def test_looking_in_vain_takes_a_tenth_of_any_time_and_a_burst_at_most(events: list[Wait]) -> None:
    thread = Thread()
    wasted = [(0, 0)]
    for after, comes, taken in events:
        thread.now += after
        began, so_far = thread.now, thread.patience.wasted
        given = thread.wait(comes, taken)
        assert 0 <= given <= BOUNDS.most
        assert thread.patience.wasted - so_far <= 2 * BOUNDS.most
        wasted.append((thread.now, thread.patience.wasted))
        for then, until_then in wasted:
            share = (thread.now - then) // BOUNDS.wasted_of
            # A wait whose message never came is counted by the next one.
            assert thread.patience.wasted - until_then <= BOUNDS.burst + BOUNDS.most + share
        assert began <= thread.now


@settings(max_examples=200)
@given(waits, st.integers(0, BOUNDS.most))
def test_messages_that_come_soon_are_soon_seen(events: list[Wait], comes: int) -> None:
    thread = Thread()
    for after, *wait in events:
        thread.now += after
        thread.wait(*wait)
    # Whatever was: no core is taken for longer, and there is credit again.
    thread.now += BOUNDS.longest_rest + BOUNDS.wasted_of * BOUNDS.burst
    thread.wait(comes)
    thread.now += BOUNDS.wasted_of * BOUNDS.most
    seen = thread.patience.seen
    assert all(thread.wait(comes) >= comes for _ in range(50))
    assert thread.patience.seen == seen + 50 * comes


@given(waits, st.integers(BOUNDS.most + 1, 100 * MS))
def test_messages_that_come_late_are_soon_slept_for(events: list[Wait], comes: int) -> None:
    thread = Thread()
    for after, *wait in events:
        thread.now += after
        thread.wait(*wait)
    allowed = [thread.wait(comes) for _ in range(100)]
    assert allowed[8:] == [0] * 92


def test_who_has_not_waited_yet_sleeps_at_once_and_looks_when_a_message_came_soon() -> None:
    thread = Thread()
    assert thread.wait(10 * US) == 0
    assert thread.wait(10 * US) == BOUNDS.first
    assert thread.wait(200 * US) == BOUNDS.first
    assert thread.wait(200 * US) == 250 * US


def test_a_core_that_is_taken_again_and_again_is_left_for_longer_and_longer() -> None:
    thread = Thread()
    rests = []
    for _ in range(10):
        thread.patience.limit = BOUNDS.first
        began = thread.now
        while not thread.wait(None, 0):
            thread.now += MS
        rests.append((thread.now - began) // MS)
    assert rests == [0, 10, 20, 40, 80, 160, 320, 640, 1000, 1000]


def test_a_core_that_was_taken_long_ago_is_left_for_a_short_time() -> None:
    thread = Thread()
    for _ in range(4):
        thread.patience.limit = BOUNDS.first
        while not thread.wait(None, 0):
            thread.now += MS
    thread.now += 9 * 80 * MS
    assert thread.wait(None, 0)
    thread.now += BOUNDS.rest - 1
    assert not thread.wait(10 * US)
    thread.now += BOUNDS.wasted_of * MS
    assert thread.wait(10 * US)


@pytest.mark.parametrize("name", [one.name for one in fields(Bounds)])
def test_a_bound_is_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: 0 is not positive"):
        replace(BOUNDS, **{name: 0})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"first": 501 * US}, "first: 501000 is above most, 500000"),
        ({"burst": 499 * US}, "most: 500000 is above burst, 499000"),
        ({"rest": 1001 * MS}, "rest: 1001000000 is above longest_rest, 1000000000"),
    ],
    ids=["first", "burst", "rest"],
)
def test_bounds_that_contradict_each_other_are_refused(changed: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(BOUNDS, **changed)
