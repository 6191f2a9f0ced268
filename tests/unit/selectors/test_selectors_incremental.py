"""Families that say that an index is the same however its rows were cut are held to it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.selectors.contract import Evidence, Query, SelectionReceipt
from kvtier_core.selectors.families import registry
from tests.unit.selectors.selector_cases import SMALL, SOURCE, query_of, rows_of, selector

ROWS = 120
CASES: dict[str, tuple[dict[str, object], int]] = {
    "certifiedScan": ({"maxOmittedMass": "0.1"}, 8),
    "emLlm": ({"window": 16, "gamma": "1", "maxEventTokens": 16}, 48),
    "infLlm": ({"unitTokens": 8, "representatives": 2}, 24),
    "quest": ({"pageTokens": 8}, 32),
    "sparq": ({"dimensions": 4}, 8),
}
LEARNING = {"clusterKv", "infinigen", "magicPig", "pqcache", "retrievalAttention", "squeezedAttention"}


def comparable(receipt: SelectionReceipt) -> SelectionReceipt:
    """Without what counts publications."""
    return replace(receipt, index_digest="", index_epoch=0)


def test_every_family_is_of_one_kind() -> None:
    assert set(CASES) | LEARNING == set(registry.FAMILIES)
    assert not set(CASES) & LEARNING


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, ROWS - 1), max_size=4, unique=True), seed=st.integers(0, 99))
def test_an_index_is_the_same_however_its_rows_were_cut(name: str, cuts: list[int], seed: int) -> None:
    parameters, tokens = CASES[name]
    recent = {"persistentRows": {"sink": 4, "recent": 16}}
    family = registry.make_family(selector(name, parameters, {"tokens": tokens}, **recent), SMALL, 16)
    assert family.facts.incremental
    k, v = rows_of(seed, ROWS)
    random = np.random.default_rng(seed)
    queries = torch.from_numpy(random.standard_normal((ROWS, 6, 16)).astype(np.float32))
    evidence = Evidence(queries=queries, surprisal=random.exponential(size=ROWS))
    whole = family.build(SOURCE, k, v, evidence)
    ends = [*sorted(cuts), ROWS]
    parts = family.build(SOURCE, k[: ends[0]], v[: ends[0]], evidence.cut(0, ends[0]))
    for first, last in itertools.pairwise(ends):
        parts = family.append(parts, k[first:last], v[first:last], evidence.cut(first, last))
    assert parts.facts.covered == whole.facts.covered == ROWS
    query = Query(query_of(seed), ROWS + 1, SOURCE)
    one, other = family.select(whole, query), family.select(parts, query)
    assert comparable(one.receipt) == comparable(other.receipt)
    for mine, theirs in zip(one.positions, other.positions, strict=True):
        assert np.array_equal(mine, theirs)
