"""Many queries over many chunks in one go have the bits of one chunk and one query at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_kernels import state
from kvtier_kernels.ops.chunk_attention import chunk_state, decode, torch_impl
from kvtier_kernels.ops.chunk_attention.decode import Reading, attend_into, merge_stacked, no_rows
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom, KeptBatch
from kvtier_kernels.ops.chunk_attention.outputs import attend, outputs
from kvtier_kernels.ops.chunk_attention.runs import chunk_runs
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, merge_ascending

SCALE = 0.125
FRAME = LogitFrame(SCALE)
LATE = 1 << 30
GEOMETRIES = [(9, 3, 64), (8, 1, 64), (4, 4, 16), (2, 2, 128), (12, 2, 32)]


@pytest.fixture(params=["compiled", "plain"])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        for module in (decode, torch_impl, state):
            monkeypatch.setattr(module, "library", lambda: None)


@dataclass(frozen=True)
class Sequenced:
    """One query's chunks, ascending, with the rows that it sees of the last one."""

    chunks: tuple[int, ...]
    visible: int


def alone(q: Tensor, pool: Tensor, one: Sequenced) -> AttentionState:
    """q [1, Hq, d] over chunks of pool [slots, 2, Hk, R, d], one after the other."""
    states = []
    for i, slot in enumerate(one.chunks):
        rows = one.visible if i == len(one.chunks) - 1 else pool.shape[3]
        k, v = (pool[slot, half].transpose(0, 1)[:rows] for half in (0, 1))
        states.append(chunk_state(q, k, v, scale=SCALE, q_pos0=LATE, row_pos0=0, frame=FRAME))
    return merge_ascending(states)


def together(q: Tensor, pool: Tensor, each: Sequence[Sequenced], shared: int = 0) -> AttentionState:
    """All of them, the first `shared` chunks of all read once; their outputs are compared on the way."""
    rows = pool.shape[3]

    def readings(slots: Sequence[int], queries: tuple[int, ...], visible: int = rows) -> list[Reading]:
        runs = chunk_runs([pool[slot, 0] for slot in slots], [pool[slot, 1] for slot in slots])
        return [Reading(run, queries, visible) for run in runs]

    found = readings(each[0].chunks[:shared], tuple(range(len(each))))
    for index, one in enumerate(each):
        found += readings(one.chunks[shared:-1], (index,))
        found += readings(one.chunks[-1:], (index,), one.visible)
    totals = no_rows(len(each), *q.shape[1:])
    attend_into(totals, q * SCALE, found)
    whole = AttentionState(*totals, FRAME)
    if torch.isfinite(whole.u).all():
        assert_same_output(attend(q * SCALE, found), whole)
        in_parts = no_rows(len(each), *q.shape[1:])
        for some in (found[: len(found) // 2], found[len(found) // 2 :]):
            if some:
                attend_into(in_parts, q * SCALE, some)
        assert_same_output(outputs(in_parts), whole)
        check_kept(q, pool, each, found, whole)
    return whole


def check_kept(
    q: Tensor, pool: Tensor, each: Sequence[Sequenced], found: Sequence[Reading], whole: AttentionState
) -> None:
    """What is kept answers again and again, other lengths of the open chunks in between, all in one call or
    with looks at the clock."""
    compiled = decode.library()
    if compiled is None:
        return
    queries, _, d = q.shape
    room = DecodeRoom(q.shape[1], pool.shape[2], d, pool.shape[3], queries=queries + 3)
    for states in (1, 5, 1 << 20):
        batch = KeptBatch(compiled, room, found, [SCALE] * queries, states)
        for visible in ([1] * queries, [one.visible for one in each]):
            out = batch.output(q.split(1), visible)
            assert out is not None
        assert_same_output(out, whole)
        if states == 1 and sum(one.run.count for one in found) > 2:
            looked = iter([False, True]).__next__
            stopped = batch.output(q.split(1), [one.visible for one in each], looked)
            assert stopped is None
            out = batch.output(q.split(1), [one.visible for one in each])
        assert out is not None
        assert_same_output(out, whole)


def readings_of(pool: Tensor, one: Sequenced) -> list[Reading]:
    """One query's, its last chunk apart."""
    parts = [(one.chunks[:-1], pool.shape[3]), (one.chunks[-1:], one.visible)]
    return [
        Reading(run, (0,), visible)
        for slots, visible in parts
        for run in chunk_runs([pool[slot, 0] for slot in slots], [pool[slot, 1] for slot in slots])
    ]


def assert_same_output(got: Tensor, total: AttentionState) -> None:
    want = finalize(total)[0]
    assert got.shape == want.shape
    assert torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32))


def assert_same(got: AttentionState, want: Sequence[AttentionState]) -> None:
    for name in ("m", "l", "u"):
        a, b = getattr(got, name), torch.cat([getattr(one, name) for one in want])
        assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)), name


def drawn(
    geometry: tuple[int, int, int], rows: int, slots: int, batch: int, seed: int
) -> tuple[Tensor, Tensor]:
    hq, hk, d = geometry
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(slots, 2, hk, rows, d, generator=generator)
    return torch.randn(batch, hq, d, generator=generator) * 3, pool


ORDERS = {
    "ascending": (0, 1, 2, 3, 4),
    "descending": (6, 5, 4, 3, 2),
    "every other": (0, 2, 4, 6),
    "scattered": (5, 0, 6, 1, 3),
    "one": (3,),
}


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_chunks_in_any_places(geometry: tuple[int, int, int], order: tuple[int, ...]) -> None:
    for rows in (64, 256):
        q, pool = drawn(geometry, rows, 7, 1, rows)
        for visible in (1, 40, rows):
            one = Sequenced(order, visible)
            want = alone(q, pool, one)
            assert_same(together(q, pool, [one]), [want])
            assert_same_output(attend(q * SCALE, readings_of(pool, one)), want)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_ragged_queries(geometry: tuple[int, int, int]) -> None:
    each = [Sequenced((0,), 5), Sequenced((4, 2, 1), 64), Sequenced((3, 5), 17), Sequenced((6, 7, 8, 9), 1)]
    q, pool = drawn(geometry, 64, 10, len(each), 1)
    wants = [alone(q[i : i + 1], pool, one) for i, one in enumerate(each)]
    assert_same(together(q, pool, each), wants)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("queries", [2, 3, 8, 17])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_shared_prefix(geometry: tuple[int, int, int], queries: int) -> None:
    """Read once for all, and each goes on alone."""
    each = [Sequenced((1, 2, 3, 4 + i % 3), 1 + 3 * i) for i in range(queries)]
    q, pool = drawn(geometry, 64, 8, queries, queries)
    wants = [alone(q[i : i + 1], pool, one) for i, one in enumerate(each)]
    assert_same(together(q, pool, each, shared=3), wants)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("count", [1, 2, 5, 9, 33, 80])
@pytest.mark.parametrize("steady", [True, False], ids=["one maximum", "many maxima"])
def test_one_query_over_many_chunks(count: int, steady: bool) -> None:
    q, pool = drawn((9, 3, 64), 64, count, 1, count)
    if steady:
        # The first row outshines all others, as a sink does, so that no later maximum changes.
        pool[0, 0, :, 0] = 4 * q.view(3, 3, 64).mean(1)
    one = Sequenced(tuple(range(count)), 29)
    assert_same_output(attend(q * SCALE, readings_of(pool, one)), alone(q, pool, one))


@pytest.mark.usefixtures("libraries")
def test_a_query_whose_logits_are_all_minus_infinity_answers_zero() -> None:
    q, pool = drawn((4, 2, 16), 64, 3, 1, 1)
    q = q.abs() + 1
    pool[:, 0] = -torch.inf
    one = Sequenced((0, 1, 2), 40)
    out = attend(q * SCALE, readings_of(pool, one))
    assert_same_output(out, alone(q, pool, one))
    assert not out.any()


@pytest.mark.usefixtures("libraries")
def test_long_sequences_merge_one_by_one() -> None:
    lengths = (40, 1, 17)
    q, pool = drawn((9, 3, 64), 64, 40, len(lengths), 7)
    each = [Sequenced(tuple(range(count)), 33) for count in lengths]
    wants = [alone(q[i : i + 1], pool, one) for i, one in enumerate(each)]
    assert_same(together(q, pool, each), wants)


def states(maxima: Sequence[Sequence[float]], width: int, seed: int) -> AttentionState:
    """[n, heads] maxima with random sums; -inf stands for no rows."""
    generator = torch.Generator().manual_seed(seed)
    m = torch.tensor(maxima, dtype=torch.float32)
    some = torch.isfinite(m)
    l = torch.where(some, torch.rand(m.shape, generator=generator) + 1, 0.0)
    u = torch.randn(*m.shape, width, generator=generator)
    return AttentionState(m, l, torch.where(some.unsqueeze(-1), u, 0.0), FRAME)


@settings(max_examples=60, deadline=None)
@given(
    maxima=st.lists(
        st.lists(st.sampled_from([-float("inf"), -2.0, 0.0, 0.5, 3.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=40,
    ),
    seed=st.integers(0, 99),
)
def test_a_merge_is_the_fold_wherever_the_maximum_stands(maxima: list[list[float]], seed: int) -> None:
    stacked = states(maxima, 16, seed)
    singles = [
        AttentionState(stacked.m[i : i + 1], stacked.l[i : i + 1], stacked.u[i : i + 1], FRAME)
        for i in range(len(maxima))
    ]
    got = merge_stacked(stacked)
    assert_same(AttentionState(got.m[None], got.l[None], got.u[None], FRAME), [merge_ascending(singles)])


def test_a_layout_that_changes_begins_another_run() -> None:
    pool, apart = torch.randn(8, 2, 1, 64, 16), torch.randn(8, 2, 1, 64, 32)[..., :16]
    chunks = [pool[0], pool[1], pool[2], apart[4], apart[6], pool[7]]
    runs = chunk_runs([chunk[0] for chunk in chunks], [chunk[1] for chunk in chunks])
    assert [run.count for run in runs] == [3, 2, 1]
    assert [run.rows for run in runs] == [64, 64, 64]
    most = chunk_runs([pool[s, 0] for s in range(8)], [pool[s, 1] for s in range(8)], 3)
    assert [run.count for run in most] == [3, 3, 2]
    part = runs[0].cut(1, 3)
    assert part.count == 2
    assert (part.jobs == runs[0].jobs[1:]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("libraries")
def test_rows_that_are_not_finite_spoil_what_they_reach_and_nothing_else() -> None:
    q, pool = drawn((9, 3, 64), 64, 4, 2, 3)
    pool[1, 0, 1, 5] = torch.inf
    pool[1, 1, 1, 6, 7] = torch.nan
    each = [Sequenced((0, 1), 64), Sequenced((2, 3), 64)]
    got = together(q, pool, each)
    assert_same(AttentionState(got.m[1:], got.l[1:], got.u[1:], FRAME), [alone(q[1:], pool, each[1])])
    want = alone(q[:1], pool, each[0])
    sound = torch.isfinite(want.u[0])
    assert torch.equal(torch.isfinite(got.u[0]), sound)
    assert torch.equal(got.u[0][sound], want.u[0][sound])
    assert sound.any() and not sound.all()


@pytest.mark.parametrize("queries", [16, 31, 32, 33, 70])
def test_many_queries_of_one_chunk_are_shared_out(queries: int) -> None:
    """To jobs whose weights stay in cache, and the bits are those of one query at a time."""
    each = [Sequenced((0, 1, 2), 100)] * queries
    q, pool = drawn((9, 3, 64), 256, 3, queries, queries)
    wants = [alone(q[i : i + 1], pool, one) for i, one in enumerate(each)]
    assert_same(together(q, pool, each, shared=2), wants)
