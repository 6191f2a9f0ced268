"""Kernels on the CPU: paged decode beside sdpa over gathered rows, and beside what memory can copy.

One thread, float32, best of many runs. GPU kernels are not timed here: see docs/kernels.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.paged_decode.spec import paged_decode_spec
from kvtier_kernels.spec import Case
from kvtier_kernels.state import LogitFrame
from tests.bench.rows import Row

RUNS = 60
COPY_BYTES = 256 << 20
# SmolLM2's geometry, and one KV head of a 70B-like model's group.
SHAPES = [("smollm2", 9, 3, 64), ("gqa8", 64, 8, 128)]
LENGTHS = (512, 2048)


def rows() -> Iterator[Row]:
    spec = paged_decode_spec()
    decode = spec.implementations["torch"]()
    with _one_thread():
        copied = _copy_gb_per_s()
        yield Row("memory.copy", copied, "GB/s")
        for name, hq, hk, d in SHAPES:
            for n in LENGTHS:
                case = Case(f"{name}-{n}", {"Hq": hq, "Hk": hk, "d": d, "P": 16}, (n,), seed=n)
                inputs = spec.make_inputs(case)
                moved = spec.bytes_moved(inputs)
                ours, theirs = _alternately(partial(decode, **inputs), partial(sdpa_with_gather, **inputs))
                yield Row(
                    f"paged_decode.torch.{name}.n{n}",
                    moved / ours / 1e9,
                    "GB/s",
                    goal=moved / theirs / 1e9,
                    peer="sdpa with gather",
                    peer_value=moved / theirs / 1e9,
                )
                yield Row(
                    f"paged_decode.torch.{name}.n{n}.of_copy",
                    moved / ours / 1e9 / copied * 100,
                    "%",
                )
        yield from _chunk_rows()


def sdpa_with_gather(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """What one would write without us: gather the pages of a request, then sdpa."""
    out = []
    for b, n in enumerate(seq_lens.tolist()):
        pages = page_table[b].long()
        k, v = (x[pages].flatten(0, 1)[:n].transpose(0, 1).unsqueeze(0) for x in (k_cache, v_cache))
        one = q[b][None, :, None]
        out.append(torch.nn.functional.scaled_dot_product_attention(one, k, v, scale=scale, enable_gqa=True))
    return torch.cat(out)


def _chunk_rows() -> Iterator[Row]:
    """One sealed chunk of SmolLM2, rows as the tiers keep them (head-major)."""
    k, v = (torch.randn(3, 256, 64).transpose(0, 1) for _ in range(2))
    frame = LogitFrame(0.125)
    for label, nq in (("decode", 1), ("prefill256", 256)):
        q = torch.randn(nq, 9, 64)

        def call(q: Tensor = q) -> Any:
            return chunk_state(q, k, v, scale=0.125, q_pos0=512, row_pos0=0, frame=frame)

        seconds = _best(call)
        yield Row(f"chunk_state.{label}", seconds * 1e6, "us", lower_is_better=True)
        flops = 4 * nq * 256 * 9 * 64
        yield Row(f"chunk_state.{label}.rate", flops / seconds / 1e9, "GFLOP/s")


def _copy_gb_per_s() -> float:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best(lambda: target.copy_(source), runs=8) / 1e9


def _best(call: Callable[[], Any], runs: int = RUNS) -> float:
    call()
    return min(_timed(call) for _ in range(runs))


def _alternately(a: Callable[[], Any], b: Callable[[], Any]) -> tuple[float, float]:
    """Best seconds of each, runs interleaved so that a busy machine troubles both alike."""
    a(), b()
    pairs = [(_timed(a), _timed(b)) for _ in range(RUNS)]
    return min(x for x, _ in pairs), min(y for _, y in pairs)


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
