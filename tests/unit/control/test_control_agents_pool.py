"""The pool of agent clients: nothing is sent without the Lease, nothing waits past its deadline."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from kvtier_operator.agents import pool
from kvtier_operator.agents.errors import ERROR_KEY
from kvtier_operator.agents.evidencereads import EvidenceReads
from kvtier_operator.agents.pool import MAX_CONCURRENT, MAX_PER_NODE, GrpcAgents
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import AgentError, AgentTarget, AgentTls, AgentUnreachable, NotLeader
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
        self.requests: list[Any] = []
        self.answers: dict[str, Any] = {}
        self.hanging: set[str] = set()
        self.on_call: Callable[[Any], None] = lambda request: None
        self.closed: list[str] = []
        self.expected = 1
        self.arrived = asyncio.Event()

    def connect(self, node: AgentTarget) -> Any:
        return Channel(self, node)


def copied(request: Any) -> Any:
    """As it was when it was sent."""
    made = type(request)()
    made.CopyFrom(request)
    return made


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
            self._wire.requests.append(copied(request))
            self._wire.on_call(request)
            if len(self._wire.sent) >= self._wire.expected:
                self._wire.arrived.set()
            if method in self._wire.hanging:
                await asyncio.Event().wait()
            return self._wire.answers.get(method) or getattr(control, f"{method}Response")()

        return call

    async def close(self, grace: float) -> None:
        self._wire.closed.append(self._node.address)


class Bench:
    def __init__(self) -> None:
        self.leader, self.wire = Leading(), Wire()
        telemetry = build_telemetry(otlp_endpoint="", instance="test", version="0")
        self.metrics = Metrics(CollectorRegistry())
        self.agents = GrpcAgents(TLS, self.leader, telemetry, self.metrics, channels=self.wire.connect)


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


async def test_reasons_that_are_not_known_have_one_label_together() -> None:
    """A newer agent may have any; each would be a time series for as long as the process lives."""
    bench = Bench()
    detail = common.ErrorDetail()

    def refuse(request: Any) -> None:
        trailing = grpc.aio.Metadata((ERROR_KEY, detail.SerializeToString()))
        raise grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailing)

    bench.wire.on_call = refuse
    for number in (7001, 7002, 7003, common.FENCE_STALE):
        detail.reason = number  # type: ignore[assignment]
        with pytest.raises(AgentError) as told:
            await bench.agents.prove(node("a"), control.ProveRequest())
        assert told.value.reason == ("FENCE_STALE" if number < 7000 else f"REASON_{number}")
    shown = generate_latest(bench.metrics.registry).decode()
    counted = re.findall(r'rpc_duration_seconds_count{code="(\w+)",method="Prove"} (\S+)', shown)
    assert counted == [("REASON_UNKNOWN", "3.0"), ("FENCE_STALE", "1.0")]


async def test_calls_that_hang_do_not_hold_up_renewals() -> None:
    """Or the leases of live agents would end because others are dead."""
    bench = Bench()
    bench.wire.hanging = {"GetState"}
    dead = [node(f"dead-{index // MAX_PER_NODE}") for index in range(MAX_CONCURRENT)]
    bench.wire.expected = MAX_CONCURRENT
    slow = [asyncio.create_task(bench.agents.get_state(one, deadline_seconds=600.0)) for one in dead]
    await bench.wire.arrived.wait()
    for target in (node("live"), dead[0]):
        await bench.agents.renew(target, control.RenewRequest(), deadline_seconds=20.0)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize(("wanted", "named"), [("", []), ("uid-1", ["uid-1"])], ids=["all", "one"])
async def test_a_cache_that_is_wanted_is_named(wanted: str, named: list[str]) -> None:
    bench = Bench()
    await bench.agents.get_state(node("a"), wanted)
    [request] = bench.wire.requests
    assert list(request.cache_uids) == named


STAMP = 10**18


@pytest.mark.parametrize("what", ["Renew", "Grant"])
async def test_what_extends_a_permission_says_when_it_was_sent_by_the_agents_own_clock(what: str) -> None:
    bench, target = Bench(), node("a")
    bench.wire.answers["GetState"] = control.GetStateResponse(boot_id=target.boot_id, stamp_ns=STAMP)
    await bench.agents.get_state(target)
    bench.wire.requests.clear()
    if what == "Renew":
        await bench.agents.renew(target, control.RenewRequest(boot_id=target.boot_id))
    else:
        await bench.agents.grant(target, control.GrantRequest(boot_id=target.boot_id))
    [request] = bench.wire.requests
    assert request.sent_ns >= STAMP


RENEWED = control.RenewItem(digest="sha256:c")


@pytest.mark.parametrize("tells", [STAMP, 0], ids=["its-clock", "none"])
async def test_a_leader_asks_an_agent_that_it_has_not_heard_for_its_clock_before_it_renews(
    tells: int,
) -> None:
    """Else the renewal of a new leader would count from its arrival, however long it was on its way. Once a
    life of the agent, also of one that tells no clock."""
    bench, target = Bench(), node("a")
    bench.wire.answers["Renew"] = control.RenewResponse(boot_id=target.boot_id, stamp_ns=tells)
    renewal = control.RenewRequest(boot_id=target.boot_id, items=[RENEWED])
    await bench.agents.renew(target, renewal)
    await bench.agents.renew(target, renewal)
    asked, first, second = bench.wire.requests
    assert (list(asked.items), asked.boot_id) == ([], target.boot_id)
    assert [list(one.items) for one in (first, second)] == [[RENEWED], [RENEWED]]
    assert all(one.sent_ns >= tells and bool(one.sent_ns) == bool(tells) for one in (first, second))
    bench.wire.requests.clear()
    await bench.agents.renew(target, control.RenewRequest(boot_id="another life", items=[RENEWED]))
    assert [list(one.items) for one in bench.wire.requests] == [[], [RENEWED]]


async def test_leadership_that_is_lost_while_the_clock_is_asked_for_renews_nothing() -> None:
    bench, target = Bench(), node("a")

    def lose(request: control.RenewRequest) -> None:
        bench.leader.holds = False

    bench.wire.on_call = lose
    with pytest.raises(NotLeader):
        await bench.agents.renew(target, control.RenewRequest(boot_id=target.boot_id, items=[RENEWED]))
    assert [list(one.items) for one in bench.wire.requests] == [[]]


async def test_leadership_that_is_lost_while_reads_are_gathered_sends_nothing() -> None:
    bench = Bench()

    class Moment:
        def monotonic(self) -> float:
            return 0.0

        async def sleep(self, seconds: float) -> None:
            bench.leader.holds = False

    reads = EvidenceReads(bench.agents, Moment())  # type: ignore[arg-type]
    asked = [reads.read(node("a"), control.ReadEvidenceRequest()) for _ in range(2)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in found] == [NotLeader] * 2
    assert bench.wire.sent == []


async def test_channels_of_agents_that_are_gone_are_closed() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        await bench.agents.get_state(node(name))
    bench.agents.retain({"a", "d"})
    await bench.agents.get_state(node("a"))
    await bench.agents.get_state(node("b", "b:2"))
    await bench.agents.close()
    assert sorted(bench.wire.closed) == ["a:1", "b:1", "b:2", "c:1"]


async def test_at_the_end_all_channels_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take its grace; one after the other, two hundred would outlast the process' own."""
    bench = Bench()
    for name in ("a", "b", "c"):
        await bench.agents.get_state(node(name))
    begun = asyncio.Barrier(3)

    async def close(channel: Channel, grace: float) -> None:
        await begun.wait()

    monkeypatch.setattr(Channel, "close", close)
    async with asyncio.timeout(60):
        await bench.agents.close()


async def test_an_agent_at_another_address_is_connected_anew() -> None:
    bench = Bench()
    await bench.agents.get_state(node("a", "here:1"))
    await bench.agents.get_state(node("a", "there:1"))
    assert [address for address, _ in bench.wire.sent] == ["here:1", "there:1"]
    await bench.agents.close()
    assert sorted(bench.wire.closed) == ["here:1", "there:1"]


class Hanging(ControlServicer):
    """An agent that takes a call and never answers it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Renew(self, request: control.RenewRequest, context: Any) -> control.RenewResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@pytest.fixture
async def hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[GrpcAgents, AgentTarget, Hanging]]:
    """Clients over real channels, and an agent that hangs."""
    monkeypatch.setattr(pool, "CLOSE_GRACE_SECONDS", 0.01)
    servicer, server = Hanging(), grpc.aio.server()
    add_ControlServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agents = GrpcAgents(
        TLS,
        Leading(),
        build_telemetry(otlp_endpoint="", instance="test", version="0"),
        Metrics(CollectorRegistry()),
        channels=lambda target: grpc.aio.insecure_channel(target.address),
    )
    try:
        yield agents, node("a", f"127.0.0.1:{port}"), servicer
    finally:
        await agents.close()
        await server.stop(0)


async def test_a_call_whose_channel_is_closed_is_no_cancellation_of_its_caller(
    hanging: tuple[GrpcAgents, AgentTarget, Hanging],
) -> None:
    """Else the renewal loop, and with it the operator, would end when a Node is deleted."""
    agents, target, servicer = hanging
    renewal = asyncio.create_task(agents.renew(target, control.RenewRequest(), deadline_seconds=20))
    async with asyncio.timeout(60):
        await servicer.asked.wait()
        agents.retain(())
        with pytest.raises(AgentUnreachable) as caught:
            await renewal
    assert caught.value.code == "CHANNEL_CLOSED"


async def test_a_caller_that_is_cancelled_stays_cancelled(
    hanging: tuple[GrpcAgents, AgentTarget, Hanging],
) -> None:
    agents, target, servicer = hanging
    renewal = asyncio.create_task(agents.renew(target, control.RenewRequest(), deadline_seconds=20))
    async with asyncio.timeout(60):
        await servicer.asked.wait()
        renewal.cancel()
        await asyncio.wait([renewal])
    assert renewal.cancelled()


async def test_a_call_that_waited_for_its_turn_while_the_channel_was_closed_is_unanswered(
    hanging: tuple[GrpcAgents, AgentTarget, Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, target, servicer = hanging
    monkeypatch.setattr(agents, "_renewals", asyncio.Semaphore(1))
    calls = [
        asyncio.create_task(agents.renew(target, control.RenewRequest(), deadline_seconds=20))
        for _ in range(2)
    ]
    async with asyncio.timeout(60):
        await servicer.asked.wait()
        agents.retain(())
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [getattr(one, "code", one) for one in found] == ["CHANNEL_CLOSED"] * 2
