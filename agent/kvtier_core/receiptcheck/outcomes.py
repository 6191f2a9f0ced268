"""What one attention answer was over, what it cost and how far it is from dense: claims against their inputs.

Why it exists: recall of pages is no recall of rows, bytes of setup are no payload, and an error without its
norm says nothing; each such number looks like the right one. It must not know selectors or how rows were
read.
Definitions: specification F.1 to F.3; order of guards and names: N.9, items 1 to 38.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class OutcomeReason(StrEnum):
    """Names of N.9. These never travel: whoever finds one does not publish the record."""

    REQUEST_STALE = "REQUEST_STALE"
    STALE_CACHE_GENERATION = "STALE_CACHE_GENERATION"
    INDEX_STALE = "INDEX_STALE"
    QUERY_MISMATCH = "QUERY_MISMATCH"
    QUERY_IDENTITY_MISMATCH = "QUERY_IDENTITY_MISMATCH"
    HEAD_MAPPING_MISMATCH = "HEAD_MAPPING_MISMATCH"
    MASK_MISMATCH = "MASK_MISMATCH"
    TENANT_MISMATCH = "TENANT_MISMATCH"
    PAYLOAD_GEOMETRY = "PAYLOAD_GEOMETRY"
    STATE_INVALID = "STATE_INVALID"
    CODEC_OR_LAYOUT_MISMATCH = "CODEC_OR_LAYOUT_MISMATCH"
    COST_UNIT = "COST_UNIT"
    LEDGER_MIXED = "LEDGER_MIXED"
    UNIT_PARTITION = "UNIT_PARTITION"
    CANDIDATE_OUT_OF_RANGE = "CANDIDATE_OUT_OF_RANGE"
    DUPLICATE_POSITION = "DUPLICATE_POSITION"
    NAMESPACE_MISMATCH = "NAMESPACE_MISMATCH"
    SUPPORT_OVERLAP = "SUPPORT_OVERLAP"
    SUPPORT_OUT_OF_RANGE = "SUPPORT_OUT_OF_RANGE"
    METRIC_CONTRACT = "METRIC_CONTRACT"
    EMPTY_SUPPORT = "EMPTY_SUPPORT"
    GATE_INPUT = "GATE_INPUT"
    EXACTNESS_MISSING = "EXACTNESS_MISSING"
    EXACTNESS_CONFLICT = "EXACTNESS_CONFLICT"
    FALLBACK_PHASE = "FALLBACK_PHASE"
    DEADLINE = "DEADLINE"
    RETRY_CONTRACT = "RETRY_CONTRACT"
    ILLEGAL_ACTION = "ILLEGAL_ACTION"


class OutcomeRefused(Exception):
    def __init__(self, reason: OutcomeReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason


def refuse_if(failed: bool, reason: OutcomeReason, message: str) -> None:
    if failed:
        raise OutcomeRefused(reason, message)


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
    """F.3, never added up: bytes, but selector_macs, which are MACs."""

    candidate: int
    descriptor: int
    selector_macs: int
    support: int
    resident_hit: int
    transfer: int
    setup: int
    false_positive: int
    false_negative: int


def ledgers(
    support: Support, top: Sequence[int], prices: Prices, row_bytes: int, *, macs: int, setup: int
) -> Ledgers:
    """COST_UNIT for a price that is none."""
    unit = OutcomeReason.COST_UNIT
    refuse_if(prices.candidate_bytes < 1, unit, "a candidate costs no bytes")
    descriptor = prices.descriptor_bytes
    if descriptor is None:
        raise OutcomeRefused(unit, "a descriptor's bytes are not declared")
    refuse_if(prices.mac_unit != "mac", unit, f"MACs are counted in {prices.mac_unit}")
    rows, best, here = set(support.rows), set(top), set(support.resident)
    return Ledgers(
        candidate=len(support.candidates) * prices.candidate_bytes,
        descriptor=len(support.selected) * descriptor,
        selector_macs=macs,
        support=len(rows) * row_bytes,
        resident_hit=len(rows & here) * row_bytes,
        transfer=len(rows - here) * row_bytes,
        setup=setup,
        false_positive=len(rows - best) * row_bytes,
        false_negative=len(best - rows) * row_bytes,
    )


def check_ledgers(right: Ledgers, published: Mapping[str, int]) -> None:
    """LEDGER_MIXED unless each ledger is published under its own name with its own number."""
    wanted = {field.name: getattr(right, field.name) for field in fields(right)}
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


def check_metrics(right: Measured, stated: Measured, namespace: str) -> None:
    """stated: what is to be published; namespace: of its candidates. METRIC_CONTRACT (top-k, delta, relative
    error without a norm, bound), NAMESPACE_MISMATCH, EMPTY_SUPPORT."""
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
    refuse_if(stated.bound < stated.error - 1e-12, contract, "the bound is below the error that it bounds")
    pairs = ((getattr(right, name), getattr(stated, name)) for name in ("delta", "error", "norm", "bound"))
    refuse_if(not all(_same(a, b) for a, b in pairs), contract, "another number than the inputs give")


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
