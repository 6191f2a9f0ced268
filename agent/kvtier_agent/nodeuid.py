"""The uid of this agent's own Node, asked of the API server before anything is claimed under it.

The downward API tells a pod its Node's name but not the uid. A uid names this agent's folder in each tier and
owns its KVNode, so an agent that cannot learn it does not start. It must not know KVNodes, tiers or sockets.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum

from kvtier_agent.config import UID
from kvtier_agent.registration import REQUEST_SECONDS, KubeError, KubeTransport

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 60.0
MAX_PAUSE_SECONDS = 5.0


class NodeUidReason(StrEnum):
    NODE_MISSING = "NodeMissing"
    NOT_ALLOWED = "NotAllowed"
    ANSWER_INVALID = "AnswerInvalid"
    API_UNREACHABLE = "APIUnreachable"


class NodeUidError(Exception):
    """Why the uid is not known; the text names the Node and what to do."""

    def __init__(self, reason: NodeUidReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason


async def find_node_uid(
    transport: KubeTransport,
    node_name: str,
    *,
    seconds: float = LOOKUP_SECONDS,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> str:
    """metadata.uid of the Node, within `seconds`. Retries a server that is away or overloaded, with backoff
    from half a second to five; a refusal is final. Raises NodeUidError."""
    end = monotonic() + seconds
    attempt = 0
    while True:
        try:
            async with asyncio.timeout(2 * REQUEST_SECONDS):
                found = await transport.get(f"/api/v1/nodes/{node_name}")
            break
        except (KubeError, TimeoutError) as error:
            final = _final(node_name, error)
            if final is not None:
                raise final from error
            pause = min(MAX_PAUSE_SECONDS, 0.5 * 2.0 ** min(attempt, 10)) * (0.5 + 0.5 * jitter())
            attempt += 1
            if monotonic() + pause >= end:
                raise NodeUidError(
                    NodeUidReason.API_UNREACHABLE,
                    f"Node {node_name} could not be read in {seconds:g} s and {attempt} attempts: {error}",
                ) from error
            log.warning("Node %s not read: %s", node_name, error)
            await sleep(pause)
    metadata = found.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    if not isinstance(uid, str) or not UID.fullmatch(uid):
        raise NodeUidError(NodeUidReason.ANSWER_INVALID, f"Node {node_name} has no usable uid: {uid!r}")
    return uid


def _final(node_name: str, error: KubeError | TimeoutError) -> NodeUidError | None:
    """None: it may be otherwise in a moment."""
    if not isinstance(error, KubeError) or error.status in (0, 429) or error.status >= 500:
        return None
    if error.status == 404:
        return NodeUidError(NodeUidReason.NODE_MISSING, f"there is no Node {node_name}; see --node-name")
    if error.status in (401, 403):
        return NodeUidError(
            NodeUidReason.NOT_ALLOWED,
            f"Node {node_name} may not be read ({error}); grant `get` on nodes or pass --node-uid",
        )
    return NodeUidError(NodeUidReason.ANSWER_INVALID, f"Node {node_name}: {error}")
