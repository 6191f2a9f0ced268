"""How a frame of a cache with two engines is answered: by the one, by the other, or by both and compared.

Why it exists: `PairedEngine` says in which engine a session is; here is what that means for one frame. It
must not know how sessions move, nor leases: whether a candidate may answer, the frame's mode says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from kvtier_agent.engine_port import FrameComparison, FrameInput, FrameMode, FrameResult
from kvtier_agent.seats import Seat, Slot, follow, unseat
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import PublishArm, StepReceipt

_EXACT = FrameMode(False, False, None, lambda: False)
# What a candidate's engine may refuse while the baseline's can still answer.
FALLS_BACK = frozenset(
    {
        Reason.NO_DESTINATION_CAPACITY,
        Reason.STORAGE_UNAVAILABLE,
        Reason.CREDIT_PRESSURE,
        Reason.NO_LEGAL_PATH,
    }
)


class Home(Protocol):
    """Where sessions go that no candidate's engine answers."""

    running: Slot

    def bring_home(self, seat: Seat, deadline: float | None = None) -> None: ...

    def settled(self, seat: Seat, deadline: float | None = None) -> None: ...


class PairedFrames:
    """Answers frames of seats whose locks their caller holds."""

    def __init__(self, house: Home) -> None:
        self._house = house

    def step(self, seat: Seat, frame: FrameInput, mode: FrameMode) -> FrameResult:
        """Of a frame that is not `plain`; the seat's lock is held."""
        asks = _asks_own(mode)
        candidate = mode.candidate
        own = candidate is not None and candidate.own
        if candidate is not None and own:
            if seat.mirror is not None and seat.mirror.digest == candidate.candidate_digest:
                return self._both(seat, seat.mirror, frame, mode)
            if seat.home.digest == candidate.candidate_digest and not seat.home.retired:
                return self._served(seat, frame, mode)
            if seat.refusal is not None:
                return self._refused(seat, frame, mode)
        self._house.settled(seat, frame.deadline)
        if asks:
            # It lost its permission for a while, and came home for good.
            seat.refusal, seat.told = CoreError(Reason.NO_CANDIDATE, "the session left its engine"), True
            return self._refused(seat, frame, mode)
        return seat.home.engine.step(seat.frame(frame, seat.at), _EXACT if own else mode)

    def _served(self, seat: Seat, frame: FrameInput, mode: FrameMode) -> FrameResult:
        """By the candidate's engine alone. What it refuses for want of room the baseline answers."""
        try:
            result = seat.home.engine.step(seat.frame(frame, seat.at), _EXACT)
        except CoreError as error:
            if error.reason not in FALLS_BACK:
                raise
            seat.refusal = error
            self._house.bring_home(seat, frame.deadline)
            return self._refused(seat, frame, mode)
        return _candidates(result) if mode.publish_candidate else result

    def _both(self, seat: Seat, mirror: Slot, frame: FrameInput, mode: FrameMode) -> FrameResult:
        """Exact first; a candidate that fails afterwards costs nothing but its own answer."""
        exact = seat.home.engine.step(seat.frame(frame, seat.at), _EXACT)
        try:
            other = mirror.engine.step(seat.frame(frame, seat.mirrored_at), _EXACT)
        except CoreError as error:
            seat.refusal = error
            unseat(seat)
            return self._with_refusal(seat, exact, mode)
        comparison = compared(exact.out, other.out) if mode.compare else None
        publishes = mode.publish_candidate and mode.may_publish()
        first = min(frame.first_row_position, frame.first_query_position)
        follow(seat, mirror, first, mirrors=publishes)
        return replace(_candidates(other) if publishes else exact, comparison=comparison)

    def _refused(self, seat: Seat, frame: FrameInput, mode: FrameMode) -> FrameResult:
        result = seat.home.engine.step(seat.frame(frame, seat.at), _EXACT)
        return self._with_refusal(seat, result, mode)

    @staticmethod
    def _with_refusal(seat: Seat, result: FrameResult, mode: FrameMode) -> FrameResult:
        """The baseline's answer in the candidate's place, and once the reason for evidence."""
        assert seat.refusal is not None
        told, seat.told = seat.told, True
        result = replace(result, refused=None if told else seat.refusal)
        if mode.publish_candidate and isinstance(result.receipt, StepReceipt):
            receipt = replace(result.receipt, fallback=seat.refusal.reason.value)
            result = replace(result, receipt=receipt)
        return result


def plain(seat: Seat, running: Slot, mode: FrameMode) -> bool:
    """Whether the baseline's engine answers the frame, and no other is concerned."""
    alone = seat.home is running and seat.mirror is None and seat.refusal is None
    return alone and (mode.candidate is None or not _asks_own(mode))


def _asks_own(mode: FrameMode) -> bool:
    """Whether an answer of a candidate's own engine is wanted, which the baseline's never has."""
    return mode.candidate is not None and mode.candidate.own and (mode.publish_candidate or mode.compare)


def compared(exact: bytes, candidate: bytes) -> FrameComparison:
    """Norms of float32 bytes, exact first. Two answers with other bits never differ by nothing."""
    left, right = np.frombuffer(exact, dtype="<f4"), np.frombuffer(candidate, dtype="<f4")
    norm = float(np.linalg.norm(right.astype(np.float64) - left.astype(np.float64)))
    if norm == 0.0 and exact != candidate:
        norm = float(np.finfo(np.float32).tiny)
    return FrameComparison(norm, float(np.linalg.norm(left.astype(np.float64))))


def _candidates(result: FrameResult) -> FrameResult:
    receipt = result.receipt
    if isinstance(receipt, StepReceipt):
        receipt = replace(receipt, arm=PublishArm.CANDIDATE)
    return replace(result, receipt=receipt, from_candidate=True)
