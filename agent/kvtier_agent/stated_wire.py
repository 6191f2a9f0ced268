"""A block's source on the wire to what the client stated: absent stays absent, nothing is filled in.

Why it exists: a default in a message looks like a statement, and an identity built on one finds another's
rows. It must not judge what was stated; the core does.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from kvtier.v1 import blocks_pb2
from kvtier_core.errors import CoreError, Reason
from kvtier_core.stated import StatedSource
from kvtier_crds.manifest import Geometry, Rope, RopeScaling


def stated_source(message: blocks_pb2.BlockSource) -> StatedSource:
    """BAD_ARGUMENT for a geometry or RoPE that is not well-formed. `block_source` refuses the rest."""
    return StatedSource(
        model_artifact_digest=message.model_artifact_digest or None,
        checkpoint=message.checkpoint or None,
        adapters=_adapters(message),
        geometry=_geometry(message),
        numerics_version=message.numerics_version or None,
        device_kind=message.device_kind or None,
        rope=_rope(message),
        position_contract=message.position_contract or None,
        visibility_mask=message.visibility_mask or None,
        visibility_support=message.visibility_support or None,
        dtype=message.dtype or None,
        codec=message.codec or None,
        layout=message.layout or None,
        producer=message.producer or None,
        layers=_range(message, "first_layer", "end_layer"),
        kv_heads=_range(message, "first_kv_head", "end_kv_head"),
        block_tokens=message.block_tokens or None,
        hash_version=message.hash_version or None,
        branch=tuple(message.branch.path),
        request_generation=message.branch.request_generation,
    )


def _adapters(message: blocks_pb2.BlockSource) -> tuple[tuple[str, str], ...] | None:
    if not message.HasField("adapters"):
        return None
    return tuple((adapter.name, adapter.digest) for adapter in message.adapters.adapters)


def _geometry(message: blocks_pb2.BlockSource) -> Geometry | None:
    if not message.HasField("geometry"):
        return None
    said = message.geometry
    try:
        return Geometry.model_validate(
            {
                "layers": said.layers,
                "query_heads": said.query_heads,
                "kv_heads": said.kv_heads,
                "head_dim": said.head_dim,
                "dtype": said.dtype,
            }
        )
    except ValidationError as error:
        raise _malformed("geometry", error) from None


def _rope(message: blocks_pb2.BlockSource) -> Rope | None:
    """None unless theta and interleaving are both stated; scaling is none when it is empty."""
    said = message.rope
    if not message.HasField("rope") or not said.theta or not said.HasField("interleaved"):
        return None
    try:
        scaling = RopeScaling.model_validate_json(said.scaling) if said.scaling else None
        return Rope(theta=said.theta, scaling=scaling, interleaved=said.interleaved)
    except ValidationError as error:
        raise _malformed("rope", error) from None


def _range(message: blocks_pb2.BlockSource, first: str, end: str) -> tuple[int, int] | None:
    if not (message.HasField(first) and message.HasField(end)):
        return None
    return int(getattr(message, first)), int(getattr(message, end))


def _malformed(field: str, error: ValidationError) -> CoreError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join([field, *(str(part) for part in first["loc"])])
    # The models name their fields as manifests do; the client knows the wire's names.
    where = re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), path)
    return CoreError(Reason.BAD_ARGUMENT, f"{where}: {first['msg']}", {"field": where})
