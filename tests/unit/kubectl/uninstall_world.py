"""A cluster in memory for an uninstall, with the clock of the person who runs it, and an operator or none."""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kubectl_kvtier.outcomes import Exit, Failure, Forbidden
from kubectl_kvtier.ports import Changed, Json
from kubectl_kvtier.printing import Out
from kubectl_kvtier.uninstall.holds import FINALIZERS
from kubectl_kvtier.uninstall.uninstaller import Order, Watch, uninstall

REQUEST_SECONDS = 0.01


@dataclass
class World:
    """Objects by (plural, namespace, name). operator: seconds after which a live one releases what is
    deleted; None: there is none. denied: (verb, plural) without the right. down: until when no
    request is answered."""

    operator: float | None = None
    namespace: str = "serving"
    now: float = 1000.0
    denied: set[tuple[str, str]] = field(default_factory=set)
    down: float = 0.0
    objects: dict[tuple[str, str, str], Json] = field(default_factory=dict)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    before_patch: list[Callable[[], None]] = field(default_factory=list)
    writes: list[tuple[float, str, str]] = field(default_factory=list)
    stream: io.StringIO = field(default_factory=io.StringIO)
    _uids: int = 0

    def add(self, plural: str, name: str, *, namespace: str = "serving", **more: Any) -> Json:
        """more: spec, status, finalizers."""
        self._uids += 1
        held = [FINALIZERS[plural]] if plural in FINALIZERS else []
        metadata = {"name": name, "namespace": namespace, "uid": f"u{self._uids}"}
        made = {
            "metadata": {**metadata, "finalizers": list(more.pop("finalizers", held))},
            "spec": more.pop("spec", {}),
            "status": more.pop("status", {}),
        }
        assert not more
        self.objects[plural, namespace, name] = made
        return made

    def rollout(self, name: str = "quest", cache: str = "chat", lease: str = "20s", **more: Any) -> Json:
        return self.add("kvrollouts", name, spec={"cacheRef": {"name": cache}, "leaseTTL": lease}, **more)

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """seconds: from now."""
        self.later.append((self.now + seconds, act))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [act for at, act in self.later if at <= self.now]
        self.later = [(at, act) for at, act in self.later if at > self.now]
        for act in due:
            act()

    def titles(self, verb: str) -> list[str]:
        return [what for _, done, what in self.writes if done == verb]

    def times(self, verb: str) -> list[float]:
        return [at - 1000.0 for at, done, _ in self.writes if done == verb]

    async def run(self, seconds: float = 60.0, **order: Any) -> Exit:
        wanted = Order(**{"everywhere": False, "rest": False, "seconds": seconds, **order})
        as_json = self.stream.name == "json" if hasattr(self.stream, "name") else False
        return await uninstall(self, wanted, Out(self.stream, as_json, lambda: self.now), self.watch())

    def watch(self) -> Watch:
        async def sleep(seconds: float) -> None:
            assert seconds >= 0
            await asyncio.sleep(0)
            self.advance(seconds)

        return Watch(lambda: self.now, sleep)

    # --- the port ----------------------------------------------------------------------------------------

    async def list(self, plural: str, *, everywhere: bool = False) -> list[Json]:
        self._ask("list", plural)
        found = [
            one
            for (kind, namespace, _), one in self.objects.items()
            if kind == plural and (everywhere or namespace == self.namespace)
        ]
        return copy.deepcopy(found)

    async def delete(self, plural: str, name: str, *, uid: str, namespace: str = "") -> None:
        self._ask("delete", plural)
        one = self._exactly(plural, namespace, name, uid)
        self.writes.append((self.now, "delete", f"{plural}/{name}"))
        one["metadata"].setdefault("deletionTimestamp", "now")
        if self.operator is not None and plural in FINALIZERS:
            self.at(self.operator, lambda: self.release(one, FINALIZERS[plural]))
        self._collect(one)

    async def patch(self, plural: str, name: str, operations: list[Json], *, namespace: str = "") -> Json:
        self._ask("patch", plural)
        if self.before_patch:
            self.before_patch.pop(0)()
        uid, held, gone = operations
        one = self._exactly(plural, namespace, name, uid["value"])
        index = int(held["path"].rsplit("/", 1)[-1])
        here = one["metadata"]["finalizers"]
        if index >= len(here) or here[index] != held["value"]:
            raise Changed("test failed")
        assert (gone["op"], gone["path"]) == ("remove", held["path"]) and "deletionTimestamp" in one[
            "metadata"
        ]
        self.writes.append((self.now, "drop", f"{plural}/{name} {here.pop(index)}"))
        self._collect(one)
        return one

    async def get(self, plural: str, name: str) -> Json:
        raise AssertionError("an uninstall does not ask for it")

    async def revisions(self, cache_uid: str) -> list[Json]:
        raise AssertionError("an uninstall does not ask for it")

    async def events(self, kind: str, name: str) -> list[Json]:
        raise AssertionError("an uninstall does not ask for it")

    def follow(self, plural: str, name: str) -> Any:
        raise AssertionError("an uninstall does not ask for it")

    def release(self, one: Json, finalizer: str) -> None:
        if finalizer in one["metadata"]["finalizers"]:
            one["metadata"]["finalizers"].remove(finalizer)
        self._collect(one)

    def _ask(self, verb: str, plural: str) -> None:
        if self.now < self.down:
            self.advance(10.0)
            raise Failure(Exit.FAILED, "no answer from the API server: timed out")
        self.advance(REQUEST_SECONDS)
        if (verb, plural) in self.denied:
            raise Forbidden(f'User "person" cannot {verb} resource "{plural}"')

    def _exactly(self, plural: str, namespace: str, name: str, uid: str) -> Json:
        one = self.objects.get((plural, namespace, name))
        if one is None:
            raise Failure(Exit.NOT_FOUND, f'{plural} "{name}" not found')
        if one["metadata"]["uid"] != uid:
            raise Changed("another uid")
        return one

    def _collect(self, one: Json) -> None:
        if "deletionTimestamp" in one["metadata"] and not one["metadata"]["finalizers"]:
            self.objects = {key: other for key, other in self.objects.items() if other is not one}
