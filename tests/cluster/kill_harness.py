"""Rollouts whose operator is killed at one chosen write, and how they end.

For each run a cache of its own, an operator that dies at the point, another that finishes, and two agents
that outlive both. What a run is compared with is a run without a death. It must not know which points are
tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.kill_lives import SUCCESSOR, Life, Lives, Point
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    agent_pool,
    apply,
    condition,
    install,
    kv_cache,
    tier_class,
)
from tests.cluster.rollout_fake_agent import RolloutFakeAgent

LIFE_SECONDS = 120.0
PLAN = json.dumps({"prompts": [{"digest": "a"}, {"digest": "b"}]})
PROBES = f"sha256:{hashlib.sha256(PLAN.encode()).hexdigest()}"
COUNTED = re.compile(r"swap |status |apply ControllerRevision")
OTHERS = re.compile(r"apply (ServiceAccount|RoleBinding|Service|DaemonSet) |Event AgentLive ")
EXTRA_WRITES = 5
"""What a death may cost: a number burned, a swap and a status that take the next one for the same step, the
write that was lost, once more, and one of a look at evidence that came at another moment."""
STEP_SECONDS = 60.0
"""Of a lease. A slow machine loses none for its slowness: then steps were opened again, and cost writes."""
ANSWER_SECONDS = 20.0
SMALL = {"quantile": 75, "minSamples": 30, "designEffect": "1"}


@dataclass(frozen=True)
class Scenario:
    """ends: (phase, stage, cause). fails_in: the stage in which every further answer is far off; empty:
    none."""

    name: str
    candidate: dict[str, Any]
    ends: tuple[str, str, str]
    fails_in: str = ""
    approximate: bool = True


COMPLETES = Scenario("completes", {"selectorRef": {"name": "quest-64"}}, ("Completed", "Full", ""))
RETURNS = Scenario(
    "returns",
    {"selectorRef": {"name": "quest-64"}},
    ("RolledBack", "ExactBaseline", "GateFailed"),
    fails_in="Canary",
)
ADOPTS = Scenario(
    "adopts",
    {"overrides": {"placement": {"policy": "headGroups", "headGroups": {"stagingBytes": "4Mi"}}}},
    ("Completed", "Full", ""),
    approximate=False,
)
SCENARIOS = (COMPLETES, RETURNS, ADOPTS)


@dataclass(frozen=True)
class Outcome:
    """Where it ended. Fences are left out: a death burns numbers, nothing else."""

    ends: tuple[str, str, str]
    attempt: int
    restored: tuple[int, int]
    approved: bool
    adopted: bool
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Ran:
    """died: whether the point was reached. gap: seconds from the death to the next write."""

    outcome: Outcome
    writes: tuple[str, ...]
    cost: int
    died: bool
    gap: float = 0.0


@dataclass(frozen=True)
class Overtaken:
    """A leader that stopped before a write, longer than its Lease, and went on when another had finished.
    tried, accepted: its writes from then on. unchanged: whether objects and agents are as they were."""

    outcome: Outcome
    tried: tuple[str, ...]
    accepted: tuple[str, ...]
    unchanged: bool


@contextlib.contextmanager
def kill_harness(cluster: Cluster, folder: Path, namespace: str) -> Iterator[KillHarness]:
    """Everything that runs need, in a namespace and a pool of that name."""
    install(cluster)
    cluster.ensure_namespace(namespace)
    place = {"namespace": namespace}
    quest = {"budget": {"tokens": 64, "capPolicy": "truncate"}, "family": "quest", "quest": {}}
    apply(
        cluster,
        tier_class("gpu-sim", "gpu"),
        tier_class("cpu-dram", "cpu"),
        agent_pool(namespace, namespace),
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVSelector",
            "metadata": {"name": "quest-64", **place},
            "spec": {**quest, "persistentRows": {"sink": 4, "recent": 8}},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "golden", **place},
            "data": {"plan.json": PLAN},
        },
    )
    with contextlib.ExitStack() as stack:
        lives = Lives(cluster, folder)
        stack.callback(lives.close)
        first = lives.begin()
        agents = []
        for letter in "ab":
            agent = RolloutFakeAgent(
                cluster,
                folder,
                f"{namespace}-{letter}",
                namespace=namespace,
                pool=namespace,
                lease_seconds=6 * 3600,
                probe_digest=PROBES,
            )
            stack.callback(agent.cleanup)
            agent.start()
            agents.append(agent)
        lives.end(first)
        harness = KillHarness(cluster, lives, agents, namespace, namespace)
        stack.callback(harness.close)
        yield harness


class KillHarness:
    def __init__(
        self, cluster: Cluster, lives: Lives, agents: Sequence[RolloutFakeAgent], namespace: str, pool: str
    ) -> None:
        self._cluster = cluster
        self._lives = lives
        self._agents = agents
        self._namespace = namespace
        self._pool = pool
        self._count = 0
        self._now: Life | None = None

    def run(self, scenario: Scenario, point: Point | None = None) -> Ran:
        """One rollout from nothing to its end. Raises EventuallyError when it does not come."""
        name = self._prepare(scenario)
        apply(self._cluster, self._rollout(name, scenario))
        first = self._lives.begin(point)
        finished = eventually(
            lambda: "died" if first.dead.is_set() else self._end_of(name, scenario) and "finished",
            LIFE_SECONDS,
            what=f"{scenario.name}: dies at {point}, or ends",
            on_failure=lambda: self._explain(name, first),
            interval=0.2,
        )
        # The agent may have done what the operator has not yet been told of.
        died = finished == "died" or (point is not None and first.dead.wait(ANSWER_SECONDS))
        lives, gap = [first], 0.0
        if died:
            began = time.monotonic()
            lives.append(self._lives.begin())
            eventually(lambda: lives[1].lines(), LIFE_SECONDS, what="the next operator writes")
            gap = time.monotonic() - began
        eventually(
            lambda: self._end_of(name, scenario),
            LIFE_SECONDS,
            what=f"{scenario.name} after {point}",
            on_failure=lambda: self._explain(name, lives[-1]),
            interval=0.2,
        )
        outcome = self._outcome(name, scenario)
        self._now = lives[-1]
        written = [line[2:] for life in lives for line in life.lines() if line.startswith("< ")]
        cost = sum(COUNTED.match(line) is not None for line in written)
        self._forget(name)
        return Ran(outcome, tuple(written), cost, died, gap)

    def overtake(self, scenario: Scenario, point: Point) -> Overtaken:
        """The leader stops before it sends the write, another takes over and finishes, the first goes on."""
        name = self._prepare(scenario)
        apply(self._cluster, self._rollout(name, scenario))
        first = self._lives.begin(point, stop=True)
        try:
            eventually(
                first.stopped,
                LIFE_SECONDS,
                what=f"{scenario.name}: stops at {point}",
                on_failure=lambda: self._explain(name, first),
            )
            second = self._now = self._lives.begin(identity=SUCCESSOR)
            eventually(
                lambda: self._end_of(name, scenario),
                LIFE_SECONDS,
                what=f"{scenario.name} after {point}",
                on_failure=lambda: self._explain(name, second),
                interval=0.2,
            )
            outcome, before, said = self._outcome(name, scenario), self._seen(name), len(first.lines())
            os.kill(first.pid, signal.SIGCONT)
            failed = f"! {point.write.rpartition(' #')[0]}"
            eventually(
                lambda: failed in first.lines()[said:],
                LIFE_SECONDS,
                what="the write that was about to be sent has failed",
                on_failure=lambda: self._explain(name, first),
            )
        finally:
            self._lives.end(first)
        since = first.lines()[said:]
        tried = {line[2:] for line in since if line.startswith("> ")} | {point.write}
        accepted = tuple(line[2:] for line in since if line.startswith("< ") and line[2:] in tried)
        unchanged = self._seen(name) == before
        self._forget(name)
        return Overtaken(outcome, tuple(sorted(tried)), accepted, unchanged)

    def interrupted(self, scenario: Scenario, write: str, interrupt: Callable[[], None]) -> Ran:
        """One rollout to its end by one operator; something happens right after a write was accepted."""
        name = self._prepare(scenario)
        apply(self._cluster, self._rollout(name, scenario))
        life = self._now = self._lives.begin()
        eventually(
            lambda: f"< {write}" in life.lines(),
            LIFE_SECONDS,
            what=f"{scenario.name}: {write} was accepted",
            on_failure=lambda: self._explain(name, life),
            interval=0.02,
        )
        interrupt()
        eventually(
            lambda: self._end_of(name, scenario),
            LIFE_SECONDS,
            what=f"{scenario.name} after {write}",
            on_failure=lambda: self._explain(name, life),
            interval=0.2,
        )
        outcome = self._outcome(name, scenario)
        written = tuple(line[2:] for line in life.lines() if line.startswith("< "))
        self._forget(name)
        return Ran(outcome, written, sum(COUNTED.match(line) is not None for line in written), died=False)

    def _seen(self, name: str) -> tuple[Any, ...]:
        """What an older operator could have spoiled."""
        rollout, cache = self._get("kvr", name), self._get("kvc", name)
        uid = cache["metadata"]["uid"]
        fences = [agent.state.caches[uid].fence for agent in self._agents]
        held = [agent.state.candidate(uid) for agent in self._agents]
        moved = [rollout["status"][part] for part in ("phase", "stage", "step", "attempt", "fence")]
        return moved, cache["status"]["fence"], cache["status"]["baseline"], fences, held

    def close(self) -> None:
        if self._now is not None:
            self._lives.end(self._now)
            self._now = None

    def _prepare(self, scenario: Scenario) -> str:
        """A cache on its baseline, and nobody at work."""
        self._count += 1
        name = f"{scenario.name}-{self._count}"
        life = self._now
        if life is None or life.dead.is_set():
            life = self._lives.begin()
        apply(
            self._cluster,
            kv_cache(name, self._namespace, self._pool, contract={"exactness": "approximate"}),
        )
        eventually(
            lambda: condition(self._get("kvcache", name), "Ready").get("status") == "True",
            LIFE_SECONDS,
            what=f"KVCache {name} is served",
            on_failure=lambda: self._explain(name, life),
            interval=0.2,
        )
        eventually(
            lambda: not self._cluster.get("kvr,kvc", "-n", self._namespace)["items"][1:],
            LIFE_SECONDS,
            what="the objects of the run before are gone",
            interval=0.2,
        )
        self._lives.end(life)
        self._now = None
        for agent in self._agents:
            agent.state.harm.bad_output = bool(scenario.fails_in)
            agent.state.harm.stage = scenario.fails_in
        return name

    def _forget(self, name: str) -> None:
        for kind in ("kvr", "kvc"):
            self._cluster.kubectl("delete", kind, name, "-n", self._namespace, "--wait=false")

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._cluster.get(f"{kind}/{name}", "-n", self._namespace)
        return found

    def _end_of(self, name: str, scenario: Scenario) -> bool:
        """Whether the status says so, and agents are as it says."""
        rollout = self._get("kvr", name)
        status = rollout.get("status") or {}
        if (status.get("phase"), status.get("stage")) != scenario.ends[:2]:
            return False
        cache = self._get("kvc", name)
        uid, baseline = cache["metadata"]["uid"], cache["status"]["baseline"]["digest"]
        held = [agent.state.enforcement(uid).lease() for agent in self._agents]
        if scenario is COMPLETES:
            return all(lease is not None and lease.terms.fence.value == status["fence"] for lease in held)
        runs = {agent.state.caches[uid].digest for agent in self._agents if uid in agent.state.caches}
        return all(lease is None for lease in held) and runs == {baseline}

    def _outcome(self, name: str, scenario: Scenario) -> Outcome:
        status, cache = self._get("kvr", name)["status"], self._get("kvc", name)
        rollback = status.get("rollback") or {}
        candidate = (status.get("candidate") or {}).get("digest")
        uid = cache["metadata"]["uid"]
        return Outcome(
            ends=(status["phase"], status["stage"], rollback.get("cause", "")),
            attempt=status["attempt"],
            restored=(rollback.get("agentsRestored", 0), rollback.get("agentsTotal", 0)),
            approved=(cache["status"].get("approved") or {}).get("digest") == candidate,
            adopted=cache["status"]["baseline"]["digest"] == candidate,
            holders=tuple(agent.state.node for agent in self._agents if agent.state.candidate(uid)),
        )

    def _rollout(self, name: str, scenario: Scenario) -> dict[str, Any]:
        stage = {"minSamples": 30}
        stall = {"minSamples": 30, "designEffect": "1"}
        gates: list[dict[str, Any]] = [
            {"name": "tail", "metric": "tpotRatio", "max": "2", **SMALL},
            {"name": "stall", "metric": "exposedStallFraction", "max": "0.5", **stall},
        ]
        if scenario.approximate:
            gates += [
                {"name": "output", "metric": "outputRelativeError", "max": "0.5", **SMALL},
                {
                    "name": "quality",
                    "metric": "taskScoreDrop",
                    "max": "0.25",
                    "probeRef": {"name": "golden"},
                    "scope": "ProbeSet",
                },
            ]
        return {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVRollout",
            "metadata": {"name": name, "namespace": self._namespace},
            "spec": {
                "cacheRef": {"name": name},
                "candidate": scenario.candidate,
                "stages": [
                    {"name": "Shadow", "sampleFraction": "100%", **stage},
                    {"name": "Canary", "trafficFraction": "50%", **stage},
                    {"name": "Full", "holdback": "50%", **stage},
                ],
                "gates": gates,
                "evidence": {"settle": "1s", "warmup": "0s"},
                "leaseTTL": f"{STEP_SECONDS:.0f}s",
                "progressDeadline": "10m",
            },
        }

    def _explain(self, name: str, life: Life) -> str:
        arguments = ("get", "kvr,kvc", name, "-n", self._namespace, "-o", "yaml")
        return self._cluster.kubectl(*arguments, check=False).stdout + "\n".join(life.lines()[-40:])


def points(reference: Ran) -> list[Point]:
    """Every write of a run, before it is sent and after it was accepted, in the order of the run; without
    those that any operator makes as it starts."""
    own = [write for write in reference.writes if not OTHERS.match(write)]
    return [Point(write, after) for write in own for after in (False, True)]


def certain(point: Point) -> bool:
    """Whether every run comes to it: renewals depend on time, and an Event may be the first for anybody."""
    return not point.write.startswith(("renew ", "Event ", "patch_status "))


def differs(reference: Ran, ran: Ran) -> str:
    """Why a run is not as the reference; empty when it is."""
    if ran.outcome != reference.outcome:
        return f"ended as {ran.outcome}, not {reference.outcome}"
    most = reference.cost + EXTRA_WRITES
    if ran.gap >= STEP_SECONDS / 2:
        most *= 2  # leases have ended meanwhile, and steps were opened again
    return "" if ran.cost <= most else f"{ran.cost} writes, at most {most} were expected: {ran.writes}"
