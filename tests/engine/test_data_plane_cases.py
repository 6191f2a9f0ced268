"""What users of other caches reported of agents and engines together: restarts, reaped sessions, sockets that
nobody answers, blocks that cannot be loaded. docs/data-plane.md has all such cases with their tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.v1 import attention_pb2
from kvtier_client import localwire
from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.errors import KvtierError
from kvtier_client.localwire import LocalWire
from kvtier_client.pipe import Transport
from kvtier_client.session import AttentionSession, Geometry, SessionRequest
from kvtier_core.errors import Reason
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.nvme.verify import SUFFIX, verify_store
from kvtier_core.tiers.staging import PAGE
from tests.engine.agent_process import CACHE, baseline_manifest, running_agent, until
from tests.engine.test_agent_blocks_process import kept_tiers
from tests.engine.test_agent_blocks_sessions import (
    CHUNK,
    LAYERS,
    MANIFEST,
    SOURCE,
    Client,
    client_of,
    followed_by,
)

pytestmark = pytest.mark.timeout(600)

TRANSPORTS = [pytest.param("grpc", id="grpc"), pytest.param("local", id="local-channel")]
GEOMETRY = Geometry(layers=2, query_heads=6, kv_heads=2, head_dim=64)


def opened(client: AttentionClient) -> AttentionSession:
    request = SessionRequest(
        namespace=CACHE.namespace,
        name=CACHE.name,
        tenant="alpha",
        model_fingerprint=declared_fingerprint(client, CACHE.namespace, CACHE.name),
        geometry=GEOMETRY,
        score_scale=0.125,
        session_root_id="root",
        max_tokens=512,
    )
    return AttentionSession(client, request)


def attend(session: AttentionSession, step: int, have: int, n: int) -> None:
    """A step of both layers."""
    g = torch.Generator().manual_seed(have)
    for layer in range(GEOMETRY.layers):
        q, k, v = (torch.randn(n, heads, 64, generator=g) for heads in (6, 2, 2))
        session.attend(step, layer, have, q, k, v, have)


def refusals(call: Callable[[], object], count: int = 2) -> list[Reason]:
    """Why it is refused, each time that it is asked."""
    found = []
    for _ in range(count):
        with pytest.raises(KvtierError) as caught:
            call()
        found.append(caught.value.reason)
    return found


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        pytest.param("grpc", Reason.BOOT_ID_MISMATCH, id="grpc"),
        # Over gRPC, since nobody serves the former agent's channel.
        pytest.param("auto", Reason.BOOT_ID_MISMATCH, id="local-channel-or-grpc"),
        pytest.param("local", Reason.DRAINING, id="local-channel-alone"),
    ],
)
def test_lmcache_4642_who_meets_an_agent_that_restarted_is_told_so_and_begins_anew(
    tmp_path: Path, transport: Transport, told: Reason
) -> None:
    """The socket is the same and the new agent is there before anybody has looked: only the boot tells."""
    with running_agent(folder=tmp_path) as agent:
        agent.apply_baseline(baseline_manifest())
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(AttentionClient(agent.socket_path, transport=transport))
            before = opened(client)
            attend(before, 1, 0, 5)
            agent.kill()
            with running_agent(folder=tmp_path) as again:
                assert again.socket_path == agent.socket_path
                assert refusals(lambda: attend(before, 2, 5, 1)) == [told] * 2
                assert before.close() == 0
                with opened(client) as after:
                    assert after.opened.boot_id == again.boot_id != before.opened.boot_id
                    attend(after, 1, 0, 5)
                    attend(after, 2, 5, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lmcache_4715_a_session_that_was_ended_for_idleness_is_refused_and_the_engine_opens_another(
    tmp_path: Path, transport: Transport
) -> None:
    with running_agent(folder=tmp_path, extra=("--session-idle", "1")) as agent:
        agent.apply_baseline(baseline_manifest())
        with AttentionClient(agent.socket_path, transport=transport) as client:
            idle = opened(client)
            attend(idle, 1, 0, 5)
            until(lambda: not agent.state().caches[0].sessions)
            assert refusals(lambda: attend(idle, 2, 5, 1)) == [Reason.SESSION_UNKNOWN] * 2
            idle.close()
            with opened(client) as another:
                attend(another, 1, 0, 5)


@contextlib.contextmanager
def deaf(path: Path, kind: int) -> Iterator[str]:
    """A socket to which one can connect, and at which nobody ever reads."""
    with socket.socket(socket.AF_UNIX, kind) as listening:
        listening.bind(str(path))
        listening.listen(4)
        yield str(path)


def test_lmcache_4670_a_socket_that_nobody_answers_costs_a_call_its_own_time(socket_path: Path) -> None:
    with (
        deaf(socket_path, socket.SOCK_STREAM),
        AttentionClient(socket_path, timeout=0.3) as client,
    ):
        calls = (
            lambda: client.describe_cache("serving", "chat"),
            lambda: client.close_session("s", 1, "alpha"),
        )
        for call in calls:
            assert set(refusals(call)) <= {Reason.DEADLINE, Reason.DRAINING}


class Nobody:
    """A session as its agent opened it, on a channel that is not served."""

    position_epoch = 1
    tenant = "alpha"

    def __init__(self, path: str) -> None:
        self.opened = attention_pb2.OpenSessionResponse(session_id="s", generation=1, boot_id="b")
        self.opened.local_channel.socket = path
        self.opened.local_channel.token = b"\1" * 32
        self.opened.local_channel.max_ring_bytes = 1 << 20


def test_lmcache_4670_a_local_channel_that_nobody_serves_is_given_up(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(localwire, "_SECONDS", 0.2)
    with deaf(socket_path, socket.SOCK_SEQPACKET) as path:
        sender: Any = Nobody(path)
        offer = sender.opened.local_channel
        given_up = refusals(lambda: LocalWire([sender], {"s": offer.token}, offer, 1 << 12))
        assert given_up == [Reason.DRAINING] * 2


def damage(folder: Path, keys: Collection[bytes]) -> None:
    """Changes a bit in the middle of each of these blocks' payloads."""
    done = set()
    for path in folder.rglob(f"*{SUFFIX}"):
        report = verify_store(path)
        assert report.superblock is not None
        stride, middle = report.superblock.stride, PAGE + report.superblock.payload_bytes // 2
        with open(path, "r+b") as file:
            for block in report.blocks:
                if block.key in keys:
                    file.seek(SUPERBLOCK_BYTES + block.slot * stride + middle)
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 1]))
                    done.add(block.key)
    assert done == set(keys)


def keys_of(client: Client, ids: torch.Tensor, layer: int) -> list[bytes]:
    """Of the blocks of one layer, chunk by chunk."""
    source = dataclasses.replace(SOURCE, layers=(layer, layer + 1))
    found = client.blocks.lookup(source, ids[0, : 3 * CHUNK].tolist()).blocks
    assert len(found) == 3
    return [block.key for block in found]


DAMAGED = [
    pytest.param(((1, 1),), 1, id="a-layer-of-the-second-chunk"),
    pytest.param(((0, 0),), 0, id="the-first-chunk"),
    pytest.param(((2, 2), (2, 0)), 2, id="two-layers-of-the-last-chunk"),
]


@pytest.mark.parametrize(("damaged", "whole"), DAMAGED)
def test_vllm_49250_what_cannot_be_loaded_is_computed_with_the_same_tokens(
    tmp_path: Path, tiny_model: Any, damaged: tuple[tuple[int, int], ...], whole: int
) -> None:
    """damaged: (chunk, layer). Of other layers the same chunk is whole, and is not used without them
    (sglang#31108); the session goes on from what it has."""
    ids = followed_by(50, 51)
    with running_agent(tiers=kept_tiers, folder=tmp_path) as agent:
        agent.apply_baseline(MANIFEST)
        with client_of(agent, tiny_model) as client:
            rows, want = client.answer(ids, start=True, publish=True, durable=True)
            assert rows == 0
            keys = [keys_of(client, ids, layer) for layer in range(LAYERS)]
        agent.kill()
    damage(tmp_path, {keys[layer][chunk] for chunk, layer in damaged})
    with running_agent(tiers=kept_tiers, folder=tmp_path) as agent, client_of(agent, tiny_model) as client:
        for _ in range(2):
            rows, out = client.answer(ids, start=True)
            assert (rows, torch.equal(out, want)) == (whole * CHUNK, True)
        # What was computed is published again, and whole from then on.
        client.answer(ids, start=True, publish=True, durable=True)
        rows, out = client.answer(ids, start=True)
        assert (rows, torch.equal(out, want)) == (3 * CHUNK, True)
