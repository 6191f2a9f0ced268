"""A stream that ends at any moment gives back every place it took, and what it waits for has an end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import attention_pb2, blocks_pb2, common_pb2
from kvtier_agent.attendframes import FrameCount
from kvtier_agent.attention_service import AttentionService
from kvtier_agent.blockcalls import BlockCalls
from kvtier_agent.blockmetrics import BlockMetrics
from kvtier_agent.blocks_service import BlocksService
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.engine_port import EngineRunner
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import SessionFacts
from kvtier_crds.manifest import model_fingerprint
from tests.engine.agent_process import CACHE, baseline_manifest
from tests.engine.attention_driver import wire_geometry
from tests.unit.agent.agent_fakes import Bench, FakeEngine

GEOMETRY = baseline_manifest().model.geometry


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


class Aborted:
    """A servicer context that remembers how its call was ended."""

    class Ended(Exception):
        """As grpc.aio raises it in the handler."""

    status: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, status: grpc.StatusCode, details: str, trailing: object) -> None:
        self.status = status
        raise Aborted.Ended(details)


async def test_a_stream_that_ends_while_a_frame_waits_for_the_queue_takes_no_place_with_it(
    bench: Bench,
) -> None:
    """With one frame in flight allowed, two are queued; the fifth is accepted and finds the queue full."""
    bench.node.limits = replace(bench.node.limits, stream_in_flight=1)
    host: CacheHost = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 100, "")
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    frames = FrameCount(8, metrics)
    service = AttentionService(bench.node, RpcScope(telemetry, metrics, 60.0), telemetry, metrics, frames)
    release, sent = threading.Event(), asyncio.Semaphore(0)
    bench.engine.hook = lambda: release.wait(120) and None

    async def incoming() -> AsyncIterator[attention_pb2.AttendFrame]:
        for _ in range(6):
            sent.release()
            yield attention_pb2.AttendFrame(
                session_id=session.handle.session_id,
                generation=session.handle.generation,
                boot_id=bench.node.boot_id,
                tenant="beta",
                q=b"\0" * (GEOMETRY.query_heads * GEOMETRY.head_dim * 4),
            )

    answers = service.Attend(incoming(), None)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        first = asyncio.ensure_future(anext(answers))
        for _ in range(4):
            await sent.acquire()
        release.set()
        assert not (await first).HasField("error")
        refused = await anext(answers)
        assert refused.error.reason == common_pb2.QUEUE_FULL
        await sent.acquire()
        assert frames.count == 1
        await answers.aclose()
        # The reader ends by itself; it gives its own place back.
        [reader] = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait([reader])
    assert frames.count == 0


async def test_a_stream_without_frames_ends_and_says_why(bench: Bench) -> None:
    bench.node.limits = replace(bench.node.limits, session_idle_seconds=0.05)
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    frames = FrameCount(8, metrics)
    service = AttentionService(bench.node, RpcScope(telemetry, metrics, 60.0), telemetry, metrics, frames)
    ended = asyncio.Event()

    async def silence() -> AsyncIterator[attention_pb2.AttendFrame]:
        try:
            await asyncio.Event().wait()
            yield attention_pb2.AttendFrame()
        finally:
            ended.set()

    context = Aborted()
    async with asyncio.timeout(60):
        with pytest.raises(Aborted.Ended, match=r"SESSION_UNKNOWN: no frame came for 0\.05 s"):
            await anext(service.Attend(silence(), context))  # type: ignore[arg-type]
        await ended.wait()
    assert context.status is grpc.StatusCode.NOT_FOUND


async def test_a_frame_of_an_engine_that_hangs_is_answered_and_its_session_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Called hung 30 ms after the frame came, whose own deadline does not pass before it is computed.
    grace, deadline = "kvtier_agent.attendframes.ENGINE_GRACE_SECONDS", 60.0
    monkeypatch.setattr(grace, 0.03 - deadline)
    host: CacheHost = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 100, "")
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    frames = FrameCount(8, metrics)
    service = AttentionService(bench.node, RpcScope(telemetry, metrics, 60.0), telemetry, metrics, frames)
    release, answered = threading.Event(), asyncio.Event()
    bench.engine.hook = lambda: release.wait(120) and None

    async def incoming() -> AsyncIterator[attention_pb2.AttendFrame]:
        for _ in range(2):
            yield attention_pb2.AttendFrame(
                session_id=session.handle.session_id,
                generation=session.handle.generation,
                boot_id=bench.node.boot_id,
                tenant="beta",
                q=b"\0" * (GEOMETRY.query_heads * GEOMETRY.head_dim * 4),
                deadline_ms=int(deadline * 1000),
            )
            await answered.wait()

    answers = service.Attend(incoming(), None)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        late = await anext(answers)
        assert late.error.reason == common_pb2.DEADLINE
        assert "does not answer" in late.error.message
        assert (session.frames_running, frames.count) == (0, 0)
        monkeypatch.setattr(grace, deadline)
        release.set()
        answered.set()
        assert not (await anext(answers)).HasField("error")
        await answers.aclose()


async def test_sessions_that_are_being_opened_count_towards_the_bound(bench: Bench) -> None:
    bench.node.limits = replace(bench.node.limits, max_sessions=2)
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    scope = RpcScope(telemetry, metrics, 60.0)
    service = AttentionService(bench.node, scope, telemetry, metrics, FrameCount(8, metrics))
    request = attention_pb2.OpenSessionRequest(
        cache=CACHE,
        model_fingerprint=model_fingerprint(bench.baseline.model),
        geometry=wire_geometry(GEOMETRY),
        score_scale=0.125,
        tenant="beta",
        max_tokens=100,
    )
    contexts = [Aborted() for _ in range(5)]
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(service.OpenSession(request, context) for context in contexts),  # type: ignore[arg-type]
            return_exceptions=True,
        )
    refused = [context.status for context in contexts if context.status is not None]
    assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
    assert bench.node.session_count() == 2
    bench.engine.refusal = CoreError(Reason.NO_DESTINATION_CAPACITY, "full")
    bench.node.limits = replace(bench.node.limits, max_sessions=3)
    for _ in range(2):
        context = Aborted()
        with pytest.raises(Aborted.Ended, match="full"):
            await service.OpenSession(request, context)  # type: ignore[arg-type]


async def test_a_call_that_a_closing_engine_never_ran_is_refused_by_name(bench: Bench) -> None:
    release, begun = threading.Event(), threading.Event()
    runner = EngineRunner(FakeEngine(bench.baseline), "x", 4)
    running = asyncio.create_task(runner.call(lambda: begun.set() or release.wait(120)))
    queued = asyncio.create_task(runner.call(lambda: None))
    # A call that has not begun is not run either.
    assert await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(runner.close(60))
    await asyncio.wait([queued], timeout=60)
    release.set()
    async with asyncio.timeout(60):
        await closing
        assert await running
        with pytest.raises(CoreError) as refused:
            await queued
    assert refused.value.reason is Reason.CACHE_UNKNOWN
    assert runner.pending == 0


async def test_a_block_that_the_engine_does_not_bring_is_refused_at_the_deadline(bench: Bench) -> None:
    bench.node.limits = replace(bench.node.limits, control_deadline_seconds=0.05)
    host: CacheHost = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 100, "")
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    calls = BlockCalls(bench.node, BlockMetrics(metrics.registry))
    service = BlocksService(bench.node, RpcScope(telemetry, metrics, 60.0), calls)
    release = threading.Event()
    busy = asyncio.create_task(host.runner.call(lambda: release.wait(120)))
    await asyncio.sleep(0)
    handle = session.handle
    ref = blocks_pb2.BlockRef(session_id=handle.session_id, session_generation=handle.generation)
    request = blocks_pb2.ReadBlockRequest(ref=ref, tenant="beta", boot_id=bench.node.boot_id)
    context = Aborted()
    async with asyncio.timeout(60):
        with pytest.raises(Aborted.Ended):
            await anext(service.Read(request, context))  # type: ignore[arg-type]
        release.set()
        await busy
    assert context.status is grpc.StatusCode.DEADLINE_EXCEEDED
