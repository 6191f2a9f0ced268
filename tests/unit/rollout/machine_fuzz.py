"""`next_plan` in a world of bad luck, held against the reference at every pass: commands, evidence, clock
jumps, crashes between any two effects, calls that are lost, doubled or late.

`make soak ARGS=--machine`, or `python -m tests.unit.rollout.machine_fuzz --seed 1 --steps 1000000`; a seed
replays its run. It must not know the reconciler: effects are done here in the order that the design states.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvtier_operator.rollout.inputs import AgentView, Approved, Grant, Inputs, Look, Plan, ProofView, Rpc
from kvtier_operator.rollout.machine import next_plan
from kvtier_operator.rollout.spec import Intent
from kvtier_operator.rollout.state import ManifestRef, RolloutState
from kvtier_operator.rollout.status import as_written
from kvtier_operator.rollout.vocabulary import CandidateClass, Verb, Verdict
from tests.unit.rollout.machine_agent import Agent
from tests.unit.rollout.machine_reference import Place, decide
from tests.unit.rollout.machine_truth import REFUSALS, UID, Now, truth
from tests.unit.rollout.machine_world import EVENTS as EVENTS
from tests.unit.rollout.machine_world import World

SEQUENCE = 400
"""Steps of one rollout's life, before it is calmed and another begins."""
MAX_PASSES = 10


class Killed(Exception):
    """The operator died here."""


class Broken(AssertionError):
    """What the machine did is not what it must do; the message says what."""


class Fuzz(World):
    """With an operator that dies now and then."""

    def operate(self) -> None:
        if self.released:
            self.begin()
        try:
            self.run()
        except Killed:
            self.events["killed"] += 1
            if self.random.random() < 0.2:
                self.pass_time(self.random.uniform(5.0, 30.0))
            self.new_life()
        self.check()

    # --- what the operator does ------------------------------------------------------------

    def effect(self) -> None:
        """Called before and after each: the operator may be dead."""
        if self.unlucky and self.random.random() < self.unlucky * 0.2:
            raise Killed

    def run(self) -> None:
        """One reconcile: passes until there is nothing fresh to do."""
        look: Look | None = None
        changed: dict[str, AgentView] = {}
        tried: set[tuple[str, int, type]] = set()
        for _ in range(MAX_PASSES):
            self.passes += 1
            state = self.state if self.schedule is None else replace(self.state, schedule=self.schedule)
            self.held -= {one.node for one in state.vanished}
            if look is None:
                look = self.take_look(state, self.spec)
                self.last_look = look or self.last_look
            inputs = self.inputs(look, changed)
            plan = next_plan(state, inputs)
            self.compare(state, inputs, plan)
            if plan.transition is not None:
                if not self.move(plan):
                    return
                look = None
                changed.clear()
                continue
            if plan.extend is not None and self.approved is not None:
                self.effect()
                self.approved = replace(self.approved, grant_expires=plan.extend.grant_expires)
            self.schedule = plan.state.schedule
            wrote = plan.urgent or self.random.random() < 0.02
            if wrote:
                self.write(plan.state)
            if plan.withdraw:
                self.effect()
                self.approved = None
                continue
            if plan.release:
                self.released = True
                return
            fresh = [rpc for rpc in plan.rpcs if (rpc.node, plan.state.fence, type(rpc)) not in tried]
            if not fresh:
                return
            if wrote or self.cache_fence != self.state.fence:
                look = None
                continue
            tried |= {(rpc.node, plan.state.fence, type(rpc)) for rpc in fresh}
            for rpc in fresh:
                view = next(view for view in inputs.agents if view.node == rpc.node)
                changed[rpc.node] = self.call(rpc, plan.state, view)

    def move(self, plan: Plan) -> bool:
        """Fence, then status; False when somebody else was faster."""
        move = plan.transition
        assert move is not None
        self.effect()
        if self.cache_fence != move.expected:
            return False
        if move.new <= self.cache_fence:
            raise Broken(f"fence {self.cache_fence} to {move.new}")
        self.cache_fence = move.new
        if move.approve is not None and plan.state.candidate is not None:
            digest = plan.state.candidate.digest
            self.approved = Approved("fuzz", UID, digest, move.approve.grant_expires)
        elif move.clear_approved:
            self.approved = None
        if move.adopt:
            if plan.state.candidate is None or plan.state.candidate.kind is not CandidateClass.EXACT:
                raise Broken("an approximate candidate became the baseline")
            self.baseline = ManifestRef(plan.state.candidate.digest, plan.state.candidate.revision)
        if move.shares:
            self.shares = move.shares
        self.effect()
        self.schedule = plan.state.schedule
        self.write(plan.state)
        return True

    def write(self, state: RolloutState) -> None:
        self.effect()
        if state.observed_generation < self.state.observed_generation:
            raise Broken(f"generation {state.observed_generation} observed after a later one")
        if state.fence < self.state.fence or state.fence > self.cache_fence:
            raise Broken(f"status fence {self.state.fence} to {state.fence}, cache {self.cache_fence}")
        # What cannot be read back was never known; reading it each time would be most of the work.
        self.state = as_written(state) if self.random.random() < 0.05 else state
        self.written = frozenset(state.holders.names)
        self.shown = True
        self.effect()

    def call(self, rpc: Rpc, state: RolloutState, view: AgentView) -> AgentView:
        """One call with its luck: lost before or after it did something, doubled, or late."""
        agent = self.agents[rpc.node]
        self.effect()
        if state.fence != self.cache_fence or state.fence != self.state.fence:
            raise Broken("a call under a fence that the objects do not carry")
        luck = self.random.random()
        act = self.granting(rpc, state, agent) if isinstance(rpc, Grant) else self.revoking(state, agent)
        if isinstance(rpc, Grant):
            self.held.add(agent.name)
        if agent.cut or luck < self.unlucky * 0.3:
            if not agent.cut and luck < self.unlucky * 0.1 and not isinstance(rpc, Grant):
                self.late_calls.append(act)
            return replace(view, reachable=False)
        refused = act()
        if luck < self.unlucky * 0.5:
            act()
        if luck < self.unlucky * 0.7:
            return replace(view, reachable=False)
        self.effect()
        if refused:
            if refused in REFUSALS and view.granted_rollout != UID:
                self.held.discard(agent.name)
            return replace(view, reachable=True, refusal=refused, highest_fence=agent.highest)
        return self.answered(rpc, state, agent, view)

    def granting(self, rpc: Grant, state: RolloutState, agent: Agent) -> Any:
        assert state.candidate is not None and state.window is not None
        digest = state.candidate.digest
        content = (
            "Grant",
            digest,
            str(state.stage),
            state.step,
            state.window.opening_fence,
            str(state.phase),
        )
        if str(state.stage) in ("Off", "ExactBaseline"):
            raise Broken(f"a grant in {state.stage}")
        return lambda: agent.grant(state.fence, content, digest, self.boot_clock)

    def revoking(self, state: RolloutState, agent: Agent) -> Any:
        content = ("Revoke", str(state.stage), state.step, state.attempt)
        return lambda: agent.revoke(state.fence, content)

    def answered(self, rpc: Rpc, state: RolloutState, agent: Agent, view: AgentView) -> AgentView:
        view = replace(view, reachable=True, refusal="", highest_fence=max(view.highest_fence, agent.highest))
        if isinstance(rpc, Grant):
            digest = state.candidate.digest if state.candidate else ""
            return replace(
                view,
                granted_fence=state.fence,
                granted_rollout=UID,
                candidate_digest=digest,
                returned_reason="",
                returned_fence=0,
            )
        proof = ProofView(agent.highest, agent.baseline, "", 0, valid=True)
        self.proofs[agent.name] = proof
        self.held.discard(agent.name)
        return replace(view, proof=proof, granted_fence=0, granted_rollout="", candidate_digest="")

    # --- what must be so ------------------------------------------------------------

    def compare(self, state: RolloutState, inputs: Inputs, plan: Plan) -> None:
        here, told = place_of(state), truth(state, inputs, self.now())
        there, legal = place_of(plan.state), decide(here, told)
        if there not in legal:
            raise Broken(f"{here} went to {there}, not to {sorted(map(str, legal))}: {told}")
        if plan.transition is not None and plan.rpcs:
            raise Broken("a plan that moves and sends")
        seen = plan.state.observed_generation
        if seen != self.generation or any(one.observed_generation != seen for one in plan.state.conditions):
            raise Broken(f"generation {self.generation} was read, and {seen} is said")
        if state.observed_generation != seen and not plan.urgent:
            raise Broken("a spec that was read first, or edited, and nobody is told so")
        if plan.state.shares < state.shares:
            raise Broken("a share of the error budget came back")
        before, after = state.last_intent, plan.state.last_intent
        if before is not None and (after is None or after.seq < before.seq):
            raise Broken("an older intent replaced a newer one")

    def now(self) -> Now:
        return Now(
            wall=self.wall,
            spec=self.spec,
            fence=self.cache_fence,
            baseline=self.baseline,
            approved=self.approved,
            candidate=self.candidate,
            intent=self.intent,
            resumable=self.choice[2] == "Resume",
            unreadable=self.unreadable,
            edits=self.generation - 1,
            shown=self.shown,
        )

    def check(self) -> None:
        """Of the world after a run, whatever happened in it."""
        state = self.state
        if str(state.phase) == "RolledBack":
            late = [one.name for one in (*self.agents.values(), *self.gone) if self.may_serve(one)]
            if late and state.rollback is not None and state.rollback.verified_at:
                raise Broken(f"rolled back, and {late} serve the candidate")
            if self.approved is not None and self.approved.rollout_uid == UID:
                raise Broken("rolled back, and approved")
        if state.window is not None and state.window.resumes > 3:
            raise Broken(f"resumed {state.window.resumes} times")
        if str(state.phase) == "Completed" and state.candidate is not None:
            exact = state.candidate.kind is CandidateClass.EXACT
            if exact and state.grant_expires:
                raise Broken("an exact candidate under a long grant")

    def may_serve(self, agent: Agent) -> bool:
        agent.look(self.boot_clock)
        return agent.lease is not None

    def calm(self) -> None:
        """Everything works from now on, so the rollout must arrive somewhere."""
        self.unlucky, self.bad_gate, self.verdict, self.busy, self.compiles_to = (
            0.0,
            "",
            Verdict.PASS,
            False,
            "",
        )
        self.unreadable = False
        self.store_spec()
        for agent in self.agents.values():
            agent.cut = agent.cordoned = False
            agent.refuses = ""
            agent.baseline = self.baseline.digest
        for _ in range(600):
            self.operate()
            if self.released or str(self.state.phase) in ("Completed", "RolledBack", "Invalid"):
                return
            if str(self.state.phase) == "Paused":
                self.seq += 1
                here = self.state
                self.intent = Intent(self.seq, Verb.RESUME, here.attempt, str(here.stage), here.step)
                self.store_spec()
            self.pass_time(1.0)
            self.renew()
        raise Broken(f"in calm weather it stays in {place_of(self.state)}: {self.state.blocker_message}")


def place_of(state: RolloutState) -> Place:
    cause = str(state.rollback.cause) if state.rollback is not None else ""
    return Place(str(state.phase), str(state.stage), state.step, state.attempt, cause)


def run(seed: int, steps: int, tell: Callable[[int, int], None] = lambda done, seed: None) -> Counter[str]:
    """Raises Broken with the seed of the life in which it happened. tell: hears after each life how many
    steps are done and which seed is next, from which another run can go on."""
    seen: Counter[str] = Counter()
    done = 0
    while done < steps:
        world = Fuzz(seed)
        try:
            for _ in range(min(SEQUENCE, steps - done)):
                world.step()
                done += 1
            world.calm()
        except Broken as broken:
            raise Broken(f"seed {seed}: {broken}") from broken
        seen.update(world.events)
        seen[f"ended {world.state.phase}"] += 1
        seen["passes"] += world.passes
        seed += 1
        tell(done, seed)
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args(argv)
    began = time.monotonic()

    def tell(done: int, seed: int) -> None:
        if done % (SEQUENCE * 25) == 0:
            taken = time.monotonic() - began
            print(f"{done} steps in {taken:.0f} s, nothing broken; next: --seed {seed}", flush=True)

    try:
        seen = run(options.seed, options.steps, tell)
    except Broken as broken:
        print(f"BROKEN {broken}")
        return 1
    taken = time.monotonic() - began
    print(f"{options.steps} steps in {taken:.0f} s, {options.steps / taken:.0f} a second")
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
