"""The agents of the release bench: production code behind mutual TLS, with evidence that can be spoiled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_crds.compile import compile_manifest
from kvtier_crds.manifest import RuntimeManifest
from kvtier_crds.models.kvcache import KVCache
from kvtier_crds.models.kvselector import KVSelector
from kvtier_crds.models.tierclass import TierClass
from kvtier_operator.agents import GrpcAgents
from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.clock import SystemClock
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import AgentError, AgentTarget, AgentTls
from kvtier_operator.proofs import nonce_digest
from kvtier_operator.telemetry import build_telemetry
from tests.bench.release_objects import PROBES, Role, cache, rollout, selector
from tests.cluster.kvtier_localplane.pki import CertificateAuthority
from tests.release_agents import evidence
from tests.release_agents.__main__ import Host

UID = "11111111-2222-3333-4444-555555555555"
NODES = ("node-a", "node-b")


class Leading:
    def check(self) -> None:
        """Always."""

    def leading_since(self) -> float | None:
        return 0.0


@dataclass
class Rig:
    host: Host
    agents: GrpcAgents
    targets: dict[str, AgentTarget]
    baseline: RuntimeManifest
    candidate: RuntimeManifest
    ref: common.CacheRef

    async def apply(self, node: str, fence: int = 1) -> str:
        request = control.ApplyBaselineRequest(
            cache=self.ref,
            fence=common.Fence(value=fence, stage="Off"),
            boot_id=self.targets[node].boot_id,
            manifest=self.baseline.canonical(),
            digest=self.baseline.digest(),
        )
        return (await self.agents.apply_baseline(self.targets[node], request)).running_digest

    def window(self) -> Any:
        return {
            "rollout_uid": "r",
            "attempt": 1,
            "stage": "Canary",
            "candidate_digest": self.candidate.digest(),
            "baseline_digest": self.baseline.digest(),
            "gates_digest": "g",
            "opening_fence": 2,
        }

    def token(self, fence: int) -> common.Fence:
        return common.Fence(value=fence, rollout_uid="r", attempt=1, stage="Canary")

    async def grant(self, node: str, fence: int = 2) -> str:
        gates = [
            {"name": gate["name"], "metric": gate["metric"], "quantile": 75, "limit": gate["max"]}
            for gate in rollout("r", "ns", "c", Role.CANARY)["spec"]["gates"]
        ]
        request = control.GrantRequest(
            cache=self.ref,
            fence=self.token(fence),
            boot_id=self.targets[node].boot_id,
            manifest=self.candidate.canonical(),
            digest=self.candidate.digest(),
            baseline_digest=self.baseline.digest(),
            ttl_ms=60_000,
            traffic_fraction="0.5",
            sample_fraction="1",
            window=self.window(),
            gates=gates,
            settle_ms=1000,
        )
        return (await self.agents.grant(self.targets[node], request)).candidate_digest

    async def read(self, node: str) -> control.ReadEvidenceResponse:
        request = control.ReadEvidenceRequest(cache=self.ref, fence=self.token(2), window=self.window())
        return await self.agents.read_evidence(self.targets[node], request)


def manifests() -> tuple[RuntimeManifest, RuntimeManifest]:
    body = cache("chat", "serving", "default")
    body["metadata"]["uid"] = UID
    capabilities: dict[str, Any] = {
        "dmaSource": True,
        "dmaDestination": True,
        "persistence": "process",
        "tenantIsolation": "shared",
        "codecs": [{"name": "identity", "lossless": True}],
        "layouts": ["kv-head-major-f32/1"],
        "alignmentBytes": 64,
        "checksum": "xxh3",
        "visibility": "hostFence",
        "kernelReadable": True,
        "partialAttention": True,
    }
    media = {"gpu-sim": {"medium": "gpu", "deviceKind": "simulated"}, "cpu-dram": {"medium": "cpu"}}
    classes = {
        name: TierClass.model_validate(
            {"metadata": {"name": name}, "spec": {**spec, "capabilities": capabilities}}
        )
        for name, spec in media.items()
    }
    chosen = KVSelector.model_validate(selector("quest-64", "serving"))
    model = KVCache.model_validate(body)
    baseline = compile_manifest(model, UID, "serving", classes, None).exact()
    return baseline, compile_manifest(model, UID, "serving", classes, chosen)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Two agents of one process, and the operator's own client."""
    authority = CertificateAuthority("test-ca", tmp_path)
    places = []
    for node in NODES:
        tls = authority.issue(node, tmp_path / "tls")
        files = {"cert": str(tls.cert_file), "key": str(tls.key_file), "ca": str(tls.ca_file)}
        where = {"node": node, "uid": f"uid-{node}", "namespace": "serving", "pool": "default"}
        places.append({**where, **files, "kubeconfig": "", "state": str(tmp_path / node)})
    spec = {"operator": "kvtier-operator", "probeDigest": PROBES, "agents": places, "reads": ["node-a"]}
    host = Host(spec)
    addresses = {agent.node.name: await agent.start(register=False) for agent in host.agents}
    targets = {
        agent.node.name: AgentTarget(agent.node.name, "u", addresses[agent.node.name], agent.node.boot_id)
        for agent in host.agents
    }
    mine = authority.issue("kvtier-operator", tmp_path / "tls")
    client = GrpcAgents(
        AgentTls(mine.cert_file, mine.key_file, mine.ca_file),
        Leading(),
        build_telemetry(otlp_endpoint="", instance="test", version="test"),
        Metrics(CollectorRegistry()),
    )
    ref = common.CacheRef(namespace="serving", name="chat", uid=UID)
    try:
        yield Rig(host, client, targets, *manifests(), ref)
    finally:
        await client.close()
        assert await host.close() == []


async def test_a_candidate_is_granted_read_spoiled_and_revoked_with_proof(rig: Rig) -> None:
    for node in NODES:
        assert await rig.apply(node) == rig.baseline.digest()
        assert await rig.grant(node) == rig.candidate.digest()
    harmless = await rig.read("node-a")
    assert harmless.total_units == (await rig.read("node-b")).total_units > 0
    assert rig.host.answer({"do": "observed"})["firstHarm"] == {}
    rig.host.answer({"do": "harm", "rollouts": ["another"]})
    assert (await rig.read("node-a")).total_units == harmless.total_units
    rig.host.answer({"do": "harm", "rollouts": ["r"]})
    assert (await rig.read("node-a")).total_units > harmless.total_units
    for node in NODES:
        nonce = b"0123456789abcdef"
        answer = await rig.agents.revoke(
            rig.targets[node],
            control.RevokeRequest(
                cache=rig.ref,
                fence=rig.token(3),
                boot_id=rig.targets[node].boot_id,
                reason="GateFailed",
                nonce=nonce,
            ),
        )
        proof = answer.proof
        assert (proof.baseline_digest, proof.candidate_digest) == (rig.baseline.digest(), "")
        assert proof.nonce_digest == nonce_digest(nonce, proof.baseline_digest, "", proof.boot_id)
    seen = rig.host.answer({"do": "observed"})
    assert set(seen["revoked"]) == set(NODES)
    assert set(seen["firstHarm"]) == {"r"}
    # Only node-a was to note its reads.
    assert [(uid, len(moments)) for uid, _, moments in seen["reads"]] == [("r", 3)]
    assert seen["calls"]["Grant"] == 2
    rig.host.answer({"do": "clear"})
    assert rig.host.answer({"do": "observed"})["revoked"] == {}


async def test_what_is_asked_together_is_answered_as_it_is_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The production's own client and service on mutual TLS: one call for all, one refusal for each."""
    # With time the next cohort of the window settles, which is in its answers.
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 0.0))
    await rig.apply("node-a")
    await rig.grant("node-a")
    agents, target = RecentAgents(rig.agents, SystemClock()), rig.targets["node-a"]
    good = control.ReadEvidenceRequest(cache=rig.ref, fence=rig.token(2), window=rig.window())
    other = control.ReadEvidenceRequest(cache=rig.ref, fence=rig.token(2), window={"rollout_uid": "other"})
    stale = control.ReadEvidenceRequest(cache=rig.ref, fence=rig.token(1), window=rig.window())
    alone = await rig.read("node-a")
    found = await asyncio.gather(
        *(agents.read_evidence(target, one) for one in (good, other, good, stale)), return_exceptions=True
    )
    assert found[0] == found[2] == alone
    told = [one.reason for one in found if isinstance(one, AgentError)]
    assert told == ["WINDOW_UNKNOWN", "FENCE_STALE"]
    calls = rig.host.answer({"do": "observed"})["calls"]
    assert (calls["ReadEvidence"], calls["ReadEvidenceMany"], calls["ReadEvidenceMany.items"]) == (1, 1, 4)


async def test_fences_are_the_productions_own(rig: Rig) -> None:
    await rig.apply("node-a")
    await rig.grant("node-a", fence=7)
    with pytest.raises(AgentError) as refused:
        await rig.grant("node-a", fence=6)
    assert refused.value.reason == "FENCE_STALE"
    assert refused.value.facts["highest_fence"] == "7"
