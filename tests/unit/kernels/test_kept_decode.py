"""One query over kept chunks, call after call, has the bits of the same call made anew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom, KeptDecode
from kvtier_kernels.ops.chunk_attention.outputs import attend
from kvtier_kernels.ops.chunk_attention.runs import chunk_runs

ROWS = 128
GEOMETRIES = [(9, 3, 64), (4, 2, 16), (16, 1, 64), (8, 8, 128), (5, 1, 80)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


class Kept:
    """Chunks [2, Hk, ROWS, d], the last one open, beside what is kept of them."""

    def __init__(self, geometry: tuple[int, int, int], chunks: int, scale: float, room: DecodeRoom) -> None:
        self.geometry, self.scale = geometry, scale
        self.made = torch.Generator().manual_seed(chunks)
        _, heads, d = geometry
        self.payloads = [torch.randn(2, heads, ROWS, d, generator=self.made) for _ in range(chunks)]
        self.payloads[-1].zero_()
        keys, values = [one[0] for one in self.payloads], [one[1] for one in self.payloads]
        self.runs = chunk_runs(keys[:-1], values[:-1], 2)
        self.open = chunk_runs(keys[-1:], values[-1:])[0]
        compiled = library()
        assert compiled is not None
        self.decode = KeptDecode(compiled, room, self.runs, self.open, scale)
        self.visible = 0

    def step(self, *, gaps: bool = False) -> tuple[Tensor, Tensor]:
        """Writes a row, asks, and gives the output beside that of a call of its own."""
        hq, heads, d = self.geometry
        k, v = (torch.randn(1, heads, d, generator=self.made) for _ in range(2))
        q = torch.randn(1, hq, d, generator=self.made)
        if gaps:
            k, v, q = (torch.stack([x, x], -1)[..., 0] for x in (k, v, q))
        self.decode.write(k, v, self.visible)
        assert same(self.payloads[-1][0, :, self.visible], k[0])
        assert same(self.payloads[-1][1, :, self.visible], v[0])
        self.visible += 1
        readings = [Reading(run, (0,), ROWS) for run in self.runs]
        readings.append(Reading(self.open, (0,), self.visible))
        return self.decode.output(q, self.visible), attend(q * self.scale, readings)


@pytest.mark.parametrize("chunks", [1, 2, 6])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_each_call_has_the_bits_of_a_call_of_its_own(geometry: tuple[int, int, int], chunks: int) -> None:
    kept = Kept(geometry, chunks, 80**-0.5, DecodeRoom(*geometry, ROWS))
    for step in range(20):
        got, want = kept.step(gaps=bool(step % 2))
        assert got.shape == want.shape
        assert same(got, want)


def test_calls_that_share_a_room_and_their_answers_do_not_mix() -> None:
    geometry = GEOMETRIES[0]
    room = DecodeRoom(*geometry, ROWS)
    kept = [Kept(geometry, chunks, scale, room) for chunks, scale in ((1, 0.125), (3, 0.5))]
    answers = [one.step() for _ in range(5) for one in kept]
    assert all(same(got, want) for got, want in answers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_what_is_not_finite_is_seen_or_not_as_by_any_call(part: int, value: float) -> None:
    geometry = GEOMETRIES[0]
    kept = Kept(geometry, 2, 0.125, DecodeRoom(*geometry, ROWS))
    # Behind the query: it is not read.
    kept.payloads[-1][part, :, 5:] = value
    for step in range(6):
        got, want = kept.step()
        assert torch.isfinite(got).all(), step
        assert same(got, want)
    kept.payloads[0][part, 1, 7, 3] = value
    got, want = kept.step()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_logits_that_are_all_minus_infinity_give_0() -> None:
    geometry = GEOMETRIES[1]
    kept = Kept(geometry, 1, 1.0, DecodeRoom(*geometry, ROWS))
    hq, heads, d = geometry
    kept.decode.write(torch.full((1, heads, d), -torch.inf), torch.ones(1, heads, d), 0)
    assert same(kept.decode.output(torch.ones(1, hq, d), 1), torch.zeros(1, hq, d))
