"""Columns in reserved address space: an array has its full length at once, and memory where it was written.

Why it exists: a directory that doubles its arrays holds old and new at the same time, just when memory is
short, and stops everyone while it copies. Here growth is a page fault. It must not know what the columns
mean.

Anonymous private mappings; untouched pages cost nothing and read as zero, so zero means "absent" in every
column.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason

# Linux's value; Python 3.11 does not name it. The reservation must not count as memory in use.
_MAP_NORESERVE = 0x4000

_FORMATS: dict[str, str] = {
    "int8": "b",
    "uint8": "B",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
}


class Column:
    """`length` numbers of one type. array: for whole-column work. cells: for single numbers, several times
    faster there than numpy's scalars; assigning what does not fit raises ValueError. raw: the same memory as
    bytes."""

    __slots__ = ("array", "cells", "raw")

    def __init__(self, length: int, dtype: str) -> None:
        size = max(1, length * np.dtype(dtype).itemsize)
        self.raw = reserve(size)
        self.array: NDArray[Any] = np.frombuffer(self.raw, dtype=dtype, count=length)
        used: Any = memoryview(self.raw)[: length * np.dtype(dtype).itemsize]
        self.cells: memoryview[Any] = used.cast(_FORMATS[dtype])


class Counters:
    """`length` numbers of 63 bits that are nearly always below 2**32: the upper halves lie in a column of
    their own, which is not written while they are zero, so it costs no memory. cells: itself, as a
    column's."""

    __slots__ = ("_high", "_high_cells", "_low", "_low_cells")

    def __init__(self, length: int) -> None:
        low, high = Column(length, "uint32"), Column(length, "uint32")
        self._low, self._high = low.array, high.array
        self._low_cells, self._high_cells = low.cells, high.cells

    @property
    def cells(self) -> Counters:
        return self

    def __getitem__(self, line: int) -> int:
        high = self._high_cells[line]
        low: int = self._low_cells[line]
        return high << 32 | low if high else low

    def __setitem__(self, line: int, number: int) -> None:
        """ValueError for a number outside [0, 2**63)."""
        if not 0 <= number < 1 << 63:
            raise ValueError(f"{number} does not fit 63 bits")
        high = number >> 32
        if high or self._high_cells[line]:
            self._high_cells[line] = high
        self._low_cells[line] = number & 0xFFFFFFFF

    def addresses(self) -> tuple[int, int]:
        """Of the lower and of the upper halves, uint32 by line."""
        return self._low.ctypes.data, self._high.ctypes.data

    def fill(self, first: int, numbers: NDArray[np.int64]) -> None:
        """Writes numbers [n] from `first` on; they fit."""
        span = slice(first, first + len(numbers))
        high = numbers >> 32
        if high.any() or self._high[span].any():
            self._high[span] = high
        self._low[span] = numbers & 0xFFFFFFFF


def reserve(size: int) -> mmap.mmap:
    """`size` bytes of zeroed address space without memory behind it. NO_DESTINATION_CAPACITY when the system
    refuses (strict overcommit, an address space limit)."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise CoreError(
            Reason.NO_DESTINATION_CAPACITY, f"{size} bytes of address space are refused: {error}"
        ) from error
