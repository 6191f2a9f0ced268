"""[put_durable]: what it costs a writer to wait until its blocks are durable, beside a put that does not.

Both go through the driver of one store over memory and a file, in turn; `writers` is how many threads put at
once, so that sharing of flushes shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.transactions.deletion import DeletionState
from tests.bench.rows import Row
from tests.bench.tiers_store import NAMESPACE, SIZES, keys_of

SHAPES = ((1, 1), (1, 16), (4, 1), (8, 1))
"""(writers, blocks of a put)."""
ROUNDS = 40
BLOCKS = 512
SECONDS = 60.0


def rows() -> Iterator[Row]:
    for size in ("16k", "512k"):
        with tempfile.TemporaryDirectory(dir=os.environ.get("KVTIER_BENCH_FOLDER")) as folder:
            yield from _of(Path(folder), size, SIZES[size])


class _Store:
    def __init__(self, folder: Path, layout: ChunkLayout) -> None:
        able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
        self._ram = CpuTier("cpu", layout, BLOCKS, clock=time.monotonic)
        self.disk = NvmeTier(
            "nvme",
            layout,
            2 * BLOCKS,
            folder=folder,
            file_key="bench",
            files=OsFileOps(),
            capability=able,
            clock=time.monotonic,
            options=NvmeOptions(threads=4),
        )
        bell = Bell()
        self.store = BlockStore([self._ram, self.disk], time.monotonic, wake=bell.ring, capacity=8192)
        self.driver = Driver(self.store, bell, time.monotonic)
        self.driver.start()
        self.payload = bytes(layout.payload_bytes)
        self._salt = itertools.count(1)

    def puts(self, writers: int, batch: int, durable: bool) -> float:
        """Seconds of a put, the median over the writers; then all is deleted."""
        keys = keys_of(writers * batch, next(self._salt))
        gate, seconds = threading.Barrier(writers), [0.0] * writers

        def write(index: int) -> None:
            mine = keys[index * batch : (index + 1) * batch]
            gate.wait()
            started = time.perf_counter()
            stored = self.driver.put(
                mine,
                [self.payload] * batch,
                namespace=NAMESPACE,
                deadline=time.monotonic() + SECONDS,
                durable=durable,
            )
            seconds[index] = time.perf_counter() - started
            if any(each.durable is not durable for each in stored):
                raise AssertionError(stored)

        threads = [threading.Thread(target=write, args=(index,)) for index in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        orders = self.store.delete(keys)
        self.driver.wait_deleted(orders, time.monotonic() + SECONDS)
        if any(order.state is not DeletionState.DONE for order in orders):
            raise AssertionError("a deletion did not end")
        return statistics.median(seconds)

    def close(self) -> None:
        self.driver.close()
        self.disk.close()
        self._ram.close()


def _of(folder: Path, size: str, layout: ChunkLayout) -> Iterator[Row]:
    bench = _Store(folder, layout)
    try:
        for writers, batch in SHAPES:
            bench.puts(writers, batch, True)
            durable: list[float] = []
            plain: list[float] = []
            before = bench.disk.commit.flushes
            for _ in range(ROUNDS):
                durable.append(bench.puts(writers, batch, True))
                plain.append(bench.puts(writers, batch, False))
            # Each deletion flushes once, too.
            flushes = (bench.disk.commit.flushes - before - 2 * ROUNDS) / ROUNDS
            name = f"put_durable.{size}.writers{writers}.batch{batch}"
            for label, share in (("p50", 0.5), ("p99", 0.99)):
                yield Row(
                    f"{name}.{label}",
                    _quantile(durable, share) * 1e6,
                    "us",
                    peer="put, not durable",
                    peer_value=_quantile(plain, share) * 1e6,
                )
            yield Row(f"{name}.flushes", flushes, "flushes a round")
    finally:
        bench.close()


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
