"""exp and transposition over the emitter's vectors.

Formula of exp: Cody and Waite's reduction with Cephes' polynomial of expf, every product and sum rounded on
its own, so that `numerics.exp_plain` gives the same bits with plain tensor operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_kernels import numerics
from kvtier_kernels.compiled.emit import VF, VI, Emitter, Value
from kvtier_kernels.numerics import LANES


def exp(e: Emitter, x: Value) -> Value:
    """exp(x) for x <= 0; 0 below numerics.LOWEST_EXPONENT; NaN of NaN and of +inf."""
    b = e.b
    t = b.fadd(b.fmul(x, e.vector(numerics.LOG2_E)), e.vector(numerics.MAGIC))
    n = b.fsub(t, e.vector(numerics.MAGIC))
    r = b.fsub(x, b.fmul(n, e.vector(numerics.LN2_HIGH)))
    r = b.fsub(r, b.fmul(n, e.vector(numerics.LN2_LOW)))
    y = e.vector(numerics.POLYNOMIAL[0])
    for coefficient in numerics.POLYNOMIAL[1:]:
        y = b.fadd(b.fmul(y, r), e.vector(coefficient))
    y = b.fadd(b.fmul(y, b.fmul(r, r)), r)
    y = b.fadd(y, e.vector(1.0))
    shifted = b.shl(b.bitcast(t, VI), e.int_vector([23] * LANES))
    power = b.bitcast(b.add(shifted, e.int_vector([numerics.ONE_BITS] * LANES)), VF)
    small = b.fcmp_ordered("<", x, e.vector(numerics.LOWEST_EXPONENT))
    return b.select(small, e.vector(0.0), b.fmul(y, power))


def rows_started(e: Emitter, rows: Sequence[Value]) -> Value:
    """Of 4 vectors, one for each row: lanes i and i + 8 added, then i and i + 4; quarter q is row q's."""
    a, b, c, d = rows
    low = [0, 1, 2, 3, 4, 5, 6, 7]
    ab = _added(e, a, b, [*low, *(LANES + i for i in low)], 8)
    cd = _added(e, c, d, [*low, *(LANES + i for i in low)], 8)
    quarters = [q + i for q in (0, 8, LANES, LANES + 8) for i in range(4)]
    return _added(e, ab, cd, quarters, 4)


def rows_reduced(e: Emitter, parts: Sequence[Value]) -> Value:
    """Of 4 vectors of `rows_started`, rows ascending: lanes i and i + 2 added, then i and i + 1; lane i is
    the i-th row's."""
    a, b, c, d = parts
    pairs = [q + i for q in (0, 4, 8, 12) for i in (0, 1, LANES, LANES + 1)]
    ab, cd = _added(e, a, b, pairs, 2), _added(e, c, d, pairs, 2)
    ones = [q + i for q in (0, 4, 8, 12) for i in (0, 2, LANES, LANES + 2)]
    mixed = _added(e, ab, cd, ones, 1)
    return e.shuffle(mixed, mixed, [4 * (i % 4) + i // 4 for i in range(LANES)])


def _added(e: Emitter, x: Value, y: Value, lanes: Sequence[int], apart: int) -> Value:
    return e.b.fadd(e.shuffle(x, y, lanes), e.shuffle(x, y, [lane + apart for lane in lanes]))


def transposed(e: Emitter, rows: Sequence[Value]) -> list[Value]:
    """16 vectors; lane j of the i-th is the i-th number at address rows[j]."""
    # Four numbers each of rows r, r + 4, r + 8 and r + 12 are loaded into one vector, so that what is left to
    # do stays within quarters of a vector.
    out: list[Value] = []
    for q in range(4):
        a, b, c, d = (_quads(e, list(rows[r::4]), 16 * q) for r in range(4))
        for half in (0, 2):
            ab, cd = _interleaved(e, a, b, half), _interleaved(e, c, d, half)
            out += [_pairs(e, ab, cd, 0), _pairs(e, ab, cd, 2)]
    return out


def _quads(e: Emitter, rows: Sequence[Value], offset: int) -> Value:
    one, two, three, four = (e.load_quad(row, offset) for row in rows)
    halves = [e.shuffle(x, y, range(8)) for x, y in ((one, two), (three, four))]
    return e.shuffle(halves[0], halves[1], range(16))


def _interleaved(e: Emitter, a: Value, b: Value, first: int) -> Value:
    lanes = [base + 4 * q for q in range(4) for base in (first, LANES + first, first + 1, LANES + first + 1)]
    return e.shuffle(a, b, lanes)


def _pairs(e: Emitter, a: Value, b: Value, first: int) -> Value:
    lanes = [base + 4 * q for q in range(4) for base in (first, first + 1, LANES + first, LANES + first + 1)]
    return e.shuffle(a, b, lanes)
