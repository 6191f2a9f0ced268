"""The gates of a rollout: declarations of the API turned into those that evidence is judged by.

Which gates exist without being declared, and where each counts, is `kvtier_evidence.gatespec`'s. It must not
know how a verdict is reached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

from kvtier_crds.quantity import parse_decimal, parse_limit
from kvtier_evidence import metrics
from kvtier_evidence.external import DEFAULT_CONSECUTIVE
from kvtier_evidence.gatespec import ExternalTerms, GateDeclaration, with_defaults
from kvtier_evidence.limits import LimitError, parse_quantile
from kvtier_evidence.metrics import Scope
from kvtier_evidence.metrics import Stage as EvidenceStage
from kvtier_evidence.probeplan import ProbePlan
from kvtier_operator.external.query import QueryError, parse_query

PROBE_SET = "ProbeSet"
POINT_THRESHOLD = "PointThreshold"


@dataclass(frozen=True, order=True)
class ProbeSet:
    """What a probeRef's ConfigMap holds: how many prompts, and the digest of all of it. problem: why it
    cannot be used, empty when it can; missing: there is none. key: of its data, where the plan's text is."""

    digest: str
    size: int
    missing: bool = False
    problem: str = ""
    plan: ProbePlan | None = field(default=None, compare=False, repr=False)
    key: str = ""


def declarations(
    declared: Sequence[Mapping[str, Any]], probes: Mapping[str, ProbeSet]
) -> tuple[GateDeclaration, ...]:
    """In the order of the spec. A probe set that is not there yet has size 0 and no digest. Raises LimitError
    or QuantityError naming the gate."""
    return tuple(_declaration(raw, probes) for raw in declared)


def _declaration(raw: Mapping[str, Any], probes: Mapping[str, ProbeSet]) -> GateDeclaration:
    name = str(raw["name"])
    where = f"spec.gates[{name}]"
    quantile = raw.get("quantile")
    effect, absolute = raw.get("designEffect"), raw.get("absoluteInFull")
    scope = Scope.PROBE_SET if raw.get("scope") == PROBE_SET else Scope.POPULATION
    probe = probes.get(str((raw.get("probeRef") or {}).get("name", "")), ProbeSet("", 0))
    return GateDeclaration(
        name=name,
        metric=str(raw["metric"]),
        limit=parse_limit(raw["max"], f"{where}.max"),
        quantile=None if quantile is None else _quantile(quantile, f"{where}.quantile"),
        per_stage=tuple(
            (EvidenceStage(item["stage"]), parse_limit(item["max"], f"{where}.perStage"))
            for item in raw.get("perStage") or []
        ),
        stages=tuple(EvidenceStage(stage) for stage in raw.get("stages") or []),
        scope=scope,
        min_samples=int(raw["minSamples"]) if raw.get("minSamples") else None,
        design_effect=None if effect is None else parse_decimal(effect, f"{where}.designEffect"),
        absolute=None if absolute is None else parse_decimal(absolute, f"{where}.absoluteInFull"),
        probe_set_digest=probe.digest,
        probe_set_size=probe.size,
        external=_external(raw, where) if str(raw["metric"]) == metrics.EXTERNAL else None,
    )


def _external(raw: Mapping[str, Any], where: str) -> ExternalTerms:
    """A value may fail only when that is declared; counts may unless that is declared away."""
    text = str(raw.get("query") or "")
    try:
        query = parse_query(text)
    except QueryError as error:
        raise LimitError(f"{where}.query: {error}") from error
    point = raw.get("inference") == POINT_THRESHOLD
    if point and len(query.parts) != 2:
        raise LimitError(f"{where}.inference: PointThreshold takes point(expression; count)")
    can_fail = raw.get("canFail")
    return ExternalTerms(
        form=query.form,
        can_fail=query.form.counts if can_fail is None else bool(can_fail),
        consecutive=int(raw.get("consecutive") or DEFAULT_CONSECUTIVE),
        point=point,
        query=text,
    )


def _quantile(value: object, where: str) -> Decimal:
    try:
        return parse_quantile(value)
    except LimitError as error:
        raise LimitError(f"{where}: {error}") from error


def probe_names(declared: object) -> tuple[str, ...]:
    """ConfigMaps that the gates refer to. Of gates that cannot be read none: what is wrong with them is said
    where they are parsed."""
    rows = declared if isinstance(declared, list) else []
    references = [raw.get("probeRef") for raw in rows if isinstance(raw, Mapping)]
    names = {str(one.get("name", "")) for one in references if isinstance(one, Mapping)}
    return tuple(sorted(names - {""}))


def gates_digest(
    declared: Sequence[GateDeclaration],
    *,
    exact: bool,
    design_effect: Decimal | None,
    settle: float,
    warmup: float,
) -> str:
    """Of everything that shapes what is counted and where the limits lie; part of every window's key."""
    rows = [
        {
            "name": gate.name,
            "metric": gate.metric,
            "limit": str(gate.limit),
            "quantile": str(gate.quantile),
            "perStage": [[str(stage), str(limit)] for stage, limit in gate.per_stage],
            "stages": [str(stage) for stage in gate.stages],
            "scope": str(gate.scope),
            "minSamples": gate.min_samples,
            "designEffect": str(gate.design_effect),
            "probeSet": gate.probe_set_digest,
            # Only where it is declared, so that windows of before it could be are still the same.
            **({"absolute": str(gate.absolute)} if gate.absolute is not None else {}),
            **({"external": asdict(gate.external)} if gate.external is not None else {}),
        }
        for gate in with_defaults(declared, exact=exact)
    ]
    body = {"gates": rows, "designEffect": str(design_effect), "settle": settle, "warmup": warmup}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def missing_for_approximate(declared: Sequence[GateDeclaration]) -> str:
    """Name of the metric an approximate candidate must declare and does not; empty when complete."""
    present = {gate.metric for gate in declared}
    needed = (metrics.OUTPUT_RELATIVE_ERROR, metrics.TASK_SCORE_DROP)
    return next((metric for metric in needed if metric not in present), "")
