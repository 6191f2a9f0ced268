"""An agent's answer serves those who ask a moment later, and nobody who has told it something since."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents import recent
from kvtier_operator.agents.recent import RecentAgents, state_and_age
from kvtier_operator.ports import AgentError, AgentTarget, AgentUnreachable
from tests.unit.control.control_fakes import FakeClock

NODE = AgentTarget("a", "uid-a", "here:1", "boot-1")
AGE = 0.5


class Asked:
    """Counts GetState; its commands wait for `go_on`, when there is one."""

    def __init__(self) -> None:
        self.states = 0
        self.wanted: list[str] = []
        self.go_on: asyncio.Event | None = None
        self.answer: asyncio.Event | None = None
        self.down = False
        self.fails = False
        self.boot = "boot-1"

    async def get_state(
        self, node: AgentTarget, cache_uid: str = "", *, deadline_seconds: float | None = None
    ) -> Any:
        self.states += 1
        self.wanted.append(cache_uid)
        if self.down:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "down")
        answer = control.GetStateResponse(node=node.name, agent_version=str(self.states), boot_id=self.boot)
        if self.answer is not None:
            await self.answer.wait()
        if self.fails:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "went down")
        return answer

    async def grant(self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None) -> Any:
        if self.go_on is not None:
            await self.go_on.wait()
        if self.down:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "down")
        if request.boot_id not in ("", self.boot):
            raise AgentError(node.name, "BOOT_ID_MISMATCH", "the agent restarted", 0.0, {})
        return control.GrantResponse()

    apply_baseline = remove_cache = revoke = grant

    def retain(self, names: Any) -> None:
        """Nothing is kept here."""


class Rig:
    def __init__(self) -> None:
        self.asked, self.clock = Asked(), FakeClock()
        self.agents = RecentAgents(self.asked, self.clock)  # type: ignore[arg-type]

    async def look(self, cache: str = "mine", node: AgentTarget = NODE, *, for_all: bool = True) -> int:
        """The number of the answer that this look got."""
        state = await self.agents.recent_state(node, cache, AGE, for_all=for_all)
        return int(state.agent_version)


@pytest.mark.parametrize(
    "seconds, asked",
    [pytest.param(0.0, 1, id="at-once"), pytest.param(0.5, 1, id="in-time"), pytest.param(0.6, 2, id="late")],
)
async def test_one_answer_serves_all_who_ask_in_time(seconds: float, asked: int) -> None:
    rig = Rig()
    await rig.look("other")
    rig.clock.advance(seconds)
    assert await rig.look() == asked


@pytest.mark.parametrize("verb", ["grant", "revoke", "apply_baseline", "remove_cache"])
async def test_a_command_ends_what_was_said_of_its_cache_and_of_no_other(verb: str) -> None:
    rig = Rig()
    await rig.look()
    rig.clock.advance(0.1)
    message = {
        "grant": control.GrantRequest,
        "revoke": control.RevokeRequest,
        "apply_baseline": control.ApplyBaselineRequest,
        "remove_cache": control.RemoveCacheRequest,
    }[verb]
    await getattr(rig.agents, verb)(NODE, message(cache=common.CacheRef(uid="mine")))
    assert await rig.look("other") == 1
    assert await rig.look("mine") == 2


async def test_what_was_asked_while_a_command_was_under_way_is_not_shown_to_its_sender() -> None:
    """The answer may be of before the command or of after it."""
    rig = Rig()
    rig.asked.go_on = asyncio.Event()
    request = control.GrantRequest(cache=common.CacheRef(uid="mine"))
    telling = asyncio.create_task(rig.agents.grant(NODE, request))
    await asyncio.sleep(0)
    rig.clock.advance(0.1)
    assert await rig.look("other") == 1
    rig.clock.advance(0.1)
    rig.asked.go_on.set()
    await telling
    assert await rig.look("mine") == 2


async def test_a_command_that_fails_may_have_arrived() -> None:
    rig = Rig()
    await rig.look()
    rig.asked.down = True
    with pytest.raises(AgentUnreachable):
        await rig.agents.grant(NODE, control.GrantRequest(cache=common.CacheRef(uid="mine")))
    rig.asked.down = False
    assert await rig.look() == 2


async def test_silence_is_never_covered_by_an_older_answer() -> None:
    rig = Rig()
    await rig.look()
    rig.asked.down = True
    rig.clock.advance(0.6)
    with pytest.raises(AgentUnreachable):
        await rig.look()
    with pytest.raises(AgentUnreachable):
        await rig.look("other")


async def asking(rig: Rig, *caches: str) -> list[asyncio.Task[int]]:
    """Looks that are all under way; the agent answers when `rig.asked.answer` is set."""
    rig.asked.answer = asyncio.Event()
    looks = []
    for cache in caches:
        looks.append(asyncio.create_task(rig.look(cache)))
        await asyncio.sleep(0)
    return looks


async def test_who_asks_while_another_waits_for_the_answer_gets_the_same() -> None:
    rig = Rig()
    looks = await asking(rig, "one", "two", "three")
    assert rig.asked.answer is not None
    rig.asked.answer.set()
    assert await asyncio.gather(*looks) == [1, 1, 1]
    assert rig.asked.states == 1


async def test_an_asker_that_is_cancelled_does_not_take_the_answer_from_the_others() -> None:
    rig = Rig()
    first, second, third = await asking(rig, "one", "two", "three")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second.cancel()
    assert rig.asked.answer is not None
    rig.asked.answer.set()
    async with asyncio.timeout(20):
        assert await third == 2
    assert second.cancelled()


async def test_a_failure_is_that_of_all_who_waited_for_it() -> None:
    rig = Rig()
    looks = await asking(rig, "one", "two")
    rig.asked.fails = True
    assert rig.asked.answer is not None
    rig.asked.answer.set()
    found = await asyncio.gather(*looks, return_exceptions=True)
    assert [type(one) for one in found] == [AgentUnreachable, AgentUnreachable]
    rig.asked.fails = False
    assert await rig.look() == 2


@pytest.mark.parametrize("passed, answer", [(AGE, 1), (AGE + 0.1, 2)], ids=["in-time", "too-long-ago"])
async def test_who_asks_waits_for_no_question_that_is_older_than_the_answer_may_be(
    passed: float, answer: int
) -> None:
    rig = Rig()
    (looking,) = await asking(rig, "other")
    rig.clock.advance(passed)
    mine = asyncio.create_task(rig.look("mine"))
    await asyncio.sleep(0)
    assert rig.asked.answer is not None
    rig.asked.answer.set()
    assert (await looking, await mine) == (1, answer)


async def test_who_has_told_the_agent_something_does_not_wait_for_an_older_question() -> None:
    rig = Rig()
    (looking,) = await asking(rig, "other")
    rig.clock.advance(0.1)
    await rig.agents.grant(NODE, control.GrantRequest(cache=common.CacheRef(uid="mine")))
    mine = asyncio.create_task(rig.look("mine"))
    await asyncio.sleep(0)
    assert rig.asked.answer is not None
    rig.asked.answer.set()
    assert (await looking, await mine) == (1, 2)


async def test_another_life_or_address_of_the_agent_is_asked_itself() -> None:
    rig = Rig()
    await rig.look()
    assert await rig.look(node=replace(NODE, boot_id="boot-2")) == 2
    assert await rig.look(node=replace(NODE, boot_id="boot-2", address="there:1")) == 3


async def test_an_agent_that_is_gone_leaves_nothing_behind() -> None:
    rig = Rig()
    await rig.look()
    rig.agents.retain({"b"})
    assert await rig.look() == 2


async def test_a_bound_on_what_is_remembered_shows_nobody_a_time_before_his_own_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that was on its way when a command was told is not newer for having arrived after it."""
    monkeypatch.setattr(recent, "MAX_TOLD", 1)
    rig = Rig()
    rig.asked.answer = asyncio.Event()
    looking = asyncio.create_task(rig.look("other"))
    await asyncio.sleep(0)
    rig.clock.advance(0.1)
    for uid in ("mine", "others"):
        await rig.agents.grant(NODE, control.GrantRequest(cache=common.CacheRef(uid=uid)))
    rig.asked.answer.set()
    assert await looking == 1
    rig.clock.advance(0.1)
    assert await rig.look("mine") == 2
    assert await rig.look("other") == 2, "what was asked afterwards serves again"


async def test_an_agent_that_restarts_is_asked_again_as_soon_as_it_refuses_and_then_told() -> None:
    """Its KVNode may still name the life before."""
    rig = Rig()
    before = await rig.agents.recent_state(NODE, "mine", AGE)
    rig.asked.boot = "boot-2"
    with pytest.raises(AgentError):
        await rig.agents.grant(NODE, _grant(before.boot_id))
    rig.clock.advance(0.1)
    after = await rig.agents.recent_state(NODE, "mine", AGE)
    assert after.boot_id == "boot-2"
    await rig.agents.grant(NODE, _grant(after.boot_id))


@pytest.mark.parametrize("under_way", [False, True], ids=["answered", "under-way"])
@pytest.mark.parametrize(
    "asked, looking, wanted",
    [
        pytest.param(("mine", False), ("mine", False), ["mine"], id="of-one-for-the-same"),
        pytest.param(("other", False), ("mine", False), ["other", "mine"], id="of-one-for-another"),
        pytest.param(("other", True), ("mine", False), [""], id="of-all-for-one"),
        pytest.param(("mine", False), ("mine", True), ["mine"], id="of-one-for-the-same-for-all"),
        pytest.param(("other", False), ("mine", True), ["other", ""], id="of-one-for-another-for-all"),
    ],
)
async def test_an_answer_of_one_cache_serves_those_of_that_one_and_of_all_everybody(
    asked: tuple[str, bool], looking: tuple[str, bool], wanted: list[str], under_way: bool
) -> None:
    rig = Rig()
    if under_way:
        rig.asked.answer = asyncio.Event()
    first = asyncio.create_task(rig.look(asked[0], for_all=asked[1]))
    if not under_way:
        await first
    else:
        await asyncio.sleep(0)
    second = asyncio.create_task(rig.look(looking[0], for_all=looking[1]))
    await asyncio.sleep(0)
    if rig.asked.answer is not None:
        rig.asked.answer.set()
    assert await asyncio.gather(first, second) == [1, len(wanted)]
    assert rig.asked.wanted == wanted


async def test_a_command_ends_also_what_was_said_of_its_cache_alone() -> None:
    rig = Rig()
    await rig.look("mine", for_all=False)
    await rig.look("other", for_all=False)
    rig.clock.advance(0.1)
    await rig.agents.grant(NODE, control.GrantRequest(cache=common.CacheRef(uid="mine")))
    assert await rig.look("other", for_all=False) == 2
    assert await rig.look("mine", for_all=False) == 3


async def test_of_an_agent_that_has_restarted_nothing_counts_that_it_said_before() -> None:
    rig = Rig()
    await rig.look("one", for_all=False)
    await rig.look("two", for_all=True)
    rig.asked.boot = "boot-2"
    await rig.agents.get_state(NODE, "three")
    assert await rig.look("three", for_all=False) == 3
    assert await rig.look("one", for_all=False) == 4
    assert await rig.look("two", for_all=False) == 5


async def test_silence_ends_what_was_said_of_any_cache() -> None:
    rig = Rig()
    await rig.look("one", for_all=False)
    rig.asked.down = True
    for _ in range(2):
        with pytest.raises(AgentUnreachable):
            await rig.look("two", for_all=False)
        with pytest.raises(AgentUnreachable):
            await rig.look("one", for_all=False)


async def test_of_one_agent_few_answers_of_single_caches_are_kept_the_latest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent, "MAX_SINGLE", 2)
    rig = Rig()
    await rig.look("all", for_all=True)
    rig.clock.advance(AGE + 0.1)
    for uid in ("one", "two", "three"):
        await rig.look(uid, for_all=False)
    assert [await rig.look(uid, for_all=False) for uid in ("two", "three")] == [3, 4]
    assert await rig.look("one", for_all=False) == 5


def _grant(boot_id: str) -> control.GrantRequest:
    return control.GrantRequest(cache=common.CacheRef(uid="mine"), boot_id=boot_id)


async def test_an_answer_that_nobody_asks_for_again_is_not_kept() -> None:
    """Each cache of an agent is asked for alone now and then, and an answer has many fields."""
    rig = Rig()
    for index in range(2_000):
        await rig.look(f"cache-{index}", for_all=False)
        rig.clock.advance(recent.KEPT_SECONDS / 2)
        assert len(rig.agents._answers[NODE.name]) <= 3


async def test_who_asks_hears_how_old_the_answer_is() -> None:
    """Counted from when it was asked for, until whoever hears it asked: how long it took does not age it."""
    rig = Rig()
    rig.asked.answer = asyncio.Event()
    first = asyncio.create_task(rig.agents.recent_answer(NODE, "mine", AGE))
    await asyncio.sleep(0)
    rig.clock.advance(0.2)
    second = asyncio.create_task(rig.agents.recent_answer(NODE, "mine", AGE))
    await asyncio.sleep(0)
    rig.clock.advance(2.0)
    rig.asked.answer.set()
    assert [(await first)[1], (await second)[1]] == [0.0, pytest.approx(0.2)]
    assert (await state_and_age(rig.agents, NODE, "mine", 4.0))[1] == pytest.approx(2.2)
    assert rig.asked.states == 1
    assert (await state_and_age(rig.asked, NODE, "mine", 4.0))[1] == 0.0  # type: ignore[arg-type]
