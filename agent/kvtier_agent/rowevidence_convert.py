"""What engines give beside rows: wire messages to the process's own values and back; decides nothing else."""

from __future__ import annotations

import numpy as np

from kvtier.v1 import attention_pb2
from kvtier_agent.rowevidence import MAX_HIDDEN_SIZE, EngineGives, EvidenceAsked, RowEvidence, checked
from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import Need

_NEEDS = {
    attention_pb2.PREFILL_QUERIES: Need.PREFILL_QUERIES,
    attention_pb2.PREVIOUS_HIDDEN_STATE: Need.PREVIOUS_HIDDEN_STATE,
    attention_pb2.WEIGHTS: Need.WEIGHTS,
    attention_pb2.SURPRISAL: Need.SURPRISAL,
}
_KINDS = {need: kind for kind, need in _NEEDS.items()}


def evidence_input(
    frame: attention_pb2.AttendFrame, queries: int, asked: EvidenceAsked | None
) -> RowEvidence:
    """As `rowevidence.checked`, and FRAME_INVALID for bytes that are no numbers."""
    given = frame.evidence
    for name, size in (("hidden", 4), ("surprisal", 8)):
        length = len(getattr(given, name))
        if length % size:
            message = f"evidence.{name} has {length} bytes; it must be a multiple of {size}"
            raise CoreError(Reason.FRAME_INVALID, message, {"field": f"evidence.{name}"})
    return checked(
        asked,
        frame.layer,
        queries,
        # Copies: a view of received bytes is read-only.
        hidden=np.frombuffer(given.hidden, dtype="<f4").astype(np.float32),
        hidden_layer=given.hidden_layer,
        surprisal=np.frombuffer(given.surprisal, dtype="<f8").astype(np.float64),
        surprisal_first=given.surprisal_first,
    )


def engine_gives(request: attention_pb2.OpenSessionRequest) -> EngineGives:
    """BAD_ARGUMENT naming the field: a kind that is none or stated twice, an illegal width or context."""
    kinds = list(request.gives)
    for kind in kinds:
        if kind not in _NEEDS and kind != attention_pb2.FIXED_CONTEXT:
            raise CoreError(Reason.BAD_ARGUMENT, f"gives: {kind} is none of {_legal_kinds()}")
    if len(set(kinds)) != len(kinds):
        raise CoreError(Reason.BAD_ARGUMENT, "gives: a kind is stated twice")
    wide = {attention_pb2.PREVIOUS_HIDDEN_STATE, attention_pb2.WEIGHTS} & set(kinds)
    size, context = request.hidden_size, request.fixed_context_tokens
    if not (1 <= size <= MAX_HIDDEN_SIZE if wide else size == 0):
        legal = f"1 to {MAX_HIDDEN_SIZE}" if wide else "0 without hidden states and weights"
        raise CoreError(Reason.BAD_ARGUMENT, f"hidden_size is {size}; legal: {legal}")
    fixed = attention_pb2.FIXED_CONTEXT in kinds
    if not (0 <= context <= request.max_tokens if fixed else context == 0):
        legal = "0 to max_tokens" if fixed else "0 without FIXED_CONTEXT"
        raise CoreError(Reason.BAD_ARGUMENT, f"fixed_context_tokens is {context}; legal: {legal}")
    needs = frozenset(_NEEDS[kind] for kind in kinds if kind in _NEEDS)
    return EngineGives(needs, size, context if fixed else None)


def evidence_wanted(asked: EvidenceAsked) -> attention_pb2.EvidenceWanted:
    """What OpenSession answers; its layers only where something is asked of some of them."""
    kinds = sorted(_KINDS[need] for need in asked.needs)
    if asked.fixed_context:
        kinds.append(attention_pb2.FIXED_CONTEXT)
    by_layer = {Need.PREVIOUS_HIDDEN_STATE, Need.WEIGHTS} & asked.needs
    return attention_pb2.EvidenceWanted(kinds=kinds, layers=sorted(asked.layers) if by_layer else ())


def _legal_kinds() -> str:
    return ", ".join(name for name, number in attention_pb2.EvidenceKind.items() if number)
