"""Edits on an agent without tensors: what reaches the engine, and what a fork is in the agent's own books."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import attention_pb2
from kvtier.weights import WeightsShape
from kvtier_agent import convert
from kvtier_agent.attendframes import FrameCount
from kvtier_agent.attention_service import AttentionService
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import Session
from kvtier_agent.candidateengines import paired
from kvtier_agent.rpc import RpcScope
from kvtier_agent.sessionedits import SessionEditor, opened_message
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest, Move, Operation, Reposition, Truncate
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm, SessionFacts
from tests.unit.agent.agent_fakes import Bench, FakeEngine, frame


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


async def opened(bench: Bench) -> tuple[Session, FakeEngine]:
    host: CacheHost = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 100, "")
    engine = paired(host).running.engine
    assert isinstance(engine, FakeEngine)
    return session, engine


def editor(bench: Bench, offers: list[tuple[str, int]] | None = None) -> SessionEditor:
    def offer(session: Session, version: int, answer: attention_pb2.OpenSessionResponse) -> None:
        (offers if offers is not None else []).append((session.handle.session_id, version))
        answer.local_channel_refused = "none here"

    return SessionEditor(bench.node, offer)


def request(bench: Bench, session: Session, **edit: object) -> attention_pb2.EditSessionRequest:
    return attention_pb2.EditSessionRequest(
        session_id=session.handle.session_id,
        generation=session.handle.generation,
        boot_id=bench.node.boot_id,
        tenant="beta",
        position_epoch=1,
        **edit,  # type: ignore[arg-type]
    )


ranges = attention_pb2.DropEdit(ranges=[attention_pb2.PositionRange(first=1, last=4)])
moves = attention_pb2.RepositionEdit(moves=[attention_pb2.PositionMove(first=1, last=4, to=0)])


class Leaving:
    """A gRPC context of a caller that may leave."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def left_alone(
    scope: RpcScope, call: Coroutine[Any, Any, object], engine: FakeEngine, name: str
) -> None:
    """The caller leaves while the engine makes what it asked for, and the agent ends all the same."""
    begun, go_on = threading.Event(), threading.Event()
    make = getattr(engine, name)

    def slow(*args: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return make(*args)

    setattr(engine, name, slow)
    calling = asyncio.create_task(call)
    try:
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(begun.wait, 60)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
    finally:
        go_on.set()
    assert await scope.finish(60.0) == 0


@pytest.mark.parametrize("what", ["fork", "open", "truncate"])
async def test_a_session_that_its_caller_never_heard_of_is_closed(bench: Bench, what: str) -> None:
    session, engine = await opened(bench)
    closed: list[str] = []
    engine.close_session = lambda name, generation: closed.append(name) or 3  # type: ignore
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    scope = RpcScope(telemetry, metrics, 60.0)
    service = AttentionService(bench.node, scope, telemetry, metrics, FrameCount(8, metrics))
    context: Any = Leaving()
    if what == "open":
        asked = attention_pb2.OpenSessionRequest(
            cache=convert.cache_ref(session.host.name),
            model_fingerprint=session.host.fingerprint,
            geometry=convert.geometry_message(session.host.manifest),
            score_scale=0.125,
            tenant="beta",
            max_tokens=100,
        )
        await left_alone(scope, service.OpenSession(asked, context), engine, "open_session")
    elif what == "fork":
        fork = request(bench, session, fork=attention_pb2.ForkEdit())
        await left_alone(scope, service.EditSession(fork, context), engine, "fork_session")
    else:
        cut = request(bench, session, truncate=attention_pb2.TruncateEdit(to=5))
        await left_alone(scope, service.EditSession(cut, context), engine, "edit_session")
        assert isinstance(engine.edits[0], EditRequest)
    assert list(session.host.sessions) == [session.handle.session_id]
    assert len(closed) == (what != "truncate") and session.handle.session_id not in closed


OPERATIONS = [
    pytest.param({"truncate": attention_pb2.TruncateEdit(to=5)}, Truncate(5), id="truncate"),
    pytest.param(
        {"truncate": attention_pb2.TruncateEdit(to=5, anew=True)}, Truncate(5, anew=True), id="truncate-anew"
    ),
    pytest.param({"drop": ranges}, Drop(((1, 4),)), id="drop"),
    pytest.param({"drop": attention_pb2.DropEdit()}, Drop(()), id="drop-nothing"),
    pytest.param({"reposition": moves}, Reposition((Move(1, 4, 0),)), id="moves"),
    pytest.param(
        {"reposition": attention_pb2.RepositionEdit(close_gaps=True)}, Reposition(), id="close-gaps"
    ),
]


@pytest.mark.parametrize(("edit", "operation"), OPERATIONS)
async def test_an_edit_reaches_the_engine_as_what_it_means(
    bench: Bench, edit: dict[str, object], operation: Operation
) -> None:
    session, engine = await opened(bench)
    answer = await editor(bench).edit(request(bench, session, **edit))
    (asked,) = engine.edits
    assert isinstance(asked, EditRequest)
    assert (asked.operation, asked.position_epoch) == (operation, 1)
    assert asked.deadline is not None
    assert (answer.changed, answer.position_epoch, answer.next_position) == (True, 2, 7)
    assert (answer.rows, answer.chunks, answer.HasField("child")) == (5, 4, False)


async def test_a_fork_is_a_session_of_the_same_arm_and_no_unit_of_evidence(bench: Bench) -> None:
    session, engine = await opened(bench)
    offers: list[tuple[str, int]] = []
    fork = attention_pb2.ForkEdit(traceparent="00-trace", local_channel_version=1)
    answer = await editor(bench, offers).edit(request(bench, session, fork=fork))
    assert isinstance(engine.edits[0], ForkRequest)
    child = bench.node.session(answer.child.session_id, answer.child.generation, "beta")
    assert child is not session and child.traceparent == "00-trace"
    assert (child.assignment.arm, child.assignment.sampled) == (ServedArm.BASELINE, False)
    assert not child.counted
    assert offers == [(child.handle.session_id, 1)]
    assert answer.child.boot_id == bench.node.boot_id
    assert answer.child.chunk_tokens == session.host.manifest.chunk_tokens
    assert answer.child.local_channel_refused == "none here"
    assert (answer.position_epoch, answer.next_position) == (2, 7)
    with pytest.raises(CoreError):
        bench.node.session(answer.child.session_id, answer.child.generation, "alpha")
    await session.host.close_session(child)
    assert bench.node.session(session.handle.session_id, session.handle.generation, "beta") is session


async def test_an_engine_is_told_of_the_chunks_of_the_engine_that_answers_it(bench: Bench) -> None:
    session, _ = await opened(bench)
    baselines = session.host.manifest.chunk_tokens
    assert opened_message(bench.node, session).chunk_tokens == baselines
    session.handle = replace(session.handle, chunk_tokens=2 * baselines)
    assert opened_message(bench.node, session).chunk_tokens == 2 * baselines


async def test_a_fork_uses_its_parents_weights_after_the_parent_has_closed(bench: Bench) -> None:
    session, _ = await opened(bench)
    store = session.host.weights
    kept = store.put("alpha", 1, GivenWeights(WeightsShape(1, 1, False, 0.0, 0, False), "kept", bytearray(8)))
    store.used("alpha", 1, session.handle.session_id)
    answer = await editor(bench).edit(request(bench, session, fork=attention_pb2.ForkEdit()))
    child = bench.node.session(answer.child.session_id, answer.child.generation, "beta")
    await session.host.close_session(session)
    with pytest.raises(CoreError) as refused:
        store.held("alpha", 1, "another")
    assert refused.value.reason is Reason.MODEL_MISMATCH
    assert store.held("alpha", 1, "kept") is kept
    await child.host.close_session(child)
    assert store.held("alpha", 1, "another") is None


@pytest.mark.parametrize("reason", [Reason.STEP_ORDER, Reason.NO_DESTINATION_CAPACITY])
async def test_what_the_engine_refuses_opens_nothing(bench: Bench, reason: Reason) -> None:
    session, engine = await opened(bench)
    engine.refusal = CoreError(reason, "not now")
    for edit in ({"fork": attention_pb2.ForkEdit()}, {"truncate": attention_pb2.TruncateEdit()}):
        with pytest.raises(CoreError) as refused:
            await editor(bench).edit(request(bench, session, **edit))
        assert refused.value.reason is reason
    assert list(session.host.sessions) == [session.handle.session_id]
    assert session.frames_running == 0


async def test_a_draining_agent_forks_nothing_and_still_edits(bench: Bench) -> None:
    session, _ = await opened(bench)
    bench.node.draining = True
    with pytest.raises(CoreError) as refused:
        await editor(bench).edit(request(bench, session, fork=attention_pb2.ForkEdit()))
    assert refused.value.reason is Reason.DRAINING
    assert (await editor(bench).edit(request(bench, session, drop=ranges))).changed


async def test_an_edit_is_a_use_of_the_session(bench: Bench) -> None:
    session, _ = await opened(bench)
    bench.clock.advance(100)
    await editor(bench).edit(request(bench, session, drop=ranges))
    assert session.host.idle_sessions(50 * 10**9) == []


async def test_after_an_edit_steps_of_any_number_are_steps(bench: Bench) -> None:
    session, _ = await opened(bench)
    for step in range(3):
        for layer in range(2):
            await session.host.frames.attend(
                session, frame(session.handle.session_id, step, layer), 1 if step else 7
            )
    assert (session.progress.tokens, session.last_answered_step) == (3, 2)
    await editor(bench).edit(request(bench, session, drop=ranges))
    assert session.stalled_upto == (-1, -1) and session.step_errors == {}
    # Step 2 once more is another step, and a decode: the session had its prefill.
    prepared = session.host.frames._prepare(session, frame(session.handle.session_id, 2, 0), 1)
    assert prepared.decode
    await session.host.frames.attend(session, frame(session.handle.session_id, 2, 1), 1)
    assert session.progress.tokens == 4
