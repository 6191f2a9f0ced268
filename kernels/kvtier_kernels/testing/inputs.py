"""Inputs of a kernel's case, changed in ways that must not matter: copies, strides, devices, far offsets."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Linux's MAP_NORESERVE, which Python names from 3.13 on.
_NORESERVE = 0x4000


def fresh(inputs: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The inputs with the named tensors copied: same values, same strides, other memory. Storage
    between the elements of a view is reserved and never touched."""
    out = dict(inputs)
    for name in names:
        out[name] = _copy(out[name])
    return out


def _copy(x: Tensor) -> Tensor:
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return y.copy_(x)


def strided(inputs: Mapping[str, Any], names: Iterable[str], *, pad: int = 16) -> dict[str, Any]:
    """The named tensors as views that are not contiguous: `pad` more elements lie behind the last
    dimension, so that only its stride stays 1. Values are equal; the gap is NaN or the dtype's largest."""
    out = dict(inputs)
    for name in names:
        x = out[name]
        gap = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
        wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), gap, dtype=x.dtype, device=x.device)
        view = wide[..., : x.shape[-1]]
        view.copy_(x)
        out[name] = view
    return out


def one_of(*names: str) -> Callable[[Mapping[str, Any], int], dict[str, Any]]:
    """What gives the inputs of one request, the tensors named having a first dimension of requests."""

    def of(inputs: Mapping[str, Any], at: int) -> dict[str, Any]:
        return {**inputs, **{name: inputs[name][at : at + 1] for name in names}}

    return of


def to_device(inputs: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """All tensors on the device, with their strides."""
    out = dict(inputs)
    for name, x in out.items():
        if isinstance(x, Tensor):
            y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            out[name] = y.copy_(x)
    return out


def reserved(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros in memory that is reserved and not backed until it is touched, however much it is. 2^31
    elements lie before and behind its start, so that an offset which int32 wraps is wrong without a fault.
    """
    size = (2**31 + max(elements, 2**31)) * torch.empty(0, dtype=dtype).element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=dtype)[2**31 :]


def far_rows(rows: Tensor, ids: Tensor, *, stride: int) -> Tensor:
    """A pool in which row `i` of `rows` [N, ...] lies `ids[i]` times `stride` elements in.

    Choose ids times stride beyond 2^31 with each below it, and a product that int32 would wrap to
    another row: `wrapping_ids`. The pool is virtual memory; only the rows and the first N places are
    touched, which are set to 1, so that a wrapped read is wrong without a fault. ids: distinct, ascending.
    """
    inner = rows[0].numel()
    if inner > stride or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < len(rows):
        raise ValueError(f"rows of {inner} elements every {stride}, ids {ids.tolist()}")
    pool = reserved((int(ids[-1]) + 1) * stride, rows.dtype)
    strides = (stride, *rows[0].contiguous().stride())
    view = pool.as_strided((int(ids[-1]) + 1, *rows.shape[1:]), strides)
    view[: len(rows)] = 1
    for i, at in enumerate(ids.tolist()):
        view[at] = rows[i]
    return view


def wrapping_ids(n: int, stride: int) -> Tensor:
    """n ids whose offsets, in int32, all wrap to a place within the first n rows: 2^32 / stride + 0, 1..."""
    if stride & (stride - 1) or not 2 <= stride < 2**31:
        raise ValueError(f"stride {stride} is no power of two below 2^31")
    return torch.arange(n) + 2**32 // stride
