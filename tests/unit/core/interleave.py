"""A controlled scheduler: which pending action runs next is drawn from a seed, so any interleaving repeats.

A world lists what can happen now, as (name, action) pairs in a fixed order; the scheduler draws one, runs it,
and lets the world check its invariants. A failing seed is printed with the actions that led there, and
`replay` runs it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

Action = tuple[str, Callable[[], None]]


class World(Protocol):
    def actions(self) -> Sequence[Action]:
        """What can happen now. Empty: the world is at rest."""
        ...

    def check(self) -> None:
        """Invariants that hold after every step."""
        ...

    def finish(self) -> None:
        """Called at rest or after the last step: brings all to an end and checks what must hold then."""
        ...


class InterleavingFailed(AssertionError):
    """An invariant broke. `seed` repeats it; `trace` names the actions, oldest first."""

    def __init__(self, seed: int, trace: Sequence[str], error: BaseException) -> None:
        shown = "\n  ".join(trace[-60:])
        super().__init__(f"seed {seed}, after {len(trace)} actions: {error!r}\n  {shown}")
        self.seed = seed
        self.trace = list(trace)


def replay(build: Callable[[random.Random], World], seed: int, steps: int) -> list[str]:
    """Runs one interleaving and returns the actions. Raises InterleavingFailed."""
    rng = random.Random(seed)
    trace: list[str] = []
    try:
        world = build(rng)
        for _ in range(steps):
            choices = world.actions()
            if not choices:
                break
            name, action = choices[rng.randrange(len(choices))]
            trace.append(name)
            action()
            world.check()
        trace.append("finish")
        world.finish()
        world.check()
    except Exception as error:
        raise InterleavingFailed(seed, trace, error) from error
    return trace


def explore(build: Callable[[random.Random], World], seeds: Iterator[int] | range, steps: int) -> set[str]:
    """Runs an interleaving per seed and returns the names of all actions seen, up to their first space, so
    that a test can demand that what it is about has happened."""
    seen: set[str] = set()
    for seed in seeds:
        seen.update(name.split(" ")[0] for name in replay(build, seed, steps))
    return seen
