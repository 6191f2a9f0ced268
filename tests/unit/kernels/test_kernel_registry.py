"""What the registry promises: each op has cases, hazards, costs, gates and compilations that agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvtier_kernels.aot
from kvtier_kernels.compare import Exact
from kvtier_kernels.registry import registry
from kvtier_kernels.spec import Cost, Hazard, KernelSpec
from kvtier_kernels.stability import written

REGISTRY = registry()
SPECS = [pytest.param(spec, id=spec.name) for spec in REGISTRY]
COSTS = [pytest.param(spec, cost, id=f"{spec.name}-{cost.case}") for spec in REGISTRY for cost in spec.costs]
GROUPS = {1, 2, 5, 7, 16}
HEAD_DIMS = {64, 128, 256}


def covered(spec: KernelSpec) -> set[Hazard]:
    """Hazards that some case or invariance of the op is."""
    traits = set().union(*(case.traits for case in spec.cases)) | {i.hazard for i in spec.invariances}
    out = {h for h in Hazard if h in traits}
    groups = {c.axes["Hq"] // c.axes["Hk"] for c in spec.cases if "Hq" in c.axes and c.axes.get("Hk")}
    if groups >= GROUPS:
        out.add(Hazard.GQA)
    if {c.axes["d"] for c in spec.cases if "d" in c.axes} >= HEAD_DIMS:
        out.add(Hazard.HEAD_DIMS)
    if any(c.dtype == "bfloat16" for c in spec.cases):
        out.add(Hazard.BF16)
    return out


@pytest.mark.parametrize("spec", SPECS)
def test_every_hazard_is_tried_or_exempt_for_a_reason(spec: KernelSpec) -> None:
    have = covered(spec)
    missing = set(Hazard) - have - spec.exempt.keys()
    assert not missing, f"{spec.name} has no case for {sorted(missing)}"
    assert all(len(reason) > 10 for reason in spec.exempt.values())
    assert not have & spec.exempt.keys(), "exempt and tried"


@pytest.mark.parametrize("spec", SPECS)
def test_cases_are_named_once_and_cover_the_dtypes(spec: KernelSpec) -> None:
    ids = [case.id for case in spec.cases]
    assert len(ids) == len(set(ids))
    assert {case.dtype for case in spec.cases} == set(spec.dtypes)
    assert {"torch", "plain", "triton"} >= spec.implementations.keys() >= {"torch"}
    named = {c for i in spec.invariances for c in i.cases} | {r.case for r in spec.refusals}
    assert named <= set(ids)
    assert spec.costs, "no cost is worked by hand"


@pytest.mark.parametrize("spec", SPECS)
def test_inputs_come_from_the_seed_alone_and_gates_name_the_outputs(spec: KernelSpec) -> None:
    case = next(c for c in spec.cases if Hazard.FAR not in c.traits and Hazard.EMPTY not in c.traits)
    first, second = spec.make_inputs(case), spec.make_inputs(case)
    for name, x in first.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(second[name])), name
    assert spec.outputs(spec.reference(**first)).keys() == spec.comparisons.keys()


@pytest.mark.parametrize(("spec", "cost"), COSTS)
def test_costs_are_those_worked_by_hand(spec: KernelSpec, cost: Cost) -> None:
    inputs = spec.make_inputs(spec.case(cost.case))
    assert (spec.bytes_moved(inputs), spec.flops(inputs)) == (cost.bytes_moved, cost.flops)


@pytest.mark.parametrize("spec", SPECS)
def test_every_compilation_is_recorded_without_spills(spec: KernelSpec) -> None:
    file = Path(kvtier_kernels.aot.__file__).parent / "baseline_sm90" / f"{spec.name}.json"
    assert file.is_file() == bool(spec.aot)
    if not spec.aot:
        return
    recorded = json.loads(file.read_text())["variants"]
    assert recorded.keys() == {v.id for v in spec.aot}
    assert all(row["spill_stores"] == row["spill_loads"] == 0 for row in recorded.values())
    for variant in spec.aot:
        if "cp.async" in variant.must_contain:
            assert recorded[variant.id]["cp_async"] > 0


def test_what_bits_depend_on_is_said_of_each_op_and_printed() -> None:
    text = (Path(__file__).parents[3] / "docs/kernels.md").read_text(encoding="utf-8")
    assert written(text, REGISTRY) == text, "run python -m kvtier_kernels.stability docs/kernels.md"
    for spec in REGISTRY:
        said = spec.stability
        assert said.batch and said.placement, spec.name
        assert (said.alone is None) == (not said.requests), spec.name
        exact = all(isinstance(one, Exact) for one in spec.comparisons.values())
        assert said.rounds or exact, f"{spec.name} rounds nothing, and is judged within a bound"


def test_no_baseline_is_left_of_an_op_that_is_gone() -> None:
    folder = Path(kvtier_kernels.aot.__file__).parent / "baseline_sm90"
    assert {f.stem for f in folder.iterdir()} == {spec.name for spec in REGISTRY if spec.aot}
