"""Calls on a cache's shared blocks: who asks is checked, what they name is found, and only then it is
served.

Why it exists: store, look up, load, delete and explain share one order of checks (boot, cache, tenant,
source, span) and one rule: nothing that blocks runs on the loop, every wait has the call's deadline. It must
not know gRPC contexts, nor how the store works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvtier.v1 import blocks_pb2, common_pb2
from kvtier_agent import convert
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.blockinspect import (
    copies_of,
    explanation_message,
    found_message,
    inspection,
    tier_deletions,
)
from kvtier_agent.blockloading import Loading, Wanted
from kvtier_agent.blockmetrics import BlockMetrics
from kvtier_agent.blockpins import MAX_SECONDS as MAX_PIN_SECONDS
from kvtier_agent.blockscope import Caller, Span, caller_of, check_cost, check_payload, span_of
from kvtier_agent.blockstoring import Order, Storing, stored_message
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.node import Node
from kvtier_core.blockkey import BlockSource, check_committed
from kvtier_core.blockstore.outcomes import Explanation
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.directory import NO_LINE
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import Deletion, DeletionState
from kvtier_crds.manifest import RuntimeManifest

DEFAULT_SECONDS = 10.0
# Left of a call's deadline for its answer to be written.
ANSWER_SECONDS = 0.2
MAX_PAGE = 1000
# After a call's deadline, before what it holds is taken from it.
LATE_SECONDS = 0.1
# In one hold of the metadata lock.
KEYS_AT_ONCE = 256
NO_LINES: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose caller is known. deadline: absolute seconds of the host's clock."""

    host: BlockHost
    cache: CacheHost
    manifest: RuntimeManifest
    caller: Caller
    deadline: float

    @property
    def source(self) -> BlockSource:
        assert self.caller.source is not None
        return self.caller.source


class BlockCalls:
    """The calls of one agent, of all its caches."""

    def __init__(self, node: Node, metrics: BlockMetrics) -> None:
        self._node = node
        self._metrics = metrics

    # Who asks.

    def _place(self, scope: blocks_pb2.BlockScope) -> tuple[CacheHost, BlockHost, float]:
        """The cache of a call and its deadline. BOOT_ID_MISMATCH, CACHE_UNKNOWN, TIER_INCAPABLE."""
        self._node.check_boot(scope.boot_id)
        cache = self._node.host(convert.cache_name(scope.cache))
        host = cache.blocks
        if host is None:
            raise CoreError(Reason.TIER_INCAPABLE, "this cache has no tier of host memory for shared blocks")
        if scope.deadline_ms < 0:
            raise CoreError(Reason.BAD_ARGUMENT, f"deadline_ms {scope.deadline_ms} is negative")
        most = self._node.limits.control_deadline_seconds - ANSWER_SECONDS
        seconds = min(most, scope.deadline_ms / 1000 if scope.deadline_ms else DEFAULT_SECONDS)
        return cache, host, host.clock() + seconds

    def call_of(self, scope: blocks_pb2.BlockScope, *, source_needed: bool = True) -> Call:
        """Its caller checked. What `_place` refuses, and `caller_of`."""
        cache, host, deadline = self._place(scope)
        generation = host.store.moves.cache_generation
        caller = caller_of(scope, cache.manifest, generation, source_needed=source_needed)
        return Call(host, cache, cache.manifest, caller, deadline)

    async def _keys(self, call: Call, span: Span) -> NDArray[np.uint8]:
        return await call.host.run(lambda: span.keys(call.caller.source))

    # Storing.

    async def store(self, parts: AsyncIterator[blocks_pb2.StoreBlocksPart]) -> blocks_pb2.StoreBlocksResponse:
        """One client stream to its end."""
        if self._node.draining:
            raise CoreError(Reason.DRAINING, "the agent is draining and takes no blocks")
        begin = await self._begin(parts)
        call = self.call_of(begin.scope)
        with call.host.call():
            order = await self._order(call, begin)
            storing = Storing(call.host, order)
            started = time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, call.deadline - call.host.clock()) + LATE_SECONDS):
                    outcomes = await storing.run(parts)
            except TimeoutError:
                message = f"the next part did not come in time; {len(storing.outcomes)} blocks are done with"
                raise CoreError(Reason.DEADLINE, message) from None
            finally:
                self._metrics.stored(storing.outcomes, storing.received_bytes, time.monotonic() - started)
            return blocks_pb2.StoreBlocksResponse(
                blocks=[
                    stored_message(key.tobytes(), stored)
                    for key, stored in zip(order.keys, outcomes, strict=True)
                ],
                boot_id=self._node.boot_id,
                cache_generation=call.host.store.moves.cache_generation,
            )

    async def _begin(self, parts: AsyncIterator[blocks_pb2.StoreBlocksPart]) -> blocks_pb2.StoreBegin:
        try:
            async with asyncio.timeout(DEFAULT_SECONDS):
                async for part in parts:
                    if not part.HasField("begin") or part.data:
                        raise CoreError(Reason.BAD_ARGUMENT, "the first message is begin, without bytes")
                    return part.begin
        except TimeoutError:
            raise CoreError(Reason.DEADLINE, f"no message came for {DEFAULT_SECONDS} s") from None
        raise CoreError(Reason.BAD_ARGUMENT, "the stream ended before its first message")

    async def _order(self, call: Call, begin: blocks_pb2.StoreBegin) -> Order:
        source = call.source
        span = span_of(begin.span, tokens_needed=True)
        check_payload(source, begin.block_bytes, call.host.block_bytes, call.manifest.model.geometry.head_dim)
        check_cost(begin.recompute_seconds)
        assert span.tokens is not None
        count = len(span.tokens) // source.block_tokens
        if not count:
            raise CoreError(
                Reason.BLOCK_COVERAGE, f"{len(span.tokens)} tokens make no block of {source.block_tokens}"
            )
        check_committed(source, (span.first_block + count) * source.block_tokens, begin.committed_frontier)
        if begin.durable:
            call.host.store.through.check()
        return Order(
            keys=await self._keys(call, span),
            namespace=call.caller.namespace,
            rows=source.block_tokens,
            cost=begin.recompute_seconds,
            droppable=begin.droppable,
            durable=begin.durable,
            deadline=call.deadline,
        )

    # Finding.

    async def lookup(self, request: blocks_pb2.LookupBlocksRequest) -> blocks_pb2.LookupBlocksResponse:
        call = self.call_of(request.scope)
        if not 0 <= request.pin_ms <= MAX_PIN_SECONDS * 1000:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"pin_ms {request.pin_ms} is not in [0, {MAX_PIN_SECONDS * 1000:g}]"
            )
        with call.host.call():
            span = span_of(request.span)
            host, namespace = call.host, call.caller.namespace
            seconds = request.pin_ms / 1000

            def find() -> blocks_pb2.LookupBlocksResponse:
                keys = span.keys(call.caller.source)
                if seconds:
                    pin_id, found = host.pins.take(keys, namespace, seconds)
                else:
                    pin_id, found = "", host.store.lookup(keys, namespace)
                self._metrics.looked_up(len(found), len(keys))
                return blocks_pb2.LookupBlocksResponse(
                    blocks=[
                        found_message(host.store, key.tobytes(), one)
                        for key, one in zip(keys, found, strict=False)
                    ],
                    pin_id=pin_id,
                    boot_id=self._node.boot_id,
                    cache_generation=host.store.moves.cache_generation,
                )

            return await host.run(find)

    # Loading.

    async def load(
        self, request: blocks_pb2.LoadBlocksRequest
    ) -> AsyncGenerator[blocks_pb2.LoadBlocksPart, None]:
        call = self.call_of(request.scope)
        with call.host.call():
            release: Callable[[], None] | None = None
            if request.pin_id:
                use = partial(call.host.pins.use, request.pin_id, call.caller.namespace)
                release = await call.host.run(use)
            loading: Loading | None = None
            started = time.monotonic()
            try:
                keys = await self._keys(call, span_of(request.span))
                if request.generations and len(request.generations) != len(keys):
                    raise CoreError(
                        Reason.BAD_ARGUMENT,
                        f"generations names {len(request.generations)} of {len(keys)} blocks",
                    )
                wanted = Wanted(keys, call.caller.namespace, request.generations, call.deadline)
                loading = Loading(call.host, wanted)
                # A reader that stalls would hold its windows for as long as it likes.
                late = asyncio.get_running_loop().call_later(
                    max(0.0, call.deadline - call.host.clock()) + LATE_SECONDS,
                    partial(_expire, call.host, loading, release),
                )
                async for part in loading.parts():
                    if part.HasField("error"):
                        self._metrics.load_refusals[common_pb2.Reason.Name(part.error.reason),].inc()
                    if loading.sent == 0 and part.offset == 0:
                        self._metrics.load_wait_seconds.observe(time.monotonic() - started)
                    yield part
            finally:
                if loading is not None:
                    late.cancel()
                    loading.end()
                    self._metrics.loaded(loading.sent, loading.sent_bytes, time.monotonic() - started)
                if release is not None:
                    call.host.give_back(release)

    # Deleting.

    async def delete(self, request: blocks_pb2.DeleteBlocksRequest) -> blocks_pb2.DeleteBlocksResponse:
        what = request.WhichOneof("what")
        if what is None or (what == "whole_namespace" and not request.whole_namespace):
            raise CoreError(Reason.BAD_ARGUMENT, "what: a span of blocks, or whole_namespace")
        whole = what == "whole_namespace"
        call = self.call_of(request.scope, source_needed=not whole)
        with call.host.call():
            span = None if whole else span_of(request.span)
            store, namespace = call.host.store, call.caller.namespace

            delete: Callable[[BlockStore], _Ordered]
            if span is None:
                delete = partial(_delete_namespace, namespace=namespace)
            else:
                delete = partial(_delete_keys, namespace=namespace, keys=await self._keys(call, span))
            orders, answer = await call.host.run(partial(delete, store))
            orders += await _delete_copies(call, delete)
            self._metrics.deletions_requested.inc(len(orders))
            store.parts.wake()
            done = await call.host.until(lambda: all(map(_done, orders)), call.deadline)
            if not done:
                answer.pending = sum(len(each) for each in orders if not _done(each))
            for tier in answer.tiers:
                tier.durable = tier.durable and done
            return answer

    # Looking.

    async def explain(self, request: blocks_pb2.ExplainBlockRequest) -> blocks_pb2.ExplainBlockResponse:
        named = bool(request.span.keys)
        call = self.call_of(request.scope, source_needed=not named)
        with call.host.call():
            span = span_of(request.span)
            return await call.host.run(lambda: self._explain(call, span))

    @staticmethod
    def _explain(call: Call, span: Span) -> blocks_pb2.ExplainBlockResponse:
        keys = span.keys(call.caller.source)
        if len(keys) != 1:
            raise CoreError(Reason.BAD_ARGUMENT, f"span names {len(keys)} blocks, one is explained")
        store, key = call.host.store, keys[0].tobytes()
        with store.parts.lock:
            line = store.directory.locate(key)
            owner = store.parts.namespaces.known(call.caller.namespace)
            foreign = line != NO_LINE and int(store.directory.namespace[line]) != owner
            if foreign:
                # As if it were nowhere: a tenant learns nothing of another's blocks.
                unknown = Explanation(key, "unknown", MoveReason.MISS, "it was not stored here")
                return explanation_message(unknown)
            return explanation_message(store.explain(key))

    async def inspect(self, request: blocks_pb2.InspectBlocksRequest) -> blocks_pb2.InspectBlocksResponse:
        if request.after < 0 or not 0 <= request.limit <= MAX_PAGE:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"after must not be negative, limit must be in [0, {MAX_PAGE}]"
            )
        _, host, _ = self._place(request.scope)
        namespace = None
        if request.scope.tenant:
            namespace = self.call_of(request.scope, source_needed=False).caller.namespace
        with host.call():
            answer = await host.run(
                lambda: inspection(host, namespace, request.after, request.limit or MAX_PAGE)
            )
            answer.boot_id = self._node.boot_id
            return answer


_Ordered = tuple[list[Deletion], blocks_pb2.DeleteBlocksResponse]


async def _delete_copies(call: Call, delete: Callable[[BlockStore], _Ordered]) -> list[Deletion]:
    """Of what sessions of another engine start from, a candidate's or a former baseline's; once the call's
    store has none of it any more, so that a copy that is on its way is either here already or finds the count
    moved. Those of an engine that was adopted meanwhile are the cache's now."""
    cache, orders = call.cache, list[Deletion]()
    cache.deletions += 1
    for host in cache.all_blocks:
        if host is call.host:
            continue
        ordered = partial(delete, host.store)
        try:
            orders += (await host.run(ordered))[0]
        except CoreError as error:
            if error.reason is not Reason.CACHE_UNKNOWN:
                raise
            if host is not cache.blocks_former:
                # One that has ended has nothing that anybody could start from.
                continue
            # It takes no more calls, but its store goes on with the sessions that stay in its engine.
            orders += (await asyncio.to_thread(ordered))[0]
        host.store.parts.wake()
    return orders


def _delete_namespace(store: BlockStore, namespace: bytes) -> _Ordered:
    with store.parts.lock:
        index = store.parts.namespaces.known(namespace)
        lines = NO_LINES if index is None else store.directory.lines_of(index)
        copies = copies_of(store, lines)
        orders = [store.delete_namespace(namespace)]
    return orders, blocks_pb2.DeleteBlocksResponse(
        tombstoned=len(lines), tombstone_generation=orders[0].generation, tiers=tier_deletions(store, copies)
    )


def _delete_keys(store: BlockStore, namespace: bytes, keys: NDArray[np.uint8]) -> _Ordered:
    """Deletes those of `keys` that are this namespace's or nobody's (what is nowhere may still lie on a
    device); another's are left out as if they were not there."""
    directory = store.directory
    orders: list[Deletion] = []
    copies = copies_of(store, NO_LINES)
    tombstoned = 0
    for first in range(0, len(keys), KEYS_AT_ONCE):
        with store.parts.lock:
            owner = store.parts.namespaces.known(namespace)
            mine: list[bytes] = []
            lines: list[int] = []
            for row in keys[first : first + KEYS_AT_ONCE]:
                key = row.tobytes()
                line = directory.locate(key)
                if line != NO_LINE and int(directory.namespace[line]) != owner:
                    continue
                mine.append(key)
                if line != NO_LINE:
                    lines.append(line)
            copies = copies + copies_of(store, np.asarray(lines, dtype=np.int64))
            tombstoned += len(lines)
            orders += [each for each in store.delete(mine) if each not in orders]
    return orders, blocks_pb2.DeleteBlocksResponse(
        tombstoned=tombstoned,
        tombstone_generation=max((each.generation for each in orders), default=0),
        tiers=tier_deletions(store, copies),
    )


def _expire(host: BlockHost, loading: Loading, release: Callable[[], None] | None) -> None:
    loading.expire()
    if release is not None:
        host.give_back(release)


def _done(deletion: Deletion) -> bool:
    return deletion.state is DeletionState.DONE
