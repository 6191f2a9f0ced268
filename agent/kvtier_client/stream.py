"""One session's stream of frames and answers, with a deadline on each wait and a bound on each queue.

It exists because gRPC's synchronous iterators wait without a deadline. It must not know what a frame
computes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from kvtier.v1 import attention_pb2, attention_pb2_grpc
from kvtier_client.errors import KvtierError, from_rpc
from kvtier_client.wire import MAX_OUTSTANDING
from kvtier_core.errors import Reason

_CLOSE_SECONDS = 2.0
# How a call ends whose connection, not whose frame, was the trouble.
_LOST = ("UNAVAILABLE", "CANCELLED")
T = TypeVar("T")
Sent = TypeVar("Sent")
Got = TypeVar("Got")


def put_for_sure(into: queue.Queue[T], item: T) -> None:
    """Puts an item into a bounded queue without waiting; if it is full, the oldest gives its place. Others
    may put and take meanwhile."""
    while True:
        try:
            into.put_nowait(item)
            return
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                into.get_nowait()


class _Stream(Generic[Sent, Got]):
    """Messages of at most MAX_OUTSTANDING ahead of their answers, which come in their order.

    Not thread-safe: one engine thread drives it. After a DEADLINE or a failed call it is `broken`; `lost`
    says that the connection went away, so that another stream may ask again what was not answered.
    """

    def __init__(self, method: Callable[..., Any], metadata: Sequence[tuple[str, str]]) -> None:
        self._frames: queue.Queue[Sent | None] = queue.Queue(MAX_OUTSTANDING + 1)
        self._answers: queue.Queue[Got | KvtierError] = queue.Queue(MAX_OUTSTANDING + 1)
        self._expected: list[tuple[int, ...]] = []
        self._sequence = 0
        self.broken: KvtierError | None = None
        self._end: KvtierError | None = None
        self._was_lost = False
        self._call = method(self._outgoing(), metadata=tuple(metadata))
        self._reader = threading.Thread(target=self._read, name="kvtier-attend", daemon=True)
        self._reader.start()

    @property
    def lost(self) -> bool:
        return self._was_lost and self.broken is not None and self.broken is self._end

    @property
    def outstanding(self) -> int:
        return len(self._expected)

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.outstanding >= MAX_OUTSTANDING:
            raise KvtierError(Reason.QUEUE_FULL, f"{MAX_OUTSTANDING} messages wait for their answers")

    def _number(self) -> int:
        self._sequence += 1
        return self._sequence

    def _take(self, timeout: float) -> tuple[Got, tuple[int, ...]]:
        """The oldest answer with the numbers that it must have. Raises what broke the stream, DEADLINE."""
        if self.broken is not None:
            raise self.broken
        if not self._expected:
            raise KvtierError(Reason.STEP_ORDER, "no frame waits for an answer")
        try:
            got = self._answers.get(timeout=timeout)
        except queue.Empty:
            self._break(KvtierError(Reason.DEADLINE, f"no answer within {timeout:.3f} s"))
            raise self.broken from None  # type: ignore[misc]
        if isinstance(got, KvtierError):
            self._break(got)
            raise got
        return got, self._expected.pop(0)

    def _check_numbers(self, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if got != wanted:
            came, due = (", ".join(map(str, numbers)) for numbers in (got, wanted))
            self._break(KvtierError(Reason.IDENTITY_MISMATCH, f"answer {came} came where {due} was due"))
            raise self.broken  # type: ignore[misc]

    def close(self) -> None:
        """Ends the stream; never raises, waits at most two seconds."""
        self.broken = self.broken or KvtierError(Reason.SESSION_UNKNOWN, "the stream is closed")
        try:
            self._frames.put_nowait(None)
        except queue.Full:
            self._call.cancel()
        self._reader.join(_CLOSE_SECONDS)
        if self._reader.is_alive():
            self._call.cancel()
            self._reader.join(_CLOSE_SECONDS)

    def _outgoing(self) -> Iterator[Sent]:
        """Runs in gRPC's own thread, which waits here: `close` and `_break` always wake it with None."""
        while (frame := self._frames.get()) is not None:
            yield frame

    def _read(self) -> None:
        end, lost = KvtierError(Reason.SESSION_UNKNOWN, "the agent ended the stream"), True
        try:
            for answer in self._call:
                self._answers.put_nowait(answer)
        except queue.Full:
            self._call.cancel()
            end, lost = KvtierError(Reason.FRAME_INVALID, "the agent sent more answers than frames"), False
        except grpc.RpcError as error:
            end = from_rpc(error)
            lost = not end.typed and end.status in _LOST
        self._was_lost, self._end = lost, end
        put_for_sure(self._answers, end)

    def _break(self, error: KvtierError) -> None:
        self.broken = error
        self._call.cancel()
        put_for_sure(self._frames, None)


class AttendStream(_Stream[attention_pb2.AttendFrame, attention_pb2.AttendAnswer]):
    """One session's frames, one a message."""

    def __init__(self, stub: attention_pb2_grpc.AttentionStub, metadata: Sequence[tuple[str, str]]) -> None:
        super().__init__(stub.Attend, metadata)

    def send(self, frame: attention_pb2.AttendFrame) -> None:
        """Numbers the frame and hands it over. Raises what broke the stream, or QUEUE_FULL."""
        self._check()
        frame.sequence = self._number()
        self._expected.append((frame.sequence,))
        self._frames.put_nowait(frame)

    def receive(self, timeout: float) -> attention_pb2.AttendAnswer:
        """The answer to the oldest frame, which may be a refusal and then leaves the stream usable; a wait
        over `timeout` seconds raises DEADLINE and breaks it."""
        got, wanted = self._take(timeout)
        self._check_numbers((got.sequence,), wanted)
        return got


class AttendManyStream(_Stream[attention_pb2.AttendFrames, attention_pb2.AttendAnswers]):
    """Frames of several sessions a message."""

    def __init__(self, stub: attention_pb2_grpc.AttentionStub, metadata: Sequence[tuple[str, str]]) -> None:
        super().__init__(stub.AttendMany, metadata)

    def send(self, frames: Sequence[attention_pb2.AttendFrame]) -> None:
        """As AttendStream.send, for one message."""
        self._check()
        for frame in frames:
            frame.sequence = self._number()
        self._expected.append(tuple(frame.sequence for frame in frames))
        self._frames.put_nowait(attention_pb2.AttendFrames(frames=frames))

    def receive(self, timeout: float) -> list[attention_pb2.AttendAnswer]:
        """As AttendStream.receive, for one message."""
        got, wanted = self._take(timeout)
        answers = list(got.answers)
        self._check_numbers(tuple(answer.sequence for answer in answers), wanted)
        return answers
