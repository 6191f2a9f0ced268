"""House-keeping of all shared blocks of an agent: pins whose time is over, and stores that failed.

Why it exists: a store that failed is a fault of its cache, which somebody must be told; one of a candidate's
engine is a fault only as long as that engine is there. It must not know why an engine is there.
"""

from __future__ import annotations

import logging

from kvtier_agent.cachehost import CacheHost
from kvtier_agent.node import Node

log = logging.getLogger(__name__)

_FAILED = "INTERNAL: the block store failed: "
_CANDIDATES_FAILED = "INTERNAL: the block store of a candidate failed: "


async def tend_blocks(node: Node) -> None:
    """Ends pins whose time is over. A store that failed is a fault of its cache: nothing moves on."""
    for uid, host in list(node.caches.items()):
        for blocks in host.all_blocks:
            if not blocks.failure:
                await blocks.tend()
        fault, told = _fault(host), node.faults.get(uid, "")
        if fault == told or (told and not told.startswith(_CANDIDATES_FAILED)):
            continue
        if fault:
            node.faults[uid] = fault
            log.error("cache %s: %s", uid, fault)
        else:
            del node.faults[uid]
        node.changed.set()


def _fault(host: CacheHost) -> str:
    for said, blocks in ((_FAILED, host.blocks), (_CANDIDATES_FAILED, host.blocks_beside)):
        if blocks is not None and blocks.failure:
            return said + blocks.failure
    return ""
