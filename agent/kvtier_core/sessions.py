"""One session's rows: per layer a frontier, sealed chunks and one open chunk; appended frame by frame.

Why it exists: a frame is accepted as a whole or not at all. Rows are written beyond the frontier, where
nobody looks, and become rows when the answer exists. It must not know attention or selectors.

Appending: `reserve` takes every credit and slot and writes invisible rows; `settle` does the last I/O that
can fail; `commit` cannot fail; `abort` gives all back.

Two locks: the engine's, held for a whole frame, so that a session's lines are its frame's; and the metadata
lock, shared with the block store and held only while directory, ledger and slot tables change, never while
bytes move or answers are computed. Reading a session's own lines needs no metadata lock: nobody else ever
changes them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvtier_core.appends import NO_LINE as NO_LINE
from kvtier_core.appends import Append as Append
from kvtier_core.appends import LayerState as LayerState
from kvtier_core.appends import SealedPart as SealedPart
from kvtier_core.appends import Session as Session
from kvtier_core.credits import CreditLedger
from kvtier_core.directory import ChunkState, Directory, logical_id, recency_key
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import chunk_digest
from kvtier_core.layout import ChunkLayout
from kvtier_core.placement import Placement
from kvtier_core.tiers.base import BlockIdentity, PoolTier, SlotRef, Tier, seal_checksum
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.transactions import Transactions


class RowStore:
    """Rows of all sessions of one engine. Lines' identities are kept here, one per sealed chunk. lock: of
    metadata, taken for each short step. moved: told of each session whose chunk has another place now, under
    that lock."""

    def __init__(
        self,
        layout: ChunkLayout,
        tiers: list[Tier],
        ledger: CreditLedger,
        directory: Directory,
        lock: threading.RLock | None = None,
    ) -> None:
        self.layout = layout
        self.lock = lock or threading.RLock()
        self.tiers = tiers
        self.ledger = ledger
        self.directory = directory
        self.identities: dict[int, BlockIdentity] = {}
        self._owners: dict[int, tuple[Session, ...]] = {}
        self._borrowed: dict[int, tuple[int, int]] = {}
        self._lent: Counter[tuple[int, int]] = Counter()
        self._epochs = 0
        self.moved: Callable[[Session, int], object] = lambda session, line: None
        self.transactions = Transactions(directory, ledger, tiers, self.identity_of, self._published)
        self.placement: Placement

    @property
    def cache_generation(self) -> int:
        return self.transactions.cache_generation

    @property
    def chunks(self) -> int:
        """Chunks of all sessions, open ones included; one that several sessions share counts once."""
        return len(self._owners)

    def owners(self, line: int) -> tuple[Session, ...]:
        """Sessions that hold a line; it is freed when the last of them lets go."""
        return self._owners[line]

    def identity_of(self, line: int, replica_generation: int) -> BlockIdentity:
        """What a sealed line's copy of that replica generation must be."""
        known = self.identities[line]
        if known.replica_generation == replica_generation:
            return known
        return BlockIdentity(
            chunk_digest=known.chunk_digest,
            logical=known.logical,
            replica_generation=replica_generation,
            rows=known.rows,
            length=known.length,
            checksum=known.checksum,
        )

    def _published(self, line: int, identity: BlockIdentity) -> None:
        self.identities[line] = identity
        for session in self._owners[line]:
            session.snapshot_generation += 1
            self.moved(session, line)

    def start_step(self, session: Session) -> None:
        """Names the recency of what the session seals from now on."""
        self._epochs += 1
        session.epoch = self._epochs

    # Appending.

    def reserve(
        self, session: Session, layer: int, k: Tensor, v: Tensor, deadline: float | None = None
    ) -> Append:
        """Takes what the rows need and writes those that fit the open chunk, beyond the frontier. Cached
        blocks that stand in the way leave, until `deadline`. NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE;
        nothing is held then."""
        state = session.layers[layer]
        append = Append(session, layer, state.frontier, k, v)
        size = self.layout.chunk_tokens
        first, end = append.first, append.end
        if end == first:
            return append
        try:
            # Newest first, so that it gets the fastest home.
            for chunk in reversed(range(first // size, end // size)):
                append.sealed.append(self._reserve_sealed(append, state, chunk, deadline))
            append.sealed.reverse()
            if end % size:
                append.open_chunk = end // size
                append.open_from = max(first, append.open_chunk * size)
                if state.open_line == NO_LINE or append.open_chunk != first // size:
                    self._reserve_open(append, state, deadline)
            self._write_invisible(append, state)
        except BaseException:
            self.abort(append)
            raise
        return append

    def _reserve_sealed(
        self, append: Append, state: LayerState, chunk: int, deadline: float | None
    ) -> SealedPart:
        size = self.layout.chunk_tokens
        tier, credit = self.placement.home_for_sealed(
            state.open_tier,
            recency_key(append.session.epoch, chunk),
            deadline,
            self.placement.rule.home(append.session.generation, chunk),
        )
        part = SealedPart(
            chunk=chunk,
            tier=tier,
            credit=credit,
            ref=None,
            first=max(append.first, chunk * size) - append.first,
            last=(chunk + 1) * size - append.first,
        )
        if chunk == append.first // size:
            part.line = state.open_line
        if part.line == NO_LINE or tier != state.open_tier:
            try:
                part.ref = self.placement.slot(tier, self._logical(append, chunk), deadline)
            except CoreError:
                with self.lock:
                    self.ledger.release(credit)
                raise
        return part

    def _reserve_open(self, append: Append, state: LayerState, deadline: float | None) -> None:
        """The open credit pays this slot. While the chunk before still lies in it, it comes at commit."""
        leaving = (
            bool(append.sealed) and append.sealed[0].line != NO_LINE and append.sealed[0].ref is not None
        )
        if not leaving:
            logical = self._logical(append, append.open_chunk)
            append.open_ref = self.placement.slot(state.open_tier, logical, deadline)

    def _logical(self, append: Append, chunk: int) -> int:
        return logical_id(append.session.number, append.layer, chunk)

    def pool(self, tier: int) -> PoolTier:
        found = self.tiers[tier]
        if not isinstance(found, PoolTier):
            raise CoreError(Reason.TIER_INCAPABLE, f"tier {found.name} cannot hold an open chunk")
        return found

    def _write_invisible(self, append: Append, state: LayerState) -> None:
        if state.open_line == NO_LINE:
            return
        size = self.layout.chunk_tokens
        at = append.first % size
        count = min(int(append.k.shape[0]), size - at)
        line = state.open_line
        self.pool(state.open_tier).append(self.ref(line), at, append.k[:count], append.v[:count])

    def ref(self, line: int) -> SlotRef:
        return SlotRef(int(self.directory.slot[line]), int(self.directory.slot_generation[line]))

    def settle(self, append: Append) -> None:
        """Writes and validates the copies of chunks that leave their tier as they are sealed. The last step
        that may fail; call `abort` then."""
        for part in append.sealed:
            tier = self.tiers[part.tier]
            if part.ref is None:
                part.identity = self._seal_identity(append, part, self._open_payload(append))
                continue
            if part.line != NO_LINE:
                payload = self._open_payload(append)
            else:
                rows = slice(part.first, part.last)
                payload = self.layout.assemble(append.k[rows], append.v[rows])
            part.identity = self._seal_identity(append, part, payload)
            done = tier.write(part.ref, payload, part.identity)
            if done != part.identity.length:
                raise CoreError(
                    Reason.SHORT_COPY,
                    f"{done} of {part.identity.length} bytes reached tier {tier.name}",
                    {"tier": tier.name},
                )
            tier.validate(part.ref, part.identity)

    def _open_payload(self, append: Append) -> Tensor:
        state = append.session.layers[append.layer]
        return self.pool(state.open_tier).view(self.ref(state.open_line))

    def _seal_identity(self, append: Append, part: SealedPart, payload: Tensor) -> BlockIdentity:
        size = self.layout.chunk_tokens
        stays = part.ref is None
        with self.lock:
            issue = self.directory.issue_generation
            generation = int(self.directory.generation[part.line]) if stays else issue()
        return BlockIdentity(
            chunk_digest=chunk_digest(
                append.session.source,
                append.layer,
                self.layout.kv_heads,
                part.chunk * size,
                (part.chunk + 1) * size,
            ),
            logical=self._logical(append, part.chunk),
            replica_generation=generation,
            rows=size,
            length=self.layout.payload_bytes,
            checksum=seal_checksum(payload),
        )

    def commit(self, append: Append) -> None:
        """Makes the rows rows: directory and frontier change together. Cannot fail."""
        state = append.session.layers[append.layer]
        with self.lock:
            for part in append.sealed:
                self._commit_sealed(append, state, part)
            ref = self._open_slot(append, state)
            if ref is None and append.open_chunk != NO_LINE:
                self._note_open(append, state)
        if ref is not None:
            self._commit_open(append, state, ref)
        state.frontier = append.end

    def _commit_sealed(self, append: Append, state: LayerState, part: SealedPart) -> None:
        directory = self.directory
        assert part.identity is not None
        identity = part.identity
        if part.ref is not None:
            self.tiers[part.tier].publish(part.ref)
        line = part.line
        if line == NO_LINE:
            assert part.ref is not None
            line = self.insert(
                append.session, append.layer, part.chunk, part.tier, part.ref, identity.replica_generation
            )
        elif part.ref is not None:
            old = self.ref(line)
            directory.publish(
                line,
                tier=part.tier,
                slot=part.ref.slot,
                slot_generation=part.ref.generation,
                generation=identity.replica_generation,
            )
            self.tiers[state.open_tier].release(old)
        directory.state[line] = ChunkState.SEALED
        directory.rows[line] = self.layout.chunk_tokens
        directory.checksum[line] = identity.checksum
        directory.credit[line] = part.credit
        directory.recency[line] = recency_key(append.session.epoch, part.chunk)
        last = append.first + part.last - 1
        directory.producer[line] = append.session.producer_at(last)
        self.identities[line] = identity
        state.open_line = NO_LINE

    def insert(
        self, session: Session, layer: int, chunk: int, tier: int, ref: SlotRef, generation: int
    ) -> int:
        """A line of the session's own for a chunk whose rows lie in `ref`, after its other lines. The
        metadata lock is held."""
        line = self.directory.insert(
            logical_id(session.number, layer, chunk),
            tier=tier,
            slot=ref.slot,
            slot_generation=ref.generation,
            generation=generation,
            state=ChunkState.OPEN,
        )
        session.layers[layer].lines.append(line)
        self._owners[line] = (session,)
        return line

    def _open_slot(self, append: Append, state: LayerState) -> SlotRef | None:
        """The slot of a new open chunk: kept for it, or just come free. None when none begins."""
        if append.open_chunk == NO_LINE or state.open_line != NO_LINE:
            return None
        kept, append.open_ref = append.open_ref, None
        return kept or self.pool(state.open_tier).reserve(self._logical(append, append.open_chunk))

    def _commit_open(self, append: Append, state: LayerState, ref: SlotRef) -> None:
        """Fills a new open chunk, and then lists it."""
        size = self.layout.chunk_tokens
        tier = self.pool(state.open_tier)
        tier.adopt(ref)
        rows = slice(append.open_from - append.first, append.end - append.first)
        tier.append(ref, append.open_from % size, append.k[rows], append.v[rows])
        with self.lock:
            generation = self.directory.issue_generation()
            state.open_line = self.insert(
                append.session, append.layer, append.open_chunk, state.open_tier, ref, generation
            )
            self._note_open(append, state)

    def _note_open(self, append: Append, state: LayerState) -> None:
        size = self.layout.chunk_tokens
        line = state.open_line
        self.directory.rows[line] = append.end - append.open_chunk * size
        self.directory.producer[line] = append.session.producer_at(append.end - 1)

    def abort(self, append: Append) -> None:
        """Gives back what the frame held. The session is as before; rows beyond the frontier do not exist."""
        with self.lock:
            for part in append.sealed:
                if part.ref is not None:
                    self.tiers[part.tier].release(part.ref)
                self.ledger.release(part.credit)
            append.sealed.clear()
            if append.open_ref is not None:
                self.tiers[append.session.layers[append.layer].open_tier].release(append.open_ref)
                append.open_ref = None

    # Ending.

    def drop(self, session: Session) -> int:
        """Lets go of every chunk and credit of a session; returns its rows (layer 0's frontier)."""
        rows = session.layers[0].frontier if session.layers else 0
        for state in session.layers:
            # A layer at a time: a long session must not hold the lock for all of its chunks.
            with self.lock:
                for line in state.lines:
                    self.let_go(session, line)
                state.lines.clear()
                state.open_line = NO_LINE
        with self.lock:
            self.ledger.release(session.open_grant)
        self.placement.rule.closed(session.generation)
        return rows

    # Sharing.

    def share(self, session: Session, line: int) -> None:
        """One more owner of a sealed line, which is copied by nobody: its bytes never change. Its slot stays
        paid by the credit that it has. The metadata lock is held."""
        self._owners[line] = (*self._owners[line], session)

    def lendable(self, chunks: Sequence[Sequence[tuple[int, int]]]) -> int:
        """Of how many leading chunks copies of blocks, each (line, tier), may be held for sessions too: all
        that sessions started from hold at most half of a tier's slots, a block of many sessions once. The
        metadata lock is held."""
        held = Counter(tier for _, tier in self._lent)
        seen: set[tuple[int, int]] = set()
        for count, places in enumerate(chunks):
            fresh = {place for place in places if place not in self._lent} - seen
            seen |= fresh
            held.update(tier for _, tier in fresh)
            if any(held[tier] > self.ledger.capacity(tier) // 2 for _, tier in fresh):
                return count
        return len(chunks)

    def borrow(self, session: Session, layer: int, chunk: int, block: int, tier: int, ref: SlotRef) -> None:
        """A sealed line of the session's own over the slot where a block's copy lies: leased until the line
        goes, so that it neither leaves nor moves; the block pays for it. The caller holds the copy meanwhile.
        The metadata lock is held."""
        directory, size = self.directory, self.layout.chunk_tokens
        directory.lease(block, tier)
        generation = directory.replica(block, tier).generation
        try:
            line = self.insert(session, layer, chunk, tier, ref, generation)
        except BaseException:
            directory.unlease(block, tier)
            raise
        self._borrowed[line] = (block, tier)
        self._lent[block, tier] += 1
        directory.state[line] = ChunkState.SEALED
        directory.rows[line] = size
        directory.checksum[line] = directory.checksum[block]
        directory.recency[line] = recency_key(session.epoch, chunk)
        directory.producer[line] = session.producer_at(0)
        # For the line's whole life: a placement that moved it would free a slot that is the block's.
        directory.readers[line] += 1
        self.identities[line] = BlockIdentity(
            chunk_digest=chunk_digest(
                session.source, layer, self.layout.kv_heads, chunk * size, (chunk + 1) * size
            ),
            logical=logical_id(session.number, layer, chunk),
            replica_generation=generation,
            rows=size,
            length=self.layout.payload_bytes,
            checksum=int(directory.checksum[block]),
        )

    def let_go(self, session: Session, line: int) -> None:
        """The session's hold of a line ends, and the line with its last owner; NO_LINE is held by nobody. The
        metadata lock is held."""
        if line == NO_LINE:
            return
        left = tuple(owner for owner in self._owners[line] if owner is not session)
        if left:
            self._owners[line] = left
        else:
            self._drop_line(line)

    def _drop_line(self, line: int) -> None:
        self.directory.state[line] = ChunkState.TOMBSTONED
        self.transactions.cancel_line(line)
        lent = self._borrowed.pop(line, None)
        if lent is None:
            self.tiers[int(self.directory.tier[line])].release(self.ref(line))
        else:
            self.directory.readers[line] -= 1
            self.directory.unlease(*lent)
            self._lent[lent] -= 1
            if not self._lent[lent]:
                del self._lent[lent]
        credit = int(self.directory.credit[line])
        if credit:
            self.ledger.release(credit)
        self.identities.pop(line, None)
        self._owners.pop(line, None)
        self.directory.remove(line)

    # Reading.

    def staging_job(self, line: int, deadline: float | None = None) -> Callable[[StagingBuffer], None]:
        """Brings a line's payload into a staging buffer when called. A sealed chunk is verified; an open one
        has no checksum yet, never left memory and is copied as it is."""
        tier, ref = self.tiers[int(self.directory.tier[line])], self.ref(line)
        if ChunkState(int(self.directory.state[line])) is not ChunkState.OPEN:
            return partial(tier.read, ref, self.identities[line], deadline=deadline)
        payload = tier.view(ref)

        def copy_open(buffer: StagingBuffer) -> None:
            buffer.payload.copy_(payload)

        return copy_open

    def read_rows(self, line: int, deadline: float | None = None) -> Tensor:
        """A verified copy of the line's payload [2, Hk, C, d] in host memory."""
        buffer = StagingBuffer(self.layout)
        self.staging_job(line, deadline)(buffer)
        return buffer.payload

    def rows_equal(
        self, session: Session, layer: int, first: int, k: Tensor, v: Tensor, deadline: float | None = None
    ) -> bool:
        """Whether rows [first, first + n) of a layer hold exactly these bytes. DEADLINE, and what reading
        them may refuse."""
        size = self.layout.chunk_tokens
        state = session.layers[layer]
        done = 0
        while done < k.shape[0]:
            position = first + done
            count = min(int(k.shape[0]) - done, size - position % size)
            payload = self.read_rows(state.lines[position // size], deadline)
            stored = payload[:, :, position % size : position % size + count].transpose(1, 2)
            given = torch.stack((k[done : done + count], v[done : done + count]))
            if not torch.equal(stored.contiguous().view(torch.int32), given.contiguous().view(torch.int32)):
                return False
            done += count
        return True
