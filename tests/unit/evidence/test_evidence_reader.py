"""The operator's side: each unit once, lost tails missing, who was not read; and a model of the protocol."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier_evidence import metrics
from kvtier_evidence.delta import Delta, DeltaLog
from kvtier_evidence.grid import Histogram
from kvtier_evidence.reader import Applied, Position, WindowReader
from kvtier_evidence.verdicts import Reason
from kvtier_evidence.window import MetricCounts, WindowCounts
from tests.unit.evidence.evidence_builders import key


@dataclass
class Agent:
    """One life of an agent, without cohorts: counts, and the log that reads them."""

    epoch: str
    counts: WindowCounts = field(default_factory=WindowCounts)
    settled: int = 1
    assigned: int = 0

    def __post_init__(self) -> None:
        self.log = DeltaLog(self.epoch, self.counts)

    def unit(self, value: float | None = 0.1, arm: str = "candidate") -> None:
        self.counts.of(metrics.REQUESTS, arm).histogram.add(0.0)
        self.counts.of(metrics.TPOT_RATIO, arm).histogram.add(value)
        self.assigned += 1
        self.log.changed()

    def read(self, epoch: str = "", ack: int = 0) -> Delta:
        return self.log.read(epoch, ack, settled_cohort=self.settled, assigned_units=self.assigned)


def reader() -> WindowReader:
    return WindowReader(key(), opened_at=0.0, cohort=10.0, settle=30.0)


def units(counts: WindowCounts, metric: str = metrics.REQUESTS) -> int:
    return sum(c.histogram.n for (m, _), c in counts.metrics.items() if m == metric)


def test_a_repeated_read_counts_once() -> None:
    agent, op = Agent("boot1"), reader()
    for _ in range(3):
        agent.unit()
    reply = agent.read()
    assert [op.apply("n1", reply, now=1.0) for _ in range(3)] == [
        Applied.APPLIED,
        Applied.DUPLICATE,
        Applied.DUPLICATE,
    ]
    assert units(op.evidence(["n1"], now=1.0, interval=5.0).merged) == 3


MALFORMED = {
    "n does not add up": WindowCounts({("requests", "candidate"): MetricCounts(Histogram(zero=1, n=2))}),
    "negative": WindowCounts(zero_tolerance={"illegalFallbacks": -1}),
    "more candidates than sessions": WindowCounts(sessions_candidate=2, sessions_total=1),
    "more above than units": WindowCounts(
        {("outputRelativeError", "candidate"): MetricCounts(Histogram(zero=1, n=1), {"output": 1 << 33})}
    ),
    "down over up": WindowCounts(
        {("outputRelativeError", "candidate"): MetricCounts(Histogram(zero=1, n=1), {"g": 1}, {"g": 2})}
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_reply_changes_nothing_and_is_an_error(case: str) -> None:
    op = reader()
    bad = Delta("boot1", 0, 1, False, MALFORMED[case], MALFORMED[case].total(), 1, 0)
    assert op.apply("n1", bad, now=1.0) is Applied.MALFORMED
    seen = op.evidence(["n1"], now=1.0, interval=5.0)
    assert (seen.error, seen.error_agents) == (Reason.EVIDENCE_INCONSISTENT, ("n1",))
    assert seen.merged.total() == 0
    assert op.apply("n1", Agent("boot1").read(), now=2.0) is Applied.APPLIED
    assert op.evidence(["n1"], now=2.0, interval=5.0).error is None


def test_a_sum_that_does_not_fit_is_a_rebuild_and_twice_an_error() -> None:
    agent, op = Agent("boot1"), reader()
    agent.unit()
    wrong = replace(agent.read(), total_units=99)
    assert op.apply("n1", wrong, now=1.0) is Applied.REBUILD
    assert op.evidence(["n1"], now=1.0, interval=5.0).error is None
    assert op.apply("n1", wrong, now=2.0) is Applied.REBUILD
    assert op.evidence(["n1"], now=2.0, interval=5.0).error is Reason.EVIDENCE_INCONSISTENT
    assert op.apply("n1", agent.read(), now=3.0) is Applied.APPLIED
    assert op.evidence(["n1"], now=3.0, interval=5.0).error is None


def test_the_unread_tail_of_a_restarted_agent_is_missing() -> None:
    first, op = Agent("boot1"), reader()
    for _ in range(80):
        first.unit()
    for _ in range(20):
        first.unit(arm="baseline")
    first.assigned = 110
    op.apply("n1", first.read(), now=0.0)
    first.assigned = 130
    op.apply("n1", first.read("boot1", 100), now=10.0)
    second = Agent("boot2")
    second.unit()
    # 30 assigned and not settled, and 13 a second for 2 seconds since the last read.
    assert op.apply("n1", second.read("boot1", 100), now=12.0) is Applied.APPLIED
    merged = op.evidence(["n1"], now=12.0, interval=5.0).merged
    lost = 30 + 26
    candidate = merged.get(metrics.TPOT_RATIO, "candidate").histogram
    baseline = merged.get(metrics.TPOT_RATIO, "baseline").histogram
    assert candidate.missing == -(-lost * 81 // 101)
    assert baseline.missing == -(-lost * 20 // 101)
    assert candidate.n == 81 + candidate.missing
    assert candidate.consistent()


def test_an_agent_that_was_read_once_has_a_rate_too() -> None:
    first, op = Agent("boot1"), reader()
    for _ in range(100):
        first.unit()
    first.assigned = 100
    op.apply("n1", first.read(), now=20.0)
    second = Agent("boot2")
    second.unit()
    op.apply("n1", second.read("boot1", 100), now=26.0)
    requests = op.evidence(["n1"], now=26.0, interval=5.0).merged.get(metrics.REQUESTS, "candidate")
    assert requests.histogram.missing == 30, "5 a second since the window opened, for 6 seconds"


def test_what_was_lost_before_anything_was_read_is_not_forgotten() -> None:
    first, op = Agent("boot1"), reader()
    first.assigned = 7
    op.apply("n1", first.read(), now=0.0)
    second = Agent("boot2")
    op.apply("n1", second.read(), now=0.0)
    second.unit()
    op.apply("n1", second.read("boot2", 0), now=1.0)
    assert (
        op.evidence(["n1"], now=1.0, interval=5.0).merged.get(metrics.REQUESTS, "candidate").histogram.missing
        == 7
    )


def test_an_agent_not_read_for_three_intervals_is_named() -> None:
    op = reader()
    for name in ("n1", "n2"):
        op.apply(name, Agent("boot-" + name).read(), now=0.0)
    op.apply("n1", Agent("boot-n1").read("boot-n1", 0), now=20.0)
    late = op.evidence(["n1", "n2", "n3"], now=20.0, interval=5.0)
    assert (late.error, late.error_agents) == (Reason.AGENT_UNREACHABLE, ("n2", "n3"))
    soon = op.evidence(["n1", "n2"], now=15.0, interval=5.0)
    assert (soon.error, soon.complete) == (None, True)


COVERAGE = {
    "never read": ([], False),
    "no cohort yet": ([(0.0, 0)], False),
    "one cohort": ([(0.0, 1)], True),
    "still settling": ([(0.0, 1), (60.0, 1)], True),
    "stuck": ([(0.0, 1), (61.0, 1)], False),
    "joined late, on its own clock": ([(500.0, 1), (560.0, 1)], True),
}


@pytest.mark.parametrize("case", COVERAGE)
def test_coverage(case: str) -> None:
    reads, complete = COVERAGE[case]
    op, agent = reader(), Agent("boot1")
    for now, settled in reads:
        agent.settled = settled
        op.apply("n1", agent.read("boot1", 0), now=now)
    assert op.evidence(["n1"], now=600.0, interval=300.0).complete is complete
    assert not op.evidence([], now=600.0, interval=300.0).complete, "a window without agents proves nothing"


def test_only_expected_agents_are_shown_apart_but_all_counts_stay() -> None:
    """A node that left keeps its counts in the pool."""
    op = reader()
    for name in ("n1", "gone"):
        agent = Agent("boot-" + name)
        agent.unit()
        op.apply(name, agent.read(), now=0.0)
    seen = op.evidence(["n1"], now=1.0, interval=5.0)
    assert (units(seen.merged), set(seen.agents)) == (2, {"n1"})
    assert (metrics.TPOT_RATIO, "candidate") not in seen.agents["n1"].metrics


def test_a_late_reply_of_a_life_that_ended_in_between_begins_nothing() -> None:
    op, first, second = reader(), Agent("boot1"), Agent("boot2")
    asked = op.position("n1")
    late = first.read(asked.epoch, asked.ack_seq)
    assert op.apply("n1", second.read(), now=0.0, asked=asked) is Applied.APPLIED
    assert op.apply("n1", late, now=1.0, asked=asked) is Applied.DUPLICATE
    second.unit()
    at = op.position("n1")
    assert at.epoch == "boot2"
    assert op.apply("n1", second.read(at.epoch, at.ack_seq), now=2.0, asked=at) is Applied.APPLIED
    third = Agent("boot3")
    at = op.position("n1")
    assert op.apply("n1", third.read(at.epoch, at.ack_seq), now=3.0, asked=at) is Applied.APPLIED


class DeltaProtocol(RuleBasedStateMachine):
    """Two agents with lives, two readers, replies that are lost, late, repeated or reordered.

    Truth: for each reader, the sum over (agent, life) of that life's counts at the version applied last.
    """

    AGENTS = ("n1", "n2")

    @initialize()
    def start(self) -> None:
        self.lives = Counter(self.AGENTS)
        self.agents = {a: Agent(f"{a}/1") for a in self.AGENTS}
        self.readers = [reader(), reader()]
        self.applied: list[dict[tuple[str, str], int]] = [{}, {}]
        self.truth: dict[tuple[str, int], WindowCounts] = {}
        self.open: dict[tuple[str, int], int] = {}
        self.wire: list[tuple[int, str, Delta, Position]] = []
        self.now = 0.0

    @rule(
        a=st.sampled_from(AGENTS),
        n=st.integers(1, 4),
        arm=st.sampled_from(["candidate", "baseline"]),
        begun=st.integers(0, 3),
    )
    def record(self, a: str, n: int, arm: str, begun: int) -> None:
        """`begun` units do not settle any more: a restart takes them with it."""
        self.agents[a].assigned += begun
        for i in range(n):
            self.agents[a].unit(0.1 * i if i else None, arm)

    @rule(a=st.sampled_from(AGENTS))
    def event(self, a: str) -> None:
        agent = self.agents[a]
        agent.counts.zero_tolerance["illegalFallbacks"] = (
            agent.counts.zero_tolerance.get("illegalFallbacks", 0) + 1
        )
        agent.log.changed()

    @rule(a=st.sampled_from(AGENTS), r=st.sampled_from([0, 1]), deliver=st.booleans())
    def read(self, a: str, r: int, deliver: bool) -> None:
        at = self.readers[r].position(a)
        reply = self.agents[a].read(at.epoch, at.ack_seq)
        self.truth[reply.epoch, reply.to_seq] = self.agents[a].counts.copy()
        self._note_open(reply)
        if deliver:
            self._deliver(r, a, reply, at)
        else:
            self.wire = [*self.wire, (r, a, reply, at)][-8:]

    @rule(a=st.sampled_from(AGENTS), n=st.integers(1, 4), begun=st.integers(0, 3), restarts=st.booleans())
    def busy(self, a: str, n: int, begun: int, restarts: bool) -> None:
        """The usual turn of things, so that most runs get somewhere: work, a read by both, perhaps an end."""
        self.record(a, n, "candidate", begun)
        for r in (0, 1):
            self.read(a, r, True)
        if restarts:
            self.restart(a)

    @rule(i=st.integers(0, 7), keep=st.booleans())
    def late(self, i: int, keep: bool) -> None:
        if i < len(self.wire):
            r, a, reply, at = self.wire[i] if keep else self.wire.pop(i)
            self._deliver(r, a, reply, at)

    @rule(a=st.sampled_from(AGENTS))
    def restart(self, a: str) -> None:
        self.lives[a] += 1
        self.agents[a] = Agent(f"{a}/{self.lives[a]}")

    @rule(r=st.sampled_from([0, 1]))
    def new_leader(self, r: int) -> None:
        self.readers[r], self.applied[r] = reader(), {}
        self.wire = [w for w in self.wire if w[0] != r]

    def _deliver(self, r: int, a: str, reply: Delta, at: Position) -> None:
        self.now += 1.0
        lives = [life for agent, life in self.applied[r] if agent == a]
        result = self.readers[r].apply(a, reply, now=self.now, asked=at)
        if result is Applied.APPLIED:
            assert reply.epoch not in lives[:-1], "an old life is never taken up again"
            self.applied[r][a, reply.epoch] = reply.to_seq
        elif result is Applied.REBUILD:
            self.applied[r] = {}
        else:
            assert result is Applied.DUPLICATE

    @invariant()
    def counts_are_the_truth(self) -> None:
        for r, op in enumerate(self.readers):
            want = WindowCounts()
            for (_, epoch), seq in self.applied[r].items():
                want.merge(self.truth[epoch, seq])
            got = op._merged
            assert got.total() == want.total()
            assert got.zero_tolerance == want.zero_tolerance
            for where in want.metrics:
                assert got.get(*where) == want.get(*where)

    @invariant()
    def what_ended_lives_had_open_is_missing(self) -> None:
        """Never dropped: each unit that a life had assigned when it was last read counts, without a value."""
        for r, op in enumerate(self.readers):
            counted = units(op._merged)
            lost = 0
            for agent in self.AGENTS:
                lives = [(epoch, seq) for (a, epoch), seq in self.applied[r].items() if a == agent]
                lost += sum(self.open[life] for life in lives[:-1])
            seen = op.evidence(self.AGENTS, now=self.now, interval=1e9).merged
            assert units(seen) >= counted + (lost if counted else 0)
            assert all(c.histogram.consistent() for c in seen.metrics.values())

    def _note_open(self, reply: Delta) -> None:
        """The fewest that a reply of this version can have said: it may be sent again with more."""
        settled = units(self.truth[reply.epoch, reply.to_seq])
        said = reply.assigned_units - settled
        known = self.open.get((reply.epoch, reply.to_seq), said)
        self.open[reply.epoch, reply.to_seq] = min(said, known)

    def teardown(self) -> None:
        if not hasattr(self, "agents"):
            return
        for r, op in enumerate(self.readers):
            for _ in range(4):
                for a in self.AGENTS:
                    at = op.position(a)
                    reply = self.agents[a].read(at.epoch, at.ack_seq)
                    self.truth[reply.epoch, reply.to_seq] = self.agents[a].counts.copy()
                    self._note_open(reply)
                    self._deliver(r, a, reply, at)
            for a in self.AGENTS:
                assert self.applied[r][a, self.agents[a].epoch] == self.agents[a].log.seq, "it converges"
        self.counts_are_the_truth()
        self.what_ended_lives_had_open_is_missing()


TestDeltaProtocol = DeltaProtocol.TestCase
TestDeltaProtocol.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
