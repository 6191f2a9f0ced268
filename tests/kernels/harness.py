"""Runs an implementation of the registry on inputs of its own, on the device of this run."""

from __future__ import annotations

import inspect
import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from kvtier_kernels.registry import registry
from kvtier_kernels.spec import Case, Invariance, KernelSpec, Refusal
from kvtier_kernels.testing.inputs import fresh, to_device
from kvtier_kernels.testing.interp_bf16 import correct_bf16

DEVICE = os.environ.get("KVTIER_KERNELS_DEVICE", "cpu")
SPECS = registry()


def run(
    spec: KernelSpec, backend: str, inputs: dict[str, Any], *, device: str = DEVICE
) -> dict[str, torch.Tensor]:
    """Named outputs, on the CPU. The inputs are left as they are; Triton gets them on the device."""
    if backend == "ref":
        return want(spec, inputs)
    own = fresh(inputs, spec.mutates)
    if device != "cpu" and backend == "triton":
        own = to_device(own, device)
    with correct_bf16() if DEVICE == "cpu" else nullcontext():
        result = spec.implementations[backend]()(**own)
    return {name: x.detach().cpu() for name, x in spec.outputs(result).items()}


def want(spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The reference's named outputs. What only says how to compute (a split, a bound) is not for it."""
    known = inspect.signature(spec.reference).parameters
    own = fresh(inputs, spec.mutates)
    return spec.outputs(spec.reference(**{name: x for name, x in own.items() if name in known}))


@cache
def wanted(op: str, case: str) -> dict[str, torch.Tensor]:
    """The reference's named outputs of a case, computed once for all implementations."""
    spec = next(s for s in SPECS if s.name == op)
    return want(spec, spec.make_inputs(spec.case(case)))


def unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the outputs that differ in a bit (NaN equals NaN)."""
    return [n for n in a if a[n].shape != b[n].shape or not _same_bits(a[n], b[n])]


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())


def backends(spec: KernelSpec) -> tuple[str, ...]:
    return tuple(spec.implementations)


def every(kind: str) -> list[Any]:
    """pytest parameters (spec, backend, item) over the registry; kind: cases, invariances, refusals. What
    must not matter must not matter to the reference either."""
    out = []
    for spec in SPECS:
        for backend in (*(("ref",) if kind == "invariances" else ()), *backends(spec)):
            items: tuple[Case | Invariance | Refusal, ...] = getattr(spec, kind)
            for item in items:
                if isinstance(item, Refusal) and backend not in item.backends:
                    continue
                out.append(pytest.param(spec, backend, item, id=f"{spec.name}-{backend}-{item.id}"))
    return out
