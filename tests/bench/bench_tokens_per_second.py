"""[tokens_per_second]: SmolLM2-135M decoding exactly with every row in an agent, beside transformers' caches.

The agent is a process of its own behind the local channel, one thread a side, float32. Per context:

- `resident`: DynamicCache, all rows in the model's own process.
- `offloaded`: DynamicCache whose layers are copied whole before each use and thrown away after it, which is
  what transformers' offloading does between a GPU and the host. There is no GPU here: its link is a memcpy.
- `cpu100`, `cpu50`, `cpu10`: the agent with that share of the context's chunks in its cpu tier and the rest
  on its nvme tier. The cpu tier always holds one open chunk a layer, so of a short context it holds more.

All of them decode token by token in turn, so that a busy machine troubles all alike. The floor of a share is
the longer of two times: the all-resident token's, and that in which storage delivers the bytes that receipts
name, at the rate at which the same folder gives blocks of that size one after the other.

`--lengths` (or `KVTIER_BENCH_LENGTHS`) chooses contexts, by default 1000: most of the time goes into the five
prefills, whose ends are printed with each round of tokens. `--tokens` is how many are decoded by each way.
`--resume` (or `KVTIER_BENCH_RESUME`) names a file: contexts that stand there are not measured again, others
are added.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtier_client.client import AttentionClient
from kvtier_client.hf import KvtierCache, attach
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.hostmemory import HUGE_PAGE
from kvtier_core.tiers.staging import StagingRoom
from tests.bench.rows import Row
from tests.engine.agent_process import default_tiers, running_agent
from tests.engine.exactness import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    GEOMETRY,
    SLOT_BYTES,
    Tiers,
    apply_cache,
    prompts,
)
from tests.engine.smollm2 import load_smollm2

LENGTHS, RESUME = "KVTIER_BENCH_LENGTHS", "KVTIER_BENCH_RESUME"
SHARES = (100, 50, 10)
NEW_TOKENS = 24
PASSES = 5
GOAL_RESIDENT, GOAL_SPREAD = 1.15, 1.3


@dataclass(frozen=True)
class Made:
    """tokens: greedy. seconds: the median decode step's. storage_bytes: read from nvme for one token. held:
    the cpu tier's chunks out of all, in percent. stall_seconds: for which frames of one token waited for
    storage, on average."""

    tokens: list[int]
    seconds: float
    storage_bytes: float = 0.0
    held: float = 100.0
    stall_seconds: float = 0.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tokens_per_second", description=__doc__)
    made.add_argument(
        "--lengths", default=os.environ.get(LENGTHS, "1000"), help="rows of context, with commas"
    )
    made.add_argument("--tokens", type=int, default=NEW_TOKENS, help="decoded by each way, at least 2")
    made.add_argument("--resume", default=os.environ.get(RESUME), help="file of results between runs")
    return made


def rows(arguments: Sequence[str] = ()) -> Iterator[Row]:
    args = parser().parse_args(arguments)
    if args.tokens < 2:
        raise ValueError(f"--tokens {args.tokens}: the first one is the prefill's")
    lengths = [int(part) for part in args.lengths.split(",")]
    kept = _Kept(args.resume)
    model, tokenizer = load_smollm2()
    torch.set_num_threads(1)
    rate = _storage_rate()
    yield Row("tokens_per_second.storage", rate / 1e9, "GB/s")
    for length, ids in zip(lengths, prompts(tokenizer, lengths), strict=True):
        made = kept.get(f"n{length}", partial(_measure, model, ids, args.tokens))
        yield from _rows(f"tokens_per_second.n{length}", made, rate)


def _rows(label: str, made: Mapping[str, Made], rate: float) -> Iterator[Row]:
    resident, offloaded = made["resident"], made["offloaded"]
    yield Row(f"{label}.resident", 1 / resident.seconds, "tokens/s")
    yield Row(f"{label}.offloaded", 1 / offloaded.seconds, "tokens/s")
    for share in SHARES:
        name, one = f"{label}.cpu{share}", made[f"cpu{share}"]
        floor = max(resident.seconds, one.storage_bytes / rate)
        longest = GOAL_RESIDENT * resident.seconds if share == 100 else GOAL_SPREAD * floor
        yield Row(
            name,
            1 / one.seconds,
            "tokens/s",
            goal=1 / longest,
            peer="offloaded",
            peer_value=1 / offloaded.seconds,
        )
        yield Row(f"{name}.floor", 1 / floor, "tokens/s")
        yield Row(f"{name}.held", one.held, "% in memory")
        yield Row(f"{name}.stall", one.stall_seconds * 1e3, "ms a token")
        equal = sum(a == b for a, b in zip(one.tokens, resident.tokens, strict=True))
        yield Row(f"{name}.equal_tokens", equal, f"of {len(one.tokens)}")


@torch.no_grad()
def _measure(model: Any, ids: torch.Tensor, new_tokens: int) -> dict[str, Made]:
    """Every way's prefill, then rounds of one token each."""
    from transformers import DynamicCache

    count, began = ids.shape[1], time.perf_counter()
    with ExitStack() as stack:
        agent = stack.enter_context(running_agent(tiers=partial(default_tiers, capacity="4Gi")))
        client = stack.enter_context(AttentionClient(agent.socket_path, transport="local"))
        caches: dict[str, Any] = {
            "resident": DynamicCache(config=model.config),
            "offloaded": _offloaded(model.config),
        }
        held: dict[str, float] = {}
        for share in SHARES:
            name = f"cpu{share}"
            budgets, held[name] = _budgets(count, share, new_tokens)
            tiers = apply_cache(agent, client, name, budgets)
            caches[name] = stack.enter_context(_opened(tiers, model, count + new_tokens))
        tokens: dict[str, list[int]] = {name: [] for name in caches}
        seconds: dict[str, list[float]] = {name: [] for name in caches}
        names = list(caches)
        for round_ in range(new_tokens):
            # Whoever follows a long computation is favoured by a busy machine's scheduler: all do in turn.
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                cache = caches[name]
                step = torch.tensor([tokens[name][-1:]]) if round_ else ids
                with attach(model) if name in held else nullcontext():
                    started = time.perf_counter()
                    logits = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
                    seconds[name].append(time.perf_counter() - started)
                tokens[name].append(int(logits.argmax()))
                if not round_:
                    print(f"{count} rows: {name} prefilled in {seconds[name][0]:.1f} s", flush=True)
                if name in held and not round_:
                    cache.take_receipts()
            spent = time.perf_counter() - began
            print(f"{count} rows: {round_ + 1} of {new_tokens} tokens after {spent:.0f} s", flush=True)
        made = {name: Made(tokens[name], statistics.median(seconds[name][1:])) for name in caches}
        for name, percent in held.items():
            receipts, steps = caches[name].take_receipts(), new_tokens - 1
            read = sum(receipt.bytes_by_tier.get("nvme", 0) for receipt in receipts)
            stall = sum(receipt.stall_seconds for receipt in receipts)
            made[name] = replace(
                made[name], storage_bytes=read / steps, held=percent, stall_seconds=stall / steps
            )
    return made


def _budgets(count: int, share: int, new_tokens: int) -> tuple[dict[str, int], float]:
    """Bytes by tier class, and the percentage of the context's chunks that the cpu tier takes."""
    layers = GEOMETRY.layers
    chunks = layers * ((count + new_tokens) // CHUNK_TOKENS + 1)
    held = chunks if share == 100 else max(layers, chunks * share // 100)
    budgets = {"gpu-sim": 0, "dram": held * CHUNK_BYTES, "nvme": 0}
    if share < 100:
        budgets["nvme"] = (chunks + layers) * SLOT_BYTES
    return budgets, held / chunks * 100


def _offloaded(config: Any) -> Any:
    from transformers import DynamicCache

    class Offloaded(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = super().update(*args, **kwargs)
            return k.clone(), v.clone()

    return Offloaded(config=config)


def _opened(tiers: Tiers, model: Any, most: int) -> KvtierCache:
    return KvtierCache(
        tiers.client,
        namespace=tiers.cache.namespace,
        name=tiers.cache.name,
        uid=tiers.cache.uid,
        model_fingerprint=tiers.fingerprint,
        config=model.config,
        tenant="bench",
        max_tokens=most,
        deadline_seconds=120.0,
    )


def _storage_rate(blocks: int = 200) -> float:
    """Bytes a second of a slot's size at a time, into huge pages and past the page cache where kernel and
    filesystem let us: the best of some passes."""
    layout = ChunkLayout(GEOMETRY.kv_heads, CHUNK_TOKENS, GEOMETRY.head_dim)
    buffer = StagingRoom(layout, HUGE_PAGE // SLOT_BYTES + 1).buffer(0).block
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks"
        buffer[:] = os.urandom(SLOT_BYTES)
        with path.open("wb") as file:
            for _ in range(blocks):
                file.write(buffer)
            file.flush()
            os.fsync(file.fileno())
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            fd = os.open(path, os.O_RDONLY)
        try:
            return max(_read_rate(fd, buffer, blocks) for _ in range(PASSES))
        finally:
            os.close(fd)


def _read_rate(fd: int, buffer: memoryview, blocks: int) -> float:
    started = time.perf_counter()
    for block in range(blocks):
        os.preadv(fd, [buffer], block * SLOT_BYTES)
    return blocks * SLOT_BYTES / (time.perf_counter() - started)


class _Kept:
    """Results by name, in a file between runs."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._found: dict[str, Any] = {}
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._found = json.loads(self._path.read_text(encoding="utf-8"))

    def _keep(self, name: str, value: Any) -> None:
        self._found[name] = value
        if self._path is not None:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")

    def get(self, name: str, measure: Callable[[], dict[str, Made]]) -> dict[str, Made]:
        if name not in self._found:
            print(f"measuring {name}", flush=True)
            self._keep(name, {way: asdict(made) for way, made in measure().items()})
        return {way: Made(**fields) for way, fields in self._found[name].items()}
