"""The registry's entry of sparse paged decode: inputs, hostile ones included, costs and compilations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import state_comparisons, state_outputs
from kvtier_kernels.ops.sparse_paged_decode.ref import sparse_paged_decode_ref
from kvtier_kernels.ops.sparse_paged_decode.torch_impl import sparse_paged_decode_torch
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


def _case(
    id: str,
    lens: tuple[int, ...],
    *traits: str,
    share: str = "kv",
    unit: int = _PAGE,
    hq: int = 6,
    hk: int = 2,
    d: int = 64,
    dtype: str = "float32",
) -> Case:
    """seq_lens: tokens that the lists of a request may name; of its units every third is left out."""
    scope = {"request": 1, "kv": hk, "query": hq}[share]
    axes = {"Hq": hq, "Hk": hk, "d": d, "P": _PAGE, "S": scope, "U": unit}
    return Case(id, axes, lens, dtype, frozenset(traits), seed=len(id) + sum(lens) + d)


def _cases() -> tuple[Case, ...]:
    cases = [
        _case("empty", (0, 0), Hazard.EMPTY),
        _case("one-token", (1,), Hazard.SINGLE),
        _case("ragged", (0, 200, 37), Hazard.RAGGED, Hazard.EMPTY),
        _case("two-splits", (620,), hq=2, hk=1),
        _case("list-a-query-head", (90, 20), share="query"),
        _case("list-a-request", (90, 20), share="request"),
        _case("single-tokens", (70,), unit=1, share="query", hq=3, hk=1),
        _case("units-of-4-pages", (300,), unit=64),
        _case("log-weight", (130, 40), "weights"),
        _case("log-weight-minus-inf", (90,), "weights", "minus-inf-weight"),
        _case("poison", (90, 40), Hazard.POISON),
        _case("duplicate-units", (90,), Hazard.DUPLICATE),
        _case("padded-units", (90, 40), Hazard.PADDED),
        _case("only-padding", (20,), Hazard.PADDED, "only-padding"),
        _case("strided", (90,), Hazard.STRIDED),
        _case("far-pages", (40,), Hazard.FAR, hq=2, hk=1, dtype="float16"),
        _case("bf16", (90, 40), dtype="bfloat16"),
        _case("f16-d128", (90,), d=128, dtype="float16"),
        _case("d256", (40,), hq=2, hk=1, d=256),
    ]
    cases += [_case(f"gqa{g}", (40,), hq=g, hk=1) for g in (1, 2, 5, 7, 16)]
    return tuple(cases)


def make_inputs(case: Case) -> Inputs:
    """Inputs of a case from its seed. Pages are permuted; page 0 is never mapped; each list has its own
    two thirds of the request's units, ascending, and the last list's last unit may be short."""
    g = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    hq, hk, d, page, unit = (case.axes[x] for x in ("Hq", "Hk", "d", "P", "U"))
    batch = len(case.seq_lens)
    width = max(1, *(-(-n // page) for n in case.seq_lens))
    total = batch * width + 1
    k = torch.randn(total, page, hk, d, generator=g).to(dtype)
    v = torch.randn(total, page, hk, d, generator=g).to(dtype)
    table = (torch.randperm(total - 1, generator=g) + 1).to(torch.int32).view(batch, width)
    indptr, units, last = _lists(case, g)
    weight = None
    if "weights" in case.traits:
        weight = torch.randn(units.numel(), generator=g)
        if "minus-inf-weight" in case.traits:
            weight[::2] = -torch.inf
    if Hazard.FAR in case.traits:
        ids = wrapping_ids(total, _FAR_STRIDE)
        k, v = far_rows(k, ids, stride=_FAR_STRIDE), far_rows(v, ids, stride=_FAR_STRIDE)
        table = ids[table.long()].int()
    inputs: Inputs = {
        "q": (torch.randn(batch, hq, d, generator=g) * 2).to(dtype),
        "k_cache": k,
        "v_cache": v,
        "page_table": table,
        "indptr": indptr,
        "units": units,
        "last_unit_len": last,
        "log_weight": weight,
        "scale": 1 / math.sqrt(d),
        "unit_tokens": unit,
    }
    if Hazard.POISON in case.traits:
        seen = touched(inputs)
        for x in (k, v):
            x[~seen] = torch.nan
    return inputs


def _lists(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    scope, unit = case.axes["S"], case.axes["U"]
    units: list[Tensor] = []
    last: list[int] = []
    for i, n in enumerate(case.seq_lens):
        for s in range(scope):
            there = -(-n // unit)
            own = torch.arange(there)
            if there > 3:
                own = own[(own + s) % 3 != 1]
            short = int(own[-1]) == there - 1 if there else False
            last.append((n - (there - 1) * unit if short else unit) if there else 0)
            if Hazard.DUPLICATE in case.traits and s == 0:
                own = torch.cat((own[:2], own[:1], own[2:]))
            if Hazard.PADDED in case.traits:
                own = torch.cat((torch.tensor([-1]), own[:2], torch.tensor([-7, -1]), own[2:]))
            if "only-padding" in case.traits or (Hazard.PADDED in case.traits and i == s == 1):
                own = torch.full_like(own, -1)
            units.append(own)
    sizes = torch.tensor([0] + [x.numel() for x in units])
    everything = torch.cat(units) if units else torch.empty(0)
    return sizes.cumsum(0).int(), everything.int(), torch.tensor(last, dtype=torch.int32)


def touched(inputs: Inputs) -> Tensor:
    """bool [N, P]: rows of the pool that some list names."""
    page, unit = inputs["k_cache"].shape[1], inputs["unit_tokens"]
    seen = torch.zeros(inputs["k_cache"].shape[:2], dtype=torch.bool)
    scope = inputs["last_unit_len"].numel() // inputs["q"].shape[0]
    for own, length in enumerate(inputs["last_unit_len"].tolist()):
        ids = inputs["units"][int(inputs["indptr"][own]) : int(inputs["indptr"][own + 1])].tolist()
        for i, x in enumerate(ids):
            for t in range(x * unit, x * unit + (length if i == len(ids) - 1 else unit)):
                if x >= 0:
                    seen[int(inputs["page_table"][own // scope, t // page]), t % page] = True
    return seen


def _rows(inputs: Inputs) -> int:
    """Rows of K and V that are read, over all lists and KV heads; one read for all that share a list."""
    scope = inputs["last_unit_len"].numel() // max(1, inputs["q"].shape[0])
    hk = inputs["k_cache"].shape[2]
    rows = 0
    for own, length in enumerate(inputs["last_unit_len"].tolist()):
        ids = inputs["units"][int(inputs["indptr"][own]) : int(inputs["indptr"][own + 1])]
        whole = int((ids[:-1] >= 0).sum()) * inputs["unit_tokens"]
        rows += whole + (length if ids.numel() and int(ids[-1]) >= 0 else 0)
    return rows * (hk if scope == 1 else 1)


def bytes_moved(inputs: Inputs) -> int:
    """K and V of every row a list names, the lists, q in and the state out (float32 m, l, u)."""
    q, k = inputs["q"], inputs["k_cache"]
    batch, hq, d = q.shape
    weights = 0 if inputs["log_weight"] is None else 4
    return int(
        2 * _rows(inputs) * d * k.element_size()
        + inputs["units"].numel() * (4 + weights)
        + q.numel() * q.element_size()
        + batch * hq * (d + 2) * 4
    )


def flops(inputs: Inputs) -> int:
    """4 d multiply-adds counted as two each per query head and row it attends."""
    hq, d = inputs["q"].shape[1:]
    scope = inputs["last_unit_len"].numel() // max(1, inputs["q"].shape[0])
    heads = hq // max(scope, inputs["k_cache"].shape[2])
    return int(4 * _rows(inputs) * heads * d)


def _clean(inputs: Inputs) -> Inputs:
    return inputs | {n: torch.nan_to_num(inputs[n], 0.0) for n in ("k_cache", "v_cache")}


def _padding_out(inputs: Inputs) -> Inputs:
    """The same lists without their padding."""
    keep = inputs["units"] >= 0
    before = torch.cat((torch.zeros(1), keep.cumsum(0))).int()
    return inputs | {"units": inputs["units"][keep], "indptr": before[inputs["indptr"].long()]}


def _longer_bound(inputs: Inputs) -> Inputs:
    return inputs | {"max_units": 40}


def _straight_pages(inputs: Inputs) -> Inputs:
    order = inputs["page_table"].flatten().long()
    table = torch.arange(order.numel(), dtype=torch.int32).view_as(inputs["page_table"])
    return inputs | {n: inputs[n][order] for n in ("k_cache", "v_cache")} | {"page_table": table}


def _alone(inputs: Inputs, at: int) -> Inputs:
    """Of one request, with its lists."""
    scope = inputs["last_unit_len"].numel() // inputs["q"].shape[0]
    indptr = inputs["indptr"][at * scope : (at + 1) * scope + 1]
    own = slice(int(indptr[0]), int(indptr[-1]))
    weight = inputs["log_weight"]
    return one_of("q", "page_table")(inputs, at) | {
        "indptr": indptr - indptr[0],
        "units": inputs["units"][own],
        "last_unit_len": inputs["last_unit_len"][at * scope : (at + 1) * scope],
        "log_weight": None if weight is None else weight[own],
    }


INVARIANCES = (
    Invariance("no-poison", ("poison",), _clean, Hazard.POISON),
    Invariance("where-pages-lie", ("ragged", "list-a-query-head"), _straight_pages),
    Invariance("another-bound", ("ragged",), _longer_bound),
    Invariance("strides", ("strided",), lambda x: strided(x, ("q", "k_cache", "v_cache")), Hazard.STRIDED),
)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "one-token", change, match, backends or ("torch", "triton"))


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSALS = (
    _refusal("dtype", {"units": torch.tensor([0, 0])}, "int32"),
    _refusal("scope", {"indptr": _ids(0, 1, 1, 1), "last_unit_len": _ids(1, 0, 0)}, "3 lists for 1"),
    _refusal("past-the-table", {"units": _ids(0, 1)}, "past the table"),
    _refusal("negative-length", {"last_unit_len": _ids(1, -1)}, r"\[0, 16\]"),
    _refusal("length-of-more-than-a-unit", {"last_unit_len": _ids(1, 17)}, r"\[0, 16\]"),
    _refusal("descending", {"indptr": _ids(0, 2, 1)}, "ascend"),
    _refusal("longer-than-its-bound", {"max_units": 0}, "max_units is 0"),
    _refusal("weights", {"log_weight": torch.zeros(3)}, "like units"),
    _refusal("heads", {"q": torch.zeros(1, 5, 64)}, "heads"),
    _refusal("split-of-nothing", {"split_tokens": 0}, "split of 0|multiple of 64"),
    _refusal("split", {"split_tokens": 100}, "multiple of 64", "triton"),
    _refusal("dtypes", {"q": torch.zeros(1, 6, 64).half()}, "one dtype", "triton"),
)


def _torch() -> Implementation:
    return sparse_paged_decode_torch


def _triton() -> Implementation:
    from kvtier_kernels.ops.sparse_paged_decode.triton_impl import sparse_paged_decode_triton

    return sparse_paged_decode_triton


_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _variant(
    id: str, dtype: str, hq: int, hk: int, d: int, unit: int, *, scope: int, weighted: bool = False
) -> AotVariant:
    signature = {f"{x}_ptr": f"*{_TYPES[dtype]}" for x in "qkv"}
    signature |= {f"{x}_ptr": "*i32" for x in ("table", "indptr", "units", "last")} | {"weight_ptr": "*fp32"}
    signature |= {f"{x}_ptr": "*fp32" for x in "mlu"} | {"qk_scale": "fp32"}
    signature |= {f"stride_{s}": "i32" for s in ("qb", "qh", "kp", "kt", "kh", "vp", "vt", "vh", "tb")}
    heads = hk if scope <= hk else hq
    constants = {"LISTS": scope, "HEADS": heads, "HK": hk, "ROWS": hq // heads, "UNIT": unit, "PAGE": _PAGE}
    constants |= {"D": d, "SPLIT": 256, "WEIGHTED": weighted, "BM": 16, "BN": 64}
    aligned = frozenset(x for x in signature if x not in ("qk_scale", "stride_tb"))
    return AotVariant(id, "sparse_kernel", signature, constants, aligned, 4, 3, ("cp.async",))


def _bench() -> tuple[Case, ...]:
    return (
        _case("smollm2-8k-of-16", (2048,), hq=9, hk=3),
        _case("gqa8-8k-of-16", (2048,), hq=64, hk=8, d=128),
    )


def _bench_gpu() -> tuple[Case, ...]:
    return tuple(
        _case(f"gqa8-{n}", (n,) * 8, hq=64, hk=8, d=128, dtype="bfloat16") for n in (3072, 6144, 49152)
    )


def specs() -> tuple[KernelSpec, ...]:
    """Sparse paged decode."""
    return (
        KernelSpec(
            name="sparse_paged_decode",
            axes={
                "B": "requests",
                "Hq": "query heads",
                "Hk": "KV heads",
                "d": "head dim",
                "P": "tokens a page",
                "S": "lists a request",
                "U": "tokens a unit",
            },
            dtypes=("float32", "float16", "bfloat16"),
            cases=_cases(),
            make_inputs=make_inputs,
            reference=sparse_paged_decode_ref,
            implementations={"torch": _torch, "triton": _triton},
            outputs=state_outputs,
            comparisons=state_comparisons(),
            bytes_moved=bytes_moved,
            flops=flops,
            stability=Stability(
                "a state of each split of fixed length of a list, merged ascending; behind it the identity",
                "rows are read by their ids and added in the order of positions",
                requests="ragged",
                alone=_alone,
            ),
            aot_module="kvtier_kernels.ops.sparse_paged_decode.triton_impl",
            aot=(
                _variant("bf16-g8-d128-u16", "bfloat16", 64, 8, 128, 16, scope=8),
                _variant("bf16-g3-d64-u16", "bfloat16", 9, 3, 64, 16, scope=3),
                _variant("f32-g3-d64-u16", "float32", 9, 3, 64, 16, scope=3),
                _variant("bf16-query-d128-u1-weighted", "bfloat16", 64, 8, 128, 1, scope=64, weighted=True),
                _variant("f16-request-d128-u64", "float16", 64, 8, 128, 64, scope=1),
            ),
            invariances=INVARIANCES,
            refusals=REFUSALS,
            # One token in a unit for each of 2 KV heads, 3 query heads each, float32.
            costs=(Cost("one-token", 2 * 2 * 64 * 4 + 2 * 4 + 6 * 64 * 4 + 6 * 66 * 4, 4 * 2 * 3 * 64),),
            bench=_bench(),
            bench_gpu=_bench_gpu(),
        ),
    )
