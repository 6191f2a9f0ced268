"""The ledger of one cache on one node: grants in flight, slots that are occupied, and what is free.

Why it exists: a copy needs all its resources or none; what a fault leaves behind must still add up; and one
tenant must not take what another was promised. It must not know blocks, tiers or transfers.

Conservation, per resource: free + in grants + in shared units + resident == total. One caller at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from kvtier_core.credits.resources import (
    NO_TENANT,
    CreditRefused,
    Grant,
    Limit,
    Release,
    Resource,
    ResourceKind,
    Unit,
)
from kvtier_core.errors import CoreError, Reason

# A hint before anything was given back, and its bounds.
RETRY_MS = 50
_MIN_RETRY_MS, _MAX_RETRY_MS = 1, 10_000
# Over how many seconds the speed of giving back is remembered.
_MEMORY_SECONDS = 1.0
_NO_QUOTA: Mapping[Resource, int] = {}
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """One resource as it stands. refused: how many acquisitions it stopped."""

    total: int
    free: int
    granted: int
    resident: int
    refused: int


@dataclass(slots=True)
class _Charged:
    """A unit in flight: who pays, what, and how many grants share it."""

    tenant: int
    backend: dict[Resource, int]
    sharers: int


class _Flow:
    """How much of a resource was given back per second, lately."""

    __slots__ = ("at", "level")

    def __init__(self) -> None:
        self.at = 0.0
        self.level = 0.0

    def add(self, amount: int, now: float) -> None:
        self.level = self.per_second(now) * _MEMORY_SECONDS + amount
        self.at = now

    def per_second(self, now: float) -> float:
        return self.level * math.exp(min(0.0, self.at - now) / _MEMORY_SECONDS) / _MEMORY_SECONDS


class Ledger:
    """limits: all resources there are. quotas: per tenant; `default_quota` for every tenant without one of
    its own (NO_TENANT has none). clock: seconds, for retry hints only; without one hints are constant."""

    def __init__(
        self,
        limits: Mapping[Resource, Limit],
        *,
        quotas: Mapping[int, Mapping[Resource, int]] | None = None,
        default_quota: Mapping[Resource, int] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._limits = dict(limits)
        self._free = {resource: limit.total for resource, limit in limits.items()}
        self._quotas = {tenant: dict(quota) for tenant, quota in (quotas or {}).items()}
        self._default_quota = dict(default_quota or {})
        self._used: dict[tuple[int, Resource], int] = {}
        self._resident: dict[tuple[int, Resource], int] = {}
        self._grants: dict[int, tuple[Grant, dict[Resource, int]]] = {}
        self._units: dict[bytes, _Charged] = {}
        self._claimed: dict[Resource, int] = {}
        self._clock = clock
        self._flows = {resource: _Flow() for resource in limits}
        self._next = 1
        self._first_of_epoch = 1
        self.epoch = 1
        self.refusals: dict[tuple[Resource, Reason], int] = {}
        self.double_releases = 0
        self.stale_releases = 0
        self.shared_grants = 0

    def resize(self, resource: Resource, total: int) -> None:
        """Another total from now on. CREDIT_PRESSURE while more than that is taken (ADMISSION_PINNED for
        PINNED); nothing has changed then."""
        limit = self._limits[resource]
        taken = limit.total - self._free[resource]
        if taken > total:
            reason = Reason.ADMISSION_PINNED if resource.kind is ResourceKind.PINNED else None
            raise CreditRefused(
                reason or Reason.CREDIT_PRESSURE, resource, taken, total, total, None if reason else RETRY_MS
            )
        self._limits[resource] = replace(limit, total=total)
        self._free[resource] = total - taken

    # Asking.

    def total(self, resource: Resource) -> int:
        return self._limits[resource].total

    def available(self, resource: Resource) -> int:
        return self._free[resource]

    def offered(self, resource: Resource) -> int:
        """What tenants may take of it: what is free and not claimed; negative when more is claimed than
        free."""
        return self._free[resource] - self._claimed.get(resource, 0)

    def resident(self, resource: Resource, tenant: int | None = None) -> int:
        """What occupies a resource without a grant, of one tenant or of all."""
        if tenant is not None:
            return self._resident.get((tenant, resource), 0)
        return sum(count for (_, one), count in self._resident.items() if one == resource)

    def granted(self, resource: Resource) -> int:
        """What grants in flight and the units they share hold."""
        held = sum(parts.get(resource, 0) for _, parts in self._grants.values())
        return held + sum(unit.backend.get(resource, 0) for unit in self._units.values())

    def outstanding(self) -> int:
        """How many grants are not released."""
        return len(self._grants)

    def used_by(self, tenant: int, resource: Resource) -> int:
        return self._used.get((tenant, resource), 0)

    def quota(self, tenant: int, resource: Resource) -> int | None:
        """The tenant's limit of a resource; None: only the total."""
        quotas = _NO_QUOTA if tenant == NO_TENANT else self._quotas.get(tenant, self._default_quota)
        return quotas.get(resource)

    def set_quota(self, tenant: int, quota: Mapping[Resource, int]) -> None:
        """Replaces a tenant's quota. One below what is used takes effect as room comes back."""
        self._quotas[tenant] = dict(quota)

    def excess(self, resource: Resource) -> int:
        """How much to free now: nothing up to the high watermark, above it what exceeds the low one."""
        limit = self._limits[resource]
        used = limit.total - self._free[resource]
        return used - math.floor(limit.total * limit.low) if used > limit.total * limit.high else 0

    def use(self) -> dict[Resource, ResourceUse]:
        return {
            resource: ResourceUse(
                total=limit.total,
                free=self._free[resource],
                granted=self.granted(resource),
                resident=self.resident(resource),
                refused=sum(count for (one, _), count in self.refusals.items() if one == resource),
            )
            for resource, limit in self._limits.items()
        }

    def refusal(
        self, want: Mapping[Resource, int], tenant: int = NO_TENANT, unit: Unit | None = None
    ) -> CreditRefused | None:
        """Why `acquire` would refuse; None when it would not. Counts nothing."""
        return self._shortage(self._charge(want, tenant, unit), tenant)

    # Taking and giving back.

    def acquire(
        self, want: Mapping[Resource, int], tenant: int = NO_TENANT, *, unit: Unit | None = None
    ) -> Grant:
        """Takes all of `want`, and the unit's backend unless a grant in flight has paid it, or nothing.
        Raises CreditRefused; BAD_ARGUMENT for a negative amount, an unknown resource, or a unit whose backend
        changed; COALESCE_KEY_MISMATCH for a unit that another tenant pays."""
        charge = self._charge(want, tenant, unit)
        short = self._shortage(charge, tenant)
        if short is not None:
            key = (short.resource, short.reason)
            self.refusals[key] = self.refusals.get(key, 0) + 1
            raise short
        grant = Grant(self._next, tenant, self.epoch, want, unit.key if unit else None)
        self._next += 1
        for resource, amount in charge.items():
            self._take(tenant, resource, amount)
        if unit is not None:
            known = self._units.get(unit.key)
            if known is None:
                self._units[unit.key] = _Charged(tenant, dict(unit.backend), 1)
            else:
                known.sharers += 1
                self.shared_grants += 1
        self._grants[grant.id] = (grant, dict(want))
        return grant

    def claim(self, resource: Resource, count: int) -> None:
        """Until `unclaim`, tenants leave `count` of what is or comes free to NO_TENANT: sessions' rows go
        before cached blocks, and what is freed for a row must not be a block's before the row has it."""
        self._claimed[resource] = self._claimed.get(resource, 0) + count

    def unclaim(self, resource: Resource, count: int) -> None:
        _note(self._claimed, resource, -count)

    def release(self, grant: Grant | int) -> Release:
        """Gives back what is left of a grant (or of the grant of that id), once; see `Release`."""
        held = self._grants.pop(_id(grant), None)
        if held is None:
            return self._not_held(grant)
        given, parts = held
        for resource, amount in parts.items():
            self._give(given.tenant, resource, amount)
        if given.unit is not None:
            unit = self._units[given.unit]
            unit.sharers -= 1
            if not unit.sharers:
                del self._units[given.unit]
                for resource, amount in unit.backend.items():
                    self._give(unit.tenant, resource, amount)
        return Release.RELEASED

    def release_part(self, grant: Grant | int, resource: Resource) -> Release:
        """Gives back one resource of a grant early: link bytes once the copy ended, say. DOUBLE when the
        grant holds none of it any more."""
        held = self._grants.get(_id(grant))
        if held is None or resource not in held[1]:
            return self._not_held(grant)
        self._give(held[0].tenant, resource, held[1].pop(resource))
        return Release.RELEASED

    def settle(self, grant: Grant | int, resource: Resource) -> Release:
        """Turns a grant's part into what is resident: a published copy occupies its slot without a grant.
        `vacate` ends that. DOUBLE when the grant holds none of it any more."""
        held = self._grants.get(_id(grant))
        if held is None or resource not in held[1]:
            return self._not_held(grant)
        _note(self._resident, (held[0].tenant, resource), held[1].pop(resource))
        return Release.RELEASED

    def occupy(self, resource: Resource, count: int, tenant: int = NO_TENANT) -> None:
        """Takes `count` as resident in one step, without a grant: for slots whose taker keeps account of them
        itself. `vacate` ends that. Raises CreditRefused as `acquire` does; nothing is taken then."""
        short = self._shortage({resource: count}, tenant)
        if short is not None:
            key = (short.resource, short.reason)
            self.refusals[key] = self.refusals.get(key, 0) + 1
            raise short
        if count:
            self._free[resource] -= count
            place = (tenant, resource)
            self._used[place] = self._used.get(place, 0) + count
            self._resident[place] = self._resident.get(place, 0) + count

    def vacate(self, resource: Resource, count: int, tenant: int = NO_TENANT) -> Release:
        """Ends residence. DOUBLE when the tenant has less resident: nothing changed."""
        if count < 0:
            raise CoreError(Reason.BAD_ARGUMENT, f"{count} of {resource.label} to vacate")
        if self._resident.get((tenant, resource), 0) < count:
            self.double_releases += 1
            return Release.DOUBLE
        _note(self._resident, (tenant, resource), -count)
        self._give(tenant, resource, count)
        return Release.RELEASED

    def rebuild(self, resident: Mapping[tuple[int, Resource], int], *, keep: Iterable[Grant] = ()) -> int:
        """Starts the next job epoch: `resident` is what the directory says is occupied, `keep` are the grants
        whose bytes may still arrive, to be released when they have drained. All others end here and are STALE
        from now on. Returns the epoch. BAD_ARGUMENT, with nothing changed, when that is more than there is or
        a kept grant is not held."""
        kept = {grant.id: self._grants[grant.id] for grant in keep if grant.id in self._grants}
        units: dict[bytes, _Charged] = {}
        used: dict[tuple[int, Resource], int] = {}
        for (tenant, resource), amount in resident.items():
            _note(used, (tenant, resource), amount)
        for grant, parts in kept.values():
            for resource, amount in parts.items():
                _note(used, (grant.tenant, resource), amount)
            if grant.unit is not None and grant.unit not in units:
                old = self._units[grant.unit]
                units[grant.unit] = _Charged(old.tenant, old.backend, 0)
                for resource, amount in old.backend.items():
                    _note(used, (old.tenant, resource), amount)
            if grant.unit is not None:
                units[grant.unit].sharers += 1
        free = {resource: limit.total for resource, limit in self._limits.items()}
        for (_, resource), amount in used.items():
            free[resource] = free.get(resource, -1) - amount
        if (
            len(free) != len(self._limits)
            or min(free.values(), default=0) < 0
            or min(used.values(), default=0) < 0
        ):
            raise CoreError(Reason.BAD_ARGUMENT, "more is occupied than there is")
        self._free, self._used, self._units, self._grants = free, used, units, kept
        self._resident = {key: amount for key, amount in resident.items() if amount}
        self._first_of_epoch = self._next
        self.epoch += 1
        return self.epoch

    def check(self) -> None:
        """Conservation; raises AssertionError. For tests and for a cache's own stop."""
        for resource, limit in self._limits.items():
            free, held, settled = self._free[resource], self.granted(resource), self.resident(resource)
            if free < 0 or free + held + settled != limit.total:
                raise AssertionError(
                    f"{resource.label}: free {free} + granted {held} + resident {settled} != {limit.total}"
                )
            by_tenant = sum(amount for (_, one), amount in self._used.items() if one == resource)
            if by_tenant != held + settled:
                raise AssertionError(f"{resource.label}: tenants use {by_tenant}, not {held + settled}")

    # Inside.

    def _charge(self, want: Mapping[Resource, int], tenant: int, unit: Unit | None) -> Mapping[Resource, int]:
        """`want`, and the unit's backend unless it is paid already."""
        if unit is None:
            return want
        known = self._units.get(unit.key)
        if known is None:
            charge = dict(want)
            for resource, amount in unit.backend.items():
                # A negative amount must be refused, not hidden in a sum.
                if amount < 0:
                    return unit.backend
                charge[resource] = charge.get(resource, 0) + amount
            return charge
        if known.tenant != tenant:
            raise CoreError(Reason.COALESCE_KEY_MISMATCH, "a read is never shared between tenants")
        if known.backend != dict(unit.backend):
            raise CoreError(Reason.BAD_ARGUMENT, "an immutable unit does not change its bytes")
        return want

    def _shortage(self, charge: Mapping[Resource, int], tenant: int) -> CreditRefused | None:
        quotas = _NO_QUOTA if tenant == NO_TENANT else self._quotas.get(tenant, self._default_quota)
        for resource, amount in charge.items():
            free = self._free.get(resource)
            if free is None or amount < 0:
                raise CoreError(Reason.BAD_ARGUMENT, f"{amount} of {resource.label} wanted")
            quota = quotas.get(resource) if quotas else None
            if quota is not None:
                left = max(0, quota - self._used.get((tenant, resource), 0))
                if amount > left:
                    return self._refuse(Reason.QUOTA_EXCEEDED, resource, amount, left, quota)
            if self._claimed and tenant != NO_TENANT:
                free -= self._claimed.get(resource, 0)
            if amount > free:
                free, total = max(0, free), self._limits[resource].total
                return self._refuse(_reason(resource, amount, total), resource, amount, free, total)
        return None

    def _refuse(self, reason: Reason, resource: Resource, wanted: int, left: int, most: int) -> CreditRefused:
        hint = None if wanted > most else self._retry_ms(resource, wanted - left)
        return CreditRefused(reason, resource, wanted, left, most, hint)

    def _retry_ms(self, resource: Resource, missing: int) -> int:
        """When the missing amount should be back, at the speed at which it lately came."""
        speed = self._flows[resource].per_second(self._clock()) if self._clock else 0.0
        if speed <= 0.0:
            return RETRY_MS
        return min(_MAX_RETRY_MS, max(_MIN_RETRY_MS, math.ceil(missing / speed * 1000)))

    def _not_held(self, grant: Grant | int) -> Release:
        number = _id(grant)
        if number not in self._grants and 0 < number < self._first_of_epoch:
            self.stale_releases += 1
            return Release.STALE
        self.double_releases += 1
        return Release.DOUBLE

    def _take(self, tenant: int, resource: Resource, amount: int) -> None:
        if amount:
            self._free[resource] -= amount
            key = (tenant, resource)
            self._used[key] = self._used.get(key, 0) + amount

    def _give(self, tenant: int, resource: Resource, amount: int) -> None:
        if amount:
            self._free[resource] += amount
            _note(self._used, (tenant, resource), -amount)
            if self._clock is not None:
                self._flows[resource].add(amount, self._clock())


def _note(table: dict[_Key, int], key: _Key, amount: int) -> None:
    """Adds to a sparse table; what is zero is not in it."""
    left = table.get(key, 0) + amount
    if left:
        table[key] = left
    else:
        table.pop(key, None)


def _reason(resource: Resource, wanted: int, total: int) -> Reason:
    if resource.kind is ResourceKind.QUEUE:
        return Reason.QUEUE_FULL
    if resource.kind is ResourceKind.PINNED and wanted > total:
        return Reason.ADMISSION_PINNED
    return Reason.CREDIT_PRESSURE


def _id(grant: Grant | int) -> int:
    return grant if isinstance(grant, int) else grant.id
