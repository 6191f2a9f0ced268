"""Who a row is: typed digests that never depend on where the row lies.

Why it exists: equal shape is not equal identity. Legality of a read is decided by what produced the row
(model, adapters, position contract, tenant, generations), and a copy keeps its name when it moves. It must
not know tiers, slots or devices. Encoding and fields: specification A.4 and A.5.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtier_core.layout import LAYOUT_ID
from kvtier_crds.canonical import canonical_json
from kvtier_crds.manifest import Geometry, Rope, RuntimeManifest

Field = str | int | bytes | Sequence[int] | NDArray[np.int64]


def digest(domain: str, fields: Sequence[tuple[str, Field]]) -> bytes:
    """SHA-256 over typed fields (specification A.4): no two lists of fields share an encoding.

    `"M55/1" | len16 domain | domain | n16 | per field: len16 name | name | type | len32 payload | payload`,
    types S utf-8, I int64, B bytes, L int64s; integers big-endian.
    """
    hasher = hashlib.sha256(encode_domain(domain, len(fields)))
    for name, value in fields:
        kind, payload = _encode(value)
        hasher.update(encode_header(name, kind, len(payload)))
        hasher.update(payload)
    return hasher.digest()


def encode_domain(domain: str, fields: int) -> bytes:
    """What stands before the fields: with `encode_header`, `digest` for those who lay out many at once."""
    encoded = domain.encode()
    return b"M55/1" + struct.pack(">H", len(encoded)) + encoded + struct.pack(">H", fields)


def encode_header(name: str, kind: bytes, length: int) -> bytes:
    """What stands before a field's payload of `length` bytes."""
    encoded = name.encode()
    return struct.pack(">H", len(encoded)) + encoded + kind + struct.pack(">I", length)


def _encode(value: Field) -> tuple[bytes, bytes]:
    if isinstance(value, bool):
        raise TypeError("a digest field is text, an int64, bytes or int64s; not a boolean")
    if isinstance(value, str):
        return b"S", value.encode()
    if isinstance(value, int):
        return b"I", struct.pack(">q", value)
    if isinstance(value, bytes):
        return b"B", value
    return b"L", np.asarray(value, dtype=">i8").tobytes()


@dataclass(frozen=True, slots=True)
class SourceBinding:
    """What a session's rows come from (specification A.5, 14 fields). Derived state stores its digest."""

    logical_cache_abi_sha256: bytes
    cache_layout_manifest_sha256: bytes
    visibility_policy_manifest_sha256: bytes
    model_artifact_sha256: str
    checkpoint_generation: str
    adapter_set_sha256: bytes
    position_contract_sha256: bytes
    rope_config_sha256: bytes
    tenant_namespace: str
    namespace_generation: int
    request_generation: int
    cache_generation: int
    publication_generation: int
    committed_frontier: int

    def at(self, frontier: int) -> SourceBinding:
        """The same source with another committed frontier."""
        return replace(self, committed_frontier=frontier)

    def digest(self) -> bytes:
        return digest("source", [(name, getattr(self, name)) for name in self.__slots__])


def tenancy_name(*parts: str) -> str:
    """One name for a path of names, such that no two paths share one, whatever their characters."""
    return "".join(f"{len(part)}:{part}" for part in parts)


def cache_abi(*, numerics: str, device_kind: str, geometry: Geometry) -> bytes:
    """What two caches must share for the bits of a row to mean the same."""
    return digest(
        "cache_abi",
        [
            ("numerics", numerics),
            ("device_kind", device_kind),
            ("layers", geometry.layers),
            ("query_heads", geometry.query_heads),
            ("kv_heads", geometry.kv_heads),
            ("head_dim", geometry.head_dim),
            ("dtype", geometry.dtype.value),
        ],
    )


def layout_manifest(layout: str, block_tokens: int) -> bytes:
    return digest("layout", [("layout", layout), ("chunk_tokens", block_tokens)])


def visibility_policy(mask: str = "causal", support: str = "all") -> bytes:
    return digest("visibility", [("mask", mask), ("support", support)])


def adapter_set(adapters: Sequence[tuple[str, str]]) -> bytes:
    """Over (name, digest of the content) in the order in which they apply; none is the model alone."""
    return digest("adapters", adapters)


def position_contract(contract: str) -> bytes:
    return digest("position_contract", [("contract", contract)])


def rope_config(rope: Rope) -> bytes:
    return digest("rope", [("config", canonical_json(rope))])


def source_binding(
    manifest: RuntimeManifest, *, tenant: str, session_id: str, request_generation: int, cache_generation: int
) -> SourceBinding:
    """Binds one session of a cache to everything that shaped its rows; frontier 0."""
    model = manifest.model
    return SourceBinding(
        logical_cache_abi_sha256=cache_abi(
            numerics=manifest.numerics_version, device_kind=manifest.device_kind, geometry=model.geometry
        ),
        cache_layout_manifest_sha256=layout_manifest(LAYOUT_ID, manifest.chunk_tokens),
        visibility_policy_manifest_sha256=visibility_policy(),
        model_artifact_sha256=model.artifact_digest,
        checkpoint_generation=model.checkpoint,
        adapter_set_sha256=adapter_set([(adapter.name, adapter.digest) for adapter in model.adapters]),
        position_contract_sha256=position_contract(model.position_contract.value),
        rope_config_sha256=rope_config(model.rope),
        tenant_namespace=tenancy_name(
            manifest.tenancy.namespace, manifest.tenancy.cache_uid, tenant, session_id
        ),
        namespace_generation=0,
        request_generation=request_generation,
        cache_generation=cache_generation,
        publication_generation=request_generation,
        committed_frontier=0,
    )


def row_digest(
    *,
    model: str,
    adapter: str | bytes,
    cache_abi: str | bytes,
    layer: int,
    kv_head: int,
    position: int,
    position_contract: str | bytes,
    cache_generation: int,
    publication_generation: int,
    tenant: str,
) -> bytes:
    """Semantic identity of one K/V row (A.4). Excludes pointer, tier, allocation, query head and codec."""
    return digest(
        "row",
        [
            ("model", model),
            ("adapter", adapter),
            ("cache_abi", cache_abi),
            ("layer", layer),
            ("kv_head", kv_head),
            ("position", position),
            ("position_contract", position_contract),
            ("cache_generation", cache_generation),
            ("publication_generation", publication_generation),
            ("tenant", tenant),
        ],
    )


def source_row(source: SourceBinding, layer: int, kv_head: int, position: int) -> bytes:
    """Semantic identity of one row of a source."""
    return row_digest(
        model=source.model_artifact_sha256 + "@" + source.checkpoint_generation,
        adapter=source.adapter_set_sha256,
        cache_abi=source.logical_cache_abi_sha256,
        layer=layer,
        kv_head=kv_head,
        position=position,
        position_contract=source.position_contract_sha256,
        cache_generation=source.cache_generation,
        publication_generation=source.publication_generation,
        tenant=source.tenant_namespace,
    )


def chunk_digest(source: SourceBinding, layer: int, kv_heads: int, first: int, last: int) -> bytes:
    """Semantic identity of rows [first, last) of one layer, all KV heads (A.4)."""
    return digest(
        "chunk",
        [
            ("model", source.model_artifact_sha256 + "@" + source.checkpoint_generation),
            ("adapter", source.adapter_set_sha256),
            ("cache_abi", source.logical_cache_abi_sha256),
            ("layers", (layer, layer + 1)),
            ("kv_heads", (0, kv_heads)),
            ("positions", (first, last)),
            ("position_contract", source.position_contract_sha256),
            ("cache_generation", source.cache_generation),
            ("publication_generation", source.publication_generation),
            ("tenant", source.tenant_namespace),
        ],
    )


def replica_digest(
    chunk: bytes,
    *,
    tier: str,
    allocation_generation: int,
    replica_generation: int,
    authority_epoch: int,
    codec: str,
    layout: str,
    payload: bytes,
) -> bytes:
    """Identity of one physical copy (A.4): changes with every move, re-encoding or change of authority."""
    return digest(
        "replica",
        [
            ("chunk", chunk),
            ("tier", tier),
            ("allocation_generation", allocation_generation),
            ("replica_generation", replica_generation),
            ("authority_epoch", authority_epoch),
            ("codec", codec),
            ("layout", layout),
            ("payload_sha256", payload),
        ],
    )


@lru_cache(maxsize=1024)
def full_support_digest(frontier: int) -> str:
    """Support digest of all rows [0, frontier), the same for every KV head: `sha256:<hex>`."""
    positions = np.arange(frontier, dtype=np.int64)
    return "sha256:" + digest("support", [("scope", "all"), ("positions", positions)]).hex()


def edited_support_digest(segments: Sequence[tuple[int, int, int]]) -> str:
    """Support digest of all rows of an edited view: (first row, behind the last, position of the first) of
    each of its segments, ascending."""
    numbers = [number for segment in segments for number in segment]
    return "sha256:" + digest("support", [("scope", "view"), ("segments", numbers)]).hex()


def selected_support_digest(frontier: int, per_head: Sequence[NDArray[np.int64]]) -> str:
    """Support digest of sorted original positions per KV head; complete supports hash as the full one."""
    if all(len(positions) == frontier for positions in per_head):
        return full_support_digest(frontier)
    fields: list[tuple[str, Field]] = [("scope", "kv_head")]
    fields += [(f"head{head}", positions) for head, positions in enumerate(per_head)]
    return "sha256:" + digest("support", fields).hex()
