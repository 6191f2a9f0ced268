"""What calls on shared blocks are refused for, in which order, and that a refusal holds nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import xxhash

from kvtier.v1 import blocks_pb2, common_pb2
from kvtier_agent.blockstoring import GROUP_BLOCKS
from kvtier_client.blocks import Keys
from kvtier_client.errors import KvtierError, from_rpc
from kvtier_core.errors import Reason
from tests.engine.block_server import (
    BLOCK_TOKENS,
    MANIFEST,
    BlockServer,
    block_server,
    eventually,
    payload_of,
    source_of,
    tokens_of,
)

SOURCE = source_of()
PAYLOAD = payload_of(0)
TOKENS = tokens_of(2)
RAW_TOKENS = b"".join(token.to_bytes(4, "little") for token in TOKENS)
SPAN = blocks_pb2.BlockSpan(tokens=RAW_TOKENS)
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockServer]:
    with block_server(tmp_path_factory.mktemp("store")) as running:
        yield running


def refusal(call: Callable[[], Any]) -> KvtierError:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return from_rpc(failed.value)


# Who asks.


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"boot_id": "another"}, Reason.BOOT_ID_MISMATCH, id="another-life-of-the-agent"),
        pytest.param(
            {"cache": common_pb2.CacheRef(namespace="serving", name="other")},
            Reason.CACHE_UNKNOWN,
            id="no-such-cache",
        ),
        pytest.param({"deadline_ms": -1}, Reason.BAD_ARGUMENT, id="negative-deadline"),
        pytest.param({"tenant": ""}, Reason.IDENTITY_INCOMPLETE, id="no-tenant"),
        pytest.param({"tenant": "t" * 254}, Reason.BAD_ARGUMENT, id="tenant-too-long"),
        pytest.param({"cache_generation": 7}, Reason.STALE_CACHE_GENERATION, id="another-generation"),
        pytest.param({"source": None}, Reason.IDENTITY_INCOMPLETE, id="no-source"),
        pytest.param(
            {"source": source_of(model_artifact_digest="sha256:" + "b" * 64).message()},
            Reason.MODEL_MISMATCH,
            id="another-model",
        ),
        pytest.param(
            {"source": source_of(adapters=(("lora", "sha256:" + "c" * 64),)).message()},
            Reason.ADAPTER_MISMATCH,
            id="another-adapter",
        ),
    ],
)
@pytest.mark.parametrize("method", ["LookupBlocks", "LoadBlocks", "DeleteBlocks", "StoreBlocks"])
def test_every_call_checks_who_asks(
    server: BlockServer, method: str, changed: dict[str, Any], reason: Reason
) -> None:
    scope = server.scope(SOURCE, **changed)
    stub = server.stub()
    calls: dict[str, Callable[[], Any]] = {
        "LookupBlocks": lambda: stub.LookupBlocks(
            blocks_pb2.LookupBlocksRequest(scope=scope, span=SPAN), timeout=60
        ),
        "LoadBlocks": lambda: list(
            stub.LoadBlocks(blocks_pb2.LoadBlocksRequest(scope=scope, span=SPAN), timeout=60)
        ),
        "DeleteBlocks": lambda: stub.DeleteBlocks(
            blocks_pb2.DeleteBlocksRequest(scope=scope, span=SPAN), timeout=60
        ),
        "StoreBlocks": lambda: stub.StoreBlocks(iter([begin(scope)]), timeout=60),
    }
    assert refusal(calls[method]).reason is reason


@pytest.mark.parametrize(
    "field", [each.name for each in blocks_pb2.BlockSource.DESCRIPTOR.fields if each.name != "branch"]
)
def test_a_field_that_is_not_stated_is_named(server: BlockServer, field: str) -> None:
    scope = server.scope(SOURCE)
    scope.source.ClearField(field)
    request = blocks_pb2.LookupBlocksRequest(scope=scope, span=SPAN)
    refused = refusal(lambda: server.stub().LookupBlocks(request, timeout=60))
    assert refused.reason is Reason.IDENTITY_INCOMPLETE
    named = refused.facts["field"]
    assert named == field or named in ("layers", "kv_heads")


# Which blocks.


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        pytest.param(blocks_pb2.BlockSpan(), Reason.IDENTITY_INCOMPLETE, id="nothing"),
        pytest.param(blocks_pb2.BlockSpan(tokens=b"123"), Reason.BAD_ARGUMENT, id="broken-token"),
        pytest.param(
            blocks_pb2.BlockSpan(tokens=bytes(4 * 524_289)), Reason.BAD_ARGUMENT, id="too-many-tokens"
        ),
        pytest.param(
            blocks_pb2.BlockSpan(tokens=RAW_TOKENS, keys=[KEY]), Reason.BAD_ARGUMENT, id="tokens-and-keys"
        ),
        pytest.param(
            blocks_pb2.BlockSpan(tokens=RAW_TOKENS, first_block=1), Reason.BAD_ARGUMENT, id="no-parent"
        ),
        pytest.param(
            blocks_pb2.BlockSpan(tokens=RAW_TOKENS, parent_key=KEY), Reason.BAD_ARGUMENT, id="parent-of-none"
        ),
        pytest.param(
            blocks_pb2.BlockSpan(tokens=RAW_TOKENS, content=[KEY]), Reason.BAD_ARGUMENT, id="content-of-one"
        ),
        pytest.param(blocks_pb2.BlockSpan(keys=[b"short"]), Reason.BAD_ARGUMENT, id="short-key"),
        pytest.param(blocks_pb2.BlockSpan(keys=[KEY] * 8193), Reason.BAD_ARGUMENT, id="too-many-keys"),
    ],
)
def test_what_names_no_blocks_is_refused(
    server: BlockServer, span: blocks_pb2.BlockSpan, reason: Reason
) -> None:
    request = blocks_pb2.LookupBlocksRequest(scope=server.scope(SOURCE), span=span)
    assert refusal(lambda: server.stub().LookupBlocks(request, timeout=60)).reason is reason


def test_pins_and_generations_have_bounds(server: BlockServer) -> None:
    scope, stub = server.scope(SOURCE), server.stub()
    for seconds in (-1, 61):
        late = blocks_pb2.LookupBlocksRequest(scope=scope, span=SPAN, pin_ms=seconds * 1000)
        assert refusal(lambda: stub.LookupBlocks(late, timeout=60)).reason is Reason.BAD_ARGUMENT  # noqa: B023
    short = blocks_pb2.LoadBlocksRequest(scope=scope, span=SPAN, generations=[1])
    assert refusal(lambda: list(stub.LoadBlocks(short, timeout=60))).reason is Reason.BAD_ARGUMENT
    unknown = blocks_pb2.LoadBlocksRequest(scope=scope, span=SPAN, pin_id="nobody's")
    assert refusal(lambda: list(stub.LoadBlocks(unknown, timeout=60))).reason is Reason.LEASE_EXPIRED


def test_a_copy_of_another_generation_is_stale(server: BlockServer) -> None:
    client, tokens = server.client(), tokens_of(1, 50)
    client.store(SOURCE, tokens, [PAYLOAD], committed_frontier=len(tokens))
    generation = client.lookup(SOURCE, tokens).blocks[0].generation
    span = blocks_pb2.BlockSpan(tokens=b"".join(token.to_bytes(4, "little") for token in tokens))
    for asked, reason in ((generation, None), (generation + 1, common_pb2.GENERATION_STALE)):
        request = blocks_pb2.LoadBlocksRequest(scope=server.scope(SOURCE), span=span, generations=[asked])
        (part,) = server.stub().LoadBlocks(request, timeout=60)
        assert (part.error.reason if part.HasField("error") else None) == reason
        assert part.data == (PAYLOAD if reason is None else b"")


# What is stored.


def begin(scope: blocks_pb2.BlockScope, **changed: Any) -> blocks_pb2.StoreBlocksPart:
    stated = {"span": SPAN, "block_bytes": len(PAYLOAD), "committed_frontier": len(TOKENS)}
    return blocks_pb2.StoreBlocksPart(begin=blocks_pb2.StoreBegin(scope=scope, **{**stated, **changed}))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"block_bytes": len(PAYLOAD) - 1}, Reason.PAYLOAD_GEOMETRY, id="another-length"),
        pytest.param(
            {"span": blocks_pb2.BlockSpan(keys=[KEY])}, Reason.IDENTITY_INCOMPLETE, id="a-key-made-up"
        ),
        pytest.param(
            {"span": blocks_pb2.BlockSpan(tokens=RAW_TOKENS[: 4 * (BLOCK_TOKENS - 1)])},
            Reason.BLOCK_COVERAGE,
            id="less-than-a-block",
        ),
        pytest.param({"committed_frontier": 31}, Reason.UNCOMMITTED_ROWS, id="uncommitted"),
        pytest.param({"recompute_seconds": float("nan")}, Reason.BAD_ARGUMENT, id="no-cost"),
        pytest.param({"recompute_seconds": -1.0}, Reason.BAD_ARGUMENT, id="negative-cost"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_its_bytes(
    server: BlockServer, changed: dict[str, Any], reason: Reason
) -> None:
    parts = iter([begin(server.scope(SOURCE), **changed)])
    assert refusal(lambda: server.stub().StoreBlocks(parts, timeout=60)).reason is reason
    eventually(server.idle, "nothing is held")


def test_a_payload_of_another_shape_than_its_source_says_is_refused(server: BlockServer) -> None:
    scope = server.scope(dataclasses.replace(SOURCE, layers=(0, 2)))
    refused = refusal(lambda: server.stub().StoreBlocks(iter([begin(scope)]), timeout=60))
    assert (refused.reason, refused.facts["block_bytes"]) == (
        Reason.PAYLOAD_GEOMETRY,
        str(2 * len(PAYLOAD)),
    )


def part(block: int, offset: int, data: bytes, **more: Any) -> blocks_pb2.StoreBlocksPart:
    return blocks_pb2.StoreBlocksPart(block=block, offset=offset, data=data, **more)


ALL = {"last": True, "checksum": "xxh3:" + "0" * 16}


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda scope: [], id="nothing"),
        pytest.param(lambda scope: [part(0, 0, PAYLOAD, **ALL)], id="no-begin"),
        pytest.param(lambda scope: [begin(scope), begin(scope)], id="begin-twice"),
        pytest.param(lambda scope: [begin(scope), part(1, 0, PAYLOAD, **ALL)], id="another-block-first"),
        pytest.param(lambda scope: [begin(scope), part(0, 4, PAYLOAD[4:], **ALL)], id="a-hole"),
        pytest.param(lambda scope: [begin(scope), part(0, 0, b"")], id="no-bytes"),
        pytest.param(lambda scope: [begin(scope), part(0, 0, PAYLOAD + b"x", **ALL)], id="too-long"),
        pytest.param(lambda scope: [begin(scope), part(0, 0, PAYLOAD)], id="last-is-not-said"),
        pytest.param(lambda scope: [begin(scope), part(0, 0, PAYLOAD[:4], **ALL)], id="last-too-early"),
        pytest.param(lambda scope: [begin(scope), part(0, 0, PAYLOAD, last=True)], id="no-checksum"),
        pytest.param(
            lambda scope: [begin(scope), part(0, 0, PAYLOAD, last=True, checksum="crc32c:00000000")],
            id="another-checksum",
        ),
        pytest.param(
            lambda scope: [begin(scope), part(0, 0, PAYLOAD, last=True, checksum="xxh3:" + "z" * 16)],
            id="no-hex",
        ),
    ],
)
def test_parts_out_of_order_end_the_call_and_publish_nothing(
    server: BlockServer, parts: Callable[[blocks_pb2.BlockScope], list[blocks_pb2.StoreBlocksPart]]
) -> None:
    sent = iter(parts(server.scope(SOURCE)))
    assert refusal(lambda: server.stub().StoreBlocks(sent, timeout=60)).reason is Reason.BAD_ARGUMENT
    eventually(server.idle, "nothing is held")
    assert not server.client().lookup(SOURCE, TOKENS).blocks


def test_bytes_that_are_not_what_was_stated_are_refused_alone(server: BlockServer) -> None:
    tokens = tokens_of(3, 60)
    stream = [
        begin(
            server.scope(SOURCE),
            span=blocks_pb2.BlockSpan(tokens=b"".join(token.to_bytes(4, "little") for token in tokens)),
            committed_frontier=len(tokens),
        )
    ]
    for block in range(3):
        data = payload_of(600 + block)
        stated = xxhash.xxh3_64_intdigest(data) ^ (block == 1)
        stream.append(part(block, 0, data, last=True, checksum=f"xxh3:{stated:016x}"))
    answer = server.stub().StoreBlocks(iter(stream), timeout=60)
    assert [block.error.reason for block in answer.blocks] == [0, common_pb2.CHECKSUM_MISMATCH, 0]
    assert len(server.client().lookup(SOURCE, tokens).blocks) == 1
    eventually(server.idle, "nothing is held")


def test_a_stream_that_ends_early_keeps_the_groups_that_were_whole(server: BlockServer) -> None:
    tokens = tokens_of(40, 61)
    stream = [
        begin(
            server.scope(SOURCE),
            span=blocks_pb2.BlockSpan(tokens=b"".join(token.to_bytes(4, "little") for token in tokens)),
            committed_frontier=len(tokens),
        )
    ]
    for block in range(35):
        data = payload_of(6100 + block)
        stream.append(part(block, 0, data, last=True, checksum=f"xxh3:{xxhash.xxh3_64_intdigest(data):016x}"))
    answer = server.stub().StoreBlocks(iter(stream), timeout=60)
    missing = [at for at, block in enumerate(answer.blocks) if block.error.reason == common_pb2.SHORT_COPY]
    assert missing == list(range(GROUP_BLOCKS, 40))
    assert len(server.client().lookup(SOURCE, tokens).blocks) == GROUP_BLOCKS
    eventually(server.idle, "nothing is held")


# Looking.


def test_explain_and_inspect_say_what_they_were_not_given(server: BlockServer) -> None:
    stub = server.stub()
    two = blocks_pb2.ExplainBlockRequest(scope=server.scope(), span=blocks_pb2.BlockSpan(keys=[KEY, KEY]))
    assert refusal(lambda: stub.ExplainBlock(two, timeout=60)).reason is Reason.BAD_ARGUMENT
    unsourced = blocks_pb2.ExplainBlockRequest(scope=server.scope(), span=SPAN)
    assert refusal(lambda: stub.ExplainBlock(unsourced, timeout=60)).reason is Reason.IDENTITY_INCOMPLETE
    page = blocks_pb2.InspectBlocksRequest(scope=server.scope(), limit=1001)
    assert refusal(lambda: stub.InspectBlocks(page, timeout=60)).reason is Reason.BAD_ARGUMENT
    neither = blocks_pb2.DeleteBlocksRequest(scope=server.scope(SOURCE))
    assert refusal(lambda: stub.DeleteBlocks(neither, timeout=60)).reason is Reason.BAD_ARGUMENT
    assert server.client().explain(KEY).state == "unknown"


def test_an_agent_that_drains_takes_no_blocks_and_serves_what_it_has(server: BlockServer) -> None:
    client, tokens = server.client(), tokens_of(1, 70)
    client.store(SOURCE, tokens, [PAYLOAD], committed_frontier=len(tokens))
    server.bench.node.draining = True
    try:
        with pytest.raises(KvtierError) as refused:
            client.store(SOURCE, tokens_of(1, 71), [PAYLOAD], committed_frontier=BLOCK_TOKENS)
        assert refused.value.reason is Reason.DRAINING
        rows = blocks_pb2.PublishSessionRequest(scope=server.scope(SOURCE), session_id="s")
        assert refusal(lambda: server.stub().PublishSession(rows, timeout=60)).reason is Reason.DRAINING
        assert bytes(client.load(SOURCE, tokens).blocks[0].payload) == PAYLOAD
    finally:
        server.bench.node.draining = False


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_rows_of_a_session_are_not_published_at_a_cost_that_orders_nothing(
    server: BlockServer, seconds: float
) -> None:
    rows = blocks_pb2.PublishSessionRequest(
        scope=server.scope(SOURCE), session_id="s", recompute_seconds=seconds
    )
    found = refusal(lambda: server.stub().PublishSession(rows, timeout=60))
    assert found.reason is Reason.BAD_ARGUMENT
    assert "recompute_seconds" in str(found)


def test_pages_of_a_tenants_blocks_follow_each_other(server: BlockServer) -> None:
    client = server.client("pages")
    tokens = tokens_of(5, 80)
    answer = client.store(
        SOURCE, tokens, [payload_of(800 + at) for at in range(5)], committed_frontier=len(tokens)
    )
    seen: list[bytes] = []
    after = 0
    while True:
        request = blocks_pb2.InspectBlocksRequest(scope=server.scope(tenant="pages"), after=after, limit=2)
        page = server.stub().InspectBlocks(request, timeout=60)
        assert len(page.blocks) <= 2
        seen += [block.key for block in page.blocks]
        after = page.next
        if not after:
            break
    assert sorted(seen) == sorted(block.key for block in answer)
    assert MANIFEST.chunk_tokens == BLOCK_TOKENS
    assert client.lookup(SOURCE, Keys(tuple(seen[:1]))).blocks[0].key == seen[0]
