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
    Evidence,
    LayerWeights,
    Query,
    Shape,
)
from kvtier_core.selectors.families.infinigen import Infinigen, PartialKeys, Skew
from tests.unit.selectors.infinigen_cases import Case, case, family
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of


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


def test_a_rotation_changes_no_score_and_a_part_of_it_is_bounded() -> None:
    c = case(4, 40)
    fam = family(partialDimensions=16)
    index = fam.build(SOURCE, c.k, c.v, c.evidence)
    assert isinstance(index.skew, Skew)
    q = fam.rehearsed(index, c.query())
    whole = (index.skew.partial(q) @ index.keys.tensor).reshape(6, -1).double().numpy() * SMALL.scale
    assert whole == pytest.approx(logits_of(q.reshape(1, 6, 16), c.k), abs=1e-4)
