"""Blocks that a candidate's engine takes over from the baseline's: verified, in order, and none that was
deleted while it was on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash

from kvtier_agent.blockcalls import Call
from kvtier_agent.blocksbeside import COPIED_AT_ONCE, bring
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.errors import CoreError, Reason

KEYS = [bytes([n % 256, n // 256]) * 16 for n in range(2 * COPIED_AT_ONCE + 3)]


class Fetched:
    """The leading blocks of a request that are there."""

    over = True

    def __init__(self, store: Store, keys: Sequence[bytes]) -> None:
        self._bodies = []
        for key in keys:
            if key not in store.held:
                break
            self._bodies.append(store.held[key])
        self.ready = len(self._bodies)
        self._store = store
        store.open += 1

    def body(self, index: int) -> bytes:
        return self._bodies[index]

    def found(self, index: int) -> Any:
        spoilt = self._bodies[index] in self._store.spoilt
        return SimpleNamespace(checksum=xxhash.xxh3_64_intdigest(self._bodies[index]) + spoilt)

    def close(self) -> None:
        self._store.open -= 1


class Store:
    """As much of a block host and its store as a copy needs."""

    def __init__(self, held: Sequence[bytes] = ()) -> None:
        self.held = {key: b"payload of " + key for key in held}
        self.spoilt: set[bytes] = set()
        self.room = 10**6
        self.open = 0
        self.store = self
        self.parts = SimpleNamespace(wake=lambda: None)
        self.on_put: Callable[[], None] = lambda: None

    def call(self) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()

    async def until(self, done: Callable[[], bool], deadline: float) -> bool:
        return done()

    def give_back(self, function: Callable[[], None]) -> None:
        function()

    def lookup(self, keys: Any, namespace: bytes) -> list[bytes]:
        found = []
        for row in keys:
            if row.tobytes() not in self.held:
                break
            found.append(row.tobytes())
        return found

    def fetch(self, keys: Sequence[bytes], **terms: Any) -> Fetched:
        return Fetched(self, keys)

    def put(self, keys: Sequence[bytes], payloads: Sequence[bytes], **terms: Any) -> list[Any]:
        if not self.room:
            raise CoreError(Reason.QUEUE_FULL, "no place")
        self.on_put()
        stored = []
        for key, payload in zip(keys, payloads, strict=True):
            fits = len(self.held) < self.room
            if fits:
                self.held[key] = payload
            stored.append(SimpleNamespace(outcome=PutOutcome.STORED if fits else PutOutcome.REFUSED))
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)


async def copied(source: Store, into: Store, host: Any = None) -> list[bytes]:
    """What the second store has afterwards, of KEYS and in their order."""
    caller = SimpleNamespace(namespace=b"n", source=SimpleNamespace(block_tokens=64))
    call = Call(cast(Any, source), cast(Any, None), cast(Any, None), cast(Any, caller), 1.0)
    session = SimpleNamespace(host=host or SimpleNamespace(deletions=0))
    await bring(KEYS, call, cast(Any, session), cast(Any, into))
    assert source.open == 0, "every scope was left"
    assert all(into.held[key] == b"payload of " + key for key in into.held)
    return [key for key in KEYS if key in into.held]


@pytest.mark.parametrize(
    ("there", "mine", "expected"),
    [
        pytest.param(len(KEYS), 0, len(KEYS), id="all"),
        pytest.param(len(KEYS), 5, len(KEYS), id="the-rest"),
        pytest.param(70, 0, 70, id="as-far-as-it-goes"),
        pytest.param(0, 3, 3, id="none"),
    ],
)
async def test_leading_blocks_that_only_the_baseline_has_are_copied(
    there: int, mine: int, expected: int
) -> None:
    assert await copied(Store(KEYS[:there]), Store(KEYS[:mine])) == KEYS[:expected]


async def test_what_is_not_what_was_stored_ends_the_copy() -> None:
    source = Store(KEYS)
    source.spoilt = {source.held[KEYS[7]]}
    assert await copied(source, Store()) == KEYS[:7]


@pytest.mark.parametrize("room", [0, 9], ids=["no-place", "some-room"])
async def test_what_finds_no_room_is_left(room: int) -> None:
    into = Store()
    into.room = room
    assert await copied(Store(KEYS), into) == KEYS[:room]


async def test_what_was_deleted_meanwhile_is_not_there_afterwards() -> None:
    host, into = SimpleNamespace(deletions=0), Store()

    def deleted() -> None:
        host.deletions += 1

    into.on_put = deleted
    assert await copied(Store(KEYS), into, host) == []
