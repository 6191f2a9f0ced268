"""Quest: its bound, its policy, its index's freshness; against a brute-force selection in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.base import build_family, check_fresh
from kvtier_core.selectors.quest import PageBoxes, QuestFamily
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import Budget, CapPolicy, PersistentRows, Selector
from tests.unit.core.builders import quest

SOURCE = bytes(32)


def family(
    page: int, pages: int, sink: int = 0, recent: int = 0, kv_heads: int = 2, head_dim: int = 4
) -> QuestFamily:
    selector = Selector(
        family="quest",
        parameters=Parameters({"pageTokens": page}),
        budget=Budget(units=pages, cap_policy=CapPolicy.TRUNCATE),
        persistent_rows=PersistentRows(sink=sink, recent=recent),
    )
    built = build_family(
        selector, page_tokens=16, query_heads=3 * kv_heads, kv_heads=kv_heads, head_dim=head_dim
    )
    assert isinstance(built, QuestFamily)
    return built


def boxes(fam: QuestFamily, k: torch.Tensor) -> PageBoxes:
    index = fam.index(SOURCE)
    index.append(0, k)
    return index


def brute_force(fam: QuestFamily, k: torch.Tensor, q: torch.Tensor) -> list[list[int]]:
    """Rows per KV head, from the definition, in float64 and plain loops."""
    rows, size = k.shape[0], fam.page_tokens
    group = q.shape[1] // fam.kv_heads
    last = (rows - 1) // size
    always = {i for i in range(rows) if i < fam.sink or i >= rows - fam.recent or i // size == last}
    result = []
    for head in range(fam.kv_heads):
        bounds = {}
        for page in range(last):
            members = range(page * size, (page + 1) * size)
            if all(i < fam.sink or i >= rows - fam.recent for i in members):
                continue
            keys = k[page * size : (page + 1) * size, head].double()
            low, high = keys.min(0).values, keys.max(0).values
            bounds[page] = max(
                float(
                    torch.maximum(
                        q[0, head * group + g].double() * low, q[0, head * group + g].double() * high
                    ).sum()
                )
                for g in range(group)
            )
        best = sorted(bounds, key=lambda page: (-bounds[page], page))[: fam.pages - 1]
        chosen = {i for page in best for i in range(page * size, (page + 1) * size)}
        result.append(sorted(always | chosen))
    return result


# Integers as floats: float32 and float64 bounds are equal, so ties are real ties in both.
WHOLE = st.integers(-3, 3)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), rows=st.integers(1, 40), page=st.integers(1, 6), pages=st.integers(1, 6))
def test_the_selection_is_the_brute_force_one(data: st.DataObject, rows: int, page: int, pages: int) -> None:
    fam = family(page, pages, sink=data.draw(st.integers(0, 9)), recent=data.draw(st.integers(0, 9)))
    seed = data.draw(st.integers(0, 1 << 20))
    rng = np.random.default_rng(seed)
    k = torch.from_numpy(rng.integers(-3, 4, (rows, 2, 4)).astype(np.float32))
    q = torch.from_numpy(rng.integers(-3, 4, (1, 6, 4)).astype(np.float32))
    index = boxes(fam, k)
    selection = index.select(q, rows)
    want = brute_force(fam, k, q)
    assert [list(positions) for positions in selection.positions] == want
    assert fam.omits(rows) == any(len(positions) < rows for positions in want)
    assert selection.chosen_rows <= (pages - 1) * page


def test_persistent_rows_that_meet_leave_nothing_out() -> None:
    assert not family(2, 1, sink=1, recent=9).omits(10)
    assert family(2, 1, sink=1, recent=8).omits(10)


SCORES = {
    "mean query of the group": lambda low, high, q: bound(low, high, q.mean(1, keepdim=True)).amax(1),
    "mean key": lambda low, high, q: torch.einsum("hgd,hpd->hgp", q, (low + high) / 2).amax(1),
    "upper corner only": lambda low, high, q: torch.einsum("hgd,hpd->hgp", q, high).amax(1),
    "sum over the group": lambda low, high, q: bound(low, high, q).sum(1),
    "width of the box": lambda low, high, q: (high - low).sum(-1),
}


def bound(low: torch.Tensor, high: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    a, b = q.unsqueeze(2) * low.unsqueeze(1), q.unsqueeze(2) * high.unsqueeze(1)
    return torch.maximum(a, b).sum(-1)


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())
def test_another_score_would_select_other_rows(score: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the score; the comparison with brute force must then fail on some of these inputs."""
    fam = family(3, 3)

    def replaced(self: PageBoxes, q: torch.Tensor, pages: np.ndarray) -> torch.Tensor:
        grouped = q.view(2, -1, 4)
        wanted = torch.from_numpy(pages)
        return score(self.low[wanted].transpose(0, 1), self.high[wanted].transpose(0, 1), grouped)  # type: ignore[operator,no-any-return]

    def disagreements() -> int:
        rng = np.random.default_rng(5)
        count = 0
        for _ in range(40):
            k = torch.from_numpy(rng.integers(-3, 4, (30, 2, 4)).astype(np.float32))
            q = torch.from_numpy(rng.integers(-3, 4, (1, 6, 4)).astype(np.float32))
            got = [list(rows) for rows in boxes(fam, k).select(q, 30).positions]
            count += got != brute_force(fam, k, q)
        return count

    assert disagreements() == 0
    monkeypatch.setattr(PageBoxes, "scores", replaced)
    assert disagreements() > 0


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 1 << 20), page=st.integers(1, 9), rows=st.integers(1, 60))
def test_c6_21_the_bound_is_never_below_a_rows_logit(seed: int, page: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(rows, 2, 4, generator=generator)
    q = torch.randn(1, 6, 4, generator=generator)
    fam = family(page, 2)
    index = boxes(fam, k)
    pages = np.arange(-(-rows // page))
    scores = index.scores(q, pages).double()
    logits = torch.einsum("hgd,rhd->hgr", q.view(2, 3, 4).double(), k.double()).amax(1)
    for row in range(rows):
        assert (logits[:, row] <= scores[:, row // page] + 1e-5).all()


TOY_K = [[(2, 2), (-2, -2)], [(1, 0), (0, -1)], [(1.5, -1.5), (1, -1)]]


def toy(pages: int) -> tuple[QuestFamily, torch.Tensor, torch.Tensor]:
    """The toy's three pages and a last page of one row that every query reads."""
    fam = family(2, pages + 1, kv_heads=1, head_dim=2)
    k = torch.tensor([*itertools.chain(*TOY_K), (0.0, 0.0)]).view(7, 1, 2)
    return fam, k, torch.tensor([[[1.0, -1.0]]])


def test_c6_16_to_c6_18_the_toy_of_the_specification() -> None:
    fam, k, q = toy(1)
    index = boxes(fam, k)
    assert index.scores(q, np.arange(3)).tolist() == [[4.0, 2.0, 3.0]]
    assert [list(units) for units in index.select(q, 7).chosen_units] == [[0]]
    fam, k, q = toy(2)
    assert [list(units) for units in boxes(fam, k).select(q, 7).chosen_units] == [[0, 2]]


def test_equal_scores_prefer_the_lower_page() -> None:
    fam = family(2, 3, kv_heads=1, head_dim=2)
    k = torch.ones(11, 1, 2)
    selection = boxes(fam, k).select(torch.ones(1, 1, 2), 11)
    assert [list(units) for units in selection.chosen_units] == [[0, 1]]
    assert list(selection.positions[0]) == [0, 1, 2, 3, 10]
    assert selection.threshold == selection.runner_up == (2.0,)


def test_rows_always_read_are_no_success_of_the_selector() -> None:
    fam = family(2, 1, sink=3, recent=3, kv_heads=1, head_dim=2)
    k = torch.randn(12, 1, 2)
    selection = boxes(fam, k).select(torch.randn(1, 1, 2), 12)
    assert list(selection.positions[0]) == [0, 1, 2, 9, 10, 11]
    assert selection.chosen_rows == 0
    assert [list(units) for units in selection.chosen_units] == [[]]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 16), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_boxes_do_not_depend_on_how_rows_arrived(seed: int, cuts: list[int]) -> None:
    rows = sum(cuts)
    k = torch.randn(rows, 2, 4, generator=torch.Generator().manual_seed(seed))
    fam = family(4, 2)
    whole, pieces = boxes(fam, k), fam.index(SOURCE)
    at = 0
    for cut in cuts:
        pieces.append(at, k[at : at + cut])
        at += cut
    pages = -(-rows // 4)
    assert torch.equal(whole.low[:pages], pieces.low[:pages])
    assert torch.equal(whole.high[:pages], pieces.high[:pages])
    assert pieces.covered == rows
    assert pieces.generation == len(cuts)


def test_a_box_of_many_pages_grows_without_losing_any() -> None:
    k = torch.randn(700, 2, 4)
    fam = family(4, 2)
    index = fam.index(SOURCE)
    for lo in range(0, 700, 7):
        index.append(lo, k[lo : lo + 7])
    whole = k.view(175, 4, 2, 4)
    assert torch.equal(index.low[:175], whole.amin(1))
    assert torch.equal(index.high[:175], whole.amax(1))


def refused(reason: Reason, call: object, *args: object) -> None:
    with pytest.raises(CoreError) as error:
        call(*args)  # type: ignore[operator]
    assert error.value.reason is reason


def test_a_stale_index_is_refused() -> None:
    fam, other = family(4, 2), family(4, 3)
    index = boxes(fam, torch.randn(9, 2, 4))
    check_fresh(index, fam, SOURCE)
    refused(Reason.GENERATION_STALE, check_fresh, index, other, SOURCE)
    refused(Reason.IDENTITY_MISMATCH, check_fresh, index, fam, bytes([1] * 32))
    q = torch.randn(1, 6, 4)
    # Page 2 is the last of 12 rows; rows of pages 0 and 1 are covered.
    index.select(q, 12)
    refused(Reason.SUPPORT_GAP, index.select, q, 13)
    refused(Reason.SUPPORT_GAP, index.append, 8, torch.randn(1, 2, 4))
    refused(Reason.SUPPORT_GAP, index.append, 10, torch.randn(1, 2, 4))
    refused(Reason.UNSUPPORTED, index.select, torch.randn(2, 6, 4), 9)


BAD = [
    ({"family": "dense"}, "dense"),
    ({"parameters": Parameters({"pages": 3})}, "pages"),
    ({"parameters": Parameters({"pageTokens": 0})}, "pageTokens"),
    ({"parameters": Parameters({"pageTokens": True})}, "pageTokens"),
    ({"budget": Budget(tokens=7, cap_policy=CapPolicy.TRUNCATE)}, "8 tokens"),
    ({"budget": Budget(bytes=8 * 2 * 16 * 8 - 1, cap_policy=CapPolicy.TRUNCATE)}, "2048 bytes"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_a_selector_that_cannot_run_is_refused_with_what_would(change: dict[str, object], text: str) -> None:
    with pytest.raises(CoreError) as error:
        build_family(quest().model_copy(update=change), page_tokens=8, query_heads=2, kv_heads=2, head_dim=16)
    assert error.value.reason is Reason.MANIFEST_INVALID
    assert text in error.value.message


def test_budgets_in_tokens_bytes_and_pages_mean_the_same() -> None:
    page_bytes = 8 * 2 * 16 * 2 * 4
    budgets = [
        Budget(tokens=30, cap_policy=CapPolicy.TRUNCATE),
        Budget(bytes=3 * page_bytes + 5, cap_policy=CapPolicy.TRUNCATE),
        Budget(units=3, cap_policy=CapPolicy.TRUNCATE),
    ]
    built = [
        build_family(
            quest().model_copy(update={"budget": b}), page_tokens=8, query_heads=2, kv_heads=2, head_dim=16
        )
        for b in budgets
    ]
    assert [one.pages for one in built if isinstance(one, QuestFamily)] == [3, 3, 3]
    assert len({one.digest for one in built}) == 3
