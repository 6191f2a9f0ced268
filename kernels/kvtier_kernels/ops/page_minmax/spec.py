"""The registry's entries of page boxes: building them and appending to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Comparison, Exact, named
from kvtier_kernels.ops.page_minmax.ref import (
    page_minmax_append_ref,
    page_minmax_build_ref,
    page_minmax_ref,
)
from kvtier_kernels.ops.page_minmax.torch_impl import (
    page_minmax_append_torch,
    page_minmax_build_torch,
    page_minmax_torch,
)
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

_PAGE = 8
_FAR_STRIDE = 2**20
_MODULE = "kvtier_kernels.ops.page_minmax.triton_impl"
_EXACT: dict[str, Comparison] = {"kmin": Exact(), "kmax": Exact(), "sealed": Exact()}
_MUTATES = ("kmin", "kmax", "sealed")
_AXES = {"Hk": "KV heads", "d": "head dim", "P": "tokens a page", "W": "entries"}
_EXEMPT = {Hazard.GQA: "keys only: there are no query heads"}


def _case(
    id: str,
    counts: tuple[int, ...],
    *traits: str,
    first: int = 0,
    hk: int = 2,
    d: int = 64,
    dtype: str = "float32",
) -> Case:
    """seq_lens: rows of each entry; first: the slot where each begins."""
    axes = {"Hk": hk, "d": d, "P": _PAGE, "first": first}
    return Case(id, axes, counts, dtype, frozenset(traits), seed=len(id) + sum(counts) + d)


_CASES = (
    _case("empty", (), Hazard.EMPTY),
    _case("no-rows", (0, 3), Hazard.EMPTY),
    _case("single", (1,), Hazard.SINGLE),
    _case("whole-pages", (_PAGE, _PAGE)),
    _case("ragged", (1, _PAGE, 5, 0), Hazard.RAGGED),
    _case("widen", (3, 2), first=2),
    _case("widen-to-the-end", (2,), first=_PAGE - 2),
    _case("nan-key", (4, 4), "nan-key"),
    _case("nan-key-widens", (4,), "nan-key", first=2),
    _case("poison-behind-rows", (3, 5), Hazard.POISON),
    _case("used-again", (3,), Hazard.POISON, "old-box"),
    _case("duplicate-entry", (4, 4), Hazard.DUPLICATE),
    _case("duplicate-widening", (2, 2), Hazard.DUPLICATE, first=4),
    _case("padded", (4, 2), Hazard.PADDED),
    _case("strided", (5, 3), Hazard.STRIDED),
    _case("far-pages", (5, 3), Hazard.FAR, dtype="float16"),
    _case("bf16", (5, 3), dtype="bfloat16", first=1),
    _case("d128", (5,), d=128, dtype="float16"),
    _case("d256-one-head", (3,), d=256, hk=1),
)


def make_inputs(case: Case) -> Inputs:
    """Pages in another order than the entries; boxes not written yet hold NaN, and those to be widened
    the box of the rows before."""
    g = torch.Generator().manual_seed(case.seed)
    hk, d, first = (case.axes[x] for x in ("Hk", "d", "first"))
    dtype = getattr(torch, case.dtype)
    entries = len(case.seq_lens)
    pages = entries + 2
    k = torch.randn(pages, _PAGE, hk, d, generator=g).to(dtype)
    ids = torch.randperm(pages - 1, generator=g)[:entries].int() + 1
    counts = torch.tensor(case.seq_lens, dtype=torch.int32)
    starts = torch.full_like(counts, first)
    if Hazard.DUPLICATE in case.traits:
        ids = ids[:1].expand(entries).contiguous()
    if "nan-key" in case.traits:
        k[int(ids[0]), first + 1, 0, 3] = torch.nan
    kmin, kmax = (torch.full((pages, hk, d), torch.nan).to(dtype) for _ in range(2))
    for page in ids.tolist() if first else []:
        kmin[page], kmax[page] = k[page, :first].amin(0), k[page, :first].amax(0)
    if "old-box" in case.traits:
        kmin[:], kmax[:] = -9, 9
    if Hazard.POISON in case.traits:
        for page, n in zip(ids.tolist(), case.seq_lens, strict=True):
            k[page, first + n :] = torch.nan
    if Hazard.PADDED in case.traits:
        pad = torch.tensor([-1, -5], dtype=torch.int32)
        ids, counts, starts = (torch.cat((x[:1], pad, x[1:])) for x in (ids, counts, starts))
    sealed = torch.full((pages,), 1 if "old-box" in case.traits else 0, dtype=torch.uint8)
    if Hazard.FAR in case.traits:
        far = wrapping_ids(pages, _FAR_STRIDE)
        k = far_rows(k, far, stride=_FAR_STRIDE)
        kmin, kmax, sealed = (_spread(x, far) for x in (kmin, kmax, sealed))
        ids = far[ids.long()].int()
    return {
        "k_cache": k,
        "page_ids": ids,
        "first": starts,
        "count": counts,
        "kmin": kmin,
        "kmax": kmax,
        "sealed": sealed,
    }


def _spread(x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(int(ids[-1]) + 1, *x.shape[1:], dtype=x.dtype)
    out[ids] = x
    return out


def build_inputs(case: Case) -> Inputs:
    inputs = make_inputs(case)
    return {("filled" if n == "count" else n): x for n, x in inputs.items() if n != "first"}


def append_inputs(case: Case) -> Inputs:
    inputs = make_inputs(case)
    return {("slots" if n == "first" else n): x for n, x in inputs.items() if n != "count"}


def _entries(inputs: Inputs) -> list[tuple[int, int]]:
    """(first slot, rows) of each entry that is none of padding."""
    n = inputs["page_ids"].numel()
    zero, one = [0] * n, [1] * n
    first = inputs["first"].tolist() if "first" in inputs else zero
    count = inputs["count"].tolist() if "count" in inputs else one
    if "filled" in inputs:
        count = inputs["filled"].tolist()
    if "slots" in inputs:
        first = inputs["slots"].tolist()
    real = (inputs["page_ids"] >= 0).tolist()
    return [(f, c) for f, c, r in zip(first, count, real, strict=True) if r]


def bytes_moved(inputs: Inputs) -> int:
    """Rows in; boxes out, and in where they are widened; an entry and a seal."""
    _, _, hk, d = inputs["k_cache"].shape
    vectors = sum(c + (4 if f else 2) for f, c in _entries(inputs))
    return int(vectors * hk * d * inputs["k_cache"].element_size() + len(_entries(inputs)) * 13)


def flops(inputs: Inputs) -> int:
    """Two comparisons a key."""
    _, _, hk, d = inputs["k_cache"].shape
    return int(2 * sum(c for _, c in _entries(inputs)) * hk * d)


def _clean(inputs: Inputs) -> Inputs:
    return inputs | {"k_cache": torch.nan_to_num(inputs["k_cache"], 7.0)}


def _other_old_box(inputs: Inputs) -> Inputs:
    """What a page held that is started anew; the last page is in no entry and stays."""
    kmin, kmax, sealed = inputs["kmin"], inputs["kmax"], inputs["sealed"]
    kept = torch.ones_like(sealed, dtype=torch.bool)
    kept[inputs["page_ids"].long()] = False
    kmin[~kept], kmax[~kept], sealed[~kept] = torch.nan, torch.nan, 0
    return inputs


def _strides(inputs: Inputs) -> Inputs:
    return strided(inputs, ("k_cache", "kmin", "kmax"))


INVARIANCES = (
    Invariance("rows-behind", ("poison-behind-rows",), _clean, Hazard.POISON),
    Invariance("what-the-page-held", ("used-again",), _other_old_box),
    Invariance("strides", ("strided",), _strides, Hazard.STRIDED),
)


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _refusal(id: str, change: dict[str, Any], match: str, *backends: str) -> Refusal:
    return Refusal(id, "ragged", change, match, backends or ("torch", "triton"))


REFUSALS = (
    _refusal("unknown-page", {"page_ids": _ids(0, 1, 2, 6)}, "page 6 of 6"),
    _refusal("past-the-page", {"first": _ids(0, 1, 0, 0)}, "of a page of 8"),
    _refusal("a-slot-that-wraps", {"first": _ids(0, 2**31 - 1, 0, 0)}, "of a page of 8"),
    _refusal("two-entries-of-a-page", {"page_ids": _ids(1, 1, 2, 3)}, "two different entries"),
    _refusal("dtype-of-ids", {"page_ids": torch.arange(4)}, "int32"),
    _refusal("dtype-of-boxes", {"kmin": torch.zeros(6, 2, 64).half()}, "one dtype"),
    _refusal("shape", {"kmax": torch.zeros(6, 2, 32)}, "want kmin and kmax"),
    _refusal("layouts", {"kmin": torch.zeros(2, 6, 64).transpose(0, 1)}, "one layout", "triton"),
)


def _triton(name: str) -> Any:
    def load() -> Implementation:
        from kvtier_kernels.ops.page_minmax import triton_impl

        found: Implementation = getattr(triton_impl, name)
        return found

    return load


_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _variant(dtype: str, d: int) -> AotVariant:
    t = f"*{_TYPES[dtype]}"
    signature = {"k_ptr": t, "ids_ptr": "*i32", "first_ptr": "*i32", "count_ptr": "*i32"}
    signature |= {"min_ptr": t, "max_ptr": t, "sealed_ptr": "*u8"}
    signature |= {f"stride_{s}": "i32" for s in ("kp", "kt", "kh", "bp", "bh")}
    constants = {"PAGE": 16, "D": d, "ROWS": 16}
    id = f"{_TYPES[dtype]}-d{d}"
    return AotVariant(id, "minmax_kernel", signature, constants, frozenset(signature), 4, 3)


def specs() -> tuple[KernelSpec, ...]:
    """page_minmax and its two uses, page_minmax_build and page_minmax_append."""
    return page_minmax_spec(), build_spec(), append_spec()


def page_minmax_spec() -> KernelSpec:
    return KernelSpec(
        name="page_minmax",
        axes=_AXES,
        dtypes=("float32", "float16", "bfloat16"),
        cases=_CASES,
        make_inputs=make_inputs,
        reference=page_minmax_ref,
        implementations={"torch": lambda: page_minmax_torch, "triton": _triton("page_minmax_triton")},
        outputs=named,
        comparisons=_EXACT,
        bytes_moved=bytes_moved,
        flops=flops,
        stability=Stability(
            "one program a box; least and greatest of its rows",
            "nothing is rounded",
            rounds=False,
        ),
        aot_module=_MODULE,
        aot=(_variant("bfloat16", 128), _variant("float32", 64)),
        invariances=INVARIANCES,
        refusals=REFUSALS,
        exempt=_EXEMPT,
        mutates=_MUTATES,
        # 3 and 2 rows, two boxes read and written: 5 + 8 vectors of 2 heads of 64.
        costs=(Cost("widen", 13 * 2 * 64 * 4 + 26, 2 * 5 * 2 * 64),),
    )


def _use(
    name: str, cases: tuple[Case, ...], inputs: Any, reference: Any, torch_use: Any, **fields: Any
) -> KernelSpec:
    """An entry of a use, whose kernel is page_minmax's and compiled there."""
    return KernelSpec(
        name=name,
        axes=_AXES,
        dtypes=("float32", "float16", "bfloat16"),
        cases=cases,
        make_inputs=inputs,
        reference=reference,
        implementations={"torch": lambda: torch_use, "triton": _triton(f"{name}_triton")},
        outputs=named,
        comparisons=_EXACT,
        bytes_moved=bytes_moved,
        flops=flops,
        stability=Stability(
            "one program a box; least and greatest of its rows",
            "nothing is rounded",
            rounds=False,
        ),
        aot_module=_MODULE,
        exempt=_EXEMPT,
        mutates=_MUTATES,
        **fields,
    )


def build_spec() -> KernelSpec:
    cases = (*(c for c in _CASES if not c.axes["first"]), _case("bf16-built", (5,), dtype="bfloat16"))
    return _use(
        "page_minmax_build",
        cases,
        build_inputs,
        page_minmax_build_ref,
        page_minmax_build_torch,
        invariances=INVARIANCES,
        # Two whole pages in, two boxes out.
        costs=(Cost("whole-pages", (16 + 4) * 2 * 64 * 4 + 26, 2 * 16 * 2 * 64),),
        bench=(_case("smollm2-8k", (_PAGE,) * 1024, hk=3),),
        bench_gpu=(_case("gqa8-128k", (_PAGE,) * 16384, hk=8, d=128, dtype="bfloat16"),),
    )


def append_spec() -> KernelSpec:
    """Each case's entries are one row, at `first`."""
    cases = tuple(
        _case(
            c.id,
            (1,) * len(c.seq_lens),
            *c.traits,
            first=c.axes["first"],
            hk=c.axes["Hk"],
            d=c.axes["d"],
            dtype=c.dtype,
        )
        for c in _CASES
        if c.id not in ("no-rows", "nan-key", "nan-key-widens")
    )
    return _use(
        "page_minmax_append",
        (*cases, _case("last-slot", (1,), first=_PAGE - 1)),
        append_inputs,
        page_minmax_append_ref,
        page_minmax_append_torch,
        invariances=INVARIANCES,
        # One row of each of two pages and their boxes, read and written.
        costs=(Cost("widen", (2 + 8) * 2 * 64 * 4 + 26, 2 * 2 * 2 * 64),),
        bench=(_case("smollm2-b8", (1,) * 8, first=3, hk=3),),
        bench_gpu=(_case("gqa8-b64", (1,) * 64, first=3, hk=8, d=128, dtype="bfloat16"),),
    )
