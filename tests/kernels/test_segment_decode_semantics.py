"""What is particular to segment decode: no shift is no change, rotations compose, pairings differ."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtier_kernels.ops.segment_decode import join_runs, rotate
from kvtier_kernels.registry import entry
from tests.kernels.harness import run, unlike

SPEC = entry("segment_decode")
FREQ = (1e4 ** -(torch.arange(0, 64, 2).double() / 64)).float()
PAIRINGS = [pytest.param(False, id="neox"), pytest.param(True, id="interleaved")]


def segments(*rows: tuple[int, int, int], n: int = 300, **change: Any) -> dict[str, Any]:
    """One request of 300 rows in pages, with these segments (first, end, delta)."""
    inputs = SPEC.make_inputs(SPEC.case("delta-0"))
    tokens = torch.tensor([r[:2] for r in rows], dtype=torch.int32)
    delta = torch.tensor([r[2] for r in rows], dtype=torch.int32)
    ptr = torch.tensor([0, len(rows)], dtype=torch.int32)
    return inputs | {"seg_tok": tokens, "delta": delta, "seg_ptr": ptr} | change


@pytest.mark.parametrize("backend", SPEC.implementations)
@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_delta_0_over_one_segment_gives_the_bits_of_paged_decode(backend: str, interleaved: bool) -> None:
    inputs = segments((0, 300, 0), interleaved=interleaved)
    paged = entry("paged_decode")
    plain = {n: inputs[n] for n in ("q", "k_cache", "v_cache", "page_table", "scale")}
    plain["seq_lens"] = torch.tensor([300], dtype=torch.int32)
    assert not unlike(run(SPEC, backend, inputs), run(paged, backend, plain))


@pytest.mark.parametrize("backend", SPEC.implementations)
def test_two_adjacent_segments_of_equal_delta_are_one_and_of_unequal_delta_are_not(backend: str) -> None:
    one = run(SPEC, backend, segments((0, 300, -9)))
    assert not unlike(one, run(SPEC, backend, segments((0, 130, -9), (130, 300, -9))))
    assert unlike(one, run(SPEC, backend, segments((0, 130, -9), (130, 300, -8))))


@pytest.mark.parametrize("backend", SPEC.implementations)
def test_pairings_differ(backend: str) -> None:
    """AKV-09: a pairing that is not the model's is silent corruption."""
    rows = ((0, 300, -40),)
    assert "lse" in unlike(
        run(SPEC, backend, segments(*rows, interleaved=False)),
        run(SPEC, backend, segments(*rows, interleaved=True)),
    )


def test_runs_join_within_a_request_and_never_over_its_end() -> None:
    tokens = torch.tensor([[0, 4], [4, 9], [9, 9], [9, 12], [12, 20], [20, 21], [21, 30]], dtype=torch.int32)
    delta = torch.tensor([0, 0, 0, -1, -1, -1, -1], dtype=torch.int32)
    ptr = torch.tensor([0, 5, 5, 7], dtype=torch.int32)
    runs = join_runs(ptr, tokens, delta).tolist()
    assert runs == [[0, 9], [4, 4], [9, 9], [9, 20], [12, 12], [20, 30], [21, 21]]


DELTAS = [pytest.param(d, id=str(d)) for d in (1, 96, 2500, -4096, 1_000_000)]


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_there_and_back_is_within_2_ulp_of_a_pair(delta: int, interleaved: bool) -> None:
    g = torch.Generator().manual_seed(delta & 0xFFFF)
    x = torch.randn(1, 5, 64, generator=g)
    there = rotate(x, torch.tensor([delta]), FREQ, interleaved=interleaved)
    back = rotate(there, torch.tensor([-delta]), FREQ, interleaved=interleaved)
    pairs = x.unflatten(-1, (32, 2)) if interleaved else x.unflatten(-1, (2, 32)).transpose(-1, -2)
    length = pairs.norm(dim=-1, keepdim=True).expand_as(pairs)
    length = length.flatten(-2) if interleaved else length.transpose(-1, -2).flatten(-2)
    ulp = torch.nextafter(length, torch.tensor(math.inf)) - length
    assert bool(((back - x).abs() <= 2 * ulp).all())
    assert not torch.equal(there, x)


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_rotations_add_up_and_a_score_depends_on_the_distance_only(interleaved: bool) -> None:
    """AKV-06, 07: R(-2500) R(3600) = R(1100); q(4000) . k(3600) = q(1500) . k(1100)."""
    g = torch.Generator().manual_seed(7)
    q, k = torch.randn(1, 1, 64, generator=g), torch.randn(1, 1, 64, generator=g)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, torch.tensor([-position]), FREQ, interleaved=interleaved)

    torch.testing.assert_close(at(at(k, 3600), -2500), at(k, 1100), rtol=0, atol=2e-6)
    far, near = (at(q, 4000) * at(k, 3600)).sum(), (at(q, 1500) * at(k, 1100)).sum()
    torch.testing.assert_close(far, near, rtol=0, atol=2e-5)


def test_the_seeds_example_of_one_pair() -> None:
    """AKV-08: theta 1, a shift of 4 back, (1, 0) -> (-0.653644, 0.756802)."""
    moved = rotate(torch.tensor([[[1.0, 0.0]]]), torch.tensor([4]), torch.ones(1), interleaved=True)
    torch.testing.assert_close(moved.flatten(), torch.tensor([-0.653644, 0.756802]), rtol=0, atol=1e-6)


def test_angles_of_a_million_positions_are_those_of_float64() -> None:
    """In float32 the angle of the fastest pair would be off by a sixteenth of a radian."""
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 1
    moved = rotate(x, torch.tensor([1_000_001]), FREQ * 0.7, interleaved=True)
    angle = 1_000_001 * float((FREQ * 0.7)[0])
    want = torch.tensor([math.cos(angle), -math.sin(angle)]).float()
    torch.testing.assert_close(moved.flatten()[:2], want, rtol=0, atol=1e-7)
