"""Fork and truncate, on rows: what is prepared and may fail, and what is committed and cannot.

Why it exists: an edit is all or nothing, and rows that two sessions share must never change under one of
them. Sealed chunks are shared by counting their owners; the open chunk is the only one that changes, so a
fork copies it, and a cut inside a sealed chunk goes on in a copy of its first rows. It must not know why an
edit is made, nor positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kvtier_core.appends import NO_LINE, LayerState, Session
from kvtier_core.directory import logical_id
from kvtier_core.errors import CoreError, Reason
from kvtier_core.sessions import RowStore
from kvtier_core.tiers.base import SlotRef


@dataclass(frozen=True, slots=True)
class Patience:
    """deadline: seconds on `clock`; None for none."""

    clock: Callable[[], float]
    deadline: float | None

    def check(self) -> None:
        """DEADLINE once it has passed."""
        if self.deadline is not None and self.clock() > self.deadline:
            raise CoreError(Reason.DEADLINE, "the deadline passed before the edit was done")


@dataclass(slots=True)
class Reopened:
    """A chunk that goes on growing from its first rows. k, v: float32 [n, Hk, d], None when its open line
    stays as it is. ref: the slot that it gets, None when that of the former open chunk comes free for it."""

    k: Tensor | None = None
    v: Tensor | None = None
    ref: SlotRef | None = None


@dataclass(slots=True)
class Cut:
    """A truncation on its way: rows [0, to) of each layer stay. number: names the lines that come after."""

    session: Session
    to: int
    number: int
    layers: list[Reopened] = field(default_factory=list)


@dataclass(slots=True)
class Branch:
    """A fork on its way. opened: the slot of each layer's open chunk, already filled; None without one."""

    parent: Session
    child: Session
    opened: list[SlotRef | None] = field(default_factory=list)


class Branching:
    """Changes sessions of one store. The engine's lock is held; patience is asked between layers."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    # Truncate.

    def loses_lines(self, session: Session, to: int) -> bool:
        """Whether a cut at row `to` takes a line from the session, and not just rows from its open chunk."""
        chunk, rows = divmod(to, self._store.layout.chunk_tokens)
        stays = chunk + 1 if rows else chunk
        return any(
            len(state.lines) > stays or (rows > 0 and state.lines[chunk] != state.open_line)
            for state in session.layers
        )

    def prepare_cut(self, session: Session, to: int, number: int, patience: Patience) -> Cut:
        """Reads what a cut at row `to` must keep of the chunk that it goes through. `to` is at most the
        frontier of every layer. Typed errors of tiers; nothing is held then."""
        cut = Cut(session, to, number)
        try:
            for layer, state in enumerate(session.layers):
                patience.check()
                cut.layers.append(self._reopened(cut, layer, state, patience.deadline))
        except BaseException:
            self.abort_cut(cut)
            raise
        return cut

    def _reopened(self, cut: Cut, layer: int, state: LayerState, deadline: float | None) -> Reopened:
        store = self._store
        chunk, rows = divmod(cut.to, store.layout.chunk_tokens)
        if not rows or state.lines[chunk] == state.open_line:
            return Reopened()
        k, v = store.layout.rows(store.read_rows(state.lines[chunk], deadline), rows)
        kept = Reopened(k.clone(), v.clone())
        if state.open_line == NO_LINE:
            logical = logical_id(cut.number, layer, chunk)
            kept.ref = store.placement.slot(state.open_tier, logical, deadline)
        return kept

    def abort_cut(self, cut: Cut) -> None:
        """Gives back what the cut held. The session is as before."""
        with self._store.lock:
            for state, kept in zip(cut.session.layers, cut.layers, strict=False):
                if kept.ref is not None:
                    self._store.tiers[state.open_tier].release(kept.ref)
        cut.layers.clear()

    def commit_cut(self, cut: Cut) -> None:
        """Cannot fail. Lines that nobody else holds are freed."""
        cut.session.number = cut.number
        for layer, kept in enumerate(cut.layers):
            self._commit_layer(cut, layer, kept)

    def _commit_layer(self, cut: Cut, layer: int, kept: Reopened) -> None:
        store, session = self._store, cut.session
        state = session.layers[layer]
        chunk, rows = divmod(cut.to, store.layout.chunk_tokens)
        stays = chunk + (1 if rows and kept.k is None else 0)
        ref: SlotRef | None = None
        # A layer at a time: a long session must not hold the lock for all of its chunks.
        with store.lock:
            for line in state.lines[stays:]:
                store.let_go(session, line)
            del state.lines[stays:]
            state.frontier = cut.to
            if not rows:
                state.open_line = NO_LINE
                return
            if kept.k is not None:
                # The former open chunk's slot is free now, and must not become another's.
                tier = store.pool(state.open_tier)
                ref = kept.ref or tier.reserve(logical_id(session.number, layer, chunk))
        if ref is not None and kept.k is not None and kept.v is not None:
            tier.adopt(ref)
            tier.append(ref, 0, kept.k, kept.v)
        with store.lock:
            if ref is not None:
                generation = store.directory.issue_generation()
                state.open_line = store.insert(session, layer, chunk, state.open_tier, ref, generation)
            store.directory.rows[state.open_line] = rows
            store.directory.producer[state.open_line] = session.producer_at(cut.to - 1)

    # Drop.

    def forget_chunk(self, session: Session, chunk: int) -> None:
        """Lets go of a sealed chunk of which nothing is seen, in every layer; again is nothing. Cannot
        fail."""
        with self._store.lock:
            for state in session.layers:
                self._store.let_go(session, state.lines[chunk])
                state.lines[chunk] = NO_LINE

    # Fork.

    def prepare_branch(self, parent: Session, child: Session, patience: Patience) -> Branch:
        """Fills the child's open chunks, which its open credit pays for. The child's layers hold their open
        tiers and nothing else yet. Typed errors of tiers; nothing but the credit is held then."""
        branch = Branch(parent, child)
        try:
            for layer, state in enumerate(parent.layers):
                patience.check()
                branch.opened.append(self._copy_open(branch, layer, state, patience.deadline))
        except BaseException:
            self.abort_branch(branch)
            raise
        return branch

    def _copy_open(
        self, branch: Branch, layer: int, state: LayerState, deadline: float | None
    ) -> SlotRef | None:
        if state.open_line == NO_LINE:
            return None
        store, home = self._store, branch.child.layers[layer].open_tier
        tier = store.pool(home)
        chunk, rows = divmod(state.frontier, store.layout.chunk_tokens)
        payload = store.pool(state.open_tier).view(store.ref(state.open_line))
        ref = store.placement.slot(home, logical_id(branch.child.number, layer, chunk), deadline)
        try:
            tier.adopt(ref)
            tier.append(ref, 0, *store.layout.rows(payload, rows))
        except BaseException:
            with store.lock:
                tier.release(ref)
            raise
        return ref

    def abort_branch(self, branch: Branch) -> None:
        """Gives back the child's slots; its open credit is the caller's."""
        with self._store.lock:
            for state, ref in zip(branch.child.layers, branch.opened, strict=False):
                if ref is not None:
                    self._store.tiers[state.open_tier].release(ref)
        branch.opened.clear()

    def commit_branch(self, branch: Branch) -> None:
        """Cannot fail. The child has the parent's rows."""
        store, child = self._store, branch.child
        for layer, (state, ref) in enumerate(zip(branch.parent.layers, branch.opened, strict=True)):
            own = child.layers[layer]
            with store.lock:
                for line in state.lines:
                    if line == NO_LINE or line != state.open_line:
                        own.lines.append(line)
                    if line not in (NO_LINE, state.open_line):
                        store.share(child, line)
                own.frontier = state.frontier
                if ref is None:
                    continue
                chunk, rows = divmod(state.frontier, store.layout.chunk_tokens)
                generation = store.directory.issue_generation()
                own.open_line = store.insert(child, layer, chunk, own.open_tier, ref, generation)
                store.directory.rows[own.open_line] = rows
                store.directory.producer[own.open_line] = child.producer_at(own.frontier - 1)
