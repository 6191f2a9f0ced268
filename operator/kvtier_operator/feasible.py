"""Arithmetic of a cache on the nodes of its pool: what fits where, with the numbers. Pure.

A schema cannot see other objects; this can. All sizes are bytes per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.v1 import control_pb2 as control
from kvtier_crds.manifest import Dtype, RuntimeManifest
from kvtier_crds.quantity import parse_bytes, parse_duration
from kvtier_operator.budgets import budgets_of_others
from kvtier_operator.conditions import Condition, false, true, unknown
from kvtier_operator.ports import JsonObject, NodeView

DTYPE_BYTES = {Dtype.FLOAT32: 4, Dtype.FLOAT16: 2, Dtype.BFLOAT16: 2}
PROBLEMS_SHOWN = 6
DEFAULT_TTL = "1h"


@dataclass(frozen=True)
class Problem:
    """Why a manifest does not run on a node. `node` empty: on none, whatever it has."""

    node: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.node}: {self.message}" if self.node else self.message


@dataclass(frozen=True)
class Feasibility:
    """`nodes` is how many live nodes were looked at."""

    nodes: int
    problems: tuple[Problem, ...]

    def condition(self) -> Condition:
        if self.problems:
            shown = "; ".join(str(problem) for problem in self.problems[:PROBLEMS_SHOWN])
            rest = len(self.problems) - PROBLEMS_SHOWN
            more = f"; and {rest} more" if rest > 0 else ""
            return false("Feasible", self.problems[0].reason, shown + more)
        if not self.nodes:
            return unknown("Feasible", "NoLiveNodes", "no live agent to compare with")
        return true("Feasible", "FitsEveryNode", f"fits on {self.nodes} live nodes")


def open_chunk_bytes(manifest: RuntimeManifest) -> int:
    """What one session needs in the first tier before anything is sealed: one open chunk of K and of V in
    each layer, chunkTokens * kvHeads * headDim values each."""
    geometry = manifest.model.geometry
    values = manifest.chunk_tokens * geometry.kv_heads * geometry.head_dim
    return 2 * geometry.layers * values * DTYPE_BYTES[geometry.dtype]


def unsupported(cache: JsonObject) -> tuple[Problem, ...]:
    """Fields that are valid but that this version does not carry out."""
    spec = cache["spec"]
    found = []
    deletion = spec.get("deletion") or {}
    if deletion.get("policy", "delete") != "delete":
        found.append(
            f"spec.deletion.policy {deletion['policy']} cannot be carried out: a cache's blocks are named by "
            "its uid, which no later cache has; legal: delete"
        )
    if (spec.get("sessions") or {}).get("interruption", "drop") != "drop":
        found.append("spec.sessions.interruption preserve is not implemented; legal now: drop")
    ttl = str((spec.get("sessions") or {}).get("ttl", DEFAULT_TTL))
    if parse_duration(ttl, "spec.sessions.ttl") == 0:
        found.append(f"spec.sessions.ttl {ttl} leaves a session no time between frames; legal: longer than 0")
    return tuple(Problem("", "NotImplemented", message) for message in found)


def admission_of(cache: JsonObject, running: RuntimeManifest | None = None) -> control.CacheAdmission:
    """What agents act on: bounds that a rollout brought are the manifest's, others the spec's. QuantityError
    names the field."""
    sessions = _sessions_of(cache["spec"].get("sessions") or {})
    if running is not None and running.admission is not None:
        brought = running.admission
        return control.CacheAdmission(
            pinned_bytes=brought.pinned_bytes,
            staging_bytes=brought.staging_bytes,
            link_bytes=brought.link_bytes,
            queue=brought.queue,
            policy=brought.policy.value,
            sessions=sessions,
        )
    said = cache["spec"].get("admission") or {}
    sizes = {
        f"{name}_bytes": parse_bytes(said[name], f"spec.admission.{name}")
        for name in ("pinned", "staging", "link")
        if said.get(name) is not None
    }
    return control.CacheAdmission(
        **sizes,
        queue=int(said.get("queue", 256)),
        policy=str(said.get("policy", "fifo")),
        sessions=sessions,
    )


def _sessions_of(said: JsonObject) -> control.CacheSessions:
    seconds = parse_duration(str(said.get("ttl", DEFAULT_TTL)), "spec.sessions.ttl")
    return control.CacheSessions(idle=str(said.get("idle", "demote")), ttl_ms=round(seconds * 1000))


def key_secret(cache: JsonObject) -> str:
    """The Secret of a cache's keys of encryption at rest; empty: what the agents have themselves, or none."""
    return str((cache["spec"].get("keySecretRef") or {}).get("name", ""))


def feasibility(
    manifest: RuntimeManifest,
    cache: JsonObject,
    pool: JsonObject,
    nodes: Sequence[NodeView],
    other_budgets: Mapping[str, int],
) -> Feasibility:
    """`other_budgets`: bytes per node that other caches of the pool were promised, by tier class."""
    problems = [*_first_tier(manifest), *_keys(cache, pool)]
    live = [view for view in nodes if view.live]
    for view in live:
        problems += _on_node(manifest, view, _reserves(pool), other_budgets)
    return Feasibility(len(live), tuple(problems))


def room_beside(
    candidate: RuntimeManifest,
    running: RuntimeManifest,
    cache: JsonObject,
    pool: JsonObject,
    nodes: Sequence[NodeView],
    all_caches: Sequence[JsonObject],
    rollouts: Sequence[JsonObject],
) -> Feasibility:
    """Whether an engine of the candidate finds room beside the baseline's, which counts among the others
    here, and all other caches of the pool, whichever of them is older: they run."""
    taken = budgets_of_others(cache, all_caches, rollouts, younger=True)
    for tier in running.tiers:
        taken[tier.tier_class_name] = taken.get(tier.tier_class_name, 0) + tier.budget_bytes
    problems = _first_tier(candidate)
    for view in nodes:
        problems += _on_node(candidate, view, _reserves(pool), taken)
    return Feasibility(len(nodes), tuple(problems))


def _reserves(pool: JsonObject) -> dict[str, int]:
    return {
        tier["tierClassName"]: parse_bytes(tier.get("reserve", 0), "spec.tiers[].reserve")
        for tier in pool["spec"]["tiers"]
    }


def _keys(cache: JsonObject, pool: JsonObject) -> list[Problem]:
    name = key_secret(cache)
    mounted = [reference["name"] for reference in pool["spec"].get("keySecretRefs") or []]
    if not name or name in mounted:
        return []
    return [
        Problem(
            "",
            "KeyNotMounted",
            f"keySecretRef names Secret {name}, which AgentPool {pool['metadata']['name']} does not mount; "
            f"its spec.keySecretRefs: {', '.join(mounted) or 'none'}",
        )
    ]


def _first_tier(manifest: RuntimeManifest) -> list[Problem]:
    need, first = open_chunk_bytes(manifest), manifest.tiers[0]
    if first.budget_bytes >= need:
        return []
    return [
        Problem(
            "",
            "BudgetTooSmall",
            f"spec.tiers[0].budget of {first.tier_class_name} is {first.budget_bytes} bytes, one session "
            f"needs {need} for its open chunks",
        )
    ]


def _on_node(
    manifest: RuntimeManifest, view: NodeView, reserves: Mapping[str, int], others: Mapping[str, int]
) -> list[Problem]:
    status = view.raw.get("status") or {}
    tiers = {tier["class"]: tier for tier in status.get("tiers") or []}
    if not tiers:
        return []  # it has not reported yet; it will answer for itself when asked to apply
    name, problems = view.target.name, []
    numerics = status.get("numericsVersion")
    if numerics and numerics != manifest.numerics_version:
        problems.append(
            Problem(
                name,
                "NumericsMismatch",
                f"numerics {numerics}, the manifest needs {manifest.numerics_version}",
            )
        )
    for wanted in manifest.tiers:
        there = tiers.get(wanted.tier_class_name)
        if there is None:
            problems.append(Problem(name, "TierMissing", f"has no tier {wanted.tier_class_name}"))
            continue
        kind = there.get("deviceKind")
        if wanted.medium.value == "gpu" and kind and kind != manifest.device_kind:
            problems.append(
                Problem(
                    name,
                    "NumericsMismatch",
                    f"tier {wanted.tier_class_name} is {kind}, the manifest needs {manifest.device_kind}",
                )
            )
        reserve = reserves.get(wanted.tier_class_name, 0)
        usable = int(there.get("capacity") or 0) - reserve
        promised = others.get(wanted.tier_class_name, 0)
        if wanted.budget_bytes + promised > usable:
            problems.append(
                Problem(
                    name,
                    "BudgetExceedsCapacity",
                    f"tier {wanted.tier_class_name} has {usable} bytes, this cache needs "
                    f"{wanted.budget_bytes} and others hold {promised}",
                )
            )
    return problems
