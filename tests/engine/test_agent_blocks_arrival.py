"""What a client believes of a load: bytes that it hashed itself, in order, as the lookup promised them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import xxhash

from kvtier.v1 import blocks_pb2, common_pb2
from kvtier_client.blockarrival import Arrival
from kvtier_client.blockrecords import FoundBlock, Lookup
from kvtier_client.errors import KvtierError
from kvtier_core.errors import Reason
from tests.engine.block_server import source_of

SENT = [bytes([at]) * 100 for at in range(3)]
FOUND = Lookup(
    tuple(
        FoundBlock(bytes([at]) * 32, 7 + at, "nvme", 100, xxhash.xxh3_64_intdigest(data))
        for at, data in enumerate(SENT)
    ),
    "pin",
    1,
)


def text(data: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_64_intdigest(data):016x}"


def part(block: int, data: bytes, **more: Any) -> blocks_pb2.LoadBlocksPart:
    stated = {"last": True, "checksum": text(data), **more}
    return blocks_pb2.LoadBlocksPart(block=block, data=data, **stated)


def arrive(
    parts: Sequence[blocks_pb2.LoadBlocksPart], into: Callable[[int], memoryview] | None = None
) -> list[bytes]:
    arrival = Arrival("team-a", source_of(), FOUND, 1, into)
    return [bytes(block.payload) for block in arrival.blocks(iter(parts))]


def test_whole_blocks_and_pieces_arrive_alike() -> None:
    pieces = [
        part(0, SENT[0]),
        part(1, SENT[1][:40], last=False, checksum=""),
        part(1, SENT[1][40:], offset=40, checksum=text(SENT[1])),
        part(2, SENT[2]),
    ]
    assert arrive(pieces) == SENT


FLIPPED = SENT[0][:-1] + b"\x01"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        pytest.param(
            [part(0, FLIPPED, checksum=text(SENT[0]))], Reason.CHECKSUM_MISMATCH, id="hit-on-its-way"
        ),
        pytest.param([part(0, FLIPPED)], Reason.CHECKSUM_MISMATCH, id="other-bytes-well-hashed"),
        pytest.param([part(0, SENT[0], checksum="xxh3:1")], Reason.CHECKSUM_MISMATCH, id="no-checksum"),
        pytest.param([part(0, SENT[0][:50])], Reason.SHORT_COPY, id="short"),
        pytest.param([part(0, SENT[0] + b"x")], Reason.SHORT_COPY, id="long"),
        pytest.param([part(1, SENT[1])], Reason.SHORT_COPY, id="another-block"),
        pytest.param([part(0, SENT[0], offset=10)], Reason.SHORT_COPY, id="a-hole"),
        pytest.param(
            [part(0, SENT[0]), part(1, SENT[1]), part(2, SENT[2]), part(3, SENT[0])],
            Reason.SHORT_COPY,
            id="more-than-was-found",
        ),
        pytest.param([part(0, SENT[0])], Reason.SHORT_COPY, id="fewer-than-were-found"),
        pytest.param(
            [part(0, SENT[0]), part(1, SENT[1]), part(2, SENT[2][:5], last=False, checksum="")],
            Reason.SHORT_COPY,
            id="ends-inside-a-block",
        ),
        pytest.param(
            [blocks_pb2.LoadBlocksPart(error=common_pb2.ErrorDetail(reason=common_pb2.FETCH_LATE))],
            Reason.FETCH_LATE,
            id="a-refusal",
        ),
    ],
)
def test_what_is_not_what_was_found_is_not_handed_over(
    parts: list[blocks_pb2.LoadBlocksPart], reason: Reason
) -> None:
    with pytest.raises(KvtierError) as refused:
        arrive(parts)
    assert refused.value.reason is reason


def test_memory_of_another_length_is_refused() -> None:
    with pytest.raises(KvtierError) as refused:
        arrive([part(0, SENT[0])], lambda index: memoryview(bytearray(99)))
    assert refused.value.reason is Reason.PAYLOAD_GEOMETRY


def test_what_was_verified_before_a_refusal_is_kept() -> None:
    arrival = Arrival("team-a", source_of(), FOUND, 1, None)
    blocks = arrival.blocks(iter([part(0, SENT[0]), part(1, FLIPPED)]))
    assert bytes(next(blocks).payload) == SENT[0]
    with pytest.raises(KvtierError):
        next(blocks)
