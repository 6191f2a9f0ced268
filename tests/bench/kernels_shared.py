"""What it saves to read a chunk once for several decode queries of a call, and what finding out costs.

SmolLM2's shape, one thread, float32, by processor time. Thirty layers take turns, so that no layer finds its
rows in the caches; the two ways take turns too. `own` over `shared` is what a call of the kernel costs;
`made` is what is done once for the same frames: finding what they have in common and writing it down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch

from kvtier_core import sharedreads
from kvtier_core.sharedreads import Place, Sequenced, readings_of
from kvtier_core.tiers.base import SlotRef, Tier
from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom, KeptBatch
from kvtier_kernels.ops.chunk_attention.runs import chunk_runs
from tests.bench.rows import Row
from tests.bench.timing import threads

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
VISIBLE = 60
TURNS = 24


def rows() -> Iterator[Row]:
    if library() is None:
        return
    with threads(1):
        for chunk in (16, 64, 256):
            for count in (1, 4) if chunk == 256 else (4,):
                for queries in (2, 3, 4, 8):
                    yield from _rows(chunk, count, queries)


def _sequences(chunk: int, count: int, queries: int) -> list[Sequenced]:
    """Queries over the same `count` chunks, each with an open one of its own."""
    pool = torch.randn(count + queries, 2, KV_HEADS, chunk, HEAD_DIM)
    memory = cast(Tier, "memory")
    shared = [Place(memory, SlotRef(slot, 1)) for slot in range(count)]
    found = []
    for query in range(queries):
        # Runs of their own, as each session keeps its views.
        runs = chunk_runs([pool[slot, 0] for slot in range(count)], [pool[slot, 1] for slot in range(count)])
        own = chunk_runs([pool[count + query, 0]], [pool[count + query, 1]])[0]
        found.append(Sequenced(shared, runs, own, min(VISIBLE, chunk)))
    return found


def _once(each: list[Sequenced], chunk: int) -> list[Reading]:
    """As an engine does it, whether it pays or not."""
    return readings_of(each, chunk, sharedreads.PAYS_FROM_BYTES)


def _apart(each: list[Sequenced], chunk: int) -> list[Reading]:
    found = []
    for index, one in enumerate(each):
        found += [Reading(run, (index,), chunk) for run in one.runs]
        found.append(Reading(one.open_run, (index,), one.visible))
    return found


def _rows(chunk: int, count: int, queries: int) -> Iterator[Row]:
    compiled = library()
    assert compiled is not None
    room = DecodeRoom(QUERY_HEADS, KV_HEADS, HEAD_DIM, chunk, queries=queries)
    layers = [_sequences(chunk, count, queries) for _ in range(LAYERS)]
    ways: dict[str, Callable[[list[Sequenced], int], list[Reading]]] = {"shared": _once, "own": _apart}

    def batch(way: str, each: list[Sequenced]) -> KeptBatch:
        return KeptBatch(compiled, room, ways[way](each, chunk), [0.125] * queries, 64)

    q = [torch.randn(1, QUERY_HEADS, HEAD_DIM) for _ in range(queries)]
    visible = [min(VISIBLE, chunk)] * queries
    kept = {way: [batch(way, each) for each in layers] for way in ways}
    spent: dict[tuple[str, str], list[float]] = {}
    for turn in range(TURNS):
        for way in sorted(ways, reverse=bool(turn % 2)):
            calls = [partial(one.output, q, visible) for one in kept[way]]
            spent.setdefault((way, "call"), []).append(_seconds(calls))
            if turn < TURNS // 4:
                spent.setdefault((way, "made"), []).append(
                    _seconds([partial(batch, way, each) for each in layers])
                )
    for (way, what), seconds in spent.items():
        name = f"shared.rows{chunk}.chunks{count}.queries{queries}.{way}.{what}"
        yield Row(name, statistics.median(seconds) / LAYERS * 1e6, "us", lower_is_better=True)


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of this thread's processor."""
    started = time.thread_time()
    for call in calls:
        call()
    return time.thread_time() - started
