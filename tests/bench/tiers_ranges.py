"""[select_read]: what a selection of one layer of 8,192 tokens reads of flash, by pages and by whole blocks.

Both sides read the same blocks in one batch through the same tier, in turn, verified; the peer asks for all
of each block that holds a selected row, as every read did before segments had checksums. `pages`: rows come
in pages of 16, as quest's; `rows`: each by itself, as SparQ's. Each KV head has its own. Nothing is hot.
What a call costs is measured before, as an agent does; the row `seek_kib` says what it was.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier_core.checksums import checksum
from kvtier_core.hotunits import UnitGrid
from kvtier_core.layout import ChunkLayout
from kvtier_core.measure import measure
from kvtier_core.tiers.base import BlockIdentity
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_core.tiers.segments import PAGE_ROWS
from kvtier_core.tiers.transfer import Landing, Ranges, TransferItem
from tests.bench.rows import Row
from tests.bench.tiers_nvme import FOREVER, Sink, random_bytes

TOKENS = 8192
LAYOUTS = {"smollm2": ChunkLayout(3, 256, 64), "8x128": ChunkLayout(8, 256, 128)}
SELECTED = (64, 256)
ROUNDS = 15


@dataclass(frozen=True)
class _Read:
    seconds: float
    size: int


class _Layer:
    """The blocks of one layer on flash."""

    def __init__(self, folder: Path, layout: ChunkLayout, encrypted: bool) -> None:
        self.layout = layout
        self.grid = UnitGrid(layout)
        blocks = TOKENS // layout.chunk_tokens
        keys = MemoryKeys(random.Random(1).randbytes) if encrypted else None
        self.tier = NvmeTier(
            "nvme",
            layout,
            blocks,
            folder=folder,
            file_key="bench",
            files=OsFileOps(),
            clock=time.monotonic,
            options=NvmeOptions(threads=4, keys=keys),
        )
        measure(self.tier, time.monotonic)
        self.landings = [random_bytes(layout.payload_bytes) for _ in range(blocks)]
        self.data = [random.Random(block).randbytes(layout.payload_bytes) for block in range(blocks)]
        self.items = []
        for block, (landing, data) in enumerate(zip(self.landings, self.data, strict=True)):
            landing[:] = data
            named = BlockIdentity(
                block.to_bytes(32, "big"), block, 1, layout.chunk_tokens, len(data), checksum("xxh3", data)
            )
            self.items.append(TransferItem(self.tier.reserve(block), named, Landing(landing)))
        heard = Sink(blocks)
        self.tier.submit_write(self.items, FOREVER, heard)
        heard.wait()
        for item in self.items:
            self.tier.publish(item.ref)

    def read(self, lists: list[np.ndarray], ranged: bool) -> _Read:
        units = self.grid.of_rows(lists)
        size = self.layout.payload_bytes
        ranges = [Ranges(self.grid.spans(mine), size) for mine in units.values()]
        wanted = [
            dataclasses.replace(self.items[chunk], ranges=one if ranged else None)
            for chunk, one in zip(units, ranges, strict=True)
        ]
        heard = Sink(len(wanted))
        started = time.perf_counter()
        self.tier.submit_read(wanted, FOREVER, heard)
        heard.wait()
        seconds = time.perf_counter() - started
        for chunk, one in zip(units, ranges, strict=True):
            for low, high in one.spans:
                if self.landings[chunk][low:high] != self.data[chunk][low:high]:
                    raise AssertionError("other bytes came")
        return _Read(seconds, sum(one.read_bytes for one in ranges))


def rows() -> Iterator[Row]:
    for name, layout in LAYOUTS.items():
        for at_rest in ("plain", "aes256gcm"):
            with tempfile.TemporaryDirectory(dir=os.environ.get("KVTIER_BENCH_FOLDER")) as folder:
                layer = _Layer(Path(folder), layout, at_rest != "plain")
                try:
                    seek = layer.tier.measured.seek_bytes / 2**10
                    yield Row(f"select_read.{name}.{at_rest}.seek_kib", seek, "KiB")
                    for count in SELECTED:
                        for kind in ("pages", "rows"):
                            yield from _of(layer, f"select_read.{name}.{at_rest}.{count}_{kind}", count, kind)
                finally:
                    layer.tier.close()


def _of(layer: _Layer, name: str, count: int, kind: str) -> Iterator[Row]:
    draw = np.random.default_rng(count)
    parts: list[_Read] = []
    wholes: list[_Read] = []
    for turn in range(ROUNDS):
        lists = [_drawn(draw, count, kind) for _ in range(layer.layout.kv_heads)]
        # Who reads first finds the drive as the other left it: in turn.
        for ranged in (turn % 2 == 0, turn % 2 == 1):
            (parts if ranged else wholes).append(layer.read(lists, ranged))
    for label, share in (("p50", 50), ("p99", 99)):
        mine, theirs = ([one.seconds * 1e3 for one in each] for each in (parts, wholes))
        yield Row(
            f"{name}.ms.{label}",
            float(np.percentile(mine, share)),
            "ms",
            peer="whole blocks",
            peer_value=float(np.percentile(theirs, share)),
            lower_is_better=True,
        )
    yield Row(
        f"{name}.mib",
        statistics.mean(one.size for one in parts) / 2**20,
        "MiB",
        peer="whole blocks",
        peer_value=statistics.mean(one.size for one in wholes) / 2**20,
        lower_is_better=True,
    )


def _drawn(draw: np.random.Generator, count: int, kind: str) -> np.ndarray:
    if kind == "rows":
        return np.sort(draw.choice(TOKENS, count, replace=False))
    first = np.sort(draw.choice(TOKENS // PAGE_ROWS, count // PAGE_ROWS, replace=False)) * PAGE_ROWS
    return (first[:, None] + np.arange(PAGE_ROWS)).reshape(-1)
