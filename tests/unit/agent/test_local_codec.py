"""The local channel's bytes: what goes in comes out, a receipt says what gRPC's says, and junk is refused."""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.local import frames as wire
from kvtier.local import memory
from kvtier.local.receipts import (
    ANSWER,
    FIXED_FIELDS,
    AnswerPacker,
    ReceiptFacts,
    pack_answers,
    refusal,
    unpack_answers,
)
from kvtier.v1 import attention_pb2, common_pb2
from kvtier_agent.cachesession import FrameAnswer
from kvtier_agent.convert import answer_message, packed_answer
from kvtier_agent.engine_port import ExactnessClass, FrameReceipt, FrameResult
from kvtier_core.receipts import SelectionFacts
from kvtier_core.release.enforcement import ServedArm

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
uint32 = st.integers(0, (1 << 32) - 1)
names = st.text(max_size=20)
digests = st.one_of(
    st.binary(min_size=32, max_size=32).map(lambda raw: "sha256:" + raw.hex()),
    st.sampled_from(["", "sha256:m", "sha256:" + "AB" * 32, "sha256:" + "0" * 63 + " ", "x" * 71]),
)
evidence = st.builds(
    wire.EvidenceRecord,
    hidden_layer=st.integers(-(1 << 31), (1 << 31) - 1),
    hidden=uint32,
    surprisals=uint32,
    surprisal_first=int64,
)
frames = st.builds(
    wire.FrameRecord,
    attachment=st.integers(0, 65535),
    layer=st.integers(-(1 << 31), (1 << 31) - 1),
    rows=uint32,
    queries=uint32,
    generation=int64,
    step=int64,
    first_row_position=int64,
    first_query_position=int64,
    committed_frontier=int64,
    deadline_ms=int64,
    position_epoch=int64,
    sequence=int64,
    offset=int64,
    session_tag=st.binary(min_size=16, max_size=16),
    boot_tag=st.binary(min_size=16, max_size=16),
    next_layer_follows=st.booleans(),
    evidence=st.none() | evidence,
    extra=st.binary(max_size=40),
)
receipts = st.builds(
    ReceiptFacts,
    exactness=st.integers(0, 4),
    arm=st.integers(0, 2),
    manifest_digest=digests,
    support_digest=digests,
    producer_digest=digests,
    frontier=int64,
    rows_attended=int64,
    tiers=st.dictionaries(names, int64, max_size=4).map(lambda made: tuple(made.items())),
    plan=st.lists(names, max_size=4).map(tuple),
    simulated=st.booleans(),
    stall_seconds=st.floats(allow_nan=False),
    estimated_omitted_mass=st.floats(),
    fallback=names,
    snapshot_generation=int64,
    position_epoch=int64,
    plan_kind=names,
    hidden_transfer_seconds=st.floats(allow_nan=False),
    exposed_transfer_seconds=st.floats(allow_nan=False),
    peak_buffer_bytes=int64,
    promised_bytes=int64,
)


@given(st.lists(frames, min_size=1, max_size=wire.MAX_FRAMES), int64)
def test_frames_come_out_as_they_went_in(records: list[wire.FrameRecord], clock_ns: int) -> None:
    message = wire.pack_frames(records, clock_ns)
    kind, count, clock = wire.read_header(message, len(message))
    assert (kind, count, clock) == (wire.Kind.FRAMES, len(records), clock_ns)
    assert wire.unpack_frames(message, len(message), count) == records


@given(st.lists(receipts, min_size=1, max_size=3))
def test_receipts_come_out_as_they_went_in(made: list[ReceiptFacts]) -> None:
    packer = AnswerPacker()
    message = pack_answers([packer.answer(i, i + 1, -i, 7, one) for i, one in enumerate(made)], 0)
    _, count, _ = wire.read_header(message, len(message))
    for index, (record, facts) in enumerate(
        zip(unpack_answers(message, len(message), count), made, strict=True)
    ):
        assert (record.sequence, record.step, record.layer) == (index, index + 1, -index)
        assert (record.out_bytes, record.error) == (7, None)
        assert str(record.receipt()) == str(plain(facts))


def plain(facts: ReceiptFacts) -> attention_pb2.Receipt:
    """The message itself."""
    fields = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    del fields["extra"], fields["tiers"]
    receipt = attention_pb2.Receipt(**{**fields, "bytes_by_tier": dict(facts.tiers)})
    if math.isnan(facts.estimated_omitted_mass):
        receipt.estimated_omitted_mass = math.nan
    return receipt


def test_every_field_of_a_receipt_has_its_place() -> None:
    """A new field of Receipt needs one in the record, or travels in the extra bytes and costs a parse, as
    what a selector says does, and what was read for others."""
    assert set(attention_pb2.Receipt.DESCRIPTOR.fields_by_name) == FIXED_FIELDS | {
        "selection",
        "shared_bytes_by_tier",
    }


VALUES: Mapping[type, Any] = {str: "text", int: 7, float: 0.25, bool: True}


def full_selection() -> SelectionFacts:
    """Every field of its own."""
    made: dict[str, Any] = {}
    for number, field in enumerate(dataclasses.fields(SelectionFacts), 1):
        kinds = {"str": f"text-{number}", "int": number, "float": number / 8, "bool": True}
        made[field.name] = kinds[str(field.type)]
    return SelectionFacts(**made)


def full_receipt() -> FrameReceipt:
    """Every field of its own, so that one that is lost on the way is seen."""
    made: dict[str, Any] = {}
    for number, field in enumerate(dataclasses.fields(FrameReceipt)):
        made[field.name] = {
            "exactness": ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY,
            "bytes_by_tier": {"dram": 5, "nvme": 1 << 40},
            "shared_bytes_by_tier": {"nvme": 1 << 39},
            "plan": ("cpu:partial", "nvme:staged"),
            "simulated": True,
            # For the agent's own telemetry.
            "failed_plans": (("headGroups", "DEADLINE"),),
            "selection": full_selection(),
        }.get(field.name)
        if made[field.name] is not None:
            continue
        if field.type == "str":
            made[field.name] = f"text-{number}"
        elif field.type == "int":
            made[field.name] = 1000 + number
        elif field.type == "float":
            made[field.name] = number / 8
        else:
            raise AssertionError(f"{field.name}: {field.type}")
    return FrameReceipt(**made)


def test_the_compact_receipt_decodes_to_the_message_that_grpc_carries() -> None:
    answer = FrameAnswer(
        FrameResult(b"\0" * 8, full_receipt(), None, False), ServedArm.CANDIDATE, "why", None
    )
    frame = attention_pb2.AttendFrame(sequence=3, step=4, layer=5)
    message = pack_answers([packed_answer(AnswerPacker(), 3, 4, 5, 8, answer)], 0)
    [record] = unpack_answers(message, len(message), 1)
    want = answer_message(frame, answer).receipt
    assert str(record.receipt()) == str(want)
    missing = {name for name in FIXED_FIELDS if not getattr(want, name)}
    assert not missing, "a field that no answer ever sets"
    assert set(attention_pb2.SelectionReceipt.DESCRIPTOR.fields_by_name) == {
        field.name for field in dataclasses.fields(SelectionFacts)
    }
    assert {
        name for name in full_selection().__dataclass_fields__ if not getattr(want.selection, name)
    } == set()


def test_a_refusal_is_the_whole_detail() -> None:
    detail = common_pb2.ErrorDetail(
        reason=common_pb2.QUEUE_FULL, message="full", retry_after_ms=50, facts={"bound": "4"}
    )
    message = pack_answers([refusal(1, 2, 3, detail)], 0)
    [record] = unpack_answers(message, len(message), 1)
    assert record.error == detail
    assert record.out_bytes == 0


@settings(max_examples=300)
@given(st.binary(max_size=400), st.booleans(), st.integers(0, 40))
def test_junk_is_malformed_and_nothing_else(body: bytes, answers: bool, count: int) -> None:
    kind = wire.Kind.ANSWERS if answers else wire.Kind.FRAMES
    message = wire.header(kind, len(body), count, 0) + body
    wire.read_header(message, len(message))
    unpack: Any = unpack_answers if answers else wire.unpack_frames
    try:
        found: Sequence[Any] = unpack(message, len(message), count)
        for one in found:
            if answers and one.error is None:
                one.receipt()
    except wire.MalformedError:
        pass


@given(receipts, st.data())
def test_a_receipt_with_a_flipped_byte_is_malformed_or_another_receipt(
    facts: ReceiptFacts, data: st.DataObject
) -> None:
    raw = bytearray(AnswerPacker().answer(1, 1, 1, 0, facts))
    at = data.draw(st.integers(ANSWER.size, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    message = pack_answers([bytes(raw)], 0)
    try:
        for record in unpack_answers(message, len(message), 1):
            record.receipt()
    except wire.MalformedError:
        pass


@pytest.mark.parametrize(
    ("count", "change"),
    [
        pytest.param(0, {}, id="none"),
        pytest.param(wire.MAX_FRAMES + 1, {}, id="too-many"),
        pytest.param(1, {"step": 1 << 63}, id="too-large"),
        pytest.param(1, {"rows": -1}, id="negative-rows"),
    ],
)
def test_what_has_no_place_is_not_packed(count: int, change: dict[str, int]) -> None:
    record = wire.FrameRecord(0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, b"", b"")
    for name, value in change.items():
        setattr(record, name, value)
    with pytest.raises(wire.MalformedError):
        wire.pack_frames([record] * count, 0)


def with_evidence(**change: int) -> bytes:
    """A message of one frame with evidence."""
    record = wire.FrameRecord(0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, bytes(16), bytes(16))
    fields = {"hidden_layer": 1, "hidden": 2, "surprisals": 3, "surprisal_first": 0, **change}
    record.evidence = wire.EvidenceRecord(**fields)
    return wire.pack_frames([record], 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda m: m[: -wire.EVIDENCE.size], "evidence record ends after", id="cut-off"),
        pytest.param(lambda m: m[:-1], "evidence record ends after", id="short"),
        pytest.param(lambda m: m + b"\0", "bytes after the last frame", id="longer"),
        pytest.param(lambda m: m[:-12] + b"\1" + m[-11:], "where 0 stands", id="not-zero"),
        pytest.param(lambda m: m[:26] + b"\4\0" + m[28:], "flags: 0x4", id="flag-of-nobody"),
    ],
)
def test_evidence_that_no_peer_packs_is_malformed(change: Callable[[bytes], bytes], words: str) -> None:
    message = change(with_evidence(surprisal_first=4))
    with pytest.raises(wire.MalformedError, match=words):
        wire.unpack_frames(message, len(message), 1)


def test_surprisals_lie_behind_states_at_a_multiple_of_eight() -> None:
    assert [wire.evidence_place(4 * n, 4) for n in range(4)] == [8, 8, 16, 16]


@pytest.mark.parametrize(
    ("spans", "overlap"),
    [
        pytest.param([(0, 4), (4, 8)], False, id="side-by-side"),
        pytest.param([(4, 8), (0, 5)], True, id="by-one"),
        pytest.param([(0, 100), (10, 20), (30, 40)], True, id="inside"),
        pytest.param([(0, 100), (10, 20), (150, 160)], True, id="inside-and-far"),
        pytest.param([(0, 1)], False, id="alone"),
    ],
)
def test_spans_overlap(spans: list[tuple[int, int]], overlap: bool) -> None:
    assert wire.spans_overlap(spans) is overlap


def test_records_have_the_sizes_that_the_reference_states() -> None:
    assert (wire.HEADER.size, wire.FRAME.size, ANSWER.size) == (24, 124, 212)
    assert wire.EVIDENCE.size == 24
    assert struct.calcsize("<4sHHIIq") == wire.HEADER.size


def test_memory_of_a_peer_is_mapped_read_only_and_of_its_size() -> None:
    descriptor, mapped = memory.create("test", 8192, others_read_only=True)
    try:
        mapped[:3] = b"abc"
        with memory.map_checked(descriptor, 8192, must_be_read_only=True) as view:
            assert view[:3] == b"abc"
            with pytest.raises(TypeError):
                view[0] = 1  # type: ignore[assignment]
        with pytest.raises(memory.UnsafeMemoryError, match="announced"):
            memory.map_checked(descriptor, 4096, must_be_read_only=True)
    finally:
        mapped.close()
        os.close(descriptor)


def test_memory_that_others_may_write_is_no_answers_ring() -> None:
    descriptor, mapped = memory.create("test", 4096, others_read_only=False)
    try:
        with pytest.raises(memory.UnsafeMemoryError, match="lack 0x10"):
            memory.map_checked(descriptor, 4096, must_be_read_only=True)
    finally:
        mapped.close()
        os.close(descriptor)
