from kvtier.v1 import common_pb2 as _common_pb2
from kvtier.v1 import evidence_pb2 as _evidence_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStateRequest(_message.Message):
    __slots__ = ("cache_uids",)
    CACHE_UIDS_FIELD_NUMBER: _ClassVar[int]
    cache_uids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cache_uids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("node", "boot_id", "agent_version", "numerics_version", "manifest_set_digest", "draining", "caches", "tiers", "stamp_ns")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    node: str
    boot_id: str
    agent_version: str
    numerics_version: str
    manifest_set_digest: str
    draining: bool
    caches: _containers.RepeatedCompositeFieldContainer[CacheState]
    tiers: _containers.RepeatedCompositeFieldContainer[TierState]
    stamp_ns: int
    def __init__(self, node: _Optional[str] = ..., boot_id: _Optional[str] = ..., agent_version: _Optional[str] = ..., numerics_version: _Optional[str] = ..., manifest_set_digest: _Optional[str] = ..., draining: _Optional[bool] = ..., caches: _Optional[_Iterable[_Union[CacheState, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierState, _Mapping]]] = ..., stamp_ns: _Optional[int] = ...) -> None: ...

class CacheState(_message.Message):
    __slots__ = ("cache", "highest_fence", "baseline_digest", "candidate", "sessions", "returned_reason", "returned_fence", "returned_rollout_uid", "used_by_tier", "pinned_by_tier", "plan", "indexes", "admission", "running_digest")
    class UsedByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PinnedByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CACHE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FENCE_FIELD_NUMBER: _ClassVar[int]
    BASELINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_REASON_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FENCE_FIELD_NUMBER: _ClassVar[int]
    RETURNED_ROLLOUT_UID_FIELD_NUMBER: _ClassVar[int]
    USED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    PINNED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    highest_fence: int
    baseline_digest: str
    candidate: CandidateState
    sessions: int
    returned_reason: str
    returned_fence: int
    returned_rollout_uid: str
    used_by_tier: _containers.ScalarMap[str, int]
    pinned_by_tier: _containers.ScalarMap[str, int]
    plan: PlanState
    indexes: _containers.RepeatedCompositeFieldContainer[IndexState]
    admission: CacheAdmission
    running_digest: str
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., highest_fence: _Optional[int] = ..., baseline_digest: _Optional[str] = ..., candidate: _Optional[_Union[CandidateState, _Mapping]] = ..., sessions: _Optional[int] = ..., returned_reason: _Optional[str] = ..., returned_fence: _Optional[int] = ..., returned_rollout_uid: _Optional[str] = ..., used_by_tier: _Optional[_Mapping[str, int]] = ..., pinned_by_tier: _Optional[_Mapping[str, int]] = ..., plan: _Optional[_Union[PlanState, _Mapping]] = ..., indexes: _Optional[_Iterable[_Union[IndexState, _Mapping]]] = ..., admission: _Optional[_Union[CacheAdmission, _Mapping]] = ..., running_digest: _Optional[str] = ...) -> None: ...

class IndexState(_message.Message):
    __slots__ = ("family", "selector_digest", "of_candidate", "ready", "building", "refused", "hidden_seconds", "exposed_seconds", "index_bytes", "waiting_bytes", "builds", "appends", "failures", "refusals")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OF_CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BUILDING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUILDS_FIELD_NUMBER: _ClassVar[int]
    APPENDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    family: str
    selector_digest: str
    of_candidate: bool
    ready: int
    building: int
    refused: int
    hidden_seconds: float
    exposed_seconds: float
    index_bytes: int
    waiting_bytes: int
    builds: int
    appends: int
    failures: int
    refusals: _containers.ScalarMap[str, int]
    def __init__(self, family: _Optional[str] = ..., selector_digest: _Optional[str] = ..., of_candidate: _Optional[bool] = ..., ready: _Optional[int] = ..., building: _Optional[int] = ..., refused: _Optional[int] = ..., hidden_seconds: _Optional[float] = ..., exposed_seconds: _Optional[float] = ..., index_bytes: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., builds: _Optional[int] = ..., appends: _Optional[int] = ..., failures: _Optional[int] = ..., refusals: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PlanState(_message.Message):
    __slots__ = ("predicted_stall_seconds", "schedule", "kappa_crit", "link_bytes_per_second", "compute_flop_per_second", "bytes_per_token", "inputs", "policy", "considered")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PREDICTED_STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    KAPPA_CRIT_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FLOP_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    predicted_stall_seconds: float
    schedule: str
    kappa_crit: float
    link_bytes_per_second: float
    compute_flop_per_second: float
    bytes_per_token: int
    inputs: _containers.ScalarMap[str, str]
    policy: str
    considered: _containers.RepeatedCompositeFieldContainer[PlanAlternative]
    def __init__(self, predicted_stall_seconds: _Optional[float] = ..., schedule: _Optional[str] = ..., kappa_crit: _Optional[float] = ..., link_bytes_per_second: _Optional[float] = ..., compute_flop_per_second: _Optional[float] = ..., bytes_per_token: _Optional[int] = ..., inputs: _Optional[_Mapping[str, str]] = ..., policy: _Optional[str] = ..., considered: _Optional[_Iterable[_Union[PlanAlternative, _Mapping]]] = ...) -> None: ...

class PlanAlternative(_message.Message):
    __slots__ = ("name", "lost", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    lost: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., lost: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class CandidateState(_message.Message):
    __slots__ = ("digest", "fence", "remaining_ms", "running_digest")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    fence: _common_pb2.Fence
    remaining_ms: int
    running_digest: str
    def __init__(self, digest: _Optional[str] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., remaining_ms: _Optional[int] = ..., running_digest: _Optional[str] = ...) -> None: ...

class TierState(_message.Message):
    __slots__ = ("tier_class", "medium", "simulated", "capacity_bytes", "used_bytes", "pinned_bytes", "read_bytes_per_second", "write_bytes_per_second", "probes", "condition")
    class ProbesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    tier_class: str
    medium: str
    simulated: bool
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    probes: _containers.ScalarMap[str, str]
    condition: str
    def __init__(self, tier_class: _Optional[str] = ..., medium: _Optional[str] = ..., simulated: _Optional[bool] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., read_bytes_per_second: _Optional[float] = ..., write_bytes_per_second: _Optional[float] = ..., probes: _Optional[_Mapping[str, str]] = ..., condition: _Optional[str] = ...) -> None: ...

class ApplyBaselineRequest(_message.Message):
    __slots__ = ("cache", "fence", "boot_id", "manifest", "digest", "key_secret", "admission")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEY_SECRET_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    boot_id: str
    manifest: bytes
    digest: str
    key_secret: str
    admission: CacheAdmission
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., boot_id: _Optional[str] = ..., manifest: _Optional[bytes] = ..., digest: _Optional[str] = ..., key_secret: _Optional[str] = ..., admission: _Optional[_Union[CacheAdmission, _Mapping]] = ...) -> None: ...

class CacheAdmission(_message.Message):
    __slots__ = ("pinned_bytes", "staging_bytes", "link_bytes", "queue", "policy", "sessions")
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    pinned_bytes: int
    staging_bytes: int
    link_bytes: int
    queue: int
    policy: str
    sessions: CacheSessions
    def __init__(self, pinned_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., link_bytes: _Optional[int] = ..., queue: _Optional[int] = ..., policy: _Optional[str] = ..., sessions: _Optional[_Union[CacheSessions, _Mapping]] = ...) -> None: ...

class CacheSessions(_message.Message):
    __slots__ = ("idle", "ttl_ms")
    IDLE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    idle: str
    ttl_ms: int
    def __init__(self, idle: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ApplyBaselineResponse(_message.Message):
    __slots__ = ("running_digest", "boot_id")
    RUNNING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    running_digest: str
    boot_id: str
    def __init__(self, running_digest: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class RemoveCacheRequest(_message.Message):
    __slots__ = ("cache", "fence", "boot_id")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    boot_id: str
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., boot_id: _Optional[str] = ...) -> None: ...

class RemoveCacheResponse(_message.Message):
    __slots__ = ("sessions_ended", "key_erasures")
    SESSIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    KEY_ERASURES_FIELD_NUMBER: _ClassVar[int]
    sessions_ended: int
    key_erasures: _containers.RepeatedCompositeFieldContainer[KeyErasure]
    def __init__(self, sessions_ended: _Optional[int] = ..., key_erasures: _Optional[_Iterable[_Union[KeyErasure, _Mapping]]] = ...) -> None: ...

class KeyErasure(_message.Message):
    __slots__ = ("tier_class", "file", "keys")
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tier_class: str
    file: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tier_class: _Optional[str] = ..., file: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class BlastRadius(_message.Message):
    __slots__ = ("tenants", "request_classes")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASSES_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    request_classes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenants: _Optional[_Iterable[str]] = ..., request_classes: _Optional[_Iterable[str]] = ...) -> None: ...

class GateLimit(_message.Message):
    __slots__ = ("name", "metric", "quantile", "limit", "pair_threshold")
    NAME_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    QUANTILE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAIR_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    name: str
    metric: str
    quantile: float
    limit: str
    pair_threshold: str
    def __init__(self, name: _Optional[str] = ..., metric: _Optional[str] = ..., quantile: _Optional[float] = ..., limit: _Optional[str] = ..., pair_threshold: _Optional[str] = ...) -> None: ...

class GrantRequest(_message.Message):
    __slots__ = ("cache", "fence", "boot_id", "manifest", "digest", "baseline_digest", "ttl_ms", "traffic_fraction", "sample_fraction", "blast_radius", "window", "gates", "settle_ms", "warmup_ms", "nonce", "approved", "sent_ns")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASELINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FRACTION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FRACTION_FIELD_NUMBER: _ClassVar[int]
    BLAST_RADIUS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    SETTLE_MS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_MS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    boot_id: str
    manifest: bytes
    digest: str
    baseline_digest: str
    ttl_ms: int
    traffic_fraction: str
    sample_fraction: str
    blast_radius: BlastRadius
    window: _evidence_pb2.WindowKey
    gates: _containers.RepeatedCompositeFieldContainer[GateLimit]
    settle_ms: int
    warmup_ms: int
    nonce: bytes
    approved: bool
    sent_ns: int
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., boot_id: _Optional[str] = ..., manifest: _Optional[bytes] = ..., digest: _Optional[str] = ..., baseline_digest: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., traffic_fraction: _Optional[str] = ..., sample_fraction: _Optional[str] = ..., blast_radius: _Optional[_Union[BlastRadius, _Mapping]] = ..., window: _Optional[_Union[_evidence_pb2.WindowKey, _Mapping]] = ..., gates: _Optional[_Iterable[_Union[GateLimit, _Mapping]]] = ..., settle_ms: _Optional[int] = ..., warmup_ms: _Optional[int] = ..., nonce: _Optional[bytes] = ..., approved: _Optional[bool] = ..., sent_ns: _Optional[int] = ...) -> None: ...

class GrantResponse(_message.Message):
    __slots__ = ("candidate_digest", "boot_id", "remaining_ms", "stamp_ns")
    CANDIDATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    candidate_digest: str
    boot_id: str
    remaining_ms: int
    stamp_ns: int
    def __init__(self, candidate_digest: _Optional[str] = ..., boot_id: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., stamp_ns: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("boot_id", "items", "sent_ns")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    items: _containers.RepeatedCompositeFieldContainer[RenewItem]
    sent_ns: int
    def __init__(self, boot_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[RenewItem, _Mapping]]] = ..., sent_ns: _Optional[int] = ...) -> None: ...

class RenewItem(_message.Message):
    __slots__ = ("cache", "fence", "digest", "ttl_ms")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    digest: str
    ttl_ms: int
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., digest: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("results", "boot_id", "stamp_ns")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RenewResult]
    boot_id: str
    stamp_ns: int
    def __init__(self, results: _Optional[_Iterable[_Union[RenewResult, _Mapping]]] = ..., boot_id: _Optional[str] = ..., stamp_ns: _Optional[int] = ...) -> None: ...

class RenewResult(_message.Message):
    __slots__ = ("cache", "renewed", "error", "remaining_ms")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    renewed: bool
    error: _common_pb2.ErrorDetail
    remaining_ms: int
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., renewed: _Optional[bool] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., remaining_ms: _Optional[int] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("cache", "fence", "boot_id", "reason", "nonce")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    boot_id: str
    reason: str
    nonce: bytes
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., boot_id: _Optional[str] = ..., reason: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class RevokeResponse(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ...) -> None: ...

class ProveRequest(_message.Message):
    __slots__ = ("cache", "fence", "boot_id", "nonce")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    boot_id: str
    nonce: bytes
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., boot_id: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ProveResponse(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: Proof
    def __init__(self, proof: _Optional[_Union[Proof, _Mapping]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("node", "boot_id", "baseline_digest", "candidate_digest", "in_flight_candidate", "highest_fence", "nonce_digest")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BASELINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FENCE_FIELD_NUMBER: _ClassVar[int]
    NONCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    node: str
    boot_id: str
    baseline_digest: str
    candidate_digest: str
    in_flight_candidate: int
    highest_fence: int
    nonce_digest: bytes
    def __init__(self, node: _Optional[str] = ..., boot_id: _Optional[str] = ..., baseline_digest: _Optional[str] = ..., candidate_digest: _Optional[str] = ..., in_flight_candidate: _Optional[int] = ..., highest_fence: _Optional[int] = ..., nonce_digest: _Optional[bytes] = ...) -> None: ...

class ReadEvidenceRequest(_message.Message):
    __slots__ = ("cache", "fence", "window", "epoch", "ack_seq")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACK_SEQ_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    fence: _common_pb2.Fence
    window: _evidence_pb2.WindowKey
    epoch: str
    ack_seq: int
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., fence: _Optional[_Union[_common_pb2.Fence, _Mapping]] = ..., window: _Optional[_Union[_evidence_pb2.WindowKey, _Mapping]] = ..., epoch: _Optional[str] = ..., ack_seq: _Optional[int] = ...) -> None: ...

class ReadEvidenceResponse(_message.Message):
    __slots__ = ("epoch", "from_seq", "to_seq", "full", "increments", "total_units", "settled_cohort", "assigned_units")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    INCREMENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_UNITS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_COHORT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_UNITS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    from_seq: int
    to_seq: int
    full: bool
    increments: _evidence_pb2.WindowCounts
    total_units: int
    settled_cohort: int
    assigned_units: int
    def __init__(self, epoch: _Optional[str] = ..., from_seq: _Optional[int] = ..., to_seq: _Optional[int] = ..., full: _Optional[bool] = ..., increments: _Optional[_Union[_evidence_pb2.WindowCounts, _Mapping]] = ..., total_units: _Optional[int] = ..., settled_cohort: _Optional[int] = ..., assigned_units: _Optional[int] = ...) -> None: ...

class ReadEvidenceManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ReadEvidenceRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[ReadEvidenceRequest, _Mapping]]] = ...) -> None: ...

class ReadEvidenceManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReadEvidenceResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReadEvidenceResult, _Mapping]]] = ...) -> None: ...

class ReadEvidenceResult(_message.Message):
    __slots__ = ("evidence", "error")
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    evidence: ReadEvidenceResponse
    error: _common_pb2.ErrorDetail
    def __init__(self, evidence: _Optional[_Union[ReadEvidenceResponse, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
