"""Shared blocks of a real agent process: what a crash leaves, who shares a read, whose blocks are whose."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import blocks_pb2, blocks_pb2_grpc
from kvtier_agent.inspectcli import main as inspect
from kvtier_client.blocks import BlocksClient, CacheName, Keys
from kvtier_client.errors import KvtierError
from kvtier_core.errors import Reason
from tests.engine.agent_process import CACHE, Agent, baseline_manifest, running_agent
from tests.engine.block_server import payload_of, source_of, tokens_of

BLOCKS = 200
BLOCK_TOKENS = 32
DELETED = range(40, 60)
CLIENTS = 32
SHARED = 24
# Memory for 32 blocks of 32 KiB, storage for 512 with their header pages.
MANIFEST = baseline_manifest(
    chunk_tokens=BLOCK_TOKENS,
    page_tokens=16,
    budgets={"gpu-sim": 0, "dram": 32 * 32768, "nvme": 512 * 40960},
)
SOURCE = source_of(MANIFEST)
TOKENS = tokens_of(BLOCKS, 1, BLOCK_TOKENS)
SENT = [payload_of(at, MANIFEST) for at in range(BLOCKS)]


def kept_tiers(folder: Path) -> Sequence[Mapping[str, Any]]:
    """A node whose flash outlives the agent."""
    flash = {"className": "nvme", "medium": "nvme", "capacity": "256Mi", "persistence": "node"}
    return [
        {"className": "dram", "medium": "cpu", "capacity": "256Mi"},
        {**flash, "device": {"path": str(folder)}},
    ]


def client_of(agent: Agent, tenant: str = "team-a") -> BlocksClient:
    name = CacheName(CACHE.namespace, CACHE.name, CACHE.uid)
    return BlocksClient(agent.socket_path, name, tenant, timeout=25.0)


def counters(agent: Agent) -> Mapping[str, int]:
    scope = blocks_pb2.BlockScope(cache=CACHE, boot_id=agent.boot_id)
    with grpc.insecure_channel(f"unix:{agent.socket_path}") as channel:
        stub = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.InspectBlocks(blocks_pb2.InspectBlocksRequest(scope=scope), timeout=30)
    return dict(answer.counters)


def on_flash(client: BlocksClient, key: bytes) -> bool:
    copies = client.explain(key).replicas
    return any(copy["tier_class"] == "nvme" and copy.get("published") for copy in copies)


@dataclass(frozen=True)
class Left:
    """What was known when the agent was killed, and the disk that it left. durable: indexes of blocks with a
    copy on flash. good: blocks on the disk, as verified offline."""

    folder: Path
    boot_id: str
    keys: list[bytes]
    durable: set[int]
    good: int


def verified(folder: Path, *more: str) -> dict[str, Any]:
    """The offline report, as the command line prints it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = inspect(["--store", str(folder / "nvme"), "--json", *more])
    report: dict[str, Any] = json.loads(out.getvalue())
    assert status == (0 if report["whole"] else 1)
    return report


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """An agent stored, deleted and was killed."""
    folder = tmp_path_factory.mktemp("kept")
    with running_agent(tiers=kept_tiers, folder=folder) as agent, client_of(agent) as client:
        agent.apply_baseline(MANIFEST)
        stored = client.store(SOURCE, TOKENS, SENT, committed_frontier=len(TOKENS))
        assert [block.refusal for block in stored] == [None] * BLOCKS
        keys = [block.key for block in stored]
        gone = client.delete(SOURCE, Keys(tuple(keys[at] for at in DELETED)))
        assert (gone.tombstoned, gone.pending) == (len(DELETED), 0)
        assert "nvme" in gone.durable_tiers
        durable = {at for at, key in enumerate(keys) if on_flash(client, key)}
        agent.kill()
        report = verified(folder)
        assert report["whole"]
        good = sum(store["slots"].get("GOOD", 0) for store in report["stores"])
        return Left(folder, agent.boot_id, keys, durable, good)


def test_kill_nine_keeps_every_durable_block_and_nothing_else(left: Left) -> None:
    assert len(left.durable) > BLOCKS // 2
    with running_agent(tiers=kept_tiers, folder=left.folder) as agent, client_of(agent) as client:
        found = {at for at, key in enumerate(left.keys) if client.explain(key).state == "published"}
        assert left.durable <= found
        assert len(found) == left.good
        assert not found & set(DELETED)
        wanted = sorted(found)
        loaded = client.load(SOURCE, Keys(tuple(left.keys[at] for at in wanted)))
        assert loaded.stopped is None
        assert [bytes(block.payload) for block in loaded.blocks] == [SENT[at] for at in wanted]
        assert len(client.lookup(SOURCE, TOKENS).blocks) == DELETED[0]
        assert client.explain(left.keys[DELETED[0]]).state == "unknown"
        agent.kill()


def test_kill_nine_right_after_a_durable_store_costs_nothing(tmp_path: Path) -> None:
    tokens, sent = tokens_of(60, 5, BLOCK_TOKENS), [payload_of(1000 + at, MANIFEST) for at in range(60)]
    with running_agent(tiers=kept_tiers, folder=tmp_path) as agent, client_of(agent) as client:
        agent.apply_baseline(MANIFEST)
        stored = client.store(SOURCE, tokens, sent, committed_frontier=len(tokens), durable=True)
        agent.kill()
        assert [(block.durable, block.refusal) for block in stored] == [(True, None)] * 60
    with running_agent(tiers=kept_tiers, folder=tmp_path) as agent, client_of(agent) as client:
        loaded = client.load(SOURCE, tokens)
        assert (loaded.stopped, [bytes(block.payload) for block in loaded.blocks]) == (None, sent)
        agent.kill()


def test_many_clients_of_one_prefix_read_each_block_once(left: Left) -> None:
    with running_agent(tiers=kept_tiers, folder=left.folder) as agent:
        gate = threading.Barrier(CLIENTS)

        def load(_: int) -> list[bytes]:
            with client_of(agent) as client:
                client.refresh()
                gate.wait(60)
                loaded = client.load(SOURCE, TOKENS[: SHARED * BLOCK_TOKENS])
                assert loaded.stopped is None
                return [bytes(block.payload) for block in loaded.blocks]

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(load, range(CLIENTS)))
        assert answers == [SENT[:SHARED]] * CLIENTS
        counted = counters(agent)
        assert (counted["backend_reads"], counted["reads_started"]) == (SHARED, SHARED)
        assert counted["memory_reads"] == CLIENTS * SHARED
        agent.kill()


def test_a_client_of_the_former_agent_is_told_so(left: Left) -> None:
    """And an agent that ends in order leaves a disk that says so, whole."""
    with running_agent(tiers=kept_tiers, folder=left.folder) as agent, client_of(agent, "team-b") as client:
        client._boot_id = left.boot_id
        with pytest.raises(KvtierError) as refused:
            client.lookup(SOURCE, TOKENS)
        assert refused.value.reason is Reason.BOOT_ID_MISMATCH
        assert client.refresh() == agent.boot_id
        assert client.lookup(SOURCE, TOKENS).blocks == ()
        assert agent.terminate() == 0
    report = verified(left.folder)
    assert report["whole"]
    assert [store["superblock"]["clean"] for store in report["stores"]] == [True]


def test_what_is_encrypted_is_found_again_with_its_key_and_never_without(tmp_path: Path) -> None:
    keys, base = tmp_path / "keys", tmp_path / "node"
    keys.mkdir()
    base.mkdir()
    (keys / "CURRENT").write_text("k1\n")
    (keys / "k1").write_bytes(bytes(range(32)))
    (keys / "k2").write_bytes(bytes(32))
    extra = ("--key-dir", str(keys))
    tokens, sent = TOKENS[: 80 * BLOCK_TOKENS], SENT[:80]
    with running_agent(tiers=kept_tiers, folder=base, extra=extra) as agent, client_of(agent) as client:
        agent.apply_baseline(MANIFEST)
        stored = client.store(SOURCE, tokens, sent, committed_frontier=len(tokens))
        assert [block.refusal for block in stored] == [None] * len(sent)
        durable = [at for at, block in enumerate(stored) if on_flash(client, block.key)]
        agent.kill()
    disk = b"".join(path.read_bytes() for path in (base / "nvme").rglob("*.blocks"))
    assert durable and not any(sent[at][:64] in disk for at in durable)
    assert verified(base)["stores"][0]["slots"].keys() == {"SEALED"}
    assert verified(base, "--key-dir", str(keys))["stores"][0]["slots"]["GOOD"] >= len(durable)
    with running_agent(tiers=kept_tiers, folder=base, extra=extra) as agent, client_of(agent) as client:
        loaded = client.load(SOURCE, tokens)
        assert len(loaded.blocks) > 0
        assert [bytes(block.payload) for block in loaded.blocks] == sent[: len(loaded.blocks)]
        agent.kill()
    # The end of a key is the end of what was written under it, and of nothing else.
    (keys / "CURRENT").write_text("k2\n")
    (keys / "k1").unlink()
    with running_agent(tiers=kept_tiers, folder=base, extra=extra) as agent, client_of(agent) as client:
        assert not client.lookup(SOURCE, tokens).blocks
        again = client.store(SOURCE, tokens, sent, committed_frontier=len(tokens))
        assert [(block.refusal, block.existed) for block in again] == [(None, False)] * len(sent)
