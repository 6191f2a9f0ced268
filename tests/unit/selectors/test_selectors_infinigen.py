"""InfiniGen against the algorithm written out in float64, both of its scripts, and where it is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    NO_EVIDENCE,
    Edit,
    Evidence,
    LayerWeights,
    NeedsRebuild,
    Query,
    Shape,
)
from kvtier_core.selectors.families.infinigen import Infinigen, PartialKeys, Skew, check_receipt
from kvtier_core.selectors.growing import GrowingColumns
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, rows_of, selector

WIDTH = 24


def family(
    tokens: int = 6,
    shape: Shape = SMALL,
    sink: int = 2,
    recent: int = 3,
    policy: str = "truncate",
    **more: Any,
) -> Infinigen:
    declared = selector(
        "infinigen",
        {"partialDimensions": 5, "alpha": "3", "trainTokens": 4} | more,
        {"tokens": tokens, "capPolicy": policy},
        persistentRows={"sink": sink, "recent": recent},
    )
    return Infinigen.from_manifest(declared, shape, 16)


@dataclass(frozen=True)
class Case:
    k: torch.Tensor
    v: torch.Tensor
    evidence: Evidence
    hidden: torch.Tensor

    def query(self, rows: int | None = None, **more: Any) -> Query:
        q = torch.full((1, SMALL.query_heads, SMALL.head_dim), torch.nan)
        return Query(q, len(self.k) if rows is None else rows, SOURCE, hidden=self.hidden, **more)

    def part(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, Evidence]:
        assert self.evidence.queries is not None
        some = replace(self.evidence, queries=self.evidence.queries[first:end])
        return self.k[first:end], self.v[first:end], some


def case(seed: int, rows: int, *, rope: str = "halves", bias: bool = True, spread: float = 1.0) -> Case:
    random = np.random.default_rng(seed)
    heads, d = SMALL.query_heads, SMALL.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(size).astype(np.float32))

    k, v = rows_of(seed, rows)
    weights = LayerWeights(
        query=normal(WIDTH, heads * d) * spread / math.sqrt(WIDTH),
        bias=normal(heads * d) * 0.1 if bias else None,
        norm_weight=1 + 0.1 * normal(WIDTH),
        norm_eps=1e-5,
        inv_freq=None if rope == "none" else 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8),
        interleaved=rope == "interleaved",
    )
    # Queries of a prefill lie near few directions, or there would be nothing to skew.
    queries = (normal(rows, heads, 3) @ normal(3, d)) + 0.2 * normal(rows, heads, d)
    return Case(
        k, v, Evidence(queries=queries, hidden=normal(rows, WIDTH), weights=weights), normal(1, WIDTH)
    )


def rehearsed(weights: LayerWeights, hidden: torch.Tensor, position: int) -> np.ndarray:
    """The query [Hq, d] in float64: norm, projection, rotation as complex numbers."""
    h = hidden[0].double().numpy()
    h = h / math.sqrt(float((h**2).mean()) + weights.norm_eps) * weights.norm_weight.double().numpy()
    q = h @ weights.query.double().numpy()
    if weights.bias is not None:
        q = q + weights.bias.double().numpy()
    q = q.reshape(SMALL.query_heads, SMALL.head_dim)
    if weights.inv_freq is None:
        return q
    n = len(weights.inv_freq)
    for i, frequency in enumerate(weights.inv_freq.tolist()):
        a, b = (2 * i, 2 * i + 1) if weights.interleaved else (i, i + n)
        turned = (q[:, a] + 1j * q[:, b]) * np.exp(1j * frequency * position)
        q[:, a], q[:, b] = turned.real, turned.imag
    return q


@dataclass
class Published:
    rows: list[list[int]]
    counts: list[int]
    omitted: list[float]
    margin: float


def published(fam: Infinigen, c: Case, position: int | None = None) -> Published:
    """One thing at a time, in float64. margin: how near any decision was."""
    assert c.evidence.queries is not None and c.evidence.weights is not None
    rows, shape = len(c.k), fam.shape
    q = rehearsed(c.evidence.weights, c.hidden, rows - 1 if position is None else position)
    approx = np.empty((shape.query_heads, rows))
    for head in range(shape.kv_heads):
        mine = range(head * shape.group, (head + 1) * shape.group)
        asked = np.concatenate([c.evidence.queries[:, h].double().numpy() for h in mine])
        keys = c.k[:, head].double().numpy()
        basis = np.linalg.svd(asked)[2].T if fam.skewed else np.eye(shape.head_dim)
        weight = np.abs(asked @ basis).sum(0)
        if fam.facts.variant == "paper":
            weight += np.abs(keys @ basis).sum(0)
        columns = sorted(range(shape.head_dim), key=lambda j: -weight[j])[: fam.channels]
        for h in mine:
            approx[h] = shape.scale * (keys @ basis)[:, columns] @ (q[h] @ basis)[columns]
    always = {i for i in range(rows) if i < fam.persistent.sink or i >= rows - max(1, fam.persistent.recent)}
    middle = [i for i in range(rows) if i not in always]
    margin = math.inf
    counts, worth = [], []
    for head in range(shape.kv_heads):
        best, passed = dict.fromkeys(middle, -math.inf), set()
        for h in range(head * shape.group, (head + 1) * shape.group):
            top = approx[0 if fam.facts.variant == "accuracyScript" else h].max()
            for i in middle:
                behind = approx[h, i] - top
                best[i] = max(best[i], behind)
                margin = min(margin, abs(behind + fam.alpha))
                if behind > -fam.alpha:
                    passed.add(i)
        counts.append(len(passed))
        worth.append(best)
    count = min(int(sum(counts) / len(counts)), fam.cap(rows), len(middle))
    chosen, omitted = [], []
    for head in range(shape.kv_heads):
        ranked = sorted(middle, key=lambda i: (-worth[head][i], i))
        if 0 < count < len(ranked):
            margin = min(margin, worth[head][ranked[count - 1]] - worth[head][ranked[count]])
        read = sorted(always | set(ranked[:count]))
        chosen.append(read)
        for h in range(head * shape.group, (head + 1) * shape.group):
            share = np.exp(approx[h] - approx[h].max())
            omitted.append(1 - share[read].sum() / share.sum())
    return Published(chosen, counts, omitted, margin)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 5000),
    rows=st.integers(6, 60),
    tokens=st.integers(1, 30),
    channels=st.integers(1, 16),
    alpha=st.sampled_from(["0.5", "2", "5"]),
    variant=st.sampled_from(["paper", "accuracyScript", "speedScript"]),
    rope=st.sampled_from(["none", "halves", "interleaved"]),
    skew=st.booleans(),
)
def test_it_is_the_published_algorithm(
    seed: int, rows: int, tokens: int, channels: int, alpha: str, variant: str, rope: str, skew: bool
) -> None:
    fam = family(tokens, partialDimensions=channels, alpha=alpha, variant=variant, skew=skew)
    c = case(seed, rows, rope=rope, bias=seed % 2 == 0)
    want = published(fam, c)
    assume(want.margin > 1e-4)
    selection = fam.select(fam.build(SOURCE, c.k, c.v, c.evidence), c.query())
    assert [positions.tolist() for positions in selection.positions] == want.rows
    assert selection.receipt.detail["counts"] == ",".join(map(str, want.counts))
    assert selection.receipt.omitted_mass == pytest.approx(want.omitted, abs=1e-5)
    assert fam.omits(rows) or all(len(positions) == rows for positions in want.rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"variant": "paper"}, {"variant": "accuracyScript"}),
        ({"variant": "paper"}, {"variant": "speedScript"}),
        ({"variant": "accuracyScript"}, {"variant": "speedScript"}),
        ({}, {"skew": False}),
        ({}, {"partialDimensions": 16}),
        ({}, {"alpha": "1"}),
    ],
    ids=["own-or-first-head", "keys-too", "scripts", "no-skew", "all-channels", "alpha"],
)
def test_another_selector_would_read_other_rows(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The comparison above must be able to fail: it does for what another variant or score reads."""
    differs = False
    for seed in range(6):
        c = case(seed, 50)
        fam = family(20, **one)
        selection = fam.select(fam.build(SOURCE, c.k, c.v, c.evidence), c.query())
        differs |= [rows.tolist() for rows in selection.positions] != published(family(20, **other), c).rows
    assert differs


def test_the_query_of_the_step_itself_plays_no_part() -> None:
    """It is not there yet when the layer is rehearsed: every other family's score would be of NaN."""
    fam, c = family(), case(1, 40)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    blind = fam.select(index, c.query())
    told = fam.select(index, replace(c.query(), q=torch.ones(1, 6, 16)))
    assert [rows.tolist() for rows in blind.positions] == [rows.tolist() for rows in told.positions]


def test_the_position_turns_the_rehearsed_query() -> None:
    fam, c = family(20), case(3, 50)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    selection = fam.select(index, c.query(position=7))
    assert [rows.tolist() for rows in selection.positions] == published(fam, c, 7).rows
    assert published(fam, c, 7).rows != published(fam, c).rows


PAIR = Shape(1, 1, 2, 1.0)
ROOT = math.sqrt(0.5)


def tiny(
    fam: Infinigen, shape: Shape, k: list[list[float]], asked: list[list[float]], decode: list[list[float]]
) -> tuple[PartialKeys, Query]:
    """An index of keys (one KV head a query head) whose prefill asked `asked`, and a step asking `decode`:
    weights that give just that from a hidden state of ones."""
    heads, d = shape.query_heads, shape.head_dim
    keys = torch.tensor(k).unsqueeze(1).expand(-1, heads, -1).contiguous()
    queries = torch.zeros(len(k), heads, d)
    queries[: len(asked)] = torch.tensor(asked).unsqueeze(1)
    weights = LayerWeights(torch.tensor(decode).reshape(1, heads * d), None, torch.ones(1), 0.0)
    evidence = Evidence(queries=queries, hidden=torch.ones(len(k), 1), weights=weights)
    index = fam.build(SOURCE, keys, keys, evidence)
    return index, Query(torch.zeros(1, heads, d), len(k), SOURCE, hidden=torch.ones(1, 1))


def example(alpha: str = "0.7", tokens: int = 4) -> tuple[Infinigen, PartialKeys, Query]:
    fam = family(tokens, PAIR, sink=0, recent=1, partialDimensions=1, alpha=alpha)
    keys = [[1, 1], [1.6, -1.0], [0.9, 0.6], [1.8, -0.4], [0, 0]]
    index, query = tiny(fam, PAIR, keys, [[2.0, 1], [1, 2]], [[1.5, 1.2]])
    return fam, index, query


def test_the_worked_example_misses_a_row_of_the_exact_best_two() -> None:
    """C6.23 to C6.29; K20: an orthogonal rotation is exact, a part of it is not."""
    fam, index, query = example()
    assert index.skew is not None
    basis = index.skew.basis[0].double()
    assert basis.abs() == pytest.approx(torch.full((2, 2), ROOT).double())
    asked = torch.tensor([[2.0, 1], [1, 2]]).double()
    assert (asked @ basis).norm(dim=0).tolist() == pytest.approx([3, 1])
    keys = torch.tensor([[1, 1], [1.6, -1.0], [0.9, 0.6], [1.8, -0.4]]).double()
    evidence = ((asked @ basis).abs().sum(0) + (keys @ basis).abs().sum(0)) * math.sqrt(2)
    assert evidence.tolist() == pytest.approx([11.5, 7.1], abs=1e-5)
    assert index.skew.columns.tolist() == [[0]]
    q = fam.rehearsed(index, query)
    assert q.flatten().tolist() == pytest.approx([1.5, 1.2])
    partial = (index.skew.partial(q) @ index.keys.tensor)[0, 0, :4].double()
    assert partial.tolist() == pytest.approx([2.7, 0.81, 2.025, 1.89], abs=1e-5)
    full = keys @ q.flatten().double()
    assert full.tolist() == pytest.approx([2.7, 1.2, 2.07, 2.22], abs=1e-6)
    rotated = (keys @ basis) @ (q.flatten().double() @ basis)
    assert rotated.tolist() == pytest.approx(full.tolist(), abs=1e-6)
    bound = (q.flatten().double() @ basis)[1].abs() * (keys @ basis)[:, 1].abs()
    assert ((full - partial).abs() <= bound + 1e-5).all()
    assert (float((full - partial)[3].abs()), float(bound[3])) == pytest.approx((0.33, 0.33), abs=1e-5)
    selection = fam.select(index, query)
    assert selection.units[0].tolist() == [0, 2]
    assert sorted(full.argsort(descending=True)[:2].tolist()) == [0, 3]
    one, index, query = example(tokens=1)
    selection = one.select(index, query)
    assert selection.units[0].tolist() == [0]
    assert selection.receipt.uncapped == (2,)
    assert selection.receipt.dropped_by_cap == (1,)


def test_channels_frozen_at_prefill_miss_a_key_that_decode_asks_for() -> None:
    """The anchor's adversary: prompts ask (1, 0), the step asks (0.1, 1), the key is (0, 5)."""
    fam = family(
        1, PAIR, sink=0, recent=1, partialDimensions=1, alpha="5", variant="speedScript", trainTokens=1
    )
    keys = [[1, 0], [0, 5.0], [1.1, 0], [0, 0]]
    index, query = tiny(fam, PAIR, keys, [[1.0, 0], [1, 0], [1, 0], [1, 0]], [[0.1, 1.0]])
    selection = fam.select(index, query)
    weights = np.exp(np.array(keys) @ [0.1, 1.0])
    assert 1 not in selection.positions[0]
    assert weights[selection.positions[0]].sum() / weights.sum() < 0.05


def test_a_flat_head_gets_the_count_that_peaked_ones_need() -> None:
    """The anchor's adversary: 64 rows alike for one head; the others want one, so the mean is few."""
    shape = Shape(8, 8, 2, 1.0)
    fam = family(64, shape, sink=0, recent=1, partialDimensions=2, alpha="4", trainTokens=1)
    keys = [[0.0, 0.0]] * 63 + [[20.0, 0.0], [0.0, 0.0]]
    index, query = tiny(fam, shape, keys, [[1.0, 0.5]], [[0.0, 0.0]] + [[1.0, 0.0]] * 7)
    receipt = fam.select(index, query).receipt
    assert receipt.detail["counts"] == "64,1,1,1,1,1,1,1"
    assert receipt.uncapped == (8,) * 8
    assert receipt.omitted_mass is not None
    assert receipt.omitted_mass[0] == pytest.approx(56 / 65)
    assert max(receipt.omitted_mass[1:]) < 1e-6


def test_the_first_heads_maximum_starves_or_floods_the_others() -> None:
    """What the accuracy script selects is not what the speed script does."""
    shape = Shape(2, 2, 2, 1.0)
    keys = [[float(i), 0.0] for i in range(10)] + [[0.0, 0.0]]
    counts = {}
    for variant in ("accuracyScript", "speedScript"):
        fam = family(
            9, shape, sink=0, recent=1, partialDimensions=2, alpha="2.5", variant=variant, trainTokens=1
        )
        index, query = tiny(fam, shape, keys, [[1.0, 0.5]], [[3.0, 0.0], [1.0, 0.0]])
        counts[variant] = fam.select(index, query).receipt.detail["counts"]
    assert counts == {"accuracyScript": "1,0", "speedScript": "1,3"}


def test_equal_counts_are_the_floor_of_the_mean_and_the_cap_is_a_share_of_the_context() -> None:
    """C6.30: counts 2, 4, 3 give 3; a fifth of ten rows is 2."""
    shape = Shape(3, 3, 2, 1.0)
    keys = [[-float(i), 0.0] for i in range(9)] + [[-100.0, 0.0]]
    steps = [[0.6, 0.0], [0.3, 0.0], [0.4, 0.0]]
    fam = family(9, shape, sink=0, recent=1, partialDimensions=2, alpha="1", trainTokens=1, capShare="0.2")
    index, query = tiny(fam, shape, keys, [[1.0, 0.5]], steps)
    receipt = fam.select(index, query).receipt
    assert receipt.detail["counts"] == "2,4,3"
    assert (receipt.detail["equalised"], receipt.detail["cap"]) == ("3", "2")
    assert receipt.got_rows == (2, 2, 2)
    assert receipt.dropped_by_cap == (1, 1, 1)


@pytest.mark.parametrize(
    ("policy", "outcome"), [("truncate", 3), ("dense", 45), ("error", Reason.CAP_VIOLATION)], ids=str
)
def test_more_rows_than_the_cap_end_by_its_policy(policy: str, outcome: object) -> None:
    fam, c = family(3, policy=policy, alpha="100"), case(5, 50)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    if isinstance(outcome, Reason):
        with pytest.raises(CoreError) as refused:
            fam.select(index, c.query())
        assert refused.value.reason is outcome
        return
    receipt = fam.select(index, c.query()).receipt
    assert receipt.got_rows == (outcome, outcome)
    assert receipt.uncapped == (45, 45)


def test_alpha_bounds_a_rows_weight_and_not_what_rows_weigh_together() -> None:
    """K20, C9.04: 200 rows just below alpha 5 hold more than half of the mass."""
    fam = family(9, PAIR, sink=0, recent=1, partialDimensions=2, alpha="5", trainTokens=1)
    keys = [[5.0, 0.0]] + [[-0.0001, 0.0]] * 200 + [[-90.0, 0.0]]
    index, query = tiny(fam, PAIR, keys, [[1.0, 0.5]], [[1.0, 0.0]])
    receipt = fam.select(index, query).receipt
    assert receipt.got_rows == (1,)
    assert receipt.omitted_mass is not None
    assert receipt.omitted_mass[0] == pytest.approx(0.574, abs=1e-3)


def test_a_row_of_which_nothing_is_known_is_read() -> None:
    fam, c = family(), case(2, 50)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    columns = index.keys.entries.copy()
    columns[0, 0, 20] = np.nan
    spoiled = replace(index, keys=GrowingColumns(columns.shape[:2], np.float32).plus(columns))
    selection = fam.select(spoiled, c.query())
    assert 20 in selection.units[0]
    assert np.isfinite(selection.receipt.omitted_mass or ()).all()


def test_training_waits_for_as_many_rows_as_declared_and_reads_all_before() -> None:
    fam, c = family(1, trainTokens=20, alpha="1"), case(6, 40)
    index = fam.build(SOURCE, *c.part(0, 0))
    for first in range(19):
        index = fam.append(index, *c.part(first, first + 1))
    assert index.skew is None
    assert not fam.omits(19) and fam.omits(20)
    early = fam.select(index, c.query(19))
    assert [rows.tolist() for rows in early.positions] == [list(range(19))] * 2
    assert early.receipt.detail["skew"] == "absent"
    index = fam.append(index, *c.part(19, 30))
    assert index.skew is not None and index.skew.rows == 30
    whole = fam.build(SOURCE, *c.part(0, 30))
    assert index.skew.digest == whole.made_by == index.made_by
    assert np.array_equal(index.keys.entries, whole.keys.entries)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 30), max_size=4))
def test_appending_in_parts_is_appending_at_once_and_old_handles_stay(cuts: list[int]) -> None:
    fam, c = family(), case(7, 60)
    first = fam.build(SOURCE, *c.part(0, 30))
    before = first.keys.entries.copy()
    index, at = first, 30
    for count in [*cuts, 30]:
        end = min(60, at + count)
        index, at = fam.append(index, c.k[at:end], c.v[at:end], NO_EVIDENCE), end
    whole = fam.append(first, c.k[30:], c.v[30:], NO_EVIDENCE)
    assert np.allclose(index.keys.entries, whole.keys.entries, atol=1e-5)
    assert np.array_equal(first.keys.entries, before)
    assert first.facts.covered == 30
    assert index.made_by == first.made_by


def test_a_cut_keeps_channels_and_too_deep_a_cut_asks_for_a_build() -> None:
    fam, c = family(), case(8, 50)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    cut = fam.edit(index, Edit(first=20, epoch=1, truncated=True))
    assert isinstance(cut, PartialKeys) and cut.facts.covered == 20
    assert np.array_equal(cut.keys.entries, index.keys.entries[..., :20])
    with pytest.raises(CoreError) as refused:
        fam.select(cut, c.query(21))
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
    moved = replace(c.query(21), source=replace(SOURCE, position_epoch=1))
    assert fam.select(cut, moved).receipt.unindexed == 1
    deep = fam.edit(index, Edit(first=3, epoch=1, truncated=False))
    assert isinstance(deep, NeedsRebuild)
    assert "made of 50 rows, 3 are left and 4 are needed" in deep.why


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ({"weights": None}, "infinigen needs weights"),
        ({"hidden": None}, "infinigen needs previousHiddenState"),
        ({"queries": None}, "infinigen needs prefillQueries"),
    ],
    ids=["weights", "hidden", "queries"],
)
def test_an_engine_that_cannot_give_what_is_needed_is_refused(lacking: dict[str, Any], words: str) -> None:
    fam, c = family(), case(1, 20)
    with pytest.raises(CoreError) as refused:
        fam.build(SOURCE, c.k, c.v, replace(c.evidence, **lacking))
    assert refused.value.reason is Reason.UNSUPPORTED
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"hidden": None}, Reason.UNSUPPORTED, id="no-hidden"),
        pytest.param({"hidden_layer": 1}, Reason.LAYER_DISTANCE, id="from-the-layer-itself"),
        pytest.param({"hidden": torch.zeros(1, 3)}, Reason.SELECTOR_GEOMETRY, id="other-width"),
        pytest.param({"source": replace(SOURCE, layer=2)}, Reason.LAYER_DISTANCE, id="layer"),
        pytest.param({"source": replace(SOURCE, digest=b"o" * 32)}, Reason.IDENTITY_MISMATCH, id="source"),
        pytest.param({"rows": 29}, Reason.INDEX_STALE, id="rows-gone"),
        pytest.param({"rows": 34}, Reason.INDEX_FRONTIER_LAG, id="lag"),
    ],
)
def test_queries_that_an_index_cannot_answer_are_refused(change: dict[str, Any], reason: Reason) -> None:
    fam, c = family(), case(1, 30)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    assert fam.select(index, c.query(hidden_layer=0)).units
    with pytest.raises(CoreError) as refused:
        fam.select(index, replace(c.query(), **change))
    assert refused.value.reason is reason


def other_skew(index: PartialKeys, **change: Any) -> PartialKeys:
    assert index.skew is not None
    return replace(index, skew=replace(index.skew, **change))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(
            lambda i: other_skew(i, basis=i.skew.basis * 1.01), Reason.SKEW_NOT_ORTHOGONAL, id="orthogonal"
        ),
        pytest.param(
            lambda i: other_skew(i, columns=i.skew.columns + 16), Reason.SELECTOR_GEOMETRY, id="out-of-range"
        ),
        pytest.param(
            lambda i: other_skew(i, columns=(i.skew.columns + 1) % 16),
            Reason.SELECTOR_STATE_MIXED,
            id="other-d",
        ),
        pytest.param(
            lambda i: other_skew(i, basis=torch.eye(16).repeat(2, 1, 1)),
            Reason.SELECTOR_STATE_MIXED,
            id="unrotated-queries",
        ),
        pytest.param(
            lambda i: other_skew(i, columns=i.skew.columns[:, 1:]), Reason.SELECTOR_GEOMETRY, id="fewer"
        ),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, parts=(("skew", "old"),))),
            Reason.SELECTOR_STALE,
            id="generation",
        ),
        pytest.param(lambda i: replace(i, keys=i.keys.first(9)), Reason.COVERAGE_GAP, id="short"),
        pytest.param(lambda i: replace(i, skew=None), Reason.PARTIAL_INDEX, id="no-skew"),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, selector_digest="sha256:00")),
            Reason.SELECTOR_STALE,
            id="other-parameters",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(spoil: Any, reason: Reason) -> None:
    fam, c = family(), case(1, 30)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    with pytest.raises(CoreError) as refused:
        fam.select(spoil(index), c.query())
    assert refused.value.reason is reason


def test_builds_of_what_is_not_there_are_refused() -> None:
    fam, c = family(), case(1, 20)
    with pytest.raises(CoreError) as first:
        fam.build(replace(SOURCE, layer=0), c.k, c.v, c.evidence)
    assert first.value.reason is Reason.LAYER_DISTANCE
    assert 0 in fam.dense_layers
    with pytest.raises(CoreError) as half:
        fam.build(SOURCE, c.k, c.v[:19], c.evidence)
    assert half.value.reason is Reason.ROW_INCOMPLETE
    with pytest.raises(CoreError) as few:
        fam.build(SOURCE, c.k[:9], c.v[:9], c.evidence)
    assert few.value.reason is Reason.COVERAGE_GAP
    assert c.evidence.weights is not None
    narrow = replace(c.evidence.weights, query=c.evidence.weights.query[:, :-16])
    with pytest.raises(CoreError) as shape:
        fam.build(SOURCE, c.k, c.v, replace(c.evidence, weights=narrow))
    assert shape.value.reason is Reason.SELECTOR_GEOMETRY


def test_a_receipt_states_count_threshold_and_channels_or_is_refused() -> None:
    fam, c = family(), case(1, 30)
    receipt = fam.select(fam.build(SOURCE, c.k, c.v, c.evidence), c.query()).receipt
    check_receipt(receipt)
    for name in ("equalised", "alpha", "columns"):
        with pytest.raises(CoreError) as refused:
            check_receipt(replace(receipt, detail={k: v for k, v in receipt.detail.items() if k != name}))
        assert refused.value.reason is Reason.RECEIPT_INCOMPLETE
        assert name in refused.value.message


def test_a_rotation_changes_no_score_and_a_part_of_it_is_bounded() -> None:
    c = case(4, 40)
    fam = family(partialDimensions=16)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    assert isinstance(index.skew, Skew)
    q = fam.rehearsed(index, c.query())
    whole = (index.skew.partial(q) @ index.keys.tensor).reshape(6, -1).double().numpy() * SMALL.scale
    assert whole == pytest.approx(logits_of(q.reshape(1, 6, 16), c.k), abs=1e-4)


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({"alpha": "5"}, Reason.MANIFEST_INVALID, "infinigen.partialDimensions must be given"),
        ({"partialDimensions": 4}, Reason.MANIFEST_INVALID, "infinigen.alpha must be given"),
        ({"partialDimensions": 17, "alpha": "5"}, Reason.SELECTOR_GEOMETRY, "17 of a head dim of 16"),
        ({"partialDimensions": 4, "alpha": "-1"}, Reason.THRESHOLD_INVALID, "alpha -1 puts the threshold"),
        (
            {"partialDimensions": 4, "alpha": "5", "variant": "mine"},
            Reason.MANIFEST_INVALID,
            "one of paper, accuracyScript, speedScript",
        ),
        ({"partialDimensions": 4, "alpha": "5", "capShare": "2"}, Reason.MANIFEST_INVALID, "from 0 to 1"),
        ({"partialDimensions": 4, "alpha": "5", "rank": 1}, Reason.MANIFEST_INVALID, "no parameters rank"),
    ],
    ids=["channels", "alpha", "too-many", "negative", "variant", "share", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, Any], reason: Reason, words: str) -> None:
    with pytest.raises(CoreError) as refused:
        Infinigen.from_manifest(selector("infinigen", parameters, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message
