"""The registry entry of paged decode: what must not change its answers, its costs and its compilations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtier_kernels.compare import state_comparisons, state_outputs
from kvtier_kernels.ops.paged_decode.cases import PAGE, SPLIT, case_of, cases, make_inputs, outside
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
from kvtier_kernels.testing.inputs import one_of, strided


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


def _pages_outside(inputs: Inputs) -> Inputs:
    """Pages outside of the window are there, whatever they hold."""
    table = inputs["page_table"].clone()
    outside(table, inputs["seq_lens"].tolist(), inputs["window"], 0)
    return inputs | {"page_table": table}


def _no_window(inputs: Inputs) -> Inputs:
    return inputs | {"window": None}


INVARIANCES = (
    Invariance(
        "no-poison",
        (
            "nan-beyond-the-length",
            "nan-in-unmapped-pages",
            "window-poison",
            "softcap-poison",
            "softcap-window",
        ),
        _without_poison,
        Hazard.POISON,
    ),
    Invariance("where-pages-lie", ("three-splits", "window-ragged", "softcap-window"), _straight_pages),
    Invariance("padding-of-the-table", ("split-edges",), _other_padding, Hazard.PADDED),
    Invariance("pages-outside-of-the-window", ("window-absent-pages",), _pages_outside, Hazard.PADDED),
    Invariance("no-window-is-the-longest", ("window-longer",), _no_window),
    Invariance(
        "strides",
        ("strided", "window-strided"),
        lambda x: strided(x, ("q", "k_cache", "v_cache")),
        Hazard.STRIDED,
    ),
)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "one-token", change, match, backends or ("torch", "plain", "triton"))


def _wide_cache(extra: int) -> dict[str, Any]:
    cache = torch.zeros(3, PAGE, 3, 64 + extra)[..., :64]
    return {"k_cache": cache, "v_cache": cache}


def _out(
    batch: int, hq: int, d: int, kept: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    m, l = (torch.zeros(batch, hq, dtype=dtype) for _ in range(2))
    return m, l, torch.zeros(batch, hq, d, dtype=dtype)[..., :kept]


REFUSALS = (
    _refusal("dtype-of-lengths", {"seq_lens": torch.tensor([1])}, "int32"),
    _refusal("negative-length", {"seq_lens": torch.tensor([-1], dtype=torch.int32)}, r"\[0, "),
    _refusal("past-the-table", {"seq_lens": torch.tensor([999], dtype=torch.int32)}, r"\[0, "),
    _refusal("page-past-the-cache", {"page_table": torch.full((1, 2), 99, dtype=torch.int32)}, "page ids"),
    _refusal("negative-page", {"page_table": torch.full((1, 2), -1, dtype=torch.int32)}, "page ids"),
    _refusal("split-of-nothing", {"split_tokens": 0}, "whole pages"),
    _refusal("split-inside-a-page", {"split_tokens": 24}, "whole pages"),
    _refusal("heads", {"q": torch.zeros(1, 8, 64)}, "heads"),
    _refusal("window-below-0", {"window": -1}, "window is None or an int, 0 rows or more, not -1"),
    _refusal("window-of-half-a-row", {"window": 1.5}, r"window is None .* not 1\.5"),
    _refusal("window-true", {"window": True}, "window is None .* not True"),
    *(
        _refusal(f"softcap-{x}", {"softcap": x}, rf"softcap is None or a number from .* above 0, not {x}")
        for x in (0.0, -30.0, math.inf, math.nan, True)
    ),
    _refusal(
        "page-past-the-cache-in-the-window",
        {"page_table": torch.full((1, 2), 99, dtype=torch.int32), "window": 1},
        "page ids",
    ),
    _refusal("out-of-one-request", {"out": _out(2, 9, 64)}, r"out's m is float32 \[1, 9\]"),
    _refusal("out-not-contiguous", {"out": _out(1, 9, 128, 64)}, "out's u is .* contiguous"),
    _refusal("out-of-half-precision", {"out": _out(1, 9, 64, dtype=torch.float16)}, "out's m is float32"),
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


def _rows(inputs: Mapping[str, Any]) -> int:
    """Rows that are read, over all requests: those of the window, where there is one."""
    lens, window = inputs["seq_lens"], inputs.get("window")
    return int((lens if window is None else lens.clamp(max=window)).sum())


def bytes_moved(inputs: Mapping[str, Any]) -> int:
    """Bytes of K and V of every row read once, plus q in and the state out (float32 m, l, u)."""
    q, k = inputs["q"], inputs["k_cache"]
    batch, hq, d = q.shape
    kv = 2 * _rows(inputs) * k.shape[2] * d * k.element_size()
    return int(kv + q.numel() * q.element_size() + batch * hq * (d + 2) * 4)


def flops(inputs: Mapping[str, Any]) -> int:
    """4 d multiply-adds counted as two each per query head and row (QK and PV); softmax and cap are not
    counted."""
    q = inputs["q"]
    return int(4 * _rows(inputs) * q.shape[1] * q.shape[2])


def _bench() -> tuple[Case, ...]:
    """SmolLM2's geometry, and one KV head of a 70B-like model's group."""
    shapes = (("smollm2", 9, 3, 64), ("gqa8", 64, 8, 128))
    whole = (
        Case(f"{name}-{n}", {"Hq": hq, "Hk": hk, "d": d, "P": PAGE}, (n,), seed=n)
        for name, hq, hk, d in shapes
        for n in (512, 2048)
    )
    return (
        *whole,
        case_of("smollm2-2048-window-512", (2048,), window=512),
        case_of("smollm2-2048-window-500", (2048,), window=500),
        case_of("smollm2-2048-softcap", (2048,), cap=50),
    )


def _bench_gpu() -> tuple[Case, ...]:
    axes = {"Hq": 64, "Hk": 8, "d": 128, "P": PAGE}
    window = {"W": 4096}
    return (
        *(Case(f"gqa8-{n // 1024}k", axes, (n,), "bfloat16", seed=n) for n in (32768, 131072)),
        Case("gqa8-32k-window-4k", axes | window, (32768,), "bfloat16", seed=1),
        Case("gqa8-32k-softcap", axes | {"C": 50}, (32768,), "bfloat16", seed=2),
    )


def _triton() -> Implementation:
    from kvtier_kernels.ops.paged_decode.triton_impl import paged_decode_triton

    return paged_decode_triton


def _torch() -> Implementation:
    return paged_decode_torch


def _plain() -> Implementation:
    return paged_decode_plain


_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_STRIDES = ("qb", "qh", "kp", "kt", "kh", "vp", "vt", "vh")


def _split_variant(id: str, dtype: str, hq: int, hk: int, d: int, *options: str) -> AotVariant:
    """options: those of "window" and "cap" that are given; the other is no argument of what is compiled."""
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
    constants: dict[str, Any] = {"HK": hk, "G": hq // hk, "PAGE": PAGE, "D": d, "SPLIT": SPLIT}
    constants |= {"BM": 16, "BN": 64}
    aligned = frozenset(x for x in signature if x not in ("qk_scale", "stride_tb"))
    for name, kind in (("window", "i32"), ("cap", "fp32")):
        if name in options:
            signature[name] = kind
        else:
            constants[name] = None
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
            "W": "rows of the window, in which the last row is",
            "C": "the cap of logits",
        },
        dtypes=("float32", "float16", "bfloat16"),
        cases=cases(),
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
        # 430 rows, one KV head of 128, 8 query heads, 2 requests, float32. 90 of 300 rows and all of 20, the
        # same heads, bfloat16.
        costs=(
            Cost("d128-gqa8", 2 * 430 * 128 * 4 + 2 * 8 * 128 * 4 + 2 * 8 * 130 * 4, 4 * 430 * 8 * 128),
            Cost(
                "window-bf16-d128", 2 * 110 * 128 * 2 + 2 * 8 * 128 * 2 + 2 * 8 * 130 * 4, 4 * 110 * 8 * 128
            ),
        ),
        bench=_bench(),
        bench_gpu=_bench_gpu(),
        aot_module="kvtier_kernels.ops.paged_decode.triton_impl",
        aot=(
            _split_variant("split-bf16-g8-d128", "bfloat16", 8, 1, 128),
            _split_variant("split-bf16-g3-d64", "bfloat16", 9, 3, 64),
            _split_variant("split-f32-g3-d64", "float32", 9, 3, 64),
            _split_variant("split-f16-g8-d128", "float16", 64, 8, 128),
            _split_variant("window-bf16-g8-d128", "bfloat16", 8, 1, 128, "window"),
            _split_variant("window-f32-g3-d64", "float32", 9, 3, 64, "window"),
            _split_variant("softcap-bf16-g8-d128", "bfloat16", 8, 1, 128, "cap"),
            _split_variant("window-softcap-bf16-g8-d128", "bfloat16", 8, 1, 128, "window", "cap"),
            _split_variant("window-softcap-f16-g3-d64", "float16", 9, 3, 64, "window", "cap"),
        ),
    )
