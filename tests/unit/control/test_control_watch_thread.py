"""kopf's thread is started again when it ends by itself, and says how long it has been down."""

from __future__ import annotations

import asyncio
import itertools
import threading

import kopf
import pytest

from kvtier_operator.store import WatchStore
from kvtier_operator.watch.kopf_thread import (
    WATCHER,
    Backoffs,
    KopfThread,
    WatchDeps,
    WatchEnded,
    register,
    settings,
)
from kvtier_operator.watch.nothing_kept import UnexpectedHandler
from kvtier_operator.watch.triggers import WATCHED
from tests.unit.control.control_fakes import FakeClock


class Breaking(KopfThread):
    """Fails `failures` times, then watches until it is stopped."""

    def __init__(self, clock: FakeClock, failures: int) -> None:
        super().__init__(
            WatchDeps(WatchStore(), lambda _keys, _seen: None, None, clock), restart_seconds=(0.001,)
        )
        self.failures = failures
        self.starts = 0
        self.watching = threading.Event()

    async def _run(self) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise ConnectionError("the watch broke")
        ready = asyncio.Event()
        ready.set()
        await self._note_ready(ready)
        self.watching.set()
        await asyncio.to_thread(self._stop.wait, 120)


def test_a_watch_that_breaks_for_good_is_started_again() -> None:
    clock = FakeClock()
    thread = Breaking(clock, failures=3)
    clock.advance(7)
    assert thread.down_seconds() == 0, "the first lists are waited for, and may take long"
    thread.start()
    assert thread.watching.wait(120)
    assert thread.starts == 4
    assert thread.down_seconds() == 0
    clock.advance(100)
    assert thread.down_seconds() == 0
    assert thread.stop()


def test_a_thread_that_is_stopped_before_it_ever_watched_ends() -> None:
    thread = Breaking(FakeClock(), failures=10**9)
    thread.start()
    assert thread.stop()
    assert thread.down_seconds() == 0.0


def test_kopf_stores_nothing_and_posts_nothing() -> None:
    made = settings()
    assert made.scanning.disabled
    assert made.peering.standalone
    assert not made.posting.enabled
    assert made.watching.server_timeout is not None
    assert sorted(made.watching.label_selectors.values()) == [
        "kvtier.dev/component in (agent,operator)",
        "kvtier.dev/component=agent",
    ]


def test_only_events_are_handled_so_that_kopf_sets_no_finalizer() -> None:
    """It does for a handler of deletions, for timers and for daemons."""
    registry = kopf.OperatorRegistry()
    register(registry, WatchDeps(WatchStore(), lambda _keys, _seen: None, None, FakeClock()))
    assert len(registry._watching.get_all_handlers()) == len(WATCHED)
    others = (registry._spawning, registry._changing, registry._indexing, registry._webhooks)
    assert [handler for one in others for handler in one.get_all_handlers()] == []


def test_with_an_event_kopf_copies_no_object() -> None:
    made = settings().persistence
    body = kopf.Body({"metadata": {"name": "chat", "labels": {"a": "b"}}, "spec": {"tiers": [1, 2]}})
    essence = made.diffbase_storage.build(body=body)
    assert essence == {}
    assert made.diffbase_storage.fetch(body=body) is None
    assert made.progress_storage.clear(essence=essence) is essence


def test_a_handler_for_which_kopf_would_keep_something_is_not_served() -> None:
    made = settings().persistence
    body, patch = kopf.Body({"metadata": {"name": "chat"}}), kopf.Patch()
    record: kopf.ProgressRecord = {"success": True}
    with pytest.raises(UnexpectedHandler):
        made.diffbase_storage.store(body=body, patch=patch, essence={})
    with pytest.raises(UnexpectedHandler):
        made.progress_storage.store(key=kopf.HandlerId("on"), record=record, body=body, patch=patch)
    assert not patch


class Losing(KopfThread):
    """Loses one of two watches without ending, as kopf does."""

    def __init__(self) -> None:
        deps = WatchDeps(WatchStore(), lambda _keys, _seen: None, None, FakeClock())
        super().__init__(deps, sleep=self._look)
        self.looks = 0
        self.looked = asyncio.Event()

    async def _look(self, seconds: float) -> None:
        self.looks += 1
        if self.looks > 2:
            self.looked.set()
        await asyncio.sleep(0)

    async def _watch(self, ready: asyncio.Event) -> None:
        never = asyncio.Event()
        names = ("kvcaches", "kvrollouts")
        watches = [asyncio.create_task(never.wait(), name=f"{WATCHER}{name}") for name in names]
        await self.looked.wait()
        watches[0].cancel()
        await never.wait()


async def test_a_kind_that_is_not_watched_any_more_ends_the_life_in_which_it_was() -> None:
    """Which is then followed by another, as any that ends by itself."""
    with pytest.raises(WatchEnded, match="watcher for kvcaches"):
        await asyncio.wait_for(Losing()._run(), 60)


def test_an_api_server_that_is_away_for_long_ends_no_watch() -> None:
    backoffs = settings().networking.error_backoffs
    assert isinstance(backoffs, Backoffs)
    waits = list(itertools.islice(backoffs, 1000))
    assert len(waits) == 1000
    assert max(waits) <= 5.0
    assert list(itertools.islice(backoffs, 3)) == waits[:3]
