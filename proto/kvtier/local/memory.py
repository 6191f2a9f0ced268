"""Sealed memory files: made by one end, checked by the other before it maps them.

A file that may shrink kills whoever reads its mapping (SIGBUS), and one that others may write changes what
was checked. It must not know what lies in the file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

# linux/fcntl.h; not in every version's fcntl module.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1, 2, 4, 16
SIZE_SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
OWNER_SEALS = SIZE_SEALS | F_SEAL_FUTURE_WRITE


class UnsafeMemoryError(ValueError):
    """A descriptor that must not be mapped; the text says what is wrong with it."""


def create(name: str, size: int, *, others_read_only: bool) -> tuple[int, mmap.mmap]:
    """A sealed file of `size` bytes and this process's writable mapping of it. others_read_only: nobody can
    map it writable any more. The caller closes both. OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            fcntl.fcntl(descriptor, F_ADD_SEALS, OWNER_SEALS if others_read_only else SIZE_SEALS)
        except BaseException:
            mapped.close()
            raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapped


def map_checked(descriptor: int, size: int, *, must_be_read_only: bool) -> mmap.mmap:
    """A read-only mapping of a peer's file of exactly `size` bytes. Seals are looked at first, since the size
    of an unsealed file means nothing. UnsafeMemoryError, OSError. The descriptor stays the caller's."""
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
    except OSError as error:
        raise UnsafeMemoryError(f"not a memory file: {error.strerror}") from None
    wanted = OWNER_SEALS if must_be_read_only else SIZE_SEALS
    if seals & wanted != wanted:
        raise UnsafeMemoryError(f"seals {seals:#x} lack {wanted & ~seals:#x}")
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
        raise UnsafeMemoryError(f"{facts.st_size} bytes where {size} were announced")
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
