"""[directory] Ten million blocks: what they occupy, and what lookups, publications and grants cost there.

The peer of a single find is a dict of bytes at a tenth of the size: the least that Python has. Keys are
given; naming them is `[block_key]`. One thread. Memory is the growth of the process's resident set: columns,
index and page rounding. The processor's time of a lookup stands beside the clock's, whose tail on a shared
machine is the others'. A directory of this size takes half a minute to fill.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier_core.credits import QUEUE, STAGING, Ledger, Limit, LinkStage, link, slots
from kvtier_core.directory import Directory, ReplicaState
from tests.bench.rows import Row

BLOCKS = 10_000_000
BATCH = 100_000
PREFIX = 512
LOOKUPS = 2_000
SINGLES = 100_000
STEPS = 20_000
PEER_BLOCKS = 1_000_000
GPU, HOST, DISK = 0, 1, 2
GOAL_BYTES = 1.5 * (1 << 30) / BLOCKS


def rows() -> Iterator[Row]:
    before = _resident()
    directory = Directory(tiers=3, capacity=BLOCKS + STEPS)
    random = np.random.default_rng(1)
    started = time.perf_counter()
    for first in range(0, BLOCKS, BATCH):
        _fill(directory, random.integers(0, 256, (BATCH, 32), dtype=np.uint8), first)
    seconds = time.perf_counter() - started
    yield Row("directory.restore.10m", BLOCKS / seconds, "blocks/s", goal=10_000)
    yield _memory("one_tier", before, goal=GOAL_BYTES)
    yield from _lookups(directory)
    yield from _steps(directory)
    directory.check()
    _copies_in(directory, HOST)
    yield _memory("two_tiers", before, goal=GOAL_BYTES)
    _copies_in(directory, GPU)
    yield _memory("three_tiers", before, goal=GOAL_BYTES)
    directory.write_txn[:BLOCKS] = 1
    directory.write_txn[:BLOCKS] = 0
    yield _memory("three_tiers_after_moves", before, goal=GOAL_BYTES)
    del directory
    gc.collect()
    yield from _dict_of_bytes()
    yield from _grants()


def _fill(directory: Directory, keys: NDArray[np.uint8], first: int) -> None:
    numbers = np.arange(first, first + len(keys))
    directory.restore_blocks(
        keys,
        tier=DISK,
        slots=numbers,
        slot_generations=np.ones(len(keys), dtype=np.int64),
        namespaces=1,
        rows=256,
        checksums=numbers.astype(np.uint64),
        producers=0,
        costs=0.01,
        tick=1,
    )


def _copies_in(directory: Directory, tier: int) -> None:
    """What publishing a copy of each block writes, a column at a time."""
    columns = directory.replicas.tiers[tier]
    span = slice(0, BLOCKS)
    columns.slot.array[span] = np.arange(BLOCKS)
    columns.slot_generation.fill(0, np.ones(BLOCKS, dtype=np.int64))
    columns.generation.fill(0, np.arange(BLOCKS))
    columns.stamp.array[span] = directory.epoch[span]
    columns.leases.array[span] = 1
    columns.leases.array[span] = 0
    columns.state.array[span] = ReplicaState.PUBLISHED


def _memory(name: str, before: int, goal: float) -> Row:
    each = (_resident() - before) / BLOCKS
    return Row(f"directory.resident_10m.{name}", each, "B/block", goal=goal, lower_is_better=True)


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _lookups(directory: Directory) -> Iterator[Row]:
    """Blocks from all over the directory: nothing is in the processor's cache."""
    random = np.random.default_rng(2)
    whole: list[float] = []
    worked: list[float] = []
    for _ in range(LOOKUPS):
        keys = _keys_at(directory, random.integers(0, BLOCKS, PREFIX))
        started, before = time.perf_counter(), time.thread_time()
        found = directory.prefix(keys)
        worked.append(time.thread_time() - before)
        whole.append(time.perf_counter() - started)
        assert found == PREFIX
    for kind, each in (("", whole), (".cpu", worked)):
        for name, quantile in (("p50", 0.5), ("p99", 0.99)):
            value = float(np.quantile(each, quantile)) * 1e3
            yield Row(f"directory.prefix_{PREFIX}{kind}.{name}", value, "ms", goal=1.0, lower_is_better=True)
    there = [bytes(key) for key in _keys_at(directory, random.integers(0, BLOCKS, SINGLES))]
    absent = [random.bytes(32) for _ in range(SINGLES)]
    for name, asked in (("find", there), ("find_absent", absent)):
        each = [_seconds(lambda key=key: directory.find(key)) for key in asked]  # type: ignore[misc]
        for part, quantile in (("p50", 0.5), ("p99", 0.99)):
            value = float(np.quantile(each, quantile)) * 1e6
            yield Row(f"directory.{name}.{part}", value, "us", goal=3.0, lower_is_better=True)


def _keys_at(directory: Directory, lines: NDArray[np.int64]) -> NDArray[np.uint8]:
    joined = b"".join(directory.key_of(line) for line in lines.tolist())
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 32)


def _steps(directory: Directory) -> Iterator[Row]:
    random = np.random.default_rng(3)
    keys = [random.bytes(32) for _ in range(STEPS)]
    publish, promote, forget = [], [], []
    for slot, key in enumerate(keys):
        started = time.perf_counter()
        line = directory.insert_block(key, namespace=1, rows=256, checksum=slot, cost=0.01, tick=2)
        directory.add_replica(line, HOST, slot, 1, directory.issue_generation())
        directory.publish_replica(line, HOST)
        publish.append(time.perf_counter() - started)
    for key in keys:
        line = directory.find(key)
        started = time.perf_counter()
        directory.add_replica(line, GPU, 1, 1, directory.issue_generation())
        directory.publish_replica(line, GPU, authority=True)
        promote.append(time.perf_counter() - started)
    for key in keys:
        line = directory.find(key)
        started = time.perf_counter()
        directory.tombstone(line)
        directory.drop_replica(line, HOST)
        directory.drop_replica(line, GPU)
        directory.remove(line)
        forget.append(time.perf_counter() - started)
    for name, each in (("insert_and_publish", publish), ("second_copy", promote), ("delete", forget)):
        for part, quantile in (("p50", 0.5), ("p99", 0.99)):
            value = float(np.quantile(each, quantile)) * 1e6
            yield Row(f"directory.{name}.{part}", value, "us", lower_is_better=True)
    scan = min(_seconds(lambda: directory.evictable(DISK, first=0, limit=65536)) for _ in range(50))
    yield Row("directory.evictable.of_64k_lines", scan * 1e3, "ms", lower_is_better=True)


def _dict_of_bytes() -> Iterator[Row]:
    random = np.random.default_rng(4)
    before = _resident()
    table = {random.bytes(32): number for number in range(PEER_BLOCKS)}
    yield Row("directory.peer.dict_of_bytes", (_resident() - before) / PEER_BLOCKS, "B/block")
    keys = list(table)
    asked = [bytes(bytearray(keys[one])) for one in random.integers(0, PEER_BLOCKS, SINGLES).tolist()]
    each = [_seconds(lambda key=key: table.get(key)) for key in asked]  # type: ignore[misc]
    yield Row("directory.peer.dict_get.p50", float(np.median(each)) * 1e6, "us", lower_is_better=True)


def _grants() -> Iterator[Row]:
    """A put's credits: a slot, bytes on a link, staging and a queue slot, the slot resident afterwards."""
    write, slot = link(LinkStage.STORAGE_WRITE), slots(DISK)
    limits = {STAGING: Limit(1 << 40), write: Limit(1 << 40), QUEUE: Limit(64), slot: Limit(STEPS)}
    ledger = Ledger(limits, default_quota={slot: STEPS}, clock=time.perf_counter)
    each = []
    for _ in range(STEPS):
        started = time.perf_counter()
        grant = ledger.acquire({slot: 1, write: 4096, STAGING: 4096, QUEUE: 1}, 1)
        ledger.settle(grant, slot)
        ledger.release(grant)
        each.append(time.perf_counter() - started)
    ledger.check()
    for part, quantile in (("p50", 0.5), ("p99", 0.99)):
        value = float(np.quantile(each, quantile)) * 1e6
        yield Row(f"directory.credits.acquire_settle_release.{part}", value, "us", lower_is_better=True)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
