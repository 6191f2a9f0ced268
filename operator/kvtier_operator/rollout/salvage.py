"""What is left of a status that this version cannot read, when its KVRollout is deleted.

Nothing may be decided on such a status but to let the object go, and that safely: each part that can be read
counts, and of each that cannot, whatever makes agents be asked and leases be waited for. It must not decide
what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier_operator.packed import unpacked
from kvtier_operator.ports import ROLLOUT_FINALIZER, JsonObject
from kvtier_operator.rollout.spec import MAX_LEASE_TTL
from kvtier_operator.rollout.state import Holders, LostAgent, Revocation, RolloutState
from kvtier_operator.rollout.status import (
    StatusUnreadable,
    from_status,
    parse_stamp,
    read_candidate,
    read_holders,
    read_intent,
    read_milliseconds,
    read_reference,
    read_revoking,
)
from kvtier_operator.rollout.vocabulary import Phase, Stage

_T = TypeVar("_T")
_HELD = frozenset({Stage.SHADOW, Stage.CANARY, Stage.RAMP, Stage.FULL})
_AT_REST = frozenset({Phase.PENDING, Phase.INVALID, Phase.ROLLED_BACK, Phase.COMPLETED})


@dataclass(frozen=True, slots=True)
class StatusRead:
    """What a status says. unreadable: why this version cannot read it; then the state is what is left of it,
    and `lease_ttl` seconds of a longer lease than the spec's that agents may hold by it."""

    state: RolloutState
    unreadable: str = ""
    lease_ttl: float = 0.0


def read_status(rollout: JsonObject) -> StatusRead:
    """Raises StatusUnreadable, unless the rollout is being deleted."""
    status = rollout.get("status") or {}
    try:
        if has_lost_status(rollout):
            raise StatusUnreadable("there is none, as after it was removed by hand")
        return StatusRead(from_status(status))
    except StatusUnreadable as error:
        if "deletionTimestamp" not in rollout["metadata"]:
            raise
        state, lease_ttl = salvaged(status)
        return StatusRead(state, str(error), lease_ttl)


def has_lost_status(rollout: JsonObject) -> bool:
    """Whether it is deleted and says nothing of where it stands, though an operator has had it in hand: what
    its status said is lost, or it was just about to have its first one, which nobody can tell apart. While it
    is not deleted, it begins anew at Shadow, and takes over whoever holds its candidate still."""
    metadata, status = rollout["metadata"], rollout.get("status") or {}
    mine = "deletionTimestamp" in metadata and ROLLOUT_FINALIZER in (metadata.get("finalizers") or [])
    return mine and isinstance(status, Mapping) and not status.get("phase")


def salvaged(status: object) -> tuple[RolloutState, float]:
    """The state, and the longest lease in seconds that agents may hold by what its status says, 0 where that
    is the spec's. Agents may hold the candidate unless a phase that this version knows says that none do."""
    if not isinstance(status, Mapping):
        return RolloutState(phase=Phase.PROGRESSING, stage=Stage.SHADOW), MAX_LEASE_TTL
    told = {name: unpacked(part) for name, part in status.items()}
    phase = _or(lambda: Phase(told["phase"]), Phase.PROGRESSING)
    free = phase in _AT_REST and not told.get("revoking") and not told.get("grantExpires")
    stage = _or(lambda: Stage(told["stage"]), Stage.SHADOW)
    if not free:
        phase, stage = Phase.PROGRESSING, stage if stage in _HELD else Stage.SHADOW
    longest: Revocation | None = Revocation("", 0.0, MAX_LEASE_TTL)
    revoking = _or(lambda: read_revoking(told.get("revoking")), longest)
    state = RolloutState(
        phase=phase,
        stage=stage,
        step=_or(lambda: int(told.get("step") or 0), 0),
        attempt=_or(lambda: int(told.get("attempt") or 1), 1),
        fence=_or(lambda: int(told.get("fence") or 0), 0),
        baseline=_or(lambda: read_reference(told.get("baseline")), None),
        candidate=_or(lambda: read_candidate(told.get("candidate")), None),
        holders=_or(lambda: read_holders(told), Holders()),
        vanished=_or(lambda: _lost(told.get("vanished")), ()),
        last_intent=_or(lambda: read_intent(told.get("lastIntent")), None),
        shares=_or(lambda: int((told.get("digestBudget") or {}).get("attemptsUsed") or 0), 0),
        revoking=revoking,
        started_at=_or(lambda: parse_stamp((told.get("schedule") or {}).get("attemptStartedAt")), 0.0),
    )
    lease = _or(lambda: read_milliseconds((told.get("rollback") or {}).get("leaseTTL")), MAX_LEASE_TTL)
    return state, lease


def _lost(rows: Any) -> tuple[LostAgent, ...]:
    return tuple(LostAgent(str(row["node"]), parse_stamp(row.get("since"))) for row in rows or [])


def _or(read: Callable[[], _T], worst: _T) -> _T:
    try:
        return read()
    except (KeyError, ValueError, TypeError, AttributeError):
        return worst
