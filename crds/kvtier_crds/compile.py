"""From resources to the runtime manifest: the one place where a spec becomes what agents run.

Why it exists: the operator that writes a manifest and a test that expects one must compile alike. Pure: no
cluster, no clock, no defaults that depend on where it runs. It must not judge whether a node can run the
result (that is arithmetic over measured capabilities, and the operator's), nor release anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import ValidationError

from kvtier_crds import manifest as m
from kvtier_crds.canonical import Parameters, Scalar, canonical_decimal
from kvtier_crds.models.common import Struct
from kvtier_crds.models.kvcache import Admission as AdmissionSpec
from kvtier_crds.models.kvcache import CacheTier, KVCache
from kvtier_crds.models.kvcache import Model as ModelSpec
from kvtier_crds.models.kvselector import KVSelector, SelectorGate
from kvtier_crds.models.tierclass import TierClass
from kvtier_crds.placement_parameters import placement_parameters
from kvtier_crds.quantity import parse_bytes, parse_fraction

CPU_DEVICE_KIND = "simulated"
"""The numerics class of a cache without a gpu tier: it computes where a simulated one does."""


_BYTES_OF = {m.Dtype.FLOAT32: 4, m.Dtype.FLOAT16: 2, m.Dtype.BFLOAT16: 2}


class CompileReason(StrEnum):
    """Why resources do not compile; stable, used as a condition's reason."""

    TIER_CLASS_MISSING = "TierClassMissing"
    TIER_INCAPABLE = "TierIncapable"
    CONTRACT_FORBIDS = "ContractForbids"
    SELECTOR_GEOMETRY = "SelectorGeometry"
    SPEC_INVALID = "SpecInvalid"


class CompileError(ValueError):
    """`reference` names the object or field that is missing or wrong."""

    def __init__(self, reason: CompileReason, reference: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.reference = reference
        self.message = message


def compile_manifest(
    cache: KVCache,
    cache_uid: str,
    namespace: str,
    tier_classes: Mapping[str, TierClass],
    selector: KVSelector | None,
) -> m.RuntimeManifest:
    """The manifest of a cache with that selector, or without one.

    `tier_classes` by name. `spec.selectorRef` is not followed: the caller says which selector is meant, and
    the baseline is `compile_manifest(..., None).exact()`. Raises CompileError.
    """
    spec = cache.spec
    if selector is not None and spec.contract.exactness is not m.Exactness.APPROXIMATE:
        raise CompileError(
            CompileReason.CONTRACT_FORBIDS,
            f"KVCache {cache.metadata.name} spec.contract.exactness",
            f"KVSelector {selector.metadata.name} needs contract.exactness approximate, but KVCache "
            f"{cache.metadata.name} is exact",
        )
    classes = _classes(spec.tiers, tier_classes)
    try:
        return m.RuntimeManifest(
            device_kind=_device_kind(classes),
            tenancy=m.Tenancy(namespace=namespace, cache_uid=cache_uid),
            model=compile_model(spec.model),
            page_tokens=spec.page_tokens,
            chunk_tokens=spec.chunk_tokens,
            tiers=tuple(_tier(tier, classes[tier.tier_class_name]) for tier in spec.tiers),
            placement=m.Placement(
                policy=spec.placement.policy.value,
                parameters=Parameters(placement_parameters(spec.placement)),
            ),
            selector=None if selector is None else _selector(cache, selector),
            contract=m.Contract(
                exactness=spec.contract.exactness,
                allowed_fallbacks=spec.contract.allowed_fallbacks,
                tolerance=spec.contract.tolerance,
            ),
        )
    except CompileError:
        raise
    except ValueError as error:
        raise CompileError(
            CompileReason.SPEC_INVALID,
            f"KVCache {cache.metadata.name}",
            f"KVCache {cache.metadata.name} does not compile: {_first(error)}",
        ) from error


def compile_model(model: ModelSpec) -> m.Model:
    """The model block; `kvtier_crds.manifest.model_fingerprint` of it is what engines must name."""
    geometry, rope = model.geometry, model.rope
    scaling = rope.scaling
    return m.Model(
        artifact_digest=model.artifact_digest,
        checkpoint=model.checkpoint,
        adapters=tuple(m.Adapter(name=adapter.name, digest=adapter.digest) for adapter in model.adapters),
        geometry=m.Geometry(
            layers=geometry.layers,
            query_heads=geometry.query_heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
        ),
        rope=m.Rope(
            theta=rope.theta,
            scaling=None
            if scaling is None
            else m.RopeScaling(type=scaling.type, parameters=Parameters(scaling.parameters)),
            interleaved=rope.interleaved,
        ),
        position_contract=model.position_contract,
    )


def compile_admission(spec: AdmissionSpec) -> m.Admission:
    """Bounds of transfers as a manifest of the second schema has them. QuantityError names the field."""

    def size(value: int | str | None, name: str) -> int | None:
        return None if value is None else parse_bytes(value, f"spec.admission.{name}")

    return m.Admission(
        pinned_bytes=size(spec.pinned, "pinned"),
        staging_bytes=size(spec.staging, "staging"),
        link_bytes=size(spec.link, "link"),
        queue=spec.queue,
        policy=spec.policy,
    )


def _classes(tiers: tuple[CacheTier, ...], known: Mapping[str, TierClass]) -> dict[str, TierClass]:
    missing = [tier.tier_class_name for tier in tiers if tier.tier_class_name not in known]
    if missing:
        raise CompileError(
            CompileReason.TIER_CLASS_MISSING,
            f"TierClass {missing[0]}",
            f"TierClass {', '.join(missing)} does not exist (spec.tiers)",
        )
    return {tier.tier_class_name: known[tier.tier_class_name] for tier in tiers}


def _device_kind(classes: Mapping[str, TierClass]) -> str:
    kinds = {
        name: found.spec.device_kind or ""
        for name, found in classes.items()
        if found.spec.medium is m.Medium.GPU
    }
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is {kind}" for name, kind in sorted(kinds.items()))
        raise CompileError(
            CompileReason.TIER_INCAPABLE,
            "spec.tiers",
            f"gpu tiers of one cache must be of one device kind, so of one numerics class: {listed}",
        )
    return next(iter(kinds.values()), CPU_DEVICE_KIND)


def _tier(tier: CacheTier, found: TierClass) -> m.Tier:
    capabilities = found.spec.capabilities
    codec = next((codec.name for codec in capabilities.codecs if codec.lossless), None)
    if codec is None:
        raise CompileError(
            CompileReason.TIER_INCAPABLE,
            f"TierClass {tier.tier_class_name}",
            f"TierClass {tier.tier_class_name} has no lossless codec: exact rows cannot be held there",
        )
    return m.Tier(
        tier_class_name=tier.tier_class_name,
        medium=found.spec.medium,
        role=tier.role,
        budget_bytes=parse_bytes(tier.budget, f"spec.tiers[{tier.tier_class_name}].budget"),
        codec=codec,
        checksum=capabilities.checksum,
    )


def _selector(cache: KVCache, selector: KVSelector) -> m.Selector:
    spec = selector.spec
    layers = cache.spec.model.geometry.layers
    outside = [layer for layer in spec.dense_layers if layer >= layers]
    if outside:
        raise CompileError(
            CompileReason.SELECTOR_GEOMETRY,
            f"KVSelector {selector.metadata.name} spec.denseLayers",
            f"KVSelector {selector.metadata.name} spec.denseLayers holds {outside[0]}, but KVCache "
            f"{cache.metadata.name} has layers 0 to {layers - 1}",
        )
    budget = spec.budget
    return m.Selector(
        family=spec.family.value,
        parameters=Parameters(_parameters(cache, selector)),
        budget=m.Budget(
            tokens=budget.tokens,
            bytes=None if budget.bytes is None else parse_bytes(budget.bytes, "spec.budget.bytes"),
            units=budget.units,
            cap_policy=budget.cap_policy,
        ),
        persistent_rows=m.PersistentRows(sink=spec.persistent_rows.sink, recent=spec.persistent_rows.recent),
        dense_layers=spec.dense_layers,
        seed=spec.seed,
        gate=None if spec.gate is None else _gate(spec.gate),
    )


def _parameters(cache: KVCache, selector: KVSelector) -> dict[str, Scalar]:
    """The family's block as scalars, with what it takes over from the cache filled in."""
    block = _scalars(selector.spec.parameters())
    quest = selector.spec.quest
    if quest is None:
        return block
    page = quest.page_tokens or cache.spec.page_tokens
    if cache.spec.chunk_tokens % page:
        raise CompileError(
            CompileReason.SELECTOR_GEOMETRY,
            f"KVSelector {selector.metadata.name} spec.quest.pageTokens",
            f"KVSelector {selector.metadata.name} has boxes of {page} rows, which do not divide chunkTokens "
            f"{cache.spec.chunk_tokens} of KVCache {cache.metadata.name}",
        )
    budget, geometry = selector.spec.budget, cache.spec.model.geometry
    if budget.tokens is not None and budget.tokens < page:
        raise CompileError(
            CompileReason.SELECTOR_GEOMETRY,
            f"KVSelector {selector.metadata.name} spec.budget.tokens",
            f"KVSelector {selector.metadata.name} may read {budget.tokens} rows, less than one box of {page}",
        )
    box_bytes = page * geometry.kv_heads * geometry.head_dim * 2 * _BYTES_OF[geometry.dtype]
    if budget.bytes is not None and parse_bytes(budget.bytes, "spec.budget.bytes") < box_bytes:
        raise CompileError(
            CompileReason.SELECTOR_GEOMETRY,
            f"KVSelector {selector.metadata.name} spec.budget.bytes",
            f"KVSelector {selector.metadata.name} may read {budget.bytes} bytes, less than one box of "
            f"{box_bytes}",
        )
    return block | {"pageTokens": page}


def _scalars(block: Struct) -> dict[str, Scalar]:
    values = block.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: value if isinstance(value, str | int) else str(value) for name, value in values.items()}


def _gate(gate: SelectorGate) -> m.SelectorGate:
    def share(value: int | str | None, field: str) -> str | None:
        return None if value is None else canonical_decimal(parse_fraction(value, field))

    return m.SelectorGate(
        max_estimated_omitted_mass=share(
            gate.max_estimated_omitted_mass, "spec.gate.maxEstimatedOmittedMass"
        ),
        min_confidence=share(gate.min_confidence, "spec.gate.minConfidence"),
        widen_steps=gate.widen_steps,
    )


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
