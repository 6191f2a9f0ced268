"""An API server, agents and a clock in memory, for reconciles in a unit test.

The API keeps what the operator depends on: uids, resource versions, tests of JSON patches, server-side apply
per manager on what it sends. It checks no schema; the cluster tests do that.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Callable, Container, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.fleet import StoreFleet, format_micro_time
from kvtier_operator.kube.resources import RESOURCES, key_of
from kvtier_operator.lastreads import LastReads
from kvtier_operator.ports import (
    FIELD_MANAGER,
    AgentError,
    AgentTarget,
    AgentUnreachable,
    AlreadyExists,
    Conflict,
    Deps,
    EventType,
    JsonObject,
    Kind,
    Known,
    NotFound,
    ObjectKey,
    PatchOp,
    PatchVerb,
)
from kvtier_operator.store import WatchStore
from kvtier_operator.telemetry import Telemetry, build_telemetry
from tests.unit.selecting import selected

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeClock:
    """ahead: by how much the wall clock was set, which no other clock notices."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.ahead = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed + self.ahead)

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        self.elapsed += seconds
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self.elapsed += seconds


class Crash(BaseException):
    """The process dies here; nothing may catch it."""


class FakeApi:
    """Writes appear in the store at once, as if the watch had no delay, unless `lag` is set. `crash_at`: the
    n-th write (from 1) is accepted by the server, and then the operator dies."""

    def __init__(self, store: WatchStore) -> None:
        self.store = store
        self.objects: dict[ObjectKey, JsonObject] = {}
        self.owned: dict[tuple[ObjectKey, str], set[str]] = {}
        self.writes: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.crash_at = 0
        self.lag = False
        self._version = 100

    def add(self, obj: JsonObject) -> JsonObject:
        """As a user would create it."""
        key = key_of(obj)
        made = copy.deepcopy(obj)
        self._version += 1
        made["metadata"].setdefault("uid", f"uid-{key.name}")
        made["metadata"].setdefault("generation", 1)
        made["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        made["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = made
        self.store.put(key, copy.deepcopy(made))
        return made

    async def get(self, key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        if key not in self.objects:
            raise NotFound(404, "NotFound", str(key))
        return copy.deepcopy(self.objects[key])

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
            copy.deepcopy(obj)
            for key, obj in sorted(self.objects.items())
            if key.kind is kind
            and (not namespace or key.namespace == namespace)
            and selected(obj, label_selector, field_selector)
        ]

    async def apply(
        self, manifest: JsonObject, *, manager: str = FIELD_MANAGER, force: bool = True
    ) -> JsonObject:
        key = key_of(manifest)
        if key in self.objects:
            before = copy.deepcopy(self.objects[key])
            merged = before | {k: v for k, v in manifest.items() if k != "metadata"}
            merged["metadata"] = before["metadata"] | manifest["metadata"]
            self._store(key, merged, f"apply {key.kind}")
        else:
            self.writes.append(f"apply {key.kind}")
            self.add(manifest)
            self._maybe_crash()
        return copy.deepcopy(self.objects[key])

    async def patch_status(
        self, key: ObjectKey, status: JsonObject, *, uid: str = "", manager: str = FIELD_MANAGER
    ) -> JsonObject:
        obj = copy.deepcopy(await self.get(key))
        if uid and obj["metadata"]["uid"] != uid:
            raise Conflict(409, "Conflict", "uid")
        owned = self.owned.get((key, manager), set())
        current = {k: v for k, v in (obj.get("status") or {}).items() if k not in owned - set(status)}
        obj["status"] = current | copy.deepcopy(status)
        self.owned[key, manager] = set(status)
        self._store(key, obj, f"status {key.kind}")
        return copy.deepcopy(obj)

    async def compare_and_swap(
        self, key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status"
    ) -> JsonObject:
        obj = copy.deepcopy(await self.get(key))
        for op in ops:
            parts = op.path.strip("/").split("/")
            parent: Any = obj
            for part in parts[:-1]:
                parent = parent[int(part)] if isinstance(parent, list) else parent.get(part)
                if parent is None:
                    raise Conflict(422, "Invalid", f"no container for {op.path}")
            _apply_op(parent, parts[-1], op)
        self._store(key, obj, f"swap {key.kind}/{subresource}")
        return copy.deepcopy(obj)

    async def create(self, manifest: JsonObject) -> JsonObject:
        key = key_of(manifest)
        if key in self.objects:
            raise AlreadyExists(409, "AlreadyExists", str(key))
        self.writes.append(f"create {key.kind}")
        return self.add(manifest)

    async def delete(self, key: ObjectKey, *, uid: str = "") -> None:
        self.writes.append(f"delete {key.kind}")
        self.objects.pop(key, None)
        self.store.remove(key)

    async def event(self, regarding: JsonObject, type: EventType, reason: str, message: str) -> None:
        self.events.append((reason, message))

    def mark_deleted(self, key: ObjectKey, now: datetime) -> None:
        obj = self.objects[key]
        obj["metadata"]["deletionTimestamp"] = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        self._publish(key)

    def catch_up(self) -> None:
        """The watch delivers everything that it owes."""
        for key in list(self.objects):
            self._publish(key)

    def _store(self, key: ObjectKey, obj: JsonObject, what: str) -> None:
        self.writes.append(what)
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = obj
        if obj["metadata"].get("deletionTimestamp") and not obj["metadata"].get("finalizers"):
            del self.objects[key]
            self.store.remove(key)
        elif not self.lag:
            self._publish(key)
        self._maybe_crash()

    def _publish(self, key: ObjectKey) -> None:
        self.store.put(key, copy.deepcopy(self.objects[key]))

    def _maybe_crash(self) -> None:
        if self.crash_at and len(self.writes) == self.crash_at:
            raise Crash(self.writes[-1])


def _apply_op(parent: Any, name: str, op: PatchOp) -> None:
    if isinstance(parent, list):
        index = int(name)
        if op.verb is PatchVerb.TEST and (index >= len(parent) or parent[index] != op.value):
            raise Conflict(422, "Invalid", f"testing {op.path}")
        if op.verb is PatchVerb.REMOVE:
            del parent[index]
        return
    if op.verb is PatchVerb.TEST:
        if parent.get(name) != op.value:
            raise Conflict(422, "Invalid", f"testing {op.path}")
    elif op.verb is PatchVerb.REMOVE:
        if name not in parent:
            raise Conflict(422, "Invalid", f"no {op.path}")
        del parent[name]
    else:
        parent[name] = copy.deepcopy(op.value)


class FakeAgents:
    """Agents by node name; `caches` is what each holds: uid -> [fence, digest]. A name in `down` does not
    answer, one in `late` does not answer so many calls in time."""

    def __init__(self) -> None:
        self.boots: dict[str, str] = {}
        self.caches: dict[str, dict[str, list[Any]]] = {}
        self.refs: dict[str, common.CacheRef] = {}
        self.key_secrets: list[str] = []
        self.erasures: list[control.KeyErasure] = []
        self.admissions: dict[str, control.CacheAdmission] = {}
        self.down: set[str] = set()
        self.late: dict[str, int] = {}
        self.calls: list[str] = []
        self.wanted: list[str] = []
        self.used: dict[str, int] = {}
        self.plans: dict[str, control.PlanState] = {}
        self.candidates: dict[str, control.CandidateState] = {}
        self.indexes: dict[str, list[control.IndexState]] = {}
        self.retained: Container[str] | None = None
        # By node, what it recomputes of what runs, and proves; others are of an earlier version.
        self.runs: dict[str, str] = {}

    def _node(self, node: AgentTarget) -> dict[str, list[Any]]:
        if node.name in self.down:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "down")
        if self.late.get(node.name):
            self.late[node.name] -= 1
            raise AgentUnreachable(node.name, "DEADLINE_EXCEEDED", "late")
        return self.caches.setdefault(node.name, {})

    async def get_state(
        self, node: AgentTarget, cache_uid: str = "", *, deadline_seconds: float | None = None
    ) -> control.GetStateResponse:
        held = self._node(node)
        self.calls.append("GetState")
        self.wanted.append(cache_uid)
        return control.GetStateResponse(
            node=node.name,
            boot_id=self.boots.get(node.name, node.boot_id),
            caches=[
                control.CacheState(
                    cache=self.refs[uid],
                    highest_fence=fence,
                    baseline_digest=digest,
                    running_digest=self.runs.get(node.name),
                    used_by_tier=self.used,
                    plan=self.plans.get(node.name),
                    candidate=self.candidates.get(node.name),
                    indexes=self.indexes.get(node.name, []),
                    admission=self.admissions.get(node.name),
                )
                for uid, (fence, digest) in held.items()
                if cache_uid in ("", uid)
            ],
        )

    async def apply_baseline(
        self,
        node: AgentTarget,
        request: control.ApplyBaselineRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ApplyBaselineResponse:
        held = self._node(node)
        self.calls.append("ApplyBaseline")
        uid, fence = request.cache.uid, request.fence.value
        if uid in held:
            highest, digest = held[uid]
            facts = {"highest_fence": str(highest)}
            if fence < highest:
                raise AgentError(node.name, "FENCE_STALE", "below", 0.0, facts)
            other = self.admissions.get(node.name, request.admission) != request.admission
            if fence == highest and (digest != request.digest or other):
                raise AgentError(node.name, "FENCE_CONFLICT", "used", 0.0, facts)
        held[uid] = [fence, request.digest]
        self.admissions[node.name] = request.admission
        self.refs[uid] = request.cache
        self.key_secrets.append(request.key_secret)
        return control.ApplyBaselineResponse(running_digest=request.digest, boot_id=node.boot_id)

    async def remove_cache(
        self, node: AgentTarget, request: control.RemoveCacheRequest, *, deadline_seconds: float | None = None
    ) -> control.RemoveCacheResponse:
        held = self._node(node)
        self.calls.append("RemoveCache")
        if request.fence.value < held.get(request.cache.uid, [0])[0]:
            raise AgentError(node.name, "FENCE_STALE", "below", 0.0, {})
        held.pop(request.cache.uid, None)
        return control.RemoveCacheResponse(key_erasures=self.erasures)

    async def prove(
        self, node: AgentTarget, request: control.ProveRequest, *, deadline_seconds: float | None = None
    ) -> control.ProveResponse:
        held = self._node(node)
        self.calls.append("Prove")
        fence, digest = held[request.cache.uid]
        if request.fence.value < fence:
            raise AgentError(node.name, "FENCE_STALE", "below", 0.0, {"highest_fence": str(fence)})
        digest = self.runs.get(node.name) or digest
        boot = self.boots.get(node.name, node.boot_id)
        joined = request.nonce + digest.encode() + boot.encode()
        return control.ProveResponse(
            proof=control.Proof(
                node=node.name,
                boot_id=boot,
                baseline_digest=digest,
                highest_fence=fence,
                nonce_digest=hashlib.sha256(joined).digest(),
            )
        )

    async def grant(self, node: AgentTarget, request: Any, *, deadline_seconds: float | None = None) -> Any:
        raise AssertionError("a KVCache grants nothing")

    renew = revoke = read_evidence = read_evidence_many = grant

    def retain(self, names: Container[str]) -> None:
        self.retained = names

    async def close(self) -> None:
        return None


class AlwaysLeader:
    """since: when this term began, on the monotonic clock."""

    def __init__(self) -> None:
        self.since = 0.0

    def check(self) -> None:
        return None

    def leading_since(self) -> float | None:
        return self.since


class Bench:
    """Everything a reconciler needs, in memory."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = WatchStore()
        self.api = FakeApi(self.store)
        self.agents = FakeAgents()
        self.leader = AlwaysLeader()
        self.woken: list[ObjectKey] = []
        self.telemetry: Telemetry = build_telemetry(otlp_endpoint="", instance="test", version="test")
        self._nonces = 0
        self.deps = self.make_deps(self.woken.append)

    def make_deps(self, wake: Callable[[ObjectKey], None]) -> Deps:
        return Deps(
            api=self.api,
            store=self.store,
            fleet=StoreFleet(self.store, self.clock),
            agents=self.agents,
            leader=self.leader,
            clock=self.clock,
            wake=wake,
            randomness=lambda: 0.5,
            nonce=self._nonce,
            telemetry=self.telemetry,
            reads=LastReads(),
        )

    def _nonce(self) -> bytes:
        self._nonces += 1
        return self._nonces.to_bytes(16, "big")

    def add_node(
        self, name: str, *, namespace: str = "serving", pool: str = "default", **status: Any
    ) -> None:
        """A Node, its KVNode and a fresh Lease of a minute."""
        self.api.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        tiers = [
            {"class": "gpu-sim", "deviceKind": "simulated", "capacity": 256 * 2**20},
            {"class": "cpu-dram", "capacity": 512 * 2**20},
        ]
        self.api.add(
            {
                "apiVersion": RESOURCES[Kind.KV_NODE].api_version,
                "kind": "KVNode",
                "metadata": {"name": name},
                "spec": {
                    "nodeName": name,
                    "address": f"{name}:7443",
                    "poolRef": {"namespace": namespace, "name": pool},
                },
                "status": {"bootID": f"boot-{name}", "tiers": tiers} | status,
            }
        )
        self.renew(name, namespace=namespace)

    def renew(self, name: str, *, namespace: str = "serving", seconds: int = 60, boot: str = "") -> None:
        self.api.objects.pop(ObjectKey(Kind.LEASE, namespace, f"kvnode-{name}"), None)
        self.api.add(
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": f"kvnode-{name}", "namespace": namespace},
                "spec": {
                    "holderIdentity": boot or f"boot-{name}",
                    "leaseDurationSeconds": seconds,
                    "renewTime": format_micro_time(self.clock.now()),
                },
            }
        )
