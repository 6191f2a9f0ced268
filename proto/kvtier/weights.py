"""What names a layer's weights, and how many bytes they have: both ends must compute it alike.

A digest covers the model, the layer and every number, so that equal bytes of another model or layer are other
weights. It must not know tensors. Layout: docs/reference/wire.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PART_BYTES = 1 << 20
_MAGIC = b"kvtier.weights/1\0"


@dataclass(frozen=True, slots=True)
class WeightsShape:
    """hidden_size: d_model. queries: query_heads * head_dim. frequencies: RoPE's angles a position, 0: the
    projection is attended as it is. interleaved: rotated channels are pairs that lie side by side."""

    hidden_size: int
    queries: int
    has_bias: bool
    norm_eps: float
    frequencies: int
    interleaved: bool

    @property
    def size_bytes(self) -> int:
        floats = self.hidden_size * self.queries + self.hidden_size + (self.queries if self.has_bias else 0)
        return 4 * floats + 8 * self.frequencies

    def digest(self, model_fingerprint: str, layer: int, data: bytes | bytearray | memoryview) -> str:
        """`sha256:` and 64 hex digits. data: query, bias, norm_weight and inv_freq, as they travel."""
        made = hashlib.sha256(_MAGIC)
        numbers = (layer, self.hidden_size, self.queries, int(self.has_bias), float(self.norm_eps).hex())
        more = (self.frequencies, int(self.interleaved))
        made.update("|".join(map(str, (model_fingerprint, *numbers, *more))).encode() + b"\0")
        made.update(data)
        return "sha256:" + made.hexdigest()
