"""Paged decode has the bits of one chunk at a time, however its pages lie and whoever computes them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from kvtier_kernels import state
from kvtier_kernels.compiled import crew as crews
from kvtier_kernels.compiled.crew import Crew
from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state, torch_impl
from kvtier_kernels.ops.paged_decode import paged_decode_torch
from kvtier_kernels.ops.paged_decode import torch_impl as paged
from kvtier_kernels.state import AttentionState, LogitFrame, merge_ascending

PAGE, SPLIT, SCALE = 16, 64, 0.125
CHUNK_PAGES = SPLIT // PAGE
PAGES = 160
TABLES = {
    "straight": list(range(PAGES)),
    "scattered": torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist(),
    "backwards": list(range(PAGES))[::-1],
    "straight within chunks": [
        chunk * CHUNK_PAGES + page
        for chunk in torch.randperm(PAGES // CHUNK_PAGES, generator=torch.Generator().manual_seed(2)).tolist()
        for page in range(CHUNK_PAGES)
    ],
    "straight but for two": [*range(9), 12, 11, 10, *range(13, PAGES), 9],
}


def inputs(hq: int, hk: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(hq)
    k, v = (torch.randn(PAGES, PAGE, hk, d, generator=g).to(dtype) for _ in range(2))
    return (torch.randn(3, hq, d, generator=g) * 2).to(dtype), k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int, window: int | None = None
) -> AttentionState:
    first = 0 if window is None else n - min(n, window)
    rows = [x[table].flatten(0, 1)[:n].float() for x in (k, v)]
    states = [
        chunk_state(
            q.float(),
            rows[0][max(lo, first) : lo + SPLIT],
            rows[1][max(lo, first) : lo + SPLIT],
            scale=SCALE,
            q_pos0=n - 1,
            row_pos0=max(lo, first),
            frame=LogitFrame(SCALE),
        )
        for lo in range(first // SPLIT * SPLIT, n, SPLIT)
    ]
    return merge_ascending(states)


@pytest.mark.parametrize("library", ["compiled", "plain"])
@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("window", [1, 15, SPLIT, SPLIT + 3, 500, PAGES * PAGE - 1, PAGES * PAGE])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "half"])
def test_a_window_has_the_bits_of_its_rows_one_chunk_at_a_time(
    half: bool, window: int, helpers: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever helps, and wherever in a block of 16 rows it begins; pages before it are not there."""
    q, k, v = inputs(9, 3, 64, torch.float16 if half else torch.float32)
    table, lengths = TABLES["scattered"], [PAGES * PAGE, 40 * PAGE + 3, 7]
    tables = torch.tensor([table] * 3, dtype=torch.int32)
    for b, n in enumerate(lengths):
        tables[b, : max(0, n - window) // PAGE] = -1
    with monkeypatch.context() as patched, contextlib.ExitStack() as stack:
        if library == "plain":
            for module in (paged, torch_impl, state, crews):
                patched.setattr(module, "library", lambda: None)
        crew = stack.enter_context(Crew(helpers)) if helpers else None
        lens = torch.tensor(lengths, dtype=torch.int32)
        got = paged_decode_torch(
            q, k, v, tables, lens, scale=SCALE, split_tokens=SPLIT, window=window, crew=crew
        )
    for b, n in enumerate(lengths):
        want = expected(q[b : b + 1], k, v, table, n, window)
        for name in ("m", "l", "u"):
            a, e = getattr(got, name)[b : b + 1].contiguous(), getattr(want, name).contiguous()
            assert torch.equal(a.view(torch.int32), e.view(torch.int32)), (b, name)


@pytest.mark.parametrize("library", ["compiled", "plain"])
@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 128), (2, 2, 16)], ids=str)
def test_any_table_has_the_bits_of_one_chunk_at_a_time(
    heads: tuple[int, int, int],
    table: list[int],
    helpers: int,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = inputs(*heads)
    lengths = [PAGES * PAGE, 40 * PAGE + 3, 7]
    tables = torch.tensor([table] * 3, dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    with monkeypatch.context() as patched, contextlib.ExitStack() as stack:
        if library == "plain":
            for module in (paged, torch_impl, state, crews):
                patched.setattr(module, "library", lambda: None)
        crew = stack.enter_context(Crew(helpers)) if helpers else None
        got = paged_decode_torch(q, k, v, tables, lens, scale=SCALE, split_tokens=SPLIT, crew=crew)
    for b, n in enumerate(lengths):
        want = expected(q[b : b + 1], k, v, table, n)
        for name in ("m", "l", "u"):
            a, e = getattr(got, name)[b : b + 1].contiguous(), getattr(want, name).contiguous()
            assert torch.equal(a.view(torch.int32), e.view(torch.int32)), (b, name)


def test_a_crew_that_is_busy_or_closed_leaves_all_to_its_caller() -> None:
    q, k, v = inputs(9, 3, 64)
    table, lens = whole()
    want = expected(q[:1], k, v, list(range(PAGES)), PAGES * PAGE)
    with Crew(1) as crew, crew._lock:
        busy = paged_decode_torch(q[:1], k, v, table, lens, scale=SCALE, split_tokens=SPLIT, crew=crew)
    closed = paged_decode_torch(q[:1], k, v, table, lens, scale=SCALE, split_tokens=SPLIT, crew=crew)
    for got in (busy, closed):
        assert torch.equal(got.u, want.u) and torch.equal(got.l, want.l) and torch.equal(got.m, want.m)


def whole() -> tuple[Tensor, Tensor]:
    return torch.arange(PAGES, dtype=torch.int32)[None], torch.tensor([PAGES * PAGE], dtype=torch.int32)


@pytest.mark.parametrize("layout", ["half precision", "pages apart", "rows apart"])
def test_caches_that_cannot_be_read_in_place_have_the_same_bits(layout: str) -> None:
    q, k, v = inputs(9, 3, 64, torch.float16 if layout == "half precision" else torch.float32)
    if layout == "pages apart":
        k, v = (torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, :PAGE] for x in (k, v))
    if layout == "rows apart":
        k, v = (torch.cat((x, torch.full_like(x, torch.nan)), 3)[..., :64] for x in (k, v))
    n = 10 * SPLIT
    got = paged_decode_torch(
        q[:1],
        k,
        v,
        torch.arange(PAGES, dtype=torch.int32)[None],
        torch.tensor([n], dtype=torch.int32),
        scale=SCALE,
        split_tokens=SPLIT,
    )
    want = expected(q[:1], k, v, list(range(PAGES)), n)
    assert torch.equal(got.u, want.u) and torch.equal(got.l, want.l) and torch.equal(got.m, want.m)


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("wide", [False, True], ids=["dense", "every-other-column"])
def test_tables_of_several_requests_and_page_sizes_are_read_as_they_lie(page: int, wide: bool) -> None:
    pages = PAGES * PAGE // page
    q, k, v = inputs(9, 3, 64)
    k, v = (x.reshape(pages, page, 3, 64) for x in (k, v))
    shuffled = [torch.randperm(pages, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    table = torch.stack(shuffled).int()
    if wide:
        table = torch.stack([table, torch.full_like(table, -7)], 2).flatten(1)[:, ::2]
    lens = [pages * page - 3, 0, 70]
    got = paged_decode_torch(
        q, k, v, table, torch.tensor(lens, dtype=torch.int32), scale=SCALE, split_tokens=SPLIT
    )
    for b in (0, 2):
        flat = [x.flatten(0, 1).unflatten(0, (-1, PAGE)) for x in (k, v)]
        small = [int(one) * (page // PAGE) + i for one in table[b] for i in range(page // PAGE)]
        want = expected(q[b : b + 1], flat[0], flat[1], small, lens[b])
        for name in ("m", "l", "u"):
            assert torch.equal(getattr(got, name)[b : b + 1], getattr(want, name)), name
    assert not got.l[1].any()


@pytest.mark.parametrize("library", ["compiled", "plain"])
@pytest.mark.parametrize("wrong", [-1, PAGES, -(1 << 31), (1 << 31) - 1], ids=str)
@pytest.mark.parametrize("place", [0, 3, 6])
def test_an_id_that_is_no_page_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, library: str, wrong: int, place: int
) -> None:
    if library == "plain":
        monkeypatch.setattr(paged, "library", lambda: None)
    q, k, v = inputs(9, 3, 64)
    table = torch.arange(3 * 7, dtype=torch.int32).view(3, 7)
    table[1, place] = wrong
    lens = torch.tensor([100, 6 * PAGE + 1, 5], dtype=torch.int32)
    with pytest.raises(ShapeError, match="page ids"):
        paged_decode_torch(q, k, v, table, lens, scale=SCALE, split_tokens=SPLIT)
    # Before a window and behind a request's last page anything may stand.
    outside = lens[1] - (place + 1) * PAGE
    if outside > 0:
        options = {"scale": SCALE, "split_tokens": SPLIT}
        with pytest.raises(ShapeError, match="page ids"):
            paged_decode_torch(q, k, v, table, lens, window=int(outside) + 1, **options)
        paged_decode_torch(q, k, v, table, lens, window=int(outside), **options)
    lens[1] = place * PAGE
    paged_decode_torch(q, k, v, table, lens, scale=SCALE, split_tokens=SPLIT)
