"""What this node's processor does in a second of attention and of arithmetic, measured in a few milliseconds.

Why it exists: a plan weighs copies against computing, and a data sheet knows neither the rows' layout nor the
share of a machine that an agent has. It must not know tiers, sessions or plans. The figures are of the
processor that attends rows in this version, which is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_core.layout import ChunkLayout
from kvtier_core.units import FlopPerSecond
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.decode import decode_states, merge_stacked, reads_in_place
from kvtier_kernels.state import LogitFrame

# Larger than a core's own caches, small enough to be filled in milliseconds.
PROBE_BYTES = 4 << 20
MAX_CHUNKS = 8
MIN_ROUNDS, MAX_ROUNDS = 3, 8
ROUND_SECONDS = 0.004
_ROWS, _WIDTH = 128, 512


@dataclass(frozen=True, slots=True)
class ComputeFigures:
    """row_seconds: exact attention of one decode query over one row of one layer, all heads, rows in host
    memory. flops: fp32 matrix products. None where the clock saw no time pass."""

    row_seconds: float | None
    flops: FlopPerSecond | None


def measure_compute(layout: ChunkLayout, query_heads: int, clock: Callable[[], float]) -> ComputeFigures:
    """About 20 ms. The least of a few rounds counts: what disturbs a round only makes it longer. clock:
    seconds, fine enough for microseconds."""
    with torch.inference_mode():
        count = max(1, min(MAX_CHUNKS, PROBE_BYTES // layout.payload_bytes))
        payloads = torch.full((count, *layout.shape), 0.5, dtype=torch.float32)
        q = torch.full((1, query_heads, layout.head_dim), 0.5, dtype=torch.float32)
        frame = LogitFrame(layout.head_dim**-0.5)
        attended = _least(lambda: _attend(layout, q, payloads, frame), clock)
        left = torch.full((_ROWS, _WIDTH), 0.5, dtype=torch.float32)
        right = torch.full((_WIDTH, _WIDTH), 0.5, dtype=torch.float32)
        product = torch.empty(_ROWS, _WIDTH)
        multiplied = _least(lambda: torch.mm(left, right, out=product), clock)
    return ComputeFigures(
        None if attended is None else attended / (count * layout.chunk_tokens),
        None if multiplied is None else FlopPerSecond(2.0 * _ROWS * _WIDTH * _WIDTH / multiplied),
    )


def _attend(layout: ChunkLayout, q: Tensor, payloads: Tensor, frame: LogitFrame) -> None:
    """The calls of a decode step over full chunks."""
    if reads_in_place(layout.chunk_tokens, layout.head_dim):
        merge_stacked(decode_states(q, list(payloads[:, 0]), list(payloads[:, 1]), frame))
        return
    for payload in payloads:
        k, v = layout.rows(payload, layout.chunk_tokens)
        chunk_state(q, k, v, scale=frame.scale, q_pos0=layout.chunk_tokens, row_pos0=0, frame=frame)


def _least(work: Callable[[], object], clock: Callable[[], float]) -> float | None:
    """Seconds of the fastest round but the first, which pays for pages and for libraries that start."""
    work()
    rounds: list[float] = []
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and sum(rounds) < ROUND_SECONDS):
        begun = clock()
        work()
        rounds.append(clock() - begun)
    least = min(rounds)
    return least if least > 0.0 else None
