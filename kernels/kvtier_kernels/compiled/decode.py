"""Emits a query's way from the query to its output: times its scale, over its jobs, divided.

Why it exists: a decode frame finds nothing of its code in a processor's caches, since a model's weights went
through them, so each library call beside the attention costs several times what it costs when it is repeated.
What rounds is what `attend` and the operations around it round: a product with the scale, and a quotient.
It must not know Python objects.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from kvtier_kernels.compiled.emit import F32, VECTOR_BYTES, Emitter, Value
from kvtier_kernels.compiled.layout import BatchWord, DecodeWord, Word


def emit_decode(module: ir.Module, attend: Value) -> None:
    """`decode(words)`: sets the query and the totals of `attend`, calls it, and writes the output."""
    e = Emitter(module, "decode")
    words = e.word(DecodeWord.ATTEND)
    sizes = Sizes.of(e, words)
    zero = e.number(0)
    begin(e, sizes, e.word(DecodeWord.QUERY), e.word(DecodeWord.SCALE), zero)
    e.b.call(attend, [words])
    _end(e, sizes, e.word(DecodeWord.OUT), zero)
    e.done()


def emit_batch(module: ir.Module) -> None:
    """`decodebegin(words)` and `decode_end(words)`: of several queries, before and after calls of `attend`
    which together are all of their jobs."""
    e = Emitter(module, "decode_begin")
    sizes = Sizes.of(e, e.word(BatchWord.ATTEND))
    with e.loop(e.word(BatchWord.COUNT)) as i:
        query = e.load_int(e.at(e.word(BatchWord.QUERIES), e.times(i, 8)))
        begin(e, sizes, query, e.at(e.word(BatchWord.SCALES), e.times(i, 4)), i)
    e.done()
    e = Emitter(module, "decode_end")
    sizes = Sizes.of(e, e.word(BatchWord.ATTEND))
    with e.loop(e.word(BatchWord.COUNT)) as i:
        _end(e, sizes, e.word(BatchWord.OUT), i)
    e.done()


class Sizes(NamedTuple):
    """What `attend` is told: how many query heads, bytes of a row, and where queries and totals are."""

    heads: Value
    row_bytes: Value
    q: Value
    m: Value
    l: Value
    u: Value

    @classmethod
    def of(cls, e: Emitter, words: Value) -> Sizes:
        return cls(
            e.times(e.load_int(words, 8 * Word.HEADS), e.load_int(words, 8 * Word.GROUP)),
            e.times(e.load_int(words, 8 * Word.HEAD_DIM), 4),
            *(e.load_int(words, 8 * word) for word in (Word.Q, Word.M, Word.L, Word.U)),
        )


def begin(e: Emitter, sizes: Sizes, query: Value, scale: Value, slot: Value) -> None:
    """Query `slot` times its scale, and no rows in its totals. query, scale: addresses."""
    factor = e.spread(e.load_one(scale))
    first = e.times(slot, sizes.heads)
    row = e.times(first, sizes.row_bytes)
    with e.loop(e.times(sizes.heads, sizes.row_bytes), step=VECTOR_BYTES) as at:
        e.store(e.b.fmul(e.load(e.at(query, at)), factor), e.at(sizes.q, row, at))
        e.store(e.vector(0.0), e.at(sizes.u, row, at))
    with e.loop(sizes.heads) as h:
        place = e.times(e.at(first, h), 4)
        e.store_one(ir.Constant(F32, float("-inf")), e.at(sizes.m, place))
        e.store_one(ir.Constant(F32, 0.0), e.at(sizes.l, place))


def _end(e: Emitter, sizes: Sizes, out: Value, slot: Value) -> None:
    """The output of query `slot`: u / l, 0 where there are no rows."""
    first = e.times(slot, sizes.heads)
    with e.loop(sizes.heads) as h:
        head = e.at(first, h)
        total = e.spread(e.load_one(e.at(sizes.l, e.times(head, 4))))
        none = e.b.fcmp_ordered("==", total, e.vector(0.0))
        divisor = e.b.select(none, e.vector(1.0), total)
        row = e.times(head, sizes.row_bytes)
        with e.loop(sizes.row_bytes, step=VECTOR_BYTES) as at:
            e.store(e.b.fdiv(e.load(e.at(sizes.u, row, at)), divisor), e.at(out, row, at))
