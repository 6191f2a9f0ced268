"""Certified scan: every row scored from an int8 copy of its key, with a bound on the error of each score.

Why it exists: the one family whose bound is tight enough to certify how much of the attention was read, so it
also audits the others. It must not know tiers, V or requests.

Formulas. Keys are coded symmetrically per row and KV head: scale_i = max_j |k_ij| / 127, c_ij = round(k_ij /
scale_i). With t the factor on q.k, a logit lies within r_i of t scale_i (q . c_i), where

    r_i = t (scale_i / 2) |q|_1 (1 + slack) + t scale_i |q . c_i| slack

and `slack` bounds the rounding of both this dot product and attention's own, in float32 (2 (d + 4) 2^-24).
Rows are read by descending upper bound until, for every query head of the group,

    sum over read of e^lower / (that + sum over unread of e^upper) >= 1 - maxOmittedMass

or the budget is spent: the largest share the rows left out could have is then in the receipt, sound whatever
the keys are. Selectors anchor 5.4; B.8 decides what an answer that misses its bound becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    Budget,
    CapPolicy,
    Edit,
    EditCost,
    Evidence,
    FamilyFacts,
    Guarantee,
    Index,
    IndexFacts,
    Need,
    NeedsRebuild,
    Query,
    Scope,
    Selection,
    SelectionReceipt,
    Shape,
    Source,
    Unit,
    check_index,
)
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="certifiedScan",
    unit=Unit.ROW,
    scope=Scope.KV_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.UPPER_BOUND,
    appendable=True,
    edit=EditCost.UNIT,
    fixed_size=False,
    estimates=True,
    incremental=True,
)
LEVELS = 127
_EPSILON = 2.0**-24


@dataclass(frozen=True, slots=True)
class CodedKeys:
    """codes: int8 entries [Hk, d]; scales: float32 entries [Hk]; both of rows [0, covered)."""

    facts: IndexFacts
    codes: Growing
    scales: Growing


@dataclass(frozen=True, slots=True)
class _Head:
    """One KV head's choice. wanted: rows that the bound needs."""

    rows: NDArray[np.int64]
    chosen: NDArray[np.int64]
    wanted: int
    threshold: float
    runner_up: float
    ties: int


@dataclass(frozen=True, slots=True)
class CertifiedScan:
    """max_omitted: the largest share of the attention that may be left out, of any query head."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    max_omitted: float
    facts: FamilyFacts = FACTS

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> CertifiedScan:
        """MANIFEST_INVALID names the field."""
        parameters = Parameters(selector)
        max_omitted = parameters.number("maxOmittedMass", 0.0, 1.0)
        parameters.done()
        budget = budget_of(selector)
        rows = budget.units if budget.units is not None else budget.rows(shape)
        if not rows:
            raise CoreError(Reason.MANIFEST_INVALID, "the budget pays no row")
        return cls(
            digest=digest_of(selector),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            max_omitted=max_omitted,
        )

    def omits(self, rows: int) -> bool:
        """Whether it could: any row that is not persistent may be found not to matter."""
        return rows > self.persistent.sink + max(1, self.persistent.recent)

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> CodedKeys:
        heads, d = self.shape.kv_heads, self.shape.head_dim
        empty = CodedKeys(
            IndexFacts(self.digest, source, epoch=0, covered=0),
            Growing((heads, d), np.int8),
            Growing((heads,), np.float32),
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> CodedKeys:
        own = _own(index)
        codes, scales = coded(k.detach().to("cpu").numpy())
        covered = own.facts.covered + len(codes)
        return CodedKeys(
            replace(own.facts, epoch=own.facts.epoch + 1, covered=covered, parts=(("rows", str(covered)),)),
            own.codes.plus(codes),
            own.scales.plus(scales),
        )

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Cut rows go; moved ones must be coded again, since RoPE changes keys."""
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        facts = replace(
            own.facts,
            source=replace(own.facts.source, position_epoch=edit.epoch),
            epoch=own.facts.epoch + 1,
            covered=kept,
            parts=(("rows", str(kept)),),
        )
        return CodedKeys(facts, own.codes.first(kept), own.scales.first(kept))

    def bounds(
        self, index: CodedKeys, q: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lower and upper bounds of the logits, each [Hq, covered], for q [Hq, d]."""
        heads, group, d = self.shape.kv_heads, self.shape.group, self.shape.head_dim
        codes = index.codes.entries.astype(np.float32)
        scales = index.scales.entries.astype(np.float64)
        grouped = q.reshape(heads, group, d)
        dot = np.einsum("hgd,nhd->hgn", grouped, codes, optimize=True).astype(np.float64)
        slack = 2 * (d + 4) * _EPSILON
        one = np.abs(grouped).sum(-1, dtype=np.float64)[:, :, None]
        step = self.shape.scale * scales.T[:, None, :]
        unknown = ~np.isfinite(step)
        step = np.where(unknown, 0.0, step)
        centre = step * dot
        # |q| . |c| <= 127 |q|_1 bounds what rounding the dot product may lose, however it cancels.
        radius = np.where(unknown, np.inf, step * one * (0.5 * (1 + slack) + LEVELS * slack))
        shaped = (heads * group, -1)
        return (centre - radius).reshape(shaped), (centre + radius).reshape(shaped)

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        tail = max(1, self.persistent.recent)
        lag = check_index(own, self, query, tail=tail)
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        others = persistent.others
        lower, upper = self.bounds(own, query.q[0].to("cpu").numpy())
        allowed = self.budget.units if self.budget.units is not None else self.budget.rows(self.shape)
        assert allowed is not None
        scanned = np.flatnonzero(persistent.mask[: own.facts.covered])
        found: list[_Head] = []
        omitted: list[float] = []
        left = np.full(self.shape.query_heads, -np.inf)
        for head in range(self.shape.kv_heads):
            mine = slice(head * self.shape.group, (head + 1) * self.shape.group)
            low, high = lower[mine], upper[mine]
            best = high[:, others].max(axis=0) if len(others) else np.empty(0)
            order = np.argsort(-best, kind="stable")
            wanted = self._enough(low, high, scanned, others[order])
            count = self._capped(wanted, allowed, len(others))
            chosen, unread = np.sort(others[order[:count]]), others[order[count:]]
            rows, _ = persistent.joined(chosen)
            threshold = float(best[order[count - 1]]) if count else -np.inf
            runner_up = float(best[order[count]]) if count < len(order) else -np.inf
            ties = int(np.count_nonzero(best[order[count:]] == threshold)) if count else 0
            found.append(_Head(rows, chosen, wanted, threshold, runner_up, ties))
            read = np.concatenate([scanned, chosen])
            for at in range(self.shape.group):
                left[mine.start + at] = _log_sum(high[at, unread])
                omitted.append(_share(left[mine.start + at], _log_sum(low[at, read])))
        counts = tuple(len(head.chosen) for head in found)
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=counts,
            got_rows=counts,
            uncapped=tuple(head.wanted for head in found),
            dropped_by_cap=tuple(max(0, head.wanted - len(head.chosen)) for head in found),
            scanned_units=own.facts.covered,
            index_bytes=own.facts.covered * self.shape.kv_heads * (self.shape.head_dim + 4),
            threshold=tuple(head.threshold for head in found),
            runner_up=tuple(head.runner_up for head in found),
            ties=tuple(head.ties for head in found),
            unindexed=lag,
            omitted_mass=tuple(omitted),
            confidence=1.0,
        )
        return Selection(
            self.facts.scope,
            tuple(head.rows for head in found),
            tuple(head.chosen for head in found),
            receipt,
            left_out=left,
        )

    def _enough(
        self,
        low: NDArray[np.float64],
        high: NDArray[np.float64],
        always: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> int:
        """How many of `order` must be read besides `always` until the bound holds for every head of the
        group. Rows of which nothing is known come first in `order` and are always among them."""
        forced = int(np.count_nonzero(np.isposinf(high[0, order])))
        most = forced
        for lows, highs in zip(low, high, strict=True):
            known = highs[np.isfinite(highs)]
            if not len(known):
                continue
            top = float(known.max())
            kept = np.exp(lows[always] - top).sum() + np.cumsum(
                np.concatenate([[0.0], np.exp(lows[order] - top)])
            )
            weights = np.where(np.isposinf(highs[order]), 0.0, np.exp(highs[order] - top))
            unread = np.concatenate([np.cumsum(weights[::-1])[::-1], [0.0]])
            # A sum of n terms in float64 may be off by n 2^-53 of itself.
            unread *= 1 + len(order) * 2.0**-52
            fine = unread <= self.max_omitted * (kept + unread)
            most = max(most, forced + int(np.argmax(fine[forced:])))
        return most

    def _capped(self, wanted: int, allowed: int, there: int) -> int:
        if wanted <= allowed:
            return wanted
        if self.budget.cap_policy is CapPolicy.ERROR:
            raise CoreError(
                Reason.CAP_VIOLATION,
                f"{wanted} rows are needed for the bound, the budget allows {allowed}",
                {"wanted": wanted, "allowed": allowed},
            )
        return there if self.budget.cap_policy is CapPolicy.DENSE else allowed


def coded(k: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes int8 [n, Hk, d] and scales float32 [n, Hk] of keys [n, Hk, d]: half a scale is the largest error
    of a channel. A key with a number that is not finite has an infinite scale: its row is always read."""
    largest = np.abs(k).max(axis=-1)
    finite = np.isfinite(largest)
    # Rounded up, so that the largest channel still fits in 127 steps.
    scales = np.nextafter(np.where(finite, largest, 0.0) / np.float32(LEVELS), np.float32(np.inf))
    safe = np.where(np.isfinite(k), k, 0.0)
    codes = np.rint(safe / scales[..., None].astype(np.float64)).clip(-LEVELS, LEVELS).astype(np.int8)
    return codes, np.where(finite, scales, np.float32(np.inf)).astype(np.float32)


def _own(index: Index) -> CodedKeys:
    if not isinstance(index, CodedKeys):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of a certified scan")
    return index


def _log_sum(values: NDArray[np.float64]) -> float:
    """ln of the sum of e^values; -inf of none."""
    top = float(values.max(initial=-np.inf))
    return top if not np.isfinite(top) else top + float(np.log(np.exp(values - top).sum()))


def _share(left: float, kept: float) -> float:
    """e^left / (e^left + e^kept); 0 where nothing is left out, 1 where nothing is known to be kept."""
    if left == -np.inf:
        return 0.0
    if kept == -np.inf or left == np.inf:
        return 1.0
    return float(1.0 / (1.0 + np.exp(min(700.0, kept - left))))
