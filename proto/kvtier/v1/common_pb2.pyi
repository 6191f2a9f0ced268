from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    FENCE_STALE: _ClassVar[Reason]
    FENCE_CONFLICT: _ClassVar[Reason]
    BOOT_ID_MISMATCH: _ClassVar[Reason]
    GENERATION_STALE: _ClassVar[Reason]
    LEASE_EXPIRED: _ClassVar[Reason]
    WINDOW_UNKNOWN: _ClassVar[Reason]
    CACHE_UNKNOWN: _ClassVar[Reason]
    MODEL_MISMATCH: _ClassVar[Reason]
    GEOMETRY_MISMATCH: _ClassVar[Reason]
    TENANT_MISMATCH: _ClassVar[Reason]
    POSITION_CONTRACT_MISMATCH: _ClassVar[Reason]
    SESSION_UNKNOWN: _ClassVar[Reason]
    MANIFEST_MISMATCH: _ClassVar[Reason]
    MANIFEST_INVALID: _ClassVar[Reason]
    NUMERICS_MISMATCH: _ClassVar[Reason]
    CALLER_NOT_OPERATOR: _ClassVar[Reason]
    FRAME_INVALID: _ClassVar[Reason]
    FRONTIER_MISMATCH: _ClassVar[Reason]
    STEP_ORDER: _ClassVar[Reason]
    UNSUPPORTED: _ClassVar[Reason]
    BAD_ARGUMENT: _ClassVar[Reason]
    NO_DESTINATION_CAPACITY: _ClassVar[Reason]
    CREDIT_PRESSURE: _ClassVar[Reason]
    QUEUE_FULL: _ClassVar[Reason]
    DEADLINE: _ClassVar[Reason]
    DRAINING: _ClassVar[Reason]
    NO_LEGAL_PATH: _ClassVar[Reason]
    STORAGE_UNAVAILABLE: _ClassVar[Reason]
    TIER_INCAPABLE: _ClassVar[Reason]
    CHECKSUM_MISMATCH: _ClassVar[Reason]
    RECYCLED_DESTINATION: _ClassVar[Reason]
    IDENTITY_MISMATCH: _ClassVar[Reason]
    SHORT_COPY: _ClassVar[Reason]
    STALE_CACHE_GENERATION: _ClassVar[Reason]
    NOT_VISIBLE: _ClassVar[Reason]
    SUPPORT_GAP: _ClassVar[Reason]
    NO_CANDIDATE: _ClassVar[Reason]
    CANDIDATE_REFUSED: _ClassVar[Reason]
    FENCE_NOT_DURABLE: _ClassVar[Reason]
    INTERNAL: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
FENCE_STALE: Reason
FENCE_CONFLICT: Reason
BOOT_ID_MISMATCH: Reason
GENERATION_STALE: Reason
LEASE_EXPIRED: Reason
WINDOW_UNKNOWN: Reason
CACHE_UNKNOWN: Reason
MODEL_MISMATCH: Reason
GEOMETRY_MISMATCH: Reason
TENANT_MISMATCH: Reason
POSITION_CONTRACT_MISMATCH: Reason
SESSION_UNKNOWN: Reason
MANIFEST_MISMATCH: Reason
MANIFEST_INVALID: Reason
NUMERICS_MISMATCH: Reason
CALLER_NOT_OPERATOR: Reason
FRAME_INVALID: Reason
FRONTIER_MISMATCH: Reason
STEP_ORDER: Reason
UNSUPPORTED: Reason
BAD_ARGUMENT: Reason
NO_DESTINATION_CAPACITY: Reason
CREDIT_PRESSURE: Reason
QUEUE_FULL: Reason
DEADLINE: Reason
DRAINING: Reason
NO_LEGAL_PATH: Reason
STORAGE_UNAVAILABLE: Reason
TIER_INCAPABLE: Reason
CHECKSUM_MISMATCH: Reason
RECYCLED_DESTINATION: Reason
IDENTITY_MISMATCH: Reason
SHORT_COPY: Reason
STALE_CACHE_GENERATION: Reason
NOT_VISIBLE: Reason
SUPPORT_GAP: Reason
NO_CANDIDATE: Reason
CANDIDATE_REFUSED: Reason
FENCE_NOT_DURABLE: Reason
INTERNAL: Reason

class CacheRef(_message.Message):
    __slots__ = ("namespace", "name", "uid")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("value", "rollout_uid", "attempt", "stage", "step")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    value: int
    rollout_uid: str
    attempt: int
    stage: str
    step: int
    def __init__(self, value: _Optional[int] = ..., rollout_uid: _Optional[str] = ..., attempt: _Optional[int] = ..., stage: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "retry_after_ms", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    retry_after_ms: int
    facts: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
