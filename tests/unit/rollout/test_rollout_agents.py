"""Leases that end, agents that vanish, restart, refuse or are cordoned, and proofs that do not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier_operator.ports import CACHE_FINALIZER, AgentError, Kind, ObjectKey
from kvtier_operator.rollout.inputs import AgentView, Look
from kvtier_operator.rollout.messenger import REVOKE_SECONDS, grant_deadline
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import Rollback, RolloutState
from kvtier_operator.rollout.unproved import WAY_OUT, how_it_ends, who_is_missing
from kvtier_operator.rollout.vocabulary import Cause, Stage, Verdict
from tests.unit.rollout.rollout_world import Killed, World, held


async def to_canary(world: World) -> None:
    await world.until("Progressing", "Canary")
    await world.pass_()


async def test_expired_lease_resumes_the_same_step_in_a_new_window() -> None:
    world = World()
    await to_canary(world)
    before = world.status
    world.clock.seconds += 30
    assert held(world) == []
    world.restart()
    await world.pass_()
    after = world.status
    assert world.where == ("Progressing", "Canary", 0)
    assert after["resumes"] == 1
    assert after["window"]["openingFence"] > before["window"]["openingFence"]
    assert after["digestBudget"]["attemptsUsed"] == 2
    assert ("LeaseExpired" in {reason for reason, _ in world.api.events}) is True
    assert len(held(world)) == 2


async def test_expired_lease_is_resumed_three_times_at_most() -> None:
    world = World()
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.pass_()
    for expected in (1, 2, 3):
        world.clock.seconds += 30
        await world.pass_()
        assert world.status["resumes"] == expected
    world.clock.seconds += 30
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "LeaseExpired"


async def test_expired_lease_rolls_back_when_so_declared() -> None:
    world = World(onLeaseExpired="RollBack")
    await to_canary(world)
    world.clock.seconds += 30
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "LeaseExpired"


async def test_restarted_agent_is_granted_again_under_the_same_evidence() -> None:
    world = World()
    await to_canary(world)
    window = world.status["window"]
    world.sims["node-0"].boot()
    assert held(world) == ["node-1"]
    await world.pass_()
    assert held(world) == ["node-0", "node-1"]
    assert world.status["window"] == window
    assert "resumes" not in world.status or world.status["resumes"] == 0


@pytest.mark.parametrize(
    ("took", "tries"), [pytest.param(0.4, 2, id="time-left"), pytest.param(1.0, 1, id="no-time-left")]
)
@pytest.mark.parametrize("verb", ["grant", "revoke"])
async def test_command_that_met_a_restarted_agent_has_one_deadline(
    verb: str, took: float, tries: int
) -> None:
    """A grant is on its way for at most the grace that expiry allows for, however often it is sent."""
    world = World(nodes=1, leaseTTL="30s")
    await to_canary(world)
    sent: list[float] = []
    original = getattr(world.deps.agents, verb)

    async def slow(node: Any, request: Any, *, deadline_seconds: float) -> Any:
        sent.append(deadline_seconds)
        if len(sent) == 1:
            world.clock.seconds += took * deadline_seconds
            raise AgentError(node.name, "BOOT_ID_MISMATCH", "restarted", 0.0, {"boot_id": node.boot_id})
        return await original(node, request, deadline_seconds=deadline_seconds)

    setattr(world.deps.agents, verb, slow)
    if verb == "grant":
        world.sims["node-0"].boot()
    else:
        world.intent("Abort", 1)
    await world.pass_()
    whole = sent[0]
    assert sent[1:2] == [pytest.approx(whole * (1 - took))][: tries - 1]
    assert whole == (grant_deadline(30.0) if verb == "grant" else REVOKE_SECONDS)


async def test_silent_agent_is_said_and_holds_the_step() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    await world.run(5)
    assert world.condition("Degraded")["reason"] == "AgentUnreachable"
    await world.run(40)
    assert world.where == ("Progressing", "Canary", 0)
    world.sims["node-0"].cut_off = False
    await world.until("Completed")
    assert world.condition("Degraded")["status"] == "False"


async def test_evidence_that_cannot_be_read_is_said_with_its_agent() -> None:
    world = World()
    await to_canary(world)
    world.feed.default = Verdict.PROVIDER_ERROR
    look = world.feed.look

    async def unread(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        return replace(await look(reading, state, spec, now), unread=("node-1",))

    world.feed.look = unread  # type: ignore[method-assign]
    await world.run(15)
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ProviderError")
    assert degraded["message"].endswith(" of node-1")


async def test_dead_agent_is_missed_by_the_first_look_and_holds_the_step() -> None:
    """Its Lease has ended, so it may hold nothing any more; what it had counted is missing all the same."""
    world = World()
    await to_canary(world)
    asked: list[list[str]] = []
    look = world.feed.look

    async def noting(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        asked.append([node.name for node in reading.nodes])
        return await look(reading, state, spec, now)

    world.feed.look = noting  # type: ignore[method-assign]
    world.clock.seconds += 8
    world.sims["node-0"].alive = False
    await world.pass_()
    assert asked[0] == ["node-0", "node-1"]
    await world.run(30)
    assert world.where == ("Progressing", "Canary", 0)
    assert world.condition("Degraded")["reason"] == "AgentUnreachable"


@pytest.mark.parametrize(("policy", "seconds"), [("RollBack", 20), ("Resume", 130)])
async def test_lost_agent_returns_the_rollout(policy: str, seconds: int) -> None:
    world = World(onLeaseExpired=policy)
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    await world.run(seconds)
    assert world.status["rollback"]["cause"] == "AgentLost"
    assert world.where[0] == "RollingBack"
    assert world.condition("BaselineRestored")["status"] == "False"
    assert "node-0" in world.condition("BaselineRestored")["message"]


async def test_an_approval_outlives_an_agent() -> None:
    world = World()
    await world.until("Completed")
    world.sims["node-0"].cut_off = True
    await world.run(130)
    assert world.where[0] == "Completed"
    assert world.condition("Degraded")["reason"] == "AgentUnreachable"
    assert held(world) == ["node-1"]
    assert "approved" in world.cache_status


async def test_revoked_is_not_restored_until_the_lost_agent_proves() -> None:
    """Two conditions: the lease has provably ended; the baseline is proved only by the agent itself."""
    world = World()
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    world.intent("Abort", 1)
    await world.run(3)
    assert world.condition("CandidateRevoked")["status"] == "False"
    await world.run(12)
    assert world.condition("CandidateRevoked")["status"] == "True"
    assert world.condition("BaselineRestored")["status"] == "False"
    assert world.status["rollback"]["missing"] == ["node-0"]
    world.sims["node-0"].cut_off = False
    await world.until("RolledBack", limit=30)
    assert world.condition("BaselineRestored")["status"] == "True"


async def test_new_leader_waits_a_lease_before_it_calls_it_ended() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    world.intent("Abort", 1)
    await world.run(9)
    world.restart()
    await world.run(9)
    assert world.condition("CandidateRevoked")["status"] == "False"
    await world.run(5)
    assert world.condition("CandidateRevoked")["status"] == "True"


async def test_a_lease_ends_by_its_own_ttl_though_the_spec_cannot_be_run_any_more() -> None:
    world = World(leaseTTL="100s")
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    world.edit(
        stages=[{"name": "Shadow"}, {"name": "Ramp", "steps": ["10%"]}, {"name": "Full", "holdback": "95%"}]
    )
    await world.run(80)
    assert world.status["rollback"]["cause"] == "InputDrift"
    assert world.condition("CandidateRevoked")["status"] == "False"
    await world.run(40)
    assert world.condition("CandidateRevoked")["status"] == "True"


async def test_deleted_node_leaves_the_count() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    world.intent("Abort", 1)
    await world.run(3)
    del world.sims["node-0"]
    await world.run(3)
    assert world.condition("CandidateRevoked")["status"] == "False"
    assert world.status["rollback"]["missing"] == ["node-0"]
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["agentsTotal"] == 1
    assert world.condition("CandidateRevoked")["status"] == "True"


@pytest.mark.parametrize("restarted", [False, True], ids=["same-operator", "next-operator"])
async def test_holder_deleted_a_moment_before_the_return_is_waited_for(restarted: bool) -> None:
    """Its lease goes on for a while, whatever became of its Node."""
    world = World()
    await to_canary(world)
    gone = world.sims.pop("node-0")
    await world.pass_()
    if restarted:
        world.restart()
    world.intent("Abort", 1)
    await world.run(3)
    assert gone.candidate is not None
    assert world.condition("CandidateRevoked")["status"] == "False"
    assert "node-0" in world.condition("CandidateRevoked")["message"]
    await world.until("RolledBack", limit=30)
    assert gone.candidate is None


@pytest.mark.parametrize("passes", [0, 2], ids=["abort-at-once", "abort-a-little-later"])
async def test_holder_deleted_while_no_operator_runs_is_waited_for(passes: int) -> None:
    """Who holds the candidate is in the status before the grant is sent, so the next operator misses it."""
    world = World(nodes=3)
    await to_canary(world)
    assert world.status["holders"] == {"nodes": ["node-0", "node-1", "node-2"], "count": 3}
    gone = world.sims.pop("node-0")
    world.restart()
    for _ in range(passes):
        await world.pass_()
    world.intent("Abort", 1)
    await world.run(5)
    assert gone.candidate is not None
    assert world.condition("CandidateRevoked")["status"] == "False"
    assert "node-0" in world.condition("CandidateRevoked")["message"]
    await world.until("RolledBack", limit=30)
    assert gone.candidate is None
    assert "holders" not in world.status


async def test_late_holder_is_written_down_before_it_is_granted() -> None:
    world = World()
    await to_canary(world)
    late = world.add_node("node-9")
    late.grant = lambda request: killed()  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(Killed):
        await world.operator.reconcile(world.rollout)
    assert world.status["holders"]["nodes"] == ["node-0", "node-1", "node-9"]


def killed() -> None:
    raise Killed("as the grant is sent")


async def test_holder_that_let_go_is_none_any_more() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-0"].cordoned = True
    await world.run(3)
    assert world.status["holders"] == {"nodes": ["node-1"], "count": 1}
    del world.sims["node-0"]
    world.restart()
    world.intent("Abort", 1)
    await world.run(3)
    assert world.where[0] == "RolledBack"


async def test_holder_deleted_long_ago_is_waited_for_no_more() -> None:
    world = World()
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.pass_()
    del world.sims["node-0"]
    await world.run(20)
    assert "vanished" not in world.status
    world.intent("Abort", 1)
    await world.run(3)
    assert world.where[0] == "RolledBack"


async def test_nothing_is_restored_before_a_lease_could_end_when_no_agent_is_there() -> None:
    world = World()
    await to_canary(world)
    world.sims.clear()
    world.intent("Abort", 1)
    await world.run(9)
    assert world.where[0] == "RollingBack"
    assert world.condition("CandidateRevoked")["status"] == "False"
    assert world.condition("BaselineRestored")["status"] == "False"
    await world.until("RolledBack", limit=30)


async def test_agents_prove_the_baseline_that_the_cache_has_now() -> None:
    """Or a rollout whose cache got another baseline meanwhile would never end, and keep the cache busy."""
    world = World()
    await to_canary(world)
    other = "sha256:" + "b" * 64
    world.api.objects[world.cache_key]["status"]["baseline"] = {"digest": other, "revision": "chat-other"}
    for sim in world.sims.values():
        sim.baseline = other
    await world.until("RolledBack", limit=60)
    assert world.status["rollback"]["cause"] == "InputDrift"
    assert world.status["rollback"]["targetDigest"] == other
    assert world.condition("BaselineRestored")["status"] == "True"


async def test_finalizer_goes_when_the_lease_has_provably_ended() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    world.api.ask_to_delete(world.rollout)
    await world.run(5)
    assert world.rollout in world.api.objects
    await world.run(12)
    assert world.rollout not in world.api.objects
    assert "ReleasedUnproved" in {reason for reason, _ in world.api.events}
    assert held(world) == []


async def test_wrong_digest_is_never_called_restored() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-1"].lie_about_baseline = "sha256:" + "f" * 64
    world.intent("Abort", 1)
    await world.run(60)
    assert world.where[0] == "RollingBack"
    assert world.condition("BaselineRestored")["status"] == "False"
    assert world.condition("Degraded")["reason"] == "BaselineUnproved"


async def test_a_proof_of_an_earlier_return_proves_nothing_now() -> None:
    world = World()
    await to_canary(world)
    world.intent("Abort", 1)
    await world.until("RolledBack")
    assert world.condition("BaselineRestored")["status"] == "True"
    world.intent("Retry", 2)
    await to_canary(world)
    world.sims["node-0"].cut_off = True
    world.intent("Abort", 3, attempt=2)
    await world.run(3)
    assert world.where[0] == "RollingBack"
    assert world.condition("CandidateRevoked")["status"] == "False"
    await world.run(30)
    assert world.where[0] == "RollingBack"
    assert world.status["rollback"]["missing"] == ["node-0"]
    assert world.condition("BaselineRestored")["status"] == "False"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuses", "CACHE_UNKNOWN"),
        ("other", f"runs {'f' * 12}"),
        ("silent", "no answer"),
    ],
)
async def test_who_cannot_prove_the_baseline_is_named_with_why_and_how_the_return_ends(
    how: str, said: str
) -> None:
    """Also an agent that was never offered the candidate: restored means every agent of the pool."""
    world = World(blastRadius={"maxNodes": 1})
    await to_canary(world)
    (cannot,) = [sim for name, sim in world.sims.items() if name not in held(world)]
    said = f"{cannot.name} ({said})"
    if how == "refuses":

        def unknown(request: Any) -> Any:
            raise AgentError(cannot.name, "CACHE_UNKNOWN", "this agent serves no cache", 0.0, {})

        cannot.revoke = unknown  # type: ignore[method-assign]
    elif how == "other":
        cannot.lie_about_baseline = "sha256:" + "f" * 64
    else:
        cannot.cut_off = True
    world.intent("Abort", 1)
    await world.run(20)
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "BaselineUnproved")
    assert degraded["message"] == f"missing {said}; {WAY_OUT}"
    assert said in world.condition("BaselineRestored")["message"]
    writes = world.api.writes
    await world.run(60)
    assert world.api.writes == writes, "what is said of it stays the same from pass to pass"
    world.api.ask_to_delete(world.rollout)
    await world.run(3)
    assert world.rollout not in world.api.objects


def test_what_is_said_of_who_is_missing_leaves_room_for_the_way_out() -> None:
    names = tuple(f"a-node-with-a-very-long-name-{index:03}.example.internal" for index in range(16))
    rollback = Rollback(Cause.INTENT_ABORT, "", Stage.CANARY, 0, "sha256:b", 1.0, total=200, missing=names)
    views = tuple(AgentView(name, True, said="NO_DESTINATION_CAPACITY") for name in names)
    said = how_it_ends(rollback, views, 240)
    assert len(said) <= 240 and said.endswith(WAY_OUT) and names[0] in said
    assert who_is_missing(rollback, views).endswith("and 196 more")


async def test_an_agent_that_still_holds_the_candidate_is_neither_revoked_nor_restored() -> None:
    """It has answered, and its proof is of our nonce: what it says is that something is left."""
    world = World()
    await to_canary(world)
    world.sims["node-1"].keeps = world.status["candidate"]["digest"]
    world.intent("Abort", 1)
    await world.run(5)
    assert world.where[0] == "RollingBack"
    assert world.condition("CandidateRevoked")["status"] == "False"
    assert world.status["rollback"]["missing"] == ["node-1"]
    await world.run(60)
    assert world.where[0] == "RollingBack"
    assert world.condition("BaselineRestored")["status"] == "False"
    world.sims["node-1"].keeps = ""
    await world.until("RolledBack", limit=30)
    assert world.condition("BaselineRestored")["status"] == "True"


async def test_steps_in_flight_on_the_candidate_are_waited_for() -> None:
    world = World()
    await to_canary(world)
    world.sims["node-1"].in_flight = 3
    world.intent("Abort", 1)
    await world.run(5)
    assert world.where[0] == "RollingBack"
    assert world.status["rollback"]["inFlight"] == 3
    world.sims["node-1"].in_flight = 0
    await world.until("RolledBack", limit=30)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("MANIFEST_MISMATCH", "ManifestMismatch"),
        ("NUMERICS_MISMATCH", "ManifestMismatch"),
        ("NO_DESTINATION_CAPACITY", "InfeasibleNode"),
        ("CANDIDATE_REFUSED", "InfeasibleNode"),
        ("STAGING_TOO_SMALL", "InfeasibleNode"),
        ("ADMISSION_PINNED", "InfeasibleNode"),
    ],
)
async def test_refused_grant_has_a_typed_cause(reason: str, cause: str) -> None:
    world = World()
    world.sims["node-1"].refuse = reason
    await world.until("RolledBack", limit=60)
    assert world.status["rollback"]["cause"] == cause
    assert "node-1" in world.status["rollback"]["message"]


async def test_cordoned_node_loses_its_candidate_and_keeps_the_evidence() -> None:
    world = World()
    await to_canary(world)
    before = world.status
    world.sims["node-0"].cordoned = True
    await world.pass_()
    assert held(world) == ["node-1"]
    assert world.status["fence"] > before["fence"]
    assert world.status["window"] == before["window"]
    await world.until("Completed")


@pytest.mark.parametrize("policy", ["Resume", "RollBack"])
@pytest.mark.parametrize("stage", ["Canary", "Completed"])
async def test_a_cordoned_agent_that_could_not_be_told_before_its_lease_ended_is_no_outage(
    stage: str, policy: str
) -> None:
    """It was to let go, and nobody renewed it: no share is spent, also when its node is in service again."""
    world = World(onLeaseExpired=policy)
    world.feed.default = Verdict.INSUFFICIENT if stage == "Canary" else Verdict.PASS
    if stage == "Canary":
        world.feed.default = Verdict.PASS
        await to_canary(world)
        world.feed.default = Verdict.INSUFFICIENT
    else:
        await world.until("Completed")
        await world.run(2)
    before = world.status
    node = world.sims["node-0"]
    node.cordoned = node.cut_off = True
    await world.run(8)
    world.clock.seconds += 2.5
    node.cut_off = False
    assert node.candidate is None and node.state().caches[0].returned_reason == "LeaseExpired"
    await world.run(5)
    assert held(world) == ["node-1"]
    node.cordoned = False
    await world.run(5)
    assert held(world) == ["node-0", "node-1"]
    assert world.says(before["phase"], before["stage"])
    assert world.status["window"] == before["window"]
    assert world.status["digestBudget"] == before["digestBudget"]
    assert "LeaseExpired" not in {reason for reason, _ in world.api.events}


async def test_number_of_nodes_is_honoured_and_means_the_same_nodes() -> None:
    world = World(nodes=5, blastRadius={"maxNodes": 2})
    await to_canary(world)
    chosen = held(world)
    assert len(chosen) == 2
    world.add_node("node-9")
    await world.run(10)
    assert held(world) == chosen


async def test_new_node_joins_the_open_step() -> None:
    world = World()
    await to_canary(world)
    world.add_node("node-9")
    await world.pass_()
    assert "node-9" in held(world)


@pytest.mark.parametrize("reason", ["NO_DESTINATION_CAPACITY", "NUMERICS_MISMATCH"])
@pytest.mark.parametrize("stage", ["Shadow", "Canary", "Completed"])
async def test_new_node_that_cannot_host_the_candidate_stays_exact(stage: str, reason: str) -> None:
    """It joined in mid-attempt; the others go on, are promoted on their evidence, and a person is told."""
    world = World()
    await world.until(
        "Completed" if stage == "Completed" else "Progressing", "" if stage == "Completed" else stage
    )
    await world.run(2)
    world.add_node("node-9").refuse = reason
    await world.run(5)
    assert "rollback" not in world.status
    assert held(world) == ["node-0", "node-1"]
    assert world.status["excluded"] == [{"node": "node-9", "reason": reason, "bootID": "node-9-boot-1"}]
    assert world.status["nodesTotal"] == 2
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NodeExcluded")
    assert f"node-9 ({reason})" in degraded["message"]
    told = [text for kind, text in world.api.events if kind == "NodeExcluded"]
    assert len(told) == 1
    assert "node-9" in told[0]
    await world.until("Completed")


async def test_excluded_node_tries_again_when_it_has_restarted() -> None:
    world = World()
    await to_canary(world)
    late = world.add_node("node-9")
    late.refuse = "NO_DESTINATION_CAPACITY"
    await world.run(3)
    late.refuse = ""
    await world.run(3)
    assert held(world) == ["node-0", "node-1"]
    late.boot()
    await world.run(2)
    assert held(world) == ["node-0", "node-1", "node-9"]
    assert "excluded" not in world.status
    assert world.condition("Degraded")["status"] == "False"


async def test_more_late_nodes_refuse_than_can_be_named() -> None:
    """The ninth is no reason to return either, and who comes after it is not asked before the next step."""
    world = World(stages=[{"name": "Shadow", "minDuration": "60s"}, {"name": "Full", "soak": "20s"}])
    await world.until("Progressing", "Shadow")
    await world.run(2)
    for index in range(10):
        world.add_node(f"late-{index}").refuse = "NO_DESTINATION_CAPACITY"
    await world.run(3)
    after = world.add_node("later")
    await world.run(3)
    assert world.where == ("Progressing", "Shadow", 0)
    assert held(world) == ["node-0", "node-1"]
    assert after.grants == []
    assert [row["node"] for row in world.status["excluded"]] == [f"late-{index}" for index in range(8)]
    assert world.status["excludedCount"] == 10
    assert ": 2 not named, late-0 (" in world.condition("Degraded")["message"]
    assert world.status["holders"] == {"nodes": ["node-0", "node-1"], "count": 2}
    await world.run(12)  # what the gates say is written by then
    world.restart()
    before = world.api.writes
    await world.run(15)
    assert world.api.writes == before
    world.sims["late-3"].refuse = ""
    world.sims["late-3"].boot()
    await world.run(3)
    assert held(world) == ["node-0", "node-1", "late-3"]
    assert world.status["excludedCount"] == 9
    for sim in world.sims.values():
        sim.refuse = ""
    await world.until("Completed")
    assert after.grants
    assert "excludedCount" not in world.status


async def test_excluded_node_that_falls_silent_is_no_lost_holder() -> None:
    world = World()
    await to_canary(world)
    late = world.add_node("node-9")
    late.refuse = "NO_DESTINATION_CAPACITY"
    await world.run(3)
    late.alive = False
    await world.run(5)
    assert "unreachable" not in world.status
    await world.until("Completed")


async def test_excluded_node_takes_no_place_of_the_radius() -> None:
    world = World(blastRadius={"maxNodes": 2})
    await to_canary(world)
    del world.sims["node-1"]
    world.add_node("node-8").refuse = "NO_DESTINATION_CAPACITY"
    # node-1 keeps its place while its lease may last.
    await world.run(15)
    assert held(world) == ["node-0"]
    assert [row["node"] for row in world.status["excluded"]] == ["node-8"]
    world.add_node("node-9")
    await world.run(3)
    assert held(world) == ["node-0", "node-9"]


async def test_holder_that_restarts_and_refuses_is_infeasible() -> None:
    """It served the candidate; that it cannot any more is about the candidate, and its counts are missing."""
    world = World()
    await to_canary(world)
    world.sims["node-0"].boot()
    world.sims["node-0"].refuse = "NO_DESTINATION_CAPACITY"
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "InfeasibleNode"


async def test_agent_with_a_higher_fence_is_caught_up_with() -> None:
    """The KVCache's status was lost and rebuilt too low; the agent remembers."""
    world = World()
    await to_canary(world)
    world.api.objects[world.cache_key]["status"]["fence"] = 1
    await world.pass_()
    assert world.cache_status["fence"] == world.status["fence"] > 3
    await world.until("Completed")


async def test_deleted_cache_ends_the_rollout_without_a_fence() -> None:
    world = World()
    await to_canary(world)
    del world.api.objects[world.cache_key]
    await world.run(3)
    assert world.where[0] == "RolledBack"
    assert world.status["rollback"]["cause"] == "ObjectDeleted"


async def test_a_return_in_which_every_agent_has_left_the_pool_claims_no_proof() -> None:
    world = World()
    await to_canary(world)
    world.intent("Abort", 1)
    world.sims.clear()
    await world.run(30)
    status, rollback = world.status, world.status["rollback"]
    assert (status["phase"], rollback["agentsTotal"]) == ("RolledBack", 0)
    assert rollback["revokedAt"], "the leases have ended"
    assert "verifiedAt" not in rollback
    restored = next(one for one in status["conditions"] if one["type"] == "BaselineRestored")
    assert (restored["status"], restored["reason"]) == ("False", "NothingProved")
    assert "BaselineRestored" not in {reason for reason, _ in world.api.events}


@pytest.mark.parametrize("kind", [Kind.KV_ROLLOUT, Kind.KV_CACHE])
async def test_nothing_is_granted_for_what_was_deleted_a_moment_before(kind: Kind) -> None:
    """Between the decision and the call. An uninstall counts the end of leases from the deletion."""
    world = World()
    world.api.objects[world.cache_key]["metadata"]["finalizers"] = [CACHE_FINALIZER]
    read, gone = world.api.get, []

    async def get(key: ObjectKey, **options: Any) -> Any:
        if key.kind is kind and world.status.get("stage") == "Shadow" and not gone:
            gone.append(key)
            world.api.ask_to_delete(key)
        return await read(key, **options)

    world.api.get = get  # type: ignore[method-assign]
    await world.run(30)
    assert gone and "Grant" not in " ".join(world.faults.names)


async def test_a_step_without_any_agent_says_that_it_is_held_and_goes_on_when_one_comes() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    await world.run(2)
    world.sims.clear()
    await world.run(30)
    assert world.where[:2] == ("Progressing", "Canary")
    found = world.condition("Progressing")
    assert (found["status"], found["reason"]) == ("False", "NoNodes")
    assert "no live agent in the blast radius" in found["message"]
    world.add_node("node-9")
    await world.until("Progressing", "Ramp", limit=60)
    assert world.condition("Progressing")["status"] == "True"
