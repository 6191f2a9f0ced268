"""Ports of servers that are told a number, and bind it later, often in another process.

The kernel gives a port that it once chose to whoever asks next, also to a client of another suite that runs
meanwhile. These ports lie outside of the range that it chooses from, and are one test process's alone.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 15_000, 65_535


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, and which no other test process is given while this one
    lives."""
    lowest, highest = map(int, _RANGE.read_text().split())
    outside = [port for port in range(_LOWEST, _HIGHEST) if not lowest <= port <= highest]
    random.SystemRandom().shuffle(outside)
    for port in outside:
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as claim:
            try:
                # A claim that other test processes see, and that the server does not need: UDP.
                claim.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            os.dup(claim.fileno())
            return port
    raise OSError(errno.EADDRINUSE, "no port is free")
