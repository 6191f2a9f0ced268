"""Appends, cuts, forks, drops, repositions, moves between tiers and closings in any order, over several
sessions, against lists of rows.

The model: a session is a list of (stored position, position, k, v); an answer is attention over it in
float64, each key turned from where it was stored to where it stands. A chunk is a name; a fork takes the
names of sealed ones along. So the engine must hold exactly as many chunks as there are names: one less was
freed early, one more has leaked. Stopping checks the ledger.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest, Move, Operation, Reposition, Truncate
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, SessionHandle, SessionSpec, StepRequest
from kvtier_core.transactions import MoveKind, MoveRefused
from tests.unit.core.builders import (
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SCALE,
    cpu,
    engine,
    gpu,
    nvme,
)

SESSIONS = 4
MOST = 5 * CHUNK
# Open chunks of two sessions in the fastest tier; those of others in the next, where sealed ones make room.
TIERS = [gpu(LAYERS * 2 + 1), cpu(LAYERS * 2 + 5), nvme(256)]
GROUP = QUERY_HEADS // KV_HEADS


@dataclass
class Row:
    """k, v float64 [layers, Hk, d]; index: of the row in its session."""

    index: int
    stored: int
    position: int
    k: NDArray[np.float64]
    v: NDArray[np.float64]


@dataclass
class Held:
    """A session as it must be. chunks: a name for each chunk that it holds, None for one it gave up."""

    handle: SessionHandle
    rows: list[Row] = field(default_factory=list)
    frontier: int = 0
    next: int = 0
    step: int = 0
    epoch: int = 1
    edited: bool = False
    chunks: list[int | None] = field(default_factory=list)


def turn(k: NDArray[np.float64], delta: int) -> NDArray[np.float64]:
    """Half-split pairs as complex numbers, times e^(i delta theta)."""
    half = HEAD_DIM // 2
    pairs = k[..., :half] + 1j * k[..., half:]
    pairs = pairs * np.exp(1j * delta * 10000.0 ** (-np.arange(half) / half))
    return np.concatenate((pairs.real, pairs.imag), axis=-1)


def attention(rows: list[Row], layer: int, q: NDArray[np.float64]) -> NDArray[np.float64]:
    """One query [Hq, d] over all rows: [Hq, d]."""
    keys = np.stack([turn(row.k[layer], row.position - row.stored) for row in rows])
    values = np.stack([row.v[layer] for row in rows])
    out = np.empty_like(q)
    for head in range(QUERY_HEADS):
        logits = keys[:, head // GROUP] @ q[head] * SCALE
        weights = np.exp(logits - logits.max())
        out[head] = weights @ values[:, head // GROUP] / weights.sum()
    return out


class Edited(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.engine = self.stack.enter_context(engine(self.folder, TIERS))
        self.held: list[Held] = []
        self.names = itertools.count()
        self.random = torch.Generator().manual_seed(1)

    @initialize(tokens=st.sampled_from([3, CHUNK, 2 * CHUNK + 5]))
    def begin(self, tokens: int) -> None:
        self.open()
        self.append(0, tokens)

    def pick(self, which: int) -> Held | None:
        return self.held[which % len(self.held)] if self.held else None

    # Frames.

    @rule()
    def open(self) -> None:
        if len(self.held) < SESSIONS:
            self.held.append(Held(self.engine.open_session(SessionSpec("team-a", SCALE, 0))))

    @rule(which=st.integers(0, 9), tokens=st.sampled_from([1, 1, 6, CHUNK - 1, CHUNK, CHUNK + 9]))
    def append(self, which: int, tokens: int) -> None:
        held = self.pick(which)
        if held is not None:
            self.go_on(held, tokens)

    def go_on(self, held: Held, tokens: int = 1) -> None:
        """One step, each of whose answers is compared."""
        if held.frontier + tokens > MOST:
            return
        shape = (LAYERS, tokens)
        k = torch.randn(*shape, KV_HEADS, HEAD_DIM, generator=self.random)
        v = torch.randn(*shape, KV_HEADS, HEAD_DIM, generator=self.random)
        q = torch.randn(*shape, QUERY_HEADS, HEAD_DIM, generator=self.random)
        first = len(held.rows)
        for at in range(tokens):
            place = held.next + at
            row = Row(held.frontier + at, place, place, k[:, at].double().numpy(), v[:, at].double().numpy())
            held.rows.append(row)
        held.step += 1
        for layer in range(LAYERS):
            answer = self.engine.step(
                StepRequest(
                    held.handle.session_id,
                    held.handle.generation,
                    held.step,
                    layer,
                    held.next,
                    k[layer],
                    v[layer],
                    held.next,
                    q[layer],
                    held.next,
                    position_epoch=held.epoch,
                )
            )
            for at in (0, tokens - 1):
                rows = held.rows[: first + at + 1]
                wanted = attention(rows, layer, q[layer, at].double().numpy())
                assert np.abs(answer.out[at].double().numpy() - wanted).max() < 2e-5
            receipt = answer.receipt
            assert receipt.rows_attended == len(held.rows)
            assert receipt.position_epoch == held.epoch
            assert receipt.frontier == held.next + tokens
            label = ExactnessClass.EXACT_OVER_EDITED_HISTORY if held.edited else ExactnessClass.EXACT
            assert receipt.exactness is label
        held.frontier += tokens
        held.next += tokens
        while len(held.chunks) * CHUNK < held.frontier:
            held.chunks.append(next(self.names))

    # Edits.

    def edit(self, held: Held, operation: Operation) -> bool:
        answer = self.engine.edit_session(
            EditRequest(held.handle.session_id, held.handle.generation, operation, held.epoch)
        )
        held.epoch += answer.changed
        assert answer.position_epoch == held.epoch
        return answer.changed

    def settle(self, held: Held, operation: Operation, before: tuple[object, ...]) -> None:
        """Gives the edit to the engine and compares what the model has become."""
        # A row that was computed elsewhere and moved back has another history all the same.
        unedited = [(row, row, row) for row in range(held.frontier)]
        stand = [(row.index, row.stored, row.position) for row in held.rows]
        held.edited = held.next != held.frontier or stand != unedited
        after = (held.frontier, held.next, [(row.index, row.position) for row in held.rows])
        assert self.edit(held, operation) == (after != before)
        if isinstance(operation, Drop):
            self.forget(held)
        if after != before:
            self.go_on(held)

    def state(self, held: Held) -> tuple[object, ...]:
        return (held.frontier, held.next, [(row.index, row.position) for row in held.rows])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), to=st.integers(0, MOST))
    def truncate(self, which: int, to: int) -> None:
        held = self.pick(which)
        assert held is not None
        before, to = self.state(held), min(to, held.next)
        held.rows = [row for row in held.rows if row.position < to]
        held.frontier, held.next = held.rows[-1].index + 1 if held.rows else 0, to
        chunk, rest = divmod(held.frontier, CHUNK)
        was_open = before[0] // CHUNK == chunk  # type: ignore[operator]
        kept = held.chunks[:chunk]
        if rest:
            kept.append(held.chunks[chunk] if was_open else next(self.names))
        held.chunks = kept
        self.settle(held, Truncate(to), before)

    @precondition(lambda self: self.held)
    @rule(
        which=st.integers(0, 9), at=st.integers(0, MOST), count=st.sampled_from([1, 5, CHUNK, 2 * CHUNK + 3])
    )
    def drop(self, which: int, at: int, count: int) -> None:
        held = self.pick(which)
        assert held is not None
        before = self.state(held)
        at = at % (held.next or 1)
        last = min(held.next, at + count)
        ranges = ((at, last),) if at < last else ()
        held.rows = [row for row in held.rows if not any(s <= row.position < e for s, e in ranges)]
        self.settle(held, Drop(ranges), before)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def compact(self, which: int) -> None:
        held = self.pick(which)
        assert held is not None
        before = self.state(held)
        held.rows = [replace(row, position=place) for place, row in enumerate(held.rows)]
        held.next = len(held.rows)
        self.settle(held, Reposition(), before)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), at=st.integers(0, MOST), by=st.sampled_from([-3, 0, 1, 40, 100_000]))
    def move(self, which: int, at: int, by: int) -> None:
        held = self.pick(which)
        assert held is not None
        before = self.state(held)
        at = at % (held.next or 1)
        if at >= held.next or at + by < 0:
            return
        operation = Reposition((Move(at, held.next, at + by),))
        moved = [replace(row, position=row.position + by * (row.position >= at)) for row in held.rows]
        if any(a.position >= b.position for a, b in itertools.pairwise(moved)):
            with pytest.raises(CoreError, match=r"reposition\.moves") as refused:
                self.edit(held, operation)
            assert refused.value.reason is Reason.BAD_ARGUMENT
            return
        held.rows = moved
        held.next = moved[-1].position + 1 if moved else 0
        self.settle(held, operation, before)

    def forget(self, held: Held) -> None:
        """Whole chunks of which nothing is seen are given up."""
        seen = {row.index // CHUNK for row in held.rows}
        for chunk in range(held.frontier // CHUNK):
            if chunk not in seen:
                held.chunks[chunk] = None

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        held = self.pick(which)
        assert held is not None
        if len(self.held) == SESSIONS:
            return
        handle = self.engine.fork_session(
            ForkRequest(held.handle.session_id, held.handle.generation, position_epoch=held.epoch)
        )
        chunks = list(held.chunks)
        if held.frontier % CHUNK:
            chunks[-1] = next(self.names)
        self.held.append(replace(held, handle=handle, rows=list(held.rows), chunks=chunks))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def stale(self, which: int) -> None:
        """A frame that was meant for other positions is refused, and so is an edit."""
        held = self.pick(which)
        assert held is not None
        name, generation = held.handle.session_id, held.handle.generation
        with pytest.raises(CoreError) as refused:
            self.engine.edit_session(EditRequest(name, generation, Drop(((0, 1),)), held.epoch + 1))
        assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH

    # Tiers.

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), tier=st.integers(0, 2))
    def move_between_tiers(self, number: int, tier: int) -> None:
        store = self.engine._store
        lines = [int(line) for at in range(3) if at != tier for line in store.directory.sealed_in(at)]
        if not lines:
            return
        line = lines[number % len(lines)]
        kind = MoveKind.DEMOTE if tier > int(store.directory.tier[line]) else MoveKind.PROMOTE
        try:
            store.transactions.run(kind, line, tier)
        except MoveRefused:
            return
        assert int(store.directory.tier[line]) == tier

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        held = self.held.pop(which % len(self.held))
        assert self.engine.close_session(held.handle.session_id, held.handle.generation) == held.frontier

    # Always.

    @invariant()
    def every_chunk_is_somebodys_and_counted_once(self) -> None:
        names = {name for held in self.held for name in held.chunks if name is not None}
        stats = self.engine.stats()
        assert stats.chunks == len(names) * LAYERS
        sealed = sum(granted for granted in (self.engine._parts.ledger.granted(tier) for tier in range(3)))
        # One slot a sealed chunk, and one a layer that each session's open chunk has or will have.
        ends = {held.chunks[-1] for held in self.held if held.frontier % CHUNK}
        assert sealed == (len(names - ends) + len(self.held)) * LAYERS
        self.engine._store.directory.check()

    def teardown(self) -> None:
        for held in self.held:
            self.engine.close_session(held.handle.session_id, held.handle.generation)
        assert self.engine.stats().chunks == 0
        assert sum(self.engine._parts.ledger.granted(tier) for tier in range(3)) == 0
        self.stack.close()
        shutil.rmtree(self.folder)


TestEdited = Edited.TestCase
TestEdited.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
