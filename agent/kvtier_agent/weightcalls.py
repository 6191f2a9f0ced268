"""GiveWeights: a layer's header, then its bytes, checked and bound to the session that asks for them.

Why it exists: what an engine says of a model's weights is believed only after its digest was computed anew
under the model that this agent serves. It decides nothing about what selectors do with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

from kvtier.v1 import attention_pb2
from kvtier.weights import PART_BYTES, WeightsShape
from kvtier_agent.cachesession import Session
from kvtier_agent.node import Node
from kvtier_agent.rowevidence import EvidenceAsked
from kvtier_agent.weightstore import GivenWeights, check_shape, checked_weights
from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import Need


@dataclass(slots=True)
class _Arriving:
    session: Session
    layer: int
    shape: WeightsShape
    digest: str
    data: bytearray


class WeightCalls:
    """One agent's."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def give(
        self, parts: AsyncIterator[attention_pb2.GiveWeightsRequest]
    ) -> attention_pb2.GiveWeightsResponse:
        """Layers that were complete stay bound when a later one is refused. BAD_ARGUMENT: parts out of order;
        SESSION_UNKNOWN, GENERATION_STALE, TENANT_MISMATCH, BOOT_ID_MISMATCH; MODEL_MISMATCH: of another
        model, or others than open sessions of the tenant use; UNSUPPORTED: not asked for; PAYLOAD_GEOMETRY,
        SELECTOR_GEOMETRY, CHECKSUM_MISMATCH, NO_DESTINATION_CAPACITY."""
        answer = attention_pb2.GiveWeightsResponse()
        arriving: _Arriving | None = None
        with ExitStack() as room:
            async for part in parts:
                arriving = await self._take(part, arriving, answer, room)
        _check_complete(arriving)
        return answer

    async def _take(
        self,
        part: attention_pb2.GiveWeightsRequest,
        arriving: _Arriving | None,
        answer: attention_pb2.GiveWeightsResponse,
        room: ExitStack,
    ) -> _Arriving | None:
        """The layer that is still on its way. room: taken for it, until it is kept or the call ends."""
        if part.WhichOneof("part") == "header":
            _check_complete(arriving)
            arriving = self._begin(part.header, answer)
            if arriving is not None:
                store = arriving.session.host.weights
                room.enter_context(store.arriving(arriving.shape.size_bytes))
            return arriving
        if arriving is None:
            raise CoreError(Reason.BAD_ARGUMENT, "bytes of weights without a layer's header before them")
        due = arriving.shape.size_bytes - len(arriving.data)
        if not 0 < len(part.data) <= min(due, PART_BYTES):
            raise CoreError(
                Reason.BAD_ARGUMENT,
                f"{len(part.data)} bytes of layer {arriving.layer}; legal: 1 to {min(due, PART_BYTES)}",
            )
        arriving.data += part.data
        if len(part.data) < due:
            return arriving
        await self._complete(arriving)
        room.close()
        answer.bound.append(arriving.layer)
        return None

    def _begin(
        self, header: attention_pb2.LayerWeightsHeader, answer: attention_pb2.GiveWeightsResponse
    ) -> _Arriving | None:
        """What the bytes that follow belong to; None when none do."""
        self._node.check_boot(header.boot_id)
        session = self._node.session(header.session_id, header.generation, header.tenant)
        host, asked = session.host, session.handle.asked
        if header.model_fingerprint != host.fingerprint:
            raise CoreError(
                Reason.MODEL_MISMATCH,
                f"weights of model {header.model_fingerprint[:80]!r}; this cache's is {host.fingerprint}",
            )
        if asked is None or Need.WEIGHTS not in asked.needs or header.layer not in asked.layers:
            raise CoreError(Reason.UNSUPPORTED, f"weights of layer {header.layer} were not asked for")
        shape = _shape_of(header, session, asked)
        found = host.weights.held(session.tenant, header.layer, header.digest)
        if not header.size_bytes:
            if found is None:
                answer.missing.append(header.layer)
            elif found.shape != shape:
                raise CoreError(
                    Reason.CHECKSUM_MISMATCH,
                    f"the weights of layer {header.layer} that {header.digest[:19]} names have another shape",
                    {"layer": header.layer},
                )
            else:
                _bind(session, header.layer, found)
                answer.bound.append(header.layer)
            return None
        if header.size_bytes != shape.size_bytes:
            raise CoreError(
                Reason.PAYLOAD_GEOMETRY,
                f"size_bytes {header.size_bytes} of layer {header.layer}; its shape gives {shape.size_bytes}",
                {"size_bytes": shape.size_bytes},
            )
        return _Arriving(session, header.layer, shape, header.digest, bytearray())

    async def _complete(self, arriving: _Arriving) -> None:
        session, layer = arriving.session, arriving.layer
        weights = await asyncio.to_thread(
            checked_weights,
            arriving.shape,
            arriving.digest,
            arriving.data,
            session.host.fingerprint,
            layer,
        )
        _bind(session, layer, session.host.weights.put(session.tenant, layer, weights))


def _shape_of(
    header: attention_pb2.LayerWeightsHeader, session: Session, asked: EvidenceAsked
) -> WeightsShape:
    geometry = session.host.manifest.model.geometry
    shape = WeightsShape(
        hidden_size=asked.hidden_size,
        queries=geometry.query_heads * geometry.head_dim,
        has_bias=header.has_bias,
        norm_eps=header.norm_eps,
        frequencies=header.frequencies,
        interleaved=header.interleaved,
    )
    check_shape(shape, geometry.head_dim)
    return shape


def _bind(session: Session, layer: int, weights: GivenWeights) -> None:
    handle, host = session.handle, session.host
    host.runner.engine.bind_weights(handle.session_id, handle.generation, layer, weights)
    host.weights.used(session.tenant, layer, handle.session_id)


def _check_complete(arriving: _Arriving | None) -> None:
    if arriving is not None:
        raise CoreError(
            Reason.BAD_ARGUMENT,
            f"layer {arriving.layer} has {len(arriving.data)} of {arriving.shape.size_bytes} bytes",
        )
