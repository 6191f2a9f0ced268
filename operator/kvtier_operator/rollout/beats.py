"""When evidence is looked at next: on beats that all rollouts of one pool with the same interval share.

The agents are the same for all of them, so that what is asked of one at the same moment goes as one call, and
one answer about its state serves all. A hash of the pool's name spreads pools over the interval. Beats lie on
whole milliseconds of the wall clock, as a status writes them, so that an operator that goes on has the same.
It must not know what is looked at.
"""

from __future__ import annotations

import hashlib
import math

_SLACK_MILLIS = 0.01
"""More than a moment of this century can be off as a float of seconds, and less than anything takes."""
BEAT_SLACK = 0.001
"""Seconds. By less than this a beat may be further away than the interval, as floats go."""


def next_beat(pool: str, interval: float, now: float) -> float:
    """The pool's first beat after `now`, seconds since the epoch. It is never further away than the interval
    (seconds, cut to whole milliseconds), and from one beat to the next it is the interval exactly."""
    step = max(1, math.floor(interval * 1000.0 + 1e-6))
    told = hashlib.sha256(f"kvtier.dev/beats/v1|{pool}".encode()).digest()
    phase = int.from_bytes(told[:8], "big") % step
    passed = math.floor(now * 1000.0 + _SLACK_MILLIS)
    return (passed + step - (passed - phase) % step) / 1000.0
