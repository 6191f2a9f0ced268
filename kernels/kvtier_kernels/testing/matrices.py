"""Matrices whose rows lie far apart, for kernels that multiply a row's number by a stride."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_STRIDE = 2**30


def far_matrix(x: Tensor) -> Tensor:
    """The same values with row r at r * 2^30 elements: in int32, row 4 would be row 0 again. Rows 2 and 3
    would lie before the pool, so a case leaves them without work. The pool is virtual memory; only the
    rows are touched."""
    rows, width = x.shape
    pool = torch.empty((rows - 1) * ROW_STRIDE + width, dtype=x.dtype)
    return pool.as_strided((rows, width), (ROW_STRIDE, 1)).copy_(x)
