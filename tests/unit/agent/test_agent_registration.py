"""What an agent writes about itself, when, and that a missing API server never stops it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier_agent import kvnode
from kvtier_agent.cli import build_parser
from kvtier_agent.config import AgentConfig
from kvtier_agent.engine_port import TierReport
from kvtier_agent.registration import MIN_SPREAD_SECONDS, ClusterRegistration, KubeError
from kvtier_agent.telemetry import Metrics
from kvtier_crds.models.kvnode import KVNode
from tests.unit.agent.agent_fakes import Bench

NODE_PATH = "/apis/kvtier.dev/v1alpha1/kvnodes/node-a"
LEASE_PATH = "/apis/coordination.k8s.io/v1/namespaces/serving/leases/kvnode-node-a"


class FakeApi:
    """Remembers every write; `down` answers nothing, `missing` answers 404 to the status."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, dict[str, Any]]] = []
        self.down = False
        self.error: Exception = KubeError(0, "connection refused")
        self.objects: dict[str, dict[str, Any]] = {}
        self.closed = False
        self.wrote = asyncio.Event()
        self.refused = asyncio.Semaphore(0)

    async def apply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.down:
            self.refused.release()
            raise self.error
        if path.endswith("/status") and NODE_PATH not in self.objects:
            raise KubeError(404, "not found")
        self.writes.append((path, body))
        self.wrote.set()
        self.objects[path] = {**body, "metadata": {**body["metadata"], "generation": 1}}
        return self.objects[path]

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("a registration creates by apply")

    async def get(self, path: str) -> dict[str, Any]:
        if self.down:
            raise KubeError(0, "connection refused")
        if path not in self.objects:
            raise KubeError(404, "not found")
        return self.objects[path]

    async def close(self) -> None:
        self.closed = True

    def of(self, path: str) -> list[dict[str, Any]]:
        return [body for written, body in self.writes if written == path]


class Registered:
    """A registration over a fake node and API, with a clock that tests move."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.api = FakeApi()
        self.seconds = 1000.0
        self.metrics = Metrics(CollectorRegistry())
        for name in ("crt", "key", "ca"):
            (folder / name).write_text("pem")
        config = AgentConfig.from_arguments(
            build_parser().parse_args(
                [
                    *("--node-name", "node-a", "--node-uid", "uid-a", "--pool", "serving/pool"),
                    *("--tls-cert", str(folder / "crt"), "--tls-key", str(folder / "key")),
                    *("--tls-ca", str(folder / "ca"), "--listen", "127.0.0.1:0", "--no-kubernetes"),
                ]
            )
        )
        self.registration = ClusterRegistration(
            config,
            self.bench.node,
            self.metrics,
            "10.0.0.1:7443",
            self.api,
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds),
            monotonic=lambda: self.seconds,
            jitter=lambda: 0.0,
        )

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [body["status"] for body in self.api.of(f"{NODE_PATH}/status")]

    def failures(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "kvtier_agent_registration_failures_total", {"object": name}
        )
        return value or 0.0


@pytest.fixture
async def registered(tmp_path: Path) -> AsyncIterator[Registered]:
    made = Registered(tmp_path)
    await made.bench.apply()
    yield made
    await made.bench.close()


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in status["conditions"] if one["type"] == kind)
    return found


async def test_the_object_is_a_kvnode_owned_by_its_node(registered: Registered) -> None:
    await registered.registration.write_node()
    [spec] = registered.api.of(NODE_PATH)
    [status] = registered.statuses
    model = KVNode.model_validate({**spec, "status": status})
    assert model.spec.address == "10.0.0.1:7443"
    assert (model.spec.pool_ref.namespace, model.spec.pool_ref.name) == ("serving", "pool")
    assert spec["metadata"]["ownerReferences"][0]["uid"] == "uid-a"
    assert model.status is not None
    assert model.status.boot_id == registered.bench.node.boot_id
    assert [tier.class_name for tier in model.status.tiers] == ["gpu-sim", "dram", "nvme"]
    assert [tier.simulated for tier in model.status.tiers] == [True, False, False]
    assert {c.type: c.status.value for c in model.status.conditions} == {
        "Ready": "True",
        "Draining": "False",
        "CapabilitiesVerified": "True",
        "ManifestsVerified": "True",
    }


async def test_nothing_new_writes_nothing(registered: Registered) -> None:
    await registered.registration.write_node()
    for _ in range(50):
        registered.seconds += 30
        await registered.registration.write_node()
    assert len(registered.statuses) == 1
    assert len(registered.api.of(NODE_PATH)) == 1


async def test_numbers_wait_for_a_minute_and_five_percent(registered: Registered) -> None:
    node = registered.bench.node
    registered.bench.engine.used = 1000
    await node.refresh_reports()
    await registered.registration.write_node()
    registered.bench.engine.used = 2000
    await node.refresh_reports()
    registered.seconds += 59
    await registered.registration.write_node()
    assert len(registered.statuses) == 1
    registered.seconds += 1
    await registered.registration.write_node()
    assert len(registered.statuses) == 2
    registered.bench.engine.used = 2100
    await node.refresh_reports()
    registered.seconds += 61
    await registered.registration.write_node()
    assert len(registered.statuses) == 2, "exactly five percent is not a change"
    registered.bench.engine.used = 2120
    await node.refresh_reports()
    await registered.registration.write_node()
    assert len(registered.statuses) == 3


async def test_a_candidate_is_written_within_seconds_and_leaves_within_seconds(
    registered: Registered,
) -> None:
    """Two hundred agents are granted one at one moment, and let go of it at another."""
    await registered.registration.write_node()
    await registered.bench.grant(stage="Canary")
    await registered.registration.write_node()
    assert registered.statuses[-1]["candidates"] == []
    registered.seconds += MIN_SPREAD_SECONDS
    await registered.registration.write_node()
    [held] = registered.statuses[-1]["candidates"]
    assert held == {
        "namespace": "serving",
        "cache": "chat",
        "cacheUID": "cache-uid-1",
        "digest": registered.bench.candidate.digest(),
        "stage": "Canary",
        "step": 0,
        "fence": 2,
    }
    registered.bench.clock.advance(61)
    await registered.registration.write_node()
    assert len(registered.statuses) == 2
    registered.seconds += MIN_SPREAD_SECONDS
    await registered.registration.write_node()
    assert registered.statuses[-1]["candidates"] == []
    assert len(registered.statuses) == 3


async def test_a_candidate_that_came_and_went_meanwhile_is_not_written(registered: Registered) -> None:
    await registered.registration.write_node()
    await registered.bench.grant(stage="Canary")
    await registered.registration.write_node()
    registered.bench.clock.advance(61)
    registered.seconds += MIN_SPREAD_SECONDS
    await registered.registration.write_node()
    assert len(registered.statuses) == 1
    # Nor has the next one waited already.
    await registered.bench.grant(stage="Canary")
    await registered.registration.write_node()
    assert len(registered.statuses) == 1


async def test_a_condition_takes_a_candidate_that_waits_with_it(registered: Registered) -> None:
    await registered.registration.write_node()
    await registered.bench.grant(stage="Canary")
    registered.bench.node.draining = True
    await registered.registration.write_node()
    assert condition(registered.statuses[-1], "Draining")["status"] == "True"
    assert len(registered.statuses[-1]["candidates"]) == 1


async def test_conditions_keep_their_transition_time(registered: Registered) -> None:
    await registered.registration.write_node()
    first = condition(registered.statuses[-1], "Ready")["lastTransitionTime"]
    registered.seconds += 100
    await registered.bench.grant()
    await registered.registration.write_node()
    assert condition(registered.statuses[-1], "Ready")["lastTransitionTime"] == first
    registered.bench.node.draining = True
    registered.seconds += 100
    await registered.registration.write_node()
    ready = condition(registered.statuses[-1], "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Draining")
    assert ready["lastTransitionTime"] != first


async def test_a_broken_tier_is_said_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "nvme").write_text("not a folder")
    made = Registered(tmp_path)
    await made.registration.write_node()
    nvme = made.statuses[-1]["tiers"][2]
    assert (nvme["state"], nvme["reason"]) == ("Failed", "StorageUnavailable")
    verified = condition(made.statuses[-1], "CapabilitiesVerified")
    assert (verified["status"], verified["reason"]) == ("False", "StorageUnavailable")
    assert "nvme" in verified["message"]
    KVNode.model_validate({**made.api.of(NODE_PATH)[0], "status": made.statuses[-1]})
    await made.bench.close()


async def test_a_deleted_object_is_made_again(registered: Registered) -> None:
    await registered.registration.write_node()
    registered.api.objects.clear()
    registered.seconds += 61
    await registered.registration.write_node()
    assert len(registered.api.of(NODE_PATH)) == 2
    assert len(registered.statuses) == 2


async def test_the_lease_is_the_boot_ids(registered: Registered) -> None:
    await registered.registration.renew_lease()
    [lease] = registered.api.of(LEASE_PATH)
    assert lease["spec"]["holderIdentity"] == registered.bench.node.boot_id
    assert lease["spec"]["leaseDurationSeconds"] == 30
    assert lease["spec"]["renewTime"].endswith("Z")


async def test_a_drain_says_so_and_gives_the_lease_back(registered: Registered) -> None:
    await registered.registration.write_node()
    registered.bench.node.draining = True
    await registered.registration.drain()
    assert condition(registered.statuses[-1], "Draining")["status"] == "True"
    assert "holderIdentity" not in registered.api.of(LEASE_PATH)[-1]["spec"]
    assert registered.api.closed


async def test_a_drain_waits_for_no_connection_that_will_not_close(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_agent.registration.REQUEST_SECONDS", 0.01)

    async def hang() -> None:
        await asyncio.Event().wait()

    registered.api.close = hang  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await registered.registration.drain()
    assert registered.failures("connection") == 1


async def test_a_renewal_on_its_way_does_not_take_a_released_lease_again(registered: Registered) -> None:
    under_way, go_on, told = asyncio.Event(), asyncio.Event(), asyncio.Event()
    apply = registered.api.apply

    async def slow(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == LEASE_PATH and "holderIdentity" in body["spec"]:
            under_way.set()
            await go_on.wait()
        if path == f"{NODE_PATH}/status":
            told.set()
        return await apply(path, body)

    registered.api.apply = slow  # type: ignore[method-assign]
    renewal = asyncio.create_task(registered.registration.renew_lease())
    async with asyncio.timeout(60):
        await under_way.wait()
        drain = asyncio.create_task(registered.registration.drain())
        await told.wait()
        go_on.set()
        await asyncio.gather(renewal, drain)
    assert "holderIdentity" not in registered.api.of(LEASE_PATH)[-1]["spec"]


async def test_a_drain_gives_the_lease_back_though_the_node_cannot_be_written(registered: Registered) -> None:
    async def no_json() -> None:
        raise ValueError("an answer that is no JSON")

    registered.registration.write_node = no_json  # type: ignore[method-assign]
    await registered.registration.drain()
    assert "holderIdentity" not in registered.api.of(LEASE_PATH)[-1]["spec"]
    assert registered.failures("KVNode") == 1
    assert registered.api.closed


@pytest.mark.parametrize(
    "error",
    [KubeError(0, "connection refused"), ValueError("an answer that is no JSON")],
    ids=["away", "unexpected"],
)
async def test_an_api_server_that_is_away_is_retried_and_never_raised(
    registered: Registered, error: Exception
) -> None:
    registered.api.down = True
    registered.api.error = error
    running = asyncio.create_task(registered.registration.run())
    async with asyncio.timeout(60):
        for _ in range(2):
            await registered.api.refused.acquire()
        assert registered.failures("Lease") == registered.failures("KVNode") == 1
        registered.api.down = False
        await registered.api.wrote.wait()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    registered.api.down = True
    registered.api.error = KubeError(0, "connection refused")
    await registered.registration.drain()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param({"used": 100}, {"used": 105}, False, id="five-percent"),
        pytest.param({"used": 100}, {"used": 106}, True, id="more"),
        pytest.param({"used": 0}, {"used": 1}, True, id="from-nothing"),
        pytest.param({}, {"readBytesPerSecond": 9}, True, id="measured-for-the-first-time"),
        pytest.param({"used": 7}, {"used": 7}, False, id="equal"),
    ],
)
def test_must_write_numbers(before: dict[str, int], after: dict[str, int], expected: bool) -> None:
    def status(numbers: dict[str, int]) -> dict[str, Any]:
        return {"tiers": [{"class": "dram", "state": "Ready", **numbers}], "conditions": []}

    assert kvnode.must_write(status(before), status(after), 60.0) is expected
    assert not kvnode.must_write(status(before), status(after), 59.0)


@pytest.mark.parametrize(
    ("said", "reason", "message"),
    [
        ("STORAGE_UNAVAILABLE: no space left", "StorageUnavailable", "no space left"),
        ("StorageUnavailable: /mnt: Read-only", "StorageUnavailable", "/mnt: Read-only"),
        ("something odd happened", "TierFailed", "something odd happened"),
    ],
    ids=["of-the-core", "of-the-agent", "free-text"],
)
async def test_a_tiers_condition_becomes_a_legal_reason(
    registered: Registered, said: str, reason: str, message: str
) -> None:
    report = TierReport("dram", "cpu", False, 1, condition=said)
    tier = kvnode.tier_of(report, registered.bench.node)
    assert (tier["state"], tier["reason"], tier["message"]) == ("Failed", reason, message)
