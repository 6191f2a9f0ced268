"""Matrices whose rows lie far apart, for kernels that multiply a row's number by a stride."""

from __future__ import annotations

from torch import Tensor

from kvtier_kernels.testing.inputs import reserved

ROW_STRIDE = 2**30


def far_matrix(x: Tensor) -> Tensor:
    """The same values with row r at r * 2^30 elements: in int32, row 4 would be row 0 again. Rows 2 and 3
    would lie before the first, so a case leaves them without work. The pool is reserved; only the rows are
    touched."""
    rows, width = x.shape
    pool = reserved((rows - 1) * ROW_STRIDE + width, x.dtype)
    return pool.as_strided((rows, width), (ROW_STRIDE, 1)).copy_(x)
