"""Calls on shared blocks that wait, for storage, room or readers; and clients that go away meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier.v1 import blocks_pb2, common_pb2
from kvtier_agent.blockpins import PinBook
from kvtier_client.blocks import Keys, LoadedBlock
from kvtier_client.errors import KvtierError
from kvtier_core.errors import Reason
from tests.engine.block_doubles import Gate
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
MEMORY = 32
COLD = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BlockServer]:
    with block_server(tmp_path, memory=MEMORY) as running:
        yield running


@pytest.fixture
def gate(server: BlockServer) -> Gate:
    """Reads of flash, held back; and the blocks of prompt 0 lie there alone."""
    client = server.client()
    for prompt in range(4):
        tokens = tokens_of(MEMORY // 2, prompt)
        payloads = [payload_of(prompt * 1000 + at) for at in range(MEMORY // 2)]
        assert all(
            block.refusal is None
            for block in client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens))
        )
    found = client.lookup(SOURCE, tokens_of(COLD)).blocks
    assert [block.tier_class for block in found] == ["nvme"] * COLD
    eventually(server.idle, "stores have ended")
    held = Gate(server.flash)
    held.open = False
    return held


def span(blocks: int, prompt: int = 0) -> blocks_pb2.BlockSpan:
    return blocks_pb2.BlockSpan(
        tokens=b"".join(token.to_bytes(4, "little") for token in tokens_of(blocks, prompt))
    )


def test_each_block_leaves_as_soon_as_it_is_there(server: BlockServer, gate: Gate) -> None:
    keys = [block.key for block in server.client().lookup(SOURCE, tokens_of(COLD)).blocks]
    arriving = server.client().stream(SOURCE, tokens_of(COLD))
    with ThreadPoolExecutor(1) as pool:
        for at in range(COLD):
            block = pool.submit(next, arriving)
            eventually(lambda: gate.holds(keys[at]), "the read has been asked for")  # noqa: B023
            gate.let_block(keys[at])
            loaded: LoadedBlock = block.result(60)
            assert (loaded.index, bytes(loaded.payload)) == (at, payload_of(at))
            assert server.store.reads.fetched == at + 1
    arriving.close()
    gate.let(gate.waiting)
    eventually(server.idle, "nothing is held")


async def turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def test_storage_that_does_not_answer_costs_the_call_and_nobody_else(server: BlockServer, gate: Gate) -> None:
    hot = tokens_of(1, 3)
    other = server.client(timeout=20.0)

    def slow() -> KvtierError:
        with pytest.raises(KvtierError) as refused:
            server.client(timeout=3.0).load(SOURCE, tokens_of(COLD))
        return refused.value

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(slow)
        eventually(lambda: gate.waiting > 0, "the read has been asked for")
        # The loop turns and others are served while storage keeps still; with it they would wait for ever.
        server.on_loop(turns)
        assert bytes(other.load(SOURCE, hot).blocks[0].payload) == payload_of(3000)
        assert late.result(30).reason is Reason.FETCH_LATE
    eventually(lambda: not server.host.calls, "the call has ended")
    gate.release()
    eventually(server.idle, "nothing is held")
    assert len(server.client().load(SOURCE, tokens_of(COLD)).blocks) == COLD


@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_leaves_gives_everything_back(server: BlockServer, gate: Gate, after: int) -> None:
    keys = [block.key for block in server.client().lookup(SOURCE, tokens_of(COLD)).blocks]
    request = blocks_pb2.LoadBlocksRequest(scope=server.scope(SOURCE), span=span(COLD))
    call = server.stub().LoadBlocks(request, timeout=60)
    eventually(lambda: gate.holds(keys[0]), "a read has been asked for")
    for at in range(after):
        # Reads are asked for one after another: each must wait here before it can be let through.
        eventually(lambda: gate.holds(keys[at]), "the read has been asked for")  # noqa: B023
        gate.let_block(keys[at])
        next(call)
    call.cancel()
    eventually(lambda: not server.host.calls, "the call has ended")
    gate.release()
    eventually(server.idle, "nothing is held")
    assert len(server.client().load(SOURCE, tokens_of(COLD)).blocks) == COLD


def test_a_reader_that_stalls_holds_nothing_beyond_its_deadline(server: BlockServer) -> None:
    client = server.client(timeout=20.0)
    tokens = tokens_of(MEMORY * 6, 5)
    sent = [payload_of(5000 + at) for at in range(MEMORY * 6)]
    assert all(
        block.refusal is None for block in client.store(SOURCE, tokens, sent, committed_frontier=len(tokens))
    )
    pinned = client.lookup(SOURCE, tokens[: 8 * BLOCK_TOKENS], pin_seconds=60)
    request = blocks_pb2.LoadBlocksRequest(
        scope=server.scope(SOURCE, deadline_ms=3000), span=span(len(sent), 5), pin_id=pinned.pin_id
    )
    # Small windows of flow control, so that a reader who reads nothing is noticed.
    narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    call = server.stub(*narrow).LoadBlocks(request, timeout=60)
    next(call)
    assert server.host.calls == 1
    eventually(lambda: server.host.pins.blocks == 0, "the pin is taken from it")
    eventually(server.unheld, "nothing is leased")
    assert server.host.calls == 1
    assert [part.error.reason for part in call if part.HasField("error")] == [common_pb2.FETCH_LATE]
    eventually(server.idle, "nothing is held")


def test_a_writer_that_stalls_is_ended_at_its_deadline(server: BlockServer) -> None:
    hold = threading.Event()

    def parts() -> Iterator[blocks_pb2.StoreBlocksPart]:
        begun = blocks_pb2.StoreBegin(
            scope=server.scope(SOURCE, deadline_ms=2000),
            span=span(2, 9),
            block_bytes=len(payload_of(0)),
            committed_frontier=2 * BLOCK_TOKENS,
        )
        yield blocks_pb2.StoreBlocksPart(begin=begun)
        hold.wait(120)

    with pytest.raises(Exception, match="DEADLINE"):
        server.stub().StoreBlocks(parts(), timeout=60)
    hold.set()
    eventually(server.idle, "nothing is held")


def test_a_reader_that_joined_goes_on_when_the_first_leaves(server: BlockServer, gate: Gate) -> None:
    first = server.stub().LoadBlocks(
        blocks_pb2.LoadBlocksRequest(scope=server.scope(SOURCE), span=span(COLD)), timeout=20
    )
    eventually(lambda: gate.waiting > 0, "the reads have been asked for")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(server.client().load, SOURCE, tokens_of(COLD))
        eventually(lambda: server.store.reads.flights.counts["joined"] > 0, "the second has joined")
        first.cancel()
        gate.release()
        assert [bytes(block.payload) for block in second.result().blocks] == [
            payload_of(at) for at in range(COLD)
        ]
    assert server.store.reads.fetched == COLD
    eventually(server.idle, "nothing is held")


@pytest.mark.parametrize("sent", [0, 1, 40], ids=["after-begin", "inside-a-group", "after-a-group"])
def test_a_writer_that_leaves_publishes_no_part_of_a_block(server: BlockServer, sent: int) -> None:
    payload = payload_of(1)
    hold = threading.Event()
    tokens = tokens_of(64, 9)

    def parts() -> Iterator[blocks_pb2.StoreBlocksPart]:
        begun = blocks_pb2.StoreBegin(
            scope=server.scope(SOURCE),
            span=span(64, 9),
            block_bytes=len(payload),
            committed_frontier=len(tokens),
        )
        yield blocks_pb2.StoreBlocksPart(begin=begun)
        for block in range(sent):
            yield blocks_pb2.StoreBlocksPart(
                block=block,
                data=payload,
                last=True,
                checksum=f"xxh3:{xxhash.xxh3_64_intdigest(payload):016x}",
            )
        yield blocks_pb2.StoreBlocksPart(block=sent, data=payload[:100])
        hold.wait(120)

    call = server.stub().StoreBlocks.future(parts(), timeout=60)
    eventually(lambda: server.host.calls > 0, "the call has begun")
    eventually(lambda: server.store.writes.open_blocks > 0, "a group is reserved")
    call.cancel()
    hold.set()
    eventually(server.idle, "nothing is held")
    found = server.client().lookup(SOURCE, tokens).blocks
    assert len(found) in (0, 32)
    assert len(found) == 0 or sent == 40


def test_what_finds_half_of_the_memory_pinned_is_stored_in_parts(server: BlockServer) -> None:
    client = server.client(timeout=20.0)
    held = tokens_of(MEMORY // 2, 1)
    client.store(SOURCE, held, [payload_of(1000 + at) for at in range(MEMORY // 2)], committed_frontier=4096)
    pinned = client.lookup(SOURCE, held, pin_seconds=60)
    assert len(pinned.blocks) == MEMORY // 2
    tokens = tokens_of(2 * MEMORY, 11)
    payloads = [payload_of(11_000 + at) for at in range(2 * MEMORY)]
    stored = client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens))
    assert [block.refusal for block in stored] == [None] * len(payloads)
    assert [bytes(block.payload) for block in client.load(SOURCE, tokens).blocks] == payloads
    assert len(client.load(SOURCE, held, found=pinned).blocks) == MEMORY // 2


def test_pins_leave_room_to_read_through(server: BlockServer) -> None:
    """What is in memory alone is pinned up to half of it; the refusal says when to ask again."""
    client = server.client()
    tokens = tokens_of(MEMORY // 2 + 1, 1)
    payloads = [payload_of(1000 + at) for at in range(MEMORY // 2 + 1)]
    client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens))
    with pytest.raises(KvtierError) as refused:
        client.lookup(SOURCE, tokens, pin_seconds=60)
    assert (refused.value.reason, refused.value.retry_after_ms > 0) == (Reason.ADMISSION_PINNED, True)
    assert server.host.pins.blocks == 0
    assert len(client.lookup(SOURCE, tokens[:-BLOCK_TOKENS], pin_seconds=60).blocks) == MEMORY // 2


# Pins.


def test_what_is_pinned_stays_until_it_is_loaded(server: BlockServer) -> None:
    client = server.client(timeout=20.0)
    tokens = tokens_of(4)
    payloads = [payload_of(at) for at in range(4)]
    client.store(SOURCE, tokens, payloads, committed_frontier=len(tokens), droppable=True)
    pinned = client.lookup(SOURCE, tokens, pin_seconds=60)
    assert (len(pinned.blocks), server.host.pins.blocks) == (4, 4)
    for prompt in range(1, 12):
        more = tokens_of(MEMORY, prompt)
        client.store(
            SOURCE,
            more,
            [payload_of(prompt * 1000 + at) for at in range(MEMORY)],
            committed_frontier=len(more),
            droppable=True,
        )
    loaded = client.load(SOURCE, tokens, found=pinned)
    assert [bytes(block.payload) for block in loaded.blocks] == payloads
    eventually(lambda: server.host.pins.blocks == 0, "the pin was given back")
    eventually(server.idle, "nothing is held")


def test_a_pin_is_one_namespaces_and_used_once(server: BlockServer) -> None:
    client, tokens = server.client(), tokens_of(2)
    client.store(SOURCE, tokens, [payload_of(0), payload_of(1)], committed_frontier=len(tokens))
    pinned = client.lookup(SOURCE, tokens, pin_seconds=60)
    stub = server.stub()
    foreign = blocks_pb2.LoadBlocksRequest(
        scope=server.scope(SOURCE, tenant="team-b"), span=span(2), pin_id=pinned.pin_id
    )
    with pytest.raises(Exception, match="LEASE_EXPIRED"):
        list(stub.LoadBlocks(foreign, timeout=60))
    assert server.host.pins.blocks == 2
    assert len(client.load(SOURCE, tokens, found=pinned).blocks) == 2
    with pytest.raises(KvtierError) as refused:
        client.load(SOURCE, tokens, found=pinned)
    assert refused.value.reason is Reason.LEASE_EXPIRED


def test_a_pin_ends_by_itself(server: BlockServer) -> None:
    client, tokens = server.client(), tokens_of(2)
    client.store(SOURCE, tokens, [payload_of(0), payload_of(1)], committed_frontier=len(tokens))
    now = [100.0]
    book = PinBook(server.store, lambda: now[0], max_pins=1)
    keys = server.store.directory.key_of(0)
    namespace = server.store.parts.namespaces.digest(int(server.store.directory.namespace[0]))
    wanted = np.frombuffer(keys, dtype=np.uint8).reshape(1, 32)
    pin_id, found = book.take(wanted, namespace, 5.0)
    assert len(found) == 1
    with pytest.raises(Exception, match="QUEUE_FULL"):
        book.take(wanted, namespace, 5.0)
    now[0] += 4.9
    assert (book.expire(), len(book)) == (0, 1)
    now[0] += 0.1
    assert (book.expire(), len(book), book.blocks) == (1, 0, 0)
    with pytest.raises(Exception, match="LEASE_EXPIRED"):
        book.use(pin_id, namespace)
    assert book.take(wanted, namespace, 5.0)[1] == found
    book.close()
    eventually(server.idle, "nothing is held")


# Bounds and ends.


def test_calls_have_a_bound(server: BlockServer, gate: Gate) -> None:
    server.host._max_calls = 1
    request = blocks_pb2.LoadBlocksRequest(scope=server.scope(SOURCE), span=span(COLD))
    call = server.stub().LoadBlocks(request, timeout=60)
    eventually(lambda: gate.waiting > 0, "the reads have been asked for")
    with pytest.raises(KvtierError) as refused:
        server.client().lookup(SOURCE, tokens_of(1))
    assert (refused.value.reason, refused.value.retry_after_ms > 0) == (Reason.QUEUE_FULL, True)
    call.cancel()
    eventually(lambda: not server.host.calls, "the call has ended")
    server.client().lookup(SOURCE, tokens_of(1))


def test_a_cache_that_is_removed_ends_its_calls_first(server: BlockServer, gate: Gate) -> None:
    request = blocks_pb2.LoadBlocksRequest(scope=server.scope(SOURCE), span=span(COLD))
    call = server.stub().LoadBlocks(request, timeout=60)
    eventually(lambda: gate.waiting > 0, "the reads have been asked for")
    host = server.host
    ended = server.on_loop(lambda: server.bench.node.remove_cache(server.bench.command("remove")))
    assert ended == (0, [])
    (last,) = list(call)
    assert last.error.reason == common_pb2.CACHE_UNKNOWN
    assert host.calls == 0
    gate.release()
    with pytest.raises(KvtierError) as refused:
        server.client().lookup(SOURCE, tokens_of(1))
    assert refused.value.reason is Reason.CACHE_UNKNOWN


def test_metrics_count_what_happened(server: BlockServer, gate: Gate) -> None:
    gate.release()
    client = server.client()
    client.lookup(SOURCE, tokens_of(COLD + 20))
    client.load(SOURCE, tokens_of(COLD))
    client.delete(SOURCE, Keys((client.lookup(SOURCE, tokens_of(1)).blocks[0].key,)))
    size = len(payload_of(0))
    counted = {
        name: server.metric(f"kvtier_agent_block_{name}", **labels)
        for name, labels in (
            ("lookups_total", {"found": "some"}),
            ("store_blocks_total", {"outcome": "STORED", "reason": ""}),
            ("load_blocks_total", {}),
            ("load_bytes_total", {}),
            ("reads_total", {"kind": "backend"}),
            ("moved_bytes_total", {"source": "nvme", "destination": "dram"}),
            ("deletions_requested_total", {}),
            ("deletions_open", {}),
            ("credits_released_twice_total", {}),
            ("load_wait_seconds_count", {}),
        )
    }
    assert counted == {
        "lookups_total": 1,
        "store_blocks_total": 2 * MEMORY,
        "load_blocks_total": COLD,
        "load_bytes_total": COLD * size,
        "reads_total": COLD,
        "moved_bytes_total": COLD * size,
        "deletions_requested_total": 1,
        "deletions_open": 0,
        "credits_released_twice_total": 0,
        "load_wait_seconds_count": 1,
    }
    labels = {
        name
        for family in server.registry.collect()
        if family.name.startswith("kvtier_agent_block")
        for sample in family.samples
        for name in sample.labels
    }
    bounded = {"found", "outcome", "reason", "kind", "source", "destination", "resource", "tier_class", "le"}
    assert labels <= bounded
