"""The arithmetic of the release bench: what it makes of watches, reads and the audit log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.bench.release_audit import AuditTail, Write, by_operator, difference, most_by_agent, on_objects
from tests.bench.release_objects import ROLES, Role, Sizes, all_named, at_rest
from tests.bench.release_range import ENDED, FACTOR, FILE, HELD, held, limits_of, main, name_of, read
from tests.bench.release_track import Tracker, bucket_quantile, buckets, lateness, quantile, slope
from tests.bench.rows import Row

OPERATOR = "system:serviceaccount:kvtier-system:kvtier-operator"


def event(generation: int, observed: int, **status: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": "a", "uid": "u", "generation": generation}
    return {"metadata": metadata, "status": {"observedGeneration": observed, **status}}


def test_an_edit_is_answered_by_the_status_that_has_observed_it() -> None:
    tracker = Tracker()
    tracker.feed("kvcaches", "ADDED", event(1, 1), 0.0)
    tracker.begin()
    tracker.feed("kvcaches", "MODIFIED", event(2, 1), 10.0)
    tracker.feed("kvcaches", "MODIFIED", event(3, 1), 11.0)
    assert tracker.unanswered() == 2
    tracker.feed("kvcaches", "MODIFIED", event(3, 2), 12.0)
    assert tracker.latencies == [2.0]
    tracker.feed("kvcaches", "MODIFIED", event(3, 3), 12.5)
    assert (tracker.latencies, tracker.unanswered()) == ([2.0, 1.5], 0)


def test_a_move_of_a_fence_is_a_transition_and_numbers_are_none() -> None:
    tracker = Tracker()
    for fence, verdict in ((1, "x"), (2, "x"), (2, "y"), (3, "y")):
        tracker.feed("kvrollouts", "MODIFIED", event(1, 1, fence=fence, verdict=verdict, stage="Ramp"), 0.0)
    assert tracker.transitions == {"a": 2}


@pytest.mark.parametrize(
    "moments, late",
    [
        pytest.param([], [], id="never"),
        pytest.param([5.0], [], id="one-says-nothing"),
        pytest.param([7.0, 10.0, 20.0], [], id="nor-does-one-on-a-beat"),
        pytest.param([-3.0, 0.0, 10.0, 20.5, 30.0], [0.5, 0.0], id="in-time"),
        pytest.param([0.0, 10.0, 20.0, 30.5, 40.0], [0.0, 0.5, 0.0], id="opened-on-a-beat"),
        pytest.param([-3.0, 0.0, 10.0, 14.0, 20.0], [0.0], id="an-extra-look"),
        pytest.param(
            [-3.0, 0.0, 10.0, 20.0, 47.0, 50.0, 60.0],
            [0.0, 17.0, 0.0, 0.0],
            id="a-missed-beat-is-made-up-for-once",
        ),
        pytest.param([-5.0, 12.0, 20.0, 30.0, 40.0], [2.0, 0.0, 0.0], id="the-first-was-late"),
        pytest.param([-3.0, 0.0, 10.3, 20.0, 30.2, 40.1], [0.3, 0.2, 0.1], id="each-by-another-bit"),
    ],
)
def test_lateness_is_measured_against_the_beat(moments: list[float], late: list[float]) -> None:
    assert lateness(moments, 10.0) == pytest.approx(late)


def test_a_quantile_is_a_value_and_a_slope_is_a_line() -> None:
    assert quantile([], 0.99) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0] * 99 + [9.0], 0.99) == 9.0
    assert slope([(0.0, 1.0), (10.0, 3.0), (20.0, 5.0)]) == pytest.approx(0.2)
    assert slope([(1.0, 5.0)]) == 0.0


def line(user: str, verb: str, resource: str, name: str, subresource: str = "") -> bytes:
    target = {"resource": resource, "name": name} | ({"subresource": subresource} if subresource else {})
    body = {"verb": verb, "user": {"username": user}, "objectRef": target}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def test_the_audit_log_says_who_wrote_what(tmp_path: Path) -> None:
    """Reads do not count; half a line waits for its other half."""
    agent = "system:serviceaccount:ns:kvtier-agent-pool"
    tail = AuditTail(tmp_path / "audit.log", OPERATOR)
    data = b"".join(
        [
            line(OPERATOR, "patch", "kvrollouts", "r", "status"),
            line(OPERATOR, "get", "kvrollouts", "r"),
            line(OPERATOR, "update", "leases", "kvtier-operator"),
            line(OPERATOR, "create", "events", ""),
            line(agent, "patch", "leases", "kvnode-a"),
            line(agent, "patch", "leases", "kvnode-a"),
            line(agent, "patch", "leases", "kvnode-b"),
            line(agent, "patch", "kvnodes", "a", "status"),
            line("admin", "patch", "kvcaches", "c"),
        ]
    )
    rest = tail.take(data[:-10])
    assert tail.take(rest + data[-10:]) == b""
    assert by_operator(tail.counts, lease="kvtier-operator") == {
        "patch kvrollouts/status": 1,
        "create events": 1,
    }
    assert most_by_agent(tail.counts, "leases") == 2
    assert most_by_agent(tail.counts, "kvnodes/status") == 1
    assert tail.counts[Write("other", "patch", "kvcaches", "c")] == 1
    assert on_objects(tail.counts, frozenset({"r", "c", "a"})) == {"patch kvrollouts/status": 1}
    before = Counter(tail.counts)
    tail.take(line(OPERATOR, "create", "events", ""))
    assert difference(tail.counts, before) == {Write("operator", "create", "events"): 1}


@pytest.mark.parametrize("sizes", [Sizes(1000, 200), Sizes(60, 10), Sizes(1, 200, 200)], ids=str)
def test_every_pool_lies_in_one_namespace_and_has_its_agents(sizes: Sizes) -> None:
    named = all_named(sizes)
    assert len(named) == sizes.caches
    for one in named:
        assert one.namespace == sizes.namespace(sizes.pool_of_cache(one.index))
    agents = Counter(sizes.pool_of_agent(index) for index in range(sizes.agents))
    assert set(agents) == set(range(sizes.pools))
    assert min(agents.values()) >= sizes.pool_size


def test_a_thousand_rollouts_are_of_all_roles() -> None:
    roles = Counter(one.role for one in all_named(Sizes(1000, 200)))
    assert set(roles) == set(ROLES)
    assert min(roles.values()) >= 100


@pytest.mark.parametrize(
    "role, status",
    [
        pytest.param(Role.SHADOW, {"stage": "Shadow", "phase": "Progressing"}, id="shadow"),
        pytest.param(Role.FULL, {"stage": "Full", "phase": "Progressing"}, id="full"),
        pytest.param(Role.COMPLETED, {"stage": "Full", "phase": "Completed"}, id="completed"),
        pytest.param(Role.ROLLED_BACK, {"stage": "ExactBaseline", "phase": "RolledBack"}, id="rolled-back"),
        pytest.param(Role.PENDING, {"stage": "Off", "phase": "Pending"}, id="pending"),
    ],
)
def test_a_rollout_rests_where_its_role_says(role: Role, status: dict[str, str]) -> None:
    assert at_rest(role, status)
    assert not at_rest(role, {})
    assert not at_rest(role, {"stage": "Ramp", "phase": "RollingBack"})


def test_limits_are_of_the_mean_of_runs_and_hold_a_run_of_the_same_sizes(tmp_path: Path) -> None:
    reports = []
    for number, value in enumerate((1.0, 3.0)):
        rows = [
            Row("event_to_status.p99", value, "s", goal=2.0, lower_is_better=True),
            Row("looks", 9.0, "n"),
        ]
        reports.append(tmp_path / f"{number}.json")
        reports[-1].write_text(json.dumps([row.to_json() for row in rows]))
    file = tmp_path / "range.json"
    sizes = ["--caches", "16", "--agents", "5", "--file", str(file)]
    assert main([*(str(report) for report in reports), *sizes]) == 0
    name = name_of(16, 5, 5)
    assert read(file) == {name: {"event_to_status.p99": {"mean": 2.0, "limit": 2.4}}}
    for value, broken in ((2.4, False), (2.5, True)):
        row = Row("event_to_status.p99", value, "s", goal=2.0, lower_is_better=True)
        assert [one.broken for one in held([row], read(file), name)] == [broken]
        assert [one.floor for one in held([row], read(file), name_of(17, 5, 5))] == [None]


def test_a_report_of_one_part_keeps_the_limits_of_the_other_and_one_that_ended_early_makes_none(
    tmp_path: Path,
) -> None:
    file, report = tmp_path / "range.json", tmp_path / "report.json"
    sizes = ["--caches", "16", "--agents", "5", "--file", str(file)]

    def tell(*rows: Row) -> int:
        report.write_text(json.dumps([row.to_json() for row in rows]))
        return main([str(report), *sizes])

    def ended(parts: int) -> Row:
        return Row(ENDED, parts, "parts", floor=1.0)

    assert tell(Row("lateness.p99", 1.0, "interval", lower_is_better=True), ended(1)) == 0
    assert tell(Row("rollback.proved.p99", 2.0, "s", lower_is_better=True), ended(1)) == 0
    kept = {"lateness.p99": {"mean": 1.0, "limit": 1.2}, "rollback.proved.p99": {"mean": 2.0, "limit": 2.4}}
    assert read(file) == {name_of(16, 5, 5): kept}
    assert tell(Row("lateness.p99", 9.0, "interval", lower_is_better=True), ended(0)) == 1
    assert read(file) == {name_of(16, 5, 5): kept}


def test_the_committed_limits_follow_from_their_means() -> None:
    ranges = read(FILE)
    assert ranges
    for rows in ranges.values():
        assert rows
        for name, row in rows.items():
            assert name.startswith(HELD)
            assert row["limit"] == pytest.approx(row["mean"] * FACTOR, abs=1e-6)
    assert limits_of([]) == {}


def test_slow_answers_are_told_by_when_they_came() -> None:
    tracker = Tracker()
    tracker.feed("kvcaches", "ADDED", event(1, 1), 0.0)
    tracker.begin()
    for generation, at, seconds in ((2, 110.0, 2.5), (3, 114.0, 3.0), (4, 130.0, 0.5)):
        tracker.feed("kvcaches", "MODIFIED", event(generation, generation - 1), at)
        tracker.feed("kvcaches", "MODIFIED", event(generation, generation), at + seconds)
    told = tracker.slow_by(100.0, 10.0)
    assert told == [
        "10 s: 2 slow, by kind {'kvcaches': 2}, 2.5 to 3.0 s, as kvcaches/ns/a",
    ]
    tracker.begin()
    assert tracker.slow_by(100.0, 10.0) == []


def test_what_was_written_between_two_moments_is_told_by_its_fields() -> None:
    tracker = Tracker()
    for name, gate in (("a", 1), ("b", 1)):
        status = {"stage": "Canary", "gates": gate}
        tracker.feed("kvrollouts", "ADDED", {"metadata": metadata(name), "status": status}, 0.0)
    before = dict(tracker.statuses)
    later = {"stage": "Canary", "gates": 2, "conditions": []}
    tracker.feed("kvrollouts", "MODIFIED", {"metadata": metadata("b"), "status": later}, 1.0)
    assert tracker.changed_since(before) == ["kvrollouts/ns/b in Canary: conditions null -> [], gates 1 -> 2"]


def metadata(name: str) -> dict[str, str]:
    return {"namespace": "ns", "name": name, "uid": name}


def histogram(**counts: float) -> str:
    edges = {"low": "0.1", "high": "0.5", "rest": "+Inf"}
    lines = [f'looks_bucket{{le="{edges[name]}"}} {count}' for name, count in counts.items()]
    return "\n".join(["# TYPE looks histogram", 'other_bucket{le="9.0"} 70.0', *lines, "looks_count 12.0"])


@pytest.mark.parametrize(
    "before, after, share, edge",
    [
        pytest.param("", histogram(low=99, high=100, rest=100), 0.99, 0.1, id="at-an-edge"),
        pytest.param("", histogram(low=98, high=100, rest=100), 0.99, 0.5, id="above-it"),
        pytest.param("", histogram(low=0, high=0, rest=1), 0.5, float("inf"), id="above-all"),
        pytest.param(
            histogram(low=90, high=90, rest=90),
            histogram(low=90, high=99, rest=99),
            0.5,
            0.5,
            id="since-then",
        ),
        pytest.param(
            histogram(low=1, high=2, rest=2), histogram(low=1, high=2, rest=2), 0.5, 0.0, id="nothing-counted"
        ),
        pytest.param("", "", 0.5, 0.0, id="no-histogram"),
    ],
)
def test_a_quantile_of_a_histogram_is_at_most_the_edge_of_its_bucket(
    before: str, after: str, share: float, edge: float
) -> None:
    assert bucket_quantile(buckets(before, "looks"), buckets(after, "looks"), share) == edge
