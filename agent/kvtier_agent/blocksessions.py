"""Sessions that start from shared blocks, and sessions whose rows become such blocks.

Why it exists: a prompt whose first chunks were computed before, for the same tenant and source, need not be
computed again. Here the source that names all layers becomes one of each layer's blocks, reads are awaited
before the engine is asked, and what a call held goes back however it ends. It must not know slots or leases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier.v1 import blocks_pb2
from kvtier_agent import convert
from kvtier_agent.blockcalls import BlockCalls, Call
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.blocksbeside import bring, call_for, put_copies
from kvtier_agent.blockscope import MAX_BLOCKS, Span, check_cost, span_of
from kvtier_agent.blockstoring import stored_message
from kvtier_agent.cachesession import Session
from kvtier_agent.node import Node
from kvtier_core.blockkey import EXACT, BlockSource, chain_keys
from kvtier_core.blockstore.lasting import THERE, answered
from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID
from kvtier_core.prefixes import Prefixes
from kvtier_core.transactions import MoveReason
from kvtier_crds.manifest import RuntimeManifest

# What a call meets whose blocks are of an engine that was replaced meanwhile.
_MOVED = frozenset({Reason.NOT_VISIBLE, Reason.CACHE_UNKNOWN})


@runtime_checkable
class HasPrefixes(Protocol):
    """An engine whose sessions and blocks share slots."""

    @property
    def prefixes(self) -> Prefixes: ...


_Placed = tuple[Call, Call, Session, Prefixes]
"""On the blocks of the session's engine, and on those that all share."""


class BlockSessions:
    """Calls of one agent that concern a session and blocks."""

    def __init__(self, node: Node, calls: BlockCalls) -> None:
        self._node = node
        self._calls = calls

    async def start(self, request: blocks_pb2.StartSessionRequest) -> blocks_pb2.StartSessionResponse:
        """Reads that are not over in time end the prefix before them. May be repeated when its answer was
        lost, also while the first call goes on. Where another engine takes the place of the one whose blocks
        were read, those of that one are read, until the call's deadline."""
        cache, deadline = convert.cache_name(request.scope.cache), 0.0
        await self._node.arriving.wait(cache)
        placed = self._placed(request)
        while True:
            call = placed[0]
            deadline = deadline or call.deadline
            try:
                return await self._start(placed, request, deadline)
            except CoreError as error:
                if error.reason not in _MOVED or call.host.clock() >= deadline:
                    raise
                await self._node.arriving.wait(cache, deadline - call.host.clock())
                placed = self._placed(request)
                if placed[0].host is call.host:
                    raise

    def _placed(self, request: blocks_pb2.StartSessionRequest) -> _Placed:
        """Where the session's blocks are now."""
        common, session, prefixes = self._of(request.scope, request.session_id, request.session_generation)
        return call_for(common, session), common, session, prefixes

    async def _start(
        self, placed: _Placed, request: blocks_pb2.StartSessionRequest, deadline: float
    ) -> blocks_pb2.StartSessionResponse:
        call, common, session, prefixes = placed
        host = call.host
        with host.call():
            span = span_of(request.span, tokens_needed=True)
            keys = await host.run(partial(_keys, call.source, span, call.manifest))
            asked = hashlib.sha256(keys.tobytes()).digest()
            if host is not common.host:
                await bring([key.tobytes() for key in keys], replace(common, deadline=deadline), host)
            fetch = await host.run(
                lambda: host.store.fetch(
                    [key.tobytes() for key in keys], namespace=call.caller.namespace, deadline=deadline
                )
            )
            try:
                await host.until(lambda: fetch.over, deadline)
            except BaseException:
                host.give_back(fetch.close)
                raise
            handle = session.handle
            rows = await session.host.runner.call(
                lambda: prefixes.start(handle.session_id, handle.generation, fetch, asked),
                # After the step, which goes on when its caller leaves in the middle.
                over=partial(host.give_back, fetch.close),
            )
        return blocks_pb2.StartSessionResponse(rows=rows, boot_id=self._node.boot_id)

    async def publish(self, request: blocks_pb2.PublishSessionRequest) -> blocks_pb2.PublishSessionResponse:
        """Chunk by chunk, so that no more than one is held twice. What is published stays when a later one
        is refused."""
        if self._node.draining:
            raise CoreError(Reason.DRAINING, "the agent is draining and takes no blocks")
        check_cost(request.recompute_seconds)
        call, session, prefixes = self._of(request.scope, request.session_id, request.session_generation)
        host, handle = call.host, session.handle
        layers = call.manifest.model.geometry.layers
        if request.durable:
            host.store.through.check()
        with host.call():
            span = span_of(request.span, tokens_needed=True)
            keys = [key.tobytes() for key in await host.run(partial(_keys, call.source, span, call.manifest))]
            outcomes: list[Stored] = []
            for chunk in range(len(keys) // layers):
                payloads = [
                    await session.host.runner.call(
                        partial(
                            prefixes.payload,
                            handle.session_id,
                            handle.generation,
                            layer,
                            chunk,
                            call.deadline,
                        )
                    )
                    for layer in range(layers)
                ]
                mine, deletions = keys[chunk * layers : (chunk + 1) * layers], call.cache.deletions
                outcomes += await _put(call, mine, payloads, request)
                own = call_for(call, session)
                if own is not call:
                    # Its engine's other sessions find them under that engine's bounds.
                    with own.host.call():
                        await put_copies(mine, payloads, own, deletions)
            if request.durable:
                await _write_through(call, keys, outcomes)
            there = [each.outcome in THERE for each in outcomes]
            whole = there.index(False) // layers if False in there else len(there) // layers
            return blocks_pb2.PublishSessionResponse(
                blocks=[stored_message(key, stored) for key, stored in zip(keys, outcomes, strict=True)],
                rows=whole * call.manifest.chunk_tokens,
                boot_id=self._node.boot_id,
            )

    def _of(
        self, scope: blocks_pb2.BlockScope, session_id: str, generation: int
    ) -> tuple[Call, Session, Prefixes]:
        """SESSION_UNKNOWN for a session of another cache, TENANT_MISMATCH for one of another tenant."""
        call = self._calls.call_of(scope)
        session = self._node.session(session_id, generation, scope.tenant)
        if session.host is not self._node.host(convert.cache_name(scope.cache)):
            raise CoreError(Reason.SESSION_UNKNOWN, "the session is of another cache")
        engine = session.host.runner.engine
        if not isinstance(engine, HasPrefixes):
            raise CoreError(Reason.UNSUPPORTED, "sessions of this engine do not start from blocks")
        return call, session, engine.prefixes


def _keys(source: BlockSource, span: Span, manifest: RuntimeManifest) -> NDArray[np.uint8]:
    """uint8 [chunks * layers, 32], by chunk and, of each, by layer. BAD_ARGUMENT naming the field that is not
    that of a session's rows."""
    geometry = manifest.model.geometry
    wanted = {
        "layers": (source.layers, (0, geometry.layers)),
        "kv_heads": (source.kv_heads, (0, geometry.kv_heads)),
        "block_tokens": (source.block_tokens, manifest.chunk_tokens),
        "dtype": (source.dtype, geometry.dtype.value),
        "codec": (source.codec, CODEC_IDENTITY),
        "layout": (source.layout, LAYOUT_ID),
        "producer": (source.producer, EXACT),
        "branch": (source.branch, ()),
        "first_block": (span.first_block, 0),
    }
    for name, (stated, ours) in wanted.items():
        if stated != ours:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"{name} {stated!r} is not a session's {ours!r}", {"field": name}
            )
    assert span.tokens is not None
    chunks = len(span.tokens) // source.block_tokens
    if chunks * geometry.layers > MAX_BLOCKS:
        raise CoreError(
            Reason.BAD_ARGUMENT, f"{chunks} chunks of {geometry.layers} layers are over {MAX_BLOCKS} blocks"
        )
    of_layers = [
        chain_keys(replace(source, layers=(layer, layer + 1)), span.tokens, content=span.content)
        for layer in range(geometry.layers)
    ]
    return np.stack(of_layers, axis=1).reshape(-1, 32)


async def _put(
    call: Call, keys: Sequence[bytes], payloads: Sequence[bytes], request: blocks_pb2.PublishSessionRequest
) -> list[Stored]:
    """One chunk's blocks; those that find no room while others leave wait for it, until the deadline."""
    host, done = call.host, dict[int, Stored]()
    left = list(range(len(keys)))
    while left:
        mark = host.mark()
        stored = await host.run(
            partial(
                host.store.put,
                [keys[at] for at in left],
                [payloads[at] for at in left],
                namespace=call.caller.namespace,
                deadline=call.deadline,
                rows=call.source.block_tokens,
                cost=request.recompute_seconds,
                droppable=request.droppable,
            )
        )
        done.update(zip(left, stored, strict=True))
        left = [at for at in left if done[at].reason is MoveReason.CREDIT_PRESSURE]
        if left and not await host.turn(mark, call.deadline):
            break
    return [done[at] for at in range(len(keys))]


async def _write_through(call: Call, keys: Sequence[bytes], outcomes: list[Stored]) -> None:
    host: BlockHost = call.host
    there = [
        at for at, each in enumerate(outcomes) if each.outcome in (PutOutcome.STORED, PutOutcome.EXISTED)
    ]
    scope = await host.run(
        lambda: host.store.persist(
            [keys[at] for at in there], namespace=call.caller.namespace, deadline=call.deadline
        )
    )
    try:
        await host.until(lambda: scope.over, call.deadline)
    finally:
        host.give_back(partial(host.store.through_with, scope))
    for index, at in enumerate(there):
        outcomes[at] = answered(outcomes[at], scope, index)
