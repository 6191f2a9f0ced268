"""Quest: the rows that its definition names in float64, by both published paths, and a bound that holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_core.selectors.contract import NO_EVIDENCE, Query, Shape
from kvtier_core.selectors.families.quest import PageBoxes, Quest
from kvtier_core.selectors.live import LiveFamily
from tests.unit.selectors.selector_cases import SOURCE, selector

KV_HEADS, GROUP, DIM = 2, 3, 4
SMALL = Shape(KV_HEADS * GROUP, KV_HEADS, DIM, 0.5)


def declared(page: int, pages: int, sink: int, recent: int, variant: str) -> object:
    return selector(
        "quest",
        {"pageTokens": page, "variant": variant},
        {"units": pages},
        persistentRows={"sink": sink, "recent": recent},
    )


def family(
    page: int, pages: int, sink: int = 0, recent: int = 0, shape: Shape = SMALL, variant: str = "kernel"
) -> Quest:
    return Quest.from_manifest(declared(page, pages, sink, recent, variant), shape, 16)  # type: ignore[arg-type]


def boxes(quest: Quest, k: Tensor) -> PageBoxes:
    return quest.build(SOURCE, k, torch.zeros_like(k), NO_EVIDENCE)


def selected(quest: Quest, k: Tensor, q: Tensor) -> list[list[int]]:
    found = quest.select(boxes(quest, k), Query(q, len(k), SOURCE))
    return [list(rows) for rows in found.positions]


def whole(random: np.random.Generator, *shape: int) -> Tensor:
    """Integers as floats: float32 and float64 bounds are equal, so ties are real ties in both."""
    return torch.from_numpy(random.integers(-3, 4, shape).astype(np.float32))


def brute_force(
    quest: Quest, k: Tensor, q: Tensor, *, competes: bool = False, outside: int = 0
) -> list[list[int]]:
    """Rows per KV head, from the definition, in float64 and plain loops. competes: the path of the authors'
    evaluation, where the last page is a page like all others and at least three are read. outside: rows at
    the end that are read and in no box."""
    rows, size = len(k), quest.page_tokens
    sink, recent = quest.persistent.sink, quest.persistent.recent
    last = (rows - 1) // size
    always = {i for i in range(rows) if i < sink or i >= rows - max(recent, outside)}
    always |= {rows - 1} if competes else {i for i in range(rows) if i // size == last}
    count = max(3, quest.pages) if competes else quest.pages - 1
    result = []
    for head in range(quest.shape.kv_heads):
        bounds = {}
        for page in range(last + 1):
            members = [i for i in range(rows) if i // size == page]
            if set(members) <= always or (page == last and not competes):
                continue
            keys = k[[i for i in members if i < rows - outside], head].double()
            low, high = keys.min(0).values, keys.max(0).values
            mine = range(head * quest.shape.group, (head + 1) * quest.shape.group)
            bounds[page] = max(
                float(torch.maximum(q[0, one].double() * low, q[0, one].double() * high).sum())
                for one in mine
            )
        best = sorted(bounds, key=lambda page: (-bounds[page], page))[:count]
        result.append(sorted(always | {i for i in range(rows) if i // size in best}))
    return result


@pytest.mark.parametrize("variant", ["kernel", "evaluation"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.integers(1, 40), page=st.integers(1, 6), pages=st.integers(1, 6))
def test_the_selection_is_the_brute_force_one(
    variant: str, data: st.DataObject, rows: int, page: int, pages: int
) -> None:
    sink, recent = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    quest = family(page, pages, sink, recent, variant=variant)
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    k, q = whole(random, rows, KV_HEADS, DIM), whole(random, 1, KV_HEADS * GROUP, DIM)
    outside = data.draw(st.integers(0, min(recent, rows)))
    want = brute_force(quest, k, q, competes=variant == "evaluation", outside=outside)
    found = quest.select(boxes(quest, k[: rows - outside]), Query(q, rows, SOURCE))
    assert [list(one) for one in found.positions] == want
    assert quest.omits(rows) == any(len(one) < rows for one in want)
    assert max(found.receipt.got_rows) <= quest.slots * page
    assert found.receipt.unindexed == outside


def test_a_session_selects_as_the_family_does_however_rows_arrive() -> None:
    """What agents run: indexes that follow frames of any size, and the query's own row as a tail."""
    random = np.random.default_rng(8)
    declaration = declared(4, 5, 2, 3, "kernel")
    live = LiveFamily(declaration, SMALL, 2)  # type: ignore[arg-type]
    quest = family(4, 5, 2, 3)
    assert live.digest == quest.digest
    index, k, at = live.index(SOURCE.digest, 0), torch.empty(0, KV_HEADS, DIM), 0
    behind = set()
    for _ in range(60):
        new = whole(random, int(random.integers(2, 12)), KV_HEADS, DIM)
        index.append(at, new, torch.zeros_like(new))
        k, at = torch.cat([k, new]), at + len(new)
        own, q = whole(random, 1, KV_HEADS, DIM), whole(random, 1, KV_HEADS * GROUP, DIM)
        found = index.select(q, at + 1, SMALL.scale, own)
        outside = at + 1 - found.covered
        want = brute_force(quest, torch.cat([k, own]), q, outside=outside)
        assert [list(rows) for rows in found.positions] == want
        behind.add(outside)
    assert 1 in behind


def test_persistent_rows_that_meet_leave_nothing_out() -> None:
    assert not family(2, 1, sink=1, recent=9).omits(10)
    assert family(2, 1, sink=1, recent=8).omits(10)


def test_the_published_paths_differ_where_the_last_page_is_not_worth_a_slot() -> None:
    k = torch.zeros(8, 1, DIM)
    k[:6] = torch.tensor([5.0, 5, 4, 4, 3, 3]).view(6, 1, 1)
    one, q = Shape(1, 1, DIM, 1.0), torch.ones(1, 1, DIM)
    assert selected(family(2, 3, shape=one), k, q) == [[0, 1, 2, 3, 6, 7]]
    assert selected(family(2, 3, shape=one, variant="evaluation"), k, q) == [[0, 1, 2, 3, 4, 5, 7]]
    # The kernel's path with a budget of one page reads the last; the other never less than three.
    assert selected(family(2, 1, shape=one), k, q) == [[6, 7]]
    assert selected(family(2, 1, shape=one, variant="evaluation"), k, q) == [[0, 1, 2, 3, 4, 5, 7]]


def bound(low: Tensor, high: Tensor, q: Tensor) -> Tensor:
    a, b = q.unsqueeze(2) * low.unsqueeze(1), q.unsqueeze(2) * high.unsqueeze(1)
    return torch.maximum(a, b).sum(-1)


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean query of the group": lambda low, high, q: bound(low, high, q.mean(1, keepdim=True)).amax(1),
    "mean key": lambda low, high, q: torch.einsum("hgd,hpd->hgp", q, (low + high) / 2).amax(1),
    "upper corner only": lambda low, high, q: torch.einsum("hgd,hpd->hgp", q, high).amax(1),
    "sum over the group": lambda low, high, q: bound(low, high, q).sum(1),
    "width of the box": lambda low, high, q: (high - low).sum(-1),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())
def test_another_score_would_select_other_rows(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaces the score; the comparison with brute force must then fail on some of these inputs."""
    quest = family(3, 3)

    def replaced(self: Quest, index: PageBoxes, q: Tensor, pages: np.ndarray) -> Tensor:
        low, high = index.boxes(int(pages[0]), int(pages[-1]) + 1)
        return score(low.transpose(0, 1), high.transpose(0, 1), q.view(KV_HEADS, GROUP, DIM))

    def disagreements() -> int:
        random = np.random.default_rng(5)
        count = 0
        for _ in range(40):
            k, q = whole(random, 30, KV_HEADS, DIM), whole(random, 1, KV_HEADS * GROUP, DIM)
            count += selected(quest, k, q) != brute_force(quest, k, q)
        return count

    assert disagreements() == 0
    monkeypatch.setattr(Quest, "scores", replaced)
    assert disagreements() > 0


@pytest.mark.parametrize(
    ("q_spread", "k_spread"),
    [(1.0, 1.0), (1e-3, 1e3), (1e3, 1e-3), (30.0, 30.0), (1e-20, 1e-18), (1e-22, 1e-22)],
    ids=["plain", "small-q", "small-k", "loud", "small", "denormal"],
)
def test_c6_21_the_bound_of_a_page_is_never_below_a_rows_logit(q_spread: float, k_spread: float) -> None:
    """A million rows and heads in all cases together, in float64 and as float32 attention rounds them."""
    heads, dim, rows = 6, 64, 2_000
    quest = family(16, 2, shape=Shape(heads, 2, dim, 0.125))
    trials = 0
    for seed in range(14):
        generator = torch.Generator().manual_seed(seed)
        k = torch.randn(rows, 2, dim, generator=generator) * k_spread
        k[:: 7 + seed] *= 20.0
        q = torch.randn(1, heads, dim, generator=generator) * q_spread
        index, pages = boxes(quest, k), np.arange(rows // 16)
        upper = np.repeat(quest.bounds(index, q, quest.scores(index, q, pages)), 16, axis=1)
        for logits in (
            torch.einsum("hgd,rhd->hgr", q.view(2, 3, dim).double(), k.double()) * 0.125,
            torch.einsum("hgd,rhd->hgr", q.view(2, 3, dim), k).double() * 0.125,
            torch.einsum("hgd,rhd->hgr", q.view(2, 3, dim) * 0.125, k).double(),
        ):
            assert (logits.amax(1).numpy() <= upper).all()
            trials += heads * rows
    assert 6 * trials >= 3 * 1_000_000


@pytest.mark.parametrize("variant", ["kernel", "evaluation"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20), rows=st.integers(30, 80), recent=st.integers(0, 9))
def test_what_is_left_out_is_never_more_than_the_bound_says(
    variant: str, seed: int, rows: int, recent: int
) -> None:
    quest = family(4, 3, sink=2, recent=recent, variant=variant)
    generator = torch.Generator().manual_seed(seed)
    k, q = torch.randn(rows, KV_HEADS, DIM, generator=generator), torch.randn(1, 6, DIM, generator=generator)
    found = quest.select(boxes(quest, k), Query(q, rows, SOURCE))
    assert found.left_out is not None
    for head in range(KV_HEADS * GROUP):
        unread = np.setdiff1d(np.arange(rows), found.positions[head // GROUP])
        logits = k[unread, head // GROUP].double() @ q[0, head].double() * SMALL.scale
        assert float(logits.exp().sum().log()) <= found.left_out[head]


def test_the_certificate_of_boxes_is_sound_and_worth_nothing() -> None:
    """Selectors anchor 5.4: on random keys it certifies next to nothing; Quest is a ranking."""
    shape = Shape(2, 2, 64, 0.125)
    quest = family(16, 17, shape=shape)
    generator = torch.Generator().manual_seed(1)
    k, q = torch.randn(1024, 2, 64, generator=generator), torch.randn(1, 2, 64, generator=generator)
    found = quest.select(boxes(quest, k), Query(q, 1024, SOURCE))
    assert found.left_out is not None
    for head in range(2):
        logits = k[:, head].double() @ q[0, head].double() * 0.125
        read = float(logits[torch.from_numpy(found.positions[head])].exp().sum())
        true = read / float(logits.exp().sum())
        certified = read / (read + float(np.exp(found.left_out[head])))
        assert certified < 0.01 < true


def test_a_key_that_is_no_number_is_read_and_nothing_is_certified_without_it() -> None:
    k = torch.zeros(40, 2, DIM)
    k[5, 0, 1] = torch.nan
    k[9, 1, 2] = torch.inf
    q = -torch.ones(1, 6, DIM)
    found = family(4, 2).select(boxes(family(4, 2), k), Query(q, 40, SOURCE))
    assert [list(one) for one in found.units] == [[1], [2]]
    k[33:, 0] = torch.nan
    found = family(4, 2).select(boxes(family(4, 2), k), Query(q, 40, SOURCE))
    assert found.left_out is not None and found.left_out[0] == np.inf


TOY_K = [[(2, 2), (-2, -2)], [(1, 0), (0, -1)], [(1.5, -1.5), (1, -1)]]


def test_c6_16_to_c6_18_the_toy_of_the_specification() -> None:
    """The toy's three pages and a last page of one row that every query reads."""
    one = Shape(1, 1, 2, 1.0)
    k = torch.tensor([*itertools.chain(*TOY_K), (0.0, 0.0)]).view(7, 1, 2)
    q = torch.tensor([[[1.0, -1.0]]])
    for pages, want in ((1, [0]), (2, [0, 2])):
        quest = family(2, pages + 1, shape=one)
        index = boxes(quest, k)
        assert quest.scores(index, q, np.arange(3)).tolist() == [[4.0, 2.0, 3.0]]
        assert [list(units) for units in quest.select(index, Query(q, 7, SOURCE)).units] == [want]


def test_it_fails_where_loose_boxes_promise_more_than_they_hold() -> None:
    """Selectors anchor 1.3: the page with the mass has the smaller bound, so it is not read."""
    one = Shape(1, 1, 2, 1.0)
    loose, true, last = [(3.0, -3.0), (-3.0, 3.0)], [(2.5, 2.5)] * 2, [(0.0, 0.0)] * 2
    k = torch.tensor([*loose, *true, *last]).view(6, 1, 2)
    quest = family(2, 2, shape=one)
    q = torch.ones(1, 1, 2)
    found = quest.select(boxes(quest, k), Query(q, 6, SOURCE))
    assert list(found.positions[0]) == [0, 1, 4, 5]
    assert found.receipt.threshold[0] == 6.0 and found.receipt.runner_up[0] == 5.0
    weights = (k[:, 0] @ q[0, 0]).exp()
    assert float(weights[[0, 1, 4, 5]].sum() / weights.sum()) < 0.02


def test_equal_scores_prefer_the_lower_page() -> None:
    one = Shape(1, 1, 2, 1.0)
    quest = family(2, 3, shape=one)
    found = quest.select(boxes(quest, torch.ones(11, 1, 2)), Query(torch.ones(1, 1, 2), 11, SOURCE))
    assert [list(units) for units in found.units] == [[0, 1]]
    assert list(found.positions[0]) == [0, 1, 2, 3, 10]
    assert found.receipt.threshold == found.receipt.runner_up == (2.0,)
    assert found.receipt.ties == (3,)


def test_rows_always_read_are_no_success_of_the_selector() -> None:
    quest = family(2, 1, sink=3, recent=3, shape=Shape(1, 1, 2, 1.0))
    found = quest.select(boxes(quest, torch.randn(12, 1, 2)), Query(torch.randn(1, 1, 2), 12, SOURCE))
    assert list(found.positions[0]) == [0, 1, 2, 9, 10, 11]
    assert found.receipt.got_rows == found.receipt.got_units == (0,)


def test_a_receipt_states_what_was_scored_and_read_of_the_index() -> None:
    quest = family(4, 3, sink=2, recent=3)
    k = torch.randn(41, 2, DIM)
    receipt = quest.select(boxes(quest, k[:40]), Query(torch.randn(1, 6, DIM), 41, SOURCE)).receipt
    # Rows [2, 38) may be left out: of pages 0 to 9; page 10 is the last.
    assert (receipt.scanned_units, receipt.index_bytes) == (10, 10 * 2 * 2 * DIM * 4)
    assert (receipt.got_units, receipt.unindexed) == ((2, 2), 1)
