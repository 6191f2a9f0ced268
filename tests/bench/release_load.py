"""Caches and rollouts in every stage, edited all the time: how long a status takes, and what it costs.

Three measurements on one world: under edits, by single steps when nothing else happens, and idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

import aiohttp

from tests.bench.release_api import Json, at_once, until
from tests.bench.release_audit import AuditTail, Write, by_operator, difference, most_by_agent, on_objects
from tests.bench.release_objects import (
    GROUP,
    HOLDING,
    Named,
    Role,
    all_named,
    at_rest,
    cache,
    collection,
    pool_name,
    rollout,
)
from tests.bench.release_processes import cpu_of, rss_of
from tests.bench.release_track import Tracker, bucket_quantile, buckets, lateness, quantile, slope
from tests.bench.release_world import World
from tests.bench.rows import Row
from tests.cluster.operator_harness import SYSTEM

EDITS_PER_SECOND = 5.0
INTERVAL = 10.0
"""Between looks at the evidence, by the default lease of 60 s."""
SETTLE_SECONDS = 1800.0
CALM_SECONDS = 15.0
TOLD_SECONDS = 100.0
"""Numbers that moved are told up to a minute and a look at them later, and then nobody has more to say."""
SAMPLE_SECONDS = 2.0
PROGRESS_SECONDS = 30.0
STEPS = 20
MOST_TOLD = 40
MIB = 1024 * 1024
LEASE = "kvtier-operator"


@dataclass
class Load:
    """One world with its watches; made by `watched`."""

    world: World
    named: list[Named]
    tracker: Tracker
    audit: AuditTail
    memory: list[tuple[float, float]] = field(default_factory=list)
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    measuring: bool = False
    """A signal ends only what is measured now, which then says what it has."""

    def status(self, one: Named) -> Json:
        return self.tracker.statuses.get(("kvrollouts", one.namespace, one.rollout)) or {}

    def restless(self) -> list[Named]:
        return [one for one in self.named if not at_rest(one.role, self.status(one))]

    def note(self, text: str) -> None:
        print(f"release: {text}", flush=True)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """SIGINT ends the measurement that is under way; where none is, the part."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            self.interrupted.set()
            if not self.measuring and task is not None:
                task.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def pause(self, seconds: float) -> None:
        """Until then, or until the interruption."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.interrupted.wait()


@contextlib.asynccontextmanager
async def watched(world: World) -> AsyncIterator[Load]:
    tracker = Tracker()
    assert world.cluster.audit_log is not None
    audit = AuditTail(world.cluster.audit_log, f"system:serviceaccount:{SYSTEM}:kvtier-operator")
    load = Load(world, all_named(world.sizes), tracker, audit)
    tasks = [asyncio.create_task(audit.run(), name="audit"), asyncio.create_task(_sample(load), name="rss")]
    tasks.append(asyncio.create_task(_progress(load), name="progress"))
    for plural in ("kvcaches", "kvrollouts"):

        def seen(kind: str, obj: Json, now: float, plural: str = plural) -> None:
            tracker.feed(plural, kind, obj, now)

        tasks.append(asyncio.create_task(world.admin.watch(f"{GROUP}/{plural}", seen), name=plural))
    try:
        yield load
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample(load: Load) -> None:
    while True:
        load.memory.append((time.monotonic(), load.world.operator.rss() / MIB))
        await asyncio.sleep(SAMPLE_SECONDS)


async def _progress(load: Load) -> None:
    """A line now and then: a run takes an hour."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        tracker, world = load.tracker, load.world
        api = rss_of(world.api_server) // MIB
        load.note(
            f"{time.monotonic() - began:5.0f} s: {_ready(load)} Ready, {len(load.restless())} on their way, "
            f"{len(tracker.latencies)} edits answered and {tracker.unanswered()} open, "
            f"p99 {quantile(tracker.latencies, 0.99):.2f} s; "
            f"operator {world.operator.rss() // MIB} MiB, API server {api} MiB"
        )


async def populate(load: Load) -> None:
    """Every cache Ready, every rollout where its role says."""
    world, named = load.world, load.named
    await world.admin.create_all(
        [
            (collection(one.namespace, "kvcaches"), cache(one.cache, one.namespace, _pool(world, one)))
            for one in named
        ]
    )
    took = await until(
        lambda: _ready(load) >= len(named), SETTLE_SECONDS, lambda: f"{_ready(load)} caches are Ready"
    )
    load.note(
        f"{len(named)} caches Ready after {took:.0f} s, operator {load.world.operator.rss() // MIB} MiB"
    )
    await world.admin.create_all(
        [
            (
                collection(one.namespace, "kvrollouts"),
                rollout(one.rollout, one.namespace, one.cache, one.role),
            )
            for one in named
        ]
    )
    failing = [one for one in named if one.role is Role.ROLLED_BACK]
    await until(lambda: len(_uids(load, named)) == len(named), SETTLE_SECONDS, lambda: "rollouts not seen")
    await world.agents.ask({"do": "harm", "rollouts": _uids(load, failing)})
    took = await until(
        lambda: not load.restless(), SETTLE_SECONDS, lambda: f"{len(load.restless())} rollouts on their way"
    )
    load.note(f"every rollout at its stage after {took:.0f} s more")


def _pool(world: World, one: Named) -> str:
    return pool_name(world.sizes.pool_of_cache(one.index))


def _ready(load: Load) -> int:
    return sum(
        any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or [])
        for key, status in load.tracker.statuses.items()
        if key[0] == "kvcaches"
    )


def _uids(load: Load, named: Iterable[Named]) -> list[str]:
    keys = [("kvrollouts", one.namespace, one.rollout) for one in named]
    return [load.tracker.uids[key] for key in keys if key in load.tracker.uids]


async def under_edits(load: Load, minutes: float) -> list[Row]:
    """[event_to_status], [operator_rss], [lateness], while specs are edited at a steady rate."""
    world = load.world
    await world.agents.ask({"do": "clear"})
    load.tracker.begin()
    load.memory.clear()
    before, started, cpu = Counter(load.audit.counts), time.monotonic(), world.operator.cpu_seconds()
    judged = await _judged(world)
    agents_cpu, api_cpu = world.agents.cpu_seconds(), cpu_of(world.api_server)
    load.measuring = True
    edits = await _edit(load, minutes * 60.0)
    await until(
        lambda: not load.tracker.unanswered(), 120.0, lambda: f"{load.tracker.unanswered()} edits open"
    )
    load.measuring = False
    seconds = time.monotonic() - started
    used = (world.operator.cpu_seconds() - cpu) / seconds
    agents_used = (world.agents.cpu_seconds() - agents_cpu) / seconds
    api_used = (cpu_of(world.api_server) - api_cpu) / seconds
    observed = await world.agents.ask({"do": "observed"})
    late = [one / INTERVAL for _, _, moments in observed["reads"] for one in lateness(moments, INTERVAL)]
    looks, moved = await _judged(world), sum(load.tracker.transitions.values())
    written = by_operator(difference(load.audit.counts, before), lease=LEASE)
    load.note(
        f"{edits} edits in {seconds:.0f} s, {moved} moves of a fence, {len(late)} looks on a beat; "
        f"processor: operator {used:.2f}, agents {agents_used:.2f}, API server {api_used:.2f}; "
        f"writes {dict(written)}; calls a second {_a_second(observed['calls'], seconds)}; "
        f"longest collection of the agents' garbage {observed['longestStop']:.2f} s"
    )
    for line in load.tracker.slow_by(started, PROGRESS_SECONDS)[:MOST_TOLD]:
        load.note(f"edits, after {line}")
    latencies = load.tracker.latencies
    return [
        Row("event_to_status.p50", quantile(latencies, 0.50), "s", lower_is_better=True),
        Row("event_to_status.p99", quantile(latencies, 0.99), "s", goal=2.0, lower_is_better=True),
        Row("event_to_status.edits", float(edits), "edits"),
        Row("event_to_status.moves", float(moved), "moves"),
        *_memory_rows(load),
        Row("operator_cpu", used, "cores", lower_is_better=True),
        Row("lateness.p50", quantile(late, 0.50), "interval", lower_is_better=True),
        Row("lateness.p99", quantile(late, 0.99), "interval", goal=0.1, lower_is_better=True),
        Row("lateness.looks", float(len(late)), "looks"),
        *(
            Row(f"lateness.judged.{name}", bucket_quantile(judged, looks, share), "interval",
                lower_is_better=True)
            for name, share in (("p50", 0.50), ("p99", 0.99))
        ),
    ]  # fmt: skip


async def _judged(world: World) -> dict[float, float]:
    """The operator's own histogram of how late looks came, in intervals, since it began."""
    async with aiohttp.ClientSession() as session, session.get(world.operator.metrics_url) as answer:
        return buckets(await answer.text(), "kvtier_operator_look_lateness_intervals")


def _a_second(calls: dict[str, int], seconds: float) -> dict[str, float]:
    return {verb: round(count / seconds, 1) for verb, count in sorted(calls.items())}


def _memory_rows(load: Load) -> list[Row]:
    """The highest sample, and how much the second half rose: a straight line through it, over an hour."""
    points = load.memory
    later = points[len(points) // 2 :]
    return [
        Row("operator_rss.max", max(y for _, y in points), "MiB", goal=256.0, lower_is_better=True),
        Row("operator_rss.slope", slope(later) * 3600.0, "MiB/h", lower_is_better=True),
    ]


async def _edit(load: Load, seconds: float) -> int:
    """Edits at their moments, whether or not earlier ones were answered."""
    chosen = _edits(load)
    started, count = time.monotonic(), 0
    running: set[asyncio.Task[Json]] = set()
    while (due := started + count / EDITS_PER_SECOND) < started + seconds and not load.interrupted.is_set():
        await load.pause(due - time.monotonic())
        path, body = next(chosen)
        task = asyncio.create_task(load.world.admin.merge(path, body))
        running.add(task)
        task.add_done_callback(running.discard)
        count += 1
    await asyncio.gather(*running)
    return count


def _edits(load: Load) -> Iterator[tuple[str, Json]]:
    """Of caches what agents are told, and of rollouts what changes nothing, what opens a window again, and
    what begins another attempt; in turn, on objects by chance."""
    chance = random.Random(7)
    holding = [one for one in load.named if one.role in HOLDING]
    walking = [one for one in load.named if one.role is Role.WALKING]
    number = 0
    while True:
        number += 1
        of = chance.choice(load.named)
        yield of.cache_path, {"spec": {"admission": {"queue": 16 + number % 200}}}
        of = chance.choice(holding)
        yield of.rollout_path, {"spec": {"progressDeadline": f"{73 + number % 90}h"}}
        of = chance.choice(holding)
        share = f"{0.01 + 0.0001 * (number % 90):.4f}"
        yield of.rollout_path, {"spec": {"errorBudget": {"falsePromotion": "0.05", "falseRollback": share}}}
        of = chance.choice(load.named)
        yield of.cache_path, {"spec": {"admission": {"queue": 300 + number % 200}}}
        of = chance.choice(walking)
        wanted = "quest-32" if number % 2 else "quest-64"
        yield of.rollout_path, {"spec": {"candidate": {"selectorRef": {"name": wanted}}}}


async def calm(load: Load) -> None:
    """Until nothing has changed for a while."""
    await until(
        lambda: time.monotonic() - load.tracker.last_change > CALM_SECONDS,
        SETTLE_SECONDS,
        lambda: "objects still change",
    )


async def _all_told(load: Load) -> None:
    """Until the operator has written nothing but its Lease for a while."""
    seen, since = by_operator(load.audit.counts, lease=LEASE), time.monotonic()
    async with asyncio.timeout(SETTLE_SECONDS):
        while time.monotonic() - since < TOLD_SECONDS and not load.interrupted.is_set():
            await load.pause(1.0)
            now = by_operator(load.audit.counts, lease=LEASE)
            if now != seen:
                seen, since = now, time.monotonic()


async def by_steps(load: Load) -> list[Row]:
    """[writes_per_transition]: rollouts in Canary are sent on by hand, and all that is written is counted."""
    chosen = [one for one in load.named if one.role is Role.CANARY][:STEPS]
    await calm(load)
    before = Counter(load.audit.counts)
    load.tracker.begin()

    async def promote(one: Named) -> None:
        status = load.status(one)
        intent = {"seq": 1, "verb": "Promote", "attempt": status["attempt"]}
        intent |= {"expectedStage": "Canary", "expectedStep": 0}
        await load.world.admin.merge(one.rollout_path, {"spec": {"intent": intent}})

    await at_once([lambda one=one: promote(one) for one in chosen])  # type: ignore[misc]
    await until(
        lambda: all(load.status(one).get("stage") == "Ramp" for one in chosen),
        SETTLE_SECONDS,
        lambda: "not all promoted",
    )
    await calm(load)
    written = difference(load.audit.counts, before)
    moved = load.tracker.transitions
    moves = sum(moved[one.rollout] for one in chosen)
    names = frozenset(name for one in chosen for name in (one.cache, one.rollout))
    mine, all_of_them = on_objects(written, names), by_operator(written, lease=LEASE)
    load.note(f"{moves} steps by hand: {dict(mine)}; with others, {sum(moved.values())}: {dict(all_of_them)}")
    return [
        Row("writes_per_transition", sum(mine.values()) / moves, "writes", goal=2.0, lower_is_better=True),
        Row("events_per_transition", _events(all_of_them) / sum(moved.values()), "events",
            lower_is_better=True),
    ]  # fmt: skip


def _events(writes: Counter[str]) -> int:
    return sum(count for name, count in writes.items() if name.endswith(" events"))


async def idle(load: Load, minutes: float) -> list[Row]:
    """[idle_writes]: nothing is edited, and nobody has anything to say."""
    await calm(load)
    await _all_told(load)
    before, began = Counter(load.audit.counts), time.monotonic()
    statuses = dict(load.tracker.statuses)
    load.measuring = True
    await load.pause(minutes * 60.0)
    load.measuring, minutes = False, max(1 / 60, (time.monotonic() - began) / 60.0)
    written: Counter[Write] = difference(load.audit.counts, before)
    told = by_operator(written, lease=LEASE)
    load.note(f"idle for {minutes:g} min: operator {dict(told)}")
    if told:
        for line in load.tracker.changed_since(statuses)[:MOST_TOLD]:
            load.note(line)
    tens = minutes * 6.0
    return [
        Row("idle_writes.operator", float(sum(told.values())), "writes", goal=0.0, lower_is_better=True),
        # One more may fall into a span of that length than its beat says.
        Row("idle_writes.agent_lease", max(0, most_by_agent(written, "leases") - 1) / tens, "per 10 s",
            goal=1.0, lower_is_better=True),
        Row("idle_writes.agent_status", most_by_agent(written, "kvnodes/status") / minutes, "per min",
            goal=1.0, lower_is_better=True),
    ]  # fmt: skip
