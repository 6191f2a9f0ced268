"""Messages of the local channel: a versioned header and fixed little-endian records.

Why it exists: at 30 layers a token a protobuf and a gRPC stream cost more than the attention. It packs and
unpacks and decides only well-formedness; it must not know a session, a ring's memory or a socket. Layout:
docs/reference/wire.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"KVLC"
VERSION = 1
# Of a message of frames; a longer batch travels as several.
MAX_FRAMES = 32
MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 256 * 1024
ALIGNMENT = 64
TOKEN_BYTES = 32
TAG_BYTES = 16
# Where a namespace's socket lies under the agent's folder of channels.
SOCKET_NAME = "attend.sock"


class Kind(IntEnum):
    """Requests are below 16."""

    HELLO = 1
    ATTACH = 2
    FRAMES = 3
    WELCOME = 16
    ATTACHED = 17
    ANSWERS = 18
    ENDED = 19


_KINDS = {int(kind): kind for kind in Kind}
_FRAMES = int(Kind.FRAMES)

# magic, version, kind, bytes of the whole message, records, clock: nanoseconds of the sender's
# CLOCK_MONOTONIC.
HEADER = struct.Struct("<4sHHIIq")
# token, bytes of each ring.
_HELLO = struct.Struct("<32sQ")
# token.
_ATTACH = struct.Struct("<32s")
# attachment, the token of the session's next attachment, bytes of each ring.
_WELCOME = struct.Struct("<II32sQ")
# attachment, flags, extra bytes, layer, rows, queries, generation, step, first row, first query, committed
# frontier, deadline_ms, position epoch, sequence, offset in the ring, session tag, boot tag.
FRAME = struct.Struct("<HHIiII9q16s16s")

# Whose input the hidden states are, hidden states, surprisals, 0, row of the first surprisal.
EVIDENCE = struct.Struct("<iIIIq")

# A whole message of one frame that has neither evidence nor extra bytes: what a token of one sequence sends.
_ONE = struct.Struct(HEADER.format + FRAME.format.removeprefix("<"))

# Of such a message, what is not the same in every frame of a session that is one query and one row at the
# ring's first byte: clock, attachment, flags, 0, layer, rows, queries, and the numbers up to the sequence.
LONE_FRAME = struct.Struct("<qHHIiII8q")
LONE_AT = HEADER.size - 8
# The same message as its reader takes it: `LONE_MESSAGE_IS`, clock, and the frame's fields.
LONE_MESSAGE = struct.Struct("<16sq" + FRAME.format.removeprefix("<"))
LONE_MESSAGE_IS = HEADER.pack(MAGIC, VERSION, _FRAMES, LONE_MESSAGE.size, 1, 0)[:LONE_AT]

# A frame's flags: the next layer of its step comes next, with rows to the same frontier; it has evidence.
_FOLLOWS, _EVIDENCE = 1, 2


class MalformedError(ValueError):
    """Bytes that no peer of this version sends; the text names the field."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a channel and attaches its first session. The staging ring's descriptor comes with it."""

    token: bytes
    ring_bytes: int


@dataclass(frozen=True, slots=True)
class Attached:
    """`attachment` names the session in frames of this channel; `next_token` attaches it again elsewhere."""

    attachment: int
    next_token: bytes
    ring_bytes: int


@dataclass(slots=True)
class EvidenceRecord:
    """FrameEvidence without its numbers. hidden: states float32 [hidden_size] behind q; surprisals: float64
    numbers behind those, from the next multiple of 8 of the frame's bytes on."""

    hidden_layer: int
    hidden: int
    surprisals: int
    surprisal_first: int


@dataclass(slots=True)
class FrameRecord:
    """AttendFrame without its tensors: k, v and q of `rows` and `queries` lie at `offset` of the staging
    ring, in this order and C-contiguous, and behind them what `evidence` counts; the output goes to `offset`
    of the answers' ring. `extra`: a serialized AttendFrame of the fields that the record has no place for."""

    attachment: int
    layer: int
    rows: int
    queries: int
    generation: int
    step: int
    first_row_position: int
    first_query_position: int
    committed_frontier: int
    deadline_ms: int
    position_epoch: int
    sequence: int
    offset: int
    session_tag: bytes
    boot_tag: bytes
    next_layer_follows: bool = False
    evidence: EvidenceRecord | None = None
    extra: bytes = b""

    @property
    def lowest(self) -> int:
        """Of the numbers that may not be negative."""
        return min(
            self.step,
            self.first_row_position,
            self.first_query_position,
            self.committed_frontier,
            self.deadline_ms,
            self.position_epoch,
        )


def header(kind: Kind, size: int, count: int, clock_ns: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, kind, HEADER.size + size, count, clock_ns)


def read_header(message: bytes | bytearray | memoryview, size: int) -> tuple[Kind, int, int]:
    """Kind, records and the sender's clock of a message of `size` bytes; MalformedError."""
    if size < HEADER.size:
        raise MalformedError(f"length: {size} bytes are no header")
    magic, version, kind, length, count, clock_ns = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise MalformedError("magic")
    if version != VERSION:
        raise MalformedError(f"version: {version} is not {VERSION}")
    if length != size:
        raise MalformedError(f"length: the header says {length}, {size} bytes came")
    known = _KINDS.get(kind)
    if known is None:
        raise MalformedError(f"kind: {kind}")
    return known, count, clock_ns


def pack_hello(hello: Hello, clock_ns: int) -> bytes:
    body = _HELLO.pack(hello.token, hello.ring_bytes)
    return header(Kind.HELLO, len(body), 1, clock_ns) + body


def unpack_hello(message: bytes | bytearray | memoryview, size: int) -> Hello:
    _exact(size, _HELLO.size)
    return Hello(*_HELLO.unpack_from(message, HEADER.size))


def pack_attach(token: bytes, clock_ns: int) -> bytes:
    return header(Kind.ATTACH, _ATTACH.size, 1, clock_ns) + _ATTACH.pack(token)


def unpack_attach(message: bytes | bytearray | memoryview, size: int) -> bytes:
    _exact(size, _ATTACH.size)
    token: bytes = _ATTACH.unpack_from(message, HEADER.size)[0]
    return token


def pack_attached(kind: Kind, attached: Attached, clock_ns: int) -> bytes:
    body = _WELCOME.pack(attached.attachment, 0, attached.next_token, attached.ring_bytes)
    return header(kind, len(body), 1, clock_ns) + body


def unpack_attached(message: bytes | bytearray | memoryview, size: int) -> Attached:
    _exact(size, _WELCOME.size)
    attachment, _, token, ring_bytes = _WELCOME.unpack_from(message, HEADER.size)
    return Attached(attachment, token, ring_bytes)


def pack_frames(frames: Sequence[FrameRecord], clock_ns: int) -> bytes:
    """MalformedError for a number that has no place in its field, or too many frames."""
    if len(frames) == 1 and frames[0].evidence is None and not frames[0].extra:
        return _packed_frame(frames[0], clock_ns)
    if not 0 < len(frames) <= MAX_FRAMES:
        raise MalformedError(f"count: {len(frames)} frames in a message of 1 to {MAX_FRAMES}")
    records = []
    extras = []
    size = 0
    for f in frames:
        try:
            record = FRAME.pack(
                f.attachment,
                (_FOLLOWS if f.next_layer_follows else 0) | (0 if f.evidence is None else _EVIDENCE),
                len(f.extra),
                f.layer,
                f.rows,
                f.queries,
                f.generation,
                f.step,
                f.first_row_position,
                f.first_query_position,
                f.committed_frontier,
                f.deadline_ms,
                f.position_epoch,
                f.sequence,
                f.offset,
                f.session_tag,
                f.boot_tag,
            )
            if f.evidence is not None:
                e = f.evidence
                counted = EVIDENCE.pack(e.hidden_layer, e.hidden, e.surprisals, 0, e.surprisal_first)
                extras.append(counted)
                size += EVIDENCE.size
        except struct.error as error:
            raise MalformedError(str(error)) from None
        records.append(record)
        size += FRAME.size
        if f.extra:
            extras.append(f.extra)
            size += len(f.extra)
    return b"".join((header(Kind.FRAMES, size, len(frames), clock_ns), *records, *extras))


def _packed_frame(f: FrameRecord, clock_ns: int) -> bytes:
    try:
        return _ONE.pack(
            MAGIC,
            VERSION,
            _FRAMES,
            _ONE.size,
            1,
            clock_ns,
            f.attachment,
            _FOLLOWS if f.next_layer_follows else 0,
            0,
            f.layer,
            f.rows,
            f.queries,
            f.generation,
            f.step,
            f.first_row_position,
            f.first_query_position,
            f.committed_frontier,
            f.deadline_ms,
            f.position_epoch,
            f.sequence,
            f.offset,
            f.session_tag,
            f.boot_tag,
        )
    except struct.error as error:
        raise MalformedError(str(error)) from None


def lone_message(session_tag: bytes, boot_tag: bytes) -> bytes:
    """A message of one frame for `LONE_FRAME` to complete at `LONE_AT`."""
    return _ONE.pack(MAGIC, VERSION, _FRAMES, _ONE.size, 1, *[0] * 16, session_tag, boot_tag)


def read_frame(message: bytes | bytearray | memoryview, size: int) -> tuple[FrameRecord, int] | None:
    """The frame and the sender's clock, of a well-formed message of one frame that has neither evidence nor
    extra bytes; None of any other, which `read_header` and `unpack_frames` read or refuse."""
    if size != _ONE.size:
        return None
    magic, version, kind, length, count, clock_ns, attachment, flags, extra, *rest = _ONE.unpack_from(message)
    if (magic, version, kind, length, count, extra) != (MAGIC, VERSION, _FRAMES, size, 1, 0):
        return None
    if flags & ~_FOLLOWS:
        return None
    record = FrameRecord(attachment, *rest)
    record.next_layer_follows = flags == _FOLLOWS
    return record, clock_ns


def unpack_frames(message: bytes | bytearray | memoryview, size: int, count: int) -> list[FrameRecord]:
    """The records of a FRAMES message whose header was read; MalformedError."""
    if not 0 < count <= MAX_FRAMES:
        raise MalformedError(f"count: {count} frames in a message of 1 to {MAX_FRAMES}")
    at = HEADER.size
    end = at + count * FRAME.size
    if end > size:
        raise MalformedError(f"length: {size} bytes hold no {count} frames")
    found = []
    extra_at = end
    for _ in range(count):
        attachment, flags, extra, *rest = FRAME.unpack_from(message, at)
        at += FRAME.size
        record = FrameRecord(attachment, *rest)
        if flags:
            if flags & ~(_FOLLOWS | _EVIDENCE):
                raise MalformedError(f"flags: {flags:#x}")
            record.next_layer_follows = bool(flags & _FOLLOWS)
            if flags & _EVIDENCE:
                record.evidence = _evidence(message, extra_at, size)
                extra_at += EVIDENCE.size
        if extra:
            if extra_at + extra > size:
                raise MalformedError("length: extra bytes end after the message")
            record.extra = bytes(message[extra_at : extra_at + extra])
            extra_at += extra
        found.append(record)
    if extra_at != size:
        raise MalformedError(f"length: {size - extra_at} bytes after the last frame")
    return found


def _evidence(message: bytes | bytearray | memoryview, at: int, size: int) -> EvidenceRecord:
    if at + EVIDENCE.size > size:
        raise MalformedError("length: an evidence record ends after the message")
    hidden_layer, hidden, surprisals, zero, first = EVIDENCE.unpack_from(message, at)
    if zero:
        raise MalformedError(f"evidence: {zero} where 0 stands")
    return EvidenceRecord(hidden_layer, hidden, surprisals, first)


def evidence_place(before: int, hidden_bytes: int) -> int:
    """Where surprisals begin in a frame whose k, v and q have `before` bytes."""
    return -(-(before + hidden_bytes) // 8) * 8


def tag(text: str) -> bytes:
    """The 16 bytes that stand for a session's or a boot's name in frames."""
    return hashlib.sha256(text.encode()).digest()[:TAG_BYTES]


def spans_overlap(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether any two of the half-open spans share a byte."""
    reached = -1
    for start, end in sorted(spans):
        if start < reached:
            return True
        reached = max(reached, end)
    return False


def aligned(size: int) -> int:
    """The next multiple of the rings' alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _exact(size: int, body: int) -> None:
    if size != HEADER.size + body:
        raise MalformedError(f"length: {size} is not {HEADER.size + body}")
