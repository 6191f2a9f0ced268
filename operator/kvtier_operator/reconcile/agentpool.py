"""AgentPool: the agents of a set of nodes, as a DaemonSet and what it needs, and how many are alive."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import datetime
from http import HTTPStatus

from kvtier_operator.conditions import MESSAGE_LIMIT, Condition, false, merge, true
from kvtier_operator.events import post_changes
from kvtier_operator.ports import (
    ApiError,
    Conflict,
    Deps,
    Done,
    EventType,
    JsonObject,
    Kind,
    NodeView,
    ObjectKey,
    ReconcileOutcome,
    Requeue,
)
from kvtier_operator.reconcile.pool_objects import object_name, pool_objects
from kvtier_operator.reconcile.status import write_status
from kvtier_operator.store import cache_of

OWNED = ("observedGeneration", "desired", "ready", "updated", "conditions")
FINISHED_PHASES = ("Completed", "RolledBack", "Invalid")
EVENT_CONDITIONS = ("Available", "NoOverlap")
NAMES_SHOWN = 8
REFUSED = "ObjectRefused"
REFUSED_SECONDS = 60.0


@dataclass(frozen=True)
class Observed:
    """What a plan looks at. `daemon_set` is the pool's own, if it exists; `rollouts` are unfinished ones of
    caches on this pool."""

    pool: JsonObject
    other_pools: tuple[JsonObject, ...]
    nodes: tuple[JsonObject, ...]
    members: tuple[NodeView, ...]
    tier_classes: dict[str, JsonObject]
    daemon_set: JsonObject | None
    rollouts: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """`objects` empty: nothing is applied, and a condition says why."""

    objects: tuple[JsonObject, ...]
    status: JsonObject


def plan(observed: Observed, now: datetime) -> Plan:
    """Pure."""
    pool = observed.pool
    wanted = [node["metadata"]["name"] for node in observed.nodes if selects(pool, node)]
    missing = _missing_classes(observed)
    overlap = _overlap(observed)
    objects: tuple[JsonObject, ...] = ()
    # The older pool keeps its nodes: a new one must not take agents away from caches that are served.
    if not missing and not any(mine for _, _, mine in overlap):
        objects = tuple(pool_objects(pool, observed.tier_classes, hold=bool(observed.rollouts)))
    live = [view.target.name for view in observed.members if view.live]
    status: JsonObject = {
        "observedGeneration": int(pool["metadata"].get("generation") or 1),
        "desired": len(wanted),
        "ready": len(live),
    }
    updated = _updated(observed.daemon_set)
    if updated is not None:
        status["updated"] = updated
    conditions = [
        _available(wanted, live, missing),
        _progressing(wanted, live, observed),
        _no_overlap(overlap),
    ]
    before = (pool.get("status") or {}).get("conditions") or []
    status["conditions"] = merge(before, conditions, generation=status["observedGeneration"], now=now)
    return Plan(objects, status)


def selects(pool: JsonObject, node: JsonObject) -> bool:
    """Whether a DaemonSet of this pool would run on the node: labels and hard taints."""
    labels = node["metadata"].get("labels") or {}
    selector = pool["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    tolerations = pool["spec"].get("tolerations") or []
    taints = (node.get("spec") or {}).get("taints") or []
    # DaemonSet pods tolerate what the node lifecycle adds (unschedulable, not-ready, ...).
    hard = [
        taint
        for taint in taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and not taint.get("key", "").startswith("node.kubernetes.io/")
    ]
    return all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in hard)


def _tolerates(toleration: JsonObject, taint: JsonObject) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return (toleration.get("key"), toleration.get("value") or "") == (
        taint.get("key"),
        taint.get("value") or "",
    )


def _missing_classes(observed: Observed) -> list[str]:
    named = {tier["tierClassName"] for tier in observed.pool["spec"]["tiers"]}
    return sorted(named - set(observed.tier_classes))


def _overlap(observed: Observed) -> list[tuple[str, str, bool]]:
    """(node, other pool, True when this pool is the younger one and must give way)."""
    found = []
    own = [node for node in observed.nodes if selects(observed.pool, node)]
    for other in observed.other_pools:
        for node in own:
            if selects(other, node):
                mine = _age(observed.pool) > _age(other)
                metadata = other["metadata"]
                found.append((node["metadata"]["name"], f"{metadata['namespace']}/{metadata['name']}", mine))
    return found


def _age(pool: JsonObject) -> tuple[str, str, str]:
    metadata = pool["metadata"]
    return metadata.get("creationTimestamp", ""), metadata.get("namespace", ""), metadata["name"]


def _updated(daemon_set: JsonObject | None) -> int | None:
    """Absent until a DaemonSet controller has reported: a number of ours would be a guess."""
    status = (daemon_set or {}).get("status") or {}
    if not status.get("observedGeneration"):
        return None
    return int(status.get("updatedNumberScheduled") or 0)


def _available(wanted: list[str], live: list[str], missing: list[str]) -> Condition:
    if missing:
        return false("Available", "ReferenceMissing", f"TierClass {', '.join(missing)} does not exist")
    absent = sorted(set(wanted) - set(live))
    if not wanted and not live:
        return false("Available", "NoNodes", "no node matches spec.nodeSelector and spec.tolerations")
    if absent:
        return false("Available", "AgentsMissing", f"no live agent on {_names(absent)}")
    return true("Available", "AllAgentsLive", f"{len(live)} of {len(wanted)} agents are live")


def _progressing(wanted: list[str], live: list[str], observed: Observed) -> Condition:
    status = (observed.daemon_set or {}).get("status") or {}
    generation = ((observed.daemon_set or {}).get("metadata") or {}).get("generation")
    if status.get("observedGeneration") and generation and status["observedGeneration"] < generation:
        return true("Progressing", "TemplateChanged", "the DaemonSet has not been observed yet")
    if set(wanted) - set(live):
        return true("Progressing", "WaitingForAgents", f"{len(live)} of {len(wanted)} agents are live")
    if observed.rollouts and observed.pool["spec"].get("updateStrategy") == "RollingUpdate":
        return false("Progressing", "HeldByRollout", f"unfinished: {_names(list(observed.rollouts))}")
    return false("Progressing", "Stable", "")


def _no_overlap(overlap: list[tuple[str, str, bool]]) -> Condition:
    if not overlap:
        return true("NoOverlap", "NodesAreOwn", "")
    nodes = sorted({node for node, _, _ in overlap})
    pools = sorted({pool for _, pool, _ in overlap})
    gives_way = any(mine for _, _, mine in overlap)
    what = "nothing is applied until it ends" if gives_way else "this pool is the older one and keeps them"
    return false("NoOverlap", "NodesShared", f"{_names(nodes)} also match AgentPool {_names(pools)}; {what}")


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


class AgentPoolReconciler:
    kind = Kind.AGENT_POOL

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._applied: dict[str, str] = {}

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        pool = self._deps.store.get(key)
        if pool is None or "deletionTimestamp" in pool["metadata"]:
            return Done()
        observed = self._observe(key, pool)
        decided = plan(observed, self._deps.clock.now())
        refused = await self._apply(pool, decided, observed)
        if refused:
            decided = self._with_refusal(pool, decided, refused)
            if not any(one.get("reason") == REFUSED for one in _conditions(pool)):
                await self._deps.api.event(pool, EventType.WARNING, REFUSED, refused)
        if await write_status(self._deps.api, pool, decided.status, OWNED):
            # A pool is born without agents: that they are not there yet is no news.
            born = bool((pool.get("status") or {}).get("conditions"))
            types = EVENT_CONDITIONS if born else ("NoOverlap",)
            await post_changes(self._deps.api, pool, decided.status["conditions"], types)
        return Requeue(REFUSED_SECONDS) if refused else Done()

    def _with_refusal(self, pool: JsonObject, decided: Plan, refused: str) -> Plan:
        """The status that says so: nobody else hears of what the API server answered."""
        generation, now = decided.status["observedGeneration"], self._deps.clock.now()
        told = merge(
            _conditions(pool), [false("Progressing", REFUSED, refused)], generation=generation, now=now
        )
        others = [one for one in decided.status["conditions"] if one["type"] != "Progressing"]
        rows = sorted([*others, *told], key=lambda one: str(one["type"]))
        return replace(decided, status={**decided.status, "conditions": rows})

    async def _apply(self, pool: JsonObject, decided: Plan, observed: Observed) -> str:
        """Applies each object unless it is what this process applied last and the DaemonSet is still there.
        A change by somebody else to the other three is repaired at the next start of an operator. What the
        API server finds invalid, since the pool says it, is the answer; empty when it takes all."""
        for manifest in decided.objects:
            token = f"{pool['metadata']['uid']}/{manifest['kind']}"
            digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
            if manifest["kind"] == Kind.DAEMON_SET.value:
                digest += _seen_template(observed.daemon_set)
            if self._applied.get(token) == digest:
                continue
            try:
                applied = await self._deps.api.apply(manifest)
            except Conflict:
                raise
            except ApiError as error:
                if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                    raise
                named = f"{manifest['kind']} {manifest['metadata']['name']}"
                return f"the API server refuses {named}: {error.message}"[:MESSAGE_LIMIT]
            if manifest["kind"] == Kind.DAEMON_SET.value:
                digest = digest[:64] + _seen_template(applied)
            self._applied[token] = digest
        return ""

    def _observe(self, key: ObjectKey, pool: JsonObject) -> Observed:
        store = self._deps.store
        named = {tier["tierClassName"] for tier in pool["spec"]["tiers"]}
        classes = {name: store.get(ObjectKey(Kind.TIER_CLASS, "", name)) for name in named}
        caches = {
            cache["metadata"]["name"]
            for cache in store.list_all(Kind.KV_CACHE, key.namespace)
            if cache["spec"]["poolRef"]["name"] == key.name
        }
        return Observed(
            pool=pool,
            other_pools=tuple(
                other
                for other in store.list_all(Kind.AGENT_POOL)
                if other["metadata"]["uid"] != pool["metadata"]["uid"]
            ),
            nodes=tuple(store.list_all(Kind.NODE)),
            members=tuple(self._deps.fleet.members(key.namespace, key.name)),
            tier_classes={name: found for name, found in classes.items() if found is not None},
            daemon_set=store.get(ObjectKey(Kind.DAEMON_SET, key.namespace, object_name(pool))),
            rollouts=tuple(
                rollout["metadata"]["name"]
                for rollout in store.list_all(Kind.KV_ROLLOUT, key.namespace)
                if cache_of(rollout) in caches
                and (rollout.get("status") or {}).get("phase") not in FINISHED_PHASES
            ),
        )


def _conditions(pool: JsonObject) -> list[JsonObject]:
    found: list[JsonObject] = (pool.get("status") or {}).get("conditions") or []
    return found


def _seen_template(daemon_set: JsonObject | None) -> str:
    """Changes when anybody changes the DaemonSet's spec, or deletes it."""
    metadata = (daemon_set or {}).get("metadata") or {}
    return f"{metadata.get('uid', '')}/{metadata.get('generation', 0)}"


__all__ = ["AgentPoolReconciler", "Observed", "Plan", "plan", "selects"]
