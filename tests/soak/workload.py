"""What clients of a long run do: conversations by Zipf that grow turn by turn, single blocks, deletions, and
every rudeness that a client is capable of. Each byte that is served is compared."""

from __future__ import annotations

import gc
import hashlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier_core.blockstore.driver import Driver
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError
from tests.soak.measures import Histogram, Tally

TENANTS = 4
MAX_TURNS = 8
OPERATIONS = ("put", "fetch_hot", "fetch_cold", "pin", "lookup", "delete")


@dataclass(eq=False)
class Item:
    """One key. version: of the bytes that it stands for now; floor: the oldest that may still be served. Who
    stores or deletes it holds the lock."""

    key: bytes
    namespace: bytes
    version: int = 1
    floor: int = 1

    def __post_init__(self) -> None:
        self.lock = threading.Lock()


class Corpus:
    """Conversations of blocks; the bytes of each are computed, not kept."""

    def __init__(self, conversations: int, block_bytes: int, seed: int) -> None:
        self.block_bytes = block_bytes
        self._noise = np.random.default_rng(seed).bytes(1 << 20) + bytes(block_bytes)
        self.turns = [random.Random(number).randrange(1, 4) for number in range(conversations)]
        self.items = [
            [self._item(number, turn) for turn in range(MAX_TURNS)] for number in range(conversations)
        ]
        ranks = np.arange(1, conversations + 1, dtype=np.float64)
        self._edges = np.cumsum(1.0 / ranks) / np.sum(1.0 / ranks)

    def _item(self, number: int, turn: int) -> Item:
        tenant = hashlib.sha256(f"tenant {number % TENANTS}".encode()).digest()
        return Item(hashlib.sha256(f"{number}/{turn}".encode()).digest(), tenant)

    def draw(self, chance: random.Random) -> int:
        """A conversation, by Zipf with exponent 1."""
        return int(np.searchsorted(self._edges, chance.random()))

    def content(self, item: Item, version: int) -> bytes:
        at = (int.from_bytes(item.key[:6], "little") + 977 * version) % (1 << 20)
        head = item.key + version.to_bytes(8, "little")
        return head + self._noise[at : at + self.block_bytes - len(head)]

    def verdict(self, item: Item, floor: int, body: memoryview) -> str:
        """Empty when the bytes are whole and of a version that may be served."""
        got = bytes(body)
        version = int.from_bytes(got[32:40], "little")
        if got[:32] != item.key:
            return f"another block's bytes ({got[:32].hex()[:12]})"
        if got != self.content(item, min(version, 1 << 40)):
            return f"damaged bytes of version {version}"
        if version < floor:
            return f"version {version}, deleted before version {floor} began"
        return ""


class Board:
    """What all clients write down."""

    def __init__(self) -> None:
        self.latency = {name: Histogram() for name in OPERATIONS}
        self.refusals = Tally()
        self.counts = Tally()
        self.wrong: list[str] = []
        self.defects: list[str] = []


class Client:
    """One thread's worth of requests."""

    def __init__(
        self,
        store: BlockStore,
        driver: Driver,
        corpus: Corpus,
        board: Board,
        seed: int,
        over: threading.Event,
    ) -> None:
        self._store = store
        self._driver = driver
        self._corpus = corpus
        self._board = board
        self._chance = random.Random(seed)
        self._over = over

    def run(self) -> None:
        actions: list[tuple[float, Callable[[], None]]] = [
            (70, self.converse),
            (14, self.pin),
            (8, self.look),
            (4, self.delete),
            (2, self.be_rude),
            (2, self.hurry),
        ]
        weights = [weight for weight, _ in actions]
        while not self._over.is_set():
            _, action = self._chance.choices(actions, weights)[0]
            try:
                action()
            except CoreError as error:
                self._board.refusals.add(f"raised {error.facts.get('move', error.reason.value)}")
            except Exception as defect:
                self._board.defects.append(f"{action.__name__}: {defect!r}")
                return

    def _timed(self, name: str, started: float) -> None:
        self._board.latency[name].add(time.monotonic() - started)

    def _check(self, item: Item, floor: int, body: memoryview) -> None:
        verdict = self._corpus.verdict(item, floor, body)
        self._board.counts.add("verified blocks")
        if verdict:
            self._board.wrong.append(verdict)

    def _prefix(self) -> list[Item]:
        number = self._corpus.draw(self._chance)
        turns = self._corpus.turns
        if turns[number] < MAX_TURNS and self._chance.random() < 0.1:
            turns[number] += 1
        elif self._chance.random() < 0.02:
            turns[number] = 1
        return self._corpus.items[number][: turns[number]]

    def converse(self) -> None:
        """The next turn of a conversation: its prefix is fetched, the rest is computed and stored."""
        items = self._prefix()
        floors = [item.floor for item in items]
        started = time.monotonic()
        with self._store.fetch(
            [item.key for item in items], namespace=items[0].namespace, deadline=started + 1.0
        ) as fetch:
            cold = not fetch.over
            ready = self._driver.wait_for(fetch, len(items), started + 1.0)
            self._timed("fetch_cold" if cold else "fetch_hot", started)
            for index in range(ready):
                self._check(items[index], floors[index], fetch.body(index))
            why = fetch.reason.value if fetch.over else "still waiting at its deadline"
        self._board.counts.add("blocks wanted", len(items))
        self._board.counts.add("blocks served", ready)
        if ready < len(items):
            self._board.refusals.add(f"fetch {why}")
            for item in items[ready:]:
                self._store_one(item)

    def _store_one(self, item: Item) -> None:
        if not item.lock.acquire(timeout=1.0):
            self._board.refusals.add("client lock")
            return
        try:
            started = time.monotonic()
            (stored,) = self._driver.put(
                [item.key],
                [self._corpus.content(item, item.version)],
                namespace=item.namespace,
                deadline=started + 0.5,
                cost=0.01,
                droppable=True,
            )
            self._timed("put", started)
        finally:
            item.lock.release()
        self._board.counts.add(f"put {stored.outcome.value}")
        if stored.outcome is PutOutcome.REFUSED:
            self._board.refusals.add(f"put {stored.reason.value}")
            if stored.reason.value in ("IDENTITY_MISMATCH", "TENANT_MISMATCH"):
                self._board.wrong.append(f"put of unchanged bytes: {stored}")

    def pin(self) -> None:
        items = self._prefix()
        floors = [item.floor for item in items]
        started = time.monotonic()
        with self._store.pin([item.key for item in items], items[0].namespace, started + 1) as pin:
            self._timed("pin", started)
            for index in range(len(pin)):
                self._check(items[index], floors[index], pin.body(index))

    def look(self) -> None:
        item = self._chance.choice(self._prefix())
        keys = np.frombuffer(item.key, dtype=np.uint8).reshape(1, 32)
        started = time.monotonic()
        self._store.lookup(keys, item.namespace)
        self._timed("lookup", started)
        foreign = hashlib.sha256(b"nobody").digest()
        if self._store.lookup(keys, foreign):
            self._board.wrong.append("another tenant found the block")
        self._board.counts.add(f"explained {self._store.explain(item.key).state}")

    def delete(self) -> None:
        item = self._chance.choice(self._prefix())
        if not item.lock.acquire(timeout=0.1):
            return
        try:
            started = time.monotonic()
            if self._driver.wait_deleted(self._store.delete([item.key]), started + 20.0):
                item.version += 1
                item.floor = item.version
                self._timed("delete", started)
                self._board.counts.add("deleted")
            else:
                # It goes on, and nobody knows how far it is: this key is not used again with other bytes.
                self._board.counts.add("deletion not yet done")
        finally:
            item.lock.release()

    def be_rude(self) -> None:
        """Scopes that nobody leaves; the collector finds them."""
        items = self._prefix()
        keys = [item.key for item in items]
        now = time.monotonic()
        kind = self._chance.randrange(3)
        if kind == 0:
            self._store.fetch(keys, namespace=items[0].namespace, deadline=now + 0.2)
        elif kind == 1:
            self._store.pin(keys, items[0].namespace, now + 0.2)
        else:
            scope = self._store.reserve(
                keys[-1:], namespace=items[0].namespace, deadline=now + 0.1, droppable=True
            )
            target = scope.landing(0)
            if target is not None:
                target[:64] = bytes(64)
            del scope
        self._board.counts.add("scopes dropped")
        if self._chance.random() < 0.05:
            gc.collect()

    def hurry(self) -> None:
        """A request whose deadline is too near."""
        items = self._prefix()
        floors = [item.floor for item in items]
        now = time.monotonic()
        with self._store.fetch(
            [item.key for item in items], namespace=items[0].namespace, deadline=now + 0.002, priority=5
        ) as fetch:
            ready = self._driver.wait_for(fetch, len(items), now + 0.05)
            for index in range(ready):
                self._check(items[index], floors[index], fetch.body(index))
            if not fetch.over:
                self._board.counts.add("left while waiting")
