"""The registry entries of LSH hashing and collisions: inputs, costs and compilations."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvtier_kernels.compare import Exact, Within, named
from kvtier_kernels.ops.lsh.ref import lsh_collide_ref, lsh_hash_ref
from kvtier_kernels.ops.lsh.torch_impl import TAIL_TERMS, lsh_collide_torch, lsh_hash_torch, lsh_tables
from kvtier_kernels.ops.scoring_cases import (
    TYPES,
    bench_cases,
    both,
    capacity,
    case,
    far_case,
    far_requests,
    lens,
    queries,
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

_MODULE = "kvtier_kernels.ops.lsh.triton_impl"
_SIZES = {"L": 4, "K": 2, "h": 2, "cap": 48}
AXES = {
    "B": "requests",
    "Hq": "query heads",
    "Hk": "KV heads",
    "d": "head dim",
    "N": "rows that fit",
    "L": "tables",
    "K": "bits of a code",
    "h": "tables that must agree",
    "cap": "rows a list holds",
}


def _more(**other: int) -> dict[str, int]:
    return _SIZES | other


def _cases() -> tuple[Case, ...]:
    return (
        *standard_cases(**_SIZES),
        far_case("float16", **_more(cap=16)),
        case("d96", (20,), hk=1, d=96, more=_SIZES),
        case("sixteen-bits", (20,), hq=2, hk=1, more=_more(K=16, L=3, h=1)),
    )


def hash_inputs(c: Case) -> Inputs:
    """Small multiples of 1/8, so that every product is exact in float32 and no order of summing can turn a
    side; many products are exactly 0."""
    g = torch.Generator().manual_seed(c.seed)
    d, rows = c.axes["d"], -(-sum(c.seq_lens) // 8)
    far = Hazard.FAR in c.traits
    x = torch.randint(-8, 9, (3 if far else rows, 1 if far else c.axes["Hq"], d), generator=g) / 4
    if Hazard.DUPLICATE in c.traits:
        x[:] = x[:1]
    if "zero-query" in c.traits:
        x[:, 0] = 0
    x = x.to(getattr(torch, c.dtype))
    planes = torch.randint(-8, 9, (d, c.axes["L"] * c.axes["K"]), generator=g) / 8
    return {"x": far_requests(x) if far else x, "planes": planes, "bits": c.axes["K"]}


def collide_inputs(c: Case) -> Inputs:
    """Keys and their tables; behind a request's last row lies a key in no bucket."""
    g = torch.Generator().manual_seed(c.seed)
    bits, tables, hk = c.axes["K"], c.axes["L"], c.axes["Hk"]
    q, n = queries(c, g), capacity(c)
    keys = torch.randn(q.shape[0], hk, n, c.axes["d"], generator=g).to(q.dtype)
    if Hazard.DUPLICATE in c.traits:
        keys[:] = keys[:, :, :1]
    own = q[:, :: c.axes["Hq"] // hk, None]  # the first query head of each KV head
    if "close" in c.traits:
        keys = keys * 0.7 + own
    if "same" in c.traits:
        keys[:] = own * 0.25
    if "near" in c.traits:
        keys[:, :, ::4] = own * 0.25
        keys[:, :, 1::4] = -own
        keys[:, :, 2::4] = 0
    planes = torch.randn(c.axes["d"], tables * bits, generator=g)
    codes = lsh_hash_torch(keys, planes, bits=bits)
    starts, ends, content = lsh_tables(codes, lens(c), bits=bits)
    if Hazard.PADDED in c.traits:
        ends[..., -1] = n
    if Hazard.POISON in c.traits:
        content[content < 0] = 2**30
        for b, length in enumerate(c.seq_lens):
            keys[b, :, length:] = math.nan
    if Hazard.FAR in c.traits:
        keys = far_requests(keys)
    return {
        "q": q,
        "q_codes": lsh_hash_torch(q, planes, bits=bits),
        "keys": keys,
        "starts": starts,
        "ends": ends,
        "content": content,
        "min_hits": c.axes["h"],
        "cap": c.axes["cap"],
    }


def hash_bytes(x: Inputs) -> int:
    """Vectors and planes in, two bytes a code out."""
    rows = x["x"].shape[:-1].numel()
    codes = rows * (x["planes"].shape[1] // x["bits"])
    return int(x["x"].numel() * x["x"].element_size() + 4 * x["planes"].numel() + 2 * codes)


def hash_flops(x: Inputs) -> int:
    return int(2 * x["x"].shape[:-1].numel() * x["planes"].numel())


def _entries(x: Inputs) -> tuple[int, int]:
    """(entries of the buckets that are looked into, rows that are found and kept)."""
    bucket = x["q_codes"].long().unsqueeze(-1)
    of = torch.arange(x["q"].shape[1]) * x["keys"].shape[1] // x["q"].shape[1]
    size = x["ends"][:, of].gather(3, bucket) - x["starts"][:, of].gather(3, bucket)
    return int(size.sum()), int(lsh_collide_torch(**x).indptr[-1])


def collide_bytes(x: Inputs) -> int:
    """Codes and edges of a head's buckets, their entries; key, id and probability of what is found."""
    looked, kept = _entries(x)
    keys = x["keys"]
    lists = x["q_codes"].numel()
    return int(10 * lists + 4 * looked + kept * (keys.shape[3] * keys.element_size() + 8))


def collide_flops(x: Inputs) -> int:
    """An addition an entry, and the two distances of what is found."""
    looked, kept = _entries(x)
    return int(looked + 6 * kept * x["keys"].shape[3])


def _hash_variant(dtype: str, d: int, bits: int, tables: int) -> AotVariant:
    t = TYPES[dtype]
    signature = {"x_ptr": f"*{t}", "planes_ptr": "*fp32", "codes_ptr": "*u16", "rows": "i32"}
    signature |= {"stride_x": "i32", "stride_p": "i32"}
    constants = {"L": tables, "K": bits, "D": d, "BD": d, "BM": 32, "BT": 8}
    aligned = frozenset(signature) - {"rows", "stride_p"}
    return AotVariant(f"{t}-d{d}-k{bits}-l{tables}", "hash_kernel", signature, constants, aligned, 4, 3)


def _collide_variants(dtype: str, hq: int, hk: int, d: int, bits: int, tables: int) -> tuple[AotVariant, ...]:
    ints = ("code", "starts", "ends", "content", "hits", "counts", "total", "indptr", "ids")
    types = {f"{n}_ptr": "*i32" for n in ints} | {"code_ptr": "*u16", "log_p_ptr": "*fp32"}
    types |= {
        "q_ptr": f"*{TYPES[dtype]}",
        "keys_ptr": f"*{TYPES[dtype]}",
        "log_choose": "fp32",
        "log_below": "fp32",
    }
    group = hq // hk

    def variant(kernel: str, names: tuple[str, ...], constants: dict[str, Any], warps: int) -> AotVariant:
        signature = {n: types.get(n, "i32") for n in names}
        aligned = frozenset(n for n in names if n.endswith("_ptr") or n.startswith("stride_"))
        name = f"{kernel}-{TYPES[dtype]}-g{group}-d{d}" if kernel == "log_p" else kernel
        return AotVariant(name, f"{kernel}_kernel", signature, constants, aligned, warps, 3)

    steps = tuple(f"stride_{s}" for s in ("qb", "qh", "kb", "kh", "kn"))
    log_p = {
        "HQ": hq,
        "G": group,
        "K": bits,
        "L": tables,
        "H": 2,
        "D": d,
        "BD": d,
        "BN": 32,
        "TERMS": TAIL_TERMS,
    }
    buckets = {"G": group, "L": tables, "BUCKETS": 1 << bits, "BN": 128}
    return (
        variant(
            "hits",
            ("code_ptr", "starts_ptr", "ends_ptr", "content_ptr", "hits_ptr", "n", "width"),
            buckets,
            1,
        ),
        variant("count", ("hits_ptr", "counts_ptr", "n", "min_hits"), {"BN": 512}, 4),
        variant(
            "indptr", ("counts_ptr", "total_ptr", "indptr_ptr", "lists", "blocks", "cap"), {"BN": 256}, 4
        ),
        variant(
            "compact",
            ("hits_ptr", "counts_ptr", "indptr_ptr", "ids_ptr", "n", "min_hits", "cap"),
            {"BN": 512, "BB": 256},
            4,
        ),
        variant(
            "log_p",
            ("q_ptr", "keys_ptr", "indptr_ptr", "ids_ptr", "log_p_ptr", "log_choose", "log_below", *steps),
            log_p,
            4,
        ),
    )


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "single", change, match, backends or ("torch", "triton"))


def _hash_spec() -> KernelSpec:
    whole = "every vector it is given is hashed: it has neither lengths nor ids"
    apart = {Hazard.POISON, Hazard.PADDED, Hazard.RAGGED}
    return KernelSpec(
        name="lsh_hash",
        axes=AXES,
        dtypes=("float32", "float16", "bfloat16"),
        cases=tuple(c for c in _cases() if not apart & c.traits),
        make_inputs=hash_inputs,
        reference=lsh_hash_ref,
        implementations=both("lsh", "lsh_hash"),
        outputs=named,
        comparisons={"out": Exact()},
        bytes_moved=hash_bytes,
        flops=hash_flops,
        stability=Stability(
            "one product of all channels a side",
            "strides choose addresses only",
            requests="strided",
            alone=one_of("x"),
        ),
        invariances=(
            Invariance("strides", ("strided",), lambda x: strided(x, ("x", "planes")), Hazard.STRIDED),
        ),
        refusals=(
            _refusal("bits", {"bits": 17}, "at most 16"),
            _refusal("part-of-a-code", {"bits": 5}, "whole codes"),
            _refusal("planes-dtype", {"planes": torch.zeros(64, 8).half()}, "planes float32"),
            _refusal("odd-stride", {"x": torch.zeros(2, 1, 65)[..., :64]}, "multiples of 16", "triton"),
        ),
        # 5 vectors of 64 floats, 8 planes, 4 codes of two bytes each.
        costs=(Cost("gqa1", 5 * 64 * 4 + 64 * 8 * 4 + 5 * 4 * 2, 2 * 5 * 64 * 8),),
        exempt=dict.fromkeys(apart, whole),
        bench=bench_cases("float32", 2048, hq=3, hk=3, d=64, **_more(L=150, K=10)),
        bench_gpu=bench_cases("bfloat16", 32768, hq=8, hk=8, d=128, **_more(L=150, K=10)),
        aot_module=_MODULE,
        aot=(
            _hash_variant("bfloat16", 128, 10, 150),
            _hash_variant("bfloat16", 64, 8, 75),
            _hash_variant("float32", 64, 8, 75),
        ),
    )


def _no_poison(x: Inputs) -> Inputs:
    return x | {
        "keys": torch.nan_to_num(x["keys"], 0.0),
        "content": x["content"].masked_fill(x["content"] == 2**30, 0),
    }


def _only_keys(x: Inputs) -> Inputs:
    """Padding of a bucket is left out of it."""
    last = x["content"].gather(3, (x["ends"][..., -1:] - 1).clamp_min(0).long())
    assert bool((last < 0).any())
    x["ends"][..., -1] = (x["content"] >= 0).sum(-1).to(torch.int32)
    return x


def _collide_spec() -> KernelSpec:
    return KernelSpec(
        name="lsh_collide",
        axes=AXES,
        dtypes=("float32", "float16", "bfloat16"),
        cases=(
            *(c for c in _cases() if c.id not in ("huge-logits", "zero-query", "d128-gqa3")),
            case("same", (20,), "same", hq=1, hk=1, more=_SIZES),
            case("capped", (100, 60), hq=2, hk=1, more=_more(cap=5)),
            case("near-opposite-and-zero", (40,), "near", "zero-query", more=_more(cap=40)),
            case("two-blocks", (900,), hq=1, hk=1, more=_more(K=6, h=1, cap=80)),
            case("close", (20,), "close", hq=1, hk=1, more=_more(L=60, cap=20)),
            case("one-hit", (60,), hk=1, more=_more(h=1)),
            case("five-hits", (60,), hq=2, hk=1, more=_more(h=5, L=12)),
            case("all-tables", (60,), hk=1, more=_more(h=4, L=4, K=1)),
            case("all-of-sixteen", (30,), "near", hq=2, hk=1, more=_more(h=16, L=16, K=1)),
            case("many-tables", (40,), "near", hq=1, hk=1, more=_more(L=60, K=8, cap=40)),
        ),
        make_inputs=collide_inputs,
        reference=lsh_collide_ref,
        implementations=both("lsh", "lsh_collide"),
        outputs=named,
        comparisons={
            "indptr": Exact(),
            "ids": Exact(),
            "total": Exact(),
            "log_p": Within(lambda x, want: 5e-5 * (1 + want.abs())),
        },
        bytes_moved=collide_bytes,
        flops=collide_flops,
        stability=Stability(
            "counts; log_p of a row is of that row alone",
            "strides choose addresses only",
        ),
        invariances=(
            Invariance("no-poison", ("poison",), _no_poison, Hazard.POISON),
            Invariance("padding", ("padded",), _only_keys, Hazard.PADDED),
            Invariance("strides", ("strided",), lambda x: strided(x, ("q", "keys")), Hazard.STRIDED),
        ),
        refusals=(
            _refusal("more-hits-than-tables", {"min_hits": 5}, "COLLISION_RULE"),
            _refusal("no-hit", {"min_hits": 0}, "COLLISION_RULE"),
            _refusal("no-room", {"cap": 0}, "at most 0"),
            _refusal("code-dtype", {"q_codes": torch.zeros(1, 4, 4)}, "want q_codes uint16"),
            _refusal("edges", {"starts": torch.zeros(1, 1, 4, 7, dtype=torch.int32)}, "want starts"),
        ),
        # All 20 rows in each of 4 buckets, and so found: 4 codes and edges, 80 entries, 20 keys of 64.
        costs=(Cost("same", 4 * 10 + 80 * 4 + 20 * (64 * 4 + 8), 80 + 6 * 20 * 64),),
        bench=bench_cases("float32", 2048, hq=9, hk=3, d=64, **_more(L=75, K=8, cap=512)),
        bench_gpu=bench_cases("bfloat16", 32768, hq=64, hk=8, d=128, **_more(L=150, K=10, cap=4096)),
        aot_module=_MODULE,
        aot=_collide_variants("bfloat16", 64, 8, 128, 10, 150),
    )


def specs() -> tuple[KernelSpec, ...]:
    """Hashing, and collisions."""
    return _hash_spec(), _collide_spec()
