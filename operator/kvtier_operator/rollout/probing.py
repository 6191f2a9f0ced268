"""Task quality of a rollout: which Jobs score its probe sets now, what became of them, and who is told.

The evidence itself comes from agents, like all other; a Job only makes it. So nothing here decides about a
rollout: a Job that fails, or that nobody runs, leaves its gate without evidence, and this says what a person
can do. Where a plan names no model, whoever serves reports the scores and no Job is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from kvtier_evidence.metrics import Scope
from kvtier_operator.fleet import parse_time
from kvtier_operator.ports import (
    ApiError,
    Deps,
    EventType,
    Invalid,
    JsonObject,
    Kind,
    ObjectKey,
)
from kvtier_operator.rollout.effects import Subject
from kvtier_operator.rollout.inputs import AgentView
from kvtier_operator.rollout.probejob import (
    COMMAND_ANNOTATION,
    ROLLOUT_LABEL,
    ProbeRun,
    command_by_hand,
    probe_objects,
)
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import Phase

LOOK_SECONDS = 10.0
IDLE_SECONDS = 30.0
"""A Job controller writes a Job's startTime at once; after so long there is none, or it is stuck."""
JOB_IDLE = "ProbeJobIdle"
JOB_FAILED = "ProbeJobFailed"
JOB_REFUSED = "ProbeJobRefused"
JOB_CREATED = "ProbeJobCreated"


@dataclass
class Probing:
    """Of one rollout, between calls; a cache. trouble: reason and sentence, for its conditions."""

    looked_at: float | None = None
    jobs: int = 0
    trouble: tuple[str, str] | None = None


@dataclass(frozen=True)
class JobView:
    """One Job of the rollout as the server has it. taken: a controller has begun with it. failed: reason and
    message of its end, empty when it did not fail."""

    name: str
    uid: str
    created: datetime | None
    command: str
    taken: bool
    finished: bool
    failed: str

    @classmethod
    def of(cls, job: JsonObject) -> JobView:
        metadata, status = job["metadata"], job.get("status") or {}
        ended = {row["type"]: row for row in status.get("conditions") or [] if row.get("status") == "True"}
        failure = ended.get("Failed") or {}
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            created=parse_time(metadata.get("creationTimestamp")),
            command=(metadata.get("annotations") or {}).get(COMMAND_ANNOTATION, ""),
            taken=bool(status.get("startTime") or ended),
            finished=bool({"Failed", "Complete"} & set(ended)),
            failed=": ".join(filter(None, (failure.get("reason"), failure.get("message")))),
        )


@dataclass(frozen=True)
class Wanted:
    """current: names of Jobs of the attempt that is under way, whether or not they are needed still.
    missing: runs whose pairs are waited for, by name."""

    current: frozenset[str] = frozenset()
    missing: Mapping[str, ProbeRun] = field(default_factory=dict)


@dataclass(frozen=True)
class JobPlan:
    """create in order; delete by (name, uid). troubles: reason, Job, sentence and command, worst first."""

    create: tuple[ProbeRun, ...] = ()
    delete: tuple[tuple[str, str], ...] = ()
    troubles: tuple[tuple[str, str, str, str], ...] = ()


def wanted_runs(
    subject: Subject,
    spec: RolloutSpec | None,
    state: RolloutState,
    *,
    image: str,
    nodes: Sequence[str],
    tolerations: Sequence[JsonObject] = (),
) -> Wanted:
    """Pure. nodes: Nodes whose agents hold the candidate now."""
    cache, candidate = subject.cache, state.candidate
    walking = state.holds_candidate and state.phase in (Phase.PROGRESSING, Phase.PAUSED)
    if spec is None or cache is None or candidate is None or not walking:
        return Wanted()
    current: set[str] = set()
    missing: dict[str, ProbeRun] = {}
    for config_map, probes in spec.probes:
        plan = probes.plan
        gates = [
            gate.name
            for gate in spec.gates
            if gate.scope is Scope.PROBE_SET and gate.probe_set_digest == probes.digest
        ]
        if plan is None or plan.model is None or not gates:
            continue
        run = ProbeRun(
            rollout=subject.rollout,
            attempt=state.attempt,
            candidate_digest=candidate.digest,
            cache=cache["metadata"]["name"],
            gates=tuple(gates),
            plan=plan,
            config_map=config_map,
            key=probes.key,
            image=image,
            nodes=tuple(sorted(nodes)),
            tolerations=tuple(tolerations),
        )
        current.add(run.name)
        if nodes and not all(_passed(state, gate, candidate.digest, plan.digest) for gate in gates):
            missing.setdefault(run.name, run)
    return Wanted(frozenset(current), missing)


def _passed(state: RolloutState, gate: str, candidate: str, probe_set: str) -> bool:
    found = state.carry.probe_passes.get(gate)
    return found is not None and (found.candidate_digest, found.probe_set_digest) == (candidate, probe_set)


def plan_jobs(wanted: Wanted, jobs: Iterable[JobView], now: datetime) -> JobPlan:
    """Pure. A Job that is there is never changed: its template cannot be."""
    present = {job.name: job for job in jobs}
    troubles = []
    for name in wanted.missing:
        job = present.get(name)
        if job is None:
            continue
        if job.failed:
            troubles.append((JOB_FAILED, name, f"Job {name} failed: {job.failed}", job.command))
        elif not job.taken and job.created and (now - job.created).total_seconds() > IDLE_SECONDS:
            said = f"no Job controller has taken up Job {name} for {IDLE_SECONDS:.0f} s"
            troubles.append((JOB_IDLE, name, said, job.command))
    return JobPlan(
        create=tuple(run for name, run in wanted.missing.items() if name not in present),
        delete=tuple(
            (job.name, job.uid)
            for job in present.values()
            if job.name not in wanted.current and not job.finished
        ),
        troubles=tuple(sorted(troubles)),
    )


class ProbeJobs:
    """Makes what `plan_jobs` says; a refusal of the API server never stops a rollout."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def tend(
        self,
        subject: Subject,
        spec: RolloutSpec | None,
        state: RolloutState,
        views: Sequence[AgentView],
        probing: Probing,
    ) -> None:
        """Looks at most every LOOK_SECONDS, and at nothing while no Job is wanted and none is known."""
        wanted = self._wanted(subject, spec, state, views)
        now = self._deps.clock.monotonic()
        if not wanted.missing and not probing.jobs:
            probing.trouble = None
            return
        if probing.looked_at is not None and now - probing.looked_at < LOOK_SECONDS:
            return
        probing.looked_at = now
        try:
            await self._do(subject, wanted, probing)
        except ApiError as error:
            said = f"the API server refused what a probe Job needs: {error.message}"
            probing.trouble = (JOB_REFUSED, said)
            commands = [command_by_hand(run) for run in wanted.missing.values()]
            note = f"{said[:300]}; by hand: {commands[0]}" if commands else said
            await self._deps.api.event(subject.rollout, EventType.WARNING, JOB_REFUSED, note)

    def _wanted(
        self,
        subject: Subject,
        spec: RolloutSpec | None,
        state: RolloutState,
        views: Sequence[AgentView],
    ) -> Wanted:
        cache = subject.cache
        if cache is None:
            return Wanted()
        key = ObjectKey(Kind.AGENT_POOL, cache["metadata"]["namespace"], cache["spec"]["poolRef"]["name"])
        pool = self._deps.store.get(key)
        if pool is None:
            return Wanted()
        digest = state.candidate.digest if state.candidate is not None else ""
        holders = {
            view.node
            for view in views
            if view.reachable and (view.granted_rollout, view.candidate_digest) == (subject.uid, digest)
        }
        members = self._deps.fleet.members(key.namespace, key.name)
        nodes = [
            str((member.raw.get("spec") or {}).get("nodeName") or member.target.name)
            for member in members
            if member.target.name in holders
        ]
        return wanted_runs(
            subject,
            spec,
            state,
            image=pool["spec"]["image"],
            nodes=nodes,
            tolerations=pool["spec"].get("tolerations") or (),
        )

    async def _do(self, subject: Subject, wanted: Wanted, probing: Probing) -> None:
        api, namespace = self._deps.api, subject.key.namespace
        listed = await api.list_all(Kind.JOB, namespace, f"{ROLLOUT_LABEL}={subject.uid}")
        jobs = [JobView.of(job) for job in listed]
        decided = plan_jobs(wanted, jobs, self._deps.clock.now())
        for name, uid in decided.delete:
            await api.delete(ObjectKey(Kind.JOB, namespace, name), uid=uid)
        for run in decided.create:
            await self._create(subject, run)
        left = [job for job in jobs if not job.finished and (job.name, job.uid) not in decided.delete]
        probing.jobs = len(left) + len(decided.create)
        probing.trouble = None
        for reason, name, said, command in decided.troubles:
            note = f"{said}; kubectl logs -n {namespace} job/{name}; by hand on a node of the pool: {command}"
            await api.event(subject.rollout, EventType.WARNING, reason, note[:1000])
            where = f"{said}; its command is in the Job's annotation {COMMAND_ANNOTATION}"
            probing.trouble = probing.trouble or (reason, where)

    async def _create(self, subject: Subject, run: ProbeRun) -> None:
        for manifest in probe_objects(run):
            try:
                await self._deps.api.apply(manifest)
            except Invalid:
                if manifest["kind"] != Kind.JOB.value:
                    raise
                # Another operator made it a moment ago for other nodes; the next look will find it.
                return
        said = f"Job {run.name} scores {run.plan.size} prompts of ConfigMap {run.config_map}"
        await self._deps.api.event(subject.rollout, EventType.NORMAL, JOB_CREATED, said)
