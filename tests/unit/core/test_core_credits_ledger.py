"""The ledger case by case: what is charged once, who may take what, what refusals say and resets leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kvtier_core.credits import (
    NO_TENANT,
    PINNED,
    QUEUE,
    STAGING,
    BlockSlots,
    CreditLedger,
    CreditRefused,
    Ledger,
    Limit,
    LinkPayer,
    LinkStage,
    Release,
    Resource,
    Unit,
    link,
    slots,
)
from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason

READ = link(LinkStage.STORAGE_READ)
COPY = link(LinkStage.HOST_TO_DEVICE)


def ledger(**more: object) -> Ledger:
    limits = {
        PINNED: Limit(12288),
        STAGING: Limit(12288),
        READ: Limit(10240),
        COPY: Limit(4096),
        QUEUE: Limit(2),
        slots(0): Limit(10, high=0.8, low=0.5),
    }
    return Ledger(limits, **more)  # type: ignore[arg-type]


def refusal(action: Callable[[], object]) -> CreditRefused:
    with pytest.raises(CreditRefused) as refused:
        action()
    return refused.value


# All or nothing, typed.


@pytest.mark.parametrize(
    ("want", "reason", "label", "available", "retries"),
    [
        pytest.param(
            {STAGING: 12289}, Reason.CREDIT_PRESSURE, "staging", 12288, False, id="more-than-there-is"
        ),
        pytest.param(
            {PINNED: 12289}, Reason.ADMISSION_PINNED, "pinned", 12288, False, id="n3-21-pinned-budget"
        ),
        pytest.param({PINNED: 12288}, Reason.CREDIT_PRESSURE, "pinned", 12287, True, id="pinned-for-now"),
        pytest.param(
            {QUEUE: 1, STAGING: 12288}, Reason.CREDIT_PRESSURE, "staging", 12287, True, id="staging"
        ),
        pytest.param(
            {STAGING: 1, COPY: 4096}, Reason.CREDIT_PRESSURE, "link:host_to_device", 4095, True, id="link"
        ),
        pytest.param({STAGING: 1, QUEUE: 2}, Reason.QUEUE_FULL, "queue", 1, True, id="n10-19-queue"),
        pytest.param({QUEUE: 1, slots(0): 10}, Reason.CREDIT_PRESSURE, "slots:0", 9, True, id="slots"),
    ],
)
def test_what_is_short_is_named_and_nothing_is_taken(
    want: Mapping[Resource, int], reason: Reason, label: str, available: int, retries: bool
) -> None:
    one = ledger()
    if retries:
        one.acquire({PINNED: 1, STAGING: 1, READ: 1, COPY: 1, QUEUE: 1, slots(0): 1})
    before = one.use()
    error = refusal(lambda: one.acquire(want))
    assert error.reason is reason
    assert (error.resource.label, error.available, error.facts["resource"]) == (label, available, label)
    assert error.facts["wanted"] == str(want[error.resource])
    assert (error.retry_after_ms is not None) is retries is ("retry_after_ms" in error.facts)
    assert one.refusals == {(error.resource, reason): 1}
    after = one.use()
    assert {key: (use.free, use.granted) for key, use in after.items()} == {
        key: (use.free, use.granted) for key, use in before.items()
    }
    assert sum(use.refused for use in after.values()) == 1
    one.check()


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({STAGING: -1}, id="negative"),
        pytest.param({slots(7): 1}, id="unknown-tier"),
        pytest.param({link(LinkStage.STORAGE_WRITE): 1}, id="unknown-stage"),
    ],
)
def test_nonsense_is_no_pressure(bad: Mapping[Resource, int]) -> None:
    one = ledger()
    for action in (
        lambda: one.acquire(bad),
        lambda: one.acquire({}, unit=Unit(b"u", bad)),
        lambda: one.acquire({STAGING: 5}, unit=Unit(b"u", bad)),
    ):
        with pytest.raises(CoreError) as refused:
            action()
        assert refused.value.reason is Reason.BAD_ARGUMENT
    assert one.outstanding() == 0
    one.check()


@pytest.mark.parametrize(
    "marks", [pytest.param((-1, 1.0, 1.0), id="total"), pytest.param((5, 0.5, 0.8), id="low-over-high")]
)
def test_a_limit_makes_sense(marks: tuple[int, float, float]) -> None:
    with pytest.raises(CoreError):
        Limit(*marks)


# Released exactly once.


def test_a_second_release_changes_nothing_and_is_counted() -> None:
    one = ledger()
    grant = one.acquire({STAGING: 100, QUEUE: 1})
    assert one.release(grant) is Release.RELEASED
    assert one.release(grant) is Release.DOUBLE
    assert one.release(99) is Release.DOUBLE
    assert one.settle(grant, STAGING) is Release.DOUBLE
    assert one.vacate(slots(0), 1) is Release.DOUBLE
    assert (one.double_releases, one.available(STAGING), one.outstanding()) == (4, 12288, 0)
    one.check()


def test_parts_go_back_as_their_stage_ends() -> None:
    one = ledger()
    grant = one.acquire({READ: 4096, STAGING: 4096, slots(0): 1})
    assert one.release_part(grant, READ) is Release.RELEASED
    assert one.release_part(grant, READ) is Release.DOUBLE
    assert one.settle(grant, slots(0)) is Release.RELEASED
    assert one.settle(grant, slots(0)) is Release.DOUBLE
    one.check()
    assert one.release(grant) is Release.RELEASED
    assert (one.available(STAGING), one.available(slots(0)), one.resident(slots(0))) == (12288, 9, 1)
    assert one.vacate(slots(0), 1) is Release.RELEASED
    assert one.available(slots(0)) == 10


# Backend once per unit, staging per request (G.3).


def test_shared_bytes_are_charged_once_and_staging_for_each() -> None:
    one = ledger()
    unit = Unit(b"u1", {PINNED: 4096, READ: 4096})
    alpha = one.acquire({STAGING: 4096, QUEUE: 1}, 1, unit=unit)
    beta = one.acquire({STAGING: 4096, QUEUE: 1}, 1, unit=unit)
    assert (one.available(PINNED), one.available(READ), one.available(STAGING)) == (8192, 6144, 4096)
    assert (one.shared_grants, one.available(QUEUE)) == (1, 0)
    one.check()
    one.release(alpha)
    assert (one.available(PINNED), one.available(STAGING)) == (8192, 8192)
    one.check()
    one.release(beta)
    assert (one.available(PINNED), one.available(READ), one.available(STAGING)) == (12288, 10240, 12288)
    one.check()


def test_a_unit_is_never_shared_between_tenants_nor_changed() -> None:
    one = ledger()
    one.acquire({STAGING: 1}, 1, unit=Unit(b"u1", {PINNED: 4096}))
    for tenant, unit, reason in (
        (2, Unit(b"u1", {PINNED: 4096}), Reason.COALESCE_KEY_MISMATCH),
        (1, Unit(b"u1", {PINNED: 4097}), Reason.BAD_ARGUMENT),
    ):
        with pytest.raises(CoreError) as refused:
            one.acquire({STAGING: 1}, tenant, unit=unit)
        assert refused.value.reason is reason
    assert (one.outstanding(), one.available(PINNED)) == (1, 8192)


def test_a_refused_unit_is_not_paid_by_anybody() -> None:
    one = ledger()
    unit = Unit(b"u1", {PINNED: 4096})
    assert refusal(lambda: one.acquire({STAGING: 20000}, 1, unit=unit)).reason is Reason.CREDIT_PRESSURE
    one.acquire({STAGING: 1}, 2, unit=unit)
    one.check()


# Quotas.


def test_one_tenant_cannot_take_what_another_was_promised() -> None:
    one = ledger(quotas={1: {slots(0): 3}}, default_quota={slots(0): 2})
    held = [one.acquire({slots(0): 1}, 1) for _ in range(3)]
    error = refusal(lambda: one.acquire({slots(0): 1}, 1))
    assert (error.reason, error.available, error.capacity) == (Reason.QUOTA_EXCEEDED, 0, 3)
    assert error.retry_after_ms is not None
    assert refusal(lambda: one.acquire({slots(0): 3}, 2)).retry_after_ms is None
    one.acquire({slots(0): 2}, 2)
    one.acquire({slots(0): 5}, NO_TENANT)
    assert refusal(lambda: one.acquire({slots(0): 1}, 3)).reason is Reason.CREDIT_PRESSURE
    one.settle(held[0], slots(0))
    one.release(held[0])
    assert refusal(lambda: one.acquire({slots(0): 1}, 1)).reason is Reason.QUOTA_EXCEEDED
    assert (one.used_by(1, slots(0)), one.resident(slots(0), 1)) == (3, 1)
    assert one.vacate(slots(0), 1, 2) is Release.DOUBLE
    assert one.vacate(slots(0), 1, 1) is Release.RELEASED
    one.acquire({slots(0): 1}, 1)
    one.set_quota(1, {slots(0): 1})
    error = refusal(lambda: one.acquire({slots(0): 1}, 1))
    assert (error.reason, error.available) == (Reason.QUOTA_EXCEEDED, 0)
    one.check()


# Watermarks and hints.


def test_watermarks_ask_for_room_down_to_the_low_one() -> None:
    one = ledger()
    grants = [one.acquire({slots(0): 1}) for _ in range(8)]
    assert one.excess(slots(0)) == 0
    grants.append(one.acquire({slots(0): 1}))
    assert one.excess(slots(0)) == 4
    for grant in grants[:4]:
        one.release(grant)
    assert one.excess(slots(0)) == 0
    assert one.excess(STAGING) == 0


def test_the_hint_follows_how_fast_room_comes_back() -> None:
    now = [0.0]
    one = ledger(clock=lambda: now[0])
    first = one.acquire({STAGING: 12288})
    assert refusal(lambda: one.acquire({STAGING: 1000})).retry_after_ms == 50
    one.release(first)
    hold = one.acquire({STAGING: 12288})
    soon = refusal(lambda: one.acquire({STAGING: 6144})).retry_after_ms
    assert soon == 500
    now[0] = 1.0
    later = refusal(lambda: one.acquire({STAGING: 6144})).retry_after_ms
    assert later == 1360
    now[0] = 100.0
    assert refusal(lambda: one.acquire({STAGING: 6144})).retry_after_ms == 10_000
    one.release(hold)


# Reset.


def test_after_a_reset_old_grants_are_stale_and_kept_ones_come_back_once() -> None:
    one = ledger()
    unit = Unit(b"u", {PINNED: 100})
    lost = one.acquire({STAGING: 10}, 1, unit=unit)
    draining = one.acquire({STAGING: 20, slots(0): 1}, 1, unit=unit)
    assert one.rebuild({(1, slots(0)): 4, (2, slots(0)): 2}, keep=[draining]) == 2
    one.check()
    assert (one.available(slots(0)), one.available(STAGING), one.available(PINNED)) == (3, 12268, 12188)
    assert one.release(lost) is Release.STALE
    assert one.release(draining) is Release.RELEASED
    assert one.release(draining) is Release.STALE
    assert (one.stale_releases, one.double_releases) == (2, 0)
    assert (one.available(slots(0)), one.available(STAGING), one.available(PINNED)) == (4, 12288, 12288)
    fresh = one.acquire({STAGING: 1})
    assert fresh.epoch == 2 and fresh.id > draining.id
    assert one.release(fresh) is Release.RELEASED and one.release(fresh) is Release.DOUBLE
    one.check()


@pytest.mark.parametrize(
    "resident",
    [
        pytest.param({(1, slots(0)): 10}, id="with-what-is-kept"),
        pytest.param({(1, slots(0)): 11}, id="alone"),
        pytest.param({(1, slots(9)): 1}, id="unknown"),
        pytest.param({(1, slots(0)): -1}, id="negative"),
    ],
)
def test_a_reset_to_more_than_there_is_is_refused(resident: Mapping[tuple[int, Resource], int]) -> None:
    one = ledger()
    grant = one.acquire({slots(0): 1})
    with pytest.raises(CoreError) as refused:
        one.rebuild(resident, keep=[grant])
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert (one.epoch, one.available(slots(0))) == (1, 9)
    one.check()
    assert one.release(grant) is Release.RELEASED


# Sessions and blocks out of one ledger; who pays for a block.


def test_sessions_and_blocks_share_slots() -> None:
    shared = Ledger({slots(0): Limit(3)})
    sessions = CreditLedger([3], shared)
    grant = sessions.acquire({0: 2})
    shared.acquire({slots(0): 1}, 4)
    with pytest.raises(CoreError) as refused:
        sessions.acquire({0: 1})
    assert refused.value.reason is Reason.CREDIT_PRESSURE
    assert (sessions.available(0), sessions.granted(0), sessions.outstanding()) == (0, 2, 1)
    sessions.release(grant)
    sessions.check()
    assert shared.available(slots(0)) == 2


def test_a_published_block_holds_its_slot_without_a_grant() -> None:
    directory, one = Directory(tiers=1), ledger(quotas={5: {slots(0): 1}})
    payer = BlockSlots(one, directory)
    line, other = (directory.insert_block(bytes([n]) * 32, namespace=5) for n in (1, 2))
    token = payer.take(line, 0)
    assert refusal(lambda: payer.take(other, 0)).reason is Reason.QUOTA_EXCEEDED
    assert payer.settle(line, 0, -1, token) == 0
    assert (one.outstanding(), one.resident(slots(0), 5)) == (0, 1)
    payer.give(line, 0, 0)
    one.check()
    for action in (lambda: payer.give(line, 0, 0), lambda: payer.settle(line, 0, -1, token)):
        with pytest.raises(CoreError) as refused:
            action()
        assert refused.value.reason is Reason.INTERNAL
    payer.give(other, 0, payer.take(other, 0))
    assert one.available(slots(0)) == 10
    one.check()


def test_a_transfer_pays_each_stage_that_it_passes_and_a_queue_slot() -> None:
    one = ledger()
    payer = LinkPayer(one, {(2, 0): (READ, COPY), (1, 0): (COPY,)})
    through = payer.acquire(2, 0, 4096, 1)
    assert (one.available(READ), one.available(COPY), one.available(QUEUE)) == (6144, 0, 1)
    assert refusal(lambda: payer.acquire(1, 0, 1, 1)).resource == COPY
    payer.acquire(0, 1, 4096, 1)
    assert refusal(lambda: payer.acquire(0, 1, 1, 1)).reason is Reason.QUEUE_FULL
    payer.release(through)
    payer.release(through)
    assert (one.available(READ), one.double_releases) == (10240, 1)
    one.check()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(lambda one: one._free.__setitem__(QUEUE, 2), "queue: free 2", id="free"),
        pytest.param(lambda one: one._resident.__setitem__((1, QUEUE), 1), "queue: free", id="resident"),
        pytest.param(lambda one: one._used.__setitem__((1, QUEUE), 2), "tenants use 2", id="tenant"),
        pytest.param(lambda one: one._grants.clear(), "staging", id="grant"),
        pytest.param(lambda one: one._units.clear(), "pinned", id="unit"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_noticed(harm: Callable[[Ledger], object], words: str) -> None:
    one = ledger()
    one.acquire({QUEUE: 1, STAGING: 5}, 1, unit=Unit(b"u", {PINNED: 3}))
    one.check()
    harm(one)
    with pytest.raises(AssertionError, match=words):
        one.check()
