"""[rollback]: from evidence that fails to the last of all agents proved on the exact baseline.

One cache on one pool of all agents; each round a candidate serves in Canary, its evidence turns bad, and the
return is timed. Argo Rollouts has its round in between, on the same API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.bench.release_api import Json, until
from tests.bench.release_argo import argo
from tests.bench.release_load import MIB
from tests.bench.release_objects import GROUP, Role, cache, collection, pool_name, rollout
from tests.bench.release_track import quantile
from tests.bench.release_world import World
from tests.bench.rows import Row

LEASE = "6s"
"""As short as makes the operator look once a second."""
SECONDS = 300.0
PAIRS = 20
PEER = "Argo Rollouts 1.10.1"
Round = Callable[[], Coroutine[Any, Any, float]]


@dataclass
class Seen:
    """Of the one rollout: its status, and when a phase was first seen in this attempt."""

    status: Json
    uid: str
    first: dict[tuple[int, str], float]

    def feed(self, kind: str, obj: Json, now: float) -> None:
        self.status, self.uid = obj.get("status") or {}, obj["metadata"]["uid"]
        self.first.setdefault((int(self.status.get("attempt") or 0), str(self.status.get("phase"))), now)


@dataclass(frozen=True)
class Return:
    """One round, in seconds. From the first answer that held harm: `proved` until the last agent answered its
    revocation with a proof, `restored` until that was written down. `persisted`: from the last answer of that
    look, which completes the measurement, until ExactBaseline was written down."""

    proved: float
    restored: float
    persisted: float
    persisted_from_first: float


@dataclass(frozen=True)
class Writes:
    """Seconds, with nothing else at work: of a fence, of the status after it, and of the least that any write
    is, one value in a ConfigMap."""

    fence_write: float
    status_write: float
    smallest_write: float

    @property
    def two_writes(self) -> float:
        return self.fence_write + self.status_write


class Rounds:
    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = Seen({}, "", {})
        self._space = world.sizes.namespace(0)
        self._path = f"{collection(self._space, 'kvrollouts')}/back"
        self._number = 0
        self._ready = False
        self._telling: set[str] = set()
        self._ours: list[Return] = []
        self._theirs: list[float] = []
        self._alone: list[Writes] = []

    def rows(self) -> list[Row]:
        """Of the rounds that have ended."""
        found = _rows(self._ours, self._theirs) if self._ours else []
        for name in ("two_writes", "fence_write", "status_write", "smallest_write"):
            values = [float(getattr(one, name)) for one in self._alone]
            for label, share in (("p50", 0.5), ("p99", 0.99)) if values else ():
                value = quantile(values, share)
                found.append(Row(f"rollback.{name}.{label}", value, "s", lower_is_better=True))
        if self._ours and self._alone:
            # Of one run, so that it is the same on a slower machine.
            ours = quantile([one.persisted for one in self._ours], 0.5)
            ratio = ours / quantile([one.two_writes for one in self._alone], 0.5)
            found.append(Row("rollback.persisted_in_two_writes", ratio, "ratio", lower_is_better=True))
        return found

    async def run(self, rounds: int, peer: Round | None) -> None:
        """Ours and the peer's in turn, after one of each that is not counted."""
        watches = [
            asyncio.create_task(self._world.admin.watch(f"{GROUP}/namespaces/{self._space}/{plural}", feed))
            for plural, feed in (("kvrollouts", self._seen.feed), ("kvcaches", self._cache))
        ]
        watches.append(asyncio.create_task(self._world.admin.watch(f"{GROUP}/kvnodes", self._node)))
        try:
            await self._begin()
            for number in range(rounds + 1):
                mine = await self._round()
                other = [await peer()] if peer is not None else []
                print(f"release: round {number}: {mine}, peer {other}", flush=True)
                if number:
                    self._ours.append(mine)
                    self._theirs += other
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def two_writes(self) -> None:
        """What a return writes before anybody can see it, a fence and then a status, each durable before it
        is answered, with nothing judged and nobody else at work: the operator is ended first."""
        await self._world.operator.close()
        admin = self._world.admin
        cache_path = f"{collection(self._space, 'kvcaches')}/wide"
        least = f"/api/v1/namespaces/{self._space}/configmaps"
        named = {"name": "least", "namespace": self._space}
        await admin.create(least, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named})
        for number in range(PAIRS + 1):
            held, back = await admin.get(cache_path), await admin.get(self._path)
            fence = held["status"]["fence"]
            began = time.monotonic()
            await admin.swap(
                f"{cache_path}/status",
                [
                    {"op": "test", "path": "/metadata/uid", "value": held["metadata"]["uid"]},
                    {"op": "test", "path": "/status/fence", "value": fence},
                    {"op": "add", "path": "/status/fence", "value": fence + 1},
                ],
            )
            fenced = time.monotonic()
            version = back["metadata"]["resourceVersion"]
            await admin.swap(
                f"{self._path}/status",
                [
                    {"op": "test", "path": "/metadata/resourceVersion", "value": version},
                    {"op": "add", "path": "/status", "value": {**back["status"], "fence": fence + 1}},
                ],
            )
            written = time.monotonic()
            await admin.merge(f"{least}/least", {"data": {"number": str(number)}})
            if number:
                ended = time.monotonic()
                self._alone.append(Writes(fenced - began, written - fenced, ended - written))

    def _cache(self, kind: str, obj: Json, now: float) -> None:
        self._ready = _is_ready(obj)

    def _node(self, kind: str, obj: Json, now: float) -> None:
        held = (obj.get("status") or {}).get("candidates") and kind != "DELETED"
        (self._telling.add if held else self._telling.discard)(obj["metadata"]["name"])

    async def _begin(self) -> None:
        admin = self._world.admin
        await admin.create(collection(self._space, "kvcaches"), cache("wide", self._space, pool_name(0)))
        await until(lambda: self._ready, SECONDS, lambda: "the cache is not Ready")
        body = rollout("back", self._space, "wide", Role.CANARY, lease=LEASE)
        await admin.create(collection(self._space, "kvrollouts"), body)

    async def _round(self) -> Return:
        world, seen = self._world, self._seen
        self._number += 1
        if self._number > 1:
            name = "quest-32" if self._number % 2 == 0 else "quest-64"
            body = {"spec": {"candidate": {"selectorRef": {"name": name}}}}
            await world.admin.merge(self._path, body)
        attempt = self._number
        await until(lambda: self._serves(attempt), SECONDS, lambda: f"not in Canary: {seen.status}")
        # Harm comes to a fleet that serves, not to one that is still telling of what it was granted.
        wanted = world.sizes.agents
        await until(
            lambda: len(self._telling) == wanted, SECONDS, lambda: f"{len(self._telling)} KVNodes tell of it"
        )
        await world.agents.ask({"do": "clear"})
        await world.agents.ask({"do": "harm", "rollouts": [seen.uid]})
        await until(
            lambda: (attempt, "RolledBack") in seen.first, SECONDS, lambda: f"not returned: {seen.status}"
        )
        told = await world.agents.ask({"do": "observed"})
        await world.agents.ask({"do": "harm", "rollouts": []})
        began, revoked = float(told["firstHarm"][seen.uid]), told["revoked"]
        written = seen.first[attempt, "RollingBack"]
        answers = [moment for _, _, moments in told["reads"] for moment in moments if moment <= written]
        if len(revoked) != world.sizes.agents:
            raise AssertionError(f"{len(revoked)} of {world.sizes.agents} agents answered with a proof")
        return Return(
            proved=max(revoked.values()) - began,
            restored=seen.first[attempt, "RolledBack"] - began,
            persisted=written - max(answers),
            persisted_from_first=written - began,
        )

    def _serves(self, attempt: int) -> bool:
        """In Canary, and every agent holds the candidate there."""
        status = self._seen.status
        where = status.get("attempt"), status.get("stage"), status.get("phase")
        held, wanted = status.get("nodes"), self._world.sizes.agents
        return where == (attempt, "Canary", "Progressing") and held == wanted


def _is_ready(obj: Json) -> bool:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


async def measure(world: World, rounds: Rounds, count: int, *, beside: bool) -> None:
    """beside: Argo Rollouts too."""
    async with contextlib.AsyncExitStack() as stack:
        peer: Round | None = None
        if beside:
            other = await stack.enter_async_context(argo(world.cluster, world.admin, world.folder))
            peer = other.round
        await rounds.run(count, peer)
    print(f"release: operator {world.operator.rss() // MIB} MiB after {count} returns", flush=True)
    await rounds.two_writes()


def _rows(ours: list[Return], theirs: list[float]) -> list[Row]:
    rows = []
    for name, values, goal in (
        ("proved", [one.proved for one in ours], 1.0),
        ("restored", [one.restored for one in ours], None),
        ("persisted_from_first", [one.persisted_from_first for one in ours], None),
    ):
        rows.append(Row(f"rollback.{name}.p50", quantile(values, 0.5), "s", lower_is_better=True))
        rows.append(Row(f"rollback.{name}.p99", quantile(values, 0.99), "s", goal=goal, lower_is_better=True))
    persisted = [one.persisted for one in ours]
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        value = quantile(persisted, share)
        if not theirs:
            rows.append(Row(f"rollback.persisted.{label}", value, "s", lower_is_better=True))
            continue
        other = quantile(theirs, share)
        rows.append(
            Row(f"rollback.persisted.{label}", value, "s", goal=0.2 * other, peer=PEER, peer_value=other,
                lower_is_better=True)
        )  # fmt: skip
    return rows
