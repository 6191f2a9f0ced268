"""One rollout as a tree: stages with their marks, gates with values and bounds, nodes, the way back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kubectl_kvtier.explain import explain
from kubectl_kvtier.rollouts import Mark, Step, ends_at, span, status_of, steps, title
from kvtier_crds.models import KVNode, KVRollout
from kvtier_crds.models.common import short_digest
from kvtier_crds.models.rolloutstatus import GateStatus, KVRolloutStatus, Verdict

_MARKS = {Mark.PASSED: "✔", Mark.CURRENT: "●", Mark.AHEAD: "○", Mark.LEFT: "✖"}
_ASCII = {"✔": "v", "●": "*", "○": "o", "✖": "x", "├─": "|-", "└─": "`-", "│ ": "| "}
_COLOURS = {
    Verdict.PASS: "32",
    Verdict.FAIL: "31",
    Verdict.PROVIDER_ERROR: "31",
    Verdict.INSUFFICIENT: "33",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How it is drawn. colour: ANSI. unicode: else ASCII."""

    colour: bool = False
    unicode: bool = True


def drawable(encoding: str | None) -> bool:
    """Whether a stream of that encoding has the characters of the tree; None: one that has no bytes."""
    try:
        "".join(_ASCII).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Branch:
    text: str
    under: tuple[_Branch, ...] = ()


def tree(rollout: KVRollout, nodes: Sequence[KVNode], now: float, look: Look | None = None) -> list[str]:
    """Lines, the sentence of `explain` last."""
    look = look or Look()
    status = status_of(rollout)
    branches = [
        _identity(status),
        *(_stage(step, rollout, look, now) for step in steps(rollout)),
        *_nodes(rollout, status, nodes),
        *_way_back(status),
        *_conditions(status),
    ]
    head = (
        f"KVRollout {rollout.metadata.namespace}/{rollout.metadata.name}  "
        f"{status.phase or 'not seen yet'}  {status.stage or ''}"
        f"  cache {rollout.spec.cache_ref.name}  attempt {status.attempt or 1}  fence {status.fence or 0}"
    )
    lines = [head, *_drawn([one for one in branches if one is not None], ""), ""]
    lines.append(explain(rollout, now).sentence)
    if look.unicode:
        return lines
    return [_plain(line) for line in lines]


def _identity(status: KVRolloutStatus) -> _Branch | None:
    if status.candidate is None and status.baseline is None:
        return None
    candidate = (
        f"candidate {short_digest(status.candidate.digest)} ({status.candidate.candidate_class})"
        if status.candidate
        else "no candidate"
    )
    baseline = f"baseline {short_digest(status.baseline.digest)}" if status.baseline else "no baseline"
    return _Branch(f"{candidate}, {baseline}")


def _stage(step: Step, rollout: KVRollout, look: Look, now: float) -> _Branch:
    text = f"{_MARKS[step.mark]} {title(step)}"
    if step.lasts:
        text += f", at least {step.lasts}"
    if step.mark is not Mark.CURRENT:
        return _Branch(text)
    ends = ends_at(rollout)
    if step.lasts and ends is not None:
        text += f", {span(ends - now)} left" if ends > now else f", passed {span(now - ends)} ago"
    return _Branch(text, tuple(_Branch(_gate(gate, look)) for gate in status_of(rollout).gates))


def _gate(gate: GateStatus, look: Look) -> str:
    verdict = f"{gate.verdict:<12}"
    if look.colour:
        verdict = f"\x1b[{_COLOURS[gate.verdict]}m{verdict}\x1b[0m"
    facts = [
        f"value {gate.value}" if gate.value is not None else "",
        f"bound {gate.bound}" if gate.bound is not None else "",
        f"limit {gate.limit}" if gate.limit is not None else "",
        f"n {gate.n}" + (f" of {gate.expected_n}" if gate.expected_n else "")
        if gate.n or gate.expected_n
        else "",
        gate.reason,
        "promoted past" if gate.overridden else "",
    ]
    return f"{gate.name:<18} {verdict} {'  '.join(fact for fact in facts if fact)}"


def _nodes(rollout: KVRollout, status: KVRolloutStatus, nodes: Sequence[KVNode]) -> Iterable[_Branch]:
    if status.nodes is None and status.nodes_total is None:
        return
    digest = status.candidate.digest if status.candidate else ""
    holding = []
    for node in nodes:
        for held in node.status.candidates if node.status else ():
            same = held.namespace == rollout.metadata.namespace and held.cache == rollout.spec.cache_ref.name
            if same and held.digest == digest:
                where = f"{held.stage} step {held.step}, fence {held.fence}"
                holding.append(_Branch(f"{node.metadata.name}: {where}"))
    lost = [_Branch(f"{one.node}: no answer since {one.since}") for one in status.unreachable]
    out = [_Branch(f"{one.node}: exact only, {one.reason}") for one in status.excluded]
    told = f"nodes: {status.nodes or 0} of {status.nodes_total or 0} hold the candidate"
    yield _Branch(told, (*holding, *lost, *out))


def _way_back(status: KVRolloutStatus) -> Iterable[_Branch]:
    back = status.rollback
    if back is None:
        return
    facts = [f"{back.agents_restored} of {back.agents_total} agents proved the baseline"]
    if back.missing:
        facts.append(f"missing: {', '.join(back.missing)}")
    if back.in_flight:
        facts.append(f"{back.in_flight} requests were in flight on the candidate")
    facts += [
        f"{name} {at}" for name, at in (("revoked", back.revoked_at), ("verified", back.verified_at)) if at
    ]
    gate = f", gate {back.gate}" if back.gate else ""
    yield _Branch(
        f"back from {back.from_stage or 'Off'}: {back.cause}{gate}", tuple(_Branch(fact) for fact in facts)
    )


def _conditions(status: KVRolloutStatus) -> Iterable[_Branch]:
    for one in status.conditions:
        worth = (one.type == "Degraded" and one.status == "True") or one.type == "Feasible"
        if worth and one.message:
            yield _Branch(f"{one.type}={one.status} {one.reason}: {one.message}")
    if status.trace_id:
        yield _Branch(f"trace {status.trace_id}")


def _drawn(branches: Sequence[_Branch], indent: str) -> list[str]:
    lines = []
    for at, branch in enumerate(branches):
        last = at == len(branches) - 1
        lines.append(f"{indent}{'└─' if last else '├─'} {branch.text}")
        lines += _drawn(branch.under, indent + ("   " if last else "│  "))
    return lines


def _plain(line: str) -> str:
    for fancy, simple in _ASCII.items():
        line = line.replace(fancy, simple)
    return line
