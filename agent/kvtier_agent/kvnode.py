"""What this agent says of itself in its KVNode: a pure function of the node, and when to write it.

A write happens within seconds on a change of a condition, a digest or a candidate, and on one of a number by
more than 5 % at most once a minute. Knows no HTTP. Shape: api.md, KVNode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_agent.attentionkernels import remark
from kvtier_agent.control_service import AGENT_VERSION
from kvtier_agent.engine_port import TierReport
from kvtier_agent.node import Node
from kvtier_agent.tierdirs import PACED
from kvtier_crds.manifest import NUMERICS_VERSION

Json = dict[str, Any]

STEADY_SECONDS = 60.0
_NUMBERS = ("capacity", "used", "pinned", "readBytesPerSecond", "writeBytesPerSecond")
_RELATIVE_CHANGE = 0.05
_MAX_CANDIDATES = 64
_WIRE_REASON = re.compile(r"[A-Z]+(_[A-Z]+)*")
_CAMEL_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")


@dataclass(frozen=True)
class Condition:
    """metav1.Condition without its times."""

    type: str
    status: str
    reason: str
    message: str


def spec_of(node_name: str, address: str, pool_namespace: str, pool_name: str) -> Json:
    return {
        "nodeName": node_name,
        "address": address,
        "poolRef": {"namespace": pool_namespace, "name": pool_name},
    }


def status_of(node: Node, generation: int, now: str, previous: Json | None) -> Json:
    """The whole status this agent owns; `now` is RFC 3339, kept for conditions that did not change."""
    tiers = [tier_of(report, node) for report in node.tier_reports()]
    return {
        "observedGeneration": generation,
        "tiers": tiers,
        "agentVersion": AGENT_VERSION,
        "numericsVersion": NUMERICS_VERSION,
        "bootID": node.boot_id,
        "manifestSetDigest": node.manifest_set_digest(),
        "candidates": candidates_of(node),
        "conditions": [
            _dated(condition, generation, now, previous) for condition in conditions_of(node, tiers)
        ],
    }


def conditions_of(node: Node, tiers: list[Json]) -> list[Condition]:
    """Ready, Draining, CapabilitiesVerified, ManifestsVerified."""
    failed = [tier for tier in tiers if tier["state"] == "Failed"]
    if node.draining:
        ready = Condition("Ready", "False", "Draining", "no new sessions are taken")
        draining = Condition("Draining", "True", "Terminating", "in-flight work ends, then the agent")
    else:
        faults = "; ".join(f"cache {uid}: {fault}" for uid, fault in sorted(node.faults.items()))
        ready = (
            Condition("Ready", "False", "CacheFault", faults[:2048])
            if faults
            else Condition("Ready", "True", "Serving", remark())
        )
        draining = Condition("Draining", "False", "Serving", "")
    if failed:
        text = "; ".join(f"{tier['class']}: {tier.get('message', tier['state'])}" for tier in failed)
        verified = Condition("CapabilitiesVerified", "False", failed[0].get("reason", "Failed"), text[:2048])
    else:
        verified = Condition("CapabilitiesVerified", "True", "Probed", "")
    differs = "; ".join(f"cache {uid}: {text}" for uid, text in sorted(node.differences().items()))
    runs = (
        Condition("ManifestsVerified", "False", "DigestsDiffer", differs[:2048])
        if differs
        else Condition("ManifestsVerified", "True", "Recomputed", "")
    )
    return [ready, draining, verified, runs]


def tier_of(report: TierReport, node: Node) -> Json:
    """One entry of status.tiers; a measured value that does not exist is left out."""
    tier: Json = {
        "class": report.class_name,
        "medium": report.medium,
        "simulated": report.simulated,
        "capacity": report.capacity_bytes,
        "used": report.used_bytes,
        "pinned": report.pinned_bytes,
        "state": "Ready",
    }
    kind = node.tiers.device_kind_of(report.class_name)
    if kind:
        tier["deviceKind"] = kind
    if report.read_bytes_per_second > 0:
        tier["readBytesPerSecond"] = int(report.read_bytes_per_second)
    if report.write_bytes_per_second > 0:
        tier["writeBytesPerSecond"] = int(report.write_bytes_per_second)
    probes = _probes(report.probes)
    if probes:
        tier["probes"] = probes
    if report.condition != "Ready":
        name, _, message = report.condition.partition(":")
        state = "Degraded" if report.condition == PACED else "Failed"
        tier.update(state=state, reason=_reason(name), message=(message.strip() or name)[:512])
    return tier


def candidates_of(node: Node) -> list[Json]:
    """What this agent holds a lease for now, sorted by cache uid."""
    held = []
    for uid, host in sorted(node.caches.items()):
        lease = host.enforcement.lease()
        if lease is None:
            continue
        fence = lease.terms.fence
        held.append(
            {
                "namespace": host.name.namespace,
                "cache": host.name.name,
                "cacheUID": uid,
                "digest": lease.terms.candidate_digest,
                "stage": fence.stage,
                "step": fence.step,
                "fence": fence.value,
            }
        )
    return held[:_MAX_CANDIDATES]


def must_write(written: Json | None, wanted: Json, seconds_since_write: float) -> bool:
    """The rule of the module docstring, between the status last written and the one that is true now."""
    if written is None or _without_numbers(written) != _without_numbers(wanted):
        return True
    if seconds_since_write < STEADY_SECONDS:
        return False
    before = {tier["class"]: tier for tier in written["tiers"]}
    return any(
        _moved(before[tier["class"]].get(name), tier.get(name))
        for tier in wanted["tiers"]
        for name in _NUMBERS
    )


def may_wait(written: Json | None, wanted: Json) -> bool:
    """Whether nothing but candidates has changed. Nobody decides by these alone, and a whole fleet is granted
    or revoked one at one moment, at which the operator has its own writes to make."""
    if written is None or written["candidates"] == wanted["candidates"]:
        return False
    before, after = ({**one, "candidates": None} for one in (written, wanted))
    return _without_numbers(before) == _without_numbers(after)


def _moved(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > _RELATIVE_CHANGE * max(abs(before), abs(after))


def _without_numbers(status: Json) -> Json:
    tiers = [
        {name: value for name, value in tier.items() if name not in (*_NUMBERS, "probes")}
        for tier in status["tiers"]
    ]
    return {**status, "tiers": tiers}


def _dated(condition: Condition, generation: int, now: str, previous: Json | None) -> Json:
    since = now
    for old in (previous or {}).get("conditions", []):
        if old["type"] == condition.type and old["status"] == condition.status:
            since = old["lastTransitionTime"]
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "observedGeneration": generation,
        "lastTransitionTime": since,
    }


def _reason(name: str) -> str:
    """A CamelCase reason; the core's STORAGE_UNAVAILABLE is the API's StorageUnavailable."""
    if _WIRE_REASON.fullmatch(name):
        return "".join(part.capitalize() for part in name.split("_"))
    return name if _CAMEL_REASON.fullmatch(name) else "TierFailed"


def _probes(probes: Mapping[str, str]) -> Json:
    found: Json = {}
    if "o_direct" in probes:
        found["oDirect"] = probes["o_direct"].lower() in ("true", "1", "yes")
    if "fsync_seconds" in probes:
        found["fsyncSeconds"] = f"{float(probes['fsync_seconds']):.9f}"
    if "gds" in probes:
        found["gds"] = probes["gds"].lower() in ("true", "1", "yes")
    return found
