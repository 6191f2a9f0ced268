"""What a client says of its own rows, held against what the cache declares, becomes a block source.

Why it exists: an integration that drops one field of a request's identity (an adapter, a tenant, a layout)
finds another's rows, and nobody notices. So a client states every field, what the cache declares as well must
be equal, and what it cannot state is a refusal, never a default. It must not know the wire, keys or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from kvtier_core.blockkey import HASH_VERSION, BlockSource, incomplete
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import (
    SourceBinding,
    adapter_set,
    cache_abi,
    layout_manifest,
    position_contract,
    rope_config,
    tenancy_name,
    visibility_policy,
)
from kvtier_core.receiptcheck.binding import check_binding
from kvtier_crds.manifest import Geometry, Model, Rope, RuntimeManifest


@dataclass(frozen=True, slots=True)
class StatedSource:
    """A client's words; None is what it did not say. adapters: (name, content digest) in the order in which
    they apply, () is the model alone. numerics_version, device_kind: of whoever computed the rows. layers,
    kv_heads: half-open ranges. branch: () for committed rows; request_generation then stays 0."""

    model_artifact_digest: str | None
    checkpoint: str | None
    adapters: tuple[tuple[str, str], ...] | None
    geometry: Geometry | None
    numerics_version: str | None
    device_kind: str | None
    rope: Rope | None
    position_contract: str | None
    visibility_mask: str | None
    visibility_support: str | None
    dtype: str | None
    codec: str | None
    layout: str | None
    producer: str | None
    layers: tuple[int, int] | None
    kv_heads: tuple[int, int] | None
    block_tokens: int | None
    hash_version: int | None = HASH_VERSION
    branch: tuple[str, ...] = ()
    request_generation: int = 0


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What a client cannot say, since it is the agent's: whose blocks they are, and of which generations."""

    tenant: str
    namespace_generation: int
    cache_generation: int
    publication_generation: int


def block_source(stated: StatedSource, manifest: RuntimeManifest, facts: AgentFacts) -> BlockSource:
    """The source of a client's blocks in one cache.

    Guards in order: every field stated, IDENTITY_INCOMPLETE naming it (a request without a tenant included:
    its namespace cannot be carried); GEOMETRY_MISMATCH naming the field; layer and head ranges inside the
    model, BAD_ARGUMENT; then what the cache declares too, by `check_binding`: VISIBILITY_POLICY_MISMATCH,
    MODEL_MISMATCH (artifact, checkpoint), ADAPTER_MISMATCH (each must be one of the cache's, by name and
    content), POSITION_CONTRACT_MISMATCH, ROPE_MISMATCH. Numerics, device kind, layout, codec and dtype are
    the client's own and only sealed.
    """
    if not facts.tenant:
        raise incomplete("tenant")
    for field in fields(stated):
        if getattr(stated, field.name) in (None, "") or (
            field.name in ("block_tokens", "hash_version") and not getattr(stated, field.name)
        ):
            raise incomplete(field.name)
    geometry, layers, kv_heads = _said(stated.geometry), _said(stated.layers), _said(stated.kv_heads)
    _check_shapes(geometry, layers, kv_heads, manifest.model.geometry)
    binding = _binding(stated, manifest, facts)
    check_binding(_declared(binding, stated, manifest.model), binding)
    return BlockSource(
        binding=binding,
        dtype=_said(stated.dtype),
        codec=_said(stated.codec),
        layout=_said(stated.layout),
        producer=_said(stated.producer),
        layers=layers,
        kv_heads=kv_heads,
        block_tokens=_said(stated.block_tokens),
        branch=stated.branch,
        hash_version=_said(stated.hash_version),
    )


T = TypeVar("T")


def _said(value: T | None) -> T:
    assert value is not None
    return value


def _binding(stated: StatedSource, manifest: RuntimeManifest, facts: AgentFacts) -> SourceBinding:
    return SourceBinding(
        logical_cache_abi_sha256=cache_abi(
            numerics=_said(stated.numerics_version),
            device_kind=_said(stated.device_kind),
            geometry=_said(stated.geometry),
        ),
        cache_layout_manifest_sha256=layout_manifest(_said(stated.layout), _said(stated.block_tokens)),
        visibility_policy_manifest_sha256=visibility_policy(
            _said(stated.visibility_mask), _said(stated.visibility_support)
        ),
        model_artifact_sha256=_said(stated.model_artifact_digest),
        checkpoint_generation=_said(stated.checkpoint),
        adapter_set_sha256=adapter_set(_said(stated.adapters)),
        position_contract_sha256=position_contract(_said(stated.position_contract)),
        rope_config_sha256=rope_config(_said(stated.rope)),
        tenant_namespace=tenancy_name(
            manifest.tenancy.namespace, manifest.tenancy.cache_uid, facts.tenant, ""
        ),
        namespace_generation=facts.namespace_generation,
        request_generation=stated.request_generation,
        cache_generation=facts.cache_generation,
        publication_generation=facts.publication_generation,
        committed_frontier=0,
    )


def _declared(binding: SourceBinding, stated: StatedSource, model: Model) -> SourceBinding:
    """The same binding with what the cache declares. Of its adapters a request may use any, in any order."""
    declared = {(adapter.name, adapter.digest) for adapter in model.adapters}
    used = tuple(adapter for adapter in _said(stated.adapters) if adapter in declared)
    return replace(
        binding,
        visibility_policy_manifest_sha256=visibility_policy(),
        model_artifact_sha256=model.artifact_digest,
        checkpoint_generation=model.checkpoint,
        adapter_set_sha256=adapter_set(used),
        position_contract_sha256=position_contract(model.position_contract.value),
        rope_config_sha256=rope_config(model.rope),
    )


def _check_shapes(
    geometry: Geometry, layers: tuple[int, int], kv_heads: tuple[int, int], declared: Geometry
) -> None:
    theirs, ours = geometry.model_dump(mode="json"), declared.model_dump(mode="json")
    for name, value in ours.items():
        if theirs[name] != value:
            raise CoreError(
                Reason.GEOMETRY_MISMATCH,
                f"geometry.{name} {theirs[name]!r} is not this cache's {value!r}",
                {"field": f"geometry.{name}"},
            )
    for name, (low, high), bound in (
        ("layers", layers, declared.layers),
        ("kv_heads", kv_heads, declared.kv_heads),
    ):
        if not 0 <= low < high <= bound:
            raise CoreError(Reason.BAD_ARGUMENT, f"{name} [{low}, {high}) is not inside [0, {bound})")
