"""Seconds of a call on the CPU, and what this memory can do in the same run.

It exists so that every bench times alike. It must not know what it times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

RUNS = 60
COPY_BYTES = 256 << 20
# Below this a copy is mostly its call.
SMALLEST_BYTES = 64 << 10


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def best(call: Callable[[], Any], runs: int = RUNS) -> float:
    """The fastest of many runs: what the machine can do when nothing disturbs it."""
    call()
    return min(seconds(call) for _ in range(runs))


def copy_gb_per_s(size: int = COPY_BYTES, runs: int = 8) -> float:
    """Read and written bytes of a copy of `size` bytes, in 10^9 a second."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    return 2 * size / best(lambda: target.copy_(source), runs) / 1e9


def read_gb_per_s(size: int = COPY_BYTES, runs: int = 8) -> float:
    """Bytes of `size` read once, in 10^9 a second: the largest of its integers."""
    source = torch.ones(size // 4, dtype=torch.int32)
    return size / best(source.max, runs) / 1e9


class Floors:
    """The least seconds in which this memory moves so many bytes: read, or half of them copied to the other
    half, whichever is faster with a working set of that size. Measured once a power of two, then kept."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}

    def seconds(self, moved: int) -> float:
        """Of a call that moves `moved` bytes, reads and writes counted."""
        size = max(SMALLEST_BYTES, 1 << max(0, moved - 1).bit_length())
        if size not in self._measured:
            runs = max(5, min(40, (64 << 20) // size))
            self._measured[size] = max(read_gb_per_s(size, runs), copy_gb_per_s(size // 2, runs))
        return moved / (self._measured[size] * 1e9)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
