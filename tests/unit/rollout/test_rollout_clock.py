"""A wall clock that is set, forth and back, under a running operator and between two of them; leases on
agents do not know the wall clock at all."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

import kvtier_agent
import kvtier_core.release
from kvtier_agent.boottime import boottime_ns
from kvtier_operator.rollout.inputs import CandidateView, Inputs
from kvtier_operator.rollout.moves import APPROVAL_SECONDS, lease_end
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, held

TICK = 10.0 / 6
HOUR = 3600.0
QUICK = [
    {"name": "Shadow", "minDuration": "1s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "1s"},
    {"name": "Full", "soak": "1s", "holdback": "2%"},
]


@pytest.mark.parametrize(("ttl", "wait"), [(2.0, 3.0), (10.0, 11.0), (60.0, 66.0), (HOUR, 3960.0)])
@pytest.mark.parametrize("measured", [False, True], ids=["by-the-wall", "by-what-was-waited"])
def test_a_lease_has_provably_ended_a_tenth_after_its_ttl_and_at_least_a_second(
    ttl: float, wait: float, measured: bool
) -> None:
    """Clocks of two machines may go apart by so much."""
    since, now = 1000.0, 1005.0
    inputs = Inputs(
        now=now, uid="u", name="n", generation=1, spec=None, spec_error="", deleting=False, cache=None,
        busy_with="", superseded_by="", candidate=CandidateView(), agents=(), lease_ttl=ttl,
        quiet_since=since + 2.0, waited={since: 3.0} if measured else {},
    )  # fmt: skip
    # A leader that began two seconds later knows of no renewal before.
    assert lease_end(inputs, since) == pytest.approx(since + 2.0 + wait)


@pytest.mark.parametrize("jump", [-HOUR, -1.0, 1.0, HOUR], ids=lambda jump: f"{jump:+.0f}s")
@pytest.mark.parametrize("restarted", [False, True], ids=["same-operator", "next-operator"])
async def test_harm_is_found_within_one_interval_after_the_clock_was_set(
    jump: float, restarted: bool
) -> None:
    """A successor on another node reads times that were written by another clock."""
    world = World(progressDeadline="10h")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(5)
    world.clock.ahead = jump
    if restarted:
        world.restart()
    await world.run(5)
    assert world.where == ("Progressing", "Shadow", 0)
    world.feed.gates["output"] = Verdict.FAIL
    looks = world.feed.looks
    await world.run(2 * TICK)
    assert world.feed.looks > looks
    assert world.status["rollback"]["cause"] == "GateFailed"
    await world.until("RolledBack")
    assert held(world) == []


@pytest.mark.parametrize("jump", [-HOUR, HOUR], ids=["back", "forth"])
@pytest.mark.parametrize(
    ("phase", "stage"), [("Progressing", "Canary"), ("Completed", "Full")], ids=["canary", "completed"]
)
async def test_nothing_is_lost_and_nothing_done_twice_when_the_clock_is_set(
    jump: float, phase: str, stage: str
) -> None:
    """Leases go on by the agents' own clocks: no resumption, no other fence, no share of the budget."""
    world = World(progressDeadline="10h", stages=QUICK)
    world.feed.default = Verdict.INSUFFICIENT if phase == "Progressing" else Verdict.PASS
    if phase == "Progressing":
        await world.until("Progressing", "Shadow")
        world.intent("Promote", 1)
    await world.until(phase, stage)
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(5)
    before, fence = world.where, world.status["fence"]
    grants = [len(sim.grants) for sim in world.sims.values()]
    world.clock.ahead = jump
    await world.run(12)
    assert world.where == before
    assert world.status["fence"] == fence
    assert [len(sim.grants) for sim in world.sims.values()] == grants
    assert held(world) == ["node-0", "node-1"]


async def test_ticks_that_a_jump_forth_skipped_run_once() -> None:
    world = World(progressDeadline="10h")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(5)
    looks = world.feed.looks
    world.clock.ahead = HOUR
    for _ in range(5):
        await world.pass_()
    assert world.feed.looks == looks + 1


@pytest.mark.parametrize("jump", [-HOUR, -5.0, 5.0, HOUR], ids=lambda jump: f"{jump:+.0f}s")
@pytest.mark.parametrize("restarted", [False, True], ids=["same-operator", "next-operator"])
async def test_a_clock_that_is_set_in_a_return_neither_ends_its_wait_nor_lengthens_it(
    jump: float, restarted: bool
) -> None:
    """A lease may go on for as long as a lease lasts: of 10 s, with a grace of one. A successor, which knows
    of no renewal, counts from its own start, whatever the clocks of the two say."""
    world = World(progressDeadline="10h", stages=QUICK)
    await world.until("Progressing", "Canary")
    world.feed.default = Verdict.INSUFFICIENT
    # Or it would count from the start of its own process.
    await world.run(30)
    world.sims["node-1"].cut_off = True
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RollingBack")
    await world.run(2)
    world.clock.ahead = jump
    if restarted:
        world.restart()
    await world.run(7)
    assert world.condition("CandidateRevoked")["status"] == "False"
    await world.run(6)
    assert world.condition("CandidateRevoked")["status"] == "True"
    assert held(world) == []


@pytest.mark.parametrize("jump", [-4 * HOUR, 4 * HOUR], ids=["back", "forth"])
async def test_a_step_lasts_as_long_as_declared_though_the_clock_was_set(jump: float) -> None:
    """Or one jump would promote through every step whose gates pass, at an hour that stands for no other."""
    stages = [{**QUICK[0], "minDuration": "1h"}, *QUICK[1:]]
    world = World(progressDeadline="100h", stages=stages)
    await world.until("Progressing", "Shadow")
    await world.run(1790, tick=5)
    world.clock.ahead = jump
    await world.run(1790, tick=5)
    assert world.where == ("Progressing", "Shadow", 0)
    await world.run(40, tick=5)
    assert world.where[1] != "Shadow"


async def test_a_next_operator_counts_a_step_on_from_what_was_written() -> None:
    world = World(progressDeadline="100h", stages=[{**QUICK[0], "minDuration": "1h"}, *QUICK[1:]])
    await world.until("Progressing", "Shadow")
    await world.run(1800, tick=5)
    world.restart()
    await world.run(1780, tick=5)
    assert world.where == ("Progressing", "Shadow", 0)
    await world.run(40, tick=5)
    assert world.where[1] != "Shadow"


async def test_a_clock_that_is_set_forth_ends_no_attempt() -> None:
    world = World(progressDeadline="1h")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(1800, tick=5)
    world.clock.ahead = 2 * HOUR
    await world.run(1780, tick=5)
    assert world.where == ("Progressing", "Shadow", 0)
    await world.run(40, tick=5)
    assert world.status["rollback"]["cause"] == "DeadlineExceeded"


async def test_a_clock_that_is_set_forth_leaves_no_step_with_too_little_evidence_before_its_time() -> None:
    stages = [{**QUICK[0], "minDuration": "10m"}, *QUICK[1:]]
    world = World(progressDeadline="100h", onInsufficient="RollBack", stages=stages)
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(5)
    world.clock.ahead = HOUR
    await world.run(585, tick=5)
    assert world.where == ("Progressing", "Shadow", 0)
    await world.run(40, tick=5)
    assert world.status["rollback"]["cause"] == "DeadlineExceeded"


async def test_a_clock_that_is_set_forth_ends_no_wait_for_a_turn() -> None:
    world = World(progressDeadline="1h")
    cache = world.api.objects[world.cache_key]
    world.api.put({**cache, "spec": {**cache["spec"], "suspend": True}})
    await world.run(5)
    assert world.where[0] == "Pending"
    world.clock.ahead = 2 * HOUR
    await world.run(5)
    assert world.where[0] == "Pending"


async def test_a_clock_that_is_set_forth_ends_no_approval() -> None:
    world = World(stages=QUICK)
    await world.until("Completed")
    world.clock.ahead = 30 * HOUR
    await world.run(12)
    assert world.where[0] == "Completed"
    assert held(world) == ["node-0", "node-1"]


async def test_an_approval_is_renewed_in_time_though_the_clock_was_set_back() -> None:
    world = World(stages=QUICK)
    await world.until("Completed")
    await world.run(3)
    before = world.cache_status["approved"]["grantExpires"]
    world.clock.ahead = -30 * HOUR
    await world.run(3)
    assert world.cache_status["approved"]["grantExpires"] == before
    world.clock.seconds += APPROVAL_SECONDS / 2
    await world.run(3)
    assert world.where[0] == "Completed"
    assert world.cache_status["approved"]["grantExpires"] != before


async def test_a_clock_that_is_set_forth_makes_no_agent_lost_and_later_nobody_forgotten() -> None:
    world = World(progressDeadline="100h", onLeaseExpired="RollBack", leaseTTL="60s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(100)
    world.sims["node-1"].cut_off = True
    await world.run(10)
    world.clock.ahead = HOUR
    await world.run(50)
    assert world.where == ("Progressing", "Shadow", 0)
    await world.run(10)
    assert world.status["rollback"]["cause"] == "AgentLost"


def test_the_agents_lease_clock_is_boottime() -> None:
    """It goes on while the machine is suspended, and nobody can set it."""
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before <= boottime_ns() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)


RELEASE = sorted(Path(kvtier_core.release.__file__).parent.glob("*.py"))
AGENT = [
    Path(kvtier_agent.__file__).parent / f"{name}.py"
    for name in ("cachehost", "cachesession", "node", "control_service", "evidence_windows")
]


@pytest.mark.parametrize("path", [*RELEASE, *AGENT], ids=lambda path: path.stem)
def test_what_decides_on_leases_reads_no_wall_clock(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not names & {"time", "time_ns", "now", "utcnow", "CLOCK_REALTIME"}
    assert not imported & {"datetime", "time", "time_ns"}


async def test_a_clock_that_is_set_forth_deletes_nothing_before_its_time() -> None:
    """Of the hour that a finished rollout is kept, none has passed; and then all of it."""
    world = World(ttlAfterFinished="1h", stages=QUICK)
    await world.until("Progressing", "Shadow")
    world.intent("Abort", 1)
    await world.until("RolledBack")
    await world.run(3)
    world.clock.ahead = 24 * HOUR
    await world.run(30)
    assert world.rollout in world.api.objects
    world.clock.seconds += HOUR
    await world.run(3)
    assert world.rollout not in world.api.objects
