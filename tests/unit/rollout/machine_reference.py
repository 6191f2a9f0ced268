"""What a rollout must do next, in as few words as possible: the reference that `next_plan` is held against.

Written from the release design and not from the machine: it knows no fences, windows, holders or status, only
where a rollout is, what is true, and which rule outranks which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LADDER = (("Shadow", 0), ("Canary", 0), ("Ramp", 0), ("Ramp", 1), ("Full", 0))
GOING = ("Progressing", "Paused")


@dataclass(frozen=True)
class Place:
    """Where a rollout is. cause: of the return, empty for none."""

    phase: str
    stage: str
    step: int
    attempt: int
    cause: str = ""


@dataclass(frozen=True)
class Told:
    """An intent that was not answered yet; fresh: its seq has grown."""

    verb: str
    fresh: bool
    attempt: int
    stage: str
    step: int


@dataclass(frozen=True)
class Truth:
    """What is so now. unreadable: the spec cannot be run. unseen: whoever wrote the command had seen no
    attempt of this object. holds: agents may hold the candidate. clearing: an older candidate is being
    revoked. resumes: of the open step. refused: the causes of agents' refusals; perhaps: one may stay exact
    and be left out instead. passed: every gate, at a look that was due, every agent holds it, and the step
    has lasted; passed_without: the same of those that do not refuse."""

    deleting: bool = False
    unreadable: bool = False
    unseen: bool = False
    half_adopted: bool = False
    holds: bool = False
    clearing: bool = False
    told: Told | None = None
    edited: bool = False
    failed: bool = False
    drifted: bool = False
    refused: frozenset[str] = frozenset()
    perhaps: bool = False
    lost: bool = False
    grant_over: bool = False
    late: bool = False
    starved: bool = False
    expired: bool = False
    resumes: int = 0
    resumable: bool = True
    passed: bool = False
    passed_without: bool = False
    blocked: bool = False
    old_approval: bool = False


def decide(here: Place, truth: Truth) -> frozenset[Place]:
    """Every place where one pass may leave it; more than one only where time or proofs decide."""
    if truth.half_adopted:
        return only(replace(here, phase="Completed"))
    active = truth.holds or truth.clearing
    if truth.unreadable and active:
        return only(back(here, "InputDrift"))
    if truth.deleting and active:
        return only(back(here, "ObjectDeleted"))
    if truth.deleting and here.phase != "RollingBack":
        return only(here)
    if truth.told is not None:
        against = against_it(here, truth)
        if truth.told.verb in ("Promote", "Skip") and truth.holds and against:
            return against
        return only(obey(here, truth, truth.told))
    if here.phase == "RollingBack":
        return frozenset({here, replace(here, phase="RolledBack")})
    if truth.holds:
        return against_it(here, truth) or only(onward(here, truth))
    return at_rest(here, truth)


def only(place: Place) -> frozenset[Place]:
    return frozenset({place})


def back(here: Place, cause: str) -> Place:
    return Place("RollingBack", "ExactBaseline", 0, here.attempt, cause)


def begins_again(here: Place) -> Place:
    return Place("Pending", "Off", 0, here.attempt + 1)


def following(here: Place) -> Place:
    if (here.stage, here.step) == LADDER[-1]:
        return replace(here, phase="Completed")
    stage, step = LADDER[LADDER.index((here.stage, here.step)) + 1]
    return Place("Progressing", stage, step, here.attempt)


def against_it(here: Place, truth: Truth) -> frozenset[Place]:
    """Every reason to return, before every reason to go on; empty for none."""
    completed = here.phase == "Completed"
    if truth.edited:
        return only(begins_again(here))
    if truth.failed:
        return only(back(here, "GateFailed"))
    if truth.drifted:
        return only(back(here, "InputDrift"))
    if truth.refused:
        refused = frozenset(back(here, cause) for cause in truth.refused)
        without = onward(here, replace(truth, passed=truth.passed_without))
        return refused | {onward(here, truth), without} if truth.perhaps else refused
    if completed:
        return only(back(here, "LeaseExpired")) if truth.grant_over else frozenset()
    if truth.lost:
        return only(back(here, "AgentLost"))
    if truth.late or truth.starved:
        return only(back(here, "DeadlineExceeded"))
    return frozenset()


def onward(here: Place, truth: Truth) -> Place:
    if truth.expired and here.phase != "Completed" and (truth.resumes >= 3 or not truth.resumable):
        return back(here, "LeaseExpired")
    if truth.passed and here.phase == "Progressing" and not truth.expired:
        return following(here)
    return here


def obey(here: Place, truth: Truth, told: Told) -> Place:
    legal = {
        "Pause": ("Progressing",),
        "Resume": ("Paused",),
        "Promote": GOING,
        "Skip": GOING,
        "Retry": ("RolledBack",),
        "Abort": ("Pending", "Invalid", *GOING, *(("Completed",) if truth.holds else ())),
    }
    fits = told.fresh and not truth.unseen and told.attempt == here.attempt
    if not fits or here.phase not in legal.get(told.verb, ()):
        return here
    if told.verb == "Abort":
        active = truth.holds or truth.clearing
        return replace(back(here, "IntentAbort"), phase="RollingBack" if active else "RolledBack")
    if truth.unreadable:
        return here
    stays = here.stage == "ExactBaseline"
    if told.stage != here.stage or (told.step != here.step and not stays):
        return here
    if told.verb == "Retry":
        return begins_again(here)
    if told.verb in ("Promote", "Skip"):
        return following(here)
    return replace(here, phase="Paused" if told.verb == "Pause" else "Progressing")


def at_rest(here: Place, truth: Truth) -> frozenset[Place]:
    if here.phase in ("Completed", "RolledBack"):
        return only(begins_again(here)) if truth.edited else only(here)
    if truth.clearing:
        return only(here)
    if truth.unreadable:
        return only(replace(here, phase="Invalid", stage="Off", step=0, cause=""))
    if truth.blocked:
        waited = Place("RolledBack", "ExactBaseline", 0, here.attempt, "DeadlineExceeded")
        waits = {
            replace(here, phase=phase, stage="Off", step=0, cause="") for phase in ("Pending", "Invalid")
        }
        return frozenset({waited, *waits})
    if truth.old_approval:
        return only(replace(here, phase="Pending"))
    return only(Place("Progressing", "Shadow", 0, here.attempt))
