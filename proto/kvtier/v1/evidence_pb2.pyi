from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WindowKey(_message.Message):
    __slots__ = ("rollout_uid", "attempt", "stage", "step", "candidate_digest", "baseline_digest", "gates_digest", "opening_fence")
    ROLLOUT_UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASELINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GATES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPENING_FENCE_FIELD_NUMBER: _ClassVar[int]
    rollout_uid: str
    attempt: int
    stage: str
    step: int
    candidate_digest: str
    baseline_digest: str
    gates_digest: str
    opening_fence: int
    def __init__(self, rollout_uid: _Optional[str] = ..., attempt: _Optional[int] = ..., stage: _Optional[str] = ..., step: _Optional[int] = ..., candidate_digest: _Optional[str] = ..., baseline_digest: _Optional[str] = ..., gates_digest: _Optional[str] = ..., opening_fence: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bins", "zero", "missing", "n", "scale_shift")
    class BinsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    BINS_FIELD_NUMBER: _ClassVar[int]
    ZERO_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SCALE_SHIFT_FIELD_NUMBER: _ClassVar[int]
    bins: _containers.ScalarMap[int, int]
    zero: int
    missing: int
    n: int
    scale_shift: int
    def __init__(self, bins: _Optional[_Mapping[int, int]] = ..., zero: _Optional[int] = ..., missing: _Optional[int] = ..., n: _Optional[int] = ..., scale_shift: _Optional[int] = ...) -> None: ...

class MetricCounts(_message.Message):
    __slots__ = ("metric", "arm", "histogram", "above_up", "above_down", "warmup", "warmup_above_down")
    class AboveUpEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AboveDownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WarmupAboveDownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    METRIC_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    ABOVE_UP_FIELD_NUMBER: _ClassVar[int]
    ABOVE_DOWN_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    WARMUP_ABOVE_DOWN_FIELD_NUMBER: _ClassVar[int]
    metric: str
    arm: str
    histogram: Histogram
    above_up: _containers.ScalarMap[str, int]
    above_down: _containers.ScalarMap[str, int]
    warmup: Histogram
    warmup_above_down: _containers.ScalarMap[str, int]
    def __init__(self, metric: _Optional[str] = ..., arm: _Optional[str] = ..., histogram: _Optional[_Union[Histogram, _Mapping]] = ..., above_up: _Optional[_Mapping[str, int]] = ..., above_down: _Optional[_Mapping[str, int]] = ..., warmup: _Optional[_Union[Histogram, _Mapping]] = ..., warmup_above_down: _Optional[_Mapping[str, int]] = ...) -> None: ...

class BlockSums(_message.Message):
    __slots__ = ("blocks", "sums")
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    sums: _containers.ScalarMap[str, float]
    def __init__(self, blocks: _Optional[int] = ..., sums: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ProbePair(_message.Message):
    __slots__ = ("gate", "probe_set_digest", "prompt_digest", "difference", "missing")
    GATE_FIELD_NUMBER: _ClassVar[int]
    PROBE_SET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    gate: str
    probe_set_digest: str
    prompt_digest: str
    difference: float
    missing: bool
    def __init__(self, gate: _Optional[str] = ..., probe_set_digest: _Optional[str] = ..., prompt_digest: _Optional[str] = ..., difference: _Optional[float] = ..., missing: _Optional[bool] = ...) -> None: ...

class WindowCounts(_message.Message):
    __slots__ = ("metrics", "zero_tolerance", "sessions_candidate", "sessions_total", "assignment_disagreements", "probes", "blocks")
    class ZeroToleranceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: BlockSums
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[BlockSums, _Mapping]] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ZERO_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_DISAGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.RepeatedCompositeFieldContainer[MetricCounts]
    zero_tolerance: _containers.ScalarMap[str, int]
    sessions_candidate: int
    sessions_total: int
    assignment_disagreements: int
    probes: _containers.RepeatedCompositeFieldContainer[ProbePair]
    blocks: _containers.MessageMap[str, BlockSums]
    def __init__(self, metrics: _Optional[_Iterable[_Union[MetricCounts, _Mapping]]] = ..., zero_tolerance: _Optional[_Mapping[str, int]] = ..., sessions_candidate: _Optional[int] = ..., sessions_total: _Optional[int] = ..., assignment_disagreements: _Optional[int] = ..., probes: _Optional[_Iterable[_Union[ProbePair, _Mapping]]] = ..., blocks: _Optional[_Mapping[str, BlockSums]] = ...) -> None: ...
