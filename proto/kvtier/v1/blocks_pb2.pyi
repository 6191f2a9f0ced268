from kvtier.v1 import attention_pb2 as _attention_pb2
from kvtier.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockRef(_message.Message):
    __slots__ = ("session_id", "session_generation", "layer", "chunk", "generation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    session_generation: int
    layer: int
    chunk: int
    generation: int
    def __init__(self, session_id: _Optional[str] = ..., session_generation: _Optional[int] = ..., layer: _Optional[int] = ..., chunk: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("ref", "tier_class", "rows", "bytes", "checksum", "producer_digest", "sealed")
    REF_FIELD_NUMBER: _ClassVar[int]
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    ref: BlockRef
    tier_class: str
    rows: int
    bytes: int
    checksum: str
    producer_digest: str
    sealed: bool
    def __init__(self, ref: _Optional[_Union[BlockRef, _Mapping]] = ..., tier_class: _Optional[str] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., producer_digest: _Optional[str] = ..., sealed: _Optional[bool] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("session_id", "session_generation", "tenant", "boot_id", "limit", "offset")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    session_generation: int
    tenant: str
    boot_id: str
    limit: int
    offset: int
    def __init__(self, session_id: _Optional[str] = ..., session_generation: _Optional[int] = ..., tenant: _Optional[str] = ..., boot_id: _Optional[str] = ..., limit: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "more")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    more: bool
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class ReadBlockRequest(_message.Message):
    __slots__ = ("ref", "tenant", "boot_id")
    REF_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ref: BlockRef
    tenant: str
    boot_id: str
    def __init__(self, ref: _Optional[_Union[BlockRef, _Mapping]] = ..., tenant: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class BlockPart(_message.Message):
    __slots__ = ("offset", "data", "checksum", "last")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    checksum: str
    last: bool
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[str] = ..., last: _Optional[bool] = ...) -> None: ...

class BlockSource(_message.Message):
    __slots__ = ("model_artifact_digest", "checkpoint", "adapters", "geometry", "numerics_version", "device_kind", "rope", "position_contract", "visibility_mask", "visibility_support", "dtype", "codec", "layout", "producer", "first_layer", "end_layer", "first_kv_head", "end_kv_head", "block_tokens", "hash_version", "branch")
    MODEL_ARTIFACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    POSITION_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MASK_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    END_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    model_artifact_digest: str
    checkpoint: str
    adapters: AdapterSet
    geometry: _attention_pb2.Geometry
    numerics_version: str
    device_kind: str
    rope: RopeConfig
    position_contract: str
    visibility_mask: str
    visibility_support: str
    dtype: str
    codec: str
    layout: str
    producer: str
    first_layer: int
    end_layer: int
    first_kv_head: int
    end_kv_head: int
    block_tokens: int
    hash_version: int
    branch: BlockBranch
    def __init__(self, model_artifact_digest: _Optional[str] = ..., checkpoint: _Optional[str] = ..., adapters: _Optional[_Union[AdapterSet, _Mapping]] = ..., geometry: _Optional[_Union[_attention_pb2.Geometry, _Mapping]] = ..., numerics_version: _Optional[str] = ..., device_kind: _Optional[str] = ..., rope: _Optional[_Union[RopeConfig, _Mapping]] = ..., position_contract: _Optional[str] = ..., visibility_mask: _Optional[str] = ..., visibility_support: _Optional[str] = ..., dtype: _Optional[str] = ..., codec: _Optional[str] = ..., layout: _Optional[str] = ..., producer: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., end_kv_head: _Optional[int] = ..., block_tokens: _Optional[int] = ..., hash_version: _Optional[int] = ..., branch: _Optional[_Union[BlockBranch, _Mapping]] = ...) -> None: ...

class AdapterSet(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterRef]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterRef, _Mapping]]] = ...) -> None: ...

class AdapterRef(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RopeConfig(_message.Message):
    __slots__ = ("theta", "interleaved", "scaling")
    THETA_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVED_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    theta: str
    interleaved: bool
    scaling: str
    def __init__(self, theta: _Optional[str] = ..., interleaved: _Optional[bool] = ..., scaling: _Optional[str] = ...) -> None: ...

class BlockBranch(_message.Message):
    __slots__ = ("path", "request_generation")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    request_generation: int
    def __init__(self, path: _Optional[_Iterable[str]] = ..., request_generation: _Optional[int] = ...) -> None: ...

class BlockScope(_message.Message):
    __slots__ = ("cache", "tenant", "boot_id", "cache_generation", "deadline_ms", "source")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    cache: _common_pb2.CacheRef
    tenant: str
    boot_id: str
    cache_generation: int
    deadline_ms: int
    source: BlockSource
    def __init__(self, cache: _Optional[_Union[_common_pb2.CacheRef, _Mapping]] = ..., tenant: _Optional[str] = ..., boot_id: _Optional[str] = ..., cache_generation: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., source: _Optional[_Union[BlockSource, _Mapping]] = ...) -> None: ...

class BlockSpan(_message.Message):
    __slots__ = ("first_block", "parent_key", "tokens", "content", "keys")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    parent_key: bytes
    tokens: bytes
    content: _containers.RepeatedScalarFieldContainer[bytes]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, first_block: _Optional[int] = ..., parent_key: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., content: _Optional[_Iterable[bytes]] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoreBlocksPart(_message.Message):
    __slots__ = ("begin", "block", "offset", "data", "last", "checksum")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    begin: StoreBegin
    block: int
    offset: int
    data: bytes
    last: bool
    checksum: str
    def __init__(self, begin: _Optional[_Union[StoreBegin, _Mapping]] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., checksum: _Optional[str] = ...) -> None: ...

class StoreBegin(_message.Message):
    __slots__ = ("scope", "span", "block_bytes", "committed_frontier", "recompute_seconds", "droppable", "durable")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPABLE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    block_bytes: int
    committed_frontier: int
    recompute_seconds: float
    droppable: bool
    durable: bool
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ..., block_bytes: _Optional[int] = ..., committed_frontier: _Optional[int] = ..., recompute_seconds: _Optional[float] = ..., droppable: _Optional[bool] = ..., durable: _Optional[bool] = ...) -> None: ...

class StoreBlocksResponse(_message.Message):
    __slots__ = ("blocks", "boot_id", "cache_generation")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    boot_id: str
    cache_generation: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ..., boot_id: _Optional[str] = ..., cache_generation: _Optional[int] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("key", "generation", "existed", "error", "durable", "not_durable")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    NOT_DURABLE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    generation: int
    existed: bool
    error: _common_pb2.ErrorDetail
    durable: bool
    not_durable: _common_pb2.ErrorDetail
    def __init__(self, key: _Optional[bytes] = ..., generation: _Optional[int] = ..., existed: _Optional[bool] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., durable: _Optional[bool] = ..., not_durable: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("scope", "span", "pin_ms")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    PIN_MS_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    pin_ms: int
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ..., pin_ms: _Optional[int] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("blocks", "pin_id", "boot_id", "cache_generation")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[FoundBlock]
    pin_id: str
    boot_id: str
    cache_generation: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[FoundBlock, _Mapping]]] = ..., pin_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., cache_generation: _Optional[int] = ...) -> None: ...

class FoundBlock(_message.Message):
    __slots__ = ("key", "generation", "tier_class", "bytes", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    generation: int
    tier_class: str
    bytes: int
    checksum: str
    def __init__(self, key: _Optional[bytes] = ..., generation: _Optional[int] = ..., tier_class: _Optional[str] = ..., bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class LoadBlocksRequest(_message.Message):
    __slots__ = ("scope", "span", "pin_id", "generations")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    pin_id: str
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ..., pin_id: _Optional[str] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadBlocksPart(_message.Message):
    __slots__ = ("block", "offset", "data", "last", "checksum", "generation", "error")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    data: bytes
    last: bool
    checksum: str
    generation: int
    error: _common_pb2.ErrorDetail
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., checksum: _Optional[str] = ..., generation: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class DeleteBlocksRequest(_message.Message):
    __slots__ = ("scope", "span", "whole_namespace")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    whole_namespace: bool
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ..., whole_namespace: _Optional[bool] = ...) -> None: ...

class DeleteBlocksResponse(_message.Message):
    __slots__ = ("tombstoned", "pending", "tombstone_generation", "tiers")
    TOMBSTONED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tombstoned: int
    pending: int
    tombstone_generation: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierDeletion]
    def __init__(self, tombstoned: _Optional[int] = ..., pending: _Optional[int] = ..., tombstone_generation: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierDeletion, _Mapping]]] = ...) -> None: ...

class TierDeletion(_message.Message):
    __slots__ = ("tier_class", "blocks", "bytes", "durable")
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    tier_class: str
    blocks: int
    bytes: int
    durable: bool
    def __init__(self, tier_class: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., durable: _Optional[bool] = ...) -> None: ...

class ExplainBlockRequest(_message.Message):
    __slots__ = ("scope", "span")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ...) -> None: ...

class ExplainBlockResponse(_message.Message):
    __slots__ = ("key", "state", "replicas", "reason", "message", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    state: str
    replicas: _containers.RepeatedCompositeFieldContainer[BlockReplica]
    reason: _common_pb2.Reason
    message: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, key: _Optional[bytes] = ..., state: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[BlockReplica, _Mapping]]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., message: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class BlockReplica(_message.Message):
    __slots__ = ("tier_class", "generation", "slot_generation", "readers", "authority", "published", "slot")
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    tier_class: str
    generation: int
    slot_generation: int
    readers: int
    authority: bool
    published: bool
    slot: int
    def __init__(self, tier_class: _Optional[str] = ..., generation: _Optional[int] = ..., slot_generation: _Optional[int] = ..., readers: _Optional[int] = ..., authority: _Optional[bool] = ..., published: _Optional[bool] = ..., slot: _Optional[int] = ...) -> None: ...

class InspectBlocksRequest(_message.Message):
    __slots__ = ("scope", "after", "limit")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    after: int
    limit: int
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class InspectBlocksResponse(_message.Message):
    __slots__ = ("boot_id", "cache_generation", "block_bytes", "tiers", "counters", "blocks", "next")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    cache_generation: int
    block_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[BlockTierTotals]
    counters: _containers.ScalarMap[str, int]
    blocks: _containers.RepeatedCompositeFieldContainer[ExplainBlockResponse]
    next: int
    def __init__(self, boot_id: _Optional[str] = ..., cache_generation: _Optional[int] = ..., block_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[BlockTierTotals, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., blocks: _Optional[_Iterable[_Union[ExplainBlockResponse, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...

class BlockTierTotals(_message.Message):
    __slots__ = ("tier_class", "medium", "capacity_blocks", "used_blocks", "published_blocks", "read_blocks", "persistent", "condition")
    TIER_CLASS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    tier_class: str
    medium: str
    capacity_blocks: int
    used_blocks: int
    published_blocks: int
    read_blocks: int
    persistent: bool
    condition: str
    def __init__(self, tier_class: _Optional[str] = ..., medium: _Optional[str] = ..., capacity_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., published_blocks: _Optional[int] = ..., read_blocks: _Optional[int] = ..., persistent: _Optional[bool] = ..., condition: _Optional[str] = ...) -> None: ...

class StartSessionRequest(_message.Message):
    __slots__ = ("scope", "span", "session_id", "session_generation")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    session_id: str
    session_generation: int
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ..., session_id: _Optional[str] = ..., session_generation: _Optional[int] = ...) -> None: ...

class StartSessionResponse(_message.Message):
    __slots__ = ("rows", "boot_id")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    rows: int
    boot_id: str
    def __init__(self, rows: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class PublishSessionRequest(_message.Message):
    __slots__ = ("scope", "span", "session_id", "session_generation", "recompute_seconds", "droppable", "durable")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPABLE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    scope: BlockScope
    span: BlockSpan
    session_id: str
    session_generation: int
    recompute_seconds: float
    droppable: bool
    durable: bool
    def __init__(self, scope: _Optional[_Union[BlockScope, _Mapping]] = ..., span: _Optional[_Union[BlockSpan, _Mapping]] = ..., session_id: _Optional[str] = ..., session_generation: _Optional[int] = ..., recompute_seconds: _Optional[float] = ..., droppable: _Optional[bool] = ..., durable: _Optional[bool] = ...) -> None: ...

class PublishSessionResponse(_message.Message):
    __slots__ = ("blocks", "rows", "boot_id")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    rows: int
    boot_id: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ..., rows: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...
