"""The gates of a KVRollout as declared: which metric, which limit, at which stage, on which population.

Kinds and statistics are in the gates specification; what stands here is only what a declaration may say. It
must not know how a verdict is computed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvtier_crds.models.common import (
    SET_LIST,
    DecimalString,
    Limit,
    LocalRef,
    Percent,
    Struct,
    cel,
    map_list,
    struct_config,
)
from kvtier_crds.models.stages import StageName


class Metric(StrEnum):
    """What a declared gate may measure. The built-in gates measure more and cannot be removed."""

    OUTPUT_RELATIVE_ERROR = "outputRelativeError"
    TPOT_RATIO = "tpotRatio"
    EXPOSED_STALL_FRACTION = "exposedStallFraction"
    TASK_SCORE_DROP = "taskScoreDrop"
    ILLEGAL_FALLBACKS = "illegalFallbacks"
    ISOLATION_FAILURES = "isolationFailures"
    ALLOCATION_FAILURES = "allocationFailures"
    REPLAY_FAILURES = "replayFailures"
    EXTERNAL = "external"


class GateScope(StrEnum):
    TRAFFIC = "Traffic"
    PROBE_SET = "ProbeSet"


class Inference(StrEnum):
    ANYTIME = "Anytime"
    POINT_THRESHOLD = "PointThreshold"


def number(expression: str) -> str:
    """CEL: the value of a limit or fraction ("5%", "50m", "0.05", 1) as a double."""
    text = f"string({expression})"
    shorter = f"double({text}.substring(0, {text}.size() - 1))"
    return (
        f"({text}.endsWith('%') ? {shorter} / 100.0 : "
        f"({text}.endsWith('m') ? {shorter} / 1000.0 : double({text})))"
    )


def _limits(metrics: str, legal: str) -> str:
    """CEL: when the metric is one of `metrics`, `max` and every `perStage[].max` satisfy `legal` (of `$`)."""
    own = legal.replace("$", number("self.max"))
    per_stage = legal.replace("$", number("p.max"))
    staged = f"(!has(self.perStage) || self.perStage.all(p, {per_stage}))"
    return f"!(self.metric in [{metrics}]) || ({own} && {staged})"


_QUANTILE = "double(self.quantile)"


class PerStageLimit(Struct):
    stage: StageName
    max: Limit


class Gate(Struct):
    """One gate: Pass needs the bound on the harmful (high) side to lie inside `max`."""

    model_config = struct_config(
        cel(
            _limits("'exposedStallFraction', 'taskScoreDrop'", "$ > 0.0 && $ < 1.0"),
            "spec.gates[].max must be greater than 0 and less than 1 for exposedStallFraction and "
            "taskScoreDrop, in perStage too",
        ),
        cel(
            _limits("'outputRelativeError'", "$ > 0.0"),
            "spec.gates[].max must be greater than 0 for outputRelativeError, in perStage too",
        ),
        cel(
            _limits("'tpotRatio'", "$ >= 0.5"),
            "spec.gates[].max must be at least 0.5 for tpotRatio, in perStage too",
        ),
        cel(
            _limits(
                "'illegalFallbacks', 'isolationFailures', 'allocationFailures', 'replayFailures'", "$ == 0.0"
            ),
            "spec.gates[].max must be 0 for illegalFallbacks, isolationFailures, allocationFailures and "
            "replayFailures, in perStage too",
        ),
        cel(
            "!(self.metric in ['outputRelativeError', 'tpotRatio']) || has(self.quantile)",
            "spec.gates[].quantile is required for outputRelativeError and tpotRatio",
        ),
        cel(
            "self.metric in ['outputRelativeError', 'tpotRatio', 'external'] || !has(self.quantile)",
            "spec.gates[].quantile is only for outputRelativeError, tpotRatio and external",
        ),
        cel(
            f"!has(self.quantile) || ({_QUANTILE} > 50.0 && {_QUANTILE} <= 99.9)",
            "spec.gates[].quantile must be greater than 50 and at most 99.9",
        ),
        cel(
            "self.metric != 'taskScoreDrop' || self.scope == 'ProbeSet'",
            "spec.gates[].scope must be ProbeSet for taskScoreDrop",
        ),
        cel(
            "(self.scope == 'ProbeSet') == has(self.probeRef)",
            "spec.gates[].probeRef is required with scope ProbeSet and must be absent with scope Traffic",
        ),
        cel(
            "(self.metric == 'external') == has(self.query)",
            "spec.gates[].query is required for metric external and must be absent for all others",
        ),
        cel(
            "self.metric == 'external' || (!has(self.canFail) && !has(self.consecutive) && "
            "self.inference == 'Anytime')",
            "spec.gates[].canFail, consecutive and inference PointThreshold are only for metric external",
        ),
        cel(
            "!(self.metric in ['tpotRatio', 'exposedStallFraction']) || ((!has(self.stages) || "
            "!self.stages.exists(s, s == 'Shadow')) && (!has(self.perStage) || !self.perStage.exists(p, "
            "p.stage == 'Shadow')))",
            "spec.gates[].stages and perStage may not name Shadow for tpotRatio and exposedStallFraction: "
            "nothing is served there; legal: Canary, Ramp, Full",
        ),
        cel(
            "!has(self.absoluteInFull) || (self.metric == 'tpotRatio' && "
            "double(self.absoluteInFull) >= 1.0 && double(self.absoluteInFull) <= 100.0)",
            "spec.gates[].absoluteInFull is only for tpotRatio, and must be at least 1 and at most 100",
        ),
        cel(
            "!has(self.designEffect) || double(self.designEffect) >= 1.0",
            "spec.gates[].designEffect must be at least 1",
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]
    metric: Metric
    quantile: Percent | None = None
    """Percent, greater than 50 and at most 99.9: 99 or "99.9"."""
    max: Limit
    per_stage: Annotated[
        tuple[PerStageLimit, ...], Field(max_length=4, json_schema_extra=map_list("stage"))
    ] = ()
    stages: Annotated[tuple[StageName, ...], Field(max_length=4, json_schema_extra=SET_LIST)] = ()
    """Stages that require it; absent: all where its metric exists. It can Fail in every stage."""
    scope: GateScope = GateScope.TRAFFIC
    probe_ref: LocalRef | None = None
    """A ConfigMap with an evaluation plan: tasks, lengths, seeds."""
    inference: Inference = Inference.ANYTIME
    design_effect: DecimalString | None = None
    """Absent: that of spec.evidence, else measured."""
    absolute_in_full: DecimalString | None = None
    """For tpotRatio, at least 1 and at most 100: in Full the candidate's own quantile may also be at most so
    many times the upper bound that the baseline's had in the last step before. It can Fail only; absent: no
    such limit."""
    min_samples: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Absent: that of the stage, else 500."""
    query: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    can_fail: bool | None = None
    consecutive: Annotated[int, Field(ge=1, le=100)] | None = None
