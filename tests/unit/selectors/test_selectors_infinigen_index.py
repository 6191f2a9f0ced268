"""The life of InfiniGen's index: training, growth, cuts, and what it refuses."""

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
    NeedsRebuild,
)
from kvtier_core.selectors.families.infinigen import Infinigen, PartialKeys, check_receipt
from kvtier_core.selectors.growing import GrowingColumns
from tests.unit.selectors.infinigen_cases import case, family
from tests.unit.selectors.selector_cases import SMALL, SOURCE, selector


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


def test_an_index_is_named_by_the_weights_that_its_queries_are_rehearsed_with() -> None:
    fam, c = family(), case(8, 50)
    weights = c.evidence.weights
    assert weights is not None
    made = [
        fam.build(SOURCE, c.k, c.v, replace(c.evidence, weights=replace(weights, digest=digest)))
        for digest in ("sha256:1", "sha256:1", "sha256:2")
    ]
    assert made[0].facts.digest == made[1].facts.digest != made[2].facts.digest
    grown = fam.append(made[2], c.k[:1], c.v[:1], NO_EVIDENCE)
    assert dict(grown.facts.parts)["weights"] == "sha256:2"


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
        ({"queries": None}, "infinigen needs prefillQueries"),
    ],
    ids=["weights", "queries"],
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
    # A rehearsal is of a query: rows need no hidden states.
    index = fam.build(SOURCE, c.k, c.v, replace(c.evidence, hidden=None))
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
