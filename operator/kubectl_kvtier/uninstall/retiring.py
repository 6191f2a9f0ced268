"""What an uninstall does next, from what its looks have found: a pure function of looks and times.

Why it exists: it must end, and a finalizer may be dropped only when no agent can hold a candidate any more.
Both are rules over what was seen and when, and are tested as such. Times are seconds of the caller's own
monotonic clock: nothing is compared with the clock of another machine. It must not do I/O.

The order is rollouts, caches, the rest. A cache waits until no rollout of it is held by our finalizer, so
that its candidate is revoked first, but not beyond half of the time: what the operator must do for the cache
needs its time, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kubectl_kvtier.uninstall.holds import (
    CACHES,
    FINALIZERS,
    KINDS,
    ROLLOUTS,
    Held,
    lease_wait,
    unowned,
    waits_of,
)

CACHES_SHARE = 0.5
CLOSING_SECONDS = 60.0
"""After the deadline, for what is then dropped to be seen gone, and for leases that end a little later."""
_ORDER = tuple(KINDS)


@dataclass(frozen=True, slots=True)
class Known:
    """An object as it was seen last. since: its first sight. quiet: the first look that found it deleted or
    gone, after which no lease is renewed by it; None while it lives. gone: when it was found gone."""

    held: Held
    since: float
    quiet: float | None = None
    gone: float | None = None
    dropped: str = ""

    @property
    def here(self) -> bool:
        return self.gone is None


@dataclass(frozen=True, slots=True)
class Progress:
    """All that is known, by uid: another object of the same name is another object. families: the uids of
    rollouts by namespace and name of their cache. refused: uids whose finalizer the server does not let us
    drop."""

    started: float
    deadline: float
    known: Mapping[str, Known] = field(default_factory=dict)
    families: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()

    @property
    def here(self) -> list[Known]:
        return [one for one in self.known.values() if one.here]

    def rollouts_of(self, cache: Held) -> list[Known]:
        """Also of those that are gone."""
        return [self.known[uid] for uid in self.families.get((cache.namespace, cache.name), ())]


@dataclass(frozen=True, slots=True)
class Step:
    """delete, drop: what to ask of the server now. over: nothing more is done."""

    delete: tuple[Held, ...] = ()
    drop: tuple[Held, ...] = ()
    over: bool = False


def begin(now: float, seconds: float) -> Progress:
    return Progress(now, now + seconds)


def observe(progress: Progress, found: Sequence[Held], asked: float, now: float) -> Progress:
    """After a look at all kinds. asked: when it began; what was seen alive may have lived until then and
    longer, so it is quiet from `now` at the earliest."""
    present = {one.uid: one for one in found}
    known: dict[str, Known] = {}
    for uid, before in progress.known.items():
        held = present.pop(uid, None)
        if held is None:
            ended = now if before.quiet is None else before.quiet
            known[uid] = replace(before, gone=now, quiet=ended) if before.here else before
            continue
        # A lease that was longer once may be out still.
        held = replace(held, lease=max(held.lease, before.held.lease))
        quiet = before.quiet if before.quiet is not None else now if held.deleting else None
        known[uid] = replace(before, held=held, quiet=quiet, gone=None)
    for uid, held in present.items():
        known[uid] = Known(held, asked, now if held.deleting else None)
    families: dict[tuple[str, str], tuple[str, ...]] = {}
    for uid, one in known.items():
        if one.held.plural == ROLLOUTS:
            place = one.held.namespace, one.held.cache
            families[place] = (*families.get(place, ()), uid)
    return replace(progress, known=known, families=families)


def deleted(progress: Progress, held: Held, now: float) -> Progress:
    """After the server took the deletion: whoever reads the object from now on sees it."""
    one = progress.known[held.uid]
    quiet = now if one.quiet is None else one.quiet
    return replace(progress, known={**progress.known, held.uid: replace(one, quiet=quiet)})


def dropped(progress: Progress, held: Held) -> Progress:
    """After the server took the patch."""
    known = {**progress.known}
    known[held.uid] = replace(known[held.uid], dropped=FINALIZERS[held.plural])
    return replace(progress, known=known)


def refused(progress: Progress, held: Held) -> Progress:
    return replace(progress, refused=progress.refused | {held.uid})


def least_deadline(found: Sequence[Held]) -> tuple[float, Held | None]:
    """(seconds, whose leases they are): shorter, and a finalizer could go while an agent serves a candidate.
    None where nothing can be held."""
    least: float = 0.0
    by: Held | None = None
    families: dict[tuple[str, str], list[Held]] = {}
    for one in found:
        if one.plural == ROLLOUTS:
            families.setdefault((one.namespace, one.cache), []).append(one)
            if lease_wait(one.lease) > least:
                least, by = lease_wait(one.lease), one
    for one in found:
        if one.plural == CACHES:
            wait = waits_of(one, families.get((one.namespace, one.name), []))
            if wait > least:
                least, by = wait, one
    return least, by


def safe_at(progress: Progress, one: Known) -> float | None:
    """From when on no agent can hold a candidate by this object; None while one of its rollouts lives."""
    held = one.held
    if held.plural == ROLLOUTS:
        return None if one.quiet is None else one.quiet + lease_wait(held.lease)
    mine = progress.rollouts_of(held)
    ends = [safe_at(progress, rollout) for rollout in mine]
    if not mine or unowned(held, [rollout.held for rollout in mine]):
        # What was granted before this uninstall had its first look at the cache, by what is gone since.
        ends.append(one.since + waits_of(held, ()))
    return None if None in ends else max(end for end in ends if end is not None)


def decide(progress: Progress, now: float) -> Step:
    """What follows from the last look. From the deadline on what is left of our finalizers goes, where that
    is safe; what appears then is left, or it would never end. Over at once when nothing can follow, and
    CLOSING_SECONDS after the deadline in any case."""
    here = sorted(progress.here, key=lambda one: (_ORDER.index(one.held.plural), one.held.title))
    if not here:
        return Step(over=True)
    late = now >= progress.deadline
    end = progress.deadline + CLOSING_SECONDS
    if now >= end:
        return Step(over=True)
    waits = any(known.held.ours is not None or not known.held.deleting for known in here if _first(known))
    delete = [one.held for one in here if not one.held.deleting and _free(progress, one, now, waits)]
    ends = [(one.held, _drops_at(progress, one)) for one in here] if late else []
    drop = [held for held, at in ends if at is not None and now >= at]
    soon = any(at is not None and now < at <= end for _, at in ends)
    return Step(tuple(delete), tuple(drop), over=late and not delete and not drop and not soon)


def _first(one: Known) -> bool:
    """Whether the rest waits for it: while our part in it is undone, the cache's agents are needed."""
    return one.held.plural in (ROLLOUTS, CACHES)


def _free(progress: Progress, one: Known, now: float, waits: bool) -> bool:
    """Whether it is this object's turn to be deleted. waits: what goes before the rest is not done."""
    held = one.held
    if not _first(one):
        return not waits
    if one.since >= progress.deadline:
        return False
    if held.plural == ROLLOUTS:
        return True
    half = progress.started + CACHES_SHARE * (progress.deadline - progress.started)
    mine = progress.rollouts_of(held)
    return now >= half or not any(rollout.here and rollout.held.ours is not None for rollout in mine)


def _drops_at(progress: Progress, one: Known) -> float | None:
    """When our finalizer may be dropped, after the deadline; None where it is not there, or may not go."""
    if one.held.ours is None or not one.held.deleting or one.held.uid in progress.refused:
        return None
    return safe_at(progress, one)
