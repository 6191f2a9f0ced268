"""The registry entry of bucketed LRU: states in the middle of their life, costs and compilations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Exact, named
from kvtier_kernels.ops.bucket_lru.ref import bucket_lru_ref
from kvtier_kernels.ops.bucket_lru.torch_impl import BUCKETS, EPOCH_LIMIT, BucketLru, bucket_lru_torch
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


def _case(id: str, lens: tuple[int, ...], slots: int, units: int, *traits: str) -> Case:
    """lens: wanted units of each row."""
    return Case(id, {"HOT": slots, "U": units}, lens, "int32", frozenset(traits), len(id) + slots + units)


def _cases() -> tuple[Case, ...]:
    return (
        _case("nothing-wanted", (0, 0), 8, 20, Hazard.EMPTY),
        _case("one-unit", (1,), 1, 1, Hazard.SINGLE, "cold"),
        _case("cold", (7, 12), 16, 40, "cold", Hazard.RAGGED),
        _case("warm", (10, 16, 3), 24, 60, Hazard.RAGGED, Hazard.PADDED),
        _case("twice-in-want", (20, 20), 24, 30, Hazard.DUPLICATE),
        _case("more-than-slots", (30, 25), 12, 60),
        _case("pinned", (12, 12), 16, 40, "pinned"),
        _case("all-pinned", (9,), 16, 40, "all-pinned"),
        _case("rebase", (12, 12), 16, 40, "old", Hazard.DUPLICATE),
        _case("same-epoch", (12, 12), 16, 40, "same-epoch"),
        _case("stale-loc", (12,), 16, 40, "stale"),
        _case("none-by-any-number-below-0", (12, 16), 16, 40, "below-0"),
        _case("ages-past-the-buckets", (12,), 16, 40, "ancient"),
        _case("odd-sizes", (33, 7), 37, 101, Hazard.RAGGED),
        _case("far-rows", (6, 0, 0, 0, 6), 8, 20, Hazard.FAR),
    )


def make_inputs(case: Case) -> Inputs:
    """A state in which three quarters of the slots hold units of different ages, and a list of wants."""
    g = torch.Generator().manual_seed(case.seed)
    rows, width = len(case.seq_lens), max([0, *case.seq_lens])
    hot, units = case.axes["HOT"], case.axes["U"]
    now = EPOCH_LIMIT + 5 if "old" in case.traits else 300
    oldest = now - (270 if "ancient" in case.traits else 20)
    slot_tok = torch.full((rows, hot), -1, dtype=torch.int32)
    loc = torch.full((rows, units), -1, dtype=torch.int32)
    age = torch.zeros(rows, hot, dtype=torch.int16)
    want = torch.full((rows, width), -1, dtype=torch.int32)
    for r, n in enumerate(case.seq_lens):
        live = 0 if "cold" in case.traits else min(3 * hot // 4, units)
        slots, ids = torch.randperm(hot, generator=g)[:live], torch.randperm(units, generator=g)[:live]
        slot_tok[r, slots], loc[r, ids] = ids.int(), slots.int()
        age[r, slots] = torch.randint(oldest, min(now, EPOCH_LIMIT), (live,), generator=g).short()
        if Hazard.DUPLICATE in case.traits:
            want[r, :n] = torch.randint(0, max(1, units // 2), (n,), generator=g).int()
        elif n <= units:
            want[r, :n] = torch.randperm(units, generator=g)[:n].int()
    if "same-epoch" in case.traits:
        age[:, ::2] = now
    if "below-0" in case.traits:
        loc[loc < 0] = -7
        loc[:, ::3][loc[:, ::3] < 0] = -100_000
    if "stale" in case.traits:
        loc[loc < 0] = 3
    pin = torch.rand(rows, hot, generator=g) < (0.5 if "pinned" in case.traits else 0.0)
    return {
        "want": want,
        "slot_tok": slot_tok,
        "age": age,
        "loc": far_matrix(loc) if Hazard.FAR in case.traits else loc,
        "pin": torch.ones_like(pin) if "all-pinned" in case.traits else pin,
        "epoch": torch.full((rows,), now, dtype=torch.int32),
    }


def _more_padding(inputs: Inputs) -> Inputs:
    """Padding between the wanted units and of another value: nobody sees where it stands."""
    want = inputs["want"]
    spread = torch.full((want.shape[0], 2 * want.shape[1]), -7, dtype=torch.int32)
    spread[:, 1::2] = want
    return inputs | {"want": spread}


def _without_padding(got: dict[str, Tensor]) -> dict[str, Tensor]:
    width = got["hit_slot"].shape[1] // 2
    lists = {n: got[n][:, :width] for n in ("victim", "miss", "evicted")}
    return got | lists | {"hit_slot": got["hit_slot"][:, 1::2]}


INVARIANCES = (
    Invariance(
        "where-padding-stands", ("warm", "twice-in-want"), _more_padding, Hazard.PADDED, _without_padding
    ),
    Invariance(
        "strides",
        ("warm", "rebase"),
        lambda x: strided(x, ("want", "slot_tok", "age", "loc")),
        Hazard.STRIDED,
    ),
)


def _refusal(id: str, change: dict[str, Any], match: str) -> Refusal:
    return Refusal(id, "one-unit", change, match)


def _ints(value: int, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


_TWO_ROWS = {
    "want": _ints(0, 2, 1),
    "slot_tok": _ints(-1, 2, 1),
    "age": _ints(0, 2, 1).short(),
    "loc": _ints(-1, 4, 2).T,
    "pin": _ints(0, 2, 1).bool(),
    "epoch": _ints(1, 2),
}
REFUSALS = (
    _refusal("rows", {"want": _ints(0, 2, 1)}, "want slot_tok"),
    _refusal("dimensions", {"want": _ints(0, 1)}, "two dimensions"),
    _refusal("dtype-of-age", {"age": _ints(0, 1, 1)}, "want age torch.int16"),
    _refusal("dtype-of-pin", {"pin": _ints(0, 1, 1)}, "want pin torch.bool"),
    _refusal("unknown-unit", {"want": _ints(1, 1, 1)}, "unit 1 of 1"),
    _refusal("epoch-0", {"epoch": _ints(0, 1)}, "at least 1"),
    _refusal("age-after-epoch", {"age": _ints(301, 1, 1).short()}, "every age"),
    _refusal("columns-apart", _TWO_ROWS, "contiguous"),
)


def bytes_moved(inputs: Mapping[str, Any]) -> int:
    """Per row: want, loc of each wanted, and the four lists; slot_tok, age and pin in, age out; 12 bytes of
    epoch and counts. Installed units are not counted."""
    rows, width = inputs["want"].shape
    return int(rows * (width * 4 * 6 + inputs["slot_tok"].shape[1] * (4 + 2 + 1 + 2) + 12))


def flops(inputs: Mapping[str, Any]) -> int:
    """None: integers only."""
    return 0


def _torch() -> Implementation:
    return bucket_lru_torch


def _triton() -> Implementation:
    from kvtier_kernels.ops.bucket_lru.triton_impl import bucket_lru_triton

    return bucket_lru_triton


_POINTERS = {"age_ptr": "*i16", "pin_ptr": "*i1"}
_NAMES = (
    "want_ptr tok_ptr age_ptr loc_ptr pin_ptr epoch_ptr hit_ptr victim_ptr miss_ptr evicted_ptr n_miss_ptr "
    "shortfall_ptr width hot units stride_want stride_tok stride_age stride_loc stride_pin"
)


def _variant(width: int, hot: int, warps: int) -> AotVariant:
    signature = {n: _POINTERS.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in _NAMES.split()}
    constants = {"W": width, "H": hot, "NB": BUCKETS, "LIMIT": EPOCH_LIMIT}
    return AotVariant(
        f"w{width}-hot{hot}", "lru_kernel", signature, constants, frozenset(signature) - {"units"}, warps, 3
    )


def specs() -> tuple[KernelSpec, ...]:
    """Bucketed LRU."""
    no_heads = "a row is one list of units: heads and their dims are the caller's"
    bench = (
        _case("w256-hot1024", (256,) * 8, 1024, 8192),
        _case("w2048-hot4096", (2048,) * 8, 4096, 131072),
    )
    return (
        KernelSpec(
            name="bucket_lru",
            axes={"R": "rows: requests times KV heads", "W": "wanted units", "HOT": "slots", "U": "units"},
            dtypes=("int32",),
            cases=_cases(),
            make_inputs=make_inputs,
            reference=bucket_lru_ref,
            implementations={"torch": _torch, "triton": _triton},
            outputs=named,
            comparisons={n: Exact() for n in BucketLru._fields},
            bytes_moved=bytes_moved,
            flops=flops,
            stability=Stability(
                "one program a row, by counts; of equal units the place in the list decides",
                "nothing is rounded",
                rounds=False,
            ),
            invariances=INVARIANCES,
            refusals=REFUSALS,
            exempt={
                Hazard.POISON: "integers have no NaN; padding is tried in its place",
                Hazard.GQA: no_heads,
                Hazard.HEAD_DIMS: no_heads,
                Hazard.BF16: "no floating point",
            },
            mutates=("slot_tok", "age", "loc", "epoch"),
            # 3 rows, 16 places, 24 slots.
            costs=(Cost("warm", 3 * (16 * 24 + 24 * 9 + 12), 0),),
            bench=bench,
            bench_gpu=bench,
            aot_module="kvtier_kernels.ops.bucket_lru.triton_impl",
            aot=(_variant(256, 1024, 4), _variant(2048, 4096, 8)),
        ),
    )
