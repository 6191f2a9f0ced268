"""What only several objects together can tell: references between them, and whether a cache compiles.

A reference to what the files do not hold is a note, since the cluster may hold it. It must not know how one
object is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kubectl_kvtier.lint.findings import Finding, Severity
from kvtier_crds.compile import CompileError, compile_manifest
from kvtier_crds.models import AgentPool, KVCache, KVRollout, KVSelector, Resource, TierClass
from kvtier_crds.models.kvrollout import Candidate

_R = TypeVar("_R", bound=Resource)
_NO_UID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Placed:
    """An object that is right by itself, and where it stands."""

    where: str
    resource: Resource


def cross_check(objects: Sequence[Placed], default_namespace: str) -> Iterator[Finding]:
    """References of the objects to each other, by kind, namespace and name."""
    known = {
        (type(one.resource), _namespace(one.resource, default_namespace), one.resource.metadata.name): one
        for one in objects
    }
    for one in objects:
        resource = one.resource
        namespace = _namespace(resource, default_namespace)
        if isinstance(resource, KVCache):
            yield from _cache(one, resource, namespace, known)
        elif isinstance(resource, KVRollout):
            yield from _rollout(one, resource, namespace, known)
        elif isinstance(resource, AgentPool):
            for at, tier in enumerate(resource.spec.tiers):
                field = f"spec.tiers[{at}].tierClassName"
                yield from _missing(one, known, TierClass, "", tier.tier_class_name, field)


_Known = Mapping[tuple[type[Resource], str, str], Placed]


def _cache(one: Placed, cache: KVCache, namespace: str, known: _Known) -> Iterator[Finding]:
    yield from _missing(one, known, AgentPool, namespace, cache.spec.pool_ref.name, "spec.poolRef")
    for at, tier in enumerate(cache.spec.tiers):
        field = f"spec.tiers[{at}].tierClassName"
        yield from _missing(one, known, TierClass, "", tier.tier_class_name, field)
    reference = cache.spec.selector_ref
    selector = None
    if reference is not None:
        yield from _missing(one, known, KVSelector, namespace, reference.name, "spec.selectorRef")
        selector = _found(known, KVSelector, namespace, reference.name)
        if selector is None:
            return
    yield from _compiles(one, cache, namespace, selector, known)


def _rollout(one: Placed, rollout: KVRollout, namespace: str, known: _Known) -> Iterator[Finding]:
    yield from _missing(one, known, KVCache, namespace, rollout.spec.cache_ref.name, "spec.cacheRef")
    cache = _found(known, KVCache, namespace, rollout.spec.cache_ref.name)
    candidate: Candidate = rollout.spec.candidate
    if candidate.selector_ref is None:
        return
    name = candidate.selector_ref.name
    yield from _missing(one, known, KVSelector, namespace, name, "spec.candidate.selectorRef")
    selector = _found(known, KVSelector, namespace, name)
    if cache is not None and selector is not None:
        yield from _compiles(one, cache, namespace, selector, known)


def _compiles(
    one: Placed, cache: KVCache, namespace: str, selector: KVSelector | None, known: _Known
) -> Iterator[Finding]:
    classes: dict[str, TierClass] = {}
    for tier in cache.spec.tiers:
        found = _found(known, TierClass, "", tier.tier_class_name)
        if found is None:
            return
        classes[tier.tier_class_name] = found
    try:
        compile_manifest(cache, _NO_UID, namespace, classes, selector)
    except CompileError as error:
        yield Finding(Severity.ERROR, one.where, "", f"{error.reason}: {error}")


def _missing(
    one: Placed, known: _Known, kind: type[Resource], namespace: str, name: str, field: str
) -> Iterator[Finding]:
    if (kind, namespace, name) not in known:
        place = f" in namespace {namespace}" if namespace else ""
        yield Finding(
            Severity.NOTE,
            one.where,
            field,
            f"{field}: {kind.KIND} {name}{place} is not in these files; the cluster must have it",
        )


def _found(known: _Known, kind: type[_R], namespace: str, name: str) -> _R | None:
    placed = known.get((kind, namespace, name))
    return placed.resource if placed is not None and isinstance(placed.resource, kind) else None


def _namespace(resource: Resource, default: str) -> str:
    return "" if resource.SCOPE.value == "Cluster" else resource.metadata.namespace or default
