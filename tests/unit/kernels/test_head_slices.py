"""A state of some KV heads has the bits of the same heads of the whole: rows may come in slices of heads."""

from __future__ import annotations

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.decode import decode_states, reads_in_place
from kvtier_kernels.state import LogitFrame

ROWS = 256


def payload(heads: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(2, heads, ROWS, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 63, 64, 200, ROWS])
@pytest.mark.parametrize("queries", [1, 3, 64])
@pytest.mark.parametrize(
    ("heads", "group", "d"), [(3, 3, 64), (2, 1, 128), (8, 4, 64), (4, 2, 16), (8, 1, 64), (2, 16, 64)]
)
def test_a_chunks_state_of_some_heads_is_a_slice_of_the_whole(
    heads: int, group: int, d: int, queries: int, rows: int
) -> None:
    chunk = payload(heads, d, rows)
    q = torch.randn(queries, heads * group, d, generator=torch.Generator().manual_seed(1))
    frame = LogitFrame(d**-0.5)

    def state(low: int, high: int, rows_of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = chunk_state(
            q[:, low * group : high * group].contiguous(),
            rows_of[0, :, :rows].transpose(0, 1),
            rows_of[1, :, :rows].transpose(0, 1),
            scale=frame.scale,
            q_pos0=max(0, rows - queries),
            row_pos0=0,
            frame=frame,
        )
        return found.m, found.l, found.u

    whole = state(0, heads, chunk)
    for size in {1, 2, max(1, heads - 1)}:
        for low in range(0, heads, size):
            high = min(heads, low + size)
            # As it lies in a slice buffer, and as a view of the whole payload.
            for rows_of in (chunk[:, low:high].clone(), chunk[:, low:high]):
                part = state(low, high, rows_of)
                for mine, all_heads in zip(part, whole, strict=True):
                    assert torch.equal(mine, all_heads[:, low * group : high * group])


@pytest.mark.parametrize(("heads", "group", "d"), [(3, 3, 64), (2, 1, 128), (8, 4, 64), (4, 2, 16)])
def test_states_of_full_chunks_are_slices_of_the_whole(heads: int, group: int, d: int) -> None:
    assert reads_in_place(ROWS, d)
    chunks = [payload(heads, d, seed) for seed in range(3)]
    q = torch.randn(1, heads * group, d, generator=torch.Generator().manual_seed(1))
    frame = LogitFrame(d**-0.5)
    whole = decode_states(q, [c[0] for c in chunks], [c[1] for c in chunks], frame)
    for low in range(heads):
        part = decode_states(
            q[:, low * group : (low + 1) * group].contiguous(),
            [c[0, low : low + 1] for c in chunks],
            [c[1, low : low + 1].clone() for c in chunks],
            frame,
        )
        at = slice(low * group, (low + 1) * group)
        assert torch.equal(part.m, whole.m[..., at])
        assert torch.equal(part.l, whole.l[..., at])
        assert torch.equal(part.u, whole.u[:, :, at])
