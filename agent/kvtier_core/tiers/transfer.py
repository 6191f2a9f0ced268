"""One asynchronous batch of block transfers: what is moved, where it lands, who hears of it, until when.

Why it exists: a tier may take microseconds or 50 ms, may fail halfway and may hang, and its caller must not
care which. So a batch reports item by item, and an item reports twice: that it is over for the caller
(done), and that no byte can arrive any more (drained). It must not know directories, transactions or keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.slots import BlockIdentity, SlotRef


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a block's bytes lie or arrive. body: exactly the payload, page-aligned when a storage tier is
    to use it without a copy. header: one page of scratch for a self-describing header, None where the tier
    has its own.
    """

    body: memoryview
    header: memoryview | None = None


@dataclass(slots=True)
class Ranges:
    """What of a payload a read is for. spans: bytes [first, last), ascending and apart. A tier may bring
    more, up to the whole payload; what it brings is verified, and the rest of the landing is nobody's.
    read_bytes: what left the device for it, stated before `done`; a tier that knows no ranges leaves what its
    caller put there, the whole payload."""

    spans: tuple[tuple[int, int], ...]
    read_bytes: int


@dataclass(frozen=True, slots=True)
class TransferItem:
    """One block: for a read, `ref` is the source and `landing` receives; for a write, `landing` is the
    source and `ref` receives. `identity` is what the copy must be: verified on every read, written on every
    write. ahead: a tier with a queue reads it before what waits there; few are, or the others would
    starve. ranges: of a read that needs no more of the payload; None: all of it."""

    ref: SlotRef
    identity: BlockIdentity
    landing: Landing
    ahead: bool = False
    ranges: Ranges | None = None


@dataclass(frozen=True, slots=True)
class EraseItem:
    """What a deletion takes from a tier: the copy in `ref` (its readers are gone and nobody may find it any
    more), and what an eviction left behind of a block key or of a whole namespace (32 bytes each)."""

    ref: SlotRef | None = None
    key: bytes | None = None
    namespace: bytes | None = None


class TransferSink(Protocol):
    """Told by the tier, from any thread, without any lock of the tier held; must not block.

    Per item index exactly one `done`, and exactly one `drained` at or after it. `done(error)` may be a
    deadline (DEADLINE) while the device still works: until `drained`, the landing and the slot stay
    quarantined.
    """

    def done(self, index: int, error: CoreError | None) -> None: ...
    def drained(self, index: int) -> None: ...


# About 0.1 ms. Below, giving the interpreter up costs more than it gives, and taking it back may cost 5 ms.
_UNLOCKED_BYTES = 1 << 20


def move_bytes(target: memoryview, source: memoryview) -> None:
    """One memmove. From 1 MiB on through numpy, which lets other threads run meanwhile; below, a plain slice
    assignment costs less. SHORT_COPY when the lengths differ."""
    if len(source) < _UNLOCKED_BYTES:
        try:
            target[:] = source
        except ValueError:
            raise _misfit(target, source) from None
        return
    if len(target) != len(source):
        raise _misfit(target, source)
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _misfit(target: memoryview, source: memoryview) -> CoreError:
    return CoreError(Reason.SHORT_COPY, f"{len(source)} bytes do not fill {len(target)}")
