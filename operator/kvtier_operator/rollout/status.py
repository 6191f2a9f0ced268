"""Reads and writes `status` of a KVRollout: RolloutState to JSON and back, under 8 KiB whatever happens.

What is read back equals what was written (to the millisecond), since a restarted operator has nothing else.
It must not decide anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kvtier_crds.models.common import short_digest
from kvtier_operator.budgets import budget_entries, budgets_in
from kvtier_operator.packed import unpacked
from kvtier_operator.rollout.carrystatus import carry_from_json, carry_to_json, slim_carry
from kvtier_operator.rollout.evaluation import summary_verdict
from kvtier_operator.rollout.state import (
    CandidateRef,
    Condition,
    ExcludedAgent,
    GateStatus,
    Holders,
    LastIntent,
    LostAgent,
    ManifestRef,
    Revocation,
    Rollback,
    RolloutState,
    Schedule,
)
from kvtier_operator.rollout.vocabulary import (
    STATUS_LIMIT_BYTES,
    Blocker,
    CandidateClass,
    Cause,
    ConditionType,
    IntentResult,
    Phase,
    Stage,
    Verdict,
)
from kvtier_operator.rollout.windowstatus import window_from_json, window_to_json

Json = dict[str, Any]
MESSAGE_LIMIT = 240
MAX_HOLDERS = 16
SHOWN_NODES = 4
"""Names of nodes that even a full status has room for, unless it is an extreme one."""
_BLOCKERS = {str(blocker): blocker for blocker in Blocker}


def format_stamp(seconds: float) -> str:
    """RFC 3339 with milliseconds; empty for 0."""
    if not seconds:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_stamp(text: object) -> float:
    """Seconds since the epoch; 0 when absent or unreadable."""
    if not isinstance(text, str) or not text:
        return 0.0
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _milliseconds(seconds: float) -> str:
    """A Go duration; empty for 0."""
    return f"{round(seconds * 1000)}ms" if seconds else ""


def read_milliseconds(text: object) -> float:
    return float(str(text or "0ms").removesuffix("ms")) / 1000


def to_status(state: RolloutState, *, deadline_seconds: float = 0.0) -> Json:
    """The whole status. Numbers that telemetry has too are dropped first when it would grow too large."""
    for slim in range(3 + len(_CUTS)):
        status = _render(_slimmed(state, slim), deadline_seconds)
        if len(json.dumps(status, separators=(",", ":")).encode()) < STATUS_LIMIT_BYTES:
            return status
    return status


def as_written(state: RolloutState, deadline_seconds: float = 0.0) -> RolloutState:
    """What will be read of it: times to the millisecond, numbers as printed, lists as far as room goes."""
    return from_status(to_status(state, deadline_seconds=deadline_seconds))


def _slimmed(state: RolloutState, level: int) -> RolloutState:
    if level == 0:
        return state
    gates = tuple(replace(gate, basis="", k="", expected_n=0) for gate in state.gates)
    conditions = tuple(replace(condition, message=condition.message[:80]) for condition in state.conditions)
    state = replace(state, gates=gates, conditions=conditions)
    if level == 1:
        return state
    rollback = state.rollback
    if rollback is not None:
        rollback = replace(rollback, missing=rollback.missing[:SHOWN_NODES], message=rollback.message[:120])
    gates = tuple(replace(gate, value="", bound="", limit="", at=0.0) for gate in state.gates)
    state = replace(state, gates=gates, rollback=rollback, lost=state.lost[:SHOWN_NODES])
    state = replace(state, holders=_named(state.holders, SHOWN_NODES))
    return state if level == 2 else _cut(state, *_CUTS[level - 3])


# Gates, cells of evidence, probe results, names of nodes, characters of a message.
_CUTS = ((16, 16, 16, 4, 80), (12, 8, 4, 1, 60), (8, 4, 0, 1, 40))


def _cut(state: RolloutState, gates: int, cells: int, passes: int, nodes: int, text: int) -> RolloutState:
    """Drops what costs most time to lose last: a probe set is scored again, harm with little weight counts
    for little, a mismatch of a closed window for nothing."""
    window, rollback, intent = state.window, state.rollback, state.last_intent
    if window is not None and passes == 0:
        window = replace(window, pair_thresholds=(), effects=(), probes=())
    if rollback is not None:
        rollback = replace(rollback, missing=rollback.missing[:nodes], message=rollback.message[:text])
    if intent is not None:
        intent = replace(intent, message=intent.message[:text])
    revoking = state.revoking
    if revoking is not None:
        revoking = replace(revoking, nodes=revoking.nodes[:nodes])
    opened = f"/{window.opening_fence}" if window is not None else ""
    return replace(
        state,
        gates=tuple(sorted(state.gates, key=lambda gate: not gate.open)[:gates]),
        conditions=tuple(replace(one, message=one.message[:text]) for one in state.conditions),
        carry=slim_carry(state.carry, cells, passes, opened),
        lost=state.lost[:nodes],
        holders=_named(state.holders, nodes),
        excluded=state.excluded[:nodes],
        vanished=state.vanished[:nodes],
        window=window,
        rollback=rollback,
        revoking=revoking,
        last_intent=intent,
    )


def _named(holders: Holders, nodes: int) -> Holders:
    """With so many names; the number tells of the others."""
    return replace(holders, names=holders.names[:nodes])


def _render(state: RolloutState, deadline_seconds: float) -> Json:
    status: Json = {
        "observedGeneration": state.observed_generation,
        "phase": str(state.phase),
        "stage": str(state.stage),
        "step": state.step,
        "attempt": state.attempt,
        "fence": state.fence,
        "nodes": state.nodes_granted,
        "nodesTotal": state.nodes_total,
        "specDigest": f"{state.candidate_hash}.{state.window.spec_hash if state.window else ''}",
        "overridden": state.overridden or None,
        "heldByAll": state.held_by_all or None,
        "verdict": summary_verdict(state.gates) or None,
        "digestBudget": {"attemptsUsed": state.shares} if state.shares else None,
        "finishedAt": format_stamp(state.finished_at),
        "grantExpires": format_stamp(state.grant_expires),
        "traceparent": state.traceparent,
        "traceID": state.traceparent[3:35],
    }
    if state.baseline is not None:
        status["baseline"] = _reference(state.baseline.digest, state.baseline.revision)
    if state.candidate is not None:
        reference = _reference(state.candidate.digest, state.candidate.revision)
        status["candidate"] = {**reference, "class": str(state.candidate.kind)}
        if state.candidate.budgets:
            status["candidate"]["budgets"] = budget_entries(state.candidate.budgets)
    if state.window is not None:
        status["window"] = window_to_json(state.window)
        status["resumes"] = state.window.resumes
    begun = state.started_at or state.pending_since
    status["schedule"] = _clean(
        {
            "dueAt": format_stamp(state.schedule.due_at) if state.schedule else "",
            "ranAt": format_stamp(state.schedule.ran_at) if state.schedule else "",
            "lateBy": _milliseconds(state.schedule.late_by) or "0ms" if state.schedule else "",
            "stepStartedAt": format_stamp(state.window.opened_at) if state.window else "",
            "attemptStartedAt": format_stamp(state.started_at),
            "pendingSince": format_stamp(state.pending_since),
            "deadlineAt": format_stamp(begun + deadline_seconds) if begun else "",
        }
    )
    status["gates"] = [_gate(gate) for gate in state.gates]
    status["carry"] = carry_to_json(state.carry)
    status["unreachable"] = [{"node": lost.node, "since": format_stamp(lost.since)} for lost in state.lost]
    if state.holders.count:
        names = list(state.holders.names[:MAX_HOLDERS])
        status["holders"] = _clean({"nodes": names, "count": state.holders.count})
    status["vanished"] = [{"node": one.node, "since": format_stamp(one.since)} for one in state.vanished]
    status["excludedCount"] = state.excluded_count or None
    status["excluded"] = [
        _clean({"node": one.node, "reason": one.reason, "bootID": one.boot_id}) for one in state.excluded
    ]
    if state.revoking is not None:
        status["revoking"] = _revoking(state.revoking)
    if state.rollback is not None:
        status["rollback"] = _rollback(state.rollback)
    if state.last_intent is not None:
        last = state.last_intent
        status["lastIntent"] = {
            "seq": last.seq,
            "verb": last.verb,
            "result": str(last.result),
            "message": last.message,
            "at": format_stamp(last.at),
        }
    status["conditions"] = [_condition(condition) for condition in state.conditions]
    return _clean(status)


def _clean(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value not in ("", None, [], {})}


def _reference(digest: str, revision: str) -> Json:
    return _clean({"digest": digest, "short": short_digest(digest), "revision": revision})


def _gate(gate: GateStatus) -> Json:
    row: Json = {
        "name": gate.name,
        "metric": gate.metric,
        "verdict": str(gate.verdict),
        "reason": gate.reason,
        "basis": gate.basis,
        "value": gate.value,
        "bound": gate.bound,
        "limit": gate.limit,
        "expectedN": gate.expected_n or None,
        "k": gate.k,
        "failOnly": gate.fail_only or None,
        "overridden": gate.overridden or None,
        "at": format_stamp(gate.at),
    }
    return {**_clean(row), "n": gate.n}


def _revoking(revoking: Revocation) -> Json:
    row = {
        "rollout": revoking.rollout,
        "startedAt": format_stamp(revoking.since),
        "leaseTTL": _milliseconds(revoking.lease_ttl),
        "nodes": list(revoking.nodes),
        "agents": revoking.agents or None,
    }
    return _clean(row)


def _rollback(rollback: Rollback) -> Json:
    row = {
        "cause": str(rollback.cause),
        "message": rollback.message[:MESSAGE_LIMIT],
        "gate": rollback.gate,
        "fromStage": str(rollback.from_stage),
        "fromStep": rollback.from_step,
        "targetDigest": rollback.target_digest,
        "startedAt": format_stamp(rollback.started_at),
        "revokedAt": format_stamp(rollback.revoked_at),
        "verifiedAt": format_stamp(rollback.verified_at),
        "missing": list(rollback.missing),
        "leaseTTL": _milliseconds(rollback.lease_ttl),
    }
    counts = {
        "agentsRestored": rollback.restored,
        "agentsTotal": rollback.total,
        "inFlight": rollback.in_flight,
    }
    return {**_clean(row), **counts}


def _condition(condition: Condition) -> Json:
    stamp = datetime.fromtimestamp(condition.last_transition, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "observedGeneration": condition.observed_generation,
        "lastTransitionTime": stamp,
    }


class StatusUnreadable(ValueError):
    """Somebody else, or another version, has written this status. Nothing may be decided on it."""


def from_status(status: Mapping[str, Any]) -> RolloutState:
    """The state that a former pass wrote; the first state when there is none. Raises StatusUnreadable."""
    try:
        if not status.get("phase"):
            return RolloutState()
        return _read({name: unpacked(part) for name, part in status.items()})
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StatusUnreadable(f"{type(error).__name__}: {error}") from error


def _read(status: Mapping[str, Any]) -> RolloutState:
    schedule = status.get("schedule") or {}
    candidate_hash, _, window_hash = str(status.get("specDigest") or "").partition(".")
    blocker, message = _blocker(status)
    return RolloutState(
        phase=Phase(status["phase"]),
        stage=Stage(status.get("stage") or Stage.OFF),
        step=int(status.get("step") or 0),
        attempt=int(status.get("attempt") or 1),
        fence=int(status.get("fence") or 0),
        observed_generation=int(status.get("observedGeneration") or 0),
        blocker=blocker,
        blocker_message=message,
        baseline=read_reference(status.get("baseline")),
        candidate=read_candidate(status.get("candidate")),
        candidate_hash=candidate_hash,
        window=window_from_json(
            status.get("window"),
            opened_at=parse_stamp(schedule.get("stepStartedAt")),
            spec_hash=window_hash,
            resumes=int(status.get("resumes") or 0),
        ),
        gates=tuple(_read_gate(row) for row in status.get("gates") or []),
        carry=carry_from_json(status.get("carry")),
        schedule=_read_schedule(schedule),
        lost=tuple(
            LostAgent(row["node"], parse_stamp(row.get("since"))) for row in status.get("unreachable") or []
        ),
        holders=read_holders(status),
        vanished=tuple(
            LostAgent(row["node"], parse_stamp(row.get("since"))) for row in status.get("vanished") or []
        ),
        excluded=tuple(
            ExcludedAgent(row["node"], str(row.get("reason") or ""), str(row.get("bootID") or ""))
            for row in status.get("excluded") or []
        ),
        excluded_count=int(status.get("excludedCount") or 0),
        held_by_all=bool(status.get("heldByAll")),
        nodes_granted=int(status.get("nodes") or 0),
        nodes_total=int(status.get("nodesTotal") or 0),
        rollback=_read_rollback(status.get("rollback")),
        last_intent=read_intent(status.get("lastIntent")),
        overridden=bool(status.get("overridden")),
        shares=int((status.get("digestBudget") or {}).get("attemptsUsed") or 0),
        revoking=read_revoking(status.get("revoking")),
        pending_since=parse_stamp(schedule.get("pendingSince")),
        started_at=parse_stamp(schedule.get("attemptStartedAt")),
        finished_at=parse_stamp(status.get("finishedAt")),
        grant_expires=parse_stamp(status.get("grantExpires")),
        traceparent=str(status.get("traceparent") or ""),
        conditions=tuple(_read_condition(row) for row in status.get("conditions") or []),
    )


def _word(value: object) -> str:
    """Names and printed numbers, empty for none: one object for all states, as in the read cache."""
    return sys.intern(str(value or ""))


def _blocker(status: Mapping[str, Any]) -> tuple[Blocker, str]:
    for row in status.get("conditions") or []:
        if row.get("type") == ConditionType.PROGRESSING:
            blocker = _BLOCKERS.get(row.get("reason"), Blocker.NONE)
            return blocker, str(row.get("message") or "") if blocker else ""
    return Blocker.NONE, ""


def read_holders(status: Mapping[str, Any]) -> Holders:
    row = status.get("holders") or {}
    names = tuple(_word(node) for node in row.get("nodes") or ())
    return Holders(names, max(len(names), int(row.get("count") or 0)))


def read_reference(row: Mapping[str, Any] | None) -> ManifestRef | None:
    return ManifestRef(str(row["digest"]), str(row.get("revision") or "")) if row else None


def read_candidate(row: Mapping[str, Any] | None) -> CandidateRef | None:
    if not row:
        return None
    budgets = tuple(budgets_in(row).items())
    kind = CandidateClass(row["class"])
    return CandidateRef(str(row["digest"]), str(row.get("revision") or ""), kind, budgets)


def _read_schedule(row: Mapping[str, Any]) -> Schedule | None:
    if not row.get("dueAt"):
        return None
    late = read_milliseconds(row.get("lateBy"))
    return Schedule(parse_stamp(row["dueAt"]), parse_stamp(row.get("ranAt")), late)


def _read_gate(row: Mapping[str, Any]) -> GateStatus:
    return GateStatus(
        name=_word(row["name"]),
        verdict=Verdict(row["verdict"]),
        reason=_word(row.get("reason")),
        metric=_word(row.get("metric")),
        value=_word(row.get("value")),
        bound=_word(row.get("bound")),
        limit=_word(row.get("limit")),
        n=int(row.get("n") or 0),
        expected_n=int(row.get("expectedN") or 0),
        k=_word(row.get("k")),
        basis=_word(row.get("basis")),
        at=parse_stamp(row.get("at")),
        fail_only=bool(row.get("failOnly")),
        overridden=bool(row.get("overridden")),
    )


def read_revoking(row: Mapping[str, Any] | None) -> Revocation | None:
    if not row:
        return None
    return Revocation(
        rollout=str(row["rollout"]),
        since=parse_stamp(row.get("startedAt")),
        lease_ttl=read_milliseconds(row.get("leaseTTL")),
        nodes=tuple(row.get("nodes") or ()),
        agents=int(row.get("agents") or 0),
    )


def _read_rollback(row: Mapping[str, Any] | None) -> Rollback | None:
    if not row:
        return None
    return Rollback(
        cause=Cause(row["cause"]),
        message=str(row.get("message") or ""),
        gate=str(row.get("gate") or ""),
        lease_ttl=read_milliseconds(row.get("leaseTTL")),
        from_stage=Stage(row.get("fromStage") or Stage.OFF),
        from_step=int(row.get("fromStep") or 0),
        target_digest=str(row.get("targetDigest") or ""),
        started_at=parse_stamp(row.get("startedAt")),
        restored=int(row.get("agentsRestored") or 0),
        total=int(row.get("agentsTotal") or 0),
        missing=tuple(row.get("missing") or ()),
        in_flight=int(row.get("inFlight") or 0),
        revoked_at=parse_stamp(row.get("revokedAt")),
        verified_at=parse_stamp(row.get("verifiedAt")),
    )


def read_intent(row: Mapping[str, Any] | None) -> LastIntent | None:
    if not row:
        return None
    return LastIntent(
        seq=int(row["seq"]),
        verb=str(row.get("verb") or ""),
        result=IntentResult(row["result"]),
        message=str(row.get("message") or ""),
        at=parse_stamp(row.get("at")),
    )


def _read_condition(row: Mapping[str, Any]) -> Condition:
    return Condition(
        type=_word(row["type"]),
        status=_word(row["status"]),
        reason=_word(row.get("reason")),
        message=str(row.get("message") or ""),
        observed_generation=int(row.get("observedGeneration") or 0),
        last_transition=parse_stamp(row.get("lastTransitionTime")),
    )
