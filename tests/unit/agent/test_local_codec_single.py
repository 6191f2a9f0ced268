"""A message of one is read at once, or left to those who read and refuse any: never read otherwise."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.local import frames as wire
from kvtier.local.receipts import AnswerPacker, pack_answers, read_answer, refusal, unpack_answers
from kvtier.v1 import common_pb2
from tests.unit.agent.test_local_codec import frames, int64, receipts

lone = frames.map(lambda record: replace(record, evidence=None, extra=b""))


def read_frames(message: bytes) -> tuple[list[wire.FrameRecord], int] | str:
    """As a channel without the short way: the records and the clock, or what is malformed."""
    try:
        kind, count, clock_ns = wire.read_header(message, len(message))
        if kind is not wire.Kind.FRAMES:
            return kind.name
        return wire.unpack_frames(message, len(message), count), clock_ns
    except wire.MalformedError as error:
        return str(error)


def plain(record: wire.FrameRecord) -> bool:
    return record.evidence is None and not record.extra


@given(frames, int64)
def test_a_frame_alone_is_packed_and_read_as_among_others(record: wire.FrameRecord, clock_ns: int) -> None:
    message = wire.pack_frames([record], clock_ns)
    assert read_frames(message) == ([record], clock_ns)
    assert wire.read_frame(message, len(message)) == ((record, clock_ns) if plain(record) else None)
    pair = wire.pack_frames([record, record], clock_ns)
    assert wire.read_frame(pair, len(pair)) is None
    first = pair[wire.HEADER.size : wire.HEADER.size + wire.FRAME.size]
    assert first == message[wire.HEADER.size : wire.HEADER.size + wire.FRAME.size]


@settings(max_examples=150)
@given(lone, st.integers(0, 23 + wire.FRAME.size), st.integers(1, 255))
@example(wire.FrameRecord(0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, bytes(16), bytes(16)), 26, 4)
def test_a_frame_with_a_flipped_byte_is_read_as_ever(record: wire.FrameRecord, at: int, flip: int) -> None:
    message = bytearray(wire.pack_frames([record], 7))
    message[at] ^= flip
    found, usual = wire.read_frame(bytes(message), len(message)), read_frames(bytes(message))
    if found is None:
        assert isinstance(usual, str) or not plain(usual[0][0])
    else:
        assert usual == ([found[0]], found[1])


@given(lone, st.integers(-30, 30).filter(bool))
def test_a_frame_of_another_length_is_left_to_others(record: wire.FrameRecord, more: int) -> None:
    message = wire.pack_frames([record], 7)
    message = message + bytes(more) if more > 0 else message[:more]
    assert wire.read_frame(message, len(message)) is None


@settings(max_examples=150)
@given(receipts, st.integers(0, 1 << 20), st.integers(0, 255))
def test_an_answer_alone_is_read_as_among_others(facts: object, place: int, flip: int) -> None:
    message = bytearray(pack_answers([AnswerPacker().answer(3, 4, 5, 6, facts)], 0))  # type: ignore[arg-type]
    message[place % len(message)] ^= flip
    found = read_answer(memoryview(message), len(message))
    try:
        kind, count, _ = wire.read_header(message, len(message))
        usual = unpack_answers(message, len(message), count) if kind is wire.Kind.ANSWERS else []
    except wire.MalformedError:
        usual = []
    assert ([] if found is None else [found]) == [one for one in usual if one.error is None]
    if not flip:
        assert found is not None and len(usual) == 1


def test_a_refusal_and_a_pair_are_left_to_others() -> None:
    detail = common_pb2.ErrorDetail(reason=common_pb2.DEADLINE, message="late")
    for records in ([refusal(1, 2, 3, detail)], [refusal(1, 2, 3, detail)] * 2, []):
        message = pack_answers(records, 0)
        assert read_answer(memoryview(message), len(message)) is None
