"""One StoreBlocks call: parts of payloads go straight into the slots that will be read, a few blocks at a
time.

Why it exists: a stream is longer than memory has slots, so blocks are reserved, filled and published in
groups, and a call that waits for room holds no slot meanwhile: two writers never wait for each other. It must
not know identity or who asked.

Parts come in order: block by block, offset by offset. A block that needs no bytes is hashed all the same,
since what the client says of it is compared with what is stored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.v1 import blocks_pb2
from kvtier_agent.blockhost import BlockHost, Strand
from kvtier_agent.errors import to_detail
from kvtier_core.blockstore.lasting import THERE, Lasting, answered
from kvtier_core.blockstore.outcomes import PutOutcome, Stored, compared
from kvtier_core.blockstore.store import Reservation
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.transfer import move_bytes
from kvtier_core.transactions import MoveReason, MoveRefused
from kvtier_core.transactions.reasons import refusal

PART_BYTES = 1 << 20
GROUP_BLOCKS = 32
GROUP_BYTES = 32 << 20
# Above this, copying on the loop would be felt by who shares it.
INLINE_BYTES = 64 << 10
_CHECKSUM = "xxh3:"
# What a group lacks whose own first blocks, once published, can make room.
_UNTIL_PUBLISHED = (MoveReason.NO_DESTINATION_CAPACITY, MoveReason.WOULD_EVICT_PINNED)


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be stored. keys: uint8 [n, 32]. deadline: absolute seconds of the host's clock."""

    keys: NDArray[np.uint8]
    namespace: bytes
    rows: int
    cost: float
    droppable: bool
    durable: bool
    deadline: float


@dataclass(slots=True)
class _Group:
    """Blocks [first, end) of the call. refused: those that have no slot and get none."""

    first: int
    end: int
    reservation: Reservation
    stated: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)


class Storing:
    """State of one call. `outcomes` grows in the order of the blocks."""

    def __init__(self, host: BlockHost, order: Order) -> None:
        self._host = host
        self._order = order
        self._strand = Strand(host)
        self._keys = [key.tobytes() for key in order.keys]
        self._size = host.block_bytes
        self._most = max(1, min(GROUP_BLOCKS, GROUP_BYTES // self._size))
        self._group: _Group | None = None
        self._waits: list[tuple[list[int], Lasting]] = []
        self.outcomes: list[Stored] = []
        self.received_bytes = 0

    async def run(self, parts: AsyncIterator[blocks_pb2.StoreBlocksPart]) -> Sequence[Stored]:
        """Outcome per block. What did not arrive is refused, with what else there is of its group; what found
        no room in time, by itself. BAD_ARGUMENT for parts out of order ends the call. What was published
        stays. Of an order that is to be durable, each published block says whether it is, or why not."""
        try:
            await self._consume(parts)
            await self._last()
        finally:
            group, self._group = self._group, None
            if group is not None:
                self._strand.finish(group.reservation.close)
            for _, scope in self._waits:
                if not scope.over:
                    self._host.give_back(partial(self._host.store.through_with, scope))
        missing = len(self._keys) - len(self.outcomes)
        self.outcomes += [_refused(MoveReason.SHORT_COPY, "its bytes did not arrive")] * missing
        return self.outcomes

    async def _consume(self, parts: AsyncIterator[blocks_pb2.StoreBlocksPart]) -> None:
        for block in range(len(self._keys)):
            if self._group is None:
                await self._open(block)
                if self._group is None:
                    # No room in time; what follows would find none either.
                    return
            if not await self._receive(block, parts):
                return
            if block + 1 == self._group.end:
                await self._publish()

    # Groups.

    async def _open(self, first: int) -> None:
        """Reserves the next group, of those blocks that have room now; waits when the first has none."""
        order = self._order
        last: Stored | None = None
        while True:
            turn = self._host.mark()
            end = min(first + self._most, len(self._keys))
            try:
                reservation = await self._reserve(first, end)
            except CoreError as error:
                # For whom there was no room in time, that is what matters.
                known = last if error.reason is Reason.DEADLINE else None
                outcome = known or _refused_by(error)
                self.outcomes += [outcome] * (len(self._keys) - first)
                return
            waits = _first_waiting(reservation)
            if waits is None or waits > 0:
                if waits is not None and any(
                    reservation.outcome(at) is None for at in range(waits, len(reservation))
                ):
                    await self._strand.run(reservation.close)
                    end = first + waits
                    reservation = await self._reserve(first, end)
                elif waits is not None:
                    end = first + waits
                self._group = _Group(first, end, reservation)
                return
            last = reservation.outcome(0)
            await self._strand.run(reservation.close)
            if not await self._host.turn(turn, order.deadline):
                assert last is not None
                self.outcomes += [last] * (len(self._keys) - first)
                return

    async def _reserve(self, first: int, end: int) -> Reservation:
        order = self._order
        return await self._strand.run(
            lambda: self._host.store.reserve(
                self._keys[first:end],
                namespace=order.namespace,
                deadline=order.deadline,
                rows=order.rows,
                cost=order.cost,
                droppable=order.droppable,
            )
        )

    async def _publish(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        reservation = group.reservation
        # A group that ends before its reservation does left only refused blocks behind.
        stated = group.stated + [0] * (len(reservation) - len(group.stated))
        try:
            stored = await self._strand.run(lambda: reservation.publish(stated))
        finally:
            self._strand.finish(reservation.close)
        for at in range(group.end - group.first):
            self.outcomes.append(self._judged(stored[at], group.stated[at], group.arrived[at]))
        if self._order.durable:
            await self._write_through(group.first, group.end)

    async def _write_through(self, first: int, end: int) -> None:
        """Begins durable copies of what was just published, while the next bytes arrive."""
        order = self._order
        there = [at for at in range(first, end) if self.outcomes[at].outcome in THERE]
        keys = [self._keys[at] for at in there]
        try:
            scope = await self._strand.run(
                lambda: self._host.store.persist(keys, namespace=order.namespace, deadline=order.deadline)
            )
        except CoreError as error:
            code = refusal(error).code
            for at in there:
                self.outcomes[at] = self.outcomes[at]._replace(reason=code, message=error.message)
            return
        self._waits.append((there, scope))

    async def _last(self) -> None:
        """Waits until what is to be durable is, or until the deadline."""
        if not self._waits:
            return
        await self._host.until(lambda: all(scope.over for _, scope in self._waits), self._order.deadline)
        for there, scope in self._waits:
            for index, at in enumerate(there):
                self.outcomes[at] = answered(self.outcomes[at], scope, index)

    def _judged(self, stored: Stored, stated: int, arrived: int) -> Stored:
        """The outcome of a block that needed no bytes, given what the client has of it."""
        if stored.outcome is not PutOutcome.EXISTED:
            return stored
        if stated != arrived:
            return _refused(
                MoveReason.CHECKSUM_MISMATCH, f"xxh3:{stated:016x} was stated, xxh3:{arrived:016x} arrived"
            )
        return compared(stored, arrived)

    # Bytes.

    async def _receive(self, block: int, parts: AsyncIterator[blocks_pb2.StoreBlocksPart]) -> bool:
        """One block's parts. False when the stream ends inside it."""
        group = self._group
        assert group is not None
        target = group.reservation.landing(block - group.first)
        hashed = None if target is not None else xxhash.xxh3_64()
        at = 0
        async for part in parts:
            data = part.data
            self._check(part, block, at)
            self.received_bytes += len(data)
            if target is None:
                assert hashed is not None
                hashed.update(data)
            elif len(data) <= INLINE_BYTES:
                target[at : at + len(data)] = data
            else:
                await self._copy(target[at : at + len(data)], data)
            at += len(data)
            if part.last:
                group.stated.append(parse_checksum(part.checksum))
                group.arrived.append(0 if hashed is None else hashed.intdigest())
                return True
        return False

    async def _copy(self, target: memoryview, data: bytes) -> None:
        await self._strand.run(lambda: move_bytes(target, memoryview(data)))

    def _check(self, part: blocks_pb2.StoreBlocksPart, block: int, at: int) -> None:
        end = at + len(part.data)
        if part.HasField("begin"):
            raise CoreError(Reason.BAD_ARGUMENT, "begin stands in the first message, and only there")
        if part.block != block or part.offset != at:
            raise CoreError(
                Reason.BAD_ARGUMENT,
                f"block {part.block} at {part.offset} came where block {block} at {at} was due",
            )
        if len(part.data) > PART_BYTES or end > self._size or part.last != (end == self._size):
            raise CoreError(
                Reason.BAD_ARGUMENT,
                f"{len(part.data)} bytes at {at} of a block of {self._size} (last: {part.last}); "
                f"a part has at most {PART_BYTES}",
            )
        if not part.data:
            raise CoreError(Reason.BAD_ARGUMENT, "a part without bytes")


def parse_checksum(text: str) -> int:
    """`xxh3:<16 hex digits>`. BAD_ARGUMENT."""
    digits = text.removeprefix(_CHECKSUM)
    if len(text) != len(_CHECKSUM) + 16 or digits == text:
        raise CoreError(Reason.BAD_ARGUMENT, f"checksum {text[:40]!r} is not xxh3:<16 hex digits>")
    try:
        return int(digits, 16)
    except ValueError:
        raise CoreError(Reason.BAD_ARGUMENT, f"checksum {text[:40]!r} is not xxh3:<16 hex digits>") from None


def format_checksum(value: int) -> str:
    return f"{_CHECKSUM}{value:016x}"


def stored_message(key: bytes, stored: Stored) -> blocks_pb2.StoredBlock:
    """Of a block in the answer; `error` is set exactly when it is not published, `not_durable` when it is and
    was to be durable in vain."""
    message = blocks_pb2.StoredBlock(key=key, generation=stored.generation)
    if stored.outcome is PutOutcome.EXISTED:
        message.existed = True
    elif stored.outcome is not PutOutcome.STORED:
        message.error.CopyFrom(to_detail(MoveRefused(stored.reason, stored.message or str(stored.reason))))
    if stored.outcome in THERE and stored.reason is not MoveReason.READY:
        message.not_durable.CopyFrom(to_detail(MoveRefused(stored.reason, stored.message)))
    message.durable = stored.durable
    return message


def _first_waiting(reservation: Reservation) -> int | None:
    """The first block for which there may be room later: while copies leave, or when those before it in this
    very group can."""
    filling = False
    for at in range(len(reservation)):
        outcome = reservation.outcome(at)
        if outcome is None:
            filling = True
        elif outcome.outcome is PutOutcome.REFUSED and (
            outcome.reason is MoveReason.CREDIT_PRESSURE or (filling and outcome.reason in _UNTIL_PUBLISHED)
        ):
            return at
    return None


def _refused(reason: MoveReason, message: str) -> Stored:
    return Stored(PutOutcome.REFUSED, reason=reason, message=message)


def _refused_by(error: CoreError) -> Stored:
    known = MoveReason.__members__.get(error.reason.name, MoveReason.TRANSFER_FAILED)
    return _refused(known, error.message)
