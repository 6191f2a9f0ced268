"""What is said to an agent about a rollout: grants and revocations as messages, from written state only.

The same state and spec give the same bytes (nonce and boot id apart), so a repeat under one fence is the
repeat that agents accept. It must not send anything.
"""

from __future__ import annotations

from decimal import Decimal

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.metrics import Kind
from kvtier_evidence.window import WindowKey
from kvtier_operator.rollout.evidencewire import key_message
from kvtier_operator.rollout.moves import current_step
from kvtier_operator.rollout.spec import RolloutSpec, Step
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import Cause, Phase, Stage

MILLIS = 1000


def cache_ref(namespace: str, name: str, uid: str) -> common.CacheRef:
    return common.CacheRef(namespace=namespace, name=name, uid=uid)


def fence_of(state: RolloutState, rollout_uid: str) -> common.Fence:
    return common.Fence(
        value=state.fence,
        rollout_uid=rollout_uid,
        attempt=state.attempt,
        stage=str(state.stage),
        step=state.step,
    )


def window_key(state: RolloutState, spec: RolloutSpec, rollout_uid: str) -> WindowKey:
    """Key of the open window; ValueError when none is open."""
    if state.window is None or state.candidate is None or state.baseline is None:
        raise ValueError("no window is open")
    step = current_step(state, spec)
    return WindowKey(
        rollout_uid=rollout_uid,
        attempt=state.attempt,
        stage=str(step.stage),
        step=step.index,
        candidate_digest=state.candidate.digest,
        baseline_digest=state.baseline.digest,
        gates_digest=spec.gates_digest,
        opening_fence=state.window.opening_fence,
    )


def counted_gates(spec: RolloutSpec, step: Step) -> tuple[GateSpec, ...]:
    """Those that agents count for. What a reference gate looks at is counted for its ratio gate already, and
    one of an earlier version would refuse a metric that it does not know."""
    others = (Kind.COUNT, Kind.SPLIT, Kind.EXTERNAL, Kind.REFERENCE)
    return tuple(gate for gate in spec.gates_of(step) if gate.metric.kind not in others)


def grant_request(
    state: RolloutState,
    spec: RolloutSpec,
    *,
    cache: common.CacheRef,
    rollout_uid: str,
    manifest: bytes,
    boot_id: str,
    nonce: bytes,
) -> control.GrantRequest:
    """The candidate's lease for the step that the state is in."""
    key = window_key(state, spec, rollout_uid)
    step = current_step(state, spec)
    radius = spec.blast_radius
    thresholds = dict(state.window.pair_thresholds) if state.window else {}
    return control.GrantRequest(
        cache=cache,
        fence=fence_of(state, rollout_uid),
        boot_id=boot_id,
        manifest=manifest,
        digest=key.candidate_digest,
        baseline_digest=key.baseline_digest,
        ttl_ms=round(spec.lease_ttl * MILLIS),
        traffic_fraction=plain(step.traffic),
        sample_fraction=plain(step.sample),
        blast_radius=control.BlastRadius(tenants=radius.tenants, request_classes=radius.request_classes),
        window=key_message(key),
        gates=[
            control.GateLimit(
                name=gate.name,
                metric=gate.metric.name,
                quantile=float(gate.quantile or 0),
                limit=plain(gate.limit),
                pair_threshold=thresholds.get(gate.name, ""),
            )
            for gate in counted_gates(spec, step)
        ],
        settle_ms=round(spec.settle * MILLIS),
        warmup_ms=round(spec.warmup * MILLIS),
        nonce=nonce,
        approved=state.phase is Phase.COMPLETED,
    )


def revoke_request(
    state: RolloutState,
    cause: Cause | None,
    *,
    cache: common.CacheRef,
    rollout_uid: str,
    boot_id: str,
    nonce: bytes,
) -> control.RevokeRequest:
    reason = str(cause) if cause is not None else "Superseded" if state.stage is Stage.OFF else "OutOfRadius"
    return control.RevokeRequest(
        cache=cache, fence=fence_of(state, rollout_uid), boot_id=boot_id, reason=reason, nonce=nonce
    )


def evidence_of(rollout_uid: str, state: RolloutState, spec: RolloutSpec) -> str:
    """By what an approval was judged, as its KVCache names it; it begins with whose it is."""
    return f"{rollout_uid}/{state.attempt}/{spec.gates_digest}"


def plain(value: Decimal) -> str:
    """A decimal without exponent or trailing zeros."""
    text = f"{value.normalize():f}"
    return "0" if text in ("-0", "") else text
