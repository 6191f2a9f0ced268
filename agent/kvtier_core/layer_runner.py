"""Layers one after the other, the rows of the next on their way while this one is computed.

Why it exists: a pipeline that is only predicted hides nothing. This one runs a list of layers over staging
slots, overlaps for real, and returns the timeline that happened, in the terms of `pipeline`. It must not
know attention, tiers' insides or where staging lies. What a late or failed fetch may still write into stays
quarantined until it is drained.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.pipeline import TWO_SLOTS, LayerTimes, Timeline, check_timeline
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.tiers.transfer import Landing, TransferItem, TransferSink

MAX_WAIT_SECONDS = 0.05


class Waiter(Protocol):
    """Where the computing thread waits for completions."""

    def wait(self, seconds: float) -> None:
        """Returns after a `notify`, or after `seconds`, or earlier."""
        ...

    def notify(self) -> None:
        """From any thread."""
        ...


class ThreadWaiter:
    """For real threads and a real clock."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._event.clear()

    def notify(self) -> None:
        self._event.set()


@dataclass(frozen=True, slots=True)
class LayerJob:
    """fetch: starts bringing the layer's cold rows into staging slot `slot` until `deadline`, `items`
    completions to the sink; may raise CoreError before anything starts. None: all rows are resident.
    compute: the layer's work on the caller's thread, with the slot (None when resident); its rows are there
    and stay until it returns."""

    compute: Callable[[int | None], None]
    fetch: Callable[[int, float, TransferSink], None] | None = None
    items: int = 0

    def __post_init__(self) -> None:
        if (self.fetch is None) != (self.items == 0):
            raise ValueError("a fetch has items, a resident layer has none")


def read_blocks(
    tier: Tier,
    blocks: Sequence[tuple[SlotRef, BlockIdentity]],
    landings: Sequence[Sequence[Landing]],
) -> Callable[[int, float, TransferSink], None]:
    """A fetch that reads `blocks` of `tier` into landings[slot] as one batch."""

    def fetch(slot: int, deadline: float, sink: TransferSink) -> None:
        pairs = zip(blocks, landings[slot], strict=False)
        tier.submit_read([TransferItem(*block, landing) for block, landing in pairs], deadline, sink)

    return fetch


class _Fetch:
    """Completions of one layer's fetch; the sink of its batch."""

    def __init__(self, run: _Run, layer: int, slot: int, items: int) -> None:
        self._run, self.layer, self.slot = run, layer, slot
        self._open = self._undrained = items
        self.error: CoreError | None = None
        self.ready = False

    def done(self, index: int, error: CoreError | None) -> None:
        with self._run.lock:
            self._open -= 1
            self.error = self.error or error
            if self._open == 0:
                self.ready = True
                self._run.fetched(self)
        self._run.pump()

    def drained(self, index: int) -> None:
        with self._run.lock:
            self._undrained -= 1
        self._run.runner.waiter.notify()

    def refuse(self, error: CoreError) -> None:
        """The batch never started: nothing is on its way."""
        with self._run.lock:
            self._open = self._undrained = 0
            self.error, self.ready = error, True
        self._run.runner.waiter.notify()

    @property
    def in_flight(self) -> bool:
        return self._undrained > 0


class LayerRunner:
    """`slots` staging slots of one owner; one run at a time. clock: seconds, as deadlines are stated in.
    issue: where fetches are started (an executor's submit, so that inline tiers overlap too); None: on
    whichever thread comes to it, for tiers that only start I/O. poll: for tiers that report in stream
    order."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        slots: int = TWO_SLOTS,
        waiter: Waiter | None = None,
        issue: Callable[[Callable[[], None]], object] | None = None,
        poll: Callable[[], object] | None = None,
    ) -> None:
        self.clock = clock
        self.slots = slots
        self.waiter: Waiter = waiter or ThreadWaiter()
        self.issue = issue or (lambda work: work())
        self.poll = poll or (lambda: None)
        self._fetches: list[_Fetch] = []

    def quarantined(self) -> frozenset[int]:
        """Slots into which bytes of an earlier run may still arrive."""
        self.poll()
        self._fetches = [fetch for fetch in self._fetches if fetch.in_flight]
        return frozenset(fetch.slot for fetch in self._fetches)

    def run(self, jobs: Sequence[LayerJob], deadline: float) -> Timeline:
        """Runs all layers and returns what happened, times from the start. NO_STAGING while a slot is
        quarantined; DEADLINE; what a fetch ended with. After an error no further layer is fetched or
        computed."""
        held = self.quarantined()
        if held:
            raise CoreError(
                Reason.NO_STAGING,
                f"staging slots {sorted(held)} wait for late bytes",
                {"slots": sorted(held)},
            )
        run = _Run(self, jobs, deadline)
        try:
            times = run.all()
        finally:
            self._fetches += run.stop()
        check_timeline(times)
        return times


class _Run:
    def __init__(self, runner: LayerRunner, jobs: Sequence[LayerJob], deadline: float) -> None:
        self.runner = runner
        self.lock = threading.Lock()
        self._jobs = jobs
        self._deadline = deadline
        self._start = runner.clock()
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_start: dict[int, float] = {}
        self._ready_at: dict[int, float] = {}
        self._next = 0
        self._busy = False
        self._stopped = False
        self._computed = 0

    def now(self) -> float:
        return self.runner.clock() - self._start

    def all(self) -> Timeline:
        layers: list[LayerTimes] = []
        free = before = 0.0
        self.pump()
        for index, job in enumerate(self._jobs):
            slot = None if job.fetch is None else index % self.runner.slots
            if job.fetch is not None:
                self._wait_for(index)
                free = self._ready_at[index]
            begin = max(before, self.now())
            job.compute(slot)
            end = self.now()
            with self.lock:
                self._computed = index + 1
            self.pump()
            start = self._fetch_start.get(index)
            ready = self._ready_at.get(index, 0.0)
            layers.append(LayerTimes(free, start, ready, begin, end, begin - before))
            before = end
        return Timeline(tuple(layers), self.runner.slots)

    def pump(self) -> None:
        """Starts the next fetch if the engine is free and its slot's last layer has been computed."""
        fetch = self._take()
        if fetch is not None:
            self.runner.issue(partial(self._begin, fetch))
        self.runner.waiter.notify()

    def _take(self) -> _Fetch | None:
        with self.lock:
            while self._next < len(self._jobs) and self._jobs[self._next].fetch is None:
                self._next += 1
            index = self._next
            if self._stopped or self._busy or index >= len(self._jobs):
                return None
            if index >= self.runner.slots and self._computed <= index - self.runner.slots:
                return None
            self._next += 1
            self._busy = True
            self._fetch_start[index] = self.now()
            fetch = _Fetch(self, index, index % self.runner.slots, self._jobs[index].items)
            self._fetches[index] = fetch
            return fetch

    def _begin(self, fetch: _Fetch) -> None:
        start = self._jobs[fetch.layer].fetch
        assert start is not None
        with self.lock:
            stopped = self._stopped
        if stopped:
            fetch.refuse(CoreError(Reason.CANCELLED, "the run ended before this fetch began"))
            return
        try:
            start(fetch.slot, self._deadline, fetch)
        except CoreError as error:
            fetch.refuse(error)

    def fetched(self, fetch: _Fetch) -> None:
        """Under the lock, by the completing thread: the engine is free again."""
        self._ready_at[fetch.layer] = self.now()
        self._busy = False
        self._stopped = self._stopped or fetch.error is not None

    def _wait_for(self, index: int) -> None:
        runner = self.runner
        while True:
            runner.poll()
            with self.lock:
                fetch = self._fetches.get(index)
                error = fetch.error if fetch is not None else None
                ready = fetch is not None and fetch.ready
            if error is not None:
                raise error
            if ready:
                return
            left = self._deadline - runner.clock()
            if left <= 0.0:
                raise CoreError(
                    Reason.DEADLINE, f"the rows of layer {index} did not come in time", {"layer": index}
                )
            runner.waiter.wait(min(left, MAX_WAIT_SECONDS))

    def stop(self) -> list[_Fetch]:
        """No further fetch begins; returns those whose bytes may still arrive."""
        with self.lock:
            self._stopped = True
            return [fetch for fetch in self._fetches.values() if fetch.in_flight]
