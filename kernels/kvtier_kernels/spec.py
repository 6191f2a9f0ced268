"""One entry per kernel: what drives its tests, its byte and FLOP counts, its bench and its gate.

An entry exists so that nothing about an op is said twice. It must not know pytest, a GPU or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from kvtier_kernels.compare import Comparison

Inputs = dict[str, Any]
Implementation = Callable[..., Any]


class Hazard(StrEnum):
    """What every op is tried with, or says why it has no such thing (`KernelSpec.exempt`)."""

    EMPTY = "empty"
    SINGLE = "single"  # one token, unit or row
    POISON = "poison"  # NaN in memory that the answer must not depend on
    DUPLICATE = "duplicate"  # the same id twice, or equal scores
    PADDED = "padded"  # ids that mean nothing, at the end of a list
    RAGGED = "ragged"  # requests of different lengths in one call
    STRIDED = "strided"  # inputs that are not contiguous
    FAR = "far"  # offsets past 2^31 elements, as int32 id times int32 stride
    GQA = "gqa"  # 1 to 16 query heads a KV head; read off axes Hq and Hk
    HEAD_DIMS = "head-dims"  # 64, 128 and 256; read off axis d
    BF16 = "bf16"  # read off the cases' dtypes


@dataclass(frozen=True)
class Case:
    """One named point of a kernel's input space. `traits`: hazards, and words that only the op's own
    `make_inputs` knows. axes: sizes by name; Hq, Hk and d mean the same for every op."""

    id: str
    axes: Mapping[str, int]
    seq_lens: tuple[int, ...] = ()
    dtype: str = "float32"
    traits: frozenset[str] = frozenset()
    seed: int = 0


@dataclass(frozen=True)
class Invariance:
    """A change of the inputs that must not change a bit of any output, in each case named.

    `change` gets inputs of its own and returns the changed ones; it may write into them. `undo` turns
    the changed call's outputs into the order of the unchanged ones. hazard: what it covers, if anything.
    """

    id: str
    cases: tuple[str, ...]
    change: Callable[[Inputs], Inputs]
    hazard: Hazard | None = None
    undo: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class Refusal:
    """Inputs that every implementation named refuses with ShapeError, before it computes anything.

    change: what replaces the case's inputs. match: a regular expression of the message.
    """

    id: str
    case: str
    change: Mapping[str, Any]
    match: str
    backends: tuple[str, ...] = ("torch", "triton")


@dataclass(frozen=True)
class AotVariant:
    """One compilation of a Triton kernel for a GPU that need not be present.

    signature: Triton type of each run-time argument in order. divisible: arguments that the launcher
    guarantees to be multiples of 16 (pointers: 16-byte aligned); without them there is no cp.async.
    must_contain: of "cp.async", "mma", "wgmma".
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
class Stability:
    """Why no bit of an answer on Triton depends on what else is in the call, nor on where rows lie: for one
    device, one version of Triton and equal constants. rounds: False for integers, copies and extremes, which
    have one result whatever the order. alone: of the inputs of the case `requests`, those of one of its
    requests; the outputs of the whole call, cut at that request, must have the bits of a call of its own.
    None: its outputs are lists of all requests, which are compared exactly with the reference's."""

    batch: str
    placement: str
    rounds: bool = True
    requests: str = ""
    alone: Callable[[Inputs, int], Inputs] | None = None


@dataclass(frozen=True)
class Cost:
    """Bytes and FLOPs of one case, worked by hand: what `bytes_moved` and `flops` must say."""

    case: str
    bytes_moved: int
    flops: int


@dataclass(frozen=True)
class KernelSpec:
    """Everything about an op that a test, a bench or the gate needs.

    axes: what each name in a shape means. make_inputs: keyword arguments of every implementation, from
    the case alone. reference: float64, plain; same keywords. implementations: loaders by backend
    ("torch", "triton"; "plain" where "torch" is compiled), so that no one needs Triton who does not run it.
    outputs: names the tensors of what the reference or an implementation returned (`compare.named` for a
    tensor or a mapping, `compare.state_outputs` for an attention state); comparisons has the same names.
    stability: on what bits depend on Triton; those of attention on the CPU are `chunk_state`'s.
    mutates: inputs an implementation writes to. bytes_moved counts each tensor once, as the roofline does.
    bench, bench_gpu: what is timed on a CPU and on a GPU.
    """

    name: str
    axes: Mapping[str, str]
    dtypes: tuple[str, ...]
    cases: tuple[Case, ...]
    make_inputs: Callable[[Case], Inputs]
    reference: Callable[..., Any]
    implementations: Mapping[str, Callable[[], Implementation]]
    outputs: Callable[[Any], dict[str, Tensor]]
    comparisons: Mapping[str, Comparison]
    bytes_moved: Callable[[Inputs], int]
    flops: Callable[[Inputs], int]
    stability: Stability
    aot_module: str = ""
    aot: tuple[AotVariant, ...] = ()
    invariances: tuple[Invariance, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    exempt: Mapping[Hazard, str] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()
    bench: tuple[Case, ...] = ()
    bench_gpu: tuple[Case, ...] = ()

    def case(self, id: str) -> Case:
        """The case of that id. Raises KeyError."""
        for case in self.cases:
            if case.id == id:
                return case
        raise KeyError(f"{self.name} has no case {id!r}")
