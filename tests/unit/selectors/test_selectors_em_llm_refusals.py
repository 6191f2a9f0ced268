"""EM-LLM: evidence, rules, cuts and indexes that are refused, each with its reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Query
from kvtier_core.selectors.families.em_llm import EmLlm, SealedEvents
from kvtier_core.selectors.families.segmentation import Boundaries, Cut, check_refined
from kvtier_core.selectors.growing import Growing
from tests.unit.selectors.em_llm_cases import RULE, TRACE, evidence_of, family
from tests.unit.selectors.selector_cases import SMALL, SOURCE, query_of, rows_of, selector


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (lambda _: NO_EVIDENCE, Reason.UNSUPPORTED, "emLlm needs prefillQueries, surprisal"),
        (lambda one: replace(one, surprisal=None), Reason.UNSUPPORTED, "emLlm needs surprisal, which"),
        (lambda one: replace(one, queries=None), Reason.UNSUPPORTED, "emLlm needs prefillQueries, which"),
        (lambda one: replace(one, surprisal=np.ones(9)), Reason.EVENT_BOUNDARY, "(9,) of 10 rows"),
        (lambda one: replace(one, surprisal=np.full(10, np.nan)), Reason.EVENT_BOUNDARY, "no number"),
    ],
    ids=["none", "no-surprisal", "no-queries", "N8b-16", "no-number"],
)
def test_without_the_evidence_of_its_rows_there_is_no_index(change: Any, reason: Reason, words: str) -> None:
    k, v = rows_of(2, 10)
    with pytest.raises(CoreError) as refused:
        family().build(SOURCE, k, v, change(evidence_of(2, 10)))
    assert refused.value.reason is reason
    assert words in refused.value.message


def test_a_share_may_be_in_percent() -> None:
    assert (
        family(20, contiguityShare="30%").for_similar == family(20, contiguityShare="0.3").for_similar == 14
    )


def test_the_first_row_needs_no_surprise() -> None:
    k, v = rows_of(2, 10)
    evidence = evidence_of(2, 10)
    assert evidence.surprisal is not None
    unknown = evidence.surprisal.copy()
    unknown[0] = np.nan
    index = family().build(SOURCE, k, v, replace(evidence, surprisal=unknown))
    assert index.surprise.entries[0] == 0.0


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        pytest.param(replace(RULE, window=0), Reason.EVENT_WINDOW, id="N8b-17"),
        pytest.param(replace(RULE, gamma=-math.inf), Reason.EVENT_WINDOW, id="N8b-19"),
        pytest.param(replace(RULE, metric="ratio"), Reason.EVENT_METRIC, id="N8b-24"),
        pytest.param(replace(RULE, metric="modularity"), Reason.EVENT_BOUNDARY, id="N8a-22"),
        pytest.param(replace(RULE, least=10), Reason.EVENT_SIZE, id="sizes"),
    ],
)
def test_a_rule_that_cuts_nothing_sensible_is_refused(rule: Boundaries, reason: Reason) -> None:
    RULE.check()
    with pytest.raises(CoreError) as refused:
        rule.check()
    assert refused.value.reason is reason


def test_a_window_of_more_rows_than_there_are_is_refused() -> None:
    """N8b-18."""
    with pytest.raises(CoreError) as refused:
        RULE.threshold(TRACE, 2)
    assert refused.value.reason is Reason.EVENT_WINDOW


# Behind 1, 1, 1.1 the threshold is 1.0805 by the deviation and 1.0356 by the variance.
VARIED = np.array([1.0, 1.0, 1.1, 1.05, 9.0])


@pytest.mark.parametrize(
    ("trace", "cuts", "reason"),
    [
        pytest.param(VARIED, [Cut(3, False)], Reason.EVENT_WINDOW, id="N8b-20"),
        pytest.param(TRACE, [Cut(0, False)], Reason.EVENT_BOUNDARY, id="N8b-21"),
        pytest.param(TRACE, [Cut(7, False), Cut(3, False)], Reason.EVENT_BOUNDARY, id="N8a-21"),
        pytest.param(TRACE, [Cut(3, False), Cut(3, False)], Reason.EVENT_BOUNDARY, id="twice"),
        pytest.param(np.ones(30), [Cut(12, True)], Reason.EVENT_SIZE, id="N8b-22"),
        pytest.param(TRACE, [Cut(2, False)], Reason.EVENT_WINDOW, id="before-the-window"),
    ],
)
def test_candidates_that_the_rule_does_not_give_are_refused(
    trace: np.ndarray, cuts: list[Cut], reason: Reason
) -> None:
    RULE.check_candidates(trace, 0, RULE.candidates(trace, 0, 0))
    with pytest.raises(CoreError) as refused:
        RULE.check_candidates(trace, 0, cuts)
    assert refused.value.reason is reason


@pytest.mark.parametrize("refined", [[3], [7, 3]], ids=["N8b-25", "order"])
def test_refinement_keeps_the_number_and_order_of_cuts(refined: list[int]) -> None:
    check_refined([3, 7], [2, 8])
    with pytest.raises(CoreError) as refused:
        check_refined([3, 7], refined)
    assert refused.value.reason is Reason.EVENT_BOUNDARY


def made() -> tuple[EmLlm, SealedEvents, Query]:
    fam = family(12, contiguityRadius=1)
    k, v = rows_of(6, 60)
    return fam, fam.build(SOURCE, k, v, evidence_of(6, 60)), Query(query_of(6), 60, SOURCE)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(
            lambda one: replace(one, surprise=one.surprise.first(9)), Reason.SELECTOR_STATE_MIXED, id="trace"
        ),
        pytest.param(
            lambda one: replace(one, pending=one.pending.until(55)), Reason.SELECTOR_STATE_MIXED, id="pending"
        ),
        pytest.param(
            lambda one: replace(one, events=replace(one.events, vectors=one.events.vectors.first(1))),
            Reason.SELECTOR_STATE_MIXED,
            id="vectors",
        ),
        pytest.param(lambda one: replace(one, cuts=one.cuts.first(1)), Reason.EVENT_BOUNDARY, id="cuts"),
        pytest.param(
            lambda one: replace(
                one, events=replace(one.events, bounds=Growing.of(one.events.bounds.entries + 1))
            ),
            Reason.UNIT_PARTITION,
            id="moved",
        ),
        pytest.param(
            lambda one: replace(one, facts=replace(one.facts, selector_digest="sha256:00")),
            Reason.SELECTOR_STALE,
            id="other-parameters",
        ),
        pytest.param(
            lambda one: replace(one, facts=replace(one.facts, source=replace(SOURCE, layer=2))),
            Reason.LAYER_DISTANCE,
            id="N8a-5",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(spoil: Any, reason: Reason) -> None:
    fam, index, query = made()
    fam.select(index, query)
    with pytest.raises(CoreError) as refused:
        fam.select(spoil(index), query)
    assert refused.value.reason is reason


def test_only_neighbours_within_the_budget_are_events_of_a_recall() -> None:
    """N8b-26, N8b-27."""
    fam, index, query = made()
    scores = index.events.scores(query.q.numpy())
    recall = fam.recall(index.events, scores)
    fam.check_events(recall, recall.ids, index.events)
    count = len(index.events)
    far = next(e for e in range(count) if all(abs(e - one) > 1 for one in recall.similar))
    for ids, reason in (
        (np.array([count]), Reason.EVENT_NEIGHBOUR),
        (np.array([far]), Reason.EVENT_NEIGHBOUR),
        (np.array(sorted({*recall.similar, *recall.neighbours, *recall.trimmed})), Reason.TOKEN_BUDGET),
    ):
        with pytest.raises(CoreError) as refused:
            fam.check_events(recall, ids, index.events)
        assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("parameters", "budget", "reason", "words"),
    [
        ({"gamma": None}, {"tokens": 9}, Reason.MANIFEST_INVALID, "emLlm.gamma must be given"),
        ({"gamma": "-Infinity"}, {"tokens": 9}, Reason.MANIFEST_INVALID, "emLlm.gamma must be a decimal"),
        ({"window": 0}, {"tokens": 9}, Reason.MANIFEST_INVALID, "emLlm.window must be a whole number"),
        ({"refinement": "ratio"}, {"tokens": 9}, Reason.MANIFEST_INVALID, "none, modularity, conductance"),
        ({"refinement": "modularity"}, {"tokens": 9}, Reason.EVENT_BOUNDARY, "rows to search"),
        ({}, {"units": 9}, Reason.TOKEN_BUDGET, "not units"),
        ({}, {"tokens": 5}, Reason.TOKEN_BUDGET, "maxEventTokens 6 rows does not fit into 5"),
        ({"minEventTokens": 7}, {"tokens": 9}, Reason.EVENT_SIZE, "events of 7 to 6 rows"),
        ({"representatives": 7}, {"tokens": 9}, Reason.REP_BUDGET, "7 of emLlm.maxEventTokens 6"),
        ({"queue": 1}, {"tokens": 9}, Reason.MANIFEST_INVALID, "no parameters queue"),
    ],
    ids=[
        "absent",
        "infinite",
        "window",
        "metric",
        "no-radius",
        "N8b-27-units",
        "too-small",
        "sizes",
        "representatives",
        "unknown",
    ],
)
def test_parameters_are_refused_by_name(
    parameters: dict[str, Any], budget: dict[str, Any], reason: Reason, words: str
) -> None:
    given = {"window": 4, "gamma": "1", "maxEventTokens": 6} | parameters
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(CoreError) as refused:
        EmLlm.from_manifest(selector("emLlm", given, budget), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message
