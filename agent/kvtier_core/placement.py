"""Where chunks go when a tier is full: cached blocks make room, then the least recent chunk moves down.

Why it exists: contexts outgrow the fast tiers, and room must be made before rows are accepted. It must not
know attention, sessions' meaning or bytes. Budgets are per node: all sessions of a cache and its shared
blocks share a tier.

The engine's lock is held, the metadata lock only for single steps. So while a row looks for its place, what
comes free is claimed for it: a block that is stored meanwhile cannot take it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from kvtier_core.credits import CreditLedger, slots
from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.placements.homes import ByLane, ByRecency, Homes, homes_of
from kvtier_core.placements.preference import PlacementPreference
from kvtier_core.tiers.arena import ArenaSlots
from kvtier_core.tiers.base import SlotRef, Tier
from kvtier_core.transactions import MoveKind, MoveReason, MoveRefused, Transactions
from kvtier_crds.manifest import TierRole

MOVE_SECONDS = 5.0
"""The most that rows' way to another tier may take where nobody states a deadline."""
ROWS = b""
"""The namespace of sessions' rows, in tiers."""


class Yielding(Protocol):
    """Cached blocks, which leave when rows need their slots. Slots that a row waits for are claimed in the
    ledger before; the metadata lock is not held."""

    def leave(self, tier: int, count: int, deadline: float | None) -> bool:
        """Whether `count` slots of the tier are free for rows now, blocks having been dropped or moved down
        for that, until `deadline`."""
        ...


class NoBlocks:
    """A cache of sessions alone."""

    def leave(self, tier: int, count: int, deadline: float | None) -> bool:
        return False


def has_memory(tier: Tier) -> bool:
    """Whether a free slot of the tier can be a row's. Host memory is handed out in segments, and that of
    another namespace is none of ours."""
    return not isinstance(tier.slots, ArenaSlots) or tier.slots.arena.free_in(ROWS) > 0


class Placement:
    """Tiers by index, fastest first. A tier of role `staging` is nobody's home. `blocks` is set once they are
    there."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        roles: Sequence[TierRole],
        ledger: CreditLedger,
        directory: Directory,
        transactions: Transactions,
        lock: threading.RLock,
    ) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._directory = directory
        self._transactions = transactions
        self._lock = lock
        self.blocks: Yielding = NoBlocks()
        self.homes = [index for index, role in enumerate(roles) if role is not TierRole.STAGING]
        able = [index for index in self.homes if tiers[index].capability.appendable]
        resident = [index for index in able if roles[index] is TierRole.RESIDENT]
        self.open_homes: list[int] = resident or able
        self.rule = ByLane(ByRecency())
        """A placement policy's, and a candidate's for its own sessions."""

    def prefer(self, preference: PlacementPreference) -> None:
        self.rule.base = self.homes_by(preference)

    def homes_by(self, preference: PlacementPreference) -> Homes:
        """The rule that a preference asks for over these tiers."""
        sides = {tier: self._ledger.capacity(tier) for tier in self.open_homes}
        return homes_of(preference, sides)

    def check_fits(self, max_tokens: int, layers: int, layout: ChunkLayout) -> int:
        """Slots of a session at its longest. NO_DESTINATION_CAPACITY when all tiers together hold fewer."""
        wanted = layers * max(1, -(-max_tokens // layout.chunk_tokens))
        have = sum(self._ledger.capacity(index) for index in range(len(self._tiers)))
        if wanted > have:
            raise self.exhausted(
                f"{max_tokens} tokens need {wanted} chunks of {layout.payload_bytes} bytes, "
                f"all tiers together hold {have}"
            )
        return wanted

    def reserve_session(
        self, session: int, layers: int, slots: int, deadline: float | None = None
    ) -> tuple[list[int], int]:
        """As `reserve_open`, for a session that may grow to `slots`: first where the rule wants it."""
        try:
            return self.reserve_open(layers, deadline, wanted=self.rule.opened(session, slots))
        except BaseException:
            self.rule.closed(session)
            raise

    def reserve_open(
        self, layers: int, deadline: float | None = None, wanted: int | None = None
    ) -> tuple[list[int], int]:
        """One open slot per layer, all or nothing, in `wanted` and then fastest tier first, making room where
        blocks leave or sealed chunks can go down. Returns (tier of each layer, grant).
        NO_DESTINATION_CAPACITY with the numbers."""
        order: list[int] = []
        want: dict[int, int] = {}
        with ExitStack() as claims:
            for tier in sorted(self.open_homes, key=lambda tier: tier != wanted):
                missing = layers - len(order)
                if missing:
                    claims.enter_context(self._claim(tier, missing))
                    if self._ledger.available(tier) < missing:
                        self.blocks.leave(tier, missing, deadline)
                    want[tier] = self._room_for_open(tier, missing)
                    order += [tier] * want[tier]
            if len(order) < layers:
                raise self.exhausted(f"{layers} open chunks wanted, one a layer; {len(order)} fit")
            for tier, count in want.items():
                self.make_room(tier, count, deadline)
            with self._lock:
                return order, self._ledger.acquire(want)

    def _room_for_open(self, tier: int, wanted: int) -> int:
        """Slots of `tier` that are free, or can be by moving sealed chunks to free slots further down."""
        with self._lock:
            below = sum(self._ledger.available(lower) for lower in self.homes if lower > tier)
            movable = min(len(self._directory.sealed_in(tier)), below)
            return min(wanted, self._ledger.available(tier) + movable)

    def home_for_sealed(
        self, tier: int, recency: int, deadline: float | None = None, wanted: int | None = None
    ) -> tuple[int, int]:
        """A credit for one more sealed chunk: in `wanted`, the home that the rule gives it, if there is room
        without moving another row; else in `tier`, or below it when all that lie there are more recent or
        cannot move down. Returns (tier, grant). NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE."""
        if wanted is not None:
            with self._claim(wanted, 1):
                if self._has_room(wanted, deadline):
                    with self._lock:
                        return wanted, self._ledger.acquire({wanted: 1})
        for home in [item for item in self.homes if item >= tier]:
            with self._claim(home, 1):
                if self._has_room(home, deadline) or self._try_room(home, deadline, recency):
                    with self._lock:
                        return home, self._ledger.acquire({home: 1})
        raise self.exhausted("no tier takes one more sealed chunk")

    def make_room(self, tier: int, count: int = 1, deadline: float | None = None) -> None:
        """Demotes the least recent chunks of `tier` until `count` slots are free there."""
        while self._ledger.available(tier) < count:
            if not self._try_room(tier, deadline):
                raise self.exhausted(f"tier {self._tiers[tier].name} cannot free {count} slots")

    def send_down(self, lines: Sequence[int], most: int, deadline: float | None = None) -> int:
        """Moves up to `most` sealed chunks among `lines`, each to the slowest home with a free slot: what
        nobody uses makes way, and moves nobody else's. Returns how many moved by `deadline`, or in
        MOVE_SECONDS. After as many refusals, or one that is late, it is over, too: others wait meanwhile."""
        moved = refused = 0
        until = self._until(deadline)
        for tier in self.homes:
            with self._lock:
                here = self._directory.sealed_in(tier)
                there = set(here[self._directory.readers[here] == 0].tolist())
            for line in [line for line in lines if line in there]:
                for lower in reversed([item for item in self.homes if item > tier]):
                    if moved == most or refused >= most:
                        return moved
                    if self._late(until):
                        return moved
                    sent = self._send_down(line, lower, until)
                    if sent:
                        moved += 1
                        break
                    refused += sent is not None
        return moved

    def _send_down(self, line: int, lower: int, deadline: float | None) -> bool | None:
        """Whether the chunk moved; None: there is no free slot."""
        with self._claim(lower, 1):
            with self._lock:
                free = self._ledger.available(lower) >= 1 and has_memory(self._tiers[lower])
            if not free:
                return None
            try:
                self._demote(line, lower, deadline)
            except CoreError:
                return False
            return True

    def slot(self, tier: int, owner: int, deadline: float | None = None) -> SlotRef:
        """A slot whose credit is held. Memory may be another namespace's all the same, since it is handed out
        in segments: then blocks leave one. NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE."""
        try:
            with self._lock:
                return self._tiers[tier].reserve(owner, ROWS)
        except CoreError as error:
            full = error.reason is Reason.NO_DESTINATION_CAPACITY
            if not full or not self.blocks.leave(tier, 0, deadline):
                raise
        with self._lock:
            return self._tiers[tier].reserve(owner, ROWS)

    @contextmanager
    def _claim(self, tier: int, count: int) -> Iterator[None]:
        with self._lock:
            self._transactions.settle_detached()
            self._ledger.ledger.claim(slots(tier), count)
        try:
            yield
        finally:
            with self._lock:
                self._ledger.ledger.unclaim(slots(tier), count)

    def _has_room(self, tier: int, deadline: float | None) -> bool:
        """Whether one slot of a claimed tier is free, blocks having left for it where there are any."""
        with self._lock:
            free = self._ledger.available(tier) >= 1 and has_memory(self._tiers[tier])
        return free or self.blocks.leave(tier, 1, deadline)

    def _try_room(self, tier: int, deadline: float | None, recency: int | None = None) -> bool:
        """Moves the least recent chunk of `tier` down if it is at most as recent as `recency`."""
        with self._lock:
            lines = self._directory.sealed_in(tier)
            lines = lines[self._directory.readers[lines] == 0]
        if not len(lines) or (recency is not None and self._directory.recency[lines[0]] > recency):
            return False
        line = int(lines[0])
        moved = int(self._directory.recency[line])
        for lower in [item for item in self.homes if item > tier]:
            with self._claim(lower, 1):
                if self._has_room(lower, deadline) or self._try_room(lower, deadline, moved):
                    self._demote(line, lower, deadline)
                    return True
        return False

    def _until(self, deadline: float | None) -> float | None:
        """When a move ends at the latest; None where there is no clock."""
        clock = self._tiers[0].clock
        return clock() + MOVE_SECONDS if deadline is None and clock is not None else deadline

    def _late(self, until: float | None) -> bool:
        clock = self._tiers[0].clock
        return until is not None and clock is not None and clock() >= until

    def _demote(self, line: int, lower: int, deadline: float | None = None) -> None:
        """The whole move here and now, its bytes outside of the metadata lock, until `deadline` (DEADLINE
        then) or for MOVE_SECONDS (TRANSFER_TIMEOUT). Raises MoveRefused; the chunk is still where it was, and
        a slot in which bytes may arrive is nobody's until they cannot."""
        moves, until = self._transactions, self._until(deadline)
        with self._lock:
            move = moves.begin(MoveKind.DEMOTE, line, lower)
        try:
            with self._lock:
                moves.submit(move)
            done, error = moves.carry(move, until)
        except BaseException:
            with self._lock:
                moves.cancel(move)
            raise
        with self._lock:
            try:
                moves.complete(done, error)
            except MoveRefused as refused:
                if deadline is None or refused.code is not MoveReason.TRANSFER_TIMEOUT:
                    raise
                raise CoreError(Reason.DEADLINE, "the deadline passed before rows had moved") from refused
            moves.publish(move)
            moves.release(move)

    def exhausted(self, message: str) -> CoreError:
        """NO_DESTINATION_CAPACITY with free and total slots of each tier."""
        facts = {
            tier.name: f"{self._ledger.available(index)} of {self._ledger.capacity(index)} slots free"
            for index, tier in enumerate(self._tiers)
        }
        listed = ", ".join(f"{name}: {what}" for name, what in facts.items())
        return CoreError(Reason.NO_DESTINATION_CAPACITY, f"{message} ({listed})", facts)
