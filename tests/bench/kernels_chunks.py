"""One sealed chunk of SmolLM2 on the CPU, rows as the tiers keep them: a decode query and a prefill block.

One thread, float32, best of many runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.state import LogitFrame
from tests.bench.rows import Row
from tests.bench.timing import best, threads


def rows() -> Iterator[Row]:
    k, v = (torch.randn(3, 256, 64).transpose(0, 1) for _ in range(2))
    frame = LogitFrame(0.125)
    with threads(1):
        for label, nq in (("decode", 1), ("prefill256", 256)):
            q = torch.randn(nq, 9, 64)

            def call(q: torch.Tensor = q) -> Any:
                return chunk_state(q, k, v, scale=0.125, q_pos0=512, row_pos0=0, frame=frame)

            seconds = best(call)
            yield Row(f"chunk_state.{label}", seconds * 1e6, "us", lower_is_better=True)
            flops = 4 * nq * 256 * 9 * 64
            yield Row(f"chunk_state.{label}.rate", flops / seconds / 1e9, "GFLOP/s")
