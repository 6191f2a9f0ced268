"""Emits what turns a page table into the tables and jobs of `attend`.

Why it exists: behind a cache that was just read, none of a caller's code is in a processor's caches, and then
a score of small array operations takes as long as a thousand rows. It must not know Python objects.
"""

from __future__ import annotations

from llvmlite import ir

from kvtier_kernels.compiled.emit import Emitter, Value
from kvtier_kernels.compiled.layout import AHEAD, LANES, Job, PageWord


def emit_pages(module: ir.Module) -> None:
    """`pages(words)`: one job for each chunk of a request, in the order of its pages, each for one query, the
    first. A chunk's blocks behind the last page are the last block again: hints only."""
    e = Emitter(module, "pages")
    b = e.b
    used, pool, per_page = e.word(PageWord.USED), e.word(PageWord.POOL), e.word(PageWord.PER_PAGE)
    chunks, blocks = e.word(PageWord.CHUNKS), e.word(PageWord.BLOCKS)
    e.set_word(PageWord.WRONG, e.number(0))
    with e.loop(used) as i:
        page = _page(e, i)
        wrong = b.or_(b.icmp_signed("<", page, e.number(0)), b.icmp_signed(">=", page, pool))
        count = e.word(PageWord.WRONG)
        e.set_word(PageWord.WRONG, b.select(wrong, e.at(count, 1), count))
    last = e.at(e.times(used, per_page), -1)
    size = e.times(blocks, 8)
    with e.loop(chunks) as chunk:
        keys = e.at(e.word(PageWord.TABLE), e.times(e.times(chunk, 2), size))
        values = e.at(keys, size)
        with e.loop(blocks) as block:
            which = e.smaller(e.at(e.times(chunk, blocks), block), last)
            page, inside = _page(e, b.sdiv(which, per_page)), b.srem(which, per_page)
            for side, table in ((PageWord.KEYS, keys), (PageWord.VALUES, values)):
                pool_at, page_bytes, row_bytes = (e.word(side + i) for i in range(3))
                rows = e.times(e.times(inside, LANES), row_bytes)
                e.store_int(e.at(pool_at, e.times(page, page_bytes), rows), e.at(table, e.times(block, 8)))
        job = e.at(e.word(PageWord.JOBS), e.times(chunk, 8 * len(Job)))
        final = b.icmp_signed("==", e.at(chunk, 1), chunks)
        fields = {
            Job.KEYS: keys,
            Job.VALUES: values,
            Job.VISIBLE: b.select(final, e.word(PageWord.LAST), e.word(PageWord.SPLIT)),
            Job.FIRST: chunk,
            Job.COUNT: e.number(1),
            Job.KEY_ROW: e.word(PageWord.KEYS + 2),
            Job.KEY_HEAD: e.word(PageWord.KEYS + 3),
            Job.VALUE_ROW: e.word(PageWord.VALUES + 2),
            Job.VALUE_HEAD: e.word(PageWord.VALUES + 3),
            Job.BIAS: e.number(0),
        }
        for field in Job:
            e.store_int(fields[field], job, 8 * field)
        e.store_int(fields[Job.VISIBLE], e.at(e.word(PageWord.SEEN), e.times(chunk, 8)))
    end = e.at(e.word(PageWord.TABLE), e.times(e.times(chunks, 2), size))
    for spare in range(AHEAD):
        e.store_int(e.load_int(end, -8), end, 8 * spare)
    e.done()


def _page(e: Emitter, index: Value) -> Value:
    return e.load_short(e.at(e.word(PageWord.PAGES), e.times(index, 4)))
