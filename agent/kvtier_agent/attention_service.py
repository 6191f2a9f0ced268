"""Attention on the wire: sessions, one ordered stream each, outcomes. Identity is checked here, once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass

from kvtier.v1 import attention_pb2, attention_pb2_grpc
from kvtier_agent import attendframes, convert
from kvtier_agent.attendframes import FrameCount, FrameDesk
from kvtier_agent.cachehost import CacheHost, FrameAnswer, Session
from kvtier_agent.errors import to_detail
from kvtier_agent.localchannel.listener import ChannelServer
from kvtier_agent.node import Node, check_owner
from kvtier_agent.rpc import RpcScope, ServicerContext, abort
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm, SessionFacts
from kvtier_crds.manifest import RuntimeManifest

QUERY_BLOCK_TOKENS = 256
_MAX_NAME = 253
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Received:
    """A frame with its time of receipt, or why it is refused without being looked at."""

    frame: attention_pb2.AttendFrame
    at: float
    refusal: CoreError | None


class AttentionService(attention_pb2_grpc.AttentionServicer):
    """Engine to agent."""

    def __init__(
        self,
        node: Node,
        scope: RpcScope,
        telemetry: Telemetry,
        metrics: Metrics,
        frames: FrameCount,
        channels: ChannelServer | None = None,
    ) -> None:
        """channels: offered to sessions that want one."""
        self._node = node
        self._scope = scope
        self._metrics = metrics
        self._frames = frames
        self._channels = channels
        self._desk = FrameDesk(node, telemetry, metrics, frames)

    async def DescribeCache(
        self, request: attention_pb2.DescribeCacheRequest, context: ServicerContext
    ) -> attention_pb2.DescribeCacheResponse:
        return await self._scope.run("Attention.DescribeCache", context, self._describe(request))

    async def OpenSession(
        self, request: attention_pb2.OpenSessionRequest, context: ServicerContext
    ) -> attention_pb2.OpenSessionResponse:
        return await self._scope.run("Attention.OpenSession", context, self._open(request), finish=True)

    async def CloseSession(
        self, request: attention_pb2.CloseSessionRequest, context: ServicerContext
    ) -> attention_pb2.CloseSessionResponse:
        return await self._scope.run("Attention.CloseSession", context, self._close(request), finish=True)

    async def ReportOutcome(
        self, request: attention_pb2.ReportOutcomeRequest, context: ServicerContext
    ) -> attention_pb2.ReportOutcomeResponse:
        return await self._scope.run("Attention.ReportOutcome", context, self._report(request))

    async def Attend(
        self, request_iterator: AsyncIterator[attention_pb2.AttendFrame], context: ServicerContext
    ) -> AsyncIterator[attention_pb2.AttendAnswer]:
        """Answers in the order of the frames. A frame beyond the stream's bound is refused in its place;
        beyond twice the bound the stream is not read until answers leave (HTTP/2 holds the sender). A stream
        without a frame for the idle time ends with SESSION_UNKNOWN: its session is closed then."""
        limits = self._node.limits
        queue: asyncio.Queue[_Received | None] = asyncio.Queue(2 * limits.stream_in_flight)
        accepted = 0
        owned: Session | None = None

        async def read() -> None:
            nonlocal accepted
            try:
                async for frame in request_iterator:
                    refusal = None
                    if accepted >= limits.stream_in_flight:
                        refusal = CoreError(
                            Reason.QUEUE_FULL,
                            f"{accepted} frames of this stream wait",
                            {"bound": str(limits.stream_in_flight)},
                        )
                    else:
                        refusal = self._frames.enter()
                    if refusal is None:
                        accepted += 1
                    try:
                        await queue.put(_Received(frame, time.monotonic(), refusal))
                    except asyncio.CancelledError:
                        # It is not in the queue, so nobody else gives its place back.
                        if refusal is None:
                            self._frames.leave()
                        raise
            finally:
                await queue.put(None)

        reader = asyncio.create_task(read())
        try:
            while (received := await _next(queue, limits.session_idle_seconds, context)) is not None:
                try:
                    if received.refusal is None and owned is None:
                        owned = await self._claim(received.frame)
                    answer = await self._answer(received, owned)
                except CoreError as error:
                    answer = _refused(received.frame, error)
                finally:
                    if received.refusal is None:
                        accepted -= 1
                        self._frames.leave()
                yield answer
        finally:
            reader.cancel()
            if owned is not None:
                self._desk.release(owned)
            while not queue.empty():
                left = queue.get_nowait()
                if left is not None and left.refusal is None:
                    self._frames.leave()

    async def _claim(self, frame: attention_pb2.AttendFrame) -> Session:
        """The session that the first frame of a stream names."""
        session = self._node.session(frame.session_id, frame.generation, frame.tenant)
        await self._desk.claim(session)
        return session

    async def _answer(self, received: _Received, owned: Session | None) -> attention_pb2.AttendAnswer:
        frame = received.frame
        started_ns = time.time_ns()
        code, arm = "OK", ServedArm.BASELINE
        try:
            if received.refusal is not None:
                raise received.refusal
            session = self._checked(frame, owned)
            deadline = self._desk.deadline(received.at, frame.deadline_ms)
            converted, queries = convert.frame_input(frame, session.host.manifest, deadline)
            answer = await _in_time(session.host.attend(session, converted, queries), deadline)
            arm = answer.arm
            self._desk.observe(session, frame.step, answer, started_ns)
            return convert.answer_message(frame, answer)
        except CoreError as error:
            code = error.reason.name
            return _refused(frame, error)
        except Exception:
            log.exception("frame failed")
            code = Reason.INTERNAL.name
            return _refused(frame, CoreError(Reason.INTERNAL, "internal failure; see the agent's log"))
        finally:
            self._metrics.frame_seconds[arm.value, code].observe(time.monotonic() - received.at)

    def _checked(self, frame: attention_pb2.AttendFrame, owned: Session | None) -> Session:
        self._node.check_boot(frame.boot_id)
        session = self._node.session(frame.session_id, frame.generation, frame.tenant)
        if session is not owned:
            raise CoreError(Reason.BAD_ARGUMENT, "one stream carries one session")
        return session

    async def _describe(
        self, request: attention_pb2.DescribeCacheRequest
    ) -> attention_pb2.DescribeCacheResponse:
        host = self._node.host(convert.cache_name(request.cache))
        answer = attention_pb2.DescribeCacheResponse(
            cache=convert.cache_ref(host.name),
            boot_id=self._node.boot_id,
            baseline_digest=host.baseline_digest,
            stage="Off",
            geometry=convert.geometry_message(host.manifest),
            chunk_tokens=host.manifest.chunk_tokens,
            page_tokens=host.manifest.page_tokens,
            model_fingerprint=host.fingerprint,
        )
        lease = host.enforcement.lease()
        if lease is not None:
            answer.candidate_digest = lease.terms.candidate_digest
            answer.stage = lease.terms.fence.stage
            answer.attempt = lease.terms.fence.attempt
            if host.window is not None:
                answer.window.CopyFrom(convert.window_key(host.window))
        return answer

    async def _open(self, request: attention_pb2.OpenSessionRequest) -> attention_pb2.OpenSessionResponse:
        node = self._node
        if node.draining:
            raise CoreError(Reason.DRAINING, "the agent is draining and takes no session")
        host = node.host(convert.cache_name(request.cache))
        _check_identity(request, host)
        if request.forced_arm not in convert.ARM_FROM_WIRE:
            raise CoreError(Reason.BAD_ARGUMENT, f"forced_arm {request.forced_arm} is unknown")
        root = request.session_root_id or str(uuid.uuid4())
        facts = SessionFacts(
            tenant=request.tenant,
            request_class=request.request_class,
            session_root_id=root,
            request_id=root,
            probe=request.probe,
            forced_arm=convert.ARM_FROM_WIRE[request.forced_arm],
        )
        with node.session_place():
            session = await host.open_session(
                facts, request.score_scale, request.max_tokens, request.traceparent
            )
        assignment = session.assignment
        digest = host.baseline_digest
        if assignment.arm is ServedArm.CANDIDATE and assignment.terms is not None:
            digest = assignment.terms.candidate_digest
        opened = attention_pb2.OpenSessionResponse(
            session_id=session.handle.session_id,
            generation=session.handle.generation,
            boot_id=node.boot_id,
            arm=convert.ARM_TO_WIRE[assignment.arm],
            manifest_digest=digest,
            baseline_digest=host.baseline_digest,
            sampled=assignment.sampled,
            window=None if session.window is None else convert.window_key(session.window),
            chunk_tokens=host.manifest.chunk_tokens,
            query_block_tokens=QUERY_BLOCK_TOKENS,
            cache=convert.cache_ref(host.name),
        )
        if request.local_channel_version:
            self._offer(session, request.local_channel_version, opened)
        return opened

    def _offer(self, session: Session, version: int, opened: attention_pb2.OpenSessionResponse) -> None:
        """A local channel, or why there is none: the session is open all the same."""
        try:
            if self._channels is None:
                raise CoreError(Reason.UNSUPPORTED, "this agent has no local channels")
            opened.local_channel.CopyFrom(self._channels.offer(session, version))
        except CoreError as error:
            opened.local_channel_refused = f"{error.reason}: {error.message}"

    async def _close(self, request: attention_pb2.CloseSessionRequest) -> attention_pb2.CloseSessionResponse:
        session = self._node.session(request.session_id, request.generation, request.tenant)
        released = await session.host.close_session(session)
        return attention_pb2.CloseSessionResponse(rows_released=released)

    async def _report(
        self, request: attention_pb2.ReportOutcomeRequest
    ) -> attention_pb2.ReportOutcomeResponse:
        outcome = convert.outcome_of(request)
        for host in self._node.caches.values():
            session = host.session_for_outcome(request.session_id)
            if session is not None:
                check_owner(session, request.generation, request.tenant)
                why_not = host.report_outcome(session, outcome)
                return attention_pb2.ReportOutcomeResponse(counted=not why_not, why_not=why_not)
        raise CoreError(Reason.SESSION_UNKNOWN, "this agent holds no such session")


async def _in_time(attending: Awaitable[FrameAnswer], deadline: float) -> FrameAnswer:
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic()) + attendframes.ENGINE_GRACE_SECONDS):
            return await attending
    except TimeoutError:
        raise CoreError(Reason.DEADLINE, attendframes.HANGS) from None


async def _next(
    queue: asyncio.Queue[_Received | None], seconds: float, context: ServicerContext
) -> _Received | None:
    try:
        async with asyncio.timeout(seconds):
            return await queue.get()
    except TimeoutError:
        message = f"no frame came for {seconds:g} s, so the session is closed"
        await abort(context, CoreError(Reason.SESSION_UNKNOWN, message))


def _check_identity(request: attention_pb2.OpenSessionRequest, host: CacheHost) -> None:
    """Tenant, model, geometry and dtype, in this order; each refusal names the field."""
    if not request.tenant or len(request.tenant) > _MAX_NAME:
        raise CoreError(Reason.TENANT_MISMATCH, f"tenant must have 1 to {_MAX_NAME} characters")
    for name in ("request_class", "session_root_id"):
        if len(getattr(request, name)) > _MAX_NAME:
            raise CoreError(Reason.BAD_ARGUMENT, f"{name} must have at most {_MAX_NAME} characters")
    if request.model_fingerprint != host.fingerprint:
        message = (
            f"model_fingerprint {request.model_fingerprint[:80]!r} is not this cache's {host.fingerprint}"
        )
        raise CoreError(Reason.MODEL_MISMATCH, message)
    _check_geometry(request.geometry, host.manifest)
    if not (math.isfinite(request.score_scale) and request.score_scale > 0):
        raise CoreError(Reason.BAD_ARGUMENT, f"score_scale {request.score_scale} must be finite and above 0")
    if request.max_tokens <= 0:
        raise CoreError(Reason.BAD_ARGUMENT, f"max_tokens {request.max_tokens} must be above 0")


def _check_geometry(asked: attention_pb2.Geometry, manifest: RuntimeManifest) -> None:
    own = convert.geometry_message(manifest)
    for field in ("layers", "query_heads", "kv_heads", "head_dim", "dtype"):
        if getattr(asked, field) != getattr(own, field):
            message = (
                f"geometry.{field} {getattr(asked, field)!r} is not this cache's {getattr(own, field)!r}"
            )
            raise CoreError(Reason.GEOMETRY_MISMATCH, message)


def _refused(frame: attention_pb2.AttendFrame, error: CoreError) -> attention_pb2.AttendAnswer:
    return attention_pb2.AttendAnswer(
        sequence=frame.sequence, step=frame.step, layer=frame.layer, error=to_detail(error)
    )
