"""Reads that go together, over real channels: an agent of an earlier version is asked one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents import GrpcAgents
from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import AgentTarget, AgentTls
from kvtier_operator.telemetry import build_telemetry


def read(name: str) -> control.ReadEvidenceRequest:
    return control.ReadEvidenceRequest(cache=common.CacheRef(uid=name))


class Leading:
    def check(self) -> None:
        """Always."""

    def leading_since(self) -> float | None:
        return 0.0


class Turns:
    """A clock on which a moment is a few turns of the loop."""

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def earlier() -> AsyncIterator[tuple[RecentAgents, AgentTarget, list[str]]]:
    """The operator's clients, and an agent whose Control has no call but ReadEvidence."""
    seen: list[str] = []

    async def answer(request: control.ReadEvidenceRequest, context: Any) -> control.ReadEvidenceResponse:
        seen.append(request.cache.uid)
        return control.ReadEvidenceResponse(epoch=request.cache.uid)

    handler = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=control.ReadEvidenceRequest.FromString,
        response_serializer=control.ReadEvidenceResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvtier.v1.Control", {"ReadEvidence": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    clients = GrpcAgents(
        AgentTls(Path("none"), Path("none"), Path("none")),
        Leading(),
        build_telemetry(otlp_endpoint="", instance="test", version="0"),
        Metrics(CollectorRegistry()),
        channels=lambda target: grpc.aio.insecure_channel(target.address),
    )
    agents = RecentAgents(clients, Turns())  # type: ignore[arg-type]
    try:
        yield agents, AgentTarget("a", "uid-a", f"127.0.0.1:{port}", "boot-a"), seen
    finally:
        await agents.close()
        await server.stop(0)


async def test_an_agent_of_an_earlier_version_answers_on_the_wire_as_it_did(
    earlier: tuple[RecentAgents, AgentTarget, list[str]],
) -> None:
    agents, target, seen = earlier
    async with asyncio.timeout(60):
        for _ in range(2):
            answers = await asyncio.gather(*(agents.read_evidence(target, read(name)) for name in "xyz"))
            assert [one.epoch for one in answers] == ["x", "y", "z"]
    assert sorted(seen) == ["x", "x", "y", "y", "z", "z"]
