"""Parts of a load become blocks in the engine's memory, each judged as the copy that was ordered.

Why it exists: a client believes no byte that it has not hashed itself, whatever the agent says of it. It must
not know gRPC calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import xxhash

from kvtier.v1 import blocks_pb2
from kvtier_client.blockrecords import FoundBlock, LoadedBlock, Lookup
from kvtier_client.blocksource import BlockSource
from kvtier_client.errors import KvtierError, from_detail
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import position_contract
from kvtier_core.receiptcheck.copy import CopyReceipt, LiveCopy, check_copy

# What the wire does to bytes: nothing.
_LOSSLESS = frozenset({"identity"})


class Arrival:
    """One load. number: among the client's loads. into: where block i goes; None makes memory for it."""

    def __init__(
        self,
        tenant: str,
        source: BlockSource,
        found: Lookup,
        number: int,
        into: Callable[[int], memoryview] | None,
    ) -> None:
        self._tenant = tenant
        self._source = source
        self._found = found
        self._number = number
        self._into = into
        self._contract = position_contract(source.position_contract)

    def blocks(self, parts: Iterator[blocks_pb2.LoadBlocksPart]) -> Iterator[LoadedBlock]:
        index, at = 0, 0
        target = memoryview(b"")
        for part in parts:
            if part.HasField("error"):
                raise from_detail(part.error)
            if index >= len(self._found.blocks) or part.block != index or part.offset != at:
                raise KvtierError(
                    Reason.SHORT_COPY, f"block {part.block} at {part.offset} came for block {index} at {at}"
                )
            found = self._found.blocks[index]
            if at == 0:
                target = self._target(index, found.size_bytes)
            end = at + len(part.data)
            if end > found.size_bytes:
                raise KvtierError(Reason.SHORT_COPY, f"block {index} is longer than {found.size_bytes} bytes")
            target[at:end] = part.data
            at = end
            if part.last:
                self._judge(index, found, at, parse_checksum(part.checksum), target)
                yield LoadedBlock(index, found, target)
                index, at = index + 1, 0
        if at or index < len(self._found.blocks):
            raise KvtierError(
                Reason.SHORT_COPY, f"the stream ended in block {index} of {len(self._found.blocks)}"
            )

    def _target(self, index: int, size: int) -> memoryview:
        target = memoryview(bytearray(size)) if self._into is None else self._into(index).cast("B")
        if len(target) != size:
            raise KvtierError(Reason.PAYLOAD_GEOMETRY, f"{len(target)} bytes for a payload of {size}")
        return target

    def _judge(self, index: int, found: FoundBlock, arrived: int, stated: int, target: memoryview) -> None:
        """What was ordered was found by the lookup; what arrived is hashed here, whatever the agent says."""
        digest = xxhash.xxh3_64_intdigest(target[:arrived])
        if stated != digest:
            raise KvtierError(
                Reason.CHECKSUM_MISMATCH, f"block {index} is xxh3:{digest:016x}, xxh3:{stated:016x} was sent"
            )
        ordered = self._receipt(index, found, found.size_bytes, found.checksum)
        reported = self._receipt(index, found, arrived, digest)
        live = LiveCopy(
            alive=True,
            cache_generation=self._found.cache_generation,
            slot_generation=self._number,
            owner=index,
            request_generation=self._source.request_generation,
            authority_epoch=0,
        )
        try:
            check_copy(ordered, reported, live, epoch=0, lossless=_LOSSLESS)
        except CoreError as error:
            raise KvtierError(error.reason, f"block {index}: {error.message}", error.facts) from None

    def _receipt(self, index: int, found: FoundBlock, length: int, checksum: int) -> CopyReceipt:
        return CopyReceipt(
            txn=self._number,
            block=found.key,
            owner=index,
            cache_generation=self._found.cache_generation,
            slot=index,
            slot_generation=self._number,
            transfer_generation=self._number,
            request_generation=self._source.request_generation,
            length=length,
            codec=self._source.codec,
            layout=self._source.layout,
            transport_codec="identity",
            checksum=checksum,
            position_contract_sha256=self._contract,
            tenant_namespace=self._tenant,
        )


def parse_checksum(text: str) -> int:
    kind, _, digits = text.partition(":")
    try:
        if kind == "xxh3" and len(digits) == 16:
            return int(digits, 16)
    except ValueError:
        pass
    raise KvtierError(Reason.CHECKSUM_MISMATCH, f"{text[:40]!r} is no checksum")
