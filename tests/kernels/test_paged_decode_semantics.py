"""What is particular to paged decode: batch and splits, windows and caps, and the bits of the chunk path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.merge_states import merge_states_torch
from kvtier_kernels.ops.paged_decode.spec import paged_decode_spec
from kvtier_kernels.state import (
    AttentionState,
    FrameMismatch,
    LogitFrame,
    finalize,
    identity,
    merge,
    merge_ascending,
)

SPEC = paged_decode_spec()
SPLIT = 256


@pytest.fixture(params=tuple(SPEC.implementations))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(backend: str) -> Any:
    return SPEC.implementations[backend]()


def case(id: str) -> dict[str, Any]:
    return SPEC.make_inputs(SPEC.case(id))


def bits(s: AttentionState) -> tuple[torch.Tensor, ...]:
    return s.m, s.l, s.u


def same(a: AttentionState, b: AttentionState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("id", ["split-edges", "window-ragged", "softcap-window"])
def test_the_batch_changes_no_bit(run: Any, id: str) -> None:
    inputs = case(id)
    whole = run(**inputs)
    for b in range(len(inputs["q"])):
        one = {n: inputs[n][b : b + 1] for n in ("q", "page_table", "seq_lens")}
        got = run(**(inputs | one))
        assert all(torch.equal(x, y[b : b + 1]) for x, y in zip(bits(got), bits(whole), strict=True))


def test_another_split_is_another_order_but_the_same_answer(run: Any) -> None:
    inputs = case("three-splits")
    a, b = run(**inputs), run(**inputs, split_tokens=64)
    torch.testing.assert_close(finalize(a)[0], finalize(b)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(finalize(a)[1], finalize(b)[1], rtol=2e-5, atol=0)


def test_torch_gives_the_bits_of_the_chunk_path() -> None:
    """What the agent computes from chunks in its tiers is what paged decode computes from pages."""
    inputs = case("three-splits")
    n = int(inputs["seq_lens"][0])
    pages = inputs["page_table"][0].long()
    k = inputs["k_cache"][pages].flatten(0, 1)[:n]
    v = inputs["v_cache"][pages].flatten(0, 1)[:n]
    scale = inputs["scale"]
    parts = [
        chunk_state(inputs["q"], k[a : a + 256], v[a : a + 256], scale=scale, q_pos0=n - 1, row_pos0=a)
        for a in range(0, n, 256)
    ]
    assert same(SPEC.implementations["torch"]()(**inputs), merge_ascending(parts))


WINDOWS = [1, 40, 77, 78, 256, 300, 333, 334, 588, 589]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["torch", "plain"])
def test_a_window_has_the_bits_of_the_chunk_path_over_its_rows(name: str, window: int) -> None:
    """Of 589 rows: chunks are cut where they always are, and the first one begins where the window does."""
    inputs = case("three-splits")
    n, scale = int(inputs["seq_lens"][0]), inputs["scale"]
    pages = inputs["page_table"][0].long()
    k, v = (inputs[x][pages].flatten(0, 1)[:n] for x in ("k_cache", "v_cache"))
    parts = []
    for a in range(0, n, SPLIT):
        lo, hi = max(a, n - window), min(n, a + SPLIT)
        if lo < hi:
            parts.append(chunk_state(inputs["q"], k[lo:hi], v[lo:hi], scale=scale, q_pos0=n - 1, row_pos0=lo))
    assert same(SPEC.implementations[name]()(**inputs, window=window), merge_ascending(parts))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [0, 77, 200, 400])
def test_states_of_chunks_merge_to_the_state_of_a_window(
    run: Any, backend: str, window: int, softcap: float | None
) -> None:
    """A chunk in the window gives its whole state, one that the window cuts that of its last rows, one before
    it none: merged ascending they have the bits of one call."""
    inputs = case("three-splits")
    n, pages = int(inputs["seq_lens"][0]), SPLIT // inputs["k_cache"].shape[1]
    states = []
    for a in range(0, n, SPLIT):
        rows = min(n - a, SPLIT)
        chunk = {
            "page_table": inputs["page_table"][:, a // SPLIT * pages :][:, :pages].contiguous(),
            "seq_lens": torch.tensor([rows], dtype=torch.int32),
        }
        own = max(0, rows - max(0, n - window - a))
        states.append(run(**(inputs | chunk), window=own, softcap=softcap))
    m, l, u = (torch.stack(part, 1) for part in zip(*map(bits, states), strict=True))
    if backend == "triton":
        from kvtier_kernels.ops.merge_states.triton_impl import merge_states_triton as merge_states
    else:
        merge_states = merge_states_torch
    merged = merge_states(m, l, u, None, frame=states[0].frame, estimated=False)
    whole = run(**inputs, window=window, softcap=softcap)
    assert same(merged, whole)
    assert merged.frame == whole.frame == LogitFrame(inputs["scale"], softcap=softcap)


@pytest.mark.parametrize("window", [2**31, 2**40], ids=str)
def test_a_window_longer_than_any_number_of_rows_is_none(run: Any, window: int) -> None:
    inputs = case("split-edges")
    assert same(run(**inputs, window=window), run(**inputs))


@pytest.mark.parametrize("id", [c.id for c in SPEC.cases if c.axes.keys() & {"W", "C"}])
def test_torch_and_plain_have_the_same_bits_with_a_window_or_a_cap(id: str) -> None:
    inputs = case(id)
    torchs, plain = (SPEC.implementations[name]()(**inputs) for name in ("torch", "plain"))
    assert same(torchs, plain) and torchs.frame == plain.frame


def test_capped_states_merge_only_with_states_that_were_capped_alike(run: Any) -> None:
    inputs = case("block-edges")
    plain, capped, other = run(**inputs), run(**inputs, softcap=30.0), run(**inputs, softcap=50.0)
    for a, b in ((plain, capped), (capped, other)):
        with pytest.raises(FrameMismatch, match="softcap"):
            merge(a, b)
    assert same(merge(capped, identity((3, 9), 64, run(**inputs, softcap=30).frame)), capped)


def test_who_does_not_cap_logits_takes_no_frame_of_capped_ones() -> None:
    q, rows = torch.zeros(1, 2, 16), torch.zeros(4, 2, 16)
    with pytest.raises(ShapeError, match=r"softcap 5\.0"):
        chunk_state(q, rows, rows, scale=1.0, q_pos0=3, row_pos0=0, frame=LogitFrame(1.0, softcap=5.0))


@pytest.mark.parametrize("id", ["empty-beside-full", "split-edges", "window-ragged", "softcap-window"])
def test_the_answer_is_written_where_the_caller_says(run: Any, id: str) -> None:
    inputs = case(id)
    want = run(**inputs)
    out = tuple(torch.full_like(x, torch.nan) for x in bits(want))
    got = run(**inputs, out=out)
    assert all(x is y for x, y in zip(bits(got), out, strict=True))
    assert same(got, want) and got.frame == want.frame


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0}], ids=str)
def test_a_refused_call_writes_nothing(run: Any, options: dict[str, Any]) -> None:
    inputs = case("split-edges")
    inputs["page_table"][2, 256 // 16] = inputs["k_cache"].shape[0]
    out = torch.full((3, 9), 7.0), torch.full((3, 9), 7.0), torch.full((3, 9, 64), 7.0)
    with pytest.raises(ShapeError, match="page ids"):
        run(**inputs, **options, out=out)
    assert all(bool((x == 7.0).all()) for x in out)
