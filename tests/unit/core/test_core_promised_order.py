"""What a promise has begun is the leading blocks of its layer, whatever tiers refuse."""

from __future__ import annotations

from typing import cast

from kvtier_core.arrivals import Block, BufferPool
from kvtier_core.promises import IdentifiedRows, Promises
from kvtier_core.tiers.slots import SlotRef
from tests.unit.core.builders import FakeClock
from tests.unit.core.tierdoubles import LAYOUT, ScriptedTier


def test_a_promise_that_goes_on_begins_no_block_twice_and_leaves_none_out() -> None:
    first, second = ScriptedTier(depth=1), ScriptedTier()
    pool = BufferPool(LAYOUT, 16)
    promises = Promises(cast(IdentifiedRows, None), pool, FakeClock(), None, reserve=2)
    blocks = [
        Block(tier, SlotRef(slot, 1), tier.identity(slot)) for tier in (first, second) for slot in (0, 1)
    ]
    # The second block finds the queue of its tier full.
    assert promises.begin_blocks("s", 0, 1, blocks) == 1
    assert pool.available == pool.limit - 1
    first.depth = 8
    for _ in range(2):
        assert promises.begin_blocks("s", 0, 1, blocks) == 4
    assert [[read.item.ref.slot for read in tier.reads] for tier in (first, second)] == [[0, 1], [0, 1]]
    for read in (*first.reads, *second.reads):
        read.end()
    promises.close()
    assert pool.available == pool.limit
