"""The NVMe tier: blocks in one exclusive file, verified on every load, durable when they are asked to be.

Why it exists: contexts outgrow memory and processes, and storage lies more often than memory does. Every
failure of the file is a typed refusal, and the tier stays usable once the cause is gone. It must not know
sessions, directories or why a block moves.

With persistence "process" the file is cleared when it is opened and removed when it is closed. With "node" or
"durable" it has a superblock, and blocks whose identity says `durable` are recovered by the next opening.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import (
    CONDITION_CLOSED,
    DEFAULT_CAPABILITY,
    BlockIdentity,
    MediumKind,
    SlotRef,
    SlotState,
    Tier,
    TierCapability,
)
from kvtier_core.tiers.block import BlockFormat
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.nvme.batch import Batch
from kvtier_core.tiers.nvme.calls import CallJob, LeadJob, SoloWriter
from kvtier_core.tiers.nvme.crypto import BlockCipher
from kvtier_core.tiers.nvme.file import BlockFile
from kvtier_core.tiers.nvme.groupcommit import GroupCommit
from kvtier_core.tiers.nvme.health import TierHealth
from kvtier_core.tiers.nvme.iopool import IoPool
from kvtier_core.tiers.nvme.jobs import Backend, IoCounts, shares
from kvtier_core.tiers.nvme.opening import Recovered, SuperblockKeeper, recover
from kvtier_core.tiers.nvme.options import NvmeOptions
from kvtier_core.tiers.nvme.pace import Load, Way
from kvtier_core.tiers.nvme.rangedjobs import read_jobs
from kvtier_core.tiers.nvme.recovery import RecoveredBlock, RecoveryReport
from kvtier_core.tiers.nvme.slots import NvmeSlots
from kvtier_core.tiers.nvme.store import Pieces, Store
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.nvme.verify import store_path
from kvtier_core.tiers.nvme.writejobs import EraseJob, WriteJob
from kvtier_core.tiers.staging import PAGE, StagingBuffer
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem, TransferSink

PERSISTENT = ("node", "durable")
GROW_BLOCKS = 16
EXTENT_BYTES = 64 << 20
COMMIT_BYTES = 64 << 20
RECORD_GROUPS = 16
RECORD_BYTES = 16 << 20
CLOSE_SECONDS = 5.0


class NvmeTier(Tier):
    medium = MediumKind.NVME

    def __init__(
        self,
        name: str,
        layout: ChunkLayout,
        slots: int,
        *,
        folder: Path,
        file_key: str,
        files: FileOps,
        capability: TierCapability | None = None,
        o_direct: bool = True,
        clock: Callable[[], float] | None = None,
        options: NvmeOptions | None = None,
    ) -> None:
        self.slots: NvmeSlots
        super().__init__(name, layout, capability or DEFAULT_CAPABILITY[MediumKind.NVME], slots, clock)
        if self.capability.checksum == "none":
            raise CoreError(Reason.MANIFEST_INVALID, f"tier {name}: storage needs a checksum, xxh3 or crc32c")
        self.options = options or NvmeOptions()
        self.measured.seek_bytes = self.options.seek_bytes
        self.persistent = self.capability.persistence in PERSISTENT
        self.path = store_path(folder, file_key)
        self._form = BlockFormat.of(layout, self.capability.checksum, self.options.whole_bytes)
        self._block = self._form.stride
        self._health = TierHealth(self)
        extent = max(GROW_BLOCKS, EXTENT_BYTES // self._block) if self.persistent else GROW_BLOCKS
        base = SUPERBLOCK_BYTES if self.persistent else 0
        self._file = BlockFile(self.path, files, self._form, slots, base, extent, self._health.failed)
        cipher = BlockCipher(self.options.keys, self.options.random) if self.options.keys else None
        self._write_buffer, self._read_buffer = StagingBuffer(layout), StagingBuffer(layout)
        self._keeper: SuperblockKeeper | None = None
        self._recovered: Recovered | None = None
        if self.persistent:
            self._recovered = self._open_persistent(o_direct, cipher)
            self.slots = self._recovered.slots
        else:
            self._file.open(o_direct, self._clear)
            self.slots = NvmeSlots(slots, 0)
        self.recovery = self._recovered.report if self._recovered else RecoveryReport()
        self._recorded = self._first_group
        self._unrecorded = 0
        self._fenced: CoreError | None = None
        epoch, run = self.recovery.epoch, self.options.run_bytes
        self._store = Store(self._form, self._file, self.slots, epoch, run, cipher)
        most = max(1, COMMIT_BYTES // self._block)
        self.commit = GroupCommit(self._flush, self._flushed, most, self._first_group)
        self.counts = IoCounts()
        self._pool = IoPool(
            f"tier {name}",
            self.options.threads,
            self.options.queue_items,
            self.options.spare_threads,
            clock,
            self._hung_changed,
            self.options.pace,
        )
        self._backend = Backend(
            self._store,
            self.commit,
            self._health,
            self._pool.settled,
            self._lead_later,
            self.counts,
            self.options.read_back,
            self.options.budget,
            self.options.threads,
            self.measured,
            self.options.pace,
        )
        self._closing, self._closed = threading.Lock(), False
        self._charged: set[SlotRef] = set()
        self._left: dict[SlotRef, CallJob] = {}
        self.pinned_bytes = 2 * len(self._write_buffer)
        self.measured.probes["o_direct"] = str(self.o_direct).lower()

    # Opening.

    def _clear(self) -> None:
        """Empties the file, and finds out whether O_DIRECT works: some filesystems take the flag and refuse
        the I/O."""
        self._file.truncate(0)
        if self._file.direct:
            self._file.write([self._write_buffer.block[:PAGE]], 0)
            self._file.read([self._read_buffer.block[:PAGE]], 0)
            self._file.truncate(0)

    def _open_persistent(self, o_direct: bool, cipher: BlockCipher | None) -> Recovered:
        keeper = self._keeper = SuperblockKeeper(self._file, self._form, self.slots.capacity)
        self._file.open(o_direct, keeper.begin)
        started = self.clock() if self.clock else 0.0
        threads, keys, failed = self.options.threads, self.options.keys, self._health.failed
        try:
            found = recover(
                self._file, keeper, self._form, self.slots.capacity, threads, keys, cipher, failed
            )
        except CoreError:
            self._file.release()
            raise
        seconds = self.clock() - started if self.clock else 0.0
        found.report = dataclasses.replace(found.report, seconds=seconds)
        return found

    @property
    def _first_group(self) -> int:
        return self._recovered.findings.highest_group if self._recovered else 0

    def recovered(self) -> Iterator[RecoveredBlock]:
        """The kept blocks, once: their slots are published and owned. A block that the caller does not want
        is released like any other."""
        if self._recovered is None:
            return
        found, keys = self._recovered.findings, self._recovered.keys
        for header in found.headers():
            yield RecoveredBlock(header.identity(keys.seal(header)), header.slot, header.slot_generation)
        found.kept.clear()

    # Slots.

    @property
    def slot_bytes(self) -> int:
        return self._block

    @property
    def segment_bytes(self) -> int:
        return self._store.segment_bytes

    @property
    def o_direct(self) -> bool:
        return self._file.direct

    def reserve(self, owner: int, namespace: bytes = b"") -> SlotRef:
        """Charges the write budget: WRITE_BUDGET here is the refusal of a demotion, before anything moves."""
        budget = self.options.budget
        if budget is not None and (wait := budget.take(self._block)) > 0:
            raise CoreError(
                Reason.WRITE_BUDGET,
                f"tier {self.name}: its flash may be written again in {wait:.1f} s",
                {"tier": self.name, "retry_after_ms": int(wait * 1000) + 1},
            )
        try:
            ref = self.slots.reserve(owner, namespace)
        except CoreError:
            self._refund()
            raise
        try:
            self._file.ensure(ref.slot)
        except CoreError:
            self.slots.release(ref)
            self._refund()
            raise
        if budget is not None:
            self._charged.add(ref)
        return ref

    def release(self, ref: SlotRef) -> None:
        super().release(ref)
        if ref in self._charged:
            self._charged.discard(ref)
            self._refund()

    def _refund(self) -> None:
        if self.options.budget is not None:
            self.options.budget.refund(self._block)

    # Batches.

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        """As `read_jobs`."""
        if not items:
            return
        jobs = read_jobs(self._backend, Batch(sink, len(items)), items, deadline)
        self._pool.submit(jobs, first=any(item.ahead for item in items))

    def submit_write(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        """Neighbouring slots are written by one system call, up to `run_bytes`; durable blocks of a batch end
        together, after one flush. QUEUE_FULL; TIER_INCAPABLE for a durable block in a file that is
        cleared."""
        if not items:
            return
        if not self.persistent and any(item.identity.durable for item in items):
            raise self._not_durable()
        batch = Batch(sink, len(items))
        jobs: list[WriteJob] = []
        for durable in (True, False):
            chosen = [i for i, item in enumerate(items) if item.identity.durable is durable]
            parts = shares(self._backend, items, chosen)
            jobs += [WriteJob(self._backend, batch, items, part, deadline, durable) for part in parts]
        charged = self._charged.intersection(item.ref for item in items)
        self._charged -= charged
        try:
            self._submit_expected(jobs, sum(job.durable for job in jobs))
        except CoreError:
            self._charged |= charged
            raise

    def submit_erase(self, items: Sequence[EraseItem], deadline: float, sink: TransferSink) -> None:
        """`done(index, None)`: no header of it is left on the device, durably."""
        if not items:
            return
        job = EraseJob(self._backend, Batch(sink, len(items)), items, range(len(items)), deadline)
        self._submit_expected([job], 1)

    def _submit_expected(self, jobs: Sequence[WriteJob | EraseJob], durable: int) -> None:
        # Before they are queued: the first to be written must know that others follow.
        self.commit.expect(durable)
        try:
            self._pool.submit(jobs)
        except CoreError:
            for _ in range(durable):
                self.commit.withdraw()
            raise

    def _lead_later(self) -> None:
        self._pool.submit([LeadJob(self.commit, float("inf"))], inner=True)

    def expire(self) -> None:
        """Ends the waiting of callers whose deadline has come, by the injected clock, now."""
        self._pool.expire()

    @property
    def hung_threads(self) -> int:
        return self._pool.state.hung

    def _not_durable(self) -> CoreError:
        return CoreError(
            Reason.TIER_INCAPABLE, f"tier {self.name} does not outlive its process: no block in it is durable"
        )

    # Inline.

    def write(
        self, ref: SlotRef, payload: Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        """One I/O for header, K and V. A short write is reported as such and never retried into success."""
        self.slots.check(ref, SlotState.RESERVED)
        self.check_deadline(deadline)
        if identity.durable and not self.persistent:
            raise self._not_durable()
        self._charged.discard(ref)
        arrived = 0

        def fill(buffer: StagingBuffer) -> None:
            # The buffer may be of a caller that infers.
            with torch.inference_mode():
                buffer.payload.copy_(payload)

        def work(buffer: StagingBuffer) -> None:
            nonlocal arrived
            arrived = self._write_now(TransferItem(ref, identity, Landing(buffer.body, buffer.header)))

        self._within(deadline, self._write_buffer, work, Way.WRITE, ref, fill)
        self.slots.advance(ref, SlotState.WRITTEN, SlotState.RESERVED)
        # What the caller compares is payload; header and padding came along or the block is short.
        size = self._form.payload_bytes
        return size if arrived == self._block else max(0, min(arrived - PAGE, size - 1))

    def _write_now(self, item: TransferItem) -> int:
        """Durable when it returns, for a block that is to be."""
        ref, identity = item.ref, item.identity
        found = self._store.check_source(item)
        group = self.commit.stamp() if identity.durable else 0
        try:
            with self._store.guard.holding([ref.slot]):
                pieces = self._store.encode(item, found, self._store.scratch(), 0, group)
                if identity.durable:
                    self.slots.mark(ref.slot, identity.chunk_digest, identity.namespace)
                try:
                    done = self._file.write(pieces.buffers, self._file.offset(ref.slot))
                except OSError as error:
                    raise self._health.failed("write", error) from error
                if done == self._block:
                    (self.slots.written if identity.durable else self.slots.clean)(ref.slot)
        except CoreError:
            if identity.durable:
                self.commit.doubt(group)
                self.commit.drop(group)
            raise
        if identity.durable:
            self.commit.expect(1)
            writer = SoloWriter()
            self.commit.arrive(writer, group)
            writer.wait()
        return done

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        self.slots.check(ref, SlotState.WRITTEN)
        self.check_deadline(deadline)
        self._within(deadline, self._read_buffer, lambda buffer: self._fetch(ref, identity, buffer))
        self.slots.advance(ref, SlotState.VALIDATED, SlotState.WRITTEN)
        self._health.worked("write")

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        """One I/O straight into the caller's buffer, no copy. With a deadline one copy more: a late read must
        not arrive in a buffer that its owner uses again."""
        self.slots.check(ref, SlotState.PUBLISHED)
        self.check_deadline(deadline)
        used = self._within(deadline, buffer, lambda target: self._fetch(ref, identity, target))
        if used is not buffer:
            buffer.block[:] = used.block

    def _within(
        self,
        deadline: float | None,
        shared: StagingBuffer,
        work: Callable[[StagingBuffer], None],
        way: Way = Way.READ,
        written: SlotRef | None = None,
        fill: Callable[[StagingBuffer], None] = lambda _: None,
    ) -> StagingBuffer:
        """Runs `work` on a block here, or in the pool with a buffer of its own when there is a deadline to
        keep. Without one it waits for no pace, and those after it do. written: the slot in which bytes may
        still arrive when the caller has left. fill: puts into the block what is the caller's only as long as
        it waits."""
        load = Load(way, self._block)
        if deadline is None or self.clock is None:
            if self.options.pace is not None:
                self.options.pace.charge(load)
            fill(shared)
            work(shared)
            return shared
        own = StagingBuffer(self.layout)
        fill(own)
        call = CallJob(lambda: work(own), deadline, load)
        self._pool.submit([call])
        try:
            call.wait()
        except CoreError:
            if written is not None and not call.returned:
                self._left[written] = call
            raise
        return own

    def arriving(self, ref: SlotRef) -> bool:
        left = self._left.get(ref)
        if left is None or not left.returned:
            return left is not None
        self._left.pop(ref, None)
        return False

    def _fetch(self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer) -> None:
        item = TransferItem(ref, identity, Landing(buffer.body, buffer.header))
        scratch = self._store.scratch()
        if self._store.cipher is None:
            pieces = Pieces([buffer.block], buffer.header, False, None)
        else:
            pieces = self._store.pieces(item, scratch, 0)
        try:
            done = self._file.read(pieces.buffers, self._file.offset(ref.slot))
        except OSError as error:
            raise self._health.failed("read", error) from error
        self.counts.read(done)
        if done != self._block:
            raise self._health.short("read", done, self._block, ref)
        self._store.believe(item, pieces, scratch, 0)

    # Durability and the end.

    def sync(self) -> None:
        """Flushes data to the device: for the probe."""
        try:
            self._file.sync()
        except OSError as error:
            raise self._health.failed("sync", error) from error

    def _flush(self) -> None:
        """Called by the commit, one at a time."""
        if self._fenced is not None:
            self._health.note(self._fenced)
            raise self._fenced
        try:
            self._file.sync()
        except OSError as error:
            raise self._health.failed("sync", error) from error

    def _flushed(self, frontier: int, blocks: int) -> None:
        """Puts the frontier on record now and then. It needs no flush of its own: what it says is durable
        already, and if it is lost, recovery reads some payloads more."""
        self._unrecorded += blocks * self._block
        due = self._unrecorded >= RECORD_BYTES or frontier - self._recorded >= RECORD_GROUPS
        if self._keeper is None or not due or frontier <= self._recorded:
            return
        try:
            self._keeper.record(frontier)
            self._recorded, self._unrecorded = frontier, 0
        except OSError as error:
            self._health.failed("record", error)
        except CoreError as error:
            self._fenced = error
            self._health.note(error)

    def forget_keys(self) -> None:
        """After a key was destroyed at the provider: blocks under it are unreadable here from now on."""
        if self._store.cipher is not None:
            self._store.cipher.forget()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Ends what is queued within `seconds`, refuses the rest, and gives the file back. While a call hangs
        in the device, descriptor and lock stay taken until it returns, for bytes may still arrive."""
        if self.condition == CONDITION_CLOSED:
            return
        over = self._pool.drain(seconds)
        if over and self._keeper is not None:
            self._keeper.record_clean(self.commit.frontier)
        super().close()
        self._health.closed()
        self._closed = True
        self._give_back_when_over()

    def _give_back_when_over(self) -> None:
        """Called by whoever closes and by each thread whose call returns behind it: the last one does it.
        Nobody returns while another is at it: who has closed a store may open it again."""
        with self._closing:
            if self._closed and not self._pool.state.busy:
                self._closed = False
                self._file.release(remove=not self.persistent)

    def _hung_changed(self) -> None:
        self._health.hung_changed()
        self._give_back_when_over()
