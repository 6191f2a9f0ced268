"""Defects in what threads of storage run: whoever waits is told, and the others get on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_core.errands import Errands
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.iopool import IoPool
from kvtier_core.tiers.transfer import Landing, TransferItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_files import ScriptedFiles
from tests.unit.core.nvme_store import (
    FOREVER,
    LAYOUT,
    Heard,
    content,
    identity,
    load,
    open_store,
    page_aligned,
    store,
    write_item,
)

PATIENCE = 60.0
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def broken_once(operation: str) -> Callable[[str, int], None]:
    """A script whose first `operation` from now on is a defect."""
    left = [operation]

    def script(asked: str, _number: int) -> None:
        if asked in left:
            left.remove(asked)
            raise ZeroDivisionError("a defect")

    return script


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_defect_under_a_durable_write_is_told_to_its_writer(tmp_path: Path, operation: str) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=1)
    item = write_item(tier, identity("a"), content("a"))
    heard = Heard(1)
    files.script = broken_once(operation)
    tier.submit_write([item], FOREVER, heard)
    assert heard.wait().reasons() == ["INTERNAL"]
    (other,) = store(tier, "b")
    assert load(tier, [other]) == [content("b")]
    tier.close()


def test_a_defect_under_an_inline_flush_ends_the_write(tmp_path: Path) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=1, clock=time.monotonic)
    named = identity("a")
    payload = torch.frombuffer(bytearray(content("a")), dtype=torch.float32).view(LAYOUT.shape)
    files.script = broken_once("sync")
    with pytest.raises(CoreError) as refused:
        tier.write(tier.reserve(1), payload, named, time.monotonic() + PATIENCE)
    assert refused.value.reason is Reason.INTERNAL
    assert tier.write(tier.reserve(2), payload, named, time.monotonic() + PATIENCE) == LAYOUT.payload_bytes
    tier.close()


def test_a_defect_under_a_read_is_told_for_every_block(tmp_path: Path) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=1)
    items = store(tier, "a", "b", "c")
    files.script = broken_once("read")
    assert load(tier, items) == ["INTERNAL"] * 3
    assert load(tier, items) == [content(name) for name in "abc"]
    tier.close()


def test_a_sink_that_fails_for_each_block_hears_of_each(tmp_path: Path) -> None:
    tier = open_store(tmp_path, threads=1)
    items = store(tier, "a", "b", "c")
    heard: list[int] = []
    all_heard = threading.Event()

    def fail(index: int, _error: CoreError | None) -> None:
        heard.append(index)
        if len(heard) == len(items):
            all_heard.set()
        raise RuntimeError("a defect of the caller's")

    landings = [Landing(page_aligned(bytes(LAYOUT.payload_bytes))) for _ in items]
    reads = [TransferItem(item.ref, item.identity, one) for item, one in zip(items, landings, strict=True)]
    tier.submit_read(reads, FOREVER, Heard(3, fail))
    assert all_heard.wait(PATIENCE)
    assert sorted(heard) == [0, 1, 2]
    assert load(tier, items) == [content(name) for name in "abc"]
    tier.close()


class Late:
    """A job that says when it was told that it is late; `broken`: and fails at that."""

    items = 1
    load = None

    def __init__(
        self, deadline: float, *, broken: bool = False, holds: threading.Event | None = None
    ) -> None:
        self.deadline, self.broken, self.holds = deadline, broken, holds
        self.begun, self.told = threading.Event(), threading.Event()

    def run(self) -> bool:
        self.begun.set()
        if self.holds is not None:
            assert self.holds.wait(PATIENCE)
        return True

    def expire(self) -> None:
        self.told.set()
        if self.broken:
            raise RuntimeError("a defect of the caller's")

    def refuse(self, error: CoreError) -> None:
        self.expire()


def test_a_job_that_fails_at_being_late_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pool's own thread would look at the deadlines, too, and hear of the defect in the place of the test.
    monkeypatch.setattr(IoPool, "_wake_timer", lambda *_: None)
    clock, holds = FakeClock(), threading.Event()
    pool = IoPool("disk", 1, 64, 0, clock)
    first = Late(clock.now + 2, broken=True, holds=holds)
    pool.submit([first])
    assert first.begun.wait(PATIENCE)
    rest = [Late(clock.now + 1, broken=True), Late(clock.now + 1)]
    pool.submit(rest)
    clock.now += 3
    with pytest.raises(RuntimeError, match="a defect"):
        pool.expire()
    assert all(job.told.is_set() for job in (first, *rest))
    holds.set()
    assert pool.drain(PATIENCE)


def test_deadlines_are_kept_after_a_job_failed_at_being_late() -> None:
    holds = threading.Event()
    pool = IoPool("disk", 1, 64, 4, time.monotonic)
    for broken in (True, False):
        late = Late(time.monotonic() + 0.02, broken=broken, holds=holds)
        pool.submit([late])
        assert late.told.wait(PATIENCE)
    holds.set()
    assert pool.drain(PATIENCE)


class Closing(ScriptedFiles):
    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()

    def close(self, fd: int) -> None:
        super().close(fd)
        self.closed.set()


@pytest.mark.parametrize("returns", ["behind the close", "amid the close"])
def test_a_store_is_given_back_though_a_caller_fails_at_hearing_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: str
) -> None:
    files, holds, begun = Closing(), threading.Event(), threading.Event()
    tier = open_store(tmp_path, files=files, threads=1)
    (item,) = store(tier, "a")

    def hold(operation: str, _number: int) -> None:
        if operation == "read":
            begun.set()
            assert holds.wait(PATIENCE)

    def fail(_index: int, _error: CoreError | None) -> None:
        if returns == "amid the close":
            holds.set()
        raise RuntimeError("a defect of the caller's")

    def drain(pool: IoPool, seconds: float) -> bool:
        over = real_drain(pool, seconds)
        if returns == "amid the close":
            assert idle.wait(PATIENCE)
        return over

    real_drain, idle = IoPool.drain, threading.Event()
    monkeypatch.setattr(IoPool, "drain", drain)
    real_ran = IoPool._ran

    def ran(pool: IoPool, *arguments: Any) -> None:
        real_ran(pool, *arguments)
        idle.set()

    monkeypatch.setattr(IoPool, "_ran", ran)
    files.script = hold
    landings = [Landing(page_aligned(bytes(LAYOUT.payload_bytes))) for _ in range(2)]
    first, second = (TransferItem(item.ref, item.identity, landing) for landing in landings)
    tier.submit_read([first], FOREVER, Heard(1))
    assert begun.wait(PATIENCE)
    tier.submit_read([second], FOREVER, Heard(1, fail))
    idle.clear()
    tier.close(0.0)
    assert tier.condition == "Closed"
    assert files.closed.is_set() == (returns == "amid the close")
    holds.set()
    assert files.closed.wait(PATIENCE)
    again = open_store(tmp_path, threads=1)
    again.close()


def test_an_errand_that_fails_ends_none_behind_it() -> None:
    errands, done = Errands("test-errands"), threading.Event()

    def broken() -> None:
        raise ZeroDivisionError("a defect")

    errands.run(broken)
    errands.run(done.set)
    assert errands.close(PATIENCE)
    assert done.is_set()
