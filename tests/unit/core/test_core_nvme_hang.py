"""A device that does not answer: callers leave at their deadline, threads are written off and replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import SlotState
from kvtier_core.tiers.nvme.calls import CallJob
from kvtier_core.tiers.nvme.iopool import Job
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import Landing, TransferItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_files import Gate, ScriptedFiles
from tests.unit.core.nvme_store import (
    FOREVER,
    LAYOUT,
    SIZE,
    Heard,
    content,
    identity,
    load,
    open_store,
    page_aligned,
    says,
    store,
    write_item,
)


def reading(item: TransferItem) -> TransferItem:
    return TransferItem(item.ref, item.identity, Landing(page_aligned(bytes(SIZE))))


def refused(reason: Reason, call: object) -> CoreError:
    with pytest.raises(CoreError) as error:
        call()  # type: ignore[operator]
    assert error.value.reason is reason, error.value
    return error.value


def test_a_read_that_hangs_ends_for_its_caller_at_the_deadline(tmp_path: Path) -> None:
    """done(DEADLINE) at the deadline, drained only when the call returns; others are served meanwhile."""
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=1, spare_threads=1)
    items = store(tier, "a", "b")
    files.calls.clear()
    gate = files.script = Gate("read", 0)
    heard, late = Heard(1), reading(items[0])
    tier.submit_read([late], clock.now + 5, heard)
    assert gate.entered.acquire(timeout=60)
    clock.now += 4.9
    tier.expire()
    assert not heard.errors
    clock.now += 0.2
    tier.expire()
    tier.expire()
    assert heard.wait_done().reasons() == ["DEADLINE"]
    assert heard.drained_count == 0, "the device may still write into the landing"
    says(tier, "1 I/O threads hang")
    assert load(tier, items[1:]) == [content("b")], "a spare thread took over"
    gate.opened.set()
    heard.wait()
    says(tier, "Ready")
    assert load(tier, items) == [content("a"), content("b")]
    tier.close()


def test_the_deadline_is_kept_by_the_tier_itself(tmp_path: Path) -> None:
    """With the machine's clock nobody has to call `expire`."""
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=time.monotonic, threads=1)
    (item,) = store(tier, "a")
    files.calls.clear()
    gate = files.script = Gate("read", 0)
    heard = Heard(1)
    tier.submit_read([reading(item)], time.monotonic() + 0.05, heard)
    assert heard.wait_done().reasons() == ["DEADLINE"]
    gate.opened.set()
    heard.wait()
    tier.close()


def test_threads_are_replaced_up_to_a_bound_and_then_work_is_refused(tmp_path: Path) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=1, spare_threads=1)
    items = store(tier, "a", "b", "c")
    gate = files.script = Gate("read")
    heard = [Heard(1), Heard(1)]
    for item, sink in zip(items, heard, strict=False):
        tier.submit_read([reading(item)], clock.now + 1, sink)
        assert gate.entered.acquire(timeout=60)
        clock.now += 2
        tier.expire()
        assert sink.wait_done().reasons() == ["DEADLINE"]
    error = refused(
        Reason.STORAGE_UNAVAILABLE, lambda: tier.submit_read([reading(items[2])], FOREVER, Heard(1))
    )
    assert error.facts["hung"] == "2"
    gate.opened.set()
    for sink in heard:
        sink.wait()
    says(tier, "Ready")
    assert load(tier, items) == [content(name) for name in "abc"]
    tier.close()


def test_what_waits_behind_a_hang_is_refused_in_time_and_touches_nothing(tmp_path: Path) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=1, spare_threads=0)
    items = store(tier, "a", "b")
    files.calls.clear()
    gate = files.script = Gate("read", 0)
    first, second = Heard(1), Heard(1)
    tier.submit_read([reading(items[0])], clock.now + 10, first)
    assert gate.entered.acquire(timeout=60)
    tier.submit_read([reading(items[1])], clock.now + 1, second)
    clock.now += 2
    tier.expire()
    assert second.wait().reasons() == ["DEADLINE"]
    gate.opened.set()
    assert first.wait().reasons() == [None]
    assert files.calls["read"] == 1
    tier.close()


def test_a_write_that_hangs_holds_up_no_other_writers_flush(tmp_path: Path) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=2, spare_threads=1)
    files.calls.clear()
    gate = files.script = Gate("write", 0)
    hung, other = Heard(1), Heard(1)
    items = [write_item(tier, identity(name), content(name)) for name in ("a", "b")]
    tier.submit_write(items[:1], clock.now + 1, hung)
    assert gate.entered.acquire(timeout=60)
    tier.submit_write(items[1:], FOREVER, other)
    clock.now += 2
    tier.expire()
    assert hung.wait_done().reasons() == ["DEADLINE"]
    assert other.wait().reasons() == [None]
    tier.quarantine(items[0].ref)
    assert hung.drained_count == 0
    gate.opened.set()
    hung.wait()
    refused(Reason.NOT_VISIBLE, lambda: tier.publish(items[0].ref))
    assert tier.slots.state(items[0].ref) is SlotState.QUARANTINED
    tier.release(items[0].ref)
    tier.close()


def test_a_flush_that_hangs_ends_all_its_writers_at_their_own_deadlines(tmp_path: Path) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=2, spare_threads=2, run_bytes=8192)
    files.calls.clear()
    gate = files.script = Gate("sync", 0)
    short, long = Heard(2), Heard(1)
    items = [write_item(tier, identity(name), content(name)) for name in ("a", "b", "c")]
    tier.submit_write(items[:2], clock.now + 1, short)
    assert gate.entered.acquire(timeout=60)
    tier.submit_write(items[2:], clock.now + 3, long)
    clock.now += 2
    tier.expire()
    assert short.wait_done().reasons() == ["DEADLINE"] * 2
    assert not long.errors
    clock.now += 2
    tier.expire()
    assert long.wait_done().reasons() == ["DEADLINE"]
    gate.opened.set()
    short.wait()
    long.wait()
    tier.close()


@pytest.mark.parametrize("call", ["write", "validate", "read"])
def test_an_inline_call_with_a_deadline_ends_in_time(tmp_path: Path, call: str) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock)
    (kept,) = store(tier, "a")
    item = write_item(tier, identity("b", durable=False), content("b"))
    payload = StagingBuffer(tier.layout)
    payload.body[:] = content("b")
    if call == "validate":
        tier.write(item.ref, payload.payload, item.identity)
    files.calls.clear()
    gate = files.script = Gate("write" if call == "write" else "read", 0)
    target, outcome = StagingBuffer(tier.layout), []

    def run() -> None:
        try:
            if call == "write":
                tier.write(item.ref, payload.payload, item.identity, clock.now + 1)
            elif call == "validate":
                tier.validate(item.ref, item.identity, clock.now + 1)
            else:
                tier.read(kept.ref, kept.identity, target, clock.now + 1)
        except CoreError as error:
            outcome.append(error.reason)

    caller = threading.Thread(target=run)
    caller.start()
    assert gate.entered.acquire(timeout=60)
    clock.now += 2
    tier.expire()
    caller.join(60)
    assert outcome == [Reason.DEADLINE]
    gate.opened.set()
    tier.close()
    assert not any(target.body), "the late bytes went into a buffer that was the caller's again"


def test_closing_ends_what_is_queued_and_is_refused_afterwards(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    items = [write_item(tier, identity(name), content(name)) for name in "abcd"]
    heard = Heard(4)
    tier.submit_write(items, FOREVER, heard)
    tier.close()
    assert heard.wait().reasons() == [None] * 4
    refused(Reason.DRAINING, lambda: tier.submit_read(items, FOREVER, Heard(4)))
    tier.close()


def test_closing_does_not_wait_for_a_hung_call_and_keeps_its_file(tmp_path: Path) -> None:
    """Its descriptor stays open and locked: bytes may still arrive, and nobody else may have the file."""
    files = ScriptedFiles()
    others = set(threading.enumerate())
    tier = open_store(tmp_path, files=files, threads=1)
    items = store(tier, "a", "b")
    files.calls.clear()
    gate = files.script = Gate("read", 0)
    running, queued = Heard(1), Heard(1)
    tier.submit_read([reading(items[0])], FOREVER, running)
    assert gate.entered.acquire(timeout=60)
    tier.submit_read([reading(items[1])], FOREVER, queued)
    tier.close(0.05)
    assert queued.wait().reasons() == ["DRAINING"]
    assert running.wait_done().reasons() == ["DEADLINE"]
    refused(Reason.STORAGE_LOCKED, lambda: open_store(tmp_path))
    gate.opened.set()
    running.wait()
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    again = open_store(tmp_path)
    assert again.recovery.kept == 2
    again.close()


def test_what_is_stored_is_what_its_caller_gave_however_late_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that left at its deadline no longer holds the memory that it gave."""
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=1)
    items = store(tier, "a")
    files.calls.clear()
    gate = files.script = Gate("read", 0)
    heard, queued = Heard(1), threading.Event()
    tier.submit_read([reading(items[0])], FOREVER, heard)
    assert gate.entered.acquire(timeout=60)
    submit = tier._pool.submit

    def noted(jobs: Sequence[Job], **how: bool) -> None:
        submit(jobs, **how)
        queued.set()

    monkeypatch.setattr(tier._pool, "submit", noted)
    named = identity("b")
    payload = torch.frombuffer(bytearray(content("b")), dtype=torch.float32).view(LAYOUT.shape)
    ref = tier.reserve(named.logical)
    with ThreadPoolExecutor(1) as caller:
        written = caller.submit(tier.write, ref, payload, named, clock.now + 5)
        assert queued.wait(60)
        payload.zero_()
        gate.opened.set()
        assert written.result(60) == SIZE
    tier.validate(ref, named)
    heard.wait()
    tier.close()


def test_many_threads_report_each_item_once(tmp_path: Path) -> None:
    """Deadlines, I/O and commits race for each item: exactly one done and one drained after it, always."""
    clock = FakeClock()
    tier = open_store(tmp_path, 64, clock=clock, threads=4, run_bytes=8192)
    for round_ in range(10):
        items = [
            write_item(tier, identity(f"{round_}/{i}", durable=i % 2 == 0), content(f"{round_}/{i}"))
            for i in range(64)
        ]
        heard = Heard(64)
        tier.submit_write(items, clock.now + 1, heard)
        clock.now += 2
        tier.expire()
        for index, reason in enumerate(heard.wait().reasons()):
            assert reason in (None, "DEADLINE"), heard.errors[index]
        for item in items:
            tier.release(item.ref)
    says(tier, "Ready")
    tier.close()


def test_a_defect_ends_an_inline_call_for_its_caller() -> None:
    def broken() -> None:
        raise ZeroDivisionError("a defect")

    call = CallJob(broken, FOREVER)
    thrown: list[BaseException] = []

    def run() -> None:
        try:
            call.run()
        except ZeroDivisionError as error:
            thrown.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    refused(Reason.INTERNAL, call.wait)
    thread.join(60)
    assert thrown and call.returned, "the thread hears of it, too"
