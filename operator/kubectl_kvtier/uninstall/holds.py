"""The objects that an uninstall deletes, and what holds each of them. Pure.

Why it exists: which finalizer is ours, and how long a lease may last, is decided here once. It must not know
time, nor the order in which objects go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kubectl_kvtier.ports import Json, of_metadata
from kvtier_crds.quantity import QuantityError, parse_duration

ROLLOUTS, CACHES = "kvrollouts", "kvcaches"
KINDS = {
    ROLLOUTS: "KVRollout",
    CACHES: "KVCache",
    "kvselectors": "KVSelector",
    "agentpools": "AgentPool",
    "tierclasses": "TierClass",
}
REST = ("kvselectors", "agentpools")
"""Deleted on request, when no cache needs its agents any more."""
REST_OF_CLUSTER = (*REST, "tierclasses")
FINALIZERS = {ROLLOUTS: "kvtier.dev/rollout", CACHES: "kvtier.dev/cache"}
"""Of each kind, the one that the operator sets. Any other is somebody else's."""
DEFAULT_LEASE = 60.0
LONGEST_LEASE = 3600.0
"""The longest legal spec.leaseTTL, for a candidate whose KVRollout is gone."""
GRACE_SHARE = 0.1
LEAST_GRACE = 1.0


def lease_wait(ttl: float) -> float:
    """Seconds after which no lease of `ttl` seconds runs that was renewed before: 10 % and at least a second
    more, as the operator waits."""
    return ttl + max(ttl * GRACE_SHARE, LEAST_GRACE)


@dataclass(frozen=True, slots=True)
class Held:
    """One object as a look found it.

    cache: of a rollout, the name of its cache, else of the object. lease: seconds; of a rollout, the longest
    that agents may hold by it. approved, approved_uid: of a cache, the rollout whose candidate agents may go
    on holding. erases: a deletion ends with receipts of erased keys. phase: of a rollout's status.
    """

    plural: str
    namespace: str
    name: str
    uid: str
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    cache: str = ""
    lease: float = 0.0
    approved: str = ""
    approved_uid: str = ""
    erases: bool = False
    phase: str = ""

    @property
    def title(self) -> str:
        place = f"{self.namespace}/" if self.namespace else ""
        return f"{KINDS[self.plural]} {place}{self.name}"

    @property
    def ours(self) -> int | None:
        """The index of the finalizer that is ours to drop."""
        mine = FINALIZERS.get(self.plural)
        return self.finalizers.index(mine) if mine in self.finalizers else None

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(one for one in self.finalizers if one != FINALIZERS.get(self.plural))


def read_held(plural: str, document: Json) -> Held:
    """Of an object whatever version has written it: an uninstall must not fail by a field that it does not
    need."""
    metadata, spec, status = (
        document.get("metadata") or {},
        document.get("spec") or {},
        document.get("status") or {},
    )
    rollout = plural == ROLLOUTS
    return Held(
        plural=plural,
        namespace=metadata.get("namespace", ""),
        name=of_metadata(document, "name"),
        uid=of_metadata(document, "uid"),
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers") or ()),
        cache=_cache_of(spec) if rollout else of_metadata(document, "name"),
        lease=_longest_lease(spec, status) if rollout else 0.0,
        approved=str((status.get("approved") or {}).get("rollout", "")) if plural == CACHES else "",
        # What it was approved on begins with the rollout's uid.
        approved_uid=str((status.get("approved") or {}).get("evidence", "")).partition("/")[0],
        erases=bool((spec.get("deletion") or {}).get("cryptoErase")),
        phase=str(status.get("phase") or "") if rollout else "",
    )


def _cache_of(spec: Json) -> str:
    reference = spec.get("cacheRef")
    return str(reference.get("name") or "") if isinstance(reference, dict) else ""


def _longest_lease(spec: Json, status: Json) -> float:
    """Also of the lease of another spec that its status says may be out still. One that cannot be read counts
    as the longest legal one."""
    texts = [
        spec.get("leaseTTL") or f"{DEFAULT_LEASE:g}s",
        (status.get("rollback") or {}).get("leaseTTL"),
        (status.get("revoking") or {}).get("leaseTTL"),
    ]
    try:
        return max(parse_duration(text, "leaseTTL") for text in texts if text)
    except QuantityError:
        return LONGEST_LEASE


def waits_of(cache: Held, rollouts: Sequence[Held]) -> float:
    """Seconds that agents may hold a candidate of one cache after nobody renews it. rollouts: all of it that
    are known. Without one the default lease counts: what was there before is not known."""
    waits = [lease_wait(one.lease) for one in rollouts]
    if unowned(cache, rollouts):
        waits.append(lease_wait(LONGEST_LEASE))
    return max(waits, default=lease_wait(DEFAULT_LEASE))


def unowned(cache: Held, rollouts: Sequence[Held]) -> bool:
    """Whether agents may hold a candidate of it that none of these rollouts has released."""
    if not cache.approved:
        return False
    return not any(
        one.uid == cache.approved_uid if cache.approved_uid else one.name == cache.approved
        for one in rollouts
    )
