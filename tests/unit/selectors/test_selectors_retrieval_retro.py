"""RetroInfer: what is read, what its centres answer for, and what no index may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, NeedsRebuild, Query, Selection
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.families.retro_infer import RetroIndex, RetroInfer, Segment
from kvtier_kernels.state import AttentionState, FrameMismatch, LogitFrame, finalize
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector


def family(
    per: int = 4,
    segment: int = 20,
    estimated: int = 3,
    budget: dict[str, object] | None = None,
    sink: int = 2,
    recent: int = 4,
    **more: object,
) -> RetroInfer:
    declared = selector(
        "retrievalAttention",
        {
            "variant": "retroInfer",
            "tokensPerCluster": per,
            "segmentTokens": segment,
            "estimatedClusters": estimated,
        }
        | more,
        budget or {"tokens": 12},
        persistentRows={"sink": sink, "recent": recent},
    )
    made = make_family(declared, SMALL, 16)
    assert isinstance(made, RetroInfer)
    return made


def clusters_of(index: RetroIndex, head: int) -> list[list[int]]:
    """Members of each cluster of a KV head, over all segments; [] where there is none."""
    found = []
    for segment in index.segments:
        rows = segment.members[head].tolist()
        for count in segment.counts[head].tolist():
            found.append(rows[:count])
            rows = rows[count:]
    return found


def exact_state(selection: Selection, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
    """Of the rows that a selection reads."""
    logits = torch.from_numpy(logits_of(q, k)).float()
    m, l, u = (
        torch.empty(1, SMALL.query_heads),
        torch.empty(1, SMALL.query_heads),
        torch.empty(1, SMALL.query_heads, SMALL.head_dim),
    )
    for head in range(SMALL.query_heads):
        rows = torch.from_numpy(selection.positions[head // SMALL.group])
        m[0, head] = logits[head, rows].max()
        w = torch.exp(logits[head, rows] - m[0, head])
        l[0, head], u[0, head] = w.sum(), w @ v[rows, head // SMALL.group]
    return AttentionState(m, l, u, LogitFrame(SMALL.scale))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(8, 70),
    tokens=st.integers(1, 40),
    estimated=st.integers(0, 6),
)
def test_it_agrees_with_a_model_of_the_method(seed: int, count: int, tokens: int, estimated: int) -> None:
    made = family(estimated=estimated, budget={"tokens": tokens})
    k, v = rows_of(seed, count)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    q = query_of(seed + 1)
    selection = made.select(index, Query(q, count, SOURCE))
    keys, values, wide = k.double().numpy(), v.double().numpy(), q[0].double().numpy()
    answer, exact = None, exact_state(selection, q, k, v)
    if selection.remainder is not None:
        answer = selection.remainder.complete(exact)
        assert answer.estimated
    for kv in range(SMALL.kv_heads):
        groups = [(at, rows) for at, rows in enumerate(clusters_of(index, kv)) if rows]
        centres = {at: keys[rows, kv].mean(0) for at, rows in groups}
        score = dict.fromkeys(centres, 0.0)
        for head in range(kv * SMALL.group, (kv + 1) * SMALL.group):
            weight = {at: math.exp(float(wide[head] @ c) * SMALL.scale) for at, c in centres.items()}
            for at in score:
                score[at] += weight[at] / sum(weight.values())
        order = sorted(score, key=lambda at: (-score[at], at))
        sizes = {at: len(rows) for at, rows in groups}
        read: list[int] = []
        while len(read) < len(order) and sum(sizes[at] for at in order[: len(read) + 1]) <= tokens:
            read = order[: len(read) + 1]
        tail, ignored = order[len(read) :][:estimated], order[len(read) :][estimated:]
        assert selection.units[kv].tolist() == sorted(read)
        always = {0, 1, *range(index.sealed, count), *range(count - 4, count)}
        members = {row for at, rows in groups for row in rows if at in read}
        assert selection.positions[kv].tolist() == sorted(always | members)
        for head in range(kv * SMALL.group, (kv + 1) * SMALL.group):
            weight = {at: math.exp(float(wide[head] @ c) * SMALL.scale) for at, c in centres.items()}
            whole = sum(sizes[at] * weight[at] for at in order)
            assert selection.receipt.omitted_mass is not None
            assert selection.receipt.omitted_mass[head] == pytest.approx(
                sum(sizes[at] * weight[at] for at in ignored) / whole if order else 0.0, abs=1e-5
            )
            if answer is None:
                assert not tail
                continue
            rows = selection.positions[kv]
            mass = np.exp(logits_of(q, k)[head, rows])
            l = mass.sum() + sum(sizes[at] * weight[at] for at in tail)
            u = mass @ values[rows, kv] + sum(weight[at] * values[dict(groups)[at], kv].sum(0) for at in tail)
            assert finalize(answer)[0][0, head].numpy() == pytest.approx(u / l, abs=2e-4)


def test_every_row_is_read_or_in_one_cluster() -> None:
    made = family()
    k, v = rows_of(1, 61)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    assert [(one.first, one.end) for one in index.segments] == [(2, 22), (22, 42), (42, 57)]
    for head in range(2):
        assert sorted(row for rows in clusters_of(index, head) for row in rows) == list(range(2, 57))
    selection = made.select(index, Query(query_of(2), 64, SOURCE))
    assert selection.receipt.unindexed == 3
    assert all({0, 1, *range(57, 64)} <= set(rows.tolist()) for rows in selection.positions)


def test_the_estimate_of_clusters_of_equal_keys_is_exact() -> None:
    made = family(per=8, segment=40, estimated=8, budget={"units": 1}, sink=0, recent=0)
    k, v = rows_of(4, 41)
    k = k[torch.arange(41) // 8]
    q = query_of(5)
    selection = made.select(made.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 41, SOURCE))
    assert selection.receipt.got_rows == (8, 8)
    assert selection.receipt.omitted_mass == (0.0,) * 6
    assert selection.remainder is not None
    answer = finalize(selection.remainder.complete(exact_state(selection, q, k, v)))[0][0]
    weights = np.exp(logits_of(q, k))
    for head in range(SMALL.query_heads):
        dense = weights[head] / weights[head].sum() @ v[:, head // SMALL.group].double().numpy()
        assert answer[head].numpy() == pytest.approx(dense, abs=1e-4)


@pytest.mark.parametrize("recent", [0, 1, 4], ids=str)
def test_the_newest_row_counts_once(recent: int) -> None:
    made = family(recent=recent)
    k, v = rows_of(4, 62)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    assert index.sealed == 62 - max(1, recent)


def test_a_loud_key_in_an_estimated_cluster_is_averaged_away() -> None:
    """By Jensen's inequality the estimate is too small, and nothing tells by how much."""
    made = family(per=10, segment=20, estimated=8, budget={"units": 1}, sink=0, recent=0)
    k = torch.zeros(21, 2, 16)
    k[:10, :, 0] = 1.0
    k[4, :, 0] = 12.0
    k[10:20, :, 1] = 3.0
    q = torch.zeros(1, 6, 16)
    q[:, :, :2] = 4.0
    selection = made.select(made.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 21, SOURCE))
    assert selection.positions[0].tolist() == [*range(10, 20), 20]
    assert selection.remainder is not None
    completed = selection.remainder.complete(exact_state(selection, q, k, k))
    mass = float(completed.l[0, 0]) * math.exp(float(completed.m[0, 0]))
    assert mass < 0.01 * np.exp(logits_of(q, k)[0]).sum()
    assert selection.receipt.omitted_mass == (0.0,) * 6, "the estimate does not see it either"


def test_ranking_sums_softmaxes_of_a_group_and_not_logits() -> None:
    """One head wants the first cluster by 50, two want the second by 5 each."""
    made = family(per=10, segment=20, budget={"units": 1}, sink=0, recent=0)
    k = torch.zeros(21, 2, 16)
    k[:10, :, 0] = 1.0
    k[10:20, :, 1] = 1.0
    q = torch.zeros(1, 6, 16)
    q[:, ::3, 0] = 200.0
    q[:, 1::3, 1] = q[:, 2::3, 1] = 20.0
    selection = made.select(made.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 21, SOURCE))
    assert [rows.tolist() for rows in selection.positions] == [list(range(10, 21))] * 2
    assert logits_of(q, k)[:3, 0].sum() > logits_of(q, k)[:3, 10].sum(), "a sum of logits reads the other"
    assert logits_of(q, k)[:3, 0].max() > logits_of(q, k)[:3, 10].max(), "and so does a largest logit"


def test_the_published_family_is_never_its_name() -> None:
    made = family()
    k, v = rows_of(1, 40)
    receipt = made.select(made.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(1), 40, SOURCE)).receipt
    assert (receipt.family, receipt.variant) == ("retrievalAttention", "retroInfer")
    assert receipt.certified_mass is None
    with pytest.raises(CoreError) as refused:
        family(variant="wave")
    assert refused.value.reason is Reason.VARIANT_UNKNOWN


def test_however_rows_arrive_the_clusters_are_the_same_and_old_handles_stay() -> None:
    made = family()
    k, v = rows_of(9, 90)
    first = made.build(SOURCE, k[:31], v[:31], NO_EVIDENCE)
    whole = made.append(first, k[31:], v[31:], NO_EVIDENCE)
    index = first
    for row in range(31, 90):
        index = made.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    assert [one.sha for one in index.segments] == [one.sha for one in whole.segments]
    assert [(one.first, one.end) for one in index.segments] == [(2, 22), (22, 27), (27, 47), (47, 67)]
    assert first.sealed == 27 and len(first.segments) == 2
    query = Query(query_of(1), 90, SOURCE)
    ours, theirs = made.select(index, query), made.select(whole, query)
    assert all(np.array_equal(a, b) for a, b in zip(ours.positions, theirs.positions, strict=True))


@pytest.mark.parametrize("start", [0, 1, 3, 6], ids=str)
def test_a_sequence_that_starts_inside_its_persistent_rows(start: int) -> None:
    made = family()
    k, v = rows_of(4, 40)
    index = made.build(SOURCE, k[:start], v[:start], NO_EVIDENCE)
    for row in range(start, 40):
        selection = made.select(index, Query(query_of(1), row + 1, SOURCE))
        assert selection.positions[0][-1] == row
        index = made.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    assert [(one.first, one.end) for one in index.segments] == [(2, 22)]


@pytest.mark.parametrize(
    ("first", "covered"),
    [(85, 85), (70, 47), (50, 27), (24, None)],
    ids=["waiting", "recent-reach-a-segment", "inside-a-segment", "inside-the-first"],
)
def test_an_edit_keeps_whole_segments(first: int, covered: int | None) -> None:
    made = family(segment=25)
    k, v = rows_of(9, 90)
    index = made.append(made.build(SOURCE, k[:31], v[:31], NO_EVIDENCE), k[31:], v[31:], NO_EVIDENCE)
    ends = [one.end for one in index.segments]
    edited = made.edit(index, Edit(first=first, epoch=1, truncated=True))
    if covered is None:
        assert isinstance(edited, NeedsRebuild)
        return
    assert isinstance(edited, RetroIndex)
    assert edited.facts.covered in (first, *ends)
    assert edited.sealed <= first - 4
    again = made.append(edited, k[edited.facts.covered :], v[edited.facts.covered :], NO_EVIDENCE)
    assert [one.sha for one in again.segments] == [one.sha for one in index.segments]
    with pytest.raises(CoreError) as refused:
        made.select(again, Query(query_of(1), 90, SOURCE))
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
    made.select(again, Query(query_of(1), 90, replace(SOURCE, position_epoch=1)))


def valid() -> tuple[RetroInfer, RetroIndex]:
    made = family()
    k, v = rows_of(9, 50)
    return made, made.build(SOURCE, k, v, NO_EVIDENCE)


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda s: replace(s, counts=-s.counts), Reason.CENTROID_MASS),
        (lambda s: replace(s, counts=s.counts + 1), Reason.COVERAGE_GAP),
        (lambda s: replace(s, members=s.members - 1), Reason.COVERAGE_GAP),
        (lambda s: replace(s, sums=s.sums[:, :-1]), Reason.SELECTOR_STATE_MIXED),
        (lambda s: replace(s, counts=s.counts[:, :-1]), Reason.SELECTOR_STATE_MIXED),
    ],
    ids=["negative", "counts", "members", "sums", "fewer-counts"],
)
def test_a_segment_that_contradicts_itself_cannot_be_made(
    mutate: Callable[[Segment], Segment], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(valid()[1].segments[0])
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (
            lambda i: replace(
                i, segments=(replace(i.segments[0], sums=i.segments[0].sums + 1), *i.segments[1:])
            ),
            Reason.SELECTOR_STATE_MIXED,
        ),
        (lambda i: replace(i, segments=i.segments[1:]), Reason.COVERAGE_GAP),
        (lambda i: replace(i, segments=i.segments[:1]), Reason.SELECTOR_STATE_MIXED),
        (lambda i: replace(i, v=i.v.first(1)), Reason.SELECTOR_STATE_MIXED),
        (lambda i: replace(i, facts=replace(i.facts, covered=51)), Reason.SELECTOR_STATE_MIXED),
    ],
    ids=["sums-of-another-build", "first-missing", "last-missing", "values", "frontier"],
)
def test_an_index_of_mixed_parts_cannot_be_made(
    mutate: Callable[[RetroIndex], RetroIndex], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(valid()[1])
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("source", "rows", "reason"),
    [
        (replace(SOURCE, layer=2), 50, Reason.LAYER_DISTANCE),
        (replace(SOURCE, digest=b"o" * 32), 50, Reason.IDENTITY_MISMATCH),
        (replace(SOURCE, position_epoch=3), 50, Reason.POSITION_CONTRACT_MISMATCH),
        (SOURCE, 49, Reason.INDEX_STALE),
        (SOURCE, 55, Reason.INDEX_FRONTIER_LAG),
    ],
    ids=["layer", "source", "positions", "rows-gone", "lag"],
)
def test_an_index_of_something_else_is_refused(source: object, rows: int, reason: Reason) -> None:
    made, index = valid()
    with pytest.raises(CoreError) as refused:
        made.select(index, Query(query_of(1), rows, source))  # type: ignore[arg-type]
    assert refused.value.reason is reason
    with pytest.raises(CoreError) as refused:
        family(5).select(index, Query(query_of(1), 50, SOURCE))
    assert refused.value.reason is Reason.SELECTOR_STALE


def test_states_of_another_factor_do_not_merge() -> None:
    made, index = valid()
    k, v = rows_of(9, 50)
    selection = made.select(index, Query(query_of(1), 50, SOURCE))
    exact = exact_state(selection, query_of(1), k, v)
    assert selection.remainder is not None
    with pytest.raises(FrameMismatch):
        selection.remainder.complete(replace(exact, frame=LogitFrame(0.5)))
    moved = selection.remainder.complete(replace(exact, frame=LogitFrame(SMALL.scale, rope_epoch=3)))
    assert moved.frame.rope_epoch == 3


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"tokensPerCluster": 0}, "retrievalAttention.tokensPerCluster must be"),
        ({"estimatedClusters": -1}, "retrievalAttention.estimatedClusters must be"),
        ({"iterations": 0}, "retrievalAttention.iterations must be"),
        ({"outDegree": 4}, "has no parameters outDegree"),
    ],
    ids=["cluster", "estimated", "iterations", "of-the-graph"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(CoreError) as refused:
        family(**parameters)  # type: ignore[arg-type]
    assert refused.value.reason is Reason.MANIFEST_INVALID
    assert words in refused.value.message
