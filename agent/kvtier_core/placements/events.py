"""A discrete-event simulation of a schedule: tasks on streams, each in its stream's order and after others.

Why it exists: a closed form assumes perfect overlap and endless buffers, and only a run of the schedule's own
dependencies shows what they cost (systems specification 0.7). Integer nanoseconds, events ordered by time and
sequence, no wall clock and no randomness: equal input gives equal output. It must not know what tasks mean.

Results are simulated, and a caller says so. A stream is a resource that works on one task at a time in the
order in which they were added: a direction of a link, a device, a processor.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtier_core.exact_placements import PlacementReason, PlacementRefused

NANOSECONDS = 1_000_000_000
MAX_TASKS = 200_000


def nanoseconds(seconds: float) -> int:
    """Rounded to the nearest; TIME_MODEL for what is no time."""
    if not 0.0 <= seconds < 1e9:
        raise PlacementRefused(PlacementReason.TIME_MODEL, f"{seconds} s is no time of a task")
    return round(seconds * NANOSECONDS)


@dataclass(frozen=True, slots=True)
class Task:
    """took: nanoseconds. after: indices of tasks that must have ended before this one begins."""

    name: str
    stream: str
    took: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, nanoseconds from the start."""

    begin: int
    end: int


class Program:
    """Tasks in the order in which they were added."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, name: str, stream: str, seconds: float, after: Iterable[int | None] = ()) -> int:
        """The task's index. None in `after` is no task. TIME_MODEL for a dependency that does not exist
        yet, or a program without end."""
        index = len(self.tasks)
        wanted = tuple(sorted({item for item in after if item is not None}))
        if index >= MAX_TASKS or (wanted and not 0 <= wanted[0] <= wanted[-1] < index):
            raise PlacementRefused(PlacementReason.TIME_MODEL, f"task {name} cannot be number {index}")
        self.tasks.append(Task(name, stream, nanoseconds(seconds), wanted))
        return index


@dataclass(frozen=True, slots=True)
class Simulated:
    """spans: by task. busy: nanoseconds that each stream worked. critical: nanoseconds of the longest chain
    of dependencies, streams left out."""

    spans: tuple[Span, ...]
    busy: Mapping[str, int]
    critical: int

    @property
    def makespan(self) -> int:
        return max((span.end for span in self.spans), default=0)

    @property
    def seconds(self) -> float:
        return self.makespan / NANOSECONDS

    @property
    def floor(self) -> int:
        """Nanoseconds that no order and no number of buffers can go below."""
        return max(max(self.busy.values(), default=0), self.critical)

    def waited(self, stream: str) -> int:
        """Nanoseconds of the whole run in which the stream did nothing."""
        return self.makespan - self.busy.get(stream, 0)


def simulate(program: Program) -> Simulated:
    """Runs the program by events. It always ends: dependencies and streams both point backwards only."""
    tasks = program.tasks
    waiting = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    queues: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(index)
        for before in task.after:
            followers[before].append(index)
    for queue in queues.values():
        queue.reverse()
    spans: list[Span | None] = [None] * len(tasks)
    working: dict[str, bool] = dict.fromkeys(queues, False)
    events: list[tuple[int, int, int]] = []
    sequence = 0

    def begin(stream: str, now: int) -> None:
        """Starts the stream's next task if it is free and all before it has ended."""
        nonlocal sequence
        queue = queues[stream]
        if working[stream] or not queue or waiting[queue[-1]]:
            return
        index = queue.pop()
        working[stream] = True
        end = now + tasks[index].took
        spans[index] = Span(now, end)
        heapq.heappush(events, (end, sequence, index))
        sequence += 1

    for stream in queues:
        begin(stream, 0)
    while events:
        now, _, index = heapq.heappop(events)
        working[tasks[index].stream] = False
        touched = {tasks[index].stream: None}
        for follower in followers[index]:
            waiting[follower] -= 1
            touched[tasks[follower].stream] = None
        for stream in touched:
            begin(stream, now)
    return Simulated(tuple(span for span in spans if span is not None), _busy(tasks), _critical(tasks))


def _busy(tasks: list[Task]) -> dict[str, int]:
    busy: dict[str, int] = {}
    for task in tasks:
        busy[task.stream] = busy.get(task.stream, 0) + task.took
    return busy


def _critical(tasks: list[Task]) -> int:
    ends: list[int] = []
    for task in tasks:
        ends.append(task.took + max((ends[before] for before in task.after), default=0))
    return max(ends, default=0)
