"""Why the next step has not happened, in one sentence with numbers. Pure.

It must not know where a rollout comes from, and it judges nothing: verdicts, bounds and causes are the
operator's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kubectl_kvtier.rollouts import current, ends_at, following, seconds_of, span, status_of, title
from kubectl_kvtier.uninstall.holds import CACHES, FINALIZERS, ROLLOUTS, lease_wait
from kvtier_crds.models import KVCache, KVRollout
from kvtier_crds.models.kvrollout import Verb
from kvtier_crds.models.rolloutstatus import GateStatus, IntentResult, KVRolloutStatus, Phase, Verdict
from kvtier_crds.quantity import parse_duration

LATE_SECONDS = 60.0
"""A look comes every 10 s at the latest, and a status is not written before 10 s after the last time."""
NAMED_GATES = 4
_WORST = (Verdict.FAIL, Verdict.PROVIDER_ERROR, Verdict.INSUFFICIENT, Verdict.PASS)


@dataclass(frozen=True, slots=True)
class Explanation:
    """finished: nothing more will happen by itself. negative: the candidate was not released."""

    sentence: str
    waits_for: tuple[str, ...] = ()
    finished: bool = False
    negative: bool = False


def explain(rollout: KVRollout, now: float) -> Explanation:
    status = status_of(rollout)
    if rollout.metadata.deletion_timestamp:
        return _deleted(rollout, status, now)
    if status.phase is None:
        return Explanation(
            f"{rollout.metadata.name} has no status yet: no operator has looked at it since it was created."
        )
    if status.observed_generation is not None and rollout.metadata.generation > status.observed_generation:
        behind = f" (the operator has seen generation {status.observed_generation} of {{}})"
        tail = behind.format(rollout.metadata.generation)
    else:
        tail = ""
    found = _BY_PHASE[status.phase](rollout, status, now)
    return Explanation(found.sentence + tail + ".", found.waits_for, found.finished, found.negative)


def _deleted(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    """Who holds it, and until when."""
    name, namespace = rollout.metadata.name, rollout.metadata.namespace
    since = seconds_of(rollout.metadata.deletion_timestamp)
    age = now - since if since is not None else 0.0
    mine = FINALIZERS[ROLLOUTS]
    others = tuple(one for one in rollout.metadata.finalizers if one != mine)
    told = []
    if mine in rollout.metadata.finalizers:
        told.append(f"{mine} holds it: {_release(rollout, status, now, age)}")
    if others:
        told.append(f"{', '.join(others)} {'hold' if len(others) > 1 else 'holds'} it, not kvtier's to drop")
    held = "; ".join(told) or "nothing holds it"
    return Explanation(f"{name} in {namespace} is being deleted for {span(age)}: {held}.", others)


def explain_cache(cache: KVCache, waits: float, now: float) -> Explanation:
    """Of a KVCache: who holds its deletion, and until when; else what its conditions say. waits: seconds that
    an operator waits for nodes which do not answer."""
    name, namespace = cache.metadata.name, cache.metadata.namespace
    since = seconds_of(cache.metadata.deletion_timestamp)
    if since is None:
        found = cache.status.condition("Ready") if cache.status else None
        said = (
            f"Ready is {found.status}, {found.reason}: {found.message}"
            if found
            else "no operator has seen it"
        )
        return Explanation(f"{name} in {namespace}: {said}.")
    mine, told = FINALIZERS[CACHES], []
    others = tuple(one for one in cache.metadata.finalizers if one != mine)
    if mine in cache.metadata.finalizers:
        left = since + waits - now
        until = f"a node that does not answer is waited for {span(left)} more"
        if left <= -LATE_SECONDS:
            until = f"which should have ended {span(-left)} ago; `kubectl kvtier uninstall` needs no operator"
        told.append(f"{mine} holds it until an operator has made each agent forget it; {until}")
    if others:
        told.append(f"{', '.join(others)} {'hold' if len(others) > 1 else 'holds'} it, not kvtier's to drop")
    held = "; ".join(told) or "nothing holds it"
    return Explanation(f"{name} in {namespace} is being deleted for {span(now - since)}: {held}.", others)


def _release(rollout: KVRollout, status: KVRolloutStatus, now: float, age: float) -> str:
    """What its operator does before it lets go of a deleted rollout, and when that ends at the latest."""
    back = status.rollback
    # Without a phase its status is lost, and agents may hold its candidate.
    over = status.phase in (Phase.PENDING, Phase.INVALID, Phase.ROLLED_BACK)
    if over or (status.phase is Phase.ROLLING_BACK and back is not None and back.revoked_at):
        what, ends = "no agent can hold its candidate, and an operator's next look lets it go", None
    elif status.phase is Phase.ROLLING_BACK and back is not None:
        ttls = [rollout.spec.lease_ttl, *([back.lease_ttl] if back.lease_ttl else [])]
        wait = lease_wait(max(parse_duration(ttl, "leaseTTL") for ttl in ttls))
        began = seconds_of(back.started_at)
        ends = began + wait if began is not None else None
        of = f", not yet {', '.join(back.missing[:NAMED_GATES])}" if back.missing else ""
        what = f"{back.agents_restored} of {back.agents_total} agents have proved the exact baseline{of}"
        if ends is not None and ends > now:
            return f"{what}; every lease has ended in {span(ends - now)} at the latest"
    else:
        what, ends = "its candidate is revoked first, and no operator has begun that yet", None
    late = age if ends is None else now - ends
    if late <= LATE_SECONDS:
        return what
    return (
        f"{what}; since no operator has done it for {span(late)}, "
        f"`kubectl kvtier uninstall -n {rollout.metadata.namespace}`, which deletes all rollouts and caches "
        "there, ends it without one"
    )


def _pending(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    why = _reason(status, "Progressing")
    since = seconds_of(status.schedule.pending_since) if status.schedule else None
    waited = f" for {span(now - since)}" if since is not None else ""
    ends = seconds_of(status.schedule.deadline_at) if status.schedule else None
    left = f"; it gives up in {span(ends - now)}" if ends is not None and ends > now else ""
    return Explanation(f"{rollout.metadata.name} has waited{waited} to begin: {why}{left}", (why,))


def _invalid(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    why = _reason(status, "Progressing")
    return Explanation(
        f"{rollout.metadata.name} cannot run until its spec is edited: {why}", (why,), True, True
    )


def _paused(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    name = rollout.metadata.name
    last = status.last_intent
    # A later intent that was refused has paused nothing.
    mine = last is not None and last.verb == Verb.PAUSE and last.result is IntentResult.ACCEPTED
    by = f" by intent seq {last.seq}" if last is not None and mine else ""
    return Explanation(
        f"{name} is paused in {_where(rollout, status)}{by}, and goes on with `kubectl kvtier resume {name}`",
        ("Resume",),
    )


def _progressing(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    step, after = current(rollout), following(rollout)
    if step is None:
        return Explanation(f"{rollout.metadata.name} is about to begin: {_reason(status, 'Progressing')}")
    target = title(after) if after else "its release"
    start = f"{rollout.metadata.name} stays in {title(step)} and does not go to {target} yet"
    failed = [gate for gate in status.gates if gate.verdict is Verdict.FAIL]
    if failed:
        gates = ", ".join(_gate(gate) for gate in failed)
        return Explanation(f"{start}: {gates}; the return to the exact baseline follows", (gates,))
    waiting = sorted(
        (gate for gate in status.gates if gate.verdict is not Verdict.PASS and not gate.fail_only),
        key=lambda gate: (_WORST.index(gate.verdict), -_missing(gate)),
    )
    held, ends = _held(status), ends_at(rollout)
    if waiting:
        named = tuple(_gate(gate) for gate in waiting)
        more = f" and {len(named) - NAMED_GATES} more" if len(named) > NAMED_GATES else ""
        of = f"{len(waiting)} of {len(status.gates)} gates"
        sentence = f"{start}: {held + '; ' if held else ''}{of} do not pass: {'; '.join(named[:NAMED_GATES])}"
        return Explanation(sentence + more + _soonest(ends, now) + _forecast(status), named)
    gates = f"all {len(status.gates)} gates pass" if status.gates else ""
    if held:
        return Explanation(f"{start}: {held}{'; ' + gates if gates else ''}{_soonest(ends, now)}", (held,))
    if ends is not None and ends > now:
        passing = f"{gates}, " if gates else ""
        return Explanation(f"{start}: {passing}its minimum time ends in {span(ends - now)}", ("time",))
    ran = seconds_of(status.schedule.ran_at) if status.schedule else None
    # A look at which nothing changes is not written, so only what has been due since then tells.
    since = max(one for one in (ran, ends, 0.0) if one is not None)
    if since and now - since > LATE_SECONDS:
        return Explanation(
            f"{start}: nothing has held it for {span(now - since)}, and no operator takes it on",
            ("operator",),
        )
    return Explanation(f"{start}: {_reason(status, 'Progressing')}")


def _held(status: KVRolloutStatus) -> str:
    """What holds the step whatever its gates say; empty when nothing does."""
    going = status.condition("Progressing")
    if going is not None and going.status == "False":
        return _reason(status, "Progressing")
    if status.unreachable:
        names = ", ".join(one.node for one in status.unreachable[:NAMED_GATES])
        return f"no answer from {names} since {status.unreachable[0].since}"
    return ""


def _rolling_back(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    back = status.rollback
    if back is None:
        return Explanation(
            f"{rollout.metadata.name} returns to its baseline: {_reason(status, 'Progressing')}"
        )
    waits = f"; waits for {', '.join(back.missing)}" if back.missing else ""
    return Explanation(
        f"{rollout.metadata.name} returns to the exact baseline from {back.from_stage or 'Off'} "
        f"({back.cause}{_of_gate(back.gate)}): {back.agents_restored} of {back.agents_total} agents have "
        f"proved it{waits}",
        back.missing,
        negative=True,
    )


def _rolled_back(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    back = status.rollback
    if back is None:
        return Explanation(f"{rollout.metadata.name} was rolled back", (), True, True)
    said = f": {back.message}" if back.message else ""
    proved = f"{back.agents_restored} of {back.agents_total} agents proved the baseline"
    missing = f", not {', '.join(back.missing)}" if back.missing else ""
    return Explanation(
        f"{rollout.metadata.name} was rolled back from {back.from_stage or 'Off'} "
        f"({back.cause}{_of_gate(back.gate)}){said}; {proved}{missing}",
        (),
        True,
        True,
    )


def _completed(rollout: KVRollout, status: KVRolloutStatus, now: float) -> Explanation:
    expires = seconds_of(status.grant_expires)
    approval = ""
    if expires is not None:
        approval = (
            f"; its candidate is approved, its grant ends in {span(expires - now)} unless it is renewed"
            if expires > now
            else "; its grant has ended"
        )
    going = status.condition("Progressing")
    if going is not None and going.reason == "ApprovalEnded":
        approval = f", but {going.message or 'its approval has ended'}: no agent may serve its candidate"
    return Explanation(f"{rollout.metadata.name} is complete{approval}", (), True)


_BY_PHASE = {
    Phase.PENDING: _pending,
    Phase.INVALID: _invalid,
    Phase.PAUSED: _paused,
    Phase.PROGRESSING: _progressing,
    Phase.ROLLING_BACK: _rolling_back,
    Phase.ROLLED_BACK: _rolled_back,
    Phase.COMPLETED: _completed,
}


def _where(rollout: KVRollout, status: KVRolloutStatus) -> str:
    step = current(rollout)
    return title(step) if step is not None else str(status.stage or "Off")


def _reason(status: KVRolloutStatus, type_: str) -> str:
    """The condition's reason and words."""
    found = status.condition(type_)
    if found is None:
        return "no reason is stated"
    return f"{found.reason}: {found.message}" if found.message else found.reason


def _missing(gate: GateStatus) -> int:
    return max(0, (gate.expected_n or 0) - gate.n)


def _gate(gate: GateStatus) -> str:
    """ "tail Insufficient: 800 of 18000 requests, bound 1.09 against 1.05"."""
    facts = []
    if gate.verdict is Verdict.INSUFFICIENT and gate.expected_n:
        facts.append(f"{gate.n} of {gate.expected_n} requests")
    elif gate.n:
        facts.append(f"{gate.n} requests")
    if gate.bound is not None and gate.limit is not None:
        facts.append(f"bound {gate.bound} against {gate.limit}")
    elif gate.value is not None and gate.limit is not None:
        facts.append(f"value {gate.value} against {gate.limit}")
    if gate.message:
        facts.append(gate.message)
    told = f": {', '.join(facts)}" if facts else ""
    return f"{gate.name} {gate.verdict} ({gate.reason}){told}"


def _of_gate(gate: str | None) -> str:
    return f", gate {gate}" if gate else ""


def _soonest(ends: float | None, now: float) -> str:
    return f"; not before {span(ends - now)} from now in any case" if ends is not None and ends > now else ""


def _forecast(status: KVRolloutStatus) -> str:
    found = status.condition("Feasible")
    told = found is not None and found.reason in ("Forecast", "EvidenceSlow") and found.message
    return f"; forecast: {found.message}" if told and found is not None else ""
