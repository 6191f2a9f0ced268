"""The ledger against a plain list of what is held: thousands of grants, shared units, faults and resets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_core.credits import (
    NO_TENANT,
    PINNED,
    QUEUE,
    STAGING,
    CreditRefused,
    Grant,
    Ledger,
    Limit,
    LinkStage,
    Release,
    Resource,
    Unit,
    link,
    slots,
)
from kvtier_core.errors import CoreError, Reason

READ = link(LinkStage.STORAGE_READ)
TOTALS: dict[Resource, int] = {PINNED: 40, STAGING: 30, READ: 25, QUEUE: 6, slots(0): 9, slots(1): 5}
QUOTAS: dict[int, dict[Resource, int]] = {1: {slots(0): 4, STAGING: 12}, 2: {}}
DEFAULT: dict[Resource, int] = {slots(0): 6}
wants = st.dictionaries(st.sampled_from(sorted(TOTALS)), st.integers(0, 9), max_size=4)
tenants = st.sampled_from([NO_TENANT, 1, 2, 3])
BACKENDS: dict[bytes, dict[Resource, int]] = {b"a": {PINNED: 7, READ: 5}, b"b": {PINNED: 20}, b"c": {READ: 9}}


@dataclass
class Held:
    grant: Grant
    parts: dict[Resource, int]
    unit: bytes | None


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(
            {resource: Limit(total) for resource, total in TOTALS.items()},
            quotas=QUOTAS,
            default_quota=DEFAULT,
        )
        self.held: list[Held] = []
        self.ended: list[Grant] = []
        self.stale: list[Grant] = []
        self.resident: dict[tuple[int, Resource], int] = {}
        self.payer: dict[bytes, int] = {}
        self.doubles = self.stales = 0

    def used(self, resource: Resource, tenant: int | None = None) -> int:
        total = sum(
            one.parts.get(resource, 0) for one in self.held if tenant is None or one.grant.tenant == tenant
        )
        total += sum(
            BACKENDS[unit].get(resource, 0)
            for unit, payer in self.payer.items()
            if tenant is None or payer == tenant
        )
        return total + sum(
            count
            for (owner, one), count in self.resident.items()
            if one == resource and (tenant is None or owner == tenant)
        )

    def expected(self, want: dict[Resource, int], tenant: int, unit: bytes | None) -> set[Reason]:
        """All reasons that would be right; empty when it must be granted."""
        charge = dict(want)
        if unit is not None:
            if unit in self.payer and self.payer[unit] != tenant:
                return {Reason.COALESCE_KEY_MISMATCH}
            if unit not in self.payer:
                for resource, amount in BACKENDS[unit].items():
                    charge[resource] = charge.get(resource, 0) + amount
        found: set[Reason] = set()
        quota = {} if tenant == NO_TENANT else QUOTAS.get(tenant, DEFAULT)
        for resource, amount in charge.items():
            if resource in quota and self.used(resource, tenant) + amount > quota[resource]:
                found.add(Reason.QUOTA_EXCEEDED)
            if self.used(resource) + amount > TOTALS[resource]:
                found.add(Reason.QUEUE_FULL if resource == QUEUE else Reason.CREDIT_PRESSURE)
                if resource == PINNED and amount > TOTALS[PINNED]:
                    found.add(Reason.ADMISSION_PINNED)
        return found

    @rule(want=wants, tenant=tenants, unit=st.sampled_from([None, *BACKENDS]))
    def acquire(self, want: dict[Resource, int], tenant: int, unit: bytes | None) -> None:
        reasons = self.expected(want, tenant, unit)
        whole = None if unit is None else Unit(unit, BACKENDS[unit])
        if reasons:
            with pytest.raises(CoreError) as refused:
                self.ledger.acquire(want, tenant, unit=whole)
            assert refused.value.reason in reasons
            if isinstance(refused.value, CreditRefused):
                assert refused.value.wanted > refused.value.available >= 0
            return
        assert self.ledger.refusal(want, tenant, whole) is None
        grant = self.ledger.acquire(want, tenant, unit=whole)
        self.held.append(Held(grant, dict(want), unit))
        if unit is not None:
            self.payer[unit] = tenant

    def end(self, one: Held) -> None:
        self.held.remove(one)
        if one.unit is not None and not any(other.unit == one.unit for other in self.held):
            del self.payer[one.unit]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.held))
        assert self.ledger.release(one.grant) is Release.RELEASED
        self.end(one)
        (self.ended if one.grant.epoch == self.ledger.epoch else self.stale).append(one.grant)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.ended))
        assert self.ledger.release(grant.id) is Release.DOUBLE
        self.doubles += 1

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def release_stale(self, data: st.DataObject) -> None:
        assert self.ledger.release(data.draw(st.sampled_from(self.stale))) is Release.STALE
        self.stales += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), resource=st.sampled_from(sorted(TOTALS)), stays=st.booleans())
    def part(self, data: st.DataObject, resource: Resource, stays: bool) -> None:
        one = data.draw(st.sampled_from(self.held))
        act = self.ledger.settle if stays else self.ledger.release_part
        if resource not in one.parts:
            assert act(one.grant, resource) is Release.DOUBLE
            self.doubles += 1
            return
        assert act(one.grant, resource) is Release.RELEASED
        amount = one.parts.pop(resource)
        if stays:
            key = (one.grant.tenant, resource)
            self.resident[key] = self.resident.get(key, 0) + amount

    @rule(tenant=tenants, resource=st.sampled_from(sorted(TOTALS)), count=st.integers(0, 4))
    def vacate(self, tenant: int, resource: Resource, count: int) -> None:
        there = self.resident.get((tenant, resource), 0)
        done = self.ledger.vacate(resource, count, tenant)
        if count > there:
            assert done is Release.DOUBLE
            self.doubles += 1
        else:
            assert done is Release.RELEASED
            self.resident[tenant, resource] = there - count

    @precondition(lambda self: self.ledger.epoch < 4)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        kept = [one for one in self.held if data.draw(st.booleans())]
        epoch = self.ledger.epoch
        assert self.ledger.rebuild(self.resident, keep=[one.grant for one in kept]) == epoch + 1
        self.stale += [one.grant for one in self.held if one not in kept] + self.ended
        self.ended = []
        for one in [one for one in self.held if one not in kept]:
            self.end(one)

    @invariant()
    def adds_up(self) -> None:
        self.ledger.check()
        assert self.ledger.outstanding() == len(self.held)
        assert (self.ledger.double_releases, self.ledger.stale_releases) == (self.doubles, self.stales)
        for resource, total in TOTALS.items():
            assert self.ledger.available(resource) == total - self.used(resource)
            for tenant in (NO_TENANT, 1, 2, 3):
                assert self.ledger.used_by(tenant, resource) == self.used(resource, tenant)
                there = self.resident.get((tenant, resource), 0)
                assert self.ledger.resident(resource, tenant) == there


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
