"""[block_key] What naming a block costs, beside a bare SHA-256 chain over the same tokens.

The peer hashes parent and tokens and nothing else, from bytes that are laid out already: the least that any
chain of this hash can cost in Python. One thread; keys are computed before a lookup and counted apart.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvtier_core.blockkey import EXACT, BlockSource, chain_keys
from kvtier_core.identity import SourceBinding
from tests.bench.rows import Row

BLOCKS = 512
SIZES = (16, 64, 256)
REPEATS = 30
PEER = "bare sha256 chain"


def rows() -> Iterator[Row]:
    random = np.random.default_rng(0)
    for size in SIZES:
        source = _source(size)
        tokens = random.integers(0, 150_000, BLOCKS * size, dtype=np.int64)
        laid_out = tokens.astype(">u4").tobytes()
        chained: list[float] = []
        bare: list[float] = []
        # Interleaved, so that both meet the same machine.
        for _ in range(REPEATS):
            chained.append(_seconds(lambda source=source, tokens=tokens: chain_keys(source, tokens)))  # type: ignore[misc]
            bare.append(_seconds(lambda data=laid_out, size=size: _bare(data, 4 * size)))  # type: ignore[misc]
        ours, theirs = float(np.median(chained)), float(np.median(bare))
        yield Row(
            f"block_key.b{size}.block",
            ours / BLOCKS * 1e6,
            "us",
            peer=PEER,
            peer_value=theirs / BLOCKS * 1e6,
            lower_is_better=True,
        )
        yield Row(
            f"block_key.b{size}.token",
            ours / len(tokens) * 1e9,
            "ns",
            peer=PEER,
            peer_value=theirs / len(tokens) * 1e9,
            lower_is_better=True,
        )
        yield Row(
            f"block_key.b{size}.p99_of_{BLOCKS}_blocks",
            float(np.quantile(chained, 0.99)) * 1e3,
            "ms",
            lower_is_better=True,
        )


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _bare(data: bytes, width: int) -> bytes:
    key = bytes(32)
    for at in range(0, len(data), width):
        key = hashlib.sha256(key + data[at : at + width]).digest()
    return key


def _source(block_tokens: int) -> BlockSource:
    name = bytes([1]) * 32
    binding = SourceBinding(
        logical_cache_abi_sha256=name,
        cache_layout_manifest_sha256=name,
        visibility_policy_manifest_sha256=name,
        model_artifact_sha256="sha256:" + "1" * 64,
        checkpoint_generation="step-1",
        adapter_set_sha256=name,
        position_contract_sha256=name,
        rope_config_sha256=name,
        tenant_namespace="bench",
        namespace_generation=0,
        request_generation=0,
        cache_generation=1,
        publication_generation=1,
        committed_frontier=0,
    )
    return BlockSource(
        binding=binding,
        dtype="float32",
        codec="identity",
        layout="kv-head-major-f32/1",
        producer=EXACT,
        layers=(0, 32),
        kv_heads=(0, 8),
        block_tokens=block_tokens,
    )
