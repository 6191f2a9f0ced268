"""Random evidence, commands, crashes and losses: what must hold in every state of every rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier_operator.rollout.status import parse_stamp
from kvtier_operator.rollout.vocabulary import Verb, Verdict
from tests.unit.rollout.rollout_world import AgentSim, World, held

STAGES = [
    {"name": "Shadow", "minDuration": "2s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "2s"},
    {"name": "Ramp", "steps": ["10%", "50%"], "stepDuration": "2s"},
    {"name": "Full", "soak": "2s"},
]
LADDER = [("Shadow", 0), ("Canary", 0), ("Ramp", 0), ("Ramp", 1), ("Full", 0)]
NODES = st.sampled_from(["node-0", "node-1", "node-2"])


class RolloutMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(nodes=3, stages=STAGES)
        self.fences = (0, 0)
        self.at: tuple[str, int] = ("Off", 0)
        self.seq = 0
        self.joined = 0
        self.late: dict[str, AgentSim] = {}
        self.deleted: list[tuple[AgentSim, float]] = []

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(work)

    @initialize()
    def watch_grants(self) -> None:
        for sim in self.world.sims.values():
            self.check_grants(sim)

    def check_grants(self, sim: AgentSim) -> None:
        original = sim.grant

        def checked(request: Any) -> Any:
            status, cache = self.world.status, self.world.cache_status
            assert request.fence.value == status["fence"] == cache["fence"]
            assert (request.fence.stage, request.fence.step) == (status["stage"], status["step"])
            assert request.digest == status["candidate"]["digest"]
            return original(request)

        sim.grant = checked  # type: ignore[method-assign]

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.step_by_step(seconds)

    def step_by_step(self, seconds: int) -> None:
        for _ in range(seconds):
            self.do(self.world.pass_())
            self.check_moves()
            self.world.renew()
            self.world.clock.seconds += 1

    def check_moves(self) -> None:
        """A step onward is to the next rung only, and with every gate passing at the look that moved it,
        unless a person said so."""
        status = self.world.status
        if not status:
            return
        now = (status["stage"], status["step"])
        if now in LADDER and self.at in LADDER and now != self.at and status["attempt"] == self.attempt:
            assert LADDER.index(now) == LADDER.index(self.at) + 1
            assert status.get("overridden") or self.world.feed.last_all_pass
        if status["phase"] == "Completed" and self.phase != "Completed":
            assert self.at == ("Full", 0)
            assert status.get("overridden") or self.world.feed.last_all_pass
        self.at, self.attempt, self.phase = now, status["attempt"], status["phase"]

    attempt = 1
    phase = ""

    @rule(verdict=st.sampled_from([Verdict.PASS, Verdict.PASS, Verdict.INSUFFICIENT, Verdict.PROVIDER_ERROR]))
    def evidence_is(self, verdict: Verdict) -> None:
        self.world.feed.default = verdict
        self.world.feed.gates.clear()

    @rule(gate=st.sampled_from(["output", "quality", "illegalFallbacks"]), bad=st.booleans())
    def a_gate_turns(self, gate: str, bad: bool) -> None:
        self.world.feed.gates[gate] = Verdict.FAIL if bad else Verdict.INSUFFICIENT

    @rule(verb=st.sampled_from(list(Verb)), stale=st.booleans(), off=st.integers(0, 1))
    def someone_says(self, verb: Verb, stale: bool, off: int) -> None:
        status = self.world.status
        if not status:
            return
        self.seq += 0 if stale else 1
        self.world.intent(
            str(verb), max(1, self.seq), attempt=max(1, status["attempt"] - off), step=status["step"]
        )
        self.step_by_step(1)

    @rule(effect=st.integers(1, 6), after=st.booleans(), dead=st.sampled_from([0.0, 0.0, 15.0]))
    def the_operator_dies(self, effect: int, after: bool, dead: float) -> None:
        faults = self.world.faults
        faults.kill_at, faults.after = faults.count + effect, after
        self.world.dead_for = dead
        self.step_by_step(2)
        faults.kill_at = 0

    @rule(node=NODES, cut=st.booleans())
    def the_network_changes(self, node: str, cut: bool) -> None:
        if node in self.world.sims:
            self.world.sims[node].cut_off = cut

    @rule(node=NODES)
    def an_agent_restarts(self, node: str) -> None:
        if node in self.world.sims:
            self.world.sims[node].boot()

    @rule(node=NODES, cordoned=st.booleans())
    def a_node_is_cordoned(self, node: str, cordoned: bool) -> None:
        if node in self.world.sims:
            self.world.sims[node].cordoned = cordoned

    @rule(refuses=st.sampled_from(["", "NO_DESTINATION_CAPACITY", "NUMERICS_MISMATCH"]))
    def a_node_joins(self, refuses: str) -> None:
        if len(self.world.sims) < 6:
            self.joined += 1
            late = self.world.add_node(f"node-{2 + self.joined}")
            late.refuse = refuses
            self.check_grants(late)
            self.late[late.name] = late

    @rule(node=st.sampled_from([f"node-{index}" for index in range(8)]))
    def a_node_is_deleted(self, node: str) -> None:
        if node in self.world.sims and len(self.world.sims) > 1:
            self.deleted.append((self.world.sims.pop(node), self.world.clock.seconds))

    @rule(selector=st.sampled_from(["quest-64", "quest-32"]))
    def the_candidate_is_edited(self, selector: str) -> None:
        self.world.edit(candidate={"selectorRef": {"name": selector}})

    @rule(ttl=st.sampled_from(["10s", "12s"]))
    def the_lease_is_edited(self, ttl: str) -> None:
        self.world.edit(leaseTTL=ttl)

    @invariant()
    def fences_only_grow(self) -> None:
        now = (self.world.cache_status["fence"], self.world.status.get("fence", 0))
        assert now[0] >= self.fences[0]
        assert now[1] >= self.fences[1]
        assert now[1] <= now[0]
        self.fences = now

    @invariant()
    def rolled_back_means_that_no_agent_holds_it(self) -> None:
        if self.world.status.get("phase") == "RolledBack":
            assert held(self.world) == []
            assert "approved" not in self.world.cache_status

    @invariant()
    def rolled_back_means_that_no_agent_deleted_meanwhile_can_hold_it(self) -> None:
        status = self.world.status
        if status.get("phase") == "RolledBack":
            began = parse_stamp(status["rollback"]["startedAt"])
            assert [sim.name for sim, at in self.deleted if at >= began and sim.candidate] == []

    @invariant()
    def who_refuses_is_left_out(self) -> None:
        excluded = {row["node"] for row in self.world.status.get("excluded") or []}
        assert excluded <= set(self.late)
        assert excluded.isdisjoint(held(self.world))

    @invariant()
    def restored_means_proved_by_all(self) -> None:
        rollback = self.world.status.get("rollback") or {}
        if rollback.get("verifiedAt"):
            assert rollback["agentsRestored"] == rollback["agentsTotal"]

    @invariant()
    def approval_belongs_to_the_candidate(self) -> None:
        approved = self.world.cache_status.get("approved")
        if approved and self.world.status["phase"] == "Completed":
            assert approved["digest"] == self.world.status["candidate"]["digest"]

    def teardown(self) -> None:
        self.loop.close()


RolloutMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRolloutMachine = RolloutMachine.TestCase
