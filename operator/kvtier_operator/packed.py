"""A part of an object as it lies in the read cache: compressed, for what is read once a version by its owner.

A thousand rollouts have rows for each gate, condition and cell of evidence, and nobody but the rollout's own
run looks at them. It must not know what is packed.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

FASTEST = 1


class Packed:
    """JSON, compressed. Equal where the values are; refuses to be taken for the value itself."""

    __slots__ = ("_bytes",)

    def __init__(self, value: Any) -> None:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self._bytes = zlib.compress(text.encode(), FASTEST)

    def value(self) -> Any:
        return json.loads(zlib.decompress(self._bytes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packed) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __bool__(self) -> bool:
        raise TypeError("a packed part is not looked at before it is unpacked")


def unpacked(part: Any) -> Any:
    return part.value() if isinstance(part, Packed) else part
