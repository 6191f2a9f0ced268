"""Emits how several threads attend one request's chunks: each takes the next chunk until none is left.

Why it exists: to wake a thread and to hear from it by way of the interpreter takes as long as some chunks do.
Threads wait here, in compiled code, and never need the interpreter while they work. What a helper does is a
state of a chunk in a place of its own, so the bits do not depend on who does it. It must not know Python
objects, nor who owns the memory.

A call is open while chunks may be taken. A helper says that it is inside before it looks whether a call is
open, and a caller closes the call before it looks whether somebody is inside: one of the two always sees the
other, so a helper that comes late finds nothing to do, and none touches the memory of a call that has ended.
"""

from __future__ import annotations

from llvmlite import ir

from kvtier_kernels.compiled.decode import Sizes, begin
from kvtier_kernels.compiled.emit import F32, I32, I64, VECTOR_BYTES, Emitter, Value
from kvtier_kernels.compiled.layout import CrewWord, FoldWord, HelperWord, Job, Word

_ORDER = "seq_cst"
_SEMAPHORE_CALL = ir.FunctionType(I32, [I64])


def emit_shares(module: ir.Module, attend: Value, fold: Value) -> None:
    """`help(words)`, of HelperWord: until the crew stops, waits to be woken and attends what is left of the
    call that is open. `attend_shared(words)`, of HelperWord: one call, by its caller's own thread: the query
    times its scale, its chunks beside the helpers, and their states folded into the totals, ascending. Where
    helpers are inside for long the last is left to the caller (CrewWord.FOLDED)."""
    # The C library's, of a semaphore by its address.
    post, wait = (ir.Function(module, _SEMAPHORE_CALL, name) for name in ("sem_post", "sem_wait"))
    pause = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause")
    share = _emit_share(module, attend)
    _emit_help(module, share, wait)
    e = Emitter(module, "attend_shared")
    crew = e.word(HelperWord.CREW)
    words, into = e.load_int(crew, 8 * CrewWord.ATTEND), e.load_int(crew, 8 * CrewWord.FOLD)
    sizes = Sizes.of(e, words)
    m, l, u = (e.load_int(into, 8 * word) for word in (FoldWord.M, FoldWord.L, FoldWord.U))
    query, scale = e.load_int(crew, 8 * CrewWord.QUERY), e.load_int(crew, 8 * CrewWord.SCALE)
    begin(e, sizes._replace(m=m, l=l, u=u), query, scale, e.number(0))
    e.store_int(e.number(0), crew, 8 * CrewWord.FOLDED)
    _set(e, crew, CrewWord.NEXT, 0)
    _set(e, crew, CrewWord.OPEN, 1)
    with e.loop(e.load_int(crew, 8 * CrewWord.WAKES)):
        e.b.call(post, [e.load_int(crew, 8 * CrewWord.SEMAPHORE)])
    e.b.call(share, [e.function.args[0]])
    _set(e, crew, CrewWord.OPEN, 0)
    over = e.b.append_basic_block("over")
    with e.loop(e.load_int(crew, 8 * CrewWord.PATIENCE)):
        _leave_if(e, e.b.icmp_signed("==", _get(e, crew, CrewWord.INSIDE), e.number(0)), over)
        e.b.call(pause, [])
    e.b.branch(over)
    e.b.position_at_end(over)
    with e.b.if_then(e.b.icmp_signed("==", _get(e, crew, CrewWord.INSIDE), e.number(0))):
        e.b.call(fold, [into])
        e.store_int(e.number(1), crew, 8 * CrewWord.FOLDED)
    e.done()


def _emit_help(module: ir.Module, share: Value, wait: Value) -> None:
    e = Emitter(module, "help")
    crew = e.word(HelperWord.CREW)
    turn, over = (e.b.append_basic_block(name) for name in ("turn", "over"))
    e.b.branch(turn)
    e.b.position_at_end(turn)
    # An interrupted wait is a turn without a call, or one that found it a little early.
    e.b.call(wait, [e.load_int(crew, 8 * CrewWord.SEMAPHORE)])
    _leave_if(e, e.b.icmp_signed("!=", _get(e, crew, CrewWord.STOP), e.number(0)), over)
    e.b.call(share, [e.function.args[0]])
    e.b.branch(turn)
    e.b.position_at_end(over)
    e.done()


def _emit_share(module: ir.Module, attend: Value) -> Value:
    e = Emitter(module, "share")
    crew, own = e.word(HelperWord.CREW), e.word(HelperWord.ATTEND)
    helps = e.word(HelperWord.HELPS)
    _add(e, crew, CrewWord.INSIDE, helps)
    turn, take, work, over = (e.b.append_basic_block(name) for name in ("turn", "take", "work", "over"))
    e.b.cbranch(e.b.icmp_signed("!=", _get(e, crew, CrewWord.OPEN), e.number(0)), turn, over)
    e.b.position_at_end(turn)
    given = e.load_int(crew, 8 * CrewWord.ATTEND)
    for word in Word:
        if word is not Word.SCRATCH:
            e.store_int(e.load_int(given, 8 * word), own, 8 * word)
    e.store_int(e.number(1), own, 8 * Word.JOB_COUNT)
    heads = e.times(e.load_int(given, 8 * Word.HEADS), e.load_int(given, 8 * Word.GROUP))
    row_bytes = e.times(e.load_int(given, 8 * Word.HEAD_DIM), 4)
    e.b.branch(take)
    e.b.position_at_end(take)
    chunk = _add(e, crew, CrewWord.NEXT, e.number(1))
    left = e.b.icmp_signed("<", chunk, e.load_int(given, 8 * Word.JOB_COUNT))
    e.b.cbranch(left, work, over)
    e.b.position_at_end(work)
    _no_rows(e, given, chunk, heads, row_bytes)
    job = e.at(e.load_int(given, 8 * Word.JOBS), e.times(chunk, 8 * len(Job)))
    e.store_int(job, own, 8 * Word.JOBS)
    e.b.call(attend, [own])
    e.b.branch(take)
    e.b.position_at_end(over)
    _add(e, crew, CrewWord.INSIDE, e.b.neg(helps))
    e.done()
    return e.function


def _no_rows(e: Emitter, words: Value, slot: Value, heads: Value, row_bytes: Value) -> None:
    """The identity in a chunk's slot."""
    m, l, u = (e.load_int(words, 8 * word) for word in (Word.M, Word.L, Word.U))
    first = e.times(slot, heads)
    with e.loop(heads) as head:
        place = e.times(e.at(first, head), 4)
        e.store_one(ir.Constant(F32, float("-inf")), e.at(m, place))
        e.store_one(ir.Constant(F32, 0.0), e.at(l, place))
    with e.loop(e.times(heads, row_bytes), step=VECTOR_BYTES) as at:
        e.store(e.vector(0.0), e.at(u, e.times(first, row_bytes), at))


def _pointer(e: Emitter, base: Value, word: int) -> Value:
    return e.b.inttoptr(e.at(base, 8 * word), ir.PointerType())


def _get(e: Emitter, base: Value, word: int) -> Value:
    return e.b.load_atomic(_pointer(e, base, word), _ORDER, 8, typ=I64)


def _set(e: Emitter, base: Value, word: int, value: int) -> None:
    e.b.atomic_rmw("xchg", _pointer(e, base, word), e.number(value), _ORDER)


def _add(e: Emitter, base: Value, word: int, value: Value) -> Value:
    """What stood there before."""
    return e.b.atomic_rmw("add", _pointer(e, base, word), value, _ORDER)


def _leave_if(e: Emitter, condition: Value, over: Value) -> None:
    on = e.b.append_basic_block("on")
    e.b.cbranch(condition, over, on)
    e.b.position_at_end(on)
