"""The registry entry of paged decode: its inputs, hostile ones included, its costs and its compilations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtier_kernels.compare import state_comparisons, state_outputs
from kvtier_kernels.ops.paged_decode.plain_impl import paged_decode_plain
from kvtier_kernels.ops.paged_decode.ref import paged_decode_ref
from kvtier_kernels.ops.paged_decode.torch_impl import paged_decode_torch
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
_SPLIT = 256
_FAR_STRIDE = 2**20


def _case(
    id: str,
    lens: tuple[int, ...],
    *traits: str,
    hq: int = 9,
    hk: int = 3,
    d: int = 64,
    dtype: str = "float32",
) -> Case:
    axes = {"Hq": hq, "Hk": hk, "d": d, "P": _PAGE}
    return Case(id, axes, lens, dtype, frozenset(traits), seed=len(id) + sum(lens) + d)


def _cases() -> tuple[Case, ...]:
    edges = (0, 1, _PAGE - 1, _PAGE, _PAGE + 1)
    cases = [
        _case("empty", (0,), Hazard.EMPTY),
        _case("empty-beside-full", (0, 40, 0), Hazard.EMPTY, Hazard.RAGGED),
        _case("page-edges", edges, Hazard.RAGGED),
        _case("split-edges", (_SPLIT - 1, _SPLIT, _SPLIT + 1)),
        _case("block-edges", (63, 64, 65)),
        _case("three-splits", (2 * _SPLIT + 77,)),
        _case("one-token", (1,), Hazard.SINGLE),
        _case("huge-logits", (70, 300), "huge"),
        _case("one-logit-minus-inf", (40,), "minus-inf-row"),
        _case("all-logits-minus-inf", (20, 30), "minus-inf-all"),
        _case("nan-beyond-the-length", (33, 257), "nan-tail", Hazard.POISON),
        _case("nan-in-unmapped-pages", (48, 20), "nan-unmapped", Hazard.POISON),
        _case("inf-v-visible", (40,), "inf-v"),
        _case("duplicate-keys", (50,), Hazard.DUPLICATE),
        _case("strided", (100, 31), Hazard.STRIDED),
        _case("far-pages", (37,), Hazard.FAR, hq=2, hk=1, dtype="float16"),
        _case("d128-gqa8", (130, 300), hq=8, hk=1, d=128),
        _case("mha-d128", (40,), hq=4, hk=4, d=128),
        _case("bf16", (257, 40), dtype="bfloat16"),
        _case("bf16-d128", (300,), hq=8, hk=2, d=128, dtype="bfloat16"),
        _case("f16", (257, 40), dtype="float16"),
        _case("d256", (40,), hq=4, hk=2, d=256),
    ]
    cases += [_case(f"gqa{g}", (37, 70), hq=g, hk=1) for g in (1, 2, 5, 7, 16)]
    return tuple(cases)


def make_inputs(case: Case) -> Inputs:
    """Inputs of a case from its seed. Pages are permuted; page 0 is never mapped. The table is one page
    wider than any request needs, so its last ids are padding."""
    g = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    hq, hk, d, page = (case.axes[x] for x in ("Hq", "Hk", "d", "P"))
    batch = len(case.seq_lens)
    width = max(1, *(-(-n // page) for n in case.seq_lens)) + 1
    total = batch * width + 1
    k = torch.randn(total, page, hk, d, generator=g).to(dtype)
    v = torch.randn(total, page, hk, d, generator=g).to(dtype)
    q = (torch.randn(batch, hq, d, generator=g) * 2).to(dtype)
    table = (torch.randperm(total - 1, generator=g) + 1).to(torch.int32).view(batch, width)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    _poison(case, q, k, v, table)
    if Hazard.FAR in case.traits:
        ids = wrapping_ids(total, _FAR_STRIDE)
        k, v, table = (
            far_rows(k, ids, stride=_FAR_STRIDE),
            far_rows(v, ids, stride=_FAR_STRIDE),
            ids[table.long()].int(),
        )
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "page_table": table,
        "seq_lens": lens,
        "scale": 1 / math.sqrt(d),
    }


def _poison(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> None:
    page = case.axes["P"]
    if "huge" in case.traits:
        q *= 1e4
    if Hazard.DUPLICATE in case.traits:
        k[:] = k[1, 0]
    for b, n in enumerate(case.seq_lens):
        if "minus-inf-row" in case.traits:
            q[b] = q[b].abs()
            k[int(table[b, 0]), 3] = -math.inf
        if "minus-inf-all" in case.traits:
            q[b] = q[b].abs() + 1
            k[table[b].long()] = -math.inf
        if "inf-v" in case.traits:
            v[int(table[b, 0]), 2, 0, 5] = math.inf
        if "nan-tail" in case.traits:
            for x in (k, v):
                x[int(table[b, n // page]), n % page :] = math.nan
                x[table[b, n // page + 1 :].long()] = math.nan
    if "nan-unmapped" in case.traits:
        k[0] = math.nan
        v[0] = math.inf


def _without_poison(inputs: Inputs) -> Inputs:
    return inputs | {n: torch.nan_to_num(inputs[n], 0.0, 0.0, 0.0) for n in ("k_cache", "v_cache")}


def _straight_pages(inputs: Inputs) -> Inputs:
    table = inputs["page_table"]
    order = table.flatten().long()
    return inputs | {
        "k_cache": inputs["k_cache"][order],
        "v_cache": inputs["v_cache"][order],
        "page_table": torch.arange(order.numel(), dtype=torch.int32).view_as(table),
    }


def _other_padding(inputs: Inputs) -> Inputs:
    """Ids past a request's last page name other pages, whatever they hold."""
    table, page = inputs["page_table"].clone(), inputs["k_cache"].shape[1]
    for b, n in enumerate(inputs["seq_lens"].tolist()):
        table[b, -(-n // page) :] = 1
    return inputs | {"page_table": table}


INVARIANCES = (
    Invariance(
        "no-poison", ("nan-beyond-the-length", "nan-in-unmapped-pages"), _without_poison, Hazard.POISON
    ),
    Invariance("where-pages-lie", ("three-splits",), _straight_pages),
    Invariance("padding-of-the-table", ("split-edges",), _other_padding, Hazard.PADDED),
    Invariance("strides", ("strided",), lambda x: strided(x, ("q", "k_cache", "v_cache")), Hazard.STRIDED),
)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "one-token", change, match, backends or ("torch", "plain", "triton"))


def _wide_cache(extra: int) -> dict[str, Any]:
    cache = torch.zeros(3, _PAGE, 3, 64 + extra)[..., :64]
    return {"k_cache": cache, "v_cache": cache}


REFUSALS = (
    _refusal("dtype-of-lengths", {"seq_lens": torch.tensor([1])}, "int32"),
    _refusal("negative-length", {"seq_lens": torch.tensor([-1], dtype=torch.int32)}, r"\[0, "),
    _refusal("past-the-table", {"seq_lens": torch.tensor([999], dtype=torch.int32)}, r"\[0, "),
    _refusal("page-past-the-cache", {"page_table": torch.full((1, 2), 99, dtype=torch.int32)}, "page ids"),
    _refusal("negative-page", {"page_table": torch.full((1, 2), -1, dtype=torch.int32)}, "page ids"),
    _refusal("split-of-nothing", {"split_tokens": 0}, "whole pages"),
    _refusal("split-inside-a-page", {"split_tokens": 24}, "whole pages"),
    _refusal("heads", {"q": torch.zeros(1, 8, 64)}, "heads"),
    _refusal("odd-stride", _wide_cache(1), "multiples of 16", "triton"),
    _refusal("half-stride", _wide_cache(8), "multiples of 16", "triton"),
    _refusal("gqa17", {"q": torch.zeros(1, 51, 64)}, "share a KV head", "triton"),
    _refusal(
        "d48",
        {
            "q": torch.zeros(1, 3, 48),
            "k_cache": torch.zeros(3, 16, 3, 48),
            "v_cache": torch.zeros(3, 16, 3, 48),
        },
        "power of two",
        "triton",
    ),
)


def bytes_moved(inputs: Mapping[str, Any]) -> int:
    """Bytes of K and V of every row read once, plus q in and the state out (float32 m, l, u)."""
    q, k = inputs["q"], inputs["k_cache"]
    batch, hq, d = q.shape
    rows = int(inputs["seq_lens"].sum())
    kv = 2 * rows * k.shape[2] * d * k.element_size()
    return int(kv + q.numel() * q.element_size() + batch * hq * (d + 2) * 4)


def flops(inputs: Mapping[str, Any]) -> int:
    """4 d multiply-adds counted as two each per query head and row (QK and PV); softmax not counted."""
    q = inputs["q"]
    return int(4 * int(inputs["seq_lens"].sum()) * q.shape[1] * q.shape[2])


def _bench() -> tuple[Case, ...]:
    """SmolLM2's geometry, and one KV head of a 70B-like model's group."""
    shapes = (("smollm2", 9, 3, 64), ("gqa8", 64, 8, 128))
    return tuple(
        Case(f"{name}-{n}", {"Hq": hq, "Hk": hk, "d": d, "P": _PAGE}, (n,), seed=n)
        for name, hq, hk, d in shapes
        for n in (512, 2048)
    )


def _bench_gpu() -> tuple[Case, ...]:
    axes = {"Hq": 64, "Hk": 8, "d": 128, "P": _PAGE}
    return tuple(Case(f"gqa8-{n // 1024}k", axes, (n,), "bfloat16", seed=n) for n in (32768, 131072))


def _triton() -> Implementation:
    from kvtier_kernels.ops.paged_decode.triton_impl import paged_decode_triton

    return paged_decode_triton


def _torch() -> Implementation:
    return paged_decode_torch


def _plain() -> Implementation:
    return paged_decode_plain


_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_STRIDES = ("qb", "qh", "kp", "kt", "kh", "vp", "vt", "vh")


def _split_variant(id: str, dtype: str, hq: int, hk: int, d: int) -> AotVariant:
    t = _TYPES[dtype]
    signature = {
        "q_ptr": f"*{t}",
        "k_ptr": f"*{t}",
        "v_ptr": f"*{t}",
        "table_ptr": "*i32",
        "lens_ptr": "*i32",
    }
    signature |= {"m_ptr": "*fp32", "l_ptr": "*fp32", "u_ptr": "*fp32", "qk_scale": "fp32"}
    signature |= {f"stride_{s}": "i32" for s in _STRIDES} | {"stride_tb": "i32"}
    constants = {"HK": hk, "G": hq // hk, "PAGE": _PAGE, "D": d, "SPLIT": _SPLIT, "BM": 16, "BN": 64}
    aligned = frozenset(x for x in signature if x not in ("qk_scale", "stride_tb"))
    return AotVariant(id, "split_kernel", signature, constants, aligned, 4, 5, ("cp.async",))


def specs() -> tuple[KernelSpec, ...]:
    """Paged decode."""
    return (paged_decode_spec(),)


def paged_decode_spec() -> KernelSpec:
    """Everything about paged decode that a test, a bench or a gate needs."""
    implementations: dict[str, Callable[[], Implementation]] = {
        "torch": _torch,
        "plain": _plain,
        "triton": _triton,
    }
    return KernelSpec(
        name="paged_decode",
        axes={
            "B": "requests",
            "Hq": "query heads",
            "Hk": "KV heads",
            "d": "head dim",
            "N": "pages of the pool",
            "P": "tokens a page",
            "X": "pages a table row",
        },
        dtypes=("float32", "float16", "bfloat16"),
        cases=_cases(),
        make_inputs=make_inputs,
        reference=paged_decode_ref,
        implementations=implementations,
        outputs=state_outputs,
        comparisons=state_comparisons(),
        bytes_moved=bytes_moved,
        flops=flops,
        stability=Stability(
            "a state of each split of fixed length, merged ascending; behind the length the identity",
            "rows are read by their ids and added in the order of positions",
            requests="split-edges",
            alone=one_of("q", "page_table", "seq_lens"),
        ),
        invariances=INVARIANCES,
        refusals=REFUSALS,
        # 430 rows, one KV head of 128, 8 query heads, 2 requests, float32.
        costs=(Cost("d128-gqa8", 2 * 430 * 128 * 4 + 2 * 8 * 128 * 4 + 2 * 8 * 130 * 4, 4 * 430 * 8 * 128),),
        bench=_bench(),
        bench_gpu=_bench_gpu(),
        aot_module="kvtier_kernels.ops.paged_decode.triton_impl",
        aot=(
            _split_variant("split-bf16-g8-d128", "bfloat16", 8, 1, 128),
            _split_variant("split-bf16-g3-d64", "bfloat16", 9, 3, 64),
            _split_variant("split-f32-g3-d64", "float32", 9, 3, 64),
            _split_variant("split-f16-g8-d128", "float16", 64, 8, 128),
        ),
    )
