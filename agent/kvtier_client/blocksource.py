"""What an engine states of its own blocks; all of it, since what is left out finds another's rows.

Why it exists: the agent adds tenant, cache and generations, and holds what the cache declares against these
words. There are no defaults but for what is empty by nature. It must not know tokens or payloads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.v1 import attention_pb2, blocks_pb2
from kvtier_client.session import Geometry

HASH_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockSource:
    """model_artifact_digest: sha256:<hex>. checkpoint: changes with the weights. adapters: (name, content
    digest) in the order in which they apply; () is the model alone. geometry and geometry_dtype: as the cache
    declares them. numerics_version, device_kind: of whoever computed the rows. rope_theta: a decimal;
    rope_scaling: as in the manifest, empty for none. dtype, codec, layout: of the payload. producer: exact,
    or the candidate's digest, for a branch. layers, kv_heads: half-open ranges that one block holds. branch:
    () for committed rows that the tenant shares; else a path, with the request's generation above 0."""

    model_artifact_digest: str
    checkpoint: str
    adapters: tuple[tuple[str, str], ...]
    geometry: Geometry
    geometry_dtype: str
    numerics_version: str
    device_kind: str
    rope_theta: str
    rope_interleaved: bool
    position_contract: str
    visibility_mask: str
    visibility_support: str
    dtype: str
    codec: str
    layout: str
    producer: str
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    block_tokens: int
    rope_scaling: Mapping[str, object] = field(default_factory=dict)
    branch: tuple[str, ...] = ()
    request_generation: int = 0

    def message(self) -> blocks_pb2.BlockSource:
        geometry = self.geometry
        branch = None
        if self.branch:
            branch = blocks_pb2.BlockBranch(path=self.branch, request_generation=self.request_generation)
        return blocks_pb2.BlockSource(
            model_artifact_digest=self.model_artifact_digest,
            checkpoint=self.checkpoint,
            adapters=blocks_pb2.AdapterSet(
                adapters=[blocks_pb2.AdapterRef(name=name, digest=digest) for name, digest in self.adapters]
            ),
            geometry=attention_pb2.Geometry(
                layers=geometry.layers,
                query_heads=geometry.query_heads,
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                dtype=self.geometry_dtype,
            ),
            numerics_version=self.numerics_version,
            device_kind=self.device_kind,
            rope=blocks_pb2.RopeConfig(
                theta=self.rope_theta,
                interleaved=self.rope_interleaved,
                scaling=json.dumps(dict(self.rope_scaling)) if self.rope_scaling else "",
            ),
            position_contract=self.position_contract,
            visibility_mask=self.visibility_mask,
            visibility_support=self.visibility_support,
            dtype=self.dtype,
            codec=self.codec,
            layout=self.layout,
            producer=self.producer,
            first_layer=self.layers[0],
            end_layer=self.layers[1],
            first_kv_head=self.kv_heads[0],
            end_kv_head=self.kv_heads[1],
            block_tokens=self.block_tokens,
            hash_version=HASH_VERSION,
            branch=branch,
        )
