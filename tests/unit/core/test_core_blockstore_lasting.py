"""Write-through: nobody is told "durable" before a copy is in storage, and storage keeps it from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.lasting import Lasting
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.credits import slots
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason
from tests.unit.core.storebench import ALPHA, BETA, StoreBench, content, key


@pytest.fixture
def bench() -> StoreBench:
    return StoreBench(memory=4, storage=8, persistent=True)


def persist(bench: StoreBench, *names: str, seconds: float = 10.0, namespace: bytes = ALPHA) -> Lasting:
    return bench.store.persist(
        [key(name) for name in names], namespace=namespace, deadline=bench.clock.now + seconds
    )


def down(bench: StoreBench, name: str) -> bool:
    return bench.store.directory.counts(bench.store.directory.find(key(name)), 1)


def test_a_block_is_durable_when_its_copy_is_published_and_not_before(bench: StoreBench) -> None:
    bench.put("a", "b")
    scope = persist(bench, "a", "b")
    bench.disk.of("a").finish()
    assert (scope.over, scope.reasons) == (False, [None, None])
    bench.store.pump()
    assert (scope.over, scope.reasons) == (False, [MoveReason.READY, None])
    bench.settle()
    bench.store.pump()
    assert scope.over and scope.reasons == [MoveReason.READY] * 2
    assert down(bench, "a") and down(bench, "b")
    with bench.pin("a", "b") as pinned:
        assert [bytes(pinned.body(at)) for at in range(2)] == [content("a"), content("b")]
    assert persist(bench, "a").reasons == [MoveReason.READY]
    bench.rest()


def test_writers_share_a_batch_and_a_block_is_written_once(bench: StoreBench) -> None:
    bench.put("a", "b", "c", "d")
    scopes = [persist(bench, "a", "b"), persist(bench, "b", "c"), persist(bench, "a")]
    assert sorted(held.item.identity.chunk_digest for held in bench.disk.held) == sorted(map(key, "abc"))
    assert all(held.item.identity.durable for held in bench.disk.held)
    bench.settle()
    bench.store.pump()
    assert [scope.reasons for scope in scopes] == [[MoveReason.READY] * len(scope) for scope in scopes]
    bench.rest()


def test_only_so_many_are_on_their_way_at_a_time_and_all_arrive(bench: StoreBench) -> None:
    bench.store.through._at_once = 2
    bench.put("a", "b", "c", "d")
    scope = persist(bench, "a", "b", "c", "d")
    for _ in range(2):
        assert len(bench.disk.held) == 2
        for held in list(bench.disk.held):
            held.finish()
        bench.store.pump()
    assert scope.reasons == [MoveReason.READY] * 4
    bench.rest()


def test_a_block_on_its_way_down_is_waited_for_and_not_written_again(bench: StoreBench) -> None:
    bench.put("a", "b", "c", "d")
    assert bench.put("e")[0].reason is MoveReason.CREDIT_PRESSURE, "one of them leaves"
    (leaving,) = bench.disk.held
    name = next(each for each in "abcd" if key(each) == leaving.item.identity.chunk_digest)
    scope = persist(bench, name)
    assert len(bench.disk.held) == 1
    bench.settle()
    bench.store.pump()
    assert scope.reasons == [MoveReason.READY]
    bench.rest()


def test_who_needs_room_waits_for_what_is_written_through_and_then_has_it(bench: StoreBench) -> None:
    bench.put("a", "b", "c", "d")
    scope = persist(bench, "a", "b", "c", "d")
    assert bench.put("e")[0].reason is MoveReason.CREDIT_PRESSURE
    assert len(bench.disk.held) == 4, "nothing is written twice for that"
    bench.settle()
    assert bench.put("e")[0].outcome is PutOutcome.STORED
    assert scope.over and all(down(bench, name) for name in "abcd")
    bench.rest()


def broken(bench: StoreBench, _scope: Lasting) -> None:
    bench.disk.of("a").finish(CoreError(Reason.STORAGE_UNAVAILABLE, "EIO"), part=100)


def late(bench: StoreBench, _scope: Lasting) -> None:
    bench.clock.now += 11
    bench.disk.of("a").late()


def deleted(bench: StoreBench, _scope: Lasting) -> None:
    bench.store.delete([key("a")])


@pytest.mark.parametrize(
    ("happens", "reason", "stays"),
    [
        pytest.param(broken, MoveReason.STORAGE_UNAVAILABLE, True, id="the-device-fails"),
        pytest.param(late, MoveReason.DEADLINE, True, id="the-deadline-passes"),
        pytest.param(deleted, MoveReason.TOMBSTONED, False, id="it-is-deleted"),
    ],
)
def test_what_is_not_durable_says_why_and_stays_stored(
    bench: StoreBench, happens: Callable[[StoreBench, Lasting], None], reason: MoveReason, stays: bool
) -> None:
    bench.put("a")
    scope = persist(bench, "a")
    happens(bench, scope)
    bench.store.pump()
    assert scope.over and scope.reasons == [reason] and scope.messages[0]
    assert bench.found("a") == stays
    for _ in range(3):
        bench.settle()
    bench.rest()
    assert not len(bench.store.through)


def full_of_rows(bench: StoreBench) -> None:
    bench.store.ledger.claim(slots(1), 8)


def foreign(bench: StoreBench) -> None:
    bench.store.delete([key("a")])
    bench.settle()
    bench.put("a", namespace=BETA)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        pytest.param(full_of_rows, MoveReason.NO_DESTINATION_CAPACITY, id="rows-have-the-storage"),
        pytest.param(foreign, MoveReason.MISS, id="another-tenants"),
        pytest.param(lambda bench: bench.store.delete([key("a")]), MoveReason.MISS, id="being-deleted"),
    ],
)
def test_what_cannot_be_durable_is_refused_at_once(
    bench: StoreBench, before: Callable[[StoreBench], object], reason: MoveReason
) -> None:
    bench.put("a")
    before(bench)
    scope = persist(bench, "a")
    assert scope.over and scope.reasons == [reason]
    bench.settle()


def test_a_queue_that_is_full_for_now_is_tried_again_until_the_deadline(bench: StoreBench) -> None:
    bench.put("a")
    bench.disk.refuse = CoreError(Reason.QUEUE_FULL, "too many blocks wait")
    scope = persist(bench, "a")
    bench.store.pump()
    assert not scope.over
    bench.disk.refuse = None
    bench.settle()
    bench.store.pump()
    assert scope.reasons == [MoveReason.READY]
    bench.put("b")
    bench.disk.refuse = CoreError(Reason.QUEUE_FULL, "too many blocks wait")
    scope = persist(bench, "b")
    bench.clock.now += 11
    bench.store.pump()
    assert scope.reasons == [MoveReason.DEADLINE] and "QUEUE_FULL" in scope.messages[0]
    bench.disk.refuse = None
    bench.rest()


def test_the_patient_get_another_copy_when_that_of_the_hasty_was_late(bench: StoreBench) -> None:
    bench.put("a")
    hasty = persist(bench, "a", seconds=1)
    patient = persist(bench, "a", seconds=100)
    bench.clock.now += 2
    bench.disk.of("a").late()
    bench.store.pump()
    assert hasty.reasons == [MoveReason.DEADLINE]
    for _ in range(3):
        bench.settle()
    bench.store.pump()
    assert patient.reasons == [MoveReason.READY]
    bench.rest()


def test_a_writer_that_leaves_disturbs_nobody(bench: StoreBench) -> None:
    bench.put("a")
    one, other = persist(bench, "a"), persist(bench, "a")
    bench.store.through_with(one)
    bench.settle()
    bench.store.pump()
    assert (one.reasons, other.reasons) == ([None], [MoveReason.READY])
    bench.put("b")
    bench.store.through_with(persist(bench, "b"))
    assert not len(bench.store.through)
    bench.settle()
    assert down(bench, "b"), "what is on its way goes on"
    bench.rest()


@pytest.mark.parametrize(("persistent", "stays"), [(True, True), (False, False)])
def test_storage_that_outlives_the_process_keeps_what_may_not_be_lost(persistent: bool, stays: bool) -> None:
    """A copy in memory is none that survives a crash."""
    bench = StoreBench(memory=4, storage=4, persistent=persistent)
    bench.on_disk("a", "b", "c")
    with bench.fetch("a") as fetch:
        bench.settle()
        assert fetch.ready == 1
    bench.store.reclaim.make_room(1, 2)
    bench.settle()
    assert down(bench, "a") is stays
    assert bench.found("a") == 1
    bench.rest()


def test_where_nothing_outlives_the_process_a_durable_put_stores_nothing() -> None:
    bench = StoreBench()
    driver = Driver(bench.store, Bell(), bench.clock)
    with pytest.raises(CoreError) as refused:
        driver.put([key("a")], [content("a")], namespace=ALPHA, deadline=200.0, durable=True)
    assert refused.value.reason is Reason.TIER_INCAPABLE
    assert bench.found("a") == 0


def test_a_durable_put_of_the_driver_answers_when_the_copy_is_down(bench: StoreBench) -> None:
    bell = Bell()
    driver = Driver(bench.store, bell, bench.clock)
    driver.start()
    bench.put("b")
    answers: list[list[object]] = []

    def put() -> None:
        stored = driver.put(
            [key("a"), key("b")], [content("a"), content("b")], namespace=ALPHA, deadline=200.0, durable=True
        )
        answers.append([(each.outcome, each.durable) for each in stored])

    writer = threading.Thread(target=put)
    writer.start()
    waited = threading.Event()
    for _ in range(12_000):
        if len(bench.disk.held) == 2:
            break
        waited.wait(0.005)
    assert (len(bench.disk.held), answers) == (2, [])
    for held in list(bench.disk.held):
        held.finish()
    bell.ring()
    writer.join(60)
    driver.close()
    assert answers == [[(PutOutcome.STORED, True), (PutOutcome.EXISTED, True)]]
