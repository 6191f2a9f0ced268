"""What the process sets for itself, once, so that its memory stays small and its collections rare.

Settings of the interpreter and of libraries that no argument reaches. It must not know what the operator
does.
"""

from __future__ import annotations

import asyncio.sslproto
import gc

YOUNG_OBJECTS = 5_000
"""After so many new ones their cycles are looked for, instead of after 700."""
TLS_BUFFER_BYTES = 32 * 1024
"""Of each connection, instead of 256 KiB: forty of them are open, and a record of TLS holds 16."""


def small_tls_buffers() -> None:
    """For connections that are made from now on. Each holds a buffer of that size for as long as it is open,
    and asks for another at each read."""
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


def rare_collections() -> None:
    """What is loaded by now stays; and of a request hardly anything is left that counting references
    misses."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
