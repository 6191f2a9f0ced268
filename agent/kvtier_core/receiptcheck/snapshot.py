"""Snapshots of many layers against what they claim, before they are saved, restored or dropped.

Why it exists: layers, manifest and checksums publish together or not at all, and bytes freed before another
copy is authority are lost. It must not know sessions; where a rule is a session's, the caller applies it.
Rules: specification A.9, B.2, B.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding
from kvtier_core.receiptcheck.binding import check_binding
from kvtier_core.receiptcheck.contract import TensorContract


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """One layer's rows as saved."""

    layer: int
    bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """What a snapshot says of itself. binding: of its rows, at the committed frontier. frontier: rows
    [first_position, first_position + frontier) are in it. whole: it was saved as all of a finished turn.
    branch_rows: rows that were not committed are in it. recompute: rows [a, b) declared to be recomputed."""

    binding: SourceBinding
    frontier: int
    layers: tuple[LayerCopy, ...]
    whole: bool = True
    branch_rows: bool = False
    first_position: int = 0
    recompute: tuple[int, int] | None = None


def check_save(manifest: SnapshotManifest) -> None:
    """FRONTIER_MISMATCH when it holds more than was committed, or less though it is all of a turn;
    UNCOMMITTED_ROWS."""
    committed = manifest.binding.committed_frontier
    if manifest.frontier > committed or (manifest.whole and manifest.frontier != committed):
        raise CoreError(
            Reason.FRONTIER_MISMATCH, f"a snapshot of {manifest.frontier} rows, committed are {committed}"
        )
    if manifest.branch_rows:
        raise CoreError(Reason.UNCOMMITTED_ROWS, "rows of a branch are in no snapshot")


def check_restore(
    wanted: SourceBinding,
    contract: TensorContract,
    manifest: SnapshotManifest,
    checksums: Mapping[int, int],
    loaded: Sequence[int],
) -> None:
    """Whether what was read may become rows of `wanted`.

    checksums: by layer, of the bytes that arrived. loaded: layers in the order in which they arrived. Guards:
    the binding's reasons; SHIFTED_POSITIONS; SNAPSHOT_PARTIAL; SHORT_COPY; CHECKSUM_MISMATCH;
    PARTIAL_SUPPORT; SCHEDULE_VIOLATION for layers out of order, since attention waits for the first.
    """
    check_binding(wanted, manifest.binding)
    if manifest.first_position:
        # Keys carry their positions: the same rows elsewhere are other rows.
        raise CoreError(
            Reason.SHIFTED_POSITIONS, f"rows saved at {manifest.first_position} do not start at 0"
        )
    if [copy.layer for copy in manifest.layers] != list(range(contract.layers)):
        raise CoreError(
            Reason.SNAPSHOT_PARTIAL, f"{len(manifest.layers)} of {contract.layers} layers are saved"
        )
    length = contract.payload_bytes(manifest.frontier, layers=1)
    for copy in manifest.layers:
        if copy.bytes != length:
            raise CoreError(Reason.SHORT_COPY, f"layer {copy.layer} has {copy.bytes} of {length} bytes")
        if checksums.get(copy.layer) != copy.checksum:
            raise CoreError(Reason.CHECKSUM_MISMATCH, f"layer {copy.layer} changed its bytes")
    _check_complete(manifest, wanted.committed_frontier)
    if list(loaded) != sorted(loaded):
        raise CoreError(Reason.SCHEDULE_VIOLATION, "layers arrived in another order than they are used in")


def _check_complete(manifest: SnapshotManifest, frontier: int) -> None:
    first, last = manifest.recompute or (manifest.frontier, manifest.frontier)
    if first > manifest.frontier or max(last, manifest.frontier) < frontier:
        raise CoreError(
            Reason.PARTIAL_SUPPORT,
            f"{manifest.frontier} of {frontier} rows, and the rest is not declared to be recomputed",
        )


def check_discard(*, tokens_durable: bool, inputs_durable: bool) -> None:
    """RECOVERY_INPUTS_NOT_DURABLE unless what recomputes the rows outlives them."""
    if not (tokens_durable and inputs_durable):
        raise CoreError(
            Reason.RECOVERY_INPUTS_NOT_DURABLE,
            "the last copy is dropped only if its tokens and inputs remain",
        )
