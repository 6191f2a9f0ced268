"""An agent's clock as the operator knows it: never ahead of the truth, whatever a message took on its way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier_operator.agents.stamps import NANOS, Stamps

_waits = st.floats(min_value=0, max_value=100, allow_nan=False)


class Clock:
    def __init__(self) -> None:
        self.seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


@given(st.lists(st.tuples(_waits, _waits, _waits), min_size=1, max_size=6), _waits)
def test_what_an_agents_clock_is_said_to_be_is_never_ahead_of_it(
    calls: list[tuple[float, float, float]], ahead: float
) -> None:
    """ahead: of the operator's clock, by what neither knows. Each call: until it is sent, there, and back."""
    clock = Clock()
    stamps = Stamps(clock)
    for before, there, back in calls:
        clock.seconds += before
        truth = int((clock.seconds + ahead) * NANOS)
        assert stamps.now_ns("a", "boot") <= truth + 1_000
        clock.seconds += there
        stamp = int((clock.seconds + ahead) * NANOS)
        clock.seconds += back
        stamps.hear("a", "boot", max(1, stamp))
        # Late by the way back, and by no more than rounding.
        late = int((clock.seconds + ahead) * NANOS) - stamps.now_ns("a", "boot")
        assert -1_000 <= late <= back * NANOS + 1_000


def test_it_is_known_of_one_life_of_an_agent_only_and_not_of_one_that_says_none() -> None:
    clock = Clock()
    stamps = Stamps(clock)
    assert stamps.now_ns("a", "first") == 0
    stamps.hear("a", "first", 7 * NANOS)
    clock.seconds += 2
    assert stamps.now_ns("a", "first") == 9 * NANOS
    assert stamps.now_ns("a", "second") == stamps.now_ns("b", "first") == 0
    stamps.hear("b", "first", NANOS)
    stamps.retain({"b"})
    assert (stamps.now_ns("a", "first"), stamps.now_ns("b", "first")) == (0, NANOS)
    stamps.hear("b", "first", 0)
    assert stamps.now_ns("b", "first") == 0
