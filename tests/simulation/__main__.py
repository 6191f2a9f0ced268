"""Runs seeds of the simulated store: `--seed N` repeats one, `--seeds N` or `--seconds S` tries many."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter

from tests.simulation.world import SimulationFailed, simulate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed only")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(arguments)
    seeds = itertools.count(options.first) if options.seed is None else iter([options.seed])
    seen: Counter[str] = Counter()
    started, done = time.monotonic(), 0
    for seed in itertools.islice(seeds, options.seeds):
        try:
            seen.update(simulate(seed, options.steps).seen)
        except SimulationFailed as failed:
            print(f"seed {seed}: {failed}", file=sys.stderr)
            if options.seed is not None:
                raise
            return 1
        done += 1
        if time.monotonic() - started > options.seconds:
            break
    for name, count in sorted(seen.items()):
        print(f"{count:9d} {name}")
    print(f"{done} seeds of {options.steps} steps in {time.monotonic() - started:.1f} s: all promises held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
