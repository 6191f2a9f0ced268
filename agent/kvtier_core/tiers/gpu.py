"""The GPU tier: a paged pool on the torch device, its own or borrowed from an engine; copies in stream order.

Why it exists: rows on the compute device are attended in place, and copies beside running kernels must
neither read what is not written yet nor overwrite what is still read. It must not know kernels or who owns
a chunk. Without a CUDA device the same pool lies in host memory and the tier says `simulated`: its
bandwidth is then a memcpy's, and its device kind is part of the manifest.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.tiers.base import (
    DEFAULT_CAPABILITY,
    MediumKind,
    PoolTier,
    SlotRef,
    SlotState,
    TierCapability,
    slot_stride,
)
from kvtier_core.tiers.borrowed import AllocationGenerations, BorrowedSlots
from kvtier_core.tiers.flights import Flight, Flights
from kvtier_core.tiers.ordering import SlotEvents
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.streams import Event, InlineStream, Stream, stream_of
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem, TransferSink

QUEUE_DEPTH = 1024


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """load, store: streams for copies into and out of the pool, each direction in order; None: one of the
    device's own. queue_depth: items in flight at most, both directions together."""

    load: Stream | None = None
    store: Stream | None = None
    queue_depth: int = QUEUE_DEPTH


class GpuTier(PoolTier):
    medium = MediumKind.GPU

    def __init__(
        self,
        name: str,
        layout: ChunkLayout,
        slots: int,
        *,
        device: torch.device,
        capability: TierCapability | None = None,
        clock: Callable[[], float] | None = None,
        options: GpuOptions | None = None,
        pool: Tensor | None = None,
    ) -> None:
        """pool: memory of someone else, [slots, floats], instead of an own one; see `borrow`."""
        if device.type not in ("cpu", "cuda"):
            raise CoreError(
                Reason.TIER_INCAPABLE, f"a GPU tier needs a cuda or cpu device, not {device.type}"
            )
        try:
            self._flat = _device_pool(layout, slots, device) if pool is None else pool
        except (RuntimeError, OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"tier {name}: {slots * layout.payload_bytes} bytes cannot be allocated on {device}",
                {"bytes": slots * layout.payload_bytes},
            ) from error
        super().__init__(name, layout, capability or DEFAULT_CAPABILITY[MediumKind.GPU], slots, clock)
        self.pool = self._flat[:, : layout.floats].view(slots, *layout.shape)
        self.device = device
        self.simulated = self.host_memory = device.type == "cpu"
        self.measured.probes["device"] = str(device)
        chosen = options or GpuOptions()
        self._load = chosen.load or stream_of(device)
        self._store = chosen.store or stream_of(device)
        self._events = SlotEvents()
        self._flights = Flights(chosen.queue_depth, clock)
        self.copies_started = 0
        self._closed: CoreError | None = None

    @classmethod
    def borrow(
        cls,
        name: str,
        layout: ChunkLayout,
        pool: Tensor,
        allocations: AllocationGenerations,
        *,
        capability: TierCapability | None = None,
        clock: Callable[[], float] | None = None,
        options: GpuOptions | None = None,
    ) -> Self:
        """A tier over an engine's pool [slots, 2, Hk, C, d], float32, contiguous. The engine allocates:
        slots are taken with `adopt_allocation` and every call checks that the allocation is still the same.
        GEOMETRY_MISMATCH when the pool has another shape, type or order: a layout is declared, never
        guessed."""
        whole = (pool.shape[0], *layout.shape) if pool.dim() else layout.shape
        if tuple(pool.shape) != tuple(whole) or pool.dtype != torch.float32 or not pool.is_contiguous():
            raise CoreError(
                Reason.GEOMETRY_MISMATCH,
                f"tier {name} takes a contiguous float32 pool of {tuple(whole)}, not {tuple(pool.shape)} of "
                f"{pool.dtype}",
            )
        slots = int(pool.shape[0])
        tier = cls(
            name,
            layout,
            slots,
            device=pool.device,
            capability=capability,
            clock=clock,
            options=options,
            pool=pool.view(slots, layout.floats),
        )
        tier.slots = BorrowedSlots(slots, allocations)
        return tier

    @property
    def stride(self) -> int:
        return int(self._flat.shape[1]) * FLOAT_BYTES

    def landing(self, ref: SlotRef) -> Landing:
        """In place only in host memory without streams of its own: elsewhere a copy that went past
        `submit_read` and `submit_write` would overtake writers and readers."""
        if not (isinstance(self._load, InlineStream) and isinstance(self._store, InlineStream)):
            raise CoreError(Reason.TIER_INCAPABLE, f"copies of tier {self.name} go in stream order")
        if self.stride % PAGE:
            raise CoreError(Reason.TIER_INCAPABLE, f"slots of tier {self.name} do not lie on whole pages")
        return super().landing(ref)

    def adopt_allocation(
        self, slot: int, owner: int, allocation_generation: int, written: Event | None = None
    ) -> SlotRef:
        """Takes a slot of a borrowed pool at the engine's allocation. `written`: the event after which the
        engine's rows in it are final; the slot is then published as it is. None: it is reserved, to be
        loaded. RECYCLED_DESTINATION when the engine's allocation is another; TIER_INCAPABLE on an own
        pool."""
        if not isinstance(self.slots, BorrowedSlots):
            raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} has a pool of its own")
        ref = self.slots.adopt(slot, owner, allocation_generation)
        if written is not None:
            self._events.written(slot, written)
            self.slots.advance(ref, SlotState.PUBLISHED, SlotState.RESERVED)
        return ref

    def written(self, ref: SlotRef, event: Event) -> None:
        """States that the slot's rows are final once `event` has passed: stores wait for it."""
        self.slots.check(ref)
        self._events.written(ref.slot, event)

    def reader_done(self, ref: SlotRef, event: Event) -> None:
        """States that a kernel that was given before `event` reads the slot: loads into it wait, also when
        the slot has been given up meanwhile. Call it before the lease ends."""
        self.slots.check(ref, SlotState.PUBLISHED)
        self._events.read(ref.slot, event)

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        """Stores: pool to landings, after the last writer of each slot; neighbours in one copy."""
        self._submit(items, deadline, sink, store=True)

    def submit_write(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        """Loads: landings into reserved slots, after the last reader of each; neighbours in one copy."""
        self._submit(items, deadline, sink, store=False)

    def submit_erase(self, items: Sequence[EraseItem], deadline: float, sink: TransferSink) -> None:
        """Zeroes each copy after its last reader. An engine's own pool is only checked: its memory is not
        ours."""
        self._flights.poll()
        self._flights.admit(len(items))
        for index, item in enumerate(items):
            try:
                self._erase_item(item)
            except CoreError as error:
                sink.done(index, error)
                sink.drained(index)
                continue
            if item.ref is not None and not isinstance(self.slots, BorrowedSlots):
                self._events.before_writing(item.ref.slot, self._load)
                self._load.run(partial(_zero, self.payload(item.ref.slot)))
            self._flights.add(Flight(index, sink, deadline, self._load.record(), _nothing))
        self._flights.poll()

    def poll(self) -> int:
        return self._flights.poll()

    def publish(self, ref: SlotRef) -> None:
        """NOT_VISIBLE until the copy's event has passed and `poll` has verified what arrived."""
        super().publish(ref)

    def close(self) -> None:
        """Ends every item for its caller; `poll` goes on until the device has drained them."""
        super().close()
        self._closed = CoreError(Reason.STORAGE_UNAVAILABLE, f"tier {self.name} is closed")
        self._flights.abandon(self._closed)
        self.poll()

    def _submit(
        self, items: Sequence[TransferItem], deadline: float, sink: TransferSink, *, store: bool
    ) -> None:
        self._flights.poll()
        self._flights.admit(len(items))
        legal: list[tuple[int, TransferItem]] = []
        for index, item in enumerate(items):
            try:
                self._check_item(item, deadline, store=store)
            except CoreError as error:
                sink.done(index, error)
                sink.drained(index)
            else:
                legal.append((index, item))
        for run in self._runs([item for _, item in legal]):
            members = [legal[position] for position in run]
            event = self._give([item for _, item in members], store=store)
            for index, item in members:
                finish = partial(self._stored if store else self._loaded, item)
                self._flights.add(Flight(index, sink, deadline, event, finish))
        self._flights.poll()

    def _check_item(self, item: TransferItem, deadline: float, *, store: bool) -> None:
        if self._closed is not None:
            raise self._closed
        self.slots.check(item.ref, SlotState.PUBLISHED if store else SlotState.RESERVED)
        if len(item.landing.body) != self.layout.payload_bytes:
            raise CoreError(
                Reason.SHORT_COPY,
                f"a landing of {len(item.landing.body)} bytes is no payload of {self.layout.payload_bytes}",
            )
        self.check_deadline(deadline)

    def _runs(self, items: Sequence[TransferItem]) -> list[range]:
        """Positions whose slots and landings both follow each other: one copy each (vllm#38460)."""
        runs: list[range] = []
        last = 0
        for position, item in enumerate(items):
            address = _address(item.landing.body)
            previous = items[position - 1]
            if runs and item.ref.slot == previous.ref.slot + 1 and address == last + self.stride:
                runs[-1] = range(runs[-1].start, position + 1)
            else:
                runs.append(range(position, position + 1))
            last = address
        return runs

    def _give(self, items: Sequence[TransferItem], *, store: bool) -> Event:
        """Gives one copy of neighbouring slots to its stream and returns the event after it."""
        stream = self._store if store else self._load
        for item in items:
            if store:
                self._events.before_reading(item.ref.slot, stream)
            else:
                self._events.before_writing(item.ref.slot, stream)
        first, count = items[0].ref.slot, len(items)
        floats = (count - 1) * int(self._flat.shape[1]) + self.layout.floats
        # The copy may run after a frame's inference mode has ended, which must not forbid it to write.
        with torch.inference_mode(mode=False):
            pool = self._flat[first : first + count].view(-1)[:floats]
            host = _host_span(items, floats)
        target, source = (host, pool) if store else (pool, host)

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        stream.run(copy)
        self.copies_started += 1
        event = stream.record()
        if store:
            for item in items:
                self._events.read(item.ref.slot, event)
        return event

    def _stored(self, item: TransferItem) -> None:
        # An engine may have given the slot to another while its bytes were on their way (vllm#46951).
        self.slots.check(item.ref, SlotState.PUBLISHED)
        self.verify(item.landing.body, item.identity)

    def _loaded(self, item: TransferItem) -> None:
        self.slots.advance(item.ref, SlotState.WRITTEN, SlotState.RESERVED)
        self.validate(item.ref, item.identity)


def _zero(payload: Tensor) -> None:
    payload.zero_()


def _nothing() -> None:
    pass


def _address(body: memoryview) -> int:
    return torch.frombuffer(body, dtype=torch.uint8).data_ptr()


def _host_span(items: Sequence[TransferItem], floats: int) -> Tensor:
    """The landings of neighbours as one tensor. The items keep their memory; a copy keeps the items'
    views."""
    body = items[0].landing.body
    if len(items) == 1:
        return torch.frombuffer(body, dtype=torch.float32)
    span = (ctypes.c_char * (floats * FLOAT_BYTES)).from_address(_address(body))
    span.keep = [item.landing.body for item in items]  # type: ignore[attr-defined]
    return torch.frombuffer(span, dtype=torch.float32)


def _device_pool(layout: ChunkLayout, slots: int, device: torch.device) -> Tensor:
    """[slots, floats of a stride]; on the CPU device page-aligned, so that storage reads straight into it."""
    floats = slot_stride(layout) // FLOAT_BYTES
    if device.type != "cpu" or not slots:
        return torch.empty((slots, floats), dtype=torch.float32, device=device)
    memory = mmap.mmap(-1, slots * slot_stride(layout))
    return torch.frombuffer(memory, dtype=torch.float32).view(slots, floats)
