"""KVCache's status.plan: of what the nodes' agents worked out, the worst, and whether that is news. Pure.

Agents say what they measured; nothing here makes a number up. kappa_crit is worked out here where the spec
states the model's arithmetic, which no agent knows. It must not know how agents are asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from kvtier.v1 import control_pb2 as control
from kvtier_operator.ports import JsonObject

CHANGE = 0.05
# Less of a token's time is no news, however large a part of the last figure it is.
CHANGE_SECONDS = 1e-6
MAX_INPUTS = 14
MAX_CONSIDERED = 12
TEXT = 63
PREFILL = "prefillFlopPerToken"
# What follows from the spec alone: equal on every node, so a difference is a change of the spec.
OF_SPEC = ("contextTokens", "coldTokens", PREFILL)
# What a placement policy chose, beside its schedule.
CHOSEN = ("kvShares", "blockBatches", "groups", "subBatches")


@dataclass(frozen=True)
class NodePlan:
    """One node's. stall: seconds per token, None when no schedule is legal there. link: bytes per second,
    flops: per second, token: bytes; None or 0: not known. schedule: empty when no row lies away. policy: of
    the placement, empty from an agent that knows none; considered: (name, why it lost, seconds)."""

    stall: float | None
    schedule: str
    kappa: float | None
    link: float | None
    flops: float | None
    token: int
    inputs: Mapping[str, str]
    policy: str = ""
    considered: tuple[tuple[str, str, float | None], ...] = ()


def node_plan(held: control.CacheState | None) -> NodePlan | None:
    """What an agent says of a cache; None when it says nothing. What a status cannot hold is cut off, and a
    number that is none counts as not known."""
    if held is None or not held.HasField("plan"):
        return None
    plan = held.plan
    stall = plan.predicted_stall_seconds if plan.HasField("predicted_stall_seconds") else None
    kappa = plan.kappa_crit if plan.HasField("kappa_crit") else None
    inputs = sorted(plan.inputs.items())[:MAX_INPUTS]
    return NodePlan(
        stall=stall if _is_number(stall) else None,
        schedule=plan.schedule[:TEXT],
        kappa=kappa if _is_number(kappa) else None,
        link=plan.link_bytes_per_second if _is_positive(plan.link_bytes_per_second) else None,
        flops=plan.compute_flop_per_second if _is_positive(plan.compute_flop_per_second) else None,
        token=plan.bytes_per_token,
        inputs={name[:TEXT]: value[:TEXT] for name, value in inputs},
        policy=plan.policy[:TEXT],
        considered=tuple(
            (item.name[:TEXT], item.lost[:TEXT], _seconds(item)) for item in plan.considered[:MAX_CONSIDERED]
        ),
    )


def plan_of(plans: Mapping[str, NodePlan], prefill: str | None) -> JsonObject | None:
    """The plan of the node, by name, whose token waits longest: a user is promised no better. A node where
    nothing is legal counts only where no other has a number. prefill: F_pf, floating point operations of a
    new token through all layers, as the spec states it. None without any plan."""
    if not plans:
        return None
    name, worst = max(plans.items(), key=lambda item: (-1.0 if (s := item[1].stall) is None else s, item[0]))
    inputs = {**worst.inputs, "node": name[:TEXT]}
    kappa = worst.kappa
    if prefill is not None:
        inputs[PREFILL] = prefill
        kappa = _kappa(prefill, worst)
    found: JsonObject = {"inputs": inputs}
    if kappa is not None:
        found["kappaCrit"] = f"{kappa:.5g}"
    if worst.stall is not None:
        found["predictedStall"] = f"{worst.stall:.5g}"
    if worst.schedule:
        found["schedule"] = worst.schedule
    if worst.policy:
        found["policy"] = worst.policy
    if worst.considered:
        found["considered"] = [
            {"name": name, "lost": lost} | ({} if seconds is None else {"seconds": f"{seconds:.5g}"})
            for name, lost, seconds in worst.considered
        ]
    return found


def _seconds(item: control.PlanAlternative) -> float | None:
    seconds = item.seconds if item.HasField("seconds") else None
    return seconds if _is_number(seconds) else None


def _kappa(prefill: str, plan: NodePlan) -> float | None:
    """kappa_crit = (F_pf / B_KV) * (BW / C_eff), dimensionless (specification C.1): cached tokens per new one
    above which moving K/V takes longer than computing it."""
    arithmetic = float(Decimal(prefill))
    if plan.link is None or plan.flops is None or plan.token < 1 or arithmetic <= 0.0:
        return None
    return (arithmetic / plan.token) * (plan.link / plan.flops)


def plan_moved(before: JsonObject, after: JsonObject, nodes: Sequence[str]) -> bool:
    """Whether it is news: another schedule, policy or choice, another spec, a number that moved by more than
    5 % or came or went, or a plan of a node that is none of `nodes` any more."""
    old, new = before.get("inputs") or {}, after["inputs"]
    if any(before.get(name) != after.get(name) for name in ("schedule", "policy")):
        return True
    if any(old.get(k) != new.get(k) for k in OF_SPEC + CHOSEN):
        return True
    if old.get("node") not in [name[:TEXT] for name in nodes]:
        return True
    return _moved(before, after, "predictedStall", CHANGE_SECONDS) or _moved(before, after, "kappaCrit", 0.0)


def _moved(before: JsonObject, after: JsonObject, name: str, least: float) -> bool:
    old, new = before.get(name), after.get(name)
    if old is None or new is None:
        return old is not new
    return abs(float(new) - float(old)) > max(least, CHANGE * abs(float(old)))


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value >= 0.0


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0.0
