"""Which kernels attend rows in this process, settled before the agent says that it is ready.

Compiling takes some tenths of a second, which no request should wait for. Where nothing can be compiled,
plain tensor operations give the same bits several times slower; that is no fault, but it is said: in the log
and in the KVNode's condition Ready.
"""

from __future__ import annotations

import logging
import time

from kvtier_kernels import compiled

log = logging.getLogger(__name__)


def prepare_kernels() -> None:
    """Compiles the kernels. Blocks."""
    begun = time.perf_counter()
    if compiled.library() is None:
        log.warning("%s", remark())
    else:
        log.info("attention kernels compiled in %.2f s", time.perf_counter() - begun)


def remark() -> str:
    """What a reader of the node's status must know; empty when the kernels are compiled."""
    missing = compiled.missing()
    return f"attention runs on plain tensor operations, several times slower: {missing}" if missing else ""
