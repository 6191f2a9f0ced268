"""Kernels and the attention above them, part by part: a module `kernels_<part>.py` beside this is a part.

`--parts` (or `KVTIER_BENCH_PARTS`) chooses parts, comma-separated; all of them without it. `--lengths` goes
to `tokens_per_second`. A part is imported when it runs, so that a machine with a GPU needs no more than the
kernels and torch for `gpu`, which times each kernel by CUDA events; elsewhere that part says so and times
nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from collections.abc import Iterator, Sequence

from tests import bench
from tests.bench.rows import Row

PREFIX = "kernels_"
# Suites of their own that belong to this one too, where they exist.
ALSO = ("paged_decode", "engine_step", "attention_call", "tokens_per_second")


def parts() -> dict[str, str]:
    """Module by name of part."""
    names = {module.name for module in pkgutil.iter_modules(bench.__path__)}
    own = {name.removeprefix(PREFIX): name for name in sorted(names) if name.startswith(PREFIX)}
    return own | {part: f"bench_{part}" for part in ALSO if f"bench_{part}" in names and part not in own}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kernels", description=__doc__)
    made.add_argument(
        "--parts", default=os.environ.get("KVTIER_BENCH_PARTS"), help="with commas; default: all"
    )
    made.add_argument("--lengths", help="contexts of tokens_per_second, with commas")
    return made


def rows(arguments: Sequence[str] = ()) -> Iterator[Row]:
    args = parser().parse_args(arguments)
    known = parts()
    chosen = list(known) if args.parts is None else args.parts.split(",")
    if unknown := [part for part in chosen if part not in known]:
        raise ValueError(f"KVTIER_BENCH_PARTS: {', '.join(unknown)}; there are: {', '.join(known)}")
    for part in chosen:
        print(f"measuring {part}", flush=True)
        module = importlib.import_module(f"tests.bench.{known[part]}")
        if args.lengths is not None and part == "tokens_per_second":
            yield from module.rows(["--lengths", args.lengths])
        else:
            yield from module.rows()
