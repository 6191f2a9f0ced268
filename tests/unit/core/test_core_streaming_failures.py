"""Streams that fail half-way give every buffer back once nothing can arrive there any more."""

from __future__ import annotations

import pytest

from kvtier_core.arrivals import Arrival, Block, BufferPool, Meter, launch
from kvtier_core.errors import CoreError, Reason
from kvtier_core.streaming import BlockStream
from kvtier_core.tiers.slots import SlotRef
from tests.unit.core.builders import FakeClock
from tests.unit.core.tierdoubles import LAYOUT, ScriptedTier


def blocks(tier: ScriptedTier, count: int) -> list[Block]:
    return [Block(tier, SlotRef(slot, 1), tier.identity(slot)) for slot in range(count)]


def refused(*_: object) -> None:
    raise CoreError(Reason.STORAGE_UNAVAILABLE, "the device is gone")


def test_a_stream_that_cannot_begin_lets_go_of_what_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, broken, pool = ScriptedTier(1), ScriptedTier(1), BufferPool(LAYOUT, 4)
    monkeypatch.setattr(broken, "submit_read", refused)
    with pytest.raises(CoreError) as gone:
        BlockStream([*blocks(sound, 1), *blocks(broken, 1)], pool, FakeClock(), window=2)
    assert gone.value.reason is Reason.STORAGE_UNAVAILABLE
    assert pool.available == 3
    sound.reads[0].end()
    assert pool.available == pool.limit


@pytest.mark.parametrize("how", ["late", "gone", "full"])
def test_a_failed_promise_that_cannot_be_read_again_costs_no_buffer(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, pool, clock = ScriptedTier(1), BufferPool(LAYOUT, 2), FakeClock()
    [wanted] = blocks(tier, 1)
    buffer = pool.take()
    assert buffer is not None
    early = Arrival(wanted, buffer, pool, Meter(clock))
    launch([early], 200.0, None)
    with BlockStream([wanted], pool, clock, window=1, deadline=clock.now + 1.0, promised=[early]) as reads:
        tier.reads[0].end(CoreError(Reason.CHECKSUM_MISMATCH, "flipped"))
        if how == "late":
            tier.answer = lambda read: setattr(clock, "now", clock.now + 2.0)
        elif how == "gone":
            monkeypatch.setattr(tier, "submit_read", refused)
        else:
            tier.depth = 0
        with pytest.raises(CoreError) as ended:
            reads.next()
    reasons = {"late": Reason.DEADLINE, "gone": Reason.STORAGE_UNAVAILABLE, "full": Reason.QUEUE_FULL}
    assert ended.value.reason is reasons[how]
    for read in tier.reads[1:]:
        assert pool.available == pool.limit - 1
        read.end()
    assert pool.available == pool.limit
