"""[nvme_store], [nvme_load] beside vLLM's file functions and LMCache's file adapter, same sizes, same disk.

All sides O_DIRECT where the folder has it, two I/O threads for ours and vLLM's (LMCache's adapter brings its
own pool), one torch thread, rounds interleaved. Ours verifies a checksum on every load and seals every store;
the peers have none. Nobody flushes to the medium here; what a flush costs is in the `durable` rows of raw and
ours.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtier_core.layout import ChunkLayout
from tests.bench.peers.client import Peer
from tests.bench.rows import Row
from tests.bench.tiers_nvme import SIZES, Ours, Spent, bench_folder

ROUNDS = 9
ROUND_BYTES = 64 << 20
THREADS = 2
VLLM = "vLLM 0.33.0 fs tier"
LMCACHE = "LMCache 0.5.6 fs adapter"


def rows() -> Iterator[Row]:
    with Peer() as peer, bench_folder() as folder:
        for size, layout in SIZES.items():
            yield from _compared(peer, folder, size, layout)


def _compared(peer: Peer, folder: Path, size: str, layout: ChunkLayout) -> Iterator[Row]:
    blocks = ROUND_BYTES // layout.payload_bytes
    ours = Ours(folder / "ours", layout, blocks, THREADS, durable=False)
    direct = ours.tier.o_direct
    for name in ("vllm", "lmcache"):
        (folder / name).mkdir()
    shape = {"block": layout.payload_bytes, "blocks": blocks, "direct": direct}
    peer.make("vllm", "vllm_fs", folder=str(folder / "vllm"), threads=THREADS, **shape)
    peer.make("lmcache", "lmcache_fs", folder=str(folder / "lmcache"), **shape)
    spent: dict[tuple[str, str], list[Spent]] = {}
    for round_ in range(ROUNDS + 1):
        for action in ("store", "load"):
            results = {
                "vllm": _theirs(peer, "vllm", action),
                "lmcache": _theirs(peer, "lmcache", action),
                "ours": ours.store() if action == "store" else ours.load(),
            }
            for side, result in results.items():
                if round_:
                    spent.setdefault((action, side), []).append(result)
        peer.call("vllm", "clear")
        peer.call("lmcache", "clear")
    for action in ("store", "load"):
        yield from _rows_of(
            action, size, ours.bytes, {side: spent[action, side] for side in ("ours", "vllm", "lmcache")}
        )
    ours.close()
    peer.drop("vllm")
    peer.drop("lmcache")
    for name in ("ours", "vllm", "lmcache"):
        shutil.rmtree(folder / name)


def _theirs(peer: Peer, name: str, action: str) -> Spent:
    answer = peer.call(name, action)
    return Spent(float(answer["seconds"]), float(answer["cpu"]))


def _rows_of(action: str, size: str, moved: int, spent: dict[str, list[Spent]]) -> Iterator[Row]:
    for part, share in (("p50", 0.5), ("p99", 0.99)):
        speed = {
            side: moved / float(np.quantile([one.seconds for one in rounds], share)) / 1e9
            for side, rounds in spent.items()
        }
        for peer, label in (("vllm", VLLM), ("lmcache", LMCACHE)):
            yield Row(
                f"nvme_{action}.peers.{size}.beside_{peer}.{part}",
                speed["ours"],
                "GB/s",
                goal=speed[peer] if part == "p50" and peer == "vllm" else None,
                peer=label,
                peer_value=speed[peer],
            )
    cpu = {side: sum(one.cpu for one in rounds) / len(rounds) / moved * 1e9 for side, rounds in spent.items()}
    for peer, label in (("vllm", VLLM), ("lmcache", LMCACHE)):
        yield Row(
            f"nvme_{action}.peers.{size}.beside_{peer}.cpu",
            cpu["ours"],
            "s/GB",
            peer=label,
            peer_value=cpu[peer],
            lower_is_better=True,
        )
