"""Layout translation: the address map of systems.md section E, and nothing lost on the way there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.ops.fractal import from_fractal, to_fractal

# HWK-01, HWK-02: (s, d) of a head of 128 channels of 2 bytes, its offset in rows and in tiles, in bytes.
ADDRESSES = [
    ((0, 0), 0, 0),
    ((0, 15), 30, 30),
    ((0, 16), 32, 512),
    ((1, 0), 256, 32),
    ((15, 15), 3870, 510),
    ((16, 0), 4096, 4096),
    ((17, 33), 4418, 5154),
    ((31, 127), 8190, 8190),
]


@pytest.mark.parametrize(("at", "rows", "tiles"), [pytest.param(*a, id=str(a[0])) for a in ADDRESSES])
def test_addresses_are_those_of_the_specification(at: tuple[int, int], rows: int, tiles: int) -> None:
    x = torch.arange(32 * 128, dtype=torch.int16).view(1, 1, 32, 128)
    value = int(x[0, 0, *at])
    assert value * 2 == rows
    assert int((to_fractal(x).flatten() == value).nonzero()) * 2 == tiles


def test_every_element_has_a_place_of_its_own() -> None:
    """HWK-03, HWK-04: 2 x 3 heads of 48 x 64 have 18,432 places up to byte 36,862; 20 rows reserve 32."""
    x = torch.arange(2 * 3 * 48 * 64, dtype=torch.int16).view(2, 3, 48, 64)
    tiles = to_fractal(x).flatten()
    assert tiles.numel() == tiles.unique().numel() == 18_432
    assert (tiles.numel() - 1) * 2 == 36_862
    ragged = to_fractal(torch.ones(1, 1, 20, 128, dtype=torch.int16))
    assert ragged.numel() * 2 == 8_192
    assert int(ragged.sum()) == 20 * 128


@settings(max_examples=60, deadline=None)
@given(
    seq=st.integers(0, 70),
    dim=st.integers(1, 70),
    heads=st.integers(1, 3),
    tile=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]),
)
def test_there_and_back_is_the_identity(
    seq: int, dim: int, heads: int, tile: int, dtype: torch.dtype
) -> None:
    """With padding that is not zero on the way back, and a view of wider rows on the way there."""
    g = torch.Generator().manual_seed(seq * 100 + dim)
    x = (torch.rand(2, heads, seq, dim + 3, generator=g) * 250 + 1).to(dtype)[..., :dim]
    tiles = to_fractal(x, tile=tile)
    assert torch.equal(from_fractal(tiles, seq=seq, dim=dim), x)
    holes = tiles == 0
    assert int(holes.sum()) == tiles.numel() - x.numel()
    tiles[holes] = 7
    assert torch.equal(from_fractal(tiles, seq=seq, dim=dim), x)
