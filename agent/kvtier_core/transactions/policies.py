"""Which copy goes first when a tier is full: cost x reuse / bytes, least recent, or adaptive between the two.

Why it exists: what an eviction costs is the recomputation that it causes, so the order is by that, and it
ages; other orders are options. A policy reads whole columns of the directory and keeps nothing for each
line. It must not know whether a copy may go: pins, survival and transactions are the evictor's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory import Directory

Lines = NDArray[np.int64]


class EvictionPolicy(Protocol):
    """One tier's order. Lines are int64 [n]."""

    def order(self, lines: Lines, limit: int) -> Lines:
        """At most `limit` of `lines`, first victim first. Deterministic: equal values go by line."""
        ...

    def evicted(self, line: int) -> None:
        """`line`, as last ordered, loses its copy in this tier now."""
        ...

    def stored(self, line: int) -> None:
        """A copy of `line` was published in this tier."""
        ...


class LeastRecent:
    """LRU by the directory's `last_use`."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def order(self, lines: Lines, limit: int) -> Lines:
        return _smallest(lines, self._directory.last_use[lines].astype(np.float64), limit)

    def evicted(self, line: int) -> None:
        return None

    def stored(self, line: int) -> None:
        return None


class GreedyDual:
    """GreedyDual-Size-Frequency (Cherkasova 1998): value = L(last use) + cost x (reuse + 1) / bytes, smallest
    first, where L is the value of the last victim at the time.

    L is kept as a step function of the directory's ticks, one step an eviction and at most `steps` of them,
    so that nothing is stored for each line. bytes_of(lines) [n]: bytes of each; None: all are equally
    large."""

    def __init__(
        self,
        directory: Directory,
        *,
        bytes_of: Callable[[Lines], NDArray[np.float64]] | None = None,
        tick: Callable[[], int],
        steps: int = 4096,
    ) -> None:
        self._directory = directory
        self._bytes_of = bytes_of
        self._tick = tick
        self._steps = steps
        self._ticks: list[int] = [0]
        self._levels: list[float] = [0.0]

    @property
    def level(self) -> float:
        """L now."""
        return self._levels[-1]

    def value(self, lines: Lines) -> NDArray[np.float64]:
        directory = self._directory
        size = 1.0 if self._bytes_of is None else self._bytes_of(lines)
        worth = directory.cost[lines].astype(np.float64) * (directory.reuse[lines].astype(np.float64) + 1)
        # A use in the tick of a step counts as after it: ticks are coarse, and the victim is gone.
        at = np.searchsorted(np.asarray(self._ticks), directory.last_use[lines], side="right") - 1
        aged: NDArray[np.float64] = np.asarray(self._levels)[np.maximum(at, 0)] + worth / size
        return aged

    def order(self, lines: Lines, limit: int) -> Lines:
        # Equal values: the least recent first, as for blocks without a cost.
        return _smallest(lines, self.value(lines), limit, self._directory.last_use[lines])

    def evicted(self, line: int) -> None:
        level = max(self.level, float(self.value(np.array([line], dtype=np.int64))[0]))
        tick = self._tick()
        if tick <= self._ticks[-1]:
            self._levels[-1] = level
            return
        self._ticks.append(tick)
        self._levels.append(level)
        if len(self._ticks) > self._steps:
            # The oldest half loses every other step: what was used then is near its end anyway.
            half = len(self._ticks) // 2
            self._ticks = self._ticks[:half:2] + self._ticks[half:]
            self._levels = self._levels[:half:2] + self._levels[half:]

    def stored(self, line: int) -> None:
        return None


class Adaptive:
    """ARC (Megiddo and Modha 2003): blocks used once against blocks used again, by what was missed lately.

    T1 and T2 are read off the directory's `reuse`; the ghosts B1 and B2 are 64-bit prefixes of keys, at most
    `capacity` (slots of the tier) of each."""

    def __init__(self, directory: Directory, capacity: int) -> None:
        self._directory = directory
        self._capacity = capacity
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self.target = 0.0
        """How many of the tier's slots the blocks used once may have."""

    def order(self, lines: Lines, limit: int) -> Lines:
        recent = self._directory.last_use[lines].astype(np.float64)
        seen = self._directory.reuse[lines] > 0
        once = _smallest(lines[~seen], recent[~seen], limit)
        again = _smallest(lines[seen], recent[seen], limit)
        surplus = max(0, int((~seen).sum()) - int(self.target))
        first = once[:surplus]
        rest = np.concatenate((first, again, once[surplus:])) if len(first) < limit else first
        return rest[:limit]

    def evicted(self, line: int) -> None:
        ghosts = self._again if self._directory.reuse[line] else self._once
        ghosts[self._name(line)] = None
        if len(ghosts) > self._capacity:
            ghosts.popitem(last=False)

    def stored(self, line: int) -> None:
        name = self._name(line)
        if name in self._once:
            step = max(1.0, len(self._again) / len(self._once))
            self.target = min(float(self._capacity), self.target + step)
            del self._once[name]
        elif name in self._again:
            step = max(1.0, len(self._once) / len(self._again))
            self.target = max(0.0, self.target - step)
            del self._again[name]
        else:
            return
        # It was here before: it is a block that is used again.
        if not self._directory.reuse[line]:
            self._directory.reuse[line] = 1

    def _name(self, line: int) -> int:
        return int.from_bytes(self._directory.key_of(line)[:8], "little")


def _smallest(
    lines: Lines, values: NDArray[np.float64], limit: int, then: NDArray[np.uint32] | None = None
) -> Lines:
    """The `limit` lines of smallest value, ascending; ties by `then`, then by line."""
    if 0 < limit < len(lines):
        # All that tie with the last one are kept until they are sorted.
        bar = np.partition(values, limit - 1)[limit - 1]
        kept = np.flatnonzero(values <= bar)
        lines, values = lines[kept], values[kept]
        then = None if then is None else then[kept]
    keys = (lines, values) if then is None else (lines, then, values)
    return lines[np.lexsort(keys)][:limit]
