"""Bytes that caches of a pool have for themselves on each node: declared, adopted, held beside a baseline.

Why it exists: of two caches that are judged at different times neither may be promised what the other runs
with, whatever has become of the objects that brought it. It must not know nodes, nor what a node has. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtier_crds.manifest import RuntimeManifest
from kvtier_crds.quantity import parse_bytes
from kvtier_operator.ports import JsonObject
from kvtier_operator.store import cache_of


def budgets_of_others(
    cache: JsonObject,
    all_caches: Sequence[JsonObject],
    rollouts: Sequence[JsonObject],
    *,
    younger: bool = False,
) -> dict[str, int]:
    """Bytes per node and tier class that the other caches of the same pool declare, or run by a candidate
    that was adopted, whichever is more, and those of candidates' engines beside them. Of two that do not fit
    together, the older one keeps its place: `younger` ones are counted only when asked for."""
    metadata, pool = cache["metadata"], cache["spec"]["poolRef"]["name"]
    mine = (metadata.get("creationTimestamp", ""), metadata["name"])
    total: dict[str, int] = {}
    # Of a thousand rollouts each cache has one or two of its own.
    of_cache: dict[tuple[str, str], list[JsonObject]] = {}
    for rollout in rollouts:
        where = rollout["metadata"].get("namespace", ""), cache_of(rollout)
        of_cache.setdefault(where, []).append(rollout)
    for other in all_caches:
        theirs = other["metadata"]
        if theirs.get("uid") == metadata.get("uid") or other["spec"]["poolRef"]["name"] != pool:
            continue
        if not younger and (theirs.get("creationTimestamp", ""), theirs["name"]) > mine:
            continue
        its_own = of_cache.get((theirs.get("namespace", ""), theirs["name"]), [])
        mine_and_beside = [_declared_or_adopted(other, its_own), *_beside(other, its_own)]
        for budgets in mine_and_beside:
            for name, size in budgets.items():
                total[name] = total.get(name, 0) + size
    return total


def _declared_or_adopted(cache: JsonObject, rollouts: Sequence[JsonObject]) -> dict[str, int]:
    declared = declared_budgets(cache)
    baseline = (cache.get("status") or {}).get("baseline") or {}
    # A baseline that was adopted by an earlier version has none beside it, but perhaps its rollout.
    adopted = [
        candidate
        for rollout in rollouts
        if (candidate := _candidate(rollout, cache)) and candidate.get("digest") == baseline.get("digest")
    ]
    for one in (baseline, *adopted):
        for name, size in budgets_in(one).items():
            declared[name] = max(size, declared.get(name, 0))
    return declared


def declared_budgets(cache: JsonObject) -> dict[str, int]:
    """Bytes on each node by tier class, as the spec has them."""
    return {
        tier["tierClassName"]: parse_bytes(tier["budget"], "spec.tiers[].budget")
        for tier in cache["spec"]["tiers"]
    }


def _beside(cache: JsonObject, rollouts: Sequence[JsonObject]) -> list[dict[str, int]]:
    """Of rollouts that agents may hold: from Shadow on until they have ended."""
    running = ((cache.get("status") or {}).get("baseline") or {}).get("digest")
    return [
        budgets_in(candidate)
        for rollout in rollouts
        if (candidate := _candidate(rollout, cache))
        and candidate.get("digest") != running
        and (rollout["status"].get("stage") or "Off") != "Off"
        and rollout["status"].get("phase") not in ("Completed", "RolledBack", "Invalid")
    ]


def _candidate(rollout: JsonObject, cache: JsonObject) -> JsonObject:
    here, there = rollout["metadata"], cache["metadata"]
    same = (here.get("namespace"), cache_of(rollout)) == (there.get("namespace"), there["name"])
    return ((rollout.get("status") or {}).get("candidate") or {}) if same else {}


def budgets_in(reference: Mapping[str, Any]) -> dict[str, int]:
    """Bytes on each node by tier class, as a status names them beside a digest."""
    return {str(one["tierClassName"]): int(one["bytes"]) for one in reference.get("budgets") or ()}


def budget_entries(budgets: Iterable[tuple[str, int]]) -> list[JsonObject]:
    """What `budgets_in` reads."""
    return [{"tierClassName": name, "bytes": size} for name, size in budgets]


def budgets_of(manifest: RuntimeManifest) -> list[tuple[str, int]]:
    return [(tier.tier_class_name, tier.budget_bytes) for tier in manifest.tiers]
