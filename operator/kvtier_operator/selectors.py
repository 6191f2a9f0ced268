"""Which selectors agents of this version can run; what is refused here is what they would refuse at a grant.

KVSelector's `Accepted` and KVRollout's `Feasible` ask the same function, so they never disagree, whichever
is reconciled first. Pure; it must not know a cache: what depends on one is found by compiling its manifest.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.ports import JsonObject
from kvtier_operator.selectorfacts import facts_of, named

IMPLEMENTED = (
    *("certifiedScan", "clusterKv", "emLlm", "infLlm", "infinigen", "magicPig", "pqcache", "quest"),
    *("retrievalAttention", "sparq", "squeezedAttention"),
)
"""Families that agents run in a session. Whether a session's engine gives what a family needs is found when
the session is opened: it stays exact where not, and says what is missing."""
_ONLY_TRUNCATES = ("quest",)
_CAP_POLICY = "truncate"


@dataclass(frozen=True)
class Refusal:
    """A reason for a condition, and the sentence that names each field and what is legal."""

    reason: str
    message: str


def refusal(spec: JsonObject) -> Refusal | None:
    """Why no agent runs a KVSelector of this spec; None: some do."""
    family, facts = spec["family"], facts_of(spec)
    if family not in IMPLEMENTED or facts is None:
        message = (
            f"spec.family {family} is declared but no agent implements it; implemented: "
            f"{', '.join(IMPLEMENTED)}"
        )
        return Refusal("NotImplemented", message)
    found = []
    if spec.get("gate") is not None and not facts.estimates:
        found.append(f"spec.gate: {named(spec)} has no estimator of omitted mass; legal: absent")
    if spec.get("calibration") is not None:
        found.append(f"spec.calibration: {family} takes none; legal: absent")
    cap_policy = (spec.get("budget") or {}).get("capPolicy", _CAP_POLICY)
    if cap_policy != _CAP_POLICY and family in _ONLY_TRUNCATES:
        found.append(f"spec.budget.capPolicy {cap_policy}; legal: {_CAP_POLICY}")
    return Refusal("NotImplemented", f"not implemented: {'; '.join(found)}") if found else None
