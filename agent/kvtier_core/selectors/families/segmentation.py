"""Where a sequence is cut into events: at surprises, moved to where keys part, within limits of size.

Why it exists: cuts are a function of the surprises and keys up to a row, whoever asks and however the rows
came, or an index could not be rebuilt. It must not know what events are used for.

Formulas (specification D.9). Row t starts an event when S_t > mean + gamma * deviation of the `window`
surprises before it (population deviation, t not among them; none before there are `window`), at least `least`
rows behind the last cut; after `most` rows there is a cut in any case. Refinement moves a cut by at most
`radius` rows between its neighbours, to the best two-part split of the rows between them, averaged over KV
heads: largest modularity (1/2m) sum over equal parts of (A_ij - d_i d_j / 2m), or least conductance
cut / min(volume). A is the cosine of keys with a zero diagonal; negative ones count as 0, so that every
volume is one. Equal splits (to 12 digits, or rounding would choose): the one next to the candidate, then the
lower. Forced cuts stay.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason

METRICS = ("none", "modularity", "conductance")
Floats = NDArray[np.float64]
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Cut:
    """A candidate: the first row of an event. forced: by size, not by surprise."""

    row: int
    forced: bool


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The rule of cuts. radius: None without refinement."""

    window: int
    gamma: float
    least: int
    most: int
    metric: str
    radius: int | None

    def check(self) -> None:
        """EVENT_WINDOW, EVENT_SIZE, EVENT_METRIC, EVENT_BOUNDARY: a rule that cuts nothing sensible."""
        if self.window < 1 or not math.isfinite(self.gamma):
            raise CoreError(Reason.EVENT_WINDOW, f"a window of {self.window} rows, gamma {self.gamma}")
        if not 1 <= self.least <= self.most:
            raise CoreError(Reason.EVENT_SIZE, f"events of {self.least} to {self.most} rows")
        if self.metric not in METRICS:
            raise CoreError(Reason.EVENT_METRIC, f"{self.metric!r} is none of {', '.join(METRICS)}")
        if self.metric != "none" and not self.radius:
            raise CoreError(Reason.EVENT_BOUNDARY, f"{self.metric} needs rows to search around a candidate")

    def threshold(self, surprise: Floats, row: int) -> float:
        """What the surprise of `row` must pass. EVENT_WINDOW: there are too few before it."""
        if row < self.window:
            raise CoreError(Reason.EVENT_WINDOW, f"row {row} has fewer than {self.window} rows before it")
        before = surprise[row - self.window : row]
        return float(before.mean() + self.gamma * before.std())

    def surprises(self, surprise: Floats, row: int) -> bool:
        return row >= self.window and bool(surprise[row] > self.threshold(surprise, row))

    def candidates(self, surprise: Floats, start: int, low: int) -> list[Cut]:
        """The cuts at rows [low, n) of surprise [n], the last cut before them being at `start`."""
        found: list[Cut] = []
        for row in range(max(low, start + 1), len(surprise)):
            length = row - start
            surprised = length >= self.least and self.surprises(surprise, row)
            if surprised or length == self.most:
                found.append(Cut(row, not surprised))
                start = row
        return found

    def check_candidates(self, surprise: Floats, start: int, cuts: list[Cut]) -> None:
        """EVENT_BOUNDARY: out of order or at the start. EVENT_SIZE: too near or too far. EVENT_WINDOW: at a
        row whose surprise does not pass its threshold."""
        for cut in cuts:
            if cut.row <= start:
                raise CoreError(Reason.EVENT_BOUNDARY, f"a cut at row {cut.row}, not behind row {start}")
            if not self.least <= cut.row - start <= self.most:
                raise CoreError(Reason.EVENT_SIZE, f"an event of {cut.row - start} rows")
            if not cut.forced and not self.surprises(surprise, cut.row):
                raise CoreError(Reason.EVENT_WINDOW, f"row {cut.row} is no surprise")
            start = cut.row

    def refined(self, keys: NDArray[np.float32], first: int, cut: Cut, last: int) -> int:
        """Where `cut` is moved, for keys [last - first, Hk, d] of rows between its neighbours, cut at `first`
        and `last`."""
        assert self.radius is not None
        low = max(cut.row - self.radius, first + self.least, last - self.most)
        high = min(cut.row + self.radius, first + self.most, last - self.least)
        graph = similarity(keys)
        metric = modularity if self.metric == "modularity" else conductance
        sign = 1.0 if self.metric == "modularity" else -1.0
        scores = {
            row: round(sign * float(np.mean([metric(one, row - first) for one in graph])), _DIGITS)
            for row in range(low, high + 1)
        }
        return max(scores, key=lambda row: (scores[row], -abs(row - cut.row), -row))


def similarity(keys: NDArray[np.float32]) -> Floats:
    """float64 [Hk, n, n] of keys [n, Hk, d]: cosines, at least 0, nothing to itself."""
    wide = keys.astype(np.float64).transpose(1, 0, 2)
    norm = np.linalg.norm(wide, axis=2, keepdims=True)
    unit = wide / np.where(norm > 0, norm, 1.0)
    graph = np.maximum(unit @ unit.transpose(0, 2, 1), 0.0)
    graph[:, np.arange(len(keys)), np.arange(len(keys))] = 0.0
    return np.asarray(graph)


def modularity(graph: Floats, at: int) -> float:
    """Of the split of `graph` [n, n] before row `at`; 0 of a graph without edges."""
    degree = graph.sum(1)
    double = float(degree.sum())
    if not double:
        return 0.0
    inside = graph[:at, :at].sum() + graph[at:, at:].sum()
    return float((inside - (degree[:at].sum() ** 2 + degree[at:].sum() ** 2) / double) / double)


def conductance(graph: Floats, at: int) -> float:
    """Of the split of `graph` [n, n] before row `at`; 1 where a part has no edges."""
    degree = graph.sum(1)
    volume = min(float(degree[:at].sum()), float(degree[at:].sum()))
    return float(graph[:at, at:].sum()) / volume if volume else 1.0


def check_refined(candidates: list[int], refined: list[int]) -> None:
    """EVENT_BOUNDARY: refinement changed how many cuts there are, or their order."""
    if len(candidates) != len(refined):
        raise CoreError(Reason.EVENT_BOUNDARY, f"{len(refined)} cuts of {len(candidates)} candidates")
    if any(low >= high for low, high in itertools.pairwise(refined)):
        raise CoreError(Reason.EVENT_BOUNDARY, "cuts are out of order after refinement")
