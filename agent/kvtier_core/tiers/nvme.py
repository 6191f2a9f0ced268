"""The NVMe tier: one exclusive file of fixed, self-describing blocks, verified on every load.

Why it exists: contexts outgrow memory, and storage lies more often than memory does. Every failure of the
file is a typed refusal and the tier stays usable once the cause is gone. It must not know sessions. Sessions
do not outlive the process, so the file's leftovers are cleared when it is opened.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import (
    CONDITION_READY,
    DEFAULT_CAPABILITY,
    BlockIdentity,
    MediumKind,
    SlotRef,
    SlotState,
    Tier,
    TierCapability,
)
from kvtier_core.tiers.block import encode_header, verify_block
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.staging import StagingBuffer, block_bytes

GROW_BLOCKS = 16
_REFUSED_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


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
    ) -> None:
        super().__init__(name, layout, capability or DEFAULT_CAPABILITY[MediumKind.NVME], slots)
        if self.capability.checksum == "none":
            raise CoreError(Reason.MANIFEST_INVALID, f"tier {name}: storage needs a checksum, xxh3 or crc32c")
        self._files = files
        self._block = block_bytes(layout)
        # The key may hold any character of a Kubernetes name; a digest is always a file name.
        self.path = folder / f"{hashlib.sha256(file_key.encode()).hexdigest()[:32]}.blocks"
        self._allocated = 0
        self._write_buffer = StagingBuffer(layout)
        self._read_buffer = StagingBuffer(layout)
        self.pinned_bytes = 2 * len(self._write_buffer)
        self.o_direct = False
        self._fd = self._open(folder, o_direct)
        self.measured.probes["o_direct"] = str(self.o_direct).lower()

    @property
    def slot_bytes(self) -> int:
        return self._block

    def _open(self, folder: Path, want_direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT
        direct = getattr(os, "O_DIRECT", 0) if want_direct else 0
        try:
            self._files.make_folder(folder)
            try:
                fd = self._files.open(self.path, flags | direct)
                self.o_direct = direct != 0
            except OSError as error:
                if not direct or error.errno not in _REFUSED_DIRECT:
                    raise
                fd = self._files.open(self.path, flags)
        except OSError as error:
            raise self._unavailable("open", error) from error
        try:
            self._files.lock(fd)
            self._files.truncate(fd, 0)
            if self.o_direct and not self._direct_works(fd):
                self._files.close(fd)
                fd = self._files.open(self.path, flags)
                self.o_direct = False
                self._files.lock(fd)
        except OSError as error:
            self._files.close(fd)
            raise self._unavailable("lock and clear", error) from error
        return fd

    def _direct_works(self, fd: int) -> bool:
        """Some filesystems accept the flag and refuse the I/O."""
        try:
            self._files.write(fd, [self._write_buffer.block], 0)
            self._files.read(fd, [self._read_buffer.block], 0)
            self._files.truncate(fd, 0)
        except OSError as error:
            if error.errno in _REFUSED_DIRECT:
                return False
            raise
        return True

    def _unavailable(self, what: str, error: OSError) -> CoreError:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        message = f"tier {self.name}: {what} of {self.path.name}: {name} ({os.strerror(error.errno or 0)})"
        self.condition = f"{Reason.STORAGE_UNAVAILABLE.value}: {message}"
        return CoreError(Reason.STORAGE_UNAVAILABLE, message, {"tier": self.name, "errno": name})

    def reserve(self, owner: int, namespace: bytes = b"") -> SlotRef:
        ref = super().reserve(owner, namespace)
        if ref.slot >= self._allocated:
            grown = min(self.slots.capacity, max(ref.slot + 1, self._allocated + GROW_BLOCKS))
            try:
                self._files.allocate(
                    self._fd, self._allocated * self._block, (grown - self._allocated) * self._block
                )
            except OSError as error:
                self.slots.release(ref)
                raise self._unavailable("growth", error) from error
            self._allocated = grown
        return ref

    def write(
        self, ref: SlotRef, payload: Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        """One I/O for header, K and V. A short write is reported as such and never retried into success."""
        self.slots.check(ref, SlotState.RESERVED)
        self.check_deadline(deadline)
        buffer = self._write_buffer
        buffer.payload.copy_(payload)
        encode_header(buffer, self.capability.checksum, ref, identity)
        try:
            done = self._files.write(self._fd, [buffer.block], ref.slot * self._block)
        except OSError as error:
            raise self._unavailable("write", error) from error
        self.slots.set_state(ref, SlotState.WRITTEN)
        # What the caller compares is payload; header and padding came along or the block is short.
        return (
            len(buffer.body)
            if done == self._block
            else max(0, min(done - len(buffer.header), len(buffer.body) - 1))
        )

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        self.slots.check(ref, SlotState.WRITTEN)
        self.check_deadline(deadline)
        self._fetch(ref, self._read_buffer)
        verify_block(self._read_buffer, self.capability.checksum, ref, identity)
        self.slots.set_state(ref, SlotState.VALIDATED)
        self.condition = CONDITION_READY

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        """One I/O straight into the caller's buffer, no copy."""
        self.slots.check(ref, SlotState.PUBLISHED)
        self.check_deadline(deadline)
        self._fetch(ref, buffer)
        verify_block(buffer, self.capability.checksum, ref, identity)

    def _fetch(self, ref: SlotRef, buffer: StagingBuffer) -> None:
        try:
            done = self._files.read(self._fd, [buffer.block], ref.slot * self._block)
        except OSError as error:
            raise self._unavailable("read", error) from error
        if done != self._block:
            raise CoreError(
                Reason.SHORT_COPY,
                f"tier {self.name}: {done} of {self._block} bytes of slot {ref.slot} could be read",
                {"tier": self.name, "slot": ref.slot},
            )

    def sync(self) -> None:
        """Flushes data to the device: for the probe; sessions do not outlive the process."""
        try:
            self._files.sync(self._fd)
        except OSError as error:
            raise self._unavailable("sync", error) from error

    def close(self) -> None:
        super().close()
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self._files.remove(self.path)
        self._files.close(fd)
