"""Quest's boxes: as they grow, after edits, when they are stale, and what a manifest may not promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, Query, Shape, Source
from kvtier_core.selectors.families.quest import PageBoxes, Quest
from kvtier_crds.manifest import Selector
from tests.unit.selectors.selector_cases import SOURCE, selector

SHAPE = Shape(6, 2, 4, 0.5)


def family(page: int, pages: int, **more: Any) -> Quest:
    return Quest.from_manifest(selector("quest", {"pageTokens": page}, {"units": pages}, **more), SHAPE, 16)


def rows_of(seed: int, count: int) -> Tensor:
    return torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(seed))


def in_parts(quest: Quest, k: Tensor, cuts: list[int]) -> PageBoxes:
    index = quest.build(SOURCE, k[:0], k[:0], NO_EVIDENCE)
    at = 0
    for cut in cuts:
        index = quest.append(index, k[at : at + cut], k[at : at + cut], NO_EVIDENCE)
        at += cut
    return index


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    page=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 19), min_size=1, max_size=20),
)
def test_boxes_are_the_extremes_of_their_rows_however_these_arrived(
    seed: int, page: int, cuts: list[int]
) -> None:
    count = sum(cuts)
    k, quest = rows_of(seed, count), family(page, 2)
    index = in_parts(quest, k, cuts)
    assert (index.facts.covered, index.facts.epoch) == (count, len(cuts) + 1)
    pages = -(-count // page)
    low, high = index.boxes(0, pages)
    assert len(low) == len(high) == pages
    for number, (small, large) in enumerate(zip(low, high, strict=True)):
        rows = k[number * page : (number + 1) * page]
        assert torch.equal(small, rows.amin(0)) and torch.equal(large, rows.amax(0))


def test_an_index_stays_as_it_was_when_rows_follow() -> None:
    k, quest = rows_of(3, 30), family(4, 2)
    first = in_parts(quest, k, [10])
    before = [part.clone() for part in first.boxes(0, 3)]
    quest.append(first, k[10:], k[10:], NO_EVIDENCE)
    other = quest.append(first, -k[10:], k[10:], NO_EVIDENCE)
    assert all(torch.equal(one, two) for one, two in zip(before, first.boxes(0, 3), strict=True))
    assert torch.equal(other.boxes(3, 4)[0][0], -k[12:16].amax(0))
    assert len({first.facts.digest, other.facts.digest}) == 2


@settings(max_examples=60, deadline=None)
@given(page=st.integers(1, 6), count=st.integers(1, 40), first=st.integers(0, 45), more=st.integers(0, 20))
def test_after_an_edit_and_what_follows_it_is_as_if_made_anew(
    page: int, count: int, first: int, more: int
) -> None:
    quest = family(page, 3)
    k, new = rows_of(1, count), rows_of(2, more)
    index = quest.edit(in_parts(quest, k, [count]), Edit(first, epoch=5, truncated=True))
    assert isinstance(index, PageBoxes)
    assert index.facts.covered <= min(first, count)
    assert index.facts.source.position_epoch == 5
    now = torch.cat([k[:first], new])
    index = quest.append(index, now[index.facts.covered :], now[index.facts.covered :], NO_EVIDENCE)
    fresh = in_parts(quest, now, [len(now)])
    pages = -(-len(now) // page)
    for one, two in zip(index.boxes(0, pages), fresh.boxes(0, pages), strict=True):
        assert torch.equal(one, two)


def query(rows: int, **more: Any) -> Query:
    return Query(torch.ones(1, 6, 4), rows, more.pop("source", SOURCE), **more)


REFUSED = {
    "another selector": (4, query(9), Reason.SELECTOR_STALE),
    "another source": (3, query(9, source=Source(b"x" * 32, 1)), Reason.IDENTITY_MISMATCH),
    "another layer": (3, query(9, source=Source(SOURCE.digest, 2)), Reason.LAYER_DISTANCE),
    "another position epoch": (
        3,
        query(9, source=Source(SOURCE.digest, 1, 1)),
        Reason.POSITION_CONTRACT_MISMATCH,
    ),
    "rows that are gone": (3, query(8), Reason.INDEX_STALE),
    "pages before the last are missing": (3, query(13), Reason.INDEX_FRONTIER_LAG),
}


@pytest.mark.parametrize(("pages", "asked", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_stale_or_foreign_index_is_refused(pages: int, asked: Query, reason: Reason) -> None:
    index = in_parts(family(4, 3), rows_of(1, 9), [9])
    family(4, 3).select(index, query(12))
    with pytest.raises(CoreError) as refused:
        family(4, pages).select(index, asked)
    assert refused.value.reason is reason


def test_two_queries_at_once_are_refused() -> None:
    index = in_parts(family(4, 3), rows_of(1, 9), [9])
    with pytest.raises(CoreError) as refused:
        family(4, 3).select(index, Query(torch.ones(2, 6, 4), 9, SOURCE))
    assert refused.value.reason is Reason.UNSUPPORTED


PAGE_BYTES = 8 * 2 * 4 * 2 * 4
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown parameter": ({"parameters": {"pages": 3}}, "pages"),
    "no rows": ({"parameters": {"pageTokens": 0}}, "pageTokens"),
    "a flag": ({"parameters": {"pageTokens": True}}, "pageTokens"),
    "unknown path": ({"parameters": {"variant": "paper"}}, "kernel, evaluation"),
    "few tokens": ({"budget": {"tokens": 7, "capPolicy": "truncate"}}, "8 tokens"),
    "few bytes": ({"budget": {"bytes": PAGE_BYTES - 1, "capPolicy": "truncate"}}, "512 bytes"),
    "gate": ({"gate": {"minConfidence": "0.9"}}, "selector.gate cannot be kept"),
    "cap error": ({"budget": {"tokens": 64, "capPolicy": "error"}}, "capPolicy error cannot run"),
    "cap dense": ({"budget": {"tokens": 64, "capPolicy": "dense"}}, "capPolicy dense cannot run"),
}


def of(change: dict[str, Any]) -> Quest:
    body = {"family": "quest", "parameters": {}, "budget": {"tokens": 64, "capPolicy": "truncate"}}
    return Quest.from_manifest(Selector.model_validate(body | change), SHAPE, 8)


@pytest.mark.parametrize(("change", "words"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_kept_is_refused_with_what_could(change: dict[str, Any], words: str) -> None:
    assert of({}).pages == 8
    with pytest.raises(CoreError) as refused:
        of(change)
    assert refused.value.reason is Reason.MANIFEST_INVALID
    assert words in refused.value.message


def test_budgets_in_tokens_bytes_and_pages_mean_the_same() -> None:
    budgets: list[dict[str, Any]] = [{"tokens": 30}, {"bytes": 3 * PAGE_BYTES + 5}, {"units": 3}]
    made = [of({"budget": budget | {"capPolicy": "truncate"}}) for budget in budgets]
    assert [one.pages for one in made] == [3, 3, 3]
    assert len({one.digest for one in made}) == 3
