"""Gates as declared, and the same gates resolved for one stage, built-in ones included.

Built-in gates cannot be removed; tail and stall gates exist with defaults where none is declared; every
ratio gate has a Fail-only guard on the median. Knows declarations; not the custom resource.

Sections 1, 4.3, 9 ("Limits by stage") and 12 of the evidence specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from kvtier_evidence import metrics
from kvtier_evidence.external import DEFAULT_CONSECUTIVE, Form
from kvtier_evidence.limits import LimitError, LimitRange, check_range
from kvtier_evidence.metrics import METRICS, Kind, Metric, Scope, Stage


@dataclass(frozen=True, slots=True)
class ExternalTerms:
    """What an external gate's query ships, and what may follow from it."""

    form: Form
    can_fail: bool
    consecutive: int = DEFAULT_CONSECUTIVE
    """Point values over the limit in a row that are a Fail."""
    point: bool = False
    """Declared to pass by its value, with a count query."""
    query: str = ""
    """As written; read by whoever asks the source."""

    @property
    def waited_for(self) -> bool:
        """A point value that is not declared to pass never does, so nothing waits for it."""
        return self.form.counts or self.point


@dataclass(frozen=True, slots=True)
class GateDeclaration:
    """One gate of a rollout as a person wrote it, limits already parsed."""

    name: str
    metric: str
    limit: Decimal
    quantile: Decimal | None = None
    per_stage: tuple[tuple[Stage, Decimal], ...] = ()
    stages: tuple[Stage, ...] = ()
    """Where the gate must Pass; it may Fail in every stage of its metric. Empty: all of them."""
    scope: Scope = Scope.POPULATION
    min_samples: int | None = None
    design_effect: Decimal | None = None
    probe_set_digest: str = ""
    probe_set_size: int = 0
    external: ExternalTerms | None = None
    absolute: Decimal | None = None
    """In Full the candidate's own quantile may be at most so many times what the baseline's was before."""

    def __post_init__(self) -> None:
        metric = METRICS.get(self.metric)
        if metric is None or metric.kind in (Kind.COUNT, Kind.SPLIT, Kind.REFERENCE):
            raise LimitError(f"gate {self.name}: {self.metric} is not a metric that can be gated")
        if (metric.kind is Kind.EXTERNAL) != (self.external is not None):
            raise LimitError(f"gate {self.name}: a query is for {metrics.EXTERNAL}, and needed there")
        needs = metric.kind in (Kind.QUANTILE, Kind.RATIO)
        if self.external is not None:
            needs = self.external.form in (Form.CLASSIC_HISTOGRAM, Form.EXPONENTIAL_HISTOGRAM)
            if self.external.point and self.external.form.counts:
                raise LimitError(
                    f"gate {self.name}: PointThreshold is for a value, counts are judged as counts"
                )
            if self.external.form is Form.COUNTER_PAIR:
                self._check_limits(LimitRange.FRACTION)
        if needs != (self.quantile is not None):
            raise LimitError(f"gate {self.name}: {self.metric} {'needs a' if needs else 'takes no'} quantile")
        if self.design_effect is not None and self.design_effect < 1:
            raise LimitError(f"gate {self.name}: a design effect is at least 1")
        if self.absolute is not None and (metric.kind is not Kind.RATIO or not 1 <= self.absolute <= 100):
            raise LimitError(
                f"gate {self.name}: absoluteInFull is for {metrics.TPOT_RATIO}, at least 1 and at most 100"
            )
        if metric.limits is not None:
            self._check_limits(metric.limits)
        if self.scope is Scope.PROBE_SET and metric.kind is not Kind.PAIRED:
            raise LimitError(f"gate {self.name}: scope ProbeSet is for {metrics.TASK_SCORE_DROP}")

    def _check_limits(self, legal: LimitRange) -> None:
        named = (("max", self.limit), *((f"perStage {stage}", limit) for stage, limit in self.per_stage))
        for where, limit in named:
            try:
                check_range(limit, legal)
            except LimitError as error:
                raise LimitError(f"gate {self.name}: {where}: {error}") from error


@dataclass(frozen=True, slots=True)
class GateSpec:
    """One gate of one stage: everything the judge needs to know about it."""

    name: str
    metric: Metric
    limit: Decimal
    quantile: Decimal | None = None
    scope: Scope = Scope.POPULATION
    min_samples: int = metrics.DEFAULT_MIN_SAMPLES
    design_effect: Decimal | None = None
    """Declared; None: measured in an earlier window, or unknown."""
    required: bool = True
    """Promotion waits for its Pass; otherwise it can only Fail."""
    probe_set_digest: str = ""
    probe_set_size: int = 0
    external: ExternalTerms | None = None
    absolute: Decimal | None = None
    """Of a ratio gate: its windows measure the reference of the absolute limit in Full."""

    @property
    def budgeted(self) -> bool:
        """Whether it has a cell in the false-rollback budget."""
        if self.metric.kind is Kind.PAIRED:
            return self.scope is Scope.POPULATION
        if self.external is not None:
            return self.external.form.counts and self.external.can_fail
        return self.metric.kind in (Kind.QUANTILE, Kind.RATIO, Kind.MEAN, Kind.REFERENCE)


def with_defaults(declared: Sequence[GateDeclaration], *, exact: bool) -> tuple[GateDeclaration, ...]:
    """The declared gates, then the built-in ones; tail and stall where no gate has their metric.

    Raises LimitError on two gates of one name, a built-in's name included.
    """
    out = list(declared)
    have = {g.metric for g in out}
    if metrics.TPOT_RATIO not in have:
        out.append(
            GateDeclaration(
                "tail",
                metrics.TPOT_RATIO,
                metrics.DEFAULT_TAIL_LIMIT,
                metrics.DEFAULT_TAIL_QUANTILE,
                metrics.DEFAULT_TAIL_PER_STAGE,
            )
        )
    if metrics.EXPOSED_STALL_FRACTION not in have:
        out.append(GateDeclaration("stall", metrics.EXPOSED_STALL_FRACTION, metrics.DEFAULT_STALL_LIMIT))
    for name in metrics.ZERO_TOLERANCE:
        if name not in have and (exact or not METRICS[name].exact_only):
            out.append(GateDeclaration(name, name, Decimal(0)))
    names = [g.name for g in out]
    names += [g.name + metrics.MEDIAN_GUARD_SUFFIX for g in out if g.metric == metrics.TPOT_RATIO]
    names += [g.name + metrics.ABSOLUTE_SUFFIX for g in out if g.absolute is not None]
    for name in names:
        if names.count(name) > 1:
            raise LimitError(f"gate name {name} is used twice")
    return tuple(out)


def resolve(
    declared: Sequence[GateDeclaration],
    stage: Stage,
    *,
    exact: bool,
    min_samples: int | None = None,
    design_effect: Decimal | None = None,
) -> tuple[GateSpec, ...]:
    """The gates of one stage, in a fixed order, each ratio gate followed by its guards.

    `min_samples` is the stage's and `design_effect` the rollout's; a gate's own comes first.
    """
    out: list[GateSpec] = []
    for g in with_defaults(declared, exact=exact):
        metric = METRICS[g.metric]
        if stage not in metric.stages:
            continue
        spec = GateSpec(
            name=g.name,
            metric=metric,
            limit=dict(g.per_stage).get(stage, g.limit),
            quantile=g.quantile,
            scope=g.scope,
            min_samples=_first(g.min_samples, min_samples, metrics.DEFAULT_MIN_SAMPLES),
            design_effect=g.design_effect if g.design_effect is not None else design_effect,
            absolute=g.absolute,
            required=_waits(g, metric, stage) and (g.external is None or g.external.waited_for),
            probe_set_digest=g.probe_set_digest,
            probe_set_size=g.probe_set_size,
            external=g.external,
        )
        out.append(spec)
        if metric.kind is Kind.RATIO and g.quantile is not None:
            out.append(median_guard(spec))
            if g.absolute is not None and stage is Stage.FULL:
                out.append(absolute_guard(spec, g.absolute))
    return tuple(out)


def _waits(gate: GateDeclaration, metric: Metric, stage: Stage) -> bool:
    """Whether that stage waits for its Pass. Where it names only stages in which its metric is not counted,
    all others do, or none would."""
    named = metric.stages & set(gate.stages)
    return not named or stage in named


def median_guard(gate: GateSpec) -> GateSpec:
    """The Fail-only companion: the median sees a slowdown that a tail cannot see for a thousand units.

    Never stricter than the gate it stands beside.
    """
    return GateSpec(
        name=gate.name + metrics.MEDIAN_GUARD_SUFFIX,
        metric=gate.metric,
        limit=max(metrics.MEDIAN_GUARD_LIMIT, gate.limit),
        quantile=Decimal(50),
        min_samples=gate.min_samples,
        design_effect=gate.design_effect,
        required=False,
    )


def absolute_guard(gate: GateSpec, limit: Decimal) -> GateSpec:
    """The Fail-only companion in Full: what is held back there is too little to compare a tail with, and
    nothing at all with a holdback of 0, so the candidate's is held against the baseline's of before."""
    return GateSpec(
        name=gate.name + metrics.ABSOLUTE_SUFFIX,
        metric=METRICS[metrics.TPOT_REFERENCE],
        limit=limit,
        quantile=gate.quantile,
        min_samples=gate.min_samples,
        design_effect=gate.design_effect,
        required=False,
    )


def planned_cells(declared: Sequence[GateDeclaration], steps: Sequence[Stage], *, exact: bool) -> int:
    """Cells of the false-rollback budget over all steps of a plan (a Ramp step is one entry each)."""
    return sum(spec.budgeted for stage in steps for spec in resolve(declared, stage, exact=exact))


def _first(*values: int | None) -> int:
    return next(v for v in values if v is not None)
