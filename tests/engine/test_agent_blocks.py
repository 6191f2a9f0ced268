"""Shared blocks over the socket: stored, found, loaded, deleted, and nothing of another tenant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.block_server import BlockServer, block_server, payload_of, source_of, tokens_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BlockServer]:
    with block_server(tmp_path) as running:
        yield running


def test_what_is_stored_is_found_and_loaded_byte_for_byte(server: BlockServer) -> None:
    client, source, tokens = server.client(), source_of(), tokens_of(5)
    payloads = [payload_of(at) for at in range(5)]
    stored = client.store(source, tokens, payloads, committed_frontier=len(tokens))
    assert [(block.existed, block.refusal) for block in stored] == [(False, None)] * 5

    found = client.lookup(source, tokens)
    assert [block.key for block in found.blocks] == [block.key for block in stored]
    assert [block.tier_class for block in found.blocks] == ["dram"] * 5

    loaded = client.load(source, tokens)
    assert [bytes(block.payload) for block in loaded.blocks] == payloads
    assert loaded.stopped is None


def test_more_than_memory_holds_is_stored_and_comes_back(tmp_path: Path) -> None:
    with block_server(tmp_path, memory=16, storage=256) as server:
        client, source, tokens = server.client(timeout=25.0), source_of(), tokens_of(100)
        payloads = [payload_of(at) for at in range(100)]
        stored = client.store(source, tokens, payloads, committed_frontier=len(tokens))
        assert [block.refusal for block in stored] == [None] * 100
        loaded = client.load(source, tokens)
        assert loaded.stopped is None
        assert [bytes(block.payload) for block in loaded.blocks] == payloads
