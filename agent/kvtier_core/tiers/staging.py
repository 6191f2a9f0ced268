"""Page-aligned memory for blocks: what storage reads into and writes from, in one I/O.

Why it exists: O_DIRECT needs aligned memory and attention needs a tensor; one buffer is both, so a block that
was read is attended without a copy. It must not know what a block's header says.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.hostmemory import HUGE_PAGE, advise_private

PAGE = 4096


def block_bytes(layout: ChunkLayout) -> int:
    """Header page and payload, rounded up to whole pages."""
    return PAGE + -(-layout.payload_bytes // PAGE) * PAGE


def address_of(view: memoryview) -> int:
    """Of its first byte, in this process. The view is contiguous and not empty."""
    if view.readonly:
        return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
    # Six times as fast, and this is asked of each block that moves.
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class StagingRoom:
    """Memory for `count` buffers of a layout, in transparent huge pages where the kernel gives them: a read
    past the page cache names every page to the device, which is half of what a block of ordinary pages costs
    a processor. A page is taken when it is first touched; all of them hold no more than the buffers.

    huge_pages: what the kernel made of it, in a word."""

    def __init__(self, layout: ChunkLayout, count: int) -> None:
        self._layout, self._count = layout, count
        self._stride = block_bytes(layout)
        # Private, for shared memory has huge pages only where the whole machine is set to it.
        self._map = mmap.mmap(
            -1, count * self._stride + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._memory = memoryview(self._map)
        self._start = -address_of(self._memory) % HUGE_PAGE
        whole = count * self._stride // HUGE_PAGE * HUGE_PAGE
        # A device writes here: what a fork would copy could be the page that it is about to fill.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.huge_pages = advise_private(self._map, self._start, whole) if whole else "none (too small)"

    def buffer(self, at: int) -> StagingBuffer:
        """The buffer at place `at`, the same memory each time."""
        if not 0 <= at < self._count:
            raise ValueError(f"buffer {at} of {self._count}")
        first = self._start + at * self._stride
        return StagingBuffer(self._layout, self._memory[first : first + self._stride])


class StagingBuffer:
    """`block` is header page and payload, padded to whole pages; `payload` views it as [2, Hk, C, d]."""

    def __init__(self, layout: ChunkLayout, memory: memoryview | None = None) -> None:
        """memory: page-aligned, of a block's size; None: its own."""
        self.block = memoryview(mmap.mmap(-1, block_bytes(layout))) if memory is None else memory
        self.header = self.block[:PAGE]
        self.body = self.block[PAGE : PAGE + layout.payload_bytes]
        # Made within a step, and written by a thread that is in none.
        with torch.inference_mode(False):
            self.payload: Tensor = torch.frombuffer(
                self.block, dtype=torch.float32, count=layout.floats, offset=PAGE
            ).view(layout.shape)

    def __len__(self) -> int:
        return len(self.block)
