"""What one answer was over, what it cost and how far it is from dense: claims against their inputs.

Why it exists: recall of pages is no recall of rows, bytes of setup are no payload, and an error without its
norm says nothing; each such number looks like the right one. It must not know selectors, models or how rows
were read. Definitions: specification F.1 to F.3; order of guards and names: N.9, items 1 to 38.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_core.receiptcheck.outcomes import OutcomeReason, OutcomeRefused, refuse_if


@dataclass(frozen=True, slots=True)
class OutcomeIdentity:
    """Of which answer a record speaks. In the order in which fields are compared."""

    tenant_namespace: str
    request_generation: int
    cache_generation: int
    index_generation: int
    query_sha256: bytes
    layer: int
    kv_head: int
    mask_sha256: bytes


_IDENTITY = (
    OutcomeReason.TENANT_MISMATCH,
    OutcomeReason.REQUEST_STALE,
    OutcomeReason.STALE_CACHE_GENERATION,
    OutcomeReason.INDEX_STALE,
    OutcomeReason.QUERY_MISMATCH,
    OutcomeReason.QUERY_IDENTITY_MISMATCH,
    OutcomeReason.HEAD_MAPPING_MISMATCH,
    OutcomeReason.MASK_MISMATCH,
)


def check_identity(expected: OutcomeIdentity, got: OutcomeIdentity) -> None:
    """The reason of the first field that differs. Values are not told: they may be another tenant's."""
    for field, reason in zip(fields(expected), _IDENTITY, strict=True):
        refuse_if(
            getattr(expected, field.name) != getattr(got, field.name), reason, f"{field.name} is another"
        )


@dataclass(frozen=True, slots=True)
class Dense:
    """The reference of one query and KV head, offline. logits [n], values [n, d_v], scaled, fp64. dtype,
    scalar_bytes: of the cache's rows; row_bytes: B_row = 2 * d_h * b."""

    logits: NDArray[np.float64]
    values: NDArray[np.float64]
    dtype: str
    scalar_bytes: int
    row_bytes: int


_SCALARS = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_dense(dense: Dense, rows: int, width: int, dtype: str) -> None:
    """`rows` legal rows of `width` channels in `dtype`: PAYLOAD_GEOMETRY, STATE_INVALID,
    CODEC_OR_LAYOUT_MISMATCH, PAYLOAD_GEOMETRY."""
    geometry = OutcomeReason.PAYLOAD_GEOMETRY
    refuse_if(dense.logits.shape != (rows,), geometry, f"logits {dense.logits.shape}, {rows} legal rows")
    refuse_if(dense.values.shape != (rows, width), geometry, f"values {dense.values.shape}")
    finite = np.isfinite(dense.logits).all() and np.isfinite(dense.values).all()
    refuse_if(not finite, OutcomeReason.STATE_INVALID, "a logit or value is not finite")
    refuse_if(
        dense.dtype != dtype, OutcomeReason.CODEC_OR_LAYOUT_MISMATCH, f"{dense.dtype} rows, not {dtype}"
    )
    refuse_if(dense.scalar_bytes != _SCALARS[dtype], geometry, f"{dense.scalar_bytes} bytes a scalar")
    refuse_if(
        dense.row_bytes != 2 * width * dense.scalar_bytes,
        geometry,
        f"a row of K and V is {2 * width * dense.scalar_bytes} bytes, not {dense.row_bytes}",
    )


@dataclass(frozen=True, slots=True)
class Units:
    """How rows [0, n) are grouped. namespace: what ids of units mean: `row`, `page`, `cluster`."""

    namespace: str
    members: tuple[tuple[int, ...], ...]


def check_units(units: Units, rows: int) -> None:
    """UNIT_PARTITION unless every row is in just one unit."""
    found = sorted(row for unit in units.members for row in unit)
    refuse_if(
        found != list(range(rows)),
        OutcomeReason.UNIT_PARTITION,
        f"{len(found)} members do not make {rows} rows, each once",
    )


@dataclass(frozen=True, slots=True)
class Support:
    """What was read. candidates: unit ids of the lookup, in `namespace`; selected: those chosen; expanded:
    their rows, as claimed; persistent, resident: rows; rows: the support after dedup, ascending."""

    namespace: str
    candidates: tuple[int, ...]
    selected: tuple[int, ...]
    expanded: tuple[int, ...]
    persistent: tuple[int, ...]
    resident: tuple[int, ...]
    rows: tuple[int, ...]


def check_support(units: Units, support: Support, known: frozenset[int], rows: int) -> None:
    """known: candidate ids that the lookup may name. NAMESPACE_MISMATCH, DUPLICATE_POSITION,
    CANDIDATE_OUT_OF_RANGE (candidates, then selected), UNIT_PARTITION (expansion), SUPPORT_OUT_OF_RANGE
    (persistent, resident), SUPPORT_OVERLAP."""
    refuse_if(
        support.namespace != units.namespace,
        OutcomeReason.NAMESPACE_MISMATCH,
        f"{support.namespace} ids are no {units.namespace} ids",
    )
    refuse_if(
        len(set(support.candidates)) != len(support.candidates),
        OutcomeReason.DUPLICATE_POSITION,
        "a candidate is named twice",
    )
    outside = OutcomeReason.CANDIDATE_OUT_OF_RANGE
    refuse_if(not known >= set(support.candidates), outside, "a candidate is none of the lookup's")
    refuse_if(
        not set(support.candidates) >= set(support.selected), outside, "a selected unit is no candidate"
    )
    expanded = sorted(row for unit in support.selected for row in units.members[unit])
    refuse_if(
        sorted(support.expanded) != expanded,
        OutcomeReason.UNIT_PARTITION,
        f"units {support.selected} are rows {expanded}",
    )
    legal = set(range(rows))
    for name, found in (("persistent", support.persistent), ("resident", support.resident)):
        refuse_if(
            not legal >= set(found), OutcomeReason.SUPPORT_OUT_OF_RANGE, f"a {name} row is no legal row"
        )
    refuse_if(
        list(support.rows) != sorted({*expanded, *support.persistent}),
        OutcomeReason.SUPPORT_OVERLAP,
        "the support is not its rows and the persistent ones, each once",
    )


@dataclass(frozen=True, slots=True)
class Prices:
    """Declared sizes, bytes: of a candidate id's payload, of a unit's descriptor. None: not declared.
    mac_unit: of the selector's work."""

    candidate_bytes: int
    descriptor_bytes: int | None
    mac_unit: str = "mac"


@dataclass(frozen=True, slots=True)
class Ledgers:
    """F.3, never added up with one another: bytes, but selector_macs, which are MACs. false_positive,
    false_negative: None without a dense reference."""

    candidate: int
    descriptor: int
    selector_macs: int
    support: int
    resident_hit: int
    transfer: int
    setup: int
    false_positive: int | None
    false_negative: int | None

    def plus(self, other: Ledgers) -> Ledgers:
        """Each with its own, over steps and heads."""
        return Ledgers(*(_both(getattr(self, name), getattr(other, name)) for name in LEDGERS))


LEDGERS = tuple(field.name for field in fields(Ledgers))


NO_LEDGERS = Ledgers(0, 0, 0, 0, 0, 0, 0, None, None)


def _both(first: int | None, second: int | None) -> Any:
    return None if first is None or second is None else first + second


def ledgers(
    support: Support, top: Sequence[int] | None, prices: Prices, row_bytes: int, *, macs: int, setup: int
) -> Ledgers:
    """top: rows of the largest dense probability; None: nobody knows them. COST_UNIT for a price that is
    none."""
    unit = OutcomeReason.COST_UNIT
    refuse_if(prices.candidate_bytes < 1, unit, "a candidate costs no bytes")
    descriptor = prices.descriptor_bytes
    if descriptor is None:
        raise OutcomeRefused(unit, "a descriptor's bytes are not declared")
    refuse_if(prices.mac_unit != "mac", unit, f"MACs are counted in {prices.mac_unit}")
    rows, here = set(support.rows), set(support.resident)
    best = None if top is None else set(top)
    return Ledgers(
        candidate=len(support.candidates) * prices.candidate_bytes,
        descriptor=len(support.selected) * descriptor,
        selector_macs=macs,
        support=len(rows) * row_bytes,
        resident_hit=len(rows & here) * row_bytes,
        transfer=len(rows - here) * row_bytes,
        setup=setup,
        false_positive=None if best is None else len(rows - best) * row_bytes,
        false_negative=None if best is None else len(best - rows) * row_bytes,
    )


def check_ledgers(right: Ledgers, published: Mapping[str, int | None]) -> None:
    """LEDGER_MIXED unless each ledger is published under its own name with its own number."""
    wanted = {name: getattr(right, name) for name in LEDGERS}
    refuse_if(
        dict(published) != wanted,
        OutcomeReason.LEDGER_MIXED,
        f"published {sorted(published)}, each of {sorted(wanted)} is a ledger of its own",
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one support against dense. top: rows of the largest probability, ties to the lowest id.
    recall_support: over them. delta: omitted mass; error: of the output, absolute; norm: of the dense output;
    bound: 2 * delta * V_max. recall_candidate: None where candidates are no rows. relative: None without a
    norm."""

    top: tuple[int, ...]
    recall_support: float
    retained: float
    delta: float
    error: float
    norm: float
    bound: float
    recall_candidate: float | None = None
    relative: float | None = None


def measure(dense: Dense, rows: Sequence[int], top_k: int) -> Measured:
    """F.2. EMPTY_SUPPORT where no mass is left."""
    weights = np.exp(dense.logits - dense.logits.max())
    p = weights / weights.sum()
    kept = np.zeros(len(p), dtype=bool)
    kept[list(rows)] = True
    retained = float(p[kept].sum())
    delta = max(0.0, 1.0 - retained) if not kept.all() else 0.0
    refuse_if(retained <= 0.0, OutcomeReason.EMPTY_SUPPORT, "all mass is omitted: there is no answer")
    whole = p @ dense.values
    part = (p[kept] / p[kept].sum()) @ dense.values[kept]
    error, norm = float(np.linalg.norm(part - whole)), float(np.linalg.norm(whole))
    top = tuple(int(row) for row in sorted(np.argsort(-p, kind="stable")[:top_k]))
    largest = float(np.linalg.norm(dense.values, axis=1).max())
    return Measured(
        top=top,
        recall_support=len(set(top) & set(rows)) / top_k,
        retained=retained,
        delta=delta,
        error=error,
        norm=norm,
        bound=2.0 * delta * largest,
        relative=error / norm if norm > 0.0 else None,
    )


def check_metrics(right: Measured, stated: Measured, namespace: str, *, within: float = 0.0) -> None:
    """stated: what is to be published; namespace: of its candidates; within: what rounding may change of the
    error. METRIC_CONTRACT (top-k, delta, relative error without a norm, bound, or another number than the
    inputs give), NAMESPACE_MISMATCH, EMPTY_SUPPORT."""
    contract = OutcomeReason.METRIC_CONTRACT
    refuse_if(len(stated.top) != len(right.top), contract, f"top {len(stated.top)}, not {len(right.top)}")
    refuse_if(
        stated.recall_candidate is not None and namespace != "row",
        OutcomeReason.NAMESPACE_MISMATCH,
        f"recall of candidates over {namespace} ids",
    )
    refuse_if(stated.delta >= 1.0, OutcomeReason.EMPTY_SUPPORT, "all mass is omitted")
    refuse_if(not _same(stated.delta, 1.0 - stated.retained), contract, "delta is not 1 - retained mass")
    refuse_if(
        stated.relative is not None and not stated.norm > 0.0, contract, "a relative error without its norm"
    )
    refuse_if(
        stated.bound < stated.error - within - 1e-12, contract, "the bound is below the error that it bounds"
    )
    for name in ("delta", "norm", "bound", "recall_support"):
        one, other = getattr(right, name), getattr(stated, name)
        refuse_if(not _same(one, other), contract, f"{name} is {one} by its inputs, {other} is stated")
    apart = abs(right.error - stated.error)
    refuse_if(
        apart > within and not _same(right.error, stated.error),
        contract,
        f"error is {right.error} by its inputs, {stated.error} is stated",
    )


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-11)
