"""What the compiled kernels are written in: 64-bit addresses, vectors of 16 float32, loops.

Why it exists: every operation that rounds is one instruction here, in the order in which it is written, and
nothing may contract or reorder it: no fast-math flag is ever set. So the bits do not depend on how wide the
machine's vectors are, nor on what the optimizer does. It must not know attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from kvtier_kernels.numerics import LANES

VECTOR_BYTES = 4 * LANES

I1, I32, I64, F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)

Value = Any
"""An llvmlite value; the library states no types."""


class Emitter:
    """One function `void name(int64 arguments)`, whose single argument is the address of int64 words."""

    def __init__(self, module: ir.Module, name: str) -> None:
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._words = self.function.args[0]

    # Integers.

    def word(self, index: int) -> Value:
        """The index-th word of the arguments."""
        return self.load_int(self._words, 8 * index)

    def number(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def load_int(self, address: Value, offset: int = 0) -> Value:
        return self.b.load(self._pointer(address, offset), typ=I64, align=8)

    def load_short(self, address: Value) -> Value:
        """An int32 as one of 64 bits."""
        return self.b.sext(self.b.load(self._pointer(address), typ=I32, align=4), I64)

    def store_int(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value, self._pointer(address, offset), align=8)

    def set_word(self, index: int, value: Value) -> None:
        """The index-th word of the arguments."""
        self.store_int(value, self._words, 8 * index)

    def at(self, base: Value, *terms: Value) -> Value:
        """base plus terms."""
        for term in terms:
            base = self.b.add(base, term if not isinstance(term, int) else self.number(term))
        return base

    def times(self, a: Value, b: Value | int) -> Value:
        return self.b.mul(a, self.number(b) if isinstance(b, int) else b)

    def ceil_div(self, a: Value, b: int) -> Value:
        return self.b.sdiv(self.at(a, b - 1), self.number(b))

    def smaller(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    # Memory.

    def _pointer(self, address: Value, offset: int = 0) -> Value:
        if offset:
            address = self.b.add(address, self.number(offset))
        return self.b.inttoptr(address, ir.PointerType())

    def load(self, address: Value, offset: int = 0) -> Value:
        """16 numbers, at any address that is a multiple of 4."""
        return self.b.load(self._pointer(address, offset), typ=VF, align=4)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value, self._pointer(address, offset), align=4)

    def load_one(self, address: Value, offset: int = 0) -> Value:
        return self.b.load(self._pointer(address, offset), typ=F32, align=4)

    def store_one(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value, self._pointer(address, offset), align=4)

    def load_quad(self, address: Value, offset: int = 0) -> Value:
        return self.b.load(self._pointer(address, offset), typ=ir.VectorType(F32, 4), align=4)

    def prefetch(self, address: Value, offset: int = 0) -> None:
        """A hint to bring a line to the second level; it changes nothing, whatever the address is. The first
        level's own queue is too short to hide memory."""
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), I32, I32, I32])
        call = self._intrinsic("llvm.prefetch.p0", kind)
        hint = [ir.Constant(I32, x) for x in (0, 2, 1)]
        self.b.call(call, [self._pointer(address, offset), *hint])

    def variable(self, kind: Any) -> Value:
        """A place for a value that a loop carries; the optimizer keeps it in a register."""
        with self.b.goto_entry_block():
            return self.b.alloca(kind)

    def get(self, place: Value, kind: Any = VF) -> Value:
        return self.b.load(place, typ=kind)

    def put(self, value: Value, place: Value) -> None:
        self.b.store(value, place)

    # Vectors.

    def vector(self, value: float) -> Value:
        return ir.Constant(VF, [value] * LANES)

    def int_vector(self, values: Sequence[int]) -> Value:
        return ir.Constant(VI, list(values))

    def spread(self, scalar: Value) -> Value:
        """A scalar in all lanes."""
        one = self.b.insert_element(ir.Constant(VF, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, one, self.int_vector([0] * LANES))

    def lane(self, vector: Value, index: int = 0) -> Value:
        return self.b.extract_element(vector, ir.Constant(I32, index))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of a (0 to n - 1) and of b (from n on)."""
        kind = ir.VectorType(I32, len(lanes))
        return self.b.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a b + c, rounded once."""
        call = self._intrinsic("llvm.fma.v16f32", ir.FunctionType(VF, [VF, VF, VF]))
        return self.b.call(call, [a, b, c])

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger one; NaN where either is."""
        larger = self.b.select(self.b.fcmp_ordered(">", a, b), a, b)
        return self.b.select(self.b.fcmp_unordered("uno", a, a), a, larger)

    def first_lanes(self, count: Value) -> Value:
        """Which lanes come before `count`."""
        narrow = self.b.trunc(count, I32)
        one = self.b.insert_element(ir.Constant(VI, ir.Undefined), narrow, ir.Constant(I32, 0))
        spread = self.b.shuffle_vector(one, one, self.int_vector([0] * LANES))
        return self.b.icmp_signed("<", self.int_vector(range(LANES)), spread)

    def reduce(self, vector: Value, combine: Any) -> Value:
        """All lanes in one, in all lanes: lane i with lane i + 8, then i + 4, i + 2, i + 1."""
        half = LANES // 2
        while half:
            other = self.shuffle(vector, vector, [(i + half) % LANES for i in range(LANES)])
            vector = combine(vector, other)
            half //= 2
        return self.spread(self.lane(vector))

    # Control flow.

    @contextmanager
    def loop(self, stop: Value, start: Value | None = None, step: int = 1) -> Iterator[Value]:
        """For i from start (0) below stop."""
        b = self.b
        before = b.block
        head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(self.number(0) if start is None else start, before)
        b.cbranch(b.icmp_signed("<", i, stop), body, end)
        b.position_at_end(body)
        yield i
        i.add_incoming(b.add(i, self.number(step)), b.block)
        b.branch(head)
        b.position_at_end(end)

    def done(self) -> None:
        self.b.ret_void()

    def _intrinsic(self, name: str, kind: Any) -> Value:
        module = self.function.module
        found = module.globals.get(name)
        return found if found is not None else ir.Function(module, kind, name)
