"""The registry entries of the certified scan and the choice for drafts: inputs, costs and compilations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kvtier_kernels.compare import Exact, named
from kvtier_kernels.ops.int8_sieve.ref import int8_scan_ref, int8_select_ref
from kvtier_kernels.ops.int8_sieve.torch_impl import int8_rows
from kvtier_kernels.ops.scoring_cases import (
    TYPES,
    bench_cases,
    both,
    capacity,
    case,
    far_case,
    far_requests,
    lens,
    loader,
    relative,
    standard_cases,
)
from kvtier_kernels.spec import (
    AotVariant,
    Case,
    Cost,
    Hazard,
    Inputs,
    Invariance,
    KernelSpec,
    Refusal,
    Stability,
)
from kvtier_kernels.testing.inputs import one_of, strided

_SCAN = "kvtier_kernels.ops.int8_sieve.triton_impl"
_SELECT = "kvtier_kernels.ops.int8_sieve.select_triton"
_SIZES = {"K": 2, "k": 6, "cap": 20}
AXES = {
    "B": "requests",
    "K": "drafts of a query",
    "Hq": "query heads",
    "Hk": "KV heads",
    "d": "head dim",
    "C": "units that fit",
    "k": "units a draft asks for",
    "cap": "units in all",
}


def scan_inputs(c: Case) -> Inputs:
    """Keys of sizes between 2^-12 and 2^12, quantised; behind a request's last unit lie infinite steps."""
    g = torch.Generator().manual_seed(c.seed)
    batch, hk, n, d = len(c.seq_lens), c.axes["Hk"], capacity(c), c.axes["d"]
    far = Hazard.FAR in c.traits
    q = torch.randn(batch, c.axes["K"], c.axes["Hq"], d, generator=g) * (1e3 if "huge" in c.traits else 2)
    if "zero-query" in c.traits:
        q[:, :, 0] = 0
    keys = torch.randn(batch, hk, n, d, generator=g) * 2.0 ** torch.randint(-12, 13, (n, 1), generator=g)
    if Hazard.DUPLICATE in c.traits:
        keys[:] = keys[:, :, :1]
    if "unknown" in c.traits:
        keys[:, :, 3, 5], keys[:, :, 4, 0] = math.nan, math.inf
        q[:, 1, 0, 2] = math.nan
    cq, scale = int8_rows(keys)
    if Hazard.POISON in c.traits:
        for b, length in enumerate(c.seq_lens):
            cq[b, :, length:], scale[b, :, length:] = 127, math.nan
    q = q.to(getattr(torch, c.dtype))
    return {"q": q, "cq": far_requests(cq) if far else cq, "scale": scale, "seq_lens": lens(c)}


def select_inputs(c: Case) -> Inputs:
    """Scores of few values, so that ties are everywhere; where a trait says so, NaN and both infinities."""
    g = torch.Generator().manual_seed(c.seed)
    batch, n, drafts = len(c.seq_lens), capacity(c), c.axes["K"]
    upper = torch.randint(-6, 7, (batch, drafts, c.axes["Hq"], n), generator=g) / 4
    if Hazard.DUPLICATE in c.traits:
        upper[:] = 1.5
    if "distinct" in c.traits:
        upper = torch.randn(upper.shape, generator=g)
    if "unknown" in c.traits:
        upper[..., 3], upper[..., 7], upper[..., 9:11] = math.inf, math.nan, -math.inf
        upper[..., 1::5] = -0.0
        upper[..., 12], upper[..., 13], upper[..., 14] = 2.0**-149, -(2.0**-149), -math.nan
    if "late-ties" in c.traits:
        upper[:] = -1.0
        upper[..., 500:] = 2.0
    if "starved" in c.traits:
        upper[:, 0] += 100
    for b, length in enumerate(c.seq_lens):
        upper[b, ..., length:] = math.nan if Hazard.POISON in c.traits else -math.inf
    live = torch.full((batch,), drafts, dtype=torch.int32)
    if Hazard.PADDED in c.traits:
        live[:] = drafts - 1
    if "no-drafts" in c.traits:
        live[-1] = 0
    sizes = {"hk": c.axes["Hk"], "k": c.axes["k"], "cap": c.axes["cap"]}
    return {"upper": upper, "seq_lens": lens(c), "candidates": live} | sizes


def scan_bytes(x: Inputs) -> int:
    """Image and step of every unit once for all drafts, queries, and two bounds out."""
    q, cq = x["q"], x["cq"]
    rows = int(x["seq_lens"].sum())
    out = 8 * rows * q.shape[1] * q.shape[2]
    return int(rows * cq.shape[1] * (cq.shape[3] + 4) + q.numel() * q.element_size() + out)


def scan_flops(x: Inputs) -> int:
    q = x["q"]
    return int(2 * x["seq_lens"].sum() * q.shape[1] * q.shape[2] * q.shape[3])


def select_bytes(x: Inputs) -> int:
    """Scores once, and 8 bytes a unit that is chosen."""
    drafts, hq = x["upper"].shape[1:3]
    rows = x["seq_lens"].clamp_max(x["cap"])
    return int(4 * x["seq_lens"].sum() * drafts * hq + 8 * rows.sum() * x["hk"])


def select_flops(x: Inputs) -> int:
    """A comparison a score."""
    drafts, hq = x["upper"].shape[1:3]
    return int(x["seq_lens"].sum() * drafts * hq)


def _no_poison(x: Inputs) -> Inputs:
    for b, n in enumerate(x["seq_lens"].tolist()):
        x["cq"][b, :, n:], x["scale"][b, :, n:] = 0, 1.0
    return x


def _no_poison_scores(x: Inputs) -> Inputs:
    for b, n in enumerate(x["seq_lens"].tolist()):
        x["upper"][b, ..., n:] = 1e9
    return x


def _other_dead_draft(x: Inputs) -> Inputs:
    for b, live in enumerate(x["candidates"].tolist()):
        x["upper"][b, live:] = 1e9
    return x


def _scan_variant(dtype: str, hq: int, hk: int, d: int, drafts: int) -> AotVariant:
    t = TYPES[dtype]
    signature = {"q_ptr": f"*{t}", "cq_ptr": "*i8", "scale_ptr": "*fp32", "lens_ptr": "*i32"}
    signature |= {"upper_ptr": "*fp32", "lower_ptr": "*fp32", "factor": "fp32", "units": "i32"}
    signature |= {f"stride_{s}": "i32" for s in ("qb", "qk", "qh", "cb", "ch", "cc")}
    rows = max(16, 1 << (drafts * (hq // hk) - 1).bit_length())
    constants = {"HK": hk, "G": hq // hk, "K": drafts, "D": d, "BD": d, "BM": rows}
    constants["BC"] = 128 if rows <= 16 else 64
    name = f"{t}-g{hq // hk}-d{d}-drafts{drafts}"
    return AotVariant(name, "scan_kernel", signature, constants, frozenset(signature) - {"factor"}, 4, 3)


def _select_variants(hk: int, group: int, drafts: int, width: int) -> tuple[AotVariant, ...]:
    lists = {
        "keys": ("upper_ptr", "lens_ptr", "live_ptr", "key_ptr", "top_ptr", "units"),
        "list": ("key_ptr", "lens_ptr", "live_ptr", "ids_ptr", "keys_ptr", "kth_ptr", "units", "k"),
        "rank": ("ids_ptr", "keys_ptr", "rank_ptr", "units"),
        "level": ("rank_ptr", "lens_ptr", "best_ptr", "level_ptr", "left_ptr", "units", "k", "cap"),
        "choose": (
            *("key_ptr", "top_ptr", "rank_ptr", "best_ptr", "level_ptr", "left_ptr", "lens_ptr", "live_ptr"),
            *("indptr_ptr", "units_ptr", "member_ptr", "dropped_ptr", "runner_ptr", "units", "k"),
        ),
    }
    sizes = {"HK": hk, "K": drafts, "BN": 512}
    constants: dict[str, dict[str, int]] = {
        "keys": sizes | {"G": group},
        "list": sizes | {"KP": width},
        "rank": {"KP": width},
        "level": sizes | {"KP": width},
        "choose": sizes | {"KL": 1 << (drafts - 1).bit_length()},
    }
    floats = {"upper_ptr", "kth_ptr", "runner_ptr"}

    def variant(kind: str) -> AotVariant:
        signature = {
            n: ("*fp32" if n in floats else "*i32" if n.endswith("_ptr") else "i32") for n in lists[kind]
        }
        aligned = frozenset(n for n in signature if n.endswith("_ptr"))
        name = f"{kind}-hk{hk}-drafts{drafts}-k{width}"
        return AotVariant(name, f"{kind}_kernel", signature, constants[kind], aligned, 4, 3)

    return tuple(variant(kind) for kind in lists)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "single", change, match, backends or ("torch", "triton"))


def _scan_spec() -> KernelSpec:
    units = "a scan names no ids"
    return KernelSpec(
        name="int8_scan",
        axes=AXES,
        dtypes=("float32", "float16", "bfloat16"),
        cases=(
            *(c for c in standard_cases(**_SIZES) if Hazard.PADDED not in c.traits),
            far_case("float16", **_SIZES),
            case("d96", (20,), hk=1, d=96, more=_SIZES),
            case("unknown", (20,), "unknown", more=_SIZES),
            case("one-draft", (20,), more=_SIZES | {"K": 1}),
            case("eight-drafts-of-eight", (20,), hq=8, hk=1, more=_SIZES | {"K": 8}),
        ),
        make_inputs=scan_inputs,
        reference=int8_scan_ref,
        implementations=both("int8_sieve", "int8_scan"),
        outputs=named,
        comparisons={"upper": relative(1e-6), "lower": relative(1e-6)},
        bytes_moved=scan_bytes,
        flops=scan_flops,
        stability=Stability(
            "one product of all channels a bound",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("q", "cq", "scale", "seq_lens"),
        ),
        invariances=(
            Invariance("no-poison", ("poison",), _no_poison, Hazard.POISON),
            Invariance("strides", ("strided",), lambda x: strided(x, ("q", "cq", "scale")), Hazard.STRIDED),
        ),
        refusals=(
            _refusal("image-dtype", {"cq": torch.zeros(1, 1, 16, 64)}, "want cq int8"),
            _refusal("steps", {"scale": torch.zeros(1, 1, 15)}, "want scale"),
            _refusal("head-dim", {"q": torch.zeros(1, 2, 4, 32)}, "disagree"),
            _refusal("drafts", {"q": torch.zeros(1, 17, 4, 64)}, "at most 64", "triton"),
            _refusal("past-the-capacity", {"seq_lens": torch.tensor([17], dtype=torch.int32)}, r"\[0, 16\]"),
            _refusal(
                "odd-stride",
                {"cq": torch.zeros(1, 1, 16, 65, dtype=torch.int8)[..., :64]},
                "multiples of 16",
                "triton",
            ),
        ),
        # 37 images of 64 bytes and their steps; 2 drafts of one head of 64 floats; two bounds each.
        costs=(Cost("gqa1", 37 * 68 + 2 * 64 * 4 + 37 * 2 * 8, 2 * 37 * 2 * 64),),
        exempt={Hazard.PADDED: units},
        bench=bench_cases("float32", 2048, 8192, hq=9, hk=3, d=64, **_SIZES | {"K": 1}),
        bench_gpu=tuple(
            replace(c, id=f"{c.id}-drafts{drafts}")
            for drafts in (1, 8)
            for c in bench_cases("bfloat16", 8192, 131072, hq=64, hk=8, d=128, **_SIZES | {"K": drafts})
        ),
        aot_module=_SCAN,
        aot=(
            _scan_variant("bfloat16", 64, 8, 128, 1),
            _scan_variant("bfloat16", 64, 8, 128, 8),
            _scan_variant("bfloat16", 9, 3, 64, 1),
            _scan_variant("float32", 9, 3, 64, 1),
        ),
    )


def _select_cases() -> tuple[Case, ...]:
    cases = (
        *(
            c
            for c in standard_cases(**_SIZES)
            if c.dtype == "float32" and c.axes["d"] == 64 and not {"zero-query", "huge"} & c.traits
        ),
        case("unknown", (40,), "unknown", more=_SIZES),
        case("unknown-at-the-cut", (40,), "unknown", hk=1, more=_SIZES | {"k": 1, "cap": 1}),
        case("starved", (60,), "starved", hk=1, more=_SIZES | {"K": 3, "cap": 7}),
        case("distinct", (140, 60), "distinct", more=_SIZES | {"K": 3, "cap": 15}),
        case("cap-below-the-drafts", (60,), "distinct", hk=1, more=_SIZES | {"K": 3, "cap": 2}),
        case("cap-past-the-units", (20,), "distinct", hk=1, more=_SIZES | {"cap": 64}),
        case("nothing-asked", (40,), "distinct", hk=1, more=_SIZES | {"k": 0}),
        case("one-draft", (40,), hk=1, more=_SIZES | {"K": 1}),
        case("no-drafts", (40, 20), "no-drafts", hk=1, more=_SIZES),
        case("ties-over-blocks", (520,), "late-ties", hq=1, hk=1, more=_SIZES | {"K": 1, "k": 15, "cap": 17}),
        case(
            "ties-filled-over-blocks",
            (520,),
            "late-ties",
            hq=1,
            hk=1,
            more=_SIZES | {"K": 1, "k": 2, "cap": 15},
        ),
        case("many-drafts", (50,), "distinct", hq=1, hk=1, more=_SIZES | {"K": 31, "k": 2, "cap": 40}),
    )
    return tuple(replace(c, axes={n: x for n, x in c.axes.items() if n != "d"}) for c in cases)


def _select_spec() -> KernelSpec:
    outputs = ("indptr", "units", "member", "dropped", "kth", "runner_up")
    return KernelSpec(
        name="int8_select",
        axes=AXES,
        dtypes=("float32",),
        cases=_select_cases(),
        make_inputs=select_inputs,
        reference=int8_select_ref,
        implementations={
            "torch": loader("kvtier_kernels.ops.int8_sieve.torch_impl", "int8_select_torch"),
            "triton": loader(_SELECT, "int8_select_triton"),
        },
        outputs=named,
        comparisons={name: Exact() for name in outputs},
        bytes_moved=select_bytes,
        flops=select_flops,
        stability=Stability(
            "extremes and counts, one program a segment",
            "nothing is rounded",
            rounds=False,
        ),
        invariances=(
            Invariance("no-poison", ("poison",), _no_poison_scores, Hazard.POISON),
            Invariance("dead-drafts", ("padded",), _other_dead_draft, Hazard.PADDED),
            Invariance("strides", ("strided",), lambda x: strided(x, ("upper",)), Hazard.STRIDED),
        ),
        refusals=(
            _refusal("scores-dtype", {"upper": torch.zeros(1, 2, 4, 16).half()}, "want upper float32"),
            _refusal("no-room", {"cap": 0}, "at most 0"),
            _refusal("too-many-drafts", {"upper": torch.zeros(1, 32, 4, 16)}, "1 to 31"),
            _refusal(
                "drafts",
                {"candidates": torch.tensor([3], dtype=torch.int32)},
                r"candidates must lie in \[0, 2\]",
            ),
            _refusal("k257", {"k": 257}, "at most 256", "triton"),
        ),
        # 37 scores of 2 drafts of one head, and 20 units with their masks.
        costs=(Cost("gqa1", 4 * 37 * 2 + 8 * 20, 37 * 2),),
        exempt={
            Hazard.FAR: "scores are made contiguous, and every offset is an int64 from the program's id on",
            Hazard.HEAD_DIMS: "scores have no channels",
            Hazard.BF16: "scores are float32",
        },
        bench=bench_cases("float32", 512, 8192, hq=9, hk=3, d=64, **_SIZES | {"k": 32, "cap": 64}),
        bench_gpu=bench_cases("float32", 8192, hq=64, hk=8, d=128, **_SIZES | {"K": 8, "k": 128, "cap": 512}),
        aot_module=_SELECT,
        aot=(*_select_variants(8, 8, 8, 256), *_select_variants(3, 3, 1, 64)),
    )


def specs() -> tuple[KernelSpec, ...]:
    """The scan, and the choice."""
    return _scan_spec(), _select_spec()
