"""Edits of a KvtierCache: what transformers calls crop, and fork, drop and reposition beside it.

They change lengths here and rows at the agent, together. It must not know attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from kvtier_client.edits import Edited
from kvtier_client.errors import KvtierError
from kvtier_core.errors import Reason

if TYPE_CHECKING:
    from kvtier_client.session import AttentionSession


class CacheEdits(ABC):
    """Of a cache with a session for each sequence. Positions are a sequence's own, its padding not
    counted."""

    sessions: list[AttentionSession]
    pads: list[int]
    committed: list[int]

    @property
    @abstractmethod
    def session(self) -> AttentionSession:
        """Of a batch of one."""

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers asks for it: -n takes the last n positions of each sequence back, 0 none. Also
        after a pass that failed, half-way or (then 0) before its first rows were taken: the sessions go on.
        BAD_ARGUMENT for more than there are."""
        if tokens_to_remove > 0:
            raise KvtierError(Reason.BAD_ARGUMENT, f"crop({tokens_to_remove}); legal: 0 or less")
        if not tokens_to_remove and all(session.failure is None for session in self.sessions):
            return
        length = self._length() + tokens_to_remove
        if length < max(self.pads):
            raise KvtierError(
                Reason.BAD_ARGUMENT,
                f"crop({tokens_to_remove}) leaves {length} positions, padding included; legal: "
                f"{max(self.pads)} or more",
            )
        for session, pad in zip(self.sessions, self.pads, strict=True):
            session.truncate(length - pad)
        self._stand_at(length)

    def fork(self) -> Self:
        """Another cache of the same rows, which goes on by itself; of a batch of one. Close both."""
        session = self.session.fork()
        try:
            return self._forked(session)
        except BaseException:
            session.close()
            raise

    def drop(self, ranges: Sequence[tuple[int, int]]) -> Edited:
        """Rows at these positions are seen no more; of a batch of one. See AttentionSession.drop."""
        edited = self.session.drop(ranges)
        self._stand_at(edited.next_position + self.pads[0])
        return edited

    def reposition(self, moves: Sequence[tuple[int, int, int]] | None = None) -> Edited:
        """Rows stand elsewhere, and what comes next behind them; of a batch of one. See
        AttentionSession.reposition."""
        edited = self.session.reposition(moves)
        self._stand_at(edited.next_position + self.pads[0])
        return edited

    def stand_at(self, rows: int) -> None:
        """A cache without rows begins behind the first `rows`, which its session has from elsewhere."""
        if self._length():
            raise KvtierError(Reason.STEP_ORDER, "a cache that has rows begins nowhere else")
        self._stand_at(rows)

    @abstractmethod
    def _length(self) -> int:
        """Positions so far, padding included."""

    @abstractmethod
    def _stand_at(self, length: int) -> None:
        """What comes next stands at `length`, padding included, and begins a pass."""

    @abstractmethod
    def _forked(self, session: AttentionSession) -> Self:
        """A cache like this one over a fork of its session."""
