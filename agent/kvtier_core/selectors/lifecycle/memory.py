"""What indexes weigh, and how much they may weigh together.

Why it exists: an index is a second, smaller copy of a context, and rows that wait for it are a whole one.
Memory that nobody counts is taken from what somebody else planned. It must not know what an index is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np
from torch import Tensor

from kvtier_core.rowevidence import Evidence, LayerWeights
from kvtier_core.selectors.growing import Growing, GrowingColumns

NO_LIMIT = 1 << 62
_WORD = 8


class IndexMemory:
    """Bytes of one process's indexes and of rows that wait for them. Who uses it holds a lock."""

    def __init__(self, limit: int = NO_LIMIT) -> None:
        if limit < 0:
            raise ValueError(f"a limit of {limit} bytes")
        self.limit = limit
        self.used = 0
        self.peak = 0

    def take(self, count: int) -> bool:
        """Whether `count` more bytes fit; they are taken then."""
        if self.used + count > self.limit:
            return False
        self.used += count
        self.peak = max(self.peak, self.used)
        return True

    def give(self, count: int) -> None:
        """Back what was taken. ValueError for more than that."""
        if count > self.used:
            raise ValueError(f"{count} bytes are given back, {self.used} are taken")
        self.used -= count


def buffers(value: object) -> dict[int, int]:
    """Bytes by buffer of all arrays that an index holds, each buffer once, with what is reserved behind their
    ends. Weights of the model are nobody's index."""
    found: dict[int, int] = {}
    _collect(value, found)
    return found


def row_bytes(k: Tensor, v: Tensor, evidence: Evidence) -> int:
    """Of rows that wait; weights are shared by all sessions and not counted."""
    given = (k, v, evidence.queries, evidence.hidden)
    size = sum(one.numel() * one.element_size() for one in given if one is not None)
    return size + (0 if evidence.surprisal is None else evidence.surprisal.nbytes)


def _collect(value: object, found: dict[int, int]) -> None:
    if isinstance(value, LayerWeights):
        return
    if isinstance(value, (Growing, GrowingColumns)):
        found.update([value.buffer])
    elif isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, np.ndarray):
        base: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.nbytes:
            found[int(base.__array_interface__["data"][0])] = base.nbytes
    elif is_dataclass(value):
        for one in fields(value):
            _collect(getattr(value, one.name), found)
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, (tuple, list)):
        if value and all(isinstance(part, (int, float)) for part in value):
            found[id(value)] = _WORD * len(value)
        else:
            for part in value:
                _collect(part, found)
