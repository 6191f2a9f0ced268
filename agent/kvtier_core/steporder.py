"""In which order frames of a session may come: steps, layers, rows. Pure checks, no rows.

Why it exists: an answer over rows that never came, or came twice, is wrong without looking wrong. It must
not know tiers or attention.

A step is one forward pass: layer 0 first, then each layer in turn, any number of frames per layer, every
layer up to the same frontier. A frame whose rows all exist already is a repeat: it is answered again if its
bytes are the same (a client replays after a lost answer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import StepRequest
from kvtier_core.sessions import Session


def check_shapes(request: StepRequest, *, query_heads: int, kv_heads: int, head_dim: int) -> None:
    """FRAME_INVALID unless k, v are float32 [n, Hk, d] and q float32 [Nq, Hq, d], Nq >= 1, in CPU memory."""
    rows = int(request.k.shape[0]) if request.k.dim() == 3 else -1
    _check_tensor("k", request.k, (rows, kv_heads, head_dim))
    _check_tensor("v", request.v, (rows, kv_heads, head_dim))
    queries = int(request.q.shape[0]) if request.q.dim() == 3 else -1
    _check_tensor("q", request.q, (queries, query_heads, head_dim))
    if queries < 1:
        raise CoreError(Reason.FRAME_INVALID, "a frame needs at least one query")
    if min(request.first_row_position, request.first_query_position, request.committed_frontier) < 0:
        raise CoreError(Reason.FRAME_INVALID, "positions are never negative")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, int, int]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise CoreError(
            Reason.FRAME_INVALID,
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}, expected float32 "
            f"{('n', *shape[1:])} on cpu",
            {"tensor": name},
        )


def check_order(session: Session, request: StepRequest) -> bool:
    """Whether the frame is a repeat (True) or new (False). STEP_ORDER, FRONTIER_MISMATCH, FRAME_INVALID."""
    layers = len(session.layers)
    layer, step = request.layer, request.step
    if not 0 <= layer < layers:
        raise CoreError(Reason.FRAME_INVALID, f"layer {layer} is not in [0, {layers})")
    state = session.layers[layer]
    rows = int(request.k.shape[0])
    end = request.first_row_position + rows
    running = step == session.step >= 0
    repeat = running and rows > 0 and end <= state.frontier and layer <= session.layer
    if repeat:
        frontier = state.frontier
    else:
        _check_turn(session, step, layer)
        if request.first_row_position != state.frontier:
            raise CoreError(
                Reason.FRONTIER_MISMATCH,
                f"rows start at {request.first_row_position}, layer {layer} has rows [0, {state.frontier})",
                {"frontier": state.frontier, "first_row_position": request.first_row_position},
            )
        frontier = end
    _check_reach(session, request, frontier)
    return repeat


def _check_turn(session: Session, step: int, layer: int) -> None:
    frontiers = session.layers
    if session.step < 0:
        if step < 0 or layer != 0:
            raise CoreError(Reason.STEP_ORDER, f"a session starts with layer 0 of a step, not layer {layer}")
        return
    same = step == session.step and layer == session.layer
    following = step == session.step and layer == session.layer + 1
    restart = step == session.step + 1 and layer == 0 and session.layer == len(frontiers) - 1
    if not (same or following or restart):
        raise CoreError(
            Reason.STEP_ORDER,
            f"step {step} layer {layer} does not follow step {session.step} layer {session.layer}",
            {"step": session.step, "layer": session.layer},
        )
    behind = frontiers[session.layer].frontier != frontiers[0].frontier
    if not same and behind:
        raise CoreError(
            Reason.STEP_ORDER,
            f"layer {session.layer} has rows [0, {frontiers[session.layer].frontier}), layer 0 has "
            f"[0, {frontiers[0].frontier})",
        )


def _check_reach(session: Session, request: StepRequest, frontier: int) -> None:
    if request.layer and frontier > session.layers[0].frontier:
        raise CoreError(
            Reason.FRONTIER_MISMATCH,
            f"rows to {frontier} of layer {request.layer} are beyond layer 0's {session.layers[0].frontier}",
            {"frontier": session.layers[0].frontier},
        )
    last = request.first_query_position + int(request.q.shape[0]) - 1
    if last >= frontier:
        raise CoreError(
            Reason.FRONTIER_MISMATCH,
            f"the last query stands at {last}, rows end at {frontier}",
            {"frontier": frontier, "last_query": last},
        )
    if session.spec.max_tokens and frontier - session.positions.shift > session.spec.max_tokens:
        raise CoreError(
            Reason.FRAME_INVALID,
            f"{frontier - session.positions.shift} rows pass the session's max_tokens "
            f"{session.spec.max_tokens}",
            {"max_tokens": session.spec.max_tokens},
        )
    if not session.committed <= request.committed_frontier <= frontier:
        raise CoreError(
            Reason.FRONTIER_MISMATCH,
            f"committed_frontier {request.committed_frontier} is not in [{session.committed}, {frontier}]",
            {"committed": session.committed, "frontier": frontier},
        )
