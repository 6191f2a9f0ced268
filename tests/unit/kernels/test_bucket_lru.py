"""Bucketed LRU over many steps: against a full sort, against a plain model, and its promises one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier_kernels.ops.bucket_lru import BUCKETS, EPOCH_LIMIT, BucketLru, bucket_lru, bucket_lru_ref

State = dict[str, torch.Tensor]


def empty(rows: int, slots: int, units: int) -> State:
    return {
        "slot_tok": torch.full((rows, slots), -1, dtype=torch.int32),
        "age": torch.zeros(rows, slots, dtype=torch.int16),
        "loc": torch.full((rows, units), -1, dtype=torch.int32),
        "pin": torch.zeros(rows, slots, dtype=torch.bool),
        "epoch": torch.ones(rows, dtype=torch.int32),
    }


def ask(state: State, *want: int) -> BucketLru:
    return bucket_lru(torch.tensor([want], dtype=torch.int32), **state)


def held(state: State) -> list[int]:
    return state["slot_tok"][0].tolist()


def test_the_bucket_that_is_cut_gives_its_lowest_slots() -> None:
    state = empty(1, 6, 20)
    for units in ((0, 1), (2, 3), (4, 5)):
        ask(state, *units)
        state["epoch"] += 1
    got = ask(state, 10, 11, 12)
    assert got.victim[0].tolist() == [0, 1, 2]
    assert got.evicted[0].tolist() == [0, 1, 2]
    assert held(state) == [10, 11, 12, 3, 4, 5]


def test_hits_are_never_overwritten_and_the_last_wanted_fall_short() -> None:
    state = empty(1, 3, 20)
    ask(state, 1, 2, 3)
    state["epoch"] += 1
    got = ask(state, 7, 2, 8, 9, 7)
    assert got.hit_slot[0].tolist() == [-1, 1, -1, -1, -1]
    assert got.miss[0].tolist() == [7, 8, 9, -1, -1]
    assert got.victim[0].tolist() == [0, 2, -1, -1, -1]
    assert (got.n_miss.item(), got.shortfall.item()) == (3, 1)
    assert held(state) == [7, 2, 8]
    assert state["loc"][0, 9].item() == -1


def test_slots_used_in_this_epoch_stay_until_the_next() -> None:
    state = empty(1, 2, 9)
    ask(state, 0, 1)
    assert ask(state, 2).shortfall.item() == 1
    state["epoch"] += 1
    assert ask(state, 2).victim[0].tolist() == [0]


def test_a_pinned_slot_is_no_victim_however_old() -> None:
    state = empty(1, 3, 9)
    ask(state, 0, 1, 2)
    state["pin"][0, 0] = True
    state["epoch"] += 900
    assert ask(state, 3, 4, 5).victim[0].tolist() == [1, 2, -1]
    assert held(state)[0] == 0


def test_two_slots_follow_the_trace_of_the_specification() -> None:
    """ULA-30, ULA-31: A B A C B fills, fills, hits, evicts B, evicts A; with all pinned nothing gives way."""
    state, seen = empty(1, 2, 3), []
    for unit in (0, 1, 0, 2, 1):
        got = ask(state, unit)
        seen.append("hit" if got.n_miss.item() == 0 else got.evicted.item())
        state["epoch"] += 1
    assert seen == [-1, -1, "hit", 1, 0]
    state["pin"].fill_(True)
    assert ask(state, 0).shortfall.item() == 1
    assert held(state) == [1, 2]


@pytest.mark.parametrize("past", [1, 2, 1000, 2**31 - 1 - EPOCH_LIMIT], ids=str)
def test_a_rebased_epoch_changes_no_victim(past: int) -> None:
    """The same ages, seen once from below the limit and once from past it."""
    low, high = empty(1, 8, 40), empty(1, 8, 40)
    distances = [1, 5, 200, 200, BUCKETS - 3, BUCKETS - 2, BUCKETS - 1, 3000]
    for state, now in ((low, 4000), (high, EPOCH_LIMIT + past)):
        state["slot_tok"][0] = torch.arange(8)
        state["loc"][0, :8] = torch.arange(8)
        ages = torch.tensor([now - d for d in distances])
        state["age"][0] = ages.clamp_max(EPOCH_LIMIT).short() if now < EPOCH_LIMIT + 3 else 0
        state["epoch"].fill_(now)
    if past > 2:  # Ages past int16 cannot exist: all units of the far state are as old as can be.
        low["age"].zero_()
    else:
        low["age"][0] = (4000 - (EPOCH_LIMIT + past) + high["age"][0].int()).short()
    for want in ((20, 21, 22), (0, 30)):
        a, b = ask(low, *want), ask(high, *want)
        assert a.victim.tolist() == b.victim.tolist()
        low["epoch"] += 1
        high["epoch"] += 1
    assert high["epoch"].item() == BUCKETS + 1
    assert int(high["age"].min()) >= 0


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 3), slots=st.integers(1, 20), units=st.integers(1, 40))
def test_every_step_equals_a_sort_of_all_slots(
    data: st.DataObject, rows: int, slots: int, units: int
) -> None:
    ours, theirs = empty(rows, slots, units), empty(rows, slots, units)
    seed = data.draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    for width in data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=8)):
        want = torch.randint(-1, units, (rows, width), generator=g).int()
        pin = torch.rand(rows, slots, generator=g) < 0.2
        step = int(torch.randint(0, 3, (1,), generator=g)) or 33_000
        for state in (ours, theirs):
            state["pin"] = pin
            state["epoch"] += step
        got, wanted = bucket_lru(want, **ours)._asdict(), bucket_lru_ref(want, **theirs)
        for name, x in wanted.items():
            assert torch.equal(got[name], x), name
            assert got[name].dtype == x.dtype, name


class Residency(RuleBasedStateMachine):
    """One row against a model that keeps a dict of what lies where and since when."""

    @initialize(slots=st.integers(1, 8), epoch=st.sampled_from([1, EPOCH_LIMIT - 20]))
    def start(self, slots: int, epoch: int) -> None:
        self.slots, self.units = slots, 16
        self.state = empty(1, slots, self.units)
        self.state["epoch"].fill_(epoch)
        self.now = epoch
        self.where: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.pinned: set[int] = set()

    @rule(want=st.lists(st.integers(-1, 15), max_size=12))
    def step(self, want: list[int]) -> None:
        before = dict(self.where)
        got = ask(self.state, *want)
        hits = [before.get(u, -1) for u in want]
        assert got.hit_slot[0].tolist() == hits
        missing = list(dict.fromkeys(u for u in want if u >= 0 and u not in before))
        for slot in hits:
            if slot >= 0:
                self.used[slot] = self.now
        taken = set(before.values())
        free = [s for s in range(self.slots) if s not in taken and s not in self.pinned]
        old = sorted(
            (s for s in taken - self.pinned if self.used[s] < self.now),
            key=lambda s: (-min(self.now - self.used[s], BUCKETS - 2), s),
        )
        victims = sorted([*free, *old][: len(missing)])
        count = len(missing)
        assert got.n_miss.item() == count
        assert got.shortfall.item() == count - len(victims)
        assert got.miss[0].tolist() == missing + [-1] * (len(want) - count)
        assert got.victim[0].tolist() == victims + [-1] * (len(want) - len(victims))
        self.where = {u: s for u, s in before.items() if s not in victims}
        self.where |= dict(zip(missing, victims, strict=False))
        self.used |= dict.fromkeys(victims, self.now)

    @rule(steps=st.sampled_from([1, 1, 2, 300, 40_000]))
    def advance(self, steps: int) -> None:
        self.state["epoch"] += steps
        self.now += steps

    @rule(slot=st.integers(0, 7))
    def copy_begins(self, slot: int) -> None:
        if slot < self.slots:
            self.pinned.add(slot)
            self.state["pin"][0, slot] = True

    @rule(slot=st.integers(0, 7))
    def copy_ends(self, slot: int) -> None:
        if slot < self.slots:
            self.pinned.discard(slot)
            self.state["pin"][0, slot] = False

    @rule(data=st.data())
    def unit_is_given_up(self, data: st.DataObject) -> None:
        if self.where:
            unit = data.draw(st.sampled_from(sorted(self.where)))
            slot = self.where.pop(unit)
            self.state["slot_tok"][0, slot] = -1
            self.state["loc"][0, unit] = -1

    @invariant()
    def slots_and_units_are_inverse(self) -> None:
        if not hasattr(self, "where"):
            return
        tok, loc = held(self.state), self.state["loc"][0].tolist()
        assert {u: s for s, u in enumerate(tok) if u >= 0} == self.where
        assert {u: s for u, s in enumerate(loc) if s >= 0} == self.where
        assert 1 <= int(self.state["epoch"]) <= max(self.now, BUCKETS)


TestResidency = Residency.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
