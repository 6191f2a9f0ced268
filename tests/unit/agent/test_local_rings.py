"""The client's view of the agent's answers: copies of what lies there, and nothing beyond."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from kvtier.local import memory
from kvtier_client.localring import AnswerRing, StagingRing

SIZE = mmap.PAGESIZE


@pytest.fixture
def rings() -> Iterator[tuple[AnswerRing, mmap.mmap]]:
    descriptor, written = memory.create("kvtier-answers", SIZE, others_read_only=True)
    ring = AnswerRing(descriptor, SIZE)
    yield ring, written
    ring.close()
    written.close()
    os.close(descriptor)


def test_an_answer_is_a_copy_in_float32_whatever_the_engine_computes_in(
    rings: tuple[AnswerRing, mmap.mmap],
) -> None:
    ring, written = rings
    want = torch.randn(2, 3, 4)
    written[64 : 64 + 96] = want.numpy().tobytes()
    torch.set_default_dtype(torch.float64)
    try:
        got = ring.copy(64, want.shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype is torch.float32 and torch.equal(got, want)
    written[64 : 64 + 96] = bytes(96)
    assert torch.equal(got, want)


@pytest.mark.parametrize("start", [-4, SIZE - 92, SIZE])
def test_nothing_beyond_the_ring_is_read(rings: tuple[AnswerRing, mmap.mmap], start: int) -> None:
    with pytest.raises(ValueError, match="96 bytes"):
        rings[0].copy(start, torch.Size([2, 3, 4]))


def test_a_closed_ring_is_not_read(rings: tuple[AnswerRing, mmap.mmap]) -> None:
    rings[0].close()
    with pytest.raises(ValueError, match="a ring of 0"):
        rings[0].copy(0, torch.Size([1]))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(8, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.ones(8, dtype=torch.float64), id="float64"),
        pytest.param(torch.ones(8, dtype=torch.float64)[::2], id="float64 apart"),
        pytest.param(torch.empty(8, device="meta"), id="another device's memory"),
    ],
)
def test_only_float32_of_the_cpu_is_staged(tensor: torch.Tensor) -> None:
    ring = StagingRing(SIZE)
    try:
        with pytest.raises(TypeError, match="float32 of the CPU"):
            ring.write(0, tensor)
    finally:
        ring.close()
