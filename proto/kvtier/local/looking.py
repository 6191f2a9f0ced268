"""Looks for a message on a socket for a bounded time, in compiled code that holds no interpreter's lock.

Why it exists: to sleep and to be woken takes longer than the message, and a loop of the interpreter would
keep its other threads waiting. A thread that looks gives its core to whoever else can run there, before each
look. Where nothing can be compiled (no llvmlite), or no second core is the process's, every wait sleeps. It
must not know what a message says.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import socket
import time
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvtier.local.patience import Patience

_CORES_OF_A_LOOK = 4
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_PAUSES = 8
Look = Callable[[int], int]
"""Takes the address of the words of a look; bytes of the message, -1 for none, or -1 - errno."""


class _Word(IntEnum):
    """Of a look: a descriptor, the address and bytes of a buffer, nanoseconds to look, and between two looks
    before the core was taken; then how it went: nanoseconds that were looked, 1 where the core was taken, and
    the clock at the end."""

    FD = 0
    ADDRESS = 1
    SIZE = 2
    LIMIT = 3
    TAKEN_AFTER = 4
    LOOKED = 5
    TAKEN = 6
    NOW = 7


# Plain numbers: a name of an enumeration costs as much as the word, and there is a look for each message.
_LIMIT, _WENT = int(_Word.LIMIT), slice(int(_Word.LOOKED), int(_Word.NOW) + 1)

_CODE = """
declare i64 @recv(i32, ptr, i64, i32)
declare i32 @clock_gettime(i32, ptr)
declare i32 @sched_yield()
declare ptr @__errno_location()
{declared}

define private i64 @now() {{
  %at = alloca [2 x i64]
  %1 = call i32 @clock_gettime(i32 {clock}, ptr %at)
  %nanos_at = getelementptr i64, ptr %at, i64 1
  %seconds = load i64, ptr %at
  %nanos = load i64, ptr %nanos_at
  %whole = mul i64 %seconds, 1000000000
  %sum = add i64 %whole, %nanos
  ret i64 %sum
}}

define i64 @look(ptr %words) {{
entry:
{places}
  %wide = load i64, ptr %at_fd
  %fd = trunc i64 %wide to i32
  %address = load i64, ptr %at_address
  %buffer = inttoptr i64 %address to ptr
  %size = load i64, ptr %at_size
  %limit = load i64, ptr %at_limit
  %after = load i64, ptr %at_taken_after
  %began = call i64 @now()
  br label %turn

turn:
  %last = phi i64 [ %began, %entry ], [ %clock, %wait ]
  %got = call i64 @recv(i32 %fd, ptr %buffer, i64 %size, i32 {flags})
  %clock = call i64 @now()
  %passed = sub i64 %clock, %last
  %late = icmp sgt i64 %passed, %after
  %looked = sub i64 %clock, %began
  %came = icmp sge i64 %got, 0
  br i1 %came, label %over, label %none

none:
  %error_at = call ptr @__errno_location()
  %error = load i32, ptr %error_at
  %signed = sext i32 %error to i64
  %failed = sub i64 -1, %signed
  %again = icmp eq i32 %error, {again}
  br i1 %again, label %goes_on, label %over

goes_on:
  %full = icmp sge i64 %looked, %limit
  %stop = or i1 %full, %late
  br i1 %stop, label %over, label %wait

wait:
  %yielded = call i32 @sched_yield()
{pauses}  br label %turn

over:
  %found = phi i64 [ %got, %turn ], [ %failed, %none ], [ -1, %goes_on ]
  %taken = zext i1 %late to i64
  store i64 %looked, ptr %at_looked
  store i64 %taken, ptr %at_taken
  store i64 %clock, ptr %at_now
  ret i64 %found
}}
"""


class Seats:
    """How many threads of a process may look at a time. Safe from any thread."""

    def __init__(self, seats: int) -> None:
        # Taken and given back by one step of the interpreter each.
        self._free: list[None] = [None] * seats

    def take(self) -> bool:
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def give_back(self) -> None:
        self._free.append(None)


class Receiver:
    """Receives one thread's messages from one blocking socket into one buffer: looks first, then sleeps."""

    def __init__(
        self,
        connection: socket.socket,
        buffer: bytearray,
        patience: Patience,
        look: Look | None,
        seats: Seats,
    ) -> None:
        """connection: stays the caller's, open while `receive` runs. buffer: not resized from here on.
        patience: nobody else's. look: `compiled()`; None: it always sleeps."""
        self._connection, self._buffer, self._patience = connection, buffer, patience
        self._compiled, self._seats = look, seats
        self._held = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        words = self._words = (ctypes.c_int64 * len(_Word))()
        words[_Word.FD] = connection.fileno()
        words[_Word.ADDRESS], words[_Word.SIZE] = ctypes.addressof(self._held), len(buffer)
        words[_Word.TAKEN_AFTER] = patience.bounds.taken
        self._at = ctypes.addressof(words)
        # Whether a look has seen a message of which the patience was not told yet.
        self._seen = False

    def receive(self) -> int:
        """Bytes of the next message, of which as many as there is room for are in the buffer. Raises as
        `recv_into` does; the socket's own timeout begins when it sleeps."""
        compiled, patience = self._compiled, self._patience
        if compiled is None:
            return self._connection.recv_into(self._buffer, 0, socket.MSG_TRUNC)
        if self._seen:
            # Only now: somebody waits for the answer to a message that has come, and nobody for this.
            self._seen = False
            self._tell(came=True)
        began = time.monotonic_ns()
        if self._seats.take():
            came = -1
            try:
                limit = patience.look(began)
                if limit:
                    self._words[_LIMIT] = limit
                    came = compiled(self._at)
            finally:
                self._seats.give_back()
            if came >= 0:
                self._seen = True
                return came
            taken = limit > 0 and self._tell(came=False)
            if came < -1:
                raise OSError(-1 - came, os.strerror(-1 - came))
            if taken:
                return self._connection.recv_into(self._buffer, 0, socket.MSG_TRUNC)
        size = self._connection.recv_into(self._buffer, 0, socket.MSG_TRUNC)
        patience.missed(time.monotonic_ns() - began)
        return size

    def _tell(self, *, came: bool) -> bool:
        """Tells the patience of the last look; whether the core was taken in it."""
        looked, taken, now = self._words[_WENT]
        if taken:
            self._patience.taken(looked, now)
        elif came:
            self._patience.came(looked)
        return taken > 0


def cores() -> float:
    """That this process may use at a time: of those that it may run on, and of its group's quota."""
    count = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_MAX.read_text().split()
        if quota != "max":
            count = min(count, int(quota) / int(period))
    return count


@cache
def seats() -> Seats:
    """This process's: a quarter of its cores, and one at least."""
    return Seats(max(1, int(cores() / _CORES_OF_A_LOOK)))


@cache
def compiled() -> Look | None:
    """This process's, compiled when it is first asked for; None where nothing can be compiled, or a thread
    that looks would take the only core from whom it waits for."""
    if cores() < 2 or find_spec("llvmlite") is None:
        return None
    from llvmlite import binding

    pauses = platform.machine() in ("x86_64", "AMD64")
    places = [f"  %at_{word.name.lower()} = getelementptr i64, ptr %words, i64 {int(word)}" for word in _Word]
    text = _CODE.format(
        declared="declare void @llvm.x86.sse2.pause()" if pauses else "",
        places="\n".join(places),
        clock=time.CLOCK_MONOTONIC,
        flags=socket.MSG_DONTWAIT | socket.MSG_TRUNC,
        again=errno.EAGAIN,
        pauses="  call void @llvm.x86.sse2.pause()\n" * _PAUSES if pauses else "",
    )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(opt=2)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(engine.get_function_address("look"))
    # It never goes: a thread may stand in it when the process ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    return function
