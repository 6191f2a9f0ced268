"""[nvme_store], [nvme_load], [restart]: blocks on flash, beside raw preadv and pwritev at the same depth.

Raw moves the same payloads, one system call a block, from and to one preallocated file, and keeps nothing
else: no header, no checksum, no report. Both sides use O_DIRECT where the folder has it (the row `o_direct`
says so), the same threads, memory that is touched beforehand, and a file that was written before; rounds are
interleaved. A store ends when the last block is reported, a load when the last is verified in its landing.
`Ours` and `Raw` have the same two calls, so that another implementation can be put beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, BlockIdentity, MediumKind
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_core.tiers.transfer import Landing, TransferItem
from tests.bench.rows import Row

SIZES = {
    "16k": ChunkLayout(1, 32, 64),
    "128k": ChunkLayout(2, 128, 64),
    "512k": ChunkLayout(4, 256, 64),
    "2m": ChunkLayout(8, 256, 128),
}
ROUND_BYTES = 64 << 20
ROUNDS = 15
DEPTHS = {"depth4": 4, "depth1": 1}
FOREVER = 1e12
WAIT_SECONDS = 120.0
RESTART_BLOCKS = 10_000


@dataclass(frozen=True)
class Spent:
    """One round: seconds of the wall and of all this process's threads."""

    seconds: float
    cpu: float


class Ours:
    """The tier, `blocks` of one layout, all of them stored or loaded in one batch."""

    def __init__(
        self,
        folder: Path,
        layout: ChunkLayout,
        blocks: int,
        threads: int,
        durable: bool,
        encrypted: bool = False,
    ) -> None:
        able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
        self.tier = NvmeTier(
            "bench",
            layout,
            blocks,
            folder=folder,
            file_key="bench",
            files=OsFileOps(),
            capability=able,
            clock=time.monotonic,
            options=NvmeOptions(
                threads=threads,
                queue_items=max(4096, blocks),
                keys=MemoryKeys(os.urandom) if encrypted else None,
            ),
        )
        size = layout.payload_bytes
        self._source, self._target = random_bytes(blocks * size), random_bytes(blocks * size)
        self._identities = []
        for index in range(blocks):
            body = self._source[index * size : (index + 1) * size]
            self._identities.append(
                BlockIdentity(
                    index.to_bytes(32, "big"),
                    index,
                    1,
                    1,
                    size,
                    checksum("xxh3", body),
                    bytes([7]) * 32,
                    1,
                    durable,
                )
            )
        self._size = size
        self._items: list[TransferItem] = []
        self.bytes = blocks * size

    def store(self) -> Spent:
        for item in self._items:
            self.tier.release(item.ref)
        self._items = [
            TransferItem(self.tier.reserve(1), identity, Landing(self._at(self._source, index)))
            for index, identity in enumerate(self._identities)
        ]
        spent = _timed(lambda: self._wait(self.tier.submit_write, self._items))
        for item in self._items:
            self.tier.publish(item.ref)
        return spent

    def load(self) -> Spent:
        items = [
            TransferItem(item.ref, item.identity, Landing(self._at(self._target, index)))
            for index, item in enumerate(self._items)
        ]
        spent = _timed(lambda: self._wait(self.tier.submit_read, items))
        if self._target != self._source:
            raise AssertionError("what was loaded is not what was stored")
        return spent

    def _at(self, memory: memoryview, index: int) -> memoryview:
        return memory[index * self._size : (index + 1) * self._size]

    def _wait(
        self, submit: Callable[[list[TransferItem], float, Sink], None], items: list[TransferItem]
    ) -> None:
        sink = Sink(len(items))
        submit(items, FOREVER, sink)
        sink.wait()

    def close(self) -> None:
        self.tier.close()


class Raw:
    """The same payloads with nothing around them: what the disk and the system calls give."""

    def __init__(
        self, folder: Path, layout: ChunkLayout, blocks: int, threads: int, durable: bool, direct: bool
    ) -> None:
        self._size = layout.payload_bytes
        self._blocks = blocks
        self._durable = durable
        self._fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, blocks * self._size)
        self._source, self._target = random_bytes(blocks * self._size), random_bytes(blocks * self._size)
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads
        self.bytes = blocks * self._size

    def store(self) -> Spent:
        return _timed(lambda: self._run(os.pwritev, self._source, self._durable))

    def load(self) -> Spent:
        return _timed(lambda: self._run(os.preadv, self._target, False))

    def _run(
        self, call: Callable[[int, list[memoryview], int], int], memory: memoryview, flush: bool
    ) -> None:
        numbers = iter(range(self._blocks))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    index = next(numbers, None)
                if index is None:
                    return
                at = index * self._size
                if call(self._fd, [memory[at : at + self._size]], at) != self._size:
                    raise AssertionError("a raw call ended short")

        for task in [self._pool.submit(work) for _ in range(self._threads)]:
            task.result(WAIT_SECONDS)
        if flush:
            os.fdatasync(self._fd)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


class Sink:
    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: CoreError | None = None

    def done(self, index: int, error: CoreError | None) -> None:
        self._error = self._error or error

    def drained(self, index: int) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._over.set()

    def wait(self) -> None:
        if not self._over.wait(WAIT_SECONDS):
            raise AssertionError("a batch did not end")
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def bench_folder() -> Iterator[Path]:
    """A folder on the disk that KVTIER_BENCH_FOLDER names, else where temporary files go."""
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("KVTIER_BENCH_FOLDER")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def rows() -> Iterator[Row]:
    with bench_folder() as folder:
        for name, layout in SIZES.items():
            for depth, threads in DEPTHS.items():
                yield from _compared(folder, f"{name}.{depth}", layout, threads, durable=False)
            yield from _compared(folder, f"{name}.durable", layout, 4, durable=True)
        yield from _compared(folder, "2m.encrypted", SIZES["2m"], 4, durable=False, encrypted=True)
        yield from _restart(folder)


def _compared(
    folder: Path, name: str, layout: ChunkLayout, threads: int, *, durable: bool, encrypted: bool = False
) -> Iterator[Row]:
    blocks = ROUND_BYTES // layout.payload_bytes
    ours = Ours(folder / "ours", layout, blocks, threads, durable, encrypted)
    raw = Raw(folder, layout, blocks, threads, durable, ours.tier.o_direct)
    try:
        spent: dict[tuple[str, str], list[Spent]] = {}
        for round_ in range(ROUNDS + 1):
            for action in ("store", "load"):
                for side, what in (("raw", raw), ("ours", ours)):
                    result = what.store() if action == "store" else what.load()
                    if round_:
                        spent.setdefault((action, side), []).append(result)
        for action in ("store", "load"):
            yield from _rows_of(
                f"nvme_{action}.{name}", ours.bytes, spent[action, "ours"], spent[action, "raw"]
            )
        yield Row(f"nvme_store.{name}.o_direct", float(ours.tier.o_direct), "bool")
    finally:
        ours.close()
        raw.close()
        shutil.rmtree(folder / "ours")
        (folder / "raw").unlink()


def _rows_of(name: str, size: int, ours: list[Spent], raw: list[Spent]) -> Iterator[Row]:
    """Speed of the middle and of the slowest rounds, the ratio of the middles, and CPU seconds a gigabyte."""
    for part, quantile in (("p50", 0.5), ("p99", 0.99)):
        mine, theirs = (float(np.quantile([s.seconds for s in side], quantile)) for side in (ours, raw))
        yield Row(
            f"{name}.{part}",
            size / mine / 1e9,
            "GB/s",
            peer="raw, same depth",
            peer_value=size / theirs / 1e9,
        )
        if part == "p50":
            goal = 0.8 if ".depth1" in name else 0.9
            yield Row(f"{name}.of_raw", theirs / mine, "x", goal=goal)
    cpu, raw_cpu = (sum(s.cpu for s in side) / len(side) / size * 1e9 for side in (ours, raw))
    yield Row(f"{name}.cpu", cpu, "s/GB", peer="raw, same depth", peer_value=raw_cpu, lower_is_better=True)


def _restart(folder: Path) -> Iterator[Row]:
    """Headers of blocks that an orderly end and that a kill left, found by the next opening. Files are copied
    through the page cache, which a store is not written through: a copy is on the disk before it opens."""
    for name in ("16k", "128k"):
        layout = SIZES[name]
        tier = _reopened(folder / "ours", layout, RESTART_BLOCKS)
        _fill(tier, RESTART_BLOCKS)
        killed = folder / "killed"
        killed.mkdir()
        _copy(tier.path, killed)
        tier.close()
        for ended, where in (("closed", folder / "ours"), ("killed", killed)):
            seconds = []
            for _ in range(3):
                # Opening changes the frontier on record; a kill leaves it as it was.
                copy = folder / "copy"
                copy.mkdir()
                _copy(where / tier.path.name, copy)
                started = time.perf_counter()
                again = _reopened(copy, layout, RESTART_BLOCKS)
                seconds.append(time.perf_counter() - started)
                if again.recovery.kept != RESTART_BLOCKS:
                    raise AssertionError(f"{again.recovery.kept} of {RESTART_BLOCKS} blocks were found")
                again.close()
                shutil.rmtree(copy)
            value = float(np.median(seconds))
            yield Row(f"restart.{name}.{ended}.10000_blocks", value, "s", goal=1.0, lower_is_better=True)
        shutil.rmtree(folder / "ours")
        shutil.rmtree(killed)


def _copy(path: Path, folder: Path) -> None:
    shutil.copy(path, folder / path.name)
    with (folder / path.name).open("rb") as copied:
        os.fsync(copied.fileno())


def _fill(tier: NvmeTier, blocks: int) -> None:
    """All blocks hold the same bytes under keys of their own."""
    size = tier.layout.payload_bytes
    body = random_bytes(size)
    seal = checksum("xxh3", body)
    for first in range(0, blocks, 500):
        items = [
            TransferItem(
                tier.reserve(index),
                BlockIdentity(index.to_bytes(32, "big"), index, 1, 1, size, seal, bytes([7]) * 32, 1, True),
                Landing(body),
            )
            for index in range(first, first + 500)
        ]
        sink = Sink(len(items))
        tier.submit_write(items, FOREVER, sink)
        sink.wait()
        for item in items:
            tier.publish(item.ref)


def _reopened(folder: Path, layout: ChunkLayout, blocks: int) -> NvmeTier:
    able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
    return NvmeTier(
        "bench", layout, blocks, folder=folder, file_key="bench", files=OsFileOps(), capability=able
    )


def random_bytes(size: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = np.random.default_rng(0).bytes(size)
    return memory


def _timed(action: Callable[[], None]) -> Spent:
    cpu, started = time.process_time(), time.perf_counter()
    action()
    return Spent(time.perf_counter() - started, time.process_time() - cpu)
