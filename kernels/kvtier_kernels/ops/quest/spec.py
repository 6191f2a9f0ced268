"""The registry's entry of Quest's scores over a pool: inputs, hostile ones included, costs, compilations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Within, named
from kvtier_kernels.ops.quest.paged import quest_score_paged_torch
from kvtier_kernels.ops.quest.ref import quest_score_paged_ref
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

_FAR_STRIDE = 2**20


def _case(
    id: str,
    pages: tuple[int, ...],
    *traits: str,
    hq: int = 6,
    hk: int = 2,
    d: int = 64,
    dtype: str = "float32",
) -> Case:
    """seq_lens: pages of each request. Trait "none": no reduction over a group."""
    axes = {"Hq": hq, "Hk": hk, "d": d}
    return Case(id, axes, pages, dtype, frozenset(traits), seed=len(id) + sum(pages) + d)


def _cases() -> tuple[Case, ...]:
    cases = [
        _case("empty", (0, 0), Hazard.EMPTY),
        _case("single", (1,), Hazard.SINGLE),
        _case("ragged", (0, 70, 5), Hazard.RAGGED),
        _case("ragged-none", (0, 70, 5), Hazard.RAGGED, "none"),
        _case("two-programs", (530,), hq=2, hk=1),
        _case("tile-edges", (63, 64, 65)),
        _case("poison", (20, 3), Hazard.POISON),
        _case("duplicate-pages", (12,), Hazard.DUPLICATE),
        _case("padded", (20, 4), Hazard.PADDED),
        _case("nan-box", (9, 4), "nan-box"),
        _case("strided", (20,), Hazard.STRIDED),
        _case("far-pages", (5, 2), Hazard.FAR, dtype="float16"),
        _case("bf16", (70,), dtype="bfloat16"),
        _case("bf16-none", (20,), "none", dtype="bfloat16"),
        _case("d128", (20,), d=128),
        _case("d256", (20,), d=256, hq=2, hk=1),
    ]
    cases += [_case(f"gqa{g}", (9,), hq=g, hk=1) for g in (1, 2, 5, 7, 16)]
    return tuple(cases)


def make_inputs(case: Case) -> Inputs:
    """Boxes around normal keys; page 0 is never mapped, the table is wider than any request."""
    g = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    hq, hk, d = (case.axes[x] for x in ("Hq", "Hk", "d"))
    batch, width = len(case.seq_lens), max(1, *case.seq_lens) + 2
    total = batch * width + 1
    ends = torch.randn(2, total, hk, d, generator=g).to(dtype)
    kmin, kmax = ends.amin(0), ends.amax(0)
    table = (torch.randperm(total - 1, generator=g) + 1).to(torch.int32).view(batch, width)
    if Hazard.DUPLICATE in case.traits:
        table[:, 1::2] = table[:, ::2][:, : table[:, 1::2].shape[1]]
    if "nan-box" in case.traits:
        kmin[int(table[0, 2]), 0, 5] = torch.nan
    if Hazard.PADDED in case.traits:
        table[:, 1] = -1
        table[:, 3:] = torch.where(torch.arange(3, width) % 3 == 0, -7, table[:, 3:])
    if Hazard.POISON in case.traits:
        behind = torch.arange(width) >= torch.tensor(case.seq_lens)[:, None]
        kmin[table[behind].long()], kmax[table[behind].long()] = torch.nan, torch.inf
        kmin[0] = torch.nan
    if Hazard.FAR in case.traits:
        ids = wrapping_ids(total, _FAR_STRIDE)
        kmin, kmax = (far_rows(x, ids, stride=_FAR_STRIDE) for x in (kmin, kmax))
        table = ids[table.long()].int()
    return {
        "q": torch.randn(batch, hq, d, generator=g).to(dtype),
        "kmin": kmin,
        "kmax": kmax,
        "page_table": table,
        "n_pages": torch.tensor(case.seq_lens, dtype=torch.int32),
        "reduce": "none" if "none" in case.traits else "max",
    }


def _gate(inputs: Mapping[str, Any], want: Tensor) -> float:
    """2^-20 of the largest sum of magnitudes: products are exact in float32, sums of d of them are not."""
    q, kmin, kmax = (inputs[n].double() for n in ("q", "kmin", "kmax"))
    sides = torch.stack((kmin, kmax)).nan_to_num(0.0, 0.0, 0.0).abs()
    return float(q.abs().sum(-1).amax() * sides.max()) * 2**-20 if want.numel() and q.numel() else 0.0


def bytes_moved(inputs: Inputs) -> int:
    """Two boxes a page and KV head, the table, q in, the scores out."""
    q, kmin = inputs["q"], inputs["kmin"]
    batch, hq, d = q.shape
    hk, pages = kmin.shape[1], int(inputs["n_pages"].sum())
    heads = hk if inputs["reduce"] == "max" else hq
    out = batch * heads * inputs["page_table"].shape[1] * 4
    return int(2 * pages * hk * d * kmin.element_size() + pages * 4 + q.numel() * q.element_size() + out)


def flops(inputs: Inputs) -> int:
    """2 d multiply-adds a query head and page."""
    _, hq, d = inputs["q"].shape
    return int(4 * int(inputs["n_pages"].sum()) * hq * d)


def _clean(inputs: Inputs) -> Inputs:
    return inputs | {n: torch.nan_to_num(inputs[n], 0.0, 0.0) for n in ("kmin", "kmax")}


def _straight_pages(inputs: Inputs) -> Inputs:
    order = inputs["page_table"].flatten().long()
    table = torch.arange(order.numel(), dtype=torch.int32).view_as(inputs["page_table"])
    return inputs | {n: inputs[n][order] for n in ("kmin", "kmax")} | {"page_table": table}


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "single", change, match, backends or ("torch", "triton"))


def _torch() -> Implementation:
    return quest_score_paged_torch


def _triton() -> Implementation:
    from kvtier_kernels.ops.quest.triton_impl import quest_score_paged_triton

    return quest_score_paged_triton


_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _variant(id: str, dtype: str, hq: int, hk: int, d: int, *, reduce: bool = True) -> AotVariant:
    t = f"*{_TYPES[dtype]}"
    signature = {"q_ptr": t, "min_ptr": t, "max_ptr": t, "table_ptr": "*i32", "count_ptr": "*i32"}
    signature |= {"out_ptr": "*fp32", "width": "i32"}
    signature |= {f"stride_{s}": "i32" for s in ("qb", "qh", "np", "nh", "xp", "xh", "tb")}
    constants = {"HK": hk, "G": hq // hk, "D": d, "REDUCE": reduce, "RUN": 512, "BM": 16, "BN": 64}
    aligned = frozenset(x for x in signature if x not in ("width", "stride_tb"))
    return AotVariant(id, "quest_kernel", signature, constants, aligned, 4, 3, ("cp.async",))


def specs() -> tuple[KernelSpec, ...]:
    """quest_score, over a pool."""
    return (
        KernelSpec(
            name="quest_score",
            axes={"B": "requests", "Hq": "query heads", "Hk": "KV heads", "d": "head dim"},
            dtypes=("float32", "float16", "bfloat16"),
            cases=_cases(),
            make_inputs=make_inputs,
            reference=quest_score_paged_ref,
            implementations={"torch": _torch, "triton": _triton},
            outputs=named,
            comparisons={"out": Within(_gate)},
            bytes_moved=bytes_moved,
            flops=flops,
            stability=Stability(
                "one product of all channels a bound, in tiles of 64 pages",
                "boxes are read by their pages",
                requests="ragged",
                alone=one_of("q", "page_table", "n_pages"),
            ),
            aot_module="kvtier_kernels.ops.quest.triton_impl",
            aot=(
                _variant("bf16-g8-d128", "bfloat16", 64, 8, 128),
                _variant("bf16-g3-d64", "bfloat16", 9, 3, 64),
                _variant("f32-g3-d64", "float32", 9, 3, 64),
                _variant("bf16-g8-d128-none", "bfloat16", 64, 8, 128, reduce=False),
            ),
            invariances=(
                Invariance("boxes-behind", ("poison",), _clean, Hazard.POISON),
                Invariance("where-pages-lie", ("ragged", "ragged-none"), _straight_pages),
                Invariance(
                    "strides", ("strided",), lambda x: strided(x, ("q", "kmin", "kmax")), Hazard.STRIDED
                ),
            ),
            refusals=(
                _refusal("dtype", {"n_pages": torch.tensor([1])}, "int32"),
                _refusal("past-the-table", {"n_pages": _ids(4)}, r"\[0, 3\]"),
                _refusal("unknown-page", {"page_table": _ids(4, 9, 9)[None]}, "page 4 of 4"),
                _refusal("reduce", {"reduce": "mean"}, "max, none"),
                _refusal("heads", {"q": torch.zeros(1, 5, 64)}, "do not divide"),
                _refusal("dims", {"q": torch.zeros(1, 6, 32)}, "want q"),
                _refusal("dtypes", {"q": torch.zeros(1, 6, 64).half()}, "one dtype", "triton"),
            ),
            # 192 pages, 2 KV heads of 64 in boxes of two float32 vectors; 3 requests of 6 heads, 67 wide.
            costs=(
                Cost(
                    "tile-edges",
                    2 * 192 * 2 * 64 * 4 + 192 * 4 + 3 * 6 * 64 * 4 + 3 * 2 * 67 * 4,
                    4 * 192 * 6 * 64,
                ),
            ),
            bench=(_case("smollm2-8k", (512,), hq=9, hk=3), _case("gqa8-32k", (2048,), hq=64, hk=8, d=128)),
            bench_gpu=(
                _case("gqa8-128k", (8192,), hq=64, hk=8, d=128, dtype="bfloat16"),
                _case("gqa8-b8-128k", (8192,) * 8, hq=64, hk=8, d=128, dtype="bfloat16"),
            ),
        ),
    )
