"""Whether the chunks of a layer still lie where they lay when something was derived from that.

Why it exists: a decode frame's plan, its views and its constants are the same from frame to frame until a
chunk moves, so they are kept; a kept view of a slot that is another's by now would be another's rows. It must
not know what is derived.

The placement version of a line is its authority epoch: it grows with every promotion, demotion and other
change of the copy that answers, over all lives of the line, and never repeats. What appends, truncates or
forks changes a layer's list of lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.directory import ChunkState, Directory

_READABLE = (int(ChunkState.OPEN), int(ChunkState.SEALED))


class PlacementStamp:
    """Of the lines of one layer, taken while they were all readable."""

    __slots__ = ("_directory", "_epochs", "_lines", "_seen")

    def __init__(self, directory: Directory, lines: Sequence[int]) -> None:
        self._directory = directory
        self._lines = list(lines)
        self._epochs = self._now()
        self._seen = directory.directory_generation

    def _now(self) -> list[int]:
        cells = self._directory.cells("epoch")
        return [cells[line] for line in self._lines]

    def covers(self, line: int) -> bool:
        """Whether it was taken of that line among others."""
        return line in self._lines

    def holds(self, lines: list[int]) -> bool:
        """Whether the layer still has these lines, each at the same placement version and readable. A few
        comparisons while nothing at all has changed in the directory."""
        if lines != self._lines:
            return False
        generation = self._directory.directory_generation
        if generation == self._seen:
            return True
        states = self._directory.cells("state")
        if self._now() != self._epochs or any(states[line] not in _READABLE for line in self._lines):
            return False
        self._seen = generation
        return True
