"""A frame of a session without a candidate says and changes the same, whatever computes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import FrameAnswer, FrameWork, Session
from kvtier_agent.engine_port import FrameInput
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm, SessionFacts
from tests.engine.agent_process import baseline_manifest, tiny_geometry
from tests.unit.agent.agent_fakes import Bench

LAST = 2
# Of frames, in their order: step, layer and first query. A prefill of two blocks, two tokens, and the second
# of these once more.
FRAMES = [
    *((0, layer, first) for layer in (0, LAST) for first in (0, 256)),
    *((step, layer, 511 + step) for step in (1, 2, 2) for layer in (0, 1, LAST)),
]
REFUSED, ENDED = 5, len(FRAMES) - 1
REFUSAL = CoreError(Reason.FRONTIER_MISMATCH, "no")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, baseline=baseline_manifest(tiny_geometry(LAST + 1)))
    await made.apply()
    yield made
    await made.close()


def frame_of(session: Session, step: int, layer: int, first: int) -> FrameInput:
    handle = session.handle
    return FrameInput(handle.session_id, handle.generation, step, layer, first, b"", b"", first, b"", 0)


Outcome = FrameAnswer | CoreError
Way = Callable[[CacheHost, FrameWork], Awaitable[Outcome]]


async def _on_the_loop(host: CacheHost, work: FrameWork) -> Outcome:
    try:
        return await host.frames.attend(work.session, work.frame, work.queries)
    except CoreError as error:
        return error


async def _on_the_loop_with_others(host: CacheHost, work: FrameWork) -> Outcome:
    [answer] = await host.frames.attend_many([work])
    return answer


async def _in_a_thread(host: CacheHost, work: FrameWork) -> Outcome:
    try:
        return await asyncio.to_thread(host.frames.attend_one_now, work, host.evidence)
    except CoreError as error:
        return error


WAYS: dict[str, Way] = {
    "on the loop": _on_the_loop,
    "on the loop with others": _on_the_loop_with_others,
    "in a thread": _in_a_thread,
}


def seen(session: Session) -> dict[str, Any]:
    """What a frame may have changed."""
    names = (
        *("first_step", "step", "step_first_query", "first_decode_step", "progress", "last_used_ns"),
        *("last_answered_step", "stalled_upto", "frames_running", "step_errors", "last_compared_step"),
    )
    return {name: getattr(session, name) for name in names}


def said(outcome: Outcome) -> object:
    if isinstance(outcome, CoreError):
        return outcome.reason, outcome.message, dict(outcome.facts)
    return outcome.arm, outcome.fallback, outcome.compared_error


async def story(bench: Bench, way: Way) -> list[object]:
    """What a session's frames are answered and leave behind, one refused and the last after its end."""
    host = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 1000, "")
    session.fallback = "NO_CANDIDATE"
    bench.clock.now = session.opened_ns = session.last_used_ns = 10**12
    told: list[object] = []
    for number, (step, layer, first) in enumerate(FRAMES):
        bench.clock.advance(0.5)
        bench.engine.refusal = REFUSAL if number == REFUSED else None
        if number == ENDED:
            assert session.end_when_idle(bench.clock.now + 1, "idle for long")
        queries = 256 if step == 0 else 1
        outcome = await way(host, FrameWork(session, frame_of(session, step, layer, first), queries))
        told += [said(outcome), seen(session)]
    await host.close_session(session)
    return told


@pytest.mark.parametrize("way", [name for name in WAYS if name != "on the loop"])
async def test_a_plain_frame_says_and_changes_the_same_whatever_computes_it(bench: Bench, way: str) -> None:
    expected = await story(bench, WAYS["on the loop"])
    told = await story(bench, WAYS[way])
    assert told == expected
    plainly = ServedArm.BASELINE, "NO_CANDIDATE", None
    outcomes = [plainly] * len(FRAMES)
    assert told[::2] == [
        *outcomes[:REFUSED],
        (Reason.FRONTIER_MISMATCH, "no", {}),
        *outcomes[REFUSED + 1 : ENDED],
        (Reason.SESSION_UNKNOWN, "idle for long", {"ended": "idle"}),
    ]
    final = told[-1]
    assert isinstance(final, dict)
    assert (final["progress"].tokens, final["first_step"], final["step"]) == (3, 0, 2)
