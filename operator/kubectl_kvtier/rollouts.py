"""A KVRollout as commands read it: the model, its steps in order, and how far it is.

Why it exists: the tree, the explanation and the intents must agree on where a rollout stands. Pure; times are
seconds since the epoch. It must not know how anything is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import ValidationError

from kubectl_kvtier.outcomes import Exit, Failure
from kvtier_crds.models import KVRollout
from kvtier_crds.models.common import Resource
from kvtier_crds.models.kvrollout import Stage
from kvtier_crds.models.rolloutstatus import KVRolloutStatus, Phase
from kvtier_crds.models.stages import StageName, StatusStage
from kvtier_crds.quantity import parse_duration, parse_fraction

DEFAULT_HOLDBACK = "2%"
_R = TypeVar("_R", bound=Resource)
_T = TypeVar("_T")
ORDER = (StageName.SHADOW, StageName.CANARY, StageName.RAMP, StageName.FULL)


class Mark(StrEnum):
    """How far one step is."""

    PASSED = "passed"
    CURRENT = "current"
    AHEAD = "ahead"
    LEFT = "left"
    """The rollout returned to its baseline from here."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rung of the ladder. share: of traffic, as declared, empty in Shadow. lasts: declared minimum."""

    stage: StageName
    index: int
    share: str
    lasts: str
    mark: Mark


def read_rollout(document: dict[str, Any]) -> KVRollout:
    return read_as(KVRollout, document)


def read_as(kind: type[_R], document: dict[str, Any]) -> _R:
    """Failure FAILED, with the field, of an object that another version has written."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        name = (document.get("metadata") or {}).get("name", "")
        raise Failure(
            Exit.FAILED, f"{kind.KIND} {name} cannot be read by this version: {where}: {first['msg']}"
        ) from error


@dataclass(frozen=True, slots=True)
class Unread:
    """One of many objects that this version cannot read, and why."""

    namespace: str
    name: str
    line: str

    def facts(self) -> dict[str, str]:
        return {"namespace": self.namespace, "name": self.name, "unreadable": self.line}


def readable(
    documents: Sequence[dict[str, Any]], reads: Callable[[dict[str, Any]], _T]
) -> tuple[list[_T], list[Unread]]:
    """Those of a list that can be read, and the others: one must not hide all."""
    found: list[_T] = []
    lost: list[Unread] = []
    for document in documents:
        try:
            found.append(reads(document))
        except Failure as failure:
            metadata = document.get("metadata") or {}
            lost.append(Unread(metadata.get("namespace", ""), metadata.get("name", ""), str(failure)))
    return found, lost


def status_of(rollout: KVRollout) -> KVRolloutStatus:
    return rollout.status or KVRolloutStatus()


def steps(rollout: KVRollout) -> tuple[Step, ...]:
    """All rungs, marked."""
    status = status_of(rollout)
    at = _place(status.stage, status.step)
    back = status.rollback
    left = _place(back.from_stage, back.from_step) if back is not None else None
    done = status.phase is Phase.COMPLETED
    made = []
    for stage, index, share, lasts in _declared(rollout):
        here = (ORDER.index(stage), index)
        mark = Mark.AHEAD
        if left is not None and status.stage is StatusStage.EXACT_BASELINE:
            mark = Mark.LEFT if here == left else Mark.PASSED if here < left else Mark.AHEAD
        elif at is not None:
            mark = Mark.CURRENT if here == at and not done else Mark.PASSED if here <= at else Mark.AHEAD
        made.append(Step(stage, index, share, lasts, mark))
    return tuple(made)


def current(rollout: KVRollout) -> Step | None:
    return next((step for step in steps(rollout) if step.mark is Mark.CURRENT), None)


def following(rollout: KVRollout) -> Step | None:
    """The rung after the current one; None from the last or when none is current."""
    found = steps(rollout)
    at = next((i for i, step in enumerate(found) if step.mark is Mark.CURRENT), None)
    if at is None:
        return next(iter(found), None) if status_of(rollout).stage in (None, StatusStage.OFF) else None
    return found[at + 1] if at + 1 < len(found) else None


def ends_at(rollout: KVRollout) -> float | None:
    """When the current step has lasted as long as it must; None without one. `schedule.dueAt` is something
    else: the next look at the evidence, a few seconds away."""
    step, schedule = current(rollout), status_of(rollout).schedule
    opened = seconds_of(schedule.step_started_at) if schedule is not None else None
    if step is None or opened is None:
        return None
    return opened + (parse_duration(step.lasts, "spec.stages") if step.lasts else 0.0)


def title(step: Step) -> str:
    """ "Ramp 2 of its steps (25%)" is too long for a sentence: "Ramp step 1 (25%)"."""
    where = f"{step.stage} step {step.index}" if step.stage is StageName.RAMP else str(step.stage)
    return f"{where} ({step.share})" if step.share else where


def seconds_of(timestamp: str | None) -> float | None:
    """Of an RFC 3339 time. Failure FAILED for what is none, which only another version can have written."""
    if not timestamp:
        return None
    try:
        return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
    except ValueError as error:
        raise Failure(
            Exit.FAILED, f"a status that this version cannot read: {timestamp!r} is no time"
        ) from error


def span(seconds: float) -> str:
    """ "1h12m", "3m05s", "12s": two units, rounded down."""
    whole = int(max(0.0, seconds))
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02d}{smaller}"
    return f"{whole}s"


def _place(stage: StatusStage | None, step: int | None) -> tuple[int, int] | None:
    if stage in (None, StatusStage.OFF, StatusStage.EXACT_BASELINE):
        return None
    return ORDER.index(StageName(stage)), step or 0


def _declared(rollout: KVRollout) -> Iterator[tuple[StageName, int, str, str]]:
    for stage in rollout.spec.stages:
        yield from _rungs(stage)


def _rungs(stage: Stage) -> Iterator[tuple[StageName, int, str, str]]:
    if stage.name is StageName.RAMP:
        for index, share in enumerate(stage.steps or ()):
            yield stage.name, index, str(share), stage.step_duration or ""
    elif stage.name is StageName.FULL:
        yield stage.name, 0, _full(stage.holdback), stage.soak or ""
    else:
        yield stage.name, 0, str(stage.traffic_fraction or ""), stage.min_duration or ""


def _full(holdback: int | str | None) -> str:
    """The operator keeps its default back where none is declared."""
    kept = DEFAULT_HOLDBACK if holdback is None else str(holdback)
    return f"all but {kept}" if parse_fraction(kept, "holdback") else "all"
