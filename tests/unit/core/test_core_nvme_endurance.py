"""The write budget: so many bytes a day, refused before anything moves, and given back when nothing was
written."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.endurance import DAY_SECONDS, WriteBudget, bytes_per_day
from kvtier_core.tiers.transfer import EraseItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_store import content, erase, identity, open_store, store, write_item

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
