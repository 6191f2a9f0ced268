"""From objects to the candidate's manifest, or to the sentence that says why there is none. Pure.

A candidate here is the baseline with a selector and nothing else: what else an edited KVCache would bring
needs fromCacheSpec. It must not write a revision or know the stage of a rollout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvtier_crds.compile import CompileError, CompileReason, compile_manifest
from kvtier_crds.models.kvcache import KVCache
from kvtier_crds.models.kvselector import KVSelector
from kvtier_crds.models.tierclass import TierClass
from kvtier_operator.ports import JsonObject
from kvtier_operator.revisions import revision_name
from kvtier_operator.rollout.gateset import ProbeSet
from kvtier_operator.rollout.inputs import CandidateView
from kvtier_operator.rollout.state import CandidateRef, ManifestRef
from kvtier_operator.rollout.vocabulary import Blocker, CandidateClass
from kvtier_operator.selectors import refusal

PLAN_KEY = "plan.json"


@dataclass(frozen=True)
class Compiled:
    """What the objects say now. `data` is the candidate's canonical encoding, empty when there is none."""

    view: CandidateView
    data: bytes = b""


def compile_candidate(
    cache: JsonObject,
    baseline: ManifestRef | None,
    selector: JsonObject | None,
    selector_name: str,
    tier_classes: Mapping[str, JsonObject],
) -> Compiled:
    """The candidate of `selectorRef` over the cache as it is now."""
    if not selector_name:
        return _blocked(Blocker.NOT_IMPLEMENTED, "only candidate.selectorRef is implemented")
    if selector is None:
        return _blocked(Blocker.REFERENCE_MISSING, f"KVSelector {selector_name} does not exist")
    refused = refusal(selector["spec"])
    if refused is not None:
        return _blocked(
            Blocker.NOT_IMPLEMENTED, f"KVSelector {selector_name} is not accepted: {refused.message}"
        )
    metadata = cache["metadata"]
    try:
        model = KVCache.model_validate(cache)
        classes = {name: TierClass.model_validate(obj) for name, obj in tier_classes.items()}
        chosen = KVSelector.model_validate(selector)
        manifest = compile_manifest(model, metadata["uid"], metadata["namespace"], classes, chosen)
        exact = compile_manifest(model, metadata["uid"], metadata["namespace"], classes, None).exact()
    except CompileError as error:
        return _blocked(_BLOCKERS.get(error.reason, Blocker.SPEC_INVALID), error.message)
    except ValidationError as error:
        return _blocked(Blocker.SPEC_INVALID, str(error.errors(include_url=False)[0]["msg"]))
    if baseline is not None and exact.digest() != baseline.digest:
        return _blocked(
            Blocker.NOT_IMPLEMENTED,
            f"KVCache {metadata['name']} has edits beside the selector; they need candidate.fromCacheSpec",
        )
    digest = manifest.digest()
    ref = CandidateRef(digest, revision_name(metadata["name"], digest), CandidateClass.APPROXIMATE)
    return Compiled(CandidateView(ref), manifest.canonical())


_BLOCKERS = {
    CompileReason.TIER_CLASS_MISSING: Blocker.REFERENCE_MISSING,
    CompileReason.CONTRACT_FORBIDS: Blocker.CONTRACT_FORBIDS,
}


def _blocked(blocker: Blocker, message: str) -> Compiled:
    return Compiled(CandidateView(None, blocker, message))


def spent_shares(cache: JsonObject, digest: str) -> int:
    """Parts of the digest's false-promotion budget used on this cache, by whichever rollout."""
    rows = (cache.get("status") or {}).get("digestBudget") or []
    return next((int(row["attempts"]) for row in rows if row["digest"] == digest), 0)


def probe_set(config_map: JsonObject | None) -> ProbeSet:
    """Size and digest of an evaluation plan; size 0 when there is none that can be read."""
    data: dict[str, Any] = (config_map or {}).get("data") or {}
    text = data.get(PLAN_KEY)
    if text is None and len(data) == 1:
        text = next(iter(data.values()))
    try:
        prompts = json.loads(text)["prompts"] if text else []
    except (ValueError, TypeError, KeyError):
        return ProbeSet("", 0)
    if not isinstance(prompts, list) or not prompts:
        return ProbeSet("", 0)
    return ProbeSet(f"sha256:{hashlib.sha256(str(text).encode()).hexdigest()}", len(prompts))
