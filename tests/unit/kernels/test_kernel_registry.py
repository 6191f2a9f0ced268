"""What the registry promises: each kernel has cases, references, costs and compilations that agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvtier_kernels.aot
from kvtier_kernels.spec import KernelSpec, registry

SPECS = [pytest.param(spec, id=spec.name) for spec in registry()]
HOSTILE = {
    "huge",
    "minus-inf-row",
    "minus-inf-all",
    "nan-tail",
    "nan-unmapped",
    "inf-v",
    "duplicate",
    "strided",
}


@pytest.mark.parametrize("spec", SPECS)
def test_cases_are_named_once_and_cover_dtypes_groups_and_hostile_inputs(spec: KernelSpec) -> None:
    ids = [case.id for case in spec.cases]
    assert len(ids) == len(set(ids))
    assert {case.dtype for case in spec.cases} == set(spec.dtypes)
    assert {1, 2, 3, 5, 7, 8, 16} <= {case.axes["Hq"] // case.axes["Hk"] for case in spec.cases}
    assert {case.axes["d"] for case in spec.cases} == {64, 128}
    assert frozenset().union(*(case.traits for case in spec.cases)) >= HOSTILE
    assert any(case.seq_lens == (0,) for case in spec.cases)


@pytest.mark.parametrize("spec", SPECS)
def test_inputs_come_from_the_seed_alone(spec: KernelSpec) -> None:
    case = spec.cases[-1]
    first, second = spec.make_inputs(case), spec.make_inputs(case)
    assert all(bool((first[n] == second[n]).all()) for n in ("q", "k_cache", "page_table"))


@pytest.mark.parametrize("spec", SPECS)
def test_costs_grow_with_the_rows(spec: KernelSpec) -> None:
    one, many = (
        spec.make_inputs(next(c for c in spec.cases if c.id == i)) for i in ("one-token", "three-splits")
    )
    assert 0 < spec.bytes_moved(one) < spec.bytes_moved(many)
    assert spec.flops(many) == spec.flops(one) * int(many["seq_lens"].sum())


def test_every_compilation_is_recorded_without_spills() -> None:
    file = Path(kvtier_kernels.aot.__file__).with_name("baseline_sm90.json")
    recorded = json.loads(file.read_text())["variants"]
    assert recorded.keys() == {f"{spec.name}/{v.id}" for spec in registry() for v in spec.aot}
    assert all(row["spill_stores"] == row["spill_loads"] == 0 for row in recorded.values())
    for spec in registry():
        for variant in spec.aot:
            if "cp.async" in variant.must_contain:
                assert recorded[f"{spec.name}/{variant.id}"]["cp_async"] > 0
