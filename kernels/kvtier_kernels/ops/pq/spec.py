"""The registry entries of product-quantised scores: inputs, hostile ones included, costs and compilations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Within, named
from kvtier_kernels.ops.pq.ref import pq_lut_ref, pq_score_ref
from kvtier_kernels.ops.scoring_cases import (
    TYPES,
    bench_cases,
    both,
    capacity,
    case,
    far_case,
    far_requests,
    lens,
    lse_gate,
    queries,
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

_MODULE = "kvtier_kernels.ops.pq.triton_impl"
AXES = {
    "B": "requests",
    "Hq": "query heads",
    "Hk": "KV heads",
    "d": "head dim",
    "m": "parts of a key",
    "C": "entries of a codebook",
    "N": "rows that fit",
}


def _cases() -> tuple[Case, ...]:
    return (
        *standard_cases(m=2, C=64),
        far_case("float16", m=2, C=16),
        case("one-part", (20,), hk=1, more={"m": 1, "C": 16}),
        case("many-parts-whole-bytes", (40,), hk=1, more={"m": 16, "C": 256}),
        case("odd-sizes", (40,), hk=1, d=96, more={"m": 4, "C": 50}),
    )


def lut_inputs(c: Case) -> Inputs:
    """A codebook each."""
    g = torch.Generator().manual_seed(c.seed)
    d, m, entries = c.axes["d"], c.axes["m"], c.axes["C"]
    q = queries(c, g)
    cent = torch.randn(q.shape[0], c.axes["Hk"], m, entries, d // m, generator=g).to(q.dtype)
    if Hazard.DUPLICATE in c.traits:
        cent[:] = cent[:, :, :, :1]
    if Hazard.FAR in c.traits:
        cent = far_requests(cent)
    return {"q": q, "cent": cent}


def score_inputs(c: Case) -> Inputs:
    """Codes past the codebook lie behind every request's last row."""
    g = torch.Generator().manual_seed(c.seed)
    group, m, entries = c.axes["Hq"] // c.axes["Hk"], c.axes["m"], c.axes["C"]
    lut = torch.randn(len(c.seq_lens), c.axes["Hk"], m, group, entries, generator=g) * 8
    if "huge" in c.traits:
        lut *= 100
    if "zero-query" in c.traits:
        lut[:, :, :, 0] = 0
    shape = (len(c.seq_lens), c.axes["Hk"], m, capacity(c))
    codes = torch.randint(0, entries, shape, generator=g, dtype=torch.uint8)
    if Hazard.DUPLICATE in c.traits:
        codes[:] = codes[..., :1]
    for b, length in enumerate(c.seq_lens):
        codes[b, ..., length:] = 255
    if Hazard.FAR in c.traits:
        codes = far_requests(codes)
    return {"lut": lut, "codes": codes, "seq_lens": lens(c), "scale": 1 / math.sqrt(c.axes["d"])}


def lut_bytes(x: Inputs) -> int:
    """Codebooks and queries in, float32 tables out."""
    q, cent = x["q"], x["cent"]
    tables = cent.shape[:4].numel() * (q.shape[1] // cent.shape[1])
    return int(cent.numel() * cent.element_size() + q.numel() * q.element_size() + 4 * tables)


def lut_flops(x: Inputs) -> int:
    return int(2 * x["cent"].numel() * (x["q"].shape[1] // x["cent"].shape[1]))


def score_bytes(x: Inputs) -> int:
    """Codes of every row once, tables, float32 scores and lse. (The GPU reads the codes twice.)"""
    batch, hk, m, group, _ = x["lut"].shape
    return int(int(x["seq_lens"].sum()) * hk * (m + 4) + 4 * x["lut"].numel() + 4 * batch * hk * group)


def score_flops(x: Inputs) -> int:
    """One addition per query head, row and part."""
    _, hk, m, group, _ = x["lut"].shape
    return int(x["seq_lens"].sum()) * int(hk * m * group)


def _share(x: Mapping[str, Any], want: Tensor) -> float:
    """A logit is rounded in proportion to its size, and so is its exponential."""
    largest = float(x["lut"].abs().max()) * float(x["scale"])
    return 2e-5 + 1e-6 * largest * int(x["lut"].shape[2])


def _new_padding(x: Inputs) -> Inputs:
    codes = x["codes"]
    for b, n in enumerate(x["seq_lens"].tolist()):
        codes[b, ..., n:] = 0
    return x


def _lut_variant(dtype: str, hq: int, hk: int, d: int, m: int, c: int) -> AotVariant:
    t = TYPES[dtype]
    signature = {"q_ptr": f"*{t}", "cent_ptr": f"*{t}", "lut_ptr": "*fp32"}
    signature |= {f"stride_{s}": "i32" for s in ("qb", "qh", "cb", "ch", "cm", "cc")}
    constants = {"HK": hk, "G": hq // hk, "M": m, "C": c, "W": d // m, "BW": d // m, "BM": 16, "BC": 64}
    name = f"{t}-g{hq // hk}-d{d}-m{m}-c{c}"
    return AotVariant(name, "lut_kernel", signature, constants, frozenset(signature), 4, 3)


def _score_variants(hq: int, hk: int, m: int, c: int) -> tuple[AotVariant, ...]:
    group = hq // hk
    constants = {"HK": hk, "G": group, "M": m, "C": c, "BG": 1 << (group - 1).bit_length(), "BN": 256}
    head = {"lut_ptr": "*fp32", "codes_ptr": "*u8", "lens_ptr": "*i32"}
    steps = {f"stride_{s}": "i32" for s in ("b", "h", "m")}
    part = head | {"m_ptr": "*fp32", "l_ptr": "*fp32", "scale": "fp32"} | steps
    score = head | {"lse_ptr": "*fp32", "score_ptr": "*fp32", "scale": "fp32", "capacity": "i32"} | steps
    name = f"g{group}-m{m}-c{c}"
    return tuple(
        AotVariant(f"{kind}-{name}", f"{kind}_kernel", s, constants, frozenset(s) - {"scale"}, 4, 3)
        for kind, s in (("part", part), ("score", score))
    )


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "single", change, match, backends or ("torch", "triton"))


def _lut_spec() -> KernelSpec:
    no_rows = "a table has an entry for each code, whatever rows there are"
    return KernelSpec(
        name="pq_lut",
        axes=AXES,
        dtypes=("float32", "float16", "bfloat16"),
        cases=tuple(c for c in _cases() if not {Hazard.POISON, Hazard.PADDED} & c.traits),
        make_inputs=lut_inputs,
        reference=pq_lut_ref,
        implementations=both("pq", "pq_lut"),
        outputs=named,
        comparisons={"out": relative(1e-6)},
        bytes_moved=lut_bytes,
        flops=lut_flops,
        stability=Stability(
            "one product of all channels of a part an entry",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("q", "cent"),
        ),
        invariances=(
            Invariance("strides", ("strided",), lambda x: strided(x, ("q", "cent")), Hazard.STRIDED),
        ),
        refusals=(
            _refusal("parts", {"cent": torch.zeros(1, 1, 3, 4, 21)}, "PQ_GEOMETRY"),
            _refusal("wide-code", {"cent": torch.zeros(1, 1, 2, 257, 32)}, "one byte"),
            _refusal("gqa17", {"q": torch.zeros(1, 17, 64)}, "share a KV head", "triton"),
        ),
        # 64 entries of 2 parts of 32 channels in float32; one head of 64; 2 x 64 products.
        costs=(Cost("gqa1", 2 * 64 * 32 * 4 + 64 * 4 + 2 * 64 * 4, 2 * 2 * 64 * 32),),
        exempt={Hazard.POISON: no_rows, Hazard.PADDED: no_rows},
        bench=bench_cases("float32", 2048, hq=9, hk=3, d=64, m=2, C=64),
        bench_gpu=bench_cases("bfloat16", 131072, hq=64, hk=8, d=128, m=2, C=64),
        aot_module=_MODULE,
        aot=(
            _lut_variant("bfloat16", 64, 8, 128, 2, 64),
            _lut_variant("bfloat16", 9, 3, 64, 4, 256),
            _lut_variant("float32", 9, 3, 64, 2, 64),
        ),
    )


def _score_spec() -> KernelSpec:
    return KernelSpec(
        name="pq_score",
        axes=AXES,
        dtypes=("float32",),
        cases=(
            *(c for c in _cases() if c.dtype == "float32"),
            far_case("float32", m=2, C=16),
        ),
        make_inputs=score_inputs,
        reference=pq_score_ref,
        implementations=both("pq", "pq_score"),
        outputs=named,
        comparisons={"score": Within(_share), "lse": lse_gate()},
        bytes_moved=score_bytes,
        flops=score_flops,
        stability=Stability(
            "256 rows a program; lse joins 128 lanes of blocks, an empty one adds 0",
            "strides choose addresses only",
            requests="ragged",
            alone=one_of("lut", "codes", "seq_lens"),
        ),
        invariances=(
            Invariance("codes-behind-the-last-row", ("ragged", "poison"), _new_padding, Hazard.PADDED),
            Invariance("strides", ("strided",), lambda x: strided(x, ("codes",)), Hazard.STRIDED),
        ),
        refusals=(
            _refusal("code-dtype", {"codes": torch.zeros(1, 1, 2, 16, dtype=torch.int32)}, "uint8"),
            _refusal(
                "code-past-the-codebook",
                {"codes": torch.full((1, 1, 2, 16), 64, dtype=torch.uint8)},
                "PQ_GEOMETRY",
                "torch",
            ),
            _refusal(
                "odd-stride",
                {"codes": torch.zeros(1, 1, 2, 17, dtype=torch.uint8)[..., :16]},
                "multiples of 16",
                "triton",
            ),
            _refusal("past-the-capacity", {"seq_lens": torch.tensor([17], dtype=torch.int32)}, r"\[0, 16\]"),
        ),
        # 37 rows of 2 bytes and a float32 score; a table of 2 x 64; one lse.
        costs=(Cost("gqa1", 37 * (2 + 4) + 2 * 64 * 4 + 4, 37 * 2),),
        exempt={Hazard.BF16: "a table is float32, a code a byte"},
        bench=bench_cases("float32", 2048, 8192, hq=9, hk=3, d=64, m=2, C=64),
        bench_gpu=bench_cases("float32", 32768, 131072, hq=64, hk=8, d=128, m=2, C=64),
        aot_module=_MODULE,
        aot=(*_score_variants(64, 8, 2, 64), *_score_variants(9, 3, 16, 256)),
    )


def specs() -> tuple[KernelSpec, ...]:
    """The tables, and the scores made of them."""
    return _lut_spec(), _score_spec()
