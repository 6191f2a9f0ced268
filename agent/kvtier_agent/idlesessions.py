"""What becomes of sessions that had no frame for long, as their cache declares it.

Why it exists: an engine that hangs or forgets leaves sessions behind, and one that waits for a person keeps
memory that others need. A session is idle after the agent's own time. Where its cache declares nothing it
ends then; else it ends after the declared time to live, and until then its rows stay or make way. None of
this changes an answer, so no manifest has it. It must not know wire messages or tiers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import Session
from kvtier_agent.engine_port import DemotesSessions
from kvtier_core.admission import Idle

MOST_CHUNKS = 16
"""Chunks of a session that are moved at a time: frames of others wait meanwhile."""
MOST_SESSIONS = 8
NANOSECONDS = 1e9
log = logging.getLogger(__name__)


def lasts_seconds(host: CacheHost, idle_seconds: float) -> float:
    """How long a session of the cache lives without a frame, where one is idle after `idle_seconds`."""
    terms = host.admission.sessions
    if terms is None:
        return idle_seconds
    return min(idle_seconds, terms.ttl_seconds) if terms.idle is Idle.DROP else terms.ttl_seconds


def over(hosts: Iterable[CacheHost], idle_seconds: float) -> list[Session]:
    """Sessions whose time is up, each told why. From here on nothing of them is answered."""
    found: list[Session] = []
    for host in hosts:
        seconds = lasts_seconds(host, idle_seconds)
        why = f"the session had no frame for {seconds:g} s and was ended"
        found += host.end_idle(int(seconds * NANOSECONDS), why)
    return found


async def demote(hosts: Iterable[CacheHost], idle_seconds: float, within_seconds: float) -> int:
    """Moves rows of sessions that are idle further down where their cache wants it; how many chunks. An
    engine that hangs keeps nobody waiting for longer than `within_seconds`; what it has begun goes on."""
    due = [
        session
        for host in hosts
        if host.admission.sessions is not None and host.admission.sessions.idle is Idle.DEMOTE
        for session in host.idle_sessions(int(idle_seconds * NANOSECONDS))
        if not session.demoting and session.demoted_ns != session.last_used_ns
    ]
    if not due:
        return 0
    moving = [asyncio.create_task(_demote(session)) for session in due[:MOST_SESSIONS]]
    done, _ = await asyncio.wait(moving, timeout=within_seconds)
    return sum(each.result() for each in done if each.exception() is None)


async def _demote(session: Session) -> int:
    engine, handle, used = session.host.runner.engine, session.handle, session.last_used_ns
    if not isinstance(engine, DemotesSessions):
        session.demoted_ns = used
        return 0
    session.demoting = True
    try:
        moved: int = await session.host.runner.call(
            lambda: engine.demote_session(handle.session_id, handle.generation, MOST_CHUNKS), bounded=False
        )
    except Exception as error:
        # Others wait behind it, and it would fail again.
        session.demoted_ns = used
        log.warning("rows of session %s do not move down: %r", handle.session_id, error)
        raise
    finally:
        session.demoting = False
    if not moved:
        # All that can go has gone; again after its next frame.
        session.demoted_ns = used
    return moved
