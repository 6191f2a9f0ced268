"""SparQ against the algorithm written out in float64, its worked example, and the cases where it is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, Query, Selection, Shape
from kvtier_core.selectors.families import sparq as module
from kvtier_core.selectors.families.sparq import ColumnKeys, Sparq
from kvtier_core.selectors.growing import GrowingColumns
from kvtier_kernels.state import AttentionState, LogitFrame, finalize
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector


def family(
    dimensions: int = 4, tokens: int = 6, shape: Shape = SMALL, sink: int = 2, recent: int = 3, **more: Any
) -> Sparq:
    declared = selector(
        "sparq",
        {"dimensions": dimensions} | more,
        {"tokens": tokens},
        persistentRows={"sink": sink, "recent": recent},
    )
    return Sparq.from_manifest(declared, shape, 4)


def read_state(
    rows: tuple[np.ndarray, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape
) -> AttentionState:
    """The exact state over the rows read, by the definition."""
    logits = logits_of(q, k, shape)
    m, l = torch.empty(1, shape.query_heads), torch.empty(1, shape.query_heads)
    u = torch.empty(1, shape.query_heads, v.shape[2])
    for head in range(shape.query_heads):
        mine = rows[head // shape.group]
        weights = np.exp(logits[head, mine] - logits[head, mine].max())
        m[0, head], l[0, head] = float(logits[head, mine].max()), float(weights.sum())
        u[0, head] = torch.from_numpy(weights @ v[mine, head // shape.group].double().numpy()).float()
    return AttentionState(m, l, u, LogitFrame(shape.scale))


def published(
    fam: Sparq, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape
) -> tuple[list[list[int]], np.ndarray]:
    """Rows per KV head and outputs [Hq, d] of the algorithm as written: float64, one thing at a time."""
    rows, d = k.shape[0], shape.head_dim
    always = {i for i in range(rows) if i < fam.persistent.sink or i >= rows - max(1, fam.persistent.recent)}
    chosen_rows, out = [], np.empty((shape.query_heads, v.shape[2]))
    for head in range(shape.kv_heads):
        group = [q[0, head * shape.group + g].double().numpy() for g in range(shape.group)]
        size = [sum(abs(float(one[j])) for one in group) for j in range(d)]
        dims = sorted(sorted(range(d), key=lambda j: (-size[j], j))[: fam.dimensions])
        proxies = []
        for one in group:
            share = sum(abs(one[j]) for j in dims) / sum(abs(one[j]) for j in range(d))
            proxies.append(
                [
                    shape.scale * sum(one[j] * float(k[i, head, j]) for j in dims) / math.sqrt(share)
                    for i in range(rows)
                ]
            )
        total = [sum(proxy[i] for proxy in proxies) for i in range(rows)]
        ranked = sorted((i for i in range(rows) if i not in always), key=lambda i: (-total[i], i))
        picked = sorted(always | set(ranked[: fam.allowed]))
        chosen_rows.append(picked)
        mean = v[:, head].double().numpy().mean(0)
        for g, one in enumerate(group):
            logits = np.array([shape.scale * float(one @ k[i, head].double().numpy()) for i in picked])
            weights = np.exp(logits - logits.max())
            y = (weights / weights.sum()) @ v[picked, head].double().numpy()
            proxy = np.exp(np.array(proxies[g]) - max(proxies[g]))
            alpha = proxy[picked].sum() / proxy.sum()
            out[head * shape.group + g] = alpha * y + (1 - alpha) * mean if fam.reallocate else y
    return chosen_rows, out


def answered(selection: Selection, state: AttentionState) -> torch.Tensor:
    done = state if selection.remainder is None else selection.remainder.complete(state)
    assert done.estimated == (selection.remainder is not None)
    return finalize(done)[0][0]


@given(
    seed=st.integers(0, 5000),
    rows=st.integers(1, 60),
    dimensions=st.integers(1, 16),
    tokens=st.integers(1, 20),
    variant=st.sampled_from(module.VARIANTS),
)
def test_it_is_the_published_algorithm(
    seed: int, rows: int, dimensions: int, tokens: int, variant: str
) -> None:
    fam = family(dimensions, tokens, variant=variant)
    k, v = rows_of(seed, rows)
    q = query_of(seed + 1)
    selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, rows, SOURCE))
    want, out = published(fam, q, k, v, SMALL)
    assert [positions.tolist() for positions in selection.positions] == want
    got = answered(selection, read_state(selection.positions, q, k, v, SMALL))
    assert np.abs(got.double().numpy() - out).max() < 2e-5
    assert fam.omits(rows) == any(len(positions) < rows for positions in want)
    assert fam.reallocate == (variant != "llamaCpp")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda q, k: (q @ k).sum(0), id="all-channels"),
        pytest.param(lambda q, k: np.abs(k).sum(0), id="size-of-the-key"),
        pytest.param(lambda q, k: q.mean(0) @ k, id="mean-query"),
        pytest.param(lambda q, k: np.maximum(q[:, :, None] * k, 0).sum((0, 1)), id="positive-part"),
    ],
)
def test_another_score_would_read_other_rows(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must be able to fail: with this score it does on some of these inputs."""
    real = module.sparq_score_torch

    def replaced(q: Any, keys: Any, dims: Any, lens: Any, *, scale: float) -> Any:
        scores = real(q, keys, dims, lens, scale=scale)
        grouped = q[0].view(SMALL.kv_heads, SMALL.group, -1).numpy()
        values = np.stack([wrong(grouped[h], keys[0, h].numpy()) for h in range(SMALL.kv_heads)])
        return scores._replace(score=torch.from_numpy(values).float().unsqueeze(0))

    monkeypatch.setattr(module, "sparq_score_torch", replaced)
    differs = False
    for seed in range(6):
        fam = family(3, 5)
        k, v = rows_of(seed, 40)
        q = query_of(seed)
        selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 40, SOURCE))
        differs |= [rows.tolist() for rows in selection.positions] != published(fam, q, k, v, SMALL)[0]
    assert differs


TOY = Shape(query_heads=1, kv_heads=1, head_dim=4, scale=0.5)
TOY_Q = torch.tensor([[[0.5, -0.5, -2.0, 1.5]]])
TOY_K = torch.tensor(
    [[-1, 1, -1, 0], [-0.5, 0, 1, 0.5], [-1, 0, -0.5, -0.5], [-1, 1, -1, -0.5], [-0.5, 0, -0.5, -1]]
).unsqueeze(1)
# V has two channels in the specification; the others are zero here.
TOY_V = torch.tensor(
    [[0.5, 1, 0, 0], [0.5, -1, 0, 0], [0, -0.5, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.float32
).unsqueeze(1)


def test_the_worked_example_of_the_specification() -> None:
    """C6.06 to C6.11: k = 3 with a window of 1 is a budget of 2 beside one recent row."""
    fam = family(2, 2, TOY, sink=0, recent=1)
    selection = fam.select(fam.build(SOURCE, TOY_K, TOY_V, NO_EVIDENCE), Query(TOY_Q, 5, SOURCE))
    assert selection.receipt.detail["dims"] == "2,3"
    assert selection.positions[0].tolist() == [0, 3, 4]
    assert float(selection.receipt.detail["alpha"]) == pytest.approx(0.7817946147, abs=1e-6)
    state = read_state(selection.positions, TOY_Q, TOY_K, TOY_V, TOY)
    exact = torch.tensor([0.3623186264, 0.5297537524])
    plain = finalize(state)[0][0, 0, :2]
    assert plain.tolist() == pytest.approx([0.4357395879, 1.0], abs=1e-6)
    assert float((plain - exact).abs().max()) == pytest.approx(0.4702462476, abs=1e-6)
    corrected = answered(selection, state)[0, :2]
    assert float((corrected - exact).abs().max()) == pytest.approx(0.3175024779, abs=1e-6)


def test_coverage_of_all_channels_is_the_full_score() -> None:
    """C6.13: with every channel the temperature is that of attention, so the ranking is the true one."""
    fam = family(16, 4)
    k, v = rows_of(3, 50)
    q = query_of(5)
    selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 50, SOURCE))
    logits = logits_of(q, k)
    for head in range(SMALL.kv_heads):
        total = logits[head * SMALL.group : (head + 1) * SMALL.group].sum(0)
        others = np.arange(2, 47)
        best = others[np.argsort(-total[others], kind="stable")[:4]]
        assert selection.units[head].tolist() == sorted(best.tolist())


def test_it_is_fooled_when_the_deciding_logit_lies_in_a_dropped_channel() -> None:
    """The adversary of the anchor: one channel of two is read and three decoys beat the true row."""
    shape = Shape(1, 1, 2, 1.0)
    fam = family(1, 3, shape, sink=0, recent=1)
    k = torch.tensor([[1.5, 1.5], [1.5, 1.5], [1.5, 1.5], [1.0, -4.0], [0.0, 0.0]]).unsqueeze(1)
    q = torch.tensor([[[2.0, -1.9]]])
    selection = fam.select(fam.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 5, SOURCE))
    weights = np.exp(logits_of(q, k, shape)[0])
    kept = weights[selection.positions[0]].sum() / weights.sum()
    assert 3 not in selection.positions[0]
    assert kept < 1e-3


def test_one_loud_head_chooses_for_its_group() -> None:
    shape = Shape(2, 1, 2, 1.0)
    fam = family(1, 1, shape, sink=0, recent=1)
    q = torch.tensor([[[50.0, 0.0], [0.0, 5.0]]])
    k = torch.tensor([[1.0, 0.0], [0.9, 9.0], [0.0, 0.0]]).unsqueeze(1)
    selection = fam.select(fam.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 3, SOURCE))
    assert selection.units[0].tolist() == [0]
    weights = np.exp(logits_of(q, k, shape)[1])
    assert weights[selection.positions[0]].sum() / weights.sum() < 1e-6


def test_rows_outside_the_index_are_weighed_when_their_keys_are_given() -> None:
    fam = family()
    k, v = rows_of(9, 30)
    q = query_of(3)
    index = fam.build(SOURCE, k[:28], v[:28], NO_EVIDENCE)
    blind = fam.select(index, Query(q, 30, SOURCE))
    seeing = fam.select(index, Query(q, 30, SOURCE, tail=k[28:]))
    assert blind.receipt.unindexed == seeing.receipt.unindexed == 2
    assert (blind.receipt.detail["tailWeighed"], seeing.receipt.detail["tailWeighed"]) == ("False", "True")
    assert [rows.tolist() for rows in blind.positions] == [rows.tolist() for rows in seeing.positions]
    proxy = []
    whole = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 30, SOURCE))
    proxy = [float(share) for share in whole.receipt.detail["alpha"].split(",")]
    assert [float(s) for s in seeing.receipt.detail["alpha"].split(",")] == pytest.approx(proxy, abs=2e-6)
    with pytest.raises(CoreError) as refused:
        fam.select(index, Query(q, 30, SOURCE, tail=k[29:]))
    assert refused.value.reason is Reason.COVERAGE_GAP


def test_appending_is_building_and_a_cut_is_building_less() -> None:
    fam = family()
    k, v = rows_of(4, 200)
    index = fam.build(SOURCE, k[:64], v[:64], NO_EVIDENCE)
    for row in range(64, 200):
        index = fam.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    whole = fam.build(SOURCE, k, v, NO_EVIDENCE)
    assert np.array_equal(index.keys.entries, whole.keys.entries)
    assert np.allclose(index.sums.entries, whole.sums.entries, rtol=1e-12)
    cut = fam.edit(index, Edit(first=70, epoch=0, truncated=True))
    assert isinstance(cut, ColumnKeys)
    less = fam.build(SOURCE, k[:70], v[:70], NO_EVIDENCE)
    query = Query(query_of(1), 71, SOURCE)
    one, other = fam.select(cut, query), fam.select(less, query)
    assert [rows.tolist() for rows in one.positions] == [rows.tolist() for rows in other.positions]
    assert index.facts.covered == 200


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(
            lambda index: replace(index, sums=index.sums.first(9)), Reason.MEAN_FRONTIER_MISMATCH, id="mean"
        ),
        pytest.param(
            lambda index: replace(index, keys=index.keys.first(9)), Reason.SELECTOR_STATE_MIXED, id="keys"
        ),
        pytest.param(
            lambda index: replace(index, facts=replace(index.facts, selector_digest="sha256:00")),
            Reason.SELECTOR_STALE,
            id="other-parameters",
        ),
        pytest.param(
            lambda index: replace(index, facts=replace(index.facts, covered=4)),
            Reason.INDEX_FRONTIER_LAG,
            id="lag",
        ),
    ],
)
def test_parts_of_other_epochs_are_refused(spoil: Any, reason: Reason) -> None:
    fam = family()
    k, v = rows_of(2, 10)
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    with pytest.raises(CoreError) as refused:
        fam.select(spoil(index), Query(query_of(1), 10, SOURCE))
    assert refused.value.reason is reason


def test_keys_without_values_are_no_rows() -> None:
    fam = family()
    k, v = rows_of(2, 10)
    with pytest.raises(CoreError) as refused:
        fam.build(SOURCE, k, v[:9], NO_EVIDENCE)
    assert refused.value.reason is Reason.ROW_INCOMPLETE


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e4, 1e15], ids=str)
def test_the_mass_of_what_was_chosen_is_a_share(size: float) -> None:
    """N.6, 8: between nothing and all, however large the logits."""
    fam = family()
    k, v = rows_of(3, 60)
    selection = fam.select(fam.build(SOURCE, k * size, v, NO_EVIDENCE), Query(query_of(4), 60, SOURCE))
    shares = [float(one) for one in selection.receipt.detail["alpha"].split(",")]
    assert len(shares) == SMALL.query_heads
    assert all(0.0 <= share <= 1.0 for share in shares)
    if size == 0.0:
        assert shares == pytest.approx(
            [len(rows) / 60 for rows in selection.positions for _ in range(3)], abs=1e-6
        )


@pytest.mark.parametrize("dimensions", [1, 4, 16])
def test_what_is_read_of_the_index_is_columns_and_not_a_row_each(dimensions: int) -> None:
    """N.6, 12: of each KV head so many channels of every key, and one mean of V."""
    fam = family(dimensions)
    k, v = rows_of(3, 60)
    receipt = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(4), 60, SOURCE)).receipt
    one_head = 4 * (60 * dimensions + SMALL.head_dim)
    assert receipt.index_bytes == SMALL.kv_heads * one_head


def test_pages_of_flash_are_counted_where_that_is_how_rows_are_read() -> None:
    fam = family(variant="sparF")
    k, v = rows_of(2, 40)
    selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(1), 40, SOURCE))
    pages = [len({row // 4 for row in rows.tolist()}) for rows in selection.positions]
    assert selection.receipt.detail["pagesRead"] == ",".join(map(str, pages))


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({}, Reason.MANIFEST_INVALID, "sparq.dimensions must be given"),
        ({"dimensions": 17}, Reason.SPARQ_DIMS, "sparq.dimensions 17 of a head dim of 16"),
        ({"dimensions": 0}, Reason.MANIFEST_INVALID, "whole number from 1 to 1024, not 0"),
        ({"dimensions": 4, "variant": "mine"}, Reason.MANIFEST_INVALID, "one of paper, llamaCpp, sparF"),
        ({"dimensions": 4, "meanReallocation": "yes"}, Reason.MANIFEST_INVALID, "must be true or false"),
        ({"dimensions": 4, "local": 3}, Reason.MANIFEST_INVALID, "no parameters local"),
    ],
    ids=["absent", "too-many", "zero", "variant", "flag", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, Any], reason: Reason, words: str) -> None:
    with pytest.raises(CoreError) as refused:
        Sparq.from_manifest(selector("sparq", parameters, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message


@given(st.lists(st.integers(0, 70), max_size=6), st.integers(0, 200))
def test_columns_that_grow_keep_what_a_handle_saw(parts: list[int], cut: int) -> None:
    handle, model, handles = GrowingColumns((2,), np.int64), np.empty((2, 0), dtype=np.int64), []
    for number, count in enumerate(parts):
        fresh = np.arange(2 * count).reshape(2, count) + 1000 * number
        handle, model = handle.plus(fresh), np.concatenate([model, fresh], axis=1)
        handles.append((handle, model))
        if cut % (number + 2) == 0 and model.shape[1]:
            length = cut % model.shape[1]
            handle, model = handle.first(length), model[:, :length]
            handles.append((handle, model))
    for one, wanted in handles:
        assert np.array_equal(one.entries, wanted)
