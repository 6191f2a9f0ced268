"""KVCache, the thinking half: from what was found to conditions, ledger and what each node needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from kvtier_crds.beside import changed_fields
from kvtier_crds.manifest import RuntimeManifest
from kvtier_operator.conditions import Condition, false, merge, true, unknown
from kvtier_operator.feasible import Feasibility
from kvtier_operator.ports import JsonObject
from kvtier_operator.reconcile.kvcache_predicted import NodePlan, plan_moved, plan_of

OWNED = ("observedGeneration", "servingNodes", "ledger", "plan", "conditions")
NAMES_SHOWN = 6
LEDGER_CHANGE = 0.05


class Standing(StrEnum):
    """Where one node is with respect to the baseline."""

    PROVED = "Proved"
    APPLYING = "Applying"
    LOST = "Lost"
    DRAINING = "Draining"
    UNREACHABLE = "Unreachable"
    REFUSED = "Refused"
    UNPROVED = "Unproved"
    INFEASIBLE = "Infeasible"


@dataclass(frozen=True)
class NodeFinding:
    """One node of the pool. `detail` is for people; bytes are of this cache, by tier class."""

    name: str
    standing: Standing
    detail: str = ""
    used: Mapping[str, int] = field(default_factory=dict)
    pinned: Mapping[str, int] = field(default_factory=dict)
    tier_faults: tuple[str, ...] = ()
    plan: NodePlan | None = None


@dataclass(frozen=True)
class Findings:
    """Everything the conditions are made of. `wanted` is None when a reference is missing (`missing` says
    which); `baseline` None: not adopted yet."""

    cache: JsonObject
    missing: tuple[str, ...]
    wanted: RuntimeManifest | None
    baseline: RuntimeManifest | None
    approved_digest: str
    feasibility: Feasibility
    nodes: tuple[NodeFinding, ...]
    damaged: str = ""


def status(findings: Findings, now: datetime, *, fresh_ledger: bool) -> JsonObject:
    """The status to have. Without `fresh_ledger`, the ledger stays what it was."""
    metadata = findings.cache["metadata"]
    before = findings.cache.get("status") or {}
    generation = int(metadata.get("generation") or 1)
    wanted: JsonObject = {
        "observedGeneration": generation,
        "servingNodes": sum(node.standing is Standing.PROVED for node in findings.nodes),
        "conditions": merge(
            before.get("conditions") or [], conditions(findings), generation=generation, now=now
        ),
    }
    ledger = ledger_of(findings)
    if before.get("ledger") and not fresh_ledger:
        ledger = before["ledger"]
    if ledger:
        wanted["ledger"] = ledger
    plan = _plan(findings, before.get("plan"))
    if plan:
        wanted["plan"] = plan
    return wanted


def _plan(findings: Findings, before: JsonObject | None) -> JsonObject | None:
    """What was said stays while it is no news, and while no node that says anything can be asked."""
    if findings.baseline is None:
        return None
    plans = {node.name: node.plan for node in findings.nodes if node.plan is not None}
    after = plan_of(plans, findings.cache["spec"].get("prefillFlopPerToken"))
    if after is None or (before and not plan_moved(before, after, [node.name for node in findings.nodes])):
        return before
    return after


def conditions(findings: Findings) -> list[Condition]:
    return [
        _ready(findings),
        _feasible(findings),
        _servable(findings),
        _spec_applied(findings),
        _verified(findings),
        _degraded(findings),
    ]


def ledger_of(findings: Findings) -> list[JsonObject]:
    """Bytes by tier over the nodes that answered; budget is per node times those nodes."""
    if findings.baseline is None:
        return []
    answered = [node for node in findings.nodes if node.standing in (Standing.PROVED, Standing.UNPROVED)]
    return [
        {
            "tierClassName": tier.tier_class_name,
            "budget": tier.budget_bytes * len(answered),
            "used": sum(node.used.get(tier.tier_class_name, 0) for node in answered),
            "pinned": sum(node.pinned.get(tier.tier_class_name, 0) for node in answered),
        }
        for tier in findings.baseline.tiers
    ]


def ledger_moved(before: Sequence[JsonObject], after: Sequence[JsonObject]) -> bool:
    """Whether a number moved by more than 5 % of its tier's budget, or the tiers or budgets changed."""
    old = {entry["tierClassName"]: entry for entry in before}
    if [entry["tierClassName"] for entry in before] != [entry["tierClassName"] for entry in after]:
        return True
    for entry in after:
        previous = old[entry["tierClassName"]]
        if int(previous.get("budget") or 0) != entry["budget"]:
            return True
        step = LEDGER_CHANGE * max(1, entry["budget"])
        if any(abs(int(previous.get(name) or 0) - entry[name]) > step for name in ("used", "pinned")):
            return True
    return False


def _of(findings: Findings, *standings: Standing) -> list[NodeFinding]:
    return [node for node in findings.nodes if node.standing in standings]


def _names(nodes: Sequence[NodeFinding], *, detail: bool = False) -> str:
    shown = [f"{n.name} ({n.detail})" if detail and n.detail else n.name for n in nodes[:NAMES_SHOWN]]
    rest = len(nodes) - NAMES_SHOWN
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _ready(findings: Findings) -> Condition:
    if findings.cache["spec"].get("suspend"):
        return false("Ready", "Suspended", "spec.suspend is true: no node is changed")
    if findings.missing and findings.baseline is None:
        return false("Ready", "ReferenceMissing", f"does not exist: {', '.join(findings.missing)}")
    if findings.damaged:
        return false("Ready", "RevisionDamaged", findings.damaged)
    if findings.baseline is None:
        return false("Ready", "NoBaseline", "not adopted: see Feasible")
    expected = _expected(findings)
    proved = _of(findings, Standing.PROVED)
    if not expected:
        return false("Ready", "NoLiveNodes", "no live agent in the pool")
    if len(proved) < len(expected):
        waiting = [node for node in expected if node.standing is not Standing.PROVED]
        return false(
            "Ready",
            "BaselineNotProved",
            f"{len(proved)} of {len(expected)} nodes serve; not: {_names(waiting, detail=True)}",
        )
    return true("Ready", "BaselineServed", f"{len(proved)} nodes serve the baseline")


def _feasible(findings: Findings) -> Condition:
    if findings.wanted is None:
        return unknown("Feasible", "ReferenceMissing", f"does not exist: {', '.join(findings.missing)}")
    return findings.feasibility.condition()


def _servable(findings: Findings) -> Condition:
    proved = _of(findings, Standing.PROVED)
    if proved:
        return true("Servable", "BaselineServed", f"on {_names(proved)}")
    return false("Servable", "NoServingNode", "no live node has proved the baseline")


def _spec_applied(findings: Findings) -> Condition:
    if findings.wanted is None:
        return unknown("SpecApplied", "ReferenceMissing", f"does not exist: {', '.join(findings.missing)}")
    if findings.baseline is None:
        return false("SpecApplied", "NoBaseline", "not adopted: see Feasible")
    running = {findings.baseline.digest(), findings.approved_digest}
    if findings.wanted.digest() in running:
        return true("SpecApplied", "Applied", "what is served is what the spec says")
    fields = changed_fields(findings.baseline, findings.wanted)
    return false(
        "SpecApplied",
        "RolloutRequired",
        f"the spec differs from what is served in {', '.join(fields)}; a KVRollout brings it",
    )


def _verified(findings: Findings) -> Condition:
    if findings.baseline is None:
        return unknown("BaselineVerified", "NoBaseline", "")
    expected = _expected(findings)
    if not expected:
        return unknown("BaselineVerified", "NoLiveNodes", "no live agent to prove it")
    missing = [node for node in expected if node.standing is not Standing.PROVED]
    if missing:
        return false("BaselineVerified", "ProofMissing", f"not proved: {_names(missing, detail=True)}")
    digest = findings.baseline.digest()
    return true("BaselineVerified", "Proved", f"{len(expected)} nodes recomputed {digest[:19]}")


def _degraded(findings: Findings) -> Condition:
    lost = _of(findings, Standing.LOST)
    refusing = _of(findings, Standing.REFUSED, Standing.UNREACHABLE, Standing.UNPROVED)
    faults = [
        NodeFinding(node.name, node.standing, "; ".join(node.tier_faults))
        for node in findings.nodes
        if node.tier_faults
    ]
    if findings.damaged:
        return true("Degraded", "RevisionDamaged", findings.damaged)
    if lost:
        return true("Degraded", "AgentLost", f"the Lease has ended of {_names(lost)}")
    if refusing:
        return true("Degraded", "AgentProblem", _names(refusing, detail=True))
    if faults:
        return true("Degraded", "TierFault", _names(faults, detail=True))
    if findings.missing and findings.baseline is not None:
        return true("Degraded", "ReferenceMissing", f"does not exist: {', '.join(findings.missing)}")
    return false("Degraded", "AllWell", "")


def _expected(findings: Findings) -> list[NodeFinding]:
    """Nodes that should serve: live ones that are not going away."""
    return [node for node in findings.nodes if node.standing not in (Standing.LOST, Standing.DRAINING)]
