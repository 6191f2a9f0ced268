"""The pool of agent clients: nothing is sent without the Lease, nothing waits past its deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.pool import MAX_CONCURRENT, MAX_PER_NODE, GrpcAgents
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import AgentTarget, AgentTls, AgentUnreachable, NotLeader
from kvtier_operator.telemetry import build_telemetry

TLS = AgentTls(Path("none"), Path("none"), Path("none"))


class Leading:
    def __init__(self) -> None:
        self.holds = True

    def check(self) -> None:
        if not self.holds:
            raise NotLeader("the Lease is gone")

    def leading_since(self) -> float | None:
        return 0.0 if self.holds else None


class Wire:
    """Stands in for all channels. Calls of a method in `hanging` are never answered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.hanging: set[str] = set()
        self.closed: list[str] = []
        self.expected = 1
        self.arrived = asyncio.Event()

    def connect(self, node: AgentTarget) -> Any:
        return Channel(self, node)


class Channel:
    def __init__(self, wire: Wire, node: AgentTarget) -> None:
        self._wire, self._node = wire, node

    def unary_unary(self, path: str, **_: Any) -> Any:
        return self._call(path.rpartition("/")[2])

    unary_stream = stream_unary = stream_stream = unary_unary

    def _call(self, method: str) -> Any:
        async def call(request: Any, **options: Any) -> Any:
            assert options["timeout"] > 0
            self._wire.sent.append((self._node.address, method))
            if len(self._wire.sent) >= self._wire.expected:
                self._wire.arrived.set()
            if method in self._wire.hanging:
                await asyncio.Event().wait()
            return getattr(control, f"{method}Response")()

        return call

    async def close(self, grace: float) -> None:
        self._wire.closed.append(self._node.address)


class Bench:
    def __init__(self) -> None:
        self.leader, self.wire = Leading(), Wire()
        telemetry = build_telemetry(otlp_endpoint="", instance="test", version="0")
        self.agents = GrpcAgents(
            TLS, self.leader, telemetry, Metrics(CollectorRegistry()), channels=self.wire.connect
        )


def node(name: str, address: str = "") -> AgentTarget:
    return AgentTarget(name, f"uid-{name}", address or f"{name}:1", f"boot-{name}")


async def test_without_the_lease_nothing_is_sent() -> None:
    bench = Bench()
    bench.leader.holds = False
    with pytest.raises(NotLeader):
        await bench.agents.grant(node("a"), control.GrantRequest())
    assert bench.wire.sent == []


async def test_a_lease_lost_while_a_call_waits_its_turn_keeps_it_from_being_sent() -> None:
    bench = Bench()
    bench.wire.expected = MAX_PER_NODE
    bench.wire.hanging = {"GetState"}
    slow = [asyncio.create_task(bench.agents.get_state(node("a"))) for _ in range(MAX_PER_NODE)]
    await bench.wire.arrived.wait()
    waiting = asyncio.create_task(bench.agents.revoke(node("a"), control.RevokeRequest()))
    await asyncio.sleep(0)
    bench.leader.holds = False
    for task in slow:
        task.cancel()
    with pytest.raises(NotLeader):
        await waiting
    assert ("a:1", "Revoke") not in bench.wire.sent


async def test_waiting_for_a_turn_counts_against_the_deadline() -> None:
    bench = Bench()
    bench.wire.expected = MAX_PER_NODE
    bench.wire.hanging = {"GetState"}
    slow = [asyncio.create_task(bench.agents.get_state(node("a"))) for _ in range(MAX_PER_NODE)]
    await bench.wire.arrived.wait()
    with pytest.raises(AgentUnreachable) as caught:
        await bench.agents.prove(node("a"), control.ProveRequest(), deadline_seconds=0.05)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert ("a:1", "Prove") not in bench.wire.sent
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_calls_that_hang_do_not_hold_up_renewals() -> None:
    """Or the leases of live agents would end because others are dead."""
    bench = Bench()
    bench.wire.hanging = {"GetState"}
    dead = [node(f"dead-{index // MAX_PER_NODE}") for index in range(MAX_CONCURRENT)]
    bench.wire.expected = MAX_CONCURRENT
    slow = [asyncio.create_task(bench.agents.get_state(one)) for one in dead]
    await bench.wire.arrived.wait()
    for target in (node("live"), dead[0]):
        await bench.agents.renew(target, control.RenewRequest(), deadline_seconds=1.0)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_channels_of_agents_that_are_gone_are_closed() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        await bench.agents.get_state(node(name))
    bench.agents.retain({"a", "d"})
    await bench.agents.get_state(node("a"))
    await bench.agents.get_state(node("b", "b:2"))
    await bench.agents.close()
    assert sorted(bench.wire.closed) == ["a:1", "b:1", "b:2", "c:1"]


async def test_an_agent_at_another_address_is_connected_anew() -> None:
    bench = Bench()
    await bench.agents.get_state(node("a", "here:1"))
    await bench.agents.get_state(node("a", "there:1"))
    assert [address for address, _ in bench.wire.sent] == ["here:1", "there:1"]
    await bench.agents.close()
    assert sorted(bench.wire.closed) == ["here:1", "there:1"]
