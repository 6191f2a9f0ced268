"""Staged reads that a frame no longer needs: none begins after it, and those that run are waited for."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from kvtier_core import staged
from kvtier_core.errors import CoreError, Reason
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


class Clock:
    """Seconds that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("in_flight", [False, True], ids=["asked-for", "still-in-flight"])
def test_a_read_that_outlasts_the_deadline_is_abandoned_with_its_buffer(in_flight: bool) -> None:
    """Were it waited for, its frame would hold the engine for as long as storage hangs; were its buffer used
    again, the read might write into another frame's rows."""
    clock, release, begun = Clock(), threading.Event(), threading.Event()

    def hang(buffer: StagingBuffer) -> None:
        begun.set()
        assert release.wait(20)

    buffers = [StagingBuffer(LAYOUT), StagingBuffer(LAYOUT)]
    with ThreadPoolExecutor(1) as executor:
        reads = StagedReads([hang, hang], buffers, executor, clock, deadline=100.02)
        try:
            with reads:
                assert begun.wait(10)
                clock.now = 100.01
                if not in_flight:
                    clock.now = 100.03
                    with pytest.raises(CoreError) as refused:
                        reads.next()
                    assert refused.value.reason is Reason.DEADLINE
            assert reads.abandoned == [buffers[0]]
        finally:
            release.set()


def test_a_hang_before_a_far_deadline_is_the_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "READ_TIMEOUT_SECONDS", 0.01)
    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        reads = StagedReads(
            [lambda buffer: release.wait(20) and None],
            [StagingBuffer(LAYOUT)],
            executor,
            Clock(),
            deadline=200.0,
        )
        try:
            with reads, pytest.raises(CoreError) as refused:
                reads.next()
        finally:
            release.set()
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
