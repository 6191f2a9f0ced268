"""Sessions and shared blocks in one cache: one set of slots, rows before blocks, the same answers."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.credits import CreditRefused, Ledger, Limit, Release, slots
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import EngineStats, PublishArm, StepMode
from kvtier_core.transactions import MoveReason
from kvtier_crds.manifest import Medium, TierRole
from tests.unit.core.blockpump import (
    LATER,
    NAMESPACE,
    GatedFiles,
    brought,
    by_tier,
    delete,
    fetched,
    key,
    key_rows,
    payload,
    put,
    stored,
    until,
)
from tests.unit.core.builders import (
    BLOCK,
    CANDIDATE,
    CHUNK,
    LAYERS,
    SLOT,
    Driver,
    FakeClock,
    Fault,
    FaultyFiles,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    nvme,
    quest,
)

TOKENS, DECODE = 3 * CHUNK + 7, 9
TIERS = [gpu(LAYERS), cpu(4), nvme(32)]
OTHER = hashlib.sha256(b"team-b/1").digest()


def alone(folder: Path, tiers: list[TierBudget], seed: int = 0) -> torch.Tensor:
    with engine(folder, tiers) as built:
        return Driver.open(built, Rows.random(TOKENS + DECODE, seed)).play(TOKENS, DECODE)


def whole(stats: EngineStats) -> None:
    """Every slot is somebody's, once."""
    for tier in stats.tiers:
        size = BLOCK if tier.medium == "nvme" else SLOT
        parts = tier.bytes.rows + tier.bytes.blocks + tier.bytes.quarantined + tier.bytes.free
        assert parts == tier.capacity_bytes // size * size, tier
        assert tier.bytes.held <= tier.bytes.blocks + tier.bytes.quarantined


def test_rows_and_blocks_are_counted_in_one_place(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(8), cpu(4), nvme(32)]) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        driver.forward(CHUNK + 1)
        put(built, range(3))
        stats = built.stats()
        whole(stats)
        assert by_tier(stats) == {"hbm": (2 * LAYERS, 0), "ram": (0, 3), "flash": (0, 0)}
        assert (stats.chunks, stats.open_chunks, stats.sessions) == (2 * LAYERS, LAYERS, 1)
        assert stats.blocks is not None
        assert stats.blocks.stored == 3
        assert stats.host.payloads == (2 * LAYERS + 3) * SLOT
        with built.blocks.store.pin(key_rows([0, 1]), NAMESPACE, LATER) as pinned:
            assert len(pinned) == 2
            assert built.stats().tiers[1].bytes.held == 2 * SLOT
        driver.close()
        assert by_tier(built.stats()) == {"hbm": (0, 0), "ram": (0, 3), "flash": (0, 0)}


def test_rows_move_blocks_down_and_blocks_survive(tmp_path: Path) -> None:
    want = alone(tmp_path / "a", TIERS)
    with engine(tmp_path / "b", TIERS) as built:
        numbers = list(range(4))
        assert {each.outcome for each in put(built, numbers)} == {PutOutcome.STORED}
        driver = Driver.open(built, Rows.random(TOKENS + DECODE))
        assert torch.equal(driver.play(TOKENS, DECODE), want)
        stats = built.stats()
        whole(stats)
        assert by_tier(stats)["ram"] == (4, 0)
        assert stats.blocks is not None
        assert stats.blocks.evictions[("ram", "demoted")] == 4
        assert stats.moved_bytes[("ram", "flash")] >= 4 * SLOT
        assert stored(built, numbers) == set(numbers)
        driver.close()
        assert fetched(built, numbers) == [payload(built, number) for number in numbers]


def test_rows_drop_blocks_that_may_be_lost_when_nothing_is_below(tmp_path: Path) -> None:
    tiers = [gpu(LAYERS), cpu(6)]
    with engine(tmp_path, tiers) as built:
        put(built, range(6), droppable=True)
        driver = Driver.open(built, Rows.random(3 * CHUNK + 2))
        driver.forward(2 * CHUNK + 1)
        assert by_tier(built.stats())["ram"] == (4, 2)
        assert len(stored(built, range(6))) == 2
        driver.forward(CHUNK)
        assert by_tier(built.stats())["ram"] == (6, 0)
        assert stored(built, range(6)) == set()


def test_blocks_that_may_not_be_lost_leave_a_session_its_slots_where_nothing_is_below(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(3 + LAYERS)]) as built:
        reasons = [each.reason for each in put(built, range(4))]
        assert reasons == [*[MoveReason.READY] * 3, MoveReason.KEPT_CAPACITY]
        Driver.open(built, Rows.random(4)).forward(4)
        assert stored(built, range(4)) == {0, 1, 2}
        with pytest.raises(CoreError) as refused:
            Driver.open(built, Rows.random(4))
        assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
        delete(built, [0, 1])
        Driver.open(built, Rows.random(4)).forward(4)
        assert stored(built, range(4)) == {2}


def test_blocks_that_may_not_be_lost_never_keep_a_session_out_of_a_cache_with_storage(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(4), nvme(8)]) as built:
        numbers = range(12)
        reasons = [each.reason for each in put(built, numbers)]
        assert reasons == [MoveReason.READY] * 7 + [MoveReason.KEPT_CAPACITY] * 5
        driver = Driver.open(built, Rows.random(CHUNK))
        driver.forward(CHUNK)
        assert by_tier(built.stats())["flash"][1] + by_tier(built.stats())["ram"][1] >= 7
        assert stored(built, numbers) == set(range(7))
        driver.close()
        # What may be lost still finds room, and gives it back.
        assert put(built, [20], droppable=True)[0].outcome is PutOutcome.STORED
        delete(built, [0])
        assert put(built, [30])[0].outcome is PutOutcome.STORED
        assert put(built, [31])[0].reason is MoveReason.KEPT_CAPACITY


def test_copies_that_others_survive_go_first(tmp_path: Path) -> None:
    """A block that was fetched has its bytes on flash as well: the row costs no write."""
    with engine(tmp_path, [gpu(LAYERS), cpu(2), nvme(32)]) as built:
        put(built, range(4))
        until(built, lambda: by_tier(built.stats())["flash"][1] >= 2)
        assert fetched(built, [0, 1]) == [payload(built, 0), payload(built, 1)]
        until(built, lambda: not built.blocks.store.moves.open_moves())
        moved = built.stats().moved_bytes[("ram", "flash")]
        Driver.open(built, Rows.random(2 * CHUNK)).forward(CHUNK + 1)
        after = built.stats()
        assert by_tier(after)["ram"] == (2, 0)
        assert after.moved_bytes[("ram", "flash")] == moved
        assert stored(built, range(4)) == {0, 1, 2, 3}


def test_blocks_never_push_a_row_away(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(LAYERS), cpu(4), nvme(8)]) as built:
        driver = Driver.open(built, Rows.random(4 * CHUNK))
        driver.forward(3 * CHUNK + 1)
        before = built.list_chunks(driver.handle.session_id, driver.handle.generation)
        assert by_tier(built.stats())["ram"] == (4, 0)
        (refused,) = built.blocks.store.put(
            [key(0)], [payload(built, 0)], namespace=NAMESPACE, deadline=LATER
        )
        assert (refused.outcome, refused.reason) == (PutOutcome.REFUSED, MoveReason.NO_DESTINATION_CAPACITY)
        assert built.list_chunks(driver.handle.session_id, driver.handle.generation) == before
        driver.close()
        assert put(built, [0])[0].outcome is PutOutcome.STORED


def test_a_held_block_stays_and_rows_go_below_it(tmp_path: Path) -> None:
    want = alone(tmp_path / "a", TIERS)
    with engine(tmp_path / "b", TIERS) as built:
        put(built, range(4))
        with built.blocks.store.pin(key_rows(range(4)), NAMESPACE, LATER) as pinned:
            driver = Driver.open(built, Rows.random(TOKENS + DECODE))
            assert torch.equal(driver.play(TOKENS, DECODE), want)
            assert by_tier(built.stats())["ram"] == (0, 4)
            assert by_tier(built.stats())["flash"][0] == 3 * LAYERS
            assert [bytes(pinned.body(index)) for index in range(4)] == [
                payload(built, number) for number in range(4)
            ]


def test_when_held_blocks_fill_every_place_a_session_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(4)]) as built:
        put(built, range(4), droppable=True)
        with built.blocks.store.pin(key_rows(range(4)), NAMESPACE, LATER):
            before = built.stats()
            with pytest.raises(CoreError) as refused:
                Driver.open(built, Rows.random(4))
            assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
            assert "0 of 4 slots free" in refused.value.message
            after = built.stats()
            assert (after.tiers, after.sessions) == (before.tiers, 0)
        built.blocks.store.pump()


def test_a_claimed_slot_is_nobodys_but_the_rows() -> None:
    ledger = Ledger({slots(0): Limit(3)})
    ledger.acquire({slots(0): 1}, 7)
    ledger.claim(slots(0), 1)
    assert ledger.offered(slots(0)) == 1
    ledger.occupy(slots(0), 1, 7)
    for take in (lambda: ledger.acquire({slots(0): 1}, 7), lambda: ledger.occupy(slots(0), 1, 7)):
        with pytest.raises(CreditRefused) as refused:
            take()
    assert (refused.value.available, refused.value.capacity) == (0, 3)
    rows = ledger.acquire({slots(0): 1})
    assert ledger.offered(slots(0)) == -1
    ledger.unclaim(slots(0), 1)
    assert ledger.offered(slots(0)) == 0
    ledger.release(rows)
    assert ledger.vacate(slots(0), 1, 7) is Release.RELEASED
    assert ledger.available(slots(0)) == 2
    ledger.check()


def test_a_put_cannot_take_what_a_row_waits_for(tmp_path: Path) -> None:
    """A frame waits for a block to reach the disk. Puts meanwhile are answered, and do not get the slot."""
    files = GatedFiles()
    with engine(tmp_path, [gpu(LAYERS), cpu(2), nvme(32)], files=files, blocks=True) as built:
        with ThreadPoolExecutor(1) as pool:
            put(built, range(2))
            driver = Driver.open(built, Rows.random(2 * CHUNK))
            with files.closed():
                stepping = pool.submit(driver.forward, CHUNK)
                assert files.waiting.wait(120)
                assert not stepping.done()
                (refused,) = built.blocks.store.put(
                    [key(9)], [payload(built, 9)], namespace=NAMESPACE, deadline=LATER
                )
                assert refused.reason is MoveReason.CREDIT_PRESSURE
            stepping.result(timeout=60)
        assert by_tier(built.stats())["ram"][0] >= 1
        assert stored(built, range(2)) == {0, 1}


def test_making_room_ends_at_the_frames_deadline(tmp_path: Path) -> None:
    """The disk takes nothing. The frame is refused by the tiers' fullness, and the session goes on later."""
    files, clock = GatedFiles(), FakeClock()
    with engine(tmp_path, [cpu(2 * LAYERS), nvme(32)], files=files, clock=clock) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        put(built, range(LAYERS))
        with files.closed():
            clock.tick = 0.25
            with pytest.raises(CoreError) as refused:
                driver.forward(CHUNK + 1, block=CHUNK + 1, deadline=clock.now + 2.0)
            assert refused.value.reason in (Reason.NO_DESTINATION_CAPACITY, Reason.DEADLINE)
            assert clock.now < 130.0
            clock.tick = 0.0
        until(built, lambda: not built.blocks.store.moves.open_moves())
        driver.forward(CHUNK + 1)
        assert stored(built, range(LAYERS)) == set(range(LAYERS))


def test_a_disk_that_fails_costs_neither_rows_nor_blocks(tmp_path: Path) -> None:
    """A block that cannot be moved down stays, and the row goes where there is room."""
    files = FaultyFiles()
    with engine(tmp_path, [gpu(LAYERS), cpu(2), nvme(32)], files=files) as built:
        put(built, range(2))
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        files.faults = [Fault("write", files.calls.get("write", 0), 5)]
        driver.forward(CHUNK)
        assert stored(built, range(2)) == {0, 1}
        assert sum(built.blocks.store.reclaim.failed.values()) == 1
        assert brought(built, 0) == [payload(built, 0)]


def test_blocks_wait_for_no_step(tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def blocked() -> bool:
        begun.set()
        return release.wait(120)

    mode = StepMode(PublishArm.CANDIDATE, candidate_digest=CANDIDATE, may_publish=blocked)
    with engine(tmp_path, TIERS, blocks=True) as built, ThreadPoolExecutor(2) as pool:
        driver = Driver.open(built, Rows.random(1))
        stepping = pool.submit(built.step, driver.request(0, 0, 1), mode)
        try:
            assert begun.wait(120)
            assert pool.submit(put, built, range(6)).result(timeout=60)
            assert pool.submit(fetched, built, [0, 1]).result(timeout=60)
            assert pool.submit(built.stats).result(timeout=60).sessions == 1
            pool.submit(delete, built, [0]).result(timeout=60)
            assert not stepping.done()
        finally:
            release.set()
        assert stepping.result(timeout=60).receipt.arm is PublishArm.CANDIDATE


@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "reading ahead"])
def test_answers_do_not_change_while_blocks_come_and_go(tmp_path: Path, ahead: bool) -> None:
    """Puts, fetches, pins and deletions from two threads under pressure, for as long as two sessions play."""
    tiers = [gpu(3), cpu(5), nvme(48)]
    want = [alone(tmp_path / str(seed), tiers, seed) for seed in range(2)]
    over = threading.Event()

    def traffic(built: CacheEngine, first: int) -> int:
        rounds = 0
        numbers = [first, first + 1, first + 2]
        while not over.is_set() or not rounds:
            put(built, numbers, droppable=bool(rounds % 2))
            for number, body in zip(numbers, fetched(built, numbers), strict=False):
                assert body == payload(built, number)
            with built.blocks.store.pin(key_rows(numbers), NAMESPACE, LATER) as pinned:
                for index in range(len(pinned)):
                    assert bytes(pinned.body(index)) == payload(built, numbers[index])
            delete(built, numbers)
            assert stored(built, numbers) == set()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        options = {"reader": pool} if ahead else {}
        with engine(tmp_path / "both", tiers, blocks=True, **options) as built:
            running = [pool.submit(traffic, built, first) for first in (0, 10)]
            try:
                drivers = [Driver.open(built, Rows.random(TOKENS + DECODE, seed)) for seed in range(2)]
                parts = [[driver.forward(TOKENS)] for driver in drivers]
                for _ in range(DECODE):
                    for mine, driver in zip(parts, drivers, strict=True):
                        mine.append(driver.forward(1))
            finally:
                over.set()
            assert all(each.result(timeout=60) for each in running)
            for mine, answer in zip(parts, want, strict=True):
                assert torch.equal(torch.cat(mine, dim=1), answer)
            whole(built.stats())
            built.blocks.store.check()


def test_a_selector_reads_the_same_rows_beside_blocks(tmp_path: Path) -> None:
    mode = StepMode(PublishArm.CANDIDATE, selector=quest(), candidate_digest=CANDIDATE)

    def play(folder: Path, numbers: range) -> torch.Tensor:
        with engine(folder, TIERS) as built:
            put(built, numbers)
            driver = Driver.open(built, Rows.random(TOKENS + DECODE), quest())
            return driver.play(TOKENS, DECODE, mode)

    assert torch.equal(play(tmp_path / "a", range(0)), play(tmp_path / "b", range(8)))


def test_a_tier_for_staging_holds_no_block(tmp_path: Path) -> None:
    tiers = [gpu(4), TierBudget("ram", Medium.CPU, 4, TierRole.STAGING), nvme(8)]
    with engine(tmp_path, tiers) as built:
        put(built, range(4))
        assert by_tier(built.stats()) == {"hbm": (0, 4), "ram": (0, 0), "flash": (0, 0)}


def test_without_memory_for_blocks_there_are_none(tmp_path: Path) -> None:
    tiers = [TierBudget("ram", Medium.CPU, 4, TierRole.STAGING), nvme(8)]
    with engine(tmp_path, tiers, blocks=True) as built:
        with pytest.raises(CoreError) as refused:
            _ = built.blocks
        assert refused.value.reason is Reason.TIER_INCAPABLE
        assert built.stats().blocks is None


def test_stop_ends_what_is_open_and_refuses_what_comes(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS, blocks=True) as built:
        shared = built.blocks
        put(built, range(6))
        reserved = shared.store.reserve([key(8)], namespace=NAMESPACE, deadline=LATER)
        pinned = shared.store.pin(key_rows([5]), NAMESPACE, LATER)
        fetching = shared.store.fetch([key(0), key(77)], namespace=NAMESPACE, deadline=LATER)
        Driver.open(built, Rows.random(4)).forward(4)
        built.stop()
        built.stop()
        assert shared.driver.stopping
        assert shared.driver.failure is None
        with pytest.raises(CoreError) as refused:
            _ = built.blocks
        assert refused.value.reason is Reason.DRAINING
        for scope in (reserved, pinned, fetching):
            scope.close()


def test_stop_says_so_when_credits_are_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="1 grants of sessions are left"),
        engine(tmp_path, TIERS) as built,
    ):
        built._parts.ledger.acquire({1: 1})
    assert [tier.condition for tier in built.stats().tiers] == ["Closed"] * 3
