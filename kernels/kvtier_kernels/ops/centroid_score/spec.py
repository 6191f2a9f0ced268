"""The registry entries of centroid scores and the estimate: inputs, costs and compilations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Within, named, state_comparisons, state_outputs
from kvtier_kernels.ops.centroid_score.ref import centroid_estimate_ref, centroid_score_ref
from kvtier_kernels.ops.scoring_cases import (
    TYPES,
    bench_cases,
    both,
    capacity,
    case,
    far_case,
    far_requests,
    lse_gate,
    queries,
    standard_cases,
    without_poison,
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

_MODULE = "kvtier_kernels.ops.centroid_score.triton_impl"
AXES = {
    "B": "requests",
    "Hq": "query heads",
    "Hk": "KV heads",
    "d": "head dim of keys",
    "dv": "head dim of values",
    "C": "clusters that fit",
}


def _cases() -> tuple[Case, ...]:
    return (
        *standard_cases(),
        far_case("float16"),
        case("by-rows", (70,), "by-rows"),
        case("d96", (40,), hk=1, d=96),
        case("one-split-and-a-cluster", (257,), hq=2, hk=1),
    )


def score_inputs(c: Case) -> Inputs:
    """Clusters of 1 to 9 rows, a few of none among them, and only such behind a request's last."""
    g = torch.Generator().manual_seed(c.seed)
    q, n = queries(c, g), capacity(c)
    hk, d = c.axes["Hk"], c.axes["d"]
    cent = torch.randn(q.shape[0], hk, n, d, generator=g).to(q.dtype)
    counts = torch.randint(1, 10, (q.shape[0], hk, n), generator=g, dtype=torch.int32)
    if Hazard.DUPLICATE in c.traits:
        cent[:] = cent[:, :, :1]
    if Hazard.PADDED in c.traits:
        counts[:, :, 5::7] = 0
    for b, length in enumerate(c.seq_lens):
        counts[b, :, length:] = 0
    if Hazard.POISON in c.traits:
        counts[:, :, ::5] = 0
        cent[counts == 0] = math.nan
    if Hazard.FAR in c.traits:
        cent = far_requests(cent)
    by_rows = {"by_rows": True} if "by-rows" in c.traits else {}
    return {"q": q, "cent": cent, "counts": counts, "scale": 1 / math.sqrt(d)} | by_rows


def estimate_inputs(c: Case) -> Inputs:
    """Two clusters of three are taken. Sums of V have twice the width of keys, if that is 64."""
    g = torch.Generator().manual_seed(c.seed + 1)
    x = score_inputs(c)
    x.pop("by_rows", None)
    counts = x["counts"]
    width = 32 if Hazard.FAR in c.traits else 64
    v = torch.randn(*counts.shape, width, generator=g) * counts.unsqueeze(-1)
    take = torch.rand(counts.shape, generator=g) < 0.67
    if Hazard.POISON in c.traits:
        v[(counts == 0) | ~take] = math.nan
        x["cent"][~take] = math.inf
    v_sum = v.to(torch.float32 if "by-rows" in c.traits else x["q"].dtype)
    return x | {"v_sum": far_requests(v_sum) if Hazard.FAR in c.traits else v_sum, "take": take}


def score_bytes(x: Inputs) -> int:
    """Centroids, counts, queries; scores and lse out. Clusters that are not there cost their count alone."""
    q, cent, counts = x["q"], x["cent"], x["counts"]
    there = int((counts > 0).sum())
    return int(
        there * cent.shape[3] * cent.element_size()
        + 8 * counts.numel()
        + q.numel() * q.element_size()
        + 4 * q.shape[:2].numel()
    )


def score_flops(x: Inputs) -> int:
    group = x["q"].shape[1] // x["cent"].shape[1]
    return int(2 * int((x["counts"] > 0).sum()) * group * x["cent"].shape[3])


def _taken(x: Inputs) -> int:
    return int(((x["counts"] > 0) & x["take"]).sum())


def estimate_bytes(x: Inputs) -> int:
    """Centroid and sum of V of each taken cluster, all counts and marks, queries; a float32 state out."""
    q, cent, v = x["q"], x["cent"], x["v_sum"]
    row = cent.shape[3] * cent.element_size() + v.shape[3] * v.element_size()
    return int(
        _taken(x) * row
        + 5 * x["counts"].numel()
        + q.numel() * q.element_size()
        + 4 * q.shape[:2].numel() * (v.shape[3] + 2)
    )


def estimate_flops(x: Inputs) -> int:
    group = x["q"].shape[1] // x["cent"].shape[1]
    return int(2 * _taken(x) * group * (x["cent"].shape[3] + x["v_sum"].shape[3]))


def _share(x: Mapping[str, Any], want: Tensor) -> float:
    """A logit is rounded in proportion to its size, and so is its exponential."""
    largest = float(x["q"].float().abs().sum(-1).max()) * float(x["scale"]) * 4
    return 2e-5 + 1e-7 * largest * int(x["q"].shape[1] // x["cent"].shape[1])


def _variant(kind: str, dtype: str, hq: int, hk: int, d: int, by_rows: bool | None = None) -> AotVariant:
    t = TYPES[dtype]
    signature = {"q_ptr": f"*{t}", "cent_ptr": f"*{t}", "counts_ptr": "*i32"}
    middle = {
        "part": {"m_ptr": "*fp32", "l_ptr": "*fp32"},
        "score": {"lse_ptr": "*fp32", "score_ptr": "*fp32"},
        "estimate": {"v_ptr": f"*{t}", "take_ptr": "*i1"}
        | dict.fromkeys(("m_ptr", "l_ptr", "u_ptr"), "*fp32"),
    }
    steps = ("qb", "qh", "cb", "ch", "cc") + (("vb", "vh", "vc") if kind == "estimate" else ())
    signature |= middle[kind] | {"scale": "fp32", "clusters": "i32"}
    signature |= {f"stride_{s}": "i32" for s in steps}
    constants: dict[str, Any] = {"HK": hk, "G": hq // hk, "D": d, "BD": d, "BM": 16, "BC": 64}
    if kind == "estimate":
        constants |= {"DV": d, "SPLIT": 256}
    if by_rows is not None:
        constants["BY_ROWS"] = by_rows
    aligned = frozenset(signature) - {"scale"}
    name = f"{kind}-{t}-g{hq // hk}-d{d}" + ("-rows" if by_rows else "")
    must = ("cp.async",) if kind == "estimate" else ()
    return AotVariant(name, f"{kind}_kernel", signature, constants, aligned, 4, 3, must)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "single", change, match, backends or ("torch", "triton"))


_REFUSALS = (
    _refusal("counts-dtype", {"counts": torch.zeros(1, 1, 16)}, "want counts int32"),
    _refusal("counts-below-zero", {"counts": torch.full((1, 1, 16), -1, dtype=torch.int32)}, "CENTROID_MASS"),
    _refusal("head-dim", {"q": torch.zeros(1, 4, 32)}, "disagree"),
    _refusal("gqa17", {"q": torch.zeros(1, 17, 64)}, "share a KV head", "triton"),
    _refusal("odd-stride", {"cent": torch.zeros(1, 1, 16, 65)[..., :64]}, "multiples of 16", "triton"),
)


def specs() -> tuple[KernelSpec, ...]:
    """The scores, and the estimated state."""
    shared: dict[str, Any] = {
        "axes": AXES,
        "dtypes": ("float32", "float16", "bfloat16"),
        "cases": _cases(),
        "bench": bench_cases("float32", 512, hq=9, hk=3, d=64),
        "bench_gpu": bench_cases("bfloat16", 2048, 8192, hq=64, hk=8, d=128),
        "aot_module": _MODULE,
    }
    score = KernelSpec(
        name="centroid_score",
        make_inputs=score_inputs,
        reference=centroid_score_ref,
        implementations=both("centroid_score", "centroid_score"),
        outputs=named,
        comparisons={"score": Within(_share), "lse": lse_gate()},
        bytes_moved=score_bytes,
        flops=score_flops,
        stability=Stability(
            "64 clusters a program; lse joins 128 lanes of blocks, an empty one adds 0",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("q", "cent", "counts"),
        ),
        invariances=(
            Invariance("no-poison", ("poison",), without_poison("cent"), Hazard.POISON),
            Invariance(
                "strides", ("strided",), lambda x: strided(x, ("q", "cent", "counts")), Hazard.STRIDED
            ),
        ),
        refusals=_REFUSALS,
        # 37 clusters of 64 channels in float32; room for 48 counts and scores; one head; one lse.
        costs=(Cost("gqa1", 37 * 64 * 4 + 48 * 8 + 64 * 4 + 4, 2 * 37 * 64),),
        aot=(
            _variant("part", "bfloat16", 64, 8, 128, False),
            _variant("part", "bfloat16", 64, 8, 128, True),
            _variant("part", "bfloat16", 9, 3, 64, False),
            _variant("score", "bfloat16", 64, 8, 128),
            _variant("score", "float32", 9, 3, 64),
        ),
        **shared,
    )
    take = {"take": torch.ones(1, 1, 16)}
    sums = {"v_sum": torch.zeros(1, 1, 16, 48)}
    estimate = KernelSpec(
        name="centroid_estimate",
        make_inputs=estimate_inputs,
        reference=centroid_estimate_ref,
        implementations=both("centroid_score", "centroid_estimate"),
        outputs=state_outputs,
        comparisons=state_comparisons("v_sum"),
        bytes_moved=estimate_bytes,
        flops=estimate_flops,
        stability=Stability(
            "a state of each 256 clusters, merged ascending; without clusters the identity",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("q", "cent", "counts", "v_sum", "take"),
        ),
        invariances=(
            Invariance("no-poison", ("poison",), without_poison("cent", "v_sum"), Hazard.POISON),
            Invariance(
                "strides",
                ("strided",),
                lambda x: strided(x, ("q", "cent", "counts", "v_sum")),
                Hazard.STRIDED,
            ),
        ),
        refusals=(
            *_REFUSALS,
            _refusal("take-dtype", take, "want take bool"),
            _refusal("dv-48", sums, "power of two", "triton"),
        ),
        # 26 of 37 clusters are taken: centroid and sum of 64 floats each; 48 counts and marks; head; state.
        costs=(Cost("gqa1", 26 * 128 * 4 + 48 * 5 + 64 * 4 + 66 * 4, 2 * 26 * 128),),
        aot=(
            _variant("estimate", "bfloat16", 64, 8, 128),
            _variant("estimate", "bfloat16", 9, 3, 64),
            _variant("estimate", "float32", 9, 3, 64),
        ),
        **shared,
    )
    return score, estimate
