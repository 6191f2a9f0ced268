"""Which rows of a session are the context that its engine says will not change.

Why it exists: a family whose index takes no more rows (clusters of a prefix, a graph of a prompt) needs to
know where its context ends, or it would take the first words of an answer for a part of it. It must not know
what is made of the rows.
"""

from __future__ import annotations

from kvtier_core.errors import CoreError, Reason


class FixedContext:
    """tokens: rows [0, tokens) are the context; 0: the rows of the session's first step."""

    def __init__(self, tokens: int, layers: int) -> None:
        """layers: of the model; rows come layer by layer."""
        self.tokens = tokens
        self._extents = [0] * layers
        self._step: int | None = None

    @property
    def extent(self) -> int:
        """Rows of it that have come in every layer."""
        return min(self._extents)

    def within(self, layer: int, step: int, first: int, rows: int) -> int:
        """How many of the rows [first, first + rows) of a layer, which come with `step`, belong to it."""
        if self._step is None:
            self._step = step
        of_first_step = rows if step == self._step else 0
        inside = min(rows, max(0, self.tokens - first)) if self.tokens else of_first_step
        if inside:
            self._extents[layer] = max(self._extents[layer], first + inside)
        return inside

    def adopt(self, layer: int, first: int, rows: int) -> int:
        """As `within`, of rows that were there before any step: without a stated end all of them belong to
        the context, as those of the first step will."""
        inside = min(rows, max(0, self.tokens - first)) if self.tokens else rows
        if inside:
            self._extents[layer] = max(self._extents[layer], first + inside)
        return inside

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        return self.extent >= self.tokens

    def check_complete(self) -> None:
        """INDEX_FRONTIER_LAG: a part of it has not come yet."""
        if not self.complete:
            raise CoreError(
                Reason.INDEX_FRONTIER_LAG,
                f"{self.extent} rows of a fixed context of {self.tokens} are here",
                {"extent": self.extent, "tokens": self.tokens},
            )

    def cut(self, rows: int) -> None:
        """Only rows [0, rows) are left. What comes next is no part of a first step any more."""
        self._extents = [min(extent, rows) for extent in self._extents]
        self._step = -1

    def fork(self) -> FixedContext:
        """For a session of the same rows."""
        other = FixedContext(self.tokens, len(self._extents))
        other._extents, other._step = list(self._extents), self._step
        return other
