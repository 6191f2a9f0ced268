"""Counts who wrote what to the API server, by following its audit log while it grows.

The log is the server's own, so nothing that a process says of itself is believed. It must not judge.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

WRITES = ("create", "update", "patch", "delete", "deletecollection")
_MARKS = tuple(f'"verb":"{verb}"'.encode() for verb in WRITES)
POLL_SECONDS = 0.25
AGENT_MARK = ":kvtier-agent-"


@dataclass(frozen=True, order=True)
class Write:
    """who: operator, agent or other. resource with its subresource. name: of the object, but for Events,
    which are many and each another."""

    who: str
    verb: str
    resource: str
    name: str = ""


class AuditTail:
    """`run` until cancelled; `counts` grows meanwhile. The log may be renamed away as it becomes large."""

    def __init__(self, path: Path, operator: str) -> None:
        """operator: its user name."""
        self._path = path
        self._operator = operator
        self.counts: Counter[Write] = Counter()

    async def run(self) -> None:
        handle: BinaryIO = self._path.open("rb")
        try:
            handle.seek(0, os.SEEK_END)
            rest = b""
            while True:
                rest = self.take(rest + handle.read())
                if os.fstat(handle.fileno()).st_ino != os.stat(self._path).st_ino:
                    self.take(rest + handle.read())
                    handle, rest = _reopened(handle, self._path), b""
                await asyncio.sleep(POLL_SECONDS)
        finally:
            handle.close()

    def take(self, data: bytes) -> bytes:
        """Counts the whole lines in it; returns what is left."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            if any(mark in line for mark in _MARKS):
                self._count(json.loads(line))
        return rest

    def _count(self, event: dict[str, object]) -> None:
        user, target = event["user"], event.get("objectRef")
        if not isinstance(user, dict) or not isinstance(target, dict):
            return
        name = str(user.get("username"))
        who = "operator" if name == self._operator else "agent" if AGENT_MARK in name else "other"
        sub = f"/{target['subresource']}" if target.get("subresource") else ""
        named = "" if target["resource"] == "events" else str(target.get("name", ""))
        self.counts[Write(who, str(event["verb"]), f"{target['resource']}{sub}", named)] += 1


def _reopened(handle: BinaryIO, path: Path) -> BinaryIO:
    handle.close()
    return path.open("rb")


def difference(after: Counter[Write], before: Counter[Write]) -> Counter[Write]:
    """What came between two copies of the counts."""
    return Counter({write: count - before[write] for write, count in after.items() if count > before[write]})


def by_operator(counts: Counter[Write], *, lease: str) -> Counter[str]:
    """The operator's writes by "verb resource", without renewals of its own Lease."""
    found: Counter[str] = Counter()
    for write, count in counts.items():
        if write.who == "operator" and not (write.resource == "leases" and write.name == lease):
            found[f"{write.verb} {write.resource}"] += count
    return found


def on_objects(counts: Counter[Write], names: frozenset[str]) -> Counter[str]:
    """The operator's writes to objects of these names, by "verb resource"."""
    found: Counter[str] = Counter()
    for write, count in counts.items():
        if write.who == "operator" and write.name in names:
            found[f"{write.verb} {write.resource}"] += count
    return found


def most_by_agent(counts: Counter[Write], resource: str) -> int:
    """Of one resource (with its subresource), what the busiest agent wrote."""
    found: Counter[str] = Counter()
    for write, count in counts.items():
        if write.who == "agent" and write.resource == resource:
            found[write.name] += count
    return max(found.values(), default=0)
