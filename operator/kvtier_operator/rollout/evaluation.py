"""What one look at the evidence says about the step that is open. Judging itself is `kvtier_evidence`'s.

A look counts only for the window it was taken of: one of an older window is as good as none.
It must not know what follows from a verdict.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.beats import BEAT_SLACK, next_beat
from kvtier_operator.rollout.inputs import GateVerdict, Inputs, Look
from kvtier_operator.rollout.moves import CARRIED, current_step, tick_seconds
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import GateStatus, RolloutState, Schedule
from kvtier_operator.rollout.vocabulary import Phase, Verdict


def current_look(state: RolloutState, inputs: Inputs) -> Look | None:
    look = inputs.look
    if look is None or state.window is None or look.opening_fence != state.window.opening_fence:
        return None
    return look


def failed_gate(state: RolloutState, inputs: Inputs) -> GateVerdict | None:
    """The gate of a Fail. Pooled evidence of earlier windows may name one that this stage does not have."""
    look = current_look(state, inputs)
    if look is None:
        return None
    failing = [item for item in look.verdicts if item.verdict is Verdict.FAIL]
    if not look.failed:
        return failing[0] if failing else None
    named = next((item for item in look.verdicts if item.name == look.failed), None)
    return named or GateVerdict(look.failed, Verdict.FAIL, "BoundOutsideLimit")


def describe(gate: GateVerdict | GateStatus) -> str:
    """One line with the numbers that decided."""
    parts = [f"{gate.name}: {gate.reason}"]
    shown = (("value", gate.value), ("bound", gate.bound), ("limit", gate.limit))
    parts += [f"{name} {text}" for name, text in shown if text]
    if gate.n:
        parts.append(f"n {gate.n}")
    return ", ".join(parts)


def all_pass(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> bool:
    """Every gate that must pass in this stage passes at this one look, and none is unreadable or failing."""
    look = current_look(state, inputs)
    if look is None:
        return False
    verdicts = {item.name: item.verdict for item in look.verdicts}
    if any(verdict in (Verdict.FAIL, Verdict.PROVIDER_ERROR) for verdict in verdicts.values()):
        return False
    required = _required(state, spec)
    return bool(required) and all(verdicts.get(name) is Verdict.PASS for name in required)


def insufficient_gates(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> list[str]:
    """Names of gates that must pass here and have too little evidence; empty without a look."""
    look = current_look(state, inputs)
    if look is None:
        return []
    verdicts = {item.name: item.verdict for item in look.verdicts}
    return [
        name
        for name in _required(state, spec)
        if verdicts.get(name, Verdict.INSUFFICIENT) is Verdict.INSUFFICIENT
    ]


def _required(state: RolloutState, spec: RolloutSpec) -> list[str]:
    return [gate.name for gate in spec.gates_of(current_step(state, spec)) if gate.required]


def record_look(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> RolloutState:
    """The state with this look's numbers, and the next tick. A tick that was missed runs once."""
    look = current_look(state, inputs)
    if look is None:
        return state
    seen = {item.name for item in look.verdicts}
    carried = tuple(gate for gate in state.gates if gate.metric in CARRIED and gate.name not in seen)
    judged = tuple(_gate_status(item, look) for item in look.verdicts)
    gates = (_identity(state, inputs, look), *judged, *carried)
    state = replace(state, gates=gates, carry=look.carry)
    due = next_due(state, spec, inputs.now)
    if inputs.now < due:
        return state
    following = _following(state, inputs, spec)
    schedule = Schedule(due_at=following, ran_at=inputs.now, late_by=round(inputs.now - due, 3))
    return replace(state, schedule=schedule)


def _following(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> float:
    """The pool's next beat, or before it the moment at which the step may end: a step of as many intervals
    as it lasts would else end up to one later, by where its pool's beats lie."""
    share = inputs.cache.beat if inputs.cache is not None else 0.0
    beat = next_beat(share, tick_seconds(spec), inputs.now)
    if state.window is None or state.phase is not Phase.PROGRESSING:
        return beat
    least = max(current_step(state, spec).min_seconds, spec.warmup + spec.settle)
    ended = state.window.opened_at + least
    return ended if inputs.now < ended < beat else beat


def next_due(state: RolloutState, spec: RolloutSpec, now: float) -> float:
    """When evidence is looked at next. A tick that lies further ahead than the grid ever plans was written
    under a clock that has been set back since, or on a node whose clock is ahead; waiting for it would leave
    harm unseen for as long, so it is due now."""
    if state.schedule is None or state.schedule.due_at > now + tick_seconds(spec) + BEAT_SLACK:
        return now
    return state.schedule.due_at


def _identity(state: RolloutState, inputs: Inputs, look: Look) -> GateStatus:
    """The built-in gate that is not counted but proved: each agent recomputed the candidate's digest. One of
    an earlier version repeats what it was granted, and the reason says so."""
    digest = state.candidate.digest if state.candidate else ""
    chosen = [agent for agent in inputs.agents if agent.selected]
    said = [
        agent.candidate_digest if agent.running_candidate is None else agent.running_candidate
        for agent in chosen
    ]
    same = said.count(digest)
    whole = bool(chosen) and same == len(chosen)
    recomputed = all(agent.running_candidate is not None for agent in chosen)
    return GateStatus(
        name="manifestIdentity",
        metric="manifestIdentity",
        verdict=Verdict.PASS if whole else Verdict.INSUFFICIENT,
        reason=("DigestsRecomputed" if recomputed else "DigestsRepeated") if whole else "CoverageIncomplete",
        n=same,
        expected_n=len(chosen),
        at=look.at,
    )


def _gate_status(item: GateVerdict, look: Look) -> GateStatus:
    return GateStatus(
        name=item.name,
        verdict=item.verdict,
        reason=item.reason,
        metric=item.metric,
        value=item.value,
        bound=item.bound,
        limit=item.limit,
        n=item.n,
        expected_n=item.expected_n,
        k=item.k,
        basis=item.basis,
        at=look.at,
        fail_only=not item.required,
    )


def summary_verdict(gates: tuple[GateStatus, ...]) -> str:
    """The worst verdict, for the column: Fail, ProviderError, Insufficient, Pass; empty without gates."""
    order = (Verdict.FAIL, Verdict.PROVIDER_ERROR, Verdict.INSUFFICIENT, Verdict.PASS)
    present = {gate.verdict if gate.open else Verdict.PASS for gate in gates}
    return next((str(verdict) for verdict in order if verdict in present), "")
