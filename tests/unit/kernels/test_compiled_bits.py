"""The compiled kernels have the bits of plain tensor operations, whatever is asked and however rows lie."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from llvmlite import ir
from torch import Tensor

from kvtier_kernels import compiled, numerics, state
from kvtier_kernels.compiled.attention import TURN_FROM, emit_attend, emit_fold
from kvtier_kernels.ops.chunk_attention import chunk_state, torch_impl
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom, KeptDecode
from kvtier_kernels.ops.chunk_attention.runs import chunk_runs
from kvtier_kernels.state import AttentionState, LogitFrame, fold, fold_plain, identity

GEOMETRIES = [
    (9, 3, 64),
    (1, 1, 64),
    (8, 1, 128),
    (16, 1, 256),
    (5, 1, 80),
    (4, 2, 16),
    (6, 3, 40),
    (32, 8, 128),
]


def drawn(nq: int, rows: int, geometry: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    hq, hk, d = geometry
    g = torch.Generator().manual_seed(seed + rows)
    q = torch.randn(nq, hq, d, generator=g) * 2
    return q, torch.randn(rows, hk, d, generator=g), torch.randn(rows, hk, d, generator=g)


def both(
    monkeypatch: pytest.MonkeyPatch, q: Tensor, k: Tensor, v: Tensor, *, q_pos0: int, row_pos0: int | Tensor
) -> tuple[AttentionState, AttentionState]:
    """Compiled, and plain."""
    one = chunk_state(q, k, v, scale=0.25, q_pos0=q_pos0, row_pos0=row_pos0)
    with monkeypatch.context() as patched:
        patched.setattr(torch_impl, "library", lambda: None)
        return one, chunk_state(q, k, v, scale=0.25, q_pos0=q_pos0, row_pos0=row_pos0)


def same(a: AttentionState, b: AttentionState) -> bool:
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0))
        for x, y in ((a.m, b.m), (a.l, b.l), (a.u, b.u))
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100, 128, 129, 256, 300])
def test_one_query(rows: int, geometry: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    got, want = both(monkeypatch, *drawn(1, rows, geometry), q_pos0=rows, row_pos0=0)
    assert same(got, want)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("queries", [2, TURN_FROM - 1, TURN_FROM, 100])
def test_a_block_of_queries(
    queries: int, geometry: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the first see no row, and the last all of them."""
    got, want = both(monkeypatch, *drawn(queries, 70, geometry), q_pos0=98, row_pos0=100)
    assert same(got, want)
    assert not got.l[:2].any()


def test_gathered_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.tensor([0, 3, 4, 9, 50, 51, 90])
    got, want = both(monkeypatch, *drawn(60, 7, (6, 2, 64)), q_pos0=1, row_pos0=positions)
    assert same(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_what_is_not_finite(queries: int, where: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reaches the queries that see its row, in both alike, and no others."""
    q, k, v = drawn(queries, 64, (6, 2, 64))
    clean = chunk_state(q, k, v, scale=0.25, q_pos0=63, row_pos0=0)
    hidden = chunk_state(q[:1], k[:64], v[:64], scale=0.25, q_pos0=39, row_pos0=0)
    (k if where == "key" else v)[40, 1, 3] = value
    got, want = both(monkeypatch, q, k, v, q_pos0=63, row_pos0=0)
    assert same(got, want)
    assert torch.equal(got.u[:, :3], clean.u[:, :3])
    spoiled = chunk_state(q[:1], k, v, scale=0.25, q_pos0=39, row_pos0=0)
    assert same(spoiled, hidden)


@pytest.mark.parametrize("offset", range(0, 64, 4))
@pytest.mark.parametrize("gap", [0, 16, 48])
def test_alignment_and_gaps_change_no_bit(offset: int, gap: int) -> None:
    q, k, v = drawn(1, 50, (9, 3, 64))
    want = chunk_state(q, k, v, scale=0.25, q_pos0=60, row_pos0=0)

    def moved(x: Tensor) -> Tensor:
        memory = torch.full((offset // 4 + 50 * 3 * (64 + gap),), torch.nan)
        out = memory[offset // 4 :].view(50, 3, 64 + gap)[..., :64]
        out.copy_(x)
        return out

    assert same(chunk_state(q, moved(k), moved(v), scale=0.25, q_pos0=60, row_pos0=0), want)


def test_narrower_vectors_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for AVX2 has the bits of what is compiled for this machine."""
    narrow = importlib.import_module("kvtier_kernels.compiled.machine").Library("x86-64-v3")
    for queries in (1, 40):
        given = drawn(queries, 200, (9, 3, 64))
        want = chunk_state(*given, scale=0.25, q_pos0=170, row_pos0=0)
        with monkeypatch.context() as patched:
            patched.setattr(torch_impl, "library", lambda: narrow)
            assert same(chunk_state(*given, scale=0.25, q_pos0=170, row_pos0=0), want)


def test_threads_do_not_share_what_they_write() -> None:
    cases = [drawn(1 + i % 3, 256, (9, 3, 64), seed=i) for i in range(24)]

    def run(case: tuple[Tensor, Tensor, Tensor]) -> AttentionState:
        return chunk_state(*case, scale=0.25, q_pos0=300, row_pos0=0)

    wants = [run(case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(same(a, b) for a, b in zip(pool.map(run, cases), wants, strict=True))


@pytest.mark.parametrize("mode", ["flushes small numbers", "rounds up"])
def test_a_thread_of_other_modes_has_the_same_bits(mode: str) -> None:
    """Such as a library that was built for speed leaves behind, or an engine's own setting."""
    q, k, v = drawn(2, 200, (9, 3, 64))
    given = q, k * 1e-3, v * 1e-38
    want = chunk_state(*given, scale=1.0, q_pos0=300, row_pos0=0)
    folded = identity((2, 9), 64, LogitFrame(1.0))
    fold((folded.m, folded.l, folded.u), (want.m[None], want.l[None], want.u[None]))

    def otherwise() -> list[AttentionState]:
        if mode == "rounds up":
            assert not ctypes.CDLL("libm.so.6").fesetround(0x800)
        else:
            assert torch.set_flush_denormal(True)
        got = chunk_state(*given, scale=1.0, q_pos0=300, row_pos0=0)
        total = identity((2, 9), 64, LogitFrame(1.0))
        fold((total.m, total.l, total.u), (got.m[None], got.l[None], got.u[None]))
        return [got, total]

    with ThreadPoolExecutor(1) as pool:
        for one, wanted in zip(pool.submit(otherwise).result(), (want, folded), strict=True):
            assert same(one, wanted)


@pytest.mark.parametrize(
    "maxima", [[0.0, 3.0, -1.0], [-torch.inf, -torch.inf, 2.0], [torch.nan, 0.0, 1.0]], ids=str
)
def test_a_fold(maxima: list[float]) -> None:
    g = torch.Generator().manual_seed(1)
    m = torch.tensor(maxima).view(3, 1).repeat(1, 5)
    states = m, torch.rand(3, 5, generator=g) + 1, torch.randn(3, 5, 48, generator=g)
    totals = []
    for work in (fold, fold_plain):
        into = identity((5,), 48, LogitFrame(1.0))
        work((into.m, into.l, into.u), states)
        totals.append(into)
    assert same(*totals)


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = torch.linspace(-87, 0, 300_001)
    want = torch.exp(x.double())
    unit = 2.0 ** (torch.floor(torch.log2(want)) - 23)
    assert float(((numerics.exp_plain(x).double() - want).abs() / unit).max()) < 2
    edges = torch.tensor([0.0, -0.0, -87.5, -1e30, -torch.inf, torch.inf, torch.nan])
    got = numerics.exp_plain(edges)
    assert got[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert got[5:].isnan().all()


def test_tanh_is_within_two_units_in_the_last_place() -> None:
    """From where x itself is all of it to where it is 1, and about the place where the formula changes."""
    near = torch.tensor(0.625).view(torch.int32) + torch.arange(-1000, 1000, dtype=torch.int32)
    x = torch.cat((torch.linspace(0, 12, 300_001), torch.logspace(-30, 1, 100_001), near.view(torch.float32)))
    want = torch.tanh(x.double())
    unit = 2.0 ** (torch.floor(torch.log2(want.clamp_min(2.0**-126))) - 23)
    got = numerics.tanh_plain(x)
    assert float(((got.double() - want).abs() / unit).max()) < 2
    assert torch.equal(numerics.tanh_plain(-x), -got)
    assert numerics.tanh_plain(torch.tensor([torch.inf, -torch.inf, 1e30, 0.0])).tolist() == [1, -1, 1, 0]
    assert numerics.tanh_plain(torch.tensor([torch.nan])).isnan().all()


def test_nothing_may_be_contracted_or_reordered() -> None:
    module = ir.Module("m")
    emit_attend(module)
    emit_fold(module)
    text = str(module)
    words = {"fast", "contract", "reassoc", "nnan", "ninf", "nsz", "arcp", "afn"}
    lines = [line for line in text.splitlines() if " fadd " in line or " fmul " in line or " fsub " in line]
    assert len(lines) > 100
    assert not [line for line in lines if words & set(line.split())]


def test_without_the_compiler_the_plain_operations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    assert compiled.missing.__wrapped__() == "llvmlite is not installed"
    monkeypatch.setattr(compiled, "missing", compiled.missing.__wrapped__)
    assert compiled._library.__wrapped__() is None


def test_a_compiler_that_does_not_load_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtier_kernels.compiled.machine", None)
    assert compiled.missing.__wrapped__().startswith("llvmlite cannot be loaded: ")


def test_a_processor_without_fused_multiply_adds_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module("kvtier_kernels.compiled.machine")
    monkeypatch.setattr(real.binding, "get_host_cpu_features", lambda: {"avx2": True})
    assert compiled.missing.__wrapped__() == "the processor lacks fma"
    monkeypatch.setattr(real.platform, "machine", lambda: "aarch64")
    assert compiled.missing.__wrapped__() == "compiled kernels are for x86-64, not aarch64"


def test_threads_that_ask_at_once_get_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cache of an agent has a thread of its own, and both may see their first frame now."""
    both = threading.Barrier(2)

    class Compiling:
        def __init__(self) -> None:
            # Two that compile meet here; one alone goes on.
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)

    machine = importlib.import_module("kvtier_kernels.compiled.machine")
    monkeypatch.setattr(machine, "Library", Compiling)
    for cached in (compiled.library, compiled._library):
        cached.cache_clear()
    try:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda _: compiled.library(), range(2))
        assert one is other
        assert compiled.library() is one
    finally:
        for cached in (compiled.library, compiled._library):
            cached.cache_clear()


def test_a_function_that_is_kept_keeps_its_machine_code() -> None:
    """In a process of its own: code that is gone ends it."""
    library = importlib.import_module("kvtier_kernels.compiled.machine").Library()
    rows = torch.ones(2, 64, 16)
    room = DecodeRoom(4, 2, 16, 64)
    kept = KeptDecode(library, room, [], chunk_runs([rows], [rows])[0], 0.25)
    listed = library._attend_listed()
    child = os.fork()
    if not child:
        del library
        gc.collect()
        right = torch.equal(kept.output(torch.ones(1, 4, 16), 3), torch.ones(1, 4, 16))
        os._exit(0 if right and listed is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_states_of_any_width_merge() -> None:
    frame = LogitFrame(1.0)
    a, b = (AttentionState(torch.zeros(2), torch.ones(2), torch.ones(2, 5), frame) for _ in range(2))
    assert state.merge(a, b).l.tolist() == [2.0, 2.0]
