"""The registry's entry of segment decode: inputs, hostile ones included, costs and compilations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import state_comparisons, state_outputs
from kvtier_kernels.ops.segment_decode.ref import segment_decode_ref
from kvtier_kernels.ops.segment_decode.torch_impl import segment_decode_torch
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
from kvtier_kernels.testing.inputs import far_rows, one_of, strided, wrapping_ids

_PAGE = 16
_FAR_STRIDE = 2**20
_THETA = 1e4

# Segments of a request: (first, end, delta).
Segments = tuple[tuple[int, int, int], ...]
_SEGMENTS: dict[str, Segments] = {
    "none": (),
    "one": ((0, 1, -5),),
    "still": ((0, 300, 0),),
    "gap": ((0, 50, 0), (83, 140, -33)),
    "three": ((3, 61, 0), (64, 129, -3), (200, 270, -74)),
    "far-apart": ((0, 20, 0), (20, 90, -1_000_000)),
    "forward": ((0, 40, 7), (40, 41, 0), (41, 60, 3)),
}


def _case(
    id: str,
    segments: tuple[str, ...],
    *traits: str,
    hq: int = 6,
    hk: int = 2,
    d: int = 64,
    r: int | None = None,
    dtype: str = "float32",
) -> Case:
    """traits: one "b:NAME" per request, of _SEGMENTS; "interleaved" for pairs (2i, 2i+1)."""
    axes = {"Hq": hq, "Hk": hk, "d": d, "P": _PAGE, "r": d if r is None else r}
    tokens = tuple(_SEGMENTS[s][-1][1] if _SEGMENTS[s] else 0 for s in segments)
    named = frozenset(traits) | {f"{b}:{s}" for b, s in enumerate(segments)}
    return Case(id, axes, tokens, dtype, named, seed=len(id) + sum(tokens) + d)


def _cases() -> tuple[Case, ...]:
    cases = [
        _case("empty", ("none", "none"), Hazard.EMPTY),
        _case("one-token", ("one",), Hazard.SINGLE),
        _case("delta-0", ("still",), hq=3, hk=1),
        _case("neox", ("gap",)),
        _case("interleaved", ("gap",), "interleaved"),
        _case("ragged", ("three", "none", "gap"), Hazard.RAGGED, hq=2, hk=1),
        _case("partial-neox", ("gap",), r=32),
        _case("partial-interleaved", ("forward",), "interleaved", r=24),
        _case("no-rotary", ("gap",), r=0, hq=2, hk=1),
        _case("a-million-back", ("far-apart",)),
        _case("poison", ("three", "gap"), Hazard.POISON, hq=2, hk=1),
        _case("strided", ("gap",), Hazard.STRIDED),
        _case("far-pages", ("gap",), Hazard.FAR, hq=2, hk=1, dtype="float16"),
        _case("bf16", ("gap",), dtype="bfloat16"),
        _case("bf16-interleaved", ("forward",), "interleaved", dtype="bfloat16"),
        _case("f16-d128", ("gap",), d=128, hq=2, hk=1, dtype="float16"),
        _case("d256", ("forward",), d=256, hq=2, hk=1),
    ]
    cases += [_case(f"gqa{g}", ("forward",), hq=g, hk=1) for g in (1, 2, 5, 7, 16)]
    return tuple(cases)


def make_inputs(case: Case) -> Inputs:
    """Inputs of a case from its seed. Pages are permuted; page 0 is never mapped. A bench case without
    named segments has two halves, the second moved back by a tenth of the first."""
    g = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    hq, hk, d, page, r = (case.axes[x] for x in ("Hq", "Hk", "d", "P", "r"))
    batch = len(case.seq_lens)
    width = max(1, *(-(-n // page) for n in case.seq_lens))
    total = batch * width + 1
    k = torch.randn(total, page, hk, d, generator=g).to(dtype)
    v = torch.randn(total, page, hk, d, generator=g).to(dtype)
    table = (torch.randperm(total - 1, generator=g) + 1).to(torch.int32).view(batch, width)
    segments = [_segments(case, b) for b in range(batch)]
    if Hazard.POISON in case.traits:
        _poison_gaps(segments, table, k, v)
    if Hazard.FAR in case.traits:
        ids = wrapping_ids(total, _FAR_STRIDE)
        k, v = far_rows(k, ids, stride=_FAR_STRIDE), far_rows(v, ids, stride=_FAR_STRIDE)
        table = ids[table.long()].int()
    flat = [s for own in segments for s in own]
    return {
        "q": (torch.randn(batch, hq, d, generator=g) * 2).to(dtype),
        "k_cache": k,
        "v_cache": v,
        "page_table": table,
        "seg_ptr": torch.tensor([0] + [len(own) for own in segments]).cumsum(0).int(),
        "seg_tok": torch.tensor([s[:2] for s in flat], dtype=torch.int32).view(-1, 2),
        "delta": torch.tensor([s[2] for s in flat], dtype=torch.int32),
        "inv_freq": (_THETA ** -(torch.arange(0, r, 2).double() / max(r, 1))).float(),
        "scale": 1 / math.sqrt(d),
        "interleaved": "interleaved" in case.traits,
    }


def _segments(case: Case, b: int) -> Segments:
    for name, segments in _SEGMENTS.items():
        if f"{b}:{name}" in case.traits:
            return segments
    n = case.seq_lens[b]
    return ((0, n // 2, 0), (n // 2, n, -(n // 20)))


def _poison_gaps(segments: list[Segments], table: Tensor, k: Tensor, v: Tensor) -> None:
    seen = torch.zeros(k.shape[:2], dtype=torch.bool)
    for b, own in enumerate(segments):
        for first, end, _ in own:
            for t in range(first, end):
                seen[int(table[b, t // _PAGE]), t % _PAGE] = True
    k[~seen], v[~seen] = torch.nan, torch.inf


def bytes_moved(inputs: Inputs) -> int:
    """K and V of every row of a segment once, q in, q rotated out and in, the state out."""
    q, k = inputs["q"], inputs["k_cache"]
    batch, hq, d = q.shape
    turned = 2 * inputs["delta"].numel() * hq * d * q.element_size()
    kv = 2 * _rows(inputs) * k.shape[2] * d * k.element_size()
    return int(kv + q.numel() * q.element_size() + turned + batch * hq * (d + 2) * 4)


def _rows(inputs: Inputs) -> int:
    return int(inputs["seg_tok"].long().diff(dim=1).sum())


def flops(inputs: Inputs) -> int:
    """4 d a query head and row, and 3 a rotary dimension, segment and query head."""
    hq, d = inputs["q"].shape[1:]
    turning = 6 * inputs["inv_freq"].numel() * inputs["delta"].numel() * hq
    return int(4 * _rows(inputs) * hq * d + turning)


def _cut(inputs: Inputs) -> Inputs:
    """Every segment in three: a cut a third in, and an empty part."""
    tokens, delta = inputs["seg_tok"], inputs["delta"]
    at = tokens[:, 0] + (tokens[:, 1] - tokens[:, 0]) // 3
    parts = torch.stack((tokens[:, 0], at, at, at, at, tokens[:, 1]), 1)
    return inputs | {
        "seg_tok": parts.view(-1, 2).contiguous(),
        "delta": delta.repeat_interleave(3),
        "seg_ptr": inputs["seg_ptr"] * 3,
    }


def _clean(inputs: Inputs) -> Inputs:
    return inputs | {n: torch.nan_to_num(inputs[n], 0.0, 0.0) for n in ("k_cache", "v_cache")}


def _straight_pages(inputs: Inputs) -> Inputs:
    order = inputs["page_table"].flatten().long()
    table = torch.arange(order.numel(), dtype=torch.int32).view_as(inputs["page_table"])
    return inputs | {n: inputs[n][order] for n in ("k_cache", "v_cache")} | {"page_table": table}


def _wider_table(inputs: Inputs) -> Inputs:
    """Ids behind the last segment name a page that holds nothing of the request."""
    return inputs | {"page_table": torch.nn.functional.pad(inputs["page_table"], (0, 9), value=0)}


def _alone(inputs: Inputs, at: int) -> Inputs:
    """Of one request, with its segments."""
    own = slice(int(inputs["seg_ptr"][at]), int(inputs["seg_ptr"][at + 1]))
    found = one_of("q", "page_table")(inputs, at)
    pointers = torch.tensor([0, own.stop - own.start], dtype=torch.int32)
    return found | {"seg_ptr": pointers, "seg_tok": inputs["seg_tok"][own], "delta": inputs["delta"][own]}


INVARIANCES = (
    Invariance("no-poison", ("poison",), _clean, Hazard.POISON),
    Invariance("where-a-segment-is-cut", ("neox", "ragged"), _cut),
    Invariance("where-pages-lie", ("ragged",), _straight_pages),
    Invariance("padding-of-the-table", ("poison",), _wider_table, Hazard.PADDED),
    Invariance("strides", ("strided",), lambda x: strided(x, ("q", "k_cache", "v_cache")), Hazard.STRIDED),
)


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


_BOTH = ("torch", "triton")


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "neox", change, match, backends or _BOTH)


REFUSALS = (
    _refusal("dtype", {"delta": torch.tensor([0, 1])}, "int32"),
    _refusal("overlap", {"seg_tok": _ids(0, 50, 49, 60).view(2, 2)}, "overlap"),
    _refusal("descending", {"seg_tok": _ids(50, 60, 0, 20).view(2, 2)}, "ascend"),
    _refusal("backwards", {"seg_tok": _ids(0, 50, 60, 55).view(2, 2)}, "end where"),
    _refusal("past-the-table", {"seg_tok": _ids(0, 50, 60, 145).view(2, 2)}, r"\[0, 144\]"),
    _refusal("pointers", {"seg_ptr": _ids(0, 1)}, "ascend from 0 to 2"),
    Refusal("pointers-that-wrap", "ragged", {"seg_ptr": _ids(0, 2 * 10**9, -2 * 10**9, 5)}, "ascend", _BOTH),
    _refusal("no-page-of-a-row", {"page_table": torch.full((1, 9), -1, dtype=torch.int32)}, r"\[0, 10\)"),
    _refusal("page-past-the-pool", {"page_table": torch.full((1, 9), 10, dtype=torch.int32)}, r"\[0, 10\)"),
    _refusal("rotary-dims", {"inv_freq": torch.ones(33)}, "r <= 64"),
    _refusal("split-inside-a-page", {"split_tokens": 24}, "whole pages"),
    _refusal("split", {"split_tokens": 32}, "multiple of 64", "triton"),
    _refusal("dtypes", {"q": torch.zeros(1, 6, 64).half()}, "one dtype", "triton"),
)


def _torch() -> Implementation:
    return segment_decode_torch


def _triton() -> Implementation:
    from kvtier_kernels.ops.segment_decode.triton_impl import segment_decode_triton

    return segment_decode_triton


_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _decode_variant(id: str, dtype: str, hq: int, hk: int, d: int) -> AotVariant:
    signature = {f"{x}_ptr": f"*{_TYPES[dtype]}" for x in "qkv"}
    signature |= dict.fromkeys(("table_ptr", "seg_ptr", "runs_ptr"), "*i32")
    signature |= {f"{x}_ptr": "*fp32" for x in "mlu"} | {"qk_scale": "fp32"}
    signature |= {f"stride_{s}": "i32" for s in ("kp", "kt", "kh", "vp", "vt", "vh", "tb")}
    constants = {"HK": hk, "G": hq // hk, "PAGE": _PAGE, "D": d, "SPLIT": 256, "BM": 16, "BN": 64}
    aligned = frozenset(x for x in signature if x not in ("qk_scale", "stride_tb"))
    return AotVariant(id, "segment_kernel", signature, constants, aligned, 4, 5, ("cp.async",))


def _rotate_variant(id: str, dtype: str, d: int, pairs: int, interleaved: bool) -> AotVariant:
    t = f"*{_TYPES[dtype]}"
    signature = {"q_ptr": t, "owner_ptr": "*i32", "cos_ptr": "*fp64", "sin_ptr": "*fp64", "out_ptr": t}
    signature |= {"stride_qb": "i32", "stride_qh": "i32"}
    constants = {"PAIRS": pairs, "INTERLEAVED": interleaved, "D": d}
    return AotVariant(id, "rotate_kernel", signature, constants, frozenset(signature), 1, 3)


def specs() -> tuple[KernelSpec, ...]:
    """Segment decode."""
    gpu = {"Hq": 64, "Hk": 8, "d": 128, "P": _PAGE, "r": 128}
    cpu = {"Hq": 9, "Hk": 3, "d": 64, "P": _PAGE, "r": 64}
    return (
        KernelSpec(
            name="segment_decode",
            axes={
                "B": "requests",
                "Hq": "query heads",
                "Hk": "KV heads",
                "d": "head dim",
                "P": "tokens a page",
                "r": "rotary dims",
            },
            dtypes=("float32", "float16", "bfloat16"),
            cases=_cases(),
            make_inputs=make_inputs,
            reference=segment_decode_ref,
            implementations={"torch": _torch, "triton": _triton},
            outputs=state_outputs,
            comparisons=state_comparisons(),
            bytes_moved=bytes_moved,
            flops=flops,
            stability=Stability(
                "a state of each split of fixed length, merged ascending; without a token the identity",
                "rows are read by their ids and added in the order of positions",
                requests="ragged",
                alone=_alone,
            ),
            aot_module="kvtier_kernels.ops.segment_decode.triton_impl",
            aot=(
                _decode_variant("bf16-g8-d128", "bfloat16", 64, 8, 128),
                _decode_variant("bf16-g3-d64", "bfloat16", 9, 3, 64),
                _decode_variant("f32-g3-d64", "float32", 9, 3, 64),
                _rotate_variant("rotate-bf16-d128-neox", "bfloat16", 128, 64, False),
                _rotate_variant("rotate-bf16-d128-interleaved", "bfloat16", 128, 64, True),
                _rotate_variant("rotate-f32-d64-r32", "float32", 64, 16, False),
            ),
            invariances=INVARIANCES,
            refusals=REFUSALS,
            exempt={Hazard.DUPLICATE: "segments are disjoint ranges; an overlap is refused"},
            # 107 rows of 2 KV heads, 6 query heads of 64, two segments, float32.
            costs=(
                Cost(
                    "neox",
                    2 * 107 * 2 * 64 * 4 + 6 * 64 * 4 + 2 * 2 * 6 * 64 * 4 + 6 * 66 * 4,
                    4 * 107 * 6 * 64 + 6 * 32 * 2 * 6,
                ),
            ),
            bench=(Case("smollm2-2048", cpu, (2048,), seed=1),),
            bench_gpu=tuple(
                Case(f"gqa8-{n // 1024}k", gpu, (n,), "bfloat16", seed=n) for n in (32768, 131072)
            ),
        ),
    )
