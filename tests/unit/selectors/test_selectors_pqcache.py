"""PQCache against the algorithm written out in float64, its worked example, and where it is wrong."""

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
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, NeedsRebuild, Query, Shape
from kvtier_core.selectors.families import pqcache as module
from kvtier_core.selectors.families.codebooks import coded, k_means, most_iterations
from kvtier_core.selectors.families.pqcache import Codebooks, CodedRows, Pqcache
from kvtier_core.selectors.growing import GrowingColumns
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector


def family(
    tokens: int = 6, shape: Shape = SMALL, sink: int = 2, recent: int = 3, seed: int = 0, **more: Any
) -> Pqcache:
    declared = selector(
        "pqcache",
        {"subspaces": 2, "bits": 2} | more,
        {"tokens": tokens},
        persistentRows={"sink": sink, "recent": recent},
        seed=seed,
    )
    return Pqcache.from_manifest(declared, shape, 16)


def built(fam: Pqcache, seed: int, rows: int) -> tuple[CodedRows, torch.Tensor, torch.Tensor]:
    k, v = rows_of(seed, rows, fam.shape)
    return fam.build(SOURCE, k, v, NO_EVIDENCE), k, v


def closest(x: np.ndarray, centres: list[np.ndarray]) -> int:
    far = [sum((float(a) - float(b)) ** 2 for a, b in zip(x, c, strict=True)) for c in centres]
    return far.index(min(far))


def published(fam: Pqcache, q: torch.Tensor, k: torch.Tensor) -> tuple[list[list[int]], list[float]]:
    """Rows per KV head and the estimated share left out per query head: one thing at a time, in float64."""
    rows, shape = k.shape[0], fam.shape
    sink, end = fam.persistent.sink, rows - max(1, fam.persistent.recent)
    width, count = shape.head_dim // fam.subspaces, 2**fam.bits
    keys, wide = k.double().numpy(), q[0].double().numpy()
    chosen, left = [], []
    for head in range(shape.kv_heads):
        approx = np.zeros((shape.group, rows))
        for part in range(fam.subspaces):
            at = slice(part * width, (part + 1) * width)
            x = keys[sink:, head, at]
            draw = np.random.default_rng([fam.seed, SOURCE.layer, head, part])
            centres = [x[i] for i in sorted(draw.choice(len(x), count, replace=False))]
            label = [closest(one, centres) for one in x]
            for _ in range(fam.iterations):
                for c in range(count):
                    mine = [x[i] for i in range(len(x)) if label[i] == c]
                    centres[c] = sum(mine) / len(mine) if mine else centres[c]
                label = [closest(one, centres) for one in x]
            centres = [c.astype(np.float32).astype(np.float64) for c in centres]
            for g in range(shape.group):
                one = wide[head * shape.group + g, at]
                for i in range(rows - sink):
                    approx[g, sink + i] += shape.scale * float(one @ centres[closest(x[i], centres)])
        middle = list(range(sink, max(sink, end)))
        score = dict.fromkeys(middle, 0.0)
        for g in range(shape.group):
            total = sum(math.exp(approx[g, i]) for i in middle)
            for i in middle:
                score[i] += math.exp(approx[g, i]) / total
        # Equal codes give equal scores; rounding must not decide between them.
        ranked = sorted(middle, key=lambda i: (-round(score[i], 9), i))[: fam.allowed]
        chosen.append(sorted({*ranked, *range(min(rows, sink)), *range(max(0, end), rows)}))
        for g in range(shape.group):
            logits = approx[g].copy()
            one = wide[head * shape.group + g]
            logits[:sink] = [shape.scale * float(one @ keys[i, head]) for i in range(sink)]
            weight = np.exp(logits)
            left.append(float(sum(weight[i] for i in middle if i not in ranked) / weight.sum()))
    return chosen, left


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 5000),
    rows=st.integers(8, 50),
    tokens=st.integers(1, 20),
    subspaces=st.sampled_from([1, 2, 4]),
    bits=st.integers(1, 2),
)
def test_it_is_the_published_algorithm(seed: int, rows: int, tokens: int, subspaces: int, bits: int) -> None:
    fam = family(tokens, subspaces=subspaces, bits=bits, iterations=5, seed=seed % 3)
    index, k, _ = built(fam, seed, rows)
    q = query_of(seed + 1)
    selection = fam.select(index, Query(q, rows, SOURCE))
    want, left = published(fam, q, k)
    assert [positions.tolist() for positions in selection.positions] == want
    assert selection.receipt.omitted_mass == pytest.approx(left, abs=2e-5)
    assert fam.omits(rows) == any(len(positions) < rows for positions in want)
    fam.verify(index, k)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda logits, codes: logits.sum(0), id="sum-of-logits"),
        pytest.param(lambda logits, codes: logits.amax(0), id="largest-logit"),
        pytest.param(lambda logits, codes: -codes.sum(0).double(), id="codes"),
        pytest.param(lambda logits, codes: -logits.exp().sum(0), id="reversed"),
    ],
)
def test_another_score_would_read_other_rows(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must be able to fail: with this score it does on some of these inputs."""
    real = module.scored

    def replaced(lut: Any, codes: Any, scale: float) -> Any:
        _, lse = real(lut, codes, scale)
        score = [wrong(module.approximate(lut[h], codes[h], scale), codes[h]) for h in range(len(codes))]
        return torch.stack(score), lse

    monkeypatch.setattr(module, "scored", replaced)
    differs = False
    for seed in range(4):
        fam = family(5, bits=2, iterations=3)
        index, k, _ = built(fam, seed, 40)
        q = query_of(seed, spread=3.0)
        selection = fam.select(index, Query(q, 40, SOURCE))
        differs |= [rows.tolist() for rows in selection.positions] != published(fam, q, k)[0]
    assert differs


ONE_HEAD = Shape(1, 1, 4, 1.0)
TOY_KEYS = torch.tensor([[0.9, 0, 0, 0.9], [1.1, 0, 0, 0], [0, 0, 0, 1.2], [-1, 0, 0, -1]]).unsqueeze(1)
TOY_BOOKS = np.array([[[[0, 0], [2, 0]], [[0, 0], [0, 2]]]], dtype=np.float32)


def toy() -> tuple[Pqcache, CodedRows]:
    fam = family(2, ONE_HEAD, sink=0, recent=0, bits=1)
    index = fam.build(SOURCE, TOY_KEYS, TOY_KEYS, NO_EVIDENCE)
    codes = coded(TOY_KEYS.numpy(), TOY_BOOKS)
    return fam, replace(
        index,
        books=Codebooks(TOY_BOOKS, 4, "toy"),
        codes=GrowingColumns((1, 2), np.uint8).plus(codes),
        made_by="toy",
    )


def test_the_worked_example_misses_the_best_row_though_every_code_is_nearest() -> None:
    """C7.01 to C7.04; K21: a valid index is not dense attention."""
    fam, index = toy()
    q = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])
    fam.verify(index, TOY_KEYS)
    assert index.codes.entries[0].T.tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]
    lut = module.tables(q, TOY_BOOKS)
    assert lut[0, :, 0].tolist() == [[0, 2], [0, 2]]
    approx = module.approximate(lut[0], index.codes.tensor[0], 1.0)[0]
    assert approx.tolist() == [0, 2, 2, 0]
    exact = logits_of(q, TOY_KEYS, ONE_HEAD)[0]
    assert (exact - approx.numpy()).tolist() == pytest.approx([1.8, -0.9, -0.8, -2.0])
    rebuilt = np.concatenate([TOY_BOOKS[0, j][index.codes.entries[0, j]] for j in range(2)], axis=1)
    lost = (TOY_KEYS[:, 0].numpy() - rebuilt) @ q[0, 0].numpy()
    assert (exact - approx.numpy()).tolist() == pytest.approx(lost.tolist())
    selection = fam.select(index, Query(q, 5, SOURCE))
    assert int(exact.argmax()) == 0
    assert selection.units[0].tolist() == [1, 2]


def test_a_needle_that_comes_after_the_prefill_is_coded_by_what_was_there() -> None:
    """The adversary of the anchor: (10, 9.9) is coded (1, 0), thought worth 1 and worth 20."""
    shape = Shape(1, 1, 2, 1.0)
    fam = family(1, shape, sink=0, recent=1, subspaces=1, bits=1, seed=1)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).unsqueeze(1)
    index = fam.build(SOURCE, k, k, NO_EVIDENCE)
    assert index.books is not None
    assert sorted(index.books.entries[0, 0].tolist()) == [[0, 1], [1, 0]]
    late = torch.tensor([[10.0, 9.9], [0.0, 0.0]]).unsqueeze(1)
    index = fam.append(index, late, late, NO_EVIDENCE)
    q = torch.tensor([[[1.0, 1.01]]])
    selection = fam.select(index, Query(q, 5, SOURCE))
    weights = np.exp(logits_of(q, torch.cat([k, late]), shape)[0])
    assert selection.units[0].tolist() == [1]
    assert weights[selection.positions[0]].sum() / weights.sum() < 1e-6
    assert selection.receipt.omitted_mass is not None
    # And it does not know: what it thinks is left out is about what rows worth e would be.
    assert selection.receipt.omitted_mass[0] < 0.75


def test_an_outlier_takes_a_centroid_and_the_others_share_what_is_left() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 4))
    calm = k_means(x, 4, 50, np.random.default_rng(1))
    loud = np.concatenate([x, [[1e4, 0, 0, 0]]])
    centres = k_means(loud, 4, 50, np.random.default_rng(3))

    def error(centres: np.ndarray) -> float:
        return float(np.min(((x[:, None] - centres) ** 2).sum(2), axis=1).mean())

    assert np.abs(centres).max() == pytest.approx(1e4)
    assert error(centres) > error(calm)


def test_too_few_rows_are_all_read_whatever_the_budget() -> None:
    fam = family(1, bits=4)
    index, _, _ = built(fam, 1, 18)
    selection = fam.select(index, Query(query_of(2), 18, SOURCE))
    assert [rows.tolist() for rows in selection.positions] == [list(range(18))] * 2
    assert selection.receipt.detail["codebooks"] == "absent"
    assert selection.receipt.omitted_mass == (0.0,) * 6
    assert not fam.omits(18)
    assert fam.omits(19)
    index, _, _ = built(fam, 1, 19)
    assert fam.select(index, Query(query_of(2), 19, SOURCE)).receipt.detail["trainedRows"] == "17"


def test_training_waits_for_as_many_rows_as_declared() -> None:
    fam = family(4, trainTokens=30)
    k, v = rows_of(3, 60)
    index = fam.build(SOURCE, k[:0], v[:0], NO_EVIDENCE)
    for first in range(0, 60, 7):
        index = fam.append(index, k[first : first + 7], v[first : first + 7], NO_EVIDENCE)
        assert (index.books is None) == (index.facts.covered < 32)
        assert index.facts.covered == min(60, first + 7)
    assert index.books is not None
    assert index.books.rows == 30, "however the rows behind them were cut"
    fam.verify(index, k)


@given(cuts=st.lists(st.integers(0, 40), max_size=4))
def test_appending_in_parts_is_appending_at_once_and_old_handles_stay(cuts: list[int]) -> None:
    fam = family(tokens=4, iterations=2)
    k, v = rows_of(4, 80)
    first = fam.build(SOURCE, k[:40], v[:40], NO_EVIDENCE)
    before = first.codes.entries.copy()
    index, at = first, 40
    for count in [*cuts, 40]:
        end = min(80, at + count)
        index, at = fam.append(index, k[at:end], v[at:end], NO_EVIDENCE), end
    whole = fam.append(first, k[40:], v[40:], NO_EVIDENCE)
    assert np.array_equal(index.codes.entries, whole.codes.entries)
    assert np.array_equal(first.codes.entries, before)
    assert first.facts.covered == 40
    assert index.books is first.books
    fam.verify(index, k)


def test_the_same_keys_and_seed_make_the_same_index() -> None:
    fam = family()
    one, k, v = built(fam, 5, 64)
    other = fam.build(SOURCE, k, v, NO_EVIDENCE)
    assert one.facts.digest == other.facts.digest
    assert one.books is not None and other.books is not None
    assert one.books.entries.tobytes() == other.books.entries.tobytes()
    seeded = family(seed=1).build(SOURCE, k, v, NO_EVIDENCE)
    assert seeded.books is not None
    assert seeded.books.digest != one.books.digest
    assert seeded.facts.digest != one.facts.digest


def test_a_cut_keeps_codes_and_too_deep_a_cut_asks_for_a_build() -> None:
    fam = family()
    index, k, _ = built(fam, 6, 60)
    cut = fam.edit(index, Edit(first=20, epoch=1, truncated=True))
    assert isinstance(cut, CodedRows)
    assert cut.facts.covered == 20
    assert np.array_equal(cut.codes.entries, index.codes.entries[..., :18])
    assert index.facts.covered == 60
    fam.verify(cut, k[:20])
    with pytest.raises(CoreError) as refused:
        fam.select(cut, Query(query_of(1), 21, SOURCE))
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
    assert fam.select(cut, Query(query_of(1), 21, replace(SOURCE, position_epoch=1))).receipt.unindexed == 1
    deep = fam.edit(index, Edit(first=6, epoch=1, truncated=False))
    assert isinstance(deep, NeedsRebuild)
    assert "made of 58 rows, 4 coded rows are left and 5 are needed" in deep.why
    waiting, _, _ = built(family(bits=5), 6, 20)
    assert isinstance(family(bits=5).edit(waiting, Edit(1, 1, truncated=True)), CodedRows)


def test_local_and_sink_rows_are_never_chosen_by_score() -> None:
    fam = family(8)
    index, _, _ = built(fam, 7, 60)
    selection = fam.select(index, Query(query_of(3), 60, SOURCE))
    for positions, units in zip(selection.positions, selection.units, strict=True):
        assert len(units) == 8
        assert units.min() >= 2 and units.max() < 57
        assert (np.diff(positions) > 0).all()
        assert len(positions) == 8 + 5


def test_keys_outside_the_index_are_weighed_when_given() -> None:
    fam = family()
    k, v = rows_of(9, 40)
    index = fam.build(SOURCE, k[:38], v[:38], NO_EVIDENCE)
    q = query_of(3)
    blind = fam.select(index, Query(q, 40, SOURCE))
    seeing = fam.select(index, Query(q, 40, SOURCE, tail=k[38:]))
    still = fam.select(index, Query(q, 40, SOURCE, tail=torch.zeros(2, 2, 16)))
    without, given, zeros = (np.array(one.receipt.omitted_mass) for one in (blind, seeing, still))
    assert (given < without).all()
    # 1 / share grows by the weight of the tail over the weight left out; rows of zeros weigh 1 each.
    weight = np.exp(logits_of(q, k[38:])).sum(1)
    grown = (1 / given - 1 / without) / (1 / zeros - 1 / without)
    assert grown == pytest.approx(weight / 2, rel=1e-4)
    loud = k[38:]
    assert [rows.tolist() for rows in blind.positions] == [rows.tolist() for rows in seeing.positions]
    with pytest.raises(CoreError) as refused:
        fam.select(index, Query(q, 40, SOURCE, tail=loud[:1]))
    assert refused.value.reason is Reason.COVERAGE_GAP


def test_codes_above_a_byte_rank_as_narrow_ones_do() -> None:
    fam = family(10, bits=9, subspaces=1, iterations=1)
    index, k, _ = built(fam, 10, 530)
    assert index.codes.entries.dtype == np.uint16 and index.books is not None
    q = query_of(4)
    selection = fam.select(index, Query(q, 530, SOURCE))
    assert selection.receipt.omitted_mass is not None
    for head in range(2):
        near = index.books.entries[head, 0].astype(np.float64)[index.codes.entries[head, 0]]
        logits = q[0, head * 3 : head * 3 + 3].double().numpy() @ near[:525].T * SMALL.scale
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        order = np.argsort(-shares.sum(0).round(12), kind="stable")[:10] + 2
        assert selection.units[head].tolist() == sorted(order.tolist())
    fam.verify(index, k)


def test_a_key_that_is_no_number_spoils_no_centroid() -> None:
    fam = family()
    k, v = rows_of(11, 40)
    k[9, 0, 3] = torch.nan
    k[12, 1, 0] = torch.inf
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    assert index.books is not None
    assert np.isfinite(index.books.entries).all()


def other_books(index: CodedRows, entries: Any) -> CodedRows:
    assert index.books is not None
    return replace(index, books=replace(index.books, entries=entries(index.books.entries)))


def other_code(index: CodedRows, code: int) -> CodedRows:
    codes = index.codes.entries.copy()
    codes[0, 1, 7] = code
    return replace(index, codes=GrowingColumns(codes.shape[:2], codes.dtype).plus(codes))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda i: other_code(i, 4), Reason.PQ_GEOMETRY, id="code-past-the-codebook"),
        pytest.param(lambda i: other_books(i, lambda e: e[..., :-1]), Reason.PQ_GEOMETRY, id="width"),
        pytest.param(lambda i: other_books(i, lambda e: e[:1]), Reason.PARTIAL_INDEX, id="heads-missing"),
        pytest.param(lambda i: replace(i, books=None), Reason.PARTIAL_INDEX, id="books-missing"),
        pytest.param(lambda i: replace(i, codes=i.codes.first(9)), Reason.COVERAGE_GAP, id="codes-short"),
        pytest.param(lambda i: replace(i, made_by="other"), Reason.SELECTOR_STATE_MIXED, id="generation"),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, selector_digest="sha256:00")),
            Reason.SELECTOR_STALE,
            id="other-parameters",
        ),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, source=replace(SOURCE, layer=2))),
            Reason.LAYER_DISTANCE,
            id="layer",
        ),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, source=replace(SOURCE, digest=b"o" * 32))),
            Reason.IDENTITY_MISMATCH,
            id="source",
        ),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, covered=31)), Reason.INDEX_STALE, id="rows-gone"
        ),
        pytest.param(
            lambda i: replace(i, facts=replace(i.facts, covered=9)), Reason.INDEX_FRONTIER_LAG, id="lag"
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(spoil: Any, reason: Reason) -> None:
    fam = family()
    index, _, _ = built(fam, 2, 30)
    with pytest.raises(CoreError) as refused:
        fam.select(spoil(index), Query(query_of(1), 30, SOURCE))
    assert refused.value.reason is reason


def test_a_code_that_is_not_the_nearest_is_found_by_who_has_the_keys() -> None:
    fam = family()
    index, k, _ = built(fam, 2, 30)
    true = int(index.codes.entries[0, 1, 7])
    with pytest.raises(CoreError) as refused:
        fam.verify(other_code(index, (true + 1) % 4), k)
    assert refused.value.reason is Reason.PQ_CODE_INVALID
    assert "row 9 of KV head 0 has a nearer centroid in part 1" in refused.value.message
    with pytest.raises(CoreError) as short:
        fam.verify(index, k[:29])
    assert short.value.reason is Reason.COVERAGE_GAP


def test_keys_without_values_are_no_rows() -> None:
    fam = family()
    k, v = rows_of(2, 10)
    with pytest.raises(CoreError) as refused:
        fam.build(SOURCE, k, v[:9], NO_EVIDENCE)
    assert refused.value.reason is Reason.ROW_INCOMPLETE


def test_the_bytes_of_the_index_are_codes_centroids_and_the_sink() -> None:
    """One byte a code; C7.05 packs six bits (6,144 B for 4,096 rows of one head), which nothing here does."""
    shape = Shape(1, 1, 128, 128**-0.5)
    fam = family(128, shape, sink=32, subspaces=2, bits=6, iterations=1)
    index, _, _ = built(fam, 1, 4096)
    receipt = fam.select(index, Query(query_of(1, shape), 4096, SOURCE)).receipt
    assert receipt.index_bytes == (4096 - 32) * 2 + 4 * 64 * 128 + 4 * 32 * 128
    assert receipt.scanned_units == 4096 - 32 - 3


def test_iterations_that_hide_behind_a_layers_prefill() -> None:
    """C7.07: 8.5 by the fit, floored; and clipped."""
    fit = ((2.0, 1e-4), (1.0, 5e-4, 2e-8))
    assert most_iterations(20000, *fit) == 8
    assert most_iterations(20000, *fit, high=5) == 5
    assert most_iterations(10, *fit) == 1


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({}, Reason.MANIFEST_INVALID, "pqcache.subspaces must be given"),
        ({"subspaces": 2}, Reason.MANIFEST_INVALID, "pqcache.bits must be given"),
        ({"subspaces": 3, "bits": 6}, Reason.PQ_GEOMETRY, "subspaces 3 does not divide a head dim of 16"),
        ({"subspaces": 2, "bits": 13}, Reason.MANIFEST_INVALID, "whole number from 1 to 12, not 13"),
        ({"subspaces": 2, "bits": 6, "iterations": 0}, Reason.MANIFEST_INVALID, "from 1 to 1000, not 0"),
        ({"subspaces": 2, "bits": 6, "trainTokens": 0}, Reason.MANIFEST_INVALID, "pqcache.trainTokens must"),
        ({"subspaces": 2, "bits": 6, "metric": "ip"}, Reason.MANIFEST_INVALID, "no parameters metric"),
    ],
    ids=["absent", "bits-absent", "divides", "bits", "iterations", "train", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, Any], reason: Reason, words: str) -> None:
    with pytest.raises(CoreError) as refused:
        Pqcache.from_manifest(selector("pqcache", parameters, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message
