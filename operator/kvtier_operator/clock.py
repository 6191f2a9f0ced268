"""The real clock. Everything else takes a `ports.Clock`, so that tests and the simulator bring their own."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime


class SystemClock:
    """Implements `kvtier_operator.ports.Clock`. Its monotonic time goes on while the machine is suspended: a
    leader that was, must not take the Lease that others have seen end for its own."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
