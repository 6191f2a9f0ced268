"""Which keys must be looked at again when an object changes. Pure, over the read cache.

A missing entry here is repaired by the relist, minutes late; an entry too many costs one reconcile that
writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier_operator.election import LEASE_NAME
from kvtier_operator.fleet import condition_of, lease_end, parse_time, pool_of
from kvtier_operator.ports import LEASE_PREFIX, JsonObject, Kind, ObjectKey, Store
from kvtier_operator.store import cache_of, name_in

RECONCILED = (
    Kind.TIER_CLASS,
    Kind.KV_SELECTOR,
    Kind.AGENT_POOL,
    Kind.KV_NODE,
    Kind.KV_CACHE,
    Kind.KV_ROLLOUT,
)
_SpecTest = Callable[[JsonObject], bool]

COMPONENT_LABEL = "kvtier.dev/component"
# Filtered by the server: a large cluster has a Lease of each kubelet, renewed every ten seconds.
SELECTORS = {
    Kind.LEASE: f"{COMPONENT_LABEL}=agent",
    Kind.DAEMON_SET: f"{COMPONENT_LABEL}=agent",
}
WATCH_SELECTORS = {**SELECTORS, Kind.LEASE: f"{COMPONENT_LABEL} in (agent,operator)"}
"""A standby hears from the watch that its leader has gone; what is listed are agents' alone."""
WATCHED = (*RECONCILED, Kind.NODE, Kind.LEASE, Kind.DAEMON_SET)


# Of these, others go by what a user has written. Their statuses are ours, and some are written once a minute.
_READ_BY_SPEC = frozenset({Kind.TIER_CLASS, Kind.KV_SELECTOR, Kind.AGENT_POOL})
_FINISHED = ("Completed", "RolledBack", "Invalid")


def relevant(key: ObjectKey) -> bool:
    """False for objects of a watched kind that are not ours: other Leases."""
    return key.kind is not Kind.LEASE or key.name.startswith(LEASE_PREFIX)


def is_operators_lease(key: ObjectKey) -> bool:
    return key.kind is Kind.LEASE and key.name == LEASE_NAME


def affected(
    key: ObjectKey, before: JsonObject | None, after: JsonObject | None, store: Store
) -> set[ObjectKey]:
    """Keys to reconcile when `key` went from `before` to `after` (None: did not, does not exist)."""
    obj = after or before
    if obj is None:
        return set()
    keys: set[ObjectKey] = {key} if key.kind in RECONCILED else set()
    if key.kind in _READ_BY_SPEC and _same_spec(before, after):
        return keys
    match key.kind:
        case Kind.TIER_CLASS:
            keys |= _caches(store, "", lambda spec: key.name in _tier_names(spec))
        case Kind.KV_SELECTOR:
            keys |= _caches(store, key.namespace, lambda spec: name_in(spec, "selectorRef") == key.name)
            keys |= _rollouts(
                store,
                key.namespace,
                lambda spec: name_in(spec.get("candidate"), "selectorRef") == key.name,
            )
        case Kind.AGENT_POOL:
            keys |= _of_pool(store, key.namespace, key.name)
            keys |= {_key(Kind.AGENT_POOL, pool) for pool in store.list_all(Kind.AGENT_POOL)}
        case Kind.KV_NODE:
            if before is None or after is None or _agent_facts(before) != _agent_facts(after):
                for version in (before, after):
                    if version is not None:
                        keys |= _of_pool(store, *pool_of(version))
            else:
                # Its own reconcile is of its liveness and its boot, which are among those facts.
                keys.discard(key)
                for namespace, cache, digest in _held(before) - _held(after):
                    keys |= _waiting_for(store, namespace, cache, digest)
        case Kind.LEASE:
            node = key.name.removeprefix(LEASE_PREFIX)
            if (
                before is None
                or after is None
                or _holder(before) != _holder(after)
                or _revived(before, after)
            ):
                keys.add(ObjectKey(Kind.KV_NODE, "", node))
                kv_node = store.get(ObjectKey(Kind.KV_NODE, "", node))
                if kv_node is not None:
                    keys |= _of_pool(store, *pool_of(kv_node))
        case Kind.NODE:
            if before is None or after is None or _node_facts(before) != _node_facts(after):
                kv_node = store.get(ObjectKey(Kind.KV_NODE, "", key.name))
                if kv_node is not None:
                    keys |= _of_pool(store, *pool_of(kv_node))
                keys |= {_key(Kind.AGENT_POOL, pool) for pool in store.list_all(Kind.AGENT_POOL)}
        case Kind.DAEMON_SET:
            for owner in obj["metadata"].get("ownerReferences") or []:
                if owner.get("kind") == Kind.AGENT_POOL.value:
                    keys.add(ObjectKey(Kind.AGENT_POOL, key.namespace, owner["name"]))
        case Kind.KV_CACHE:
            if before is not None and after is not None and _no_news(key, before, after, store):
                keys.discard(key)
            if before is None or after is None or _for_its_rollouts(before) != _for_its_rollouts(after):
                keys |= _rollouts_of(store, key.namespace, key.name)
        case Kind.KV_ROLLOUT:
            cache = cache_of(obj)
            keys |= _rollouts_of(store, key.namespace, cache)
            on = store.get(ObjectKey(Kind.KV_CACHE, key.namespace, cache)) if cache else None
            if cache and (before is None or after is None or _standing(before) != _standing(after)):
                keys.add(ObjectKey(Kind.KV_CACHE, key.namespace, cache))
                # An AgentPool holds its updates while a rollout on its nodes is unfinished.
                pool = name_in((on or {}).get("spec"), "poolRef")
                if pool:
                    keys.add(ObjectKey(Kind.AGENT_POOL, key.namespace, pool))
            if cache and (before is None or after is None or _holding(before) != _holding(after)):
                # A selector's indexes are those of the agents that hold its candidate.
                for holder in ((obj.get("spec") or {}).get("candidate"), (on or {}).get("spec")):
                    selector = name_in(holder, "selectorRef")
                    if selector:
                        keys.add(ObjectKey(Kind.KV_SELECTOR, key.namespace, selector))
        case _:
            pass
    return keys


def _same_spec(before: JsonObject | None, after: JsonObject | None) -> bool:
    """Whether it is the same object, and only its status has changed."""
    if before is None or after is None:
        return False
    facts = ("uid", "generation", "deletionTimestamp", "labels")
    old, new = before["metadata"], after["metadata"]
    return "generation" in new and all(old.get(name) == new.get(name) for name in facts)


def _key(kind: Kind, obj: JsonObject) -> ObjectKey:
    return ObjectKey(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def _tier_names(spec: JsonObject) -> set[str]:
    return {tier.get("tierClassName", "") for tier in spec.get("tiers") or []}


def _no_news(key: ObjectKey, before: JsonObject, after: JsonObject, store: Store) -> bool:
    """Whether a cache's own reconcile has nothing to do: it wrote what has changed, or the number has moved
    for a rollout that owns it. It would ask each agent what it runs, at the moment at which all of them are
    told of that number. What anybody else writes there is put right at its next look, within a minute."""
    if _for_a_cache(before) != _for_a_cache(after):
        return False
    if _fence(before) == _fence(after):
        return True
    return any(_standing(one)[1] for one in store.rollouts_of(key.namespace, key.name))


def _for_a_cache(cache: JsonObject) -> tuple[object, ...]:
    """What a cache's own reconcile goes by, but for its number."""
    metadata, status = cache["metadata"], cache.get("status") or {}
    facts = ("uid", "generation", "deletionTimestamp", "finalizers", "labels")
    told = bool(status.get("fence")), bool(status.get("conditions")), status.get("baseline")
    return *told, status.get("approved"), cache.get("spec"), *(metadata.get(name) for name in facts)


def _for_its_rollouts(cache: JsonObject) -> tuple[object, ...]:
    """What rollouts go by, and what one of them may wait for: that the baseline is on every node. Bytes,
    plans and texts are not."""
    status = cache.get("status") or {}
    ready = (condition_of(cache, "Ready") or {}).get("status")
    return *_for_a_cache(cache), _fence(cache), status.get("digestBudget"), status.get("servingNodes"), ready


def _fence(cache: JsonObject) -> object:
    return (cache.get("status") or {}).get("fence")


def _standing(rollout: JsonObject) -> tuple[bool, bool]:
    """What a KVCache and an AgentPool go by: whether it is finished, and whether, unfinished, it has a fence
    by which it owns its cache."""
    status = rollout.get("status") or {}
    finished = str(status.get("phase")) in _FINISHED
    return finished, bool(status.get("fence")) and not finished


def _holding(rollout: JsonObject) -> tuple[object, ...]:
    """What a selector goes by: whose candidate agents may hold."""
    status = rollout.get("status") or {}
    held = status.get("stage") not in (None, "Off", "ExactBaseline")
    return (
        held,
        (status.get("candidate") or {}).get("digest") if held else "",
        status.get("phase") in _FINISHED,
    )


def _agent_facts(kv_node: JsonObject) -> tuple[object, ...]:
    """All that anyone but its own reconcile decides by; bytes that move and grants that come are not."""
    status = kv_node.get("status") or {}
    tiers = [
        {name: value for name, value in tier.items() if name not in ("used", "pinned")}
        for tier in status.get("tiers") or []
    ]
    conditions = [
        (one.get("type"), one.get("status"), one.get("reason")) for one in status.get("conditions") or []
    ]
    return (
        kv_node.get("spec"),
        *(kv_node["metadata"].get(name) for name in ("uid", "deletionTimestamp")),
        *(status.get(name) for name in ("bootID", "numericsVersion", "agentVersion")),
        tiers,
        conditions,
    )


def _held(kv_node: JsonObject) -> set[tuple[str, str, str]]:
    """Namespace and name of caches whose candidate this agent holds, and its digest."""
    rows = (kv_node.get("status") or {}).get("candidates") or []
    return {(row.get("namespace", ""), row.get("cache", ""), row.get("digest", "")) for row in rows}


def _holder(lease: JsonObject | None) -> str:
    return str(((lease or {}).get("spec") or {}).get("holderIdentity") or "")


def _revived(before: JsonObject, after: JsonObject) -> bool:
    """Renewed by the same agent after it had ended: everybody took it for lost."""
    end, renewed = lease_end(before), parse_time((after.get("spec") or {}).get("renewTime"))
    return end is not None and renewed is not None and renewed > end


def _node_facts(node: JsonObject) -> tuple[object, ...]:
    ready = condition_of(node, "Ready") or {}
    return (
        (node.get("spec") or {}).get("unschedulable", False),
        node["metadata"].get("labels"),
        (node.get("spec") or {}).get("taints"),
        ready.get("status"),
    )


def _caches(store: Store, namespace: str, wanted: _SpecTest) -> set[ObjectKey]:
    return {
        _key(Kind.KV_CACHE, cache)
        for cache in store.list_all(Kind.KV_CACHE, namespace)
        if wanted(cache.get("spec") or {})
    }


def _rollouts(store: Store, namespace: str, wanted: _SpecTest) -> set[ObjectKey]:
    return {
        _key(Kind.KV_ROLLOUT, rollout)
        for rollout in store.list_all(Kind.KV_ROLLOUT, namespace)
        if wanted(rollout.get("spec") or {})
    }


def _rollouts_of(store: Store, namespace: str, cache: str) -> set[ObjectKey]:
    return {_key(Kind.KV_ROLLOUT, rollout) for rollout in store.rollouts_of(namespace, cache)}


def _waiting_for(store: Store, namespace: str, cache: str, digest: str) -> set[ObjectKey]:
    """Of a cache's rollouts those to which it is news that an agent let go of this candidate: not one that
    goes on with another, and has heard so from the agent itself, seconds ago."""
    return {
        _key(Kind.KV_ROLLOUT, one)
        for one in store.rollouts_of(namespace, cache)
        if not _goes_on_with_another(one, digest)
    }


def _goes_on_with_another(rollout: JsonObject, digest: str) -> bool:
    status = rollout.get("status") or {}
    candidate = (status.get("candidate") or {}).get("digest", digest)
    return status.get("phase") == "Progressing" and "revoking" not in status and candidate != digest


def _of_pool(store: Store, namespace: str, name: str) -> set[ObjectKey]:
    """The pool itself, the caches that live on it, and the rollouts of those."""
    if not name:
        return set()
    keys = {ObjectKey(Kind.AGENT_POOL, namespace, name)}
    caches = _caches(store, namespace, lambda spec: name_in(spec, "poolRef") == name)
    names = {key.name for key in caches}
    return keys | caches | _rollouts(store, namespace, lambda spec: name_in(spec, "cacheRef") in names)
