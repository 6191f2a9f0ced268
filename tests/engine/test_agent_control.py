"""A real agent process, operator side: fences, leases in real time, proofs, evidence and rollback."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.v1 import attention_pb2, common_pb2, control_pb2, control_pb2_grpc
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import Placement, RuntimeManifest
from tests.engine.agent_process import (
    CACHE,
    CALL_SECONDS,
    NODE,
    Agent,
    baseline_manifest,
    detail_of,
    quest_candidate,
    running_agent,
    until,
)
from tests.engine.attention_driver import Driver, Engine

pytestmark = pytest.mark.timeout(600)

APPROXIMATE = attention_pb2.APPROXIMATE
AFTER = attention_pb2.EXACT_OVER_APPROXIMATE_HISTORY


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with running_agent() as started:
        yield started


@pytest.fixture
def engine(agent: Agent) -> Iterator[Engine]:
    with Engine(agent.socket_path) as connected:
        yield connected


@pytest.fixture
def baseline(agent: Agent) -> RuntimeManifest:
    """The cache at its baseline, with no candidate."""
    manifest = baseline_manifest()
    agent.apply_baseline(manifest)
    return manifest


def refusal(call: Callable[[], Any]) -> common_pb2.ErrorDetail:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return detail_of(refused.value)


def reason_of(call: Callable[[], Any]) -> str:
    return common_pb2.Reason.Name(refusal(call).reason)


def candidate_session(engine: Engine, manifest: RuntimeManifest, tokens: int = 700) -> Driver:
    session = engine.open(manifest)
    session.forward(tokens)
    return session


def test_apply_is_idempotent_and_answers_the_recomputed_digest(agent: Agent) -> None:
    manifest = baseline_manifest()
    fence = agent.fence()
    for _ in range(2):
        answer = agent.apply_baseline(manifest, fence=fence)
        assert answer.running_digest == manifest.digest()
        assert answer.boot_id == agent.boot_id
    [cache] = agent.state().caches
    assert cache.highest_fence == fence.value


def test_the_plan_is_of_what_this_node_measured(agent: Agent, baseline: RuntimeManifest) -> None:
    state = agent.state()
    [cache] = state.caches
    measured = {tier.tier_class: tier.read_bytes_per_second for tier in state.tiers}
    plan = cache.plan
    assert plan.inputs["awayTiers"] == "nvme"
    assert plan.link_bytes_per_second == pytest.approx(measured["nvme"])
    assert plan.predicted_stall_seconds > 0.0 and plan.schedule
    # Attention over a row takes between a nanosecond and a tenth of a millisecond on any machine.
    assert 1e-9 < float(plan.inputs["attentionSecondsPerRow"]) < 1e-4
    assert plan.compute_flop_per_second > 1e8
    assert agent.state().caches[0].plan == plan, "nothing was measured again"


def placed(manifest: RuntimeManifest, **parameters: int) -> RuntimeManifest:
    policy = Placement(policy="headGroups", parameters=Parameters(parameters))
    return manifest.model_copy(update={"placement": policy})


def test_a_placement_policy_is_proved_by_its_digest_and_plans_with_why_the_rest_lost(agent: Agent) -> None:
    manifest = placed(baseline_manifest(), stagingBytes=1 << 20)
    assert agent.apply_baseline(manifest).running_digest == manifest.digest() != baseline_manifest().digest()
    plan = agent.state().caches[0].plan
    assert (plan.policy, plan.schedule) == ("headGroups", "headStaging")
    assert int(plan.inputs["stagingBytes"]) == 1 << 20
    assert {item.name: item.lost for item in plan.considered}["nvme"] == "TIER_INCAPABLE"


def test_a_placement_policy_without_its_parameters_is_refused_and_changes_nothing(
    agent: Agent, baseline: RuntimeManifest
) -> None:
    error = refusal(lambda: agent.apply_baseline(placed(baseline)))
    assert common_pb2.Reason.Name(error.reason) == "MANIFEST_INVALID"
    assert "stagingBytes" in error.message
    assert agent.state().caches[0].plan.policy == "recency"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"digest": "sha256:" + "0" * 64}, "MANIFEST_MISMATCH", id="digest-of-other-bytes"),
        pytest.param({"manifest": b"{}"}, "MANIFEST_MISMATCH", id="other-bytes"),
        pytest.param({"boot_id": "an-earlier-boot"}, "BOOT_ID_MISMATCH", id="boot-id"),
        pytest.param({"fence": common_pb2.Fence(value=1)}, "FENCE_STALE", id="lower-fence"),
        pytest.param({"fence": common_pb2.Fence()}, "BAD_ARGUMENT", id="no-fence"),
        pytest.param({"fence": common_pb2.Fence(value=9**9, stage="Later")}, "BAD_ARGUMENT", id="stage"),
    ],
)
def test_apply_refused(agent: Agent, baseline: RuntimeManifest, change: dict[str, Any], reason: str) -> None:
    request = control_pb2.ApplyBaselineRequest(
        cache=CACHE,
        fence=agent.fence(),
        boot_id=agent.boot_id,
        manifest=baseline.canonical(),
        digest=baseline.digest(),
    )
    before = agent.state().caches[0]
    for name, value in change.items():
        request.ClearField(name)
        if isinstance(value, common_pb2.Fence):
            request.fence.CopyFrom(value)
        else:
            setattr(request, name, value)
    assert reason_of(lambda: agent.control.ApplyBaseline(request, timeout=CALL_SECONDS)) == reason
    assert agent.state().caches[0] == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"device_kind": "cuda-sm90"}, "NUMERICS_MISMATCH", id="device-kind"),
        pytest.param({"numerics_version": "f32-chunk-merge/9"}, "NUMERICS_MISMATCH", id="numerics"),
        pytest.param({"tiers": "unknown-class"}, "TIER_INCAPABLE", id="missing-tier-class"),
        pytest.param({"tiers": "too-big"}, "NO_DESTINATION_CAPACITY", id="budget-over-capacity"),
        pytest.param({"tenancy": "other"}, "MANIFEST_MISMATCH", id="manifest-of-another-cache"),
    ],
)
def test_a_manifest_this_node_cannot_run_is_refused(
    agent: Agent, baseline: RuntimeManifest, change: dict[str, Any], reason: str
) -> None:
    first = baseline.tiers[0]
    values = {
        "unknown-class": (first.model_copy(update={"tier_class_name": "hbm9"}), *baseline.tiers[1:]),
        "too-big": (first.model_copy(update={"budget_bytes": 1 << 40}), *baseline.tiers[1:]),
        "other": baseline.tenancy.model_copy(update={"cache_uid": "another"}),
    }
    update = {name: values.get(value, value) for name, value in change.items()}
    wrong = baseline.model_copy(update=update)
    assert reason_of(lambda: agent.apply_baseline(wrong)) == reason
    assert agent.state().caches[0].baseline_digest == baseline.digest()


def test_a_candidate_serves_until_it_is_revoked_and_then_the_history_is_named(
    agent: Agent, engine: Engine, baseline: RuntimeManifest
) -> None:
    candidate = quest_candidate(baseline)
    agent.grant(baseline, candidate)
    session = candidate_session(engine, baseline)
    assert session.opened.arm == attention_pb2.ARM_CANDIDATE
    assert session.opened.manifest_digest == candidate.digest()
    served = session.forward(1)
    assert {a.receipt.exactness for a in served} == {APPROXIMATE}
    assert {a.receipt.manifest_digest for a in served} == {candidate.digest()}
    assert {a.receipt.producer_digest for a in served} == {candidate.digest()}
    assert all(a.receipt.rows_attended < a.receipt.frontier for a in served)

    nonce = b"sixteen-byte-non"
    fence = agent.fence(stage="ExactBaseline")
    proof = agent.revoke(nonce=nonce, fence=fence)
    assert proof.baseline_digest == baseline.digest()
    assert (proof.candidate_digest, proof.in_flight_candidate) == ("", 0)
    assert proof.highest_fence == fence.value
    joined = nonce + baseline.digest().encode() + b"" + agent.boot_id.encode()
    assert proof.nonce_digest == hashlib.sha256(joined).digest()
    assert agent.prove(fence.value, nonce=nonce) == proof

    frame = session.frame(0, 1, session.frontier)
    session.send(frame)
    answer = session.receive()
    session.note(0, frame)
    assert answer.receipt.exactness == AFTER
    assert answer.receipt.fallback == "IntentAbort"
    assert answer.receipt.manifest_digest == baseline.digest()
    assert np.abs(session.output(answer) - session.expected(frame)).max() < 2e-5
    session.close()

    fresh = candidate_session(engine, baseline)
    assert fresh.opened.arm == attention_pb2.ARM_BASELINE
    assert {a.receipt.exactness for a in fresh.forward(1)} == {attention_pb2.EXACT}
    fresh.close()


def test_a_lease_expires_in_real_time_and_says_so(
    agent: Agent, engine: Engine, baseline: RuntimeManifest
) -> None:
    candidate = quest_candidate(baseline)
    agent.grant(baseline, candidate, ttl_ms=60_000)
    session = candidate_session(engine, baseline)
    request = agent.grant(baseline, candidate, ttl_ms=3_000)
    assert {a.receipt.exactness for a in session.forward(1)} <= {APPROXIMATE, AFTER}

    until(lambda: not agent.state().caches[0].HasField("candidate"))
    cache = agent.state().caches[0]
    assert cache.returned_reason == "LeaseExpired"
    assert cache.returned_fence == request.fence.value
    assert cache.returned_rollout_uid == "rollout-uid"
    answers = session.forward(1)
    assert {a.receipt.exactness for a in answers} == {AFTER}
    assert {a.receipt.fallback for a in answers} == {"LeaseExpired"}
    item = control_pb2.RenewItem(cache=CACHE, fence=request.fence, digest=request.digest, ttl_ms=3_000)
    renewal = control_pb2.RenewRequest(boot_id=agent.boot_id, items=[item])
    [result] = agent.control.Renew(renewal, timeout=CALL_SECONDS).results
    assert common_pb2.Reason.Name(result.error.reason) == "LEASE_EXPIRED"
    assert reason_of(lambda: agent.control.Grant(request, timeout=CALL_SECONDS)) == "LEASE_EXPIRED"
    session.close()


def test_a_renewal_gives_a_lease_its_whole_time_again(agent: Agent, baseline: RuntimeManifest) -> None:
    ttl_ms = 60_000
    request = agent.grant(baseline, quest_candidate(baseline), ttl_ms=ttl_ms)
    item = control_pb2.RenewItem(cache=CACHE, fence=request.fence, digest=request.digest, ttl_ms=ttl_ms)
    stranger = control_pb2.RenewItem(
        cache=common_pb2.CacheRef(namespace="serving", name="no", uid="no"), fence=request.fence, ttl_ms=1
    )

    def remaining() -> int:
        return agent.state().caches[0].candidate.remaining_ms

    for _ in range(2):
        until(lambda: remaining() < ttl_ms - 500)
        before = remaining()
        answer = agent.control.Renew(
            control_pb2.RenewRequest(boot_id=agent.boot_id, items=[stranger, item]), timeout=CALL_SECONDS
        )
        refused, renewed = answer.results
        assert common_pb2.Reason.Name(refused.error.reason) == "CACHE_UNKNOWN"
        assert renewed.renewed
        assert before < renewed.remaining_ms <= ttl_ms
    assert agent.state().caches[0].candidate.digest == request.digest


def test_same_fence_other_content_conflicts_and_a_repeat_does_not(
    agent: Agent, baseline: RuntimeManifest
) -> None:
    request = agent.grant(baseline, quest_candidate(baseline))
    request.nonce = b"another nonce!!!"
    assert agent.control.Grant(request, timeout=CALL_SECONDS).candidate_digest == request.digest
    request.sample_fraction = "0.5"
    detail = refusal(lambda: agent.control.Grant(request, timeout=CALL_SECONDS))
    assert common_pb2.Reason.Name(detail.reason) == "FENCE_CONFLICT"
    assert detail.facts["highest_fence"] == str(request.fence.value)
    used = common_pb2.Fence(value=request.fence.value)
    assert reason_of(lambda: agent.revoke(fence=used)) == "FENCE_CONFLICT"
    agent.revoke()
    assert reason_of(lambda: agent.control.Grant(request, timeout=CALL_SECONDS)) == "FENCE_STALE"
    assert reason_of(lambda: agent.prove(request.fence.value)) == "FENCE_STALE"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"baseline_digest": "sha256:" + "1" * 64}, "MANIFEST_MISMATCH", id="other-baseline"),
        pytest.param({"traffic_fraction": "1.5"}, "BAD_ARGUMENT", id="fraction"),
        pytest.param({"traffic_fraction": "half"}, "BAD_ARGUMENT", id="not-a-decimal"),
        pytest.param({"ttl_ms": 0}, "BAD_ARGUMENT", id="ttl"),
        pytest.param({"settle_ms": -1}, "BAD_ARGUMENT", id="settle"),
    ],
)
def test_grant_refused(agent: Agent, baseline: RuntimeManifest, change: dict[str, Any], reason: str) -> None:
    request = agent.grant(baseline, quest_candidate(baseline))
    agent.revoke()
    request.fence.CopyFrom(agent.fence(stage="Canary"))
    for name, value in change.items():
        setattr(request, name, value)
    assert reason_of(lambda: agent.control.Grant(request, timeout=CALL_SECONDS)) == reason
    assert not agent.state().caches[0].HasField("candidate")


def test_a_candidate_that_changes_more_than_the_selector_is_unsupported(
    agent: Agent, baseline: RuntimeManifest
) -> None:
    moved = quest_candidate(baseline_manifest(budgets={"nvme": 32 << 20}))
    assert reason_of(lambda: agent.grant(baseline, moved)) == "UNSUPPORTED"


def test_a_selector_family_that_does_not_exist_is_refused(agent: Agent, baseline: RuntimeManifest) -> None:
    quest = quest_candidate(baseline)
    assert quest.selector is not None
    unknown = quest.model_copy(update={"selector": quest.selector.model_copy(update={"family": "oracle"})})
    assert reason_of(lambda: agent.grant(baseline, unknown)) in {"MANIFEST_INVALID", "UNSUPPORTED"}


def test_shadow_compares_and_the_evidence_is_read_once(
    agent: Agent, engine: Engine, baseline: RuntimeManifest
) -> None:
    gates = [
        control_pb2.GateLimit(name="output", metric="outputRelativeError", quantile=75, limit="0.05"),
        control_pb2.GateLimit(name="tail", metric="tpotRatio", quantile=75, limit="1.25"),
    ]
    request = agent.grant(
        baseline,
        quest_candidate(baseline),
        stage="Shadow",
        traffic="0",
        sample="1",
        gates=gates,
        settle_ms=10_000,
    )
    for number in range(3):
        session = engine.open(baseline, session_root_id=f"root-{number}")
        assert session.opened.sampled
        assert session.opened.arm == attention_pb2.ARM_BASELINE
        assert session.opened.window == request.window
        session.forward(700)
        for _ in range(4):
            assert {a.receipt.exactness for a in session.forward(1)} == {attention_pb2.EXACT}
        session.close()
        outcome = attention_pb2.ReportOutcomeRequest(
            session_id=session.opened.session_id,
            generation=session.opened.generation,
            tenant=session.tenant,
            output_tokens=5,
            first_token_seconds=0.1,
            last_token_seconds=0.5,
        )
        assert engine.attention.ReportOutcome(outcome, timeout=CALL_SECONDS).counted
        again = engine.attention.ReportOutcome(outcome, timeout=CALL_SECONDS)
        assert not again.counted

    def read(epoch: str = "", ack: int = 0) -> control_pb2.ReadEvidenceResponse:
        answer: control_pb2.ReadEvidenceResponse = agent.control.ReadEvidence(
            control_pb2.ReadEvidenceRequest(
                cache=CACHE, fence=request.fence, window=request.window, epoch=epoch, ack_seq=ack
            ),
            timeout=CALL_SECONDS,
        )
        return answer

    def errors(answer: control_pb2.ReadEvidenceResponse) -> int:
        return sum(m.histogram.n for m in answer.increments.metrics if m.metric == "outputRelativeError")

    until(lambda: errors(read()) == 3)
    full = read()
    assert full.full
    assert full.epoch == agent.boot_id
    assert full.assigned_units == 3
    [metric] = [m for m in full.increments.metrics if m.metric == "outputRelativeError"]
    assert metric.histogram.missing == 0
    later = read(full.epoch, full.to_seq)
    assert not later.full
    assert errors(later) == 0
    assert read("another life", full.to_seq).full
    wrong = control_pb2.ReadEvidenceRequest(cache=CACHE, fence=request.fence, window=request.window)
    wrong.window.step = 4
    assert reason_of(lambda: agent.control.ReadEvidence(wrong, timeout=CALL_SECONDS)) == "WINDOW_UNKNOWN"


def test_many_reads_of_evidence_are_answered_as_each_is_alone(
    agent: Agent, engine: Engine, baseline: RuntimeManifest
) -> None:
    request = agent.grant(baseline, quest_candidate(baseline))
    session = candidate_session(engine, baseline, tokens=3)
    session.close()
    good = control_pb2.ReadEvidenceRequest(cache=CACHE, fence=request.fence, window=request.window)
    stranger = common_pb2.CacheRef(namespace="serving", name="no", uid="no")
    items = [
        control_pb2.ReadEvidenceRequest(cache=stranger, fence=request.fence, window=request.window),
        good,
        control_pb2.ReadEvidenceRequest(cache=CACHE, fence=request.fence, window={"rollout_uid": "other"}),
        control_pb2.ReadEvidenceRequest(cache=CACHE, fence={"value": 1}, window=request.window),
        good,
    ]
    many = control_pb2.ReadEvidenceManyRequest(items=items)
    results = agent.control.ReadEvidenceMany(many, timeout=CALL_SECONDS).results
    told = [common_pb2.Reason.Name(one.error.reason) if one.HasField("error") else "" for one in results]
    assert told == ["CACHE_UNKNOWN", "", "WINDOW_UNKNOWN", "FENCE_STALE", ""]
    for item, result in zip(items, results, strict=True):
        if result.HasField("error"):
            alone = refusal(lambda item=item: agent.control.ReadEvidence(item, timeout=CALL_SECONDS))
            assert result.error == alone
            continue
        lone = agent.control.ReadEvidence(item, timeout=CALL_SECONDS)
        for one in (result.evidence, lone):
            assert (one.epoch, one.full, one.assigned_units) == (agent.boot_id, True, 1)
    too_many = control_pb2.ReadEvidenceManyRequest(items=[good] * 257)
    assert reason_of(lambda: agent.control.ReadEvidenceMany(too_many, timeout=CALL_SECONDS)) == "BAD_ARGUMENT"


def test_probes_are_served_by_the_arm_they_ask_for_from_shadow_on(
    agent: Agent, engine: Engine, baseline: RuntimeManifest
) -> None:
    request = agent.grant(baseline, quest_candidate(baseline), stage="Shadow", traffic="0", settle_ms=10_000)
    arms = {attention_pb2.ARM_BASELINE: attention_pb2.EXACT, attention_pb2.ARM_CANDIDATE: APPROXIMATE}
    for arm, exactness in arms.items():
        probe = engine.open(baseline, probe=True, forced_arm=arm)
        assert probe.opened.arm == arm
        probe.forward(700)
        assert {a.receipt.exactness for a in probe.forward(1)} == {exactness}
        pair = attention_pb2.ReportOutcomeRequest(
            session_id=probe.opened.session_id,
            generation=probe.opened.generation,
            tenant=probe.tenant,
            output_tokens=1,
        )
        pair.probe.gate, pair.probe.probe_set_digest = "quality", "sha256:set"
        pair.probe.prompt_digest, pair.probe.difference = f"sha256:{arm}", 0.25
        assert engine.attention.ReportOutcome(pair, timeout=CALL_SECONDS).counted
        probe.close()
    answer = agent.control.ReadEvidence(
        control_pb2.ReadEvidenceRequest(cache=CACHE, fence=request.fence, window=request.window),
        timeout=CALL_SECONDS,
    )
    assert {pair.prompt_digest for pair in answer.increments.probes} == {"sha256:1", "sha256:2"}
    assert answer.assigned_units == 0


def test_control_needs_a_client_certificate(agent: Agent) -> None:
    ca = (agent.folder / "pki" / "kvtier-test-ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(ca)
    options = [("grpc.ssl_target_name_override", NODE)]
    with grpc.secure_channel(agent.control_address, credentials, options) as channel:
        stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetState(control_pb2.GetStateRequest(), timeout=CALL_SECONDS)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert agent.state().boot_id == agent.boot_id


CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name


@pytest.mark.parametrize("method", sorted(CONTROL))
def test_control_answers_no_other_agents_certificate(agent: Agent, method: str) -> None:
    other = agent.authority.issue("node-b", agent.folder / "pki", san_ip=["127.0.0.1"])
    request = getattr(control_pb2, CONTROL[method].input_type.name)()
    with agent.channel_of(other) as channel:
        stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            getattr(stub, method)(request, timeout=CALL_SECONDS)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    detail = detail_of(refused.value)
    assert common_pb2.Reason.Name(detail.reason) == "CALLER_NOT_OPERATOR"
    assert "'node-b'" in detail.message and "'kvtier-operator'" in detail.message


def test_the_operators_name_may_be_an_alternative_one(agent: Agent) -> None:
    other = agent.authority.issue("operator-1", agent.folder / "pki", san_dns=["kvtier-operator"])
    with agent.channel_of(other) as channel:
        stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        assert stub.GetState(control_pb2.GetStateRequest(), timeout=CALL_SECONDS).boot_id == agent.boot_id


def test_removing_a_cache_ends_its_sessions_but_not_its_fence() -> None:
    with (
        running_agent() as alone,
        Engine(alone.socket_path) as engine,
    ):
        manifest = baseline_manifest()
        alone.apply_baseline(manifest)
        session = engine.open(manifest)
        session.forward(3)
        remove = control_pb2.RemoveCacheRequest(cache=CACHE, fence=alone.fence(), boot_id=alone.boot_id)
        for ended in (1, 0):
            answer = alone.control.RemoveCache(remove, timeout=CALL_SECONDS)
            assert answer.sessions_ended == ended
        session.send(session.frame(0, 1, 3))
        assert common_pb2.Reason.Name(session.receive().error.reason) == "SESSION_UNKNOWN"
        assert not alone.state().caches
        stale = common_pb2.Fence(value=1)
        assert reason_of(lambda: alone.apply_baseline(manifest, fence=stale)) == "FENCE_STALE"
        alone.apply_baseline(manifest)
        assert len(alone.state().caches) == 1
