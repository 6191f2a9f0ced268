"""SqueezedAttention: scores and thresholds as published, where means deceive, and what no index may be."""

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
from kvtier_core.selectors.contract import (
    NO_EVIDENCE,
    Edit,
    IndexFacts,
    NeedsRebuild,
    Query,
    Shape,
    Source,
)
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.families.squeezed_attention import (
    FixedClusters,
    FixedIndex,
    SqueezedAttention,
    calibrated_threshold,
    scores,
)
from kvtier_core.selectors.live import LiveFamily
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector

ONE = Shape(query_heads=1, kv_heads=1, head_dim=2, scale=1 / math.sqrt(2))


def family(
    threshold: str = "0.02",
    clusters: int = 9,
    budget: dict[str, object] | None = None,
    shape: Shape = SMALL,
    sink: int = 2,
    recent: int = 4,
    **more: object,
) -> SqueezedAttention:
    declared = selector(
        "squeezedAttention",
        {"clusters": clusters, "threshold": threshold} | more,
        budget or {"tokens": 1000},
        persistentRows={"sink": sink, "recent": recent},
        seed=7,
    )
    made = make_family(declared, shape, 16)
    assert isinstance(made, SqueezedAttention)
    return made


def model_of_choice(
    k: np.ndarray, labels: np.ndarray, q: np.ndarray, scale: float, threshold: float
) -> tuple[list[int], list[int], float]:
    """Clusters, rows and the share of the centroids' mass left out, by the paper, cluster by cluster."""
    members = [[i for i in range(len(k)) if labels[i] == c] for c in range(int(labels.max()) + 1)]
    z = [float(q @ (sum(k[i] for i in group) / len(group))) * scale for group in members]
    d = sum(len(group) * math.exp(one) for group, one in zip(members, z, strict=True))
    kept = [c for c, one in enumerate(z) if math.exp(one) / d > threshold]
    left = sum(len(members[c]) * math.exp(z[c]) / d for c in range(len(z)) if c not in kept)
    return kept, sorted(i for c in kept for i in members[c]), left


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(8, 60),
    threshold=st.sampled_from(["0", "0.005", "0.02", "0.1", "0.9"]),
    scale=st.sampled_from(["scaled", "unscaled"]),
)
def test_it_agrees_with_a_model_of_the_paper(seed: int, count: int, threshold: str, scale: str) -> None:
    made = family(threshold, sink=0, recent=0, scoreScale=scale)
    k, v = rows_of(seed, count)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    q = query_of(seed + 1)
    selection = made.select(index, Query(q, count + 1, SOURCE))
    for head in range(SMALL.query_heads):
        kept, rows, left = model_of_choice(
            k[:, head // SMALL.group].double().numpy(),
            index.heads[head // SMALL.group].labels,
            q[0, head].double().numpy(),
            SMALL.scale if scale == "scaled" else 1.0,
            float(threshold),
        )
        assert selection.units[head].tolist() == kept
        assert selection.positions[head].tolist() == [*rows, count]
        assert selection.receipt.omitted_mass is not None
        assert selection.receipt.omitted_mass[head] == pytest.approx(left, abs=1e-5)
        assert selection.receipt.got_rows[head] == len(rows)


def test_clusters_are_a_fixed_point_of_k_means_on_normalised_keys_with_raw_means() -> None:
    made = family(clusters=6)
    k, v = rows_of(3, 80)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    for at, head in enumerate(index.heads):
        raw = k[:, at].double().numpy()
        x = raw / np.linalg.norm(raw, axis=1, keepdims=True)
        centres = [x[head.labels == c].mean(0) for c in range(len(head.counts))]
        for row, label in zip(x, head.labels, strict=True):
            far = [float(((row - centre) ** 2).sum()) for centre in centres]
            assert far[label] <= min(far) + 1e-12
        for c in range(len(head.counts)):
            assert head.centroids[c] == pytest.approx(raw[head.labels == c].mean(0), abs=1e-5)
    again = made.build(SOURCE, k, v, NO_EVIDENCE)
    assert again.facts.digest == index.facts.digest


def toy(
    threshold: str = "0.15", *, levels: int = 1, coarse: str = "0.1", **more: object
) -> tuple[SqueezedAttention, FixedIndex, torch.Tensor]:
    """C7.13 to C7.17: A {3, -1}, B {1.4 x 4}, C {-2 x 2}; groups {A, C} and {B}."""
    two: dict[str, object] = (
        {"levels": 2, "coarseThreshold": coarse, "coarseClusters": 2} if levels == 2 else {}
    )
    made = family(threshold, 3, shape=ONE, sink=0, recent=0, **two, **more)  # type: ignore[arg-type]
    none = np.empty((0, 2), np.float32)
    head = FixedClusters(
        labels=np.array([0, 0, 1, 1, 1, 1, 2, 2]),
        centroids=np.array([[1.0, 0], [1.4, 0], [-2.0, 0]], np.float32),
        counts=np.array([2, 4, 2]),
        parents=np.array([0, 1, 0]) if levels == 2 else np.empty(0, np.int64),
        coarse=np.array([[-0.5, 0], [1.4, 0]], np.float32) if levels == 2 else none,
        coarse_counts=np.array([4, 4]) if levels == 2 else np.empty(0, np.int64),
    )
    facts = IndexFacts(made.digest, SOURCE, epoch=1, covered=8, seed=7)
    return made, FixedIndex.published(facts, (head,), "sha256:toy", made.scale), torch.tensor([[[1.0, 0.0]]])


def test_c7_13_and_14_scores_weigh_clusters_by_their_rows() -> None:
    _, index, _ = toy()
    (head,) = index.heads
    share, log_mass = scores(head.centroids, head.counts, np.array([1.0, 0.0]), ONE.scale)
    assert share == pytest.approx([0.1324971480, 0.1758099941, 0.0158828638], abs=1e-7)
    assert (share * head.counts).sum() == pytest.approx(1, abs=1e-12)
    unweighted = np.exp(np.array([1.0, 1.4, -2.0]) * ONE.scale)
    assert (unweighted / unweighted.sum() > 0.15).tolist() == [True, True, False], "C7.16"
    assert log_mass == pytest.approx(math.log((unweighted * [2, 4, 2]).sum()), abs=1e-7)


def test_c7_15_the_best_row_hides_in_a_cluster_below_the_threshold() -> None:
    made, index, q = toy()
    selection = made.select(index, Query(q, 9, SOURCE))
    assert selection.units[0].tolist() == [1]
    assert selection.positions[0].tolist() == [2, 3, 4, 5, 8]
    assert selection.receipt.omitted_mass == pytest.approx((1 - 4 * 0.1758099941,), abs=1e-6)


def test_c7_17_only_a_coarse_cluster_above_its_threshold_is_opened() -> None:
    made, index, q = toy("0.2", levels=2)
    (head,) = index.heads
    coarse, _ = scores(head.coarse, head.coarse_counts, np.array([1.0, 0.0]), ONE.scale)
    assert coarse == pytest.approx([0.0517336502, 0.1982663498], abs=1e-7)
    receipt = made.select(index, Query(q, 9, SOURCE)).receipt
    assert receipt.detail["coarseChosen"] == "1"
    assert receipt.scanned_units == 3, "two coarse ones and the one child"
    assert receipt.got_rows == (4,)
    assert receipt.omitted_mass == pytest.approx((4 * 0.0517336502,), abs=1e-6)
    assert made.select(toy("0.2", levels=2, coarse="0.1")[1], Query(-q, 9, SOURCE)).units[0].tolist() == [2]


def test_a_coarse_mean_hides_its_best_child() -> None:
    flat, index, q = toy("0.1")
    assert flat.select(index, Query(q, 9, SOURCE)).units[0].tolist() == [0, 1]
    deep, index, q = toy("0.1", levels=2)
    assert deep.select(index, Query(q, 9, SOURCE)).units[0].tolist() == [1]


def test_two_levels_that_open_everything_are_one_level() -> None:
    k, v = rows_of(5, 90)
    one = family("0.01")
    two = family("0.01", levels=2, coarseThreshold="0")
    query = Query(query_of(6), 90, SOURCE)
    flat = one.select(one.build(SOURCE, k, v, NO_EVIDENCE), query)
    deep = two.select(two.build(SOURCE, k, v, NO_EVIDENCE), query)
    assert all(np.array_equal(a, b) for a, b in zip(flat.positions, deep.positions, strict=True))


def test_one_large_key_among_small_ones_of_its_direction_is_lost() -> None:
    """Anchor 1.7: 99 keys e1 and one 10 e1 have the mean 1.09, beside a cluster at 1.3 of another
    direction."""
    k = torch.zeros(110, 1, 2)
    k[:99, 0, 0] = 1
    k[99, 0, 0] = 10
    k[100:, 0] = torch.tensor([1.3, 2.2])
    made = family("0.0095", 2, shape=ONE, sink=0, recent=0)
    q = torch.tensor([[[1.4, 0.0]]])
    selection = made.select(made.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 111, SOURCE))
    weights = np.exp(logits_of(q, k, ONE)[0])
    assert 99 not in selection.positions[0]
    assert weights[selection.positions[0][:-1]].sum() / weights.sum() < 0.01
    assert selection.receipt.omitted_mass is not None
    assert selection.receipt.omitted_mass[0] < 0.95, "the estimate does not see it either"


def test_other_families_scores_choose_other_clusters() -> None:
    """Equal directions do not tie here, as they do for normalised centroids; and a mass decides nothing."""
    k = torch.tensor([[[1.0, 0.0]]] * 6 + [[[2.0, 2.2]]] * 2)
    made = family("0.16", 2, shape=ONE, sink=0, recent=0)
    index = made.build(SOURCE, k, k, NO_EVIDENCE)
    q = torch.tensor([[[1.0, 0.0]]])
    chosen = made.select(index, Query(q, 9, SOURCE)).positions[0].tolist()
    assert chosen == [6, 7, 8]
    x = k[:, 0].numpy() / np.linalg.norm(k[:, 0].numpy(), axis=1, keepdims=True)
    assert (x[:6] @ [1, 0]).min() > (x[6:] @ [1, 0]).max(), "ClusterKV would read the other"
    mass = np.exp(logits_of(q, k, ONE)[0])
    assert mass[:6].sum() > mass[6:].sum(), "and so would a rank by mass"


@pytest.mark.parametrize(
    ("policy", "outcome"), [("truncate", 0), ("dense", 8), ("error", Reason.CAP_VIOLATION)], ids=str
)
def test_more_rows_than_the_budget(policy: str, outcome: object) -> None:
    made, index, q = toy("0.1", budget={"tokens": 3, "capPolicy": policy})
    if isinstance(outcome, Reason):
        with pytest.raises(CoreError) as refused:
            made.select(index, Query(q, 9, SOURCE))
        assert refused.value.reason is outcome
        return
    receipt = made.select(index, Query(q, 9, SOURCE)).receipt
    assert receipt.uncapped == (2,)
    assert receipt.got_rows == (outcome,)
    assert receipt.dropped_by_cap == ((2,) if policy == "truncate" else (0,))
    assert receipt.omitted_mass == pytest.approx((1.0 if policy == "truncate" else 0.0,))


def test_a_budget_of_units_keeps_the_best() -> None:
    made, index, q = toy("0.01", budget={"units": 2})
    assert made.select(index, Query(q, 9, SOURCE)).units[0].tolist() == [0, 1]


def test_a_threshold_may_keep_nothing_and_nothing_may_be_there() -> None:
    made, index, q = toy("0.9")
    selection = made.select(index, Query(q, 12, SOURCE))
    assert selection.positions[0].tolist() == [8, 9, 10, 11]
    assert selection.receipt.omitted_mass == pytest.approx((1.0,))
    empty = made.build(SOURCE, torch.zeros(0, 1, 2), torch.zeros(0, 1, 2), NO_EVIDENCE)
    assert made.select(empty, Query(q, 3, SOURCE)).positions[0].tolist() == [0, 1, 2]


def test_a_quantile_of_all_heads_rows_is_the_threshold() -> None:
    sharp = (np.array([0.4, 0.05, 0.01]), np.array([1, 8, 20]))
    diffuse = (np.array([0.04, 0.03]), np.array([20, 7]))
    threshold = calibrated_threshold([sharp, diffuse], 0.5)
    assert threshold == 0.04
    above = sum(int(counts[share > threshold].sum()) for share, counts in (sharp, diffuse))
    assert above == 9
    with pytest.raises(CoreError) as refused:
        calibrated_threshold([], 0.5)
    assert refused.value.reason is Reason.THRESHOLD_INVALID


def valid() -> FixedClusters:
    return toy("0.2", levels=2)[1].heads[0]


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda c: replace(c, counts=c.counts[:2]), Reason.CENTROID_MASS),
        (lambda c: replace(c, counts=np.array([8, 0, 0])), Reason.CENTROID_MASS),
        (lambda c: replace(c, counts=np.array([4, 2, 2])), Reason.CENTROID_MASS),
        (lambda c: replace(c, labels=c.labels[:7]), Reason.COVERAGE_GAP),
        (lambda c: replace(c, labels=np.where(c.labels == 2, 3, c.labels)), Reason.PQ_GEOMETRY),
        (lambda c: replace(c, parents=np.array([0, 1, 2])), Reason.HIERARCHY_COVERAGE),
        (lambda c: replace(c, parents=c.parents[:2]), Reason.HIERARCHY_COVERAGE),
        (lambda c: replace(c, coarse_counts=np.array([2, 4])), Reason.HIERARCHY_COVERAGE),
    ],
    ids=[
        "no-counts",
        "no-rows",
        "other-counts",
        "rows-missing",
        "label-out-of-range",
        "parent-out-of-range",
        "fine-without-coarse",
        "coarse-counts",
    ],
)
def test_clusters_that_contradict_themselves_cannot_be_made(
    mutate: Callable[[FixedClusters], FixedClusters], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(valid())
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda i: replace(i, context="sha256:other"), Reason.CONTEXT_HASH_MISMATCH),
        (
            lambda i: replace(i, heads=(replace(i.heads[0], centroids=i.heads[0].centroids + 1),)),
            Reason.SELECTOR_STATE_MIXED,
        ),
        (lambda i: replace(i, facts=replace(i.facts, covered=9)), Reason.COVERAGE_GAP),
    ],
    ids=["context", "centroids-of-another-build", "rows"],
)
def test_an_index_of_mixed_parts_cannot_be_made(
    mutate: Callable[[FixedIndex], FixedIndex], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(toy()[1])
    assert refused.value.reason is reason


def test_an_index_made_elsewhere_is_held_against_its_rows() -> None:
    made = family()
    k, v = rows_of(2, 40)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    made.verify(index, k)
    with pytest.raises(CoreError) as refused:
        made.verify(index, k + 1e-3)
    assert refused.value.reason is Reason.CONTEXT_HASH_MISMATCH
    wrong = tuple(replace(head, centroids=head.centroids * 1.01) for head in index.heads)
    with pytest.raises(CoreError) as refused:
        made.verify(FixedIndex.published(index.facts, wrong, index.context, index.scale), k)
    assert refused.value.reason is Reason.CENTROID_INVALID


def test_a_threshold_of_another_scale_is_refused() -> None:
    made, index, q = toy()
    with pytest.raises(CoreError) as refused:
        made.select(replace(index, scale=1.0), Query(q, 9, SOURCE))
    assert refused.value.reason is Reason.SCORE_SCALE_MISMATCH


def test_a_fixed_context_takes_no_rows_and_no_edit_inside_it() -> None:
    made = family()
    k, v = rows_of(2, 40)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    with pytest.raises(CoreError) as refused:
        made.append(index, k[:1], v[:1], NO_EVIDENCE)
    assert refused.value.reason is Reason.CONTEXT_HASH_MISMATCH
    assert isinstance(made.edit(index, Edit(first=39, epoch=1, truncated=True)), NeedsRebuild)
    behind = made.edit(index, Edit(first=40, epoch=1, truncated=False))
    assert isinstance(behind, FixedIndex)
    query = Query(query_of(1), 90, replace(SOURCE, position_epoch=1))
    selection = made.select(behind, query)
    assert selection.receipt.unindexed == 50
    assert all(set(range(40, 90)) <= set(rows.tolist()) for rows in selection.positions)


def test_a_session_goes_on_over_the_rows_behind_a_fixed_context() -> None:
    declared = selector("squeezedAttention", {"clusters": 4, "threshold": "0.9"}, {"tokens": 8})
    index = LiveFamily(declared, SMALL, 16).index(b"s" * 32, 1)
    k, v = rows_of(2, 44)
    index.append(0, k[:40], v[:40])
    assert index.select(query_of(1), 40, SMALL.scale).positions[0].tolist() == [39]
    index.append(40, k[40:], v[40:])
    for rows in index.select(query_of(1), 44, SMALL.scale).positions:
        assert rows.tolist() == [40, 41, 42, 43]


def test_a_session_of_another_factor_has_a_threshold_under_that_factor() -> None:
    declared = selector("squeezedAttention", {"clusters": 4, "threshold": "0.3"}, {"tokens": 8})
    live = LiveFamily(declared, SMALL, 16)
    k, v = rows_of(2, 44)
    for factor in (SMALL.scale, 0.04, 3.0):
        index = live.indexes(b"s" * 32, 2, factor)[1]
        assert index is not None
        index.append(0, k[:40], v[:40])
        found = index.select(query_of(1), 44, factor, k[40:])
        made = make_family(declared, replace(SMALL, scale=factor), 16)
        source = Source(b"s" * 32, 1)
        built = made.build(source, k[:40], v[:40], NO_EVIDENCE)
        want = made.select(built, Query(query_of(1), 44, source, tail=k[40:]))
        assert [rows.tolist() for rows in found.positions] == [rows.tolist() for rows in want.positions]


@pytest.mark.parametrize(
    ("source", "rows", "reason"),
    [
        (replace(SOURCE, layer=2), 40, Reason.LAYER_DISTANCE),
        (replace(SOURCE, digest=b"o" * 32), 40, Reason.IDENTITY_MISMATCH),
        (replace(SOURCE, position_epoch=3), 40, Reason.POSITION_CONTRACT_MISMATCH),
        (SOURCE, 39, Reason.INDEX_STALE),
    ],
    ids=["layer", "source", "positions", "rows-gone"],
)
def test_an_index_of_something_else_is_refused(source: object, rows: int, reason: Reason) -> None:
    made = family()
    k, v = rows_of(9, 40)
    index = made.build(SOURCE, k, v, NO_EVIDENCE)
    with pytest.raises(CoreError) as refused:
        made.select(index, Query(query_of(1), rows, source))  # type: ignore[arg-type]
    assert refused.value.reason is reason
    with pytest.raises(CoreError) as refused:
        family("0.5").select(index, Query(query_of(1), 40, SOURCE))
    assert refused.value.reason is Reason.SELECTOR_STALE


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({"threshold": None}, Reason.MANIFEST_INVALID, "squeezedAttention.threshold must be given"),
        ({"threshold": "1"}, Reason.THRESHOLD_INVALID, "no score passes a threshold of 1"),
        ({"levels": 3}, Reason.MANIFEST_INVALID, "a whole number from 1 to 2, not 3"),
        ({"levels": 2}, Reason.MANIFEST_INVALID, "squeezedAttention.coarseThreshold must be given"),
        (
            {"levels": 2, "coarseThreshold": "0.1", "coarseClusters": 5},
            Reason.MANIFEST_INVALID,
            "coarseClusters 5 of 4",
        ),
        ({"scoreScale": "half"}, Reason.MANIFEST_INVALID, "one of scaled, unscaled"),
        ({"calibrationQuantile": "0.9"}, Reason.RECEIPT_INCOMPLETE, "stated together"),
        ({"calibrationDataset": "chat"}, Reason.RECEIPT_INCOMPLETE, "stated together"),
        ({"calibrationDataset": 5}, Reason.MANIFEST_INVALID, "text of at most 253 characters"),
    ],
    ids=[
        "absent",
        "above-all",
        "levels",
        "coarse-threshold",
        "coarse-clusters",
        "scale",
        "no-data",
        "no-quantile",
        "data-no-text",
    ],
)
def test_parameters_are_refused_by_name(parameters: dict[str, object], reason: Reason, words: str) -> None:
    whole = {"clusters": 4, "threshold": "0.1"} | parameters
    declared = selector("squeezedAttention", {n: v for n, v in whole.items() if v is not None}, {"tokens": 4})
    with pytest.raises(CoreError) as refused:
        SqueezedAttention.from_manifest(declared, SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message
