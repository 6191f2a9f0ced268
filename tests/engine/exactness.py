"""Exact means exact: a model through an agent's tiers against transformers' own DynamicCache.

Greedy decoding in float32, one thread on both sides. A prompt holds when all tokens are equal, or when at
the first difference the reference's two top logits lie within twice the declared tolerance (then either
token is a rounding's choice, and the prompt is listed).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvtier.v1 import common_pb2
from kvtier_client.client import AttentionClient
from kvtier_client.hf import KvtierCache, attach
from kvtier_crds.manifest import Dtype, Geometry, model_fingerprint
from tests.engine.agent_process import CACHE, Agent, baseline_manifest, running_agent

TOLERANCE = 1e-3
CHUNK_TOKENS = 256
GEOMETRY = Geometry(layers=30, query_heads=9, kv_heads=3, head_dim=64, dtype=Dtype.FLOAT32)
# Float32 K and V of one chunk of one layer; an nvme slot holds a header besides.
CHUNK_BYTES = 2 * CHUNK_TOKENS * 3 * 64 * 4
SLOT_BYTES = CHUNK_BYTES + 4096
# 30 layers keep one open chunk each in the gpu tier; 10 sealed chunks fit beside them, 40 in the cpu tier.
SPREAD = {"gpu-sim": 40 * CHUNK_BYTES, "dram": 40 * CHUNK_BYTES, "nvme": 300 * SLOT_BYTES}
RESIDENT = {"gpu-sim": 400 * CHUNK_BYTES, "dram": 0, "nvme": 0}
K = TypeVar("K")
_SOURCES = ("argparse", "asyncio", "collections", "json", "logging", "pathlib", "random", "re", "socket")


@dataclass(frozen=True)
class Generation:
    """Greedy tokens, the logits of each step [steps, vocabulary], and seconds of first and further tokens."""

    tokens: list[int]
    logits: torch.Tensor
    first_seconds: float
    rest_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.rest_seconds


@dataclass(frozen=True)
class Through(Generation):
    """As above, through an agent: receipts' classes and payload bytes read by tier."""

    exactness: frozenset[str]
    bytes_by_tier: dict[str, int]


@dataclass(frozen=True)
class Verdict:
    """Of one prompt. first_difference: index of the first token that differs; gap: the reference's two top
    logits there; both None when all tokens are equal."""

    first_difference: int | None
    gap: float | None
    largest_logit_difference: float

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def holds(self) -> bool:
        return self.gap is None or self.gap <= 2 * TOLERANCE


def prompts(tokenizer: Any, lengths: list[int], seed: int = 3) -> list[torch.Tensor]:
    """[1, n] token ids cut from docstrings of the standard library, each from a place of its own."""
    names = list(_SOURCES)
    text = "\n\n".join(
        inspect.getdoc(member) or ""
        for name in names
        for _, member in inspect.getmembers(importlib.import_module(name))
    )
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    rng = random.Random(seed)
    starts = [rng.randrange(0, ids.shape[0] - n) for n in lengths]
    return [ids[start : start + n].unsqueeze(0).clone() for start, n in zip(starts, lengths, strict=True)]


@torch.no_grad()
def greedy(model: Any, cache: Any, ids: torch.Tensor, new_tokens: int) -> Generation:
    """Exactly `new_tokens` tokens, end-of-text or not."""
    logits: list[torch.Tensor] = []
    tokens: list[int] = []
    started = first = time.perf_counter()
    step = ids
    while len(tokens) < new_tokens:
        row = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        token = int(row.argmax())
        if not tokens:
            first = time.perf_counter()
        logits.append(row.clone())
        tokens.append(token)
        step = torch.tensor([[token]])
    return Generation(tokens, torch.stack(logits), first - started, time.perf_counter() - first)


def reference(model: Any, ids: torch.Tensor, new_tokens: int) -> Generation:
    """transformers' DynamicCache and sdpa."""
    from transformers import DynamicCache

    return greedy(model, DynamicCache(config=model.config), ids, new_tokens)


def kept_references(
    name: str, ids: Iterable[torch.Tensor], new_tokens: int, make: Callable[[], dict[K, Generation]]
) -> dict[K, Generation]:
    """What DynamicCache and sdpa say, made once per machine: in the user's cache folder beside the converted
    model, under the versions and prompts that it depends on, since it takes as long as what is compared."""
    import transformers

    key = hashlib.sha256(f"{transformers.__version__} {torch.__version__} {new_tokens}".encode())
    for prompt in ids:
        key.update(prompt.numpy().tobytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = root / "kvtier" / "references" / f"{name}-{key.hexdigest()[:16]}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_suffix(f".{os.getpid()}")
        torch.save({each: (g.tokens, g.logits) for each, g in make().items()}, building)
        building.rename(path)
    loaded = torch.load(path, weights_only=True)
    return {each: Generation(tokens, logits, 0.0, 1.0) for each, (tokens, logits) in loaded.items()}


@dataclass(frozen=True)
class Tiers:
    """One cache of a running agent."""

    client: AttentionClient
    cache: common_pb2.CacheRef
    fingerprint: str

    def generate(self, model: Any, ids: torch.Tensor, new_tokens: int) -> Through:
        """The same loop with every row in the agent's tiers."""
        opened = KvtierCache(
            self.client,
            namespace=self.cache.namespace,
            name=self.cache.name,
            uid=self.cache.uid,
            model_fingerprint=self.fingerprint,
            config=model.config,
            tenant="exactness",
            max_tokens=ids.shape[1] + new_tokens,
        )
        with attach(model), opened as cache:
            made = greedy(model, cache, ids, new_tokens)
            receipts = cache.take_receipts()
        read: Counter[str] = Counter()
        for receipt in receipts:
            read.update(receipt.bytes_by_tier)
        kinds = frozenset(r.exactness for r in receipts)
        return Through(**vars(made), exactness=kinds, bytes_by_tier=dict(read))


def apply_cache(agent: Agent, client: AttentionClient, name: str, budgets: dict[str, int]) -> Tiers:
    """A cache of SmolLM2's geometry with these budgets in bytes."""
    cache = common_pb2.CacheRef(namespace=CACHE.namespace, name=name, uid=f"{name}-uid")
    manifest = baseline_manifest(GEOMETRY, cache=cache, budgets=budgets, chunk_tokens=CHUNK_TOKENS)
    agent.apply_baseline(manifest, cache=cache)
    return Tiers(client, cache, model_fingerprint(manifest.model))


@contextmanager
def spread_and_resident() -> Iterator[tuple[Tiers, Tiers]]:
    """A live agent with two caches: rows over three tiers, and all rows in one."""
    with running_agent() as agent, AttentionClient(agent.socket_path) as client:
        spread = apply_cache(agent, client, "spread", SPREAD)
        yield spread, apply_cache(agent, client, "resident", RESIDENT)


def compare(want: Generation, got: Generation) -> Verdict:
    """Of two generations of the same length. Logits are compared up to the first difference, since beyond
    it the histories differ."""
    for i, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=True)):
        if a != b:
            top = want.logits[i].topk(2).values
            worst = float((want.logits[: i + 1] - got.logits[: i + 1]).abs().max())
            return Verdict(i, float(top[0] - top[1]), worst)
    return Verdict(None, None, float((want.logits - got.logits).abs().max()))
