"""What the watches tell a bench: when an edit was seen, when a status answered it, how often fences moved.

Both moments come from the same watch, so the time that it takes to deliver is in neither. It must not edit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.bench.release_api import Json

EARLY_SECONDS = 1e-6
"""What rounding may make of a moment."""
SLOW_SECONDS = 2.0
MOST_SLOW = 10_000
Key = tuple[str, str, str]
"""Plural, namespace, name."""


@dataclass
class Tracker:
    """Fed by watches. `latencies`: seconds from a spec's change to the status that has observed it."""

    statuses: dict[Key, Json] = field(default_factory=dict)
    uids: dict[Key, str] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    slow: list[tuple[float, Key, float]] = field(default_factory=list)
    """Of those above SLOW_SECONDS: when they were answered, of what, and their seconds."""
    transitions: Counter[str] = field(default_factory=Counter)
    """Moves of fences, by the rollout's name."""
    last_change: float = 0.0
    _generations: dict[Key, int] = field(default_factory=dict)
    _open: dict[Key, dict[int, float]] = field(default_factory=dict)

    def changed_since(self, before: Mapping[Key, Json]) -> list[str]:
        """A line for each object whose status is another: its stage, and what differs, was and is."""
        lines = []
        for key, status in sorted(self.statuses.items()):
            told = differing(before.get(key, {}), status)
            if told:
                lines.append(f"{'/'.join(key)} in {status.get('stage', '-')}: {', '.join(told)}")
        return lines

    def feed(self, plural: str, kind: str, obj: Json, now: float) -> None:
        """One event of a watch."""
        metadata = obj["metadata"]
        key = plural, metadata["namespace"], metadata["name"]
        self.last_change = now
        if kind == "DELETED":
            self.statuses.pop(key, None)
            return
        status = obj.get("status") or {}
        before = self.statuses.get(key) or {}
        self.statuses[key], self.uids[key] = status, metadata["uid"]
        generation = int(metadata.get("generation") or 0)
        if generation > self._generations.get(key, 0):
            self._generations[key] = generation
            self._open.setdefault(key, {})[generation] = now
        observed = int(status.get("observedGeneration") or 0)
        waiting = self._open.get(key)
        if waiting:
            for one in [one for one in waiting if one <= observed]:
                self._answered(key, now - waiting.pop(one), now)
        if plural == "kvrollouts" and before and status.get("fence") != before.get("fence"):
            self.transitions[metadata["name"]] += 1

    def _answered(self, key: Key, seconds: float, now: float) -> None:
        self.latencies.append(seconds)
        if seconds > SLOW_SECONDS and len(self.slow) < MOST_SLOW:
            self.slow.append((now, key, seconds))

    def slow_by(self, since: float, span: float) -> list[str]:
        """A line for each span of that many seconds in which slow ones were answered."""
        spans: dict[int, list[tuple[Key, float]]] = {}
        for now, key, seconds in self.slow:
            spans.setdefault(int((now - since) // span), []).append((key, seconds))
        return [
            f"{number * span:.0f} s: {len(of)} slow, by kind {dict(Counter(key[0] for key, _ in of))}, "
            f"{min(one for _, one in of):.1f} to {max(one for _, one in of):.1f} s, as {'/'.join(of[0][0])}"
            for number, of in sorted(spans.items())
        ]

    def unanswered(self) -> int:
        """Edits that no status has observed yet."""
        return sum(len(waiting) for waiting in self._open.values())

    def begin(self) -> None:
        """Counts from now on; what is still open is forgotten."""
        self.latencies.clear()
        self.slow.clear()
        self.transitions.clear()
        self._open.clear()


def differing(was: object, now: object, at: str = "") -> list[str]:
    """The leaves of two JSON values that are not the same, each with its path and both."""
    if was == now:
        return []
    if isinstance(was, dict) and isinstance(now, dict):
        names = sorted(was.keys() | now.keys())
        return [told for name in names for told in differing(was.get(name), now.get(name), f"{at}.{name}")]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        return [told for number, (a, b) in pairs for told in differing(a, b, f"{at}[{number}]")]
    return [f"{at.removeprefix('.')} {json.dumps(was)} -> {json.dumps(now)}"]


def lateness(moments: list[float], interval: float) -> list[float]:
    """How late the reads of one window were, in seconds, by the operator's own rule: they are due on a beat,
    and one that was missed is made up for once. Where the beat lies is not told, only that no read comes
    before it: it is laid through the read by which all others are late by the least, which is not counted.
    Nor is the first interval: a window is looked at as it opens, and again as a short step has lasted, and
    neither is on a beat."""
    if not moments:
        return []
    moments = [moment for moment in moments if moment >= moments[0] + interval - EARLY_SECONDS]
    if len(moments) < 2:
        return []
    phases = sorted((moment - moments[0]) % interval for moment in moments)
    # The sum of (phase - beat) modulo the interval, but for what is the same for all.
    _, beat = min((interval * before - len(phases) * phase, phase) for before, phase in enumerate(phases))
    due, late = moments[0] - (-beat) % interval, []
    for moment in moments:
        if moment < due - EARLY_SECONDS:
            # The answer to one that was sent twice.
            continue
        passed = max(0.0, moment - due)
        late.append(passed)
        due += (int((passed + EARLY_SECONDS) / interval) + 1) * interval
    late.remove(min(late))
    return late


def quantile(values: list[float], share: float) -> float:
    """Of the values as they are, the next one above the share; 0 without any."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def buckets(text: str, name: str) -> dict[float, float]:
    """Of a histogram without labels in Prometheus' text format: upper edge to how many are not above it."""
    head = f'{name}_bucket{{le="'
    lines = (line for line in text.splitlines() if line.startswith(head))
    return {float(edge): float(count) for edge, count in (line[len(head) :].split('"} ') for line in lines)}


def bucket_quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The upper edge of the bucket that holds it, of what was counted in between, so at most that; 0 without
    any, and infinite above the last edge."""
    counted = sorted((edge, count - before.get(edge, 0.0)) for edge, count in after.items())
    whole = counted[-1][1] if counted else 0.0
    return next((edge for edge, count in counted if whole and count >= share * whole), 0.0)


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line that is nearest by squares; 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
