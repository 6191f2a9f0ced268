"""What the arena asks of the operating system, as a seam where tests inject refusals.

Why it exists: sealing, huge pages and NUMA binding differ between kernels and containers, and a machine
without one of them must be told so in a fact, not in a crash. It must not know slots, namespaces or tiers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
from pathlib import Path
from typing import Protocol

HUGE_PAGE = 2 << 20
F_SEAL_FUTURE_WRITE = 0x10
_SEALS = {
    "shrink": fcntl.F_SEAL_SHRINK,
    "grow": fcntl.F_SEAL_GROW,
    "future_write": F_SEAL_FUTURE_WRITE,
    "seal": fcntl.F_SEAL_SEAL,
}
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_PRIVATE_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NODES = Path("/sys/devices/system/node/online")


def advise_private(memory: mmap.mmap, start: int, size: int) -> str:
    """Asks for transparent huge pages for a part of private memory; returns what becomes of it. A kernel that
    refuses has ordinary pages there, and all else is the same."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, start, size)
    except OSError as error:
        return f"none ({errno.errorcode.get(error.errno or 0, 'unknown')})"
    return _made_of(_PRIVATE_HUGE, ("always", "madvise"))


def _made_of(kind: Path, giving: tuple[str, ...]) -> str:
    """What the kernel's setting makes of a request that it took."""
    try:
        setting = kind.read_text()
    except OSError:
        return "transparent (setting unknown)"
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    return "transparent" if chosen in giving else f"none ({chosen})"


class HostMemory(Protocol):
    """Errors are OSError, as the operating system gives them."""

    def create(self, name: str, size: int, *, huge: bool) -> int:
        """A descriptor of `size` bytes of zeroed memory that can be sealed; `huge`: of explicit huge
        pages."""
        ...

    def map(self, fd: int, size: int) -> mmap.mmap:
        """The memory, shared and writable."""
        ...

    def commit(self, fd: int, size: int) -> None:
        """Takes all pages now, so that a machine that is full says so here and not at a later touch."""
        ...

    def seal(self, fd: int) -> str:
        """Fixes the size and, where the kernel can, forbids every writable map to come and every write call.
        Returns the seals that hold, by name."""
        ...

    def readonly(self, fd: int) -> int:
        """A second descriptor of the same memory that can only be read."""
        ...

    def advise_huge(self, memory: mmap.mmap) -> str:
        """Asks for transparent huge pages; returns what the kernel's setting makes of it."""
        ...

    def bind(self, memory: mmap.mmap, node: int) -> None:
        """Prefers pages of NUMA node `node` for all that is not touched yet."""
        ...

    def nodes(self) -> str:
        """NUMA nodes of this machine as the kernel lists them ("0" or "0-3"); "unknown" where it does not."""
        ...

    def close(self, fd: int) -> None: ...


class LinuxHostMemory:
    """The real thing: memfd_create and its seals, madvise, mbind."""

    def create(self, name: str, size: int, *, huge: bool) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        fd = os.memfd_create(name, flags)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        return fd

    def map(self, fd: int, size: int) -> mmap.mmap:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def commit(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def seal(self, fd: int) -> str:
        wanted = 0
        for bit in _SEALS.values():
            wanted |= bit
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, wanted)
        except OSError as error:
            # Kernels before 5.1 know no seal against writers to come; the size is fixed all the same.
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, wanted & ~F_SEAL_FUTURE_WRITE)
        held = int(fcntl.fcntl(fd, fcntl.F_GET_SEALS))
        return "+".join(name for name, bit in _SEALS.items() if held & bit)

    def readonly(self, fd: int) -> int:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def advise_huge(self, memory: mmap.mmap) -> str:
        memory.madvise(mmap.MADV_HUGEPAGE)
        return _made_of(_SHMEM_HUGE, ("always", "within_size", "advise", "force"))

    def bind(self, memory: mmap.mmap, node: int) -> None:
        number = _MBIND.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, "mbind has no known number on this machine")
        libc = ctypes.CDLL(None, use_errno=True)
        words = node // 64 + 1
        mask = (ctypes.c_uint64 * words)()
        mask[node // 64] = 1 << (node % 64)
        anchor = ctypes.c_char.from_buffer(memory)
        done = libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(ctypes.addressof(anchor)),
            ctypes.c_ulong(len(memory)),
            ctypes.c_int(_MPOL_PREFERRED),
            ctypes.byref(mask),
            ctypes.c_ulong(words * 64 + 1),
            ctypes.c_uint(0),
        )
        if done != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def nodes(self) -> str:
        try:
            return _NODES.read_text().strip()
        except OSError:
            return "unknown"

    def close(self, fd: int) -> None:
        os.close(fd)
