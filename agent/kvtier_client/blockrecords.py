"""What calls on shared blocks take and give, as records; without bytes but for payloads.

Why it exists: an engine reads these and no wire message. It must not know gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import KvtierError


@dataclass(frozen=True, slots=True)
class Keys:
    """Blocks by their keys (32 bytes each), in place of tokens: found inside the caller's tenant only."""

    keys: tuple[bytes, ...]


Tokens = Sequence[int] | NDArray[np.int64] | NDArray[np.uint32] | Keys


@dataclass(frozen=True, slots=True)
class CacheName:
    namespace: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """existed: equal bytes were published before. refusal: why it is not published; None when it is. durable:
    a restart of the agent keeps it, as was asked for; not_durable: why it is published and not that."""

    key: bytes
    generation: int
    existed: bool
    refusal: KvtierError | None
    durable: bool = False
    not_durable: KvtierError | None = None


@dataclass(frozen=True, slots=True)
class FoundBlock:
    key: bytes
    generation: int
    tier_class: str
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """The leading published blocks. pin_id: empty when nothing is pinned."""

    blocks: tuple[FoundBlock, ...]
    pin_id: str
    cache_generation: int


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """index: in the tokens asked for. payload: verified, in the caller's memory where that was given."""

    index: int
    found: FoundBlock
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Loaded:
    """stopped: why there are fewer than were found; None when all of them are here."""

    blocks: tuple[LoadedBlock, ...]
    stopped: KvtierError | None


@dataclass(frozen=True, slots=True)
class Deleted:
    """pending: what still drains; it is unfindable, and goes on without the caller. durable_tiers: where no
    restart brings any of it back."""

    tombstoned: int
    pending: int
    durable_tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """state: published, storing, moving, evicted, lost, deleted or unknown."""

    key: bytes
    state: str
    reason: str
    message: str
    replicas: tuple[Mapping[str, object], ...]
    facts: Mapping[str, str]
