"""The one plan that is run, why each other lost, and what happens when none is left.

Why it exists: least declared cost among plans that end in time is a rule that anybody can check afterwards;
so is the fixed order of fallbacks (specification E.7, B.8). It must not price plans or run them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier_core.admission import UNAVAILABLE, Fallback, FallbackChoice, choose_fallback
from kvtier_core.exact_placements import InStorage, PlacementRefused
from kvtier_core.placements.preference import RECENCY, PlacementPreference, PlanKind
from kvtier_core.planning.candidates import ORDER, Approximate, Candidate, Lost
from kvtier_core.planning.facts import Terms


@dataclass(frozen=True, slots=True)
class Decision:
    """chosen: None when `fallback` decides, else `fallback` is None. considered: every plan, the chosen one
    with lost None."""

    chosen: Candidate | None
    considered: tuple[Candidate, ...]
    fallback: Fallback | None = None

    def why(self) -> dict[str, str]:
        """Each plan that was not taken, with its reason."""
        return {plan.kind.value: plan.lost.value for plan in self.considered if plan.lost is not None}


def decide(
    plans: Sequence[Candidate],
    terms: Terms,
    preference: PlacementPreference = RECENCY,
    *,
    forced: PlanKind | None = None,
    failed: frozenset[PlanKind] = frozenset(),
) -> Decision:
    """Of the plans that are legal, allowed and predicted to end within the slack: the preferred one, else the
    one of least declared cost; ties by bytes moved, by staging, then by ORDER. A plan that could not be
    priced is taken only when none was, and no prediction holds it against a deadline. forced: only this kind
    may run. failed: kinds that were run for this frame and failed.

    None left: B.8 out of what the request's contract allows. An exact request gets an exact plan or none.
    """
    judged = [_judge(plan, terms, preference, forced, failed) for plan in plans]
    # In time or not: where something can be priced, what cannot is no way around a deadline.
    priced = any(plan.cost is not None and plan.lost in (None, Lost.DEADLINE) for plan in judged)
    pool = [plan for plan in judged if plan.lost is None and (plan.cost is not None or not priced)]
    preferred = [plan for plan in pool if plan.kind is preference.prefer]
    approximate = _approximate(terms)
    best = min(preferred or pool, key=_rank) if pool else None
    outvoted = Lost.NOT_PREFERRED if preferred else Lost.COST

    def named(plan: Candidate) -> Candidate:
        if plan is best or plan.lost is not None:
            return plan
        return replace(plan, lost=Lost.UNMEASURED if plan.cost is None and priced else outvoted)

    considered = (*(named(plan) for plan in judged), approximate)
    return Decision(best, considered, None if best is not None else fallback_of(terms))


def _judge(
    plan: Candidate,
    terms: Terms,
    preference: PlacementPreference,
    forced: PlanKind | None,
    failed: frozenset[PlanKind],
) -> Candidate:
    assert isinstance(plan.kind, PlanKind)
    lost = plan.lost
    if lost is None and forced is not None and plan.kind is not forced:
        lost = Lost.NOT_ASKED_FOR
    elif lost is None and plan.kind not in preference.allowed and forced is None:
        lost = Lost.PLACEMENT_POLICY
    elif lost is None and _over(plan, preference):
        lost = Lost.STAGING_TOO_SMALL
    elif lost is None and plan.kind in failed:
        lost = Lost.FAILED
    elif lost is None and not _in_time(plan, terms):
        lost = Lost.DEADLINE
    return plan if lost is plan.lost else replace(plan, lost=lost)


def _over(plan: Candidate, preference: PlacementPreference) -> bool:
    return preference.staging_bytes is not None and plan.staging > preference.staging_bytes


def _in_time(plan: Candidate, terms: Terms) -> bool:
    if terms.slack is None:
        return True
    return terms.slack > 0.0 and (plan.seconds is None or plan.seconds <= terms.slack)


def _rank(plan: Candidate) -> tuple[float, int, int, int]:
    assert isinstance(plan.kind, PlanKind)
    return (plan.cost if plan.cost is not None else 0.0, plan.moved, plan.staging, ORDER.index(plan.kind))


def _approximate(terms: Terms) -> Candidate:
    """On record beside the exact plans: nothing here takes it. An approximate session's selector is asked by
    the step, under its lease."""
    lost = Lost.NOT_ASKED_FOR
    try:
        InStorage(
            stated_exact=False, approximation_allowed=terms.approximation_allowed and not terms.exact
        ).check()
    except PlacementRefused as refused:
        lost = Lost(refused.reason.value)
    return Candidate(Approximate.SELECTED_SUPPORT, lost=lost)


def fallback_of(terms: Terms) -> Fallback:
    """The first action of B.8 that the contract allows, when no exact plan is left. An exact fetch has been
    tried then: it is what the plans are."""
    allowed = terms.fallbacks

    def path(seconds: float, action: Fallback) -> float:
        return seconds if action in allowed else UNAVAILABLE

    degrade = Fallback.ACCEPT_DECLARED_DEGRADED in allowed
    return choose_fallback(
        FallbackChoice(
            slack=math.inf if terms.slack is None else terms.slack,
            recompute=path(terms.recompute, Fallback.RECOMPUTE_EXACT),
            retry=path(terms.retry, Fallback.POSTPONE_FOR_EXACT_RETRY),
            exact=terms.exact or not degrade,
            approximation_allowed=terms.approximation_allowed and degrade,
        )
    )
