"""The registry entries of SparQ's score and alpha: inputs, hostile ones included, costs and compilations."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvtier_kernels.compare import Within, named
from kvtier_kernels.ops.scoring_cases import (
    TYPES,
    both,
    capacity,
    case,
    lens,
    lse_gate,
    queries,
    relative,
    standard_cases,
    without_poison,
)
from kvtier_kernels.ops.sparq_score.ref import sparq_alpha_ref, sparq_score_ref
from kvtier_kernels.ops.sparq_score.torch_impl import sparq_dims, sparq_score_torch
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
from kvtier_kernels.testing.inputs import one_of, reserved, strided

_R = 16
_FAR_STRIDE = 2**25
_MODULE = "kvtier_kernels.ops.sparq_score.triton_impl"
AXES = {
    "B": "requests",
    "Hq": "query heads",
    "Hk": "KV heads",
    "d": "head dim",
    "N": "rows that fit",
    "r": "channels read",
}


def _cases() -> tuple[Case, ...]:
    far = case("far-channels", (20,), Hazard.FAR, hq=2, hk=1, d=160, dtype="float16", more={"r": _R})
    uncovered = case("nothing-covered", (20,), "uncovered", hk=1, more={"r": _R})
    few = case("few-channels", (20,), hk=1, more={"r": 3})
    nan_row = case("nan-row", (140,), "nan-row", hk=1, more={"r": _R})
    return (*standard_cases(r=_R), far, uncovered, few, nan_row)


def score_inputs(c: Case) -> Inputs:
    """Channels are the largest of the group, except where a trait says otherwise."""
    g = torch.Generator().manual_seed(c.seed)
    hk, d, r = c.axes["Hk"], c.axes["d"], c.axes["r"]
    q, n = queries(c, g), capacity(c)
    k = torch.randn(len(c.seq_lens), hk, d, n, generator=g).to(q.dtype)
    if Hazard.DUPLICATE in c.traits:
        k[:] = k[..., :1]
    dims = sparq_dims(q, hk, r)
    if "uncovered" in c.traits:
        dims[:] = torch.arange(r, dtype=torch.int32)
        q[:, 0, :r] = 0
    if Hazard.PADDED in c.traits:
        dims[:, :, -3:] = -1
        k[:, :, 0] = math.nan
        dims[dims == 0] = -1
    if Hazard.POISON in c.traits:
        for b, length in enumerate(c.seq_lens):
            k[b, :, :, length:] = math.nan
        unread = torch.ones(d, dtype=torch.bool)
        unread[dims.long().flatten()] = False
        k[:, :, unread] = math.inf
    if "nan-row" in c.traits:
        k[..., 3] = math.nan
    if Hazard.FAR in c.traits:
        k, dims = _far(k[:, :, :r]), (torch.arange(r, dtype=torch.int32) + 128).expand(1, 1, r)
    return {"q": q, "k_t": k, "dims": dims, "seq_lens": lens(c), "scale": 1 / math.sqrt(d)}


def _far(rows: torch.Tensor) -> torch.Tensor:
    """Channels 128 and up lie past 2^32 elements; int32 wraps them to the first ones, which are 1."""
    _, _, r, n = rows.shape
    view = reserved(160 * _FAR_STRIDE, rows.dtype).as_strided((1, 1, 160, n), (0, 0, _FAR_STRIDE, 1))
    view[:, :, :r] = 1
    view[:, :, 128 : 128 + r] = rows
    return view


def alpha_inputs(c: Case) -> Inputs:
    """Every third row is selected, or of many rows some 128; with padding first, and ids that repeat, where a
    trait says so."""
    x = score_inputs(c)
    lse = sparq_score_torch(**x).lse
    del x["seq_lens"]
    ids: list[int] = []
    indptr = [0]
    for length in c.seq_lens:
        for _ in range(c.axes["Hk"]):
            chosen = list(range(0, length, max(3, length // 128)))
            if Hazard.DUPLICATE in c.traits:
                chosen = sorted(2 * chosen)
            if Hazard.PADDED in c.traits:
                chosen = [-1, -1, *chosen, -1, -1]
            ids += chosen
            indptr.append(len(ids))
    return x | {
        "lse": lse,
        "indptr": torch.tensor(indptr, dtype=torch.int32),
        "ids": torch.tensor(ids, dtype=torch.int32),
    }


def score_bytes(x: Inputs) -> int:
    """r channels of every row, the queries, float32 scores and lse."""
    q, k = x["q"], x["k_t"]
    rows, hk, r = int(x["seq_lens"].sum()), k.shape[1], x["dims"].shape[2]
    return int(
        rows * hk * (r * k.element_size() + 4) + q.numel() * q.element_size() + 4 * q.shape[:2].numel()
    )


def score_flops(x: Inputs) -> int:
    return int(2 * x["seq_lens"].sum() * x["q"].shape[1] * x["dims"].shape[2])


def alpha_bytes(x: Inputs) -> int:
    """r channels and the id of every selected row, the queries, lse in and alpha out."""
    q, r = x["q"], x["dims"].shape[2]
    return int(
        x["ids"].numel() * (r * x["k_t"].element_size() + 4)
        + q.numel() * q.element_size()
        + 8 * q.shape[:2].numel()
    )


def alpha_flops(x: Inputs) -> int:
    group = x["q"].shape[1] // x["k_t"].shape[1]
    return int(2 * x["ids"].numel() * group * x["dims"].shape[2])


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "single", change, match, backends or ("torch", "triton"))


_REFUSALS = (
    _refusal("heads", {"q": torch.zeros(1, 4, 32)}, "disagree"),
    _refusal("channel-past-the-head-dim", {"dims": torch.full((1, 1, 4), 64, dtype=torch.int32)}, "below"),
    _refusal("dtype-of-dims", {"dims": torch.zeros(1, 1, 4, dtype=torch.int64)}, "int32"),
    _refusal("odd-stride", {"k_t": torch.zeros(1, 1, 64, 17)[..., :16]}, "multiples of 16", "triton"),
)


def _signature(dtype: str, *middle: str) -> dict[str, str]:
    t = TYPES[dtype]
    out = {"q_ptr": f"*{t}", "k_ptr": f"*{t}", "dims_ptr": "*i32"}
    for name in middle:
        out[name] = "*i32" if name in ("lens_ptr", "indptr_ptr", "ids_ptr") else "*fp32"
    return out | {"scale": "fp32"}


def _variant(kernel: str, dtype: str, hq: int, hk: int, d: int, r: int) -> AotVariant:
    if kernel == "score_kernel":
        signature = _signature(dtype, "lens_ptr", "score_ptr", "m_ptr", "l_ptr") | {"capacity": "i32"}
        block = 128
    else:
        signature = _signature(dtype, "lse_ptr", "indptr_ptr", "ids_ptr", "alpha_ptr")
        block = 64
    signature |= {f"stride_{s}": "i32" for s in ("qb", "qh", "kb", "kh", "kd")}
    constants = {"HK": hk, "G": hq // hk, "D": d, "BD": d, "R": r, "BR": r, "BM": 16, "BN": block}
    aligned = frozenset(signature) - {"scale"}
    name = f"{TYPES[dtype]}-g{hq // hk}-d{d}-r{r}"
    return AotVariant(name, kernel, signature, constants, aligned, 4, 3)


def _aot(kernel: str) -> tuple[AotVariant, ...]:
    return (
        _variant(kernel, "bfloat16", 64, 8, 128, 32),
        _variant(kernel, "bfloat16", 9, 3, 64, 16),
        _variant(kernel, "float32", 9, 3, 64, 16),
    )


def _bench(dtype: str, *lengths: int, hq: int, hk: int, d: int, r: int) -> tuple[Case, ...]:
    return tuple(
        case(f"g{hq // hk}-d{d}-{n}", (n,), hq=hq, hk=hk, d=d, dtype=dtype, more={"r": r}) for n in lengths
    )


def specs() -> tuple[KernelSpec, ...]:
    """SparQ's score, and its alpha."""
    shared: dict[str, Any] = {
        "axes": AXES,
        "dtypes": ("float32", "float16", "bfloat16"),
        "cases": _cases(),
        "bench": _bench("float32", 2048, 8192, hq=9, hk=3, d=64, r=16),
        "bench_gpu": _bench("bfloat16", 32768, 131072, hq=64, hk=8, d=128, r=32),
        "aot_module": _MODULE,
    }
    poison = Invariance("no-poison", ("poison",), without_poison("k_t"), Hazard.POISON)
    strides = Invariance("strides", ("strided",), lambda x: strided(x, ("q", "k_t", "dims")), Hazard.STRIDED)
    score = KernelSpec(
        name="sparq_score",
        make_inputs=score_inputs,
        reference=sparq_score_ref,
        implementations=both("sparq_score", "sparq_score"),
        outputs=named,
        comparisons={"score": relative(1e-5), "lse": lse_gate()},
        bytes_moved=score_bytes,
        flops=score_flops,
        stability=Stability(
            "128 rows a program; lse joins 128 lanes of blocks, an empty one adds 0",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("q", "k_t", "dims", "seq_lens"),
        ),
        aot=_aot("score_kernel"),
        invariances=(poison, strides),
        refusals=(
            *_REFUSALS,
            _refusal("gqa17", {"q": torch.zeros(1, 17, 64)}, "share a KV head", "triton"),
            _refusal("past-the-capacity", {"seq_lens": torch.tensor([17], dtype=torch.int32)}, r"\[0, 16\]"),
        ),
        # 37 rows of 16 channels in float32 and their scores; one head of 64 channels; one lse.
        costs=(Cost("gqa1", 37 * (16 * 4 + 4) + 64 * 4 + 4, 2 * 37 * 16),),
        **shared,
    )
    alpha = KernelSpec(
        name="sparq_alpha",
        make_inputs=alpha_inputs,
        reference=sparq_alpha_ref,
        implementations=both("sparq_score", "sparq_alpha"),
        outputs=named,
        # A logit is rounded in proportion to its size, and so is its exponential.
        comparisons={
            "out": Within(lambda x, want: 2e-5 + 5e-7 * x["lse"].abs().nan_to_num(posinf=0, neginf=0))
        },
        bytes_moved=alpha_bytes,
        flops=alpha_flops,
        stability=Stability(
            "one program a request and KV head, over its own list in tiles of 64",
            "strides choose addresses only",
        ),
        aot=_aot("alpha_kernel"),
        invariances=(poison, strides),
        refusals=(
            *_REFUSALS,
            _refusal("segments", {"indptr": torch.zeros(1, dtype=torch.int32)}, "want indptr"),
        ),
        # 13 of 37 rows, every third, of 16 channels; their ids; one head; lse in, alpha out.
        costs=(Cost("gqa1", 13 * (16 * 4 + 4) + 64 * 4 + 8, 2 * 13 * 16),),
        **shared,
    )
    return score, alpha
