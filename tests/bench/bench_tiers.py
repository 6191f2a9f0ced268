"""The tier engine beside its peers and its floors: one run, interleaved, one torch thread on every side.

`KVTIER_BENCH_FOLDER` names the disk; `KVTIER_BENCH_PARTS` a comma-separated choice of the parts below. The
peers live in an environment of their own, which `hack/peers` installs at the first run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from tests.bench import (
    tiers_block_key,
    tiers_directory,
    tiers_nvme,
    tiers_peers,
    tiers_ranges,
    tiers_store,
    tiers_through,
)
from tests.bench.rows import Row

PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "block_key": tiers_block_key.rows,
    "directory": tiers_directory.rows,
    "store": tiers_store.rows,
    "peers": tiers_peers.rows,
    "nvme": tiers_nvme.rows,
    "through": tiers_through.rows,
    "ranges": tiers_ranges.rows,
}


def rows() -> Iterator[Row]:
    torch.set_num_threads(1)
    chosen = os.environ.get("KVTIER_BENCH_PARTS", ",".join(PARTS)).split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise ValueError(f"KVTIER_BENCH_PARTS: {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    for part in chosen:
        print(f"measuring {part}", flush=True)
        yield from PARTS[part]()
