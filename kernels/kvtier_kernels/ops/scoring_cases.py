"""Cases that every scoring operation is tried with. Small, since the interpreter runs them.

It must not know what an op does with a case beyond the traits' names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Within
from kvtier_kernels.spec import Case, Hazard, Implementation
from kvtier_kernels.testing.inputs import reserved

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def case(
    id: str,
    lens: tuple[int, ...],
    *traits: str,
    hq: int = 4,
    hk: int = 2,
    d: int = 64,
    dtype: str = "float32",
    more: Mapping[str, int] | None = None,
) -> Case:
    sizes = {"Hq": hq, "Hk": hk, "d": d, **(more or {})}
    return Case(id, sizes, lens, dtype, frozenset(traits), seed=len(id) + sum(lens) + d)


def standard_cases(**more: int) -> tuple[Case, ...]:
    """Every hazard but FAR, which each op builds from its own ids."""
    cases = [
        case("empty", (0,), Hazard.EMPTY, more=more),
        case("empty-beside-full", (0, 40), Hazard.EMPTY, Hazard.RAGGED, more=more),
        case("single", (1,), Hazard.SINGLE, hk=1, more=more),
        case("ragged", (129, 15, 16), Hazard.RAGGED, hq=1, hk=1, more=more),
        case("poison", (33, 130), Hazard.POISON, hq=2, hk=1, more=more),
        case("duplicate", (50,), Hazard.DUPLICATE, more=more),
        case("padded", (50,), Hazard.PADDED, more=more),
        case("strided", (40, 31), Hazard.STRIDED, hq=3, hk=1, more=more),
        case("zero-query", (20,), "zero-query", hk=1, more=more),
        case("huge-logits", (70,), "huge", hk=1, more=more),
        case("d128-gqa3", (130,), hq=3, hk=1, d=128, more=more),
        case("d256", (40,), hq=2, hk=1, d=256, more=more),
        case("bf16", (70, 20), hq=6, hk=2, dtype="bfloat16", more=more),
        case("bf16-d128", (70,), hq=8, hk=1, d=128, dtype="bfloat16", more=more),
        case("f16", (40,), dtype="float16", more=more),
    ]
    cases += [case(f"gqa{g}", (37,), hq=g, hk=1, more=more) for g in (1, 2, 5, 7, 16)]
    return tuple(cases)


def capacity(c: Case) -> int:
    """Room for the longest request, in whole steps of 16 and with a step to spare."""
    return 16 * (max(c.seq_lens) // 16 + 1)


def queries(c: Case, g: torch.Generator) -> Tensor:
    q = torch.randn(len(c.seq_lens), c.axes["Hq"], c.axes["d"], generator=g) * 2
    if "zero-query" in c.traits:
        q[:, 0] = 0
    return (q * 1e3 if "huge" in c.traits else q).to(getattr(torch, c.dtype))


def lens(c: Case) -> Tensor:
    return torch.tensor(c.seq_lens, dtype=torch.int32)


def without_poison(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: inputs | {n: torch.nan_to_num(inputs[n], 0.0, 0.0, 0.0) for n in names}


def relative(factor: float) -> Within:
    """factor (1 + the largest finite value of the output): a sum of products of that size was rounded."""

    def bound(inputs: Mapping[str, Any], want: Tensor) -> float:
        finite = want[torch.isfinite(want)]
        return factor * (1 + (float(finite.abs().max()) if finite.numel() else 0.0))

    return Within(bound)


def lse_gate() -> Within:
    """2e-5 (1 + |lse|), as for attention."""
    return Within(lambda inputs, want: 2e-5 * (1 + want.abs()))


def loader(module: str, name: str) -> Callable[[], Implementation]:
    """Imports an implementation when it is asked for, since Triton is an optional dependency."""

    def load() -> Implementation:
        import importlib

        found: Implementation = getattr(importlib.import_module(module), name)
        return found

    return load


def both(folder: str, op: str) -> dict[str, Callable[[], Implementation]]:
    """The torch and Triton loaders of an op in ops/<folder>."""
    home = f"kvtier_kernels.ops.{folder}"
    return {b: loader(f"{home}.{b}_impl", f"{op}_{b}") for b in ("torch", "triton")}


def far_requests(x: Tensor) -> Tensor:
    """The same [3, ...] with requests 2^31 - 16 elements apart: the third lies past 2^31, and int32 wraps it
    to 32 elements before the first, where other values are. Virtual memory; the gaps are never touched."""
    step, lead = 2**31 - 16, 64
    inner = x[0].contiguous()
    pool = reserved(lead + 2 * step + inner.numel(), x.dtype)
    pool[:lead] = 1
    view = pool[lead:].as_strided((3, *inner.shape), (step, *inner.stride()))
    view.copy_(x)
    return view


def far_case(dtype: str, **more: int) -> Case:
    """Three requests, for ops whose only large offsets are a request's."""
    return case("far-requests", (20, 20, 20), Hazard.FAR, hq=2, hk=1, dtype=dtype, more=more)


def bench_cases(dtype: str, *lengths: int, hq: int, hk: int, d: int, **more: int) -> tuple[Case, ...]:
    """One request of each length."""
    return tuple(
        case(f"g{hq // hk}-d{d}-{n}", (n,), hq=hq, hk=hk, d=d, dtype=dtype, more=more) for n in lengths
    )
