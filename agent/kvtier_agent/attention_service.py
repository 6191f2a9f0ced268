"""Attention on the wire: sessions, one ordered stream each, outcomes. Identity is checked here, once."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from kvtier.v1 import attention_pb2, attention_pb2_grpc
from kvtier_agent import convert
from kvtier_agent.attendframes import FrameCount, FrameDesk
from kvtier_agent.attendstreams import FrameStream
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import Session, check_owner
from kvtier_agent.localchannel.listener import ChannelServer
from kvtier_agent.node import Node
from kvtier_agent.rowevidence_convert import engine_gives
from kvtier_agent.rpc import RpcScope, ServicerContext
from kvtier_agent.sessionedits import SessionEditor, opened_message
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_agent.weightcalls import WeightCalls
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import SessionFacts
from kvtier_crds.manifest import RuntimeManifest

_MAX_NAME = 253
log = logging.getLogger(__name__)


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
        self._editor = SessionEditor(node, self._offer)
        self._weights = WeightCalls(node)

    async def DescribeCache(
        self, request: attention_pb2.DescribeCacheRequest, context: ServicerContext
    ) -> attention_pb2.DescribeCacheResponse:
        return await self._scope.run("Attention.DescribeCache", context, self._describe(request))

    async def OpenSession(
        self, request: attention_pb2.OpenSessionRequest, context: ServicerContext
    ) -> attention_pb2.OpenSessionResponse:
        return await self._scope.run(
            "Attention.OpenSession",
            context,
            self._open(request),
            finish=True,
            unwanted=partial(self._close_untold, request.tenant),
        )

    async def GiveWeights(
        self, request_iterator: AsyncIterator[attention_pb2.GiveWeightsRequest], context: ServicerContext
    ) -> attention_pb2.GiveWeightsResponse:
        return await self._scope.run("Attention.GiveWeights", context, self._weights.give(request_iterator))

    async def CloseSession(
        self, request: attention_pb2.CloseSessionRequest, context: ServicerContext
    ) -> attention_pb2.CloseSessionResponse:
        return await self._scope.run("Attention.CloseSession", context, self._close(request), finish=True)

    async def EditSession(
        self, request: attention_pb2.EditSessionRequest, context: ServicerContext
    ) -> attention_pb2.EditSessionResponse:
        async def untold(answer: attention_pb2.EditSessionResponse) -> None:
            if answer.HasField("child"):
                await self._close_untold(request.tenant, answer.child)

        return await self._scope.run(
            "Attention.EditSession", context, self._editor.edit(request), finish=True, unwanted=untold
        )

    async def ReportOutcome(
        self, request: attention_pb2.ReportOutcomeRequest, context: ServicerContext
    ) -> attention_pb2.ReportOutcomeResponse:
        return await self._scope.run("Attention.ReportOutcome", context, self._report(request))

    async def Attend(
        self, request_iterator: AsyncIterator[attention_pb2.AttendFrame], context: ServicerContext
    ) -> AsyncIterator[attention_pb2.AttendAnswer]:
        """One session's frames; see FrameStream."""
        messages = FrameStream(self._desk, many=False).answers(_each(request_iterator), context)
        async with aclosing(messages):
            async for (answer,) in messages:
                yield answer

    async def AttendMany(
        self, request_iterator: AsyncIterator[attention_pb2.AttendFrames], context: ServicerContext
    ) -> AsyncIterator[attention_pb2.AttendAnswers]:
        """As Attend, with frames of several sessions in each message."""
        messages = FrameStream(self._desk, many=True).answers(_several(request_iterator), context)
        async with aclosing(messages):
            async for answers in messages:
                yield attention_pb2.AttendAnswers(answers=answers)

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
        node, cache = self._node, convert.cache_name(request.cache)
        await node.arriving.wait(cache)
        if node.draining:
            raise CoreError(Reason.DRAINING, "the agent is draining and takes no session")
        host = node.host(cache)
        _check_identity(request, host)
        if request.forced_arm not in convert.ARM_FROM_WIRE:
            raise CoreError(Reason.BAD_ARGUMENT, f"forced_arm {request.forced_arm} is unknown")
        gives = engine_gives(request)
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
                facts, request.score_scale, request.max_tokens, request.traceparent, gives
            )
        opened = opened_message(node, session)
        if request.local_channel_version:
            self._offer(session, request.local_channel_version, opened)
        return opened

    async def _close_untold(self, tenant: str, opened: attention_pb2.OpenSessionResponse) -> None:
        """Nobody knows its id, so nobody else would close it before it has been idle for long."""
        await self._close(
            attention_pb2.CloseSessionRequest(
                session_id=opened.session_id, generation=opened.generation, tenant=tenant
            )
        )

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


async def _each(
    frames: AsyncIterator[attention_pb2.AttendFrame],
) -> AsyncIterator[Sequence[attention_pb2.AttendFrame]]:
    async for frame in frames:
        yield (frame,)


async def _several(
    messages: AsyncIterator[attention_pb2.AttendFrames],
) -> AsyncIterator[Sequence[attention_pb2.AttendFrame]]:
    async for message in messages:
        yield message.frames


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
