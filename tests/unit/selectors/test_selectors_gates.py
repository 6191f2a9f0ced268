"""A gate's decisions, one by one, and that what was published is what the order of B.8 allows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtier_core.receipts import SelectionFacts
from kvtier_core.selectors.contract import Budget, Guarantee, Scope, Selection, SelectionReceipt
from kvtier_core.selectors.gates import Gate, illegal, judged
from kvtier_crds.manifest import Fallback
from tests.unit.selectors.selector_cases import SOURCE

RECEIPT = SelectionReceipt(
    family="f",
    variant="",
    selector_digest="d",
    index_digest="i",
    index_epoch=1,
    source=SOURCE,
    guarantee=Guarantee.ESTIMATE,
    scope=Scope.LAYER,
    asked=Budget(tokens=8),
    got_units=(1,),
    got_rows=(8,),
    uncapped=(1,),
    dropped_by_cap=(0,),
    scanned_units=1,
    index_bytes=1,
    threshold=(0.0,),
    runner_up=(0.0,),
    ties=(0,),
    unindexed=0,
)


def selection(omitted: tuple[float, ...] | None, confidence: float | None = None) -> Selection:
    return Selection(Scope.LAYER, (), (), replace(RECEIPT, omitted_mass=omitted, confidence=confidence))


@pytest.mark.parametrize(
    ("gate", "omitted", "confidence", "uncertain"),
    [
        (Gate(0.2, None), (0.1, 0.2), None, False),
        (Gate(0.2, None), (0.1, 0.21), None, True),
        (Gate(0.2, None), None, 1.0, True),
        (Gate(0.2, None), (math.nan,), 1.0, True),
        (Gate(None, 0.9), None, 0.9, False),
        (Gate(None, 0.9), (0.0,), 0.89, True),
        (Gate(None, 0.9), (0.0,), None, True),
        (Gate(0.2, 0.9), (0.1,), 0.95, False),
        (Gate(0.2, 0.9), (0.3,), 0.95, True),
        (Gate(0.2, 0.9), (0.1,), 0.5, True),
        (Gate(None, None), None, None, False),
        (Gate(0.2, None), (-0.1,), None, True),
        (Gate(0.2, None), (-1e-7,), None, False),
        (Gate(None, 0.9), None, 1.1, True),
    ],
    ids=[
        *("at-the-limit", "above", "no-estimate", "an-estimate-that-is-none", "sure", "unsure"),
        *("no-confidence", "both-pass", "mass-fails", "confidence-fails", "nothing-is-judged"),
        *("less-than-nothing", "rounded", "surer-than-sure"),
    ],
)
def test_what_a_gate_lets_pass(
    gate: Gate, omitted: tuple[float, ...] | None, confidence: float | None, uncertain: bool
) -> None:
    assert gate.uncertain(selection(omitted, confidence).receipt) == uncertain


@pytest.mark.parametrize(
    ("masses", "steps", "may_widen", "asked", "widened", "uncertain"),
    [
        ([0.1], 3, True, [0], 0, False),
        ([0.9, 0.5, 0.1], 3, True, [0, 1, 2], 2, False),
        ([0.9, 0.8, 0.7, 0.6], 3, True, [0, 1, 2, 3], 3, True),
        ([0.9, 0.1], 3, False, [0], 0, True),
        ([0.9, 0.1], 0, True, [0], 0, True),
        ([0.9, 0.8, None], 8, True, [0, 1, 2], 1, True),
    ],
    ids=["sure", "after-two", "never", "not-in-the-contract", "no-steps", "up-to-every-row"],
)
def test_a_search_widens_once_by_as_many_doublings_as_it_needs(
    masses: list[float | None], steps: int, may_widen: bool, asked: list[int], widened: int, uncertain: bool
) -> None:
    seen: list[int] = []

    def choose(doublings: int) -> Selection | None:
        seen.append(doublings)
        mass = masses[doublings]
        return None if mass is None else selection((mass,))

    found = judged(Gate(0.2, None, steps), choose, may_widen=may_widen)
    assert seen == asked
    assert (found.widened, found.uncertain) == (widened, uncertain)
    kept = masses[widened]
    assert kept is not None
    assert found.selection.receipt.omitted_mass == (kept,)


def test_without_a_gate_nothing_is_uncertain_and_nothing_widens() -> None:
    found = judged(None, lambda doublings: selection(None), may_widen=True)
    assert (found.widened, found.uncertain) == (0, False)


FACTS = SelectionFacts(
    *("f", "", "estimate", "d", "i"),
    *(1, 8, 0, 8, 0, 0, 1, 8, 1, 0, 1, 1),
    *(0.0, 0.0),
    *(0, 0),
    *(0.1, 1.0, math.nan, 0, 0.2, math.nan, False),
)
WIDE, FAILED = replace(FACTS, widened=2), replace(FACTS, failed=True)


@pytest.mark.parametrize(
    ("told", "allowed", "approximate", "wrong"),
    [
        (None, set(), False, False),
        (FACTS, set(), True, False),
        (WIDE, set(), True, True),
        (WIDE, {Fallback.WIDEN}, True, False),
        (replace(WIDE, failed=True), {Fallback.WIDEN}, False, False),
        (replace(WIDE, failed=True), set(), False, True),
        (FAILED, set(), False, False),
        (FAILED, set(), True, True),
        (FAILED, {Fallback.WIDEN}, True, True),
        (FAILED, {Fallback.DEGRADE}, True, False),
        (replace(FAILED, omitted_mass=math.nan), {Fallback.DEGRADE}, True, False),
        (replace(FACTS, omitted_mass=0.3), {Fallback.DEGRADE}, True, True),
        (replace(FACTS, omitted_mass=0.3), set(), False, False),
        (replace(FACTS, omitted_mass=math.nan), set(), True, True),
        (replace(FACTS, omitted_mass=-1e-7), set(), True, False),
        (replace(FACTS, omitted_mass=-0.1), set(), True, True),
        (replace(FACTS, min_confidence=0.9, confidence=0.8), set(), True, True),
        (replace(FACTS, min_confidence=0.9, confidence=1.1), set(), True, True),
        (replace(FACTS, max_omitted_mass=math.nan, omitted_mass=math.nan), set(), True, False),
    ],
    ids=[
        *("no-selector", "plain", "widened-without-leave", "widened", "widened-then-exact"),
        *("widened-without-leave-then-exact", "exact-instead", "published-all-the-same"),
        *("published-though-only-widening-is-allowed", "degraded", "degraded-without-an-estimate"),
        *("passed-a-gate-that-it-fails", "exact-whatever-was-estimated", "passed-without-an-estimate"),
        *("rounded", "less-than-nothing-left-out", "passed-too-unsure", "surer-than-sure", "not-judged"),
    ],
)
def test_ways_that_a_contract_does_not_list_are_illegal(
    told: SelectionFacts | None, allowed: set[Fallback], approximate: bool, wrong: bool
) -> None:
    assert illegal(told, frozenset(allowed), approximate=approximate) == wrong
