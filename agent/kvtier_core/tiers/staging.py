"""Page-aligned memory for one block: what storage reads into and writes from, in one I/O.

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


class StagingBuffer:
    """`block` is header page and payload, padded to whole pages; `payload` views it as [2, Hk, C, d]."""

    def __init__(self, layout: ChunkLayout) -> None:
        self._map = mmap.mmap(-1, block_bytes(layout))
        self.block = memoryview(self._map)
        self.header = self.block[:PAGE]
        self.body = self.block[PAGE : PAGE + layout.payload_bytes]
        # Made within a step, and written by a thread that is in none.
        with torch.inference_mode(False):
            self.payload: Tensor = torch.frombuffer(
                self._map, dtype=torch.float32, count=layout.floats, offset=PAGE
            ).view(layout.shape)

    def __len__(self) -> int:
        return len(self.block)
