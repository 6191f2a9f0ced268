"""Blocks that a candidate's engine takes over from the baseline's: verified, in order, and none that was
deleted while it was on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from kvtier.v1 import blocks_pb2
from kvtier_agent import blockcalls, blocksessions
from kvtier_agent.blockcalls import BlockCalls, Call
from kvtier_agent.blocksbeside import COPIED_AT_ONCE, bring
from kvtier_agent.blocksessions import BlockSessions
from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.errors import CoreError, Reason
from tests.unit.agent.agent_fakes import CacheBlocks

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
        self.on_delete: Callable[[], None] = lambda: None

    def call(self) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def mark(self) -> None: ...

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
            stored.append(Stored(PutOutcome.STORED if fits else PutOutcome.REFUSED))
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)


async def copied(source: Store, into: Store, cache: Any = None) -> list[bytes]:
    """What the second store has afterwards, of KEYS and in their order."""
    cache = cache or SimpleNamespace(deletions=0)
    caller = SimpleNamespace(namespace=b"n", source=SimpleNamespace(block_tokens=64))
    call = Call(cast(Any, source), cache, cast(Any, None), cast(Any, caller), 1.0)
    await bring(KEYS, call, cast(Any, into))
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
    cache, into = SimpleNamespace(deletions=0), Store()

    def deleted() -> None:
        cache.deletions += 1

    into.on_put = deleted
    assert await copied(Store(KEYS), into, cache) == []


class Calls(BlockCalls):
    """Calls on a cache that is given."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cast(Any, None), cast(Any, SimpleNamespace(deletions_requested=Counter())))
        self.cache = cache

    def call_of(self, scope: object, *, source_needed: bool = True) -> Call:
        caller = SimpleNamespace(namespace=b"n")
        return Call(self.cache.blocks, self.cache, cast(Any, None), cast(Any, caller), 1.0)


class Counter:
    def inc(self, amount: int) -> None: ...


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """Stores of which a namespace was deleted, in order; `on_delete` is called then."""
    stores: list[Store] = []

    def delete(store: Store, namespace: bytes) -> Any:
        stores.append(store)
        store.held.clear()
        store.on_delete()
        return [], blocks_pb2.DeleteBlocksResponse(tombstoned=len(stores))

    monkeypatch.setattr(blockcalls, "_delete_namespace", delete)
    return stores


WHOLE = blocks_pb2.DeleteBlocksRequest(whole_namespace=True)


async def test_a_deletion_is_of_both_engines_and_counts_once_the_baseline_has_none_of_it(
    deleted: list[Store],
) -> None:
    """A copy that was read before the baseline's deletion and arrives after the other's must see that the
    count has moved since it was read."""
    cache = CacheBlocks(Store(KEYS), Store(KEYS))
    counts: list[int] = []
    for store in (cache.blocks, cache.blocks_beside):
        store.on_delete = lambda: counts.append(cache.deletions)
    answer = await Calls(cache).delete(WHOLE)
    assert deleted == [cache.blocks, cache.blocks_beside]
    assert counts == [0, 1]
    assert answer.tombstoned == 1, "copies are not counted again"


async def test_a_deletion_reaches_the_blocks_of_an_engine_that_is_adopted_meanwhile(
    deleted: list[Store],
) -> None:
    first, second = Store(KEYS), Store(KEYS)
    cache = CacheBlocks(first, second)

    def adopted() -> None:
        cache.blocks, cache.blocks_beside = second, None

    first.on_delete = adopted
    await Calls(cache).delete(WHOLE)
    assert deleted == [first, second] and not second.held


@pytest.mark.parametrize("takes_calls", [True, False], ids=["takes calls", "takes none any more"])
async def test_a_deletion_reaches_the_blocks_of_a_former_baseline(
    deleted: list[Store], takes_calls: bool
) -> None:
    """Sessions that stay in its engine start from them."""
    cache = CacheBlocks(Store(KEYS), former=Store(KEYS))

    async def refuse(function: Callable[[], Any]) -> Any:
        raise CoreError(Reason.CACHE_UNKNOWN, "its threads have ended")

    if not takes_calls:
        cache.blocks_former.run = refuse
    await Calls(cache).delete(WHOLE)
    assert deleted == [cache.blocks, cache.blocks_former] and not cache.blocks_former.held


@pytest.mark.parametrize(
    ("reason", "passes"),
    [
        pytest.param(Reason.CACHE_UNKNOWN, True, id="ended"),
        pytest.param(Reason.QUEUE_FULL, False, id="busy"),
    ],
)
async def test_a_deletion_does_not_fail_for_an_engine_that_has_ended(
    deleted: list[Store], reason: Reason, passes: bool
) -> None:
    cache = CacheBlocks(Store(KEYS), Store(KEYS))

    def refuse() -> None:
        raise CoreError(reason, "no threads")

    cache.blocks_beside.on_delete = refuse
    with contextlib.nullcontext() if passes else pytest.raises(CoreError):
        await Calls(cache).delete(WHOLE)


async def test_what_a_session_publishes_is_not_copied_past_a_deletion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    baselines, own = Store(), Store()
    cache = SimpleNamespace(deletions=0)
    caller = SimpleNamespace(namespace=b"n", source=SimpleNamespace(block_tokens=64))
    manifest = SimpleNamespace(model=SimpleNamespace(geometry=SimpleNamespace(layers=1)), chunk_tokens=64)
    call = Call(cast(Any, baselines), cast(Any, cache), cast(Any, manifest), cast(Any, caller), 1.0)

    async def now(function: Callable[[], Any]) -> Any:
        return function()

    handle = SimpleNamespace(session_id="s", generation=1)
    session = SimpleNamespace(host=SimpleNamespace(runner=SimpleNamespace(call=now)), handle=handle)
    prefixes = SimpleNamespace(payload=lambda *_: b"payload of " + KEYS[0])

    class Given(BlockSessions):
        def _of(self, scope: object, session_id: str, generation: int) -> Any:
            return call, session, prefixes

    monkeypatch.setattr(blocksessions, "_keys", lambda *_: np.frombuffer(KEYS[0], np.uint8).reshape(1, -1))
    monkeypatch.setattr(blocksessions, "call_for", lambda call, _: replace(call, host=own))

    def gone() -> None:
        """Between the two stores somebody deletes it."""
        cache.deletions += 1

    node = cast(Any, SimpleNamespace(draining=False, boot_id="b"))
    request = blocks_pb2.PublishSessionRequest(span=blocks_pb2.BlockSpan(tokens=b"\0" * 256))
    sessions = Given(node, cast(Any, None))
    await sessions.publish(request)
    assert set(own.held) == {KEYS[0]}
    own.held.clear()
    baselines.on_put = gone
    await sessions.publish(request)
    assert not own.held
