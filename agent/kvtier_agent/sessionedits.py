"""Edits of sessions on the wire: messages become the core's operations, a fork becomes a session here too.

It decides what a message means and who may send it; positions, rows and capacity are the engine's to refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvtier.v1 import attention_pb2
from kvtier_agent import convert
from kvtier_agent.cachesession import Session
from kvtier_agent.engine_port import SessionHandle
from kvtier_agent.errors import to_detail
from kvtier_agent.node import Node
from kvtier_agent.rowevidence_convert import evidence_wanted
from kvtier_core.edits.requests import (
    Drop,
    EditAnswer,
    EditRequest,
    ForkRequest,
    Move,
    Operation,
    Reposition,
    Truncate,
)
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm

QUERY_BLOCK_TOKENS = 256
LEGAL = "truncate, fork, drop, reposition"
Offer = Callable[[Session, int, attention_pb2.OpenSessionResponse], None]


class SessionEditor:
    """One agent's. offer: a local channel for a session that was opened, or why there is none."""

    def __init__(self, node: Node, offer: Offer) -> None:
        self._node = node
        self._offer = offer

    async def edit(self, request: attention_pb2.EditSessionRequest) -> attention_pb2.EditSessionResponse:
        """SESSION_UNKNOWN, GENERATION_STALE, TENANT_MISMATCH, BOOT_ID_MISMATCH; BAD_ARGUMENT naming the
        field; else what the engine refuses, and then the session is unchanged."""
        node = self._node
        node.check_boot(request.boot_id)
        session = node.session(request.session_id, request.generation, request.tenant)
        for field in ("position_epoch", "deadline_ms"):
            if getattr(request, field) < 0:
                raise CoreError(Reason.BAD_ARGUMENT, f"{field} must not be negative")
        deadline = self._deadline(request.deadline_ms)
        if request.WhichOneof("edit") == "fork":
            return await self._fork(session, request, deadline)
        asked = EditRequest(
            session.handle.session_id,
            session.handle.generation,
            operation_of(request),
            request.position_epoch,
            deadline,
        )
        runner = session.host.runner
        session.begin_frame()
        try:
            session.check_open()
            answer = await runner.call(lambda: runner.engine.edit_session(asked))
        finally:
            session.end_frame()
            session.host.used(session)
        if answer.changed:
            session.begin_again()
        return attention_pb2.EditSessionResponse(
            changed=answer.changed,
            position_epoch=answer.position_epoch,
            next_position=answer.next_position,
            rows=answer.rows,
            chunks=answer.chunks,
        )

    def _deadline(self, asked_ms: int) -> float:
        allowed = self._node.limits.frame_deadline_seconds
        return time.monotonic() + (min(allowed, asked_ms / 1000) if asked_ms else allowed)

    async def _fork(
        self, session: Session, request: attention_pb2.EditSessionRequest, deadline: float
    ) -> attention_pb2.EditSessionResponse:
        node = self._node
        if node.draining:
            raise CoreError(Reason.DRAINING, "the agent is draining and takes no session")
        asked = ForkRequest(
            session.handle.session_id,
            session.handle.generation,
            position_epoch=request.position_epoch,
            deadline=deadline,
        )
        with node.session_place():
            child, answer = await _forked(session, asked, request.fork.traceparent)
        opened = opened_message(node, child)
        if request.fork.local_channel_version:
            self._offer(child, request.fork.local_channel_version, opened)
        return attention_pb2.EditSessionResponse(
            changed=True,
            position_epoch=answer.position_epoch,
            next_position=answer.next_position,
            rows=answer.rows,
            chunks=answer.chunks,
            child=opened,
        )


async def _forked(parent: Session, request: ForkRequest, traceparent: str) -> tuple[Session, EditAnswer]:
    """A session of the same rows and the same arm, and where it stands. It is no unit of evidence: its
    history is its parent's, which is one already."""
    runner = parent.host.runner
    engine = runner.engine

    def fork() -> tuple[SessionHandle, EditAnswer]:
        handle = engine.fork_session(request)
        # An edit that asks for nothing says where the session stands.
        return handle, engine.edit_session(EditRequest(handle.session_id, handle.generation, Drop(())))

    handle, answer = await runner.call(fork)
    now = parent.host.used(parent)
    child = Session(
        handle=handle,
        host=parent.host,
        tenant=parent.tenant,
        request_id=parent.request_id,
        assignment=replace(parent.assignment, in_radius=False, sampled=False),
        window=parent.window,
        traceparent=traceparent,
        opened_ns=now,
        last_used_ns=now,
        lacks=parent.lacks,
        fallback=parent.fallback,
    )
    parent.host.sessions[handle.session_id] = child
    parent.host.weights.forked(parent.handle.session_id, handle.session_id)
    return child, answer


def operation_of(request: attention_pb2.EditSessionRequest) -> Operation:
    """The core's operation. BAD_ARGUMENT naming the field and what is legal."""
    kind = request.WhichOneof("edit")
    if kind == "truncate":
        return Truncate(request.truncate.to, request.truncate.anew)
    if kind == "drop":
        return Drop(tuple((item.first, item.last) for item in request.drop.ranges))
    if kind != "reposition":
        raise CoreError(Reason.BAD_ARGUMENT, f"edit is not set; legal: {LEGAL}", {"field": "edit"})
    moves, close = request.reposition.moves, request.reposition.close_gaps
    if bool(moves) == close:
        message = "reposition has both moves and close_gaps" if close else "reposition asks for nothing"
        raise CoreError(
            Reason.BAD_ARGUMENT, f"{message}; legal: moves, or close_gaps", {"field": "reposition"}
        )
    return Reposition(None if close else tuple(Move(item.first, item.last, item.to) for item in moves))


def opened_message(node: Node, session: Session) -> attention_pb2.OpenSessionResponse:
    """What an engine is told of a session that was opened, its local channel excepted."""
    host, assignment = session.host, session.assignment
    digest = host.baseline_digest
    if assignment.arm is ServedArm.CANDIDATE and assignment.terms is not None:
        digest = assignment.terms.candidate_digest
    asked, lacks = session.handle.asked, session.lacks
    return attention_pb2.OpenSessionResponse(
        session_id=session.handle.session_id,
        generation=session.handle.generation,
        boot_id=node.boot_id,
        arm=convert.ARM_TO_WIRE[assignment.arm],
        manifest_digest=digest,
        baseline_digest=host.baseline_digest,
        sampled=assignment.sampled,
        window=None if session.window is None else convert.window_key(session.window),
        chunk_tokens=session.handle.chunk_tokens or host.manifest.chunk_tokens,
        query_block_tokens=QUERY_BLOCK_TOKENS,
        cache=convert.cache_ref(host.name),
        evidence=None if asked is None else evidence_wanted(asked),
        candidate_refused=None if lacks is None else to_detail(lacks),
    )
