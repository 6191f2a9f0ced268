"""From objects to the candidate's manifest, or to the sentence that says why there is none. Pure.

A candidate changes one thing: the baseline with a selector (approximate), with another placement or other
tiers (exact), or what an edited KVCache says (its exact part first, then its selector). It must not write a
revision or know the stage of a rollout, nor whether a node has room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvtier_crds.beside import changed_fields, needs_new_cache, needs_own_engine
from kvtier_crds.compile import CompileError, CompileReason, compile_admission, compile_manifest
from kvtier_crds.manifest import RuntimeManifest
from kvtier_crds.models.kvcache import KVCache
from kvtier_crds.models.kvselector import KVSelector
from kvtier_crds.models.tierclass import TierClass
from kvtier_operator.ports import JsonObject
from kvtier_operator.revisions import revision_name
from kvtier_operator.rollout.inputs import CandidateView
from kvtier_operator.rollout.state import CandidateRef, ManifestRef, RolloutState
from kvtier_operator.rollout.vocabulary import Blocker, CandidateClass
from kvtier_operator.selectors import refusal
from kvtier_operator.store import name_in

OVERRIDABLE = ("placement", "tiers", "admission")


@dataclass(frozen=True)
class Compiled:
    """What the objects say now. `data` is the candidate's canonical encoding, empty when there is none, and
    `manifest` what it encodes. unread: why the baseline's manifest could not be read."""

    view: CandidateView
    data: bytes = b""
    manifest: RuntimeManifest | None = None
    unread: str = ""


@dataclass(frozen=True)
class Sources:
    """What a candidate is compiled from, as last read. running: the manifest of `baseline`, None when it
    cannot be read. selector: the KVSelector that `selector_name` names, None when it does not exist."""

    cache: JsonObject
    baseline: ManifestRef | None
    running: RuntimeManifest | None
    selector_name: str
    selector: JsonObject | None
    tier_classes: Mapping[str, JsonObject]


def unread_baseline(state: RolloutState, why: str) -> Compiled:
    """One that agents may hold is not said to have changed, and none begins on what nobody can read."""
    view = CandidateView(None, Blocker.BASELINE_MISSING, why)
    if state.holds_candidate and state.candidate is not None:
        view = CandidateView(state.candidate)
    return Compiled(view, unread=why)


class Blocked(Exception):
    """There is no candidate, and why."""

    def __init__(self, blocker: Blocker, message: str) -> None:
        super().__init__(message)
        self.blocker = blocker
        self.message = message


def shape_fault(candidate: object) -> str:
    """Why `spec.candidate` has no form that this version can read; empty when it has one. The schema refuses
    such a form at apply, but not one of a newer version that was stored under it."""
    if not isinstance(candidate, Mapping):
        return "spec.candidate is no object"
    for name in ("selectorRef", "overrides"):
        if not isinstance(candidate.get(name) or {}, Mapping):
            return f"spec.candidate.{name} is no object"
    tiers = (candidate.get("overrides") or {}).get("tiers") or []
    if not isinstance(tiers, list) or any(
        not isinstance(tier, Mapping) or "tierClassName" not in tier for tier in tiers
    ):
        return "spec.candidate.overrides.tiers is no list of tiers with a tierClassName each"
    return ""


def selector_named(candidate: object, cache: JsonObject) -> str:
    """The KVSelector that a candidate may bring; empty for none, and where its form is another version's."""
    from_spec = isinstance(candidate, Mapping) and candidate.get("fromCacheSpec")
    return name_in(cache["spec"] if from_spec else candidate, "selectorRef")


def tier_class_names(candidate: Mapping[str, Any], cache: JsonObject) -> tuple[str, ...]:
    """The TierClasses that compiling it takes, sorted."""
    overridden = (candidate.get("overrides") or {}).get("tiers") or []
    return tuple(sorted({str(tier["tierClassName"]) for tier in (*cache["spec"]["tiers"], *overridden)}))


def compile_candidate(candidate: Mapping[str, Any], sources: Sources) -> Compiled:
    """`spec.candidate` over the objects as they are now."""
    try:
        manifest, kind = _compile(candidate, sources)
    except Blocked as blocked:
        return Compiled(CandidateView(None, blocked.blocker, blocked.message))
    except CompileError as error:
        return Compiled(CandidateView(None, _BLOCKERS.get(error.reason, Blocker.SPEC_INVALID), error.message))
    except ValidationError as error:
        message = str(error.errors(include_url=False)[0]["msg"])
        return Compiled(CandidateView(None, Blocker.SPEC_INVALID, message))
    digest = manifest.digest()
    budgets: tuple[tuple[str, int], ...] = ()
    if sources.running is not None and needs_own_engine(sources.running, manifest):
        budgets = tuple((tier.tier_class_name, tier.budget_bytes) for tier in manifest.tiers)
    ref = CandidateRef(digest, revision_name(sources.cache["metadata"]["name"], digest), kind, budgets)
    return Compiled(CandidateView(ref), manifest.canonical(), manifest)


def _compile(candidate: Mapping[str, Any], sources: Sources) -> tuple[RuntimeManifest, CandidateClass]:
    if candidate.get("overrides"):
        return _overridden(candidate["overrides"], sources), CandidateClass.EXACT
    exact = _manifest(sources, sources.cache["spec"], None).exact()
    edited = sources.baseline is not None and exact.digest() != sources.baseline.digest
    if candidate.get("fromCacheSpec") and (edited or not sources.selector_name):
        # The exact part first: an approximate candidate is judged against the baseline that it stands on.
        return _beside(exact, sources), CandidateClass.EXACT
    name = sources.selector_name
    if sources.selector is None:
        raise Blocked(Blocker.REFERENCE_MISSING, f"KVSelector {name} does not exist")
    refused = refusal(sources.selector["spec"])
    if refused is not None:
        raise Blocked(Blocker.NOT_IMPLEMENTED, f"KVSelector {name} is not accepted: {refused.message}")
    approximate = _manifest(sources, sources.cache["spec"], KVSelector.model_validate(sources.selector))
    if edited:
        fields = "" if sources.running is None else f" in {', '.join(changed_fields(sources.running, exact))}"
        raise Blocked(
            Blocker.NOT_IMPLEMENTED,
            f"KVCache {sources.cache['metadata']['name']} differs from its baseline{fields} beside the "
            "selector; a rollout with candidate.fromCacheSpec brings that first",
        )
    return approximate, CandidateClass.APPROXIMATE


def _overridden(overrides: Mapping[str, Any], sources: Sources) -> RuntimeManifest:
    """The baseline with other parts, whatever the KVCache's spec says meanwhile."""
    parts = {name: overrides[name] for name in OVERRIDABLE if overrides.get(name) is not None}
    model, compiled = _compiled(sources, {**sources.cache["spec"], **parts}, None)
    running = _running(sources)
    wanted = {name: getattr(compiled, name) for name in parts if name != "admission"}
    if "tiers" in wanted:
        wanted["device_kind"] = compiled.device_kind
    candidate = running.model_copy(update=wanted)
    if "admission" in parts:
        candidate = candidate.admitting(compile_admission(model.spec.admission))
    return _beside(candidate, sources)


def _beside(candidate: RuntimeManifest, sources: Sources) -> RuntimeManifest:
    message = needs_new_cache(_running(sources), candidate)
    if message:
        raise Blocked(Blocker.NEEDS_NEW_CACHE, message)
    return candidate


def _running(sources: Sources) -> RuntimeManifest:
    if sources.running is None:
        name = sources.cache["metadata"]["name"]
        raise Blocked(Blocker.BASELINE_MISSING, f"the baseline's manifest of KVCache {name} cannot be read")
    return sources.running


def _manifest(sources: Sources, spec: Mapping[str, Any], selector: KVSelector | None) -> RuntimeManifest:
    """As the spec says it; with its bounds of transfers where these are the baseline's."""
    model, manifest = _compiled(sources, spec, selector)
    if sources.running is None or sources.running.admission is None:
        return manifest
    return manifest.admitting(compile_admission(model.spec.admission))


def _compiled(
    sources: Sources, spec: Mapping[str, Any], selector: KVSelector | None
) -> tuple[KVCache, RuntimeManifest]:
    metadata = sources.cache["metadata"]
    model = KVCache.model_validate({**sources.cache, "spec": dict(spec)})
    classes = {name: TierClass.model_validate(obj) for name, obj in sources.tier_classes.items()}
    return model, compile_manifest(model, metadata["uid"], metadata["namespace"], classes, selector)


_BLOCKERS = {
    CompileReason.TIER_CLASS_MISSING: Blocker.REFERENCE_MISSING,
    CompileReason.CONTRACT_FORBIDS: Blocker.CONTRACT_FORBIDS,
}
