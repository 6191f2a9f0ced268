"""From arrays of units to the counts that agents publish, look by look, in the production's own types.

The judge, the reader and the estimates are production code; what is here replaces only the per-request
Python of the collector, which `tests/unit/evidence/test_evidence_soak.py` holds against it. Knows no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvtier_evidence import metrics
from kvtier_evidence.delta import Delta
from kvtier_evidence.design import BlockSums
from kvtier_evidence.gates import ONE
from kvtier_evidence.grid import Histogram
from kvtier_evidence.metrics import Arm
from kvtier_evidence.reader import WindowEvidence, WindowReader
from kvtier_evidence.window import SESSION_BLOCKS, WindowCounts, WindowKey
from tests.soak.gates.traffic import STALL_MEAN, Floats, Ints, Traffic, Window

LOOK_SECONDS = 10.0
OUTPUT, TAIL, STALL = "output", "tail", "stall"
ARMS = (Arm.BASELINE, Arm.CANDIDATE)
STALL_LIMIT = 0.02


class Counter:
    """One window's units as increments per look and agent."""

    def __init__(self, window: Window, agents: int, *, sessions: bool = True) -> None:
        """sessions: whether those are counted as blocks, too."""
        step = window.step
        self.sessions = sessions
        shape = (step.looks, agents)
        self.window, self.agents = window, agents
        out, served = window.compared, window.served
        self.compared = _table(shape, out.look, out.agent)
        self.above = _table(shape, out.look, out.agent, weights=out.value)
        arm = served.candidate.astype(np.int64)
        self.served = [_table(shape, served.look[arm == a], served.agent[arm == a]) for a in (0, 1)]
        picked = served.candidate
        cell = (served.look[picked] * agents + served.agent[picked]) * 11 + served.stall[picked]
        self._stalls = np.bincount(cell, minlength=step.looks * agents * 11).reshape(*shape, 11)
        fresh = np.zeros(len(served.look), np.bool_)
        fresh[np.unique(served.session, return_index=True)[1]] = True
        self._sessions = _table(shape, served.look[fresh], served.agent[fresh])
        fresh &= picked
        self._candidates = _table(shape, served.look[fresh], served.agent[fresh])
        self._starts = np.searchsorted(served.look, np.arange(step.looks + 1))
        self.stall_unit = window.truth.stall / STALL_MEAN
        self._over = (served.stall * self.stall_unit > STALL_LIMIT).astype(np.int64)
        self._stalled = _table(shape, served.look[picked], served.agent[picked], self._over[picked])
        self._lines: dict[tuple[float, float], tuple[Ints, tuple[Ints, ...]]] = {}

    def increments(self, look: int, agent: int, *, tails: bool) -> WindowCounts:
        """What one agent counted in one look; `tails`: with its histograms of times."""
        counts = WindowCounts()
        compared = int(self.compared[look, agent])
        if compared:
            above = int(self.above[look, agent])
            c = counts.of(metrics.OUTPUT_RELATIVE_ERROR, Arm.CANDIDATE)
            c.histogram.add(0.01, compared - above)
            c.histogram.add(0.2, above)
            c.above_up[OUTPUT] = c.above_down[OUTPUT] = above * ONE
        counts.of(metrics.REQUESTS, Arm.CANDIDATE).histogram.add(
            0.0, compared + int(self.served[1][look, agent])
        )
        if not self.window.step.served:
            return counts
        counts.of(metrics.REQUESTS, Arm.BASELINE).histogram.add(0.0, int(self.served[0][look, agent]))
        for a, arm in enumerate(ARMS):
            counts.of(metrics.MEASURED, arm).histogram.add(0.0, int(self.served[a][look, agent]))
        h = counts.of(metrics.EXPOSED_STALL_FRACTION, Arm.CANDIDATE).histogram
        for atom, count in enumerate(self._stalls[look, agent].tolist()):
            h.add(atom * self.stall_unit, count)
        counts.sessions_total = int(self._sessions[look, agent])
        counts.sessions_candidate = int(self._candidates[look, agent])
        if tails:
            self._add_times(counts, look, agent)
        return counts

    def times(self, look: int) -> WindowCounts:
        """Histograms of times of one look, all agents."""
        counts = WindowCounts()
        if self.window.step.served:
            self._add_times(counts, look, None)
        return counts

    def _add_times(self, counts: WindowCounts, look: int, agent: int | None) -> None:
        served = self.window.served
        here = slice(self._starts[look], self._starts[look + 1])
        for a, arm in enumerate(ARMS):
            keep = served.candidate[here] == bool(a)
            if agent is not None:
                keep &= served.agent[here] == agent
            bins, n = np.unique(served.value[here][keep], return_counts=True)
            total = int(n.sum())
            h = Histogram(dict(zip(bins.tolist(), n.tolist(), strict=True)), n=total)
            counts.of(metrics.TPOT_RATIO, arm).histogram.merge(h)

    def blocks(self, looks: int, lines: Mapping[str, tuple[float, float]]) -> dict[str, BlockSums]:
        """Sums of the first looks' blocks, as collectors keep them. lines: of each ratio gate the baseline's
        earlier quantile and the limit."""
        out: dict[str, BlockSums] = {}
        if self.compared[:looks].any():
            out[OUTPUT] = one_arm(self.compared[:looks], self.above[:looks])
            if self.sessions:
                units = self.window.compared
                seen = units.look < looks
                out[OUTPUT + SESSION_BLOCKS] = one_arm(*_by_session(units.session[seen], units.value[seen]))
        if not self.window.step.served:
            return out
        served = self.window.served
        early = slice(0, self._starts[looks])
        out[STALL] = one_arm(self.served[1][:looks], self._stalled[:looks])
        if self.sessions:
            mine = served.candidate[early]
            over = self._over[early][mine]
            out[STALL + SESSION_BLOCKS] = one_arm(*_by_session(served.session[early][mine], over))
        for gate, line in lines.items():
            slow, tables = self._pairs(line)
            out[gate] = two_arm(*(table[:looks].ravel() for table in tables))
            if self.sessions:
                out[gate + SESSION_BLOCKS] = self._session_pairs(slow[early], early)
        return out

    def _pairs(self, line: tuple[float, float]) -> tuple[Ints, tuple[Ints, ...]]:
        """Which units are slow, and (n_c, x_c, n_b, x_b) by look and agent."""
        if line not in self._lines:
            served, shape = self.window.served, (self.window.step.looks, self.agents)
            threshold, limit = line
            above = np.where(served.candidate, _bin(threshold * limit), _bin(threshold))
            slow = (served.value > above).astype(np.int64)
            tables: list[Ints] = []
            for a in (1, 0):
                keep = served.candidate == bool(a)
                tables += [self.served[a], _table(shape, served.look[keep], served.agent[keep], slow[keep])]
            self._lines[line] = (slow, tuple(tables))
        return self._lines[line]

    def _session_pairs(self, slow: Ints, early: slice) -> BlockSums:
        """A session has one arm."""
        parts: list[Ints] = []
        candidate, session = self.window.served.candidate[early], self.window.served.session[early]
        for keep in (candidate, ~candidate):
            parts += _by_session(session[keep], slow[keep])
        nc, xc, nb, xb = parts
        zc, zb = np.zeros_like(nc), np.zeros_like(nb)
        pairs = ((nc, zb), (xc, zb), (zc, nb), (zc, xb))
        return two_arm(*(np.concatenate(pair) for pair in pairs))


def one_arm(n: Ints, x: Ints) -> BlockSums:
    """Of the blocks that have units."""
    some = n.ravel() > 0
    return _sums({"n": n.ravel()[some].astype(np.float64), "x": x.ravel()[some].astype(np.float64)})


def two_arm(nc: Ints, xc: Ints, nb: Ints, xb: Ints) -> BlockSums:
    some = (nc > 0) | (nb > 0)
    values = {"nc": nc, "xc": xc, "nb": nb, "xb": xb}
    return _sums({name: v[some].astype(np.float64) for name, v in values.items()})


def _sums(values: dict[str, Floats]) -> BlockSums:
    names = list(values)
    sums = {name: float(v.sum()) for name, v in values.items()}
    for i, a in enumerate(names):
        for b in names[i:]:
            sums[f"{a}*{b}"] = float(values[a] @ values[b])
    return BlockSums(len(values[names[0]]), sums)


def _table(shape: tuple[int, int], look: Ints, agent: Ints, weights: Ints | None = None) -> Ints:
    got = np.bincount(look * shape[1] + agent, weights, minlength=shape[0] * shape[1])
    return got.reshape(shape).astype(np.int64)


def _by_session(session: Ints, x: Ints) -> tuple[Ints, Ints]:
    names, inverse = np.unique(session, return_inverse=True)
    n = np.bincount(inverse, minlength=len(names))
    return n.astype(np.int64), np.bincount(inverse, x, minlength=len(names)).astype(np.int64)


def _bin(x: float) -> int:
    """Values over `x` lie in higher bins; half a bin is nothing to a design effect."""
    return round(256.0 * math.log2(x)) - 1


class DirectSource:
    """Counts as the reader merges them, without the wire between."""

    def __init__(self, key: WindowKey, counter: Counter) -> None:
        self._key, self._counter = key, counter
        self.merged = WindowCounts()
        self._each = {f"node-{a}": WindowCounts() for a in range(counter.agents)}

    def look(self, look: int) -> WindowEvidence:
        for agent, counts in enumerate(self._each.values()):
            fresh = self._counter.increments(look, agent, tails=False)
            counts.merge(fresh)
            self.merged.merge(fresh)
        self.merged.merge(self._counter.times(look))
        return WindowEvidence(self._key, self.merged, self._each, True)


class ReaderSource:
    """Through replies and the production reader, with agents that restart and take unread units with them."""

    def __init__(self, key: WindowKey, counter: Counter, traffic: Traffic, rng: np.random.Generator) -> None:
        self._counter, self._traffic, self._rng = counter, traffic, rng
        self._reader = WindowReader(key, opened_at=0.0, cohort=LOOK_SECONDS, settle=0.0)
        self._lives = [0] * counter.agents
        self._sequence = [0] * counter.agents
        self._totals = [0] * counter.agents
        self._assigned = [0] * counter.agents
        self.lost = 0
        self.merged = WindowCounts()

    def look(self, look: int) -> WindowEvidence:
        now = (look + 1) * LOOK_SECONDS
        names = [f"node-{a}" for a in range(self._counter.agents)]
        for agent, name in enumerate(names):
            fresh = self._counter.increments(look, agent, tails=True)
            if self._restarts(look, agent):
                self._lives[agent] += 1
                self._sequence[agent] = self._totals[agent] = self._assigned[agent] = 0
                self.lost += 1
                fresh = WindowCounts()
            before = self._sequence[agent]
            self._sequence[agent] += 1
            self._totals[agent] += fresh.total()
            self._assigned[agent] += sum(
                c.histogram.n for (metric, _), c in fresh.metrics.items() if metric == metrics.REQUESTS
            )
            reply = Delta(
                f"boot-{self._lives[agent]}",
                before,
                before + 1,
                before == 0,
                fresh,
                self._totals[agent],
                look + 1,
                self._assigned[agent],
            )
            self._reader.apply(name, reply, now=now)
        evidence = self._reader.evidence(names, now=now, interval=LOOK_SECONDS)
        self.merged = evidence.merged
        return evidence

    def _restarts(self, look: int, agent: int) -> bool:
        """What hides harm best: a restart takes most often the units that are over the limit."""
        worse = 8.0 if self._counter.above[look, agent] else 1.0
        return self._rng.random() < self._traffic.restarts * worse


Source = DirectSource | ReaderSource


def closing(
    counter: Counter, looks: int, merged: WindowCounts, lines: Mapping[str, tuple[float, float]]
) -> WindowCounts:
    """The counts of a window that closes after `looks`, blocks included."""
    return WindowCounts(merged.metrics, blocks=counter.blocks(looks, lines))
