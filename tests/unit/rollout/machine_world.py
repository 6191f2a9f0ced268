"""The world of the fuzz of the machine: a cache, a rollout, three agents, and all that may happen to them.

It must not know what the operator does about it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from typing import Any

from kvtier_evidence.carry import Carry
from kvtier_operator.rollout.evaluation import next_due
from kvtier_operator.rollout.inputs import (
    AgentView,
    Approved,
    CacheView,
    CandidateView,
    GateVerdict,
    Inputs,
    Look,
    ProofView,
)
from kvtier_operator.rollout.moves import current_step, excluded_now
from kvtier_operator.rollout.spec import Intent, RolloutSpec, parse_spec
from kvtier_operator.rollout.state import CandidateRef, ManifestRef, RolloutState, Schedule
from kvtier_operator.rollout.vocabulary import CandidateClass, Stage, Verb, Verdict
from tests.unit.rollout.machine_agent import Agent
from tests.unit.rollout.machine_truth import REFUSALS, TTL, UID

EPOCH = 1_800_000_000.0
BASELINE = ManifestRef("sha256:" + "b" * 64, "chat-base")
DIGESTS = {"a": "sha256:" + "1" * 64, "b": "sha256:" + "2" * 64, "exact": "sha256:" + "e" * 64}


def spec_of(name: str, limit: str = "0.05", policy: str = "Resume") -> RolloutSpec:
    exact = name == "exact"
    quality = {"metric": "taskScoreDrop", "max": "0.25", "probeRef": {"name": "golden"}, "scope": "ProbeSet"}
    output = {"metric": "outputRelativeError", "quantile": 75, "max": limit}
    return parse_spec(
        {
            "cacheRef": {"name": "chat"},
            "candidate": {"fromCacheSpec": True} if exact else {"selectorRef": {"name": name}},
            "stages": [
                {"name": "Shadow", "minDuration": "2s"},
                {"name": "Canary", "trafficFraction": "5%", "minDuration": "2s"},
                {"name": "Ramp", "steps": ["10%", "50%"], "stepDuration": "2s"},
                {"name": "Full", "soak": "2s"},
            ],
            "gates": [] if exact else [{"name": "output", **output}, {"name": "quality", **quality}],
            "evidence": {"settle": "1s", "warmup": "0s"},
            "leaseTTL": f"{TTL:.0f}s",
            "onLeaseExpired": policy,
            "progressDeadline": "2h",
        },
        exact=exact,
    )


SPECS = {
    (name, limit, policy): spec_of(name, limit, policy)
    for name in DIGESTS
    for limit in ("0.05", "0.07")
    for policy in ("Resume", "RollBack")
}
WORDS: list[Verb | str] = [*Verb, "Rewind"]
"""One that this version does not know among them."""


class World(ABC):
    """One cache, one rollout, three agents and an operator that dies now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: Counter[str] = Counter()
        self.wall = self.boot_clock = EPOCH
        self.passes = 0
        self.begin()

    def begin(self) -> None:
        self.state = RolloutState()
        self.cache_fence, self.baseline = 1, BASELINE
        self.approved: Approved | None = None
        self.agents = {f"node-{n}": Agent(f"node-{n}", TTL, BASELINE.digest) for n in range(3)}
        self.gone: list[Agent] = []
        self.late_calls: list[Any] = []
        self.verdict, self.bad_gate, self.unlucky = Verdict.PASS, "", 0.0
        self.choice = [self.random.choice(list(DIGESTS)), "0.05", "Resume"]
        self.intent: Intent | None = None
        self.seq = 0
        self.compiles_to = ""
        self.deleting = self.released = self.busy = False
        self.shares = 0
        self.unreadable = self.shown = False
        self.generation = 1
        if self.random.random() < 0.2:
            # Of an old file, which was applied again.
            self.someone_says()
        self.stored = self.written_spec
        if self.random.random() < 0.2:
            self.approved = Approved("older", "uid-older", DIGESTS["b"], self.wall + 3600.0)
        self.new_life()

    def new_life(self) -> None:
        self.quiet_since = self.wall
        self.held: set[str] = set()
        self.written: frozenset[str] = frozenset()
        self.proofs: dict[str, ProofView] = {}
        self.schedule: Schedule | None = None
        self.last_look: Look | None = None

    @property
    def spec(self) -> RolloutSpec:
        name, limit, policy = self.choice
        return SPECS[name, limit, policy]

    @property
    def candidate(self) -> CandidateRef:
        kind = CandidateClass.EXACT if self.choice[0] == "exact" else CandidateClass.APPROXIMATE
        return CandidateRef(self.compiles_to or DIGESTS[self.choice[0]], "chat-candidate", kind)

    @property
    def written_spec(self) -> tuple[object, ...]:
        return tuple(self.choice), self.intent, self.unreadable

    def store_spec(self) -> None:
        """What the API server does with it: each write that changes it is one more generation."""
        self.generation += self.written_spec != self.stored
        self.stored = self.written_spec

    # --- what happens ------------------------------------------------------------

    def step(self) -> None:
        """One thing happens to the world, then the operator looks."""
        event = self.random.choices(EVENTS, WEIGHTS)[0]
        self.events[event.__name__] += 1
        event(self)
        self.store_spec()
        self.operate()

    @abstractmethod
    def operate(self) -> None:
        """The operator looks at everything once."""

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.boot_clock += seconds
        for agent in (*self.agents.values(), *self.gone):
            agent.look(self.boot_clock)

    def some(self) -> Agent:
        return self.random.choice(list(self.agents.values()))

    def time_passes(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.pass_time(1.0)
            self.renew()

    def renew(self) -> None:
        """Only what is written, and only while both objects agree."""
        state = self.state
        if (
            state.holds_candidate
            and state.candidate
            and state.fence == self.cache_fence
            and not self.deleting
        ):
            for agent in self.agents.values():
                if not agent.cut and not agent.cordoned:
                    agent.renew(state.fence, state.candidate.digest, self.boot_clock)

    def operator_was_away(self) -> None:
        """Perhaps again and again: each time leases may have ended."""
        for _ in range(self.random.choice((1, 1, 2, 6))):
            self.operate()
            self.pass_time(self.random.choice((2.0, 12.0, 12.0, 40.0)))
            self.new_life()

    def wall_clock_is_set(self) -> None:
        """Back by seconds, or forth within the grace that every wait has."""
        self.wall += self.random.uniform(-5.0, 0.9)

    def evidence_turns(self) -> None:
        self.bad_gate = ""
        self.verdict = self.random.choice(
            (Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.INSUFFICIENT, Verdict.PROVIDER_ERROR)
        )

    def a_gate_fails(self) -> None:
        self.bad_gate = self.random.choice(("output", "illegalFallbacks", "outputMismatches"))

    def someone_says(self) -> None:
        fresh = self.random.random() < 0.85
        self.seq += fresh
        state = self.state
        right = self.random.random() < 0.8
        self.intent = Intent(
            max(1, self.seq),
            self.random.choice(WORDS),
            state.attempt if right else max(1, state.attempt - 1),
            str(state.stage) if right or self.random.random() < 0.5 else "Canary",
            state.step,
        )

    def candidate_is_edited(self) -> None:
        self.choice[0] = self.random.choice(list(DIGESTS))
        self.compiles_to = ""

    def gates_are_edited(self) -> None:
        self.choice[1] = self.random.choice(("0.05", "0.07"))

    def spec_is_broken_or_mended(self) -> None:
        self.unreadable = not self.unreadable

    def policy_is_edited(self) -> None:
        self.choice[2] = self.random.choice(("Resume", "RollBack"))

    def an_input_drifts(self) -> None:
        self.compiles_to = "" if self.compiles_to else "sha256:" + "d" * 64

    def cache_is_busy(self) -> None:
        if self.state.stage is Stage.OFF and self.state.revoking is None:
            self.busy = not self.busy

    def fence_is_used_by_another(self) -> None:
        self.cache_fence += 1

    def network_changes(self) -> None:
        agent = self.some()
        agent.cut = not agent.cut

    def agent_restarts(self) -> None:
        self.some().restart()

    def node_is_cordoned(self) -> None:
        agent = self.some()
        agent.cordoned = not agent.cordoned

    def agent_refuses(self) -> None:
        agent = self.some()
        agent.refuses = "" if agent.refuses else self.random.choice(list(REFUSALS))

    def node_is_deleted(self) -> None:
        if len(self.agents) > 1:
            self.gone.append(self.agents.pop(self.some().name))

    def luck_changes(self) -> None:
        self.unlucky = self.random.choice((0.0, 0.0, 0.1, 0.3))

    def rollout_is_deleted(self) -> None:
        self.deleting = self.deleting or self.random.random() < 0.3

    def late_call_arrives(self) -> None:
        """A call that everybody took for lost: a fence makes it harmless."""
        if self.late_calls:
            self.late_calls.pop(self.random.randrange(len(self.late_calls)))()

    # --- what the operator sees ------------------------------------------------------------

    def views(self) -> tuple[AgentView, ...]:
        asked = self.state.stage is not Stage.EXACT_BASELINE and self.state.revoking is None
        found = [self.view(agent, asked=asked) for agent in self.agents.values()]
        left_out = excluded_now(self.state, found, UID)
        return tuple(
            replace(
                view,
                selected=asked and not self.agents[view.node].cordoned and view.node not in left_out,
                leaving=self.agents[view.node].cordoned,
            )
            for view in found
        )

    def view(self, agent: Agent, *, asked: bool) -> AgentView:
        boot, proof = f"{agent.name}-{agent.boot}", self.proofs.get(agent.name)
        if not asked:
            return AgentView(agent.name, True, selected=False, boot_id=boot, proof=proof)
        if agent.cut:
            holder = UID if agent.name in self.held else ""
            return AgentView(agent.name, False, boot_id=boot, granted_rollout=holder, proof=proof)
        agent.look(self.boot_clock)
        reason, fence = agent.returned
        view = AgentView(
            agent.name,
            True,
            boot_id=boot,
            highest_fence=agent.highest,
            baseline_digest=agent.baseline,
            returned_reason=reason,
            returned_fence=fence,
            returned_rollout=UID if reason else "",
            proof=proof,
        )
        if agent.lease is None:
            return view
        self.held.add(agent.name)
        return replace(
            view, candidate_digest=agent.lease[1], granted_fence=agent.lease[0], granted_rollout=UID
        )

    def take_look(self, state: RolloutState, spec: RolloutSpec) -> Look | None:
        if (
            self.unreadable
            or state.window is None
            or not state.holds_candidate
            or self.cache_fence != state.fence
        ):
            return None
        if state.window.spec_hash != spec.window_hash:
            return None
        if self.wall < next_due(state, spec, self.wall):
            return None
        verdicts = tuple(
            GateVerdict(
                gate.name,
                Verdict.FAIL if gate.name == self.bad_gate else self.verdict,
                "Fuzzed",
                gate.required,
                gate.metric.name,
            )
            for gate in spec.gates_of(current_step(state, spec))
        )
        failed = next((one.name for one in verdicts if one.verdict is Verdict.FAIL), "")
        return Look(state.window.opening_fence, self.wall, verdicts, Carry(), failed)

    def inputs(self, look: Look | None, changed: dict[str, AgentView]) -> Inputs:
        views = tuple(changed.get(view.node, view) for view in self.views())
        return Inputs(
            now=self.wall,
            uid=UID,
            name="fuzz",
            generation=self.generation,
            spec=None if self.unreadable else self.spec,
            spec_error="fuzzed" if self.unreadable else "",
            intent=self.intent,
            deleting=self.deleting,
            cache=CacheView("uid-cache", self.cache_fence, self.baseline, self.approved),
            busy_with="other" if self.busy else "",
            superseded_by="",
            candidate=CandidateView(self.candidate, prior_shares=self.shares),
            agents=views,
            holders=self.written | self.held,
            look=look,
            last_look=self.last_look,
            quiet_since=self.quiet_since,
            lease_ttl=TTL,
            approved_ttl=TTL,
            rate=5.0,
        )


EVENTS = [
    World.time_passes,
    World.evidence_turns,
    World.a_gate_fails,
    World.someone_says,
    World.candidate_is_edited,
    World.gates_are_edited,
    World.policy_is_edited,
    World.spec_is_broken_or_mended,
    World.an_input_drifts,
    World.cache_is_busy,
    World.fence_is_used_by_another,
    World.network_changes,
    World.agent_restarts,
    World.node_is_cordoned,
    World.agent_refuses,
    World.node_is_deleted,
    World.luck_changes,
    World.rollout_is_deleted,
    World.late_call_arrives,
    World.operator_was_away,
    World.wall_clock_is_set,
]
WEIGHTS = [120, 8, 2, 6, 2, 3, 1, 2, 1, 2, 2, 5, 3, 3, 1, 1, 5, 1, 4, 2, 2]
