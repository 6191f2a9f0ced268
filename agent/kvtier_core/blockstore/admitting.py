"""What a cache declares of its transfers, as limits of the ledger that each transfer pays from.

Why it exists: a declared credit that nothing takes is a promise to nobody. Reads from storage and writes to
it pay for their bytes in flight, each direction its own link; reads also pay staging, since their bytes land
in memory that nobody may use yet. Without a declaration they pay for a place in the queue alone. It must not
know who goes first.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_core.admission import AdmissionTerms
from kvtier_core.blockstore.parts import Parts
from kvtier_core.credits import PINNED, STAGING, Ledger, LinkPayer
from kvtier_core.credits.resources import LinkStage, Resource, link
from kvtier_core.errors import CoreError, Reason

READ, WRITE = link(LinkStage.STORAGE_READ), link(LinkStage.STORAGE_WRITE)
# More bytes than ever are in flight: a resource of which nothing was declared.
UNLIMITED = 1 << 62


def totals(ledger: Ledger) -> dict[Resource, int]:
    """Of what terms may limit, as it is before any were declared."""
    return {resource: ledger.total(resource) for resource in (PINNED, STAGING, READ, WRITE)}


def set_limits(
    ledger: Ledger,
    payer: LinkPayer,
    parts: Parts,
    terms: AdmissionTerms,
    undeclared: Mapping[Resource, int],
) -> None:
    """All of the terms or none of them; `undeclared`: limits of what they leave open. See
    `BlockStore.admit`."""
    wanted = {**undeclared, **_limits(ledger, parts, terms)}
    before = {resource: ledger.total(resource) for resource in wanted}
    done: list[Resource] = []
    try:
        for resource, total in wanted.items():
            ledger.resize(resource, total)
            done.append(resource)
    except CoreError:
        for resource in done:
            ledger.resize(resource, before[resource])
        raise
    payer.route(_stages(parts, terms))


def _limits(ledger: Ledger, parts: Parts, terms: AdmissionTerms) -> dict[Resource, int]:
    size = parts.block_bytes
    if terms.link is not None and terms.link < size:
        raise CoreError(
            Reason.STAGING_TOO_SMALL, f"admission.link {terms.link} is less than a block of {size} bytes"
        )
    # What others have of it for good, the engine's own buffers above all.
    kept = ledger.granted(STAGING) if terms.staging is not None else 0
    if terms.staging is not None and terms.staging < kept + size:
        raise CoreError(
            Reason.STAGING_TOO_SMALL,
            f"admission.staging {terms.staging} is less than the {kept} in use and a block of {size} bytes",
            {"staging_bytes": kept + size},
        )
    limits = {
        PINNED: terms.pinned,
        STAGING: terms.staging,
        READ: terms.link,
        WRITE: terms.link,
    }
    return {resource: total for resource, total in limits.items() if total is not None}


def _stages(parts: Parts, terms: AdmissionTerms) -> Mapping[tuple[int, int], tuple[Resource, ...]]:
    reads: tuple[Resource, ...] = () if terms.link is None else (READ,)
    if terms.staging is not None:
        reads = (*reads, STAGING)
    writes = () if terms.link is None else (WRITE,)
    stages: dict[tuple[int, int], tuple[Resource, ...]] = {}
    for memory in parts.memory:
        for storage in parts.storage:
            stages[(storage, memory)], stages[(memory, storage)] = reads, writes
    return stages
