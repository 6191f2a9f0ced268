"""A rollout that starts where another was approved: the older candidate is gone everywhere first, also where
nobody can be asked."""

from __future__ import annotations

import pytest

from kvtier_operator.ports import AgentUnreachable
from tests.unit.rollout.rollout_world import World, copied, held

AT_ONCE = 5
A_LEASE = 12
"""Of the younger rollout: 10 s, 10 % and the second that a renewal may be on its way."""


def loses_when_revoked(world: World, how: str, *names: str) -> None:
    """The agents are there as the revocation is written down, and gone as it is sent."""

    def vanish(name: str) -> object:
        world.sims[name].cut_off = True
        if how == "deleted":
            del world.sims[name]
        raise AgentUnreachable(name, "UNAVAILABLE", "no answer")

    for name in names:
        world.sims[name].revoke = lambda request, name=name: vanish(name)  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["deleted", "unreachable"])
async def test_a_holder_that_vanishes_is_waited_for_until_its_lease_has_ended(how: str) -> None:
    world = World()
    await world.until("Completed")
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    loses_when_revoked(world, how, "node-0")
    await world.pass_(second)
    assert world.status_of(second)["revoking"]["rollout"] == "quest"
    await world.run(AT_ONCE, keys=[second])
    assert world.status_of(second)["stage"] == "Off"
    waiting = world.condition("Progressing", second)
    assert (waiting["status"], waiting["reason"]) == ("True", "RevokingApproved")
    assert "node-0" in waiting["message"]
    assert "node-1" not in waiting["message"]
    assert "at the latest" in waiting["message"]
    assert "revoking" in world.status_of(second)
    await world.run(A_LEASE, keys=[second])
    assert "revoking" not in world.status_of(second)
    assert "node-0" in next(text for reason, text in world.api.events if reason == "RevokedByLeaseEnd")


@pytest.mark.parametrize("how", ["deleted", "unreachable"])
async def test_the_lease_that_is_waited_for_is_that_of_the_older_rollout(how: str) -> None:
    world = World(leaseTTL="100s")
    await world.until("Completed")
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}}, leaseTTL="10s")
    loses_when_revoked(world, how, "node-0")
    await world.pass_(second)
    await world.run(80, keys=[second])
    assert "revoking" in world.status_of(second)
    await world.run(35, keys=[second])
    assert "revoking" not in world.status_of(second)


async def test_an_abort_meanwhile_waits_for_the_older_lease_too() -> None:
    world = World(leaseTTL="100s")
    await world.until("Completed")
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}}, leaseTTL="10s")
    loses_when_revoked(world, "deleted", "node-0")
    await world.run(2, keys=[second])
    world.edit(second, intent={"seq": 1, "verb": "Abort", "attempt": 1})
    await world.run(70, keys=[second])
    assert world.condition("CandidateRevoked", second)["status"] == "False"
    assert "node-0" in world.condition("CandidateRevoked", second)["message"]
    await world.run(45, keys=[second])
    assert world.condition("CandidateRevoked", second)["status"] == "True"


async def test_an_approval_whose_rollout_is_gone_may_be_held_for_the_longest_lease() -> None:
    """Somebody took the finalizer away by hand: nobody knows what lease its agents were given."""
    world = World()
    await world.until("Completed")
    del world.api.objects[world.rollout]
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    loses_when_revoked(world, "unreachable", "node-0")
    await world.run(3000, tick=20.0, keys=[second])
    assert world.status_of(second)["stage"] == "Off"
    del world.sims["node-0"].revoke
    world.sims["node-0"].cut_off = False
    await world.run(AT_ONCE, keys=[second])
    assert world.status_of(second)["stage"] == "Shadow"


async def test_a_holder_that_vanished_just_before_is_waited_for_too() -> None:
    world = World()
    await world.until("Completed")
    await world.pass_()
    gone = world.sims.pop("node-0")
    await world.pass_()
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    await world.run(AT_ONCE, keys=[second])
    assert gone.candidate is not None
    assert world.status_of(second)["revoking"]["nodes"] == ["node-0"]
    await world.run(A_LEASE, keys=[second])
    assert gone.candidate is None
    assert world.status_of(second)["stage"] == "Shadow"


@pytest.mark.parametrize("count", [2, 20])
async def test_a_holder_that_vanished_unseen_is_waited_for_too(count: int) -> None:
    """The next rollout begins before its owner looks again; which of many it was, only their number tells."""
    world = World(nodes=count)
    await world.until("Completed")
    await world.pass_()
    name = sorted(world.sims)[-1]
    gone = world.sims.pop(name)
    world.restart()
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    await world.run(AT_ONCE, keys=[second])
    assert gone.candidate is not None
    assert world.status_of(second)["stage"] == "Off"
    assert world.status_of(second)["revoking"]["nodes"] == [name if count == 2 else "1 not named"]
    await world.run(A_LEASE, keys=[second])
    assert gone.candidate is None
    assert world.status_of(second)["stage"] == "Shadow"


async def test_many_agents_are_counted_where_they_cannot_all_be_named() -> None:
    world = World(nodes=20)
    await world.until("Completed")
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    names = sorted(world.sims)
    loses_when_revoked(world, "deleted", names[-1])
    await world.run(AT_ONCE, keys=[second])
    assert world.status_of(second)["stage"] == "Off"
    await world.run(A_LEASE, keys=[second])
    assert world.status_of(second)["stage"] == "Shadow"


async def test_a_deleted_cache_does_not_shorten_the_wait_for_the_older_lease() -> None:
    world = World(leaseTTL="100s")
    await world.until("Completed")
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}}, leaseTTL="10s")
    loses_when_revoked(world, "unreachable", "node-0")
    await world.run(AT_ONCE, keys=[second])
    assert "revoking" in world.status_of(second)
    world.api.objects[world.cache_key]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await world.run(A_LEASE + 2, keys=[second])
    assert world.status_of(second)["phase"] == "RollingBack"
    await world.run(100, keys=[second])
    assert world.status_of(second)["phase"] == "RolledBack"


@pytest.mark.parametrize("name", ["abc", "zebra"], ids=["sorts-first", "sorts-last"])
async def test_of_two_that_have_begun_at_once_the_younger_returns_and_says_for_whom(name: str) -> None:
    """As after a status that was restored from a backup: no other way leads there."""
    world = World()
    await world.until("Progressing", "Canary")
    world.clock.seconds += 1
    second = world.add_rollout(name)
    world.api.objects[second]["status"] = copied(world.status)
    await world.run(10, keys=[second, world.rollout])
    back = world.status_of(second)["rollback"]
    assert (back["cause"], back["message"]) == ("InputDrift", "quest was first and has taken the cache")
    await world.until("Completed")
    assert held(world) == ["node-0", "node-1"]
