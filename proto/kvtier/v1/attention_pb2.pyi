from kvtier.v1 import common_pb2 as _common_pb2
from kvtier.v1 import evidence_pb2 as _evidence_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EvidenceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVIDENCE_UNSPECIFIED: _ClassVar[EvidenceKind]
    PREFILL_QUERIES: _ClassVar[EvidenceKind]
    PREVIOUS_HIDDEN_STATE: _ClassVar[EvidenceKind]
    WEIGHTS: _ClassVar[EvidenceKind]
    SURPRISAL: _ClassVar[EvidenceKind]
    FIXED_CONTEXT: _ClassVar[EvidenceKind]

class Arm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARM_UNSPECIFIED: _ClassVar[Arm]
    ARM_BASELINE: _ClassVar[Arm]
    ARM_CANDIDATE: _ClassVar[Arm]

class ExactnessClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[ExactnessClass]
    EXACT: _ClassVar[ExactnessClass]
    APPROXIMATE: _ClassVar[ExactnessClass]
    EXACT_OVER_APPROXIMATE_HISTORY: _ClassVar[ExactnessClass]
    EXACT_OVER_EDITED_HISTORY: _ClassVar[ExactnessClass]
EVIDENCE_UNSPECIFIED: EvidenceKind
PREFILL_QUERIES: EvidenceKind
PREVIOUS_HIDDEN_STATE: EvidenceKind
WEIGHTS: EvidenceKind
SURPRISAL: EvidenceKind
FIXED_CONTEXT: EvidenceKind
ARM_UNSPECIFIED: Arm
ARM_BASELINE: Arm
ARM_CANDIDATE: Arm
EXACTNESS_UNSPECIFIED: ExactnessClass
EXACT: ExactnessClass
APPROXIMATE: ExactnessClass
EXACT_OVER_APPROXIMATE_HISTORY: ExactnessClass
EXACT_OVER_EDITED_HISTORY: ExactnessClass

class Geometry(_message.Message):
    __slots__ = ("layers", "query_heads", "kv_heads", "head_dim", "dtype")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    def __init__(self, layers: _Optional[int] = ..., query_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class DescribeCacheRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ...) -> None: ...

class DescribeCacheResponse(_message.Message):
    __slots__ = ("cache", "boot_id", "baseline_digest", "candidate_digest", "stage", "attempt", "window", "geometry", "chunk_tokens", "page_tokens", "model_fingerprint")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BASELINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    boot_id: str
    baseline_digest: str
    candidate_digest: str
    stage: str
    attempt: int
    window: _evidence_pb2.WindowKey
    geometry: Geometry
    chunk_tokens: int
    page_tokens: int
    model_fingerprint: str
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., boot_id: _Optional[str] = ..., baseline_digest: _Optional[str] = ..., candidate_digest: _Optional[str] = ..., stage: _Optional[str] = ..., attempt: _Optional[int] = ..., window: _Optional[_Union[_evidence_pb2.WindowKey, _Mapping]] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., page_tokens: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("cache", "model_fingerprint", "geometry", "score_scale", "tenant", "request_class", "session_root_id", "probe", "forced_arm", "max_tokens", "traceparent", "local_channel_version", "gives", "hidden_size", "fixed_context_tokens")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    SCORE_SCALE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    FORCED_ARM_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CHANNEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIXED_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    model_fingerprint: str
    geometry: Geometry
    score_scale: float
    tenant: str
    request_class: str
    session_root_id: str
    probe: bool
    forced_arm: Arm
    max_tokens: int
    traceparent: str
    local_channel_version: int
    gives: _containers.RepeatedScalarFieldContainer[EvidenceKind]
    hidden_size: int
    fixed_context_tokens: int
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., model_fingerprint: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., score_scale: _Optional[float] = ..., tenant: _Optional[str] = ..., request_class: _Optional[str] = ..., session_root_id: _Optional[str] = ..., probe: _Optional[bool] = ..., forced_arm: _Optional[_Union[Arm, str]] = ..., max_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., local_channel_version: _Optional[int] = ..., gives: _Optional[_Iterable[_Union[EvidenceKind, str]]] = ..., hidden_size: _Optional[int] = ..., fixed_context_tokens: _Optional[int] = ...) -> None: ...

class LocalChannel(_message.Message):
    __slots__ = ("socket", "token", "version", "max_ring_bytes", "max_frames")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_RING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    socket: str
    token: bytes
    version: int
    max_ring_bytes: int
    max_frames: int
    def __init__(self, socket: _Optional[str] = ..., token: _Optional[bytes] = ..., version: _Optional[int] = ..., max_ring_bytes: _Optional[int] = ..., max_frames: _Optional[int] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "generation", "boot_id", "arm", "manifest_digest", "baseline_digest", "sampled", "window", "chunk_tokens", "query_block_tokens", "cache", "local_channel", "local_channel_refused", "evidence", "candidate_refused")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASELINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CHANNEL_REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    boot_id: str
    arm: Arm
    manifest_digest: str
    baseline_digest: str
    sampled: bool
    window: _evidence_pb2.WindowKey
    chunk_tokens: int
    query_block_tokens: int
    cache: _common_pb2.CacheRef
    local_channel: LocalChannel
    local_channel_refused: str
    evidence: EvidenceWanted
    candidate_refused: _common_pb2.ErrorDetail
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., boot_id: _Optional[str] = ..., arm: _Optional[_Union[Arm, str]] = ..., manifest_digest: _Optional[str] = ..., baseline_digest: _Optional[str] = ..., sampled: _Optional[bool] = ..., window: _Optional[_Union[_evidence_pb2.WindowKey, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., query_block_tokens: _Optional[int] = ..., cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., local_channel: _Optional[_Union[LocalChannel, _Mapping]] = ..., local_channel_refused: _Optional[str] = ..., evidence: _Optional[_Union[EvidenceWanted, _Mapping]] = ..., candidate_refused: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class EvidenceWanted(_message.Message):
    __slots__ = ("kinds", "layers")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[EvidenceKind]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kinds: _Optional[_Iterable[_Union[EvidenceKind, str]]] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class GiveWeightsRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: LayerWeightsHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[LayerWeightsHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class LayerWeightsHeader(_message.Message):
    __slots__ = ("session_id", "generation", "boot_id", "tenant", "model_fingerprint", "layer", "has_bias", "norm_eps", "frequencies", "interleaved", "digest", "size_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HAS_BIAS_FIELD_NUMBER: _ClassVar[int]
    NORM_EPS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCIES_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    boot_id: str
    tenant: str
    model_fingerprint: str
    layer: int
    has_bias: bool
    norm_eps: float
    frequencies: int
    interleaved: bool
    digest: str
    size_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., boot_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., layer: _Optional[int] = ..., has_bias: _Optional[bool] = ..., norm_eps: _Optional[float] = ..., frequencies: _Optional[int] = ..., interleaved: _Optional[bool] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class GiveWeightsResponse(_message.Message):
    __slots__ = ("bound", "missing")
    BOUND_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    bound: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bound: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendFrame(_message.Message):
    __slots__ = ("session_id", "generation", "boot_id", "tenant", "step", "layer", "first_row_position", "k", "v", "first_query_position", "q", "committed_frontier", "deadline_ms", "sequence", "next_layer_follows", "position_epoch", "evidence")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_POSITION_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    FIRST_QUERY_POSITION_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_LAYER_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    POSITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    boot_id: str
    tenant: str
    step: int
    layer: int
    first_row_position: int
    k: bytes
    v: bytes
    first_query_position: int
    q: bytes
    committed_frontier: int
    deadline_ms: int
    sequence: int
    next_layer_follows: bool
    position_epoch: int
    evidence: FrameEvidence
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., boot_id: _Optional[str] = ..., tenant: _Optional[str] = ..., step: _Optional[int] = ..., layer: _Optional[int] = ..., first_row_position: _Optional[int] = ..., k: _Optional[bytes] = ..., v: _Optional[bytes] = ..., first_query_position: _Optional[int] = ..., q: _Optional[bytes] = ..., committed_frontier: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., next_layer_follows: _Optional[bool] = ..., position_epoch: _Optional[int] = ..., evidence: _Optional[_Union[FrameEvidence, _Mapping]] = ...) -> None: ...

class FrameEvidence(_message.Message):
    __slots__ = ("hidden", "hidden_layer", "surprisal_first", "surprisal")
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYER_FIELD_NUMBER: _ClassVar[int]
    SURPRISAL_FIRST_FIELD_NUMBER: _ClassVar[int]
    SURPRISAL_FIELD_NUMBER: _ClassVar[int]
    hidden: bytes
    hidden_layer: int
    surprisal_first: int
    surprisal: bytes
    def __init__(self, hidden: _Optional[bytes] = ..., hidden_layer: _Optional[int] = ..., surprisal_first: _Optional[int] = ..., surprisal: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("exactness", "arm", "manifest_digest", "support_digest", "frontier", "rows_attended", "bytes_by_tier", "plan", "simulated", "stall_seconds", "producer_digest", "estimated_omitted_mass", "fallback", "snapshot_generation", "plan_kind", "hidden_transfer_seconds", "exposed_transfer_seconds", "peak_buffer_bytes", "promised_bytes", "position_epoch", "selection", "shared_bytes_by_tier")
    class BytesByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SharedBytesByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    ROWS_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    BYTES_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_OMITTED_MASS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLAN_KIND_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POSITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    exactness: ExactnessClass
    arm: Arm
    manifest_digest: str
    support_digest: str
    frontier: int
    rows_attended: int
    bytes_by_tier: _containers.ScalarMap[str, int]
    plan: _containers.RepeatedScalarFieldContainer[str]
    simulated: bool
    stall_seconds: float
    producer_digest: str
    estimated_omitted_mass: float
    fallback: str
    snapshot_generation: int
    plan_kind: str
    hidden_transfer_seconds: float
    exposed_transfer_seconds: float
    peak_buffer_bytes: int
    promised_bytes: int
    position_epoch: int
    selection: SelectionReceipt
    shared_bytes_by_tier: _containers.ScalarMap[str, int]
    def __init__(self, exactness: _Optional[_Union[ExactnessClass, str]] = ..., arm: _Optional[_Union[Arm, str]] = ..., manifest_digest: _Optional[str] = ..., support_digest: _Optional[str] = ..., frontier: _Optional[int] = ..., rows_attended: _Optional[int] = ..., bytes_by_tier: _Optional[_Mapping[str, int]] = ..., plan: _Optional[_Iterable[str]] = ..., simulated: _Optional[bool] = ..., stall_seconds: _Optional[float] = ..., producer_digest: _Optional[str] = ..., estimated_omitted_mass: _Optional[float] = ..., fallback: _Optional[str] = ..., snapshot_generation: _Optional[int] = ..., plan_kind: _Optional[str] = ..., hidden_transfer_seconds: _Optional[float] = ..., exposed_transfer_seconds: _Optional[float] = ..., peak_buffer_bytes: _Optional[int] = ..., promised_bytes: _Optional[int] = ..., position_epoch: _Optional[int] = ..., selection: _Optional[_Union[SelectionReceipt, _Mapping]] = ..., shared_bytes_by_tier: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SelectionReceipt(_message.Message):
    __slots__ = ("family", "variant", "guarantee", "selector_digest", "index_digest", "index_epoch", "index_covered", "unindexed", "asked_tokens", "asked_bytes", "asked_units", "got_units", "got_rows", "uncapped", "dropped_by_cap", "scanned_units", "index_bytes", "threshold", "runner_up", "ties", "seed", "omitted_mass", "confidence", "certified_mass", "widened", "max_omitted_mass", "min_confidence", "failed", "hot_bytes", "selected_bytes")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_COVERED_FIELD_NUMBER: _ClassVar[int]
    UNINDEXED_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASKED_UNITS_FIELD_NUMBER: _ClassVar[int]
    GOT_UNITS_FIELD_NUMBER: _ClassVar[int]
    GOT_ROWS_FIELD_NUMBER: _ClassVar[int]
    UNCAPPED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BY_CAP_FIELD_NUMBER: _ClassVar[int]
    SCANNED_UNITS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    OMITTED_MASS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    CERTIFIED_MASS_FIELD_NUMBER: _ClassVar[int]
    WIDENED_FIELD_NUMBER: _ClassVar[int]
    MAX_OMITTED_MASS_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SELECTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    family: str
    variant: str
    guarantee: str
    selector_digest: str
    index_digest: str
    index_epoch: int
    index_covered: int
    unindexed: int
    asked_tokens: int
    asked_bytes: int
    asked_units: int
    got_units: int
    got_rows: int
    uncapped: int
    dropped_by_cap: int
    scanned_units: int
    index_bytes: int
    threshold: float
    runner_up: float
    ties: int
    seed: int
    omitted_mass: float
    confidence: float
    certified_mass: float
    widened: int
    max_omitted_mass: float
    min_confidence: float
    failed: bool
    hot_bytes: int
    selected_bytes: int
    def __init__(self, family: _Optional[str] = ..., variant: _Optional[str] = ..., guarantee: _Optional[str] = ..., selector_digest: _Optional[str] = ..., index_digest: _Optional[str] = ..., index_epoch: _Optional[int] = ..., index_covered: _Optional[int] = ..., unindexed: _Optional[int] = ..., asked_tokens: _Optional[int] = ..., asked_bytes: _Optional[int] = ..., asked_units: _Optional[int] = ..., got_units: _Optional[int] = ..., got_rows: _Optional[int] = ..., uncapped: _Optional[int] = ..., dropped_by_cap: _Optional[int] = ..., scanned_units: _Optional[int] = ..., index_bytes: _Optional[int] = ..., threshold: _Optional[float] = ..., runner_up: _Optional[float] = ..., ties: _Optional[int] = ..., seed: _Optional[int] = ..., omitted_mass: _Optional[float] = ..., confidence: _Optional[float] = ..., certified_mass: _Optional[float] = ..., widened: _Optional[int] = ..., max_omitted_mass: _Optional[float] = ..., min_confidence: _Optional[float] = ..., failed: _Optional[bool] = ..., hot_bytes: _Optional[int] = ..., selected_bytes: _Optional[int] = ...) -> None: ...

class AttendAnswer(_message.Message):
    __slots__ = ("sequence", "step", "layer", "out", "receipt", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    step: int
    layer: int
    out: bytes
    receipt: Receipt
    error: _common_pb2.ErrorDetail
    def __init__(self, sequence: _Optional[int] = ..., step: _Optional[int] = ..., layer: _Optional[int] = ..., out: _Optional[bytes] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class AttendFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[AttendFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[AttendFrame, _Mapping]]] = ...) -> None: ...

class AttendAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[AttendAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[AttendAnswer, _Mapping]]] = ...) -> None: ...

class EditSessionRequest(_message.Message):
    __slots__ = ("session_id", "generation", "boot_id", "tenant", "position_epoch", "deadline_ms", "truncate", "fork", "drop", "reposition")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POSITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    REPOSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    boot_id: str
    tenant: str
    position_epoch: int
    deadline_ms: int
    truncate: TruncateEdit
    fork: ForkEdit
    drop: DropEdit
    reposition: RepositionEdit
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., boot_id: _Optional[str] = ..., tenant: _Optional[str] = ..., position_epoch: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., truncate: _Optional[_Union[TruncateEdit, _Mapping]] = ..., fork: _Optional[_Union[ForkEdit, _Mapping]] = ..., drop: _Optional[_Union[DropEdit, _Mapping]] = ..., reposition: _Optional[_Union[RepositionEdit, _Mapping]] = ...) -> None: ...

class TruncateEdit(_message.Message):
    __slots__ = ("to", "anew")
    TO_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    to: int
    anew: bool
    def __init__(self, to: _Optional[int] = ..., anew: _Optional[bool] = ...) -> None: ...

class ForkEdit(_message.Message):
    __slots__ = ("traceparent", "local_channel_version")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CHANNEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    local_channel_version: int
    def __init__(self, traceparent: _Optional[str] = ..., local_channel_version: _Optional[int] = ...) -> None: ...

class DropEdit(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[PositionRange]
    def __init__(self, ranges: _Optional[_Iterable[_Union[PositionRange, _Mapping]]] = ...) -> None: ...

class PositionRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class RepositionEdit(_message.Message):
    __slots__ = ("moves", "close_gaps")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    CLOSE_GAPS_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[PositionMove]
    close_gaps: bool
    def __init__(self, moves: _Optional[_Iterable[_Union[PositionMove, _Mapping]]] = ..., close_gaps: _Optional[bool] = ...) -> None: ...

class PositionMove(_message.Message):
    __slots__ = ("first", "last", "to")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    to: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., to: _Optional[int] = ...) -> None: ...

class EditSessionResponse(_message.Message):
    __slots__ = ("changed", "position_epoch", "next_position", "rows", "chunks", "child")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    POSITION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHILD_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    position_epoch: int
    next_position: int
    rows: int
    chunks: int
    child: OpenSessionResponse
    def __init__(self, changed: _Optional[bool] = ..., position_epoch: _Optional[int] = ..., next_position: _Optional[int] = ..., rows: _Optional[int] = ..., chunks: _Optional[int] = ..., child: _Optional[_Union[OpenSessionResponse, _Mapping]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "generation", "tenant")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    tenant: str
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("rows_released",)
    ROWS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    rows_released: int
    def __init__(self, rows_released: _Optional[int] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("session_id", "generation", "tenant", "output_tokens", "first_token_seconds", "last_token_seconds", "cancelled", "probe")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    tenant: str
    output_tokens: int
    first_token_seconds: float
    last_token_seconds: float
    cancelled: bool
    probe: _evidence_pb2.ProbePair
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., tenant: _Optional[str] = ..., output_tokens: _Optional[int] = ..., first_token_seconds: _Optional[float] = ..., last_token_seconds: _Optional[float] = ..., cancelled: _Optional[bool] = ..., probe: _Optional[_Union[_evidence_pb2.ProbePair, _Mapping]] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ("counted", "why_not")
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    counted: bool
    why_not: str
    def __init__(self, counted: _Optional[bool] = ..., why_not: _Optional[str] = ...) -> None: ...
