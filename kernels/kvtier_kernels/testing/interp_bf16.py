# mypy: disable-error-code="import-untyped"
"""Makes Triton's interpreter compute bfloat16 as the hardware does, for as long as a block runs.

It exists because Triton 3.9's interpreter stores bfloat16 as uint16: `dot` multiplies bit patterns, and
float32 to bfloat16 truncates instead of rounding to nearest even. A canary test fails when upstream no
longer does, and then this file goes away. Kernels stay clear of the rest of the trouble by a rule:
bfloat16 is only loaded, cast, stored or given to a dot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def decode(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bfloat16 bit patterns (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 to bfloat16 bit patterns, round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


@contextmanager
def correct_bf16() -> Iterator[None]:
    """Patches `InterpreterBuilder.create_dot` and `cast_impl`, and puts them back."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def wide(x: Any) -> Any:
        return handle(decode(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, wide(a), wide(b), d, precision, imprecise)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            return cast(self, wide(src), dst_type) if target != tl.float32 else wide(src)
        if source == tl.float32 and target == tl.bfloat16:
            return handle(encode(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    try:
        yield
    finally:
        builder.create_dot, builder.cast_impl = dot, cast
