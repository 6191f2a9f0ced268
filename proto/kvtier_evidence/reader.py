"""The operator's side: adds up the deltas of a window's agents, each unit once.

A cache of what the agents hold: a new leader starts empty and reads everything from 0. What a restarted agent
took with it is added as missing. Knows agents by name and a clock's readings; no transport, no verdict.

Sections 3.3 and 3.4 of the evidence specification.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvtier_evidence import metrics
from kvtier_evidence.delta import Delta
from kvtier_evidence.external import ExternalReading
from kvtier_evidence.metrics import METRICS, Arm, Kind
from kvtier_evidence.verdicts import Reason
from kvtier_evidence.window import WindowCounts, WindowKey

UNREACHABLE_INTERVALS: Final = 3
REBUILDS_TOLERATED: Final = 1
_EPOCHS_REMEMBERED: Final = 8


class Applied(StrEnum):
    APPLIED = "Applied"
    DUPLICATE = "Duplicate"
    """Late or repeated; it brings nothing new."""
    REBUILD = "Rebuild"
    """A gap or a sum that does not fit: the merged window was dropped, read every agent from 0."""
    MALFORMED = "Malformed"
    """It cannot be what it says; nothing was changed but the agent counts as not read."""


@dataclass(frozen=True, slots=True)
class Position:
    """What to ask an agent for."""

    epoch: str
    ack_seq: int


@dataclass(frozen=True, slots=True)
class WindowEvidence:
    """What the judge sees of a window at one look."""

    key: WindowKey
    merged: WindowCounts
    agents: Mapping[str, WindowCounts]
    """Per agent, of each only what `_for_one_agent` leaves."""
    complete: bool
    """Every agent was read in this window, to one common cohort."""
    error: Reason | None = None
    error_agents: tuple[str, ...] = ()
    external: Mapping[str, ExternalReading] = field(default_factory=dict)
    """By gate."""


@dataclass(slots=True)
class _Agent:
    epoch: str = ""
    ack: int = 0
    total: int = 0
    settled_cohort: int = -1
    assigned: int = 0
    first_assigned: int = 0
    first_at: float = 0.0
    rate: float = 0.0
    """The highest rate of units of its earlier lives, per second."""
    unseen_since: float = 0.0
    """Before it no unit of this life was assigned."""
    last_at: float | None = None
    past: tuple[str, ...] = ()
    counts: WindowCounts = field(default_factory=WindowCounts.none)
    """All lives, for the judge."""
    requests: int = 0
    """Settled units of this life."""
    lost: int = 0
    """Units that earlier lives had assigned and nobody read."""


class WindowReader:
    """Merges one window. Not thread-safe: one reconcile owns it. Times are seconds of one monotonic clock."""

    def __init__(self, key: WindowKey, *, opened_at: float, cohort: float, settle: float) -> None:
        self._key = key
        self._opened_at = opened_at
        self._cohort = cohort
        self._settle = settle
        self._rebuilds = 0
        self._version = 0
        self._reset()

    @property
    def version(self) -> int:
        """Grows whenever the counts of `evidence` change; without it only what it says of time may have."""
        return self._version

    @property
    def key(self) -> WindowKey:
        return self._key

    @property
    def assigned(self) -> int:
        """Units that the agents have assigned so far, settled or not, in the lives last read."""
        return sum(agent.assigned for agent in self._agents.values())

    def position(self, agent: str) -> Position:
        """From where to read an agent; ("", 0) for one never read."""
        state = self._agents.get(agent)
        return Position(state.epoch, state.ack) if state else Position("", 0)

    def apply(self, agent: str, reply: Delta, *, now: float, asked: Position | None = None) -> Applied:
        """Adds a reply, once. After REBUILD every agent must be read again, starting from `position`.

        asked: the position that the reply answers. Lives have no order, so a reply that comes late, asked
        while another life was read, never begins one: it may be of a life that ended in between."""
        if not reply.epoch or not 0 <= reply.from_seq <= reply.to_seq or not reply.increments.consistent():
            self._malformed.add(agent)
            return Applied.MALFORMED
        state = self._agents.get(agent)
        if state is not None and reply.epoch in state.past:
            return Applied.DUPLICATE
        same_life = state is not None and state.epoch == reply.epoch
        if state is not None and not same_life and asked is not None and asked.epoch != state.epoch:
            return Applied.DUPLICATE
        ack = state.ack if state is not None and same_life else 0
        if reply.from_seq != ack:
            return Applied.DUPLICATE if reply.to_seq <= ack else self._rebuild()
        added = reply.increments.total()
        if (state.total if state is not None and same_life else 0) + added != reply.total_units:
            return self._rebuild()
        if state is None:
            state = self._agents[agent] = _Agent(unseen_since=self._opened_at)
        if not same_life:
            self._begin_life(agent, state, reply.epoch, now)
        self._take(state, reply, added, now)
        self._malformed.discard(agent)
        if self._merged.total() != self._expected_total:
            return self._rebuild()
        self._rebuilds = 0
        return Applied.APPLIED

    def evidence(self, expected: Iterable[str], *, now: float, interval: float) -> WindowEvidence:
        """The window at one look over the `expected` agents, each read every `interval` seconds."""
        names = sorted(set(expected))
        known = {a: self._agents[a] for a in names if a in self._agents}
        late = [a for a in names if now - self._last_read(a) > UNREACHABLE_INTERVALS * interval]
        bad = sorted(self._malformed & set(names))
        error: Reason | None = None
        blamed: list[str] = []
        if self._rebuilds > REBUILDS_TOLERATED or bad:
            error, blamed = Reason.EVIDENCE_INCONSISTENT, bad
        elif late:
            error, blamed = Reason.AGENT_UNREACHABLE, late
        complete = len(known) == len(names) > 0 and all(self._covered(a) for a in known.values())
        merged = self._with_lost(self._merged, sum(a.lost for a in self._agents.values()))
        agents = {name: self._with_lost(a.counts, a.lost) for name, a in known.items()}
        return WindowEvidence(self._key, merged, agents, complete, error, tuple(blamed))

    def _covered(self, agent: _Agent) -> bool:
        """It published a cohort, and all but those that may still be settling."""
        read_for = (agent.last_at or agent.first_at) - agent.first_at
        open_for = self._settle + 2.0 * self._cohort
        return agent.settled_cohort >= 1 and agent.settled_cohort * self._cohort >= read_for - open_for

    def _take(self, state: _Agent, reply: Delta, added: int, now: float) -> None:
        if reply.increments != _NOTHING:
            self._version += 1
        self._merged.merge(reply.increments)
        state.counts.merge(_for_one_agent(reply.increments))
        self._expected_total += added
        state.requests += _requests(reply.increments)
        state.ack, state.total = reply.to_seq, reply.total_units
        state.settled_cohort, state.assigned, state.last_at = reply.settled_cohort, reply.assigned_units, now

    def _begin_life(self, agent: str, state: _Agent, epoch: str, now: float) -> None:
        """A new life counts from zero; its predecessor's counts stay and its unread tail is missing."""
        self._version += 1
        if state.epoch:
            elapsed = (state.last_at or now) - state.first_at
            if elapsed > 0.0:
                rate = (state.assigned - state.first_assigned) / elapsed
            else:
                # Read once only: what it had then had come since its predecessor was read.
                rate = state.assigned / max(self._cohort, state.first_at - state.unseen_since)
            # One that restarts again and again has shown at what rate units come to it.
            rate = state.rate = max(rate, state.rate)
            since = now - (state.last_at or now)
            lost = max(0, state.assigned - state.requests) + math.ceil(max(0.0, rate * since))
            state.lost += lost
            state.unseen_since = state.last_at or now
            state.past = (*state.past, state.epoch)[-_EPOCHS_REMEMBERED:]
        state.epoch, state.ack, state.total, state.requests = epoch, 0, 0, 0
        state.first_at, state.first_assigned, state.assigned = now, 0, 0

    def _with_lost(self, counts: WindowCounts, lost: int) -> WindowCounts:
        """`counts`, with `lost` units without a value in each metric by its share of the pool's units."""
        if lost == 0:
            return counts
        out = counts.copy()
        requests = max(1, _requests(self._merged))
        for (metric, arm), pool in self._merged.metrics.items():
            share = (pool.histogram.n + pool.warmup.n) / requests
            if (metric, arm) in counts.metrics:
                out.of(metric, arm).histogram.add(None, min(lost, math.ceil(lost * share)))
        return out

    def _last_read(self, agent: str) -> float:
        state = self._agents.get(agent)
        return self._opened_at if state is None or state.last_at is None else state.last_at

    def _rebuild(self) -> Applied:
        self._rebuilds += 1
        self._reset()
        return Applied.REBUILD

    def _reset(self) -> None:
        self._version += 1
        self._merged = WindowCounts.none()
        self._agents: dict[str, _Agent] = {}
        self._expected_total = 0
        self._malformed: set[str] = set()


_NOTHING: Final = WindowCounts()


def _requests(counts: WindowCounts) -> int:
    return sum(
        c.histogram.n + c.warmup.n for (metric, _), c in counts.metrics.items() if metric == metrics.REQUESTS
    )


_HARM_OF_ONE: Final = (Kind.QUANTILE, Kind.MEAN)


def _for_one_agent(counts: WindowCounts) -> WindowCounts:
    """What the judge needs of a single agent: the candidate's arm of what may show harm in one, both arms of
    the units measured, the split. It is kept for each agent of each window."""
    kept = {
        key: c
        for key, c in counts.metrics.items()
        if key[0] == metrics.MEASURED
        or (key[0] in METRICS and METRICS[key[0]].kind in _HARM_OF_ONE and key[1] == Arm.CANDIDATE)
    }
    return WindowCounts(
        metrics=kept,
        zero_tolerance=counts.zero_tolerance,
        sessions_candidate=counts.sessions_candidate,
        sessions_total=counts.sessions_total,
        assignment_disagreements=counts.assignment_disagreements,
    )
