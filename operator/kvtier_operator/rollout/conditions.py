"""The six conditions of a KVRollout, as a function of its state. `kubectl wait` and people read these.

Before the first return to the baseline CandidateRevoked and BaselineRestored are False, so that waiting for
them waits for something that happened. It must not change anything but conditions.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.foresight import Foresight, foresee, step_needs
from kvtier_operator.rollout.inputs import Inputs
from kvtier_operator.rollout.moves import current_step
from kvtier_operator.rollout.probesets import probe_fault
from kvtier_operator.rollout.state import Condition, RolloutState
from kvtier_operator.rollout.unproved import how_it_ends, who_is_missing
from kvtier_operator.rollout.vocabulary import (
    Blocker,
    ConditionType,
    Phase,
    Stage,
    Verdict,
)

MAX_MESSAGE = 240
MAX_FORECAST = 512
MAX_IDLE = 3
EVIDENCE_SLOW = "EvidenceSlow"
_FEASIBILITY = frozenset(
    {
        Blocker.NOT_IMPLEMENTED,
        Blocker.REFERENCE_MISSING,
        Blocker.SPEC_INVALID,
        Blocker.RELEASE_ORDER,
        Blocker.GATE_MISSING,
        Blocker.PROBE_SET_SMALL,
        Blocker.PROBE_PLAN_INVALID,
        Blocker.NO_CHANGE,
        Blocker.NEEDS_NEW_CACHE,
        Blocker.NO_ROOM,
        Blocker.CONTRACT_FORBIDS,
        Blocker.NO_NODES,
    }
)
Finding = tuple[str, str, str]


def with_conditions(state: RolloutState, inputs: Inputs) -> RolloutState:
    """The state with all six; transition times move only when a status does."""
    found = {
        ConditionType.FEASIBLE: _feasible(state, inputs),
        ConditionType.PROGRESSING: _progressing(state, inputs),
        ConditionType.SERVABLE: _servable(inputs),
        ConditionType.CANDIDATE_REVOKED: _candidate_revoked(state),
        ConditionType.BASELINE_RESTORED: _baseline_restored(state, inputs),
        ConditionType.DEGRADED: _degraded(state, inputs),
    }
    before = {condition.type: condition for condition in state.conditions}
    conditions = []
    for kind, (status, reason, message) in found.items():
        old = before.get(kind)
        since = old.last_transition if old is not None and old.status == status else inputs.now
        room = MAX_FORECAST if kind is ConditionType.FEASIBLE else MAX_MESSAGE
        conditions.append(Condition(str(kind), status, reason, message[:room], inputs.generation, since))
    return replace(state, conditions=tuple(conditions))


def _feasible(state: RolloutState, inputs: Inputs) -> Finding:
    if state.stage is Stage.OFF and state.blocker in _FEASIBILITY:
        return "False", str(state.blocker), state.blocker_message
    if _held_now(state, inputs):
        return "False", str(Blocker.SPEC_INVALID), f"held: {_unwaited(inputs)}"
    idle = _idle_limits(inputs)
    told = _forecast(state, inputs, was_slow=bool(slow_evidence(state)))
    if told is not None:
        # The end of a forecast tells of steps that are far away.
        message = told.message[: MAX_FORECAST - len(idle)] + idle
        return "True", EVIDENCE_SLOW if told.slow else "Forecast", message
    return "True", "Feasible", f"{state.nodes_total} nodes in the blast radius{idle}"


def _idle_limits(inputs: Inputs) -> str:
    """Limits that a person declared and that no step is judged by."""
    limits = inputs.spec.idle_limits if inputs.spec is not None else ()
    named = ", ".join(f"spec.gates[{gate}].perStage {stage}" for gate, stage in limits[:MAX_IDLE])
    rest = f" and {len(limits) - MAX_IDLE} more" if len(limits) > MAX_IDLE else ""
    return f"; no effect, since spec.stages has no such stage: {named}{rest}" if limits else ""


def _unwaited(inputs: Inputs) -> str:
    return inputs.spec.unwaited if inputs.spec is not None else ""


def _held_now(state: RolloutState, inputs: Inputs) -> bool:
    """Whether it goes no further since a gate of its spec is one that no step would wait for."""
    return state.phase in (Phase.PROGRESSING, Phase.PAUSED) and bool(_unwaited(inputs))


def held_by_spec(state: RolloutState) -> str:
    """What Feasible says of a spec with which a rollout that is under way goes no further; empty when it does
    not."""
    if not state.holds_candidate:
        return ""
    found = (one for one in state.conditions if one.type == ConditionType.FEASIBLE)
    return next((one.message for one in found if one.reason == Blocker.SPEC_INVALID), "")


def slow_evidence(state: RolloutState) -> str:
    """What Feasible says of evidence that comes too slowly; empty when it does not."""
    found = (one for one in state.conditions if one.type == ConditionType.FEASIBLE)
    return next((one.message for one in found if one.reason == EVIDENCE_SLOW), "")


def _forecast(state: RolloutState, inputs: Inputs, *, was_slow: bool) -> Foresight | None:
    """Of an attempt that waits or walks; none without a spec or a candidate."""
    spec, candidate = inputs.spec, inputs.candidate
    walking = state.phase in (Phase.PROGRESSING, Phase.PAUSED)
    if spec is None or candidate.ref is None or not (walking or state.phase is Phase.PENDING):
        return None
    share = state.shares if walking else max(state.shares, candidate.prior_shares) + 1
    step = current_step(state, spec) if walking else None
    begun = state.window.opened_at if walking and state.window is not None else 0.0
    return foresee(
        step_needs(spec, share, step),
        rate=inputs.rate,
        spent=max(0.0, begun - state.started_at) if begun and state.started_at else 0.0,
        deadline=spec.progress_deadline,
        was_slow=was_slow,
    )


def _progressing(state: RolloutState, inputs: Inputs) -> Finding:
    if inputs.cache is not None and inputs.cache.suspended and state.phase is Phase.PROGRESSING:
        return "False", str(Blocker.CACHE_SUSPENDED), f"held while the KVCache is suspended; {_where(state)}"
    if state.phase in (Phase.PENDING, Phase.INVALID) and state.blocker is not Blocker.NONE:
        going = "True" if state.blocker is Blocker.REVOKING_APPROVED else "False"
        return going, str(state.blocker), state.blocker_message
    if state.phase is Phase.PROGRESSING and _held_now(state, inputs):
        return "False", str(Blocker.SPEC_INVALID), f"held: {_unwaited(inputs)}; {_where(state)}"
    if state.phase is Phase.PROGRESSING and not state.nodes_total:
        return "False", str(Blocker.NO_NODES), f"held: no live agent in the blast radius; {_where(state)}"
    if state.phase in (Phase.PENDING, Phase.PROGRESSING):
        return "True", str(state.stage), _where(state)
    if state.phase is Phase.ROLLING_BACK:
        return "True", "RollingBack", state.rollback.message if state.rollback else ""
    if state.phase is Phase.ROLLED_BACK and state.rollback is not None:
        return "False", str(state.rollback.cause), state.rollback.message
    if state.blocker is Blocker.APPROVAL_ENDED:
        return "False", str(state.blocker), state.blocker_message
    return "False", str(state.phase), _where(state)


def _where(state: RolloutState) -> str:
    open_gates = [gate.name for gate in state.gates if gate.open]
    suffix = f"; not passing: {', '.join(open_gates[:6])}" if open_gates else ""
    return f"attempt {state.attempt}, {state.stage} step {state.step}{suffix}"


def _servable(inputs: Inputs) -> Finding:
    if inputs.cache is None or inputs.cache.baseline is None:
        return "False", "NoBaseline", "the cache has no exact baseline to serve"
    return "True", "ExactBaseline", "the exact baseline serves whatever the candidate does not"


def _candidate_revoked(state: RolloutState) -> Finding:
    if state.stage is not Stage.EXACT_BASELINE or state.rollback is None:
        return "False", "NotRolledBack", "no return to the baseline in this attempt"
    if not state.rollback.revoked_at:
        return "False", "Revoking", f"waiting for {', '.join(state.rollback.missing[:6])}"
    if state.rollback.missing:
        return "True", "LeaseEnded", f"unproved but without a lease: {', '.join(state.rollback.missing[:6])}"
    return "True", "Revoked", "no agent holds the candidate"


def _baseline_restored(state: RolloutState, inputs: Inputs) -> Finding:
    rollback = state.rollback
    if state.stage is not Stage.EXACT_BASELINE or rollback is None:
        return "False", "NotRolledBack", "no return to the baseline in this attempt"
    if rollback.verified_at:
        return (
            "True",
            "Proved",
            f"{rollback.restored} of {rollback.total} agents proved {rollback.target_digest}",
        )
    if state.phase is Phase.ROLLED_BACK:
        return "False", "NothingProved", rollback.message
    return (
        "False",
        "Proving",
        f"{rollback.restored} of {rollback.total}; missing {who_is_missing(rollback, inputs.agents)}",
    )


def _why(gate: str, inputs: Inputs) -> str:
    """What the gate's source said, where it is another system's."""
    seen = inputs.last_look.verdicts if inputs.last_look is not None else ()
    return next((f", {one.detail}" for one in seen if one.name == gate and one.detail), "")


def _degraded(state: RolloutState, inputs: Inputs) -> Finding:
    if state.lost:
        return "True", "AgentUnreachable", f"no answer from {', '.join(lost.node for lost in state.lost)}"
    if state.excluded and state.holds_candidate:
        who = ", ".join(f"{one.node} ({one.reason})" for one in state.excluded)
        more = state.excluded_count - len(state.excluded)
        who = f"{more} not named, {who}" if more > 0 else who
        return "True", "NodeExcluded", f"exact only, since it cannot host the candidate: {who}"
    broken = [gate for gate in state.gates if gate.verdict is Verdict.PROVIDER_ERROR]
    if broken and state.holds_candidate:
        unread = inputs.last_look.unread if inputs.last_look is not None else ()
        whose = f" of {', '.join(unread[:6])}" if unread else ""
        return (
            "True",
            "ProviderError",
            f"{broken[0].name}: {broken[0].reason}{whose}{_why(broken[0].name, inputs)}",
        )
    if state.phase is Phase.ROLLING_BACK and state.rollback and state.rollback.revoked_at:
        return "True", "BaselineUnproved", how_it_ends(state.rollback, inputs.agents, MAX_MESSAGE)
    if state.holds_candidate and inputs.unread_baseline:
        return "True", "BaselineUnreadable", inputs.unread_baseline
    if state.holds_candidate and inputs.spec is not None:
        # Its gate has no evidence: a plan that is broken now, or a Job that nobody runs.
        unusable, why = probe_fault(inputs.spec.probes)
        if unusable is not Blocker.NONE:
            return "True", str(unusable), why
        if inputs.unread_probes:
            return "True", "ProbePlanUnreadable", inputs.unread_probes
        if inputs.probe_trouble is not None:
            return "True", *inputs.probe_trouble
    return "False", "AsExpected", ""
