"""[engine_step]: a decode frame of SmolLM2's shape through the core, all rows in host memory, and its kernel.

A token is 30 frames, one for each layer, so that rows come from memory as they do in use. The bare kernel is
the call that a frame makes, over rows of its own that lie alike; what the engine adds is the difference of
the medians. Frames of several sequences in one call, and of forks, stand beside. One thread, float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvtier_core.edits.requests import ForkRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.receipts import SessionHandle, SessionSpec, StepAnswer, StepRequest
from kvtier_core.tiers.base import MediumKind, TierMount
from kvtier_crds.manifest import Medium
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.outputs import attend
from kvtier_kernels.ops.chunk_attention.runs import chunk_runs
from tests.bench.rows import Row
from tests.engine.agent_process import baseline_manifest
from tests.engine.exactness import CHUNK_BYTES, CHUNK_TOKENS, GEOMETRY

ROWS = (200, 1000, 2000, 8000)
SHARED = (1000, 2000)
BATCH = 4
TOKENS = 14
WARM = 4
SCALE = GEOMETRY.head_dim**-0.5
GOAL_MICROSECONDS = 200.0


def rows() -> Iterator[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for count in ROWS:
            yield from _rows(count)
    finally:
        torch.set_num_threads(before)


def _rows(count: int) -> Iterator[Row]:
    with _engine(count) as engine:
        driver = _Driver(engine, count)
        kernel = _Kernel(count)
        taken: dict[str, list[float]] = {"step": [], "kernel": []}
        for token in range(TOKENS):
            for layer in range(GEOMETRY.layers):
                request = driver.frame(layer)
                started = time.perf_counter()
                engine.step(request)
                between = time.perf_counter()
                kernel.attend(layer, request.q)
                ended = time.perf_counter()
                if token >= WARM:
                    taken["step"].append(between - started)
                    taken["kernel"].append(ended - between)
            driver.advance()
        step, bare = (statistics.median(taken[name]) * 1e6 for name in ("step", "kernel"))
        yield Row(f"engine_step.n{count}", step, "us", peer="kernel", peer_value=bare, lower_is_better=True)
        yield Row(
            f"engine_step.n{count}.above_kernel",
            step - bare,
            "us",
            goal=GOAL_MICROSECONDS,
            lower_is_better=True,
        )
        if count in SHARED:
            forks = [driver] + [driver.fork() for _ in range(BATCH - 1)]
            yield _many(f"engine_step.n{count}.forks{BATCH}", engine, forks)
    if count in SHARED:
        with _engine(count * BATCH) as engine:
            apart = [_Driver(engine, count) for _ in range(BATCH)]
            yield _many(f"engine_step.n{count}.many{BATCH}", engine, apart)


def _many(label: str, engine: CacheEngine, drivers: list[_Driver]) -> Row:
    """Microseconds for each frame of a call with one frame of each driver, beside one call for each; tokens
    take turns, so that a busy machine troubles both alike."""
    taken: tuple[list[float], list[float]] = ([], [])
    for token in range(2 * TOKENS):
        for layer in range(GEOMETRY.layers):
            requests = [driver.frame(layer) for driver in drivers]
            started = time.perf_counter()
            if token % 2:
                answers = [engine.step(request) for request in requests]
            else:
                answers = [answer for answer in engine.step_many(requests) if isinstance(answer, StepAnswer)]
            if token >= 2 * WARM:
                taken[token % 2].append(time.perf_counter() - started)
            if len(answers) != len(requests):
                raise RuntimeError(f"{len(requests) - len(answers)} frames were refused")
        for driver in drivers:
            driver.advance()
    many, each = (statistics.median(seconds) / len(drivers) * 1e6 for seconds in taken)
    return Row(label, many, "us a frame", peer="one at a time", peer_value=each, lower_is_better=True)


@contextlib.contextmanager
def _engine(rows_in_all: int) -> Iterator[CacheEngine]:
    chunks = (rows_in_all // CHUNK_TOKENS + 2 * BATCH + 2) * GEOMETRY.layers
    budgets = {"gpu-sim": 0, "dram": chunks * CHUNK_BYTES, "nvme": 0}
    manifest = baseline_manifest(GEOMETRY, budgets=budgets, chunk_tokens=CHUNK_TOKENS)
    tiers = tuple(tier for tier in manifest.tiers if tier.medium is Medium.CPU)
    manifest = manifest.model_copy(update={"tiers": tiers})
    with tempfile.TemporaryDirectory() as folder:
        mounts = {
            tier.tier_class_name: TierMount(tier.tier_class_name, MediumKind(tier.medium.value), Path(folder))
            for tier in tiers
        }
        engine = CacheEngine(manifest, mounts, time.monotonic, probe=False)
        try:
            yield engine
        finally:
            engine.stop()


class _Driver:
    """One sequence, prefilled; its further rows are random."""

    def __init__(self, engine: CacheEngine, count: int, handle: SessionHandle | None = None) -> None:
        self._engine, self._generator = engine, torch.Generator().manual_seed(count)
        self.position, self._step = 0, 0
        self.handle = handle or engine.open_session(SessionSpec("bench", SCALE, 0))
        if handle is None:
            for layer in range(GEOMETRY.layers):
                for first in range(0, count, CHUNK_TOKENS):
                    self._engine.step(self._request(layer, first, min(count, first + CHUNK_TOKENS)))
            self.position, self._step = count, 1

    def fork(self) -> _Driver:
        handle = self._engine.fork_session(ForkRequest(self.handle.session_id, self.handle.generation))
        child = _Driver(self._engine, self.position, handle)
        child.position, child._step = self.position, self._step
        return child

    def _request(self, layer: int, first: int, last: int) -> StepRequest:
        k, v, q = (
            torch.randn(last - first, heads, GEOMETRY.head_dim, generator=self._generator)
            for heads in (GEOMETRY.kv_heads, GEOMETRY.kv_heads, GEOMETRY.query_heads)
        )
        # A prefill's answers are not looked at: its last query is enough.
        queries, at = (q[-1:], last - 1) if last - first > 1 else (q, first)
        return StepRequest(
            self.handle.session_id,
            self.handle.generation,
            self._step,
            layer,
            first,
            k,
            v,
            at,
            queries,
            first if self._step else 0,
        )

    def frame(self, layer: int) -> StepRequest:
        return dataclasses.replace(self._request(layer, self.position, self.position + 1))

    def advance(self) -> None:
        self.position += 1
        self._step += 1


class _Kernel:
    """The same rows without an engine: [layers, chunks, 2, Hk, C, d], the last chunk open."""

    def __init__(self, count: int) -> None:
        whole, rest = divmod(count + TOKENS // 2, CHUNK_TOKENS)
        shape = (GEOMETRY.layers, whole + 1, 2, GEOMETRY.kv_heads, CHUNK_TOKENS, GEOMETRY.head_dim)
        self._readings = [_readings(chunks, rest) for chunks in torch.randn(shape)]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        with torch.inference_mode():
            return attend(q * SCALE, self._readings[layer])


def _readings(chunks: Tensor, rest: int) -> list[Reading]:
    keys, values = list(chunks[:, 0].unbind(0)), list(chunks[:, 1].unbind(0))
    whole = [Reading(run, (0,), CHUNK_TOKENS) for run in chunk_runs(keys[:-1], values[:-1])]
    return [*whole, Reading(chunk_runs(keys[-1:], values[-1:])[0], (0,), rest)]
