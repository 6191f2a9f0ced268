"""A KVRollout's spec as the machine reads it: a ladder of steps, a full set of gates, numbers in SI units.

Why it exists: the machine must never parse a string. Everything the API leaves to defaults is filled in here,
so that status and grants show the same numbers. It must not know the state of a rollout, a cluster, or how
a gate is judged.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any

from kvtier_crds.quantity import QuantityError, parse_decimal, parse_duration, parse_fraction
from kvtier_evidence.gatespec import GateDeclaration, GateSpec, planned_cells, resolve
from kvtier_evidence.limits import LimitError
from kvtier_evidence.metrics import METRICS, Kind
from kvtier_evidence.metrics import Stage as EvidenceStage
from kvtier_operator.rollout.gateset import ProbeSet, declarations, gates_digest
from kvtier_operator.rollout.vocabulary import (
    STAGE_ORDER,
    Blocker,
    OnInsufficient,
    OnLeaseExpired,
    Stage,
    Verb,
)

DEFAULT_LEASE_TTL = 60.0
MAX_LEASE_TTL = 3600.0
"""The longest that the schema takes."""
MAX_WORD = 64
"""Characters of a verb that nobody knows: as many as the status has room for."""
MAX_TOLD = 4
DEFAULT_SETTLE = 120.0
DEFAULT_WARMUP = 60.0
DEFAULT_DEADLINE = 72 * 3600.0
DEFAULT_MIN_SAMPLES = 500
DEFAULT_HOLDBACK = Decimal("0.02")
DEFAULT_SAMPLE = {
    Stage.SHADOW: Decimal("0.05"),
    Stage.CANARY: Decimal("0.05"),
    Stage.RAMP: Decimal("0.02"),
    Stage.FULL: Decimal("0.01"),
}


class SpecError(ValueError):
    """The spec cannot be run. The message names the field; the schema refuses most of these at apply."""


class OrderError(SpecError):
    """Its stages are in no order in which a release may pass them."""


@dataclass(frozen=True)
class Step:
    """One rung: the share of sessions on the candidate and how long it lasts at least (seconds)."""

    stage: Stage
    index: int
    traffic: Decimal
    sample: Decimal
    min_seconds: float
    min_samples: int

    @property
    def label(self) -> str:
        return f"{self.stage} step {self.index}" if self.stage is Stage.RAMP else str(self.stage)


@dataclass(frozen=True)
class Intent:
    """verb: as it is written where this version has no such; it is refused like any other that does not
    fit."""

    seq: int
    verb: Verb | str
    attempt: int
    expected_stage: str
    expected_step: int


@dataclass(frozen=True)
class BlastRadius:
    """Empty tuples mean all; `max_nodes` 0 means all."""

    tenants: tuple[str, ...] = ()
    request_classes: tuple[str, ...] = ()
    max_nodes: int = 0

    def reaches_beyond(self, other: BlastRadius) -> bool:
        """Whether it holds requests that the other does not. Nodes say nothing of requests."""
        pairs = (self.tenants, other.tenants), (self.request_classes, other.request_classes)
        return any(old and (not new or not set(new) <= set(old)) for new, old in pairs)

    def told(self) -> str:
        """Whose requests, for people."""
        pairs = ("tenants", self.tenants), ("request classes", self.request_classes)
        parts = [f"{what} {_some(names)}" for what, names in pairs if names]
        return "; ".join(parts) or "all requests"


def _some(names: Sequence[str]) -> str:
    """The first few."""
    rest = len(names) - MAX_TOLD
    return ", ".join(names[:MAX_TOLD]) + (f" and {rest} more" if rest > 0 else "")


def blast_radius(raw: Mapping[str, Any]) -> BlastRadius:
    """Of a KVRollout's spec, or of what a KVCache says is approved."""
    return BlastRadius(
        tuple(raw.get("tenants") or ()),
        tuple(raw.get("requestClasses") or ()),
        int(raw.get("maxNodes") or 0),
    )


class Terms:
    """Stages and gates, and what each step is judged by. One object for all rollouts that say the same, as
    mostly those of a thousand do."""

    def __init__(
        self,
        ladder: tuple[Step, ...],
        holdback: Decimal,
        gates: tuple[GateDeclaration, ...],
        design_effect: Decimal | None,
        exact: bool,
    ) -> None:
        self.ladder = ladder
        self.holdback = holdback
        self.gates = gates
        self.design_effect = design_effect
        self.exact = exact
        # Of steps of this ladder and no others.
        self._resolved: dict[Step, tuple[GateSpec, ...]] = {}

    def gates_of(self, step: Step) -> tuple[GateSpec, ...]:
        """See `RolloutSpec.gates_of`; a look asks five times for the same."""
        known = self._resolved.get(step)
        if known is None:
            known = self._resolve(step)
            if step in self.ladder:
                self._resolved[step] = known
        return known

    def _resolve(self, step: Step) -> tuple[GateSpec, ...]:
        return resolve(
            self.gates,
            EvidenceStage(step.stage),
            exact=self.exact,
            min_samples=step.min_samples,
            design_effect=self.design_effect,
        )

    @cached_property
    def ratio_gates(self) -> tuple[GateSpec, ...]:
        """See `RolloutSpec.ratio_gates`."""
        found = {gate.name: gate for step in self.ladder for gate in self.gates_of(step)}
        return tuple(gate for gate in found.values() if gate.metric.kind is Kind.RATIO)

    @cached_property
    def unwaited(self) -> str:
        """See `RolloutSpec.unwaited`."""
        passed = {str(step.stage) for step in self.ladder}
        for gate in self.gates:
            # Where it names only stages in which its metric is not counted, all others wait for it.
            waiting = {str(stage) for stage in METRICS[gate.metric].stages & set(gate.stages)}
            if waiting and not passed & waiting:
                named = ", ".join(str(stage) for stage in gate.stages)
                return f"spec.gates[{gate.name}].stages: {named}, none of which spec.stages has"
        return ""

    @cached_property
    def idle_limits(self) -> tuple[tuple[str, str], ...]:
        """See `RolloutSpec.idle_limits`."""
        passed = {str(step.stage) for step in self.ladder}
        named = [(gate.name, str(stage)) for gate in self.gates for stage, _ in gate.per_stage]
        return tuple(one for one in dict.fromkeys(named) if one[1] not in passed)

    @cached_property
    def cells(self) -> int:
        """See `RolloutSpec.cells`."""
        return planned_cells(
            self.gates, [EvidenceStage(step.stage) for step in self.ladder], exact=self.exact
        )


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """`window_hash` covers what opens a new window when edited; `candidate_hash` what opens a new attempt.
    probes: by the name of their ConfigMap."""

    cache_name: str
    selector_name: str
    ladder: tuple[Step, ...]
    gates: tuple[GateDeclaration, ...]
    probes: tuple[tuple[str, ProbeSet], ...]
    gates_digest: str
    design_effect: Decimal | None
    exact: bool
    blast_radius: BlastRadius
    holdback: Decimal
    settle: float
    warmup: float
    alpha_promotion: Decimal
    alpha_rollback: Decimal
    lease_ttl: float
    on_lease_expired: OnLeaseExpired
    on_insufficient: OnInsufficient
    progress_deadline: float
    candidate_hash: str
    window_hash: str
    terms: Terms = field(compare=False, repr=False)

    def position(self, stage: Stage, index: int) -> int | None:
        """Place of a step in the ladder; None when the ladder does not hold it (any more)."""
        for place, step in enumerate(self.ladder):
            if step.stage is stage and step.index == index:
                return place
        return None

    def nearest(self, stage: Stage, index: int) -> Step:
        """The step itself, or after an edit that took it away the last one before it: an edit never moves a
        rollout forward."""
        wanted = (STAGE_ORDER.index(stage), index)
        found = self.ladder[0]
        for step in self.ladder:
            if (STAGE_ORDER.index(step.stage), step.index) <= wanted:
                found = step
        return found

    def gates_of(self, step: Step) -> tuple[GateSpec, ...]:
        """The gates of one step, built-in ones included."""
        return self.terms.gates_of(step)

    @property
    def judged_by(self) -> tuple[tuple[str, str, int], ...]:
        """Of each probe set its ConfigMap, digest and prompts, as a window keeps them."""
        return tuple((name, one.digest, one.size) for name, one in self.probes)

    @property
    def ratio_gates(self) -> tuple[GateSpec, ...]:
        """Gates that compare two arms, of any step; by name the last step's."""
        return self.terms.ratio_gates

    @property
    def unwaited(self) -> str:
        """A gate that no step would wait for, since it names stages which the ladder does not have; empty for
        none. With one a rollout does not begin, and one that is under way stays where it is."""
        return self.terms.unwaited

    @property
    def idle_limits(self) -> tuple[tuple[str, str], ...]:
        """(gate, stage) of each `perStage` limit that has no effect, since the ladder has no such stage. The
        gate counts all the same, by its `max`."""
        return self.terms.idle_limits

    @property
    def cells(self) -> int:
        """Cells of the false-rollback budget over the whole ladder."""
        return self.terms.cells

    def after(self, step: Step) -> Step | None:
        """The next rung; None after the last. Always one fraction at a time."""
        place = self.position(step.stage, step.index)
        if place is None or place + 1 >= len(self.ladder):
            return None
        return self.ladder[place + 1]


def short_hash(value: object) -> str:
    """16 hex digits over canonical JSON; for change detection, not identity."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_spec(
    spec: Mapping[str, Any], probes: Mapping[str, ProbeSet] | None = None, *, exact: bool | None = None
) -> RolloutSpec:
    """`probes` by the name of their ConfigMap. `exact`: what the candidate compiled to; None: it did not, so
    that its form tells. Raises SpecError naming the field."""
    try:
        return _parse(spec, probes or {}, exact)
    except (QuantityError, LimitError) as error:
        raise SpecError(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"spec is incomplete: {error}") from error


@dataclass(frozen=True)
class Parsed:
    """spec: None when it cannot be run; then `error` says why, and `blocker` of what kind that is."""

    spec: RolloutSpec | None
    error: str
    intent: Intent | None
    blocker: Blocker = Blocker.SPEC_INVALID


def read_spec(raw: Mapping[str, Any], probes: Mapping[str, ProbeSet], exact: bool | None) -> Parsed:
    """As `parse_spec`, but what is wrong is part of the answer."""
    intent: Intent | None = None
    try:
        intent = parse_intent(raw)
        return Parsed(parse_spec(raw, probes, exact=exact), "", intent)
    except OrderError as error:
        return Parsed(None, str(error), intent, Blocker.RELEASE_ORDER)
    except ValueError as error:
        return Parsed(None, str(error), intent)


def _parse(spec: Mapping[str, Any], probes: Mapping[str, ProbeSet], compiled: bool | None) -> RolloutSpec:
    candidate = dict(spec["candidate"])
    stages = list(spec.get("stages") or [])
    evidence = dict(spec.get("evidence") or {})
    budget = dict(spec.get("errorBudget") or {})
    radius = dict(spec.get("blastRadius") or {})
    settle = parse_duration(evidence.get("settle", f"{int(DEFAULT_SETTLE)}s"), "spec.evidence.settle")
    warmup = parse_duration(evidence.get("warmup", f"{int(DEFAULT_WARMUP)}s"), "spec.evidence.warmup")
    exact = not (candidate.get("selectorRef") or {}) if compiled is None else compiled
    terms = _terms(
        _text(stages),
        _text(list(spec.get("gates") or [])),
        tuple((name, probe.digest, probe.size) for name, probe in sorted(probes.items())),
        _text(evidence.get("designEffect")),
        exact,
    )
    digest = gates_digest(
        terms.gates, exact=exact, design_effect=terms.design_effect, settle=settle, warmup=warmup
    )
    window_parts = {
        name: spec.get(name) for name in ("stages", "errorBudget", "leaseTTL", "blastRadius", "gates")
    }
    return RolloutSpec(
        cache_name=str(spec["cacheRef"]["name"]),
        selector_name=str((candidate.get("selectorRef") or {}).get("name", "")),
        ladder=terms.ladder,
        gates=terms.gates,
        probes=tuple(sorted(probes.items())),
        gates_digest=sys.intern(digest),
        design_effect=terms.design_effect,
        exact=exact,
        blast_radius=blast_radius(radius),
        holdback=terms.holdback,
        settle=settle,
        warmup=warmup,
        alpha_promotion=parse_decimal(
            budget.get("falsePromotion", "0.05"), "spec.errorBudget.falsePromotion"
        ),
        alpha_rollback=parse_decimal(budget.get("falseRollback", "0.01"), "spec.errorBudget.falseRollback"),
        lease_ttl=_seconds(spec, "leaseTTL", DEFAULT_LEASE_TTL),
        on_lease_expired=OnLeaseExpired(spec.get("onLeaseExpired") or OnLeaseExpired.RESUME),
        on_insufficient=OnInsufficient(spec.get("onInsufficient") or OnInsufficient.HOLD),
        progress_deadline=_seconds(spec, "progressDeadline", DEFAULT_DEADLINE),
        candidate_hash=sys.intern(short_hash(candidate)),
        window_hash=sys.intern(short_hash({**window_parts, "digest": digest})),
        terms=terms,
    )


def _text(value: object) -> str:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


ALIKE = 256
"""Texts of stages and gates of which what they say is kept, those that were asked for last."""


@lru_cache(maxsize=ALIKE)
def _terms(
    stages: str, gates: str, probes: tuple[tuple[str, str, int], ...], effect: str, exact: bool
) -> Terms:
    """By what they are written as, since numbers that are equal may be printed in several ways. probes: name,
    digest and size of each."""
    ladder, holdback = _ladder(json.loads(stages))
    sets = {name: ProbeSet(digest, size) for name, digest, size in probes}
    declared = declarations(json.loads(gates), sets)
    told = json.loads(effect)
    number = None if told is None else parse_decimal(told, "spec.evidence.designEffect")
    return Terms(ladder, holdback, declared, number, exact)


def _seconds(spec: Mapping[str, Any], name: str, default: float) -> float:
    value = spec.get(name)
    return default if value is None else parse_duration(value, f"spec.{name}")


def parse_intent(spec: Mapping[str, Any]) -> Intent | None:
    """Apart from the rest: it is answered also where that cannot be run. Raises SpecError."""
    raw = spec.get("intent")
    if not raw:
        return None
    try:
        return Intent(
            seq=int(raw["seq"]),
            verb=_verb(raw["verb"]),
            attempt=int(raw.get("attempt") or 0),
            expected_stage=str(raw.get("expectedStage") or ""),
            expected_step=int(raw.get("expectedStep") or 0),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SpecError(f"spec.intent cannot be read: {error}") from error


def _verb(word: object) -> Verb | str:
    known = {str(verb): verb for verb in Verb}
    return known.get(str(word), str(word)[:MAX_WORD])


def _ladder(stages: Sequence[Mapping[str, Any]]) -> tuple[tuple[Step, ...], Decimal]:
    names = [Stage(stage["name"]) for stage in stages]
    ranks = [STAGE_ORDER.index(name) for name in names if name in STAGE_ORDER]
    if len(ranks) != len(names) or not names or names[0] is not Stage.SHADOW:
        raise OrderError("spec.stages: the first stage must be Shadow; legal are Shadow, Canary, Ramp, Full")
    if ranks != sorted(set(ranks)):
        raise OrderError("spec.stages: each stage once, in the order Shadow, Canary, Ramp, Full")
    steps: list[Step] = []
    holdback = DEFAULT_HOLDBACK
    for name, stage in zip(names, stages, strict=True):
        where = f"spec.stages[{name}]"
        sample = parse_fraction(
            stage.get("sampleFraction", str(DEFAULT_SAMPLE[name])), f"{where}.sampleFraction"
        )
        duration = (
            stage.get({Stage.RAMP: "stepDuration", Stage.FULL: "soak"}.get(name, "minDuration")) or "0s"
        )
        seconds = parse_duration(duration, f"{where} duration")
        minimum = int(stage.get("minSamples") or DEFAULT_MIN_SAMPLES)
        fractions = [Decimal(0)]
        if name is Stage.CANARY:
            fractions = [parse_fraction(stage.get("trafficFraction", "5%"), f"{where}.trafficFraction")]
        elif name is Stage.RAMP:
            fractions = [parse_fraction(value, f"{where}.steps") for value in stage.get("steps") or []]
        elif name is Stage.FULL:
            holdback = parse_fraction(stage.get("holdback", str(DEFAULT_HOLDBACK)), f"{where}.holdback")
            fractions = [1 - holdback]
        for index, traffic in enumerate(fractions):
            steps.append(Step(name, index, traffic, sample, seconds, minimum))
    served = [step.traffic for step in steps]
    if served != sorted(served):
        raise OrderError(
            "spec.stages: traffic fractions must grow from stage to stage (Full is 1 - holdback)"
        )
    return tuple(steps), holdback
