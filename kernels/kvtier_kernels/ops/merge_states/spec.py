"""The registry's entries of merging and finishing states: inputs, costs and compilations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Comparison, Exact, Within, named, state_outputs
from kvtier_kernels.ops.merge_states.ref import finalize_state_ref, merge_state_ref, merge_states_ref
from kvtier_kernels.ops.merge_states.torch_impl import (
    finalize_state_torch,
    merge_state_torch_,
    merge_states_torch,
)
from kvtier_kernels.spec import (
    AotVariant,
    Case,
    Cost,
    Hazard,
    Implementation,
    Inputs,
    Invariance,
    KernelSpec,
    Refusal,
    Stability,
)
from kvtier_kernels.state import LogitFrame
from kvtier_kernels.testing.inputs import one_of, reserved, strided

_MODULE = "kvtier_kernels.ops.merge_states.triton_impl"
_NO_HEADS: dict[Hazard, str] = {
    Hazard.GQA: "a state has query heads only",
    Hazard.BF16: "states are float32 by definition",
    Hazard.DUPLICATE: "takes no ids: the caller merges each support once",
}


def _case(id: str, b: int, s: int, h: int, d: int, *traits: str) -> Case:
    return Case(
        id, {"B": b, "S": s, "H": h, "d": d}, (), "float32", frozenset(traits), seed=b + 7 * s + h + d
    )


def _states(case: Case, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """States of 1 to 40 rows each; one in five has none."""
    g = torch.Generator().manual_seed(case.seed)
    some = torch.rand(shape, generator=g) > 0.2
    m = torch.where(some, torch.randn(shape, generator=g) * (1e4 if "huge" in case.traits else 5), -torch.inf)
    l = torch.where(some, 1 + 39 * torch.rand(shape, generator=g), 0.0)
    u = torch.randn(*shape, case.axes["d"], generator=g) * l.unsqueeze(-1)
    return m, l, u


def merge_inputs(case: Case) -> Inputs:
    """Counts run from 0 to S in a ragged case; states behind a count are NaN."""
    b, s, h = (case.axes[x] for x in "BSH")
    m, l, u = _states(case, b, s, h)
    counts = None
    if Hazard.RAGGED in case.traits:
        counts = (torch.arange(b * h, dtype=torch.int32) % (s + 1)).view(b, h)
        behind = torch.arange(s)[None, :, None] >= counts[:, None, :]
        m[behind], l[behind], u[behind] = torch.nan, torch.nan, torch.nan
    if Hazard.FAR in case.traits:
        far = reserved(4 * _FAR_HEAD + s * 64, torch.float32).as_strided(u.shape, (64, 64, _FAR_HEAD, 1))
        u = far.copy_(u)
    return {"m": m, "l": l, "u": u, "counts": counts, "frame": LogitFrame(0.125), "estimated": False}


# Four times this is 2^32, which int32 takes for 0.
_FAR_HEAD = 2**30


def pair_inputs(case: Case) -> Inputs:
    m, l, u = _states(case, 2, case.axes["B"], case.axes["H"])
    return {"m": m[0], "l": l[0], "u": u[0], "other_m": m[1], "other_l": l[1], "other_u": u[1]}


def finalize_inputs(case: Case) -> Inputs:
    m, l, u = _states(case, case.axes["B"] * case.axes["H"])
    if Hazard.FAR in case.traits:
        u = reserved(4 * _FAR_HEAD + 64, torch.float32).as_strided(u.shape, (_FAR_HEAD, 1)).copy_(u)
    return {"m": m, "l": l, "u": u, "dtype": getattr(torch, case.dtype)}


def _scaled(factor: float) -> Any:
    """A bound relative to the largest answer, for sums of parts that may cancel."""

    def bound(inputs: Mapping[str, Any], want: Tensor) -> Tensor:
        return factor * (1 + want.abs())

    return bound


# u / l is at most max|u_s| / l_s of a part; here below 6.
_STATE_GATES: dict[str, Comparison] = {"o": Within(4e-6), "lse": Within(_scaled(1e-6)), "empty": Exact()}

_CASES = (
    _case("empty", 2, 0, 3, 64, Hazard.EMPTY),
    _case("single", 1, 1, 9, 64, Hazard.SINGLE),
    _case("two", 2, 2, 3, 128),
    _case("seventeen-d256", 1, 17, 2, 256),
    _case("huge-logits", 2, 5, 3, 64, "huge"),
    _case("ragged", 3, 4, 4, 64, Hazard.RAGGED, Hazard.POISON),
    _case("strided", 2, 3, 3, 64, Hazard.STRIDED),
    _case("far-heads", 1, 2, 5, 64, Hazard.FAR),
)


def _cost(inputs: Inputs) -> int:
    """States in and one out, each read or written once."""
    u = inputs["u"]
    batch, states, heads, d = u.shape
    return int((batch * states * heads + batch * heads) * (d + 2) * 4)


def _merge_variant(hq: int, d: int, counts: bool) -> AotVariant:
    pointers = {f"{x}_ptr": "*fp32" for x in "mlu"} | {"counts_ptr": "*i32"}
    pointers |= {f"{x}_out": "*fp32" for x in "mlu"}
    names = ("mb", "ms", "mh", "lb", "ls", "lh", "ub", "us", "uh")
    signature = pointers | {"states": "i32"} | {f"stride_{x}": "i32" for x in names}
    aligned = frozenset(pointers) | {"stride_ub", "stride_us", "stride_uh"}
    constants = {"HAS_COUNTS": counts, "D": d}
    id = f"h{hq}-d{d}" + ("-counts" if counts else "")
    return AotVariant(id, "merge_kernel", signature, constants, aligned, 1, 3)


def _merge() -> Implementation:
    from kvtier_kernels.ops.merge_states.triton_impl import merge_states_triton

    return merge_states_triton


def _merge_into() -> Implementation:
    from kvtier_kernels.ops.merge_states.triton_impl import merge_state_triton_

    return merge_state_triton_


def _finalize() -> Implementation:
    from kvtier_kernels.ops.merge_states.triton_impl import finalize_state_triton

    return finalize_state_triton


def specs() -> tuple[KernelSpec, ...]:
    """merge_states, merge_state (in place) and finalize_state."""
    return merge_states_spec(), merge_state_spec(), finalize_state_spec()


def merge_states_spec() -> KernelSpec:
    refusal = {"u": torch.zeros(1, 1, 9, 48)}
    return KernelSpec(
        name="merge_states",
        axes={"B": "requests", "S": "states to merge", "H": "query heads", "d": "head dim"},
        dtypes=("float32",),
        cases=_CASES,
        make_inputs=merge_inputs,
        reference=merge_states_ref,
        implementations={"torch": lambda: merge_states_torch, "triton": _merge},
        outputs=state_outputs,
        comparisons=_STATE_GATES,
        bytes_moved=_cost,
        flops=lambda x: int(3 * x["u"].numel()),
        stability=Stability(
            "one program an answer, an ascending fold; what is behind the count is not read",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("m", "l", "u", "counts"),
        ),
        aot_module=_MODULE,
        aot=(_merge_variant(9, 64, False), _merge_variant(64, 128, False), _merge_variant(64, 128, True)),
        invariances=(
            Invariance("poison-behind-counts", ("ragged",), _clean_behind, Hazard.POISON),
            Invariance("strides", ("strided",), lambda x: strided(x, ("m", "l", "u")), Hazard.STRIDED),
            Invariance("identity-beside", ("two",), _with_identity),
        ),
        refusals=(
            Refusal("dtype", "single", {"m": torch.zeros(1, 1, 9).double()}, "float32"),
            Refusal("shape", "single", {"l": torch.zeros(1, 2, 9)}, "want m and l"),
            Refusal("count", "single", {"counts": torch.full((1, 9), 2, dtype=torch.int32)}, r"\[0, 1\]"),
            Refusal("d48", "single", refusal, "power of two", ("triton",)),
        ),
        exempt=_NO_HEADS | {Hazard.PADDED: "takes no ids; what lies behind a count is the poison case"},
        # 2 requests of 2 states and 3 heads of 128: 12 states in, 6 out, each 130 floats.
        costs=(Cost("two", 18 * 130 * 4, 3 * 12 * 128),),
        bench=(_case("b1-s16-h9-d64", 1, 16, 9, 64), _case("b8-s32-h64-d128", 8, 32, 64, 128)),
        bench_gpu=(_case("b8-s32-h64-d128", 8, 32, 64, 128), _case("b64-s32-h64-d128", 64, 32, 64, 128)),
    )


def _clean_behind(inputs: Inputs) -> Inputs:
    return inputs | {n: torch.nan_to_num(inputs[n], 0.0, neginf=-torch.inf) for n in "mlu"}


def _with_identity(inputs: Inputs) -> Inputs:
    """The identity before and behind all others."""
    m, l, u = (inputs[n] for n in "mlu")
    return inputs | {
        "m": torch.nn.functional.pad(m, (0, 0, 1, 1), value=-torch.inf),
        "l": torch.nn.functional.pad(l, (0, 0, 1, 1)),
        "u": torch.nn.functional.pad(u, (0, 0, 0, 0, 1, 1)),
    }


def merge_state_spec() -> KernelSpec:
    return KernelSpec(
        name="merge_state",
        axes={"B": "requests", "H": "query heads", "d": "head dim"},
        dtypes=("float32",),
        cases=(
            _case("empty", 0, 1, 3, 64, Hazard.EMPTY),
            _case("single", 1, 1, 1, 64, Hazard.SINGLE),
            _case("pair", 3, 1, 5, 128),
            _case("d256-huge", 2, 1, 4, 256, "huge"),
        ),
        make_inputs=pair_inputs,
        reference=merge_state_ref,
        implementations={"torch": lambda: merge_state_torch_, "triton": _merge_into},
        outputs=state_outputs,
        comparisons=_STATE_GATES,
        bytes_moved=lambda x: int(3 * (x["u"].numel() + 2 * x["m"].numel()) * 4),
        flops=lambda x: int(3 * 2 * x["u"].numel()),
        stability=Stability(
            "one program an answer",
            "strides choose addresses only",
            requests="pair",
            alone=one_of("m", "l", "u", "other_m", "other_l", "other_u"),
        ),
        aot_module=_MODULE,
        aot=(_pair_variant(64), _pair_variant(128)),
        invariances=(),
        refusals=(
            Refusal("shape", "pair", {"other_m": torch.zeros(3, 4)}, "one shape"),
            Refusal("dtype", "pair", {"other_l": torch.zeros(3, 5).half()}, "float32"),
            Refusal("strides", "pair", {"m": torch.zeros(5, 3).t()}, "contiguous", ("triton",)),
        ),
        exempt=_NO_HEADS
        | {
            Hazard.PADDED: "takes no ids",
            Hazard.POISON: "reads every element it is given",
            Hazard.RAGGED: "one state a row on each side",
            Hazard.STRIDED: "written in place, so it refuses what is not contiguous",
            Hazard.FAR: "contiguous, indexed by a widened program id without a stride",
        },
        mutates=("m", "l", "u"),
        # 15 states of 130 floats, twice read and once written.
        costs=(Cost("pair", 3 * 15 * 130 * 4, 3 * 2 * 15 * 128),),
        bench=(_case("b1-h9-d64", 1, 1, 9, 64),),
        bench_gpu=(_case("b64-h64-d128", 64, 1, 64, 128),),
    )


def _pair_variant(d: int) -> AotVariant:
    names = ("m_ptr", "l_ptr", "u_ptr", "other_m", "other_l", "other_u")
    return AotVariant(
        f"d{d}", "merge_into_kernel", dict.fromkeys(names, "*fp32"), {"D": d}, frozenset(names), 1, 3
    )


def finalize_state_spec() -> KernelSpec:
    def gate(inputs: Mapping[str, Any], want: Tensor) -> Tensor:
        ulp = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}[inputs["dtype"]]
        return ulp * want.abs() + 1e-7

    def cases() -> tuple[Case, ...]:
        half = {"B": 1, "H": 9, "d": 64}
        return (
            _case("empty", 0, 1, 1, 64, Hazard.EMPTY),
            _case("single", 1, 1, 1, 64, Hazard.SINGLE),
            _case("many-d128", 3, 1, 5, 128),
            _case("d256", 1, 1, 3, 256),
            _case("strided", 2, 1, 3, 64, Hazard.STRIDED),
            _case("far-rows", 5, 1, 1, 64, Hazard.FAR),
            Case("bf16", half, (), "bfloat16", seed=3),
            Case("f16", half, (), "float16", seed=4),
        )

    names = ("m_ptr", "l_ptr", "u_ptr", "o_ptr", "lse_ptr")

    def variant(d: int, t: str) -> AotVariant:
        signature = dict.fromkeys(names, "*fp32") | {"o_ptr": f"*{t}", "stride_ur": "i32"}
        aligned = frozenset(signature)
        return AotVariant(f"d{d}-{t}", "finalize_kernel", signature, {"D": d}, aligned, 1, 3)

    return KernelSpec(
        name="finalize_state",
        axes={"B": "requests", "H": "query heads", "d": "head dim"},
        dtypes=("float32", "float16", "bfloat16"),
        cases=cases(),
        make_inputs=finalize_inputs,
        reference=finalize_state_ref,
        implementations={"torch": lambda: finalize_state_torch, "triton": _finalize},
        outputs=named,
        comparisons={"o": Within(gate), "lse": Within(_scaled(1e-6))},
        bytes_moved=lambda x: int(
            x["u"].numel() * (4 + torch.empty(0, dtype=x["dtype"]).element_size()) + x["m"].numel() * 12
        ),
        flops=lambda x: int(x["u"].numel()),
        stability=Stability(
            "one program an answer, a quotient a channel",
            "strides choose addresses only",
            requests="many-d128",
            alone=one_of("m", "l", "u"),
        ),
        aot_module=_MODULE,
        aot=(variant(64, "fp32"), variant(128, "bf16")),
        invariances=(Invariance("strides", ("strided",), lambda x: strided(x, ("u",)), Hazard.STRIDED),),
        refusals=(
            Refusal("shape", "many-d128", {"l": torch.zeros(14)}, "want m and l"),
            Refusal("dtype", "many-d128", {"m": torch.zeros(15).half()}, "float32"),
        ),
        exempt={
            Hazard.GQA: _NO_HEADS[Hazard.GQA],
            Hazard.DUPLICATE: _NO_HEADS[Hazard.DUPLICATE],
            Hazard.PADDED: "takes no ids",
            Hazard.POISON: "reads every element it is given",
            Hazard.RAGGED: "one state a row",
        },
        # 15 rows of 128 in and out as float32, m, l and lse beside.
        costs=(Cost("many-d128", 15 * 128 * 8 + 15 * 12, 15 * 128),),
        bench=(_case("b1-h9-d64", 1, 1, 9, 64),),
        bench_gpu=(_case("b64-h64-d128", 64, 1, 64, 128),),
    )
