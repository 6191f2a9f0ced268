"""What engines say that they give to selectors, what a session asks of its engine, and what a frame brings.

Why it exists: a frame may carry only what its session's selector needs, in the shape that the session stated,
whatever wire it came on; one place says so. It knows no message and no index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import Need, Surprisal

MAX_HIDDEN_SIZE = 1 << 16
# Of a frame: 1 MiB. Those of a longer prompt come with the next frames.
MAX_SURPRISALS = 1 << 17


@dataclass(frozen=True, slots=True)
class EngineGives:
    """needs: what the session's engine can send. hidden_size: floats of a hidden state. fixed_context: rows
    [0, n) do not change, 0: those of the first step; None: nothing is said."""

    needs: frozenset[Need] = frozenset()
    hidden_size: int = 0
    fixed_context: int | None = None


GIVES_NOTHING = EngineGives()


@dataclass(frozen=True, slots=True)
class EvidenceAsked:
    """needs: what the session's selector needs of its engine, besides the queries of each frame. layers: of
    hidden states and weights."""

    needs: frozenset[Need]
    layers: frozenset[int]
    hidden_size: int
    fixed_context: bool = False


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """hidden: float32 [queries, hidden_size], the input of `hidden_layer`."""

    hidden: NDArray[np.float32] | None = None
    hidden_layer: int = 0
    surprisal: Surprisal | None = None


def checked(
    asked: EvidenceAsked | None,
    layer: int,
    queries: int,
    *,
    hidden: NDArray[np.float32],
    hidden_layer: int,
    surprisal: NDArray[np.float64],
    surprisal_first: int,
) -> RowEvidence:
    """Of one frame, flat arrays that nobody else writes to. FRAME_INVALID names the field that was not asked
    for, has another length, is not finite or is too long; LAYER_DISTANCE: states of another layer than the
    one before."""
    states: NDArray[np.float32] | None = None
    late: Surprisal | None = None
    if hidden.size:
        states = _states(asked, layer, queries, hidden)
        if hidden_layer != layer - 1:
            raise CoreError(
                Reason.LAYER_DISTANCE,
                f"evidence.hidden_layer {hidden_layer}: layer {layer} is rehearsed from the input of layer "
                f"{layer - 1}",
                {"field": "evidence.hidden_layer"},
            )
    if surprisal.size:
        if asked is None or Need.SURPRISAL not in asked.needs:
            raise _invalid("surprisal", "was not asked for")
        if surprisal.size > MAX_SURPRISALS:
            raise _invalid("surprisal", f"has {surprisal.size} numbers; at most {MAX_SURPRISALS} a frame")
        if surprisal_first < 0:
            raise _invalid("surprisal_first", "must not be negative")
        if not np.isfinite(surprisal).all():
            raise _invalid("surprisal", "is not finite")
        late = Surprisal(surprisal_first, surprisal)
    return RowEvidence(states, hidden_layer, late)


def _states(
    asked: EvidenceAsked | None, layer: int, queries: int, hidden: NDArray[np.float32]
) -> NDArray[np.float32]:
    if asked is None or Need.PREVIOUS_HIDDEN_STATE not in asked.needs:
        raise _invalid("hidden", "was not asked for")
    if layer not in asked.layers:
        raise _invalid("hidden", f"was not asked for in layer {layer}")
    if hidden.size != queries * asked.hidden_size:
        raise _invalid(
            "hidden", f"has {hidden.size} floats; {queries} queries of {asked.hidden_size} were due"
        )
    if not np.isfinite(hidden).all():
        raise _invalid("hidden", "is not finite")
    return hidden.reshape(queries, asked.hidden_size)


def _invalid(field: str, what: str) -> CoreError:
    return CoreError(Reason.FRAME_INVALID, f"evidence.{field} {what}", {"field": f"evidence.{field}"})
