"""What the engines of one cache's sessions give beside rows, made into what the core takes with a frame.

Why it exists: weights come once and belong to every later frame of their layer, and a frame's queries are
evidence only for sessions whose selector learns from them. It knows no message and no index. Calls come from
the engine's threads and, for weights, from the event loop.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvtier_agent.rowevidence import EngineGives, EvidenceAsked, RowEvidence
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import StepRequest
from kvtier_core.rowevidence import Evidence, LayerWeights, Need
from kvtier_core.selectors.wanted import Wanted


@dataclass(slots=True)
class _Session:
    asked: EvidenceAsked
    weights: dict[int, LayerWeights] = field(default_factory=dict)


def asked_of(wanted: Wanted, gives: EngineGives) -> EvidenceAsked | None:
    """What a session under this selector asks of its engine; None: nothing."""
    if not wanted.needs and not wanted.fixed:
        return None
    return EvidenceAsked(wanted.needs, frozenset(wanted.layers), gives.hidden_size, wanted.fixed)


class SessionsEvidence:
    """Of the open sessions that ask for any."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()

    def opened(self, session_id: str, asked: EvidenceAsked | None) -> None:
        if asked is not None:
            with self._lock:
                self._sessions[session_id] = _Session(asked)

    def closed(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(session_id, None)

    def forked(self, parent: str, child: str) -> EvidenceAsked | None:
        """The child has what its parent has."""
        with self._lock:
            own = self._sessions.get(parent)
            if own is None:
                return None
            self._sessions[child] = _Session(own.asked, dict(own.weights))
            return own.asked

    def bind(self, session_id: str, layer: int, weights: LayerWeights) -> None:
        """SESSION_UNKNOWN: no session of that name asks for any."""
        with self._lock:
            own = self._sessions.get(session_id)
            if own is None:
                raise CoreError(Reason.SESSION_UNKNOWN, "no open session asks for weights under this name")
            own.weights[layer] = weights

    def completed(self, request: StepRequest, given: RowEvidence | None) -> StepRequest:
        """The request with its evidence; itself for a session that asks for none."""
        own = self._sessions.get(request.session_id)
        if own is None:
            return request
        queries = None
        if Need.PREFILL_QUERIES in own.asked.needs and _of_its_rows(request):
            queries = request.q
        hidden = None if given is None or given.hidden is None else torch.from_numpy(given.hidden)
        weights = own.weights.get(request.layer)
        # States are of queries; a family reads those of the last one.
        return replace(
            request,
            evidence=Evidence(queries=queries, hidden=hidden, weights=weights),
            hidden_layer=None if given is None or hidden is None else given.hidden_layer,
            surprisal=None if given is None else given.surprisal,
        )


def layer_weights(given: GivenWeights) -> LayerWeights:
    """Tensors over the same bytes, which all sessions share; only the angles are copied."""
    shape, at = given.shape, 0

    def floats(*sizes: int) -> torch.Tensor:
        nonlocal at
        count = math.prod(sizes)
        made = torch.frombuffer(given.data, dtype=torch.float32, count=count, offset=at).view(*sizes)
        at += 4 * count
        return made

    query = floats(shape.hidden_size, shape.queries)
    bias = floats(shape.queries) if shape.has_bias else None
    norm = floats(shape.hidden_size)
    angles = np.frombuffer(given.data, dtype="<f8", offset=at).copy()
    return LayerWeights(
        query=query,
        bias=bias,
        norm_weight=norm,
        norm_eps=shape.norm_eps,
        inv_freq=torch.from_numpy(angles) if shape.frequencies else None,
        interleaved=shape.interleaved,
        digest=given.digest,
    )


def _of_its_rows(request: StepRequest) -> bool:
    """Whether the queries stand where the frame's rows do, one each."""
    same = request.first_query_position == request.first_row_position
    return same and request.q.shape[0] == request.k.shape[0]
