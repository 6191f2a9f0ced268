"""What a manifest must satisfy before this node runs it: bytes, versions, identity, and what a candidate may
change. Pure; it must not know fences, leases or engines.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from kvtier_agent.cachesession import CacheName
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placements.policy import check_policy
from kvtier_core.release.leases import GrantTerms
from kvtier_crds.beside import beside, needs_new_cache, needs_own_engine
from kvtier_crds.manifest import (
    NUMERICS_VERSION,
    Exactness,
    Fallback,
    ManifestError,
    ManifestReason,
    RuntimeManifest,
)
from kvtier_evidence.window import WindowKey


def parse_manifest(encoded: bytes, digest: str) -> RuntimeManifest:
    """Raises MANIFEST_MISMATCH when the bytes do not hash to the digest, else MANIFEST_INVALID."""
    actual = f"sha256:{hashlib.sha256(encoded).hexdigest()}"
    if actual != digest:
        raise CoreError(Reason.MANIFEST_MISMATCH, f"the manifest's bytes hash to {actual}, not {digest}")
    try:
        return RuntimeManifest.parse(encoded)
    except ManifestError as error:
        unknown = error.reason is ManifestReason.UNKNOWN_SCHEMA
        reason = Reason.NUMERICS_MISMATCH if unknown else Reason.MANIFEST_INVALID
        raise CoreError(reason, error.message) from error


def check_candidate(
    running: RuntimeManifest, candidate: RuntimeManifest, terms: GrantTerms, window: WindowKey
) -> str:
    """A candidate may differ from the running baseline in what a rollout may change; returns the digest
    recomputed from what would run. Raises MANIFEST_MISMATCH, MANIFEST_INVALID, UNSUPPORTED,
    CANDIDATE_REFUSED, BAD_ARGUMENT."""
    if running.digest() != terms.baseline_digest:
        message = f"baseline_digest {terms.baseline_digest} is not the running {running.digest()}"
        raise CoreError(Reason.MANIFEST_MISMATCH, message)
    refused = needs_new_cache(running, candidate)
    would_run = beside(running, candidate)
    if refused or would_run.digest() != terms.candidate_digest:
        raise CoreError(Reason.UNSUPPORTED, refused or "the candidate's digest is of another manifest")
    check_policy(candidate.placement, candidate.model.geometry)
    if candidate.contract.exactness is Exactness.EXACT and candidate.selector is not None:
        raise CoreError(Reason.CANDIDATE_REFUSED, "contract.exactness exact forbids a selector")
    gate = None if candidate.selector is None else candidate.selector.gate
    if gate is not None and gate.widen_steps and Fallback.WIDEN not in candidate.contract.allowed_fallbacks:
        raise CoreError(
            Reason.CANDIDATE_REFUSED,
            f"selector.gate.widenSteps {gate.widen_steps} needs widen in contract.allowedFallbacks",
        )
    named = (window.candidate_digest, window.baseline_digest)
    if named != (terms.candidate_digest, terms.baseline_digest):
        raise CoreError(Reason.BAD_ARGUMENT, "window names other digests than the grant")
    return would_run.digest()


def placed_terms(running: RuntimeManifest, candidate: RuntimeManifest, terms: GrantTerms) -> GrantTerms:
    """With the candidate's placement, where that is its own, or where it is exact and its contract is; or
    for an engine of its own, which has both. Chunks of another size are merged at other rows, so their
    answers are the same up to rounding only: within the contract's tolerance."""
    terms = replace(terms, contract=candidate.contract)
    if needs_own_engine(running, candidate):
        same = candidate.chunk_tokens == running.chunk_tokens
        return replace(terms, own=True, tolerance=0.0 if same else float(running.contract.tolerance))
    contract = candidate.selector is None and candidate.contract != running.contract
    if candidate.placement == running.placement and not contract:
        return terms
    own = "\n".join(one.model_dump_json(by_alias=True) for one in (candidate.placement, candidate.contract))
    name = hashlib.sha256(own.encode()).hexdigest()[:16]
    return replace(terms, placement=candidate.placement, lane=name)


def lane_manifest(running: RuntimeManifest, terms: GrantTerms) -> RuntimeManifest:
    """What answers for a candidate in the baseline's engine: what runs, with all that the lease lets steps do
    otherwise. For `placed_terms` without an engine of their own."""
    allowed = tuple(one for one in Fallback if one in terms.fallbacks)
    changed = {
        "selector": terms.selector,
        "placement": terms.placement or running.placement,
        "contract": terms.contract.model_copy(update={"allowed_fallbacks": allowed}),
    }
    return running.model_copy(update=changed)


def check_baseline(manifest: RuntimeManifest, cache: CacheName, device_kind: str) -> None:
    """Whether a node with this device kind can run it as the cache's exact baseline. Raises
    NUMERICS_MISMATCH, MANIFEST_MISMATCH or MANIFEST_INVALID."""
    if manifest.numerics_version != NUMERICS_VERSION:
        message = f"numericsVersion {manifest.numerics_version} is not {NUMERICS_VERSION}"
        raise CoreError(Reason.NUMERICS_MISMATCH, message)
    if manifest.device_kind != device_kind:
        message = f"deviceKind {manifest.device_kind} is not this node's {device_kind}"
        raise CoreError(Reason.NUMERICS_MISMATCH, message)
    tenancy = manifest.tenancy
    if (tenancy.namespace, tenancy.cache_uid) != (cache.namespace, cache.uid):
        message = f"the manifest is of cache {tenancy.namespace}/{tenancy.cache_uid}"
        raise CoreError(Reason.MANIFEST_MISMATCH, message)
    if manifest.contract.exactness is not Exactness.EXACT and manifest.selector is not None:
        raise CoreError(Reason.MANIFEST_INVALID, "a baseline manifest has no selector")
    check_policy(manifest.placement, manifest.model.geometry)
