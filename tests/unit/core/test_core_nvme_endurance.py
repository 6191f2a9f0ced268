"""The write budget: so many bytes a day, refused before anything moves, and given back when nothing was
written."""

from __future__ import annotations

import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.blockstore.driver import Bell
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.nvme.endurance import DAY_SECONDS, WriteBudget, bytes_per_day
from kvtier_core.tiers.transfer import EraseItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_store import LAYOUT, content, erase, identity, key, open_store, store, write_item

SLOT = 8192


def test_the_rate_is_the_drives_rated_writes_times_the_caches_share() -> None:
    assert bytes_per_day(1000, Decimal("1.5"), Decimal("0.4")) == 600


def test_a_demotion_beyond_the_budget_is_refused_and_allowed_later(tmp_path: Path) -> None:
    clock = FakeClock()
    budget = WriteBudget(rate=SLOT * 24, burst=2 * SLOT, clock=clock)
    tier = open_store(tmp_path, budget=budget, clock=clock)
    store(tier, "a", "b")
    with pytest.raises(CoreError) as refused:
        tier.reserve(1)
    assert refused.value.reason is Reason.WRITE_BUDGET
    assert int(refused.value.facts["retry_after_ms"]) == pytest.approx(3600_000, rel=0.01)
    assert tier.slots.used == 2, "nothing was reserved"
    clock.now += 3601
    store(tier, "c")
    assert budget.written_bytes == 3 * SLOT
    tier.close()


def test_what_was_reserved_and_not_written_is_given_back_once(tmp_path: Path) -> None:
    clock = FakeClock()
    budget = WriteBudget(rate=1, burst=SLOT, clock=clock)
    tier = open_store(tmp_path, budget=budget, clock=clock)
    for _ in range(3):
        tier.release(tier.reserve(1))
    (item,) = store(tier, "a")
    tier.release(item.ref)
    assert (budget.available_bytes, budget.written_bytes) == (0, SLOT)
    with pytest.raises(CoreError):
        tier.reserve(1)
    tier.close()


def test_a_full_tier_charges_nothing(tmp_path: Path) -> None:
    budget = WriteBudget(rate=1, burst=3 * SLOT, clock=FakeClock())
    tier = open_store(tmp_path, 1, budget=budget)
    tier.reserve(1)
    with pytest.raises(CoreError) as refused:
        tier.reserve(1)
    assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
    assert budget.available_bytes == 2 * SLOT
    tier.close()


def test_a_deletion_is_never_refused_for_wear_but_counts(tmp_path: Path) -> None:
    budget = WriteBudget(rate=1, burst=SLOT, clock=FakeClock())
    tier = open_store(tmp_path, budget=budget)
    (item,) = store(tier, "a")
    assert budget.available_bytes == 0
    assert erase(tier, EraseItem(item.ref)) == [None]
    assert budget.written_bytes == SLOT + 4096
    assert budget.available_bytes == -4096
    tier.close()


@given(
    steps=st.lists(st.tuples(st.floats(0, 1e5), st.integers(1, 10**6)), max_size=60),
    rate=st.integers(1, 10**9),
    burst=st.integers(1, 10**6),
)
def test_no_schedule_writes_more_than_rate_and_burst(
    steps: list[tuple[float, int]], rate: int, burst: int
) -> None:
    """And a refusal's hint is kept: after that time the same bytes are let through."""
    clock = FakeClock()
    budget = WriteBudget(rate, burst, clock)
    began, largest = clock.now, 0
    for wait, size in steps:
        clock.now += wait
        hint = budget.take(size)
        if hint > 0:
            before = clock.now
            clock.now += hint * (1 + 1e-9) + 1e-6
            assert budget.take(size) == 0.0 or hint > 1e9, before
        largest = max(largest, size)
        allowed = (clock.now - began) * rate / DAY_SECONDS + burst + max(0, largest - burst)
        assert budget.written_bytes <= allowed * (1 + 1e-6) + 1


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 5)])
def test_a_budget_of_nothing_is_a_mistake(rate: int, burst: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        WriteBudget(rate, burst, FakeClock())


def test_an_unwritten_block_is_refunded_when_its_batch_is_refused(tmp_path: Path) -> None:
    """A full queue starts nothing, so nothing is worn."""
    budget = WriteBudget(rate=1, burst=4 * SLOT, clock=FakeClock())
    tier = open_store(tmp_path, budget=budget, queue_items=1)
    items = [write_item(tier, identity(name), content(name)) for name in ("a", "b")]
    with pytest.raises(CoreError) as refused:
        tier.submit_write(items, 1e9, _Deaf())
    assert refused.value.reason is Reason.QUEUE_FULL
    for item in items:
        tier.release(item.ref)
    assert budget.available_bytes == 4 * SLOT
    tier.close()


class _Deaf:
    def done(self, index: int, error: CoreError | None) -> None:
        raise AssertionError("a refused batch is not reported")

    def drained(self, index: int) -> None:
        raise AssertionError("a refused batch is not reported")


def test_a_used_up_budget_fills_memory_and_refuses_and_goes_on_when_it_may(tmp_path: Path) -> None:
    """Shared blocks over flash that may take two of them a day: what cannot go down stays readable."""
    clock = FakeClock()
    flash = open_store(tmp_path, 16, clock=clock)
    size = flash.slot_bytes
    flash.options = replace(flash.options, budget=WriteBudget(rate=2 * size, burst=2 * size, clock=clock))
    bell = Bell()
    blocks = BlockStore([CpuTier("ram", LAYOUT, 4, clock=clock), flash], clock, wake=bell.ring)
    space, names = bytes(32), [f"block {number}" for number in range(10)]
    keys = [key(name) for name in names]
    bodies = [content(name, 1, LAYOUT.payload_bytes) for name in names]

    def put(index: int) -> PutOutcome:
        arguments = ([keys[index]], [bodies[index]])
        (stored,) = blocks.put(*arguments, namespace=space, deadline=clock.now + 1)
        return stored.outcome

    def settle() -> None:
        until = time.monotonic() + 60
        blocks.pump()
        while blocks.moves.open_moves():
            assert time.monotonic() < until
            bell.wait(0.05)
            blocks.pump()

    def fill() -> int:
        """How many blocks are there when no more goes in."""
        for index in range(len(keys)):
            for _ in range(3):
                if put(index) is not PutOutcome.REFUSED:
                    break
                settle()
                clock.now += 3
        return sum(len(blocks.lookup(row, space)) for row in rows)

    rows = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 1, 32)
    assert fill() == 4 + 2
    assert flash.options.budget is not None and flash.options.budget.refused > 0
    assert flash.slots.used == 2 and flash.condition == "Ready"
    clock.now += DAY_SECONDS
    assert fill() == 4 + 2 + 2
    blocks.check()
    flash.close()
