"""Emits one query's way from the query to its output: times its scale, over its jobs, divided.

Why it exists: a decode frame finds nothing of its code in a processor's caches, since a model's weights went
through them, so each library call beside the attention costs several times what it costs when it is repeated.
What rounds is what `attend` and the operations around it round: a product with the scale, and a quotient.
It must not know Python objects.
"""

from __future__ import annotations

from llvmlite import ir

from kvtier_kernels.compiled.emit import F32, VECTOR_BYTES, Emitter, Value
from kvtier_kernels.compiled.layout import DecodeWord, Word


def emit_decode(module: ir.Module, attend: Value) -> None:
    """`decode(words)`: sets the query and the totals of `attend`, calls it, and writes the output."""
    e = Emitter(module, "decode")
    words = e.word(DecodeWord.ATTEND)
    heads = e.times(e.load_int(words, 8 * Word.HEADS), e.load_int(words, 8 * Word.GROUP))
    row_bytes = e.times(e.load_int(words, 8 * Word.HEAD_DIM), 4)
    q, m, l, u = (e.load_int(words, 8 * word) for word in (Word.Q, Word.M, Word.L, Word.U))
    scale = e.spread(e.load_one(e.word(DecodeWord.SCALE)))
    with e.loop(e.times(heads, row_bytes), step=VECTOR_BYTES) as at:
        e.store(e.b.fmul(e.load(e.at(e.word(DecodeWord.QUERY), at)), scale), e.at(q, at))
        e.store(e.vector(0.0), e.at(u, at))
    with e.loop(heads) as h:
        e.store_one(ir.Constant(F32, float("-inf")), e.at(m, e.times(h, 4)))
        e.store_one(ir.Constant(F32, 0.0), e.at(l, e.times(h, 4)))
    e.b.call(attend, [words])
    with e.loop(heads) as h:
        total = e.spread(e.load_one(e.at(l, e.times(h, 4))))
        none = e.b.fcmp_ordered("==", total, e.vector(0.0))
        divisor = e.b.select(none, e.vector(1.0), total)
        row = e.times(h, row_bytes)
        with e.loop(row_bytes, step=VECTOR_BYTES) as at:
            out = e.b.fdiv(e.load(e.at(u, row, at)), divisor)
            e.store(out, e.at(e.word(DecodeWord.OUT), row, at))
    e.done()
