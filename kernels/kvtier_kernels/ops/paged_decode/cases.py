"""The inputs with which paged decode is tried: edges, windows, caps, and memory that no answer may depend on.

They stand apart from the registry's entry, which says what is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvtier_kernels.spec import Case, Hazard, Inputs
from kvtier_kernels.testing.inputs import far_rows, wrapping_ids

PAGE = 16
SPLIT = 256
_FAR_STRIDE = 2**20


def case_of(
    id: str,
    lens: tuple[int, ...],
    *traits: str,
    hq: int = 9,
    hk: int = 3,
    d: int = 64,
    dtype: str = "float32",
    window: int | None = None,
    cap: int | None = None,
) -> Case:
    """A case whose seed is of its name and sizes. window, cap: axes W and C."""
    axes = {"Hq": hq, "Hk": hk, "d": d, "P": PAGE}
    axes |= {} if window is None else {"W": window}
    axes |= {} if cap is None else {"C": cap}
    return Case(id, axes, lens, dtype, frozenset(traits), seed=len(id) + sum(lens) + d)


def cases() -> tuple[Case, ...]:
    """All of paged decode's."""
    edges = (0, 1, PAGE - 1, PAGE, PAGE + 1)
    found = [
        case_of("empty", (0,), Hazard.EMPTY),
        case_of("empty-beside-full", (0, 40, 0), Hazard.EMPTY, Hazard.RAGGED),
        case_of("page-edges", edges, Hazard.RAGGED),
        case_of("split-edges", (SPLIT - 1, SPLIT, SPLIT + 1)),
        case_of("block-edges", (63, 64, 65)),
        case_of("three-splits", (2 * SPLIT + 77,)),
        case_of("one-token", (1,), Hazard.SINGLE),
        case_of("huge-logits", (70, 300), "huge"),
        case_of("one-logit-minus-inf", (40,), "minus-inf-row"),
        case_of("all-logits-minus-inf", (20, 30), "minus-inf-all"),
        case_of("nan-beyond-the-length", (33, 257), "nan-tail", Hazard.POISON),
        case_of("nan-in-unmapped-pages", (48, 20), "nan-unmapped", Hazard.POISON),
        case_of("inf-v-visible", (40,), "inf-v"),
        case_of("duplicate-keys", (50,), Hazard.DUPLICATE),
        case_of("strided", (100, 31), Hazard.STRIDED),
        case_of("far-pages", (37,), Hazard.FAR, hq=2, hk=1, dtype="float16"),
        case_of("d128-gqa8", (130, 300), hq=8, hk=1, d=128),
        case_of("mha-d128", (40,), hq=4, hk=4, d=128),
        case_of("bf16", (257, 40), dtype="bfloat16"),
        case_of("bf16-d128", (300,), hq=8, hk=2, d=128, dtype="bfloat16"),
        case_of("f16", (257, 40), dtype="float16"),
        case_of("d256", (40,), hq=4, hk=2, d=256),
    ]
    found += [case_of(f"gqa{g}", (37, 70), hq=g, hk=1) for g in (1, 2, 5, 7, 16)]
    return (*found, *_windowed(), *_capped())


def _windowed() -> tuple[Case, ...]:
    """Windows that begin at, before and behind a page's, a tile's and a split's first row, or with none."""
    return (
        case_of("window-of-nothing", (0, 40, 256), Hazard.EMPTY, window=0),
        case_of("window-of-one", (1, 40, 257), Hazard.SINGLE, window=1),
        case_of("window-longer", (0, 40, 257), Hazard.RAGGED, window=257),
        case_of("window-ragged", (0, 1, 99, 100, 101, 300, 620), Hazard.RAGGED, window=100),
        case_of("window-page-edges", (46, 47, 48, 49, 50), window=2 * PAGE),
        case_of("window-of-a-page", (16, 31, 32, 33), window=PAGE),
        case_of("window-tile-edges", (163, 164, 165), window=100),
        case_of("window-split-edges", (SPLIT + 69, SPLIT + 70, SPLIT + 71), window=70),
        case_of("window-over-splits", (3 * SPLIT + 5,), window=SPLIT + 100),
        case_of("window-poison", (33, 300, 530), "nan-tail", "nan-before", Hazard.POISON, window=40),
        case_of("window-absent-pages", (33, 300, 530), "absent", Hazard.PADDED, window=40),
        case_of("window-far", (300,), Hazard.FAR, hq=2, hk=1, dtype="float16", window=37),
        case_of("window-strided", (100, 300), Hazard.STRIDED, window=45),
        case_of("window-bf16-d128", (300, 20), hq=8, hk=1, d=128, dtype="bfloat16", window=90),
        case_of("window-f16", (300, 20), dtype="float16", window=90),
    )


def _capped() -> tuple[Case, ...]:
    """Caps that change much, and windows with them."""
    return (
        case_of("softcap", (0, 1, 300), cap=5),
        case_of("softcap-tight", (40, 257), cap=1),
        case_of("softcap-wide", (40, 257), cap=1 << 20),
        case_of("softcap-of-minus-inf", (20, 40), "minus-inf-row", cap=5),
        case_of("softcap-poison", (33, 257), "nan-tail", Hazard.POISON, cap=5),
        case_of("softcap-f16", (257, 40), dtype="float16", cap=5),
        case_of("softcap-bf16-d128", (300,), hq=8, hk=2, d=128, dtype="bfloat16", cap=5),
        case_of("softcap-window", (0, 33, 300, 530), "nan-tail", "nan-before", window=40, cap=5),
        case_of("softcap-window-of-nothing", (40,), window=0, cap=5),
    )


def make_inputs(case: Case) -> Inputs:
    """Inputs of a case from its seed. Pages are permuted; page 0 is never mapped. The table is one page
    wider than any request needs, so its last ids are padding. Axes W and C are the window and the cap."""
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
    if "absent" in case.traits:
        outside(table, case.seq_lens, case.axes["W"], -1)
    if Hazard.FAR in case.traits:
        ids = wrapping_ids(total, _FAR_STRIDE)
        k, v, table = (
            far_rows(k, ids, stride=_FAR_STRIDE),
            far_rows(v, ids, stride=_FAR_STRIDE),
            ids[table.long()].int(),
        )
    options: Inputs = {"window": case.axes["W"]} if "W" in case.axes else {}
    if "C" in case.axes:
        options["softcap"] = float(case.axes["C"])
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "page_table": table,
        "seq_lens": lens,
        "scale": 1 / math.sqrt(d),
        **options,
    }


def outside(table: torch.Tensor, lens: Sequence[int], window: int, page_id: int) -> None:
    """Ids of pages of which no row is in a request's window."""
    for b, n in enumerate(lens):
        table[b, : max(0, n - window) // PAGE] = page_id
        table[b, -(-n // PAGE) :] = page_id


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
        if "nan-before" in case.traits:
            for t in range(max(0, n - case.axes["W"])):
                k[int(table[b, t // page]), t % page] = math.nan
                v[int(table[b, t // page]), t % page] = math.inf
    if "nan-unmapped" in case.traits:
        k[0] = math.nan
        v[0] = math.inf
