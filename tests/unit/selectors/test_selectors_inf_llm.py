"""InfLLM against the algorithm written out in float64, its worked examples, and where it is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    NO_EVIDENCE,
    Edit,
    Evidence,
    Guarantee,
    NeedsRebuild,
    Query,
    Scope,
    Selection,
    Shape,
)
from kvtier_core.selectors.families.inf_llm import InfLlm, SealedUnits
from kvtier_core.selectors.families.representatives import (
    VARIANTS,
    Influence,
    Pending,
    Rule,
    Run,
    Runs,
    check_recall,
    check_run,
)
from kvtier_core.selectors.growing import Growing
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector

FLAT = Shape(query_heads=1, kv_heads=1, head_dim=2, scale=1.0)


def family(
    unit: int = 4,
    count: int = 2,
    units: int = 3,
    shape: Shape = SMALL,
    sink: int = 2,
    recent: int = 3,
    **more: Any,
) -> InfLlm:
    declared = selector(
        "infLlm",
        {"unitTokens": unit, "representatives": count} | more,
        {"units": units},
        persistentRows={"sink": sink, "recent": recent},
    )
    return InfLlm.from_manifest(declared, shape, 16)


def queries_of(seed: int, rows: int, shape: Shape = SMALL) -> Evidence:
    random = np.random.default_rng(seed + 77)
    q = random.standard_normal((rows, shape.query_heads, shape.head_dim))
    return Evidence(queries=torch.from_numpy(q.astype(np.float32)))


def part(evidence: Evidence, low: int, high: int) -> Evidence:
    assert evidence.queries is not None
    return Evidence(queries=evidence.queries[low:high])


def published(
    fam: InfLlm, q: torch.Tensor, k: torch.Tensor, evidence: Evidence
) -> tuple[list[int], list[int]]:
    """Units and rows of the algorithm as written: float64, one dot product at a time."""
    assert evidence.queries is not None
    rows, wide, past = k.shape[0], k.double().numpy(), evidence.queries.double().numpy()
    ahead, recent = fam.rule.following, max(1, fam.persistent.recent)
    scores: dict[int, float] = {}
    first, number = fam.persistent.sink, 0
    while first + fam.unit + ahead <= rows and first + fam.unit <= rows - recent:
        total = 0.0
        for head in range(fam.shape.query_heads):
            keys = wide[:, head // fam.shape.group]
            weight = {}
            for m in range(first, first + fam.unit):
                if fam.rule.variant == "paper":
                    weight[m] = sum(past[m + j, head] @ keys[m] for j in range(1, ahead + 1)) / ahead
                else:
                    weight[m] = 0.0
                    for i in range(m + 1, m + ahead + 1):
                        seen = [
                            np.exp(fam.shape.scale * past[i, head] @ keys[x])
                            for x in range(max(0, i - ahead), i + 1)
                        ]
                        weight[m] += np.exp(fam.shape.scale * past[i, head] @ keys[m]) / sum(seen)
            for m in sorted(weight, key=lambda m: (-weight[m], m))[: fam.rule.count]:
                total += float(q[0, head].double().numpy() @ keys[m])
        scores[number] = total
        first, number = first + fam.unit, number + 1
    units = sorted(sorted(scores, key=lambda u: (-scores[u], u))[: fam.allowed])
    read = set(range(min(rows, fam.persistent.sink))) | set(range(first, rows))
    read |= set(range(max(0, rows - recent), rows))
    for unit in units:
        read |= set(range(fam.persistent.sink + unit * fam.unit, fam.persistent.sink + (unit + 1) * fam.unit))
    return units, sorted(read)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 5000),
    rows=st.integers(1, 50),
    unit=st.integers(1, 6),
    count=st.integers(1, 4),
    units=st.integers(1, 5),
    ahead=st.integers(1, 6),
    variant=st.sampled_from(VARIANTS),
)
def test_it_is_the_published_algorithm(
    seed: int, rows: int, unit: int, count: int, units: int, ahead: int, variant: str
) -> None:
    fam = family(unit, min(count, unit), units, influenceTokens=ahead, variant=variant)
    k, v = rows_of(seed, rows)
    q, evidence = query_of(seed + 1), queries_of(seed, rows)
    selection = fam.select(fam.build(SOURCE, k, v, evidence), Query(q, rows, SOURCE))
    want, read = published(fam, q, k, evidence)
    assert selection.units[0].tolist() == want
    assert selection.positions[0].tolist() == read
    assert fam.omits(rows) == (len(read) < rows)
    assert selection.receipt.got_rows == (len(want) * unit,)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda runs, keys, q: [keys[a:b].mean(0) for a, b in runs], id="mean-key"),
        pytest.param(lambda runs, keys, q: [keys[a:b].max(0) for a, b in runs], id="largest-channel"),
        pytest.param(
            lambda runs, keys, q: [q * float((keys[a:b] @ q).max()) for a, b in runs], id="best-row"
        ),
    ],
)
def test_another_score_would_read_other_rows(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must be able to fail: with this vector it does on some of these inputs."""
    differs = False
    for seed in range(4):
        fam = family(4, 2, 2)
        k, v = rows_of(seed, 60)
        q, evidence = query_of(seed), queries_of(seed, 60)
        index = fam.build(SOURCE, k, v, evidence)
        heads = [
            wrong(index.units.bounds.entries, k[:, h // SMALL.group].numpy(), q[0, h].numpy())
            for h in range(SMALL.query_heads)
        ]
        vectors = np.stack([np.stack(one) for one in heads], axis=1).astype(np.float32)
        monkeypatch.setattr(
            Runs,
            "scores",
            lambda self, q, vectors=vectors: np.einsum("uhd,mhd->u", vectors[: len(self)], q),
        )
        selection = fam.select(index, Query(q, 60, SOURCE))
        differs |= selection.units[0].tolist() != published(fam, q, k, evidence)[0]
    assert differs


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).unsqueeze(1)


def test_the_influence_of_the_specification() -> None:
    """VD.01: the mean logit of the two queries behind row 0."""
    keys, queries = flat([[2, 0], [0, 1], [1, 1]]), flat([[1, 0], [0, 1], [1, 1]])
    pending = Pending.none(FLAT).plus(keys.numpy(), queries.numpy())
    found = Rule(FLAT, 1, 2, "paper").influence(pending, 0, 1)
    assert found.values.tolist() == [[pytest.approx(1.0, abs=1e-12)]]
    assert found.queries == (1, 3)


def test_the_scores_of_the_specification_are_summed_over_queries_and_representatives() -> None:
    """VD.02."""
    runs = Runs.none(FLAT, 2)
    for number, keys in enumerate(([[1, 0], [0, 1]], [[-1, 0], [0.5, 0.5]])):
        pending = Pending.none(FLAT).plus(flat([*keys, [0, 0]]).numpy(), flat([[0, 0]] * 3).numpy())
        made = Rule(FLAT, 2, 1, "paper").run(pending, 0, 2)
        runs = runs.plus(replace(made, first=2 * number, last=2 * number + 2))
    scores = runs.scores(flat([[1, 0], [0.5, 1]]).numpy())
    assert scores.tolist() == pytest.approx([2.5, -0.25], abs=1e-12)


def worked() -> tuple[InfLlm, SealedUnits, Query]:
    """C8.01: units of rows 1-3, 4-6, 7-9 whose best rows score .95, .20 and -.80; local rows 10, 11."""
    keys = np.zeros((12, 1, 2), np.float32)
    for row, score in ((2, 0.95), (5, 0.20), (8, -0.80)):
        keys[row, 0] = (score, 3.0)
    fam = family(3, 1, 2, FLAT, sink=1, recent=2, influenceTokens=1)
    evidence = Evidence(queries=flat([[0, 1]] * 12))
    k = torch.from_numpy(keys)
    return fam, fam.build(SOURCE, k, k, evidence), Query(flat([[1, 0]]), 12, SOURCE)


def test_the_worked_example_of_the_specification() -> None:
    """C8.01 to C8.03: two units are read whole, not by what represents them."""
    fam, index, query = worked()
    selection = fam.select(index, query)
    assert index.units.rows.entries[:, 0, 0].tolist() == [2, 5, 8]
    assert selection.units[0].tolist() == [0, 1]
    assert selection.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11]
    assert selection.receipt.got_rows == (6,)
    assert selection.receipt.runner_up == (pytest.approx(-0.8),)


def test_what_represents_is_small_beside_what_is_read() -> None:
    """C8.04, per KV head at the printed sizes, two bytes a channel."""
    shape = Shape(1, 1, 128, 1.0)
    fam = family(128, 4, 16, shape)
    assert 256 * fam.rule.count * shape.head_dim * 2 == 262144
    assert fam.allowed * fam.unit * shape.head_dim * 4 == 1048576


def test_a_row_that_no_later_query_looked_at_represents_nothing() -> None:
    """The adversary of the anchor: the needle was never attended to, so its unit is not recalled."""
    shape = Shape(1, 1, 4, 1.0)
    fam = family(4, 1, 1, shape, sink=0, recent=1)
    keys = torch.zeros(13, 1, 4)
    keys[1, 0] = torch.tensor([9.0, 0, 0, 0])
    keys[0, 0] = torch.tensor([0.0, 1, 0, 0])
    keys[5, 0] = torch.tensor([1.0, 1, 0, 0])
    evidence = Evidence(queries=torch.tensor([[[-0.1, 1.0, 0, 0]]]).expand(13, 1, 4))
    q = torch.tensor([[[1.0, 0, 0, 0]]])
    selection = fam.select(fam.build(SOURCE, keys, keys, evidence), Query(q, 13, SOURCE))
    weights = np.exp(logits_of(q, keys, shape)[0])
    assert selection.units[0].tolist() == [1]
    assert weights[selection.positions[0]].sum() / weights.sum() < 0.01


def test_one_loud_head_chooses_for_all() -> None:
    shape = Shape(2, 1, 2, 1.0)
    fam = family(2, 1, 1, shape, sink=0, recent=1)
    keys = flat([[1, 0], [1, 0], [0, 9], [0, 9], [0, 0], [0, 0]])
    evidence = Evidence(queries=torch.ones(6, 2, 2))
    q = torch.tensor([[[50.0, 0.0], [0.0, 5.0]]])
    selection = fam.select(fam.build(SOURCE, keys, keys, evidence), Query(q, 6, SOURCE))
    assert selection.units[0].tolist() == [0]
    weights = np.exp(logits_of(q, keys, shape)[1])
    assert weights[selection.positions[0]].sum() / weights.sum() < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_appending_is_building_and_a_cut_ends_where_it_must(variant: str) -> None:
    fam = family(4, 2, 3, variant=variant)
    k, v = rows_of(4, 80)
    evidence = queries_of(4, 80)
    index = fam.build(SOURCE, k[:1], v[:1], part(evidence, 0, 1))
    handles = []
    for row in range(1, 80):
        handles.append(index)
        index = fam.append(index, k[row : row + 1], v[row : row + 1], part(evidence, row, row + 1))
    handles.append(index)
    query = query_of(1)
    for rows in (1, 2, 5, 9, 10, 40, 80):
        whole = fam.build(SOURCE, k[:rows], v[:rows], part(evidence, 0, rows))
        assert handles[rows - 1].facts.covered == rows
        one, other = (fam.select(i, Query(query, rows, SOURCE)) for i in (handles[rows - 1], whole))
        assert one.positions[0].tolist() == other.positions[0].tolist()
    for first in (0, 1, 30, 78):
        cut = fam.edit(index, Edit(first, 0, truncated=True))
        if isinstance(cut, NeedsRebuild):
            assert variant == "referenceCode" and first == 30
            continue
        covered = cut.facts.covered
        assert covered <= first
        again = fam.append(cut, k[covered:], v[covered:], part(evidence, covered, 80))
        assert again.facts.covered == 80
        for a, b in zip(
            (again.units.bounds, again.units.rows, again.units.vectors),
            (index.units.bounds, index.units.rows, index.units.vectors),
            strict=True,
        ):
            assert np.array_equal(a.entries, b.entries)


def test_moved_rows_are_another_position_epoch() -> None:
    fam, index, query = worked()
    moved = fam.edit(index, Edit(12, 1, truncated=False))
    assert not isinstance(moved, NeedsRebuild)
    with pytest.raises(CoreError) as refused:
        fam.select(moved, query)
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
    assert fam.select(moved, replace(query, source=replace(SOURCE, position_epoch=1))).units[0].size == 2


@pytest.mark.parametrize(
    ("evidence", "reason", "words"),
    [
        (NO_EVIDENCE, Reason.UNSUPPORTED, "infLlm needs prefillQueries, which this engine does not give"),
        (queries_of(1, 9), Reason.COVERAGE_GAP, "the queries are not those of 10 rows"),
    ],
    ids=["none", "of-other-rows"],
)
def test_without_the_queries_of_its_rows_there_is_no_index(
    evidence: Evidence, reason: Reason, words: str
) -> None:
    k, v = rows_of(2, 10)
    with pytest.raises(CoreError) as refused:
        family().build(SOURCE, k, v, evidence)
    assert refused.value.reason is reason
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("k", "v"),
    [
        pytest.param((10, 32), (10, 2, 16), id="N8b-1"),
        pytest.param((10, 2, 16), (9, 2, 16), id="N8b-2"),
        pytest.param((10, 2, 8), (10, 2, 8), id="N8b-3"),
    ],
)
def test_rows_of_another_geometry_are_refused(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    with pytest.raises(CoreError) as refused:
        family().build(SOURCE, torch.zeros(k), torch.zeros(v), queries_of(1, 10))
    assert refused.value.reason is Reason.PAYLOAD_GEOMETRY


def _bounds(change: Any) -> Any:
    def spoil(index: SealedUnits) -> SealedUnits:
        bounds = index.units.bounds.entries.copy()
        change(bounds)
        return replace(index, units=replace(index.units, bounds=Growing.of(bounds)))

    return spoil


def _overlap(bounds: np.ndarray) -> None:
    bounds[1, 0] -= 1


def _gap(bounds: np.ndarray) -> None:
    bounds[1, 0] += 1


def _longer(bounds: np.ndarray) -> None:
    bounds[-1, 1] = 40


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(_bounds(_overlap), Reason.UNIT_PARTITION, id="N8b-4"),
        pytest.param(_bounds(_gap), Reason.UNIT_PARTITION, id="N8b-5"),
        pytest.param(_bounds(_longer), Reason.UNIT_PARTITION, id="N8b-6"),
        pytest.param(
            lambda index: replace(index, units=replace(index.units, rows=index.units.rows.first(1))),
            Reason.SELECTOR_STATE_MIXED,
            id="representatives",
        ),
        pytest.param(
            lambda index: replace(index, pending=index.pending.until(10)),
            Reason.SELECTOR_STATE_MIXED,
            id="pending",
        ),
        pytest.param(
            lambda index: replace(index, facts=replace(index.facts, selector_digest="sha256:00")),
            Reason.SELECTOR_STALE,
            id="N8a-10",
        ),
        pytest.param(
            lambda index: replace(index, facts=replace(index.facts, covered=9)),
            Reason.INDEX_FRONTIER_LAG,
            id="lag",
        ),
        pytest.param(
            lambda index: replace(index, facts=replace(index.facts, covered=13)),
            Reason.INDEX_STALE,
            id="N8a-9",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(spoil: Any, reason: Reason) -> None:
    fam, index, query = worked()
    with pytest.raises(CoreError) as refused:
        fam.select(spoil(index), query)
    assert refused.value.reason is reason


GOOD = Influence(3, 7, np.array([[1.0, 4.0, 2.0, 3.0]]), (4, 9))


@pytest.mark.parametrize(
    ("rows", "influence", "reason"),
    [
        pytest.param([4, 6, 5, 3, 3], GOOD, Reason.REP_BUDGET, id="N8b-7"),
        pytest.param([-1, -1], GOOD, Reason.REP_BUDGET, id="N8b-8"),
        pytest.param([4, 7], GOOD, Reason.REP_MEMBERSHIP, id="N8b-9"),
        pytest.param([4, 4], GOOD, Reason.REP_MEMBERSHIP, id="twice"),
        pytest.param([4, 3], GOOD, Reason.REP_MEMBERSHIP, id="N8b-10"),
        pytest.param([4, 6], replace(GOOD, queries=(3, 9)), Reason.REP_MEMBERSHIP, id="N8b-11"),
        pytest.param([4, 6], replace(GOOD, first=2), Reason.REP_MEMBERSHIP, id="of-another-run"),
    ],
)
def test_what_may_not_represent_a_run(rows: list[int], influence: Influence, reason: Reason) -> None:
    run = Run(3, 7, np.array([[4, 6]]), np.zeros((1, 2), np.float32))
    check_run(run, GOOD)
    with pytest.raises(CoreError) as refused:
        check_run(replace(run, rows=np.array([rows])), influence)
    assert refused.value.reason is reason


def test_influence_without_the_queries_behind_is_refused() -> None:
    pending = Pending.none(FLAT).plus(np.zeros((5, 1, 2), np.float32), np.zeros((5, 1, 2), np.float32))
    with pytest.raises(CoreError) as refused:
        Rule(FLAT, 1, 3, "paper").influence(pending, 0, 3)
    assert refused.value.reason is Reason.REP_MEMBERSHIP


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda one: replace(one, units=(np.array([0, 3]),)), Reason.UNIT_BUDGET, id="N8b-12"),
        pytest.param(
            lambda one: replace(one, units=(np.array([1, 1]),)), Reason.DUPLICATE_POSITION, id="twice"
        ),
        pytest.param(
            lambda one: replace(one, positions=(np.array([0, 2, 5, 10, 11]),)),
            Reason.CANDIDATE_USED_AS_PAYLOAD,
            id="N8a-17",
        ),
        pytest.param(
            lambda one: replace(one, receipt=replace(one.receipt, guarantee=Guarantee.EXACT)),
            Reason.UNDECLARED_APPROXIMATION,
            id="N8a-25",
        ),
        pytest.param(lambda one: replace(one, scope=Scope.KV_HEAD), Reason.HEAD_MAPPING_MISMATCH, id="N8a-6"),
    ],
)
def test_a_recall_that_is_none_is_refused(spoil: Any, reason: Reason) -> None:
    fam, index, query = worked()
    selection = fam.select(index, query)
    persistent = np.array([0, 10, 11])
    check_recall(selection, index.units, persistent)
    with pytest.raises(CoreError) as refused:
        check_recall(spoil(selection), index.units, persistent)
    assert refused.value.reason is reason


@pytest.mark.parametrize("row", [1, 6], ids=["N8b-13-initial", "N8b-14-local"])
def test_a_persistent_row_is_in_no_distant_unit(row: int) -> None:
    fam, index, query = worked()
    selection: Selection = fam.select(index, query)
    with pytest.raises(CoreError) as refused:
        check_recall(selection, index.units, np.array([0, row, 10, 11]))
    assert refused.value.reason is Reason.ROLE_OVERLAP


@pytest.mark.parametrize(
    ("parameters", "budget", "reason", "words"),
    [
        ({"unitTokens": 4}, {"units": 1}, Reason.MANIFEST_INVALID, "infLlm.representatives must be given"),
        (
            {"unitTokens": 4, "representatives": 5},
            {"units": 1},
            Reason.REP_BUDGET,
            "representatives 5 of infLlm.unitTokens 4",
        ),
        (
            {"unitTokens": 4, "representatives": 0},
            {"units": 1},
            Reason.MANIFEST_INVALID,
            "from 1 to 4096, not 0",
        ),
        (
            {"unitTokens": 4, "representatives": 1},
            {"tokens": 3},
            Reason.MANIFEST_INVALID,
            "pays no unit of 4 rows",
        ),
        (
            {"unitTokens": 4, "representatives": 1, "chunk": 2},
            {"units": 1},
            Reason.MANIFEST_INVALID,
            "no parameters chunk",
        ),
    ],
    ids=["absent", "more-than-rows", "zero", "no-unit", "unknown"],
)
def test_parameters_are_refused_by_name(
    parameters: dict[str, Any], budget: dict[str, Any], reason: Reason, words: str
) -> None:
    with pytest.raises(CoreError) as refused:
        InfLlm.from_manifest(selector("infLlm", parameters, budget), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message
