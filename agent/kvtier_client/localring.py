"""The client's staging ring: where the tensors of frames that are on their way lie in shared memory.

It exists so that a frame's tensors are written once and never while the agent may still read them. It must
not know what the tensors are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.local import memory

FLOAT_BYTES = 4


class StagingRing:
    """Spans are taken and given back first in, first out; an empty ring begins at 0, where memory is warm."""

    def __init__(self, size: int) -> None:
        """size: whole pages. OSError."""
        self.size = size
        self.descriptor, self._mapped = memory.create("kvtier-staging", size, others_read_only=False)
        self._floats: NDArray[np.float32] = np.frombuffer(self._mapped, dtype="<f4")
        self.address = self._floats.ctypes.data
        self._spans: deque[tuple[int, int]] = deque()

    def place(self, size: int) -> int | None:
        """Where `size` bytes would lie; None while there is no room for them."""
        spans = self._spans
        if not spans:
            return 0 if size <= self.size else None
        first, last = spans[0], spans[-1]
        if last[0] >= first[0]:
            if last[1] + size <= self.size:
                return last[1]
            return 0 if size <= first[0] else None
        return last[1] if last[1] + size <= first[0] else None

    def take(self, start: int, size: int) -> None:
        self._spans.append((start, start + size))

    def write(self, start: int, tensor: Tensor) -> int:
        """Copies float32 elements in the CPU's memory to a place that `place` named; where the next ones go.
        TypeError for others."""
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            # They are read by their address.
            raise TypeError(f"a ring takes float32 of the CPU, not {tensor.dtype} of {tensor.device}")
        size = FLOAT_BYTES * tensor.numel()
        if not 0 <= start <= self.size - size:
            raise ValueError(f"{size} bytes at {start} of a ring of {self.size}")
        if tensor.is_contiguous():
            # Views of arrays and tensors cost several times what such a small copy does.
            ctypes.memmove(self.address + start, tensor.data_ptr(), size)
        else:
            at = start // FLOAT_BYTES
            place = self._floats[at : at + tensor.numel()].reshape(tuple(tensor.shape))
            np.copyto(place, tensor.numpy(), casting="no")
        return start + size

    def give_back(self) -> None:
        """The oldest span."""
        self._spans.popleft()

    def passed(self) -> None:
        """The peer has its own descriptor now."""
        os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            self.passed()
        self.size = 0
        self._floats = np.empty(0, np.float32)
        self._mapped.close()


class AnswerRing:
    """The agent's answers, mapped read-only."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The descriptor stays the caller's. memory.UnsafeMemoryError, OSError."""
        self._mapped = memory.map_checked(descriptor, size, must_be_read_only=True)
        self._floats: NDArray[np.float32] = np.frombuffer(self._mapped, dtype="<f4")
        self._size, self.address = size, self._floats.ctypes.data

    def copy(self, start: int, shape: torch.Size) -> Tensor:
        """Float32 of that shape, a copy. ValueError beyond the ring."""
        size = FLOAT_BYTES * shape.numel()
        if not 0 <= start <= self._size - size:
            raise ValueError(f"{size} bytes at {start} of a ring of {self._size}")
        out = torch.empty(shape, dtype=torch.float32)
        ctypes.memmove(out.data_ptr(), self.address + start, size)
        return out

    def close(self) -> None:
        """Idempotent."""
        self._size = 0
        self._floats = np.empty(0, np.float32)
        self._mapped.close()


def ring_bytes(wanted: int, most: int) -> int:
    """Whole pages for `wanted` bytes, within what the agent allows."""
    page = mmap.PAGESIZE
    return min(-(-wanted // page) * page, most // page * page)
