"""Decode frames on the short way with chunks on storage, of a whole engine over real files."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvtier_core.edits.requests import Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import StepAnswer
from kvtier_core.tiers.fileops import Buffer, OsFileOps
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_core.tiers.nvme.tier import NvmeTier
from kvtier_core.tiers.staging import PAGE
from kvtier_core.transactions import MoveKind
from kvtier_kernels.ops.chunk_attention.keptstates import KeptStates
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun
from tests.unit.core.builders import (
    CHUNK,
    LAYERS,
    Driver,
    FakeClock,
    Rows,
    cpu,
    engine,
    nvme,
)
from tests.unit.core.editing import edit, fork

TOKENS, DECODE = 3 * CHUNK + 5, 6
STORED = [cpu(LAYERS), nvme(64)]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows.random(TOKENS + 2 * DECODE)


@pytest.fixture(scope="module")
def want(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    with engine(tmp_path_factory.mktemp("all"), [cpu(64)]) as built:
        return Driver.open(built, rows).play(TOKENS, 2 * DECODE)


def general_frames(built: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layer of each frame from now on that took the general way."""
    taken: list[int] = []
    run: Callable[..., StepAnswer] = built._runner.run

    def counted(context: object, request: object, *given: object) -> StepAnswer:
        taken.append(request.layer)  # type: ignore[attr-defined]
        return run(context, request, *given)

    monkeypatch.setattr(built._runner, "run", counted)
    return taken


def decoded(driver: Driver, **changes: object) -> torch.Tensor:
    """One token, each layer promising the next."""
    at, outs = driver.position, []
    for layer in range(LAYERS):
        follows = layer + 1 < LAYERS
        request = driver.request(layer, at, at + 1, next_layer_follows=follows, **changes)
        answer = driver.engine.step(request)
        driver.answers.append(answer)
        outs.append(answer.out)
    driver.position, driver.step = at + 1, driver.step + 1
    return torch.stack(outs)


def test_encrypted_blocks_are_streamed_with_the_same_bits(
    tmp_path: Path, rows: Rows, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, STORED, keys=MemoryKeys(os.urandom)) as built:
        driver = Driver.open(built, rows)
        assert torch.equal(driver.forward(TOKENS), want[:, :TOKENS])
        general = general_frames(built, monkeypatch)
        for at in range(TOKENS, TOKENS + DECODE):
            assert torch.equal(decoded(driver), want[:, at : at + 1])
        assert general == []
        receipt = driver.answers[-1].receipt
        assert set(receipt.plan) == {"nvme:near", "cpu:partial"}
        assert receipt.promised_bytes == receipt.bytes_by_tier["flash"] > 0


def arrived(driver: Driver) -> None:
    """Waits until all that is on its way to the session is here."""
    for promise in driver.engine._plans._promises._open.get(driver.handle.session_id, ()):
        assert all(arrival.wait(60.0) for arrival in promise.arrivals)


@pytest.mark.parametrize("flawed", [False, True], ids=["all here", "one is flawed"])
def test_blocks_that_have_all_come_are_attended_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flawed: bool
) -> None:
    """More of them than one call has of those that are waited for. One whose read failed is read again."""
    count, near = 7 * CHUNK + 5, 7
    rows = Rows.random(count + DECODE)
    with engine(tmp_path / "all", [cpu(64)]) as built:
        want = Driver.open(built, rows).play(count, DECODE)
    files, taken = Flaw(), []
    take = KeptStates.take

    def counted(states: KeptStates, first: int, chunks: Sequence[ChunkRun]) -> None:
        taken.append((first, len(chunks)))
        take(states, first, chunks)

    with engine(tmp_path / "near", STORED, files=files) as built:
        driver = Driver.open(built, rows)
        driver.forward(count)
        decoded(driver)
        monkeypatch.setattr(KeptStates, "take", counted)
        at = driver.position
        assert torch.equal(built.step(driver.request(0, at, at + 1)).out, want[0, at : at + 1])
        if flawed:
            files.of(driver, 1, "flipped", 1)
        # Promised behind the frame, so that all of it is there before the next one asks.
        session = built._contexts[driver.handle.session_id].session
        built._plans.promise(session, driver.step, 1)
        arrived(driver)
        taken.clear()
        answer = built.step(driver.request(1, at, at + 1))
        assert torch.equal(answer.out, want[1, at : at + 1])
        assert sum(chunks for _, chunks in taken) == near
        # Whether the second read of a flawed one is over by then is the machine's affair.
        assert flawed or len(taken) == 1
        assert answer.receipt.promised_bytes == (near - flawed) * built._store.layout.payload_bytes
        assert built._plans.buffers.available == built._plans.buffers.limit


class Flaw(OsFileOps):
    """Real files, of which reads that cover byte `at` meet the flaw, `times` times."""

    def __init__(self) -> None:
        self.at, self.kind, self.times = -1, "", 0

    def sync(self, fd: int) -> None:
        pass

    def of(self, driver: Driver, layer: int, kind: str, times: int, chunk: int = 1) -> None:
        """The layer's second block, or another."""
        store = driver.engine._store
        line = driver.engine._contexts[driver.handle.session_id].session.layers[layer].lines[chunk]
        tier = store.tiers[int(store.directory.tier[line])]
        assert isinstance(tier, NvmeTier)
        # A run of blocks that fails is read again block by block.
        self.times = 2 * times if kind == "failed" else times
        self.at, self.kind = tier._file.offset(store.ref(line).slot) + PAGE + 77, kind

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        done = super().read(fd, buffers, offset)
        if not (self.times and offset <= self.at < offset + done):
            return done
        self.times -= 1
        if self.kind == "failed":
            raise OSError(errno.EIO, "a fault of this double")
        at = self.at - offset
        if self.kind == "short":
            return at
        for buffer in buffers:
            if at < len(buffer):
                buffer[at] ^= 4
                break
            at -= len(buffer)
        return done


def test_what_is_promised_for_later_begins_when_it_is_asked_for(
    tmp_path: Path, rows: Rows, want: torch.Tensor
) -> None:
    with engine(tmp_path, STORED) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        name = driver.handle.session_id, driver.handle.generation
        for at in range(TOKENS, TOKENS + DECODE):
            for layer in range(LAYERS):
                follows = layer + 1 < LAYERS
                request = driver.request(
                    layer, at, at + 1, next_layer_follows=follows, promise_later=at % 2 == 0
                )
                answer = built.step(request)
                assert torch.equal(answer.out, want[layer, at : at + 1])
                built.keep_promise(*name)
                assert not built.owes_promise(name[0])
            driver.position, driver.step = at + 1, driver.step + 1
            assert answer.receipt.promised_bytes == answer.receipt.bytes_by_tier["flash"] > 0


def another_step(driver: Driver) -> None:
    decoded(driver)


def ended(driver: Driver) -> None:
    driver.close()


def stopped(driver: Driver) -> None:
    driver.engine.stop()


def busy(driver: Driver) -> None:
    """Another thread computes a frame."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.engine._lock:
            held.set()
            over.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60.0)
    driver.engine.keep_promise(driver.handle.session_id, driver.handle.generation)
    over.set()
    thread.join(60.0)
    driver.close()


@pytest.mark.parametrize("what", [another_step, ended, stopped, busy], ids=lambda one: one.__name__)
def test_what_is_promised_for_later_and_is_over_by_then_is_not_begun(
    tmp_path: Path, rows: Rows, what: Callable[[Driver], None]
) -> None:
    with engine(tmp_path, STORED) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        # What is kept of a layer comes with its first frame, which goes on to the next at once.
        decoded(driver)
        at, name = driver.position, driver.handle.session_id
        built.step(driver.request(0, at, at + 1))
        built._contexts[name].due = driver.step, 1
        assert built.owes_promise(name)
        if what is another_step:
            built.step(driver.request(1, at, at + 1))
            driver.position, driver.step = at + 1, driver.step + 1
        what(driver)
        begun: list[object] = []
        built._plans.promise_kept = lambda *given: begun.append(given)  # type: ignore[method-assign, assignment]
        built._plans.promise = begun.append  # type: ignore[method-assign, assignment]
        built.keep_promise(name, driver.handle.generation)
        assert begun == []
        assert not built.owes_promise(name)


FAULTS = {
    "flipped": Reason.CHECKSUM_MISMATCH,
    "short": Reason.SHORT_COPY,
    "failed": Reason.STORAGE_UNAVAILABLE,
}


@pytest.mark.parametrize("fault", FAULTS.keys())
def test_a_read_that_fails_once_costs_its_frame_the_kept_plan_and_no_more(
    tmp_path: Path, rows: Rows, want: torch.Tensor, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Flaw()
    with engine(tmp_path, STORED, files=files) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        assert torch.equal(decoded(driver), want[:, TOKENS : TOKENS + 1])
        general = general_frames(built, monkeypatch)
        # The first layer is promised by nobody, so its frame meets the fault.
        files.of(driver, 0, fault, 1)
        assert torch.equal(decoded(driver), want[:, TOKENS + 1 : TOKENS + 2])
        assert general == [0]
        assert driver.answers[-LAYERS].receipt.failed_plans == (("supportPartition", FAULTS[fault].value),)
        assert driver.answers[-1].receipt.failed_plans == ()
        assert torch.equal(decoded(driver), want[:, TOKENS + 2 : TOKENS + 3])
        assert general == [0]


@pytest.mark.parametrize("fault", FAULTS.keys())
def test_a_promised_read_that_fails_is_read_again_within_the_kept_plan(
    tmp_path: Path, rows: Rows, want: torch.Tensor, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Flaw()
    with engine(tmp_path, STORED, files=files) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        decoded(driver)
        general = general_frames(built, monkeypatch)
        files.of(driver, 1, fault, 1)
        assert torch.equal(decoded(driver), want[:, TOKENS + 1 : TOKENS + 2])
        assert general == []
        receipt = driver.answers[-1].receipt
        assert receipt.failed_plans == ()
        assert receipt.promised_bytes < receipt.bytes_by_tier["flash"]


@pytest.mark.parametrize("fault", FAULTS.keys())
def test_reads_that_go_on_failing_are_a_typed_refusal_that_takes_nothing(
    tmp_path: Path, rows: Rows, want: torch.Tensor, fault: str
) -> None:
    files = Flaw()
    with engine(tmp_path, STORED, files=files) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        decoded(driver)
        before = built.stats()
        files.of(driver, 0, fault, 1 << 20)
        request = driver.request(0, driver.position, driver.position + 1)
        with pytest.raises(CoreError) as refused:
            built.step(request)
        assert refused.value.reason is FAULTS[fault]
        why = FAULTS[fault].value
        assert refused.value.facts["attempted"] == f"supportPartition:{why},allRowsMoved:{why}"
        files.times = 0
        now = built.stats()
        # What the device's condition says of itself is its own.
        conditions = [dataclasses.replace(tier, condition="") for tier in now.tiers]
        assert conditions == [dataclasses.replace(tier, condition="") for tier in before.tiers]
        for at in range(TOKENS + 1, TOKENS + DECODE):
            assert torch.equal(decoded(driver), want[:, at : at + 1])


def test_a_plan_that_would_end_too_late_is_not_begun(
    tmp_path: Path, rows: Rows, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B.9: who plans decides what is done instead."""
    clock = FakeClock()
    with engine(tmp_path, STORED, clock=clock) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        decoded(driver)
        kept = built._contexts[driver.handle.session_id].resident[0]
        assert kept is not None and kept.streamed is not None
        kept.streamed = dataclasses.replace(kept.streamed, seconds=5.0)
        general = general_frames(built, monkeypatch)
        for seconds, way in ((4.9, [0]), (5.0, [])):
            general.clear()
            at = driver.position
            request = driver.request(0, at, at + 1, deadline=clock.now + seconds)
            assert torch.equal(built.step(request).out, want[0, at : at + 1])
            assert general == way
            for layer in range(1, LAYERS):
                built.step(driver.request(layer, at, at + 1))
            driver.position, driver.step = at + 1, driver.step + 1


def test_a_deadline_that_has_come_takes_nothing(tmp_path: Path, rows: Rows, want: torch.Tensor) -> None:
    clock = FakeClock()
    with engine(tmp_path, STORED, clock=clock) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        decoded(driver)
        at = driver.position
        with pytest.raises(CoreError) as late:
            built.step(driver.request(0, at, at + 1, deadline=clock.now - 1.0))
        assert late.value.reason is Reason.DEADLINE
        assert late.value.facts["attempted"] == "supportPartition:DEADLINE"
        assert late.value.facts["fallback"] == "REJECT_NO_LEGAL_PATH"
        assert torch.equal(decoded(driver), want[:, at : at + 1])


def promote(driver: Driver) -> None:
    """A chunk of the first layer comes into memory."""
    store = driver.engine._store
    line = driver.engine._contexts[driver.handle.session_id].session.layers[0].lines[1]
    assert store.tiers[int(store.directory.tier[line])].name == "flash"
    store.transactions.run(MoveKind.PROMOTE, line, 0)


def demote(driver: Driver) -> None:
    promote(driver)
    store = driver.engine._store
    line = driver.engine._contexts[driver.handle.session_id].session.layers[0].lines[1]
    store.transactions.run(MoveKind.DEMOTE, line, 1)


def truncate(driver: Driver) -> None:
    edit(driver, Truncate(driver.position - 1))


def branch(driver: Driver) -> None:
    child = fork(driver)
    decoded(child)
    child.close()


@pytest.mark.parametrize("change", [promote, demote, truncate, branch], ids=lambda one: one.__name__)
def test_what_is_kept_ends_with_a_change_and_answers_have_their_bits(
    tmp_path: Path, rows: Rows, want: torch.Tensor, change: Callable[[Driver], None]
) -> None:
    with engine(tmp_path, [cpu(LAYERS + 1 + LAYERS), nvme(64)]) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        driver.engine.demote_session(driver.handle.session_id, driver.handle.generation, 64)
        decoded(driver)
        context = built._contexts[driver.handle.session_id]
        before = context.resident[0]
        assert before is not None and before.streamed is not None
        # A promise is open, of rows that will lie elsewhere.
        built._plans.promise(context.session, driver.step, 0)
        change(driver)
        for _ in range(3):
            at = driver.position
            assert torch.equal(decoded(driver), want[:, at : at + 1])
        after = context.resident[0]
        assert after is not None and after.streamed is not None
        assert (after is before) is (change is branch)
        reads = [len(kept.streamed.blocks) for kept in (before, after) if kept.streamed is not None]
        assert reads == [3, 2 if change is promote else 3]
    assert built._plans.buffers.available == built._plans.buffers.limit
