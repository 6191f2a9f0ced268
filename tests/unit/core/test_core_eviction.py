"""Eviction: what goes first, what never goes, and a refusal in bounded time when nothing may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.transactions.eviction import Evictor, Room, Watermarks
from kvtier_core.transactions.pins import Pins
from kvtier_core.transactions.policies import Adaptive, EvictionPolicy, GreedyDual, LeastRecent
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused
from kvtier_core.transactions.transfers import Settled
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, block_key, content


class Shelf(BlockBench):
    """A cache with an evictor; `tick` is the coarse clock of uses."""

    def __init__(
        self,
        slots: tuple[int, int, int] = (2, 3, 4),
        *,
        droppable: frozenset[int] = frozenset(),
        watermarks: Watermarks | None = None,
        policy: str = "dual",
        survival: int = 1,
    ) -> None:
        super().__init__(slots, survival=survival)
        self.tick = 0
        self.pins = Pins(self.directory)
        self.refused: list[Settled] = []
        self.settled: list[Settled] = []
        self.gone: list[tuple[bytes, int, bool]] = []
        self.droppable = droppable
        self.policies: list[EvictionPolicy] = [self._policy(policy, tier) for tier in range(3)]
        self.evictor = Evictor(
            self.directory,
            self.moves,
            self.tiers,
            self.policies,
            below={GPU: CPU, CPU: NVME},
            reap=self.reap,
            refused=self.refused.extend,
            droppable=self._droppable,
            watermarks=watermarks,
            on_gone=lambda key, tier, lost: self.gone.append((key, tier, lost)),
        )

    def _policy(self, name: str, tier: int) -> EvictionPolicy:
        if name == "lru":
            return LeastRecent(self.directory)
        if name == "arc":
            return Adaptive(self.directory, self.tiers[tier].slots.capacity)
        return GreedyDual(self.directory, tick=lambda: self.tick)

    def _droppable(self, lines: np.ndarray) -> np.ndarray:
        return np.array([self.names[int(self.directory.logical[line])] in self.droppable for line in lines])

    def reap(self) -> None:
        self.pins.reap()
        self.settled += self.moves.reap()

    def block(self, name: int, tier: int = CPU, cost: float = 1.0, uses: int = 0) -> int:
        line = self.put(name, tier)
        self.directory.cost[line] = cost
        self.tick += 1
        self.directory.last_use[line] = self.tick
        for _ in range(uses):
            self.use(line)
        self.evictor.stored(line, tier)
        return line

    def use(self, line: int) -> None:
        self.tick += 1
        self.directory.touch(np.array([line]), self.tick)

    def room(self, tier: int = CPU, count: int = 1) -> Room:
        return self.evictor.make_room(tier, count, now=0.0)

    def refusal(self, tier: int = CPU, count: int = 1) -> MoveRefused:
        with pytest.raises(MoveRefused) as error:
            self.room(tier, count)
        self.check()
        return error.value

    def names_in(self, tier: int) -> set[int]:
        return {self.names[int(self.directory.logical[line])] for line in self.directory.lines_in(tier)}


def test_free_slots_need_no_eviction() -> None:
    shelf = Shelf()
    shelf.block(1)
    assert shelf.room() == Room(CPU, 1, 2, 0, MoveReason.READY)
    assert shelf.names_in(CPU) == {1}


def test_a_copy_that_another_survives_is_dropped_at_once() -> None:
    shelf = Shelf()
    for name in (1, 2, 3):
        shelf.block(name)
    line = shelf.directory.find(block_key(3))
    shelf.fly(line, NVME, keep_source=True)
    shelf.settle()
    # It is the most recent one, but the only one whose loss costs no copy; the others are older and go down.
    assert shelf.room(count=1).leaving == 1
    shelf.settle()
    assert shelf.names_in(CPU) == {2, 3}
    assert shelf.room(count=3).now is False
    assert shelf.gone == [(block_key(3), CPU, False)]
    shelf.check()


def test_the_last_copy_goes_down_and_is_never_lost() -> None:
    shelf = Shelf()
    for name in (1, 2, 3):
        shelf.block(name)
    room = shelf.room()
    assert (room.free, room.leaving, room.now) == (0, 1, False)
    # Asked again while it is on its way, nothing more is begun.
    assert shelf.room() == room and len(shelf.moves.open_moves()) == 1
    shelf.settle()
    assert shelf.room().now
    assert (shelf.names_in(CPU), shelf.names_in(NVME)) == ({2, 3}, {1})
    assert shelf.serve(shelf.directory.find(block_key(1)), NVME) == content(1)
    shelf.check()


def test_a_tier_below_that_is_full_makes_room_first() -> None:
    shelf = Shelf((1, 1, 2))
    shelf.block(1, GPU)
    shelf.block(2, CPU)
    shelf.block(3, NVME)
    refused = shelf.refusal(GPU)
    assert refused.code is MoveReason.NO_DESTINATION_CAPACITY
    shelf.settle()
    assert shelf.names_in(NVME) == {2, 3}
    assert shelf.room(GPU).leaving == 1
    shelf.settle()
    assert shelf.names_in(CPU) == {1}
    shelf.check()


def test_only_a_droppable_block_loses_its_last_copy_and_only_at_the_bottom() -> None:
    shelf = Shelf((1, 1, 2), droppable=frozenset({3}))
    shelf.block(2, NVME)
    shelf.block(3, NVME, cost=100.0)
    shelf.block(1, CPU)
    # 2 is cheaper and older, and may not be lost: 3 goes.
    assert shelf.room(NVME).now
    assert shelf.names_in(NVME) == {2} and shelf.directory.find(block_key(3)) < 0
    assert shelf.gone == [(block_key(3), NVME, True)]
    shelf.block(4, NVME)
    assert shelf.refusal(NVME).code is MoveReason.NO_DESTINATION_CAPACITY
    assert shelf.names_in(NVME) == {2, 4}


def test_a_droppable_block_is_demoted_where_that_is_possible() -> None:
    shelf = Shelf(droppable=frozenset({1, 2, 3}))
    for name in (1, 2, 3):
        shelf.block(name)
    assert shelf.room().leaving == 1
    shelf.settle()
    assert shelf.names_in(NVME) == {1}


def test_sglang_32455_all_pinned_is_a_refusal_and_completions_are_reaped_first() -> None:
    """Pins make a tier full; waiting for room that only a reaped completion frees would be a livelock."""
    shelf = Shelf()
    lines = [shelf.block(name) for name in (1, 2, 3)]
    pins = [shelf.pins.hold([line], CPU) for line in lines]
    refused = shelf.refusal()
    assert refused.code is MoveReason.WOULD_EVICT_PINNED
    assert refused.facts["held"] == "3" and refused.facts["free"] == "0"
    assert not shelf.moves.open_moves()
    # A pin ends and nobody tells the evictor: asking for room finds it.
    pins.pop().close()
    assert shelf.room().leaving == 1
    for tier in shelf.tiers:
        for item in list(tier.held):
            item.land()
    # The completion is in the inbox only: asking for room takes it.
    assert shelf.room().now
    assert [item.reason for item in shelf.settled] == [MoveReason.READY]
    shelf.check()


def test_what_a_transaction_holds_is_left_alone() -> None:
    shelf = Shelf((2, 1, 1))
    line = shelf.block(1)
    shelf.fly(line, GPU, keep_source=True)
    refused = shelf.refusal()
    assert refused.code is MoveReason.WOULD_EVICT_PINNED


def test_a_demotion_that_cannot_start_is_reported_and_costs_nothing() -> None:
    shelf = Shelf()
    for name in (1, 2, 3):
        shelf.block(name)
    shelf.credits.limit = 0
    refused = shelf.refusal()
    assert refused.code is MoveReason.NO_DESTINATION_CAPACITY
    assert [item.reason for item in shelf.refused] == [MoveReason.CREDIT_PRESSURE]
    shelf.check()
    assert shelf.at_rest()


def test_r_min_2_evicts_only_a_third_copy() -> None:
    shelf = Shelf((1, 1, 1), survival=2)
    line = shelf.block(1, GPU)
    for tier in (CPU, NVME):
        shelf.fly(line, tier, keep_source=True)
        shelf.settle()
    assert shelf.room(GPU).now
    assert shelf.refusal(CPU).code is MoveReason.NO_DESTINATION_CAPACITY


@pytest.mark.parametrize(
    ("used", "kept"), [(8, 8), (9, 9), (10, 6)], ids=["below", "at-the-mark", "above-goes-down-to-low"]
)
def test_watermarks(used: int, kept: int) -> None:
    shelf = Shelf((1, 10, 10), watermarks=Watermarks(high=0.9, low=0.6))
    for name in range(used):
        shelf.block(name)
    room = shelf.evictor.relieve(CPU, now=0.0)
    assert room.leaving == used - kept
    shelf.settle()
    assert len(shelf.names_in(CPU)) == kept
    # The least recent went.
    assert shelf.names_in(CPU) == set(range(used - kept, used))
    assert shelf.evictor.relieve(CPU, now=0.0).leaving == 0


def test_relief_that_finds_nothing_to_take_says_so() -> None:
    shelf = Shelf((1, 2, 2), watermarks=Watermarks(high=0.5, low=0.0))
    pins = [shelf.pins.hold([shelf.block(name)], CPU) for name in (1, 2)]
    room = shelf.evictor.relieve(CPU, now=0.0)
    assert (room.reason, room.held) == (MoveReason.WOULD_EVICT_PINNED, len(pins))


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1)])
def test_watermarks_are_shares_in_order(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="watermarks"):
        Watermarks(high, low)


def test_copies_only_go_down() -> None:
    shelf = Shelf()
    with pytest.raises(ValueError, match="slower"):
        Evictor(
            shelf.directory,
            shelf.moves,
            shelf.tiers,
            shelf.policies,
            below={CPU: GPU},
            reap=shelf.reap,
            refused=shelf.refused.extend,
        )


def test_a_sessions_chunks_are_not_this_evictors() -> None:
    shelf = Shelf((1, 1, 1))
    line = shelf.block(1)
    shelf.directory.namespace[line] = -1
    assert shelf.refusal().code is MoveReason.NO_DESTINATION_CAPACITY


# Orders.


def order(shelf: Shelf, limit: int = 99) -> list[int]:
    lines = shelf.directory.evictable(CPU)
    found = shelf.policies[CPU].order(lines, limit)
    return [shelf.names[int(shelf.directory.logical[line])] for line in found]


def test_cost_times_reuse_over_bytes_decides() -> None:
    shelf = Shelf((1, 5, 1))
    shelf.block(1, cost=4.0)
    shelf.block(2, cost=1.0, uses=9)
    shelf.block(3, cost=2.0, uses=0)
    shelf.block(4, cost=2.0, uses=2)
    assert order(shelf) == [3, 1, 4, 2]
    assert order(shelf, 2) == [3, 1]
    wide = GreedyDual(
        shelf.directory,
        tick=lambda: shelf.tick,
        bytes_of=lambda lines: np.where(lines == shelf.directory.find(block_key(2)), 10.0, 1.0),
    )
    lines = shelf.directory.evictable(CPU)
    assert int(wide.order(lines, 1)[0]) == shelf.directory.find(block_key(2))


def test_what_was_dear_once_ages() -> None:
    """GreedyDual's L: each victim raises the bar, so a dear block that is not used again goes in the end."""
    shelf = Shelf((1, 2, 40))
    dear = shelf.block(0, cost=10.0)
    evicted: list[int] = []
    for name in range(1, 16):
        shelf.block(name, cost=1.0)
        before = shelf.names_in(CPU)
        shelf.room()
        shelf.settle()
        evicted += before - shelf.names_in(CPU)
    # Worth ten of the others, it goes as the tenth.
    assert evicted[:11] == [*range(1, 10), 0, 10]
    assert shelf.directory.tier[dear] == NVME


def test_equal_blocks_go_by_recency() -> None:
    for policy in ("dual", "lru", "arc"):
        shelf = Shelf((1, 4, 1), policy=policy)
        lines = [shelf.block(name, cost=0.0) for name in (1, 2, 3, 4)]
        for line in lines[:2]:
            shelf.directory.last_use[line] = shelf.tick = shelf.tick + 1
        assert order(shelf) == [3, 4, 1, 2], policy


def test_the_levels_of_greedy_dual_are_bounded() -> None:
    shelf = Shelf()
    line = shelf.block(1)
    policy = GreedyDual(shelf.directory, tick=lambda: shelf.tick, steps=16)
    for _ in range(200):
        shelf.use(line)
        policy.evicted(line)
    assert len(policy._ticks) <= 16 and policy._ticks == sorted(policy._ticks)
    assert policy._levels == sorted(policy._levels) and policy.level > 100


def test_arc_learns_from_what_it_missed() -> None:
    """A scan of blocks used once does not drive out blocks used again; ghosts move the target."""
    shelf = Shelf((1, 4, 40), policy="arc")
    policy = shelf.policies[CPU]
    assert isinstance(policy, Adaptive)
    for name in (1, 2):
        shelf.block(name, uses=2)
    for name in range(10, 30):
        shelf.block(name)
        shelf.room()
        shelf.settle()
    assert shelf.names_in(CPU) >= {1, 2}
    assert policy.target == 0.0
    back = shelf.directory.find(block_key(28))
    assert shelf.directory.tier[back] == NVME
    shelf.fly(back, CPU, keep_source=True)
    shelf.settle()
    shelf.evictor.stored(back, CPU)
    assert policy.target > 0.0 and shelf.directory.reuse[back] == 1
    assert len(policy._once) <= 4 and len(policy._again) <= 4


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12),
    limit=st.integers(1, 14),
    policy=st.sampled_from(["dual", "lru", "arc"]),
)
def test_a_limited_order_is_the_start_of_the_whole_order(
    costs: list[tuple[int, int]], limit: int, policy: str
) -> None:
    shelf = Shelf((1, 12, 1), policy=policy)
    for name, (cost, uses) in enumerate(costs):
        shelf.block(name, cost=float(cost), uses=uses)
    whole = order(shelf, 99)
    assert sorted(whole) == list(range(len(costs)))
    assert order(shelf, limit) == whole[:limit]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), policy=st.sampled_from(["dual", "lru", "arc"]))
def test_vllm_54914_any_traffic_over_a_full_cache_keeps_what_may_not_be_lost(
    data: st.DataObject, policy: str
) -> None:
    """Stores, uses, pins and room in any order: what is not droppable survives; room comes or is refused."""
    shelf = Shelf((2, 3, 5), policy=policy, droppable=frozenset(range(0, 40, 2)))
    kept: set[int] = set()
    pins = []
    codes: set[MoveReason] = set()
    for name in range(data.draw(st.integers(5, 30))):
        try:
            if shelf.room(data.draw(st.sampled_from([GPU, CPU])), 1).now:
                shelf.block(name, CPU if shelf.tiers[CPU].slots.used < 3 else GPU, cost=float(name % 4))
                if name % 2:
                    kept.add(name)
        except MoveRefused as refused:
            codes.add(refused.code)
        shelf.check()
        lines = shelf.lines()
        if lines and data.draw(st.booleans()):
            line = data.draw(st.sampled_from(lines))
            shelf.use(line)
            tier = int(shelf.directory.tier[line])
            if shelf.directory.counts(line, tier):
                pins.append(shelf.pins.hold([line], tier))
        if pins and data.draw(st.booleans()):
            pins.pop(0).close()
        if data.draw(st.booleans()):
            shelf.settle()
    for pin in pins:
        pin.close()
    shelf.settle()
    shelf.reap()
    shelf.check()
    assert shelf.at_rest()
    assert codes <= {MoveReason.WOULD_EVICT_PINNED, MoveReason.NO_DESTINATION_CAPACITY}
    for name in kept:
        line = shelf.directory.find(block_key(name))
        assert shelf.directory.readable(line)
        assert shelf.serve(line, int(shelf.directory.tier[line])) == content(name)


def test_begin_is_what_the_evictor_uses() -> None:
    """A demotion of the evictor is an ordinary one: it can be cancelled, and nothing is lost."""
    shelf = Shelf()
    for name in (1, 2, 3):
        shelf.block(name)
    shelf.room()
    (move,) = shelf.moves.open_moves()
    assert move.kind is MoveKind.DEMOTE and move.deadline == 30.0
    shelf.moves.cancel(move)
    shelf.settle()
    assert shelf.names_in(CPU) == {1, 2, 3}
    shelf.check()
