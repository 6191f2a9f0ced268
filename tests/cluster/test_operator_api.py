"""The client's typed verbs on a real API server: what is a conflict, what a defect, who owns a field."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvtier_operator.clock import SystemClock
from kvtier_operator.kube import KubeClient, connect
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import (
    AlreadyExists,
    Conflict,
    EventType,
    Forbidden,
    Invalid,
    Kind,
    NotFound,
    NotLeader,
    ObjectKey,
    add_op,
    expect_op,
    remove_op,
)
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import SYSTEM, apply, install, kv_cache, tier_class

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "op-api"
EXAMPLE = Path(__file__).parents[2] / "crds" / "examples" / "62-kvrollout-admission.yaml"
KEY = ObjectKey(Kind.KV_CACHE, NAMESPACE, "subject")


@pytest.fixture(scope="module")
def kubeconfig(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    return control_plane.service_account_kubeconfig(
        SYSTEM, "kvtier-operator", tmp_path_factory.mktemp("op-api") / "operator.kubeconfig"
    )


@contextlib.asynccontextmanager
async def client(
    kubeconfig: Path, metrics: Metrics | None = None, *, leading: bool = True
) -> AsyncIterator[KubeClient]:
    def gate() -> None:
        if not leading:
            raise NotLeader("not me")

    transport = await connect(str(kubeconfig))
    try:
        yield KubeClient(
            transport,
            gate=gate,
            metrics=metrics or Metrics(CollectorRegistry()),
            clock=SystemClock(),
            instance="test",
        )
    finally:
        await transport.close()


@pytest.fixture
def uid(control_plane: Cluster) -> str:
    """A fresh KVCache that no operator looks at (it has no running one in this module)."""
    control_plane.kubectl("delete", "kvcache", "subject", "-n", NAMESPACE, "--ignore-not-found")
    apply(control_plane, kv_cache("subject", NAMESPACE, "nowhere"))
    return str(control_plane.get("kvcache", "subject", "-n", NAMESPACE)["metadata"]["uid"])


async def test_of_what_is_known_the_server_says_whether_it_is_still_so(kubeconfig: Path, uid: str) -> None:
    async with client(kubeconfig) as api:
        known = await api.get(KEY)
        assert await api.get(KEY, known=known) is known
        listed = await api.list_all(KEY.kind, NAMESPACE, known={KEY: known}.get)
        assert [one for one in listed if one["metadata"]["uid"] == uid] == [known]
        assert any(one is known for one in listed)
        written = await api.compare_and_swap(
            KEY, [expect_op("/status", None), add_op("/status", {"fence": 1})]
        )
        assert await api.get(KEY, known=known) == written
        listed = await api.list_all(KEY.kind, NAMESPACE, known={KEY: known}.get)
        assert [one["status"] for one in listed if one["metadata"]["uid"] == uid] == [{"fence": 1}]


async def test_what_is_not_known_of_a_list_is_read_by_the_right_to_list(
    control_plane: Cluster, kubeconfig: Path
) -> None:
    """Of Leases, Nodes, DaemonSets and KVNodes the operator may get none."""
    names = ["agent-a", "agent-b"]
    for name in names:
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        apply(control_plane, {**kind, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": {}})
    async with client(kubeconfig) as api:
        whole = await api.list_all(Kind.LEASE, NAMESPACE)
        assert [one["metadata"]["name"] for one in whole] == names
        assert await api.list_all(Kind.LEASE, NAMESPACE, known=lambda _key: None) == whole
        assert await api.list_all(Kind.LEASE, "op-api-empty", known=lambda _key: None) == []


async def test_compare_and_swap_on_a_status_that_does_not_exist_yet(kubeconfig: Path, uid: str) -> None:
    ops = [expect_op("/metadata/uid", uid), expect_op("/status", None), add_op("/status", {"fence": 1})]
    async with client(kubeconfig) as api:
        stored = await api.compare_and_swap(KEY, ops)
        assert stored["status"]["fence"] == 1
        with pytest.raises(Conflict) as failed:
            await api.compare_and_swap(KEY, ops)
        assert failed.value.status == 422


async def test_rollouts_are_listed_by_the_cache_that_they_are_of(
    control_plane: Cluster, kubeconfig: Path
) -> None:
    for name, cache in (("one", "chat"), ("two", "code"), ("three", "chat")):
        rollout = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        rollout["metadata"] = {"name": name, "namespace": NAMESPACE}
        rollout["spec"]["cacheRef"] = {"name": cache}
        apply(control_plane, rollout)
    async with client(kubeconfig) as api:
        found = await api.list_all(Kind.KV_ROLLOUT, NAMESPACE, field_selector="spec.cacheRef.name=chat")
    assert sorted(obj["metadata"]["name"] for obj in found) == ["one", "three"]


async def test_of_many_swaps_of_one_fence_exactly_one_wins(kubeconfig: Path, uid: str) -> None:
    async with client(kubeconfig) as api:
        await api.patch_status(KEY, {"observedGeneration": 1})
        await api.compare_and_swap(KEY, [expect_op("/status/fence", None), add_op("/status/fence", 1)])

        async def swap() -> bool:
            try:
                await api.compare_and_swap(KEY, [expect_op("/status/fence", 1), add_op("/status/fence", 2)])
            except Conflict:
                return False
            return True

        assert sum(await asyncio.gather(*(swap() for _ in range(8)))) == 1
        assert (await api.get(KEY))["status"]["fence"] == 2


async def test_a_status_applied_later_neither_owns_nor_removes_the_fence(kubeconfig: Path, uid: str) -> None:
    async with client(kubeconfig) as api:
        await api.patch_status(KEY, {"observedGeneration": 1, "servingNodes": 2}, uid=uid)
        await api.compare_and_swap(KEY, [expect_op("/status/fence", None), add_op("/status/fence", 7)])
        stored = await api.patch_status(KEY, {"observedGeneration": 1}, uid=uid)
    assert stored["status"] == {"observedGeneration": 1, "fence": 7}
    owners = [entry["manager"] for entry in stored["metadata"]["managedFields"] if "f:fence" in str(entry)]
    assert owners == ["kvtier-operator-cas"]


async def test_a_schema_violation_is_a_defect_and_no_conflict(kubeconfig: Path, uid: str) -> None:
    async with client(kubeconfig) as api:
        with pytest.raises(Invalid, match="servingNodes"):
            await api.patch_status(KEY, {"servingNodes": -1})


async def test_a_recreated_object_is_a_conflict(kubeconfig: Path, uid: str) -> None:
    async with client(kubeconfig) as api:
        with pytest.raises(Conflict):
            await api.patch_status(KEY, {"servingNodes": 1}, uid="11111111-1111-4111-8111-111111111111")


async def test_what_a_role_does_not_allow_is_forbidden(control_plane: Cluster, tmp_path: Path) -> None:
    """As somebody without rights: a refusal of the operator itself counts as a defect of its role."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "nobody", "namespace": SYSTEM},
    }
    apply(control_plane, account)
    nobody = control_plane.service_account_kubeconfig(SYSTEM, "nobody", tmp_path / "nobody")
    async with client(nobody) as api:
        with pytest.raises(Forbidden):
            await api.list_all(Kind.KV_CACHE)
        with pytest.raises(Forbidden):
            await api.patch_status(KEY, {"servingNodes": 1})


async def test_what_is_absent_is_not_found_and_its_removal_is_success(kubeconfig: Path) -> None:
    async with client(kubeconfig) as api:
        with pytest.raises(NotFound):
            await api.get(ObjectKey(Kind.KV_CACHE, NAMESPACE, "absent"))
        await api.delete(ObjectKey(Kind.KV_ROLLOUT, NAMESPACE, "absent"))


async def test_without_the_lease_nothing_is_sent_and_nothing_counted(kubeconfig: Path, uid: str) -> None:
    metrics = Metrics(CollectorRegistry())
    async with client(kubeconfig, metrics, leading=False) as api:
        before = await api.get(KEY)
        for write in (
            api.patch_status(KEY, {"servingNodes": 1}),
            api.compare_and_swap(KEY, [remove_op("/status")]),
            api.apply(tier_class("never", "cpu")),
            api.delete(KEY),
        ):
            with pytest.raises(NotLeader):
                await write
        assert await api.get(KEY) == before
    samples = [s for m in metrics.registry.collect() for s in m.samples if s.name.endswith("writes_total")]
    assert samples == []


async def test_an_event_is_seen_once_by_a_person(control_plane: Cluster, kubeconfig: Path, uid: str) -> None:
    async with client(kubeconfig) as first:
        subject = await first.get(KEY)
        for _ in range(3):
            await first.event(subject, EventType.WARNING, "TierMissing", "no tier nvme")
    async with client(kubeconfig) as restarted:
        await restarted.event(subject, EventType.WARNING, "TierMissing", "no tier nvme")

    def seen() -> list[str]:
        events = control_plane.get("events", "-n", NAMESPACE, "--field-selector", f"involvedObject.uid={uid}")
        return [event["message"] for event in events["items"]]

    assert eventually(seen, 60) == ["no tier nvme"]
    described = control_plane.kubectl("describe", "kvcache", "subject", "-n", NAMESPACE).stdout
    assert "TierMissing" in described


async def test_a_create_of_what_exists_says_so(kubeconfig: Path, uid: str) -> None:
    revision = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {"name": "twice", "namespace": NAMESPACE},
        "data": {"manifest": "{}"},
        "revision": 1,
    }
    async with client(kubeconfig) as api:
        await api.create(revision)
        with pytest.raises(AlreadyExists):
            await api.create(revision)
