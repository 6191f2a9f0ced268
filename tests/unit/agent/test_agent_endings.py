"""An agent ends in bounded time: what it has begun is finished first, what hangs is named."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2, control_pb2_grpc
from kvtier_agent import node as node_module
from kvtier_agent.cachesession import CacheName
from kvtier_agent.cli import EXIT_CUT_OFF, build_parser, main
from kvtier_agent.commands import Command
from kvtier_agent.config import AgentConfig, ConfigError
from kvtier_agent.engine_port import EngineRunner
from kvtier_agent.evidence_windows import EvidenceWindows
from kvtier_agent.keyedlocks import KeyedLocks
from kvtier_agent.metricshttp import MetricsHttp
from kvtier_agent.nodeends import CacheEnds
from kvtier_agent.rpc import RpcScope
from kvtier_agent.server import AgentServer
from kvtier_agent.statedir import StateDir
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_agent.tierdirs import NodeTier
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.leases import FenceToken
from kvtier_crds.manifest import RuntimeManifest
from tests.cluster.kvtier_localplane.pki import CertificateAuthority
from tests.engine.agent_process import CACHE, agent_arguments, baseline_manifest, default_tiers
from tests.ports import free_port
from tests.unit.agent.agent_fakes import Bench, CacheBlocks, FakeEngine


class Hung:
    """An engine call that ends when told to."""

    def __init__(self, runner: EngineRunner) -> None:
        self.release, self.begun = threading.Event(), threading.Event()
        self.task = asyncio.create_task(runner.call(self._hang))

    def _hang(self) -> bool:
        self.begun.set()
        return self.release.wait(120)

    async def until_begun(self) -> Hung:
        await asyncio.to_thread(self.begun.wait, 120)
        return self


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    await made.apply()
    return made


def runner_of(bench: Bench) -> EngineRunner:
    [host] = bench.node.caches.values()
    return host.runner


async def test_an_engine_whose_call_hangs_is_waited_for_only_so_long_and_closed_when_it_ends(
    bench: Bench,
) -> None:
    hung = await Hung(runner_of(bench)).until_begun()
    async with asyncio.timeout(60):
        assert not await runner_of(bench).close(0.01)
        assert not bench.engine.closed
        hung.release.set()
        assert await runner_of(bench).close(10)
        assert await hung.task
    assert bench.engine.closed
    await bench.close()


async def test_a_node_names_what_did_not_end_and_keeps_its_folders(bench: Bench, tmp_path: Path) -> None:
    hung = await Hung(runner_of(bench)).until_begun()
    async with asyncio.timeout(60):
        assert await bench.node.close(2.0) == ["engine of cache cache-uid-1"]
        with pytest.raises(ConfigError, match="another agent holds"):
            StateDir(tmp_path / "state")
        hung.release.set()
        await hung.task
        await bench.close()
    StateDir(tmp_path / "state").close()


async def test_no_engine_is_built_over_the_tiers_of_one_that_does_not_end(bench: Bench) -> None:
    limits = bench.node.limits
    bench.node.limits = limits.__class__(control_deadline_seconds=0.05)
    hung = await Hung(runner_of(bench)).until_begun()
    other = bench.baseline.model_copy(update={"page_tokens": 32})
    command = bench.command()
    async with asyncio.timeout(60):
        for _ in range(2):
            with pytest.raises(CoreError) as refused:
                await bench.node.apply_baseline(command, other.canonical(), other.digest())
            assert refused.value.reason is Reason.DEADLINE
            assert len(bench.engines) == 1
            assert "does not end" in bench.node.faults["cache-uid-1"]
        hung.release.set()
        await hung.task
        bench.node.limits = limits
        digest = await bench.node.apply_baseline(command, other.canonical(), other.digest())
    assert digest == other.digest()
    assert not bench.node.faults
    await bench.close()


class StuckBlocks:
    """Shared blocks with a call in a thread that does not come back until it is let go."""

    def __init__(self) -> None:
        self.ended = False

    async def close(self, seconds: float) -> bool:
        return self.ended


def stick(bench: Bench) -> StuckBlocks:
    blocks = StuckBlocks()
    [host] = bench.node.caches.values()
    host.blocks = blocks  # type: ignore[assignment]
    return blocks


async def test_a_node_closes_no_engine_under_calls_on_its_blocks(bench: Bench, tmp_path: Path) -> None:
    blocks = stick(bench)
    assert await bench.node.close(5) == ["calls on blocks of cache cache-uid-1"]
    assert not bench.engine.closed
    with pytest.raises(ConfigError, match="another agent holds"):
        StateDir(tmp_path / "state")
    blocks.ended = True
    assert await bench.node.close(5) == []
    assert bench.engine.closed


class Ending:
    """Blocks or an engine that take a time to end, on a clock of the test."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes = clock, takes
        self.given: list[float] = []

    async def close(self, seconds: float) -> bool:
        self.given.append(seconds)
        self.clock[0] += min(seconds, self.takes)
        return self.takes <= seconds


@pytest.mark.parametrize("way", ["close", "end"])
async def test_blocks_and_engine_of_a_cache_share_one_deadline(way: str) -> None:
    clock = [100.0]
    blocks, runner = Ending(clock, 4.75), Ending(clock, 1.0)
    ends = CacheEnds(lambda: clock[0])
    ends.begin("u", CacheBlocks(blocks, runner=runner))  # type: ignore[arg-type]
    if way == "close":
        assert await ends.close({}, 5.0) == ["engine of cache u"]
    else:
        assert await ends.end("u", 5.0) == "a call of the engine of cache u does not end"
    assert (blocks.given, runner.given) == ([5.0], [0.25])
    assert clock[0] == 105.0


async def test_a_cache_is_removed_when_the_calls_on_its_blocks_have_ended(bench: Bench) -> None:
    blocks = stick(bench)
    command = bench.command()
    for _ in range(2):
        with pytest.raises(CoreError, match="blocks of cache cache-uid-1") as refused:
            await bench.node.remove_cache(command)
        assert refused.value.reason is Reason.DEADLINE
        assert not bench.engine.closed
    blocks.ended = True
    await bench.node.remove_cache(command)
    assert bench.engine.closed
    await bench.close()


async def test_reports_of_an_engine_that_hangs_are_given_up_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "REPORT_SECONDS", 0.01)
    await bench.node.refresh_reports()
    before, tiers, release = bench.node.tier_reports(), bench.engine.tiers, threading.Event()
    calls: list[None] = []

    def hang() -> Any:
        calls.append(None)
        release.wait(120)
        return tiers()

    bench.engine.tiers = hang  # type: ignore[method-assign]
    bench.engine.used = 7
    async with asyncio.timeout(60):
        for _ in range(3):
            await bench.node.refresh_reports()
        assert bench.node.tier_reports() is before
        assert len(calls) == 1
        release.set()
        monkeypatch.setattr(node_module, "REPORT_SECONDS", 10.0)
        await bench.node.refresh_reports()
    assert [report.used_bytes for report in bench.node.tier_reports()] == [0, 7, 0]
    await bench.close()


async def test_an_engine_that_cannot_say_what_it_uses_fails_no_command(bench: Bench) -> None:
    await bench.node.refresh_reports()
    before, tiers = bench.node.tier_reports(), bench.engine.tiers

    def fail() -> Any:
        raise ZeroDivisionError("a defect")

    bench.engine.tiers = fail  # type: ignore[method-assign]
    await bench.node.refresh_reports()
    assert bench.node.tier_reports() is before
    bench.engine.tiers, bench.engine.used = tiers, 7  # type: ignore[method-assign]
    await bench.node.refresh_reports()
    assert bench.node.tier_reports() is not before
    await bench.close()


async def test_a_lock_lives_as_long_as_somebody_needs_it() -> None:
    locks = KeyedLocks()
    order: list[str] = []

    async def work(name: str, key: str) -> None:
        async with locks.hold(key):
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    first, second = asyncio.create_task(work("a", "x")), asyncio.create_task(work("b", "x"))
    third = asyncio.create_task(work("c", "y"))
    await asyncio.sleep(0)
    assert len(locks) == 2
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert [entry for entry in order if entry[0] != "c"] == ["a in", "a out", "b in", "b out"]
    assert len(locks) == 0


async def test_commands_for_caches_that_are_not_there_leave_nothing_behind(bench: Bench) -> None:
    for number in range(50):
        command = Command(CacheName("serving", "x", f"uid-{number}"), FenceToken(1), bench.node.boot_id, "c")
        with pytest.raises(CoreError) as refused:
            await bench.node.revoke(command, "IntentAbort", b"")
        assert refused.value.reason is Reason.CACHE_UNKNOWN
    assert len(bench.node._locks) == 0
    await bench.close()


async def test_a_command_that_lost_its_caller_is_waited_for() -> None:
    metrics = Metrics(CollectorRegistry())
    scope = RpcScope(Telemetry("n", "p", "b", "0", []), metrics, 5.0)
    begun, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def command() -> Any:
        begun.set()
        await release.wait()
        done.set()

    class Context:
        def invocation_metadata(self) -> tuple[()]:
            return ()

    calling = asyncio.create_task(scope.run("Control.Revoke", Context(), command(), finish=True))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await begun.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert await scope.finish(0.01) == 1
        release.set()
        assert await scope.finish(10) == 0
    assert done.is_set()


async def test_the_metrics_port_is_closed_with_its_thread() -> None:
    port = free_port()
    served = MetricsHttp(port, "127.0.0.1", CollectorRegistry())
    socket.create_connection(("127.0.0.1", port), 5).close()
    assert await served.stop(10) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    assert not served._thread.is_alive()


class ServedAgent:
    """A whole agent in this process over fake engines, whose building waits to be released."""

    def __init__(self, folder: Path) -> None:
        authority = CertificateAuthority("ca", folder / "pki")
        certificate = authority.issue("node-a", folder / "pki", san_ip=["127.0.0.1"])
        self.operator = authority.issue("kvtier-operator", folder / "pki", server=False)
        arguments = agent_arguments(folder, "node-a", certificate, default_tiers(folder / "nvme"))
        config = AgentConfig.from_arguments(build_parser().parse_args(arguments))
        self.engines: list[FakeEngine] = []
        self.building, self.release = threading.Event(), threading.Event()
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.server = AgentServer(config, self._build, EvidenceWindows, self._registration)

    def _build(
        self, manifest: RuntimeManifest, tiers: Sequence[NodeTier], key_secret: str = ""
    ) -> FakeEngine:
        self.building.set()
        assert self.release.wait(120)
        self.engines.append(FakeEngine(manifest))
        return self.engines[-1]

    def _registration(self, config: Any, node: Any, metrics: Any, endpoints: Any) -> None:
        self.address.set_result(endpoints.control)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


async def test_a_baseline_that_is_being_built_at_the_end_is_built_and_its_engine_closed(
    short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = ServedAgent(short_folder)
    running = asyncio.create_task(agent.server.run())
    manifest = baseline_manifest()
    async with asyncio.timeout(30):
        address = await agent.address
        pair = agent.operator
        credentials = grpc.ssl_channel_credentials(
            pair.ca_file.read_bytes(), pair.key_file.read_bytes(), pair.cert_file.read_bytes()
        )
        async with grpc.aio.secure_channel(
            address, credentials, [("grpc.ssl_target_name_override", "node-a")]
        ) as channel:
            request = control_pb2.ApplyBaselineRequest(
                cache=CACHE,
                boot_id=agent.server.node.boot_id,
                manifest=manifest.canonical(),
                digest=manifest.digest(),
            )
            request.fence.value = 1
            call = control_pb2_grpc.ControlStub(channel).ApplyBaseline(request)  # type: ignore[no-untyped-call]
            await asyncio.to_thread(agent.building.wait, 20)
            agent.server.stop()
            await asyncio.gather(call, return_exceptions=True)
        # The caller is gone and its server with it; only the command goes on.
        agent.release.set()
        assert await running == []
    [engine] = agent.engines
    assert engine.closed
    assert agent.server.node.highest_fence(CACHE.uid) == 1


@pytest.mark.parametrize(("left", "status"), [([], 0), (["engine of cache x"], EXIT_CUT_OFF)])
def test_the_process_ends_though_something_hangs(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, left: list[str], status: int
) -> None:
    class Ended(Exception):
        pass

    class Server:
        def __init__(self, *_: object) -> None: ...

        async def run(self) -> list[str]:
            return left

    def leave(code: int) -> None:
        raise Ended(code)

    authority = CertificateAuthority("ca", short_folder / "pki")
    arguments = agent_arguments(short_folder, "node-a", authority.issue("node-a", short_folder / "pki"), [])
    monkeypatch.setattr("kvtier_agent.server.AgentServer", Server)
    monkeypatch.setattr("kvtier_agent.cli.os._exit", leave)
    monkeypatch.setattr("kvtier_agent.cli.configure_logging", lambda level: None)
    monkeypatch.setattr("kvtier_agent.cli.logging.shutdown", lambda: None)
    if status == 0:
        assert main(arguments) == 0
    else:
        with pytest.raises(Ended) as ended:
            main(arguments)
        assert ended.value.args == (status,)
