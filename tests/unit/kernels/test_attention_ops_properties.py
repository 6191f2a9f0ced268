"""Properties of the decode operations on the CPU, over drawn windows, lists, partitions and shifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.compare import findings
from kvtier_kernels.ops.merge_states import merge_states_torch
from kvtier_kernels.registry import entry
from kvtier_kernels.state import AttentionState, LogitFrame

PAGED, SPARSE, SEGMENT = (entry(name) for name in ("paged_decode", "sparse_paged_decode", "segment_decode"))
PAGE, WIDTH = 16, 6


def pool(seed: int, hq: int = 4, hk: int = 2, d: int = 32) -> dict[str, Any]:
    """One request over six permuted pages of 16."""
    g = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(1, hq, d, generator=g),
        "k_cache": torch.randn(WIDTH + 1, PAGE, hk, d, generator=g),
        "v_cache": torch.randn(WIDTH + 1, PAGE, hk, d, generator=g),
        "page_table": (torch.randperm(WIDTH, generator=g) + 1).int()[None],
        "scale": d**-0.5,
    }


def lists(seed: int, chosen: list[list[int]], unit: int, last: list[int]) -> dict[str, Any]:
    sizes = torch.tensor([0] + [len(c) for c in chosen])
    return pool(seed) | {
        "indptr": sizes.cumsum(0).int(),
        "units": torch.tensor([u for c in chosen for u in c], dtype=torch.int32),
        "last_unit_len": torch.tensor(last, dtype=torch.int32),
        "log_weight": None,
        "unit_tokens": unit,
    }


def stacked(parts: list[AttentionState]) -> AttentionState:
    m, l, u = (torch.stack([getattr(p, n) for p in parts], 1) for n in ("m", "l", "u"))
    return merge_states_torch(
        m, l, u, None, frame=LogitFrame(parts[0].frame.scale), estimated=any(p.estimated for p in parts)
    )


@given(
    seed=st.integers(0, 99),
    rows=st.integers(0, WIDTH * PAGE),
    window=st.none() | st.integers(0, WIDTH * PAGE + 1),
    softcap=st.none() | st.floats(0.5, 100),
    split=st.sampled_from([PAGE, 2 * PAGE, 256]),
    backend=st.sampled_from(["torch", "plain"]),
)
@settings(max_examples=40, deadline=None)
def test_drawn_windows_and_caps_equal_the_reference(
    seed: int, rows: int, window: int | None, softcap: float | None, split: int, backend: str
) -> None:
    inputs = pool(seed) | {"seq_lens": torch.tensor([rows], dtype=torch.int32)}
    options = {"window": window, "softcap": softcap}
    got = PAGED.outputs(PAGED.implementations[backend]()(**inputs, **options, split_tokens=split))
    want = PAGED.outputs(PAGED.reference(**inputs, **options))
    assert not findings(PAGED.comparisons, inputs, got, want)


@given(
    seed=st.integers(0, 99),
    unit=st.sampled_from([1, 4, 16, 32]),
    owner=st.lists(st.integers(0, 3), min_size=3, max_size=96),
)
@settings(max_examples=25, deadline=None)
def test_any_partition_of_the_units_merges_to_all_of_them(seed: int, unit: int, owner: list[int]) -> None:
    owner = owner[: WIDTH * PAGE // unit]
    sparse = SPARSE.implementations["torch"]()
    whole = sparse(**lists(seed, [list(range(len(owner)))], unit, [unit]))
    shares = [[u for u, p in enumerate(owner) if p == part] for part in range(4)]
    merged = stacked([sparse(**lists(seed, [own], unit, [unit])) for own in shares])
    inputs = lists(seed, [[]], unit, [unit])
    got, want = SPARSE.outputs(merged), SPARSE.outputs(whole)
    assert not findings(SPARSE.comparisons, inputs, got, want)


@given(seed=st.integers(0, 99), data=st.data(), scope=st.sampled_from([1, 2, 4]))
@settings(max_examples=25, deadline=None)
def test_drawn_lists_equal_the_reference(seed: int, data: st.DataObject, scope: int) -> None:
    ids = st.lists(st.integers(-2, WIDTH - 1), max_size=8)
    chosen = [data.draw(ids) for _ in range(scope)]
    last = [data.draw(st.integers(0, PAGE)) for _ in range(scope)]
    inputs = lists(seed, chosen, PAGE, last)
    if data.draw(st.booleans()):
        g = torch.Generator().manual_seed(seed + 1)
        inputs["log_weight"] = torch.randn(inputs["units"].numel(), generator=g)
    got = SPARSE.outputs(SPARSE.implementations["torch"]()(**inputs))
    assert not findings(SPARSE.comparisons, inputs, got, SPARSE.outputs(SPARSE.reference(**inputs)))


@given(
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, WIDTH * PAGE), min_size=2, max_size=10, unique=True),
    shifts=st.lists(st.integers(-100_000, 100), min_size=9, max_size=9),
    gaps=st.lists(st.booleans(), min_size=9, max_size=9),
    interleaved=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_drawn_segments_equal_the_reference(
    seed: int, cuts: list[int], shifts: list[int], gaps: list[bool], interleaved: bool
) -> None:
    """Some segments touch, some are dropped, some have their neighbour's shift."""
    cuts.sort()
    rows = [
        (lo, hi, shift) for lo, hi, shift, gap in zip(cuts, cuts[1:], shifts, gaps, strict=False) if not gap
    ]
    inputs = pool(seed) | {
        "seg_ptr": torch.tensor([0, len(rows)], dtype=torch.int32),
        "seg_tok": torch.tensor([r[:2] for r in rows], dtype=torch.int32).view(-1, 2),
        "delta": torch.tensor([r[2] // 50_000 * 50_000 for r in rows], dtype=torch.int32),
        "inv_freq": (1e4 ** -(torch.arange(0, 24, 2).double() / 24)).float(),
        "interleaved": interleaved,
    }
    got = SEGMENT.outputs(SEGMENT.implementations["torch"]()(**inputs))
    assert not findings(SEGMENT.comparisons, inputs, got, SEGMENT.outputs(SEGMENT.reference(**inputs)))


@pytest.mark.parametrize("states", [1, 2, 17])
def test_merging_is_the_left_fold_of_two(states: int) -> None:
    """Bit for bit what `merge_ascending` gives, whatever stands behind the counts."""
    from kvtier_kernels.state import identity, merge_ascending

    g = torch.Generator().manual_seed(states)
    m, l = torch.randn(2, states, 3, generator=g), torch.rand(2, states, 3, generator=g) + 1
    u = torch.randn(2, states, 3, 16, generator=g)
    counts = torch.randint(0, states + 1, (2, 3), generator=g).int()
    frame = LogitFrame(1.0)
    got = merge_states_torch(m, l, u, counts, frame=frame, estimated=False)
    for b in range(2):
        for h in range(3):
            parts = [identity((1,), 16, frame)]
            parts += [
                AttentionState(m[b, s, h : h + 1], l[b, s, h : h + 1], u[b, s, h : h + 1], frame)
                for s in range(int(counts[b, h]))
            ]
            want = merge_ascending(parts)
            assert torch.equal(got.m[b, h], want.m[0])
            assert torch.equal(got.l[b, h], want.l[0])
            assert torch.equal(got.u[b, h], want.u[0])
