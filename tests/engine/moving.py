"""Rows of sessions on the move between the steps of a model, and what their engine says of where they lie.

What a test meant to move counts for nothing here: promoted, demoted and read is what the engine lists and
what receipts say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_core.engine import CacheEngine
from kvtier_core.receipts import ChunkInfo, StepReceipt
from kvtier_core.transactions import MoveKind, MoveRefused
from tests.engine.exactness import CHUNK_BYTES, CHUNK_TOKENS
from tests.engine.planned import LAYERS, PlannedSession

ROW_BYTES = CHUNK_BYTES // CHUNK_TOKENS
Listing = dict[tuple[str, int, int], ChunkInfo]


@dataclass(frozen=True)
class Moved:
    """Chunks that the engine listed in a slower tier than a moment before, and in a faster one; each as often
    as sessions hold it."""

    demoted: int
    promoted: int


def listed(sessions: Sequence[PlannedSession]) -> Listing:
    """Published chunks by session, layer and chunk."""
    return {
        (info.session_id, info.layer, info.chunk): info
        for session in sessions
        for info in session.engine.list_chunks(session.handle.session_id, session.handle.generation)
    }


def move_rows(
    sessions: Sequence[PlannedSession], rng: random.Random, count: int, back: bool = False
) -> Moved:
    """Demotes and promotes about `count` of the chunks that the sessions list, any to any tier that takes it.
    back: those that were demoted come back to where they were, and nothing else is promoted."""
    engine = sessions[0].engine
    before = listed(sessions)
    homes = {_line(engine, key): _rank(engine, info) for key, info in before.items()}
    slowest = len(engine._store.tiers) - 1
    if all(tier == slowest for tier in homes.values()):
        _make_room(engine, count)
        promoted, middle = _moved(sessions, before, lambda: _any(engine, homes, rng, count, MoveKind.PROMOTE))
        demoted, _ = _moved(sessions, middle, lambda: _any(engine, homes, rng, count, MoveKind.DEMOTE))
        return Moved(demoted[0], promoted[1])
    demoted, middle = _moved(sessions, before, lambda: _any(engine, homes, rng, count, MoveKind.DEMOTE))
    if back:
        promoted, _ = _moved(sessions, middle, lambda: _bring_back(engine, homes))
    else:
        promoted, _ = _moved(sessions, middle, lambda: _any(engine, homes, rng, count, MoveKind.PROMOTE))
    return Moved(demoted[0], promoted[1])


def check_reads(receipts: Sequence[StepReceipt], session: PlannedSession, listing: Listing) -> None:
    """Whether a step of one token read each listed chunk from the tier that lists it, and the session's other
    rows from one tier besides. A row that begins a chunk is attended from its frame."""
    assert len(receipts) == LAYERS
    for layer, receipt in enumerate(receipts):
        mine = [
            info
            for (name, at, _), info in listing.items()
            if (name, at) == (session.handle.session_id, layer)
        ]
        others = Counter(receipt.bytes_by_tier)
        for info in mine:
            others[info.tier_class] -= info.rows * ROW_BYTES
        rows = receipt.frontier - sum(info.rows for info in mine) - (receipt.frontier % CHUNK_TOKENS == 1)
        assert min(others.values()) >= 0, (layer, dict(receipt.bytes_by_tier), mine)
        assert sum(others.values()) == rows * ROW_BYTES, (layer, dict(receipt.bytes_by_tier), mine)


def _moved(
    sessions: Sequence[PlannedSession], before: Listing, move: Callable[[], None]
) -> tuple[tuple[int, int], Listing]:
    """How many chunks are listed in slower tiers after `move`, and how many in faster ones; the listing."""
    engine = sessions[0].engine
    move()
    after = listed(sessions)
    ranks = [(_rank(engine, before[key]), _rank(engine, after[key])) for key in before]
    return (sum(a < b for a, b in ranks), sum(a > b for a, b in ranks)), after


def _rank(engine: CacheEngine, info: ChunkInfo) -> int:
    return [tier.name for tier in engine._store.tiers].index(info.tier_class)


def _line(engine: CacheEngine, key: tuple[str, int, int]) -> int:
    session, layer, chunk = key
    return engine._sessions[session].layers[layer].lines[chunk]


def _make_room(engine: CacheEngine, count: int) -> None:
    """Others' chunks, and those that are not listed yet, go down, so that these have somewhere to go."""
    for session in list(engine._sessions.values()):
        engine.demote_session(session.session_id, session.generation, count)


def _any(engine: CacheEngine, lines: dict[int, int], rng: random.Random, count: int, kind: MoveKind) -> None:
    went = 0
    for line in rng.sample(sorted(lines), len(lines)):
        at = int(engine._store.directory.tier[line])
        demote = kind is MoveKind.DEMOTE
        tiers = range(at + 1, len(engine._store.tiers)) if demote else range(at)
        if tiers and went < count:
            went += _went(engine, kind, line, rng.choice(tiers))


def _bring_back(engine: CacheEngine, homes: dict[int, int]) -> None:
    for line, home in homes.items():
        if int(engine._store.directory.tier[line]) != home:
            assert _went(engine, MoveKind.PROMOTE, line, home)


def _went(engine: CacheEngine, kind: MoveKind, line: int, tier: int) -> bool:
    try:
        engine._store.transactions.run(kind, line, tier)
    except MoveRefused:
        return False
    return True
