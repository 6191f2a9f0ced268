"""Shared blocks over the socket: stored, found, loaded, deleted, and nothing of another tenant."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier.v1 import blocks_pb2, common_pb2
from kvtier_agent.blockloading import Loading
from kvtier_client.blocks import BlocksClient, Keys
from kvtier_client.errors import KvtierError
from kvtier_core.errors import Reason
from kvtier_core.tiers.base import PoolTier
from tests.engine.block_doubles import FullDisk, flip
from tests.engine.block_server import (
    BLOCK_TOKENS,
    BlockServer,
    block_server,
    eventually,
    payload_of,
    source_of,
    tokens_of,
)

SOURCE = source_of()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BlockServer]:
    with block_server(tmp_path) as running:
        yield running


def stored(client: BlocksClient, blocks: int, prompt: int = 0) -> tuple[list[int], list[bytes], list[bytes]]:
    """Tokens, payloads and keys of a prompt that is stored whole."""
    tokens = tokens_of(blocks, prompt)
    payloads = [payload_of(prompt * 1000 + at) for at in range(blocks)]
    answer = client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens))
    assert [block.refusal for block in answer] == [None] * blocks
    return tokens, payloads, [block.key for block in answer]


def test_what_is_stored_is_found_and_loaded_byte_for_byte(server: BlockServer) -> None:
    client = server.client()
    tokens, payloads, keys = stored(client, 5)
    found = client.lookup(SOURCE, tokens)
    assert [block.key for block in found.blocks] == keys
    assert [block.tier_class for block in found.blocks] == ["dram"] * 5
    loaded = client.load(SOURCE, tokens)
    assert [bytes(block.payload) for block in loaded.blocks] == payloads
    assert loaded.stopped is None


def test_a_chain_goes_on_from_a_parent_and_a_prefix_ends_where_it_differs(server: BlockServer) -> None:
    client = server.client()
    tokens, payloads, keys = stored(client, 6)
    rest = client.load(SOURCE, tokens[2 * BLOCK_TOKENS :], first_block=2, parent_key=keys[1])
    assert [bytes(block.payload) for block in rest.blocks] == payloads[2:]
    other = [*tokens[: 4 * BLOCK_TOKENS], *tokens_of(2, 7)]
    assert [block.key for block in client.lookup(SOURCE, other).blocks] == keys[:4]


def test_blocks_arrive_in_memory_of_the_callers_own(server: BlockServer) -> None:
    client = server.client()
    tokens, payloads, _ = stored(client, 3)
    pool = memoryview(bytearray(3 * len(payloads[0])))
    size = len(payloads[0])
    loaded = client.load(SOURCE, tokens, into=lambda index: pool[index * size : (index + 1) * size])
    assert bytes(pool) == b"".join(payloads)
    assert [block.index for block in loaded.blocks] == [0, 1, 2]


def test_more_than_memory_holds_is_stored_and_comes_back(tmp_path: Path) -> None:
    with block_server(tmp_path, memory=16) as server:
        client = server.client(timeout=25.0)
        tokens, payloads, _ = stored(client, 100)
        loaded = client.load(SOURCE, tokens)
        assert loaded.stopped is None
        assert [bytes(block.payload) for block in loaded.blocks] == payloads


def test_equal_bytes_exist_and_other_bytes_under_the_same_key_are_refused(server: BlockServer) -> None:
    client = server.client()
    tokens, payloads, keys = stored(client, 3)
    again = client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens))
    assert [(block.existed, block.key) for block in again] == [(True, key) for key in keys]
    other = [payloads[0], payload_of(99), payloads[2]]
    mixed = client.store(SOURCE, tokens, other, committed_frontier=len(tokens))
    assert [block.refusal.reason if block.refusal else None for block in mixed] == [
        None,
        Reason.IDENTITY_MISMATCH,
        None,
    ]
    assert [bytes(block.payload) for block in client.load(SOURCE, tokens).blocks] == payloads


def test_rows_that_are_not_committed_are_a_branchs(server: BlockServer) -> None:
    client = server.client()
    tokens, payload = tokens_of(1), [payload_of(0)]
    with pytest.raises(KvtierError) as refused:
        client.store(SOURCE, tokens, payload, committed_frontier=len(tokens) - 1)
    assert refused.value.reason is Reason.UNCOMMITTED_ROWS
    branch = source_of(branch=("session-1",), request_generation=4)
    assert client.store(branch, tokens, payload, committed_frontier=0)[0].refusal is None
    assert not client.lookup(SOURCE, tokens).blocks
    assert not client.lookup(source_of(branch=("session-2",), request_generation=4), tokens).blocks
    assert [bytes(block.payload) for block in client.load(branch, tokens).blocks] == payload


# Durable when it is acknowledged.


def test_a_durable_store_answers_when_its_blocks_are_on_flash(server: BlockServer) -> None:
    client = server.client()
    tokens, payloads = tokens_of(40), [payload_of(at) for at in range(40)]
    first = client.store(SOURCE, tokens[: 2 * BLOCK_TOKENS], payloads[:2], committed_frontier=len(tokens))
    assert [(block.durable, block.not_durable) for block in first] == [(False, None)] * 2
    answer = client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens), durable=True)
    assert [(block.durable, block.refusal, block.not_durable) for block in answer] == [
        (True, None, None)
    ] * 40
    assert [block.existed for block in answer] == [True] * 2 + [False] * 38
    tiers = {copy["tier_class"] for block in answer for copy in client.explain(block.key).replicas}
    assert tiers == {"dram", "nvme"}
    commits = server.flash.commit.flushes
    assert commits < 40, "blocks share flushes"
    assert server.metric("kvtier_agent_block_durable_blocks_total", outcome="durable") == 40
    assert server.metric("kvtier_agent_block_durable_waiting") == 0
    assert server.metric("kvtier_agent_block_kept_blocks") == 40
    assert server.metric("kvtier_agent_block_kept_limit_blocks") == server.host.store.kept_limit
    assert [bytes(block.payload) for block in client.load(SOURCE, tokens).blocks] == payloads


def test_what_is_not_durable_in_time_is_stored_and_says_so(tmp_path: Path) -> None:
    disk = FullDisk()
    with block_server(tmp_path, files=disk) as server:
        client = server.client(timeout=5.0)
        server.flash.sync()
        disk.full = True
        tokens, payload = tokens_of(1), [payload_of(0)]
        (block,) = client.store(SOURCE, tokens, payload, committed_frontier=len(tokens), durable=True)
        assert (block.refusal, block.durable) == (None, False)
        assert block.not_durable is not None
        assert block.not_durable.reason is Reason.STORAGE_UNAVAILABLE
        assert [bytes(each.payload) for each in client.load(SOURCE, tokens).blocks] == payload
        disk.full = False
        (again,) = client.store(SOURCE, tokens, payload, committed_frontier=len(tokens), durable=True)
        assert (again.existed, again.durable) == (True, True)


# Tenants.


def test_a_tenant_neither_finds_nor_touches_what_is_anothers(server: BlockServer) -> None:
    mine, theirs = server.client("team-a"), server.client("team-b")
    tokens, payloads, keys = stored(mine, 4)
    named = Keys(tuple(keys))
    assert not theirs.lookup(SOURCE, tokens).blocks
    assert not theirs.lookup(SOURCE, named).blocks
    assert not theirs.load(SOURCE, named).blocks
    scope = server.scope(SOURCE, tenant="team-b")
    request = blocks_pb2.LoadBlocksRequest(scope=scope, span=blocks_pb2.BlockSpan(keys=keys))
    (part,) = server.stub().LoadBlocks(request, timeout=60)
    assert (part.error.reason, part.data) == (common_pb2.MISS, b"")
    assert theirs.explain(keys[0]).state == "unknown"
    assert theirs.delete(SOURCE, named).tombstoned == 0
    assert theirs.delete_tenant().tombstoned == 0
    assert [bytes(block.payload) for block in mine.load(SOURCE, tokens).blocks] == payloads
    # Equal tokens of another tenant are other blocks, with bytes of their own.
    answer = theirs.store(SOURCE, tokens[:BLOCK_TOKENS], [payload_of(77)], committed_frontier=BLOCK_TOKENS)
    assert (answer[0].refusal, answer[0].existed) == (None, False)
    assert answer[0].key != keys[0]


# Deleting.


def test_what_is_deleted_is_found_by_nobody_and_can_be_stored_anew(server: BlockServer) -> None:
    client = server.client()
    tokens, payloads, keys = stored(client, 5)
    gone = client.delete(SOURCE, Keys((keys[2],)))
    assert (gone.tombstoned, gone.pending) == (1, 0)
    assert len(client.lookup(SOURCE, tokens).blocks) == 2
    said = client.explain(keys[2])
    assert (said.state, said.reason) == ("deleted", "MISS")
    again = client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens))
    assert [block.existed for block in again] == [True, True, False, True, True]


def test_a_whole_tenant_goes_without_naming_a_source(tmp_path: Path) -> None:
    with block_server(tmp_path, memory=16) as server:
        client, other = server.client("team-a", timeout=20.0), server.client("team-b")
        stored(client, 40)
        theirs, payloads, _ = stored(other, 2)
        gone = client.delete_tenant()
        assert (gone.tombstoned, gone.pending) == (40, 0)
        assert gone.durable_tiers
        assert not client.lookup(SOURCE, tokens_of(40)).blocks
        assert [bytes(block.payload) for block in other.load(SOURCE, theirs).blocks] == payloads


def test_a_deletion_waits_for_readers_and_says_so(server: BlockServer) -> None:
    client = server.client()
    tokens, _, keys = stored(client, 2)
    pinned = client.lookup(SOURCE, tokens, pin_seconds=60)
    request = blocks_pb2.DeleteBlocksRequest(
        scope=server.scope(SOURCE, deadline_ms=300), span=blocks_pb2.BlockSpan(keys=keys)
    )
    answer = server.stub().DeleteBlocks(request, timeout=60)
    assert (answer.tombstoned, answer.pending) == (2, 2)
    assert not any(tier.durable for tier in answer.tiers)
    assert not client.lookup(SOURCE, tokens).blocks
    assert client.explain(keys[0]).reason == "NOT_VISIBLE"
    # Who held the pin learns that its blocks are gone, and lets go by that.
    with pytest.raises(KvtierError) as refused:
        client.load(SOURCE, tokens, found=pinned)
    assert refused.value.reason is Reason.MISS
    eventually(lambda: not server.store.deletions.open(), "the deletion ends")
    assert client.explain(keys[0]).state == "deleted"


# Faults of storage.


def test_a_full_disk_refuses_what_has_no_room_and_serves_what_there_is(tmp_path: Path) -> None:
    files = FullDisk()
    with block_server(tmp_path, memory=16, files=files) as server:
        client = server.client(timeout=20.0)
        tokens, payloads, _ = stored(client, 8)
        files.full = True
        more = tokens_of(30, 3)
        answer = server.client(timeout=3.0).store(
            SOURCE, more, [payload_of(3000 + at) for at in range(30)], committed_frontier=len(more)
        )
        kept = [at for at, block in enumerate(answer) if block.refusal is None]
        refused = {block.refusal.reason for block in answer if block.refusal is not None}
        assert kept == list(range(8))
        assert refused <= {Reason.CREDIT_PRESSURE, Reason.NO_DESTINATION_CAPACITY, Reason.STORAGE_UNAVAILABLE}
        assert [bytes(block.payload) for block in client.load(SOURCE, tokens).blocks] == payloads
        files.full = False
        later = tokens_of(4, 4)
        eventually(
            lambda: all(
                block.refusal is None
                for block in client.store(
                    SOURCE, later, [payload_of(4000 + at) for at in range(4)], committed_frontier=len(later)
                )
            ),
            "there is room again",
        )


def test_a_flipped_bit_on_flash_is_a_refusal_and_never_a_payload(tmp_path: Path) -> None:
    with block_server(tmp_path, memory=16) as server:
        client = server.client(timeout=25.0)
        tokens, payloads, keys = stored(client, 60)
        eventually(
            lambda: client.explain(keys[1]).replicas[0]["tier_class"] == "nvme", "it is on flash alone"
        )
        flip(server.flash.path, payloads[1])
        loaded = client.load(SOURCE, tokens)
        assert [bytes(block.payload) for block in loaded.blocks] == payloads[:1]
        assert loaded.stopped is not None
        assert loaded.stopped.reason is Reason.CHECKSUM_MISMATCH
        assert client.explain(keys[1]).state == "lost"
        assert len(client.lookup(SOURCE, tokens).blocks) == 1


@pytest.mark.parametrize("kept", [True, False], ids=["on-flash-too", "in-memory-alone"])
def test_a_flipped_bit_in_memory_is_served_to_nobody(tmp_path: Path, kept: bool) -> None:
    with block_server(tmp_path, memory=16) as server:
        client = server.client(timeout=25.0)
        tokens, payloads, keys = stored(client, 40)
        if kept:
            client.load(SOURCE, tokens[: 4 * BLOCK_TOKENS])
        at = 1 if kept else 39
        line = server.store.directory.find(keys[at])
        copy = server.store.directory.replica(line, 0)
        assert server.store.directory.survivors(line) == (2 if kept else 1)
        memory = server.store.parts.tiers[0]
        assert isinstance(memory, PoolTier)
        memory.body(copy.slot)[100] ^= 1
        if kept:
            assert bytes(client.load(SOURCE, Keys((keys[at],))).blocks[0].payload) == payloads[at]
        else:
            with pytest.raises(KvtierError) as refused:
                client.load(SOURCE, Keys((keys[at],)))
            assert refused.value.reason is Reason.CHECKSUM_MISMATCH
            assert client.explain(keys[at]).state in ("lost", "unknown")
            assert not client.lookup(SOURCE, Keys((keys[at],))).blocks
        eventually(server.idle, "nothing is held")


def test_two_readers_of_one_bad_copy_both_read_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, both = Loading._encode, threading.Barrier(2)
    met: set[int] = set()

    def together(self: Loading, *step: Any) -> Any:
        """Neither looks at the copy before both hold it."""
        if id(self) not in met:
            met.add(id(self))
            both.wait(30.0)
        return encode(self, *step)

    with block_server(tmp_path, memory=16) as server:
        client, other = server.client(timeout=20.0), server.client(timeout=20.0)
        tokens, payloads, keys = stored(client, 40)
        client.load(SOURCE, tokens[: 4 * BLOCK_TOKENS])
        line = server.store.directory.find(keys[1])
        assert server.store.directory.survivors(line) == 2
        memory = server.store.parts.tiers[0]
        assert isinstance(memory, PoolTier)
        memory.body(server.store.directory.replica(line, 0).slot)[100] ^= 1
        monkeypatch.setattr(Loading, "_encode", together)
        with ThreadPoolExecutor(2) as readers:
            loads = [readers.submit(each.load, SOURCE, Keys((keys[1],))) for each in (client, other)]
            for load in loads:
                assert bytes(load.result(60.0).blocks[0].payload) == payloads[1]
        assert len(met) == 2
        eventually(server.idle, "nothing is held")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_store_that_failed_says_so_to_every_call(server: BlockServer) -> None:
    client = server.client()
    stored(client, 1)
    server.store.pump = lambda: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    server.store.parts.wake()
    eventually(lambda: bool(server.host.failure), "the driver has ended")
    with pytest.raises(KvtierError) as refused:
        client.lookup(SOURCE, tokens_of(1))
    assert refused.value.reason is Reason.INTERNAL
    assert "ZeroDivisionError" in server.host.failure
