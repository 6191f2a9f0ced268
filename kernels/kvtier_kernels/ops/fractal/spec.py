"""The registry entries of the layout translation: ragged edges, costs and compilations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.compare import Exact, named
from kvtier_kernels.ops.fractal.ref import from_fractal_ref, to_fractal_ref
from kvtier_kernels.ops.fractal.torch_impl import from_fractal_torch, to_fractal_torch
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
from kvtier_kernels.testing.inputs import reserved, strided

_MODULE = "kvtier_kernels.ops.fractal.triton_impl"
_FAR_STRIDE = 2**30
_AXES = {"B": "requests", "H": "heads", "S": "rows", "d": "head dim", "T": "rows and columns of a tile"}
_EXEMPT = {
    Hazard.DUPLICATE: "no ids: every element moves once",
    Hazard.RAGGED: "one S for all heads: a ragged batch is several calls",
    Hazard.GQA: "heads are independent and there are no queries",
}


def _case(
    id: str,
    seq: int,
    dim: int,
    *traits: str,
    batch: int = 1,
    heads: int = 2,
    tile: int = 16,
    dtype: str = "float32",
) -> Case:
    axes = {"B": batch, "H": heads, "S": seq, "d": dim, "T": tile}
    return Case(id, axes, (), dtype, frozenset(traits), seed=seq + dim)


_CASES = (
    _case("no-rows", 0, 64, Hazard.EMPTY),
    _case("one-row", 1, 64, Hazard.SINGLE),
    _case("ragged-both", 37, 40, Hazard.PADDED, batch=2, heads=3),
    _case("whole-tiles", 32, 64),
    _case("d128-bf16", 20, 128, dtype="bfloat16"),
    _case("d256", 16, 256, heads=1),
    _case("d200", 17, 200, heads=1, dtype="bfloat16"),
    _case("less-than-a-tile", 5, 7),
    _case("tile-32", 37, 40, tile=32, dtype="bfloat16"),
    _case("bytes", 33, 48, dtype="uint8"),
    _case("nan-everywhere", 18, 24, "nan"),
    _case("far-rows", 33, 16, Hazard.FAR, heads=1, dtype="uint8"),
)


def _values(case: Case, shape: tuple[int, ...]) -> Tensor:
    g = torch.Generator().manual_seed(case.seed)
    x = (torch.rand(shape, generator=g) * 250 + 1).to(getattr(torch, case.dtype))
    if "nan" in case.traits:
        x[torch.rand(shape, generator=g) < 0.3] = torch.nan
    return x


def _apart(x: Tensor, axis: int) -> Tensor:
    """The same values with 2^30 elements between neighbours on an axis of 3, in the middle of a pool: what an
    int32 product wraps to is memory that is never touched, so it reads 0."""
    strides = list(torch.empty(x.shape, device="meta").stride())
    strides[axis] = _FAR_STRIDE
    return reserved(3 * _FAR_STRIDE + x.numel(), x.dtype).as_strided(x.shape, strides).copy_(x)


def make_row_inputs(case: Case) -> Inputs:
    """Rows, and the size of a tile. Far: three rows, far from each other."""
    batch, heads, seq, dim, tile = (case.axes[n] for n in ("B", "H", "S", "d", "T"))
    far = Hazard.FAR in case.traits
    x = _values(case, (batch, heads, 3 if far else seq, dim))
    return {"x": _apart(x, 2) if far else x, "tile": tile}


def make_tile_inputs(case: Case) -> Inputs:
    """Tiles whose padding is not zero, and the size of what is in them. Far: three rows of tiles."""
    batch, heads, seq, dim, tile = (case.axes[n] for n in ("B", "H", "S", "d", "T"))
    tiles = _values(case, (batch, heads, -(-seq // tile), -(-dim // tile), tile, tile))
    if Hazard.POISON in case.traits:
        tiles[..., -1, 8:, :] = torch.nan
    return {"tiles": _apart(tiles, 2) if Hazard.FAR in case.traits else tiles, "seq": seq, "dim": dim}


def _other_padding(inputs: Inputs) -> Inputs:
    tiles, seq, dim = inputs["tiles"].clone(), inputs["seq"], inputs["dim"]
    tile = tiles.shape[4]
    fill = torch.nan if tiles.is_floating_point() else 77
    if seq % tile:
        tiles[:, :, -1, :, seq % tile :] = fill
    if dim % tile:
        tiles[:, :, :, -1, :, dim % tile :] = fill
    return inputs | {"tiles": tiles}


def _tiles_apart(inputs: Inputs) -> Inputs:
    tiles = inputs["tiles"]
    wide = torch.zeros(*tiles.shape[:3], tiles.shape[3] + 1, *tiles.shape[4:], dtype=tiles.dtype)
    wide[:, :, :, :-1] = tiles
    return inputs | {"tiles": wide[:, :, :, :-1]}


def _one_element(inputs: Inputs) -> Inputs:
    """A view with NaN behind every row: the zero of the padding is not read from there."""
    return strided(inputs, ("x",))


def row_bytes(inputs: Mapping[str, Any]) -> int:
    """Rows in, tiles out, padding included."""
    x, tile = inputs["x"], inputs["tile"]
    batch, heads, seq, dim = x.shape
    tiles = batch * heads * -(-seq // tile) * -(-dim // tile) * tile * tile
    return int((x.numel() + tiles) * x.element_size())


def tile_bytes(inputs: Mapping[str, Any]) -> int:
    """Elements in, padding left out, and rows out."""
    batch, heads = inputs["tiles"].shape[:2]
    return int(2 * batch * heads * inputs["seq"] * inputs["dim"] * inputs["tiles"].element_size())


def no_flops(inputs: Mapping[str, Any]) -> int:
    """None: copies."""
    return 0


def _torch_to() -> Implementation:
    return to_fractal_torch


def _torch_from() -> Implementation:
    return from_fractal_torch


def _triton_to() -> Implementation:
    from kvtier_kernels.ops.fractal.triton_impl import to_fractal_triton

    return to_fractal_triton


def _triton_from() -> Implementation:
    from kvtier_kernels.ops.fractal.triton_impl import from_fractal_triton

    return from_fractal_triton


def _variant(id: str, kernel: str, names: str, word: str, columns: int) -> AotVariant:
    """Pointers end in _ptr; sizes and strides are multiples of 16, as heads of 64 and 128 have them."""
    signature = {n: f"*{word}" if n.endswith("_ptr") else "i32" for n in names.split()}
    aligned = frozenset(n for n in signature if n.endswith("_ptr") or n.startswith("stride") or n == "dim")
    return AotVariant(id, kernel, signature, {"T": 16, "BD": columns}, aligned, 4, 3)


_TO = "x_ptr out_ptr heads seq dim down across stride_b stride_h stride_s"
_FROM = "tiles_ptr out_ptr heads seq dim stride_b stride_h stride_s stride_d"


def _spec(
    name: str,
    make_inputs: Callable[[Case], Inputs],
    reference: Callable[..., Tensor],
    torch_impl: Callable[[], Implementation],
    triton_impl: Callable[[], Implementation],
    **rest: Any,
) -> KernelSpec:
    return KernelSpec(
        name=name,
        axes=_AXES,
        dtypes=("float32", "bfloat16", "uint8"),
        make_inputs=make_inputs,
        reference=reference,
        implementations={"torch": torch_impl, "triton": triton_impl},
        outputs=named,
        comparisons={"out": Exact()},
        flops=no_flops,
        stability=Stability(
            "copies of whole elements",
            "nothing is rounded",
            rounds=False,
        ),
        bench=(
            _case("smollm2-8k", 8192, 64, heads=3),
            _case("gqa8-8k", 8192, 128, heads=8, dtype="bfloat16"),
        ),
        bench_gpu=(_case("gqa8-128k", 131072, 128, heads=8, dtype="bfloat16"),),
        aot_module=_MODULE,
        **rest,
    )


def specs() -> tuple[KernelSpec, ...]:
    """To tiles and back."""
    to = _spec(
        "to_fractal",
        make_row_inputs,
        to_fractal_ref,
        _torch_to,
        _triton_to,
        cases=_CASES,
        bytes_moved=row_bytes,
        invariances=(
            Invariance("strides", ("ragged-both", "d200"), _one_element, Hazard.STRIDED),
            Invariance("nan-behind-the-rows", ("less-than-a-tile",), _one_element, Hazard.POISON),
        ),
        refusals=(
            Refusal("dimensions", "one-row", {"x": torch.zeros(1, 2, 64)}, r"want x \[B,H,S,D\]"),
            Refusal("columns-apart", "one-row", {"x": torch.zeros(1, 1, 4, 8)[..., ::2]}, "contiguous"),
            Refusal("tile-8", "one-row", {"tile": 8}, "tiles of 16 or 32"),
        ),
        exempt=_EXEMPT,
        # 2 x 3 heads of 37 x 40 float32 into 3 x 3 tiles of 256.
        costs=(Cost("ragged-both", 6 * (37 * 40 + 9 * 256) * 4, 0),),
        aot=(
            _variant("rows-2b-d128", "to_kernel", _TO, "i16", 128),
            _variant("rows-4b-d64", "to_kernel", _TO, "i32", 64),
        ),
    )
    back = _spec(
        "from_fractal",
        make_tile_inputs,
        from_fractal_ref,
        _torch_from,
        _triton_from,
        cases=_CASES,
        bytes_moved=tile_bytes,
        invariances=(
            Invariance("padding", ("ragged-both", "less-than-a-tile", "d200"), _other_padding, Hazard.POISON),
            Invariance("tiles-apart", ("ragged-both", "tile-32"), _tiles_apart, Hazard.STRIDED),
        ),
        refusals=(
            Refusal("dimensions", "one-row", {"tiles": torch.zeros(1, 2, 1, 4, 16)}, "want tiles"),
            Refusal("not-square", "one-row", {"tiles": torch.zeros(1, 2, 1, 4, 16, 32)}, "want tiles"),
            Refusal("too-many-rows", "one-row", {"seq": 17}, "17 rows of 64 are not"),
            Refusal("negative", "one-row", {"seq": -1}, "-1 rows"),
            Refusal(
                "tile-in-pieces",
                "one-row",
                {"tiles": torch.zeros(1, 2, 1, 4, 16, 32)[..., ::2]},
                "contiguous",
            ),
        ),
        exempt=_EXEMPT,
        costs=(Cost("ragged-both", 2 * 6 * 37 * 40 * 4, 0),),
        aot=(
            _variant("rows-2b-d128", "from_kernel", _FROM, "i16", 128),
            _variant("rows-4b-d64", "from_kernel", _FROM, "i32", 64),
        ),
    )
    return back, to
