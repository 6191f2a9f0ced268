"""The Tier contract on all three media, and every way storage can fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import (
    DEFAULT_CAPABILITY,
    BlockIdentity,
    MediumKind,
    PoolTier,
    SlotRef,
    Tier,
    seal_checksum,
)
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.gpu import GpuTier
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.staging import PAGE, StagingBuffer
from tests.unit.core.builders import CHUNK, DISK_ERRORS, HEAD_DIM, KV_HEADS, Fault, FaultyFiles

LAYOUT = ChunkLayout(KV_HEADS, CHUNK, HEAD_DIM)
Build = Callable[[Path], Tier]


def nvme_tier(folder: Path, slots: int = 3, files: FileOps | None = None, **options: object) -> NvmeTier:
    return NvmeTier(
        "flash",
        LAYOUT,
        slots,
        folder=folder,
        file_key="cache",
        files=files or OsFileOps(),
        **options,  # type: ignore[arg-type]
    )


BUILD: dict[str, Build] = {
    "gpu": lambda _: GpuTier("hbm", LAYOUT, 3, device=torch.device("cpu")),
    "cpu": lambda _: CpuTier("ram", LAYOUT, 3),
    "nvme": nvme_tier,
}


@pytest.fixture(params=BUILD.values(), ids=BUILD.keys())
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return request.param(tmp_path)  # type: ignore[no-any-return]


def payload(seed: int = 0) -> torch.Tensor:
    return torch.randn(LAYOUT.shape, generator=torch.Generator().manual_seed(seed))


def named(data: torch.Tensor, logical: int = 7, generation: int = 1) -> BlockIdentity:
    return BlockIdentity(
        bytes([logical] * 32), logical, generation, CHUNK, LAYOUT.payload_bytes, seal_checksum(data)
    )


def store(tier: Tier, data: torch.Tensor, identity: BlockIdentity) -> SlotRef:
    ref = tier.reserve(identity.logical)
    assert tier.write(ref, data, identity) == LAYOUT.payload_bytes
    tier.validate(ref, identity)
    tier.publish(ref)
    return ref


def refused(reason: Reason, call: Callable[..., object], *args: object) -> CoreError:
    with pytest.raises(CoreError) as error:
        call(*args)
    assert error.value.reason is reason, error.value
    return error.value


def test_bytes_come_back_as_they_went_in(tier: Tier) -> None:
    data = payload()
    ref = store(tier, data, named(data))
    buffer = StagingBuffer(LAYOUT)
    tier.read(ref, named(data), buffer)
    assert torch.equal(buffer.payload, data)
    assert tier.used_bytes == tier.slot_bytes
    tier.release(ref)
    assert tier.used_bytes == 0


def test_nothing_is_readable_before_it_is_published(tier: Tier) -> None:
    data = payload()
    identity = named(data)
    ref = tier.reserve(7)
    buffer = StagingBuffer(LAYOUT)
    refused(Reason.NOT_VISIBLE, tier.read, ref, identity, buffer)
    refused(Reason.NOT_VISIBLE, tier.publish, ref)
    tier.write(ref, data, identity)
    refused(Reason.NOT_VISIBLE, tier.read, ref, identity, buffer)
    refused(Reason.NOT_VISIBLE, tier.publish, ref)
    tier.validate(ref, identity)
    refused(Reason.NOT_VISIBLE, tier.read, ref, identity, buffer)
    tier.publish(ref)
    tier.read(ref, identity, buffer)


def test_a_slots_next_owner_is_not_touched_by_its_last(tier: Tier) -> None:
    """B3.01: the block alone would match; slot and generation together do not."""
    first, second = payload(1), payload(2)
    old = store(tier, first, named(first, 1))
    tier.release(old)
    live = store(tier, second, named(second, 2))
    assert (old.slot, live.slot) == (live.slot, old.slot)
    assert old != live
    buffer = StagingBuffer(LAYOUT)
    for call in (
        lambda: tier.read(old, named(first, 1), buffer),
        lambda: tier.write(old, first, named(first, 1)),
        lambda: tier.publish(old),
        lambda: tier.validate(old, named(first, 1)),
        lambda: tier.quarantine(old),
        lambda: tier.release(old),
    ):
        refused(Reason.RECYCLED_DESTINATION, call)
    tier.read(live, named(second, 2), buffer)
    assert torch.equal(buffer.payload, second)


def test_a_slot_is_released_once(tier: Tier) -> None:
    ref = tier.reserve(1)
    tier.release(ref)
    refused(Reason.RECYCLED_DESTINATION, tier.release, ref)
    assert len({tier.reserve(1).slot for _ in range(3)}) == 3
    refused(Reason.NO_DESTINATION_CAPACITY, tier.reserve, 1)


def test_a_copy_that_differs_from_its_seal_is_not_validated(tier: Tier) -> None:
    data = payload()
    identity = named(data)
    ref = tier.reserve(7)
    damaged = data.clone()
    damaged.view(torch.int32)[0, 0, 0, 0] ^= 1

    def run() -> None:
        tier.write(ref, damaged, identity)
        tier.validate(ref, identity)

    refused(Reason.CHECKSUM_MISMATCH, run)
    refused(Reason.NOT_VISIBLE, tier.publish, ref)


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_a_former_owners_rows_do_not_remain(name: str, tmp_path: Path) -> None:
    tier = BUILD[name](tmp_path)
    assert isinstance(tier, PoolTier)
    poison = torch.full(LAYOUT.shape, torch.nan)
    for _ in range(3):
        ref = tier.reserve(1)
        tier.adopt(ref)
        tier.view(ref).copy_(poison)
        tier.release(ref)
    for _ in range(3):
        ref = tier.reserve(2)
        tier.adopt(ref)
        assert not tier.view(ref).any()


def test_storage_takes_no_single_rows_and_is_not_read_in_place(tmp_path: Path) -> None:
    tier = nvme_tier(tmp_path)
    rows = torch.zeros(1, KV_HEADS, HEAD_DIM)
    ref = tier.reserve(1)
    refused(Reason.TIER_INCAPABLE, tier.append, ref, 0, rows, rows)
    refused(Reason.TIER_INCAPABLE, tier.view, ref)


def test_appended_rows_lie_where_chunks_lie(tmp_path: Path) -> None:
    tier = CpuTier("ram", LAYOUT, 1)
    k = torch.randn(CHUNK, KV_HEADS, HEAD_DIM)
    v = torch.randn(CHUNK, KV_HEADS, HEAD_DIM)
    ref = tier.reserve(1)
    tier.adopt(ref)
    for lo in range(0, CHUNK, 5):
        tier.append(ref, lo, k[lo : lo + 5], v[lo : lo + 5])
    assert torch.equal(tier.view(ref), LAYOUT.assemble(k, v))
    got_k, got_v = LAYOUT.rows(tier.view(ref), 9)
    assert torch.equal(got_k, k[:9])
    assert torch.equal(got_v, v[:9])
    refused(Reason.FRAME_INVALID, tier.append, ref, CHUNK - 1, k[:2], v[:2])
    assert tier.view(ref).data_ptr() % 64 == 0


# Storage only.


@pytest.mark.parametrize("kind", ["xxh3", "crc32c"])
@pytest.mark.parametrize("o_direct", [True, False], ids=["direct", "buffered"])
def test_each_flipped_bit_on_disk_is_a_refusal(tmp_path: Path, kind: str, o_direct: bool) -> None:
    """Every header byte and a stride of payload bytes, one bit each; never the damaged bytes."""
    import dataclasses

    able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], checksum=kind)
    tier = nvme_tier(tmp_path, capability=able, o_direct=o_direct)
    data = payload()
    ref = store(tier, data, named(data))
    buffer = StagingBuffer(LAYOUT)
    # Magic to the header's own checksum; what follows is zero and means nothing.
    header = 8 + 4 + 8 + 32 + 8 * 3 + 4 + 8 * 3 + 4
    offsets = [*range(header), *range(PAGE, PAGE + LAYOUT.payload_bytes, 97)]
    base = ref.slot * tier.slot_bytes
    with tier.path.open("r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(base + offset)
            (byte,) = file.read(1)
            file.seek(base + offset)
            file.write(bytes([byte ^ (1 << (offset % 8))]))
            os.fsync(file.fileno())
            refused(Reason.CHECKSUM_MISMATCH, tier.read, ref, named(data), buffer)
            file.seek(base + offset)
            file.write(bytes([byte]))
        os.fsync(file.fileno())
    tier.read(ref, named(data), buffer)
    assert torch.equal(buffer.payload, data)


def test_a_valid_block_of_another_chunk_is_refused(tmp_path: Path) -> None:
    """A misdirected write: intact bytes, wrong owner, generation or rows."""
    import dataclasses

    tier = nvme_tier(tmp_path)
    data = payload()
    identity = named(data)
    ref = store(tier, data, identity)
    buffer = StagingBuffer(LAYOUT)
    for change in (
        {"chunk_digest": bytes(32)},
        {"logical": 8},
        {"replica_generation": 2},
        {"rows": CHUNK - 1},
        {"checksum": identity.checksum ^ 1},
    ):
        refused(Reason.IDENTITY_MISMATCH, tier.read, ref, dataclasses.replace(identity, **change), buffer)
    refused(Reason.SHORT_COPY, tier.read, ref, dataclasses.replace(identity, length=4), buffer)


def test_a_block_that_an_earlier_life_of_the_slot_left_is_refused(tmp_path: Path) -> None:
    """The write of the new owner never reached the disk."""
    tier = nvme_tier(tmp_path, 1)
    data = payload()
    tier.release(store(tier, data, named(data)))
    ref = tier.reserve(7)
    with tier.path.open("rb") as file:
        stale = file.read(tier.slot_bytes)
    tier.write(ref, data, named(data))
    with tier.path.open("r+b") as file:
        file.write(stale)
        file.flush()
        os.fsync(file.fileno())
    refused(Reason.RECYCLED_DESTINATION, tier.validate, ref, named(data))


@pytest.mark.parametrize("code", DISK_ERRORS.values(), ids=DISK_ERRORS.keys())
@pytest.mark.parametrize("operation", ["make_folder", "open", "lock", "truncate"])
def test_a_folder_that_cannot_be_used_is_a_typed_refusal(tmp_path: Path, operation: str, code: int) -> None:
    files = FaultyFiles(Fault(operation, 0, code, sticky=True))
    error = refused(Reason.STORAGE_UNAVAILABLE, lambda: nvme_tier(tmp_path, files=files))
    assert errno.errorcode[code] in error.message
    assert error.facts["tier"] == "flash"


@pytest.mark.parametrize("code", DISK_ERRORS.values(), ids=DISK_ERRORS.keys())
@pytest.mark.parametrize("operation", ["allocate", "write", "read"])
def test_an_error_of_one_io_is_typed_and_passes(tmp_path: Path, operation: str, code: int) -> None:
    probes = 1 if operation != "allocate" else 0
    files = FaultyFiles(Fault(operation, probes, code))
    tier = nvme_tier(tmp_path, files=files)
    data = payload()
    error = refused(Reason.STORAGE_UNAVAILABLE, lambda: store(tier, data, named(data)))
    assert errno.errorcode[code] in error.message
    assert tier.condition.startswith("STORAGE_UNAVAILABLE: ")
    ref = store(tier, data, named(data))
    assert tier.condition == "Ready"
    buffer = StagingBuffer(LAYOUT)
    tier.read(ref, named(data), buffer)
    assert torch.equal(buffer.payload, data)


def test_a_short_write_is_reported_as_short(tmp_path: Path) -> None:
    tier = nvme_tier(tmp_path, files=FaultyFiles(Fault("write", 1, "short")))
    data = payload()
    ref = tier.reserve(7)
    assert tier.write(ref, data, named(data)) < LAYOUT.payload_bytes
    refused(Reason.CHECKSUM_MISMATCH, tier.validate, ref, named(data))


def test_a_short_read_is_never_bytes(tmp_path: Path) -> None:
    tier = nvme_tier(tmp_path, files=FaultyFiles(Fault("read", 2, "short")))
    data = payload()
    ref = store(tier, data, named(data))
    refused(Reason.SHORT_COPY, tier.read, ref, named(data), StagingBuffer(LAYOUT))
    tier.read(ref, named(data), StagingBuffer(LAYOUT))


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_filesystem_without_o_direct_is_used_buffered(tmp_path: Path, where: str) -> None:
    """tmpfs of old kernels refuses the flag, some FUSE filesystems refuse the I/O."""
    tier = nvme_tier(tmp_path, files=FaultyFiles(Fault(where, 0, errno.EINVAL)))
    assert tier.measured.probes["o_direct"] == "false"
    data = payload()
    tier.read(store(tier, data, named(data)), named(data), StagingBuffer(LAYOUT))


def test_two_engines_never_share_a_file(tmp_path: Path) -> None:
    first = nvme_tier(tmp_path)
    refused(Reason.STORAGE_LOCKED, lambda: nvme_tier(tmp_path))
    first.close()
    nvme_tier(tmp_path).close()


def test_leftovers_are_cleared_at_start_and_the_file_at_the_end(tmp_path: Path) -> None:
    tier = nvme_tier(tmp_path)
    path = tier.path
    tier.close()
    assert not path.exists()
    path.write_bytes(b"leftover" * 4096)
    again = nvme_tier(tmp_path)
    assert path.stat().st_size == 0
    again.close()


def test_the_file_grows_as_slots_are_used(tmp_path: Path) -> None:
    tier = nvme_tier(tmp_path, slots=40)
    assert tier.path.stat().st_size == 0
    for expected in (16, 32, 40):
        while tier.slots.used < expected - 15 or tier.slots.used % 16 != 1:
            tier.reserve(1)
        assert tier.path.stat().st_size == expected * tier.slot_bytes
    tier.close()
