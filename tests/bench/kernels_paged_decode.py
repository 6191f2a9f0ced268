"""Paged decode and chunks on the CPU: beside sdpa over gathered rows, and beside what memory can copy.

One thread, float32, best of many runs, runs of both sides interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.paged_decode.spec import paged_decode_spec
from kvtier_kernels.spec import Case
from kvtier_kernels.state import LogitFrame
from tests.bench.rows import Row
from tests.bench.timing import alternately, best, copy_gb_per_s

# SmolLM2's geometry, and one KV head of a 70B-like model's group.
SHAPES = [("smollm2", 9, 3, 64), ("gqa8", 64, 8, 128)]
LENGTHS = (512, 2048)


def rows() -> Iterator[Row]:
    spec = paged_decode_spec()
    decode = spec.implementations["torch"]()
    copied = copy_gb_per_s()
    for name, hq, hk, d in SHAPES:
        for n in LENGTHS:
            case = Case(f"{name}-{n}", {"Hq": hq, "Hk": hk, "d": d, "P": 16}, (n,), seed=n)
            inputs = spec.make_inputs(case)
            moved = spec.bytes_moved(inputs)
            ours, theirs = alternately(partial(decode, **inputs), partial(sdpa_with_gather, **inputs))
            yield Row(
                f"paged_decode.torch.{name}.n{n}",
                moved / ours / 1e9,
                "GB/s",
                goal=moved / theirs / 1e9,
                peer="sdpa with gather",
                peer_value=moved / theirs / 1e9,
            )
            yield Row(f"paged_decode.torch.{name}.n{n}.of_copy", moved / ours / 1e9 / copied * 100, "%")
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

        seconds = best(call)
        yield Row(f"chunk_state.{label}", seconds * 1e6, "us", lower_is_better=True)
        flops = 4 * nq * 256 * 9 * 64
        yield Row(f"chunk_state.{label}.rate", flops / seconds / 1e9, "GFLOP/s")
