"""A cache whose engine is replaced is not unknown meanwhile to whoever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.v1 import attention_pb2, blocks_pb2
from kvtier_agent import attention_service
from kvtier_agent.arriving import Arriving
from kvtier_agent.attention_service import AttentionService
from kvtier_agent.blocksessions import BlockSessions
from kvtier_agent.cachesession import CacheName
from kvtier_agent.convert import cache_ref
from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import baseline_manifest
from tests.unit.agent.agent_fakes import Bench, FakeEngine

WAIT_SECONDS = 60.0
CHAT = CacheName("serving", "chat", "cache-uid-1")


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(CHAT, id="by-uid"),
        pytest.param(CacheName("serving", "chat", ""), id="by-name"),
    ],
)
async def test_whoever_asks_for_a_cache_that_is_expected_waits_for_it(cache: CacheName) -> None:
    arriving = Arriving()
    with arriving.expected(CHAT):
        waiting = asyncio.create_task(arriving.wait(cache, WAIT_SECONDS))
        await asyncio.sleep(0)
        assert not waiting.done()
        await arriving.wait(cache, 0.0)
    async with asyncio.timeout(WAIT_SECONDS):
        await waiting
        await arriving.wait(cache, WAIT_SECONDS)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(CacheName("serving", "chat", "another"), id="another-life"),
        pytest.param(CacheName("serving", "other", ""), id="another-name"),
        pytest.param(CacheName("elsewhere", "chat", "cache-uid-1"), id="another-namespace"),
    ],
)
async def test_nobody_waits_for_another(cache: CacheName) -> None:
    arriving = Arriving()
    with arriving.expected(CHAT):
        async with asyncio.timeout(WAIT_SECONDS):
            await arriving.wait(cache, 10 * WAIT_SECONDS)


class Rebuilding:
    """A baseline that takes a new engine, which is being built until `go_on`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.building, self.go_on = threading.Event(), threading.Event()
        bench.engines_made = self._built
        self.baseline = bench.baseline = baseline_manifest(budgets={"dram": 80 << 20})
        self.task = asyncio.create_task(bench.apply())

    def _built(self, manifest: RuntimeManifest) -> FakeEngine:
        self.building.set()
        assert self.go_on.wait(WAIT_SECONDS)
        return FakeEngine(manifest)


@pytest.fixture
async def rebuilding(tmp_path: Path) -> AsyncIterator[Rebuilding]:
    bench = Bench(tmp_path)
    await bench.apply()
    made = Rebuilding(bench)
    assert await asyncio.to_thread(made.building.wait, WAIT_SECONDS)
    with pytest.raises(CoreError) as refused:
        bench.node.host(CHAT)
    assert refused.value.reason is Reason.CACHE_UNKNOWN
    yield made
    made.go_on.set()
    await made.task
    await bench.close()


class Answered(Exception):
    """What would be answered now."""


async def asked(call: asyncio.Task[Any], rebuilding: Rebuilding) -> None:
    """It says nothing until the engine is there."""
    await asyncio.sleep(0)
    assert not call.done()
    rebuilding.go_on.set()
    await rebuilding.task
    await asyncio.wait([call], timeout=WAIT_SECONDS)


async def test_a_session_is_opened_on_the_new_engine(
    rebuilding: Rebuilding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(request: object, host: Any) -> None:
        raise Answered(host.baseline_digest)

    monkeypatch.setattr(attention_service, "_check_identity", identity)
    given = SimpleNamespace(_node=rebuilding.bench.node)
    request = attention_pb2.OpenSessionRequest(cache=cache_ref(CHAT))
    call = asyncio.create_task(AttentionService._open(cast(AttentionService, given), request))
    await asked(call, rebuilding)
    assert str(call.exception()) == rebuilding.baseline.digest()


async def test_a_session_that_would_start_from_blocks_is_told_what_has_become_of_it(
    rebuilding: Rebuilding,
) -> None:
    node = rebuilding.bench.node

    class Given(BlockSessions):
        def _of(self, scope: object, session_id: str, generation: int) -> Any:
            assert node.host(CHAT).baseline_digest == rebuilding.baseline.digest()
            return node.session(session_id, generation, "team-a")

    sessions = Given(node, cast(Any, None))
    request = blocks_pb2.StartSessionRequest(
        scope=blocks_pb2.BlockScope(cache=cache_ref(CHAT)), session_id="session-1"
    )
    call = asyncio.create_task(sessions.start(request))
    await asked(call, rebuilding)
    error = call.exception()
    assert isinstance(error, CoreError) and error.reason is Reason.SESSION_UNKNOWN
