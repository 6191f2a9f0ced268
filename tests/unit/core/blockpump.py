"""Blocks for tests of an engine that has both: named payloads, and a pump by hand instead of the thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.engine import CacheEngine
from kvtier_core.receipts import EngineStats
from kvtier_core.tiers.base import tensor_bytes
from kvtier_core.transactions import MoveReason
from tests.unit.core.builders import BLOCK, SLOT, FaultyFiles

NAMESPACE = hashlib.sha256(b"team-a/1").digest()
LATER = 1e9
ROUNDS = 6000


def key(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest()


def payload(engine: CacheEngine, number: int) -> bytes:
    """What block `number` is, in this engine's geometry."""
    generator = torch.Generator().manual_seed(number)
    return bytes(tensor_bytes(torch.rand(engine.layout.shape, generator=generator)))


def key_rows(numbers: Sequence[int]) -> np.ndarray:
    return np.frombuffer(b"".join(key(number) for number in numbers), dtype=np.uint8).reshape(-1, 32)


def until(engine: CacheEngine, done: Callable[[], bool]) -> None:
    """Pumps until `done`; the tiers' threads work meanwhile."""
    bell = threading.Event()
    for _ in range(ROUNDS):
        engine.blocks.store.pump()
        if done():
            return
        bell.wait(0.01)
    raise AssertionError("what was awaited did not come about")


def put(
    engine: CacheEngine, numbers: Sequence[int], *, droppable: bool = False, namespace: bytes = NAMESPACE
) -> list[Stored]:
    """Stores blocks one by one, waiting for room that others are leaving."""
    return [_put_one(engine, number, droppable, namespace) for number in numbers]


def _put_one(engine: CacheEngine, number: int, droppable: bool, namespace: bytes) -> Stored:
    stored: list[Stored] = []

    def attempt() -> bool:
        stored[:] = engine.blocks.store.put(
            [key(number)],
            [payload(engine, number)],
            namespace=namespace,
            deadline=LATER,
            droppable=droppable,
        )
        refused = stored[0].outcome is PutOutcome.REFUSED
        return not (refused and stored[0].reason is MoveReason.CREDIT_PRESSURE)

    until(engine, attempt)
    return stored[0]


def stored(engine: CacheEngine, numbers: Sequence[int], namespace: bytes = NAMESPACE) -> set[int]:
    """Which of these blocks a lookup finds."""
    found = engine.blocks.store.lookup
    return {number for number in numbers if found(key_rows([number]), namespace)}


def fetched(engine: CacheEngine, numbers: Sequence[int], namespace: bytes = NAMESPACE) -> list[bytes]:
    """The leading blocks that can be brought into memory, byte for byte."""
    keys = [key(number) for number in numbers]
    with engine.blocks.store.fetch(keys, namespace=namespace, deadline=LATER) as scope:
        until(engine, lambda: scope.over)
        return [bytes(scope.body(index)) for index in range(scope.ready)]


def brought(engine: CacheEngine, number: int) -> list[bytes]:
    """A block, brought into memory once nothing moves: what still does holds slots that it could take."""
    until(engine, lambda: not engine.blocks.store.moves.open_moves())
    return fetched(engine, [number])


def delete(engine: CacheEngine, numbers: Sequence[int]) -> None:
    orders = engine.blocks.store.delete([key(number) for number in numbers])
    until(engine, lambda: all(order.state.value == "DONE" for order in orders))


def by_tier(stats: EngineStats) -> dict[str, tuple[int, int]]:
    """(slots of rows, slots of blocks) by tier."""
    return {
        tier.class_name: (
            tier.bytes.rows // (BLOCK if tier.medium == "nvme" else SLOT),
            tier.bytes.blocks // (BLOCK if tier.medium == "nvme" else SLOT),
        )
        for tier in stats.tiers
    }


class GatedFiles(FaultyFiles):
    """Files whose writes wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.waiting = threading.Event()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.open_gate.clear()
        try:
            yield
        finally:
            self.open_gate.set()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self.open_gate.is_set():
            self.waiting.set()
            self.open_gate.wait(120)
        return super().write(fd, buffers, offset)
