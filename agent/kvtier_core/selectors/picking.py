"""From scores to rows: the best units within a budget, the same ones every time, beside the rows always read.

Why it exists: ties, caps and persistent rows decide what is read, in every family alike, and a receipt must
be reproducible. It must not know how scores came about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import Budget, CapPolicy, Rows
from kvtier_crds.manifest import PersistentRows


@dataclass(frozen=True, slots=True)
class Picked:
    """ids: ascending. threshold: worst score among them; runner_up: best of the others (-inf: none). ties:
    others whose score equals the threshold."""

    ids: Rows
    threshold: float
    runner_up: float
    ties: int


def best(scores: NDArray[np.floating], ids: Rows, count: int) -> Picked:
    """The `count` ids of highest score; ties to the lowest id. NaN counts as largest: what is not known is
    read. scores [n] and ids [n], ids ascending."""
    if len(scores) != len(ids):
        raise CoreError(Reason.COVERAGE_GAP, f"{len(scores)} scores for {len(ids)} units")
    count = max(0, min(count, len(ids)))
    keyed = np.where(np.isnan(scores), np.inf, scores)
    order = np.argsort(-keyed, kind="stable")
    chosen, rest = order[:count], order[count:]
    threshold = float(keyed[chosen[-1]]) if count else -np.inf
    runner_up = float(keyed[rest[0]]) if len(rest) else -np.inf
    ties = int(np.count_nonzero(keyed[rest] == threshold)) if count else 0
    return Picked(np.sort(ids[chosen]), threshold, runner_up, ties)


@dataclass(frozen=True, slots=True)
class Persistent:
    """Rows that every query over `rows` rows reads: sink, recent, what the index does not cover, the query's
    own. Given as a mask [rows]."""

    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, declared: PersistentRows, rows: int, covered: int) -> Persistent:
        mask = np.zeros(rows, dtype=np.bool_)
        mask[: min(rows, declared.sink)] = True
        mask[max(0, min(rows - declared.recent, covered)) :] = True
        mask[rows - 1 :] = True
        return cls(mask)

    @property
    def rows(self) -> Rows:
        return np.flatnonzero(self.mask)

    @property
    def others(self) -> Rows:
        """Rows that a score decides about, ascending."""
        return np.flatnonzero(~self.mask)

    def joined(self, chosen: Rows) -> tuple[Rows, int]:
        """`chosen` (rows, in any order, repeats allowed) and the persistent ones, ascending without repeats;
        and how many of them are not persistent. SUPPORT_OUT_OF_RANGE for a row that is not there."""
        if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= len(self.mask)):
            raise CoreError(Reason.SUPPORT_OUT_OF_RANGE, "a row was selected that the query may not read")
        mask = self.mask.copy()
        mask[chosen] = True
        return np.flatnonzero(mask), int(np.count_nonzero(mask) - np.count_nonzero(self.mask))


def capped(wanted: int, allowed: int, budget: Budget) -> int:
    """How many units of `wanted` are read when the budget allows `allowed`. CAP_VIOLATION under policy error;
    under policy dense the caller reads every row, told by -1."""
    if wanted <= allowed:
        return wanted
    if budget.cap_policy is CapPolicy.ERROR:
        raise CoreError(
            Reason.CAP_VIOLATION,
            f"{wanted} units pass the threshold, the budget allows {allowed}",
            {"wanted": wanted, "allowed": allowed},
        )
    return -1 if budget.cap_policy is CapPolicy.DENSE else allowed
