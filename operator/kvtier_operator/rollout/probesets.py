"""What a probeRef's ConfigMap holds, and what stands in the way when it cannot be used. Pure.

Why it exists: its text is an input like the spec (its digest is part of the gates' digest), but it is edited
apart from the rollout, so that a plan that is broken or gone must be said and waited for. It must not know
Jobs or verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier_evidence.probeplan import PlanError, parse_plan
from kvtier_operator.ports import JsonObject
from kvtier_operator.rollout.gateset import ProbeSet
from kvtier_operator.rollout.vocabulary import Blocker

PLAN_KEY = "plan.json"


def probe_set(config_map: JsonObject | None) -> ProbeSet:
    """Size 0 and the problem when there is no plan that can be read."""
    if config_map is None:
        return ProbeSet("", 0, missing=True, problem="does not exist")
    data: dict[str, Any] = config_map.get("data") or {}
    key = PLAN_KEY if PLAN_KEY in data or len(data) != 1 else next(iter(data))
    if key not in data:
        held = ", ".join(sorted(data)[:6]) or "nothing"
        return ProbeSet("", 0, problem=f"data holds {held}; legal: {PLAN_KEY}, or one key of any name")
    try:
        plan = parse_plan(str(data[key]))
    except PlanError as error:
        return ProbeSet("", 0, problem=f"{key}: {error}")
    return ProbeSet(plan.digest, plan.size, plan=plan, key=key)


def probe_fault(probes: Iterable[tuple[str, ProbeSet]]) -> tuple[Blocker, str]:
    """The first plan that cannot be used."""
    for name, found in probes:
        if found.problem:
            blocker = Blocker.REFERENCE_MISSING if found.missing else Blocker.PROBE_PLAN_INVALID
            return blocker, f"ConfigMap {name}: {found.problem}"
    return Blocker.NONE, ""
