"""Credits are conserved under any sequence of reservations and releases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier_core.credits import CreditLedger, slots
from kvtier_core.directory import ChunkState, Directory, logical_id, place_of
from kvtier_core.errors import CoreError, Reason

CAPACITY = (4, 7, 0)


class CreditMachine(RuleBasedStateMachine):
    """A model with plain integers beside the ledger."""

    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = CreditLedger(CAPACITY)
        self.held: dict[int, dict[int, int]] = {}

    @rule(
        target=grants,
        want=st.dictionaries(st.integers(0, len(CAPACITY) - 1), st.integers(0, 8), max_size=3),
    )
    def acquire(self, want: dict[int, int]) -> object:
        free = [c - sum(h.get(t, 0) for h in self.held.values()) for t, c in enumerate(CAPACITY)]
        if all(count <= free[tier] for tier, count in want.items()):
            grant = self.ledger.acquire(want)
            self.held[grant] = want
            return grant
        with pytest.raises(CoreError) as refused:
            self.ledger.acquire(want)
        assert refused.value.reason is Reason.CREDIT_PRESSURE
        return multiple()

    @rule(grant=consumes(grants))
    def release(self, grant: int) -> None:
        self.ledger.release(grant)
        del self.held[grant]
        with pytest.raises(KeyError):
            self.ledger.release(grant)

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()
        for tier, capacity in enumerate(CAPACITY):
            held = sum(parts.get(tier, 0) for parts in self.held.values())
            assert self.ledger.available(tier) == capacity - held
        assert self.ledger.outstanding() == len(self.held)


TestCredits = CreditMachine.TestCase
TestCredits.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_broken_ledger_is_noticed() -> None:
    ledger = CreditLedger([2])
    ledger.acquire({0: 1})
    ledger.ledger._free[slots(0)] = 2
    with pytest.raises(AssertionError, match="slots:0"):
        ledger.check()


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="never negative"):
        CreditLedger([-1])
    with pytest.raises(ValueError, match="never negative"):
        CreditLedger([1]).acquire({0: -1})


def test_logical_ids_are_unique_and_bounded() -> None:
    ids = {logical_id(s, layer, c) for s in (1, 2) for layer in (0, 1, 4095) for c in (0, 1, (1 << 23) - 1)}
    assert len(ids) == 18
    assert all(0 <= one < 1 << 62 for one in ids | {logical_id((1 << 27) - 1, 0, 0)})
    for bad in ((-1, 0, 0), (0, 4096, 0), (0, 0, 1 << 23), (1 << 27, 0, 0)):
        with pytest.raises(CoreError) as refused:
            logical_id(*bad)
        assert refused.value.reason is Reason.BAD_ARGUMENT


@pytest.mark.parametrize("session", [0, 1, 1 << 26, (1 << 27) - 1], ids=hex)
@pytest.mark.parametrize("layer", [0, 1, 4095])
@pytest.mark.parametrize("chunk", [0, 1, (1 << 23) - 1], ids=hex)
def test_a_name_gives_back_its_layer_and_chunk_whatever_its_session(
    session: int, layer: int, chunk: int
) -> None:
    """As ULA-02 to 08 want it of packed identifiers: no part reaches into another, none into the sign."""
    named = logical_id(session, layer, chunk)
    assert place_of(named) == (layer, chunk)
    assert int(np.int64(named)) == named


def test_a_lines_generation_never_returns() -> None:
    directory = Directory(lines=2)
    seen: set[int] = set()
    for round_ in range(5):
        line = directory.insert(
            logical_id(1, 0, round_),
            tier=0,
            slot=0,
            slot_generation=0,
            generation=directory.issue_generation(),
            state=ChunkState.OPEN,
        )
        seen.add(int(directory.generation[line]))
        directory.publish(line, tier=1, slot=3, slot_generation=1, generation=directory.issue_generation())
        seen.add(int(directory.generation[line]))
        directory.remove(line)
        assert directory.generation[line] == -1
        assert directory.line_of(logical_id(1, 0, round_)) is None
    assert len(seen) == 10


def test_the_directory_grows_without_losing_lines() -> None:
    directory = Directory(lines=2)
    lines = [
        directory.insert(
            logical_id(1, 0, chunk),
            tier=0,
            slot=chunk,
            slot_generation=chunk,
            generation=chunk + 1,
            state=ChunkState.SEALED,
        )
        for chunk in range(9)
    ]
    assert len(directory) == len(set(lines)) == 9
    assert [int(directory.slot[directory.line_of(logical_id(1, 0, c)) or 0]) for c in range(9)] == list(
        range(9)
    )
    with pytest.raises(CoreError) as refused:
        directory.insert(
            logical_id(1, 0, 3), tier=0, slot=0, slot_generation=0, generation=99, state=ChunkState.OPEN
        )
    assert refused.value.reason is Reason.IDENTITY_MISMATCH
