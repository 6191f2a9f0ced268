"""Moments that a rollout's status has written down, and that the process that reads them measures on from, by
a clock that nobody sets. Pure. It must not know what ends at any of them."""

from __future__ import annotations

from kvtier_operator.rollout.state import RolloutState


def waits(state: RolloutState) -> tuple[float, ...]:
    """Since when leases are waited for."""
    found = [one.since for one in state.vanished]
    found += [state.rollback.started_at] if state.rollback is not None else []
    found += [state.revoking.since] if state.revoking is not None else []
    return tuple(found)


def measured(state: RolloutState) -> tuple[float, ...]:
    """Times by which a step, an attempt, a grant, patience or what is kept of a finished one ends."""
    opened = () if state.window is None else (state.window.opened_at,)
    lost = (one.since for one in state.lost)
    at = (
        *opened,
        *lost,
        state.started_at,
        state.pending_since,
        state.grant_expires,
        state.finished_at,
    )
    return tuple(one for one in at if one)
