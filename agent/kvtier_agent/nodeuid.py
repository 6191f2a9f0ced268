"""The uid of this agent's own Node, asked of the API server before anything is claimed under it.

The downward API tells a pod its Node's name but not the uid. A token that is bound to a Pod names both, and
its bearer may ask what it names (SelfSubjectReview) without a right to read any Node. A uid names this
agent's folder in each tier and owns its KVNode, so an agent that cannot learn it does not start. It must not
know KVNodes, tiers or sockets.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from kvtier_agent.config import UID
from kvtier_agent.registration import REQUEST_SECONDS, Json, KubeError, KubeTransport

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 60.0
MAX_PAUSE_SECONDS = 5.0
REVIEW_PATH = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
REVIEW = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
NODE_NAME = "authentication.kubernetes.io/node-name"
NODE_UID = "authentication.kubernetes.io/node-uid"


class NodeUidReason(StrEnum):
    TOKEN_UNBOUND = "TokenUnbound"
    OTHER_NODE = "OtherNode"
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
    """The uid of the Node that this process's token is bound to, within `seconds`. Retries a server that is
    away or overloaded, with backoff from half a second to five; a refusal is final. Raises NodeUidError."""
    end = monotonic() + seconds
    attempt = 0
    while True:
        try:
            async with asyncio.timeout(2 * REQUEST_SECONDS):
                review = await transport.create(REVIEW_PATH, REVIEW)
            break
        except (KubeError, TimeoutError) as error:
            final = _final(error)
            if final is not None:
                raise final from error
            pause = min(MAX_PAUSE_SECONDS, 0.5 * 2.0 ** min(attempt, 10)) * (0.5 + 0.5 * jitter())
            attempt += 1
            if monotonic() + pause >= end:
                raise NodeUidError(
                    NodeUidReason.API_UNREACHABLE,
                    f"who this agent is could not be asked in {seconds:g} s and {attempt} attempts: {error}",
                ) from error
            log.warning("the API server does not say who this agent is: %s", error)
            await sleep(pause)
    return _uid_of(review, node_name)


def _uid_of(review: Json, node_name: str) -> str:
    bound, uid = _extra(review, NODE_NAME), _extra(review, NODE_UID)
    if not bound or not uid:
        raise NodeUidError(
            NodeUidReason.TOKEN_UNBOUND,
            f"the token names no Node with a uid (node-name {bound!r}, node-uid {uid!r}): it must be "
            "bound to a Pod that runs on an existing Node, or pass --node-uid",
        )
    if bound != node_name:
        message = f"the token is bound to a Pod on Node {bound}, not {node_name}; see --node-name"
        raise NodeUidError(NodeUidReason.OTHER_NODE, message)
    if not UID.fullmatch(uid):
        raise NodeUidError(NodeUidReason.ANSWER_INVALID, f"Node {node_name} has no usable uid: {uid!r}")
    return uid


def _extra(review: Json, key: str) -> str:
    """The one value of a user extra; empty when there is none."""
    found: Any = review
    for name in ("status", "userInfo", "extra", key):
        found = found.get(name) if isinstance(found, dict) else None
    return found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else ""


def _final(error: KubeError | TimeoutError) -> NodeUidError | None:
    """None: it may be otherwise in a moment."""
    if not isinstance(error, KubeError) or error.status in (0, 429) or error.status >= 500:
        return None
    if error.status in (401, 403):
        return NodeUidError(
            NodeUidReason.NOT_ALLOWED,
            f"a SelfSubjectReview is refused ({error}); every authenticated account may make one by default "
            "(system:basic-user); or pass --node-uid",
        )
    return NodeUidError(NodeUidReason.ANSWER_INVALID, f"SelfSubjectReview: {error}")
