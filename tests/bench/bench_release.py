"""Release control at scale, against a real API server, with the operator as it is shipped and many agents.

`ARGS="--minutes 30 --idle-minutes 10"` is the run that docs/benchmarks/release.md tells of; `--caches 16
--agents 5 --minutes 0.2 --idle-minutes 0.2` shows within minutes that all parts work. `--parts` chooses among
the parts below. What a run is held to stands in docs/benchmarks/release-range.json. SIGINT ends what is
measured at that moment, and the report has the rows of what was measured until then.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence

from tests.bench import release_load, release_range, release_rollback
from tests.bench.release_objects import Sizes
from tests.bench.release_world import open_world
from tests.bench.rows import Row

PARTS = ("load", "rollback")


def rows(arguments: Sequence[str] = ()) -> Iterator[Row]:
    options = parser().parse_args(arguments)
    parts = options.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(f"--parts: {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    ranges = release_range.read()
    sizes = release_range.name_of(options.caches, options.agents, options.pool_size)
    whole = 0
    for name, measure in (("load", _load), ("rollback", _rollback)):
        if name not in parts:
            continue
        measured: list[Row] = []
        try:
            whole += asyncio.run(measure(options, measured))
        except (Exception, KeyboardInterrupt, asyncio.CancelledError) as error:
            # What was measured before is worth its hour; the last row says that it is not all.
            print(f"release: {name} ended early: {type(error).__name__}: {error}", flush=True)
        yield from release_range.held(measured, ranges, sizes)
    yield Row(release_range.ENDED, float(whole), "parts", floor=float(len(set(parts))))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.bench release", description=__doc__)
    made.add_argument("--caches", type=int, default=1000, help="each with one rollout")
    made.add_argument("--agents", type=int, default=200)
    made.add_argument("--pool-size", type=int, default=5, help="agents of a pool, on which a cache lies")
    made.add_argument("--minutes", type=float, default=3.0, help="of edits")
    made.add_argument("--idle-minutes", type=float, default=1.0)
    made.add_argument("--rounds", type=int, default=20, help="returns to the baseline")
    made.add_argument("--without-argo", action="store_true", help="ours alone: nothing is built")
    made.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    return made


async def _load(options: argparse.Namespace, measured: list[Row]) -> bool:
    """Adds rows as they are measured; whether all of it was."""
    sizes = Sizes(options.caches, options.agents, options.pool_size)
    async with open_world(sizes) as world, release_load.watched(world) as load:
        with load.interruptible():
            await release_load.populate(load)
            measured += await release_load.under_edits(load, options.minutes)
            measured += await release_load.by_steps(load)
            measured += await release_load.idle(load, options.idle_minutes)
        return not load.interrupted.is_set()


async def _rollback(options: argparse.Namespace, measured: list[Row]) -> bool:
    """All agents in one pool."""
    sizes = Sizes(1, options.agents, options.agents)
    async with open_world(sizes, all_read=True) as world:
        rounds = release_rollback.Rounds(world)
        try:
            await release_rollback.measure(world, rounds, options.rounds, beside=not options.without_argo)
        finally:
            measured += rounds.rows()
        return True
