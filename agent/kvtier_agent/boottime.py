"""The agent's one source of lease time: CLOCK_BOOTTIME, which goes on while the machine is suspended."""

from __future__ import annotations

import time


def boottime_ns() -> int:
    """Nanoseconds since the machine's boot."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
