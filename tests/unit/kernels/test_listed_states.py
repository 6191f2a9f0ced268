"""Rows that lists name: the bits of the same rows gathered, compiled or plain, and the estimator's definition
where they are weighted."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtier_kernels import state
from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job
from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state, listed
from kvtier_kernels.ops.chunk_attention.listed import listed_states
from kvtier_kernels.ops.paged_decode import paged_decode_torch
from kvtier_kernels.registry import entry
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, merge

FRAME = LogitFrame(0.3)
GEOMETRIES = [(9, 3, 64), (4, 2, 16), (5, 1, 80), (6, 3, 40), (32, 2, 128)]
LISTS = ["one for each KV head", "one for each query head", "one for all"]
SPARSE = entry("sparse_paged_decode")


def drawn(seed: int, rows: int, geometry: tuple[int, int, int] = (3, 1, 8)) -> tuple[Tensor, Tensor, Tensor]:
    hq, hk, d = geometry
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, hq, d, generator=g),
        torch.randn(rows, hk, d, generator=g),
        torch.randn(rows, hk, d, generator=g),
    )


def chosen(seed: int, rows: int, geometry: tuple[int, int, int], kind: str) -> list[np.ndarray]:
    """Lists of different lengths, among them an empty one and one of all rows."""
    hq, hk, _ = geometry
    count = {LISTS[0]: hk, LISTS[1]: hq, LISTS[2]: 1}[kind]
    random = np.random.default_rng(seed)
    sizes = [rows if i == 0 else int(random.integers(0, rows + 1)) for i in range(count)]
    if count > 1:
        sizes[-1] = 0
    return [np.sort(random.permutation(rows)[:size]).astype(np.int64) for size in sizes]


def gathered(
    q: Tensor, k: Tensor, v: Tensor, lists: list[np.ndarray], frame: LogitFrame = FRAME
) -> AttentionState:
    """The states of `chunk_state` over copies of each list's rows."""
    hq, hk = q.shape[1], k.shape[1]
    count = len(lists)
    parts = []
    for i, rows in enumerate(lists):
        heads = slice(0, hk) if count == 1 else slice(i * hk // count, i * hk // count + 1)
        own = q[:, i * hq // count : (i + 1) * hq // count]
        at = torch.from_numpy(rows)
        keys, values = k[at][:, heads], v[at][:, heads]
        parts.append(
            chunk_state(own, keys, values, scale=frame.scale, q_pos0=len(k), row_pos0=at, frame=frame)
        )
    m, l, u = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("m", "l", "u"))
    return AttentionState(m, l, u, frame)


def same(a: AttentionState, b: AttentionState) -> bool:
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        for x, y in ((a.m, b.m), (a.l, b.l), (a.u, b.u))
    )


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "library", lambda: None)
    monkeypatch.setattr(state, "library", lambda: None)


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 130, 256])
def test_they_have_the_bits_of_the_same_rows_gathered(
    rows: int, geometry: tuple[int, int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = drawn(rows, rows, geometry)
    lists = chosen(rows, rows, geometry, kind)
    want = gathered(q, k, v, lists)
    assert same(listed_states(q, k, v, lists, None, FRAME), want)
    plain(monkeypatch)
    assert same(listed_states(q, k, v, lists, None, FRAME), want)


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_weights_have_the_same_bits_compiled_and_plain(
    geometry: tuple[int, int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = drawn(1, 150, geometry)
    lists = chosen(2, 150, geometry, kind)
    weights = [np.random.default_rng(len(one)).normal(0, 3, len(one)).astype(np.float32) for one in lists]
    if len(weights[0]) > 2:
        weights[0][1] = -np.inf
    got = listed_states(q, k, v, lists, weights, FRAME)
    plain(monkeypatch)
    assert got.estimated
    assert same(got, listed_states(q, k, v, lists, weights, FRAME))


@pytest.mark.parametrize("layout", ["rows within heads", "heads within rows", "gaps", "unaligned"])
def test_the_layout_changes_no_bit(layout: str) -> None:
    geometry, rows = (9, 3, 64), 70
    q, k, v = drawn(3, rows, geometry)
    lists = chosen(3, rows, geometry, LISTS[1])
    want = listed_states(q, k, v, lists, None, FRAME)

    def moved(x: Tensor) -> Tensor:
        if layout == "rows within heads":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        memory = torch.full((rows + 1, 3, 64 + 48), torch.nan).view(-1)
        offset = {"heads within rows": 0, "gaps": 16, "unaligned": 3}[layout]
        step = 3 * 64 if layout == "heads within rows" else 3 * (64 + 48)
        out = memory.as_strided((rows, 3, 64), (step, step // 3, 1), offset)
        return out.copy_(x)

    assert same(listed_states(q, moved(k), moved(v), lists, None, FRAME), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("where", ["key", "value", "weight"])
def test_what_is_not_finite_reaches_the_lists_that_name_it(
    where: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = drawn(4, 40, (6, 3, 64))
    lists = [np.arange(40), np.array([0, 1, 2]), np.arange(7, 20)]
    weights = [np.zeros(len(one), np.float32) for one in lists]
    clean = listed_states(q, k, v, lists, weights, FRAME)
    if where == "weight":
        weights[0][30] = value
    else:
        (k if where == "key" else v)[30, :, 5] = value
    got = listed_states(q, k, v, lists, weights, FRAME)
    for name in ("m", "l", "u"):
        assert torch.equal(getattr(got, name)[:, 2:], getattr(clean, name)[:, 2:])
    plain(monkeypatch)
    assert same(got, listed_states(q, k, v, lists, weights, FRAME))


@given(seed=st.integers(0, 1000), rows=st.integers(1, 40), cut=st.integers(0, 40))
def test_weighted_it_is_the_definition_and_parts_merge_to_the_whole(seed: int, rows: int, cut: int) -> None:
    q, k, v = drawn(seed, rows)
    w = np.random.default_rng(seed).normal(0, 3, rows).astype(np.float32)
    every = np.arange(rows)
    logits = FRAME.scale * (q[0].double() @ k[:, 0].double().T) + torch.from_numpy(w).double()
    want = logits.softmax(-1) @ v[:, 0].double()
    whole = listed_states(q, k, v, [every], [w], FRAME)
    out, lse = finalize(whole)
    assert whole.estimated
    torch.testing.assert_close(out[0].double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), rtol=0, atol=1e-5)
    parts = merge(
        listed_states(q, k, v, [every[:cut]], [w[:cut]], FRAME),
        listed_states(q, k, v, [every[cut:]], [w[cut:]], FRAME),
    )
    torch.testing.assert_close(finalize(parts)[0], out, rtol=0, atol=2e-6)


def test_a_weight_of_one_changes_no_bit_but_what_the_state_says_of_itself() -> None:
    q, k, v = drawn(1, 20)
    every = np.arange(20)
    exact = listed_states(q, k, v, [every], None, FRAME)
    weighted = listed_states(q, k, v, [every], [np.zeros(20, np.float32)], FRAME)
    assert same(exact, weighted)
    assert (exact.estimated, weighted.estimated) == (False, True)


def test_no_rows_are_the_identity_and_a_row_of_no_weight_is_none() -> None:
    q, k, v = drawn(2, 4)
    w = np.random.default_rng(2).normal(0, 3, 4).astype(np.float32)
    none: np.ndarray = np.empty(0, np.int64)
    empty = listed_states(q, k, v, [none], [w[:0]], FRAME)
    assert torch.isneginf(empty.m).all() and not empty.l.any()
    w[1] = -np.inf
    kept = np.array([0, 2, 3])
    without = listed_states(q, k, v, [kept], [w[kept]], FRAME)
    whole = listed_states(q, k, v, [np.arange(4)], [w], FRAME)
    torch.testing.assert_close(finalize(whole)[0], finalize(without)[0])
    hidden = listed_states(q, k, v, [np.array([1])], [w[1:2]], FRAME)
    assert not hidden.l.any() and not hidden.u.any()


REFUSED: dict[str, dict[str, Any]] = {
    "queries": {"q": torch.zeros(2, 3, 8)},
    "values": {"v": torch.zeros(4, 1, 8)},
    "width": {"k": torch.zeros(5, 1, 4), "v": torch.zeros(5, 1, 4)},
    "half": {"k": torch.zeros(5, 1, 8).half()},
    "two lists": {"lists": [np.arange(2), np.arange(2)]},
    "weights": {"log_weight": [np.zeros(4, np.float32)]},
    "behind the last row": {"lists": [np.array([0, 5])]},
    "before the first row": {"lists": [np.array([-1, 3])]},
    "no row of an unsigned type": {"lists": [np.array([0, 1 << 63], np.uint64)]},
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64], ids=lambda one: one.__name__)
def test_rows_named_in_another_type_of_integers_are_the_same(dtype: type) -> None:
    q, k, v = drawn(3, 200)
    rows = np.array([1, 7, 60, 199])
    got, want = (listed_states(q, k, v, [one], None, FRAME) for one in (rows.astype(dtype), rows))
    assert same(got, want)


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(wrong: dict[str, Any]) -> None:
    q, k, v = drawn(3, 5)
    given_: dict[str, Any] = {"q": q, "k": k, "v": v, "lists": [np.arange(5)], "log_weight": None}
    with pytest.raises(ShapeError):
        listed_states(**{**given_, **wrong}, frame=FRAME)


@pytest.mark.parametrize("case", [case.id for case in SPARSE.cases if "far" not in case.id])
def test_sparse_decode_has_the_same_bits_compiled_and_plain(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = SPARSE.make_inputs(SPARSE.case(case))
    run = SPARSE.implementations["torch"]()
    got = run(**inputs)
    plain(monkeypatch)
    assert same(got, run(**inputs))


@pytest.mark.parametrize("lists", [1, 3, 9])
@pytest.mark.parametrize("tokens", [1, 255, 256, 700])
def test_all_units_have_the_bits_of_paged_decode(tokens: int, lists: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    pages = -(-tokens // 16)
    k, v = (torch.randn(pages + 2, 16, 3, 64, generator=g) for _ in range(2))
    q, table = torch.randn(1, 9, 64, generator=g), torch.randperm(pages + 2, generator=g)[None, :pages].int()
    want = paged_decode_torch(q, k, v, table, torch.tensor([tokens], dtype=torch.int32), scale=0.125)
    got = SPARSE.implementations["torch"]()(
        q,
        k,
        v,
        table,
        torch.arange(lists + 1, dtype=torch.int32) * pages,
        torch.arange(pages, dtype=torch.int32).repeat(lists),
        torch.full((lists,), tokens - 16 * (pages - 1), dtype=torch.int32),
        None,
        scale=0.125,
        unit_tokens=16,
    )
    assert same(got, want)


@pytest.mark.parametrize("rows", [*range(1, 5), 15, 16, 17, 33])
@pytest.mark.parametrize("group", [1, 12], ids=["begun", "transposed"])
def test_a_table_is_not_read_beyond_its_hints(rows: int, group: int) -> None:
    """It lies before memory that nobody may read; a process of its own runs into that, if any does."""
    compiled, width = library(), 16
    assert compiled is not None
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    pages = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(pages + mmap.PAGESIZE), mmap.PAGESIZE, 0)
    room = rows + AHEAD * LANES
    table = np.frombuffer(memory, np.int64, room, mmap.PAGESIZE - 8 * room)
    data = np.ones((rows, width), np.float32)
    table[:] = data.ctypes.data
    table[:rows] += np.arange(rows) * data.strides[0]
    jobs = np.zeros((1, len(Job)), np.int64)
    jobs[0, [Job.KEYS, Job.VALUES]] = table.ctypes.data
    jobs[0, [Job.VISIBLE, Job.COUNT]] = rows, 1
    jobs[0, [Job.KEY_ROW, Job.VALUE_ROW]] = data.strides[0]
    only, q = np.zeros(1, np.int64), torch.ones(1, 1, group, width)
    total = state.identity((1, group), width, FRAME)
    compiled._attend_listed()
    child = os.fork()
    if not child:
        compiled.attend(
            q, jobs, only, only, np.array([rows], np.int64), (total.m, total.l, total.u), listed=True
        )
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
