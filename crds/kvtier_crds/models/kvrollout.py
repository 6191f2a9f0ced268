"""KVRollout: one gated change of one cache, from what is approved to a candidate."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_crds.models.common import (
    AGE,
    ATOMIC_LIST,
    MAX_ATTEMPTS,
    Column,
    DecimalString,
    Duration,
    Fraction,
    Json,
    LocalRef,
    Resource,
    Scope,
    Struct,
    cel,
    map_list,
    rules,
    struct_config,
    when_changed,
)
from kvtier_crds.models.gates import Gate, Metric, number
from kvtier_crds.models.kvcache import Admission, CacheTiers
from kvtier_crds.models.placements import Placement
from kvtier_crds.models.rolloutstatus import KVRolloutStatus
from kvtier_crds.models.stages import BlastRadius, StageName, StatusStage


class Overrides(Struct):
    """An exact candidate: the same cache, placed otherwise."""

    model_config = struct_config(
        cel(
            "has(self.placement) || has(self.tiers) || has(self.admission)",
            "spec.candidate.overrides needs at least one of placement, tiers, admission",
        )
    )

    placement: Placement | None = None
    tiers: CacheTiers | None = None
    admission: Admission | None = None


class Candidate(Struct):
    model_config = struct_config(
        cel(
            "[has(self.fromCacheSpec), has(self.selectorRef), has(self.overrides)].filter(x, x).size() == 1",
            "spec.candidate needs exactly one of fromCacheSpec, selectorRef, overrides",
        ),
        cel(
            "!has(self.fromCacheSpec) || self.fromCacheSpec",
            "spec.candidate.fromCacheSpec may only be true; leave it out otherwise",
        ),
    )

    from_cache_spec: bool | None = None
    """Brings the edited KVCache spec."""
    selector_ref: LocalRef | None = None
    """An approximate candidate: the baseline with this KVSelector."""
    overrides: Overrides | None = None


def _only(field: str, stages: str) -> Json:
    return cel(
        f"self.name in [{stages}] || !has(self.{field})",
        f"spec.stages[].{field} is only for stage {stages.replace(chr(39), '').replace(', ', ' or ')}",
    )


class Stage(Struct):
    model_config = struct_config(
        _only("minDuration", "'Shadow', 'Canary'"),
        _only("trafficFraction", "'Canary'"),
        _only("steps", "'Ramp'"),
        _only("stepDuration", "'Ramp'"),
        _only("soak", "'Full'"),
        _only("holdback", "'Full'"),
        cel(
            "self.name != 'Canary' || has(self.trafficFraction)",
            "spec.stages[].trafficFraction is required for stage Canary",
        ),
        cel("self.name != 'Ramp' || has(self.steps)", "spec.stages[].steps is required for stage Ramp"),
        cel(
            f"!has(self.trafficFraction) || {number('self.trafficFraction')} > 0.0",
            "spec.stages[].trafficFraction must be greater than 0 and at most 100%",
        ),
        cel(
            f"!has(self.steps) || self.steps.all(a, {number('a')} > 0.0)",
            "spec.stages[].steps must each be greater than 0 and at most 100%",
        ),
        cel(
            f"!has(self.steps) || (self.steps.map(a, {number('a')}).isSorted() && "
            f"self.steps.all(a, self.steps.exists_one(b, {number('b')} == {number('a')})))",
            "spec.stages[].steps must rise strictly, for example [10%, 25%, 50%]",
        ),
        cel(
            f"!has(self.holdback) || {number('self.holdback')} < 1.0",
            "spec.stages[].holdback must be less than 100%",
        ),
    )

    name: StageName
    min_duration: Duration | None = None
    min_samples: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """A floor of units per gate; absent: 500."""
    sample_fraction: Fraction | None = None
    """Share of requests answered twice; absent: 5% in Shadow and Canary, 2% in Ramp, 1% in Full."""
    traffic_fraction: Fraction | None = None
    steps: (
        Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=10, json_schema_extra=ATOMIC_LIST)]
        | None
    ) = None
    step_duration: Duration | None = None
    soak: Duration | None = None
    holdback: Fraction | None = None
    """Share that stays on the exact baseline until the soak ends; absent: 2%."""


class Evidence(Struct):
    model_config = struct_config(
        cel(
            "!has(self.designEffect) || double(self.designEffect) >= 1.0",
            "spec.evidence.designEffect must be at least 1",
        )
    )

    settle: Duration = "120s"
    """A request's value is taken this long after its assignment, in both arms alike."""
    warmup: Duration = "60s"
    """Units of this time after a step began count for Fail, not for Pass."""
    design_effect: DecimalString | None = None
    """Replaces the measured one for all gates."""


class ErrorBudget(Struct):
    model_config = struct_config(
        cel(
            "double(self.falsePromotion) > 0.0 && double(self.falsePromotion) <= 0.5",
            "spec.errorBudget.falsePromotion must be greater than 0 and at most 0.5",
        ),
        cel(
            "double(self.falseRollback) > 0.0 && double(self.falseRollback) <= 0.5",
            "spec.errorBudget.falseRollback must be greater than 0 and at most 0.5",
        ),
    )

    false_promotion: DecimalString = "0.05"
    """Per candidate digest on this cache; each attempt spends a share."""
    false_rollback: DecimalString = "0.01"
    """Per attempt, split over gates and steps."""


class OnLeaseExpired(StrEnum):
    RESUME = "Resume"
    ROLL_BACK = "RollBack"


class OnInsufficient(StrEnum):
    HOLD = "Hold"
    ROLL_BACK = "RollBack"


class Verb(StrEnum):
    PAUSE = "Pause"
    RESUME = "Resume"
    PROMOTE = "Promote"
    SKIP = "Skip"
    ABORT = "Abort"
    RETRY = "Retry"


class Intent(Struct):
    """A command of a person, meant for one attempt, stage and step."""

    model_config = struct_config(
        cel(
            "self.verb == 'Abort' || (has(self.expectedStage) && has(self.expectedStep))",
            "spec.intent.expectedStage and expectedStep are required for Pause, Resume, Promote, "
            "Skip and Retry",
        )
    )

    seq: Annotated[int, Field(ge=1, le=2**53 - 1, json_schema_extra={"format": "int64"})]
    verb: Verb
    attempt: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)]
    expected_stage: StatusStage | None = None
    expected_step: Annotated[int, Field(ge=0, le=64)] | None = None


_CANARY_BELOW_RAMP = (
    "self.stages.all(c, c.name != 'Canary' || !has(c.trafficFraction) || self.stages.all(r, "
    "r.name != 'Ramp' || !has(r.steps) || r.steps.size() == 0 || "
    f"{number('c.trafficFraction')} <= {number('r.steps[0]')}))"
)


_WITHIN_FULL = (
    "self.stages.all(f, f.name != 'Full' || self.stages.all(s, "
    f"(!has(s.trafficFraction) || {number('s.trafficFraction')} + $ <= 1.000000001) && "
    f"(!has(s.steps) || s.steps.size() == 0 || {number('s.steps[s.steps.size() - 1]')} + $ <= 1.000000001)))"
).replace("$", f"(has(f.holdback) ? {number('f.holdback')} : 0.02)")
_GATE_STAGES_EXIST = (
    "!has(self.gates) || self.gates.all(g, !has(g.stages) || g.stages.size() == 0 || "
    "g.stages.exists(n, self.stages.exists(s, s.name == n)))"
)


_EXTERNAL_IS_WAITED_FOR = (
    "!has(self.gates) || self.gates.all(g, g.metric != 'external' || !has(g.stages) || g.stages.size() == 0 "
    "|| g.stages.exists(n, n != 'Shadow' && self.stages.exists(s, s.name == n)))"
)


_SAME_LADDER_AND_GATES = (
    "oldSelf.value().stages == self.stages && has(oldSelf.value().gates) == has(self.gates) && "
    "(!has(self.gates) || oldSelf.value().gates == self.gates)"
)


def _of_ladder_and_gates(rule: str, message: str) -> Json:
    return when_changed(cel(rule, message), _SAME_LADDER_AND_GATES)


def _free_name(metric: Metric, name: str) -> str:
    """CEL: a built-in gate of that metric has the name, unless a gate of the metric is declared."""
    return (
        f"!has(self.gates) || self.gates.exists(g, g.metric == '{metric}') || "
        f"!self.gates.exists(g, g.name in [{name}])"
    )


def _selector_declares(metric: Metric) -> str:
    declared = f"has(self.gates) && self.gates.exists(g, g.metric == '{metric}')"
    return f"!has(self.candidate.selectorRef) || ({declared})"


class KVRolloutSpec(Struct):
    model_config = struct_config(
        cel(
            "self.stages[0].name == 'Shadow'",
            "spec.stages[0].name must be Shadow: every candidate is compared before it serves",
        ),
        cel(
            "self.stages[self.stages.size() - 1].name == 'Full'",
            "spec.stages must end with Full",
        ),
        cel(
            "['Shadow', 'Canary', 'Ramp', 'Full'].filter(n, self.stages.exists(s, s.name == n)) == "
            "self.stages.map(s, s.name)",
            "spec.stages must be in the order Shadow, Canary, Ramp, Full, each at most once",
        ),
        cel(
            _CANARY_BELOW_RAMP,
            "spec.stages: the first step of Ramp must be at least the trafficFraction of Canary",
        ),
        _of_ladder_and_gates(
            _WITHIN_FULL,
            "spec.stages: trafficFraction and steps must be at most what Full serves, 100% less its holdback "
            "(2% where it is absent)",
        ),
        _of_ladder_and_gates(
            _GATE_STAGES_EXIST,
            "spec.gates[].stages must name a stage that spec.stages has, or no step would wait for the gate",
        ),
        _of_ladder_and_gates(
            _EXTERNAL_IS_WAITED_FOR,
            "spec.gates[].stages must name Canary, Ramp or Full for external, and one that spec.stages has: "
            "it is not counted in Shadow, and no step would wait for it",
        ),
        _of_ladder_and_gates(
            _free_name(Metric.TPOT_RATIO, "'tail', 'tail-median'"),
            "spec.gates[].name may not be tail or tail-median unless a gate on tpotRatio is declared: the "
            "built-in ones have these names",
        ),
        _of_ladder_and_gates(
            _free_name(Metric.EXPOSED_STALL_FRACTION, "'stall'"),
            "spec.gates[].name may not be stall unless a gate on exposedStallFraction is declared: the "
            "built-in one has this name",
        ),
        _of_ladder_and_gates(
            "!has(self.gates) || self.gates.all(t, t.metric != 'tpotRatio' || "
            "!self.gates.exists(g, g.name == t.name + '-median'))",
            "spec.gates[].name may not be that of a gate on tpotRatio with -median behind it: its median "
            "guard has this name",
        ),
        cel(
            "!has(self.gates) || self.gates.all(t, !has(t.absoluteInFull) || "
            "!self.gates.exists(g, g.name == t.name + '-absolute'))",
            "spec.gates[].name may not be that of a gate with absoluteInFull with -absolute behind it: its "
            "guard in Full has this name",
        ),
        cel(
            _selector_declares(Metric.OUTPUT_RELATIVE_ERROR),
            "spec.gates must hold an output gate (metric outputRelativeError) when "
            "spec.candidate.selectorRef is set: the candidate is approximate",
        ),
        cel(
            _selector_declares(Metric.TASK_SCORE_DROP),
            "spec.gates must hold a task-quality gate (metric taskScoreDrop) when "
            "spec.candidate.selectorRef is set: the candidate is approximate",
        ),
        cel(
            "duration(self.leaseTTL) >= duration('1s') && duration(self.leaseTTL) <= duration('1h')",
            "spec.leaseTTL must be from 1s to 1h",
        ),
        cel(
            "duration(self.progressDeadline) > duration('0s')",
            "spec.progressDeadline must be greater than 0",
        ),
        cel(
            "!has(oldSelf.intent) || (has(self.intent) && (self.intent == oldSelf.intent || "
            "self.intent.seq > oldSelf.intent.seq))",
            "spec.intent.seq must grow with every change of spec.intent, and spec.intent cannot be removed",
        ),
    )

    cache_ref: Annotated[
        LocalRef,
        Field(
            json_schema_extra=rules(
                cel(
                    "self == oldSelf",
                    "spec.cacheRef is immutable: a change of another cache is a new KVRollout",
                )
            )
        ),
    ]
    candidate: Candidate
    blast_radius: BlastRadius = BlastRadius()
    stages: Annotated[
        tuple[Stage, ...], Field(min_length=1, max_length=4, json_schema_extra=map_list("name"))
    ]
    gates: Annotated[tuple[Gate, ...], Field(max_length=16, json_schema_extra=map_list("name"))] = ()
    """Added to the built-in ones, which cannot be removed."""
    evidence: Evidence = Evidence()
    error_budget: ErrorBudget = ErrorBudget()
    lease_ttl: Annotated[
        Duration,
        Field(
            alias="leaseTTL",
            json_schema_extra=rules(
                cel(
                    "duration(self) >= duration(oldSelf)",
                    "spec.leaseTTL may only grow: an unreachable agent holds the longer lease; "
                    "a shorter one needs a new KVRollout",
                )
            ),
        ),
    ] = "60s"
    on_lease_expired: OnLeaseExpired = OnLeaseExpired.RESUME
    """Resume: the same step again with fresh evidence, at most 3 times."""
    on_insufficient: OnInsufficient = OnInsufficient.HOLD
    progress_deadline: Duration = "72h"
    ttl_after_finished: Duration = "720h"
    """For so long one that has ended is kept. 0s: it goes once how it ended is written. An approval that goes
    on has not ended."""
    intent: Intent | None = None

    def stage(self, name: StageName) -> Stage | None:
        """The declared stage of that name."""
        return next((stage for stage in self.stages if stage.name is name), None)


class KVRollout(Resource):
    """Walks a candidate Off > Shadow > Canary > Ramp > Full on evidence, or returns to the exact baseline."""

    KIND: ClassVar[str] = "KVRollout"
    PLURAL: ClassVar[str] = "kvrollouts"
    SHORT: ClassVar[str] = "kvr"
    SCOPE: ClassVar[Scope] = Scope.NAMESPACED
    SELECTABLE: ClassVar[tuple[str, ...]] = ("spec.cacheRef.name",)
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(name="Stage", path=".status.stage"),
        Column(name="Step", path=".status.step", type="integer"),
        Column(name="Verdict", path=".status.verdict", description="The worst verdict of the current step."),
        Column(
            name="Candidate", path=".status.candidate.short", description="First 12 digits of the digest."
        ),
        Column(name="Baseline", path=".status.baseline.short", description="First 12 digits of the digest."),
        AGE,
        Column(name="Phase", path=".status.phase", wide=True),
        Column(name="Nodes", path=".status.nodes", type="integer", wide=True),
        Column(name="Cause", path=".status.rollback.cause", wide=True),
        Column(name="Trace", path=".status.traceID", wide=True),
    )

    spec: KVRolloutSpec
    status: KVRolloutStatus | None = None
