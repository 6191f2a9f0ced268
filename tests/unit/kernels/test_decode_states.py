"""Many chunks at once give the bits of one after the other."""

from __future__ import annotations

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.chunk_attention.decode import decode_states, merge_stacked, reads_in_place
from kvtier_kernels.state import AttentionState, LogitFrame, identity, merge_ascending

FRAME = LogitFrame(0.125)
LATE = 1 << 30
SHAPES = [(9, 3, 64), (32, 8, 128), (4, 4, 16), (14, 2, 64), (1, 1, 32)]


def one_by_one(q: torch.Tensor, chunks: torch.Tensor) -> list[AttentionState]:
    return [
        chunk_state(
            q,
            chunk[0].transpose(0, 1),
            chunk[1].transpose(0, 1),
            scale=FRAME.scale,
            q_pos0=LATE,
            row_pos0=i * chunk.shape[2],
            frame=FRAME,
        )
        for i, chunk in enumerate(chunks)
    ]


def same(a: AttentionState, b: AttentionState) -> bool:
    pairs = ((a.m, b.m), (a.l, b.l), (a.u, b.u))
    return all(
        torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32)) for x, y in pairs
    )


@pytest.mark.parametrize("rows", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_and_their_merge_have_the_same_bits(shape: tuple[int, int, int], rows: int) -> None:
    hq, hk, d = shape
    generator = torch.Generator().manual_seed(rows + d)
    for count in (1, 2, 3, 8):
        for size in (1.0, 60.0):
            chunks = torch.randn(count, 2, hk, rows, d, generator=generator)
            q = torch.randn(1, hq, d, generator=generator) * size
            singles = one_by_one(q, chunks)
            stacked = decode_states(q, list(chunks[:, 0]), list(chunks[:, 1]), FRAME)
            for i, single in enumerate(singles):
                assert same(AttentionState(stacked.m[i], stacked.l[i], stacked.u[i], FRAME), single)
            assert same(merge_stacked(stacked), merge_ascending(singles))


def test_empty_states_stay_empty_and_change_nothing() -> None:
    q = torch.randn(1, 4, 16)
    single = one_by_one(q, torch.randn(1, 2, 2, 64, 16))[0]
    empty = identity((1, 4), 16, FRAME)
    for order in ([empty, single], [single, empty], [empty, empty], [empty, single, empty]):
        stacked = AttentionState(
            torch.stack([s.m for s in order]),
            torch.stack([s.l for s in order]),
            torch.stack([s.u for s in order]),
            FRAME,
        )
        assert same(merge_stacked(stacked), merge_ascending(order))


def test_what_needs_padding_is_refused() -> None:
    assert reads_in_place(256, 64)
    assert not reads_in_place(100, 64)
    assert not reads_in_place(256, 20)
    q = torch.randn(1, 4, 16)
    odd = [torch.randn(2, 63, 16)]
    with pytest.raises(ShapeError):
        decode_states(q, odd, odd, FRAME)
    with pytest.raises(ShapeError):
        decode_states(q, [], [], FRAME)
    with pytest.raises(ShapeError):
        decode_states(torch.randn(2, 4, 16), odd, odd, FRAME)


HALF = torch.zeros(1, 64, 64, dtype=torch.float16)
WHOLE = HALF.float()
NARROW = torch.zeros(1, 64, 32)
TURNED = WHOLE.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    ("query", "keys", "values"),
    [
        pytest.param(torch.float32, [HALF], [WHOLE], id="half-precision"),
        pytest.param(torch.float32, [WHOLE, HALF], [WHOLE, WHOLE], id="the-second-in-half-precision"),
        pytest.param(torch.float32, [WHOLE], [TURNED], id="columns-contiguous"),
        pytest.param(torch.float32, [WHOLE], [WHOLE[:, :32]], id="fewer-values"),
        pytest.param(torch.float32, [WHOLE.to("meta")], [WHOLE], id="another-device"),
        pytest.param(torch.float32, [WHOLE, WHOLE[:, :, :32]], [WHOLE] * 2, id="narrower-keys"),
        pytest.param(torch.float32, [WHOLE, NARROW], [WHOLE, NARROW], id="a-narrower-chunk"),
        pytest.param(torch.float32, [NARROW], [NARROW], id="a-wider-query"),
        pytest.param(torch.float64, [WHOLE], [WHOLE], id="query-in-double"),
    ],
)
def test_memory_that_would_be_read_as_something_else_is_refused(
    query: torch.dtype, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> None:
    with pytest.raises(ShapeError):
        decode_states(torch.zeros(1, 2, 64, dtype=query), keys, values, FRAME)
