"""The registry entry of the selection: hostile rows, costs and compilations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Exact, named
from kvtier_kernels.ops.topk_units.ref import topk_units_ref
from kvtier_kernels.ops.topk_units.torch_impl import topk_units_torch
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
from kvtier_kernels.testing.inputs import strided
from kvtier_kernels.testing.matrices import far_matrix


def _case(id: str, lens: tuple[int, ...], width: int, k: int, *traits: str) -> Case:
    return Case(id, {"X": width, "k": k}, lens, "float32", frozenset(traits), seed=len(id) + width + k)


def _cases() -> tuple[Case, ...]:
    return (
        _case("no-scores", (0, 0), 0, 3, Hazard.EMPTY),
        _case("empty-beside-full", (0, 40, 0), 40, 7, Hazard.EMPTY, Hazard.RAGGED),
        _case("k-0", (5, 9), 9, 0),
        _case("one-score", (1,), 1, 1, Hazard.SINGLE),
        _case("more-than-there-are", (3, 20), 20, 33, Hazard.RAGGED),
        _case("exactly-all", (20, 20), 20, 20),
        _case("k-by-row", (17, 29, 2), 30, 9, Hazard.RAGGED, "k-by-row"),
        _case("capacity-below-k", (30, 20), 30, 12, "capacity"),
        _case("ties-at-the-cut", (50, 31), 50, 11, Hazard.DUPLICATE),
        _case("all-equal", (33,), 33, 5, "all-equal"),
        _case("both-zeros", (30,), 30, 9, "zeros"),
        _case("nan-and-inf", (60, 30), 60, 22, "special"),
        _case("more-nan-than-k", (30,), 30, 5, "nan-mostly"),
        _case("tiny", (30,), 30, 6, "subnormal"),
        _case("nan-beyond-the-length", (20, 27), 32, 6, Hazard.POISON, Hazard.RAGGED),
        _case("far-rows", (16, 0, 0, 0, 16), 16, 4, Hazard.FAR),
        _case("long", (9000, 4097, 0), 9000, 600, Hazard.RAGGED, "k-by-row"),
        _case("long-ties", (9000, 8500), 9000, 3000, Hazard.DUPLICATE),
        _case("long-special", (8200,), 8200, 900, "special", Hazard.POISON),
        _case("long-all-equal", (9000,), 9000, 4500, "all-equal"),
    )


def make_inputs(case: Case) -> Inputs:
    """Scores of a case from its seed."""
    g = torch.Generator().manual_seed(case.seed)
    rows, width = len(case.seq_lens), case.axes["X"]
    score = torch.randn(rows, width, generator=g)
    k = torch.full((rows,), case.axes["k"], dtype=torch.int32)
    if "k-by-row" in case.traits:
        k = torch.randint(0, case.axes["k"] + 1, (rows,), generator=g).int()
        k[0] = case.axes["k"]
    score = _hostile(case, score, g)
    if Hazard.POISON in case.traits:
        for r, n in enumerate(case.seq_lens):
            score[r, n:] = math.nan
    if Hazard.FAR in case.traits:
        score = far_matrix(score)
    return {
        "score": score,
        "valid_len": torch.tensor(case.seq_lens, dtype=torch.int32),
        "k": k,
        "max_k": 5 if "capacity" in case.traits else case.axes["k"],
    }


def _hostile(case: Case, score: Tensor, g: torch.Generator) -> Tensor:
    draw = torch.rand(score.shape, generator=g)
    if Hazard.DUPLICATE in case.traits:
        score = (score * 2).round()
    if "all-equal" in case.traits:
        score = torch.full_like(score, -1.5)
    if "zeros" in case.traits:
        score = torch.where(score > 0, 0.0, -0.0)
    if "special" in case.traits:
        score = score.masked_fill(draw < 0.1, math.nan).masked_fill(draw > 0.9, math.inf)
        score = score.masked_fill((draw > 0.3) & (draw < 0.5), -math.inf)
    if "nan-mostly" in case.traits:
        score = score.masked_fill(draw < 0.5, math.nan)
    if "subnormal" in case.traits:
        score = (score * 8).round() * 1e-45
    return score


def _other_padding(inputs: Inputs) -> Inputs:
    score = inputs["score"].clone()
    for r, n in enumerate(inputs["valid_len"].tolist()):
        score[r, n:] = math.inf
    return inputs | {"score": score}


def _wider(inputs: Inputs) -> Inputs:
    score = inputs["score"]
    return inputs | {"score": torch.cat([score, torch.full_like(score, 9e9)], 1)}


INVARIANCES = (
    Invariance("no-poison", ("nan-beyond-the-length", "long-special"), _other_padding, Hazard.POISON),
    Invariance("padding", ("k-by-row",), _other_padding, Hazard.PADDED),
    Invariance("width", ("ties-at-the-cut",), _wider, Hazard.PADDED),
    Invariance("strides", ("k-by-row", "long-ties"), lambda x: strided(x, ("score",)), Hazard.STRIDED),
)

_BOTH = ("torch", "triton")


def _refusal(id: str, change: dict[str, Any], match: str) -> Refusal:
    return Refusal(id, "one-score", change, match, _BOTH)


REFUSALS = (
    _refusal("shape", {"score": torch.zeros(3)}, r"want score"),
    _refusal("dtype", {"score": torch.zeros(1, 1, dtype=torch.float64)}, "float32"),
    _refusal("columns-apart", {"score": torch.zeros(4, 1, 2)[:, 0].T[:1]}, "contiguous"),
    _refusal("k-dtype", {"k": torch.ones(1, dtype=torch.int64)}, "want k int32"),
    _refusal("k-rows", {"k": torch.ones(2, dtype=torch.int32)}, "want k int32"),
    _refusal("negative-k", {"k": torch.tensor([-1], dtype=torch.int32)}, "k >= 0"),
    _refusal("negative-max-k", {"max_k": -1}, "max_k >= 0"),
    _refusal("past-the-row", {"valid_len": torch.tensor([2], dtype=torch.int32)}, r"\[0,1\]"),
)


def _taken(inputs: Mapping[str, Any]) -> int:
    return int(torch.minimum(inputs["k"], inputs["valid_len"]).clamp_max(inputs["max_k"]).sum())


def bytes_moved(inputs: Mapping[str, Any]) -> int:
    """Valid scores in once, chosen ids out; 20 bytes a row of lengths, offsets and cuts."""
    rows = len(inputs["k"])
    return 4 * int(inputs["valid_len"].sum()) + 4 * _taken(inputs) + 20 * rows + 4


def flops(inputs: Mapping[str, Any]) -> int:
    """None: comparisons only."""
    return 0


def _torch() -> Implementation:
    return topk_units_torch


def _triton() -> Implementation:
    from kvtier_kernels.ops.topk_units.triton_impl import topk_units_triton

    return topk_units_triton


def _bench(*shapes: tuple[str, int, int, int]) -> tuple[Case, ...]:
    return tuple(_case(id, (width,) * rows, width, k) for id, rows, width, k in shapes)


_TYPES = {"score_ptr": "*fp32", "kth_ptr": "*fp32", "runner_ptr": "*fp32"}


def _variant(id: str, kernel: str, names: str, constants: dict[str, int], warps: int) -> AotVariant:
    """Pointers end in _ptr; all are aligned, and so is the stride of a row."""
    signature = {n: _TYPES.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names.split()}
    aligned = frozenset(n for n in signature if n.endswith("_ptr") or n == "stride_r")
    return AotVariant(id, kernel, signature, constants, aligned, warps, 3)


_SORT = "score_ptr valid_ptr k_ptr indptr_ptr units_ptr kth_ptr runner_ptr most stride_r"
_COUNT = "score_ptr valid_ptr k_ptr hist_ptr above_ptr prefix_ptr need_ptr most stride_r"
_WRITE = (
    "score_ptr valid_ptr k_ptr hist_ptr above_ptr prefix_ptr need_ptr indptr_ptr units_ptr kth_ptr left_ptr "
    "most stride_r"
)
_TILES = {"T": 4096, "CHUNK_": 16}


def specs() -> tuple[KernelSpec, ...]:
    """Selection of the best units."""
    no_heads = "a row is one list of scores: heads and their dims are the caller's"
    return (
        KernelSpec(
            name="topk_units",
            axes={"R": "rows: requests times heads", "X": "scores a row", "k": "units a row takes"},
            dtypes=("float32",),
            cases=_cases(),
            make_inputs=make_inputs,
            reference=topk_units_ref,
            implementations={"torch": _torch, "triton": _triton},
            outputs=named,
            comparisons={n: Exact() for n in ("indptr", "units", "kth", "runner_up")},
            bytes_moved=bytes_moved,
            flops=flops,
            stability=Stability(
                "one program a row, or counts of its blocks",
                "nothing is rounded",
                rounds=False,
            ),
            invariances=INVARIANCES,
            refusals=REFUSALS,
            exempt={
                Hazard.GQA: no_heads,
                Hazard.HEAD_DIMS: no_heads,
                Hazard.BF16: "scores are float32 in every scoring op",
            },
            # 2 rows of 50 and 31 scores, 11 of each.
            costs=(Cost("ties-at-the-cut", 4 * 81 + 4 * 22 + 40 + 4, 0),),
            bench=_bench(
                ("smollm2-pages-8k", 3, 512, 128),
                ("gqa8-pages-128k", 8, 8192, 128),
                ("rows-128k", 8, 131072, 2048),
            ),
            bench_gpu=_bench(("gqa8-pages-128k", 8, 8192, 128), ("rows-128k", 8, 131072, 2048)),
            aot_module="kvtier_kernels.ops.topk_units.triton_impl",
            aot=(
                _variant("sort-512-k128", "sort_kernel", _SORT, {"X": 512, "K": 256, "ROWS": 64}, 4),
                _variant("sort-8192-k128", "sort_kernel", _SORT, {"X": 8192, "K": 256, "ROWS": 64}, 8),
                _variant("sort-8192-all", "sort_kernel", _SORT, {"X": 8192, "K": 8192, "ROWS": 64}, 8),
                _variant("histogram-first", "histogram_kernel", _COUNT, {"LEVEL": 0, **_TILES}, 8),
                _variant("histogram-last", "histogram_kernel", _COUNT, {"LEVEL": 3, **_TILES}, 8),
                _variant("write", "write_kernel", _WRITE, {"ROWS": 64, **_TILES}, 8),
                _variant("runner-up", "runner_kernel", "left_ptr runner_ptr blocks", {"T": 256}, 1),
            ),
        ),
    )
