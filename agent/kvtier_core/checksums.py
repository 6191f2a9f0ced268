"""Checksums of payloads, by the name a tier class declares.

Why it exists: source, copy and reader must compute the same number over the same bytes. It must not know
where the bytes lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import crc32c
import xxhash

from kvtier_core.errors import CoreError, Reason

SUPPORTED = ("xxh3", "crc32c", "none")
Buffer = bytes | bytearray | memoryview


def checksum(kind: str, data: Buffer) -> int:
    """64 bits over `data`: xxh3 (XXH3-64), crc32c (zero-extended) or none (0). MANIFEST_INVALID otherwise."""
    if kind == "xxh3":
        return xxhash.xxh3_64_intdigest(data)
    if kind == "crc32c":
        return int(crc32c.crc32c(data))
    if kind == "none":
        return 0
    raise CoreError(
        Reason.MANIFEST_INVALID,
        f"checksum {kind!r} is not supported here; legal: {', '.join(SUPPORTED)}",
    )


class Running:
    """The same number over parts that come one after the other. MANIFEST_INVALID as above."""

    def __init__(self, kind: str) -> None:
        checksum(kind, b"")
        self._kind = kind
        self._xxh3 = xxhash.xxh3_64()
        self._crc32c = 0

    def add(self, data: Buffer) -> None:
        if self._kind == "xxh3":
            self._xxh3.update(data)
        elif self._kind == "crc32c":
            self._crc32c = crc32c.crc32c(data, self._crc32c)

    @property
    def value(self) -> int:
        return self._xxh3.intdigest() if self._kind == "xxh3" else int(self._crc32c)


def digests(bodies: Sequence[memoryview]) -> list[int]:
    """XXH3-64 of each."""
    return list(map(xxhash.xxh3_64_intdigest, bodies))
