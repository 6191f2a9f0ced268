"""The directory's batch steps as machine code: find keys, begin stores, publish them.

Why it exists: a block of a put costs some twenty cells of columns, which is microseconds of Python and
nanoseconds of anything else. A step takes as many leading blocks as are ordinary and stops at the first that
is not (a shard that must grow, no line left, a claim that is another's), which the plain steps of `storing`
then take or refuse: so what is refused, and why, is decided in one place. It must not know Python objects,
nor whose arrays these are: all that it gets are addresses, and whoever calls holds the lock of metadata.

Compiled once a process, in about 0.1 s. Where that cannot be, `steps` is None and all takes the plain way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from kvtier_core.directory.ids import KEY_BYTES, ChunkState, ReplicaState
from kvtier_kernels import compiled

Value = Any
"""An llvmlite value; the library states no types."""

UNLOCKED_FROM = 2048
"""Blocks from which a call lets other threads run. A shorter one is over (0.2 ms) before another thread would
give the interpreter back (5 ms), and its caller holds the lock of metadata meanwhile."""


class Word(IntEnum):
    """64-bit words of a table: addresses of columns, and what a call is about."""

    # The key index.
    ENTRIES = 0
    SIZES = 1
    COUNTS = 2
    SHARDS = 3
    STRIDE = 4
    # Columns of lines.
    KEY = 5
    STATE = 6
    TIER = 7
    EPOCH = 8
    BORN = 9
    NAMESPACE = 10
    ROWS = 11
    CHECKSUM = 12
    PRODUCER = 13
    COST = 14
    LAST_USE = 15
    REUSE = 16
    DROPPABLE = 17
    WRITE_TXN = 18
    # Columns of copies in one tier. _HIGH: upper halves of numbers of 63 bits.
    COPY_STATE = 19
    COPY_SLOT = 20
    COPY_SLOT_GENERATION = 21
    COPY_SLOT_GENERATION_HIGH = 22
    COPY_GENERATION = 23
    COPY_GENERATION_HIGH = 24
    COPY_STAMP = 25
    # The tier's slots.
    SLOT_STATE = 26
    SLOT_GENERATION = 27
    SLOT_FREE_STATE = 28
    SLOT_RESERVED_STATE = 29
    SLOT_PUBLISHED_STATE = 30
    TIER_INDEX = 31
    # A call: its blocks [FIRST, COUNT), with int64 lines, slots, generations, checksums, results.
    FIRST = 32
    COUNT = 33
    KEYS = 34
    LINES = 35
    SLOTS = 36
    GENERATIONS = 37
    SUMS = 38
    OUT = 39
    # What the blocks of a store have in common; COST_BITS as float32.
    OWNER = 40
    BLOCK_ROWS = 41
    BLOCK_PRODUCER = 42
    COST_BITS = 43
    TICK = 44
    TXN = 45
    MAY_DROP = 46
    # Read and written: the next free line plus one; lines [0, USED) were used; how many there may be.
    FREE = 47
    USED = 48
    WINDOW = 49
    ISSUED = 50


class Steps(NamedTuple):
    """locate(table): lines of keys into OUT, -1 where there is none; returns how many were found.
    begin(table): begins stores in SLOTS, lines into LINES and the slots' generations into GENERATIONS.
    publish(table): publishes LINES in SLOTS, generations of the copies into OUT. Both return the index of the
    first block that is not done. Each takes the address of a table's words; `_long` ones let other threads
    run."""

    locate: Callable[[int], int]
    begin: Callable[[int], int]
    publish: Callable[[int], int]
    locate_long: Callable[[int], int]
    begin_long: Callable[[int], int]
    publish_long: Callable[[int], int]
    engine: Any
    """Owns the code."""


@cache
def steps() -> Steps | None:
    """This process's compiled steps; None where `kvtier_kernels.compiled.missing` says why."""
    if compiled.missing():
        return None
    from llvmlite import ir

    from kvtier_kernels.compiled.machine import built

    module = ir.Module("kvtier_directory")
    _emit_locate(ir, module)
    _emit_begin(ir, module)
    _emit_publish(ir, module)
    engine = built(module)
    names = ("locate", "begin", "publish")
    # The first kind keeps the interpreter's lock, the second releases it.
    addresses = [engine.get_function_address(name) for name in names]
    locate, begin, publish = (ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(at) for at in addresses)
    long = [ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(at) for at in addresses]
    return Steps(locate, begin, publish, long[0], long[1], long[2], engine)


class _Code:
    """One function `int64 name(int64 words)`."""

    def __init__(self, ir: Any, module: Any, name: str) -> None:
        self._ir = ir
        self.i64 = ir.IntType(64)
        self.function = ir.Function(module, ir.FunctionType(self.i64, [self.i64]), name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._words = self.function.args[0]

    def number(self, value: int) -> Value:
        return self._ir.Constant(self.i64, value)

    def word(self, word: Word) -> Value:
        return self.cell(self._words, self.number(word), 64)

    def set_word(self, word: Word, value: Value) -> None:
        self.put(self._words, self.number(word), 64, value)

    def cell(self, base: Value, index: Value, bits: int) -> Value:
        """Element `index` of an array of unsigned numbers of so many bits."""
        kind = self._ir.IntType(bits)
        found = self.b.load(self._address(base, index, bits), typ=kind, align=bits // 8)
        return found if bits == 64 else self.b.zext(found, self.i64)

    def put(self, base: Value, index: Value, bits: int, value: Value) -> None:
        if bits != 64:
            value = self.b.trunc(value, self._ir.IntType(bits))
        self.b.store(value, self._address(base, index, bits), align=bits // 8)

    def _address(self, base: Value, index: Value, bits: int) -> Value:
        place = self.b.add(base, self.b.mul(index, self.number(bits // 8)))
        return self.b.inttoptr(place, self._ir.PointerType())

    def variable(self, value: Value) -> Value:
        with self.b.goto_entry_block():
            place = self.b.alloca(self.i64)
        self.b.store(value, place)
        return place

    def get(self, place: Value) -> Value:
        return self.b.load(place, typ=self.i64)

    def set(self, place: Value, value: Value) -> None:
        self.b.store(value, place)

    def equal(self, a: Value, b: Value) -> Value:
        return self.b.icmp_unsigned("==", a, b)

    def is_zero(self, value: Value) -> Value:
        return self.equal(value, self.number(0))

    @contextmanager
    def loop(self) -> Iterator[Value]:
        """Until the body branches to the block that it is given."""
        body, end = self.b.append_basic_block("body"), self.b.append_basic_block("end")
        self.b.branch(body)
        self.b.position_at_end(body)
        yield end
        self.b.branch(body)
        self.b.position_at_end(end)

    def leave_if(self, condition: Value, end: Value) -> None:
        on = self.b.append_basic_block("on")
        self.b.cbranch(condition, end, on)
        self.b.position_at_end(on)

    # What the steps share.

    def place_of(self, hashed: Value) -> tuple[Value, Value, Value, Value]:
        """(tag, shard, size of the shard, its home): as KeyIndex says."""
        b, n = self.b, self.number
        tag = b.and_(hashed, n(0xFFFFFFFF))
        shard = b.lshr(b.mul(b.lshr(hashed, n(32)), self.word(Word.SHARDS)), n(32))
        size = self.cell(self.word(Word.SIZES), shard, 32)
        return tag, shard, size, b.lshr(b.mul(tag, size), n(32))

    def next_place(self, at: Value, size: Value) -> Value:
        on = self.b.add(at, self.number(1))
        return self.b.select(self.equal(on, size), self.number(0), on)

    def put_counter(self, low: Word, high: Word, line: Value, value: Value) -> None:
        """As Counters: the upper half is written only where it is or was not zero."""
        above = self.b.lshr(value, self.number(32))
        column = self.word(high)
        with self.b.if_then(self.b.not_(self.is_zero(self.b.or_(above, self.cell(column, line, 32))))):
            self.put(column, line, 32, above)
        self.put(self.word(low), line, 32, value)


def _emit_locate(ir: Any, module: Any) -> None:
    c = _Code(ir, module, "locate")
    b, n = c.b, c.number
    i, found = c.variable(n(0)), c.variable(n(0))
    words = KEY_BYTES // 8
    with c.loop() as done:
        c.leave_if(c.equal(c.get(i), c.word(Word.COUNT)), done)
        first = b.mul(c.get(i), n(words))
        tag, shard, size, home = c.place_of(c.cell(c.word(Word.KEYS), first, 64))
        base = b.mul(shard, c.word(Word.STRIDE))
        at, line = c.variable(home), c.variable(n(-1))
        with c.loop() as over:
            entry = c.cell(c.word(Word.ENTRIES), b.add(base, c.get(at)), 64)
            c.leave_if(c.is_zero(entry), over)
            with b.if_then(c.equal(b.lshr(entry, n(32)), tag)):
                one = b.sub(b.and_(entry, n(0xFFFFFFFF)), n(1))
                differs = n(0)
                for word in range(words):
                    mine = c.cell(c.word(Word.KEY), b.add(b.mul(one, n(words)), n(word)), 64)
                    asked = c.cell(c.word(Word.KEYS), b.add(first, n(word)), 64)
                    differs = b.or_(differs, b.xor(mine, asked))
                with b.if_then(c.is_zero(differs)):
                    c.set(line, one)
                    c.set(found, b.add(c.get(found), n(1)))
            c.leave_if(b.icmp_signed(">=", c.get(line), n(0)), over)
            c.set(at, c.next_place(c.get(at), size))
        c.put(c.word(Word.OUT), c.get(i), 64, c.get(line))
        c.set(i, b.add(c.get(i), n(1)))
    b.ret(c.get(found))


def _emit_begin(ir: Any, module: Any) -> None:
    c = _Code(ir, module, "begin")
    b, n = c.b, c.number
    i = c.variable(c.word(Word.FIRST))
    words = KEY_BYTES // 8
    with c.loop() as done:
        c.leave_if(c.equal(c.get(i), c.word(Word.COUNT)), done)
        index = c.get(i)
        first = b.mul(index, n(words))
        tag, shard, size, home = c.place_of(c.cell(c.word(Word.KEYS), first, 64))
        count = c.cell(c.word(Word.COUNTS), shard, 32)
        c.leave_if(b.icmp_unsigned(">=", b.mul(count, n(5)), b.mul(size, n(4))), done)
        slot = c.cell(c.word(Word.SLOTS), index, 64)
        idle = c.equal(c.cell(c.word(Word.SLOT_STATE), slot, 8), c.word(Word.SLOT_FREE_STATE))
        c.leave_if(b.not_(idle), done)
        # A free line, or the next that was never used.
        free = c.word(Word.FREE)
        fresh = c.is_zero(free)
        line = b.select(fresh, c.word(Word.USED), b.sub(free, n(1)))
        c.leave_if(b.icmp_unsigned(">=", line, c.word(Word.WINDOW)), done)
        checksums = c.word(Word.CHECKSUM)
        with b.if_else(fresh) as (then, otherwise):
            with then:
                c.set_word(Word.USED, b.add(line, n(1)))
            with otherwise:
                c.set_word(Word.FREE, c.cell(checksums, line, 64))
        base = b.mul(shard, c.word(Word.STRIDE))
        at = c.variable(home)
        with c.loop() as empty:
            there = c.cell(c.word(Word.ENTRIES), b.add(base, c.get(at)), 64)
            c.leave_if(c.is_zero(there), empty)
            c.set(at, c.next_place(c.get(at), size))
        entry = b.or_(b.shl(tag, n(32)), b.add(line, n(1)))
        c.put(c.word(Word.ENTRIES), b.add(base, c.get(at)), 64, entry)
        c.put(c.word(Word.COUNTS), shard, 32, b.add(count, n(1)))
        for word in range(words):
            part = c.cell(c.word(Word.KEYS), b.add(first, n(word)), 64)
            c.put(c.word(Word.KEY), b.add(b.mul(line, n(words)), n(word)), 64, part)
        epoch = b.add(c.cell(c.word(Word.EPOCH), line, 32), n(1))
        issued = b.add(c.word(Word.ISSUED), n(1))
        c.set_word(Word.ISSUED, issued)
        generation = c.cell(c.word(Word.SLOT_GENERATION), slot, 64)
        for column, bits, value in (
            (Word.NAMESPACE, 32, c.word(Word.OWNER)),
            (Word.ROWS, 32, c.word(Word.BLOCK_ROWS)),
            (Word.PRODUCER, 32, c.word(Word.BLOCK_PRODUCER)),
            (Word.COST, 32, c.word(Word.COST_BITS)),
            (Word.LAST_USE, 32, c.word(Word.TICK)),
            (Word.TIER, 8, n(-1)),
            (Word.EPOCH, 32, epoch),
            (Word.BORN, 32, epoch),
            (Word.REUSE, 16, n(0)),
            (Word.CHECKSUM, 64, n(0)),
            (Word.WRITE_TXN, 64, c.word(Word.TXN)),
            (Word.STATE, 8, n(ChunkState.SEALED)),
            (Word.COPY_SLOT, 32, slot),
            (Word.COPY_STAMP, 32, n(0)),
            (Word.COPY_STATE, 8, n(ReplicaState.RESERVED)),
        ):
            c.put(c.word(column), line, bits, value)
        with b.if_then(b.not_(c.is_zero(c.word(Word.MAY_DROP)))):
            c.put(c.word(Word.DROPPABLE), line, 8, n(1))
        c.put_counter(Word.COPY_SLOT_GENERATION, Word.COPY_SLOT_GENERATION_HIGH, line, generation)
        c.put_counter(Word.COPY_GENERATION, Word.COPY_GENERATION_HIGH, line, issued)
        c.put(c.word(Word.SLOT_STATE), slot, 8, c.word(Word.SLOT_RESERVED_STATE))
        c.put(c.word(Word.LINES), index, 64, line)
        c.put(c.word(Word.GENERATIONS), index, 64, generation)
        c.set(i, b.add(index, n(1)))
    b.ret(c.get(i))


def _emit_publish(ir: Any, module: Any) -> None:
    c = _Code(ir, module, "publish")
    b, n = c.b, c.number
    i = c.variable(c.word(Word.FIRST))
    with c.loop() as done:
        c.leave_if(c.equal(c.get(i), c.word(Word.COUNT)), done)
        index = c.get(i)
        line, slot = (c.cell(c.word(word), index, 64) for word in (Word.LINES, Word.SLOTS))
        generation = c.cell(c.word(Word.GENERATIONS), index, 64)
        for mine in (
            c.equal(c.cell(c.word(Word.SLOT_GENERATION), slot, 64), generation),
            c.equal(c.cell(c.word(Word.SLOT_STATE), slot, 8), c.word(Word.SLOT_RESERVED_STATE)),
            c.equal(c.cell(c.word(Word.WRITE_TXN), line, 64), c.word(Word.TXN)),
            c.equal(c.cell(c.word(Word.STATE), line, 8), n(ChunkState.SEALED)),
            c.equal(c.cell(c.word(Word.COPY_STATE), line, 8), n(ReplicaState.RESERVED)),
        ):
            c.leave_if(b.not_(mine), done)
        epoch = b.add(c.cell(c.word(Word.EPOCH), line, 32), n(1))
        low = c.cell(c.word(Word.COPY_GENERATION), line, 32)
        high = c.cell(c.word(Word.COPY_GENERATION_HIGH), line, 32)
        for column, bits, value in (
            (Word.CHECKSUM, 64, c.cell(c.word(Word.SUMS), index, 64)),
            (Word.COPY_STATE, 8, n(ReplicaState.PUBLISHED)),
            (Word.COPY_STAMP, 32, epoch),
            (Word.EPOCH, 32, epoch),
            (Word.TIER, 8, c.word(Word.TIER_INDEX)),
            (Word.WRITE_TXN, 64, n(0)),
        ):
            c.put(c.word(column), line, bits, value)
        c.put(c.word(Word.SLOT_STATE), slot, 8, c.word(Word.SLOT_PUBLISHED_STATE))
        c.put(c.word(Word.OUT), index, 64, b.or_(b.shl(high, n(32)), low))
        c.set(i, b.add(index, n(1)))
    b.ret(c.get(i))
