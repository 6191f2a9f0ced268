"""What a tier and a path between two tiers really do, measured with one spare slot.

Why it exists: a declared bandwidth is a promise and plans need numbers, of whole, verified blocks and of
the path that a block takes. It must not know what is stored. A simulated tier's numbers are a memcpy's, and
its `simulated` says so.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layer_runner import MAX_WAIT_SECONDS, ThreadWaiter, Waiter
from kvtier_core.tiers.base import BlockIdentity, SlotRef, Tier, seal_checksum, slot_stride
from kvtier_core.tiers.hostmemory import HUGE_PAGE
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.staging import StagingRoom, block_bytes
from kvtier_core.tiers.transfer import Landing, Ranges, TransferItem, move_bytes
from kvtier_core.units import BytesPerSecond

PROBE_BYTES = 8 << 20
MAX_ROUNDS = 64
PATH_SECONDS = 10.0
MAX_CALLS = 32
CALL_ROUNDS = 4
LEAST_SEEK, MOST_SEEK = 8 << 10, 64 << 10
"""Bounds of what a call may be held for, however a busy machine measured it."""


def measure(tier: Tier, clock: Callable[[], float]) -> None:
    """Fills `tier.measured`: bytes per second of whole, verified payloads over about PROBE_BYTES. A tier that
    cannot be written keeps its condition and 0.0; it raises nothing."""
    if not tier.slots.capacity:
        return
    payload = torch.ones(tier.layout.shape, dtype=torch.float32)
    size = tier.layout.payload_bytes
    rounds = _rounds(size)
    identity = BlockIdentity(bytes(32), 0, 0, 0, size, seal_checksum(payload))
    # Memory as frames have it that read ahead.
    room = StagingRoom(tier.layout, HUGE_PAGE // block_bytes(tier.layout) + 1)
    buffer = room.buffer(0)
    written = read = 0.0
    try:
        for _ in range(rounds):
            ref = tier.reserve(0)
            try:
                started = clock()
                tier.write(ref, payload, identity)
                written += clock() - started
                tier.validate(ref, identity)
                tier.publish(ref)
                started = clock()
                tier.read(ref, identity, buffer)
                read += clock() - started
            finally:
                tier.release(ref)
        if isinstance(tier, NvmeTier):
            started = clock()
            tier.sync()
            tier.measured.probes["huge_pages"] = room.huge_pages
            tier.measured.probes["fsync_seconds"] = f"{clock() - started:.6f}"
            measure_calls(tier, payload, identity, clock)
    except CoreError as error:
        tier.measured.probes["error"] = error.reason.value
        return
    moved = float(rounds * size)
    tier.measured.write_bytes_per_second = moved / written if written > 0 else 0.0
    tier.measured.read_bytes_per_second = moved / read if read > 0 else 0.0


def measure_calls(
    tier: NvmeTier,
    payload: Tensor,
    identity: BlockIdentity,
    clock: Callable[[], float],
    waiter: Waiter | None = None,
) -> None:
    """Sets what one more call costs a read of parts, in bytes that could have been read instead: as many
    blocks at a time as there are threads, whole and by single segments, in turn. Nothing is set where a block
    has too few segments or the clock saw no time pass. What the tier refuses is raised."""
    size, step = tier.layout.payload_bytes, tier.segment_bytes * 2
    spans = tuple((at, at + 1) for at in range(0, size, step))[:MAX_CALLS]
    if len(spans) < MAX_CALLS // 4:
        return
    wait = waiter or ThreadWaiter()
    before, tier.measured.seek_bytes = tier.measured.seek_bytes, 0
    ref = tier.reserve(0)
    try:
        tier.write(ref, payload, identity)
        tier.validate(ref, identity)
        tier.publish(ref)
        # The best of each: what disturbs one round says nothing of the device.
        wholes, ranged = [], []
        for _ in range(CALL_ROUNDS):
            wholes.append(_together(tier, ref, identity, None, clock, wait))
            ranged.append(_together(tier, ref, identity, spans, clock, wait))
    finally:
        tier.measured.seek_bytes = before
        tier.release(ref)
    whole, parts = min(wholes), min(ranged)
    if whole <= 0.0 or parts <= 0.0:
        return
    calls = parts / len(spans) / (whole / size) - tier.segment_bytes
    tier.measured.seek_bytes = max(LEAST_SEEK, min(MOST_SEEK, int(calls)))
    tier.measured.probes["seek_bytes"] = str(tier.measured.seek_bytes)


def _together(
    tier: NvmeTier,
    ref: SlotRef,
    identity: BlockIdentity,
    spans: tuple[tuple[int, int], ...] | None,
    clock: Callable[[], float],
    waiter: Waiter,
) -> float:
    """Seconds of as many reads of one block as there are threads."""
    size = tier.layout.payload_bytes
    items = []
    for _ in range(tier.options.threads):
        landing = Landing(memoryview(mmap.mmap(-1, slot_stride(tier.layout)))[:size])
        ranges = None if spans is None else Ranges(spans, size)
        items.append(TransferItem(ref, identity, landing, ranges=ranges))
    arrivals = [_Arrival(waiter) for _ in items]
    started = clock()
    deadline = started + PATH_SECONDS
    for item, arrival in zip(items, arrivals, strict=True):
        tier.submit_read([item], deadline, arrival)
    for arrival in arrivals:
        _until(arrival, tier, deadline, clock, waiter)
    return clock() - started


def measure_memmove(size: int, clock: Callable[[], float]) -> BytesPerSecond | None:
    """The floor of every copy of blocks of `size` bytes in host memory: memmove over pages that are there.
    None when the clock saw no time pass."""
    count = max(2, _rounds(size))
    source, target = (memoryview(mmap.mmap(-1, size * count)) for _ in range(2))
    for view in (source, target):
        move_bytes(view, memoryview(bytes(size * count)))
    started = clock()
    for at in range(0, size * count, size):
        move_bytes(target[at : at + size], source[at : at + size])
    seconds = clock() - started
    return BytesPerSecond(size * count / seconds) if seconds > 0 else None


class _Arrival:
    """Hears of one item."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self.over = self.is_drained = False
        self.error: CoreError | None = None

    def done(self, index: int, error: CoreError | None) -> None:
        self.error, self.over = error, True
        self._waiter.notify()

    def drained(self, index: int) -> None:
        self.is_drained = True
        self._waiter.notify()


def measure_path(
    source: Tier, target: Tier, clock: Callable[[], float], waiter: Waiter | None = None
) -> BytesPerSecond:
    """Bandwidth of blocks that move from `source` to `target` one after the other: read into the target's
    slot where it has memory to land in, else written from the source's, else through staging; verified on
    the way as always. What a tier refuses is raised: NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE,
    DEADLINE, ... A slot that bytes may still arrive in stays quarantined."""
    payload = torch.ones(source.layout.shape, dtype=torch.float32)
    size = source.layout.payload_bytes
    identity = BlockIdentity(bytes(32), 0, 0, 0, size, seal_checksum(payload))
    wait = waiter or ThreadWaiter()
    staging = memoryview(mmap.mmap(-1, slot_stride(source.layout)))[:size]
    taken = source.reserve(0)
    seconds = 0.0
    try:
        source.write(taken, payload, identity)
        source.validate(taken, identity)
        source.publish(taken)
        for _ in range(_rounds(size)):
            started = clock()
            _move_once(source, taken, target, identity, Landing(staging), clock, wait)
            seconds += clock() - started
    finally:
        source.release(taken)
    if seconds <= 0.0:
        raise CoreError(Reason.COST_MODEL, f"no time passed from {source.name} to {target.name}")
    return BytesPerSecond(_rounds(size) * size / seconds)


def _move_once(
    source: Tier,
    taken: SlotRef,
    target: Tier,
    identity: BlockIdentity,
    staging: Landing,
    clock: Callable[[], float],
    waiter: Waiter,
) -> None:
    ref = target.reserve(0)
    arrivals: list[_Arrival] = []
    deadline = clock() + PATH_SECONDS

    def carry(tier: Tier, at: SlotRef, landing: Landing, *, write: bool) -> None:
        arrivals.append(_Arrival(waiter))
        submit = tier.submit_write if write else tier.submit_read
        submit([TransferItem(at, identity, landing)], deadline, arrivals[-1])
        _until(arrivals[-1], tier, deadline, clock, waiter)

    try:
        into, out_of = _landing(target, ref), _landing(source, taken)
        if into is not None:
            carry(source, taken, into, write=False)
            target.filled(ref)
            target.validate(ref, identity)
        else:
            if out_of is None:
                carry(source, taken, staging, write=False)
            carry(target, ref, out_of or staging, write=True)
        target.publish(ref)
    finally:
        if all(arrival.is_drained for arrival in arrivals):
            target.release(ref)
        else:
            target.quarantine(ref)


def _landing(tier: Tier, ref: SlotRef) -> Landing | None:
    try:
        return tier.landing(ref)
    except CoreError as error:
        if error.reason is not Reason.TIER_INCAPABLE:
            raise
        return None


def _until(
    arrival: _Arrival, tier: Tier, deadline: float, clock: Callable[[], float], waiter: Waiter
) -> None:
    """Waits until the item is over and drained. DEADLINE, or what it ended with."""
    while not (arrival.over and arrival.is_drained):
        tier.poll()
        left = deadline - clock()
        if arrival.is_drained:
            break
        if left <= 0.0:
            raise arrival.error or CoreError(Reason.DEADLINE, f"tier {tier.name} did not answer in time")
        waiter.wait(min(left, MAX_WAIT_SECONDS))
    if arrival.error is not None:
        raise arrival.error


def _rounds(size: int) -> int:
    return max(1, min(MAX_ROUNDS, PROBE_BYTES // size))
