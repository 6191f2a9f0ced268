"""Kernels for the CPU that are compiled on the machine that runs them.

They are the fast way to what `chunk_attention` defines with plain tensor operations, with the same bits;
which of the two runs is decided by what is installed and by the processor, never by a clock.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library


_FIRST = threading.Lock()


@cache
def library() -> Library | None:
    """This process's compiled kernels, compiled when first asked for; None where `missing` says why."""
    # Threads that ask at once would each compile their own otherwise, and hold different ones for good.
    with _FIRST:
        return _library()


@cache
def _library() -> Library | None:
    if missing():
        return None
    from kvtier_kernels.compiled.machine import Library

    return Library()


@cache
def missing() -> str:
    """Why there are no compiled kernels here; empty where there are."""
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    try:
        from kvtier_kernels.compiled.machine import UnsupportedMachine, check_machine
    except (ImportError, OSError) as error:
        # It is there and does not load: built for another Python, or with a library missing.
        return f"llvmlite cannot be loaded: {error}"
    try:
        check_machine()
    except UnsupportedMachine as error:
        return str(error)
    return ""
