"""Arrays that only grow, shared by the immutable indexes that saw them at different lengths.

Why it exists: an index handle must never change, and copying a long index for each appended row would cost
more than attention. A handle owns the first `length` entries; appending behind the last of them writes where
no handle looks. Who appends to an older handle, whose next entry is taken, gets a copy. It must not know what
the entries mean. Not for several threads at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FIRST = 64


class _Store:
    __slots__ = ("array", "used")

    def __init__(self, array: NDArray[Any], used: int) -> None:
        self.array = array
        self.used = used


class Growing:
    """An immutable sequence of entries of one shape and dtype."""

    __slots__ = ("_length", "_store")

    def __init__(self, entry: tuple[int, ...], dtype: np.dtype[Any] | type | str) -> None:
        """entry: the shape of one entry."""
        self._store = _Store(np.empty((_FIRST, *entry), dtype=dtype), 0)
        self._length = 0

    @classmethod
    def of(cls, entries: NDArray[Any]) -> Growing:
        """A copy of `entries` [n, ...]."""
        made = cls(entries.shape[1:], entries.dtype)
        return made.plus(entries)

    def __len__(self) -> int:
        return self._length

    @property
    def entries(self) -> NDArray[Any]:
        """[length, ...], read-only."""
        view = self._store.array[: self._length]
        view.flags.writeable = False
        return view

    @property
    def buffer(self) -> tuple[int, int]:
        """Where the shared array lies and its bytes, reserved ones included."""
        array = self._store.array
        return int(array.__array_interface__["data"][0]), array.nbytes

    @property
    def tensor(self) -> Tensor:
        """The same memory as a tensor [length, ...]; tensors cannot be read-only, so nobody writes to it."""
        return torch.from_numpy(self._store.array[: self._length])

    def plus(self, entries: NDArray[Any]) -> Growing:
        """These entries and `entries` [n, ...] behind them; this one stays as it is."""
        store, count = self._store, len(entries)
        end = self._length + count
        if store.used != self._length or end > len(store.array):
            size = len(store.array)
            while size < end:
                size *= 2
            array = np.empty((size, *store.array.shape[1:]), dtype=store.array.dtype)
            array[: self._length] = store.array[: self._length]
            store = _Store(array, self._length)
        store.array[self._length : end] = entries
        store.used = end
        return self._made(store, end)

    def first(self, length: int) -> Growing:
        """The first `length` entries. ValueError beyond the end."""
        if not 0 <= length <= self._length:
            raise ValueError(f"{length} of {self._length} entries")
        return self._made(self._store, length)

    def _made(self, store: _Store, length: int) -> Growing:
        made = object.__new__(Growing)
        made._store = store
        made._length = length
        return made


class GrowingColumns:
    """As `Growing`, with the entries along the last axis: [..., length], each of the others contiguous over
    entries, so that one channel of all rows is one run of memory."""

    __slots__ = ("_length", "_store")

    def __init__(self, lead: tuple[int, ...], dtype: np.dtype[Any] | type | str) -> None:
        self._store = _Store(np.empty((*lead, _FIRST), dtype=dtype), 0)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def entries(self) -> NDArray[Any]:
        """[..., length], read-only."""
        view = self._store.array[..., : self._length]
        view.flags.writeable = False
        return view

    @property
    def buffer(self) -> tuple[int, int]:
        """Where the shared array lies and its bytes, reserved ones included."""
        array = self._store.array
        return int(array.__array_interface__["data"][0]), array.nbytes

    @property
    def tensor(self) -> Tensor:
        """The same memory as a tensor [..., length]; tensors cannot be read-only, so nobody writes to it."""
        return torch.from_numpy(self._store.array[..., : self._length])

    def plus(self, columns: NDArray[Any]) -> GrowingColumns:
        """These entries and `columns` [..., n] behind them; this one stays as it is."""
        store, count = self._store, columns.shape[-1]
        end = self._length + count
        if store.used != self._length or end > store.array.shape[-1]:
            size = store.array.shape[-1]
            while size < end:
                size *= 2
            array = np.empty((*store.array.shape[:-1], size), dtype=store.array.dtype)
            array[..., : self._length] = store.array[..., : self._length]
            store = _Store(array, self._length)
        store.array[..., self._length : end] = columns
        store.used = end
        return self._made(store, end)

    def first(self, length: int) -> GrowingColumns:
        """The first `length` entries. ValueError beyond the end."""
        if not 0 <= length <= self._length:
            raise ValueError(f"{length} of {self._length} entries")
        return self._made(self._store, length)

    def _made(self, store: _Store, length: int) -> GrowingColumns:
        made = object.__new__(GrowingColumns)
        made._store = store
        made._length = length
        return made
