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
