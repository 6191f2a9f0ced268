"""Small stores on flash for tests: blocks with known bytes, a sink that waits, what recovery must give."""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, BlockIdentity, MediumKind, SlotRef
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem

# A payload of one page, so that stores are small and sectors are few.
LAYOUT = ChunkLayout(1, 16, 32)
SIZE = LAYOUT.payload_bytes
NAMESPACE = hashlib.sha256(b"tenant").digest()
FOREVER = 1e12
WAIT_SECONDS = 30.0


def key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def content(name: str, generation: int = 1, size: int = SIZE) -> bytes:
    seed = int.from_bytes(hashlib.sha256(f"{name}/{generation}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(size)


def page_aligned(data: bytes) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(4096, len(data))))
    memory[: len(data)] = data
    return memory[: len(data)]


def identity(
    name: str, generation: int = 1, *, durable: bool = True, namespace: bytes = NAMESPACE, size: int = SIZE
) -> BlockIdentity:
    data = content(name, generation, size)
    return BlockIdentity(
        key(name),
        int.from_bytes(key(name)[:6], "little"),
        generation,
        16,
        size,
        checksum("xxh3", data),
        namespace,
        3,
        durable,
        0.25,
    )


class Heard:
    """A sink that remembers, checks the order of reports, and can be waited for."""

    def __init__(self, count: int, on_done: Callable[[int, CoreError | None], None] | None = None) -> None:
        self.errors: dict[int, CoreError | None] = {}
        self.faults: list[str] = []
        self._on_done = on_done
        self._drained: set[int] = set()
        self._count = count
        self._change = threading.Condition()

    def done(self, index: int, error: CoreError | None) -> None:
        if self._on_done is not None:
            self._on_done(index, error)
        with self._change:
            if index in self.errors:
                self.faults.append(f"{index} was done twice")
            self.errors[index] = error
            self._change.notify_all()

    def drained(self, index: int) -> None:
        with self._change:
            if index not in self.errors or index in self._drained:
                self.faults.append(f"{index} was drained before it was done, or twice")
            self._drained.add(index)
            self._change.notify_all()

    def wait_done(self) -> Heard:
        with self._change:
            assert self._change.wait_for(lambda: len(self.errors) == self._count, WAIT_SECONDS), self.errors
        return self

    def wait(self) -> Heard:
        with self._change:
            assert self._change.wait_for(lambda: len(self._drained) == self._count, WAIT_SECONDS), self.errors
        assert not self.faults
        return self

    @property
    def drained_count(self) -> int:
        with self._change:
            return len(self._drained)

    def reasons(self) -> list[str | None]:
        return [error.reason.value if (error := self.errors[i]) else None for i in range(self._count)]


def says(tier: NvmeTier, words: str) -> None:
    """Waits for the tier's condition: a thread's hang, and its return, are noted behind what callers hear."""
    until, turn = time.monotonic() + WAIT_SECONDS, threading.Event()
    while words not in tier.condition:
        assert time.monotonic() < until, tier.condition
        turn.wait(0.002)


def open_store(
    folder: Path,
    slots: int = 8,
    files: FileOps | None = None,
    *,
    layout: ChunkLayout = LAYOUT,
    persistence: str = "node",
    kind: str = "xxh3",
    clock: Callable[[], float] | None = None,
    o_direct: bool = True,
    **options: Any,
) -> NvmeTier:
    able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence=persistence, checksum=kind)
    # Blocks are so small here that none would have a table.
    chosen = {"threads": 2, "whole_bytes": 0, **options}
    return NvmeTier(
        "flash",
        layout,
        slots,
        folder=folder,
        file_key="cache",
        files=files or OsFileOps(),
        capability=able,
        o_direct=o_direct,
        clock=clock,
        options=NvmeOptions(**chosen),
    )


def write_item(tier: NvmeTier, named: BlockIdentity, data: bytes, namespace: bytes = b"") -> TransferItem:
    return TransferItem(tier.reserve(named.logical), named, Landing(page_aligned(data)))


def store(tier: NvmeTier, *names: str, durable: bool = True, generation: int = 1) -> list[TransferItem]:
    """Writes and publishes blocks of these names as one batch."""
    size = tier.layout.payload_bytes
    items = [
        write_item(
            tier, identity(name, generation, durable=durable, size=size), content(name, generation, size)
        )
        for name in names
    ]
    heard = Heard(len(items))
    tier.submit_write(items, FOREVER, heard)
    assert heard.wait().reasons() == [None] * len(items), heard.errors
    for item in items:
        tier.publish(item.ref)
    return items


def load(tier: NvmeTier, items: Sequence[TransferItem], deadline: float = FOREVER) -> list[bytes | str]:
    """Each block's bytes, or the reason why there are none."""
    landings = [page_aligned(bytes(tier.layout.payload_bytes)) for _ in items]
    heard = Heard(len(items))
    reads = [
        TransferItem(item.ref, item.identity, Landing(landing))
        for item, landing in zip(items, landings, strict=True)
    ]
    tier.submit_read(reads, deadline, heard)
    reasons = heard.wait().reasons()
    return [reason or bytes(landing) for reason, landing in zip(reasons, landings, strict=True)]


def erase(tier: NvmeTier, *items: EraseItem) -> list[str | None]:
    heard = Heard(len(items))
    tier.submit_erase(items, FOREVER, heard)
    return heard.wait().reasons()


def recovered_items(tier: NvmeTier) -> dict[bytes, TransferItem]:
    """The recovered blocks by key, as what `load` takes."""
    blank = Landing(memoryview(b""))
    return {
        block.identity.chunk_digest: TransferItem(block.ref, block.identity, blank)
        for block in tier.recovered()
    }


class Promise:
    """What was promised to a caller, event by event, and what a store may therefore give back.

    must: name to generation, acknowledged and neither evicted nor deleted. may: all that is not excluded."""

    def __init__(self) -> None:
        self.must: dict[str, int] = {}
        self.may: set[tuple[str, int]] = set()

    def apply(self, event: str) -> None:
        verb, name, number = event.split()
        generation = int(number)
        if verb == "storing":
            self.may.add((name, generation))
        elif verb == "stored":
            self.must[name] = generation
        elif verb in ("evicting", "deleting"):
            if verb == "deleting" or self.must.get(name) == generation:
                self.must.pop(name, None)
        elif verb == "deleted":
            self.may -= {(known, number) for known, number in self.may if known == name}
        else:
            raise ValueError(event)

    @classmethod
    def of(cls, events: Iterable[str]) -> Promise:
        promise = cls()
        for event in events:
            promise.apply(event)
        return promise

    def check(self, tier: NvmeTier) -> dict[bytes, TransferItem]:
        """What recovery kept, by key. All that must be there is served byte for byte; what else is served was
        stored and not deleted."""
        names = {key(name): name for name, _ in self.may}
        found = recovered_items(tier)
        served: dict[str, int] = {}
        for digest, item in found.items():
            (data,) = load(tier, [item])
            if isinstance(data, str):
                continue
            assert digest in names, "a block was served that was deleted or never stored"
            name, generation = names[digest], item.identity.replica_generation
            assert (name, generation) in self.may, f"{name}/{generation} was served after its deletion"
            assert data == content(name, generation), f"{name}/{generation} was served with other bytes"
            served[name] = generation
        for name, generation in self.must.items():
            assert served.get(name, 0) >= generation, f"{name}/{generation} was acknowledged and is lost"
        return found


def remake(ref: SlotRef, item: TransferItem) -> TransferItem:
    return dataclasses.replace(item, ref=ref)
