"""Attention frames on gRPC streams: one session's, or several sessions' in each message.

Messages are read ahead within a bound, computed one after the other, and answered in their order. It decides
nothing about sessions but whose stream this is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.v1 import attention_pb2
from kvtier_agent import attendframes, convert
from kvtier_agent.attendframes import FrameDesk
from kvtier_agent.cacheframes import DEFECT
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import FrameAnswer, FrameWork, Session
from kvtier_agent.errors import to_detail
from kvtier_agent.rpc import ServicerContext, abort
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm

# Of a message; a longer batch travels as several.
MAX_FRAMES = 32
# Messages of several frames that wait unread by the engine.
_MANY_AHEAD = 8
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Received:
    """A frame with its time of receipt; `refused`, `answer`: what became of it. `entered`: it has a place
    that must be given back."""

    frame: attention_pb2.AttendFrame
    at: float
    entered: bool = False
    refused: CoreError | None = None
    answer: FrameAnswer | None = None


class FrameStream:
    """One stream from its first message to its end."""

    def __init__(self, desk: FrameDesk, *, many: bool) -> None:
        """many: several sessions' frames, at most one of each in a message; else one session's, one each."""
        self._desk = desk
        self._many = many
        self._owned: dict[str, Session] = {}
        self._accepted = 0

    async def answers(
        self, incoming: AsyncIterator[Sequence[attention_pb2.AttendFrame]], context: ServicerContext
    ) -> AsyncGenerator[list[attention_pb2.AttendAnswer], None]:
        """Answers in the order of the messages. A frame beyond the stream's bound is refused in its place;
        beyond twice the bound the stream is not read until answers leave (HTTP/2 holds the sender). A stream
        without a message for the idle time ends with SESSION_UNKNOWN: its sessions are closed then."""
        node = self._desk.node
        ahead = _MANY_AHEAD if self._many else 2 * node.limits.stream_in_flight
        queue: asyncio.Queue[list[_Received] | None] = asyncio.Queue(ahead)
        reader = asyncio.create_task(self._read(incoming, queue))
        try:
            while (message := await _next(queue, node.longest_idle_seconds, context)) is not None:
                started_ns = time.time_ns()
                try:
                    await self._compute(message)
                finally:
                    self._leave(message)
                yield [self._answer(received, started_ns) for received in message]
        finally:
            reader.cancel()
            for session in self._owned.values():
                self._desk.release(session)
            while not queue.empty():
                self._leave(queue.get_nowait() or ())

    async def _read(
        self,
        incoming: AsyncIterator[Sequence[attention_pb2.AttendFrame]],
        queue: asyncio.Queue[list[_Received] | None],
    ) -> None:
        try:
            async for frames in incoming:
                now = time.monotonic()
                message = [_Received(frame, now) for frame in frames]
                for place, received in enumerate(message):
                    received.refused = self._enter(place)
                    received.entered = received.refused is None
                try:
                    await queue.put(message)
                except asyncio.CancelledError:
                    # It is not in the queue, so nobody else gives its places back.
                    self._leave(message)
                    raise
        finally:
            await queue.put(None)

    def _enter(self, place: int) -> CoreError | None:
        if place >= MAX_FRAMES:
            return CoreError(Reason.BAD_ARGUMENT, f"a message carries at most {MAX_FRAMES} frames")
        bound = self._desk.node.limits.stream_in_flight
        if self._accepted >= bound:
            message = f"{self._accepted} frames of this stream wait"
            return CoreError(Reason.QUEUE_FULL, message, {"bound": str(bound)})
        refused = self._desk.frames.enter()
        if refused is None:
            self._accepted += 1
        return refused

    def _leave(self, message: Sequence[_Received]) -> None:
        for received in message:
            if received.entered:
                received.entered = False
                self._accepted -= 1
                self._desk.frames.leave()

    async def _compute(self, message: Sequence[_Received]) -> None:
        """Sets what became of each frame; never raises a refusal."""
        works: dict[CacheHost, list[tuple[_Received, FrameWork, float]]] = {}
        sessions: set[str] = set()
        until = self._desk.takeover()
        for received in message:
            if received.refused is not None:
                continue
            try:
                work, deadline = await self._work(received, sessions, until)
            except CoreError as error:
                received.refused = error
                continue
            except Exception:
                log.exception("frame failed")
                received.refused = CoreError(Reason.INTERNAL, DEFECT)
                continue
            works.setdefault(work.session.host, []).append((received, work, deadline))
        await asyncio.gather(*(self._attend(host, of_host) for host, of_host in works.items()))

    async def _work(self, received: _Received, sessions: set[str], until: float) -> tuple[FrameWork, float]:
        frame = received.frame
        session = await self._checked(frame, until)
        if frame.session_id in sessions:
            raise CoreError(Reason.BAD_ARGUMENT, "one message carries one frame of a session")
        sessions.add(frame.session_id)
        deadline = self._desk.deadline(received.at, frame.deadline_ms)
        asked = session.handle.asked
        converted, queries = convert.frame_input(frame, session.host.manifest, deadline, asked)
        return FrameWork(session, converted, queries), deadline

    async def _checked(self, frame: attention_pb2.AttendFrame, until: float) -> Session:
        """The frame's session, which becomes this stream's when it is new here; another stream of it is
        waited for until then."""
        node = self._desk.node
        # First, so that an engine hears of a restart as such, and not of one session that is unknown.
        node.check_boot(frame.boot_id)
        if self._many or not self._owned:
            session = node.session(frame.session_id, frame.generation, frame.tenant)
            if self._owned.get(frame.session_id) is not session:
                await self._desk.claim(session, until)
                self._owned[frame.session_id] = session
        session = node.session(frame.session_id, frame.generation, frame.tenant)
        if self._owned.get(frame.session_id) is not session:
            raise CoreError(Reason.BAD_ARGUMENT, "one stream carries one session")
        return session

    async def _attend(self, host: CacheHost, frames: Sequence[tuple[_Received, FrameWork, float]]) -> None:
        latest = max(deadline for _, _, deadline in frames)
        answers: Sequence[FrameAnswer | CoreError]
        try:
            if len(frames) == 1:
                work = frames[0][1]
                answers = [await _in_time(host.frames.attend(work.session, work.frame, work.queries), latest)]
            else:
                answers = await _in_time(host.frames.attend_many([work for _, work, _ in frames]), latest)
        except CoreError as error:
            answers = [error] * len(frames)
        except Exception:
            log.exception("frames failed")
            answers = [CoreError(Reason.INTERNAL, DEFECT)] * len(frames)
        for (received, _, _), answer in zip(frames, answers, strict=True):
            if isinstance(answer, CoreError):
                received.refused = answer
            else:
                received.answer = answer

    def _answer(self, received: _Received, started_ns: int) -> attention_pb2.AttendAnswer:
        frame = received.frame
        code, arm = "OK", ServedArm.BASELINE
        if received.answer is not None:
            arm = received.answer.arm
            session = self._owned[frame.session_id]
            self._desk.observe(session, frame.step, received.answer, started_ns)
            message = convert.answer_message(frame, received.answer)
        else:
            refused = received.refused
            assert refused is not None
            code = refused.reason.name
            message = attention_pb2.AttendAnswer(
                sequence=frame.sequence, step=frame.step, layer=frame.layer, error=to_detail(refused)
            )
        self._desk.metrics.frame_seconds[arm.value, code].observe(time.monotonic() - received.at)
        return message


async def _in_time(attending: Awaitable[T], deadline: float) -> T:
    seconds = max(0.0, deadline - time.monotonic()) + attendframes.ENGINE_GRACE_SECONDS
    try:
        async with asyncio.timeout(seconds):
            return await attending
    except TimeoutError:
        raise CoreError(Reason.DEADLINE, attendframes.HANGS) from None


async def _next(
    queue: asyncio.Queue[list[_Received] | None], seconds: float, context: ServicerContext
) -> list[_Received] | None:
    try:
        async with asyncio.timeout(seconds):
            return await queue.get()
    except TimeoutError:
        message = f"no frame came for {seconds:g} s, so the session is closed"
        await abort(context, CoreError(Reason.SESSION_UNKNOWN, message))
