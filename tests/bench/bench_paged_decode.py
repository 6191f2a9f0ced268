"""[paged_decode] on the CPU at 8k rows of SmolLM2's shape: as many times the seconds that memory needs.

The floor is the time in which torch.sum reads the same K and V, measured alternately. All rows come from
memory: caches take turns, and together they are larger than what the processor keeps. float32; with one
thread, in seconds of its processor, and with as many as torch takes by itself, in seconds of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvtier_kernels.compiled.crew import Crew
from kvtier_kernels.ops.paged_decode import paged_decode_torch
from tests.bench.rows import Row

ROWS, PAGE, QUERY_HEADS, KV_HEADS, HEAD_DIM = 8192, 16, 9, 3, 64
SCALE = HEAD_DIM**-0.5
CACHES = 10
ROUNDS = 8
GOALS = {"runs": 1.5, "pages": 3.5}


def rows() -> Iterator[Row]:
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(5)
    caches = [_Cache(generator) for _ in range(CACHES)]
    tables = {
        "runs": torch.arange(ROWS // PAGE, dtype=torch.int32),
        "pages": torch.randperm(ROWS // PAGE, generator=generator).int(),
    }
    try:
        for threads in sorted({1, before}):
            for name, table in tables.items():
                yield from _rows(name, table.unsqueeze(0), caches, threads)
    finally:
        torch.set_num_threads(before)


class _Cache:
    def __init__(self, generator: torch.Generator) -> None:
        shape = (ROWS // PAGE, PAGE, KV_HEADS, HEAD_DIM)
        self.k, self.v = (torch.randn(shape, generator=generator) for _ in range(2))
        self.q = torch.randn(1, QUERY_HEADS, HEAD_DIM, generator=generator)


def _rows(name: str, table: Tensor, caches: Sequence[_Cache], threads: int) -> Iterator[Row]:
    lens = torch.tensor([ROWS], dtype=torch.int32)
    pages = table[0].long()
    with ExitStack() as stack:
        crew = stack.enter_context(Crew(threads - 1)) if threads > 1 else None

        def ours(cache: _Cache) -> None:
            paged_decode_torch(cache.q, cache.k, cache.v, table, lens, scale=SCALE, crew=crew)

        def sdpa(cache: _Cache) -> None:
            k, v = (x[pages].flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (cache.k, cache.v))
            one = cache.q[0][None, :, None]
            torch.nn.functional.scaled_dot_product_attention(one, k, v, scale=SCALE, enable_gqa=True)

        def floor(cache: _Cache) -> None:
            cache.k.sum(), cache.v.sum()

        # Threads of ours attend groups of chunks; torch's within them would only wait for each other.
        mine, theirs, least = _alternately([(ours, 1), (sdpa, threads), (floor, threads)], caches)
    label = f"paged_decode.n{ROWS}.{name}.t{threads}"
    yield Row(f"{label}.of_floor", mine / least, "x floor", goal=GOALS[name], lower_is_better=True)
    yield Row(
        label,
        mine * 1e6,
        "us",
        goal=theirs * 1e6,
        peer="gather and sdpa",
        peer_value=theirs * 1e6,
        lower_is_better=True,
    )
    yield Row(f"{label}.floor", least * 1e6, "us", lower_is_better=True)


def _alternately(
    calls: Sequence[tuple[Callable[[_Cache], None], int]], caches: Sequence[_Cache]
) -> list[float]:
    """Of each with its number of torch's threads, the least seconds over all rounds and caches, which is what
    a busy machine troubles least."""
    alone = all(threads == 1 for _, threads in calls)
    clock = time.thread_time if alone else time.perf_counter
    seconds: list[list[float]] = [[] for _ in calls]
    for round_ in range(ROUNDS + 1):
        for (call, threads), taken in zip(calls, seconds, strict=True):
            torch.set_num_threads(threads)
            for cache in caches:
                started = clock()
                call(cache)
                if round_:
                    taken.append(clock() - started)
    return [min(taken) for taken in seconds]
