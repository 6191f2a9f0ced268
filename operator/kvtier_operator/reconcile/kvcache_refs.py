"""What a KVCache names, looked up and compiled: pool, tier classes, selector. Pure over a Store."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from kvtier_crds.compile import CompileError, compile_admission, compile_manifest
from kvtier_crds.manifest import RuntimeManifest
from kvtier_crds.models.kvcache import KVCache
from kvtier_crds.models.kvselector import KVSelector
from kvtier_crds.models.tierclass import TierClass
from kvtier_operator.feasible import Problem
from kvtier_operator.ports import JsonObject, Kind, ObjectKey, Store


@dataclass(frozen=True)
class Resolved:
    """`missing` names objects that do not exist; `problems` what does not compile though all exist.
    `exact` is the baseline of the spec, `wanted` what the spec asks for (the same without a selectorRef)."""

    pool: JsonObject | None
    missing: tuple[str, ...]
    problems: tuple[Problem, ...]
    exact: RuntimeManifest | None
    wanted: RuntimeManifest | None


def resolve(cache: JsonObject, store: Store) -> Resolved:
    """Never raises for what a user may have written."""
    spec, namespace = cache["spec"], cache["metadata"]["namespace"]
    pool_name = spec["poolRef"]["name"]
    pool = store.get(ObjectKey(Kind.AGENT_POOL, namespace, pool_name))
    missing = [] if pool is not None else [f"AgentPool {pool_name}"]
    names = sorted({tier["tierClassName"] for tier in spec["tiers"]})
    classes = {name: store.get(ObjectKey(Kind.TIER_CLASS, "", name)) for name in names}
    missing += [f"TierClass {name}" for name in names if classes[name] is None]
    selector_name = (spec.get("selectorRef") or {}).get("name")
    selector = store.get(ObjectKey(Kind.KV_SELECTOR, namespace, selector_name)) if selector_name else None
    if selector_name and selector is None:
        missing.append(f"KVSelector {selector_name}")
    found = {name: obj for name, obj in classes.items() if obj is not None}
    if len(found) < len(names):
        return Resolved(pool, tuple(missing), (), None, None)
    try:
        exact = _compile(cache, found, None).exact()
        wanted: RuntimeManifest | None = exact
        if selector_name:
            wanted = None if selector is None else _compile(cache, found, selector)
    except CompileError as error:
        problem = Problem("", error.reason.value, error.message)
        return Resolved(pool, tuple(missing), (problem,), None, None)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = Problem("", "SpecInvalid", f"{where}: {first['msg']}")
        return Resolved(pool, tuple(missing), (problem,), None, None)
    return Resolved(pool, tuple(missing), (), exact, wanted)


def _compile(
    cache: JsonObject, classes: dict[str, JsonObject], selector: JsonObject | None
) -> RuntimeManifest:
    return compile_manifest(
        KVCache.model_validate(cache),
        cache["metadata"]["uid"],
        cache["metadata"]["namespace"],
        {name: TierClass.model_validate(obj) for name, obj in classes.items()},
        None if selector is None else KVSelector.model_validate(selector),
    )


def declared(
    wanted: RuntimeManifest | None, running: RuntimeManifest | None, cache: JsonObject
) -> RuntimeManifest | None:
    """What the spec says in the words of what runs: bounds of transfers are the manifest's from the rollout
    on that brought them."""
    if wanted is None or running is None or running.admission is None:
        return wanted
    return wanted.admitting(compile_admission(KVCache.model_validate(cache).spec.admission))
