"""What an engine sends with a frame besides rows and queries, and a layer's weights on their way to an agent.

It exists so that both wires carry the same numbers. It must not know a model, nor what a selector does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier.v1 import attention_pb2
from kvtier.weights import PART_BYTES, WeightsShape
from kvtier_core.rowevidence import Need

# What an agent takes with one frame; those of a longer prompt come with the next frames.
MAX_SURPRISALS = 1 << 17
_KINDS = {
    Need.PREFILL_QUERIES: attention_pb2.PREFILL_QUERIES,
    Need.PREVIOUS_HIDDEN_STATE: attention_pb2.PREVIOUS_HIDDEN_STATE,
    Need.WEIGHTS: attention_pb2.WEIGHTS,
    Need.SURPRISAL: attention_pb2.SURPRISAL,
}
_NEEDS = {kind: need for need, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """hidden: float32 [N, hidden_size], the input of `hidden_layer` at the frame's queries. surprisal:
    float64 [n], -ln P(token | those before), of rows from surprisal_first on; once, with whatever layer."""

    hidden: Tensor | None = None
    hidden_layer: int = 0
    surprisal: NDArray[np.float64] | None = None
    surprisal_first: int = 0

    @property
    def states(self) -> int:
        return 0 if self.hidden is None else int(self.hidden.shape[0])

    @property
    def surprisals(self) -> int:
        return 0 if self.surprisal is None else len(self.surprisal)

    @property
    def hidden_bytes(self) -> int:
        return 0 if self.hidden is None else 4 * self.hidden.numel()

    def message(self) -> attention_pb2.FrameEvidence:
        """As gRPC carries it."""
        made = attention_pb2.FrameEvidence(
            hidden_layer=self.hidden_layer, surprisal_first=self.surprisal_first
        )
        if self.hidden is not None:
            made.hidden = self.hidden.contiguous().numpy().tobytes()
        if self.surprisal is not None:
            made.surprisal = np.ascontiguousarray(self.surprisal, dtype="<f8").tobytes()
        return made


@dataclass(frozen=True, slots=True)
class LayerGiven:
    """A layer's weights. read: their bytes as they travel: query, bias, norm_weight and inv_freq, see
    `WeightsShape`."""

    layer: int
    shape: WeightsShape
    digest: str
    read: Callable[[], bytes]

    def header(
        self, opened: attention_pb2.OpenSessionResponse, tenant: str, fingerprint: str, size: int
    ) -> attention_pb2.LayerWeightsHeader:
        """size: of the bytes that follow; 0: only asks for them."""
        return attention_pb2.LayerWeightsHeader(
            session_id=opened.session_id,
            generation=opened.generation,
            boot_id=opened.boot_id,
            tenant=tenant,
            model_fingerprint=fingerprint,
            layer=self.layer,
            has_bias=self.shape.has_bias,
            norm_eps=self.shape.norm_eps,
            frequencies=self.shape.frequencies,
            interleaved=self.shape.interleaved,
            digest=self.digest,
            size_bytes=size,
        )


def weight_parts(
    layers: Sequence[LayerGiven],
    opened: attention_pb2.OpenSessionResponse,
    tenant: str,
    fingerprint: str,
    *,
    with_data: bool,
) -> Iterator[attention_pb2.GiveWeightsRequest]:
    """What a GiveWeights call sends; without data it asks which layers the agent holds."""
    for one in layers:
        data = one.read() if with_data else b""
        yield attention_pb2.GiveWeightsRequest(header=one.header(opened, tenant, fingerprint, len(data)))
        for at in range(0, len(data), PART_BYTES):
            yield attention_pb2.GiveWeightsRequest(data=data[at : at + PART_BYTES])


def kinds_of(needs: frozenset[Need], fixed_context: bool) -> list[attention_pb2.EvidenceKind]:
    """What OpenSession states of an engine that gives these."""
    kinds = sorted(_KINDS[need] for need in needs if need in _KINDS)
    return [*kinds, attention_pb2.FIXED_CONTEXT] if fixed_context else kinds


def needs_of(wanted: attention_pb2.EvidenceWanted) -> frozenset[Need]:
    """What OpenSession answered; kinds that this version does not know are left out."""
    return frozenset(_NEEDS[kind] for kind in wanted.kinds if kind in _NEEDS)
