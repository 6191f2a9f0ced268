"""Shared blocks of a session that a candidate's engine answers: they are that engine's own, under its bounds.

Why it exists: two engines of a cache have two block stores, so that transfers of one arm wait for their own
credits only. What the baseline's sessions published is of use to the other's all the same: it is copied here,
verified, when a session first asks for it. It must not know leases, nor whose answer is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import xxhash

from kvtier_agent.blockcalls import Call
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cachesession import Session
from kvtier_agent.candidateengines import paired
from kvtier_core.blockstore.lasting import THERE
from kvtier_core.blockstore.outcomes import Stored
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.errors import CoreError

COPIED_AT_ONCE = 64
"""Blocks that are in memory twice while they are copied."""


def call_for(call: Call, session: Session) -> Call:
    """The call on the blocks of the engine in which the session is, while these take calls."""
    host = session.host
    if host.blocks_beside is None or not paired(host).beside_alone(session.handle.session_id):
        return call
    return replace(call, host=host.blocks_beside)


async def bring(keys: Sequence[bytes], source: Call, into: BlockHost) -> None:
    """Copies those leading blocks that only the baseline's store has. Where one cannot be read, or finds no
    room, the rest is left: the session computes it."""
    namespace = source.caller.namespace
    array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)
    done = len(await into.run(partial(into.store.lookup, array, namespace)))
    while done < len(keys):
        part, deletions = keys[done : done + COPIED_AT_ONCE], source.cache.deletions
        with source.host.call():
            fetch = await source.host.run(
                partial(source.host.store.fetch, part, namespace=namespace, deadline=source.deadline)
            )
            try:
                await source.host.until(lambda fetch=fetch: fetch.over, source.deadline)  # type: ignore[misc]
                payloads = await source.host.run(partial(_verified, fetch))
            finally:
                source.host.give_back(fetch.close)
        stored = await put_copies(part[: len(payloads)], payloads, replace(source, host=into), deletions)
        there = [each.outcome in THERE for each in stored]
        done += len(there)
        if len(there) < len(part) or not all(there):
            return


async def put_copies(
    keys: Sequence[bytes], payloads: Sequence[bytes], call: Call, deletions: int
) -> list[Stored]:
    """Into the call's store, as far as there is room now. They may be lost: the baseline's store, or nobody,
    answers for them. deletions: the cache's count before the baseline's store was asked, or given them; when
    it has moved since, somebody may have asked for their end, and none of them stays."""
    if not keys:
        return []
    into = call.host
    stored = await _put_once(keys, payloads, call)
    if call.cache.deletions != deletions:
        await into.run(partial(into.store.delete, keys))
        into.store.parts.wake()
        return []
    return stored


async def _put_once(keys: Sequence[bytes], payloads: Sequence[bytes], call: Call) -> list[Stored]:
    put = partial(
        call.host.store.put,
        keys,
        payloads,
        namespace=call.caller.namespace,
        deadline=call.deadline,
        rows=call.source.block_tokens,
        droppable=True,
    )
    try:
        return await call.host.run(put)
    except CoreError:
        return []


def _verified(fetch: Fetch) -> list[bytes]:
    """Copies of what is ready, as far as it is what was stored; for a thread."""
    payloads: list[bytes] = []
    for index in range(fetch.ready):
        payload = bytes(fetch.body(index))
        if xxhash.xxh3_64_intdigest(payload) != fetch.found(index).checksum:
            break
        payloads.append(payload)
    return payloads
