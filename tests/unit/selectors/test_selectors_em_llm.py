"""EM-LLM against the algorithm written out in float64, its worked examples, and where it is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import Edit, Evidence, NeedsRebuild, Query, Shape
from kvtier_core.selectors.families.em_llm import EmLlm
from kvtier_core.selectors.families.representatives import VARIANTS, Runs
from kvtier_core.selectors.families.segmentation import (
    METRICS,
    Cut,
    conductance,
    modularity,
    similarity,
)
from tests.unit.selectors.em_llm_cases import RULE, TRACE, evidence_of, family, part
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of


def split_score(keys: np.ndarray, at: int, metric: str) -> float:
    """Of one head's keys [n, d], pair by pair."""
    n = len(keys)
    edge = np.zeros((n, n))
    for a in range(n):
        for b in range(n):
            if a != b:
                edge[a, b] = max(
                    0.0, float(keys[a] @ keys[b]) / math.sqrt(float(keys[a] @ keys[a]) * (keys[b] @ keys[b]))
                )
    degree = [sum(row) for row in edge]
    double = sum(degree)
    side = [x < at for x in range(n)]
    if metric == "modularity":
        pairs = [(a, b) for a in range(n) for b in range(n) if side[a] == side[b]]
        return sum(edge[a, b] - degree[a] * degree[b] / double for a, b in pairs) / double if double else 0.0
    across = sum(edge[a, b] for a in range(n) for b in range(n) if side[a] and not side[b])
    volume = min(sum(degree[:at]), sum(degree[at:]))
    return -(across / volume if volume else 1.0)


def published_events(fam: EmLlm, k: torch.Tensor, evidence: Evidence) -> list[tuple[int, int]]:
    """Events whose cut is final, as the algorithm is written: one row, one pair, one position at a time."""
    assert evidence.surprisal is not None
    rule, seen, wide = fam.boundaries, evidence.surprisal, k.double().numpy()
    start, rough = fam.persistent.sink, []
    for t in range(start + 1, len(seen)):
        past = seen[max(0, t - rule.window) : t]
        mean = sum(past) / len(past)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in past) / len(past))
        loud = t >= rule.window and seen[t] > mean + rule.gamma * deviation and t - start >= rule.least
        if loud or t - start == rule.most:
            rough.append((t, not loud))
            start = t
    events, first = [], fam.persistent.sink
    for number, (cut, forced) in enumerate(rough):
        last = cut
        if rule.metric != "none" and not forced:
            if number + 1 == len(rough):
                break
            after, options = rough[number + 1][0], []
            assert rule.radius is not None
            for at in range(cut - rule.radius, cut + rule.radius + 1):
                fits = rule.least <= at - first <= rule.most and rule.least <= after - at <= rule.most
                if fits:
                    heads = [wide[first:after, h] for h in range(fam.shape.kv_heads)]
                    scores = [split_score(one, at - first, rule.metric) for one in heads]
                    options.append((round(sum(scores) / len(scores), 12), -abs(at - cut), -at))
            last = -max(options)[2]
        events.append((first, last))
        first = last
    return events


def published(
    fam: EmLlm, q: torch.Tensor, k: torch.Tensor, evidence: Evidence
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Recallable events, those chosen, and the rows read."""
    assert evidence.queries is not None
    rows, wide, past = k.shape[0], k.double().numpy(), evidence.queries.double().numpy()
    ahead, recent = fam.rule.following, max(1, fam.persistent.recent)
    events = []
    for first, last in published_events(fam, k, evidence):
        if last + ahead > rows or last > rows - recent:
            break
        events.append((first, last))
    scores = []
    for first, last in events:
        total = 0.0
        for head in range(fam.shape.query_heads):
            keys, weight = wide[:, head // fam.shape.group], {}
            for m in range(first, last):
                weight[m] = 0.0
                for i in range(m + 1, m + ahead + 1):
                    near = range(max(0, i - ahead), i + 1)
                    below = sum(math.exp(fam.shape.scale * past[i, head] @ keys[x]) for x in near)
                    logit = past[i, head] @ keys[m]
                    paper = fam.rule.variant == "paper"
                    weight[m] += logit if paper else math.exp(fam.shape.scale * logit) / below
            best = sorted(weight, key=lambda m: (-weight[m], m))[: fam.rule.count]
            one = sum(float(q[0, head].double().numpy() @ keys[m]) for m in best)
            total += one / len(best) if fam.rule.mean else one
        scores.append(total)
    size = [last - first for first, last in events]
    chosen: list[int] = []
    for event in sorted(range(len(events)), key=lambda e: (-scores[e], e)):
        if sum(size[e] for e in chosen) + size[event] > fam.for_similar:
            break
        chosen.append(event)
    similar, full = list(chosen), False
    for distance in range(1, fam.radius + 1):
        for side in (-1, 1):
            for one in similar:
                event = one + side * distance
                if full or event in chosen or not 0 <= event < len(events):
                    continue
                full = sum(size[e] for e in chosen) + size[event] > fam.allowed
                if not full:
                    chosen.append(event)
    frontier = events[-1][1] if events else fam.persistent.sink
    read = set(range(min(rows, fam.persistent.sink))) | set(range(frontier, rows))
    read |= set(range(max(0, rows - recent), rows))
    for event in chosen:
        read |= set(range(*events[event]))
    return events, sorted(chosen), sorted(read)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 5000),
    rows=st.integers(1, 70),
    gamma=st.sampled_from(["0", "0.5", "1.5", "50"]),
    metric=st.sampled_from(METRICS),
    count=st.integers(1, 3),
    ahead=st.integers(1, 5),
    radius=st.integers(0, 2),
    share=st.sampled_from(["0", "0.3"]),
    variant=st.sampled_from(VARIANTS),
)
def test_it_is_the_published_algorithm(
    seed: int,
    rows: int,
    gamma: str,
    metric: str,
    count: int,
    ahead: int,
    radius: int,
    share: str,
    variant: str,
) -> None:
    fam = family(
        gamma=gamma,
        refinement=metric,
        searchRadius=2,
        representatives=count,
        influenceTokens=ahead,
        contiguityRadius=radius,
        contiguityShare=share,
        variant=variant,
    )
    k, v = rows_of(seed, rows)
    q, evidence = query_of(seed + 1), evidence_of(seed, rows)
    index = fam.build(SOURCE, k, v, evidence)
    selection = fam.select(index, Query(q, rows, SOURCE))
    events, chosen, read = published(fam, q, k, evidence)
    assert [tuple(one) for one in index.events.bounds.entries[: len(events)].tolist()] == events
    assert selection.units[0].tolist() == chosen
    assert selection.positions[0].tolist() == read
    assert fam.omits(rows) or len(read) == rows


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda keys, q: keys.mean(0), id="mean-key"),
        pytest.param(lambda keys, q: keys.max(0), id="largest-channel"),
        pytest.param(lambda keys, q: q * float((keys @ q).max()), id="best-row"),
    ],
)
def test_another_score_would_read_other_rows(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must be able to fail: with this vector it does on some of these inputs."""
    differs = False
    for seed in range(4):
        fam = family(12)
        k, v = rows_of(seed, 80)
        q, evidence = query_of(seed), evidence_of(seed, 80)
        index = fam.build(SOURCE, k, v, evidence)
        heads = range(SMALL.query_heads)
        total = [
            sum(
                float(q[0, h].numpy() @ wrong(k[a:b, h // SMALL.group].numpy(), q[0, h].numpy()))
                for h in heads
            )
            for a, b in index.events.bounds.entries
        ]
        monkeypatch.setattr(Runs, "scores", lambda self, q, total=total: np.array(total[: len(self)]))
        selection = fam.select(index, Query(q, 80, SOURCE))
        differs |= selection.units[0].tolist() != published(fam, q, k, evidence)[1]
    assert differs


KEYS = np.array(
    [
        (1, 0.1),
        (1, 0.2),
        (0.9, 0.1),
        (0.1, 1),
        (0.2, 1),
        (0.1, 0.9),
        (0.15, 1),
        (1, 0.15),
        (0.9, 0.2),
        (1, 0.1),
    ],
    dtype=np.float32,
)[:, None]


def test_the_surprises_of_the_specification() -> None:
    """C8.08, C8.09."""
    assert RULE.candidates(TRACE, 0, 0) == [Cut(3, False), Cut(7, False)]
    assert [RULE.threshold(TRACE, t) for t in (3, 7)] == pytest.approx([1.0804737854, 1.0], abs=1e-9)


def test_the_refinement_of_the_specification() -> None:
    """C8.10 to C8.12."""
    head, tail = similarity(KEYS[:7])[0], similarity(KEYS[3:])[0]
    assert max((2, 3, 4), key=lambda c: modularity(head, c)) == 3
    assert min((2, 3, 4), key=lambda c: conductance(head, c)) == 3
    assert max((6, 7, 8), key=lambda c: modularity(tail, c - 3)) == 7
    assert [modularity(head, 3), conductance(head, 3)] == pytest.approx(
        [0.2040306310, 0.3522575528], abs=1e-7
    )
    for metric in ("modularity", "conductance"):
        rule = replace(RULE, metric=metric, radius=1)
        assert rule.refined(KEYS[:7], 0, Cut(4, False), 7) == 3
        assert rule.refined(KEYS[:7], 0, Cut(3, False), 7) == 3


@pytest.mark.parametrize(
    ("seed", "rows", "radius", "share"), [(3455, 19, 1, "0"), (4489, 25, 0, "0.3")], ids=["one", "other"]
)
def test_rounding_does_not_choose_between_equal_splits(seed: int, rows: int, radius: int, share: str) -> None:
    """Splits of equal conductance whose sums are rounded apart."""
    fam = family(
        gamma="0", refinement="conductance", searchRadius=2, contiguityRadius=radius, contiguityShare=share
    )
    k, v = rows_of(seed, rows)
    evidence = evidence_of(seed, rows)
    sealed = fam.build(SOURCE, k, v, evidence).events.bounds.entries.tolist()
    assert [list(one) for one in published_events(fam, k, evidence)[: len(sealed)]] == sealed


def test_the_worked_example_of_the_specification() -> None:
    """C8.05 to C8.07: cuts 3 and 7, the similar event 0 and its neighbour, and local rows 10, 11."""
    shape = Shape(1, 1, 2, 1.0)
    fam = family(
        7,
        shape,
        sink=0,
        recent=2,
        window=3,
        gamma="1",
        minEventTokens=1,
        maxEventTokens=4,
        contiguityRadius=1,
        contiguityShare="0.4",
        influenceTokens=1,
    )
    k = torch.zeros(12, 1, 2)
    k[1, 0, 0] = 3.0
    surprise = np.concatenate([TRACE, [5.0, 0.0]])
    index = fam.build(SOURCE, k, k, Evidence(queries=torch.ones(12, 1, 2), surprisal=surprise))
    assert index.events.bounds.entries.tolist() == [[0, 3], [3, 7], [7, 10]]
    selection = fam.select(index, Query(torch.ones(1, 1, 2), 12, SOURCE))
    assert selection.receipt.detail["similar"] == "0"
    assert selection.receipt.detail["neighbours"] == "1"
    assert selection.units[0].tolist() == [0, 1]
    assert selection.receipt.got_rows == (7,)
    assert selection.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11]


def test_surprises_that_never_stand_out_leave_slabs() -> None:
    fam = family()
    k, v = rows_of(1, 60)
    evidence = replace(evidence_of(1, 60), surprisal=np.full(60, 2.0))
    index = fam.build(SOURCE, k, v, evidence)
    assert {int(high - low) for low, high in index.events.bounds.entries} == {6}
    assert index.cuts.entries[:, 1].all()


def test_a_cut_through_the_answer_loses_half_of_it() -> None:
    """The adversary of the anchor: two rows answer together, the second starts an event of its own."""
    shape = Shape(1, 1, 2, 1.0)
    fam = family(6, shape, sink=0, recent=1, influenceTokens=1, minEventTokens=3)
    k = torch.zeros(20, 1, 2)
    k[5, 0], k[6, 0], k[7, 0] = torch.tensor([8.0, 1]), torch.tensor([8.0, 0]), torch.tensor([0.0, 2])
    surprise = np.where(np.isin(np.arange(20), [6, 9, 12, 15, 18]), 9.0, 1.0)
    evidence = Evidence(queries=torch.tensor([[[0.0, 1.0]]]).expand(20, 1, 2), surprisal=surprise)
    q = torch.tensor([[[1.0, 0.0]]])
    index = fam.build(SOURCE, k, k, evidence)
    assert [6, 9] in index.events.bounds.entries.tolist()
    selection = fam.select(index, Query(q, 20, SOURCE))
    weights = np.exp(logits_of(q, k, shape)[0])
    kept = weights[selection.positions[0]].sum() / weights.sum()
    assert 0.4 < kept < 0.6


@pytest.mark.parametrize(
    ("policy", "outcome"), [("truncate", 1), ("dense", 0), ("error", Reason.CAP_VIOLATION)], ids=str
)
def test_neighbours_over_the_budget_end_by_the_policy(policy: str, outcome: object) -> None:
    fam = family(8, contiguityRadius=2, policy=policy)
    k, v = rows_of(3, 80)
    index = fam.build(SOURCE, k, v, evidence_of(3, 80))
    query = Query(query_of(3), 80, SOURCE)
    if isinstance(outcome, Reason):
        with pytest.raises(CoreError) as refused:
            fam.select(index, query)
        assert refused.value.reason is outcome
        return
    selection = fam.select(index, query)
    assert selection.receipt.detail["trimmed"]
    assert (len(selection.positions[0]) == 80) == (policy == "dense")
    assert (selection.receipt.dropped_by_cap[0] > 0) == bool(outcome)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_appending_is_building_and_a_cut_ends_where_it_must(metric: str, variant: str) -> None:
    fam = family(refinement=metric, searchRadius=2, variant=variant)
    k, v = rows_of(4, 80)
    evidence = evidence_of(4, 80)
    index = fam.build(SOURCE, k[:1], v[:1], part(evidence, 0, 1))
    handles = []
    for row in range(1, 80):
        handles.append(index)
        index = fam.append(index, k[row : row + 1], v[row : row + 1], part(evidence, row, row + 1))
    handles.append(index)
    query = query_of(1)
    for rows in (1, 2, 9, 40, 80):
        whole = fam.build(SOURCE, k[:rows], v[:rows], part(evidence, 0, rows))
        one, other = (fam.select(i, Query(query, rows, SOURCE)) for i in (handles[rows - 1], whole))
        assert one.positions[0].tolist() == other.positions[0].tolist()
    rebuilt = 0
    for first in (0, 1, 20, 33, 50, 76, 79):
        cut = fam.edit(index, Edit(first, 0, truncated=True))
        if isinstance(cut, NeedsRebuild):
            rebuilt += 1
            assert variant == "referenceCode"
            continue
        covered = cut.facts.covered
        assert covered <= first
        less = fam.build(SOURCE, k[:first], v[:first], part(evidence, 0, first))
        upto = fam.append(cut, k[covered:first], v[covered:first], part(evidence, covered, first))
        again = fam.append(upto, k[first:], v[first:], part(evidence, first, 80))
        for made, want in ((upto, less), (again, index)):
            assert np.array_equal(made.cuts.entries, want.cuts.entries)
            assert np.array_equal(made.surprise.entries, want.surprise.entries)
            assert np.array_equal(made.events.bounds.entries, want.events.bounds.entries)
            assert np.array_equal(made.events.vectors.entries, want.events.vectors.entries)
    assert rebuilt < 6
