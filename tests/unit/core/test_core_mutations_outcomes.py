"""N.9: a record of an answer's error, cost and fallback with one wrong field has one name.

Items 1 to 38 are what an evaluation holds its own numbers against (`kvtier_eval.proof`), 39 to 51 what a step
does. On the toy T9 (F.5), whose worked numbers C9.01 to C9.18 are tested with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvtier_core.admission import UNAVAILABLE, Fallback
from kvtier_core.receiptcheck.fallbacks import (
    LABELS,
    Estimate,
    EstimateSource,
    FallbackRecord,
    Gate,
    Label,
    check_fallback,
    uncertain,
)
from kvtier_core.receiptcheck.outcomes import OutcomeReason, OutcomeRefused
from kvtier_eval.outcomes import (
    Dense,
    Ledgers,
    Measured,
    OutcomeIdentity,
    Prices,
    Support,
    Units,
    check_dense,
    check_identity,
    check_ledgers,
    check_metrics,
    check_support,
    check_units,
    ledgers,
    measure,
)

IDENTITY = OutcomeIdentity("tenant-a", 3, 7, 5, b"\1" * 32, 1, 0, b"\2" * 32)
DENSE = Dense(
    logits=np.array([2.0, 1.6, 0.4, -0.5, 1.8, 0.0, -1.0, -0.2]),
    values=np.array(
        [[1, 0], [0, 1], [1, 1], [-1, 0.5], [0.5, -1], [0, -0.5], [2, 0], [-0.5, 0.25]], dtype=np.float64
    ),
    dtype="float16",
    scalar_bytes=2,
    row_bytes=8,
)
ROWS = 8
PAGES = Units("page", ((0, 1), (2, 3), (4, 5), (6, 7)))
CLUSTERS = Units("cluster", ((0, 3, 6), (1, 5), (2, 4, 7)))
SINGLE = Units("row", tuple((row,) for row in range(ROWS)))
BY_PAGE = Support("page", (0, 1, 2), (0, 2), (0, 1, 4, 5), (0,), (0,), (0, 1, 4, 5))
BY_CLUSTER = Support("cluster", (0, 1, 2), (0, 2), (0, 3, 6, 2, 4, 7), (0,), (0,), (0, 2, 3, 4, 6, 7))
BY_ROW = Support("row", (0, 1, 5), (0, 1, 5), (0, 1, 5), (0,), (0,), (0, 1, 5))
ALL_ROWS = tuple(range(ROWS))
WHOLE = Support("row", ALL_ROWS, ALL_ROWS, ALL_ROWS, (0,), (0,), ALL_ROWS)
KNOWN = frozenset(range(4))
PRICES = Prices(candidate_bytes=4, descriptor_bytes=64)
MEASURED = measure(DENSE, BY_PAGE.rows, 3)
LEDGERS = ledgers(BY_PAGE, MEASURED.top, PRICES, 8, macs=32, setup=128)
GATE = Gate(max_omitted_mass=0.05, min_confidence=0.9)
SURE = Estimate(0.02, 0.95, EstimateSource.ESTIMATOR)
UNSURE = replace(SURE, omitted_mass=0.2)
EXACT_FETCH = FallbackRecord(
    exact=True,
    approximation_allowed=False,
    phase="post_widen",
    can_widen=False,
    slack=5.0,
    fetch=4.0,
    recompute=9.0,
    retryable=False,
    retry_window=None,
    action=Fallback.FULL_EXACT_FETCH,
    published=Label.EXACT,
)
POSTPONED = replace(
    EXACT_FETCH,
    fetch=UNAVAILABLE,
    retryable=True,
    retry_window=3.0,
    action=Fallback.POSTPONE_FOR_EXACT_RETRY,
    published=Label.NOTHING,
)
REJECTED = replace(
    EXACT_FETCH, fetch=UNAVAILABLE, action=Fallback.REJECT_NO_LEGAL_PATH, published=Label.NOTHING
)
DEGRADED = replace(
    EXACT_FETCH,
    exact=False,
    approximation_allowed=True,
    fetch=UNAVAILABLE,
    action=Fallback.ACCEPT_DECLARED_DEGRADED,
    published=Label.DEGRADED,
)


def identity(**change: object) -> Callable[[], None]:
    return lambda: check_identity(IDENTITY, replace(IDENTITY, **change))  # type: ignore[arg-type]


def dense(**change: object) -> Callable[[], None]:
    return lambda: check_dense(replace(DENSE, **change), ROWS, 2, "float16")  # type: ignore[arg-type]


def nan_logit() -> None:
    logits = DENSE.logits.copy()
    logits[3] = math.nan
    check_dense(replace(DENSE, logits=logits), ROWS, 2, "float16")


def prices(**change: object) -> Callable[[], object]:
    changed = replace(PRICES, **change)  # type: ignore[arg-type]
    return lambda: ledgers(BY_PAGE, MEASURED.top, changed, 8, macs=32, setup=128)


def published(**change: int) -> Callable[[], None]:
    return lambda: check_ledgers(LEDGERS, {**asdict(LEDGERS), **change})


def units(kind: Units, at: int, *members: int) -> Callable[[], None]:
    changed = list(kind.members)
    changed[at] = members
    return lambda: check_units(replace(kind, members=tuple(changed)), ROWS)


def support(**change: object) -> Callable[[], None]:
    changed = replace(BY_PAGE, **change)  # type: ignore[arg-type]
    return lambda: check_support(PAGES, changed, KNOWN, ROWS)


def metrics(**change: object) -> Callable[[], None]:
    return lambda: check_metrics(MEASURED, replace(MEASURED, **change), "page")  # type: ignore[arg-type]


def gated(gate: Gate | None, **change: object) -> Callable[[], object]:
    return lambda: uncertain(gate, replace(SURE, **change))  # type: ignore[arg-type]


def decided(record: FallbackRecord, **change: object) -> Callable[[], None]:
    return lambda: check_fallback(replace(record, **change), GATE, UNSURE)  # type: ignore[arg-type]


Why = OutcomeReason
MUTATIONS: dict[str, tuple[Callable[[], object], OutcomeReason]] = {
    "1 request generation": (identity(request_generation=2), Why.REQUEST_STALE),
    "2 cache generation": (identity(cache_generation=6), Why.STALE_CACHE_GENERATION),
    "3 index generation": (identity(index_generation=4), Why.INDEX_STALE),
    "4 query digest": (identity(query_sha256=b"\x09" * 32), Why.QUERY_MISMATCH),
    "5 layer": (identity(layer=0), Why.QUERY_IDENTITY_MISMATCH),
    "6 KV head": (identity(kv_head=1), Why.HEAD_MAPPING_MISMATCH),
    "7 mask digest": (identity(mask_sha256=b"\x09" * 32), Why.MASK_MISMATCH),
    "8 tenant": (identity(tenant_namespace="tenant-b"), Why.TENANT_MISMATCH),
    "9 logits length": (dense(logits=DENSE.logits[:7]), Why.PAYLOAD_GEOMETRY),
    "10 value width": (dense(values=np.zeros((8, 3))), Why.PAYLOAD_GEOMETRY),
    "11 value rows": (dense(values=DENSE.values[:7]), Why.PAYLOAD_GEOMETRY),
    "12 NaN logit": (nan_logit, Why.STATE_INVALID),
    "13 dtype": (dense(dtype="bfloat16"), Why.CODEC_OR_LAYOUT_MISMATCH),
    "14 b_KV": (dense(scalar_bytes=4), Why.PAYLOAD_GEOMETRY),
    "15 B_row of K only": (dense(row_bytes=4), Why.PAYLOAD_GEOMETRY),
    "16 B_candidate zero": (prices(candidate_bytes=0), Why.COST_UNIT),
    "17 no descriptor cost": (prices(descriptor_bytes=None), Why.COST_UNIT),
    "18 MACs as bytes": (prices(mac_unit="byte"), Why.COST_UNIT),
    "19 setup in payload": (
        published(transfer=LEDGERS.transfer + LEDGERS.setup, setup=0),
        Why.LEDGER_MIXED,
    ),
    "20 one sum": (
        lambda: check_ledgers(LEDGERS, {"total": sum(asdict(LEDGERS).values())}),
        Why.LEDGER_MIXED,
    ),
    "21 page gap": (units(PAGES, 1, 2), Why.UNIT_PARTITION),
    "22 page overlap": (units(PAGES, 1, 1, 2, 3), Why.UNIT_PARTITION),
    "23 cluster gap": (units(CLUSTERS, 1, 5), Why.UNIT_PARTITION),
    "24 cluster member out of range": (units(CLUSTERS, 1, 1, 8), Why.UNIT_PARTITION),
    "25 a unit expanded to other rows": (support(expanded=(0, 1, 2, 3)), Why.UNIT_PARTITION),
    "26 a candidate nobody named": (support(candidates=(0, 2, 9)), Why.CANDIDATE_OUT_OF_RANGE),
    "27 a selected unit is no candidate": (support(candidates=(0, 1)), Why.CANDIDATE_OUT_OF_RANGE),
    "28 a candidate twice": (support(candidates=(0, 1, 2, 2)), Why.DUPLICATE_POSITION),
    "29 page ids as row ids": (support(namespace="row"), Why.NAMESPACE_MISMATCH),
    "30 a persistent row twice": (support(rows=(0, 0, 1, 4, 5)), Why.SUPPORT_OVERLAP),
    "31 a persistent row outside": (support(persistent=(8,)), Why.SUPPORT_OUT_OF_RANGE),
    "32 a resident row outside": (support(resident=(0, 8)), Why.SUPPORT_OUT_OF_RANGE),
    "33 another top-k": (metrics(top=(0, 1)), Why.METRIC_CONTRACT),
    "33 another recall": (metrics(recall_support=0.5), Why.METRIC_CONTRACT),
    "34 recall of candidates over pages": (metrics(recall_candidate=1.0), Why.NAMESPACE_MISMATCH),
    "35 delta is not 1 - rho": (metrics(delta=0.2), Why.METRIC_CONTRACT),
    "36 delta 1": (metrics(delta=1.0, retained=0.0), Why.EMPTY_SUPPORT),
    "37 relative without its norm": (metrics(norm=0.0), Why.METRIC_CONTRACT),
    "38 bound below error": (metrics(bound=MEASURED.error / 2), Why.METRIC_CONTRACT),
    "38 another error": (metrics(error=MEASURED.error / 2), Why.METRIC_CONTRACT),
    "39 dense mass online": (gated(GATE, source=EstimateSource.DENSE), Why.GATE_INPUT),
    "40 mass over one": (gated(replace(GATE, max_omitted_mass=1.1)), Why.GATE_INPUT),
    "41 confidence over one": (gated(GATE, confidence=1.1), Why.GATE_INPUT),
    "42 no gate": (gated(None), Why.GATE_INPUT),
    "43 exactness not stated": (decided(EXACT_FETCH, exact=None), Why.EXACTNESS_MISSING),
    "44 exact that allows approximation": (
        decided(EXACT_FETCH, approximation_allowed=True),
        Why.EXACTNESS_CONFLICT,
    ),
    "45 unknown phase": (decided(EXACT_FETCH, phase="later"), Why.FALLBACK_PHASE),
    "46 widened twice": (
        decided(DEGRADED, can_widen=True, action=Fallback.WIDEN_SEARCH, published=Label.NOTHING),
        Why.FALLBACK_PHASE,
    ),
    "47 negative slack": (decided(EXACT_FETCH, slack=-0.1), Why.DEADLINE),
    "48 a retry without a window": (decided(POSTPONED, retry_window=None), Why.RETRY_CONTRACT),
    "49 an exact answer called approximate": (
        decided(EXACT_FETCH, published=Label.APPROXIMATE),
        Why.ILLEGAL_ACTION,
    ),
    "50 a postponed request published": (decided(POSTPONED, published=Label.EXACT), Why.ILLEGAL_ACTION),
    "51 degraded without approximation": (
        decided(DEGRADED, approximation_allowed=False),
        Why.ILLEGAL_ACTION,
    ),
}


def test_what_was_not_mutated_passes() -> None:
    check_identity(IDENTITY, IDENTITY)
    check_dense(DENSE, ROWS, 2, "float16")
    for kind, read in ((PAGES, BY_PAGE), (CLUSTERS, BY_CLUSTER), (SINGLE, BY_ROW), (SINGLE, WHOLE)):
        check_units(kind, ROWS)
        check_support(kind, read, frozenset(range(ROWS)), ROWS)
    check_ledgers(LEDGERS, asdict(LEDGERS))
    check_metrics(MEASURED, MEASURED, "page")
    assert uncertain(GATE, UNSURE) and not uncertain(GATE, SURE)
    assert not uncertain(GATE, replace(SURE, source=EstimateSource.DENSE, dense_shadow=True))
    for record in (EXACT_FETCH, POSTPONED, REJECTED, DEGRADED):
        check_fallback(record, GATE, UNSURE)


@pytest.mark.parametrize(("check", "reason"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_each_mutation_has_its_reason(check: Callable[[], object], reason: OutcomeReason) -> None:
    with pytest.raises(OutcomeRefused) as refused:
        check()
    assert refused.value.reason is reason, refused.value


def test_the_catalogue_is_whole() -> None:
    assert list(dict.fromkeys(int(name.split()[0]) for name in MUTATIONS)) == list(range(1, 52))


# The worked numbers.

SUPPORTS = {"row": BY_ROW, "page": BY_PAGE, "cluster": BY_CLUSTER, "dense": WHOLE}
MEASURES: dict[str, Measured] = {name: measure(DENSE, item.rows, 3) for name, item in SUPPORTS.items()}
COSTS: dict[str, Ledgers] = {
    name: ledgers(item, MEASURES[name].top, PRICES, 8, macs=0, setup=0) for name, item in SUPPORTS.items()
}


def test_c9_01_to_03_omitted_mass_and_the_identity_of_the_mixture() -> None:
    small = replace(
        DENSE,
        logits=np.array([2.0, 0.5, 1.0, -1.0]),
        values=np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -0.5]]),
    )
    kept, rest = measure(small, (0, 2), 1), measure(small, (1, 3), 1)
    assert kept.delta == pytest.approx(0.1663321444, abs=1e-9)
    assert kept.delta + rest.delta == pytest.approx(1.0)
    # o_R - o = delta (o_R - o_O), and the other side's error is (1 - delta) of the same distance.
    assert kept.error / kept.delta == pytest.approx(rest.error / rest.delta)
    assert kept.error <= kept.bound


def test_c9_04_rows_each_far_below_the_top_hold_much_mass_together() -> None:
    many = replace(DENSE, logits=np.array([5.0] + [0.0] * 200), values=np.ones((201, 2)))
    assert measure(many, (0,), 1).delta == pytest.approx(0.5740311316, abs=1e-9)


def test_c9_07_the_dense_top_three_and_norm() -> None:
    assert MEASURES["dense"].top == (0, 1, 4)
    assert MEASURES["dense"].norm == pytest.approx(math.hypot(0.5126657135, 0.0177784972), abs=1e-9)


T9: dict[str, tuple[Callable[[str], object], list[object]]] = {
    "C9.08": (lambda name: SUPPORTS[name].rows, [(0, 1, 5), (0, 1, 4, 5), (0, 2, 3, 4, 6, 7), ALL_ROWS]),
    "C9.09": (lambda name: MEASURES[name].recall_support, [2 / 3, 1.0, 2 / 3, 1.0]),
    "C9.10": (lambda name: MEASURES[name].delta, [0.4116389238, 0.1448608188, 0.2625175630, 0.0]),
    "C9.11": (lambda name: MEASURES[name].error, [0.3186479684, 0.1030346205, 0.3176052890, 0.0]),
    "C9.12": (lambda name: MEASURES[name].error <= MEASURES[name].bound + 1e-12, [True] * 4),
    "C9.13": (
        lambda name: (COSTS[name].support, COSTS[name].transfer),
        [(24, 16), (32, 24), (48, 40), (64, 56)],
    ),
    "C9.14": (
        lambda name: (COSTS[name].false_positive, COSTS[name].false_negative),
        [(8, 8), (8, 0), (32, 8), (40, 0)],
    ),
}


@pytest.mark.parametrize(("of", "expected"), T9.values(), ids=T9.keys())
def test_t9(of: Callable[[str], object], expected: list[object]) -> None:
    for name, value in zip(SUPPORTS, expected, strict=True):
        assert of(name) == (pytest.approx(value, abs=1e-9) if isinstance(value, float) else value), name


BASE = FallbackRecord(
    exact=False,
    approximation_allowed=True,
    phase="initial",
    can_widen=True,
    slack=5.0,
    fetch=9.0,
    recompute=9.0,
    retryable=False,
    retry_window=9.0,
    action=Fallback.ACCEPT_APPROXIMATE,
    published=Label.APPROXIMATE,
)
SEVEN: dict[Fallback, tuple[dict[str, object], Estimate]] = {
    Fallback.ACCEPT_APPROXIMATE: ({}, SURE),
    Fallback.WIDEN_SEARCH: ({}, UNSURE),
    Fallback.FULL_EXACT_FETCH: ({"phase": "post_widen", "fetch": 4.0}, UNSURE),
    Fallback.RECOMPUTE_EXACT: ({"phase": "post_widen", "recompute": 4.0}, UNSURE),
    Fallback.POSTPONE_FOR_EXACT_RETRY: (
        {"exact": True, "approximation_allowed": False, "retryable": True, "retry_window": 3.0},
        SURE,
    ),
    Fallback.ACCEPT_DECLARED_DEGRADED: ({"phase": "post_widen"}, replace(SURE, confidence=0.5)),
    Fallback.REJECT_NO_LEGAL_PATH: ({"exact": True, "approximation_allowed": False}, SURE),
}


@pytest.mark.parametrize("action", SEVEN, ids=lambda action: action.value)
def test_c9_17_each_of_the_seven_actions_and_no_other_is_legal_where_it_is(action: Fallback) -> None:
    changes, estimate = SEVEN[action]
    for other in Fallback:
        record = replace(BASE, **changes, action=other, published=LABELS[other])  # type: ignore[arg-type]
        if other is action:
            check_fallback(record, GATE, estimate)
            continue
        with pytest.raises(OutcomeRefused):
            check_fallback(record, GATE, estimate)


def test_c9_18_of_256_cases_none_is_published_approximate_that_may_not_be_and_no_search_widens_twice() -> (
    None
):
    """An exact request that allows approximation, a quarter of them, contradicts itself and has no action."""
    halves = itertools.product(
        (False, True), (False, True), ("initial", "post_widen"), (False, True), (4.0, 9.0), (4.0, 9.0),
        (False, True), (SURE, UNSURE),
    )  # fmt: skip
    legal = 0
    for exact, allowed, phase, widen, fetch, recompute, retry, estimate in halves:
        for action in Fallback:
            record = FallbackRecord(
                exact, allowed, phase, widen, 5.0, fetch, recompute, retry, 3.0, action, LABELS[action]
            )
            try:
                check_fallback(record, GATE, estimate)
            except OutcomeRefused:
                continue
            legal += 1
            unexact = LABELS[action] in (Label.APPROXIMATE, Label.DEGRADED)
            assert not (unexact and (exact or not allowed))
            assert not (phase == "post_widen" and action is Fallback.WIDEN_SEARCH)
    assert legal == 256 - 64, "one action each"
