"""Selection by its meaning: any scores, by either path of the CPU, are what sorting by hand says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.compare import Exact, findings, named
from kvtier_kernels.ops.topk_units import TopkUnits, topk_units, topk_units_ref, torch_impl

# (LONG_ROW, FEW_ROWS): the choice is about speed only, so each path must do for all inputs.
PATHS = {"rows-one-by-one": (0, 8), "rows-together": (1 << 30, -1)}
VALUES = st.one_of(
    st.integers(-3, 3).map(float),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e-45, -1e-45, 3.4e38]),
    st.floats(width=32, allow_nan=False),
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by(path: str, score: torch.Tensor, valid_len: torch.Tensor, k: torch.Tensor) -> TopkUnits:
    long, few = PATHS[path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "LONG_ROW", long)
        patch.setattr(torch_impl, "FEW_ROWS", few)
        return topk_units(score, valid_len, k)


def lists(got: TopkUnits) -> list[list[int]]:
    at = got.indptr.tolist()
    return [got.units[a:b].tolist() for a, b in itertools.pairwise(at)]


@pytest.mark.parametrize("path", PATHS)
def test_ties_go_to_the_lowest_id_and_ids_ascend(path: str) -> None:
    score = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    got = by(path, score, ints(5, 5, 5), ints(2, 2, 2))
    assert lists(got) == [[1, 2], [0, 4], [0, 1]]
    assert got.kth.tolist() == [3.0, 0.0, 4.0]
    assert got.runner_up.tolist() == [3.0, 0.0, 3.0]


@pytest.mark.parametrize("path", PATHS)
def test_a_unit_whose_score_is_nan_is_kept(path: str) -> None:
    got = by(path, torch.tensor([[1.0, 2.0, math.nan, 3.0]]), ints(4), ints(2))
    assert lists(got) == [[2, 3]]
    assert (got.kth.item(), got.runner_up.item()) == (3.0, 2.0)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_chosen_and_nothing_left_have_infinite_cuts(path: str) -> None:
    got = by(path, torch.tensor([[1.0, 2.0]] * 3), ints(2, 2, 0), ints(0, 7, 7))
    assert lists(got) == [[], [0, 1], []]
    assert got.kth.tolist() == [math.inf, 1.0, math.inf]
    assert got.runner_up.tolist() == [2.0, -math.inf, -math.inf]
    assert got.units.tolist() == [0, 1] + [-1] * 19


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.integers(0, 4), width=st.integers(0, 90))
def test_both_paths_equal_sorting_by_hand(data: st.DataObject, rows: int, width: int) -> None:
    scores = data.draw(st.lists(VALUES, min_size=rows * width, max_size=rows * width))
    lens = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    ks = data.draw(st.lists(st.integers(0, width + 3), min_size=rows, max_size=rows))
    score = torch.tensor(scores, dtype=torch.float32).view(rows, width)
    want = topk_units_ref(score, ints(*lens), ints(*ks))
    for path in PATHS:
        got = named(by(path, score, ints(*lens), ints(*ks)))
        assert not findings(dict.fromkeys(want, Exact()), {}, got, want), path
        assert all(got[n].dtype == x.dtype for n, x in want.items())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(2000, 9000),
    k=st.integers(1, 300),
    steps=st.integers(1, 400),
)
def test_a_thinned_row_loses_nothing(seed: int, width: int, k: int, steps: int) -> None:
    """Few different values make long runs of ties at the cut, also inside one block of the thinning."""
    g = torch.Generator().manual_seed(seed)
    score = (torch.randn(1, width, generator=g) * steps).round() / steps
    score[0, : width // 3] = score[0, : width // 3].sort(descending=True).values
    want = topk_units_ref(score, ints(width), ints(k))
    got = named(by("rows-one-by-one", score, ints(width), ints(k)))
    assert not findings(dict.fromkeys(want, Exact()), {}, got, want)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    width=st.integers(1, 80),
    k=st.integers(0, 81),
    kind=st.sampled_from(["plain", "ties", "one NaN"]),
)
def test_full_rows_of_one_k_are_chosen_alike(seed: int, rows: int, width: int, k: int, kind: str) -> None:
    """What the selectors ask for most, in one go for all rows; ties and NaN must leave that path."""
    g = torch.Generator().manual_seed(seed)
    score = torch.randn(rows, width, generator=g)
    if kind == "ties":
        score = score.round()
    if kind == "one NaN":
        score[rows - 1, width // 2] = math.nan
    lens, ks = ints(*[width] * rows), ints(*[k] * rows)
    want = topk_units_ref(score, lens, ks, max_k=k + 2)
    got = topk_units(score, lens, ks, max_k=k + 2)
    assert not findings(dict.fromkeys(want, Exact()), {}, named(got), want)
    assert all(named(got)[n].dtype == x.dtype for n, x in want.items())
    alike = torch_impl._alike(score, lens, ks, k + 2)
    if kind == "plain":
        assert (alike is not None) == (0 < k < width)
    if kind == "one NaN":
        assert alike is None
