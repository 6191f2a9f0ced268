"""Sessions of a cache with two engines that start from shared blocks, or whose rows become such blocks.

Why it exists: blocks are some engine's, and a session must be in that one when it starts from them, though
either may have moved while they were read. It must not know who asks, nor whose blocks are offered.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtier_agent.seats import Seat
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.errors import CoreError, Reason

if TYPE_CHECKING:
    from kvtier_agent.pairedengine import PairedEngine

MOVING_SECONDS = 5.0
"""For which a session that begins is carried into the engine whose blocks it is given."""


class SessionPrefixes:
    """As `Prefixes`, of sessions wherever they are."""

    def __init__(self, paired: PairedEngine) -> None:
        self._paired = paired

    def start(self, session_id: str, generation: int, fetch: Fetch, asked: bytes = b"") -> int:
        """See `Prefixes.start`; the blocks are of the engine in which the session is. A session in a second
        engine that is used for nothing new comes home for the baseline's blocks. UNSUPPORTED too for a
        session that is in two, and in one that merges other chunks than the baseline's."""
        paired = self._paired
        with paired.seated(session_id, generation) as seat:
            if seat.home.retired or seat.home.ending:
                if seat.mirror is not None or not paired.prefixes_of(seat.home).reads(fetch):
                    paired.bring_home(seat, time.monotonic() + MOVING_SECONDS)
            elif not self._alone(seat):
                raise CoreError(
                    Reason.UNSUPPORTED,
                    "a session of two engines or other chunks computes all of its rows",
                )
            return paired.prefixes_of(seat.home).start(session_id, seat.at, fetch, asked)

    def _alone(self, seat: Seat) -> bool:
        if seat.home is self._paired.running and seat.mirror is None:
            return True
        return self._paired.beside_alone(seat.session_id)

    def payload(
        self, session_id: str, generation: int, layer: int, chunk: int, until: float | None = None
    ) -> bytes:
        """See `Prefixes.payload`. Blocks are the baseline's: what another chunk size made is none of them."""
        with self._paired.seated(session_id, generation) as seat:
            if seat.home is not self._paired.running and not self._paired.same_chunks(seat.home):
                raise CoreError(Reason.UNCOMMITTED_ROWS, "rows of another chunk size are the session's own")
            return self._paired.prefixes_of(seat.home).payload(session_id, seat.at, layer, chunk, until)
