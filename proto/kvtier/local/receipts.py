"""Answers of the local channel: a fixed record, the receipt in a compact form, or a typed refusal.

Why it exists: a receipt is three digests and a few numbers, and travels with each layer of each token. Its
compact form decodes to the same Receipt message: what the fixed record has no place for goes along as a
serialized Receipt, so a field that is new is never lost. It must not know who made the receipt.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.local.frames import HEADER, MAGIC, VERSION, Kind, MalformedError, header
from kvtier.v1 import attention_pb2, common_pb2

# tail bytes, layer, kind of the tail, exactness, arm, flags, sequence, step, output bytes, frontier, rows
# attended, snapshot generation, position epoch, peak buffer bytes, promised bytes, stall seconds, estimated
# omitted mass, hidden and exposed transfer seconds, and the digests of manifest, support and producer.
ANSWER = struct.Struct("<IiBBBB9q4d32s32s32s")
_RECEIPT, _ERROR = 0, 1
_HEADER_BYTES, _ANSWERS = HEADER.size, int(Kind.ANSWERS)
_SIMULATED, _MANIFEST, _SUPPORT, _PRODUCER = 1, 2, 4, 8
_PREFIX = "sha256:"
_NO_DIGEST = bytes(32)
_COUNTS = struct.Struct("<HHHH")
_CACHED_NAMES = 256
# Receipt's fields that the record and its names hold; the others travel serialized.
FIXED_FIELDS = frozenset(
    {
        *("exactness", "arm", "manifest_digest", "support_digest", "frontier", "rows_attended"),
        *("bytes_by_tier", "plan", "simulated", "stall_seconds", "producer_digest"),
        *("estimated_omitted_mass", "fallback", "snapshot_generation", "position_epoch"),
        *("plan_kind", "hidden_transfer_seconds", "exposed_transfer_seconds"),
        *("peak_buffer_bytes", "promised_bytes"),
    }
)


# Not frozen, as AnswerRecord: made for every layer of every token.
@dataclass(slots=True)
class ReceiptFacts:
    """Receipt's fixed fields. tiers: names with bytes read; extra: a serialized Receipt of all others."""

    exactness: int
    arm: int
    manifest_digest: str
    support_digest: str
    producer_digest: str
    frontier: int
    rows_attended: int
    tiers: tuple[tuple[str, int], ...]
    plan: tuple[str, ...]
    simulated: bool
    stall_seconds: float
    estimated_omitted_mass: float
    fallback: str
    snapshot_generation: int
    position_epoch: int
    plan_kind: str
    hidden_transfer_seconds: float
    exposed_transfer_seconds: float
    peak_buffer_bytes: int
    promised_bytes: int
    extra: bytes = b""


class _Digests(dict[str, bytes | None]):
    """Digests by their text, as `_raw`: nearly all are asked for again and again, a support's by all layers
    of a step."""

    def __missing__(self, text: str) -> bytes | None:
        if len(self) >= _CACHED_NAMES:
            self.clear()
        found = self[text] = _raw(text)
        return found


class AnswerPacker:
    """Packs answers; remembers the names that it packed last, since they hardly ever change."""

    def __init__(self) -> None:
        # With what packs the tiers' bytes.
        self._names: dict[tuple[object, ...], tuple[bytes, Callable[..., bytes]]] = {}
        self._digests = _Digests()

    def answer(self, sequence: int, step: int, layer: int, out_bytes: int, receipt: ReceiptFacts) -> bytes:
        """One record with its receipt; the output lies in the ring."""
        r = receipt
        return self.pack(
            sequence,
            step,
            layer,
            out_bytes,
            r.exactness,
            r.arm,
            r.simulated,
            r.manifest_digest,
            r.support_digest,
            r.producer_digest,
            r.frontier,
            r.rows_attended,
            r.snapshot_generation,
            r.position_epoch,
            r.peak_buffer_bytes,
            r.promised_bytes,
            r.stall_seconds,
            r.estimated_omitted_mass,
            r.hidden_transfer_seconds,
            r.exposed_transfer_seconds,
            dict(r.tiers),
            r.plan,
            r.fallback,
            r.plan_kind,
            r.extra,
        )

    def pack(
        self,
        sequence: int,
        step: int,
        layer: int,
        out_bytes: int,
        exactness: int,
        arm: int,
        simulated: bool,
        manifest_digest: str,
        support_digest: str,
        producer_digest: str,
        frontier: int,
        rows_attended: int,
        snapshot_generation: int,
        position_epoch: int,
        peak_buffer_bytes: int,
        promised_bytes: int,
        stall_seconds: float,
        estimated_omitted_mass: float,
        hidden_transfer_seconds: float,
        exposed_transfer_seconds: float,
        bytes_by_tier: Mapping[str, int],
        plan: tuple[str, ...],
        fallback: str,
        plan_kind: str,
        extra: bytes = b"",
    ) -> bytes:
        """As `answer`, without an object in between, since it is made for every layer of every token."""
        flags = _SIMULATED if simulated else 0
        known = self._digests
        manifest, support, producer = known[manifest_digest], known[support_digest], known[producer_digest]
        if manifest is None or support is None or producer is None:
            texts = attention_pb2.Receipt()
            if manifest is None:
                manifest, texts.manifest_digest = _NO_DIGEST, manifest_digest
            else:
                flags |= _MANIFEST
            if support is None:
                support, texts.support_digest = _NO_DIGEST, support_digest
            else:
                flags |= _SUPPORT
            if producer is None:
                producer, texts.producer_digest = _NO_DIGEST, producer_digest
            else:
                flags |= _PRODUCER
            # Merged by concatenation: fields of one message.
            extra += texts.SerializeToString()
        else:
            flags |= _MANIFEST | _SUPPORT | _PRODUCER
        key = (tuple(bytes_by_tier), plan, fallback, plan_kind)
        names, pack_tail = self._names.get(key) or self._packed_names(key)
        tail = names + pack_tail(*bytes_by_tier.values()) + extra
        record = ANSWER.pack(
            len(tail),
            layer,
            _RECEIPT,
            exactness,
            arm,
            flags,
            sequence,
            step,
            out_bytes,
            frontier,
            rows_attended,
            snapshot_generation,
            position_epoch,
            peak_buffer_bytes,
            promised_bytes,
            stall_seconds,
            estimated_omitted_mass,
            hidden_transfer_seconds,
            exposed_transfer_seconds,
            manifest,
            support,
            producer,
        )
        return record + tail

    def _packed_names(
        self, key: tuple[tuple[str, ...], tuple[str, ...], str, str]
    ) -> tuple[bytes, Callable[..., bytes]]:
        """Of tiers, plan, fallback and the plan's kind."""
        if len(self._names) >= _CACHED_NAMES:
            self._names.clear()
        tiers, plan, fallback, plan_kind = key
        encoded = [text.encode() for text in (*tiers, *plan, fallback, plan_kind)]
        body = b"".join(struct.pack("<H", len(text)) + text for text in encoded)
        counts = _COUNTS.pack(len(tiers), len(plan), len(body), 0)
        found = self._names[key] = counts + body, struct.Struct(f"<{len(tiers)}q").pack
        return found


def refusal(sequence: int, step: int, layer: int, detail: common_pb2.ErrorDetail) -> bytes:
    """One record that carries an ErrorDetail and no output."""
    tail = detail.SerializeToString()
    numbers = (sequence, step, *[0] * 7, *[0.0] * 4, _NO_DIGEST, _NO_DIGEST, _NO_DIGEST)
    return ANSWER.pack(len(tail), layer, _ERROR, 0, 0, 0, *numbers) + tail


def pack_answers(records: Sequence[bytes], clock_ns: int) -> bytes:
    if len(records) == 1:
        (record,) = records
        return HEADER.pack(MAGIC, VERSION, _ANSWERS, _HEADER_BYTES + len(record), 1, clock_ns) + record
    size = sum(map(len, records))
    return b"".join((header(Kind.ANSWERS, size, len(records), clock_ns), *records))


def pack_ended(detail: common_pb2.ErrorDetail, clock_ns: int) -> bytes:
    """Why the channel ends."""
    body = detail.SerializeToString()
    return header(Kind.ENDED, len(body), 1, clock_ns) + body


def unpack_ended(message: bytes | bytearray | memoryview, size: int) -> common_pb2.ErrorDetail:
    detail = common_pb2.ErrorDetail()
    try:
        detail.ParseFromString(bytes(message[HEADER.size : size]))
    except Exception as error:
        raise MalformedError(f"detail: {error}") from None
    return detail


@dataclass(slots=True)
class AnswerRecord:
    """One answer, decoded as far as its reader needs at once: `receipt` decodes the rest."""

    sequence: int
    step: int
    layer: int
    out_bytes: int
    error: common_pb2.ErrorDetail | None
    raw: bytes

    def receipt(self) -> attention_pb2.Receipt:
        """The same message that gRPC carries; MalformedError."""
        return decode_receipt(self.raw)


def unpack_answers(message: bytes | bytearray | memoryview, size: int, count: int) -> list[AnswerRecord]:
    """The records of an ANSWERS message whose header was read; MalformedError."""
    at = HEADER.size
    found = []
    view = memoryview(message)
    for _ in range(count):
        if at + ANSWER.size > size:
            raise MalformedError(f"length: {size} bytes hold no {count} answers")
        tail, layer, kind, _, _, _, sequence, step, out_bytes = _HEAD.unpack_from(message, at)
        end = at + ANSWER.size + tail
        if end > size:
            raise MalformedError("length: an answer ends after the message")
        error = None
        if kind == _ERROR:
            error = common_pb2.ErrorDetail()
            try:
                error.ParseFromString(bytes(message[at + ANSWER.size : end]))
            except Exception as wrong:
                raise MalformedError(f"detail: {wrong}") from None
        elif kind != _RECEIPT:
            raise MalformedError(f"tail: {kind}")
        found.append(AnswerRecord(sequence, step, layer, out_bytes, error, bytes(view[at:end])))
        at = end
    if at != size:
        raise MalformedError(f"length: {size - at} bytes after the last answer")
    return found


# The first fields of an answer, all that its reader needs at once; and with the header before them.
_HEAD = struct.Struct("<IiBBBB3q")
_ONE = struct.Struct(HEADER.format + _HEAD.format.removeprefix("<"))
# Of such a message, what a reader of one awaited answer compares: `LONE_ANSWER_IS`, bytes of the message,
# records, tail bytes, kind of the tail, sequence, output bytes.
LONE_ANSWER = struct.Struct("<8sII8xI4xB3xq8xq")
LONE_ANSWER_IS = struct.pack("<4sHH", MAGIC, VERSION, _ANSWERS)


def read_answer(message: memoryview, size: int) -> AnswerRecord | None:
    """The answer of a well-formed message of one that is no refusal; None of any other, which `read_header`
    and `unpack_answers` read or refuse."""
    if size < HEADER.size + ANSWER.size:
        return None
    magic, version, kind, length, count, _, tail, layer, has, _, _, _, sequence, step, out_bytes = (
        _ONE.unpack_from(message)
    )
    if (magic, version, kind, length, count) != (MAGIC, VERSION, _ANSWERS, size, 1) or has != _RECEIPT:
        return None
    if HEADER.size + ANSWER.size + tail != size:
        return None
    return AnswerRecord(sequence, step, layer, out_bytes, None, bytes(message[HEADER.size : size]))


def step_and_layer(raw: bytes) -> tuple[int, int]:
    """Of an answer's record."""
    _, layer, _, _, _, _, _, step, _ = _HEAD.unpack_from(raw)
    return step, layer


def decode_receipt(raw: bytes) -> attention_pb2.Receipt:
    """Of an answer's record with its tail; MalformedError."""
    (_, _, _, exactness, arm, flags, _, _, _, frontier, rows, snapshot, epoch, *more) = ANSWER.unpack_from(
        raw
    )
    peak, promised, stall, omitted, hidden, exposed, *digests = more
    receipt = attention_pb2.Receipt()
    try:
        at = _read_names(raw, receipt)
        receipt.MergeFromString(raw[at:])
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise MalformedError(f"receipt: {error}") from None
    except Exception as error:
        raise MalformedError(f"receipt: {error}") from None
    receipt.exactness = exactness
    receipt.arm = arm
    receipt.frontier = frontier
    receipt.rows_attended = rows
    receipt.snapshot_generation = snapshot
    receipt.position_epoch = epoch
    receipt.peak_buffer_bytes = peak
    receipt.promised_bytes = promised
    receipt.hidden_transfer_seconds = hidden
    receipt.exposed_transfer_seconds = exposed
    receipt.stall_seconds = stall
    receipt.estimated_omitted_mass = math.nan if math.isnan(omitted) else omitted
    receipt.simulated = bool(flags & _SIMULATED)
    for flag, name, digest in zip(
        (_MANIFEST, _SUPPORT, _PRODUCER),
        ("manifest_digest", "support_digest", "producer_digest"),
        digests,
        strict=True,
    ):
        if flags & flag:
            setattr(receipt, name, _PREFIX + digest.hex())
    return receipt


def _read_names(raw: bytes, receipt: attention_pb2.Receipt) -> int:
    """Reads names and bytes by tier into the receipt; where its extra bytes begin."""
    tiers: int
    plan: int
    body: int
    tiers, plan, body, _ = _COUNTS.unpack_from(raw, ANSWER.size)
    at = ANSWER.size + _COUNTS.size
    end = at + body
    texts = []
    while at < end:
        (length,) = struct.unpack_from("<H", raw, at)
        at += 2
        texts.append(raw[at : at + length].decode())
        at += length
    if at != end or len(texts) != tiers + plan + 2:
        raise IndexError("names")
    sizes = struct.unpack_from(f"<{tiers}q", raw, end)
    for name, size in zip(texts[:tiers], sizes, strict=True):
        receipt.bytes_by_tier[name] = size
    receipt.plan.extend(texts[tiers : tiers + plan])
    receipt.fallback, receipt.plan_kind = texts[-2:]
    return end + 8 * tiers


def _raw(digest: str) -> bytes | None:
    """The 32 bytes of a digest in its usual spelling, None of any other text."""
    if len(digest) != 71 or not digest.startswith(_PREFIX):
        return None
    try:
        raw = bytes.fromhex(digest[7:])
    except ValueError:
        return None
    # fromhex is lenient about case and blanks; what comes back must be the same text.
    return raw if raw.hex() == digest[7:] else None
