"""Rollouts in every phase, from the shipped example, and an API of objects in memory."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

from kubectl_kvtier.outcomes import Exit, Failure
from kubectl_kvtier.ports import Changed, Json
from kvtier_crds.models import KVRollout
from tests.unit.crds.crds_samples import example

NOW = 1_800_000_000.0
BASE = "sha256:" + "b1" * 32
CANDIDATE = "sha256:" + "c2" * 32
GOOD = {
    "name": "output",
    "verdict": "Pass",
    "reason": "BoundInsideLimit",
    "bound": "0.03",
    "limit": "0.05",
    "n": 900,
}
SHORT = {
    "name": "tail",
    "verdict": "Insufficient",
    "reason": "TooFewSamples",
    "bound": "1.09",
    "limit": "1.05",
    "n": 800,
    "expectedN": 18000,
}


def at(seconds: float) -> str:
    """RFC 3339 of NOW + seconds."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(NOW + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def document(**status: Any) -> Json:
    made = copy.deepcopy(example("KVRollout", "quest-on-chat"))
    made["metadata"] |= {
        "uid": "u-1",
        "resourceVersion": "7",
        "generation": 2,
        "creationTimestamp": at(-7200),
    }
    made["status"] = {
        "observedGeneration": 2,
        "phase": "Progressing",
        "stage": "Canary",
        "step": 0,
        "attempt": 1,
        "fence": 17,
        "baseline": {"digest": BASE, "revision": "chat-b1b1b1b1b1b1"},
        "candidate": {"digest": CANDIDATE, "class": "approximate"},
        "gates": [GOOD, SHORT],
        "nodes": 2,
        "nodesTotal": 2,
        **status,
    }
    return made


def rollout(**status: Any) -> KVRollout:
    return KVRollout.model_validate(document(**status))


def condition(type_: str, status: str, reason: str, message: str = "") -> Json:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": at(-60),
    }


class MemoryApi:
    """One namespace of objects. `operator`, if given, answers a written intent as the operator would."""

    def __init__(self, operator: Any = None) -> None:
        self.namespace = "serving"
        self.objects: dict[tuple[str, str], Json] = {}
        self.kept_revisions: list[Json] = []
        self.kept_events: list[Json] = []
        self.before_patch: list[Any] = []
        self.patches: list[list[Json]] = []
        self.judged: list[list[Json]] = []
        self._operator = operator

    def put(self, plural: str, document: Json) -> None:
        self.objects[plural, document["metadata"]["name"]] = document

    async def get(self, plural: str, name: str) -> Json:
        if (plural, name) not in self.objects:
            raise Failure(Exit.NOT_FOUND, f'{plural}.kvtier.dev "{name}" not found')
        return copy.deepcopy(self.objects[plural, name])

    async def list(self, plural: str, *, everywhere: bool = False) -> list[Json]:
        return [copy.deepcopy(one) for (kind, _), one in self.objects.items() if kind == plural]

    async def revisions(self, cache_uid: str) -> list[Json]:
        return self.kept_revisions

    async def events(self, kind: str, name: str) -> list[Json]:
        return self.kept_events

    async def patch(self, plural: str, name: str, operations: list[Json], *, dry_run: bool = False) -> Json:
        stored = self.objects[plural, name]
        if self.before_patch:
            self.before_patch.pop(0)(stored)
        for one in operations:
            if one["op"] == "test" and stored["metadata"][one["path"].rsplit("/", 1)[-1]] != one["value"]:
                raise Changed("test failed")
        if dry_run:
            self.judged.append(operations)
            return copy.deepcopy(stored)
        self.patches.append(operations)
        stored["spec"]["intent"] = operations[-1]["value"]
        stored["metadata"]["resourceVersion"] += "1"
        if self._operator is not None:
            self._operator(stored)
        return copy.deepcopy(stored)

    async def follow(self, plural: str, name: str) -> AsyncIterator[Json]:
        import asyncio

        yield await self.get(plural, name)
        await asyncio.Event().wait()
