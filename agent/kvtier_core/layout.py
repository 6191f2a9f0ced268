"""How the rows of one chunk lie in memory: one byte layout for every tier.

Why it exists: a chunk that moves must keep its bytes, so that its checksum and its answers cannot depend on
where it lies. It must not know tiers, sessions or files.

A payload is float32 `[2, kv_heads, chunk_tokens, head_dim]`, C-contiguous: K of each head, then V of each
head. Each head's rows are contiguous, which is what attention over a chunk reads without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Names of digests and keys are made of this module's constants, by processes that have no tensors.
    import torch
    from torch import Tensor

FLOAT_BYTES = 4
LAYOUT_ID = "kv-head-major-f32/1"
CODEC_IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Shape of a payload. `payload_bytes` counts K and V of a whole chunk, filled or not."""

    kv_heads: int
    chunk_tokens: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (2, self.kv_heads, self.chunk_tokens, self.head_dim)

    @property
    def floats(self) -> int:
        return 2 * self.kv_heads * self.chunk_tokens * self.head_dim

    @property
    def payload_bytes(self) -> int:
        return self.floats * FLOAT_BYTES

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer, all KV heads."""
        return 2 * self.kv_heads * self.head_dim * FLOAT_BYTES

    def write_rows(self, payload: Tensor, first_row: int, k: Tensor, v: Tensor) -> None:
        """Writes `k`, `v` [n, kv_heads, head_dim] as rows [first_row, first_row + n) of the payload."""
        rows = k.shape[0]
        payload[0, :, first_row : first_row + rows] = k.transpose(0, 1)
        payload[1, :, first_row : first_row + rows] = v.transpose(0, 1)

    def rows(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """K and V [count, kv_heads, head_dim] of the first rows: views, contiguous per head."""
        return payload[0, :, :count].transpose(0, 1), payload[1, :, :count].transpose(0, 1)

    def assemble(self, k: Tensor, v: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """A fresh payload whose first rows are `k`, `v`; the rest is zero."""
        payload = k.new_zeros(self.shape, device=device)
        self.write_rows(payload, 0, k, v)
        return payload
