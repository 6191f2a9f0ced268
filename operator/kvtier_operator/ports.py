"""The seams between the operator's rooms: what a reconciler may use, and nothing about how it is done.

Reconcilers (ours and the rollout's) code against these Protocols only, so they run unchanged against the
real API server, a fake in a unit test, or the simulator. This module must not import kopf, an HTTP client
or grpc's runtime: it holds names, frozen values and typed errors.

`kvtier_operator.app` wires `agents.GrpcAgents(tls, leader, telemetry, metrics)`, which is an `Agents`, with
`tls: AgentTls`; and `reconcile.kvrollout.KVRolloutReconciler(deps)`, which is a `Reconciler`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from kvtier.v1 import control_pb2 as control
from kvtier_operator.external.source import ExternalSource

JsonObject = dict[str, Any]
"""A Kubernetes object as the API server speaks it: camelCase keys, JSON values."""

GROUP = "kvtier.dev"
VERSION = "v1alpha1"
FIELD_MANAGER = "kvtier-operator"
CACHE_FINALIZER = "kvtier.dev/cache"
ROLLOUT_FINALIZER = "kvtier.dev/rollout"
ROLE_LABEL = "kvtier.dev/role"
CACHE_UID_LABEL = "kvtier.dev/cache-uid"
LEASE_PREFIX = "kvnode-"
RUN_DIR = "/run/kvtier"
"""On each node: the folders of agents' engine sockets, RUN_DIR/NODE/engine.sock."""


class Kind(StrEnum):
    """Every kind the operator touches. `kvtier_operator.kube.resources` maps each to its API path."""

    TIER_CLASS = "TierClass"
    AGENT_POOL = "AgentPool"
    KV_NODE = "KVNode"
    KV_CACHE = "KVCache"
    KV_SELECTOR = "KVSelector"
    KV_ROLLOUT = "KVRollout"
    NODE = "Node"
    LEASE = "Lease"
    CONFIG_MAP = "ConfigMap"
    CONTROLLER_REVISION = "ControllerRevision"
    DAEMON_SET = "DaemonSet"
    SERVICE = "Service"
    SERVICE_ACCOUNT = "ServiceAccount"
    ROLE_BINDING = "RoleBinding"
    JOB = "Job"
    EVENT = "Event"


@dataclass(frozen=True, order=True)
class ObjectKey:
    """Names one object. `namespace` is empty for cluster-scoped kinds."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        place = f"{self.namespace}/" if self.namespace else ""
        return f"{self.kind}/{place}{self.name}"


# --- Time ------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Wall time for what is written down, monotonic time for what is waited for."""

    def now(self) -> datetime:
        """Aware UTC time."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Waits on this clock; a fake one returns when it is advanced."""


# --- The Kubernetes API ----------------------------------------------------------------------------


class ApiError(Exception):
    """A request that the API server refused or never answered. `status` is 0 when there was no answer."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class NotFound(ApiError):
    """404: the object (or, for a namespaced create, its namespace) does not exist."""


class AlreadyExists(ApiError):
    """409 on create."""


class Conflict(ApiError):
    """A compare-and-swap whose test failed (422), or an update of an old resource version or uid (409).

    The caller must read again and decide again; repeating the same write is wrong.
    """


class Invalid(ApiError):
    """422 that is not a failed test: the object breaks its schema or a CEL rule. A defect of ours."""


class Forbidden(ApiError):
    """401 or 403: a verb is missing in the RBAC of the chart."""


class PatchVerb(StrEnum):
    TEST = "test"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True)
class PatchOp:
    """One operation of RFC 6902. `test` with value None also passes when the path is absent."""

    verb: PatchVerb
    path: str
    value: Any = None

    def to_json(self) -> JsonObject:
        op: JsonObject = {"op": self.verb.value, "path": self.path}
        if self.verb is not PatchVerb.REMOVE:
            op["value"] = self.value
        return op


def expect_op(path: str, value: Any) -> PatchOp:
    """A `test`: the whole patch is refused (Conflict) unless the value is there."""
    return PatchOp(PatchVerb.TEST, path, value)


def add_op(path: str, value: Any) -> PatchOp:
    """Adds or replaces a member; its parent must exist."""
    return PatchOp(PatchVerb.ADD, path, value)


def remove_op(path: str) -> PatchOp:
    return PatchOp(PatchVerb.REMOVE, path)


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


Known = Callable[[ObjectKey], JsonObject | None]


class KubeApi(Protocol):
    """The API server. Every call has a deadline of its own; every writing call passes the leader gate first
    (raises NotLeader) and is counted in `kvtier_operator_api_writes_total`.

    Who owns which status field (one owner per field, or two managers fight):
    KVCache `.status.fence`, `.status.baseline`, `.status.approved` are written by `compare_and_swap` only,
    with tests on `/metadata/uid` and `/status/fence`; the status that `patch_status` sends never holds them.
    """

    async def get(self, key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        """Asks the server, never the cache alone. known: from the cache; it is the answer where the server
        says that it still has just that version, and then no object travels. Raises NotFound."""

    async def list_all(
        self,
        kind: Kind,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        *,
        known: Known | None = None,
    ) -> list[JsonObject]:
        """All pages. An empty namespace lists the whole cluster. field_selector: by a field that the kind's
        definition calls selectable; ApiError with status 400 where a definition of an earlier version does
        not. known: as with `get`."""

    async def apply(
        self, manifest: JsonObject, *, manager: str = FIELD_MANAGER, force: bool = True
    ) -> JsonObject:
        """Server-side apply of one object (apiVersion, kind, metadata.name required)."""

    async def patch_status(
        self, key: ObjectKey, status: JsonObject, *, uid: str = "", manager: str = FIELD_MANAGER
    ) -> JsonObject:
        """Server-side apply on /status, forced. Fields that `manager` sent before and now leaves out are
        removed, so `status` is always all that this manager owns. With `uid`, a re-created object is a
        Conflict, as far as a read just before the write can tell; what a wrong status would harm has a
        finalizer, and so is not re-created in between."""

    async def compare_and_swap(
        self, key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status"
    ) -> JsonObject:
        """A JSON patch whose `test` operations decide. `subresource=""` patches the object itself.
        Raises Conflict when a test failed."""

    async def create(self, manifest: JsonObject) -> JsonObject:
        """Raises AlreadyExists."""

    async def delete(self, key: ObjectKey, *, uid: str = "") -> None:
        """Deletes in the background; absent is success. With `uid`, another object of that name is a
        Conflict."""

    async def event(self, regarding: JsonObject, type: EventType, reason: str, message: str) -> None:
        """Posts one Event on an object (needs its apiVersion, kind, metadata). The same reason and message on
        the same uid within an hour is posted once. Never raises: an event lost must not stop a reconcile."""


# --- What watches have seen ------------------------------------------------------------------------


class Store(Protocol):
    """A read cache fed by watches. It may be stale, also against our own writes: use it to find out what
    exists and what to do; let compare-and-swap and server-side apply decide. Returned objects are shared:
    never change them.

    Watched: the six kinds, Node, and DaemonSet/Lease of agents. Everything else goes through KubeApi.
    """

    def get(self, key: ObjectKey) -> JsonObject | None: ...

    def list_all(self, kind: Kind, namespace: str = "") -> list[JsonObject]:
        """Sorted by namespace and name. An empty namespace lists all."""

    def rollouts_of(self, namespace: str, cache: str) -> list[JsonObject]: ...

    def revision(self, kind: Kind) -> int:
        """Grows with every change of an object of this kind; to be asked for before a list that is kept."""


# --- Reconciling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """Nothing to do until something changes."""


@dataclass(frozen=True)
class Requeue:
    """Look again after `after_seconds`, though nothing may have changed. Not an error, no backoff."""

    after_seconds: float
    reason: str = ""


ReconcileOutcome = Done | Requeue


class Reconciler(Protocol):
    """Level-triggered: called with a key, never with a change. Calls for one key never overlap; a call has a
    deadline (it is cancelled after it). Raising means failure: retried with exponential backoff. NotLeader
    and Conflict may be raised freely, the queue treats them as a quiet retry."""

    @property
    def kind(self) -> Kind: ...

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome: ...


Wake = Callable[[ObjectKey], None]
"""Puts a key into the work queue at once; callable from any thread."""


class NotLeader(Exception):
    """This process does not hold the operator's Lease (any more): nothing may be written or sent."""


class Leader(Protocol):
    """The gate before every write and RPC. `KubeApi` and `Agents` call it themselves."""

    def check(self) -> None:
        """Raises NotLeader unless the Lease is held with margin to spare."""

    def leading_since(self) -> float | None:
        """Monotonic time at which this process became leader; None when it is not. A new leader waits
        TTL + 10 % from here before it calls an unreachable agent's lease expired."""


# --- Agents ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentTarget:
    """Where an agent is. `name` is the KVNode's, and the name its certificate must carry. `boot_id` is the
    last one seen (KVNode status or its Lease), empty when unknown."""

    name: str
    uid: str
    address: str
    boot_id: str


@dataclass(frozen=True)
class NodeView:
    """One KVNode as the control plane knows it.

    live: its Lease is fresh. draining: it says so itself. cordoned: its Node is unschedulable. A KVNode whose
    Node object is deleted is deleted with it (owner reference), and so leaves every count.
    """

    target: AgentTarget
    live: bool
    draining: bool
    cordoned: bool
    lease_renewed: datetime | None
    lease_seconds: float
    raw: Mapping[str, Any] = field(hash=False, compare=False)


class Fleet(Protocol):
    """The nodes of a pool, from the Store."""

    def members(self, pool_namespace: str, pool_name: str) -> list[NodeView]:
        """All KVNodes whose poolRef names this pool, sorted by name, dead ones included."""


class AgentError(Exception):
    """A typed refusal by an agent. `reason` is the name of a kvtier.v1.Reason."""

    def __init__(
        self, node: str, reason: str, message: str, retry_after_seconds: float, facts: Mapping[str, str]
    ) -> None:
        super().__init__(f"agent {node}: {reason}: {message}")
        self.node = node
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.facts = dict(facts)


class AgentUnreachable(Exception):
    """No answer: refused connection, broken TLS, or the deadline. `code` is the gRPC status name."""

    def __init__(self, node: str, code: str, message: str) -> None:
        super().__init__(f"agent {node}: {code}: {message}")
        self.node = node
        self.code = code
        self.message = message


@dataclass(frozen=True)
class AgentTls:
    """Paths of the operator's client certificate, its key and the CA of the agents' certificates. The server
    name that an agent's certificate must carry is the KVNode's name."""

    certificate: Path
    private_key: Path
    authority: Path


class RpcMetrics(Protocol):
    """What the client pool reports of each call."""

    def observe_rpc(self, method: str, code: str, seconds: float) -> None:
        """`code` is OK, a kvtier.v1.Reason name or a gRPC status name: bounded, so it may be a label."""


class Agents(Protocol):
    """Pool of mTLS clients, one channel per (name, address). Requests and answers are kvtier.v1 messages.

    Every call: passes the leader gate, carries the current traceparent, has a deadline (a default per method
    when `deadline_seconds` is None), is measured, raises AgentError or AgentUnreachable, never retries (the
    reconcile is the retry). An answer of a state may tell of more than the cache that is wanted.
    """

    async def get_state(
        self, node: AgentTarget, cache_uid: str = "", *, deadline_seconds: float | None = None
    ) -> control.GetStateResponse: ...

    async def apply_baseline(
        self,
        node: AgentTarget,
        request: control.ApplyBaselineRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ApplyBaselineResponse: ...

    async def remove_cache(
        self, node: AgentTarget, request: control.RemoveCacheRequest, *, deadline_seconds: float | None = None
    ) -> control.RemoveCacheResponse: ...

    async def grant(
        self, node: AgentTarget, request: control.GrantRequest, *, deadline_seconds: float | None = None
    ) -> control.GrantResponse: ...

    async def renew(
        self, node: AgentTarget, request: control.RenewRequest, *, deadline_seconds: float | None = None
    ) -> control.RenewResponse: ...

    async def revoke(
        self, node: AgentTarget, request: control.RevokeRequest, *, deadline_seconds: float | None = None
    ) -> control.RevokeResponse: ...

    async def prove(
        self, node: AgentTarget, request: control.ProveRequest, *, deadline_seconds: float | None = None
    ) -> control.ProveResponse: ...

    async def read_evidence(
        self,
        node: AgentTarget,
        request: control.ReadEvidenceRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ReadEvidenceResponse: ...

    async def read_evidence_many(
        self,
        node: AgentTarget,
        request: control.ReadEvidenceManyRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ReadEvidenceManyResponse:
        """AgentUnreachable with the code UNIMPLEMENTED: an agent of an earlier version."""

    def retain(self, names: Container[str]) -> None:
        """Closes the channels of all agents but these. A call to another one connects anew."""

    async def close(self) -> None: ...


# --- What a reconciler is built from ----------------------------------------------------------------


@dataclass(frozen=True)
class Deps:
    """Everything a reconciler may reach. `randomness` returns a float in [0, 1) for jitter; `nonce` returns
    16 unpredictable bytes for proofs. `reads`: what the server gave last, whoever asked. `rolled_back` hears
    the cause of each return to the baseline, `looked` how late each look was, in parts of its interval."""

    api: KubeApi
    store: Store
    fleet: Fleet
    agents: Agents
    leader: Leader
    clock: Clock
    wake: Wake
    randomness: Callable[[], float]
    nonce: Callable[[], bytes]
    telemetry: TelemetryPort
    reads: LastReadsPort
    external: ExternalSource | None = None
    rolled_back: Callable[[str], None] = lambda cause: None
    looked: Callable[[float], None] = lambda late: None


class LastReadsPort(Protocol):
    """See `kvtier_operator.lastreads`."""

    def note(self, key: ObjectKey, obj: JsonObject, at: float) -> None: ...

    def vouch(self, key: ObjectKey, cached: JsonObject | None, since: float) -> bool: ...

    def forget(self, key: ObjectKey) -> None: ...

    def wrote(self, key: ObjectKey, obj: JsonObject, by: ObjectKey) -> None: ...


class SpanPort(Protocol):
    def set_attribute(self, key: str, value: str | int | float | bool) -> object: ...


SpanScope = AbstractContextManager[SpanPort]
"""A span around a block. A normal exception (Conflict, NotLeader) does not mark it as an error."""


class TelemetryPort(Protocol):
    """Spans and the few measurements that reconcilers take themselves; see `kvtier_operator.telemetry`."""

    def span(
        self,
        name: str,
        attributes: Mapping[str, str | int | float | bool] | None = None,
        *,
        uid: str = "",
        attempt: int = 0,
    ) -> SpanScope:
        """A short span. With `uid` (of a KVRollout) it belongs to that attempt's trace; without, it is a
        child of the current span."""

    def attempt_root(self, uid: str, attempt: int, attributes: Mapping[str, str]) -> str:
        """Emits the root span of an attempt's trace and returns its traceparent. Its ids are derived, so a
        repeat (after a crash) is the same span."""
