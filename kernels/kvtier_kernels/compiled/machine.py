"""Compiles the kernels for this machine's processor and calls them.

Why it exists: decode is bound by memory, and tensor calls over packed copies do not come near it. No compiler
is needed at a user's: LLVM comes as a library (llvmlite), takes about 0.3 s of a processor once a process,
and writes nothing to disk. A call releases the interpreter's lock. It must not know chunks: it passes
addresses on, and whoever calls keeps their memory alive and of the right size.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numpy.typing import NDArray
from torch import Tensor

from kvtier_kernels.compiled.attention import emit_attend, emit_fold
from kvtier_kernels.compiled.decode import emit_batch, emit_decode
from kvtier_kernels.compiled.layout import LANES, FoldWord, Job, Word, scratch_floats
from kvtier_kernels.compiled.modes import emit_guarded
from kvtier_kernels.compiled.pages import emit_pages
from kvtier_kernels.compiled.shares import emit_shares

Integers = NDArray[np.int64]

_NEEDED = ("avx2", "fma")
_SCRATCH = 1 << 16
_ENTRIES = ("attend", "fold", "decode", "decode_begin", "decode_end", "pages", "attend_shared", "help")


class UnsupportedMachine(RuntimeError):
    """The kernels are not made for this processor."""


def check_machine() -> None:
    """Raises UnsupportedMachine unless this is x86-64 with AVX2 and fused multiply-adds."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UnsupportedMachine(f"compiled kernels are for x86-64, not {platform.machine()}")
    features = binding.get_host_cpu_features()
    missing = [name for name in _NEEDED if not features.get(name)]
    if missing:
        raise UnsupportedMachine(f"the processor lacks {', '.join(missing)}")


class Library:
    """Kernels of this process. Raises UnsupportedMachine. Safe to call from several threads. decode: takes
    the address of DecodeWord's arguments, decode_begin and decode_end that of BatchWord's, attend_words that
    of Word's, fold_words that of FoldWord's, pages that of PageWord's, attend_shared and help that of
    HelperWord's. Each computes as IEEE 754 says, whatever modes the calling thread is in."""

    def __init__(self, processor: str = "") -> None:
        """processor: LLVM's name of one to compile for, by default this machine's."""
        check_machine()
        module = ir.Module("kvtier")
        attend = emit_attend(module)
        emit_decode(module, attend)
        emit_batch(module)
        emit_pages(module)
        emit_shares(module, attend, emit_fold(module))
        entries = {name: emit_guarded(module, module.globals[name]) for name in _ENTRIES}
        engine = built(module, processor)
        self.attend_words, self.fold_words, self.decode, self.decode_begin, self.decode_end, self.pages = (
            _callable(engine, entries[name]) for name in _ENTRIES[:6]
        )
        self.attend_shared, self.help = (_callable(engine, entries[name]) for name in _ENTRIES[6:])
        self._local = threading.local()
        self._processor = processor
        self._lock = threading.Lock()
        self._listed: Any = None

    def attend(
        self,
        q: Tensor,
        jobs: Integers,
        queries: Integers,
        slots: Integers,
        seen: Integers,
        totals: tuple[Tensor, Tensor, Tensor],
        *,
        listed: bool = False,
    ) -> None:
        """Merges each job's states into totals, in order.

        q: float32 [B, Hk, G, d] times the scale; jobs: [n, len(Job)];
        queries, slots, seen: as Word says, at least one row seen by each; totals: m, l [S, Hq], u [S, Hq, d].
        All contiguous. listed: tables hold an address for each row.
        """
        _, heads, group, d = q.shape
        room = -(-int(jobs[:, Job.VISIBLE].max()) // LANES) * LANES
        scratch = self._scratch(scratch_floats(heads, group * int(jobs[:, Job.COUNT].max()), d, room))
        m, l, u = totals
        given = {
            Word.Q: q.data_ptr(),
            Word.JOBS: jobs.ctypes.data,
            Word.JOB_COUNT: len(jobs),
            Word.QUERIES: queries.ctypes.data,
            Word.SLOTS: slots.ctypes.data,
            Word.SEEN: seen.ctypes.data,
            Word.HEADS: heads,
            Word.GROUP: group,
            Word.HEAD_DIM: d,
            Word.M: m.data_ptr(),
            Word.L: l.data_ptr(),
            Word.U: u.data_ptr(),
            Word.SCRATCH: scratch,
            Word.ROOM: room,
        }
        words = np.array([given[word] for word in Word], np.int64)
        if listed:
            self._attend_listed()(words.ctypes.data)
        else:
            self.attend_words(words.ctypes.data)

    def _attend_listed(self) -> Any:
        """Compiled when it is first asked for: most processes never do."""
        with self._lock:
            if self._listed is None:
                module = ir.Module("kvtier-listed")
                entry = emit_guarded(module, emit_attend(module, listed=True))
                self._listed = _callable(built(module, self._processor), entry)
            return self._listed

    def fold(self, states: tuple[Tensor, Tensor, Tensor], totals: tuple[Tensor, Tensor, Tensor]) -> None:
        """Merges states m, l [n, R], u [n, R, d], in order, into totals m, l [R], u [R, d]. float32,
        contiguous, d a multiple of 16."""
        words = np.empty(len(FoldWord), np.int64)
        m, _, u = states
        words[FoldWord.STATES], words[FoldWord.ROWS] = m.shape
        words[FoldWord.HEAD_DIM] = u.shape[2]
        words[FoldWord.M_OF], words[FoldWord.L_OF], words[FoldWord.U_OF] = (x.data_ptr() for x in states)
        words[FoldWord.M], words[FoldWord.L], words[FoldWord.U] = (x.data_ptr() for x in totals)
        self.fold_words(words.ctypes.data)

    def _scratch(self, floats: int) -> int:
        """The address of this thread's own memory, which is kept."""
        kept: NDArray[np.float32] | None = getattr(self._local, "kept", None)
        if kept is None or kept.size < floats:
            kept = self._local.kept = np.empty(max(floats, _SCRATCH), np.float32)
        return int(kept.ctypes.data)


def _callable(engine: Any, name: str) -> Any:
    """A function of the engine's, which keeps it: the machine code goes with the engine, also under a caller
    that has kept the function alone."""
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address(name))
    call.engine = engine
    return call


def built(text: ir.Module, processor: str = "") -> Any:
    """The engine that owns the machine code of a module's functions. processor: as `Library` says."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(str(text))
    module.verify()
    target = binding.Target.from_default_triple()
    features = "" if processor else binding.get_host_cpu_features().flatten()
    machine = target.create_target_machine(
        cpu=processor or binding.get_host_cpu_name(), features=features, opt=2
    )
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=1))
    passes = binding.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
