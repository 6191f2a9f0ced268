"""Frames of many sessions in one call: those on the short way together, the others one by one, in order.

Why it exists: an engine decodes a token for many sequences at once, and chunks that several sessions share
are read once for all of them, in memory and from storage. Each answer has the bits of its frame alone, and a
frame that is refused is refused alone. It must not know shapes, order or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_core.errors import CoreError
from kvtier_core.receipts import StepAnswer, StepMode, StepRequest
from kvtier_core.resident import ResidentDecode, ResidentFrame
from kvtier_core.stepplans import Tried

Frame = tuple[StepRequest, StepMode]


def answer_many(
    frames: Sequence[Frame],
    resident: ResidentDecode,
    prepare: Callable[[StepRequest, StepMode], ResidentFrame | None],
    streamed: Callable[[Sequence[tuple[ResidentFrame, StepMode]]], list[StepAnswer | CoreError]],
    general: Callable[[StepRequest, StepMode], StepAnswer],
) -> list[StepAnswer | CoreError]:
    """prepare: the frame on the short way, None when it is not for that; general: answers any frame. Both
    raise CoreError for this frame. streamed: answers those of the short way whose chunks come from storage,
    and may end in the general way. A frame of the general way may move any session's chunks, and two frames
    of a session follow each other, so what waits is answered before; what needs storage at last."""
    answers: list[StepAnswer | CoreError | None] = [None] * len(frames)
    here: list[tuple[int, ResidentFrame]] = []
    away: list[tuple[int, ResidentFrame]] = []
    sessions: set[str] = set()

    def answer_waiting() -> None:
        waiting = [*here, *away]
        done: list[StepAnswer | CoreError] = []
        if here:
            done += resident.answer_all([frame for _, frame in here])
        if away:
            done += streamed([(frame, frames[index][1]) for index, frame in away])
        for (index, _), answer in zip(waiting, done, strict=True):
            answers[index] = answer
        here.clear()
        away.clear()
        sessions.clear()

    for index, (request, mode) in enumerate(frames):
        if request.session_id in sessions:
            answer_waiting()
        try:
            frame = prepare(request, mode)
            if frame is None:
                answer_waiting()
                answers[index] = general(request, mode)
            else:
                (here if frame.layer.streamed is None else away).append((index, frame))
                sessions.add(request.session_id)
        except CoreError as error:
            answers[index] = error
    answer_waiting()
    return [answer for answer in answers if answer is not None]


def ended_in_turn(
    found: Sequence[StepAnswer | Tried | CoreError],
    ended: Callable[[int, StepAnswer | Tried], StepAnswer],
) -> list[StepAnswer | CoreError]:
    """`ended` of each, by its number: what is behind an answer, and at last the other plans of frames whose
    first one failed, which may move any session's chunks."""
    answers: dict[int, StepAnswer | CoreError] = {}
    for number in sorted(range(len(found)), key=lambda at: isinstance(found[at], Tried)):
        one = found[number]
        try:
            answers[number] = one if isinstance(one, CoreError) else ended(number, one)
        except CoreError as error:
            answers[number] = error
    return [answers[number] for number in range(len(found))]
