"""Slots over many steps: what bucketed LRU decides, one plan moves, and every layer replays."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.ops.bucket_lru import bucket_lru
from kvtier_kernels.ops.swap_in import SwapPlan, swap_in_apply, swap_in_plan


def ints(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


def copies(plan: SwapPlan) -> list[tuple[int, int]]:
    n = int(plan.copies)
    assert plan.src[n:].eq(-1).all() and plan.dst[n:].eq(-1).all()
    return list(zip(plan.src[:n].tolist(), plan.dst[:n].tolist(), strict=True))


def test_an_entry_that_would_write_a_slot_again_is_refused() -> None:
    plan = swap_in_plan(ints(0, 1, 2, 3), ints(3, 1, 3, 4), ints(10, 11, 12, 13), slots=8)
    assert copies(plan) == [(10, 3), (13, 4)]
    assert (plan.refused.item(), plan.absent.item()) == (2, 0)


def test_an_absent_unit_is_counted_and_holds_its_slot() -> None:
    """Its slot stays taken in this plan: what is in it is for the caller to give up."""
    plan = swap_in_plan(ints(0, 1), ints(2, 2), ints(-1, 11), slots=8)
    assert copies(plan) == []
    assert (plan.refused.item(), plan.absent.item()) == (1, 1)


def test_rows_have_slots_of_their_own() -> None:
    miss, victim = torch.tensor([[5], [5]]).int(), torch.tensor([[1], [1]]).int()
    plan = swap_in_plan(miss, victim, ints(*range(6)).expand(2, 6), slots=4)
    assert copies(plan) == [(5, 1), (5, 5)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3),
    slots=st.integers(1, 12),
    widths=st.lists(st.integers(0, 15), min_size=1, max_size=10),
)
def test_slots_hold_the_rows_of_their_units_in_every_layer(
    seed: int, rows: int, slots: int, widths: list[int]
) -> None:
    g = torch.Generator().manual_seed(seed)
    units, layers = 24, 3
    host_row = torch.stack([torch.randperm(64, generator=g)[:units] for _ in range(rows)]).int()
    hosts = [torch.randn(64, 2, 4, generator=g) for _ in range(layers)]
    pools = [torch.zeros(rows * slots, 2, 4) for _ in range(layers)]
    state = {
        "slot_tok": torch.full((rows, slots), -1, dtype=torch.int32),
        "age": torch.zeros(rows, slots, dtype=torch.int16),
        "loc": torch.full((rows, units), -1, dtype=torch.int32),
        "pin": torch.zeros(rows, slots, dtype=torch.bool),
        "epoch": torch.ones(rows, dtype=torch.int32),
    }
    for width in widths:
        want = torch.randint(-1, units, (rows, width), generator=g).int()
        got = bucket_lru(want, **state)
        plan = swap_in_plan(got.miss, got.victim, host_row, slots=slots)
        written = [dst for _, dst in copies(plan)]
        assert len(set(written)) == len(written) == int((got.n_miss - got.shortfall).sum())
        assert not plan.refused.any() and not plan.absent.any()
        kept = set(range(rows * slots)) - set(written)
        for host, pool in zip(hosts, pools, strict=True):
            before = pool.clone()
            swap_in_apply(host, pool, plan.src, plan.dst, plan.copies)
            assert all(torch.equal(pool[i], before[i]) for i in kept)
            for r in range(rows):
                for slot, unit in enumerate(state["slot_tok"][r].tolist()):
                    if unit >= 0:
                        assert torch.equal(pool[r * slots + slot], host[int(host_row[r, unit])])
        state["epoch"] += 1
