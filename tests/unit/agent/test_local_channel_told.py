"""What frames tell the evidence while the loop stands still is bounded, and no harm is lost."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kvtier_agent.evidence_port import Progress
from kvtier_agent.localchannel.evidence import MAX_WAITING, LoopEvidence
from kvtier_evidence.metrics import ILLEGAL_FALLBACKS
from kvtier_evidence.window import WindowKey

KEY = WindowKey("rollout", 1, "Canary", 0, "sha256:c", "sha256:b", "sha256:g", 1)


class Told:
    """Evidence that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.broken = ""

    def step_error(self, key: WindowKey, unit: str, step: int, error: float) -> None:
        if unit == self.broken:
            raise ZeroDivisionError("a defect")
        self.calls.append(("error", unit, step, error))

    def progress(self, key: WindowKey, unit: str, progress: Progress) -> None:
        self.calls.append(("progress", unit, progress.tokens))

    def stall(self, key: WindowKey, unit: str, seconds: float) -> None:
        self.calls.append(("stall", unit, seconds))

    def zero_tolerance(self, key: WindowKey, counter: str) -> None:
        self.calls.append(("zero", counter))


class Loop:
    """Runs what was posted when it is told to."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []
        self.lost: list[int] = []

    def run(self) -> None:
        while self.posted:
            self.posted.pop(0)()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def evidence(told: Told, loop: Loop) -> LoopEvidence:
    return LoopEvidence(told, loop.posted.append, loop.lost.append)


def test_all_is_told_in_order_and_the_loop_is_woken_once(
    told: Told, loop: Loop, evidence: LoopEvidence
) -> None:
    evidence.step_error(KEY, "a", 1, 0.5)
    evidence.progress(KEY, "a", Progress(2, 0.1, 0.2))
    evidence.stall(KEY, "b", 0.25)
    evidence.zero_tolerance(KEY, ILLEGAL_FALLBACKS)
    assert (len(loop.posted), told.calls) == (1, [])
    loop.run()
    first = [("error", "a", 1, 0.5), ("progress", "a", 2), ("stall", "b", 0.25), ("zero", ILLEGAL_FALLBACKS)]
    assert told.calls == first
    evidence.stall(KEY, "b", 0.5)
    loop.run()
    assert told.calls == [*first, ("stall", "b", 0.5)]
    assert loop.lost == []


def test_while_the_loop_stands_still_what_waits_is_bounded_and_harm_is_kept(
    told: Told, loop: Loop, evidence: LoopEvidence
) -> None:
    for step in range(MAX_WAITING):
        evidence.step_error(KEY, "a", step, 0.0)
    rounds = 10
    for step in range(rounds):
        evidence.step_error(KEY, "b", step, 0.125)
        evidence.stall(KEY, "b", 0.5)
        evidence.progress(KEY, "b", Progress(step, 0.1, 0.2))
        evidence.zero_tolerance(KEY, ILLEGAL_FALLBACKS)
    assert len(loop.posted) == 1
    assert len(evidence._waiting) == MAX_WAITING
    assert evidence._beyond is not None
    assert [len(kept) for kept in (evidence._beyond.missing, evidence._beyond.stalls)] == [1, 1]
    loop.run()
    assert told.calls[:MAX_WAITING] == [("error", "a", step, 0.0) for step in range(MAX_WAITING)]
    beyond = told.calls[MAX_WAITING:]
    # A unit without a value is the worst one; a sum and a count lose nothing, the last progress is all.
    [missing] = [call for call in beyond if call[0] == "error"]
    assert missing[:3] == ("error", "b", rounds - 1) and math.isnan(missing[3])  # type: ignore[arg-type]
    assert [call for call in beyond if call[0] == "stall"] == [("stall", "b", 0.5 * rounds)]
    assert [call for call in beyond if call[0] == "progress"] == [("progress", "b", rounds - 1)]
    assert beyond.count(("zero", ILLEGAL_FALLBACKS)) == rounds
    assert loop.lost == [rounds]
    evidence.step_error(KEY, "b", rounds, 0.25)
    loop.run()
    assert told.calls[-1] == ("error", "b", rounds, 0.25)


def test_a_defect_of_one_costs_nothing_of_what_waits_behind_it(
    told: Told, loop: Loop, evidence: LoopEvidence
) -> None:
    told.broken = "a"
    evidence.step_error(KEY, "a", 1, 0.5)
    evidence.zero_tolerance(KEY, ILLEGAL_FALLBACKS)
    loop.run()
    assert told.calls == [("zero", ILLEGAL_FALLBACKS)]
