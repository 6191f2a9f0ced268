"""The specification's names for where a block stands while it moves (B.1), for people and for `explain`.

Why it exists: the machine has one set of states for every pair of tiers; the specification names them by
what the two tiers are. It must not decide anything.
"""

from __future__ import annotations

from enum import StrEnum

from kvtier_core.tiers.base import MediumKind
from kvtier_core.transactions.reasons import MoveKind, TxnState


class Residency(StrEnum):
    GPU_VISIBLE = "GPU_VISIBLE"
    DEMOTE_RESERVED = "DEMOTE_RESERVED"
    COPY_OUT = "COPY_OUT"
    HOST_VALID = "HOST_VALID"
    SECONDARY_VALID = "SECONDARY_VALID"
    GPU_RELEASED = "GPU_RELEASED"
    PROMOTE_RESERVED = "PROMOTE_RESERVED"
    COPY_IN = "COPY_IN"
    GPU_STAGED = "GPU_STAGED"
    UNPUBLISHED = "UNPUBLISHED"


_AT_REST: dict[MediumKind, Residency] = {
    MediumKind.GPU: Residency.GPU_VISIBLE,
    MediumKind.CPU: Residency.HOST_VALID,
    MediumKind.NVME: Residency.SECONDARY_VALID,
}
_ON_THE_WAY: dict[MoveKind, dict[TxnState, Residency]] = {
    MoveKind.DEMOTE: {
        TxnState.RESERVED: Residency.DEMOTE_RESERVED,
        TxnState.COPYING: Residency.COPY_OUT,
        TxnState.VALIDATED: Residency.COPY_OUT,
    },
    MoveKind.PROMOTE: {
        TxnState.RESERVED: Residency.PROMOTE_RESERVED,
        TxnState.COPYING: Residency.COPY_IN,
        TxnState.VALIDATED: Residency.GPU_STAGED,
    },
    MoveKind.STORE: {},
}


def residency(
    kind: MoveKind, state: TxnState, source: MediumKind | None, destination: MediumKind
) -> Residency:
    """Where a block stands by its move. source None: a STORE, which is UNPUBLISHED until it is published. A
    dead move leaves the block where it was; GPU_RELEASED is a demotion whose source on the GPU was given
    back."""
    if state is TxnState.RELEASED and kind is MoveKind.DEMOTE and source is MediumKind.GPU:
        return Residency.GPU_RELEASED
    if state in (TxnState.PUBLISHED, TxnState.RELEASED):
        return _AT_REST[destination]
    if source is None:
        return Residency.UNPUBLISHED
    return _ON_THE_WAY[kind].get(state, _AT_REST[source])
