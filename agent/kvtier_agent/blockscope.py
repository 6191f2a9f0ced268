"""Whose blocks a call means, and which: the wire's scope and span, checked in one order for every call.

Why it exists: identity is decided here, once, before anything is looked up. What a client cannot state is a
refusal that names the field, and blocks that are named by keys are looked up inside the caller's own
namespace only. It must not know stores or threads; it computes no key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.v1 import blocks_pb2
from kvtier_agent.stated_wire import stated_source
from kvtier_core.blockkey import BlockSource, chain_keys, incomplete, namespace_digest, tenancy_digest
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import tenancy_name
from kvtier_core.layout import CODEC_IDENTITY
from kvtier_core.stated import AgentFacts, block_source
from kvtier_crds.manifest import RuntimeManifest

MAX_TOKENS = 524_288
MAX_BLOCKS = 8192
MAX_TENANT = 253
KEY_BYTES = 32
# Of tenancies and publications nothing is re-created in the life of a cache's uid yet.
NAMESPACE_GENERATION = 0
PUBLICATION_GENERATION = 0
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, of which cache. source: None where the call may go without one and does."""

    tenant: str
    namespace: bytes
    source: BlockSource | None


def caller_of(
    scope: blocks_pb2.BlockScope,
    manifest: RuntimeManifest,
    cache_generation: int,
    *,
    source_needed: bool = True,
) -> Caller:
    """Guards in order: tenant, cache generation, then the source field by field. IDENTITY_INCOMPLETE,
    BAD_ARGUMENT, STALE_CACHE_GENERATION, and what `block_source` refuses."""
    tenant = scope.tenant
    if not tenant:
        raise incomplete("tenant")
    if len(tenant) > MAX_TENANT:
        raise CoreError(Reason.BAD_ARGUMENT, f"tenant must have 1 to {MAX_TENANT} characters")
    if scope.HasField("cache_generation") and scope.cache_generation != cache_generation:
        raise CoreError(
            Reason.STALE_CACHE_GENERATION,
            f"cache_generation {scope.cache_generation} is not {cache_generation}",
            {"cache_generation": cache_generation},
        )
    if not scope.HasField("source"):
        if source_needed:
            raise incomplete("source")
        name = tenancy_name(manifest.tenancy.namespace, manifest.tenancy.cache_uid, tenant, "")
        return Caller(tenant, tenancy_digest(name, NAMESPACE_GENERATION), None)
    facts = AgentFacts(tenant, NAMESPACE_GENERATION, cache_generation, PUBLICATION_GENERATION)
    source = block_source(stated_source(scope.source), manifest, facts)
    return Caller(tenant, namespace_digest(source), source)


@dataclass(frozen=True, slots=True)
class Span:
    """Which blocks. tokens: uint32 [t], None when keys uint8 [n, 32] name them."""

    first_block: int
    parent: bytes | None
    tokens: NDArray[np.uint32] | None
    content: tuple[bytes, ...] | None
    named: NDArray[np.uint8] | None

    def keys(self, source: BlockSource | None) -> NDArray[np.uint8]:
        """uint8 [n, 32]. Hashes: for a thread. IDENTITY_INCOMPLETE when tokens come without a source."""
        if self.named is not None:
            return self.named
        if source is None:
            raise incomplete("source")
        assert self.tokens is not None
        count = len(self.tokens) // source.block_tokens
        if count > MAX_BLOCKS:
            raise CoreError(Reason.BAD_ARGUMENT, f"{count} blocks are asked for, at most {MAX_BLOCKS} may be")
        return chain_keys(
            source, self.tokens, content=self.content, parent=self.parent, first_block=self.first_block
        )


def span_of(span: blocks_pb2.BlockSpan, *, tokens_needed: bool = False) -> Span:
    """BAD_ARGUMENT, naming the field. tokens_needed: a key that a client made up names nothing, so what is
    stored is named by its tokens (IDENTITY_INCOMPLETE)."""
    if span.keys:
        if tokens_needed:
            raise incomplete("tokens")
        if span.tokens or span.content or span.parent_key or span.first_block:
            raise CoreError(Reason.BAD_ARGUMENT, "span: keys stand alone, without tokens, content or parent")
        return Span(0, None, None, None, _named(span.keys))
    if len(span.tokens) % 4 or len(span.tokens) > 4 * MAX_TOKENS:
        raise CoreError(
            Reason.BAD_ARGUMENT,
            f"span.tokens has {len(span.tokens)} bytes; legal: at most {MAX_TOKENS} times 4",
        )
    if not span.tokens:
        raise incomplete("tokens")
    return Span(
        span.first_block,
        span.parent_key or None,
        np.frombuffer(span.tokens, dtype="<u4").astype(np.uint32, copy=False),
        tuple(span.content) if span.content else None,
        None,
    )


def _named(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    if len(keys) > MAX_BLOCKS:
        raise CoreError(
            Reason.BAD_ARGUMENT, f"span.keys names {len(keys)} blocks, at most {MAX_BLOCKS} may be"
        )
    if any(len(key) != KEY_BYTES for key in keys):
        raise CoreError(Reason.BAD_ARGUMENT, f"span.keys: a key has {KEY_BYTES} bytes")
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), KEY_BYTES)


def check_cost(seconds: float) -> None:
    """BAD_ARGUMENT for what eviction cannot order blocks by."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise CoreError(Reason.BAD_ARGUMENT, f"recompute_seconds {seconds} must be finite and from 0")


def check_payload(source: BlockSource, stated: int, stored: int, head_dim: int) -> None:
    """PAYLOAD_GEOMETRY: stated bytes of a payload against what the source's ranges give, where its codec and
    dtype say so, and against what this cache stores."""
    item = _ITEM_BYTES.get(source.dtype)
    if source.codec == CODEC_IDENTITY and item is not None:
        layers = source.layers[1] - source.layers[0]
        heads = source.kv_heads[1] - source.kv_heads[0]
        # K and V.
        given = 2 * layers * heads * source.block_tokens * head_dim * item
        if stated != given:
            raise CoreError(
                Reason.PAYLOAD_GEOMETRY,
                f"block_bytes {stated} is not the {given} that layers, heads, tokens and dtype give",
                {"block_bytes": given},
            )
    if stated != stored:
        raise CoreError(
            Reason.PAYLOAD_GEOMETRY,
            f"block_bytes {stated} is not this cache's {stored}",
            {"block_bytes": stored},
        )
