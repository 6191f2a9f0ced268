"""The local wire: small fixed messages over a Unix socket, tensors in shared memory.

It exists because on one node gRPC costs more than a layer's attention. It must not know blocks, steps or how
a lost connection is replaced.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.local import frames as wire
from kvtier.local import memory
from kvtier.local.looking import Receiver, compiled, seats
from kvtier.local.patience import Bounds, Patience
from kvtier.local.receipts import AnswerRecord, decode_receipt, read_answer, unpack_answers, unpack_ended
from kvtier.v1 import attention_pb2
from kvtier_client.errors import KvtierError, from_detail
from kvtier_client.localring import FLOAT_BYTES, AnswerRing, StagingRing, ring_bytes
from kvtier_client.loneframes import LoneFrames
from kvtier_client.rowevidence import RowEvidence
from kvtier_client.wire import MAX_OUTSTANDING, Answer, Frame, Sender, WireName
from kvtier_core.errors import Reason

_GONE = "UNAVAILABLE"
_SECONDS = 10.0
# An attention over some thousand rows takes as long.
_LOOKS = Bounds(most=500_000)


# Of a frame that was sent: its number, where its output will lie, and its shape.
_Waiting = tuple[int, int, torch.Size]


@dataclass(frozen=True, slots=True)
class Attached:
    index: int
    generation: int
    session_tag: bytes
    boot_tag: bytes


class LocalWire:
    """One connection with its two rings, and the sessions attached to it. One engine thread drives it."""

    name: WireName = "local"

    def __init__(
        self,
        senders: Sequence[Sender],
        tokens: dict[str, bytes],
        offer: attention_pb2.LocalChannel,
        wanted: int,
    ) -> None:
        """senders: the sessions to attach; tokens: by session id, what attaches each. What attaches one again
        elsewhere takes the place of what attached it here, also when the next one cannot be attached. offer:
        where. wanted: bytes of tensors of a message. Raises KvtierError: typed as the agent says it, DRAINING
        when nobody is there."""
        self._tokens = tokens
        self.broken: KvtierError | None = None
        self.lost = False
        self.max_frames = min(wire.MAX_FRAMES, offer.max_frames or wire.MAX_FRAMES)
        self._attached: dict[Sender, Attached] = {}
        self.waiting: deque[list[_Waiting]] = deque()
        self.sequence = 0
        self.buffer = bytearray(wire.MAX_ANSWER_BYTES)
        self._view = memoryview(self.buffer)
        self.timeout = 0.0
        self._answers: AnswerRing | None = None
        self.lone: LoneFrames | None = None
        size = ring_bytes(MAX_OUTSTANDING * wire.aligned(wanted), offer.max_ring_bytes)
        self.max_message_bytes = size
        try:
            self.ring = StagingRing(size)
        except OSError as error:
            raise KvtierError(Reason.NO_STAGING, f"no staging ring of {size} bytes: {error}") from None
        try:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self.ring.close()
            raise KvtierError(Reason.NO_STAGING, f"no socket for a local channel: {error}") from None
        self._receiver = Receiver(self.socket, self.buffer, Patience(_LOOKS), compiled(), seats())
        try:
            self._connect(offer.socket)
            first, *others = senders
            self._hello(first, tokens[first.opened.session_id], size)
            for sender in others:
                self._attach(sender, tokens[sender.opened.session_id])
            if not others:
                self.lone = LoneFrames(self, first, self._attached[first])
        except OSError as error:
            failure = self._fail(_gone(f"{offer.socket}: {error}"), lost=True)
            self.close()
            raise failure from None
        except BaseException:
            self.close()
            raise

    @property
    def answers(self) -> AnswerRing:
        assert self._answers is not None
        return self._answers

    @property
    def left_behind(self) -> bool:
        return bool(self.waiting) and self.broken is None

    def has_room(self, frames: Sequence[Frame]) -> bool:
        if len(self.waiting) >= MAX_OUTSTANDING:
            return False
        return self.ring.place(self._bytes_of(frames)) is not None

    def send(self, frames: Sequence[Frame]) -> None:
        if self.broken is not None:
            raise self.broken
        size = wire.aligned(frames[0].size) if len(frames) == 1 else self._bytes_of(frames)
        start = self.ring.place(size)
        if start is None or len(self.waiting) >= MAX_OUTSTANDING:
            raise KvtierError(Reason.QUEUE_FULL, f"{len(self.waiting)} messages wait for their answers")
        records, waiting, offset = [], [], start
        for frame in frames:
            self.sequence += 1
            at = self.ring.write(offset, frame.k)
            at = self.ring.write(at, frame.v)
            at = self.ring.write(at, frame.q)
            evidence = frame.evidence
            if evidence is not None:
                at = self._write_evidence(offset, at, evidence)
            attached = self._attached[frame.sender]
            records.append(
                wire.FrameRecord(
                    attachment=attached.index,
                    layer=frame.layer,
                    rows=frame.k.shape[0],
                    queries=frame.q.shape[0],
                    generation=attached.generation,
                    step=frame.step,
                    first_row_position=frame.position,
                    first_query_position=frame.position,
                    committed_frontier=frame.committed,
                    deadline_ms=frame.deadline_ms,
                    sequence=self.sequence,
                    offset=offset,
                    session_tag=attached.session_tag,
                    boot_tag=attached.boot_tag,
                    next_layer_follows=frame.next_layer_follows,
                    position_epoch=frame.sender.position_epoch,
                    evidence=None if evidence is None else _record(evidence),
                )
            )
            waiting.append((self.sequence, offset, frame.q.shape))
            offset = wire.aligned(at)
        try:
            message = wire.pack_frames(records, time.monotonic_ns())
        except wire.MalformedError as error:
            raise KvtierError(Reason.FRAME_INVALID, str(error)) from None
        # Before it goes: a call that is interrupted here must be seen to have left its answer behind.
        self.ring.take(start, size)
        self.waiting.append(waiting)
        try:
            self.socket.send(message)
        except OSError as error:
            raise self.not_sent(error) from None

    def receive(self, timeout: float) -> list[Answer | KvtierError]:
        if self.broken is not None:
            raise self.broken
        if not self.waiting:
            raise KvtierError(Reason.STEP_ORDER, "no frame waits for an answer")
        if timeout != self.timeout:
            self.set_timeout(timeout)
        return self.taken(self.received())

    def not_sent(self, error: OSError) -> KvtierError:
        """What a message that was not sent has broken the wire with."""
        if isinstance(error, BlockingIOError):
            return self._fail(KvtierError(Reason.DEADLINE, "the agent does not read"), lost=False)
        return self._fail(self._why_gone(error), lost=True)

    def received(self) -> int:
        """Bytes of the message that came, in `buffer`; -1 when none did, and then the wire is broken."""
        try:
            size = self._receiver.receive()
            if size <= len(self.buffer):
                return size
            # What is behind the buffer is lost, and what is in it must not be read as if it were whole.
            message = f"length: {size} bytes, at most {len(self.buffer)} are an answer"
            self._fail(KvtierError(Reason.FRAME_INVALID, message), lost=False)
        except BlockingIOError:
            message = f"no answer within {self.timeout:.3f} s"
            self._fail(KvtierError(Reason.DEADLINE, message), lost=False)
        except OSError as error:
            self._fail(self._why_gone(error), lost=True)
        return -1

    def taken(self, size: int) -> list[Answer | KvtierError]:
        """The answers in a message of that size, to the oldest that waits; as `receive`."""
        if self.broken is not None:
            raise self.broken
        records = self._read_answers(size)
        waiting = self.waiting.popleft()
        if [record.sequence for record in records] != [sequence for sequence, _, _ in waiting]:
            numbers = [record.sequence for record in records], [sequence for sequence, _, _ in waiting]
            message = "answer {} came where {} was due".format(*numbers)
            raise self._fail(KvtierError(Reason.IDENTITY_MISMATCH, message), lost=False)
        answers = [
            self._answer(record, offset, shape)
            for record, (_, offset, shape) in zip(records, waiting, strict=True)
        ]
        # Only now: the outputs were copied from the places that the next frames will take.
        self.ring.give_back()
        return answers

    def close(self) -> None:
        self.broken = self.broken or KvtierError(Reason.SESSION_UNKNOWN, "the channel is closed")
        self.socket.close()
        self.ring.close()
        if self._answers is not None:
            self._answers.close()

    def _write_evidence(self, start: int, at: int, evidence: RowEvidence) -> int:
        """Behind a frame's tensors, which end at `at`; where the frame ends."""
        place = start + wire.evidence_place(at - start, evidence.hidden_bytes)
        if evidence.hidden is not None:
            self.ring.write(at, evidence.hidden)
        if evidence.surprisal is None:
            return place
        doubles = np.ascontiguousarray(evidence.surprisal, dtype="<f8")
        # The ring knows floats; a copy of bits does not look at them.
        return self.ring.write(place, torch.from_numpy(doubles.view(np.float32)))

    # --- parts -----------------------------------------------------------------------------------------

    @staticmethod
    def _bytes_of(frames: Sequence[Frame]) -> int:
        return sum(wire.aligned(frame.size) for frame in frames)

    def _answer(self, record: AnswerRecord, offset: int, shape: torch.Size) -> Answer | KvtierError:
        if record.error is not None:
            return from_detail(record.error)
        due = FLOAT_BYTES * shape.numel()
        if record.out_bytes != due:
            message = f"{record.out_bytes} bytes of output, {due} were due"
            return KvtierError(Reason.FRAME_INVALID, message)
        out = self.answers.copy(offset, shape)
        return Answer(record.step, record.layer, out, functools.partial(receipt_of, record.raw))

    def _read_answers(self, size: int) -> list[AnswerRecord]:
        one = read_answer(self._view, size)
        if one is not None:
            return [one]
        kind, count = self._header(size)
        if kind is not wire.Kind.ANSWERS:
            raise self._fail(KvtierError(Reason.FRAME_INVALID, f"{kind.name} came for an answer"), lost=False)
        try:
            return unpack_answers(self.buffer, size, count)
        except wire.MalformedError as error:
            raise self._fail(KvtierError(Reason.FRAME_INVALID, str(error)), lost=False) from None

    def _header(self, size: int) -> tuple[wire.Kind, int]:
        """Of a message that came; raises what the agent ended the channel with."""
        if size == 0:
            raise self._fail(_gone("the agent closed the channel"), lost=True)
        try:
            kind, count, _ = wire.read_header(self.buffer, size)
            ended = unpack_ended(self.buffer, size) if kind is wire.Kind.ENDED else None
        except wire.MalformedError as error:
            raise self._fail(KvtierError(Reason.FRAME_INVALID, str(error)), lost=False) from None
        if ended is not None:
            raise self._fail(from_detail(ended), lost=False)
        return kind, count

    def _why_gone(self, error: OSError) -> KvtierError:
        """An agent that ends a channel with messages unread resets it, and still has said why."""
        with contextlib.suppress(OSError, wire.MalformedError):
            size = self.socket.recv_into(self.buffer, 0, socket.MSG_DONTWAIT)
            if size and wire.read_header(self.buffer, size)[0] is wire.Kind.ENDED:
                return from_detail(unpack_ended(self.buffer, size))
        return _gone(str(error))

    def _connect(self, path: str) -> None:
        """By way of the folder: a Unix socket's own path may hold about 100 bytes."""
        self.set_timeout(_SECONDS)
        seconds = struct.pack("@qq", int(_SECONDS), 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        folder, _, name = path.rpartition("/")
        descriptor = os.open(folder or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.socket.connect(f"/proc/self/fd/{descriptor}/{name}")
        finally:
            os.close(descriptor)

    def _hello(self, sender: Sender, token: bytes, size: int) -> None:
        hello = wire.pack_hello(wire.Hello(token, size), time.monotonic_ns())
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.ring.descriptor]))]
        self.socket.sendmsg([hello], passed)
        self.ring.passed()
        answered, descriptors = self._receive_welcome()
        try:
            if answered.ring_bytes != size or len(descriptors) != 1:
                message = f"{answered.ring_bytes} bytes and {len(descriptors)} descriptors for answers"
                raise KvtierError(Reason.FRAME_INVALID, message)
            self._answers = AnswerRing(descriptors[0], size)
        except memory.UnsafeMemoryError as error:
            raise KvtierError(Reason.FRAME_INVALID, f"the answers' ring: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._note(sender, answered)

    def _attach(self, sender: Sender, token: bytes) -> None:
        self.socket.send(wire.pack_attach(token, time.monotonic_ns()))
        size = self.socket.recv_into(self.buffer, 0, socket.MSG_TRUNC)
        kind, _ = self._header(size)
        self._note(sender, self._unpack_attached(kind, wire.Kind.ATTACHED, size))

    def _receive_welcome(self) -> tuple[wire.Attached, list[int]]:
        room = socket.CMSG_SPACE(4)
        size, control, _, _ = self.socket.recvmsg_into([self.buffer], room, socket.MSG_CMSG_CLOEXEC)
        descriptors: list[int] = []
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                descriptors.extend(found)
        try:
            kind_of, _ = self._header(size)
            return self._unpack_attached(kind_of, wire.Kind.WELCOME, size), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _unpack_attached(self, kind: wire.Kind, due: wire.Kind, size: int) -> wire.Attached:
        if kind is not due:
            raise KvtierError(Reason.FRAME_INVALID, f"{kind.name} came where {due.name} was due")
        try:
            return wire.unpack_attached(self.buffer, size)
        except wire.MalformedError as error:
            raise KvtierError(Reason.FRAME_INVALID, str(error)) from None

    def _note(self, sender: Sender, answered: wire.Attached) -> None:
        opened = sender.opened
        self._attached[sender] = Attached(
            answered.attachment, opened.generation, wire.tag(opened.session_id), wire.tag(opened.boot_id)
        )
        self._tokens[opened.session_id] = answered.next_token

    def set_timeout(self, seconds: float) -> None:
        whole = int(seconds)
        value = struct.pack("@qq", whole, max(1, int((seconds - whole) * 1_000_000)))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.timeout = seconds

    def _fail(self, error: KvtierError, *, lost: bool) -> KvtierError:
        """An error that the agent typed is its answer: no other connection would get another."""
        self.broken = error
        self.lost = lost and not error.typed
        return error


def _record(evidence: RowEvidence) -> wire.EvidenceRecord:
    return wire.EvidenceRecord(
        evidence.hidden_layer, evidence.states, evidence.surprisals, evidence.surprisal_first
    )


def _gone(message: str) -> KvtierError:
    return KvtierError(Reason.DRAINING, message, status=_GONE)


def receipt_of(record: bytes) -> attention_pb2.Receipt:
    """The receipt in an answer's record. FRAME_INVALID."""
    try:
        return decode_receipt(record)
    except wire.MalformedError as error:
        raise KvtierError(Reason.FRAME_INVALID, str(error)) from None
