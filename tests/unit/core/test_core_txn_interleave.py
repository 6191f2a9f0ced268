"""Thousands of interleavings of stores, moves, faults, pins, reads, evictions and deletions.

What must hold after each step: no byte is served that was not published under that key and generation, a
block that nobody gave up survives, credits are conserved, no slot has two owners and none into which bytes
may still arrive is used again. A failing seed is printed with its actions and can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier_core.transactions.machine import MoveMachine
from kvtier_core.transactions.moves import Move
from kvtier_core.transactions.reasons import TxnState
from tests.unit.core.interleave import InterleavingFailed, explore, replay
from tests.unit.core.txnworld import BlockWorld

WANTED = {
    "put",
    "store",
    "move",
    "cancel",
    "land",
    "arrive",
    "drain",
    "fail",
    "again",
    "spill",
    "ghost",
    "reap",
    "tick",
    "pin",
    "unpin",
    "drop",
    "spoil",
    "delete",
    "pump",
    "writer",
    "join",
    "leave",
    "reset",
    "generation",
}

SEEDS = 1200


@pytest.mark.parametrize("part", range(4))
def test_no_interleaving_serves_loses_or_leaks(part: int) -> None:
    seen = explore(BlockWorld, range(part * SEEDS // 4, (part + 1) * SEEDS // 4), steps=45)
    assert seen >= WANTED


def test_a_seed_repeats_its_interleaving() -> None:
    assert replay(BlockWorld, 7, 45) == replay(BlockWorld, 7, 45)
    assert replay(BlockWorld, 7, 45) != replay(BlockWorld, 8, 45)


# The harness can fail: with one guard taken out, some interleaving breaks an invariant and its seed shows it.


def _no_quarantine(self: MoveMachine, move: Move) -> None:
    self._tiers[move.tier].release(move.destination)


def _no_lease(self: MoveMachine, move: Move) -> None:
    move.leased = False


_release = MoveMachine.release
_bury = MoveMachine._bury


def _release_undrained(self: MoveMachine, move: Move) -> None:
    if move.state is TxnState.PUBLISHED:
        self._drop_lease(move)
        move.drained = True
    _release(self, move)


def _paid_twice(self: MoveMachine, move: Move) -> None:
    self._purse.give(move.line, move.tier, move.credit)
    _bury(self, move)


MUTATIONS: list[tuple[str, str, Callable[..., object]]] = [
    ("a-slot-is-reused-before-it-drained", "_quarantine", _no_quarantine),
    ("a-lease-is-never-given-back", "_drop_lease", _no_lease),
    ("a-source-is-released-before-it-drained", "release", _release_undrained),
    ("a-credit-is-given-back-twice", "_bury", _paid_twice),
]


@pytest.mark.parametrize(("name", "method", "broken"), MUTATIONS, ids=[name for name, _, _ in MUTATIONS])
def test_a_guard_that_is_taken_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, method: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(MoveMachine, method, broken)
    with pytest.raises(InterleavingFailed) as failed:
        explore(BlockWorld, range(400), steps=45)
    monkeypatch.undo()
    # Without the mutation the very same interleaving holds.
    replay(BlockWorld, failed.value.seed, 45)
