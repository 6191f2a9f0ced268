"""Snapshots, copies and costs with one wrong field are refused with their own reason.

Of the specification's catalogue N.4, what needs no session: 1 to 3, 6 to 9, 18 to 25, 31 to 35. Left out,
for the sessions that pause: 4, 5, 10 to 17, 26 and 27 (lifecycle epochs, call ids, results, arrivals,
samplers), 28 to 30 (the pausing scheduler's swap and recompute budgets and leases), 36 (kinds of pauses).
With them the rules of A.9 on copies that survive.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvtier_core.cost import HostLedger
from kvtier_core.errors import Reason
from kvtier_core.identity import SourceBinding, chunk_digest
from kvtier_core.receiptcheck.copy import Copy, check_successor, check_survival, survivors
from kvtier_core.receiptcheck.costs import (
    KeepDecision,
    ReuseCosts,
    Waste,
    check_decision,
    check_host_peak,
    check_waste,
)
from kvtier_core.receiptcheck.snapshot import (
    LayerCopy,
    SnapshotManifest,
    check_discard,
    check_restore,
    check_save,
)
from tests.unit.core.fixture_f2 import EPOCH, OTHER, ROWS, fixture, mutate, refusal

VALID = fixture()


# N.4, snapshots: what needs no session.

HISTORY = SnapshotManifest(
    binding=VALID.live,
    frontier=ROWS,
    layers=tuple(LayerCopy(layer, 256, 1000 + layer) for layer in range(2)),
)
SUMS = {0: 1000, 1: 1001}


@dataclasses.dataclass(frozen=True)
class Restored:
    """A snapshot as saved and as it arrived. wanted: the binding that its rows are to continue."""

    wanted: SourceBinding
    manifest: SnapshotManifest
    checksums: dict[int, int]
    loaded: tuple[int, ...] = (0, 1)

    def publish(self) -> str:
        check_save(self.manifest)
        check_restore(self.wanted, VALID.operation.contract, self.manifest, self.checksums, self.loaded)
        return "published"


SAVED = Restored(VALID.live, HISTORY, SUMS)
PARTIAL = dataclasses.replace(
    SAVED,
    manifest=dataclasses.replace(
        HISTORY,
        frontier=6,
        whole=False,
        layers=tuple(LayerCopy(layer, 192, 1000 + layer) for layer in range(2)),
        recompute=(6, 8),
    ),
)


@pytest.mark.parametrize(
    ("valid", "path", "value", "reason"),
    [
        pytest.param(SAVED, "manifest.frontier", 9, Reason.FRONTIER_MISMATCH, id="N.4-1"),
        pytest.param(PARTIAL, "manifest.whole", True, Reason.FRONTIER_MISMATCH, id="N.4-2"),
        pytest.param(SAVED, "manifest.branch_rows", True, Reason.UNCOMMITTED_ROWS, id="N.4-3"),
        pytest.param(
            SAVED, "manifest.binding.cache_generation", 22, Reason.STALE_CACHE_GENERATION, id="N.4-6"
        ),
        pytest.param(
            SAVED, "manifest.binding.tenant_namespace", "another", Reason.TENANT_MISMATCH, id="N.4-7"
        ),
        pytest.param(
            SAVED, "manifest.binding.adapter_set_sha256", OTHER, Reason.ADAPTER_MISMATCH, id="N.4-8"
        ),
        pytest.param(SAVED, "manifest.binding.rope_config_sha256", OTHER, Reason.ROPE_MISMATCH, id="N.4-9"),
        pytest.param(PARTIAL, "manifest.recompute", None, Reason.PARTIAL_SUPPORT, id="N.4-18"),
        pytest.param(PARTIAL, "manifest.recompute", (7, 8), Reason.PARTIAL_SUPPORT, id="N.4-18-gap"),
        pytest.param(SAVED, "checksums", {0: 1000, 1: 1}, Reason.CHECKSUM_MISMATCH, id="N.4-19"),
        pytest.param(SAVED, "manifest.layers.1.bytes", 192, Reason.SHORT_COPY, id="N.4-20"),
        pytest.param(SAVED, "manifest.first_position", 4, Reason.SHIFTED_POSITIONS, id="N.4-21"),
        pytest.param(
            SAVED,
            "manifest.binding.position_contract_sha256",
            OTHER,
            Reason.POSITION_CONTRACT_MISMATCH,
            id="N.4-22",
        ),
        pytest.param(SAVED, "manifest.layers", HISTORY.layers[:1], Reason.SNAPSHOT_PARTIAL, id="N.4-25"),
        pytest.param(SAVED, "loaded", (1, 0), Reason.SCHEDULE_VIOLATION, id="N.4-34"),
    ],
)
def test_a_snapshot_with_one_wrong_field_is_refused(
    valid: Restored, path: str, value: object, reason: Reason
) -> None:
    assert valid.publish() == "published"
    assert refusal(mutate(valid, path, value).publish) is reason


def test_n4_23_bytes_are_freed_only_after_another_copy_is_authority() -> None:
    host, device, proxy = VALID.copies
    check_survival([host, proxy], EPOCH)
    unproved = dataclasses.replace(host, valid=False)
    check_survival([unproved, device], EPOCH)
    assert refusal(lambda: check_survival([unproved, proxy], EPOCH)) is Reason.SURVIVAL_VIOLATION


@pytest.mark.parametrize("lost", ["tokens_durable", "inputs_durable"])
def test_n4_24_the_last_copy_is_dropped_only_if_it_can_be_recomputed(lost: str) -> None:
    check_discard(tokens_durable=True, inputs_durable=True)
    kept = {"tokens_durable": True, "inputs_durable": True, lost: False}
    assert refusal(lambda: check_discard(**kept)) is Reason.RECOVERY_INPUTS_NOT_DURABLE


# Witness WJ of the vectors (C4.12, C4.13): rates per MiB.
HOST = ReuseCosts(
    p=0.8,
    resume=3.483125,
    suffix=0.18,
    full_time=9.0,
    full_compute=0.835,
    bytes=48,
    move_rate=0.001,
    hold_rate=0.02095 / 48,
    hold_time=1.0,
    visible_save=0.0,
)
DISK = dataclasses.replace(HOST, resume=15.483125)


def test_c4_12_and_c4_13_persist_and_discard_of_the_witness() -> None:
    assert math.isclose(HOST.persist(), 3.03785, rel_tol=1e-9)
    assert math.isclose(HOST.discard(), 7.868, rel_tol=1e-9)
    check_decision(HOST, KeepDecision(True, 3.03785, 7.868))
    check_decision(DISK, KeepDecision(False, DISK.persist(), 7.868))


def test_n4_31_waste_is_bytes_times_milliseconds() -> None:
    check_waste(Waste(48e6, "byte_ms", 8_000_000, 6.0))
    for wrong in (Waste(8e6, "byte_ms", 8_000_000, 6.0), Waste(48e6, "bytes", 8_000_000, 6.0)):
        assert refusal(lambda wrong=wrong: check_waste(wrong)) is Reason.UNIT_MISMATCH  # type: ignore[misc]


def test_n4_32_a_decision_that_ignores_the_chance_of_reuse_is_refused() -> None:
    certain = dataclasses.replace(HOST, p=1.0)
    decided = KeepDecision(True, certain.persist(), certain.discard())
    assert refusal(lambda: check_decision(HOST, decided)) is Reason.COST_MODEL


def test_n4_33_the_dearer_side_is_refused() -> None:
    assert (
        refusal(lambda: check_decision(DISK, KeepDecision(True, DISK.persist(), DISK.discard())))
        is Reason.COST_MODEL
    )


@pytest.mark.parametrize("part", [field.name for field in dataclasses.fields(HostLedger)])
def test_n4_35_a_peak_that_leaves_a_part_out_is_refused(part: str) -> None:
    peak = HostLedger(40, 8, 4, 2, 6, 1)
    check_host_peak(peak, 61)
    assert refusal(lambda: check_host_peak(peak, 61 - getattr(peak, part))) is Reason.PEAK_INCOMPLETE


# Copies and survival (A.9).


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("block", OTHER, Reason.IDENTITY_MISMATCH),
        ("payload_sha256", OTHER, Reason.CHECKSUM_MISMATCH),
        ("codec", "fp8", Reason.CODEC_OR_LAYOUT_MISMATCH),
        ("layout", "other", Reason.CODEC_OR_LAYOUT_MISMATCH),
        ("tenant_namespace", "another", Reason.TENANT_MISMATCH),
        ("epoch", EPOCH - 1, Reason.STALE_AUTHORITY_EPOCH),
        ("valid", False, Reason.SURVIVAL_VIOLATION),
        ("kind", "index", Reason.SURVIVAL_VIOLATION),
    ],
)
def test_a_successor_differs_in_nothing_that_counts(field: str, value: object, reason: Reason) -> None:
    host, device, _ = VALID.copies
    check_successor(device, host)
    assert refusal(lambda: check_successor(device, mutate(host, field, value))) is reason


def test_c2_10_survival_counts_valid_replicas_of_the_current_epoch() -> None:
    host, device, proxy = VALID.copies
    disk = dataclasses.replace(host, tier="disk", epoch=4)
    assert survivors([device, host, disk, proxy], EPOCH) == 2


def test_va04_on_copies_a_move_renames_the_copy_and_not_the_block() -> None:
    host, device, _ = VALID.copies
    recoded = dataclasses.replace(host, codec="fp8")
    assert host.block == device.block == recoded.block == chunk_digest(VALID.live, 1, 2, 0, 8)
    assert len({copy.digest() for copy in (host, device, recoded)}) == 3
    names = [field.name for field in dataclasses.fields(Copy)]
    outside = {"kind", "valid", "tenant_namespace"}
    changed: list[bytes] = []
    for name in names:
        old = getattr(host, name)
        new: object = OTHER if isinstance(old, bytes) else old + 1 if type(old) is int else f"{old}x"
        if name not in outside:
            changed.append(mutate(host, name, new).digest())
    assert len({*changed, host.digest()}) == len(names) - len(outside) + 1
