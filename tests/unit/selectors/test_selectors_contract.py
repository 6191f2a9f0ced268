"""What all families share: indexes that never change, choices that repeat, and refusals of what is stale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    Budget,
    CapPolicy,
    Evidence,
    IndexFacts,
    Query,
    Scope,
    Selection,
    Shape,
    Source,
    check_index,
)
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent, best, capped
from kvtier_crds.manifest import PersistentRows

SOURCE = Source(b"s" * 32, layer=3, position_epoch=1)


@dataclass(frozen=True)
class AnIndex:
    facts: IndexFacts


@dataclass(frozen=True)
class AFamily:
    digest: str = "sha256:ab"


def a_query(rows: int, source: Source = SOURCE) -> Query:
    return Query(torch.zeros(1, 2, 4), rows, source)


def an_index(covered: int, source: Source = SOURCE, digest: str = "sha256:ab") -> AnIndex:
    return AnIndex(IndexFacts(digest, source, epoch=1, covered=covered))


@pytest.mark.parametrize(
    ("index", "rows", "reason"),
    [
        pytest.param(an_index(9, digest="sha256:cd"), 10, Reason.SELECTOR_STALE, id="other-parameters"),
        pytest.param(
            an_index(9, replace(SOURCE, digest=b"t" * 32)), 10, Reason.IDENTITY_MISMATCH, id="other-source"
        ),
        pytest.param(an_index(9, replace(SOURCE, layer=2)), 10, Reason.LAYER_DISTANCE, id="other-layer"),
        pytest.param(
            an_index(9, replace(SOURCE, position_epoch=0)),
            10,
            Reason.POSITION_CONTRACT_MISMATCH,
            id="other-positions",
        ),
        pytest.param(an_index(11), 10, Reason.INDEX_STALE, id="rows-that-are-gone"),
        pytest.param(an_index(7), 10, Reason.INDEX_FRONTIER_LAG, id="ends-too-early"),
    ],
)
def test_an_index_that_may_not_answer_says_why(index: AnIndex, rows: int, reason: Reason) -> None:
    with pytest.raises(CoreError) as refused:
        check_index(index, AFamily(), a_query(rows), tail=2)  # type: ignore[arg-type]
    assert refused.value.reason is reason


def test_an_index_may_lag_by_what_is_always_read() -> None:
    assert check_index(an_index(8), AFamily(), a_query(10), tail=2) == 2  # type: ignore[arg-type]


def test_no_field_of_an_index_changes_without_its_digest() -> None:
    facts = IndexFacts("sha256:ab", SOURCE, epoch=1, covered=5, seed=2, parts=(("boxes", "1"),))
    others = [
        replace(facts, selector_digest="sha256:cd"),
        replace(facts, source=replace(SOURCE, digest=b"t" * 32)),
        replace(facts, source=replace(SOURCE, layer=4)),
        replace(facts, source=replace(SOURCE, position_epoch=2)),
        replace(facts, epoch=2),
        replace(facts, covered=6),
        replace(facts, seed=3),
        replace(facts, parts=(("boxes", "2"),)),
        replace(facts, parts=()),
    ]
    assert len({facts.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert replace(facts).digest == facts.digest


SCORES = hnp.arrays(
    np.float32, st.integers(0, 40), elements=st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0, np.inf, np.nan])
)


@given(SCORES, st.integers(0, 45))
def test_the_best_are_those_of_a_plain_sort(scores: np.ndarray, count: int) -> None:
    ids = np.arange(len(scores), dtype=np.int64) * 3
    value = {int(i): (np.inf if np.isnan(s) else float(s)) for i, s in zip(ids, scores, strict=True)}
    order = sorted(value, key=lambda unit: (-value[unit], unit))
    wanted, rest = order[:count], order[count:]
    picked = best(scores, ids, count)
    assert picked.ids.tolist() == sorted(wanted)
    assert picked.threshold == (value[wanted[-1]] if wanted else -np.inf)
    assert picked.runner_up == (value[rest[0]] if rest else -np.inf)
    assert picked.ties == (sum(value[unit] == picked.threshold for unit in rest) if wanted else 0)


def test_scores_of_other_units_are_refused() -> None:
    with pytest.raises(CoreError) as refused:
        best(np.zeros(3, dtype=np.float32), np.arange(4), 2)
    assert refused.value.reason is Reason.COVERAGE_GAP


@pytest.mark.parametrize(
    ("sink", "recent", "rows", "covered", "expected"),
    [
        pytest.param(2, 3, 10, 9, [0, 1, 7, 8, 9], id="sink-and-recent"),
        pytest.param(0, 0, 10, 10, [9], id="the-query-itself"),
        pytest.param(0, 0, 10, 6, [6, 7, 8, 9], id="not-covered"),
        pytest.param(4, 4, 5, 5, [0, 1, 2, 3, 4], id="they-meet"),
        pytest.param(9, 0, 4, 4, [0, 1, 2, 3], id="more-than-there-are"),
        pytest.param(0, 9, 4, 2, [0, 1, 2, 3], id="recent-is-all"),
    ],
)
def test_rows_that_every_query_reads(
    sink: int, recent: int, rows: int, covered: int, expected: list[int]
) -> None:
    persistent = Persistent.of(PersistentRows(sink=sink, recent=recent), rows, covered)
    assert persistent.rows.tolist() == expected
    assert persistent.others.tolist() == [row for row in range(rows) if row not in expected]


def test_chosen_rows_are_counted_once_and_persistent_ones_not_at_all() -> None:
    persistent = Persistent.of(PersistentRows(sink=1, recent=1), 8, 8)
    rows, fresh = persistent.joined(np.array([3, 0, 3, 7, 2]))
    assert (rows.tolist(), fresh) == ([0, 2, 3, 7], 2)
    for outside in (-1, 8):
        with pytest.raises(CoreError) as refused:
            persistent.joined(np.array([outside]))
        assert refused.value.reason is Reason.SUPPORT_OUT_OF_RANGE


def test_what_a_cap_does_is_its_policys() -> None:
    assert capped(3, 4, Budget(units=4)) == 3
    assert capped(5, 4, Budget(units=4)) == 4
    assert capped(5, 4, Budget(units=4, cap_policy=CapPolicy.DENSE)) == -1
    with pytest.raises(CoreError) as refused:
        capped(5, 4, Budget(units=4, cap_policy=CapPolicy.ERROR))
    assert refused.value.reason is Reason.CAP_VIOLATION


def test_a_budget_in_bytes_pays_for_k_and_v_of_all_heads() -> None:
    shape = Shape(query_heads=9, kv_heads=3, head_dim=64, scale=0.125)
    assert Budget(bytes=10 * 2 * 3 * 64 * 4 + 1).rows(shape) == 10
    assert Budget(tokens=7).rows(shape) == 7
    assert Budget(units=7).rows(shape) is None


def test_what_must_be_fetched_for_a_kv_head() -> None:
    shape = Shape(query_heads=4, kv_heads=2, head_dim=8, scale=1.0)
    lists = tuple(np.array(rows) for rows in ([0, 2], [1, 2], [5], [4]))
    receipt = None
    by_query = Selection(Scope.QUERY_HEAD, lists, (), receipt)  # type: ignore[arg-type]
    assert [by_query.rows_of_kv_head(head, shape).tolist() for head in (0, 1)] == [[0, 1, 2], [4, 5]]
    by_head = Selection(Scope.KV_HEAD, lists[:2], (), receipt)  # type: ignore[arg-type]
    assert by_head.rows_of_kv_head(1, shape).tolist() == [1, 2]
    shared = Selection(Scope.LAYER, lists[:1], (), receipt)  # type: ignore[arg-type]
    assert shared.rows_of_kv_head(1, shape).tolist() == [0, 2]


def test_evidence_says_what_it_has() -> None:
    given_ = Evidence(queries=torch.zeros(1, 2, 4), surprisal=np.zeros(1))
    assert sorted(given_.has()) == ["prefillQueries", "query", "surprisal"]


class GrowingMachine(RuleBasedStateMachine):
    """Handles taken at any time keep what they saw, whoever appends to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[tuple[Growing, list[list[int]]]] = [(Growing((2,), np.int64), [])]
        self.next = 0

    @rule(which=st.integers(0, 1000), count=st.integers(0, 90))
    def append(self, which: int, count: int) -> None:
        handle, model = self.handles[which % len(self.handles)]
        fresh = [[self.next + i, -(self.next + i)] for i in range(count)]
        self.next += count
        grown = handle.plus(np.array(fresh, dtype=np.int64).reshape(count, 2))
        self.handles.append((grown, model + fresh))

    @rule(which=st.integers(0, 1000), share=st.floats(0, 1))
    def cut(self, which: int, share: float) -> None:
        handle, model = self.handles[which % len(self.handles)]
        length = int(len(model) * share)
        self.handles.append((handle.first(length), model[:length]))

    @invariant()
    def every_handle_is_as_it_was(self) -> None:
        for handle, model in self.handles:
            assert len(handle) == len(model)
            assert handle.entries.tolist() == model


TestGrowing = GrowingMachine.TestCase


def test_entries_cannot_be_written_nor_cut_beyond_the_end() -> None:
    handle = Growing.of(np.arange(6).reshape(3, 2))
    with pytest.raises(ValueError, match="read-only"):
        handle.entries[0] = 7
    with pytest.raises(ValueError, match="4 of 3"):
        handle.first(4)
