"""Frames of many sessions in one call: those on the short way together, the others one by one, in order.

Why it exists: an engine decodes a token for many sequences at once, and chunks that several sessions share
are read once for all of them. Each answer has the bits of its frame alone, and a frame that is refused is
refused alone. It must not know shapes, order or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_core.errors import CoreError
from kvtier_core.receipts import StepAnswer, StepMode, StepRequest
from kvtier_core.resident import ResidentDecode, ResidentFrame

Frame = tuple[StepRequest, StepMode]


def answer_many(
    frames: Sequence[Frame],
    resident: ResidentDecode,
    prepare: Callable[[StepRequest, StepMode], ResidentFrame | None],
    alone: Callable[[ResidentFrame, StepMode], StepAnswer],
    general: Callable[[StepRequest, StepMode], StepAnswer],
) -> list[StepAnswer | CoreError]:
    """prepare: the frame on the short way, None when it is not for that; alone: answers one of those whose
    chunks come from storage; general: answers any frame. All raise CoreError for this frame. A frame of the
    general way may move any session's chunks, and two frames of a session follow each other, so what waits is
    answered before."""
    answers: list[StepAnswer | CoreError | None] = [None] * len(frames)
    waiting: list[tuple[int, ResidentFrame]] = []
    sessions: set[str] = set()

    def answer_waiting() -> None:
        if waiting:
            done = resident.answer_all([frame for _, frame in waiting])
            for (index, _), answer in zip(waiting, done, strict=True):
                answers[index] = answer
            waiting.clear()
            sessions.clear()

    for index, (request, mode) in enumerate(frames):
        if request.session_id in sessions:
            answer_waiting()
        try:
            frame = prepare(request, mode)
            if frame is None:
                answer_waiting()
                answers[index] = general(request, mode)
            elif frame.layer.streamed is not None:
                answer_waiting()
                answers[index] = alone(frame, mode)
            else:
                waiting.append((index, frame))
                sessions.add(request.session_id)
        except CoreError as error:
            answers[index] = error
    answer_waiting()
    return [answer for answer in answers if answer is not None]
