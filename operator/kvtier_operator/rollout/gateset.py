"""The full set of gates of a rollout: what the spec declares and what cannot be removed.

Built-in gates (api.md): zero tolerance on illegal fallbacks, isolation, allocation and replay failures; the
split of the assignment; a Fail-only median guard beside each tail ratio; tail and stall with defaults where
none is declared. Manifest identity is judged from proofs, not counts, and so is not in this list.
It must not know how a verdict is reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.rollout.vocabulary import STAGE_ORDER, Stage

ZERO_TOLERANCE = ("illegalFallbacks", "isolationFailures", "allocationFailures", "replayFailures")
OUTPUT_METRIC = "outputRelativeError"
RATIO_METRIC = "tpotRatio"
STALL_METRIC = "exposedStallFraction"
QUALITY_METRIC = "taskScoreDrop"
SPLIT_METRIC = "assignmentSplit"
MEDIAN_LIMIT = "1.25"
PROBE_SET = "ProbeSet"

_SERVED: frozenset[Stage] = frozenset({Stage.CANARY, Stage.RAMP, Stage.FULL})
_COUNTED_IN: Mapping[str, frozenset[Stage]] = {
    RATIO_METRIC: _SERVED,
    STALL_METRIC: _SERVED,
    SPLIT_METRIC: _SERVED,
}


@dataclass(frozen=True)
class GateSpec:
    """One gate. `limits` overrides `maximum` by stage; `fail_only` gates are not asked for a Pass.

    quantile: percent, 0 where it has no meaning. design_effect and min_samples: empty and 0 when undeclared.
    """

    name: str
    metric: str
    maximum: str
    quantile: float = 0.0
    limits: tuple[tuple[Stage, str], ...] = ()
    stages: tuple[Stage, ...] = ()
    scope: str = ""
    probe_ref: str = ""
    design_effect: str = ""
    min_samples: int = 0
    fail_only: bool = False
    built_in: bool = False

    def limit(self, stage: Stage) -> str:
        return dict(self.limits).get(stage, self.maximum)

    def counts_in(self, stage: Stage) -> bool:
        """Whether this stage looks at the gate at all (table of release.md)."""
        return stage in _COUNTED_IN.get(self.metric, frozenset(STAGE_ORDER))

    def must_pass_in(self, stage: Stage) -> bool:
        """Whether leaving this stage needs its Pass. `stages` narrows where, never whether it may fail. Task
        quality is bound to the candidate's digest, not to traffic: it is earned in Shadow and carried."""
        if self.metric == QUALITY_METRIC and stage is not Stage.SHADOW:
            return False
        return self.counts_in(stage) and not self.fail_only and (not self.stages or stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "metric": self.metric,
            "max": self.maximum,
            "quantile": str(self.quantile),
            "limits": {str(stage): limit for stage, limit in self.limits},
            "stages": [str(stage) for stage in self.stages],
            "scope": self.scope,
            "probeRef": self.probe_ref,
            "designEffect": self.design_effect,
            "minSamples": self.min_samples,
            "failOnly": self.fail_only,
        }


def gates_from_spec(declared: Sequence[Mapping[str, Any]], design_effect: str | None) -> tuple[GateSpec, ...]:
    """Declared gates in their order, then the built-in ones. `design_effect` is the rollout-wide default."""
    gates = [_declared(raw, str(design_effect or "")) for raw in declared]
    metrics = {gate.metric for gate in gates}
    effect = str(design_effect or "")
    if RATIO_METRIC not in metrics:
        gates.append(
            GateSpec(
                name=_free("tail", gates),
                metric=RATIO_METRIC,
                maximum="1.05",
                quantile=99.0,
                limits=((Stage.CANARY, "1.25"), (Stage.FULL, "1.25")),
                design_effect=effect,
                built_in=True,
            )
        )
    if STALL_METRIC not in metrics:
        gates.append(
            GateSpec(_free("stall", gates), STALL_METRIC, "0.02", design_effect=effect, built_in=True)
        )
    for gate in [gate for gate in gates if gate.metric == RATIO_METRIC and gate.quantile > 50]:
        gates.append(
            GateSpec(
                name=_free(f"{gate.name}-median", gates),
                metric=RATIO_METRIC,
                maximum=MEDIAN_LIMIT,
                quantile=50.0,
                design_effect=gate.design_effect,
                fail_only=True,
                built_in=True,
            )
        )
    gates.extend(
        GateSpec(metric, metric, "0", built_in=True) for metric in ZERO_TOLERANCE if metric not in metrics
    )
    gates.append(GateSpec("split", SPLIT_METRIC, "0", fail_only=True, built_in=True))
    return tuple(gates)


def missing_for_approximate(gates: Sequence[GateSpec]) -> str:
    """Name of the metric an approximate candidate must declare and does not; empty when complete."""
    declared = {gate.metric for gate in gates if not gate.built_in}
    return next((metric for metric in (OUTPUT_METRIC, QUALITY_METRIC) if metric not in declared), "")


def _free(name: str, gates: Sequence[GateSpec]) -> str:
    taken = {gate.name for gate in gates}
    return name if name not in taken else f"{name}-default"


def _declared(raw: Mapping[str, Any], design_effect: str) -> GateSpec:
    return GateSpec(
        name=str(raw["name"]),
        metric=str(raw["metric"]),
        maximum=str(raw["max"]),
        quantile=float(raw.get("quantile") or 0),
        limits=tuple((Stage(item["stage"]), str(item["max"])) for item in raw.get("perStage") or []),
        stages=tuple(Stage(stage) for stage in raw.get("stages") or []),
        scope=str(raw.get("scope") or ""),
        probe_ref=str((raw.get("probeRef") or {}).get("name", "")),
        design_effect=str(raw.get("designEffect") or design_effect),
        min_samples=int(raw.get("minSamples") or 0),
    )
