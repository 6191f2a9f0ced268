"""An engine's end of a local channel without the client's care: sends what a test wants to, whole or broken.

It exists so that the agent's end is tested against peers that no client of ours would be.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from kvtier.local import frames as wire
from kvtier.local import memory
from kvtier.local.receipts import unpack_answers, unpack_ended
from kvtier.v1 import attention_pb2, common_pb2

RING = 1 << 20
SECONDS = 20.0


def staging(size: int = RING, seals: int = memory.SIZE_SEALS) -> tuple[int, mmap.mmap]:
    """A memory file with these seals, mapped writable before it gets them."""
    descriptor = os.memfd_create("test-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    mapped = mmap.mmap(descriptor, size)
    fcntl.fcntl(descriptor, memory.F_ADD_SEALS, seals)
    return descriptor, mapped


class Ended(Exception):
    """The agent ended the channel; `reason` is the name of why, empty when it did not say."""

    def __init__(self, detail: common_pb2.ErrorDetail | None) -> None:
        super().__init__("" if detail is None else detail.message)
        self.reason = "" if detail is None else common_pb2.Reason.Name(detail.reason)


class RawChannel:
    """A connected socket; `hello` makes it a channel."""

    def __init__(self, path: str | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(Path(path).parent, os.O_PATH | os.O_CLOEXEC)
        try:
            self.socket.connect(f"/proc/self/fd/{folder}/{Path(path).name}")
        except OSError:
            self.socket.close()
            raise
        finally:
            os.close(folder)
        self.socket.settimeout(SECONDS)
        self.ring: mmap.mmap | None = None
        self.answers: mmap.mmap | None = None
        self.answers_fd = -1
        self.attached: list[wire.Attached] = []

    def hello(
        self,
        token: bytes,
        *,
        size: int = RING,
        announced: int | None = None,
        seals: int = memory.SIZE_SEALS,
        descriptors: Sequence[int] | None = None,
    ) -> wire.Attached:
        """Attaches the token's session; the arguments make it wrong."""
        own, self.ring = staging(size, seals)
        try:
            message = wire.pack_hello(wire.Hello(token, announced or size), time.monotonic_ns())
            self.send(message, [own] if descriptors is None else descriptors)
        finally:
            os.close(own)
        received, passed = self.receive()
        kind, _, _ = wire.read_header(received, len(received))
        assert kind is wire.Kind.WELCOME
        [self.answers_fd] = passed
        self.answers = mmap.mmap(self.answers_fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.attached.append(wire.unpack_attached(received, len(received)))
        return self.attached[-1]

    def attach(self, token: bytes) -> wire.Attached:
        self.send(wire.pack_attach(token, time.monotonic_ns()))
        received, _ = self.receive()
        assert wire.read_header(received, len(received))[0] is wire.Kind.ATTACHED
        self.attached.append(wire.unpack_attached(received, len(received)))
        return self.attached[-1]

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        control = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self.socket.sendmsg([message], control)

    def receive(self) -> tuple[bytes, list[int]]:
        """One message and what came along. Raises Ended."""
        try:
            received, control, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(64))
        except ConnectionResetError:
            # What the agent had not read resets the connection; what it said is still there.
            received, control, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(64))
        passed: list[int] = []
        for _, _, data in control:
            found = array.array("i")
            found.frombytes(data)
            passed.extend(found)
        if not received:
            raise Ended(None)
        kind, _, _ = wire.read_header(received, len(received))
        if kind is wire.Kind.ENDED:
            raise Ended(unpack_ended(received, len(received)))
        return received, passed

    def answer(self, records: int = 1) -> list[attention_pb2.AttendAnswer]:
        """The next message of answers as gRPC would carry them, without outputs."""
        received, _ = self.receive()
        kind, count, _ = wire.read_header(received, len(received))
        assert (kind, count) == (wire.Kind.ANSWERS, records)
        answers = []
        for record in unpack_answers(received, len(received), count):
            answer = attention_pb2.AttendAnswer(
                sequence=record.sequence, step=record.step, layer=record.layer
            )
            if record.error is not None:
                answer.error.CopyFrom(record.error)
            else:
                answer.receipt.CopyFrom(record.receipt())
            answers.append(answer)
        return answers

    def put(self, offset: int, *tensors: bytes) -> int:
        """Writes to the staging ring; where it ends."""
        assert self.ring is not None
        for data in tensors:
            self.ring[offset : offset + len(data)] = data
            offset += len(data)
        return offset

    def output(self, offset: int, size: int) -> bytes:
        assert self.answers is not None
        return self.answers[offset : offset + size]

    def close(self) -> None:
        self.socket.close()
        for mapped in (self.ring, self.answers):
            if mapped is not None:
                mapped.close()
        if self.answers_fd >= 0:
            os.close(self.answers_fd)
            self.answers_fd = -1
        self.ring = self.answers = None

    def __enter__(self) -> RawChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record(
    opened: attention_pb2.OpenSessionResponse, attached: wire.Attached, **change: object
) -> wire.FrameRecord:
    """A decode frame's record of a session, with fields changed."""
    fields: dict[str, object] = {
        "attachment": attached.attachment,
        "layer": 0,
        "rows": 1,
        "queries": 1,
        "generation": opened.generation,
        "step": 0,
        "first_row_position": 0,
        "first_query_position": 0,
        "committed_frontier": 0,
        "deadline_ms": 20_000,
        "position_epoch": 0,
        "sequence": 1,
        "offset": 0,
        "session_tag": wire.tag(opened.session_id),
        "boot_tag": wire.tag(opened.boot_id),
    }
    return wire.FrameRecord(**{**fields, **change})  # type: ignore[arg-type]


def floats(n: int, seed: int) -> bytes:
    return np.random.default_rng(seed).standard_normal(n, dtype=np.float32).tobytes()
