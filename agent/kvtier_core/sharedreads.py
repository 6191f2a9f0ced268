"""What decode frames of one call read: chunks that several of them begin with, once for all of these.

Why it exists: requests that begin alike hold the same rows, as forks do, or as sessions that started from the
same blocks; each has lines of its own then, over one slot. That rows are the same is decided by where they
are, and by nothing that somebody says of them. It must not know sessions, lines or who asks.

What it saves and when: `pays`. The order in which a query's states are merged is its own chunks ascending,
shared or not, so no bit depends on who else is in the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier_core.tiers.base import SlotRef, Tier
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun


class Place(NamedTuple):
    """Where a sealed chunk's rows are: the memory itself, and not its name, and the slot at one of its lives.
    Of equal places, both of lines that are readable now, the bytes are the same ones: sealed rows never
    change."""

    memory: Tier
    slot: SlotRef


class Sequenced(NamedTuple):
    """One query's chunks, ascending: full ones by place, in runs of their order, and the open one behind
    them, of which `visible` rows are seen."""

    places: Sequence[Place]
    runs: Sequence[ChunkRun]
    open_run: ChunkRun
    visible: int


PAYS_FROM_BYTES = 1 << 20
"""What one call must be spared of reading again. Measured by `make bench SUITE=kernels`, part `shared`: a
mebibyte that is not read again saves 12 to 22 us of a processor, and next to nothing while its second level
still has it; to find and write down what is shared takes up to 17 us more than to write all of it down, once
for the same frames. So it has paid within a call or two, and gains in each that follows."""


def pays(queries: int, chunks: int, chunk_bytes: int) -> bool:
    """Whether so many chunks are read once for so many queries."""
    return queries > 1 and (queries - 1) * chunks * chunk_bytes >= PAYS_FROM_BYTES


def readings_of(each: Sequence[Sequenced], size: int, chunk_bytes: int) -> list[Reading]:
    """What the queries read, of each in ascending order, the open chunk last. Chunks of `size` rows that some
    begin with are one reading for all of them where that pays, and what a part of these goes on with one for
    that part."""
    readings: list[Reading] = []
    # Queries that have chunks [0, at) in common, and whose others are still to be read.
    waiting: list[tuple[Sequence[int], int]] = [(range(len(each)), 0)]
    while waiting:
        members, at = waiting.pop()
        for group in _alike(each, members, at):
            one = each[group[0]]
            if len(group) == 1:
                readings += _read(one.runs, group, at, len(one.places), size)
                readings.append(Reading(one.open_run, tuple(group), one.visible))
                continue
            end = _common(each, group, at)
            if pays(len(group), end - at, chunk_bytes):
                readings += _read(one.runs, group, at, end, size)
            else:
                for index in group:
                    readings += _read(each[index].runs, [index], at, end, size)
            waiting.append((group, end))
    return readings


def _read(
    runs: Sequence[ChunkRun], queries: Sequence[int], first: int, last: int, size: int
) -> list[Reading]:
    return [Reading(run, tuple(queries), size) for run in _cut(runs, first, last)]


def _alike(each: Sequence[Sequenced], members: Sequence[int], at: int) -> list[list[int]]:
    """By where chunk `at` is; who has none is alone."""
    if len(members) == 1:
        return [list(members)]
    alike: dict[Place, list[int]] = {}
    alone: list[list[int]] = []
    for index in members:
        places = each[index].places
        if at < len(places):
            alike.setdefault(places[at], []).append(index)
        else:
            alone.append([index])
    return [*alike.values(), *alone]


def _common(each: Sequence[Sequenced], group: Sequence[int], at: int) -> int:
    """Up to which chunk all have the same places, which they have at `at`."""
    first = each[group[0]].places
    end = min(len(each[index].places) for index in group)
    for chunk in range(at + 1, end):
        if any(each[index].places[chunk] != first[chunk] for index in group):
            return chunk
    return end


def _cut(runs: Sequence[ChunkRun], first: int, last: int) -> list[ChunkRun]:
    """Chunks [first, last) of runs that follow each other."""
    found: list[ChunkRun] = []
    at = 0
    for run in runs:
        low, high = max(first, at), min(last, at + run.count)
        if low < high:
            found.append(run.cut(low - at, high - at))
        at += run.count
    return found
