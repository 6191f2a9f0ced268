"""A small world for the rollout's reconciler: an API server with compare-and-swap, agents that run the
production release core, a clock that tests turn. `Killed` ends the operator between any two effects."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_core.errors import CoreError
from kvtier_core.release.enforcement import CacheEnforcement, LocalReturn, ReturnReason
from kvtier_core.release.fences import CommandKind, FenceBook, FenceRecord, Judgement
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_crds.compile import compile_manifest
from kvtier_crds.models.kvcache import KVCache
from kvtier_crds.models.tierclass import TierClass
from kvtier_evidence.carry import Carry
from kvtier_operator.kube.resources import version_of
from kvtier_operator.lastreads import LastReads
from kvtier_operator.ports import (
    AgentError,
    AgentTarget,
    AgentUnreachable,
    AlreadyExists,
    Conflict,
    Deps,
    Done,
    EventType,
    JsonObject,
    Kind,
    Known,
    NodeView,
    NotFound,
    ObjectKey,
    PatchOp,
    PatchVerb,
    ReconcileOutcome,
    Requeue,
)
from kvtier_operator.proofs import nonce_digest
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.revisions import Role, revision_manifest
from kvtier_operator.rollout.inputs import GateVerdict, Look
from kvtier_operator.rollout.moves import current_step
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import DesignEffect, RolloutState
from kvtier_operator.rollout.vocabulary import Verdict
from kvtier_operator.store import cache_of
from tests.unit.selecting import selected

EXAMPLES = Path(__file__).parents[3] / "crds" / "examples"
EPOCH = 1_800_000_000.0
_T = TypeVar("_T")
PLAN = '{"prompts": [{"digest": "a"}, {"digest": "b"}]}'


@cache
def examples() -> list[Any]:
    """Read once; nobody changes them. Of the caches the one that rollouts are of."""
    found = [obj for path in sorted(EXAMPLES.glob("*.yaml")) for obj in yaml.safe_load_all(path.read_text())]
    return [obj for obj in found if obj["kind"] != "KVCache" or obj["metadata"]["name"] == "chat"]


def copied(value: _T) -> _T:
    """A deep copy of plain data, several times faster than `copy.deepcopy`."""
    made: _T = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return made


class Killed(BaseException):
    """The operator's process ended here."""


@dataclass
class Clock:
    """ahead: by how much the wall clock was set, which no other clock notices."""

    seconds: float = EPOCH
    ahead: float = 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.seconds + self.ahead, UTC)

    def monotonic(self) -> float:
        return self.seconds - EPOCH + 1000.0

    def nanos(self) -> int:
        return int((self.seconds - EPOCH + 1000.0) * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class Faults:
    """Counts effects; kills the operator before or right after the n-th one is done."""

    count: int = 0
    kill_at: int = 0
    after: bool = False
    names: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def effect(self, name: str) -> Iterator[None]:
        self.count += 1
        self.names.append(name)
        mine = self.count == self.kill_at
        if mine and not self.after:
            raise Killed(name)
        yield
        if mine:
            raise Killed(name)


class Api:
    """Implements ports.KubeApi over a dict."""

    def __init__(self, clock: Clock, faults: Faults) -> None:
        self.objects: dict[ObjectKey, JsonObject] = {}
        self.events: list[tuple[str, str]] = []
        self.writes = 0
        self._clock = clock
        self._faults = faults
        self._version = 100

    def put(self, obj: JsonObject) -> ObjectKey:
        obj = copied(obj)
        metadata = obj["metadata"]
        key = ObjectKey(Kind(obj["kind"]), metadata.get("namespace", ""), metadata["name"])
        old = self.objects.get(key)
        self._version += 1
        metadata.setdefault("uid", old["metadata"]["uid"] if old else f"uid-{metadata['name']}")
        stamp = datetime.fromtimestamp(self._clock.seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata.setdefault("creationTimestamp", old["metadata"]["creationTimestamp"] if old else stamp)
        changed = old is None or old.get("spec") != obj.get("spec")
        before = old["metadata"].get("generation", 0) if old else 0
        metadata["generation"] = before + 1 if changed else before
        metadata["resourceVersion"] = str(self._version)
        if old is not None and "status" in old and "status" not in obj:
            obj["status"] = copied(old["status"])
        self.objects[key] = obj
        return key

    async def get(self, key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        if key not in self.objects:
            raise NotFound(404, "NotFound", str(key))
        found = self.objects[key]
        return known if known is not None and version_of(known) == version_of(found) else copied(found)

    async def list_all(
        self,
        kind: Kind,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        *,
        known: Known | None = None,
    ) -> list[JsonObject]:
        return [
            copied(obj)
            for key, obj in sorted(self.objects.items())
            if key.kind is kind
            and namespace in ("", key.namespace)
            and selected(obj, label_selector, field_selector)
        ]

    async def apply(self, manifest: JsonObject, *, manager: str = "", force: bool = True) -> JsonObject:
        with self._faults.effect(f"apply {manifest['kind']}"):
            self.writes += 1
            key = self.put(manifest)
        return copied(self.objects[key])

    async def patch_status(
        self, key: ObjectKey, status: JsonObject, *, uid: str = "", manager: str = ""
    ) -> JsonObject:
        raise AssertionError("the rollout writes by compare-and-swap only")

    async def compare_and_swap(
        self, key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status"
    ) -> JsonObject:
        if key not in self.objects:
            raise NotFound(404, "NotFound", str(key))
        with self._faults.effect(f"patch {key.kind} {subresource}".strip()):
            obj = copied(self.objects[key])
            for op in ops:
                apply_op(obj, op)
            self._version += 1
            obj["metadata"]["resourceVersion"] = str(self._version)
            self.writes += 1
            self.objects[key] = obj
            gone = "deletionTimestamp" in obj["metadata"] and not obj["metadata"].get("finalizers")
            if gone:
                del self.objects[key]
        return copied(obj)

    async def create(self, manifest: JsonObject) -> JsonObject:
        raise AlreadyExists(409, "AlreadyExists", "not used here")

    async def delete(self, key: ObjectKey, *, uid: str = "") -> None:
        with self._faults.effect(f"delete {key.kind}"):
            self.ask_to_delete(key)

    def ask_to_delete(self, key: ObjectKey) -> None:
        obj = self.objects[key]
        if obj["metadata"].get("finalizers"):
            obj["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
            self._version += 1
            obj["metadata"]["resourceVersion"] = str(self._version)
        else:
            del self.objects[key]

    async def event(self, regarding: JsonObject, type: EventType, reason: str, message: str) -> None:
        self.events.append((reason, message))


def apply_op(obj: JsonObject, op: PatchOp) -> None:
    parts = [part.replace("~1", "/").replace("~0", "~") for part in op.path.split("/")[1:]]
    parent: Any = obj
    for part in parts[:-1]:
        parent = parent[int(part)] if isinstance(parent, list) else parent.get(part)
        if parent is None:
            if op.verb is PatchVerb.TEST and op.value is None:
                return
            raise Conflict(422, "Invalid", f"{op.path}: no parent")
    last: Any = int(parts[-1]) if isinstance(parent, list) else parts[-1]
    present = last < len(parent) if isinstance(parent, list) else last in parent
    if op.verb is PatchVerb.TEST:
        if (parent[last] if present else None) != op.value:
            raise Conflict(422, "Invalid", f"test of {op.path} failed")
    elif op.verb is PatchVerb.REMOVE:
        if not present:
            raise Conflict(422, "Invalid", f"{op.path} is not there")
        del parent[last]
    else:
        parent[last] = copied(op.value)


class MemoryFences:
    """Durable as long as the test lives: an agent's disk."""

    def __init__(self) -> None:
        self.records: dict[str, FenceRecord] = {}

    def load(self) -> tuple[Mapping[str, FenceRecord], frozenset[str]]:
        return dict(self.records), frozenset()

    def save(self, record: FenceRecord) -> None:
        self.records[record.uid] = record


class AgentSim:
    """One agent: the production fence book and enforcement behind Control's verbs."""

    def __init__(self, name: str, clock: Clock, cache_uid: str, baseline: str) -> None:
        self.name, self.clock, self.cache_uid = name, clock, cache_uid
        self.baseline = baseline
        self.disk = MemoryFences()
        self.alive = True
        self.cut_off = False
        self.cordoned = False
        self.in_flight = 0
        self.lie_about_baseline = ""
        # Of a candidate that it does not let go, as its proof says.
        self.keeps = ""
        # What it recomputes of what runs; None: it is of an earlier version, and repeats.
        self.runs_baseline: str | None = "as applied"
        self.runs_candidate: str | None = "as granted"
        self.refuse: str = ""
        self.boots = 0
        self.grants: list[tuple[int, str, str]] = []
        self.thresholds: list[tuple[str, dict[str, str]]] = []
        self.boot()

    def boot(self) -> None:
        self.boots += 1
        self.boot_id = f"{self.name}-boot-{self.boots}"
        self.book = FenceBook(self.disk)
        record = self.disk.records.get(self.cache_uid)
        returned = None
        if record is not None and record.kind is CommandKind.GRANT:
            returned = LocalReturn(ReturnReason.BOOT_RESTART, record.value, record.rollout_uid)
        self.core = CacheEnforcement(self.clock.nanos, returned)

    @property
    def candidate(self) -> tuple[int, str] | None:
        """(fence, digest) of the lease that is valid now."""
        lease = self.core.lease()
        return None if lease is None else (lease.terms.fence.value, lease.terms.candidate_digest)

    def state(self) -> control.GetStateResponse:
        answer = control.GetStateResponse(node=self.name, boot_id=self.boot_id)
        held = answer.caches.add(highest_fence=self.book.highest(self.cache_uid))
        held.cache.uid = self.cache_uid
        held.baseline_digest = self.baseline
        if self.runs_baseline is not None:
            held.running_digest = self.baseline if self.runs_baseline == "as applied" else self.runs_baseline
        lease = self.core.lease()
        if lease is not None:
            granted = lease.terms.candidate_digest
            if self.runs_candidate is not None:
                runs = granted if self.runs_candidate == "as granted" else self.runs_candidate
                held.candidate.running_digest = runs
            held.candidate.digest = lease.terms.candidate_digest
            held.candidate.fence.value = lease.terms.fence.value
            held.candidate.fence.rollout_uid = lease.terms.fence.rollout_uid
        returned = self.core.returned
        if returned is not None:
            held.returned_reason = returned.reason.value
            held.returned_fence = returned.fence
            held.returned_rollout_uid = returned.rollout_uid
        return answer

    def judge(self, request: Any, kind: CommandKind) -> Judgement:
        if request.boot_id != self.boot_id:
            raise AgentError(self.name, "BOOT_ID_MISMATCH", "restarted", 0.0, {"boot_id": self.boot_id})
        content = self._content(request)
        verdict = self.book.judge(self.cache_uid, request.fence.value, kind, content)
        if verdict is Judgement.ADVANCE:
            self.book.commit(
                FenceRecord(
                    self.cache_uid,
                    "serving",
                    "chat",
                    request.fence.value,
                    kind,
                    content,
                    self.baseline,
                    request.fence.rollout_uid,
                )
            )
        return verdict

    @staticmethod
    def _content(request: Any) -> str:
        copied = type(request)()
        copied.CopyFrom(request)
        for name in ("boot_id", "nonce"):
            if name in copied.DESCRIPTOR.fields_by_name:
                copied.ClearField(name)
        return hashlib.sha256(copied.SerializeToString(deterministic=True)).hexdigest()

    def grant(self, request: control.GrantRequest) -> control.GrantResponse:
        if self.refuse:
            raise AgentError(self.name, self.refuse, "told to refuse", 0.0, {})
        verdict = self.judge(request, CommandKind.GRANT)
        terms = GrantTerms(
            fence=FenceToken(
                request.fence.value,
                request.fence.rollout_uid,
                request.fence.attempt,
                request.fence.stage,
                request.fence.step,
            ),
            candidate_digest=request.digest,
            baseline_digest=request.baseline_digest,
            ttl_ms=request.ttl_ms,
            traffic_fraction=Decimal(request.traffic_fraction),
            sample_fraction=Decimal(request.sample_fraction),
            blast_radius=BlastRadius(),
            selector=None,
            approved=request.approved,
        )
        lease = self.core.grant(terms, verdict, self.clock.nanos())
        self.thresholds.append(
            (
                request.fence.stage,
                {gate.name: gate.pair_threshold for gate in request.gates if gate.pair_threshold},
            )
        )
        self.grants.append((request.fence.value, request.fence.stage, request.digest))
        return control.GrantResponse(
            candidate_digest=request.digest,
            boot_id=self.boot_id,
            remaining_ms=lease.remaining_ms(self.clock.nanos()),
        )

    def revoke(self, request: control.RevokeRequest) -> control.RevokeResponse:
        self.judge(request, CommandKind.REVOKE)
        self.core.revoke(request.reason)
        baseline = self.lie_about_baseline or self.baseline
        answer = control.RevokeResponse()
        answer.proof.node, answer.proof.boot_id = self.name, self.boot_id
        answer.proof.baseline_digest = baseline
        answer.proof.in_flight_candidate = self.in_flight
        answer.proof.highest_fence = self.book.highest(self.cache_uid)
        answer.proof.candidate_digest = self.keeps
        answer.proof.nonce_digest = nonce_digest(request.nonce, baseline, self.keeps, self.boot_id)
        return answer

    def apply(self, fence: int, digest: str) -> None:
        """As the KVCache's reconcile would have it: another baseline under a higher fence."""
        request = control.ApplyBaselineRequest(boot_id=self.boot_id, digest=digest)
        request.fence.value = fence
        if self.judge(request, CommandKind.APPLY) is Judgement.ADVANCE:
            self.core.revoke("BaselineApplied")
        self.baseline = digest

    def renew(self, request: control.RenewRequest) -> control.RenewResponse:
        answer = control.RenewResponse(boot_id=self.boot_id)
        for item in request.items:
            result = answer.results.add(cache=item.cache)
            try:
                self.book.check_renewal(self.cache_uid, item.fence.value)
                self.core.renew(item.fence.value, item.digest, item.ttl_ms, self.clock.nanos())
                result.renewed = True
            except CoreError as error:
                result.error.message = error.message
                result.error.reason = common.LEASE_EXPIRED
        return answer


class Agents:
    """Implements ports.Agents over AgentSims; every mutating call is an effect."""

    def __init__(self, sims: dict[str, AgentSim], faults: Faults) -> None:
        self.sims = sims
        self.wanted: list[str] = []
        self._faults = faults

    def _sim(self, node: AgentTarget) -> AgentSim:
        sim = self.sims[node.name]
        if not sim.alive or sim.cut_off:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "no answer")
        return sim

    async def _do(self, name: str, node: AgentTarget, call: Any) -> Any:
        with self._faults.effect(f"{name} {node.name}"):
            try:
                return call(self._sim(node))
            except CoreError as error:
                raise AgentError(
                    node.name, error.reason.value, error.message, 0.0, dict(error.facts)
                ) from error

    async def get_state(
        self, node: AgentTarget, cache_uid: str = "", *, deadline_seconds: float | None = None
    ) -> Any:
        self.wanted.append(cache_uid)
        return self._sim(node).state()

    async def grant(self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None) -> Any:
        return await self._do("Grant", node, lambda sim: sim.grant(request))

    async def revoke(self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None) -> Any:
        return await self._do("Revoke", node, lambda sim: sim.revoke(request))

    async def renew(self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None) -> Any:
        if request.boot_id != self._sim(node).boot_id:
            raise AgentError(node.name, "BOOT_ID_MISMATCH", "restarted", 0.0, {})
        return self._sim(node).renew(request)

    async def apply_baseline(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the KVCache's reconcile applies baselines")

    remove_cache = prove = read_evidence = read_evidence_many = apply_baseline

    def retain(self, names: Container[str]) -> None:
        return None

    async def close(self) -> None:
        return None


class Fleet:
    def __init__(self, world: World) -> None:
        self._world = world

    def members(self, pool_namespace: str, pool_name: str) -> list[NodeView]:
        return [
            NodeView(
                target=AgentTarget(sim.name, f"uid-{sim.name}", "127.0.0.1:1", sim.boot_id),
                live=sim.alive,
                draining=False,
                cordoned=sim.cordoned,
                lease_renewed=None,
                lease_seconds=30.0,
                raw={"metadata": {"name": sim.name}, "status": self._world.node_status.get(sim.name, {})},
            )
            for sim in sorted(self._world.sims.values(), key=lambda sim: sim.name)
        ]


class StoreView:
    """Implements ports.Store: always current."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def get(self, key: ObjectKey) -> JsonObject | None:
        return self._api.objects.get(key)

    def rollouts_of(self, namespace: str, cache: str) -> list[JsonObject]:
        return [one for one in self.list_all(Kind.KV_ROLLOUT, namespace) if cache_of(one) == cache]

    def revision(self, kind: Kind) -> int:
        return self._api._version

    def list_all(self, kind: Kind, namespace: str = "") -> list[JsonObject]:
        return [
            obj
            for key, obj in sorted(self._api.objects.items())
            if key.kind is kind and namespace in ("", key.namespace)
        ]


class Leading:
    def __init__(self, since: float) -> None:
        self._since = since

    def check(self) -> None:
        return None

    def leading_since(self) -> float | None:
        return self._since


class Spans:
    """Implements ports.TelemetryPort by remembering names."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, dict[str, Any]]] = []
        self.roots: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def span(self, name: str, attributes: Any = None, *, uid: str = "", attempt: int = 0) -> Iterator[Any]:
        yield self
        self.ended.append((name, dict(attributes or {})))

    def set_attribute(self, key: str, value: Any) -> None:
        return None

    def attempt_root(self, uid: str, attempt: int, attributes: Mapping[str, str]) -> str:
        self.roots.append((uid, attempt))
        return "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


@dataclass
class ScriptedFeed:
    """What the judge would say: by gate name, else `default`."""

    default: Verdict = Verdict.PASS
    gates: dict[str, Verdict] = field(default_factory=dict)
    thresholds: dict[str, str] = field(default_factory=dict)
    effects: tuple[DesignEffect, ...] = ()
    looks: int = 0
    unopened: list[bool] = field(default_factory=list)
    last_all_pass: bool = False

    expected: list[tuple[Reading | None, float]] = field(default_factory=list)

    def forget(self, uid: str) -> None:
        return None

    def expect(self, uid: str, reading: Reading | None, due_at: float) -> None:
        self.expected.append((reading, due_at))

    async def look(self, reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        self.looks += 1
        self.unopened.append(reading.unopened)
        verdicts = []
        for gate in spec.gates_of(current_step(state, spec)):
            verdict = self.gates.get(gate.name, self.default)
            if not gate.required and verdict is Verdict.INSUFFICIENT:
                verdict = Verdict.PASS
            verdicts.append(
                GateVerdict(gate.name, verdict, "Scripted", gate.required, gate.metric.name, n=600)
            )
        self.last_all_pass = all(item.verdict is Verdict.PASS for item in verdicts if item.required)
        failed = next((item.name for item in verdicts if item.verdict is Verdict.FAIL), "")
        measured = tuple(sorted(self.thresholds.items()))
        look = Look(reading.key.opening_fence, now, tuple(verdicts), Carry(), failed, measured)
        return replace(look, effects=self.effects)


class World:
    """Objects, agents and one operator that can be killed and started again."""

    def __init__(self, nodes: int = 2, **spec: Any) -> None:
        self.clock = Clock()
        self.faults = Faults()
        self.api = Api(self.clock, self.faults)
        self.feed = ScriptedFeed()
        self.sims: dict[str, AgentSim] = {}
        self.node_status: dict[str, JsonObject] = {}
        self.spans = Spans()
        self.woken: list[ObjectKey] = []
        self.dead_for = 0.0
        self._load()
        for index in range(nodes):
            self.add_node(f"node-{index}")
        self.rollout = self.add_rollout("quest", **spec)
        self.restart()

    # --- objects -----------------------------------------------------------------------------------------

    def _load(self) -> None:
        for obj in copied(examples()):
            if obj["kind"] in ("TierClass", "AgentPool", "KVCache", "KVSelector"):
                self.api.put(obj)
            if obj["kind"] == "KVRollout" and obj["metadata"]["name"] == "quest-on-chat":
                self._template = obj
        second = copied(self.object(Kind.KV_SELECTOR, "quest-64"))
        second["metadata"] = {"name": "quest-32", "namespace": "serving"}
        second["spec"]["budget"]["tokens"] = 32
        self.api.put(second)
        self.api.put(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "golden", "namespace": "serving"},
                "data": {"plan.json": PLAN},
            }
        )
        self.cache_key = ObjectKey(Kind.KV_CACHE, "serving", "chat")
        cache = self.api.objects[self.cache_key]
        classes = {
            key.name: TierClass.model_validate(obj)
            for key, obj in self.api.objects.items()
            if key.kind is Kind.TIER_CLASS
        }
        model = KVCache.model_validate(cache)
        exact = compile_manifest(model, cache["metadata"]["uid"], "serving", classes, None).exact()
        self.baseline = exact.digest()
        kept = revision_manifest(cache, exact.canonical(), self.baseline, Role.BASELINE, 1)
        self.api.put(kept)
        reference = {"digest": self.baseline, "revision": kept["metadata"]["name"]}
        cache["status"] = {"baseline": reference, "fence": 1}

    def add_node(self, name: str) -> AgentSim:
        sim = AgentSim(name, self.clock, self.api.objects[self.cache_key]["metadata"]["uid"], self.baseline)
        self.sims[name] = sim
        return sim

    def add_rollout(self, name: str, **spec: Any) -> ObjectKey:
        obj = copied(self._template)
        obj["metadata"] = {"name": name, "namespace": "serving"}
        obj["spec"] |= {
            "blastRadius": {},
            "leaseTTL": "10s",
            "stages": [
                {"name": "Shadow", "minDuration": "20s", "minSamples": 30},
                {"name": "Canary", "trafficFraction": "5%", "minDuration": "20s"},
                {"name": "Ramp", "steps": ["10%", "50%"], "stepDuration": "20s"},
                {"name": "Full", "soak": "20s", "holdback": "2%"},
            ],
            "evidence": {"settle": "5s", "warmup": "0s"},
            "progressDeadline": "1h",
            "ttlAfterFinished": "24h",
            **spec,
        }
        return self.api.put(obj)

    def object(self, kind: Kind, name: str) -> JsonObject:
        return next(o for key, o in self.api.objects.items() if key.kind is kind and key.name == name)

    def edit(self, key: ObjectKey | None = None, **spec: Any) -> None:
        obj = copied(self.api.objects[key or self.rollout])
        obj["spec"] |= spec
        self.api.put(obj)

    def intent(self, verb: str, seq: int, *, attempt: int = 1, stage: str = "", step: int = 0) -> None:
        body: JsonObject = {"seq": seq, "verb": verb, "attempt": attempt}
        if verb != "Abort":
            body |= {"expectedStage": stage or self.status["stage"], "expectedStep": step}
        self.edit(intent=body)

    def converge(self) -> None:
        """What the KVCache's reconcile does with agents that run another baseline than its status names."""
        cache = self.cache_status
        for sim in self.sims.values():
            if sim.alive and not sim.cut_off and sim.baseline != cache["baseline"]["digest"]:
                sim.apply(cache["fence"], cache["baseline"]["digest"])

    @property
    def status(self) -> JsonObject:
        return self.status_of(self.rollout)

    def status_of(self, key: ObjectKey) -> JsonObject:
        status: JsonObject = self.api.objects[key].get("status") or {}
        return status

    @property
    def cache_status(self) -> JsonObject:
        status: JsonObject = self.api.objects[self.cache_key]["status"]
        return status

    def condition(self, name: str, key: ObjectKey | None = None) -> JsonObject:
        rows = self.status_of(key or self.rollout).get("conditions") or []
        found: JsonObject = next(row for row in rows if row["type"] == name)
        return found

    @property
    def where(self) -> tuple[str, str, int]:
        return self.status.get("phase", ""), self.status.get("stage", ""), self.status.get("step", 0)

    def says(self, phase: str, stage: str = "") -> bool:
        return self.where[0] == phase and stage in ("", self.where[1])

    # --- the operator --------------------------------------------------------------------------------------

    def restart(self) -> None:
        """A new operator process: nothing in memory, leading from now on."""
        self.deps = Deps(
            api=self.api,
            store=StoreView(self.api),
            fleet=Fleet(self),
            agents=Agents(self.sims, self.faults),
            leader=Leading(self.clock.monotonic()),
            clock=self.clock,
            wake=self.woken.append,
            randomness=lambda: 0.5,
            nonce=lambda: b"0123456789abcdef",
            telemetry=self.spans,
            reads=LastReads(),
        )
        self.operator = KVRolloutReconciler(self.deps, feed=self.feed)

    async def pass_(self, key: ObjectKey | None = None) -> ReconcileOutcome:
        """One call of reconcile; a conflict is retried as the queue would, a killed operator is started again
        after `dead_for` seconds."""
        for _ in range(10):
            try:
                return await self.operator.reconcile(key or self.rollout)
            except Conflict:
                continue
            except Killed:
                self.clock.seconds += self.dead_for
                self.restart()
        raise AssertionError("the rollout conflicts with itself")

    async def pass_once(self) -> None:
        """One call of reconcile by an operator that, once killed, is replaced and does not act yet."""
        try:
            await self.operator.reconcile(self.rollout)
        except Conflict:
            return
        except Killed:
            self.restart()

    def renew(self) -> None:
        """What the renewal loop does, for every agent that answers, only while both fences agree."""
        for key, obj in self.api.objects.items():
            status = obj.get("status") or {}
            if key.kind is not Kind.KV_ROLLOUT or not status.get("candidate"):
                continue
            held = status["stage"] not in ("Off", "ExactBaseline")
            if not held or status["fence"] != self.cache_status["fence"]:
                continue
            for sim in self.sims.values():
                if sim.alive and not sim.cut_off:
                    request = control.RenewRequest(boot_id=sim.boot_id)
                    item = request.items.add(digest=status["candidate"]["digest"], ttl_ms=10_000)
                    item.fence.value = status["fence"]
                    sim.renew(request)

    async def run(self, seconds: float, tick: float = 1.0, keys: Sequence[ObjectKey] = ()) -> None:
        """Lets the operator and the renewals work for so long."""
        end = self.clock.seconds + seconds
        while self.clock.seconds < end:
            for key in keys or (self.rollout,):
                if key in self.api.objects:
                    await self.pass_(key)
            self.renew()
            self.clock.seconds += tick

    async def until(self, phase: str, stage: str = "", step: int | None = None, limit: float = 600.0) -> None:
        """Runs until the rollout says this, or fails the test."""
        end = self.clock.seconds + limit
        while self.clock.seconds < end:
            await self.pass_()
            now = self.where
            if now[0] == phase and stage in ("", now[1]) and step in (None, now[2]):
                return
            self.renew()
            self.clock.seconds += 1.0
        raise AssertionError(f"not {phase} {stage} {step} but {self.where}: {self.status}")

    async def comes_by_itself(self, done: Callable[[], bool], limit: float = 600.0) -> None:
        """Lets the operator work by what each run says of the next, and by nothing else: no watch wakes it,
        as it does not of what a run has written itself."""
        end = self.clock.seconds + limit
        while self.clock.seconds < end:
            outcome = await self.pass_()
            if done():
                return
            assert isinstance(outcome, Requeue), f"nobody looks at it any more: {self.where}"
            due = self.clock.seconds + outcome.after_seconds
            while (left := due - self.clock.seconds) > 1e-6:
                self.renew()
                self.clock.seconds += min(1.0, left)
        raise AssertionError(f"not after {limit:.0f} s: {self.where}, {self.status}")


def held(world: World) -> list[str]:
    """Agents whose lease on a candidate is valid now."""
    return [name for name, sim in world.sims.items() if sim.candidate is not None]


__all__ = ["Done", "Killed", "World", "held"]
