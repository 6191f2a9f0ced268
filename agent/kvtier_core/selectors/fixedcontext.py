"""Which rows of a session are the context that its engine says will not change.

Why it exists: a family whose index takes no more rows (clusters of a prefix, a graph of a prompt) needs to
know where its context ends, or it would take the first words of an answer for a part of it. It must not know
what is made of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtier_core.errors import CoreError, Reason


@dataclass(slots=True)
class FixedContext:
    """tokens: rows [0, tokens) are the context; 0: the rows of the session's first step. extent: rows of it
    that have come."""

    tokens: int
    extent: int = 0
    _step: int | None = None

    def within(self, step: int, first: int, rows: int) -> int:
        """How many of the rows [first, first + rows), which come with `step`, belong to it."""
        if self._step is None:
            self._step = step
        of_first_step = rows if step == self._step else 0
        inside = min(rows, max(0, self.tokens - first)) if self.tokens else of_first_step
        if inside:
            self.extent = max(self.extent, first + inside)
        return inside

    def check_complete(self) -> None:
        """INDEX_FRONTIER_LAG: a part of it has not come yet."""
        if self.extent < self.tokens:
            raise CoreError(
                Reason.INDEX_FRONTIER_LAG,
                f"{self.extent} rows of a fixed context of {self.tokens} are here",
                {"extent": self.extent, "tokens": self.tokens},
            )

    def cut(self, rows: int) -> None:
        """Only rows [0, rows) are left. What comes next is no part of a first step any more."""
        self.extent = min(self.extent, rows)
        self._step = -1

    def fork(self) -> FixedContext:
        """For a session of the same rows."""
        return replace(self)
