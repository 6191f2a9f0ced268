"""Evidence is asked for on the beat, once for all looks that fall on it, and a look takes its own alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_evidence.reader import Applied
from kvtier_evidence.window import WindowKey
from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.ports import AgentTarget, AgentUnreachable, NotLeader
from kvtier_operator.rollout import beatreads
from kvtier_operator.rollout.beatreads import Answer, BeatReads
from kvtier_operator.rollout.readings import Reading
from tests.unit.rollout.rollout_world import EPOCH, Clock

NODES = tuple(AgentTarget(f"node-{n}", f"uid-{n}", f"here:{n}", f"boot-{n}") for n in range(3))
BEAT, NEXT = EPOCH + 5.0, EPOCH + 15.0


def reading(
    name: str, *, fence: int = 7, opened: int = 6, cache: str = "", nodes: tuple[AgentTarget, ...] = NODES
) -> Reading:
    return Reading(
        cache=common.CacheRef(namespace="serving", name=name, uid=cache or f"cache-{name}"),
        fence=common.Fence(value=fence, rollout_uid=name),
        key=WindowKey(name, 1, "Canary", 0, "sha256:c", "sha256:b", "sha256:g", opened),
        nodes=nodes,
    )


@dataclass
class Leading:
    leads: bool = True

    def check(self) -> None:
        if not self.leads:
            raise NotLeader("another one leads")

    def leading_since(self) -> float | None:
        return 0.0 if self.leads else None


@dataclass
class States:
    """Agents that are asked for their state only."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    down: bool = False

    async def get_state(
        self, node: AgentTarget, cache_uid: str = "", *, deadline_seconds: float | None = None
    ) -> control.GetStateResponse:
        self.asked.append((node.name, cache_uid))
        if self.down:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "down")
        return control.GetStateResponse(node=node.name, boot_id=node.boot_id)


class Rig:
    """shared_from: 1, but where it is what is tried."""

    def __init__(self, shared_from: int = 1) -> None:
        self.clock, self.leader, self.states = Clock(), Leading(), States()
        self.agents = RecentAgents(self.states, self.clock)  # type: ignore[arg-type]
        self.beats = BeatReads(self.agents, self.leader, self.clock, shared_from=shared_from)
        self.asked: list[tuple[str, str, float]] = []
        self.hold: asyncio.Event | None = None
        self.heard = asyncio.Event()

    async def _answer(self, name: str, node: AgentTarget) -> Answer:
        self.asked.append((name, node.name, self.clock.seconds))
        self.heard.set()
        if self.hold is not None:
            await self.hold.wait()
        return Applied.APPLIED

    def ask(self, one: Reading, node: AgentTarget) -> Coroutine[None, None, Answer]:
        return self._answer(one.key.rollout_uid, node)

    def expect(self, name: str, due_at: float = BEAT, **of: Any) -> None:
        self.beats.expect(reading(name, **of), due_at, self.ask)

    async def at(self, seconds: float) -> float:
        """The beat's own turn at this moment, and all that follows from it."""
        self.clock.seconds = seconds
        left = self.beats.tick()
        await settled()
        return left

    async def until(self, asked: int) -> None:
        async with asyncio.timeout(10.0):
            while len(self.asked) < asked:
                self.heard.clear()
                await self.heard.wait()

    async def take(
        self, name: str, due_at: float = BEAT, max_age: float = 4.0, **of: Any
    ) -> dict[str, Answer]:
        found = self.beats.take(reading(name, **of), due_at, max_age)
        await settled()
        return {node.name: await task for node, task in found.items()}


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


ALL = {node.name: Applied.APPLIED for node in NODES}


async def test_all_looks_of_a_beat_are_asked_for_at_once_before_any_of_them_comes() -> None:
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.expect(name)
    rig.expect("later", NEXT)
    assert await rig.at(BEAT - 0.5) == pytest.approx(0.5) and rig.asked == []
    await rig.at(BEAT)
    assert sorted(rig.asked) == [(name, node.name, BEAT) for name in ("a", "b", "c") for node in NODES]
    assert sorted(rig.states.asked) == [(node.name, "") for node in NODES], "of each, once, of all its caches"
    await rig.agents.recent_state(NODES[0], "any", 4.0, for_all=True)
    assert len(rig.states.asked) == len(NODES), "and looks find that answer"
    assert [await rig.take(name) for name in ("a", "b", "c")] == [ALL, ALL, ALL]
    assert len(rig.asked) == 9 and len(rig.beats) == 1


@pytest.mark.parametrize(
    "others, asked",
    [
        pytest.param((), set(), id="alone"),
        pytest.param((NODES[1:],), {"a", "other-0"}, id="with-one-that-has-an-agent-with-it"),
        pytest.param((NODES[:1], NODES[:1]), {"a", "other-0", "other-1"}, id="all-on-one-agent"),
    ],
)
async def test_a_look_that_shares_no_agent_with_another_asks_for_itself(
    others: tuple[tuple[AgentTarget, ...], ...], asked: set[str]
) -> None:
    rig = Rig(shared_from=beatreads.SHARED_FROM)
    rig.expect("a", nodes=NODES[:2])
    for number, nodes in enumerate(others):
        rig.expect(f"other-{number}", nodes=nodes)
    rig.expect("elsewhere", nodes=(AgentTarget("node-9", "uid-9", "here:9", "boot-9"),))
    await rig.at(BEAT)
    assert {name for name, _, _ in rig.asked} == asked
    shared = set(NODES[:2]) & {node for nodes in others for node in nodes}
    assert {name for name, _ in rig.states.asked} == {node.name for node in shared}
    assert len(rig.beats) == len(asked), "nothing is kept of the others"


async def test_an_agent_that_does_not_answer_for_its_state_harms_no_beat() -> None:
    rig = Rig()
    rig.states.down = True
    rig.expect("a")
    rig.expect("b")
    await rig.at(BEAT)
    assert len(rig.states.asked) == 3 and await rig.take("b") == ALL


@pytest.mark.parametrize(
    "due_at, late, of",
    [
        pytest.param(NEXT, 0.1, {}, id="another-beat"),
        pytest.param(BEAT, 0.1, {"fence": 8}, id="another-fence"),
        pytest.param(BEAT, 0.1, {"opened": 7}, id="another-window"),
        pytest.param(BEAT, 0.1, {"cache": "made-again"}, id="another-cache-of-the-name"),
        pytest.param(BEAT, 4.1, {}, id="too-old"),
    ],
)
async def test_a_look_takes_only_what_was_asked_for_it_and_is_young(
    due_at: float, late: float, of: dict[str, Any]
) -> None:
    rig = Rig()
    rig.expect("a")
    await rig.at(BEAT)
    rig.clock.seconds = BEAT + late
    assert await rig.take("a", due_at, **of) == {}
    assert len(rig.beats) == 0, "and nobody else will"


async def test_what_was_taken_is_not_taken_again() -> None:
    rig = Rig()
    rig.expect("a")
    await rig.at(BEAT)
    assert await rig.take("a") == ALL and await rig.take("a") == {}


async def test_an_agent_that_came_since_is_not_among_the_asked() -> None:
    rig = Rig()
    rig.expect("a", nodes=NODES[:2])
    await rig.at(BEAT)
    assert set(await rig.take("a")) == {"node-0", "node-1"}


async def test_a_look_that_is_faster_than_the_beat_has_all_others_asked_with_it() -> None:
    rig = Rig()
    rig.expect("a")
    rig.expect("b")
    rig.clock.seconds = BEAT
    assert await rig.take("a") == ALL
    assert {name for name, _, _ in rig.asked} == {"a", "b"} and len(rig.asked) == 6
    await rig.at(BEAT + 0.01)
    assert len(rig.asked) == 6 and await rig.take("b") == ALL


async def test_what_is_asked_of_all_is_in_the_trace_of_none_of_them() -> None:
    """A look that is faster than the beat has others' evidence asked, too."""
    trace = ContextVar("trace", default="")
    rig = Rig()
    seen: list[str] = []
    ask, state = rig._answer, rig.states.get_state

    async def answer(name: str, node: AgentTarget) -> Answer:
        seen.append(trace.get())
        return await ask(name, node)

    async def get_state(*given: Any, **options: Any) -> control.GetStateResponse:
        seen.append(trace.get())
        return await state(*given, **options)

    rig._answer, rig.states.get_state = answer, get_state  # type: ignore[method-assign]
    rig.expect("a")
    rig.expect("b")
    rig.clock.seconds = BEAT
    trace.set("of a")
    assert await rig.take("a") == ALL
    assert seen == [""] * 9


async def test_an_answer_that_is_under_way_is_waited_for() -> None:
    rig = Rig()
    rig.hold = asyncio.Event()
    rig.expect("a")
    await rig.at(BEAT)
    found = rig.beats.take(reading("a"), BEAT, 4.0)
    assert found and not any(task.done() for task in found.values())
    rig.hold.set()
    assert {await task for task in found.values()} == {Applied.APPLIED}


async def test_who_looked_in_between_is_asked_on_his_new_beat_alone() -> None:
    rig = Rig()
    rig.expect("a", BEAT)
    rig.expect("a", NEXT)
    await rig.at(BEAT)
    assert rig.asked == []
    await rig.at(NEXT)
    assert len(rig.asked) == 3 and await rig.take("a", NEXT) == ALL


async def test_whoever_does_not_lead_asks_nobody() -> None:
    rig = Rig()
    rig.expect("a")
    rig.leader.leads = False
    await rig.at(BEAT)
    assert rig.asked == [] and rig.states.asked == [] and await rig.take("a") == {}


async def test_answers_that_nobody_takes_end_with_the_next_beat_or_their_rollout() -> None:
    rig = Rig()
    rig.hold = asyncio.Event()
    rig.expect("a")
    rig.expect("b")
    await rig.at(BEAT)
    before = asyncio.all_tasks()
    rig.expect("a", NEXT)
    rig.beats.forget("b")
    await rig.at(NEXT)
    assert len(rig.beats) == 1
    assert sum(task.cancelled() for task in before) == 6


async def test_what_is_expected_is_bounded_and_who_finds_no_room_asks_for_himself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beatreads, "MAX_EXPECTED", 2)
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.expect(name)
    rig.expect("a", NEXT)
    await rig.at(BEAT)
    assert {name for name, _, _ in rig.asked} == {"b"} and await rig.take("c") == {}


async def test_who_is_expected_and_forgotten_again_and_again_takes_no_room_for_each_time() -> None:
    rig = Rig()
    for _ in range(20):
        rig.expect("a")
        rig.beats.forget("a")
        rig.expect("a")
        rig.expect("a", NEXT)
    assert {moment: list(uids) for moment, uids in rig.beats._moments.items()} == {BEAT: ["a"], NEXT: ["a"]}
    await rig.at(NEXT)
    assert len(rig.asked) == 3 and rig.beats._moments == {}


async def test_it_wakes_for_a_look_that_is_due_sooner_and_ends_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beatreads, "MAX_WAIT_SECONDS", 3600.0)
    rig = Rig()
    rig.hold = asyncio.Event()
    running = asyncio.create_task(rig.beats.run())
    await settled()
    rig.expect("a", rig.clock.seconds)
    await rig.until(3)
    tasks = list(rig.beats.take(reading("a"), rig.clock.seconds, 4.0).values())
    rig.expect("b", rig.clock.seconds)
    await rig.until(6)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(rig.beats) == 0 and not any(task.cancelled() for task in tasks)
    rig.hold.set()
    assert [await task for task in tasks] == [Applied.APPLIED] * 3, "whoever took them sees to them"


STEPS = st.lists(
    st.tuples(st.sampled_from(("expect", "take", "forget", "wait")), st.integers(0, 3), st.integers(0, 12)),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
@example([("expect", 0, 0), ("take", 0, 0), ("expect", 0, 0), ("take", 0, 0)])
@example([("expect", 0, 0), ("expect", 1, 1), ("take", 1, 1)])
@example([("expect", 0, 0), ("wait", 0, 4), ("wait", 0, 12), ("wait", 0, 12), ("take", 0, 0)])
def test_whatever_comes_in_which_order_a_look_gets_its_own_alone_and_each_is_asked_once(
    steps: list[tuple[str, int, int]],
) -> None:
    asyncio.run(compared(steps))


async def compared(steps: list[tuple[str, int, int]]) -> None:
    """With a model: whom each expects when, and for which moment it was asked at what time."""
    rig = Rig()
    expected: dict[str, float] = {}
    kept: dict[str, tuple[float, float]] = {}
    asked: Counter[str] = Counter()

    def turn() -> None:
        now = rig.clock.seconds
        for name in [name for name, due_at in expected.items() if due_at <= now]:
            kept[name] = expected.pop(name), now
            asked[name] += len(NODES)

    for verb, which, number in steps:
        name, due_at = f"r{which}", EPOCH + number
        if verb == "expect":
            rig.expect(name, due_at)
            expected[name] = due_at
        elif verb == "forget":
            rig.beats.forget(name)
            await settled()
            expected.pop(name, None)
            kept.pop(name, None)
        elif verb == "wait":
            await rig.at(rig.clock.seconds + number / 4)
            turn()
        else:
            if expected.get(name) == due_at:
                turn()
            moment, at = kept.pop(name, (0.0, 0.0))
            mine = moment == due_at and rig.clock.seconds - at <= 4.0
            assert await rig.take(name, due_at) == (ALL if mine else {})
        assert Counter(name for name, _, _ in rig.asked) == asked
        assert len(rig.beats) == len(expected) + len(kept)
