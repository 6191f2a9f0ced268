"""Which agents may hold the candidate: at most `maxNodes`, none that is cordoned, and they stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.ports import AgentTarget, AgentUnreachable, NodeView
from kvtier_operator.rollout.holders import gone, nodes_of
from kvtier_operator.rollout.inputs import AgentView
from kvtier_operator.rollout.observe import choose
from kvtier_operator.rollout.state import Holders
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import AgentSim, World, held

STATES = st.sampled_from(("able", "able", "able", "cordoned", "draining", "dead", "excluded"))


def member(name: str, state: str) -> NodeView:
    return NodeView(
        target=AgentTarget(name, f"uid-{name}", "127.0.0.1:1", "boot"),
        live=state != "dead",
        cordoned=state == "cordoned",
        draining=state == "draining",
        lease_renewed=None,
        lease_seconds=10.0,
        raw={},
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(STATES, st.booleans(), st.booleans()), max_size=12),
    st.integers(0, 6),
    st.integers(0, 2),
)
def test_exactly_the_nodes_of_the_radius(
    pool: list[tuple[str, bool, bool]], max_nodes: int, away: int
) -> None:
    members = [member(f"n{i}", state) for i, (state, _, _) in enumerate(pool)]
    views = [
        AgentView(f"n{i}", True, granted_rollout="uid" if holds else "")
        for i, (_, holds, _) in enumerate(pool)
    ]
    excluded = {f"n{i}" for i, (state, _, _) in enumerate(pool) if state == "excluded"}
    ended = {f"n{i}" for i, (_, _, over) in enumerate(pool) if over}
    able = {f"n{i}" for i, (state, _, _) in enumerate(pool) if state == "able"}
    holding = {f"n{i}" for i, (_, holds, _) in enumerate(pool) if holds}

    def chosen(limit: int, *, turned: bool = False) -> frozenset[str]:
        order = -1 if turned else 1
        return choose(members[::order], views[::order], "uid", limit, excluded, ended=ended, away=away)

    got = chosen(max_nodes)
    assert got <= able
    taken = len(holding - able - ended) + away
    assert len(got) == (min(max(0, max_nodes - taken), len(able)) if max_nodes else len(able))
    holders = holding & able
    assert holders <= got or got <= holders, "holders come first"
    assert chosen(max_nodes, turned=True) == got, "whatever the order of the pool"
    if max_nodes:
        assert got <= chosen(max_nodes + 1), "a wider radius keeps its nodes"


def candidates(world: World, left: Sequence[AgentSim]) -> int:
    """On how many nodes a lease on the candidate is valid now, those that nobody can ask included."""
    return sum(sim.candidate is not None for sim in (*world.sims.values(), *left))


@pytest.mark.parametrize("how", ["dead", "cordoned", "deleted"])
@pytest.mark.parametrize("restarted", [False, True], ids=["same-operator", "next-operator"])
async def test_no_other_node_takes_a_place_before_its_candidate_has_ended(how: str, restarted: bool) -> None:
    """A node that nobody can ask may be serving all the same, as long as its lease lasts."""
    world = World(nodes=3, blastRadius={"maxNodes": 1}, leaseTTL="60s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(3)
    (first,) = held(world)
    left: list[AgentSim] = []
    if how == "dead":
        world.sims[first].alive = False
    elif how == "cordoned":
        world.sims[first].cordoned = True
    else:
        left.append(world.sims.pop(first))
    world.node_status[first] = {
        "candidates": [
            {
                "cacheUID": world.api.objects[world.cache_key]["metadata"]["uid"],
                "digest": world.status["candidate"]["digest"],
            }
        ]
    }
    if restarted:
        world.restart()
    agents: Any = world.deps.agents
    do, most = agents._do, 0

    async def counted(*args: Any) -> Any:
        nonlocal most
        answer = await do(*args)
        most = max(most, candidates(world, left))
        return answer

    agents._do = counted
    for _ in range(80):
        await world.run(1)
        most = max(most, candidates(world, left))
    assert most <= 1
    (second,) = held(world)
    assert second != first


async def test_the_lease_of_a_silent_node_is_waited_for_from_when_nobody_renews_it() -> None:
    """It does not say what it holds, but takes renewals all the while: its silence is no wait for its end."""
    world = World(nodes=2, blastRadius={"maxNodes": 1}, leaseTTL="10s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(3)
    (first,) = held(world)
    agents: Any = world.deps.agents
    ask = agents.get_state

    async def unless_first(node: AgentTarget, *args: Any, **kwargs: Any) -> Any:
        if node.name == first:
            raise AgentUnreachable(first, "DEADLINE_EXCEEDED", "late")
        return await ask(node, *args, **kwargs)

    agents.get_state = unless_first
    await world.run(30)
    assert held(world) == [first], "renewed"
    world.sims[first].alive = False
    most = 0
    for _ in range(40):
        await world.run(1)
        most = max(most, candidates(world, []))
    assert most == 1
    (second,) = held(world)
    assert second != first


async def test_a_leader_waits_anew_for_a_silent_node_that_another_may_have_renewed_meanwhile() -> None:
    world = World(nodes=2, blastRadius={"maxNodes": 1}, leaseTTL="10s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(3)
    (first,) = held(world)
    world.sims[first].alive = False
    await world.run(6)
    before: Any = (world.operator, world.deps)
    world.restart()
    world.sims[first].alive = True
    await world.run(30)
    assert held(world) == [first], "renewed by the other leader"
    world.sims[first].alive = False
    await world.run(2)
    world.operator, world.deps = before
    before[1].leader._since = world.clock.monotonic()
    most = 0
    for _ in range(20):
        await world.run(1)
        most = max(most, candidates(world, []))
    assert most == 1
    (second,) = held(world)
    assert second != first


async def test_a_place_of_a_dead_node_is_free_again_for_an_approval() -> None:
    """Nothing ends a completed rollout because a node died; its candidate goes on somewhere else."""
    world = World(nodes=2, blastRadius={"maxNodes": 1})
    await world.until("Completed")
    (first,) = held(world)
    world.sims[first].alive = False
    await world.run(30)
    (second,) = held(world)
    assert second != first


@pytest.mark.parametrize(("entry", "nodes"), [("node-0", 1), ("3 not named", 3)])
def test_an_entry_of_those_that_are_gone_stands_for_so_many(entry: str, nodes: int) -> None:
    assert nodes_of(entry) == nodes


def test_who_could_not_be_named_counts_as_many() -> None:
    (entry,) = gone(Holders(count=3), "uid", ())
    assert nodes_of(entry) == 3
