"""One registry entry per kernel: what drives its tests, its byte and FLOP counts, its bench and its gate.

An entry exists so that nothing about an op is said twice. It must not know pytest, a GPU or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvtier_kernels.state import AttentionState

Inputs = Mapping[str, Any]
Implementation = Callable[..., AttentionState]


@dataclass(frozen=True)
class Case:
    """One named point of a kernel's input space. `traits` name what is hostile about it."""

    id: str
    axes: Mapping[str, int]
    seq_lens: tuple[int, ...]
    dtype: str = "float32"
    traits: frozenset[str] = frozenset()
    seed: int = 0


@dataclass(frozen=True)
class AotVariant:
    """One compilation of a Triton kernel for a GPU that need not be present.

    signature: Triton type of each run-time argument in order. divisible: arguments that the launcher
    guarantees to be multiples of 16 (pointers: 16-byte aligned); without them there is no cp.async.
    """

    id: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: frozenset[str]
    num_warps: int
    num_stages: int
    must_contain: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """axes: what each name in a shape means. bytes_moved counts each tensor once, as the roofline does."""

    name: str
    axes: Mapping[str, str]
    dtypes: tuple[str, ...]
    cases: tuple[Case, ...]
    make_inputs: Callable[[Case], dict[str, Any]]
    reference: Callable[..., tuple[Tensor, Tensor, Tensor]]
    implementations: Mapping[str, Callable[[], Implementation]]
    bytes_moved: Callable[[Inputs], int]
    flops: Callable[[Inputs], int]
    aot_module: str
    aot: tuple[AotVariant, ...] = field(default=())


def registry() -> tuple[KernelSpec, ...]:
    """All kernels with a Triton implementation."""
    from kvtier_kernels.ops.paged_decode.spec import paged_decode_spec

    return (paged_decode_spec(),)
