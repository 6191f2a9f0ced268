"""Every kernel of the registry on a GPU, by CUDA events, against copy bandwidth measured in the same run.

The median of many runs; before each, a write larger than the last cache puts what is timed out of it.
Without a GPU nothing is timed and no row is written. `KVTIER_BENCH_OPS` chooses ops.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
# Percent of the copy bandwidth that is wanted, by op and case: of paged decode at 32k to 128k rows.
GOALS = {("paged_decode", "gqa8-32k"): 90.0, ("paged_decode", "gqa8-128k"): 90.0}


# Seconds of a call, after what is done before each: (call, before, runs).
Timer = Callable[[Callable[[], Any], Callable[[], None], int], float]


def rows() -> Iterator[Row]:
    if not torch.cuda.is_available():
        print("no GPU: nothing was timed", flush=True)
        return
    device = torch.device("cuda")
    print(f"on {torch.cuda.get_device_name(device)}", flush=True)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    yield from measure(chosen_ops(), device, partial(_event_seconds, flush), COPY_BYTES)


def measure(
    specs: Iterable[KernelSpec], device: torch.device, timer: Timer, copy_bytes: int
) -> Iterator[Row]:
    """Rows of every case that an entry names for a GPU. An op that fails is a row worse than its floor, and
    the others go on: minutes on such a machine are few."""
    bandwidth = _copy_bytes_per_s(device, timer, copy_bytes)
    yield Row("memory.gpu_copy", bandwidth / 1e9, "GB/s")
    for spec in specs:
        for case in spec.bench_gpu:
            try:
                inputs = spec.make_inputs(case)
                took = _median(spec, to_device(inputs, device), timer)
            except Exception as e:
                print(f"{spec.name} {case.id}: {type(e).__name__}: {e}", flush=True)
                yield Row(f"{spec.name}.gpu.{case.id}.failed", 1, "calls", floor=0, lower_is_better=True)
                continue
            floor = spec.bytes_moved(inputs) / bandwidth
            yield from op_rows(spec, case, "gpu", inputs, took, floor, GOALS.get((spec.name, case.id)))


def _copy_bytes_per_s(device: torch.device, timer: Timer, size: int) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer(lambda: target.copy_(source), lambda: None, 10)


def _median(spec: KernelSpec, inputs: Inputs, timer: Timer) -> float:
    call, own = spec.implementations["triton"](), fresh(inputs, spec.mutates)

    def put_back() -> None:
        for name in spec.mutates:
            own[name].copy_(inputs[name])

    return timer(lambda: call(**own), put_back, RUNS)


def _event_seconds(
    flush: torch.Tensor, call: Callable[[], Any], before: Callable[[], None], runs: int
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
