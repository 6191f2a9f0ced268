"""What a person or a program is told of an uninstall: lines while it waits, its account at the end. Pure.

It must not decide anything: what is left, dropped and safe is the core's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kubectl_kvtier.outcomes import Exit
from kubectl_kvtier.rollouts import span
from kubectl_kvtier.uninstall.holds import CACHES, FINALIZERS, KINDS, ROLLOUTS, Held
from kubectl_kvtier.uninstall.retiring import CLOSING_SECONDS, Known, Progress, least_deadline, safe_at

ROLE = "ClusterRole kvtier-uninstaller of docs/guides/kubectl-role.yaml"
NAMED = 3
_WORK = {
    ROLLOUTS: "an operator that returns its agents to the exact baseline",
    CACHES: "an operator that makes its agents forget it",
}


def deadline_refused(seconds: float, found: Sequence[Held]) -> str:
    """Why a deadline is too short, and the legal one; empty for one that is legal."""
    least, by = least_deadline(found)
    if seconds >= least or by is None:
        return ""
    legal = f"{math.ceil(least)}s"
    if by.plural == ROLLOUTS:
        why = f"agents may hold the candidate of {by.title} under leases of {by.lease:g} s"
    elif by.approved:
        why = (
            f"{by.title} has an approved candidate, and its KVRollout {by.approved}, which would say how "
            "long leases last, is gone: they count as 1 h"
        )
    else:
        why = f"{by.title} has no KVRollout that says how long leases last: they count as 60 s"
    return (
        f"--deadline {seconds:g}s is too short: {why}, and all must have ended when a "
        f"finalizer is dropped. The least is --deadline {legal}"
    )


def changes(before: Progress, after: Progress, now: float) -> list[str]:
    """What the last look has found: objects that are gone, and those that appeared meanwhile."""
    lines = []
    for uid, one in after.known.items():
        old = before.known.get(uid)
        if not one.here and (old is None or old.here):
            lines.append(f"gone: {one.held.title}, after {span(now - after.started)}")
        elif old is None and before.known:
            lines.append(f"appeared meanwhile: {one.held.title}")
    return lines


def waiting(progress: Progress, now: float) -> str:
    """What is waited for, of whom, and how long at most."""
    here = progress.here
    counts = [
        f"{n} {KINDS[plural]}{'s' if n > 1 else ''}"
        for plural in KINDS
        if (n := sum(one.held.plural == plural for one in here))
    ]
    holders = {_WORK[one.held.plural] for one in here if one.held.ours is not None and one.held.deleting} | {
        f"whoever set {name}" for one in here if one.held.deleting for name in one.held.others
    }
    of = f", of {' and '.join(sorted(holders))}" if holders else ""
    names = ", ".join(one.held.title for one in here[:NAMED])
    more = f" and {len(here) - NAMED} more" if len(here) > NAMED else ""
    left = progress.deadline - now
    until = (
        f"{span(left)} left" if left > 0 else f"{span(left + CLOSING_SECONDS)} at most, the deadline is over"
    )
    return f"waiting for {', '.join(counts)} ({names}{more}){of}; {until}"


def meaning(held: Held) -> str:
    """What it means that our finalizer was dropped from this object."""
    if held.plural == ROLLOUTS:
        return (
            "no operator has seen its candidate revoked; its agents have returned to the exact baseline by "
            "themselves, since every lease has ended, and nobody has proved it"
        )
    kept = (
        "no agent was told: those that run go on serving its exact baseline and keep its rows until an "
        "operator tells them to forget it, or their pool is deleted; rows on nvme tiers stay on the node"
    )
    return f"{kept}; its keys are not erased, and there is no receipt" if held.erases else kept


def why_left(progress: Progress, one: Known, now: float) -> str:
    """Why an object is still there at the end."""
    held = one.held
    told = []
    if held.others:
        told.append(f"held by {', '.join(held.others)}, which is not kvtier's to drop")
    if not held.deleting:
        told.append("not deleted: it appeared too late, or what had to go before it is still there")
    elif held.ours is not None:
        told.append(_why_ours(progress, one, now))
    return "; ".join(told) or "deleted, and not gone yet"


def _why_ours(progress: Progress, one: Known, now: float) -> str:
    name = FINALIZERS[one.held.plural]
    if one.held.uid in progress.refused:
        resource = one.held.plural
        return f"held by {name}: the right to patch {resource}.kvtier.dev is missing ({ROLE})"
    safe = safe_at(progress, one)
    if safe is None or safe > now:
        ends = "" if safe is None else f" for another {span(math.ceil(safe - now))}"
        return f"held by {name}: agents may hold its candidate{ends}; run it again"
    return f"held by {name}: it changed at each try; run it again"


def exit_of(progress: Progress) -> Exit:
    """OK only when everything went by itself. FAILED where a right is missing, TIMED_OUT with something left,
    NEGATIVE when a finalizer was dropped."""
    here = {one.held.uid for one in progress.here}
    if here & progress.refused:
        return Exit.FAILED
    if here:
        return Exit.TIMED_OUT
    return Exit.NEGATIVE if _dropped(progress) else Exit.OK


def facts(progress: Progress, now: float) -> dict[str, Any]:
    """The account as JSON. seconds: what it has taken."""
    return {
        "outcome": exit_of(progress).name,
        "seconds": round(now - progress.started, 1),
        "deadlineSeconds": round(progress.deadline - progress.started, 3),
        "gone": [_named(one) for one in progress.known.values() if not one.here and not one.dropped],
        "dropped": [
            {**_named(one), "finalizer": one.dropped, "means": meaning(one.held), "gone": not one.here}
            for one in _dropped(progress)
        ],
        "left": [
            {**_named(one), "finalizers": list(one.held.finalizers), "why": why_left(progress, one, now)}
            for one in progress.here
        ],
    }


def lines(progress: Progress, now: float) -> list[str]:
    """The account for a person."""
    told = [f"dropped {one.dropped} of {one.held.title}: {meaning(one.held)}" for one in _dropped(progress)]
    told += [f"left: {one.held.title}: {why_left(progress, one, now)}" for one in progress.here]
    gone = sum(not one.here for one in progress.known.values())
    by_itself = gone - sum(not one.here for one in _dropped(progress))
    counted = f"{gone} objects gone, {by_itself} by themselves" if progress.known else "nothing to delete"
    rest = f", {len(progress.here)} left" if progress.here else ""
    return [*told, f"{counted}{rest}, in {span(now - progress.started)}"]


def preview(found: Sequence[Held]) -> list[str]:
    """What would be deleted, in its order."""
    least, _ = least_deadline(found)
    told = []
    for one in found:
        state = "is being deleted" if one.deleting else "would be deleted"
        held = f", held by {', '.join(one.finalizers)}" if one.finalizers else ""
        at = f", in {one.phase}" if one.phase else ""
        told.append(f"{one.title} {state}{at}{held}")
    counted = f"{len(found)} objects; the least --deadline is {math.ceil(least)}s"
    return [*told, f"{counted if found else 'nothing to delete'}; nothing was written"]


def _dropped(progress: Progress) -> list[Known]:
    return [one for one in progress.known.values() if one.dropped]


def _named(one: Known) -> dict[str, str]:
    held = one.held
    return {"kind": KINDS[held.plural], "namespace": held.namespace, "name": held.name, "uid": held.uid}
