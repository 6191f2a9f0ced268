"""What the process sets for itself, once, so that its memory stays small and its collections rare.

Settings of the interpreter and of libraries that no argument reaches. It must not know what the operator
does.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ctypes
import gc
from collections.abc import Awaitable, Callable

Sleep = Callable[[float], Awaitable[None]]

YOUNG_OBJECTS = 5_000
"""After so many new ones their cycles are looked for, instead of after 700."""
TLS_BUFFER_BYTES = 32 * 1024
"""Of each connection, instead of 256 KiB: forty of them are open, and a record of TLS holds 16."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""The names of glibc's mallopt, from malloc.h."""
LARGE_BYTES = 128 * 1024
"""From so many on a block is the kernel's own, and goes back to it when it is freed. It is where glibc
begins; but by itself it raises that with each such block that is freed, up to 32 MiB, and keeps them then."""


def one_heap() -> bool:
    """Of C's allocator one heap for all threads, instead of one for each that has ever met another, each of
    which keeps what is free in it. To be called before threads are started. False: this is no glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGE_BYTES), (M_TRIM_THRESHOLD, LARGE_BYTES))
    return all(mallopt(name, value) == 1 for name, value in wanted)


TRIM_SECONDS = 60.0


async def give_back(every: float = TRIM_SECONDS, sleep: Sleep = asyncio.sleep) -> None:
    """Returns to the kernel what is free within C's heap, again and again: what lies below a block that stays
    is not returned by itself. Ends at once where there is no glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await sleep(every)
        # Milliseconds, in which the loop goes on.
        await asyncio.to_thread(trim, 0)


def small_tls_buffers() -> None:
    """For connections that are made from now on. Each holds a buffer of that size for as long as it is open,
    and asks for another at each read."""
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


def rare_collections() -> None:
    """What is loaded by now stays; and of a request hardly anything is left that counting references
    misses."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
