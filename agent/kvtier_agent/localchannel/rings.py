"""The two rings of a channel: the engine's staging, mapped read-only, and the answers, which only we write.

What lies in staging may change under us at any time, so it is copied out before anybody looks at it. It must
not know what the rows mean.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvtier.local import memory
from kvtier.local.frames import ALIGNMENT
from kvtier_core.errors import CoreError, Reason

FLOAT_BYTES = 4
MIN_RING_BYTES = 4096


class Rings:
    """Both of one channel. Owns the mappings and the descriptor of the answers' ring."""

    def __init__(self, staging: int, size: int, most: int) -> None:
        """staging: the engine's descriptor, which stays the caller's. BAD_ARGUMENT when it may not be mapped,
        NO_STAGING when there is no memory for the answers."""
        if not MIN_RING_BYTES <= size <= most or size % mmap.PAGESIZE:
            raise CoreError(
                Reason.BAD_ARGUMENT,
                f"a ring of {size} bytes: it must be whole pages of {MIN_RING_BYTES} to {most} bytes",
            )
        self.size = size
        try:
            self._staging = memory.map_checked(staging, size, must_be_read_only=False)
        except (memory.UnsafeMemoryError, OSError) as error:
            raise CoreError(Reason.BAD_ARGUMENT, f"the staging ring: {error}") from None
        try:
            self.answers, self._answers = memory.create("kvtier-answers", size, others_read_only=True)
        except OSError as error:
            self._staging.close()
            raise CoreError(Reason.NO_STAGING, f"no ring for answers: {error.strerror}") from None
        self.floats: NDArray[np.float32] = np.frombuffer(self._staging, dtype="<f4")
        self._bytes = memoryview(self._staging)

    def has(self, offset: int, size: int) -> bool:
        """Whether a frame's tensors may lie there."""
        return offset >= 0 and not offset % ALIGNMENT and 0 < size <= self.size - offset

    def span(self, offset: int, size: int) -> tuple[int, int]:
        """[start, end) of a frame's tensors in both rings; FRAME_INVALID outside of them."""
        if not self.has(offset, size):
            raise CoreError(
                Reason.FRAME_INVALID,
                f"offset: {size} bytes at {offset} are not an aligned part of a ring of {self.size} bytes",
            )
        return offset, offset + size

    def copy_out(self, start: int, end: int) -> NDArray[np.float32]:
        """A copy that nobody else can write."""
        return self.floats[start // FLOAT_BYTES : end // FLOAT_BYTES].copy()

    def copy_to(self, memory: memoryview, start: int) -> None:
        """Fills that memory of bytes with what lies from `start` on, as `has` said that it may."""
        memory[:] = self._bytes[start : start + len(memory)]

    def write(self, start: int, out: bytes) -> None:
        self._answers[start : start + len(out)] = out

    def close(self) -> None:
        """Idempotent."""
        if self.answers < 0:
            return
        os.close(self.answers)
        self.answers = -1
        # Views of a mapping keep it from being closed.
        self.floats = np.empty(0, np.float32)
        self._bytes.release()
        self._staging.close()
        self._answers.close()
