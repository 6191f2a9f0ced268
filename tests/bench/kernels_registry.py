"""Every op of the registry on the CPU: time beside the time that memory needs for the op's bytes.

One thread, best of many runs, on the cases that an entry names for this. `KVTIER_BENCH_OPS` chooses ops.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvtier_kernels.registry import registry
from kvtier_kernels.spec import Case, Inputs, KernelSpec
from kvtier_kernels.testing.inputs import fresh
from tests.bench.rows import Row
from tests.bench.timing import Floors, copy_gb_per_s, read_gb_per_s, threads

CASE_SECONDS = 0.4
RUNS = range(5, 60)


def chosen_ops() -> list[KernelSpec]:
    """Entries that KVTIER_BENCH_OPS names, or all. Raises ValueError for a name that is none."""
    found = {spec.name: spec for spec in registry()}
    names = os.environ.get("KVTIER_BENCH_OPS", ",".join(found)).split(",")
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"KVTIER_BENCH_OPS: {', '.join(unknown)}; there are: {', '.join(found)}")
    return [found[name] for name in names]


def rows() -> Iterator[Row]:
    with threads(1):
        yield Row("memory.copy", copy_gb_per_s(), "GB/s")
        yield Row("memory.read", read_gb_per_s(), "GB/s")
        yield from _op_rows()


def _op_rows() -> Iterator[Row]:
    floors = Floors()
    for spec in chosen_ops():
        for case in spec.bench:
            inputs = spec.make_inputs(case)
            moved = spec.bytes_moved(inputs)
            took = _best(spec, spec.implementations["torch"](), inputs)
            yield from op_rows(spec, case, "cpu", inputs, took, floors.seconds(moved))


def op_rows(
    spec: KernelSpec,
    case: Case,
    where: str,
    inputs: Inputs,
    took: float,
    floor: float,
    goal_percent: float | None = None,
) -> Iterator[Row]:
    """Time with the floor beside it, bytes, FLOPs, and percent of the floor's speed."""
    name = f"{spec.name}.{where}.{case.id}"
    moved, flops = spec.bytes_moved(inputs), spec.flops(inputs)
    yield Row(
        f"{name}.time",
        took * 1e6,
        "us",
        peer="floor: bytes at measured bandwidth",
        peer_value=floor * 1e6,
        lower_is_better=True,
    )
    yield Row(f"{name}.bytes", moved / 1e6, "MB")
    if flops:
        yield Row(f"{name}.flops", flops / 1e6, "MFLOP")
    yield Row(f"{name}.of_floor", 100 * floor / took, "%", goal=goal_percent)


def _best(spec: KernelSpec, call: Callable[..., Any], inputs: Inputs) -> float:
    """Seconds of the fastest run. What an op writes to is put back before each run, outside of its time."""
    own = fresh(inputs, spec.mutates)
    took: list[float] = []
    deadline = time.perf_counter() + CASE_SECONDS
    while len(took) < RUNS.start or (time.perf_counter() < deadline and len(took) < RUNS.stop):
        for name in spec.mutates:
            own[name].copy_(inputs[name])
        with torch.inference_mode():
            started = time.perf_counter()
            call(**own)
            took.append(time.perf_counter() - started)
    return min(took[1:])
