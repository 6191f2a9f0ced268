"""The receipt of a copy or promotion against the transaction that ordered it and what is true by now.

Why it exists: completion is not publication. A copy may end for an owner that is gone, in a slot that is
another's, short, re-encoded or flipped, and only the whole tuple tells. Inside an agent the transactions
compare their own moves so; this is the same for a copy that another process reports, and for copies that
count towards a block's survival. It must not know tiers or threads. Order of guards: specification B.1 (D3
and P3), B.3, A.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import replica_digest


@dataclass(frozen=True, slots=True)
class CopyReceipt:
    """A copy as it was ordered, or as it was reported when it ended; both have the same fields. block: key
    or digest of the block. owner: its logical id. length: bytes. transport_codec: what they passed."""

    txn: int
    block: bytes
    owner: int
    cache_generation: int
    slot: int
    slot_generation: int
    transfer_generation: int
    request_generation: int
    length: int
    codec: str
    layout: str
    transport_codec: str
    checksum: int
    position_contract_sha256: bytes
    tenant_namespace: str


@dataclass(frozen=True, slots=True)
class LiveCopy:
    """What is true when the receipt arrives. alive: the transaction was not cancelled. slot_generation,
    owner: of the destination slot. request_generation: of the request; 0 for blocks that none owns."""

    alive: bool
    cache_generation: int
    slot_generation: int
    owner: int
    request_generation: int
    authority_epoch: int


def copy_reason(
    ordered: CopyReceipt, reported: CopyReceipt, live: LiveCopy, *, epoch: int, lossless: frozenset[str]
) -> Reason | None:
    """The first guard that fails, or None: CANCELLED, STALE_CACHE_GENERATION, RECYCLED_DESTINATION,
    IDENTITY_MISMATCH, SHORT_COPY, TRANSFER_STALE, CODEC_OR_LAYOUT_MISMATCH, CODEC_NOT_LOSSLESS,
    CHECKSUM_MISMATCH, POSITION_CONTRACT_MISMATCH, TENANT_MISMATCH, REQUEST_STALE, STALE_AUTHORITY_EPOCH.

    epoch: the authority epoch at the transaction's begin. lossless: transport codecs that an exact move may
    pass. Vector B1.01.
    """
    guards: tuple[tuple[bool, Reason], ...] = (
        (not live.alive or reported.txn != ordered.txn, Reason.CANCELLED),
        (
            not ordered.cache_generation == reported.cache_generation == live.cache_generation,
            Reason.STALE_CACHE_GENERATION,
        ),
        (
            reported.slot != ordered.slot
            or not ordered.slot_generation == reported.slot_generation == live.slot_generation,
            Reason.RECYCLED_DESTINATION,
        ),
        (
            reported.block != ordered.block or not ordered.owner == reported.owner == live.owner,
            Reason.IDENTITY_MISMATCH,
        ),
        (reported.length != ordered.length, Reason.SHORT_COPY),
        (reported.transfer_generation != ordered.transfer_generation, Reason.TRANSFER_STALE),
        (
            (reported.codec, reported.layout) != (ordered.codec, ordered.layout),
            Reason.CODEC_OR_LAYOUT_MISMATCH,
        ),
        (reported.transport_codec not in lossless, Reason.CODEC_NOT_LOSSLESS),
        (reported.checksum != ordered.checksum, Reason.CHECKSUM_MISMATCH),
        (
            reported.position_contract_sha256 != ordered.position_contract_sha256,
            Reason.POSITION_CONTRACT_MISMATCH,
        ),
        (reported.tenant_namespace != ordered.tenant_namespace, Reason.TENANT_MISMATCH),
        (
            not ordered.request_generation == reported.request_generation == live.request_generation,
            Reason.REQUEST_STALE,
        ),
        (live.authority_epoch != epoch, Reason.STALE_AUTHORITY_EPOCH),
    )
    return next((reason for failed, reason in guards if failed), None)


def check_copy(
    ordered: CopyReceipt, reported: CopyReceipt, live: LiveCopy, *, epoch: int, lossless: frozenset[str]
) -> None:
    """Raises what `copy_reason` says; after it, and only then, the copy may be published."""
    reason = copy_reason(ordered, reported, live, epoch=epoch, lossless=lossless)
    if reason is not None:
        raise CoreError(
            reason, f"the copy of block {ordered.block.hex()[:16]} by transaction {ordered.txn} is refused"
        )


# Copies that keep a block alive (A.9).


@dataclass(frozen=True, slots=True)
class Copy:
    """One physical thing that knows something of a block. kind: `replica`, or what never counts as one:
    `proxy`, `index`. valid: its bytes passed validation. epoch: the authority epoch of its stamp."""

    kind: str
    block: bytes
    tier: str
    allocation_generation: int
    generation: int
    epoch: int
    codec: str
    layout: str
    payload_sha256: bytes
    tenant_namespace: str
    valid: bool = True

    def digest(self) -> bytes:
        """Identity of this physical copy (A.4)."""
        return replica_digest(
            self.block,
            tier=self.tier,
            allocation_generation=self.allocation_generation,
            replica_generation=self.generation,
            authority_epoch=self.epoch,
            codec=self.codec,
            layout=self.layout,
            payload=self.payload_sha256,
        )


REPLICA = "replica"


def survivors(copies: Iterable[Copy], epoch: int) -> int:
    """How many copies the block can be recovered from: valid replicas of the current epoch. Vector C2.10."""
    return sum(copy.kind == REPLICA and copy.valid and copy.epoch == epoch for copy in copies)


def check_survival(
    copies: Iterable[Copy], epoch: int, *, minimum: int = 1, claimed: int | None = None
) -> None:
    """SURVIVAL_VIOLATION when fewer than `minimum` copies remain, or another number was claimed."""
    found = survivors(copies, epoch)
    if found < minimum or claimed not in (None, found):
        raise CoreError(
            Reason.SURVIVAL_VIOLATION,
            f"{found} copies survive, {minimum} are needed and {claimed} claimed",
            {"survivors": found, "minimum": minimum},
        )


def check_successor(old: Copy, new: Copy) -> None:
    """Whether `new` may take over from `old` (A.9): equal block, payload, codec, layout, tenant and epoch.
    IDENTITY_MISMATCH, CHECKSUM_MISMATCH, CODEC_OR_LAYOUT_MISMATCH, TENANT_MISMATCH, STALE_AUTHORITY_EPOCH,
    SURVIVAL_VIOLATION for what is no validated replica."""
    guards: tuple[tuple[bool, Reason], ...] = (
        (new.block != old.block, Reason.IDENTITY_MISMATCH),
        (new.payload_sha256 != old.payload_sha256, Reason.CHECKSUM_MISMATCH),
        ((new.codec, new.layout) != (old.codec, old.layout), Reason.CODEC_OR_LAYOUT_MISMATCH),
        (new.tenant_namespace != old.tenant_namespace, Reason.TENANT_MISMATCH),
        (new.epoch != old.epoch, Reason.STALE_AUTHORITY_EPOCH),
        (new.kind != REPLICA or not new.valid, Reason.SURVIVAL_VIOLATION),
    )
    for failed, reason in guards:
        if failed:
            raise CoreError(reason, f"the copy in {new.tier} does not succeed the one in {old.tier}")
