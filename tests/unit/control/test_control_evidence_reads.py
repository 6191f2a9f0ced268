"""Reads of evidence that go together: one call, and nobody notices anything of the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.evidencereads import MAX_ITEMS, MOMENT_SECONDS, READ_SECONDS, EvidenceReads
from kvtier_operator.ports import AgentError, AgentTarget, AgentUnreachable, NotLeader

A = AgentTarget("a", "uid-a", "here:1", "boot-a")
B = AgentTarget("b", "uid-b", "there:1", "boot-b")


class Moments:
    """A clock whose waits end when the test says so."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.waits: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        wait = asyncio.get_running_loop().create_future()
        self.waits.append((seconds, wait))
        await wait

    async def pass_(self, seconds: float = MOMENT_SECONDS) -> None:
        """All that wait now have waited."""
        self.elapsed += seconds
        for _, wait in self.waits:
            if not wait.done():
                wait.set_result(None)
        self.waits.clear()
        await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def read(name: str) -> control.ReadEvidenceRequest:
    return control.ReadEvidenceRequest(cache=common.CacheRef(uid=name))


def evidence(name: str) -> control.ReadEvidenceResponse:
    return control.ReadEvidenceResponse(epoch=name)


class Called:
    """An agent. calls: node, and the caches of a call, or of one alone its cache. It answers at most `most`
    items, refuses caches called "no…", and as an agent of an earlier version knows of no many reads."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str] | str]] = []
        self.seconds: list[float | None] = []
        self.failure: Exception | None = None
        self.most = 10**6
        self.old: set[str] = set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.cancelled = 0

    async def read_evidence(
        self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None
    ) -> control.ReadEvidenceResponse:
        name = request.cache.uid
        await self._called(node, name, deadline_seconds)
        if name.startswith("no"):
            raise AgentError(node.name, "CACHE_UNKNOWN", name, 0.0, {})
        return evidence(name)

    async def read_evidence_many(
        self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None
    ) -> control.ReadEvidenceManyResponse:
        names = [item.cache.uid for item in request.items]
        if node.boot_id in self.old:
            self.calls.append((node.name, names))
            raise AgentUnreachable(node.name, "UNIMPLEMENTED", "Method not found!")
        await self._called(node, names, deadline_seconds)
        answer = control.ReadEvidenceManyResponse()
        for name in names[: self.most]:
            if name.startswith("no"):
                error = common.ErrorDetail(
                    reason="FENCE_STALE", message=name, retry_after_ms=250, facts={"highest_fence": "7"}
                )
                answer.results.add(error=error)
            else:
                answer.results.add(evidence=evidence(name))
        return answer

    async def _called(self, node: AgentTarget, what: list[str] | str, seconds: float | None) -> None:
        self.calls.append((node.name, what))
        self.seconds.append(seconds)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure


class Rig:
    def __init__(self) -> None:
        self.clock, self.agent = Moments(), Called()
        self.reads = EvidenceReads(self.agent, self.clock)  # type: ignore[arg-type]

    def ask(
        self, name: str, node: AgentTarget = A, seconds: float = READ_SECONDS
    ) -> asyncio.Task[control.ReadEvidenceResponse]:
        return asyncio.create_task(self.reads.read(node, read(name), seconds))


async def found(*asked: asyncio.Task[control.ReadEvidenceResponse]) -> list[str]:
    """Each one's answer, or the kind of its failure."""
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*asked, return_exceptions=True)
    return [
        one.epoch if isinstance(one, control.ReadEvidenceResponse) else type(one).__name__ for one in answers
    ]


async def test_what_is_asked_of_one_agent_within_a_moment_goes_as_one_call() -> None:
    rig = Rig()
    asked = [rig.ask("x"), rig.ask("y"), rig.ask("far", B), rig.ask("z")]
    await turns()
    assert rig.agent.calls == []
    assert [seconds for seconds, _ in rig.clock.waits] == [MOMENT_SECONDS] * 2
    await rig.clock.pass_()
    assert sorted(rig.agent.calls, key=str) == [("a", ["x", "y", "z"]), ("b", "far")]
    assert await found(*asked) == ["x", "y", "far", "z"]
    late = rig.ask("late")
    await turns()
    await rig.clock.pass_()
    assert rig.agent.calls[2:] == [("a", "late")]
    assert await found(late) == ["late"]


async def test_who_asks_while_a_call_is_under_way_goes_with_the_next() -> None:
    rig = Rig()
    rig.agent.go_on.clear()
    first = [rig.ask("x"), rig.ask("y")]
    await turns()
    await rig.clock.pass_()
    second = [rig.ask("x"), rig.ask("z")]
    await turns()
    await rig.clock.pass_()
    assert rig.agent.calls == [("a", ["x", "y"]), ("a", ["x", "z"])]
    rig.agent.go_on.set()
    assert await found(*first, *second) == ["x", "y", "x", "z"]


@pytest.mark.parametrize(
    "other",
    [replace(A, boot_id="boot-2"), replace(A, address="there:1"), replace(A, uid="uid-2")],
    ids=["another-life", "another-place", "another-node"],
)
async def test_only_reads_of_the_same_target_go_together(other: AgentTarget) -> None:
    rig = Rig()
    asked = [rig.ask("x"), rig.ask("y", other)]
    await turns()
    await rig.clock.pass_()
    assert [what for _, what in rig.agent.calls] == ["x", "y"]
    assert await found(*asked) == ["x", "y"]


async def test_items_of_a_call_are_bounded() -> None:
    rig = Rig()
    names = [f"c{index}" for index in range(2 * MAX_ITEMS + 2)]
    asked = [rig.ask(name) for name in names]
    await turns()
    await rig.clock.pass_()
    assert [len(what) for _, what in rig.agent.calls] == [MAX_ITEMS, MAX_ITEMS, 2]
    assert await found(*asked) == names


async def test_a_refused_item_harms_no_other_and_is_refused_as_one_alone_is() -> None:
    rig = Rig()
    asked = [rig.ask("x"), rig.ask("no"), rig.ask("y")]
    await turns()
    await rig.clock.pass_()
    assert await found(*asked) == ["x", "AgentError", "y"]
    error = asked[1].exception()
    assert isinstance(error, AgentError)
    assert (error.node, error.reason, error.message) == ("a", "FENCE_STALE", "no")
    assert (error.retry_after_seconds, error.facts) == (0.25, {"highest_fence": "7"})


@pytest.mark.parametrize(
    "failure",
    [
        AgentUnreachable("a", "UNAVAILABLE", "down"),
        AgentError("a", "CALLER_NOT_OPERATOR", "who?", 0.0, {}),
        NotLeader("the Lease is gone"),
        ZeroDivisionError("a defect"),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_a_call_that_fails_fails_each_of_its_reads(failure: Exception) -> None:
    rig = Rig()
    rig.agent.failure = failure
    asked = [rig.ask("x"), rig.ask("y"), rig.ask("alone", B)]
    await turns()
    await rig.clock.pass_()
    assert await found(*asked) == [type(failure).__name__] * 3
    assert len(rig.agent.calls) == 2, "nothing is tried again"
    rig.agent.failure = None
    again = [rig.ask("x"), rig.ask("y")]
    await turns()
    await rig.clock.pass_()
    assert await found(*again) == ["x", "y"]


@pytest.mark.parametrize("when", ["in-the-moment", "under-way"])
async def test_who_is_cancelled_takes_nothing_from_the_others(when: str) -> None:
    rig = Rig()
    rig.agent.go_on.clear()
    asked = [rig.ask("x"), rig.ask("gone"), rig.ask("y")]
    await turns()
    if when == "under-way":
        await rig.clock.pass_()
    asked[1].cancel()
    await turns()
    assert asked[1].cancelled()
    await rig.clock.pass_()
    rig.agent.go_on.set()
    assert await found(asked[0], asked[2]) == ["x", "y"]
    assert rig.agent.calls == [("a", ["x", "y"] if when == "in-the-moment" else ["x", "gone", "y"])]
    assert rig.agent.cancelled == 0


@pytest.mark.parametrize("when", ["at-once", "in-the-moment", "under-way"])
async def test_for_nobody_nothing_is_sent_or_waited_for(when: str) -> None:
    rig = Rig()
    rig.agent.go_on.clear()
    asked = [rig.ask("x"), rig.ask("y")]
    # Its first turn asks, the batch's own comes after it.
    await asyncio.sleep(0)
    if when != "at-once":
        await turns()
    if when == "under-way":
        await rig.clock.pass_()
    for task in asked:
        task.cancel()
    # Whoever comes in the same turn is not taken along.
    next_one = rig.ask("z")
    await asyncio.wait(asked)
    await turns()
    assert rig.agent.cancelled == (when == "under-way")
    rig.agent.go_on.set()
    await rig.clock.pass_()
    assert await found(next_one) == ["z"]
    assert rig.agent.calls == [*([("a", ["x", "y"])] if when == "under-way" else []), ("a", "z")]


class TestOldAgent:
    """One that does not know of many reads at once."""

    async def test_it_is_asked_one_by_one_from_then_on(self) -> None:
        rig = Rig()
        rig.agent.old.add(A.boot_id)
        asked = [rig.ask("x"), rig.ask("no"), rig.ask("y")]
        await turns()
        await rig.clock.pass_()
        assert rig.agent.calls == [("a", ["x", "no", "y"]), ("a", "x"), ("a", "no"), ("a", "y")]
        assert await found(*asked) == ["x", "AgentError", "y"]
        rig.agent.calls.clear()
        later = [rig.ask("x"), rig.ask("z")]
        await turns()
        assert rig.agent.calls == [("a", "x"), ("a", "z")], "and nobody waits for another"
        assert await found(*later) == ["x", "z"]

    async def test_until_it_restarts(self) -> None:
        rig = Rig()
        rig.agent.old.add(A.boot_id)
        first = [rig.ask("x"), rig.ask("y")]
        await turns()
        await rig.clock.pass_()
        await found(*first)
        rig.agent.calls.clear()
        again = replace(A, boot_id="boot-2")
        asked = [rig.ask("x", again), rig.ask("y", again)]
        await turns()
        await rig.clock.pass_()
        assert rig.agent.calls == [("a", ["x", "y"])]
        assert await found(*asked) == ["x", "y"]

    async def test_or_is_forgotten_and_no_other_is_taken_for_it(self) -> None:
        rig = Rig()
        rig.agent.old.add(A.boot_id)
        for kept in (("a", "b"), ("b",)):
            asked = [rig.ask("x"), rig.ask("y"), rig.ask("x", B), rig.ask("y", B)]
            await turns()
            await rig.clock.pass_()
            assert await found(*asked) == ["x", "y"] * 2
            assert [what for node, what in rig.agent.calls if node == "b"] == [["x", "y"]]
            assert ("a", ["x", "y"]) in rig.agent.calls
            rig.agent.calls.clear()
            rig.reads.retain(set(kept))
            if "a" in kept:
                known = [rig.ask("x"), rig.ask("y")]
                assert await found(*known) == ["x", "y"]
                assert ("a", ["x", "y"]) not in rig.agent.calls
                rig.agent.calls.clear()
                rig.reads.retain({"b"})

    async def test_whoever_left_meanwhile_is_not_asked_for(self) -> None:
        rig = Rig()
        rig.agent.old.add(A.boot_id)
        rig.agent.go_on.clear()
        asked = [rig.ask("x"), rig.ask("y"), rig.ask("z")]
        await turns()
        await rig.clock.pass_()
        asked[1].cancel()
        await turns()
        rig.agent.go_on.set()
        assert await found(asked[0], asked[2]) == ["x", "z"]


@pytest.mark.parametrize(
    ("most", "calls"),
    [(2, [["a", "b", "no", "c"], ["no", "c"]]), (3, [["a", "b", "no", "c"], "c"])],
    ids=["two-of-four", "three-of-four"],
)
async def test_what_an_answer_had_no_room_for_is_asked_for_again(most: int, calls: list[Any]) -> None:
    rig = Rig()
    rig.agent.most = most
    asked = [rig.ask(name) for name in ("a", "b", "no", "c")]
    await turns()
    await rig.clock.pass_()
    assert await found(*asked) == ["a", "b", "AgentError", "c"]
    assert [what for _, what in rig.agent.calls] == calls


async def test_an_agent_that_answers_nothing_is_not_asked_for_ever() -> None:
    rig = Rig()
    rig.agent.most = 0
    asked = [rig.ask("x"), rig.ask("y")]
    await turns()
    await rig.clock.pass_()
    assert await found(*asked) == ["AgentUnreachable"] * 2
    assert len(rig.agent.calls) == 1


async def test_a_result_without_an_answer_is_one_that_was_not_read() -> None:
    rig = Rig()

    async def nothing(*_: Any, **__: Any) -> control.ReadEvidenceManyResponse:
        return control.ReadEvidenceManyResponse(results=[{}, {"evidence": {"epoch": "y"}}])

    rig.agent.read_evidence_many = nothing  # type: ignore[method-assign]
    asked = [rig.ask("x"), rig.ask("y")]
    await turns()
    await rig.clock.pass_()
    assert await found(*asked) == ["AgentUnreachable", "y"]


async def test_a_call_lasts_as_long_as_the_most_patient_waits_and_no_longer() -> None:
    rig = Rig()
    asked = [rig.ask("x", seconds=3.0), rig.ask("y", seconds=9.0), rig.ask("alone", B, seconds=2.0)]
    await turns()
    await rig.clock.pass_(0.5)
    await found(*asked)
    assert rig.agent.seconds == [8.5, 1.5]


async def test_the_moment_and_the_turn_count_against_each_ones_own_deadline() -> None:
    rig = Rig()
    rig.agent.go_on.clear()
    hasty, patient = rig.ask("x", seconds=0.0), rig.ask("y")
    assert await found(hasty) == ["AgentUnreachable"]
    error = hasty.exception()
    assert isinstance(error, AgentUnreachable) and error.code == "DEADLINE_EXCEEDED"
    await rig.clock.pass_()
    rig.agent.go_on.set()
    assert await found(patient) == ["y"]
    assert rig.agent.calls == [("a", "y")]


@pytest.mark.parametrize("when", ["at-once", "in-the-moment", "under-way"])
async def test_as_it_is_closed_whoever_waits_is_told(when: str) -> None:
    rig = Rig()
    rig.agent.go_on.clear()
    asked = [rig.ask("x"), rig.ask("y")]
    await asyncio.sleep(0)
    if when != "at-once":
        await turns()
    if when == "under-way":
        await rig.clock.pass_()
    await rig.reads.close()
    assert await found(*asked) == ["AgentUnreachable"] * 2
    assert [getattr(task.exception(), "code", "") for task in asked] == ["CHANNEL_CLOSED"] * 2
    assert rig.agent.cancelled == (when == "under-way")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("moment"), st.just(0), st.booleans()),
        st.tuples(st.just("hold"), st.just(0), st.booleans()),
        st.tuples(st.just("most"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("age"), st.integers(0, 2), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_whatever_happens_each_gets_its_own_answer_and_nobody_is_left(steps: list[Any]) -> None:
    """Asks, cancellations, agents of either version, answers in parts, slow agents, in any order."""
    nodes = [A, B, replace(A, boot_id="boot-2")]

    async def live() -> None:
        rig = Rig()
        asked: list[tuple[str, asyncio.Task[control.ReadEvidenceResponse]]] = []
        for what, number, yes in steps:
            if what == "ask":
                name = f"{'no-' if yes else ''}{len(asked)}"
                asked.append((name, rig.ask(name, nodes[number])))
            elif what == "cancel" and asked:
                asked[number % len(asked)][1].cancel()
            elif what == "moment":
                await rig.clock.pass_()
            elif what == "hold":
                rig.agent.go_on.clear() if yes else rig.agent.go_on.set()
            elif what == "most":
                rig.agent.most = number
            elif what == "age":
                (rig.agent.old.add if yes else rig.agent.old.discard)(nodes[number].boot_id)
            if yes:
                await turns()
        await turns()
        rig.agent.go_on.set()
        await rig.clock.pass_()
        for name, answer in zip(
            [name for name, _ in asked], await found(*(task for _, task in asked)), strict=True
        ):
            assert answer in ("CancelledError", "AgentError" if name.startswith("no-") else name)
        cancels = sum(what == "cancel" for what, _, _ in steps)
        assert sum(task.cancelled() for _, task in asked) <= cancels
        await turns()
        assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()

    asyncio.run(live())
