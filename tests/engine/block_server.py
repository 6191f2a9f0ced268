"""A real engine socket over a real block store, with an engine that computes nothing: for tests of shared
blocks that need neither a process nor a model.

The server runs on an event loop of its own thread, so that the synchronous client can be used beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from kvtier.v1 import attention_pb2_grpc, blocks_pb2, blocks_pb2_grpc
from kvtier_agent.attendframes import FrameCount
from kvtier_agent.attention_service import AttentionService
from kvtier_agent.blockcalls import BlockCalls
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.blockmetrics import BlockMetrics, StoreCollector
from kvtier_agent.blocks_service import BlocksService
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_client.blocks import BlocksClient, CacheName
from kvtier_client.blocksource import BlockSource
from kvtier_client.session import Geometry
from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, Tier
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import CACHE, baseline_manifest
from tests.unit.agent.agent_fakes import Bench

T = TypeVar("T")
WAIT_SECONDS = 60.0
BLOCK_TOKENS = 16
MANIFEST = baseline_manifest(chunk_tokens=BLOCK_TOKENS, page_tokens=16)


def source_of(manifest: RuntimeManifest = MANIFEST, **changed: Any) -> BlockSource:
    """What an engine of the manifest's model states of one layer's committed rows."""
    model = manifest.model
    shape = model.geometry
    stated: dict[str, Any] = {
        "model_artifact_digest": model.artifact_digest,
        "checkpoint": model.checkpoint,
        "adapters": (),
        "geometry": Geometry(shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim),
        "geometry_dtype": shape.dtype.value,
        "numerics_version": "engine/1",
        "device_kind": "cuda-sm90",
        "rope_theta": model.rope.theta,
        "rope_interleaved": model.rope.interleaved,
        "position_contract": model.position_contract.value,
        "visibility_mask": "causal",
        "visibility_support": "all",
        "dtype": "float32",
        "codec": "identity",
        "layout": "kv-head-major-f32/1",
        "producer": "exact",
        "layers": (0, 1),
        "kv_heads": (0, shape.kv_heads),
        "block_tokens": manifest.chunk_tokens,
    }
    return BlockSource(**{**stated, **changed})


def payload_of(seed: int, manifest: RuntimeManifest = MANIFEST) -> bytes:
    """The bytes of one block; equal seeds, equal bytes."""
    shape = manifest.model.geometry
    size = 2 * shape.kv_heads * manifest.chunk_tokens * shape.head_dim * 4
    return np.random.default_rng(seed).bytes(size)


def tokens_of(blocks: int, prompt: int = 0, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """The tokens of whole blocks of one prompt; other prompts differ from their first block on."""
    return [prompt * 1000 + at % 997 for at in range(blocks * block_tokens)]


@dataclass
class BlockServer:
    """A running socket. `store` and `driver` are those behind it."""

    socket_path: Path
    store: BlockStore
    bench: Bench
    registry: CollectorRegistry
    loop: asyncio.AbstractEventLoop
    clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(WAIT_SECONDS)

    @property
    def flash(self) -> NvmeTier:
        found = self.store.parts.tiers[1]
        assert isinstance(found, NvmeTier)
        return found

    def scope(self, said: BlockSource | None = None, **changed: Any) -> blocks_pb2.BlockScope:
        """As a client's, with single fields changed."""
        stated: dict[str, Any] = {
            "cache": CACHE,
            "tenant": "team-a",
            "boot_id": self.bench.node.boot_id,
            "deadline_ms": 25_000,
            "source": None if said is None else said.message(),
        }
        return blocks_pb2.BlockScope(**{**stated, **changed})

    def stub(self, *options: tuple[str, int]) -> Any:
        channel = self.clients.enter_context(grpc.insecure_channel(f"unix:{self.socket_path}", options))
        return blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]

    def unheld(self) -> bool:
        """No copy is leased."""
        directory = self.store.directory
        return not any(columns.leases.array[: directory.used].any() for columns in directory.replicas.tiers)

    def idle(self) -> bool:
        """Nothing is held: no reservation, lease, call or wait."""
        store = self.store
        return self.unheld() and not (
            store.writes.open_blocks or store.reads.flights.tickets() or self.host.calls
        )

    @property
    def host(self) -> BlockHost:
        found = next(iter(self.bench.node.caches.values())).blocks
        assert found is not None
        return found

    def client(self, tenant: str = "team-a", timeout: float = 25.0, **more: Any) -> BlocksClient:
        name = CacheName(CACHE.namespace, CACHE.name, CACHE.uid)
        client = BlocksClient(self.socket_path, name, tenant, timeout=timeout, **more)
        return self.clients.enter_context(client)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for what another thread brings about."""
    deadline = time.monotonic() + WAIT_SECONDS
    gate = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        gate.wait(0.005)


@contextlib.contextmanager
def block_server(
    folder: Path,
    *,
    memory: int = 64,
    storage: int = 256,
    manifest: RuntimeManifest = MANIFEST,
    files: FileOps | None = None,
) -> Iterator[BlockServer]:
    """memory, storage: slots of the two tiers. files: of the storage tier."""
    shape = manifest.model.geometry
    layout = ChunkLayout(shape.kv_heads, manifest.chunk_tokens, shape.head_dim)
    kept = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
    nvme = NvmeTier(
        "nvme",
        layout,
        storage,
        folder=folder,
        file_key="cache",
        files=files or OsFileOps(),
        capability=kept,
        clock=time.monotonic,
    )
    tiers: list[Tier] = [CpuTier("dram", layout, memory, clock=time.monotonic), nvme]
    bell = Bell()
    store = BlockStore(tiers, time.monotonic, wake=bell.ring)
    driver = Driver(store, bell, time.monotonic)
    driver.start()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="block-server", daemon=True)
    thread.start()
    with tempfile.TemporaryDirectory(prefix="kv") as place:
        path = Path(place) / "s"
        registry = CollectorRegistry()

        async def start() -> tuple[Bench, grpc.aio.Server]:
            bench = Bench(
                Path(place) / "node",
                blocks_of=lambda engine: BlockHost(store, driver, time.monotonic),
                baseline=manifest,
            )
            await bench.apply()
            server = grpc.aio.server()
            telemetry, metrics = Telemetry("node-a", "p", bench.node.boot_id, "0", []), Metrics(registry)
            scope = RpcScope(telemetry, metrics, bench.node.limits.control_deadline_seconds)
            counted = BlockMetrics(registry)
            StoreCollector(
                registry,
                lambda: [host.blocks for host in bench.node.caches.values() if host.blocks is not None],
                time.monotonic,
            )
            blocks = BlocksService(bench.node, scope, BlockCalls(bench.node, counted))
            blocks_pb2_grpc.add_BlocksServicer_to_server(blocks, server)  # type: ignore[no-untyped-call]
            frames = FrameCount(8, metrics)
            attention = AttentionService(bench.node, scope, telemetry, metrics, frames)
            attention_pb2_grpc.add_AttentionServicer_to_server(attention, server)  # type: ignore[no-untyped-call]
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            return bench, server

        bench, server = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_SECONDS)
        running = BlockServer(path, store, bench, registry, loop)
        try:
            yield running
        finally:
            running.clients.close()
            running.on_loop(lambda: _stopped(server))
            running.on_loop(bench.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_SECONDS)
            loop.close()
            driver.close()
            store.check()
            for tier in tiers:
                tier.close()


async def _stopped(server: grpc.aio.Server) -> None:
    await server.stop(1.0)
