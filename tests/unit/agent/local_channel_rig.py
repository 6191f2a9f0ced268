"""An agent's local channels over a fake engine, on an event loop of its own, for tests that play engines."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from kvtier.local import frames as wire
from kvtier.v1 import attention_pb2
from kvtier_agent.attendframes import FrameCount, FrameDesk
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import Session
from kvtier_agent.config import Limits
from kvtier_agent.engine_port import FrameInput, FrameMode, FrameResult
from kvtier_agent.localchannel.listener import ChannelServer
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.release.enforcement import SessionFacts
from tests.engine.agent_process import baseline_manifest, tiny_geometry
from tests.engine.raw_channel import RawChannel, floats, record
from tests.unit.agent.agent_fakes import Bench, FakeEngine

T = TypeVar("T")
SECONDS = 60.0
HEADS, KV_HEADS, DIM = 6, 2, 64
ROW, QUERY = KV_HEADS * DIM * 4, HEADS * DIM * 4
FRAME_BYTES = 2 * ROW + QUERY


class EchoEngine(FakeEngine):
    """Its answer is the frame's queries, so a test sees whose bytes were computed with."""

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        result = super().step(frame, mode)
        queries = frame.q if isinstance(frame.q, bytes) else np.asarray(frame.q).tobytes()
        return replace(result, out=queries)


class ChannelRig:
    """Runs the server; `opened` gives sessions with offers."""

    def __init__(self, folder: Path, limits: Limits, uids: Callable[[], frozenset[int]] | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-loop", daemon=True)
        self._thread.start()
        self.bench = self.run(self._made(folder))
        self.bench.node.limits = limits
        self.metrics = Metrics(CollectorRegistry())
        telemetry = Telemetry("node-a", "serving/pool", self.bench.node.boot_id, "0", [])
        self.frames = FrameCount(limits.agent_in_flight, self.metrics)
        self.desk = FrameDesk(self.bench.node, telemetry, self.metrics, self.frames)
        self.server = ChannelServer(self.desk, folder / "channels", uids)

    async def _made(self, folder: Path) -> Bench:
        bench = Bench(folder, baseline=baseline_manifest(tiny_geometry(2, HEADS, KV_HEADS, DIM)))
        bench.engines_made = EchoEngine
        await bench.apply()
        return bench

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the agent's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    @property
    def engine(self) -> FakeEngine:
        return self.bench.engine

    @property
    def host(self) -> CacheHost:
        return next(iter(self.bench.node.caches.values()))

    def opened(self, tenant: str = "beta") -> attention_pb2.OpenSessionResponse:
        """A session with an offer."""

        async def open_it() -> attention_pb2.OpenSessionResponse:
            session = await self.host.open_session(SessionFacts(tenant, "", "root", "root"), 0.125, 100, "")
            return attention_pb2.OpenSessionResponse(
                session_id=session.handle.session_id,
                generation=session.handle.generation,
                boot_id=self.bench.node.boot_id,
                local_channel=self.server.offer(session, wire.VERSION),
            )

        return self.run(open_it())

    def session(self, opened: attention_pb2.OpenSessionResponse) -> Session:
        return self.host.sessions[opened.session_id]

    def channel(self, opened: attention_pb2.OpenSessionResponse) -> Attached:
        return Attached(opened)

    def settled(self, done: Callable[[], bool], what: str) -> None:
        """Waits until the agent has got there; the threads of channels end by themselves."""

        async def wait() -> None:
            async with asyncio.timeout(SECONDS):
                while not done():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)

        try:
            self.run(wait())
        except TimeoutError:
            raise AssertionError(f"not within {SECONDS} s: {what}") from None

    def close(self) -> None:
        try:
            assert self.run(self.server.close(SECONDS)) == []
            self.run(self.bench.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SECONDS)
            self._loop.close()


class Attached(RawChannel):
    """A channel with one session attached."""

    def __init__(self, opened: attention_pb2.OpenSessionResponse) -> None:
        super().__init__(opened.local_channel.socket)
        self.opened = opened
        self._sequence = 0
        try:
            self.first = self.hello(opened.local_channel.token)
        except BaseException:
            self.close()
            raise

    def frame(self, offset: int = 0, seed: int = 0, **change: Any) -> wire.FrameRecord:
        """Writes a frame's tensors, by default of one row and one query, and gives its record."""
        self._sequence += 1
        self.put(offset, floats(FRAME_BYTES // 4, seed))
        change = {"sequence": self._sequence, "offset": offset, **change}
        return record(self.opened, self.first, **change)

    def ask(self, *frames: wire.FrameRecord) -> list[attention_pb2.AttendAnswer]:
        self.send(packed(*frames))
        return self.answer(len(frames))

    def works(self) -> bool:
        """Whether a frame is answered with what was sent."""
        self._sequence += 1
        seed = 1000 + self._sequence
        [answer] = self.ask(self.frame(seed=seed))
        queries = floats(FRAME_BYTES // 4, seed)[2 * ROW :]
        return not answer.HasField("error") and self.output(0, QUERY) == queries


def packed(*frames: wire.FrameRecord) -> bytes:
    return wire.pack_frames(frames, time.monotonic_ns())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def channel_rig(
    folder: Path, limits: Limits | None = None, uids: Callable[[], frozenset[int]] | None = None
) -> Iterator[ChannelRig]:
    made = ChannelRig(folder, limits or Limits(), uids)
    try:
        yield made
    finally:
        made.close()
