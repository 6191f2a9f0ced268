"""ClusterKV: its clusters and its trim as published, where both are wrong, and what no index may be."""

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
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, NeedsRebuild, Query, Shape
from kvtier_core.selectors.families.cluster_kv import ClusterIndex, ClusterKv, Clusters
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.picking import Persistent
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector

ONE = Shape(query_heads=1, kv_heads=1, head_dim=2, scale=1 / math.sqrt(2))


def family(
    per: int = 5,
    seal: int = 10,
    per_seal: int = 2,
    budget: dict[str, object] | None = None,
    shape: Shape = SMALL,
    sink: int = 2,
    recent: int = 4,
    **more: object,
) -> ClusterKv:
    declared = selector(
        "clusterKv",
        {"tokensPerCluster": per, "sealTokens": seal, "clustersPerSeal": per_seal} | more,
        budget or {"tokens": 12},
        persistentRows={"sink": sink, "recent": recent},
    )
    made = make_family(declared, shape, 16)
    assert isinstance(made, ClusterKv)
    return made


def keys_of(angles: list[float], norms: list[float] | None = None) -> torch.Tensor:
    """float32 [n, 1, 2] at `angles` in degrees."""
    radians = np.radians(angles)
    k = np.stack([np.cos(radians), np.sin(radians)], 1) * np.array(norms or [1.0] * len(angles))[:, None]
    return torch.from_numpy(k.astype(np.float32)[:, None])


def model_of_clusters(k: list[list[float]], first: int, count: int, iterations: int) -> list[list[int]]:
    """Members of each cluster by the paper, one scalar at a time."""
    x = []
    for row in k:
        norm = math.sqrt(sum(a * a for a in row))
        x.append([a / norm for a in row])
    starts = [math.floor(c * (len(x) - 1) / max(1, count - 1) + 0.5) for c in range(count)]
    centres = [x[at] for at in starts]
    label = [0] * len(x)
    for _ in range(iterations):
        for i, row in enumerate(x):
            near = [sum(a * b for a, b in zip(row, c, strict=True)) for c in centres]
            label[i] = max(range(count), key=lambda c: (near[c], -c))
        for c in range(count):
            mine = [x[i] for i in range(len(x)) if label[i] == c]
            if mine:
                mean = [sum(column) / len(mine) for column in zip(*mine, strict=True)]
                norm = math.sqrt(sum(a * a for a in mean))
                centres[c] = [a / norm for a in mean]
    groups = [[first + i for i in range(len(x)) if label[i] == c] for c in range(count)]
    return [group for group in groups if group]


def model_of_choice(
    groups: list[list[int]], k: np.ndarray, q: np.ndarray, budget: int, always: set[int]
) -> tuple[list[int], list[int]]:
    """Clusters best first and rows, from raw keys k [n, d] and q [d]."""
    scores = []
    for group in groups:
        mean = sum(k[i] / np.linalg.norm(k[i]) for i in group) / len(group)
        scores.append(float(q @ (mean / np.linalg.norm(mean))))
    clusters: list[int] = []
    rows: list[int] = []
    for c in sorted(range(len(groups)), key=lambda c: (-scores[c], c)):
        if len(rows) >= budget:
            break
        clusters.append(c)
        rows += [i for i in groups[c] if i not in always]
    return clusters, rows[:budget]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(8, 60), budget=st.integers(1, 40))
def test_it_agrees_with_a_model_of_the_paper(seed: int, count: int, budget: int) -> None:
    made = family(budget={"tokens": budget})
    k, v = rows_of(seed, count)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    q = query_of(seed + 1)
    selection = made.select(index, Query(q, count, SOURCE))
    always = set(range(2)) | set(range(count - 4, count))
    for head in range(SMALL.query_heads):
        mine = k[:, head // SMALL.group].double().numpy()
        clusters = min(made.prefill_clusters(count), count - 2)
        groups = model_of_clusters(mine[2:].tolist(), 2, clusters, 20)
        chosen, rows = model_of_choice(groups, mine, q[0, head].double().numpy(), budget, always)
        assert selection.units[head].tolist() == sorted(chosen)
        assert selection.positions[head].tolist() == sorted(always | set(rows))
        assert selection.receipt.got_rows[head] == len(rows)


def toy(**more: object) -> tuple[ClusterKv, ClusterIndex, torch.Tensor]:
    """The witness of C8.13 to C8.16: rows 1 to 8 of the vectors are rows 0 to 7 here."""
    made = family(3, shape=ONE, sink=0, recent=0, **({"budget": {"tokens": 5}} | more))  # type: ignore[arg-type]
    k = keys_of([0.0, 7.8, 15.6, 78.2, 83.2, 88.2, 174.85, 178.85])
    return made, made.build(SOURCE, k, k, NO_EVIDENCE), torch.tensor([[[1.0, 0.0]]])


def test_c8_13_to_16_the_toy_of_the_specification() -> None:
    made, index, q = toy()
    (head,) = index.heads
    assert np.split(head.members + 1, head.ends[:-1])[0].tolist() == [1, 2, 3]
    assert (head.members + 1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert head.ends.tolist() == [3, 6, 8]
    expected = [[0.9907478405, 0.1357155724], [0.1184039683, 0.9929655081], [-0.9984890975, 0.0549501799]]
    assert head.centroids == pytest.approx(np.array(expected), abs=1e-6)
    selection = made.select(index, Query(q, 9, SOURCE))
    assert selection.receipt.detail["clusters"] == "0,1"
    assert (selection.positions[0] + 1).tolist() == [1, 2, 3, 4, 5, 9]
    assert selection.receipt.detail["trimmedRows"] == "1"
    assert selection.receipt.dropped_by_cap == (1,)


def test_c9_08_a_persistent_row_of_a_chosen_cluster_is_read_once() -> None:
    """T9: clusters {0,3,6}, {1,5}, {2,4,7}, best 0 and 2, row 0 persistent: {0,2,3,4,6,7} five rows paid."""
    made = family(3, shape=ONE, sink=0, recent=0, budget={"units": 2})
    k = keys_of([0, 120, 60, 1, 61, 121, 2, 62])
    index = made.build(SOURCE, k, k, NO_EVIDENCE)
    persistent = Persistent(np.arange(8) == 0)
    choice = made._choose(index.heads[0], np.array([1.0, 0.0]), persistent)
    rows, beyond = persistent.joined(choice.rows)
    assert rows.tolist() == [0, 2, 3, 4, 6, 7]
    assert (choice.read, beyond, len(choice.clusters)) == (5, 5, 2)


@pytest.mark.parametrize(
    ("rows", "clusters"), [(32_000, 400), (32_768, 410), (1, 1)], ids=["c8-17", "c8-18-not-400", "least"]
)
def test_how_many_clusters_a_prefill_has(rows: int, clusters: int) -> None:
    assert family(80).prefill_clusters(rows) == clusters


def test_c8_19_each_sealed_window_adds_as_many_clusters() -> None:
    made = family(8, seal=32, per_seal=4, sink=0)
    k, v = rows_of(3, 80 + 96)
    index = made.build(SOURCE, k[:80], v[:80], NO_EVIDENCE)
    counts = [len(index.heads[0].ends)]
    for end in (112, 176):
        begin = index.facts.covered
        index = made.append(index, k[begin:end], v[begin:end], NO_EVIDENCE)
        counts.append(len(index.heads[0].ends))
    assert counts == [10, 14, 22]
    assert [segment[0] for segment in index.segments] == [80, 112, 144, 176]


def test_the_trim_of_the_published_code_drops_the_best_key() -> None:
    """Anchor 1.11: one cluster of eight, the row that holds most of the attention is its last."""
    k = keys_of([1, 2, 3, 4, 5, 6, 7, 0], [1.0] * 7 + [6.0])
    q = torch.tensor([[[2.0, 0.0]]])
    shares = {}
    for order in ("position", "centrality"):
        made = family(8, shape=ONE, sink=0, recent=0, budget={"tokens": 6}, memberOrder=order)
        selection = made.select(made.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 9, SOURCE))
        weights = np.exp(logits_of(q, k, ONE)[0])
        rows = selection.positions[0]
        shares[order] = weights[rows[rows < 8]].sum() / weights.sum()
        assert 7 not in rows, "neither order looks at q . k"
    assert shares["position"] < 0.05


def test_a_budget_for_all_rows_reads_all_clusters() -> None:
    """The authors' code reads one cluster then: its sentinel wins the search for the crossing cluster."""
    made, index, q = toy(budget={"tokens": 100})
    selection = made.select(index, Query(q, 9, SOURCE))
    assert selection.positions[0].tolist() == list(range(9))
    assert selection.receipt.got_units == (3,)
    assert selection.receipt.dropped_by_cap == (0,)


def test_order_by_centrality_keeps_the_rows_nearest_the_centre() -> None:
    k = keys_of([0, 30, 14, 16, 15])
    q = torch.tensor([[[1.0, 0.0]]])
    kept = {}
    for order in ("position", "centrality"):
        made = family(5, shape=ONE, sink=0, recent=0, budget={"tokens": 3}, memberOrder=order)
        kept[order] = made.select(made.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 6, SOURCE)).positions[0][
            :-1
        ]
    assert kept["position"].tolist() == [0, 1, 2]
    assert kept["centrality"].tolist() == [2, 3, 4]


def test_mixed_norms_hide_the_largest_logit() -> None:
    """The centre forgets |k|: a key of norm 10 at 40 degrees loses to keys of norm 1 at 10 degrees."""
    k = keys_of([10, 11, 12, 40, 41, 42], [1, 1, 1, 10, 1, 1])
    made = family(3, shape=ONE, sink=0, recent=0, budget={"tokens": 3})
    q = torch.tensor([[[3.0, 0.0]]])
    selection = made.select(made.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 7, SOURCE))
    assert selection.positions[0].tolist() == [0, 1, 2, 6]
    weights = np.exp(logits_of(q, k, ONE)[0])
    assert weights[:3].sum() / weights.sum() < 1e-4


def test_a_ranking_by_mass_by_mean_key_or_by_size_would_choose_otherwise() -> None:
    k = keys_of([0, 5, 60, 61, 62, 63, 64, 65, 45, 46], [1, 1, 1, 1, 1, 1, 1, 1, 9, 9])
    made = family(5, shape=ONE, sink=0, recent=0, budget={"units": 1}, per_seal=2)
    x = made._made(k.numpy()[:, 0], 3, 0)
    groups = np.split(x.members, x.ends[:-1])
    q = np.array([3.0, 0.0])
    raw = [k[group, 0].double().numpy() for group in groups]
    mine = made._choose(x, q, Persistent(np.zeros(10, dtype=np.bool_))).clusters[0]
    assert set(groups[mine].tolist()) == {0, 1}
    assert mine != int(np.argmax([np.exp(rows @ q).sum() for rows in raw])), "not mass"
    assert mine != int(np.argmax([rows.mean(0) @ q for rows in raw])), (
        "not SqueezedAttention's mean of raw keys"
    )
    assert mine != int(np.argmax([np.maximum(rows.min(0) * q, rows.max(0) * q).sum() for rows in raw])), (
        "no box"
    )
    assert mine != int(np.argmax([len(rows) for rows in raw])), "not size"


def test_however_rows_arrive_the_clusters_are_the_same_and_old_handles_stay() -> None:
    made = family()
    k, v = rows_of(9, 70)
    first = made.build(SOURCE, k[:23], v[:23], NO_EVIDENCE)
    before = [head.members.copy() for head in first.heads]
    whole = made.append(first, k[23:], v[23:], NO_EVIDENCE)
    index = first
    for row in range(23, 70):
        index = made.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    for one, other, old in zip(index.heads, whole.heads, before, strict=True):
        assert np.array_equal(one.members, other.members)
        assert np.array_equal(one.centroids, other.centroids)
        assert np.array_equal(one.members[: len(old)], old)
    assert first.facts.covered == 23 and len(first.waiting) == 0
    assert index.sealed == 63 and len(index.waiting) == 7
    query = Query(query_of(1), 70, SOURCE)
    ours, theirs = made.select(index, query), made.select(whole, query)
    assert all(np.array_equal(a, b) for a, b in zip(ours.positions, theirs.positions, strict=True))
    assert all(set(range(63, 70)) <= set(rows.tolist()) for rows in ours.positions)


@pytest.mark.parametrize("start", [0, 1, 2], ids=str)
def test_a_sequence_that_starts_inside_its_sink(start: int) -> None:
    made = family()
    k, v = rows_of(4, 30)
    index = made.build(SOURCE, k[:start], v[:start], NO_EVIDENCE)
    for row in range(start, 30):
        assert made.select(index, Query(query_of(1), row + 1, SOURCE)).positions[0][-1] == row
        index = made.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    assert [(head.first, head.end) for head in index.heads] == [(2, 22)] * 2


@pytest.mark.parametrize(
    ("first", "covered"),
    [(68, 68), (60, 53), (23, 23), (20, None)],
    ids=["waiting", "inside-a-seal", "after-the-prefill", "inside-the-prefill"],
)
def test_an_edit_keeps_whole_segments(first: int, covered: int | None) -> None:
    made = family()
    k, v = rows_of(9, 70)
    index = made.append(made.build(SOURCE, k[:23], v[:23], NO_EVIDENCE), k[23:], v[23:], NO_EVIDENCE)
    edited = made.edit(index, Edit(first=first, epoch=1, truncated=True))
    if covered is None:
        assert isinstance(edited, NeedsRebuild) and "first 23 rows" in edited.why
        return
    assert isinstance(edited, ClusterIndex)
    assert edited.facts.covered == covered
    again = made.append(edited, k[covered:], v[covered:], NO_EVIDENCE)
    moved = replace(SOURCE, position_epoch=1)
    assert isinstance(again, ClusterIndex)
    assert all(np.array_equal(a.members, b.members) for a, b in zip(again.heads, index.heads, strict=True))
    made.select(again, Query(query_of(1), 70, moved))
    with pytest.raises(CoreError) as refused:
        made.select(again, Query(query_of(1), 70, SOURCE))
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH


def valid() -> Clusters:
    return toy()[1].heads[0]


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda c: replace(c, first=1), Reason.CLUSTER_ROLE),
        (
            lambda c: replace(c, ends=np.array([3, 3, 6, 8]), centroids=c.centroids[[0, 1, 1, 2]]),
            Reason.CLUSTER_EMPTY,
        ),
        (lambda c: replace(c, centroids=c.centroids * 2), Reason.CENTROID_INVALID),
        (
            lambda c: replace(c, members=np.where(c.members == 4, 3, c.members)),
            Reason.COVERAGE_GAP,
        ),
        (lambda c: replace(c, ends=np.array([3, 6, 9])), Reason.CLUSTER_SIZES),
        (lambda c: replace(c, ends=np.array([6, 3, 8])), Reason.CLUSTER_SIZES),
        (
            lambda c: replace(c, centroids=c.centroids[[0, 1, 2, 2]], ends=np.array([3, 6, 8, 10])),
            Reason.CLUSTER_SIZES,
        ),
        (lambda c: replace(c, centroids=c.centroids[[0, 1, 2, 2]]), Reason.SELECTOR_STATE_MIXED),
    ],
    ids=[
        "sink-row",
        "empty",
        "not-unit",
        "label-missing",
        "sizes",
        "prefix-sum",
        "append-without-members",
        "new-centroids-old-sums",
    ],
)
def test_clusters_that_contradict_themselves_cannot_be_made(
    mutate: Callable[[Clusters], Clusters], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(valid())
    assert refused.value.reason is reason


def test_labels_of_before_an_append_are_refused_beside_what_came_after() -> None:
    made = family()
    k, v = rows_of(9, 40)
    old = made.build(SOURCE, k[:23], v[:23], NO_EVIDENCE)
    new = made.append(old, k[23:], v[23:], NO_EVIDENCE)
    for mixed in ((old.heads[0], new.heads[1]), old.heads):
        with pytest.raises(CoreError) as refused:
            replace(new, heads=mixed)
        assert refused.value.reason is Reason.SELECTOR_STATE_MIXED


@pytest.mark.parametrize(
    ("source", "rows", "reason"),
    [
        (replace(SOURCE, layer=2), 40, Reason.LAYER_DISTANCE),
        (replace(SOURCE, digest=b"o" * 32), 40, Reason.IDENTITY_MISMATCH),
        (replace(SOURCE, position_epoch=3), 40, Reason.POSITION_CONTRACT_MISMATCH),
        (SOURCE, 39, Reason.INDEX_STALE),
        (SOURCE, 45, Reason.INDEX_FRONTIER_LAG),
    ],
    ids=["layer", "source", "positions", "rows-gone", "lag"],
)
def test_an_index_of_something_else_is_refused(source: object, rows: int, reason: Reason) -> None:
    made = family()
    k, v = rows_of(9, 40)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    with pytest.raises(CoreError) as refused:
        made.select(index, Query(query_of(1), rows, source))  # type: ignore[arg-type]
    assert refused.value.reason is reason
    with pytest.raises(CoreError) as refused:
        family(6).select(index, Query(query_of(1), 40, SOURCE))
    assert refused.value.reason is Reason.SELECTOR_STALE


def test_keys_and_values_that_no_cluster_can_hold() -> None:
    made = family()
    k, v = rows_of(1, 20)
    with pytest.raises(CoreError) as refused:
        made.build(SOURCE, k, v[:19], NO_EVIDENCE)
    assert refused.value.reason is Reason.ROW_INCOMPLETE
    k[7, 0, 0] = torch.nan
    with pytest.raises(CoreError) as refused:
        made.build(SOURCE, k, v, NO_EVIDENCE)
    assert refused.value.reason is Reason.CENTROID_INVALID


def test_keys_of_zeros_and_equal_keys_have_clusters_too() -> None:
    made = family()
    k, v = torch.zeros(30, 2, 16), torch.zeros(30, 2, 16)
    selection = made.select(made.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(1), 30, SOURCE))
    assert selection.receipt.got_units == (1,) * 6
    assert selection.receipt.got_rows == (12,) * 6


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({}, Reason.MANIFEST_INVALID, "clusterKv.tokensPerCluster must be given"),
        ({"tokensPerCluster": 0}, Reason.MANIFEST_INVALID, "a whole number from 1 to 4096, not 0"),
        ({"iterations": 0}, Reason.MANIFEST_INVALID, "clusterKv.iterations must be"),
        ({"memberOrder": "any"}, Reason.CLUSTER_TRIM, "must be position or centrality, not 'any'"),
        ({"clustersPerSeal": 11}, Reason.CLUSTER_SIZES, "clustersPerSeal 11 of sealTokens 10"),
        ({"nlist": 4}, Reason.MANIFEST_INVALID, "has no parameters nlist"),
    ],
    ids=["absent", "too-small", "iterations", "trim-order", "seal", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, object], reason: Reason, words: str) -> None:
    given_ = (
        {"tokensPerCluster": 5, "sealTokens": 10, "clustersPerSeal": 2} | parameters if parameters else {}
    )
    with pytest.raises(CoreError) as refused:
        ClusterKv.from_manifest(selector("clusterKv", given_, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message


def test_whether_rows_are_left_out() -> None:
    assert not family().omits(18)
    assert family().omits(19)
