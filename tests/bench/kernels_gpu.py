"""Every kernel of the registry on a GPU, by CUDA events, against copy bandwidth measured in the same run.

The median of many runs; before each, a write larger than the last cache puts what is timed out of it.
Without a GPU nothing is timed and no row is written. `KVTIER_BENCH_OPS` chooses ops.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvtier_kernels.spec import Inputs, KernelSpec
from kvtier_kernels.testing.inputs import fresh, to_device
from tests.bench.kernels_registry import chosen_ops, op_rows
from tests.bench.rows import Row

RUNS, WARM = 40, 5
COPY_BYTES = 4 << 30
# Long enough to write that the launches of a call are queued before it ends: else their gaps are timed.
FLUSH_BYTES = 2 << 30
# Percent of the copy bandwidth that is wanted; of paged decode at 32k to 128k rows.
GOALS = {"paged_decode": 90.0}


def rows() -> Iterator[Row]:
    if not torch.cuda.is_available():
        print("no GPU: nothing was timed", flush=True)
        return
    device = torch.device("cuda")
    print(f"on {torch.cuda.get_device_name(device)}", flush=True)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    bandwidth = _copy_bytes_per_s(device, flush)
    yield Row("memory.gpu_copy", bandwidth / 1e9, "GB/s")
    for spec in chosen_ops():
        if "triton" not in spec.implementations:
            continue
        call = spec.implementations["triton"]()
        for case in spec.bench_gpu:
            inputs = to_device(spec.make_inputs(case), device)
            took = _median(spec, call, inputs, flush)
            floor = spec.bytes_moved(inputs) / bandwidth
            yield from op_rows(spec, case, "gpu", inputs, took, floor, GOALS.get(spec.name))
            del inputs
            torch.cuda.empty_cache()


def _copy_bytes_per_s(device: torch.device, flush: torch.Tensor) -> float:
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _event_seconds(lambda: target.copy_(source), lambda: None, flush, 10)


def _median(spec: KernelSpec, call: Callable[..., Any], inputs: Inputs, flush: torch.Tensor) -> float:
    own = fresh(inputs, spec.mutates)

    def put_back() -> None:
        for name in spec.mutates:
            own[name].copy_(inputs[name])

    return _event_seconds(lambda: call(**own), put_back, flush, RUNS)


def _event_seconds(
    call: Callable[[], Any], before: Callable[[], None], flush: torch.Tensor, runs: int
) -> float:
    for _ in range(WARM):
        before()
        call()
    event: Any = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(runs)]
    for start, end in pairs:
        before()
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in pairs) / 1e3
