"""What an edit or a frame may say of a session's positions: refusals that name the field and what is legal.

Why it exists: a frame that was meant for the positions of before would be answered over other rows without
looking wrong. Pure: it changes nothing, and must not know rows or tiers.
"""

from __future__ import annotations

import dataclasses

from kvtier_core.appends import Session
from kvtier_core.edits.requests import MAX_RANGES, Drop, Reposition
from kvtier_core.errors import CoreError, Reason
from kvtier_core.positions import PositionView, canonical_ranges
from kvtier_core.receipts import StepRequest

MAX_POSITION = 1 << 40


def bad_argument(field: str, value: object, legal: str) -> CoreError:
    return CoreError(
        Reason.BAD_ARGUMENT, f"{field} is {value}; legal: {legal}", {"field": field, "legal": legal}
    )


def check_epoch(session: Session, stated: int) -> None:
    """POSITION_CONTRACT_MISMATCH when the caller states another position epoch than the session's."""
    if stated and stated != session.position_epoch:
        raise CoreError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"position_epoch {stated} is not the session's {session.position_epoch}",
            {"position_epoch": session.position_epoch},
        )


def check_between_steps(session: Session, what: str) -> None:
    """STEP_ORDER while layers disagree about the frontier."""
    frontiers = {state.frontier for state in session.layers}
    if len(frontiers) > 1:
        raise CoreError(
            Reason.STEP_ORDER,
            f"{what} stands between steps; layer {session.layer} was the last that has its rows",
            {"step": session.step, "layer": session.layer},
        )


def placed(session: Session, request: StepRequest) -> StepRequest:
    """The frame with rows where it names positions. POSITION_CONTRACT_MISMATCH for another position epoch,
    and for positions that an edit has left behind."""
    check_epoch(session, request.position_epoch)
    view = session.positions
    if not view.edited:
        return request
    asked = min(request.first_row_position, request.first_query_position)
    if asked < view.tail_position:
        raise CoreError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"position {asked} is behind the session's last edit; legal: {view.tail_position} and beyond",
            {"position_epoch": session.position_epoch, "legal_from": view.tail_position},
        )
    return dataclasses.replace(
        request,
        first_row_position=request.first_row_position + view.shift,
        first_query_position=request.first_query_position + view.shift,
        committed_frontier=max(0, request.committed_frontier + view.shift),
    )


def dropped(view: PositionView, frontier: int, operation: Drop) -> PositionView:
    """The view without the ranges. BAD_ARGUMENT."""
    end = view.next_position(frontier)
    if len(operation.ranges) > MAX_RANGES:
        raise bad_argument("drop.ranges", f"{len(operation.ranges)} long", f"at most {MAX_RANGES}")
    for index, (first, last) in enumerate(operation.ranges):
        if not 0 <= first < last <= end:
            raise bad_argument(f"drop.ranges[{index}]", f"[{first}, {last})", f"0 <= first < last <= {end}")
    return view.drop(frontier, canonical_ranges(operation.ranges))


def repositioned(view: PositionView, frontier: int, operation: Reposition) -> PositionView:
    """The view with rows moved. BAD_ARGUMENT."""
    if operation.moves is None:
        return view.compact(frontier)
    end = view.next_position(frontier)
    if len(operation.moves) > MAX_RANGES:
        raise bad_argument("reposition.moves", f"{len(operation.moves)} long", f"at most {MAX_RANGES}")
    at = 0
    for index, move in enumerate(operation.moves):
        if not at <= move.first < move.last <= end:
            raise bad_argument(
                f"reposition.moves[{index}]",
                f"[{move.first}, {move.last})",
                f"{at} <= first < last <= {end}, ascending",
            )
        if not 0 <= move.to <= MAX_POSITION - (move.last - move.first):
            raise bad_argument(f"reposition.moves[{index}].to", move.to, f"0 to {MAX_POSITION} less its rows")
        at = move.last
    try:
        return view.reposition(frontier, [(move.first, move.last, move.to) for move in operation.moves])
    except ValueError as error:
        raise bad_argument("reposition.moves", error, "positions that ascend with rows") from error
