"""Sessions of an exact candidate beside the baseline's: the same rows and tiers, other plans and homes.

Why it exists: a placement is chosen for a cache, but a release must try another one on some sessions first. A
lane is what such sessions have of their own: the planner that obeys the candidate's placement, and the rule
by which their chunks find a home. Answers keep their bits whatever the lane. It must not know who may be
served by a candidate, nor what a policy is.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection

from kvtier_core.placement import Placement
from kvtier_core.placements.homes import Homes
from kvtier_core.placements.preference import PlacementPreference
from kvtier_core.receipts import PublishArm, StepAnswer, StepMode
from kvtier_core.stepplans import StepPlans
from kvtier_crds.manifest import Fallback

MAX_LANES = 8


class Lanes:
    """Of one engine; its lock is held."""

    def __init__(self, plans: StepPlans, placement: Placement) -> None:
        self._plans = plans
        self._placement = placement
        self._homes: OrderedDict[str, Homes] = OrderedDict()

    def prepare(
        self, lane: str, preference: PlacementPreference, allowed: Collection[Fallback] | None = None
    ) -> None:
        """Makes the lane; the same one again changes nothing. The oldest goes when there are too many: its
        sessions are then planned as the baseline's."""
        if lane in self._homes:
            return
        while len(self._homes) >= MAX_LANES:
            oldest, _ = self._homes.popitem(last=False)
            self._plans.close_lane(oldest)
        self._homes[lane] = self._placement.homes_by(preference)
        self._plans.open_lane(lane, preference, allowed)

    def reserve(
        self, number: int, session_id: str, lane: str, layers: int, slots: int
    ) -> tuple[list[int], int]:
        """As `Placement.reserve_session`, of a session that is opened in that lane. One whose lane is not
        known is the baseline's."""
        homes = self._homes.get(lane)
        if homes is None:
            return self._placement.reserve_session(number, layers, slots)
        self._placement.rule.give(number, homes)
        reserved = self._placement.reserve_session(number, layers, slots)
        self._plans.join(session_id, lane)
        return reserved

    def leave(self, number: int, session_id: str) -> bool:
        """Whether it was in one. From now on it is planned, and its chunks are placed, as the baseline's."""
        if not self._plans.leave(session_id):
            return False
        self._placement.rule.take_back(number)
        return True

    def short(self, session_id: str, mode: StepMode) -> bool:
        """Whether the frame may go the short way though a candidate's answer is wanted: its plan is kept."""
        return (
            mode.publish is PublishArm.CANDIDATE
            and bool(mode.lane)
            and not mode.compare
            and mode.selector is None
            and mode.plan is None
            and self._plans.lane_of(session_id) == mode.lane
        )


def in_candidates_name(answer: StepAnswer, mode: StepMode) -> StepAnswer:
    """An answer of the short way as the candidate's, where it was asked for and may still be published."""
    if mode.publish is PublishArm.EXACT:
        return answer
    if mode.may_publish is not None and not mode.may_publish():
        return answer
    receipt = dataclasses.replace(
        answer.receipt, arm=PublishArm.CANDIDATE, manifest_digest=mode.candidate_digest or ""
    )
    return dataclasses.replace(answer, receipt=receipt)
