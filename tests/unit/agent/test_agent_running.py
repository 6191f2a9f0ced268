"""What runs is recomputed at each refresh, told beside what was applied and granted; a difference is said."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2
from kvtier_agent import kvnode, running
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.control_service import ControlService
from kvtier_agent.engine_port import TierReport
from kvtier_agent.manifests import lane_manifest, placed_terms
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_crds.manifest import Fallback, Parameters, Placement, RuntimeManifest
from tests.engine.agent_process import baseline_manifest, quest_candidate
from tests.unit.agent.agent_fakes import NAME, Bench

MIB = 1 << 20
OWN = baseline_manifest(budgets={"dram": 96 * MIB})
PLACED = baseline_manifest().model_copy(
    update={"placement": Placement(policy="headGroups", parameters=Parameters({"stagingBytes": 16 * MIB}))}
)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


async def told(bench: Bench) -> control_pb2.CacheState:
    telemetry = Telemetry("node-a", "serving/pool", "boot", "0", [])
    service = ControlService(bench.node, RpcScope(telemetry, Metrics(CollectorRegistry()), 60.0))
    [state] = (await service._get_state(control_pb2.GetStateRequest(cache_uids=[NAME.uid]))).caches
    return state


def host_of(bench: Bench) -> CacheHost:
    [host] = bench.node.caches.values()
    return host


def verified(bench: Bench) -> kvnode.Condition:
    found = {one.type: one for one in kvnode.conditions_of(bench.node, [])}
    return found["ManifestsVerified"]


def drifted(manifest: RuntimeManifest) -> RuntimeManifest:
    return manifest.model_copy(update={"chunk_tokens": 2 * manifest.chunk_tokens})


async def test_what_runs_is_told_beside_what_was_applied_and_granted(bench: Bench) -> None:
    state = await told(bench)
    assert state.running_digest == state.baseline_digest == bench.baseline.digest()
    await bench.grant()
    state = await told(bench)
    assert state.candidate.running_digest == state.candidate.digest == bench.candidate.digest()
    assert verified(bench).status == "True"


async def test_a_baseline_that_drifts_is_found_and_said_and_its_candidate_with_it(bench: Bench) -> None:
    await bench.grant()
    await bench.node.refresh_reports()
    bench.node.changed.clear()
    bench.engine.manifest = drifted(bench.baseline)
    state = await told(bench)
    assert state.baseline_digest == bench.baseline.digest()
    assert state.running_digest == drifted(bench.baseline).digest()
    assert state.candidate.running_digest == drifted(bench.candidate).digest()
    assert bench.node.changed.is_set()
    said = verified(bench)
    assert (said.status, said.reason) == ("False", "DigestsDiffer")
    assert drifted(bench.baseline).digest() in said.message
    bench.engine.manifest = bench.baseline
    await bench.node.refresh_reports()
    assert verified(bench).status == "True" and not bench.node.differences()


async def test_an_engine_of_its_own_that_drifts_is_found(bench: Bench) -> None:
    bench.candidate = OWN
    await bench.grant(gates=())
    assert (await told(bench)).candidate.running_digest == OWN.digest()
    bench.engines[-1].manifest = drifted(OWN)
    state = await told(bench)
    assert state.candidate.running_digest == drifted(OWN).digest() != state.candidate.digest
    assert state.running_digest == state.baseline_digest
    assert "was granted" in verified(bench).message


async def test_a_proof_recomputes_a_candidate_that_has_no_engine_of_its_own(bench: Bench) -> None:
    await bench.grant()
    bench.engine.manifest = drifted(bench.baseline)
    proof = await bench.node.prove(host_of(bench).name, bench.fence, "", b"nonce")
    assert proof.candidate_digest == drifted(bench.candidate).digest()


@pytest.mark.parametrize(
    "candidate", [quest_candidate(baseline_manifest()), PLACED], ids=["selector", "placed"]
)
def test_a_lane_is_named_by_all_that_its_lease_lets_steps_do(candidate: RuntimeManifest) -> None:
    bare = granted_terms(candidate)
    live = baseline_manifest()
    terms = placed_terms(live, candidate, bare)
    assert lane_manifest(live, terms).digest() == candidate.digest()
    fallbacks = terms.fallbacks ^ {Fallback.POSTPONE}
    tolerance = terms.contract.model_copy(update={"tolerance": "0.125"})
    others = [
        replace(terms, fallbacks=fallbacks),
        replace(terms, contract=tolerance),
        replace(terms, placement=Placement(policy="another")),
        replace(terms, selector=None if terms.selector else quest_candidate(live).selector),
    ]
    digests = {lane_manifest(live, one).digest() for one in others}
    assert len(digests) == len(others) and candidate.digest() not in digests


def granted_terms(candidate: RuntimeManifest) -> GrantTerms:
    return GrantTerms(
        fence=FenceToken(2, "rollout", 1, "Canary", 0),
        candidate_digest=candidate.digest(),
        baseline_digest=baseline_manifest().digest(),
        ttl_ms=1000,
        traffic_fraction=Decimal(1),
        sample_fraction=Decimal(0),
        blast_radius=BlastRadius(),
        selector=candidate.selector,
        fallbacks=frozenset(candidate.contract.allowed_fallbacks),
    )


async def test_a_drift_is_found_while_another_answer_of_the_engine_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, tiers = threading.Event(), bench.engine.tiers

    def hang() -> Sequence[TierReport]:
        release.wait(120)
        return tiers()

    bench.engine.tiers = hang  # type: ignore[method-assign]
    bench.engine.manifest = drifted(bench.baseline)
    monkeypatch.setattr("kvtier_agent.node.REPORT_SECONDS", 1.0)
    try:
        while not bench.node.differences():
            await bench.node.refresh_reports()
    finally:
        release.set()
    monkeypatch.setattr("kvtier_agent.node.REPORT_SECONDS", 60.0)
    await bench.node.refresh_reports()


async def test_what_cannot_be_recomputed_is_not_repeated(bench: Bench) -> None:
    await bench.grant()

    def fails() -> RuntimeManifest:
        raise RuntimeError("gone")

    bench.engine.live_manifest = fails  # type: ignore[method-assign]
    state = await told(bench)
    assert state.HasField("running_digest") and state.candidate.HasField("running_digest")
    assert (state.running_digest, state.candidate.running_digest) == ("", "")
    assert "gone" in verified(bench).message


async def test_what_was_recomputed_long_ago_is_told_no_more(bench: Bench) -> None:
    await bench.node.refresh_reports()
    digests, host = bench.node.running, host_of(bench)
    now = bench.clock()
    assert digests.told(host, now + running.FRESH_NS)[0] == bench.baseline.digest()
    assert digests.told(host, now + running.FRESH_NS + 1) == ("", "")


async def test_a_lease_that_is_younger_than_the_answer_is_not_vouched_for(bench: Bench) -> None:
    await bench.grant()
    await bench.node.refresh_reports()
    await bench.grant(traffic="0.5")
    digests, host = bench.node.running, host_of(bench)
    assert digests.told(host, bench.clock()) == (bench.baseline.digest(), "")
    assert digests.difference(host) == ""


async def test_what_was_asked_before_a_change_is_not_taken_after_it(bench: Bench) -> None:
    digests, host = bench.node.running, host_of(bench)
    asked = digests.ask(host, bench.clock())
    assert asked is not None
    bench.engine.manifest = PLACED
    found = digests.answer(asked)
    host.become(PLACED)
    assert not digests.take(found)
    assert digests.told(host, bench.clock()) == ("", "") and digests.difference(host) == ""


async def test_a_baseline_that_an_engine_takes_over_is_no_difference_in_between(bench: Bench) -> None:
    adopt, seen = bench.engine.adopt, list[object]()

    def adopting(manifest: RuntimeManifest) -> None:
        adopt(manifest)
        # The engine runs the new one, and the cache is still said to have the old one.
        seen.append(running.RunningDigests.ask(host_of(bench), bench.clock()))

    bench.engine.adopt = adopting  # type: ignore[method-assign]
    bench.baseline = PLACED
    await bench.apply()
    assert seen == [None]
    state = await told(bench)
    assert state.running_digest == state.baseline_digest == PLACED.digest()


@pytest.mark.parametrize("same", [True, False], ids=["object", "bytes"])
async def test_a_quiet_refresh_hashes_nothing_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    hashed: list[bytes] = []
    real: Callable[[bytes], str] = running.sha256_digest
    monkeypatch.setattr(running, "sha256_digest", lambda data: hashed.append(data) or real(data))  # type: ignore[func-returns-value]
    await bench.grant()
    if not same:
        built = bench.baseline.canonical()
        bench.engine.live_manifest = lambda: RuntimeManifest.parse(built)  # type: ignore[method-assign]
    for _ in range(3):
        state = await told(bench)
    assert len(hashed) <= 2
    assert state.candidate.running_digest == bench.candidate.digest()


async def test_a_removed_cache_is_forgotten(bench: Bench) -> None:
    bench.engine.manifest = drifted(bench.baseline)
    await bench.node.refresh_reports()
    assert bench.node.differences()
    await bench.node.remove_cache(bench.command())
    await bench.node.refresh_reports()
    assert not bench.node.differences() and not bench.node.running._found and not bench.node.running._named
