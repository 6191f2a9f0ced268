"""[put_get_metadata], [copy], [single_flight], [small_behind_large], [restart]: the store beside its peers.

LMCache's L1Manager runs in a process of its own, vLLM's file functions likewise; rounds of both alternate.
Metadata of a put is reserve and publish without the copy and without the checksum (stated apart, since
LMCache has none); of a get it is pin and release. Simulated tiers are not involved: memory is the CPU tier's
arena, storage a file under O_DIRECT where the folder has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.tiers.transfer import move_bytes
from kvtier_core.transactions import MoveKind
from tests.bench.peers.client import Peer
from tests.bench.rows import Row

SIZES = {
    "16k": ChunkLayout(1, 32, 64),
    "128k": ChunkLayout(2, 128, 64),
    "512k": ChunkLayout(4, 256, 64),
    "2m": ChunkLayout(8, 256, 128),
}
NAMESPACE = hashlib.sha256(b"bench").digest()
POOL_BYTES = 512 << 20
BATCHES = (1, 16, 64)
CALLS = {1: 200, 16: 24, 64: 8}
REPEATS = 7
FOREVER = 1e18
LMCACHE = "LMCache 0.5.6 L1Manager"
VLLM = "vLLM 0.33.0 fs tier"
RESTART_BLOCKS = 10_000


def rows() -> Iterator[Row]:
    with Peer() as peer:
        for size, layout in SIZES.items():
            yield from _metadata(peer, size, layout)
            yield from _copies(peer, size, layout)
        yield from _single_flight(peer)
    yield from _small_behind_large()
    yield from _restart()


def keys_of(count: int, salt: int = 0) -> list[bytes]:
    return [hashlib.sha256(salt.to_bytes(8, "big") + i.to_bytes(8, "big")).digest() for i in range(count)]


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Metadata and copies in memory.


class OurMemory:
    """A block store over one CPU tier; the same calls as the peer's."""

    def __init__(self, layout: ChunkLayout, blocks: int) -> None:
        self.store = BlockStore([CpuTier("cpu", layout, blocks)], time.monotonic, capacity=2 * blocks + 64)
        self._keys = keys_of(blocks)
        payload = np.full(layout.payload_bytes, 7, dtype=np.uint8)
        self._payload = payload.data
        self._digests = self.store.writes.digests
        self._hashed = 0
        # Publishing seals the blocks; the time of that is taken where it is spent, on bytes as near or far.
        self.store.writes.digests = self._timed_digests
        # The arena's pages are taken before anything is timed.
        self.put(1, blocks)
        self.delete(blocks)

    def _timed_digests(self, bodies: Sequence[memoryview]) -> list[int]:
        t0 = time.perf_counter_ns()
        found = self._digests(bodies)
        self._hashed += time.perf_counter_ns() - t0
        return found

    def put(self, batch: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
        """Nanoseconds a call: metadata, copy, checksum of what was copied."""
        metadata: list[float] = []
        copy: list[float] = []
        hashing: list[float] = []
        clock, store = time.perf_counter_ns, self.store
        for index in range(rounds):
            keys = self._keys[index * batch : (index + 1) * batch]
            t0 = clock()
            scope = store.reserve(keys, namespace=NAMESPACE, deadline=FOREVER, droppable=True)
            t1 = clock()
            targets = [target for one in range(batch) if (target := scope.landing(one)) is not None]
            for target in targets:
                move_bytes(target, self._payload)
            self._hashed = 0
            t2 = clock()
            scope.publish()
            scope.close()
            t3 = clock()
            hashing.append(self._hashed)
            metadata.append((t1 - t0) + (t3 - t2) - self._hashed)
            copy.append(t2 - t1)
        return metadata, copy, hashing

    def copied(self, index: int, source: memoryview) -> float:
        """Stores one block; nanoseconds of its copy alone, into a landing that is there."""
        keys = self._keys[index : index + 1]
        with self.store.reserve(keys, namespace=NAMESPACE, deadline=FOREVER, droppable=True) as scope:
            target = scope.landing(0)
            assert target is not None
            t0 = time.perf_counter_ns()
            move_bytes(target, source)
            spent = time.perf_counter_ns() - t0
            scope.publish()
        return spent

    def get(self, batch: int, rounds: int, stored: int) -> list[float]:
        times: list[float] = []
        clock, store = time.perf_counter_ns, self.store
        spans = max(1, stored // batch)
        for index in range(rounds):
            at = index % spans * batch
            keys = self._keys[at : at + batch]
            t0 = clock()
            with store.pin(keys, NAMESPACE, FOREVER) as pin:
                found = len(pin)
            times.append(clock() - t0)
            assert found == batch
        return times

    def delete(self, stored: int) -> None:
        for key in self._keys[:stored]:
            self.store.moves.drop(self.store.directory.find(key), 0, last=True)


def _metadata(peer: Peer, size: str, layout: ChunkLayout) -> Iterator[Row]:
    blocks = min(2048, POOL_BYTES // layout.payload_bytes)
    ours = OurMemory(layout, blocks)
    peer.make("l1", "lmcache_l1", block=layout.payload_bytes, blocks=blocks)
    for batch in BATCHES:
        rounds = max(1, min(CALLS[batch], blocks // batch))
        put: list[float] = []
        get: list[float] = []
        their_put: list[float] = []
        their_get: list[float] = []
        sums: list[float] = []
        for _ in range(REPEATS):
            theirs = peer.call("l1", "put", batch=batch, rounds=rounds)["metadata"]
            mine, _, hashing = ours.put(batch, rounds)
            their_put += theirs
            put += mine
            sums += hashing
            their_get += peer.call("l1", "get", batch=batch, rounds=200, stored=rounds * batch)["metadata"]
            get += ours.get(batch, 200, rounds * batch)
            peer.call("l1", "delete", stored=rounds * batch)
            ours.delete(rounds * batch)
        share = 1.0 if batch == 1 else 0.5
        for what, mine_, theirs_, goal in (("put", put, their_put, 0.5), ("get", get, their_get, share)):
            for name, at in (("p50", 0.5), ("p99", 0.99)):
                other = _quantile(theirs_, at) / batch / 1000
                yield Row(
                    f"put_get_metadata.{what}.{size}.batch{batch}.{name}",
                    _quantile(mine_, at) / batch / 1000,
                    "us/block",
                    goal=goal * other if name == "p50" else None,
                    peer=LMCACHE,
                    peer_value=other,
                    lower_is_better=True,
                )
        yield Row(
            f"put_get_metadata.checksum.{size}.batch{batch}.p50",
            _quantile(sums, 0.5) / batch / 1000,
            "us/block",
            lower_is_better=True,
        )
    peer.drop("l1")


def _copies(peer: Peer, size: str, layout: ChunkLayout) -> Iterator[Row]:
    """Our copy into a landing beside a plain memcpy into memory of the same kind: a memfd's small pages, last
    written as long ago. Into pages of 2 MiB, which large numpy arrays have where the machine gives them, a
    memcpy is another one."""
    size_bytes = layout.payload_bytes
    blocks = min(256, POOL_BYTES // 2 // size_bytes)
    ours = OurMemory(layout, blocks)
    peer.make("l1", "lmcache_l1", block=size_bytes, blocks=blocks)
    source = np.full(size_bytes, 7, dtype=np.uint8).data
    heap = np.ones(blocks * size_bytes, dtype=np.uint8).data
    kinds, chance = ("arena", "memfd", "heap"), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in (*kinds, "peer")}
    with _memfd(blocks * size_bytes) as small:
        for at in range(0, len(small), size_bytes):
            small[at : at + size_bytes] = source
        for _ in range(REPEATS):
            for index in range(blocks):
                # Each finds in the caches what the one before left there, so their order is drawn.
                for name in chance.sample(kinds, len(kinds)):
                    if name == "arena":
                        times[name].append(ours.copied(index, source))
                        continue
                    at = index * size_bytes
                    with (small if name == "memfd" else heap)[at : at + size_bytes] as target:
                        t0 = time.perf_counter_ns()
                        target[:] = source
                        times[name].append(time.perf_counter_ns() - t0)
            ours.delete(blocks)
            times["peer"] += peer.call("l1", "put", batch=1, rounds=blocks)["copy"]
            peer.call("l1", "delete", stored=blocks)
    peer.drop("l1")
    speed = {name: size_bytes / _quantile(each, 0.5) for name, each in times.items()}
    yield Row(
        f"copy.into_arena.{size}.p50",
        speed["arena"],
        "GB/s",
        goal=0.95 * speed["memfd"],
        peer=LMCACHE,
        peer_value=speed["peer"],
    )
    yield Row(f"copy.plain_memcpy.{size}.p50", speed["memfd"], "GB/s")
    yield Row(f"copy.plain_memcpy_heap.{size}.p50", speed["heap"], "GB/s")


@contextmanager
def _memfd(size: int) -> Iterator[memoryview]:
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapped:
        os.close(fd)
        with memoryview(mapped) as view:
            yield view


# Storage behind memory.


class OurTiers:
    """Memory and storage with a driver; what is `cold` lies in storage only."""

    def __init__(self, folder: Path, layout: ChunkLayout, memory: int, storage: int, threads: int) -> None:
        able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
        bell = Bell()
        self.cpu = CpuTier("cpu", layout, memory)
        self.nvme = NvmeTier(
            "nvme",
            layout,
            storage,
            folder=folder,
            file_key="bench",
            files=OsFileOps(),
            capability=able,
            clock=time.monotonic,
            options=NvmeOptions(threads=threads, queue_items=max(4096, storage)),
        )
        self.store = BlockStore(
            [self.cpu, self.nvme], time.monotonic, wake=bell.ring, capacity=2 * storage + 64
        )
        self.driver = Driver(self.store, bell, time.monotonic)
        self.driver.start()

    def fill(self, keys: list[bytes], payload: bytes) -> None:
        for at in range(0, len(keys), 16):
            batch = keys[at : at + 16]
            self.driver.put(
                batch, [payload] * len(batch), namespace=NAMESPACE, deadline=time.monotonic() + 60
            )

    def cool(self, keys: list[bytes]) -> None:
        """Brings blocks down and drops their copies in memory."""
        store = self.store
        with store.parts.lock:
            lines = [store.directory.find(key) for key in keys]
            # What relief moves already needs no second move.
            hot = [
                line
                for line in lines
                if store.directory.counts(line, 0) and not store.directory.write_txn[line]
            ]
            spare = [line for line in hot if store.directory.survivors(line, 0)]
            for line in spare:
                store.moves.drop(line, 0)
            last = [line for line in hot if line not in set(spare)]
            store.moves.start([store.moves.begin(MoveKind.DEMOTE, line, 1) for line in last])
        deadline = time.monotonic() + 60
        cold = self.driver.wait_until(
            lambda: not any(store.directory.counts(line, 0) for line in lines), deadline
        )
        assert cold

    def fetch(self, keys: list[bytes], wanted: int | None = None) -> float:
        """Seconds until the first `wanted` blocks are ready."""
        deadline = time.monotonic() + 60
        t0 = time.perf_counter()
        with self.store.fetch(keys, namespace=NAMESPACE, deadline=deadline) as found:
            ready = self.driver.wait_for(found, wanted or len(keys), deadline)
            spent = time.perf_counter() - t0
            assert ready == (wanted or len(keys)), (ready, found.reason)
        return spent

    def close(self) -> None:
        self.driver.close()
        self.nvme.close()
        self.cpu.close()


def _single_flight(peer: Peer) -> Iterator[Row]:
    layout, blocks, requests = SIZES["128k"], 64, 32
    with tempfile.TemporaryDirectory(dir=_scratch()) as name:
        folder = Path(name)
        tiers = OurTiers(folder, layout, 2 * blocks, 2 * blocks, threads=2)
        keys = keys_of(blocks)
        tiers.fill(keys, bytes(layout.payload_bytes))
        direct = tiers.nvme.o_direct
        (folder / "vllm").mkdir()
        peer.make(
            "fs",
            "vllm_fs",
            folder=str(folder / "vllm"),
            block=layout.payload_bytes,
            blocks=blocks,
            direct=direct,
            threads=2,
        )
        peer.call("fs", "store")
        reads: list[float] = []
        walls: list[float] = []
        theirs: list[float] = []
        for _ in range(REPEATS):
            tiers.cool(keys)
            before = tiers.store.reads.fetched
            gate = threading.Barrier(requests + 1)
            threads = [_started(gate, lambda: tiers.fetch(keys)) for _ in range(requests)]
            gate.wait(timeout=30)
            t0 = time.perf_counter()
            for thread in threads:
                thread.join(timeout=60)
            walls.append(time.perf_counter() - t0)
            reads.append((tiers.store.reads.fetched - before) / blocks)
            # One call per request is what its interface offers: it coalesces inside a request only.
            theirs.append(sum(peer.call("fs", "load")["seconds"] for _ in range(requests)))
        tiers.close()
        peer.drop("fs")
    yield Row(
        "single_flight.reads_per_block",
        max(reads),
        "reads",
        goal=1.0,
        floor=1.0,
        peer=VLLM,
        peer_value=float(requests),
        lower_is_better=True,
    )
    yield Row(
        "single_flight.32_requests.p50",
        statistics.median(walls) * 1000,
        "ms",
        peer=VLLM,
        peer_value=statistics.median(theirs) * 1000,
        lower_is_better=True,
    )


def _started(gate: threading.Barrier, work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        gate.wait(timeout=30)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _small_behind_large() -> Iterator[Row]:
    layout, large, small = SIZES["128k"], 512, 8
    with tempfile.TemporaryDirectory(dir=_scratch()) as name:
        tiers = OurTiers(Path(name), layout, 2 * large, 4 * large, threads=2)
        keys, others = keys_of(large), keys_of(small, salt=1)
        tiers.fill(keys, bytes(layout.payload_bytes))
        tiers.fill(others, bytes(layout.payload_bytes))
        for kind, wanted in (("same_prefix", keys[:small]), ("other_prefix", others)):
            alone: list[float] = []
            behind: list[float] = []
            for _ in range(REPEATS):
                tiers.cool(keys)
                tiers.cool(others)
                alone.append(tiers.fetch(wanted))
                tiers.cool(keys)
                tiers.cool(others)
                deadline = time.monotonic() + 60
                with tiers.store.fetch(keys, namespace=NAMESPACE, deadline=deadline) as long:
                    t0 = time.perf_counter()
                    with tiers.store.fetch(
                        wanted, namespace=NAMESPACE, deadline=deadline, priority=1
                    ) as short:
                        ready = tiers.driver.wait_for(short, small, deadline)
                    behind.append(time.perf_counter() - t0)
                    assert ready == small
                    tiers.driver.wait_for(long, large, deadline)
            yield Row(
                f"small_behind_large.{kind}.p50",
                statistics.median(behind) / statistics.median(alone),
                "x alone",
                goal=1.2,
                lower_is_better=True,
            )
            yield Row(
                f"small_behind_large.{kind}.alone.p50",
                statistics.median(alone) * 1000,
                "ms",
                lower_is_better=True,
            )
        tiers.close()


def _restart() -> Iterator[Row]:
    """A process stores blocks durably, is killed with SIGKILL, and another opens what it left."""
    layout = SIZES["16k"]
    with tempfile.TemporaryDirectory(dir=_scratch()) as name:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.tiers_store", name], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        line = child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
        published = int(line)
        t0 = time.perf_counter()
        tiers = OurTiers(Path(name), layout, 64, RESTART_BLOCKS + 256, threads=2)
        opened = time.perf_counter() - t0
        keys = np.frombuffer(b"".join(keys_of(RESTART_BLOCKS)), dtype=np.uint8).reshape(-1, 32)
        found = len(tiers.store.lookup(keys, NAMESPACE))
        tiers.close()
    yield Row("restart.blocks_found", 100.0 * found / published, "%", goal=100.0, floor=100.0)
    yield Row("restart.seconds_per_10000", opened * 10_000 / published, "s", goal=1.0, lower_is_better=True)


def _store_and_wait(folder: Path) -> None:
    """The child: stores, brings everything down, says how many are published, and waits to be killed."""
    layout = SIZES["16k"]
    tiers = OurTiers(folder, layout, 512, RESTART_BLOCKS + 256, threads=2)
    keys = keys_of(RESTART_BLOCKS)
    tiers.fill(keys, bytes(layout.payload_bytes))
    for at in range(0, len(keys), 256):
        tiers.cool(keys[at : at + 256])
    print(len(keys), flush=True)
    signal.pause()


def _scratch() -> Path:
    """On the filesystem of the checkout: the temporary folder may be memory."""
    folder = Path(__file__).resolve().parents[2] / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    _store_and_wait(Path(sys.argv[1]))
