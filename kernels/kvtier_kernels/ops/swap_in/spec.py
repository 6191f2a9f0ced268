"""The registry entries of swapping in, plan and application: hostile lists, costs and compilations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Exact, named
from kvtier_kernels.ops.swap_in.ref import swap_in_apply_ref, swap_in_plan_ref
from kvtier_kernels.ops.swap_in.torch_impl import SwapPlan, swap_in_apply_torch, swap_in_plan_torch
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
from kvtier_kernels.testing.inputs import far_rows, strided, wrapping_ids
from kvtier_kernels.testing.matrices import far_matrix

_FAR_STRIDE = 2**20
_MODULE = "kvtier_kernels.ops.swap_in.triton_impl"


def _ints(value: int, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


def _plan_case(id: str, lens: tuple[int, ...], width: int, *traits: str) -> Case:
    """lens: entries of each row; the rest is padding."""
    axes = {"W": width, "HOT": 2 * width, "U": 4 * width}
    return Case(id, axes, lens, "int32", frozenset(traits), len(id) + width)


_PLAN_CASES = (
    _plan_case("nothing-missing", (0, 0), 8, Hazard.EMPTY),
    _plan_case("one-entry", (1,), 1, Hazard.SINGLE),
    _plan_case("ragged", (5, 0, 16, 9), 16, Hazard.RAGGED),
    _plan_case("shortfall", (16, 16), 16, "shortfall", Hazard.PADDED),
    _plan_case("absent-units", (16, 12), 16, "absent"),
    _plan_case("slots-twice", (16, 16), 16, Hazard.DUPLICATE),
    _plan_case("slots-and-units-that-do-not-exist", (16,), 16, "unknown"),
    _plan_case("gaps", (16, 11), 16, "gaps"),
    _plan_case("far-rows", (6, 0, 0, 0, 6), 8, Hazard.FAR),
)


def make_plan_inputs(case: Case) -> Inputs:
    """Lists as bucketed LRU gives them, then what is hostile."""
    g = torch.Generator().manual_seed(case.seed)
    width, slots, units = (case.axes[x] for x in ("W", "HOT", "U"))
    rows = len(case.seq_lens)
    miss, victim = _ints(-1, rows, width), _ints(-1, rows, width)
    for r, n in enumerate(case.seq_lens):
        miss[r, :n] = torch.randperm(units, generator=g)[:n].int()
        victim[r, :n] = torch.randperm(slots, generator=g)[:n].int().sort().values
        if "shortfall" in case.traits:
            victim[r, n - 4 : n] = -1
        if Hazard.DUPLICATE in case.traits:
            victim[r, 5:7] = victim[r, 3].clone()
            victim[r, 9], victim[r, 10] = victim[r, 10].clone(), victim[r, 9].clone()
            victim[r, 13], victim[r, 14] = victim[r, 2].clone(), victim[r, 12].clone()
        if "unknown" in case.traits:
            victim[r, n - 1], miss[r, 2] = slots, units
        if "gaps" in case.traits:
            miss[r, 3], victim[r, 6] = -1, -1
    host_row = torch.randint(0, 2**31 - 1, (rows, units), generator=g).int()
    if "absent" in case.traits:
        host_row[:, ::3] = -1
    return {
        "miss": miss,
        "victim": victim,
        "host_row": far_matrix(host_row) if Hazard.FAR in case.traits else host_row,
        "slots": slots,
    }


def _longer_lists(inputs: Inputs) -> Inputs:
    return inputs | {n: torch.cat([inputs[n], _ints(-9, len(inputs[n]), 3)], 1) for n in ("miss", "victim")}


def _cut_lists(got: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = len(got["absent"])
    return got | {n: got[n][: len(got[n]) - 3 * rows] for n in ("src", "dst")}


_PLAN_INVARIANCES = (
    Invariance("padding", ("ragged", "gaps"), _longer_lists, Hazard.PADDED, _cut_lists),
    Invariance(
        "strides", ("absent-units",), lambda x: strided(x, ("miss", "victim", "host_row")), Hazard.STRIDED
    ),
)
_PLAN_REFUSALS = (
    Refusal("rows", "one-entry", {"victim": _ints(0, 2, 1)}, r"want miss and victim"),
    Refusal("dtype", "one-entry", {"host_row": torch.zeros(1, 4, dtype=torch.int64)}, "host_row int32"),
    Refusal("columns-apart", "one-entry", {"host_row": _ints(0, 4, 2).T[:1]}, "contiguous rows"),
    Refusal("no-slots", "one-entry", {"slots": 0}, "from 1 slot"),
    Refusal("too-many-slots", "one-entry", {"slots": 2**31}, r"2\^31"),
)


def plan_bytes(inputs: Mapping[str, Any]) -> int:
    """Both lists in twice (they are counted before they are listed), a host row an entry, src and dst out;
    8 bytes a row of counts."""
    rows, width = inputs["miss"].shape
    return int(rows * width * 4 * 7 + 8 * rows + 4)


def _apply_case(id: str, copies: int, row: int, *traits: str, dtype: str = "float32") -> Case:
    """row: elements of a row; from 3 * copies + 1 host rows into 2 * copies + 1 slots."""
    return Case(id, {"E": row}, (copies,), dtype, frozenset(traits), copies + row)


_APPLY_CASES = (
    _apply_case("nothing-to-copy", 0, 16, Hazard.EMPTY),
    _apply_case("one-row", 1, 16, Hazard.SINGLE),
    _apply_case("rows", 20, 64),
    _apply_case("same-source-twice", 12, 32, Hazard.DUPLICATE),
    _apply_case("nan-in-other-rows", 9, 32, Hazard.POISON),
    _apply_case("bf16-pages", 9, 128, "pages", dtype="bfloat16"),
    _apply_case("bf16-33", 7, 33, dtype="bfloat16"),
    _apply_case("bytes-13", 9, 13, dtype="uint8"),
    _apply_case("more-than-a-tile", 3, 2500),
    _apply_case("several-pieces", 9, 7680),
    _apply_case("far-rows", 4, 13, Hazard.FAR, dtype="uint8"),
)


def make_apply_inputs(case: Case) -> Inputs:
    """A list that is right, with ids that mean nothing behind its count."""
    g = torch.Generator().manual_seed(case.seed)
    copies, row = case.seq_lens[0], case.axes["E"]
    shape = (row // 16, 16) if "pages" in case.traits else (row,)
    host_rows, slots = 3 * copies + 1, 2 * copies + 1
    dtype = getattr(torch, case.dtype)
    host = (torch.rand(host_rows, *shape, generator=g) * 250).to(dtype)
    pool = (torch.rand(slots, *shape, generator=g) * 250).to(dtype)
    src = torch.randperm(host_rows, generator=g)[:copies].int()
    dst = torch.randperm(slots, generator=g)[:copies].int()
    if Hazard.DUPLICATE in case.traits:
        src[3:6] = src[2].clone()
    if Hazard.POISON in case.traits:
        unused = torch.ones(host_rows, dtype=torch.bool)
        unused[src.long()] = False
        host[unused] = torch.nan
    if Hazard.FAR in case.traits:
        ids = wrapping_ids(host_rows, _FAR_STRIDE)
        host, src = far_rows(host, ids, stride=_FAR_STRIDE), ids[src.long()].int()
    return {
        "host": host,
        "pool": pool,
        "src": torch.cat([src, _ints(-1, 3)]),
        "dst": torch.cat([dst, _ints(-1, 3)]),
        "copies": _ints(copies, 1),
    }


def _ids_behind_the_count(inputs: Inputs) -> Inputs:
    src, dst = inputs["src"].clone(), inputs["dst"].clone()
    src[int(inputs["copies"]) :], dst[int(inputs["copies"]) :] = 1, 0
    return inputs | {"src": src, "dst": dst}


_APPLY_INVARIANCES = (
    Invariance("ids-behind-the-count", ("rows", "bytes-13"), _ids_behind_the_count, Hazard.PADDED),
    Invariance(
        "rows-apart", ("rows", "bf16-33", "bytes-13"), lambda x: strided(x, ("host", "pool")), Hazard.STRIDED
    ),
    Invariance(
        "no-poison",
        ("nan-in-other-rows",),
        lambda x: x | {"host": torch.nan_to_num(x["host"], 0.0)},
        Hazard.POISON,
    ),
)
_APPLY_REFUSALS = (
    Refusal("row-shape", "one-row", {"pool": torch.zeros(3, 15)}, "one shape and dtype"),
    Refusal("row-dtype", "one-row", {"pool": torch.zeros(3, 16).half()}, "one shape and dtype"),
    Refusal("list-dtype", "one-row", {"src": torch.zeros(4, dtype=torch.int64)}, "want src int32"),
    Refusal("lists-unlike", "one-row", {"dst": _ints(0, 5)}, "one length"),
    Refusal("count", "one-row", {"copies": _ints(5, 1)}, "5 copies of a list of 4"),
    Refusal("source-outside", "one-row", {"src": _ints(4, 4)}, "src outside"),
    Refusal("slot-outside", "one-row", {"dst": _ints(-1, 4)}, "dst outside"),
    Refusal("row-in-pieces", "one-row", {"host": torch.zeros(4, 32)[:, ::2]}, "contiguous"),
)


def apply_bytes(inputs: Mapping[str, Any]) -> int:
    """Each row copied in and out, and its two ids."""
    host, copies = inputs["host"], int(inputs["copies"])
    return int(copies * (2 * host[0].numel() * host.element_size() + 8) + 4)


def no_flops(inputs: Mapping[str, Any]) -> int:
    """None: integers and copies."""
    return 0


def _torch_plan() -> Implementation:
    return swap_in_plan_torch


def _torch_apply() -> Implementation:
    return swap_in_apply_torch


def _triton_plan() -> Implementation:
    from kvtier_kernels.ops.swap_in.triton_impl import swap_in_plan_triton

    return swap_in_plan_triton


def _triton_apply() -> Implementation:
    from kvtier_kernels.ops.swap_in.triton_impl import swap_in_apply_triton

    return swap_in_apply_triton


def _variant(
    id: str, kernel: str, names: str, constants: dict[str, int], warps: int, word: str
) -> AotVariant:
    """Pointers end in _ptr; the pools' are of `word`, others int32. Strides and words are multiples of 16."""
    pools = {"host_ptr", "pool_ptr"} if kernel == "copy_kernel" else set()
    types = {n: f"*{word}" if n in pools else "*i32" for n in names.split() if n.endswith("_ptr")}
    signature = {n: types.get(n, "i32") for n in names.split()}
    aligned = frozenset(
        n for n in signature if n.endswith("_ptr") or n.startswith(("stride", "words", "width"))
    )
    return AotVariant(id, kernel, signature, constants, aligned, warps, 3)


_COUNT = (
    "miss_ptr victim_ptr host_ptr row_copies_ptr absent_ptr refused_ptr width units slots stride_m stride_v "
    "stride_h"
)
_LIST = (
    "miss_ptr victim_ptr host_ptr row_copies_ptr src_ptr dst_ptr copies_ptr width units slots stride_m "
    "stride_v stride_h"
)
_COPY = "host_ptr pool_ptr src_ptr dst_ptr copies_ptr words host_rows pool_rows stride_h stride_p"


def specs() -> tuple[KernelSpec, ...]:
    """The plan and its application."""
    no_heads = "a row is one list: heads and their dims are the caller's"
    plan_bench = (_plan_case("w256", (256,) * 8, 256), _plan_case("w2048", (2048,) * 8, 2048))
    pages = _apply_case("pages-4k", 2048, 1024)
    plan = KernelSpec(
        name="swap_in_plan",
        axes={"R": "rows: requests times KV heads", "W": "entries", "HOT": "slots a row", "U": "units"},
        dtypes=("int32",),
        cases=_PLAN_CASES,
        make_inputs=make_plan_inputs,
        reference=swap_in_plan_ref,
        implementations={"torch": _torch_plan, "triton": _triton_plan},
        outputs=named,
        comparisons={n: Exact() for n in SwapPlan._fields},
        bytes_moved=plan_bytes,
        flops=no_flops,
        stability=Stability(
            "one program a row; its list is its own",
            "nothing is rounded",
            rounds=False,
        ),
        invariances=_PLAN_INVARIANCES,
        refusals=_PLAN_REFUSALS,
        exempt={
            Hazard.POISON: "integers have no NaN; padding is tried in its place",
            Hazard.GQA: no_heads,
            Hazard.HEAD_DIMS: no_heads,
            Hazard.BF16: "no floating point",
        },
        costs=(Cost("ragged", 4 * 16 * 28 + 32 + 4, 0),),
        bench=plan_bench,
        bench_gpu=plan_bench,
        aot_module=_MODULE,
        aot=(
            _variant("count-w2048", "count_kernel", _COUNT, {"W": 2048}, 8, "i32"),
            _variant("list-w2048", "list_kernel", _LIST, {"W": 2048, "ROWS": 64}, 8, "i32"),
        ),
    )
    apply = KernelSpec(
        name="swap_in_apply",
        axes={"N": "host rows", "M": "rows of the slots' pool", "E": "elements a row"},
        dtypes=("float32", "bfloat16", "uint8"),
        cases=_APPLY_CASES,
        make_inputs=make_apply_inputs,
        reference=swap_in_apply_ref,
        implementations={"torch": _torch_apply, "triton": _triton_apply},
        outputs=named,
        comparisons={"out": Exact()},
        bytes_moved=apply_bytes,
        flops=no_flops,
        stability=Stability(
            "copies of whole elements",
            "nothing is rounded",
            rounds=False,
        ),
        invariances=_APPLY_INVARIANCES,
        refusals=_APPLY_REFUSALS,
        exempt={
            Hazard.RAGGED: "one list, whatever requests it came from",
            Hazard.GQA: "a row is bytes: no heads",
            Hazard.HEAD_DIMS: "a row is bytes: no head dim",
        },
        mutates=("pool",),
        # 20 rows of 64 float32.
        costs=(Cost("rows", 20 * (2 * 64 * 4 + 8) + 4, 0),),
        bench=(pages, _apply_case("rows-256", 16384, 64)),
        bench_gpu=(_apply_case("pages-4k", 65536, 1024), _apply_case("rows-256", 262144, 64)),
        aot_module=_MODULE,
        aot=(
            _variant("words-512", "copy_kernel", _COPY, {"T": 512, "R": 1}, 4, "i64"),
            _variant("words-32", "copy_kernel", _COPY, {"T": 32, "R": 16}, 4, "i64"),
        ),
    )
    return plan, apply
