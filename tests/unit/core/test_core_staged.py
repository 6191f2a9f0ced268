"""Staged reads that a frame no longer needs: none begins after it, and those that run are waited for."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from kvtier_core import staged
from kvtier_core.layout import ChunkLayout
from kvtier_core.staged import StagedReads
from kvtier_core.tiers.staging import StagingBuffer

LAYOUT = ChunkLayout(kv_heads=1, chunk_tokens=16, head_dim=16)


def test_reads_that_had_not_begun_when_a_frame_ended_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    begun, release = threading.Event(), threading.Event()

    def slow(buffer: StagingBuffer) -> None:
        begun.set()
        assert release.wait(10)
        ran.append("slow")

    def late(buffer: StagingBuffer) -> None:
        ran.append("late")

    def released(futures: Collection[Future[None]], timeout: float) -> object:
        release.set()
        return wait(futures, timeout=timeout)

    monkeypatch.setattr(staged, "wait", released)
    buffers = [StagingBuffer(LAYOUT), StagingBuffer(LAYOUT)]
    with ThreadPoolExecutor(1) as executor:
        with StagedReads([slow, late], buffers, executor, lambda: 0.0):
            assert begun.wait(10)
        assert ran == ["slow"]
        executor.submit(ran.append, "next frame").result(timeout=10)
    assert ran == ["slow", "next frame"]
