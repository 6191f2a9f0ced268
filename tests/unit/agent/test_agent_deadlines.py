"""A frame's deadline reaches the engine on its clock, and ends a computation that changed nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import attention_pb2
from kvtier_agent.attendframes import FrameCount
from kvtier_agent.attention_service import AttentionService
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.config import TierConfig
from kvtier_agent.core_engine import CoreEngine
from kvtier_agent.engine_port import FrameInput, FrameMode, SessionHandle, SessionTerms
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_agent.tierdirs import NodeTiers
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import SessionFacts
from kvtier_core.tiers.fileops import Buffer, OsFileOps
from tests.engine.agent_process import baseline_manifest, default_tiers
from tests.unit.agent.agent_fakes import Bench

EXACT = FrameMode(publish_candidate=False, compare=False, candidate=None, may_publish=lambda: False)
GEOMETRY = baseline_manifest().model.geometry


class Ticking:
    """Seconds that grow by `tick` with each reading."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Cache:
    """A real engine with one session, fed the same rows every time."""

    def __init__(
        self,
        folder: Path,
        budgets: Mapping[str, int] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        configs = [TierConfig.parse(json.dumps(tier)) for tier in default_tiers(folder / "nvme")]
        self.clock = Ticking()
        self._tiers = NodeTiers(configs, "uid-a")
        manifest = baseline_manifest(budgets=budgets)
        self.engine = CoreEngine(manifest, self._tiers.for_manifest(manifest), clock or self.clock)
        self.session: SessionHandle = self.engine.open_session(SessionTerms("alpha", 0.125, 2048, None))

    def frame(self, first: int, rows: int, deadline: float | None = None) -> FrameInput:
        """Rows of layer 0; equal arguments give equal bytes."""
        random = np.random.default_rng(first)
        heads = (GEOMETRY.kv_heads, GEOMETRY.kv_heads, GEOMETRY.query_heads)
        k, v, q = (
            random.standard_normal((rows, count, GEOMETRY.head_dim), dtype=np.float32).tobytes()
            for count in heads
        )
        session = self.session
        return FrameInput(session.session_id, session.generation, 0, 0, first, k, v, first, q, 0, deadline)

    def close(self) -> None:
        self.engine.close()
        self._tiers.close()


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[tuple[Cache, Cache]]:
    pair = Cache(tmp_path / "a"), Cache(tmp_path / "b")
    yield pair
    for cache in pair:
        cache.close()


@pytest.mark.parametrize("chunks_done", [0, 1, 2])
def test_an_engine_stops_at_the_deadline_and_the_session_is_unchanged(
    caches: tuple[Cache, Cache], chunks_done: int
) -> None:
    late = caches[0]
    for cache in caches:
        cache.engine.step(cache.frame(0, 600), EXACT)
    before = late.engine.tiers(), late.engine.blocks(late.session.session_id, late.session.generation)
    late.clock.tick = 1.0
    with pytest.raises(CoreError) as refused:
        late.engine.step(late.frame(600, 8, deadline=late.clock.now + chunks_done + 0.5), EXACT)
    late.clock.tick = 0.0
    assert refused.value.reason is Reason.DEADLINE
    assert refused.value.facts["chunk"] == str(chunks_done)
    after = late.engine.tiers(), late.engine.blocks(late.session.session_id, late.session.generation)
    assert after == before
    outs = [cache.engine.step(cache.frame(600, 8, cache.clock.now + 60), EXACT).out for cache in caches]
    assert outs[0] == outs[1]


def test_a_read_that_hangs_holds_an_engine_no_longer_than_its_frames_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the open chunks in memory, the sealed ones are read from storage."""
    chunk = 256 * 2 * 2 * 64 * 4
    cache = Cache(tmp_path, {"gpu-sim": 2 * chunk, "dram": 0, "nvme": 64 * chunk}, time.monotonic)
    read, release = OsFileOps.read, threading.Event()

    def hanging(self: OsFileOps, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        release.wait(120)
        return read(self, fd, buffers, offset)

    try:
        cache.engine.step(cache.frame(0, 600), EXACT)
        want = cache.engine.step(cache.frame(600, 1), EXACT)
        assert "nvme" in want.receipt.bytes_by_tier
        monkeypatch.setattr(OsFileOps, "read", hanging)
        for _ in range(3):
            with pytest.raises(CoreError) as refused:
                cache.engine.step(cache.frame(601, 1, time.monotonic() + 0.05), EXACT)
            assert refused.value.reason is Reason.DEADLINE
        release.set()
        cache.engine.step(cache.frame(601, 1, time.monotonic() + 60), EXACT)
        again = cache.engine.step(cache.frame(600, 1), EXACT)
        assert again.out == want.out
    finally:
        release.set()
        cache.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("deadline_ms", "seconds"), [(5000, 5.0), (0, 60.0), (3_600_000, 60.0)], ids=["own", "default", "most"]
)
async def test_a_frames_deadline_counts_from_its_receipt(
    bench: Bench, deadline_ms: int, seconds: float
) -> None:
    host: CacheHost = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 100, "")
    metrics = Metrics(CollectorRegistry())
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    service = AttentionService(
        bench.node, RpcScope(telemetry, metrics, 60.0), telemetry, metrics, FrameCount(8, metrics)
    )

    async def frames() -> AsyncIterator[attention_pb2.AttendFrame]:
        yield attention_pb2.AttendFrame(
            session_id=session.handle.session_id,
            generation=session.handle.generation,
            boot_id=bench.node.boot_id,
            tenant="beta",
            q=b"\0" * (GEOMETRY.query_heads * GEOMETRY.head_dim * 4),
            deadline_ms=deadline_ms,
        )

    sent = time.monotonic()
    answers = [one async for one in service.Attend(frames(), None)]  # type: ignore[arg-type]
    assert [one.HasField("error") for one in answers] == [False]
    [frame] = bench.engine.frames
    assert frame.deadline is not None
    assert sent + seconds <= frame.deadline <= time.monotonic() + seconds
