"""Sessions of several threads over one engine: frames, edits, forks and endings, while chunks move, storage
fails, policies change and blocks come.

The model: a session's answers are those of the same rows in an engine of their own, bit for bit, and an edit
changes what it changes there. A refusal is typed and takes nothing: the same frame is asked again. At the end
every buffer, lease and credit is back.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest, Operation, Reposition, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placements.preference import RECENCY, PlacementPreference, PlanKind
from kvtier_core.receipts import SessionHandle, SessionSpec, StepMode, StepRequest
from kvtier_core.tiers.fileops import Buffer
from kvtier_core.transactions import MoveKind, MoveRefused
from tests.unit.core.blockpump import NAMESPACE, key, payload
from tests.unit.core.builders import (
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SCALE,
    SLOT,
    Unsynced,
    cpu,
    engine,
    gpu,
    nvme,
)

WORKERS, TURNS, TRIES = 2, 45, 400
MOST = 5 * CHUNK
TIERS = [gpu(LAYERS * 3 + 2), cpu(LAYERS * 4 + 6), nvme(400)]
MAY_PASS = {
    *(Reason.DEADLINE, Reason.STORAGE_UNAVAILABLE, Reason.CHECKSUM_MISMATCH, Reason.SHORT_COPY),
    *(Reason.IDENTITY_MISMATCH, Reason.NO_STAGING, Reason.TRANSFER_FAILED, Reason.TRANSFER_TIMEOUT),
    *(Reason.QUEUE_FULL, Reason.NO_DESTINATION_CAPACITY, Reason.NO_LEGAL_PATH, Reason.LATE_RECEIPT),
}
"""What a fault, a deadline or a moment without room may be answered with; asked again it is answered."""
PREFERENCES = [
    RECENCY,
    *(PlacementPreference("asks", prefer=kind) for kind in PlanKind),
    PlacementPreference("narrow", staging_bytes=SLOT),
    PlacementPreference("slices", prefer=PlanKind.HEAD_GROUPS, group_heads=1),
    PlacementPreference("whole", whole=True),
]


class Failing(Unsynced):
    """One read in 30 fails, or has a flipped bit."""

    def __init__(self, seed: int) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            drawn = self._random.random()
        if drawn < 1 / 60:
            raise OSError(errno.EIO, "a fault of this test")
        done = super().read(fd, buffers, offset)
        if drawn < 1 / 30:
            last = memoryview(buffers[-1]).cast("B")
            last[len(last) // 3] ^= 4
        return done


@dataclass
class Held:
    """A session in the engine that is tried, and alone. next: where its next row stands; rows: of its
    history, hidden ones included."""

    ours: SessionHandle
    alone: SessionHandle
    next: int = 0
    rows: int = 0
    step: int = 0
    epoch: int = 1


def _of(handle: SessionHandle, frame: StepRequest) -> StepRequest:
    return replace(frame, session_id=handle.session_id, generation=handle.generation)


class Worker:
    """What one thread does with sessions of its own."""

    def __init__(self, tried: CacheEngine, alone: CacheEngine, seed: int) -> None:
        self._tried, self._alone = tried, alone
        self._random, self._numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self._held: list[Held] = []

    def run(self, stop: threading.Event) -> None:
        for _ in range(TURNS):
            if stop.is_set():
                break
            self._turn()
        for held in self._held:
            self._close(held)

    def _turn(self) -> None:
        draw, held = self._random, self._held
        if not held or (len(held) < 3 and draw.random() < 0.1):
            spec = SessionSpec("team-a", SCALE, 0)
            held.append(Held(self._tried.open_session(spec), self._alone.open_session(spec)))
            self._go_on(held[-1:], draw.choice([3, CHUNK, 2 * CHUNK + 5]))
            return
        one, what = draw.choice(held), draw.random()
        if one.rows > MOST - 2 * CHUNK or what < 0.05:
            held.remove(one)
            self._close(one)
        elif what < 0.4:
            self._go_on([one], draw.choice([1, 1, 1, 6, CHUNK - 1, CHUNK + 9]))
        elif what < 0.6:
            self._go_on(held, 1)
        elif what < 0.7:
            self._edit(one, Truncate(draw.randint(0, one.next)))
        elif what < 0.76 and one.next:
            first = draw.randrange(one.next)
            self._edit(one, Drop(((first, min(one.next, first + draw.choice([1, 5, CHUNK]))),)))
        elif what < 0.8:
            self._edit(one, Reposition())
        elif what < 0.9 and len(held) < 3:
            self._fork(one)
        else:
            self._tried.demote_session(one.ours.session_id, one.ours.generation, draw.choice([1, 3, 50]))

    def _go_on(self, each: Sequence[Held], tokens: int) -> None:
        """One step of each; several in one call, layer by layer."""
        each, heads = list(each), (KV_HEADS, KV_HEADS, QUERY_HEADS)
        rows = [
            [torch.randn(LAYERS, tokens, count, HEAD_DIM, generator=self._numbers) for count in heads]
            for _ in each
        ]
        for held in each:
            held.step += 1
        for layer in range(LAYERS):
            frames = [
                self._frame(held, layer, [x[layer] for x in own])
                for held, own in zip(each, rows, strict=True)
            ]
            want = [
                self._alone.step(_of(held.alone, frame)).out for held, frame in zip(each, frames, strict=True)
            ]
            for out, wanted in zip(self._answers(frames, layer), want, strict=True):
                assert torch.equal(out, wanted)
        for held in each:
            held.next, held.rows = held.next + tokens, held.rows + tokens
            if self._random.random() < 0.7:
                self._tried.keep_promise(held.ours.session_id, held.ours.generation)

    @staticmethod
    def _frame(held: Held, layer: int, rows: Sequence[Tensor]) -> StepRequest:
        k, v, q = rows
        return StepRequest(
            session_id=held.ours.session_id,
            generation=held.ours.generation,
            step=held.step,
            layer=layer,
            first_row_position=held.next,
            k=k,
            v=v,
            first_query_position=held.next,
            q=q,
            committed_frontier=held.next,
            position_epoch=held.epoch,
        )

    def _answers(self, frames: Sequence[StepRequest], layer: int) -> list[Tensor]:
        """Asks until each is answered."""
        found: dict[int, Tensor] = {}
        last: CoreError | None = None
        draw = self._random
        for _ in range(TRIES):
            left = [at for at in range(len(frames)) if at not in found]
            if not left:
                return [found[at] for at in range(len(frames))]
            asked = [
                replace(
                    frames[at],
                    deadline=draw.choice([None, None, time.monotonic() + draw.random() * 0.003]),
                    next_layer_follows=layer + 1 < LAYERS and draw.random() < 0.7,
                    promise_later=draw.random() < 0.7,
                )
                for at in left
            ]
            plan = draw.choice([None, None, None, None, *(kind.value for kind in PlanKind)])
            for at, answer in zip(
                left, self._tried.step_many(asked, [StepMode(plan=plan)] * len(asked)), strict=True
            ):
                if not isinstance(answer, CoreError):
                    found[at] = answer.out
                elif answer.reason in MAY_PASS:
                    last = answer
                else:
                    raise answer
        raise AssertionError(f"a frame that is refused for good: {last}")

    def _edit(self, held: Held, operation: Operation) -> None:
        ours, alone = held.ours, held.alone
        wanted = self._alone.edit_session(
            EditRequest(alone.session_id, alone.generation, operation, held.epoch)
        )
        for _ in range(TRIES):
            deadline = self._random.choice([None, time.monotonic() + self._random.random() * 0.003])
            request = EditRequest(ours.session_id, ours.generation, operation, held.epoch, deadline)
            try:
                got = self._tried.edit_session(request)
                break
            except CoreError as error:
                if error.reason not in MAY_PASS:
                    raise
        else:
            raise AssertionError("an edit that is refused for good")
        assert (got.changed, got.next_position, got.rows) == (
            wanted.changed,
            wanted.next_position,
            wanted.rows,
        )
        held.epoch, held.next = held.epoch + got.changed, got.next_position
        self._go_on([held], 1)

    def _fork(self, held: Held) -> None:
        ours, alone = held.ours, held.alone
        try:
            child = self._tried.fork_session(
                ForkRequest(ours.session_id, ours.generation, position_epoch=held.epoch)
            )
        except CoreError as error:
            if error.reason not in MAY_PASS:
                raise
            return
        other = self._alone.fork_session(
            ForkRequest(alone.session_id, alone.generation, position_epoch=held.epoch)
        )
        self._held.append(replace(held, ours=child, alone=other))
        self._go_on(self._held[-1:], 1)
        self._go_on([held], 1)

    def _close(self, held: Held) -> None:
        rows = self._tried.close_session(held.ours.session_id, held.ours.generation)
        assert rows == self._alone.close_session(held.alone.session_id, held.alone.generation)


def disturb(built: CacheEngine, seed: int, stop: threading.Event) -> None:
    """Moves chunks, changes the policy and stores blocks until told to stop."""
    draw, store = random.Random(seed), built._store
    while not stop.wait(draw.random() * 0.01):
        what = draw.random()
        if what < 0.1:
            built.prefer(draw.choice(PREFERENCES))
        elif what < 0.4:
            names = draw.sample(range(40), 2)
            bodies = [payload(built, name) for name in names]
            deadline = time.monotonic() + 5.0
            built.blocks.store.put(
                [key(name) for name in names], bodies, namespace=NAMESPACE, deadline=deadline
            )
        else:
            to = draw.randrange(3)
            with built._lock:
                lines = [
                    int(line) for tier in range(3) if tier != to for line in store.directory.sealed_in(tier)
                ]
                if not lines:
                    continue
                line = draw.choice(lines)
                kind = MoveKind.DEMOTE if to > int(store.directory.tier[line]) else MoveKind.PROMOTE
                try:
                    store.transactions.run(kind, line, to)
                except MoveRefused:
                    continue


@pytest.mark.parametrize("seed", [1, 2])
def test_sessions_of_several_threads_have_the_bits_of_sessions_alone(tmp_path: Path, seed: int) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(run: object, *arguments: object) -> None:
        try:
            run(*arguments)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)
            stop.set()

    with (
        ThreadPoolExecutor(2) as reader,
        engine(
            tmp_path, TIERS, files=Failing(seed), clock=time.monotonic, reader=reader, blocks=True
        ) as built,
    ):
        alone = [engine(tmp_path / str(index), [gpu(600)]) for index in range(WORKERS)]
        each = [one.__enter__() for one in alone]
        workers = [Worker(built, other, 100 * seed + index) for index, other in enumerate(each)]
        threads = [threading.Thread(target=guarded, args=(worker.run, stop)) for worker in workers]
        beside = threading.Thread(target=guarded, args=(disturb, built, seed, stop))
        for thread in (beside, *threads):
            thread.start()
        for thread in threads:
            thread.join(120.0)
        stop.set()
        beside.join(30.0)
        assert not any(thread.is_alive() for thread in (beside, *threads))
        for one in alone:
            one.__exit__(None, None, None)
        if errors:
            raise errors[0]
        buffers = built._plans.buffers
        until = time.monotonic() + 30.0
        while buffers.available < buffers.limit and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert buffers.available == buffers.limit
        assert not built._store.directory.readers.any()
