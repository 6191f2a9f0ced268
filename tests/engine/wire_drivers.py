"""The ways that attention frames reach an agent, behind one face, so that one suite holds for all of them.

Frames and answers are the messages of gRPC's Attend; a driver of the local channel translates both.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvtier.local import frames as wire
from kvtier.v1 import attention_pb2, attention_pb2_grpc
from tests.engine.attention_driver import CALL_SECONDS
from tests.engine.raw_channel import RawChannel, record

Frame = attention_pb2.AttendFrame
Answer = attention_pb2.AttendAnswer
Opened = attention_pb2.OpenSessionResponse
RING = 4 << 20


class WireDriver(Protocol):
    """Carries messages of frames; of a single one for a wire that carries one session."""

    several: bool

    def send(self, frames: Sequence[Frame]) -> None: ...

    def receive(self) -> list[Answer]: ...

    def close(self) -> None: ...


class GrpcDriver:
    """Attend, or AttendMany for several."""

    def __init__(self, stub: attention_pb2_grpc.AttentionStub, several: bool) -> None:
        self.several = several
        self._sent: queue.Queue[Any] = queue.Queue()
        method = stub.AttendMany if several else stub.Attend
        self._answers = method(self._outgoing(), timeout=2 * CALL_SECONDS)

    def _outgoing(self) -> Iterator[Any]:
        while (message := self._sent.get(timeout=2 * CALL_SECONDS)) is not None:
            yield message

    def send(self, frames: Sequence[Frame]) -> None:
        if self.several:
            self._sent.put(attention_pb2.AttendFrames(frames=frames))
            return
        for frame in frames:
            self._sent.put(frame)

    def receive(self) -> list[Answer]:
        got = next(self._answers)
        return list(got.answers) if self.several else [got]

    def close(self) -> None:
        """Idempotent."""
        self._sent.put(None)
        # The agent's end of the stream, so that the next one need not wait for it.
        for _ in self._answers:
            pass


class LocalDriver:
    """The local channel. A ring of slots, each as large as a block of 256 queries. hidden_size: floats of a
    hidden state, as the sessions stated it."""

    def __init__(
        self, sessions: Sequence[Opened], geometry: attention_pb2.Geometry, hidden_size: int = 0
    ) -> None:
        self.several = len(sessions) > 1
        self._sessions = {one.session_id: one for one in sessions}
        self._geometry = geometry
        self._hidden_size = hidden_size
        self._queries: dict[int, tuple[int, int]] = {}
        self._next = 0
        self.channel = RawChannel(sessions[0].local_channel.socket)
        try:
            self._attached = {
                sessions[0].session_id: self.channel.hello(sessions[0].local_channel.token, size=RING)
            }
            for one in sessions[1:]:
                self._attached[one.session_id] = self.channel.attach(one.local_channel.token)
        except BaseException:
            self.channel.close()
            raise
        self.tokens = {name: one.next_token for name, one in self._attached.items()}
        self._waiting: list[int] = []

    def send(self, frames: Sequence[Frame]) -> None:
        records = []
        for frame in frames:
            tensors = len(frame.k) + len(frame.v) + len(frame.q)
            given = frame.evidence
            surprisal = wire.evidence_place(tensors, len(given.hidden))
            evidence = frame.HasField("evidence")
            size = wire.aligned(surprisal + len(given.surprisal) if evidence else tensors)
            if self._next + size > RING:
                self._next = 0
            offset, self._next = self._next, self._next + size
            self.channel.put(offset, frame.k, frame.v, frame.q, given.hidden)
            self.channel.put(offset + surprisal, given.surprisal)
            records.append(self._record(frame, offset))
            self._queries[frame.sequence] = (offset, len(frame.q))
        self.channel.send(wire.pack_frames(records, time.monotonic_ns()))
        self._waiting.append(len(frames))

    def receive(self) -> list[Answer]:
        answers = self.channel.answer(self._waiting.pop(0))
        for answer in answers:
            if not answer.HasField("error"):
                answer.out = self.channel.output(*self._queries[answer.sequence])
        return answers

    def close(self) -> None:
        self.channel.close()

    def _record(self, frame: Frame, offset: int) -> wire.FrameRecord:
        g = self._geometry
        opened = self._sessions.get(frame.session_id) or next(iter(self._sessions.values()))
        given = frame.evidence
        counted = wire.EvidenceRecord(
            hidden_layer=given.hidden_layer,
            hidden=-(-len(given.hidden) // (4 * max(1, self._hidden_size))),
            surprisals=len(given.surprisal) // 8,
            surprisal_first=given.surprisal_first,
        )
        return record(
            opened,
            self._attached[opened.session_id],
            layer=frame.layer,
            rows=len(frame.k) // (4 * g.kv_heads * g.head_dim),
            queries=len(frame.q) // (4 * g.query_heads * g.head_dim),
            generation=frame.generation,
            step=frame.step,
            first_row_position=frame.first_row_position,
            first_query_position=frame.first_query_position,
            committed_frontier=frame.committed_frontier,
            deadline_ms=frame.deadline_ms,
            position_epoch=frame.position_epoch,
            next_layer_follows=frame.next_layer_follows,
            evidence=counted if frame.HasField("evidence") else None,
            sequence=frame.sequence,
            offset=offset,
            session_tag=wire.tag(frame.session_id),
            boot_tag=wire.tag(frame.boot_id),
        )


Connect = Callable[[Sequence[Opened]], WireDriver]
WIRES = ("grpc", "grpc-many", "local", "local-many")


def connector(kind: str, stub: Any, geometry: attention_pb2.Geometry, hidden_size: int = 0) -> Connect:
    """Opens a driver of that kind for sessions; one session for the kinds that carry one."""
    if kind.startswith("grpc"):
        return lambda sessions: GrpcDriver(stub, kind.endswith("many"))
    return lambda sessions: LocalDriver(sessions, geometry, hidden_size)
