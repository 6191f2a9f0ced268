"""RetrievalAttention: its graph and walk as published, the keys it never finds, and what no index may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, Evidence, NeedsRebuild, Query, Shape
from kvtier_core.selectors.families.keygraph import KeyGraph, build_graph, search
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.families.retrieval_attention import GraphIndex, RetrievalAttention
from kvtier_core.selectors.picking import Persistent, best
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, merge
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector

ONE = Shape(query_heads=1, kv_heads=1, head_dim=2, scale=1.0)


def family(
    neighbours: int = 6,
    width: int = 12,
    degree: int = 4,
    budget: dict[str, object] | None = None,
    shape: Shape = SMALL,
    sink: int = 2,
    recent: int = 4,
    **more: object,
) -> RetrievalAttention:
    declared = selector(
        "retrievalAttention",
        {"buildNeighbours": neighbours, "searchWidth": width, "outDegree": degree} | more,
        budget or {"tokens": 8},
        persistentRows={"sink": sink, "recent": recent},
    )
    made = make_family(declared, shape, 16)
    assert isinstance(made, RetrievalAttention)
    return made


def queries_of(seed: int, count: int, shape: Shape = SMALL) -> Evidence:
    random = np.random.default_rng(seed)
    q = random.standard_normal((count, shape.query_heads, shape.head_dim))
    return Evidence(queries=torch.from_numpy(q.astype(np.float32)))


def model_of_graph(
    q: np.ndarray, k: np.ndarray, neighbours: int, degree: int, entries: int
) -> tuple[dict[int, list[int]], list[int]]:
    """Out-edges of each key, and entries: by the description, with sets and sorts."""
    lists = []
    for one in q:
        scores = [float(one @ key) for key in k]
        lists.append(sorted(range(len(k)), key=lambda i: (-scores[i], i))[:neighbours])
    bridges: dict[tuple[int, int], list[int]] = {}
    for ranked in lists:
        seen: dict[tuple[int, int], int] = {}
        for rank in range(1, len(ranked)):
            for other in {ranked[0], ranked[rank - 1]}:
                seen[other, ranked[rank]] = seen[ranked[rank], other] = rank
        for pair, rank in seen.items():
            bridges.setdefault(pair, []).append(rank)
    out: dict[int, list[int]] = {node: [] for node in range(len(k))}
    for source in out:
        mine = [(pair[1], ranks) for pair, ranks in bridges.items() if pair[0] == source]
        mine.sort(key=lambda edge: (-len(edge[1]), edge[1][0], edge[0]))
        out[source] = [target for target, _ in mine[:degree]]
    wins = [sum(ranked[0] == node for ranked in lists) for node in out]
    listed = [sum(node in ranked for ranked in lists) for node in out]
    starts = [max(out, key=lambda node: (wins[node], -node))]
    reached: set[int] = set()
    while True:
        todo = [starts[-1]]
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += out[node]
        left = [node for node in out if node not in reached and listed[node]]
        if not left or len(starts) >= entries:
            return out, starts
        starts.append(max(left, key=lambda node: (listed[node], -node)))


def model_of_search(
    out: dict[int, list[int]], entries: list[int], k: np.ndarray, q: np.ndarray, width: int
) -> set[int]:
    """The keys that a best-first walk scores."""
    scores = {node: float(k[node] @ q) for node in entries}
    expanded: set[int] = set()
    while True:
        pool = sorted(scores, key=lambda node: (-scores[node], node))
        waiting = [node for node in pool if node not in expanded]
        if not waiting or (len(pool) >= width and pool.index(waiting[0]) >= width):
            return set(scores)
        expanded.add(waiting[0])
        for node in out[waiting[0]]:
            scores.setdefault(node, float(k[node] @ q))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(4, 40), degree=st.integers(1, 6))
def test_graph_and_walk_agree_with_a_model_of_the_description(seed: int, count: int, degree: int) -> None:
    random = np.random.default_rng(seed)
    q, k = random.standard_normal((12, 8)), random.standard_normal((count, 8)).astype(np.float32)
    graph = build_graph(q, k.astype(np.float64), neighbours=5, out_degree=degree, entries=3)
    out, entries = model_of_graph(q, k.astype(np.float64), 5, degree, 3)
    assert graph.entries.tolist() == entries
    assert {node: graph.neighbours(node).tolist() for node in range(count)} == out
    asked = random.standard_normal(8)
    for width in (1, 4, 50):
        found = search(graph, k, asked, width)
        assert set(found.ids.tolist()) == model_of_search(out, entries, k.astype(np.float64), asked, width)


def test_a_selection_is_the_best_of_what_the_walk_scored_for_each_query_head() -> None:
    made = family()
    k, v = rows_of(5, 60)
    index = made.build(SOURCE, k, v, queries_of(6, 60))
    q = query_of(7)
    selection = made.select(index, Query(q, 66, SOURCE))
    logits = logits_of(q, k)
    for head in range(SMALL.query_heads):
        mine = k[2:, head // SMALL.group].double().numpy()
        asked = index.graphs[head].lists
        assert len(asked) == 56, "60 queries less 4 held out"
        out = {node: index.graphs[head].neighbours(node).tolist() for node in range(58)}
        entries = index.graphs[head].entries.tolist()
        scored = model_of_search(out, entries, mine, q[0, head].double().numpy(), 12)
        rows = sorted((node + 2 for node in scored), key=lambda row: (-logits[head, row], row))[:8]
        assert selection.units[head].tolist() == sorted(rows)
        assert selection.positions[head].tolist() == sorted([0, 1, *rows, *range(60, 66)])
    assert selection.receipt.unindexed == 6
    assert selection.receipt.detail["queries"] == "0..60"


def test_a_wide_walk_over_well_bridged_keys_finds_the_exact_best() -> None:
    made = family(neighbours=30, width=60, degree=30)
    k, v = rows_of(5, 60)
    index = made.build(SOURCE, k, v, queries_of(6, 60))
    q = query_of(7)
    selection = made.select(index, Query(q, 60, SOURCE))
    logits = logits_of(q, k)[:, 2:56]
    for head in range(SMALL.query_heads):
        assert selection.units[head].tolist() == sorted(
            (2 + np.argsort(-logits[head], kind="stable")[:8]).tolist()
        )
    assert selection.receipt.confidence is not None and selection.receipt.confidence > 0.95


def test_the_recall_of_a_narrow_walk_is_told_and_so_is_the_shift() -> None:
    k, v = rows_of(5, 200)
    narrow = family(neighbours=2, width=8, degree=1)
    receipt = narrow.select(
        narrow.build(SOURCE, k, v, queries_of(6, 200)), Query(query_of(7), 200, SOURCE)
    ).receipt
    assert receipt.confidence is not None and receipt.confidence < 0.5
    assert len(receipt.detail["shift"].split(",")) == 6
    assert all(int(count) > 0 for count in receipt.detail["withoutEdges"].split(","))


def needle() -> tuple[torch.Tensor, Evidence, torch.Tensor]:
    """Anchor 1.6: six keys that the prefill's queries rank, and one that only a later question needs."""
    k = torch.tensor([[1.0, 0.1 * i] for i in range(6)] + [[-6.0, 0.0]]).reshape(7, 1, 2)
    asked = torch.tensor([[1.0, 0.2 * i - 0.5] for i in range(7)]).reshape(7, 1, 2)
    return k, Evidence(queries=asked), torch.tensor([[[-1.0, 0.0]]])


def test_a_key_that_no_prefill_query_ranked_is_never_found() -> None:
    k, evidence, q = needle()
    made = family(3, 7, 6, {"tokens": 3}, ONE, sink=0, recent=0)
    index = made.build(SOURCE, k, k, evidence)
    (graph,) = index.graphs
    assert 6 not in graph.targets and 6 not in graph.entries
    selection = made.select(index, Query(q, 8, SOURCE))
    weights = np.exp(logits_of(q, k, ONE)[0])
    assert 6 not in selection.positions[0]
    assert weights[selection.positions[0][:-1]].sum() / weights.sum() < 0.02
    assert selection.receipt.detail["withoutEdges"] != "0"
    asked = evidence.queries
    assert asked is not None
    found = asked.clone()
    found[0, 0] = torch.tensor([-1.0, 0.0])
    bridged = made.build(SOURCE, k, k, Evidence(queries=found))
    assert 6 in made.select(bridged, Query(q, 8, SOURCE)).positions[0], "one query that ranked it is enough"


def test_edges_from_keys_alone_would_be_another_graph() -> None:
    """Queries live on one axis, keys vary on another: neighbours among keys are not those of any query."""
    random = np.random.default_rng(3)
    k = np.stack([random.standard_normal(40) * 5, random.standard_normal(40)], 1)
    q = np.stack([np.zeros(20), random.choice([-1.0, 1.0], 20)], 1)
    by_queries = build_graph(q, k, neighbours=5, out_degree=4, entries=2)
    by_keys = build_graph(k, k, neighbours=5, out_degree=4, entries=2)
    assert len(np.intersect1d(by_queries.targets, by_keys.targets)) < 10
    asked = np.array([0.0, 1.0])
    true = set(np.argsort(-(k @ asked))[:5].tolist())
    width = 8
    hits = [
        len(true & set(best(f.scores, f.ids, 5).ids.tolist()))
        for f in (search(graph, k.astype(np.float32), asked, width) for graph in (by_queries, by_keys))
    ]
    assert hits[0] == 5 > hits[1]


C7_SCORES = [1.0, 0.2, -0.5, 2.0, 0.1, 0.7, -1.0, 0.3]
C7_VALUES = [[1.0, 0], [0, 1], [1, 1], [-1, 0.5], [0.5, 0.5], [0, -1], [2, 0], [0.25, 0.75]]


def state_of(rows: list[int]) -> AttentionState:
    s = torch.tensor([C7_SCORES[row] for row in rows])
    v = torch.tensor([C7_VALUES[row] for row in rows])
    w = torch.exp(s - s.max())
    return AttentionState(
        s.max().reshape(1, 1), w.sum().reshape(1, 1), (w @ v).reshape(1, 1, 2), LogitFrame(1.0)
    )


def test_c7_08_to_12_a_row_that_is_persistent_and_found_is_read_once() -> None:
    persistent = Persistent(np.isin(np.arange(8), [0, 1, 7]))
    rows, beyond = persistent.joined(np.array([3, 1, 5]))
    assert rows.tolist() == [0, 1, 3, 5, 7] and beyond == 2
    whole = finalize(state_of(rows.tolist()))[0][0, 0].tolist()
    parts = finalize(merge(state_of([0, 1, 7]), state_of([3, 5])))[0][0, 0].tolist()
    assert whole == pytest.approx([-0.2949364070, 0.2664360446], abs=1e-6)
    assert parts == pytest.approx(whole, abs=1e-6)
    twice = finalize(merge(state_of([0, 1, 7]), state_of([3, 1, 5])))[0][0, 0].tolist()
    assert twice == pytest.approx([-0.2722996288, 0.3227380953], abs=1e-6)
    p = np.exp(C7_SCORES) / np.exp(C7_SCORES).sum()
    assert p[[2, 4, 6]].sum() == pytest.approx(0.1239917302, abs=1e-9)


def valid() -> tuple[RetrievalAttention, GraphIndex]:
    made = family()
    k, v = rows_of(5, 30)
    return made, made.build(SOURCE, k, v, queries_of(6, 30))


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (
            lambda g: replace(g, targets=np.where(g.targets == g.targets[0], 99, g.targets)),
            Reason.DANGLING_ID,
        ),
        (lambda g: replace(g, entries=np.array([-1])), Reason.DANGLING_ID),
        (lambda g: replace(g, starts=g.starts[:-1]), Reason.PARTIAL_INDEX),
        (lambda g: replace(g, targets=g.targets[:-1], via=g.via[:-1]), Reason.PARTIAL_INDEX),
        (lambda g: replace(g, targets=np.roll(g.targets, 1)), Reason.INDEX_BUILD_CONTRACT),
        (lambda g: replace(g, via=np.full_like(g.via, len(g.lists))), Reason.INDEX_BUILD_CONTRACT),
        (lambda g: replace(g, via=g.via[:0]), Reason.INDEX_BUILD_CONTRACT),
    ],
    ids=["edge", "entry", "keys-missing", "edges-missing", "not-bridged", "query-unknown", "no-queries"],
)
def test_a_graph_that_contradicts_itself_cannot_be_made(
    mutate: Callable[[KeyGraph], KeyGraph], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(valid()[1].graphs[0])
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda i: replace(i, sampled=(0, 0)), Reason.RECEIPT_INCOMPLETE),
        (lambda i: replace(i, recall=()), Reason.RECEIPT_INCOMPLETE),
        (lambda i: replace(i, shift=i.shift[:2]), Reason.RECEIPT_INCOMPLETE),
        (lambda i: replace(i, keys=i.keys[:-1]), Reason.PARTIAL_INDEX),
        (lambda i: replace(i, facts=replace(i.facts, covered=31)), Reason.PARTIAL_INDEX),
        (lambda i: replace(i, keys=i.keys + 1), Reason.SELECTOR_STATE_MIXED),
        (lambda i: replace(i, graphs=i.graphs[::-1]), Reason.SELECTOR_STATE_MIXED),
    ],
    ids=["queries-unknown", "no-recall", "no-shift", "keys", "frontier", "keys-of-another", "heads-swapped"],
)
def test_an_index_of_mixed_parts_cannot_be_made(
    mutate: Callable[[GraphIndex], GraphIndex], reason: Reason
) -> None:
    with pytest.raises(CoreError) as refused:
        mutate(valid()[1])
    assert refused.value.reason is reason


def test_an_index_per_kv_head_is_refused() -> None:
    made = family()
    k, v = rows_of(5, 30)
    few = replace(made, shape=replace(SMALL, query_heads=2))
    index = few.build(SOURCE, k, v, queries_of(6, 30, few.shape))
    with pytest.raises(CoreError) as refused:
        made.select(index, Query(query_of(1), 30, SOURCE))
    assert refused.value.reason is Reason.HEAD_MAPPING_MISMATCH
    with pytest.raises(CoreError) as refused:
        made.build(SOURCE, k, v, queries_of(6, 30, few.shape))
    assert refused.value.reason is Reason.HEAD_MAPPING_MISMATCH


@pytest.mark.parametrize(
    ("evidence", "values", "reason", "words"),
    [
        (NO_EVIDENCE, 30, Reason.UNSUPPORTED, "retrievalAttention needs prefillQueries"),
        (queries_of(1, 29), 30, Reason.COVERAGE_GAP, "29 queries of 30 rows"),
        (queries_of(1, 30), 29, Reason.ROW_INCOMPLETE, "values"),
    ],
    ids=["no-queries", "fewer-queries", "fewer-values"],
)
def test_a_build_needs_a_query_and_a_value_of_each_row(
    evidence: Evidence, values: int, reason: Reason, words: str
) -> None:
    k, v = rows_of(5, 30)
    with pytest.raises(CoreError) as refused:
        family().build(SOURCE, k, v[:values], evidence)
    assert refused.value.reason is reason
    assert words in refused.value.message


def test_it_takes_no_rows_and_no_edit_inside_it() -> None:
    made, index = valid()
    k, v = rows_of(8, 1)
    with pytest.raises(CoreError) as refused:
        made.append(index, k, v, queries_of(1, 1))
    assert refused.value.reason is Reason.CONTEXT_HASH_MISMATCH
    assert isinstance(made.edit(index, Edit(first=29, epoch=1, truncated=True)), NeedsRebuild)
    behind = made.edit(index, Edit(first=30, epoch=1, truncated=True))
    assert isinstance(behind, GraphIndex)
    made.select(behind, Query(query_of(1), 300, replace(SOURCE, position_epoch=1)))


@pytest.mark.parametrize(
    ("source", "rows", "reason"),
    [
        (replace(SOURCE, layer=2), 30, Reason.LAYER_DISTANCE),
        (replace(SOURCE, digest=b"o" * 32), 30, Reason.IDENTITY_MISMATCH),
        (replace(SOURCE, position_epoch=3), 30, Reason.POSITION_CONTRACT_MISMATCH),
        (SOURCE, 29, Reason.INDEX_STALE),
    ],
    ids=["layer", "source", "positions", "rows-gone"],
)
def test_an_index_of_something_else_is_refused(source: object, rows: int, reason: Reason) -> None:
    made, index = valid()
    with pytest.raises(CoreError) as refused:
        made.select(index, Query(query_of(1), rows, source))  # type: ignore[arg-type]
    assert refused.value.reason is reason
    with pytest.raises(CoreError) as refused:
        family(7).select(index, Query(query_of(1), 30, SOURCE))
    assert refused.value.reason is Reason.SELECTOR_STALE


@pytest.mark.parametrize("count", [0, 1, 2, 3], ids=str)
def test_few_rows_are_all_read(count: int) -> None:
    made = family()
    k, v = rows_of(5, count)
    index = made.build(SOURCE, k, v, queries_of(6, count))
    selection = made.select(index, Query(query_of(1), count + 1, SOURCE))
    assert all(rows.tolist() == list(range(count + 1)) for rows in selection.positions)


def test_the_same_rows_make_the_same_index() -> None:
    assert valid()[1].facts.digest == valid()[1].facts.digest
    assert valid()[1].recall == valid()[1].recall


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"outDegree": None}, "retrievalAttention.outDegree must be given"),
        ({"searchWidth": 0}, "retrievalAttention.searchWidth must be a whole number from 1 to 4096"),
        ({"sampleQueries": 0}, "retrievalAttention.sampleQueries must be"),
        ({"variant": "hnsw"}, "retrievalAttention.variant must be one of"),
        ({"ef": 3}, "has no parameters ef"),
    ],
    ids=["absent", "too-small", "sample", "variant", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, object], words: str) -> None:
    whole = {"buildNeighbours": 4, "searchWidth": 8, "outDegree": 4} | parameters
    given_ = {name: value for name, value in whole.items() if value is not None}
    with pytest.raises(CoreError) as refused:
        make_family(selector("retrievalAttention", given_, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason in (Reason.MANIFEST_INVALID, Reason.VARIANT_UNKNOWN)
    assert words in refused.value.message
