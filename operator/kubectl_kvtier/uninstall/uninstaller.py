"""The shell of an uninstall: looks, deletions and patches, none of them without a deadline.

A server that does not answer is asked again, up to the deadline and the closing seconds after it. It must not
decide what goes when: that is `retiring`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kubectl_kvtier.outcomes import Exit, Failure, Forbidden
from kubectl_kvtier.ports import Api, Changed
from kubectl_kvtier.printing import Out
from kubectl_kvtier.uninstall import accounts, retiring
from kubectl_kvtier.uninstall.holds import (
    CACHES,
    FINALIZERS,
    KINDS,
    REST,
    REST_OF_CLUSTER,
    ROLLOUTS,
    Held,
    read_held,
)
from kubectl_kvtier.uninstall.retiring import Step

POLL_SECONDS = 1.0
LOOK_SHARE = 0.2
"""At most so much of the time is spent on asking, however long the lists are."""
TELL_SECONDS = 10.0
CLOSING_PAUSE = 0.5
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Order:
    """everywhere: in all namespaces. rest: also what holds nothing: selectors, pools, tier classes."""

    everywhere: bool
    rest: bool
    seconds: float
    dry_run: bool = False

    @property
    def plurals(self) -> tuple[str, ...]:
        more = REST_OF_CLUSTER if self.everywhere else REST
        return (ROLLOUTS, CACHES, *(more if self.rest else ()))


@dataclass(frozen=True, slots=True)
class Watch:
    """A clock that never goes back, in seconds, and a sleep by it."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def uninstall(api: Api, order: Order, out: Out, watch: Watch | None = None) -> Exit:
    """See `accounts.exit_of`. Failure USAGE for a deadline that is too short, Forbidden for a right to list
    or delete that is missing, FAILED when the server does not answer."""
    return await _Uninstall(api, order, out, watch or Watch()).run()


class _Uninstall:
    def __init__(self, api: Api, order: Order, out: Out, watch: Watch) -> None:
        self._api, self._order, self._out, self._watch = api, order, out, watch
        self._progress = retiring.begin(watch.monotonic(), order.seconds)
        self._told_at = self._progress.started
        self._look_seconds = 0.0

    async def run(self) -> Exit:
        found = await self._list()
        refused = accounts.deadline_refused(self._order.seconds, found)
        if refused:
            raise Failure(Exit.USAGE, refused)
        if self._order.dry_run:
            self._out.write([_shown(one) for one in found], accounts.preview(found))
            return Exit.OK
        try:
            await self._until_deadline()
            await self._close()
        except asyncio.CancelledError:
            self._out.tell(
                [f"interrupted: {len(self._progress.here)} objects are left; run it again to go on"]
            )
            raise
        self._account()
        return accounts.exit_of(self._progress)

    def _account(self) -> None:
        now = self._watch.monotonic()
        self._out.write(accounts.facts(self._progress, now), accounts.lines(self._progress, now))

    async def _until_deadline(self) -> None:
        while (left := self._progress.deadline - self._watch.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    if (await self._pass()).over:
                        return
            except TimeoutError:
                return
            except Forbidden:
                raise
            except Failure as failure:
                self._out.tell([f"asked again: {failure}"])
            left = self._progress.deadline - self._watch.monotonic()
            await self._watch.sleep(max(0.0, min(left, max(POLL_SECONDS, self._look_seconds / LOOK_SHARE))))

    async def _close(self) -> None:
        """What is left of ours goes, and is looked for once more. Failure when the server does not answer."""
        trouble: Failure | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(retiring.CLOSING_SECONDS):
                while True:
                    try:
                        if (await self._pass()).over:
                            return
                        trouble = None
                    except Forbidden:
                        raise
                    except Failure as failure:
                        trouble = failure
                        if self._watch.monotonic() >= self._progress.deadline + retiring.CLOSING_SECONDS:
                            break
                    await self._watch.sleep(CLOSING_PAUSE)
        if trouble is not None:
            self._account()
            raise Failure(trouble.status, f"{trouble}; run it again to go on") from trouble

    async def _pass(self) -> Step:
        await self._look()
        step = retiring.decide(self._progress, self._watch.monotonic())
        await self._all(step.delete, self._delete)
        await self._all(step.drop, self._drop)
        now = self._watch.monotonic()
        if not step.over and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            self._out.tell([accounts.waiting(self._progress, now)])
        return step

    async def _look(self) -> None:
        asked = self._watch.monotonic()
        found = await self._list()
        now = self._watch.monotonic()
        self._look_seconds = now - asked
        before = self._progress
        self._progress = retiring.observe(before, found, asked, now)
        self._out.tell(accounts.changes(before, self._progress, now))

    async def _list(self) -> list[Held]:
        found = []
        for plural in self._order.plurals:
            try:
                documents = await self._api.list(plural, everywhere=self._order.everywhere)
            except Forbidden as error:
                raise _missing("list", plural, error) from error
            found += sorted((read_held(plural, one) for one in documents), key=lambda one: one.title)
        return found

    async def _all(self, objects: Sequence[Held], act: Callable[[Held], Awaitable[None]]) -> None:
        """A bounded number at once, one kind after the other."""
        for _, of_kind in groupby(objects, lambda one: one.plural):
            same = list(of_kind)
            for first in range(0, len(same), AT_ONCE):
                await asyncio.gather(*(act(one) for one in same[first : first + AT_ONCE]))

    async def _delete(self, held: Held) -> None:
        try:
            await self._api.delete(held.plural, held.name, uid=held.uid, namespace=held.namespace)
        except Changed:
            return
        except Forbidden as error:
            raise _missing("delete", held.plural, error) from error
        except Failure as failure:
            if failure.status is not Exit.NOT_FOUND:
                raise
            return
        self._progress = retiring.deleted(self._progress, held, self._watch.monotonic())
        self._out.tell([f"deleted: {held.title}{f', in {held.phase}' if held.phase else ''}"])

    async def _drop(self, held: Held) -> None:
        """Of exactly this object, and only the finalizer that was seen at this place."""
        index, name = held.ours, FINALIZERS[held.plural]
        operations = [
            {"op": "test", "path": "/metadata/uid", "value": held.uid},
            {"op": "test", "path": f"/metadata/finalizers/{index}", "value": name},
            {"op": "remove", "path": f"/metadata/finalizers/{index}"},
        ]
        try:
            await self._api.patch(held.plural, held.name, operations, namespace=held.namespace)
        except Changed:
            return
        except Forbidden:
            self._progress = retiring.refused(self._progress, held)
            return
        except Failure as failure:
            if failure.status is not Exit.NOT_FOUND:
                raise
            return
        self._progress = retiring.dropped(self._progress, held)


def _missing(verb: str, plural: str, error: Forbidden) -> Forbidden:
    return Forbidden(f"the right to {verb} {plural}.kvtier.dev is missing ({accounts.ROLE}): {error}")


def _shown(one: Held) -> dict[str, object]:
    return {
        "kind": KINDS[one.plural],
        "namespace": one.namespace,
        "name": one.name,
        "uid": one.uid,
        "deleting": one.deleting,
        "finalizers": list(one.finalizers),
    }
