"""One LoadBlocks call: blocks are fetched a window ahead, verified, and sent as each becomes ready.

Why it exists: a prefix may be longer than memory has slots, so a window of it is pinned at a time, and the
next is on its way while this one is sent. It must not know identity or who asked.

What follows the first block that cannot be read is of no use to its prefix: the stream says why and ends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.v1 import blocks_pb2
from kvtier_agent.blockhost import BlockHost, Strand
from kvtier_agent.blockstoring import PART_BYTES, format_checksum
from kvtier_agent.errors import to_detail
from kvtier_core.blockstore.outcomes import Found
from kvtier_core.blockstore.store import Fetch
from kvtier_core.directory import ReplicaState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason, MoveRefused

log = logging.getLogger(__name__)
LoadPart = blocks_pb2.LoadBlocksPart
WINDOW_BLOCKS = 64
WINDOW_BYTES = 64 << 20
# Encoded in one step of a thread.
STEP_BYTES = 4 << 20
_NO_ROOM = (
    MoveReason.NO_STAGING,
    MoveReason.NO_DESTINATION_CAPACITY,
    MoveReason.CREDIT_PRESSURE,
    MoveReason.WOULD_EVICT_PINNED,
    MoveReason.QUEUE_FULL,
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """keys: uint8 [n, 32]. generations: one for each key, of any copy of it, or none. deadline: absolute
    seconds of the host's clock."""

    keys: NDArray[np.uint8]
    namespace: bytes
    generations: Sequence[int]
    deadline: float


@dataclass(frozen=True, slots=True)
class _Bad:
    """A copy that was found bad. others: whether there is another."""

    error: CoreError
    others: bool


class Loading:
    """State of one call. sent, sent_bytes: so far."""

    def __init__(self, host: BlockHost, wanted: Wanted) -> None:
        self._host = host
        self._wanted = wanted
        self._strand = Strand(host)
        self._keys = [key.tobytes() for key in wanted.keys]
        size = host.block_bytes
        slots = host.store.parts.tiers[host.store.parts.home].slots.capacity
        # Two windows are held at a time, and a cache has more than one reader.
        self._window = max(1, min(WINDOW_BLOCKS, WINDOW_BYTES // size, slots // 8))
        self._step = max(1, STEP_BYTES // size)
        self._lock = RLock()
        self._open: deque[Fetch] = deque()
        self._over = False
        self._bad: _Bad | None = None
        self._late = False
        self.sent = 0
        self.sent_bytes = 0

    async def parts(self) -> AsyncIterator[blocks_pb2.LoadBlocksPart]:
        """Parts in the order of the blocks; the last may say why the next block cannot be read. Call `end`
        afterwards, whatever happens."""
        try:
            if self._wanted.generations:
                await self._strand.run(self._check_generations)
            current: Fetch | None = await self._fetch(0)
            while current is not None:
                turn, first = self._host.mark(), self.sent
                after = first + len(current)
                ahead = await self._fetch(after) if after < len(self._keys) else None
                async for part in self._send(current, first):
                    yield part
                if self.sent == after:
                    await self._strand.run(self._close_first)
                    current = ahead
                else:
                    current = await self._again(current, turn)
        except CoreError as error:
            late = MoveRefused(MoveReason.FETCH_LATE, f"block {self.sent} was not taken in time")
            yield self._failed(late if self._late else error)

    def expire(self) -> None:
        """The call's time is over: what it holds goes back though its reader may still be at it."""
        self._late = True
        self.end()

    def end(self) -> None:
        """Gives back what is held, after the step that may still run."""
        self._strand.finish(self._close_all)

    async def _send(self, fetch: Fetch, first: int) -> AsyncIterator[blocks_pb2.LoadBlocksPart]:
        """What becomes ready of a window, until all of it was or nothing more will."""
        done = 0
        while (ready := await self._ready(fetch, done)) > 0:
            blocks = await self._strand.run(partial(self._encode, fetch, done, ready, first))
            if not blocks:
                return
            for parts in blocks:
                for part in parts:
                    self.sent_bytes += len(part.data)
                    yield part
                self.sent += 1
            done += len(blocks)

    async def _ready(self, fetch: Fetch, done: int) -> int:
        """How many blocks after the first `done` may be sent now; 0 when no more will be."""
        if done < len(fetch):
            await self._host.until(lambda: fetch.over or fetch.ready > done, self._wanted.deadline)
        return min(fetch.ready - done, self._step)

    async def _again(self, fetch: Fetch, turn: object) -> Fetch:
        """Another attempt: for what found no room, when others have moved on; for what was found bad in
        memory, at once, if there is another copy. Raises why there is none."""
        bad, self._bad = self._bad, None
        if bad is None:
            error = self._why(fetch)
            if error.code not in _NO_ROOM:
                raise error
            await self._strand.run(self._close_open)
            if not await self._host.turn(turn, self._wanted.deadline):
                raise error
        elif bad.others:
            await self._strand.run(self._close_open)
        else:
            raise bad.error
        return await self._fetch(self.sent)

    def _why(self, fetch: Fetch) -> MoveRefused:
        reason = fetch.reason
        if not fetch.over:
            reason = MoveReason.FETCH_LATE
        elif reason is MoveReason.TENANT_MISMATCH:
            # Whether another tenant has it is nobody's business.
            reason = MoveReason.MISS
        return MoveRefused(reason, f"block {self.sent} cannot be read: {reason}")

    # In threads.

    async def _fetch(self, first: int) -> Fetch:
        wanted, keys = self._wanted, self._keys[first : first + self._window]

        def begin() -> Fetch:
            fetch = self._host.store.fetch(
                keys,
                namespace=wanted.namespace,
                deadline=wanted.deadline,
                # What comes late in a long prefix can wait for the beginning of another's.
                priority=-(first // self._window),
            )
            with self._lock:
                if not self._over:
                    self._open.append(fetch)
                    return fetch
            fetch.close()
            raise CoreError(Reason.CANCELLED, "the call is over")

        return await self._strand.run(begin)

    def _close_first(self) -> None:
        with self._lock:
            self._check_held()
            self._open.popleft().close()

    def _close_all(self) -> None:
        with self._lock:
            self._over = True
            self._close_open()

    def _close_open(self) -> None:
        with self._lock:
            while self._open:
                self._open.popleft().close()

    def _check_held(self) -> None:
        if self._over:
            raise CoreError(Reason.CANCELLED, "the call is over")

    def _encode(self, fetch: Fetch, start: int, count: int, first: int) -> list[list[LoadPart]]:
        """Messages of `count` blocks, or of those before one that is bad. Each is verified first: memory may
        have been hit since it was filled."""
        # What is being read may not be given back meanwhile, whoever ends the call.
        with self._lock:
            self._check_held()
            return self._encoded(fetch, start, count, first)

    def _encoded(self, fetch: Fetch, start: int, count: int, first: int) -> list[list[LoadPart]]:
        encoded: list[list[LoadPart]] = []
        for index in range(start, start + count):
            body, found = fetch.body(index), fetch.found(index)
            digest = xxhash.xxh3_64_intdigest(body)
            if digest != found.checksum:
                if not encoded:
                    self._bad = self._condemned(first + index, found, digest)
                break
            encoded.append(
                [
                    blocks_pb2.LoadBlocksPart(
                        block=first + index,
                        offset=offset,
                        data=bytes(body[offset : offset + PART_BYTES]),
                        last=offset + PART_BYTES >= len(body),
                        checksum=format_checksum(digest) if offset + PART_BYTES >= len(body) else "",
                        generation=found.generation,
                    )
                    for offset in range(0, len(body), PART_BYTES)
                ]
            )
        return encoded

    def _condemned(self, index: int, found: Found, digest: int) -> _Bad:
        """From here nobody is served that copy."""
        store = self._host.store
        with store.parts.lock:
            directory, line = store.directory, store.directory.find(self._keys[index])
            others = 0
            if line >= 0:
                copy = directory.replica(line, found.tier)
                # Another reader may have been here first.
                if copy.generation == found.generation and copy.state == ReplicaState.PUBLISHED:
                    others = store.moves.condemn(line, found.tier)
                else:
                    others = directory.survivors(line)
        log.error("block %s in memory is not what was stored; %d copies are left", index, others)
        message = (
            f"block {index} is {format_checksum(digest)} in memory, not {format_checksum(found.checksum)}"
        )
        return _Bad(CoreError(Reason.CHECKSUM_MISMATCH, message), others > 0)

    def _check_generations(self) -> None:
        """GENERATION_STALE when a block has no copy of the generation that was found. MISS is told by the
        fetch."""
        store, owner = self._host.store, self._host.store.parts.namespaces.known(self._wanted.namespace)
        directory = store.directory
        with store.parts.lock:
            for index, (key, wanted) in enumerate(zip(self._keys, self._wanted.generations, strict=True)):
                line = directory.find(key)
                if line < 0 or int(directory.namespace[line]) != owner:
                    return
                held = [directory.replica(line, tier).generation for tier in directory.replicas.held_in(line)]
                if wanted not in held:
                    raise CoreError(
                        Reason.GENERATION_STALE,
                        f"block {index} has no copy of generation {wanted} any more",
                        {"block": index},
                    )

    def _failed(self, error: CoreError) -> blocks_pb2.LoadBlocksPart:
        return blocks_pb2.LoadBlocksPart(block=self.sent, error=to_detail(error))
