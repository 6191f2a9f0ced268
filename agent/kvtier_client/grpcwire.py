"""The gRPC wires: a session's stream, or one of several sessions' frames. Tensors become bytes here."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier.v1 import attention_pb2
from kvtier_client.errors import KvtierError, from_detail
from kvtier_client.stream import AttendManyStream, AttendStream
from kvtier_client.wire import MAX_OUTSTANDING, Answer, Frame, WireName
from kvtier_core.errors import Reason

# gRPC's own default for a message; frames are cut to stay below it.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
FRAME_OVERHEAD = 64 * 1024
MAX_FRAMES = 32


class GrpcWire:
    """One frame a message for AttendStream, several for AttendManyStream."""

    name: WireName = "grpc"
    max_message_bytes = MAX_MESSAGE_BYTES - FRAME_OVERHEAD

    def __init__(self, stream: AttendStream | AttendManyStream) -> None:
        self.stream = stream
        self.max_frames = MAX_FRAMES if isinstance(stream, AttendManyStream) else 1
        self._shapes: deque[list[torch.Size]] = deque()
        self.lone = None

    @property
    def lost(self) -> bool:
        return self.stream.lost

    @property
    def left_behind(self) -> bool:
        return bool(self._shapes or self.stream.outstanding) and self.stream.broken is None

    def has_room(self, frames: Sequence[Frame]) -> bool:
        return self.stream.outstanding < MAX_OUTSTANDING

    def send(self, frames: Sequence[Frame]) -> None:
        messages = [frame_message(frame) for frame in frames]
        # Before they go: a call that is interrupted here must be seen to have left its answer behind, or the
        # next one would take that for its own.
        self._shapes.append([frame.q.shape for frame in frames])
        try:
            if isinstance(self.stream, AttendManyStream):
                self.stream.send(messages)
            else:
                (one,) = messages
                self.stream.send(one)
        except KvtierError:
            self._shapes.pop()
            raise

    def receive(self, timeout: float) -> list[Answer | KvtierError]:
        if isinstance(self.stream, AttendManyStream):
            answers = self.stream.receive(timeout)
        else:
            answers = [self.stream.receive(timeout)]
        return [_answer(one, shape) for one, shape in zip(answers, self._shapes.popleft(), strict=True)]

    def close(self) -> None:
        self.stream.close()


def frame_message(frame: Frame) -> attention_pb2.AttendFrame:
    """The frame as gRPC carries it, without its number."""
    opened = frame.sender.opened
    return attention_pb2.AttendFrame(
        session_id=opened.session_id,
        generation=opened.generation,
        boot_id=opened.boot_id,
        tenant=frame.sender.tenant,
        step=frame.step,
        layer=frame.layer,
        first_row_position=frame.position,
        k=_to_bytes(frame.k),
        v=_to_bytes(frame.v),
        first_query_position=frame.position,
        q=_to_bytes(frame.q),
        committed_frontier=frame.committed,
        deadline_ms=frame.deadline_ms,
        next_layer_follows=frame.next_layer_follows,
        position_epoch=frame.sender.position_epoch,
        evidence=None if frame.evidence is None else frame.evidence.message(),
    )


def _answer(message: attention_pb2.AttendAnswer, shape: torch.Size) -> Answer | KvtierError:
    if message.HasField("error"):
        return from_detail(message.error)
    out = message.out
    due = 4 * shape.numel()
    if len(out) != due:
        return KvtierError(Reason.FRAME_INVALID, f"{len(out)} bytes of output, {due} were due")
    tensor = torch.frombuffer(bytearray(out), dtype=torch.float32).view(shape)
    return Answer(message.step, message.layer, tensor, functools.partial(_receipt, message))


def _receipt(message: attention_pb2.AttendAnswer) -> attention_pb2.Receipt:
    return message.receipt


def _to_bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()
