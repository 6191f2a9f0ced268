"""What is counted in one step reads as what the client library counts."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from kvtier_agent.quickmetrics import ChildOf, Duration, Durations, Totals
from kvtier_core.release.enforcement import ServedArm

BOUNDS = (0.0005, 0.25, 1.0, 30.0)
arms = st.sampled_from([*ServedArm, 'odd "name"\n'])
seconds = st.floats(0.0, 100.0) | st.sampled_from(BOUNDS)


def told(registry: CollectorRegistry) -> list[str]:
    """As scraped, in both formats, but for when each child was made."""
    texts = (generate(registry).decode() for generate in (generate_latest, generate_openmetrics))
    return [re.sub(r"(_created\{[^}]*\}) .*", r"\1", text) for text in texts]


@given(st.lists(st.tuples(arms, st.sampled_from(["OK", "DEADLINE"]), seconds), max_size=20))
def test_a_histogram_reads_as_the_librarys(observed: list[tuple[str, str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    named = "kvtier_agent_x_seconds", "What it is", ["arm", "code"]
    quick = Durations(*named, BOUNDS, ours)
    slow = Histogram(*named, buckets=BOUNDS, registry=theirs)
    for arm, code, one in observed:
        quick.children[arm, code].observe(one)
        slow.labels(arm, code).observe(one)
    assert told(ours) == told(theirs)


@given(st.lists(st.tuples(arms, st.integers(0, 1 << 40)), max_size=20))
def test_a_counter_reads_as_the_librarys(counted: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    named = "kvtier_agent_x_bytes", "What it is", ["arm"]
    quick, slow = Totals(*named, ours), Counter(*named, registry=theirs)
    for arm, amount in counted:
        quick.children[arm,].inc(amount)
        slow.labels(arm).inc(amount)
    assert told(ours) == told(theirs)


def test_a_name_is_registered_once() -> None:
    registry = CollectorRegistry()
    Durations("kvtier_agent_x_seconds", "What it is", ["arm"], BOUNDS, registry)
    Totals("kvtier_agent_x_bytes", "What it is", ["arm"], registry)
    for name in ("kvtier_agent_x_seconds", "kvtier_agent_x_seconds_bucket", "kvtier_agent_x_bytes_total"):
        with pytest.raises(ValueError, match="Duplicated"):
            Counter(name, "Another one", registry=registry)


def test_nothing_is_lost_between_threads() -> None:
    registry = CollectorRegistry()
    durations = Durations("kvtier_agent_x_seconds", "What it is", ["n"], BOUNDS, registry).children
    totals = Totals("kvtier_agent_x_bytes", "What it is", ["n"], registry).children
    begin = threading.Barrier(4, timeout=30)

    def count() -> None:
        begin.wait()
        for number in range(500):
            durations[str(number % 7),].observe(1.0)
            totals[str(number % 7),].inc(3)

    threads = [threading.Thread(target=count, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(one.read()[0][-1] for one in durations.values()) == 2000
    assert sum(one.read()[1] for one in durations.values()) == 2000.0
    assert sum(one.value for one in totals.values()) == 6000


def test_two_who_ask_for_a_child_at_once_get_the_same() -> None:
    """The second one comes while the first one's is made."""
    met: list[Duration] = []

    def make(name: str) -> Duration:
        if not met:
            met.append(Duration(BOUNDS))
            met.append(children[name,])
        return Duration(BOUNDS)

    children = ChildOf(make)
    assert children["a",] is met[1] is children["a",]
