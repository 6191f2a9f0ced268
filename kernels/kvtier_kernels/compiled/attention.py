"""Emits the attention of queries over chunks of rows: logits, softmax, weighted sum and merge in one pass.

What rounds, in this order (numerics version 2):
- a logit: lane i of 16 is a chain of fused multiply-adds over dimensions i, i + 16, i + 32 and so on, from 0;
  then lanes i and i + 8 are added, i + 4, i + 2, i + 1;
- exp and the sum of weights: as `numerics` says;
- the sum of V: a chain of fused multiply-adds over the rows of each block of 128, ascending, from 0; blocks
  are added ascending;
- the merge: as `state.merge`, in the order of the jobs.
So a state's bits depend on its query and on the rows that it sees. Rows that no query of a job sees are not
read.

`attend` reads runs of 16 rows, `attend_listed` rows that lie anywhere, each by an address of its own, and
adds a bias of each row to its logits, where there is one, before anything else is done with them. Bits are
the same.

Memory is read in the order in which it lies, since a processor's prefetching follows nothing else: where rows
lie within heads, head by head; where heads lie within rows, a few rows of all heads, then the next few. It
must not know Python objects: all that it gets are addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from kvtier_kernels.compiled.emit import VECTOR_BYTES, VF, Emitter, Value
from kvtier_kernels.compiled.layout import AHEAD, LANES, FoldWord, Job, Word
from kvtier_kernels.compiled.vectormath import exp, rows_reduced, rows_started, transposed

VALUE_BLOCK = 128
ROWS = 4
"""Rows whose logits are begun together. More of them read memory from more places at once, which is
slower."""
VALUE_ROWS = LANES
"""Rows that are added to the sums together: a block of the table."""
QUERY_TILE = 3
VALUE_TILE = 4
TURN_FROM = 12
"""Query heads per KV head from which keys are transposed once for all of them."""
LOWEST = -3.4028234663852886e38


class _Sizes(NamedTuple):
    """listed: whether tables hold an address for each row, and none for each block."""

    listed: bool
    heads: Value
    group: Value
    row_bytes: Value  # of a query, or of a sum
    room_bytes: Value  # of the logits of one query


class _Chunk(NamedTuple):
    """A job, and where its parts stand in the scratch memory."""

    address: Value
    visible: Value
    blocks: Value
    queries: Value  # query heads per KV head
    q: Value
    p: Value
    u: Value
    part: Value  # of u, one block of 128 rows
    begun: Value  # logits of 4 rows each, not added up
    turned: Value  # 16 keys of one head, transposed
    m: Value
    l: Value


class _Side(NamedTuple):
    """Keys or values of a job: where they lie."""

    table: Value
    step: Value
    head_step: Value
    by_rows: Value  # whether heads lie within rows


class _Rows(NamedTuple):
    """Some rows of one head. base: the address of the first row that may be read, of a list that of its place
    in the table; step: bytes from row to row, of a list from there to this head; first, count: which of them;
    ahead: what is read later and may be fetched by now, like base."""

    base: Value
    step: Value
    first: Value
    count: Value
    ahead: Value

    def at(self, e: Emitter, sizes: _Sizes, i: Value) -> Value:
        """The address of the i-th."""
        if sizes.listed:
            return e.at(e.load_int(e.at(self.base, e.times(i, 8))), self.step)
        return e.at(self.base, e.times(i, self.step))

    def later(self, e: Emitter, sizes: _Sizes, i: Value) -> Value:
        """What to fetch while the i-th is read, but for where it stands in its row."""
        if sizes.listed:
            return e.at(e.load_int(e.at(self.ahead, e.times(i, 8))), self.step)
        return e.at(self.ahead, e.times(i, sizes.row_bytes))


def emit_attend(module: ir.Module, *, listed: bool = False) -> Value:
    """`attend(words)`, or `attend_listed(words)`; the function."""
    e = Emitter(module, "attend_listed" if listed else "attend")
    sizes = _Sizes(
        listed=listed,
        heads=e.word(Word.HEADS),
        group=e.word(Word.GROUP),
        row_bytes=e.times(e.word(Word.HEAD_DIM), 4),
        room_bytes=e.times(e.word(Word.ROOM), 4),
    )
    with e.loop(e.word(Word.JOB_COUNT)) as j:
        chunk = _chunk(e, sizes, e.at(e.word(Word.JOBS), e.times(j, 8 * len(Job))))
        _pack(e, sizes, chunk)
        _logits(e, sizes, chunk)
        with e.loop(e.times(sizes.heads, chunk.queries)) as row:
            _softmax(e, sizes, chunk, row)
        _values(e, sizes, chunk)
        with e.loop(sizes.heads) as h, e.loop(chunk.queries) as m:
            _merge(e, sizes, chunk, h, m)
    e.done()
    return e.function


def _chunk(e: Emitter, sizes: _Sizes, address: Value) -> _Chunk:
    visible = e.load_int(address, 8 * Job.VISIBLE)
    queries = e.times(e.load_int(address, 8 * Job.COUNT), sizes.group)
    states = e.times(sizes.heads, queries)
    vectors = e.times(states, sizes.row_bytes)
    parts = [e.word(Word.SCRATCH)]
    for size in (
        vectors,
        e.times(states, sizes.room_bytes),
        vectors,
        vectors,
        e.times(states, VECTOR_BYTES * 4),
        e.times(sizes.row_bytes, LANES),
        e.times(states, 4),
    ):
        parts.append(e.at(parts[-1], size))
    return _Chunk(address, visible, e.ceil_div(visible, LANES), queries, *parts)


def _side(e: Emitter, chunk: _Chunk, table: Job, row: Job, head: Job) -> _Side:
    step, head_step = e.load_int(chunk.address, 8 * row), e.load_int(chunk.address, 8 * head)
    by_rows = e.b.icmp_signed("<", head_step, step)
    return _Side(e.load_int(chunk.address, 8 * table), step, head_step, by_rows)


def _pack(e: Emitter, sizes: _Sizes, chunk: _Chunk) -> None:
    """Queries [count, Hk, G, d] to [Hk, count, G, d]."""
    size = e.times(sizes.group, sizes.row_bytes)
    count = e.load_int(chunk.address, 8 * Job.COUNT)
    first = e.load_int(chunk.address, 8 * Job.FIRST)
    with e.loop(sizes.heads) as h, e.loop(count) as i:
        entry = e.at(e.word(Word.QUERIES), e.times(e.at(first, i), 8))
        source = e.times(e.at(e.times(e.load_int(entry), sizes.heads), h), size)
        target = e.times(e.at(e.times(h, count), i), size)
        with e.loop(size, step=VECTOR_BYTES) as at:
            e.store(e.load(e.at(e.word(Word.Q), source, at)), e.at(chunk.q, target, at))


def _tiles(e: Emitter, count: Value, most: int, body: Callable[[Value, int], None]) -> None:
    """body(first, width) over [0, count) in tiles of `most`, the last one as wide as what is left."""
    b = e.b
    with e.loop(count, step=most) as first:
        width = e.smaller(b.sub(count, first), e.number(most))
        end = b.append_basic_block("tiled")
        blocks = [b.append_basic_block(f"tile{w}") for w in range(1, most + 1)]
        choice = b.switch(width, blocks[-1])
        for w, block in enumerate(blocks[:-1], 1):
            choice.add_case(e.number(w), block)
        for w, block in enumerate(blocks, 1):
            b.position_at_end(block)
            body(first, w)
            b.branch(end)
        b.position_at_end(end)


def _logits(e: Emitter, sizes: _Sizes, chunk: _Chunk) -> None:
    side = _side(e, chunk, Job.KEYS, Job.KEY_ROW, Job.KEY_HEAD)
    outer = e.b.select(side.by_rows, e.number(1), sizes.heads)
    inner = e.b.select(side.by_rows, sizes.heads, e.number(1))
    many = e.b.icmp_signed(">=", chunk.queries, e.number(TURN_FROM))
    with e.loop(outer) as x, e.loop(chunk.blocks) as block:
        base, later = _block(e, sizes, side, block)
        seen = e.smaller(e.number(LANES), e.b.sub(chunk.visible, e.times(block, LANES)))
        with e.b.if_else(many) as (transpose, directly):
            with transpose, e.loop(inner) as y:
                h = e.at(x, y)
                _turn(e, sizes, chunk, _rows(e, sizes, side, h, base, later, seen))

                def tile(first: Value, width: int, h: Value = h) -> None:
                    _turned_tile(e, sizes, chunk, (h, block), first, width)

                _tiles(e, chunk.queries, QUERY_TILE, tile)
            with directly:
                with e.loop(e.ceil_div(seen, ROWS)) as part, e.loop(inner) as y:
                    h = e.at(x, y)
                    unit = e.at(e.times(part, inner), y)
                    ahead = (
                        later if sizes.listed else e.at(later, e.times(unit, e.times(sizes.row_bytes, ROWS)))
                    )
                    keys = _rows(e, sizes, side, h, base, ahead, seen, e.times(part, ROWS))

                    def begin(first: Value, width: int, h: Value = h, keys: _Rows = keys) -> None:
                        _begun_tile(e, sizes, chunk, h, keys, first, width)

                    _tiles(e, chunk.queries, QUERY_TILE, begin)
                with e.loop(inner) as y, e.loop(chunk.queries) as m:
                    state = e.at(e.times(e.at(x, y), chunk.queries), m)
                    begun = e.at(chunk.begun, e.times(state, VECTOR_BYTES * 4))
                    parts = [e.load(begun, VECTOR_BYTES * i) for i in range(4)]
                    out = e.at(chunk.p, e.times(state, sizes.room_bytes), e.times(block, VECTOR_BYTES))
                    e.store(rows_reduced(e, parts), out)


def _block(e: Emitter, sizes: _Sizes, side: _Side, block: Value) -> tuple[Value, Value]:
    """Where a block of 16 rows is, and the one to be fetched meanwhile; of a list, their places in the
    table."""
    if sizes.listed:
        entry = e.at(side.table, e.times(block, 8 * LANES))
        return entry, e.at(entry, 8 * LANES * AHEAD)
    entry = e.at(side.table, e.times(block, 8))
    return e.load_int(entry), e.load_int(entry, 8 * AHEAD)


def _rows(
    e: Emitter,
    sizes: _Sizes,
    side: _Side,
    h: Value,
    base: Value,
    ahead: Value,
    count: Value,
    first: Value | None = None,
) -> _Rows:
    first = e.number(0) if first is None else first
    to_head = e.times(h, side.head_step)
    if sizes.listed:
        return _Rows(base, to_head, first, count, ahead)
    return _Rows(e.at(base, to_head), side.step, first, count, ahead)


def _begun_tile(
    e: Emitter, sizes: _Sizes, chunk: _Chunk, h: Value, keys: _Rows, first: Value, width: int
) -> None:
    """`width` queries times 4 rows: one vector each, of 4 lanes a row."""
    # Rows that are not seen are not read: their lanes read the last one that is.
    last = e.at(keys.count, -1)
    which = [e.smaller(e.at(keys.first, i), last) for i in range(ROWS)]
    rows = [keys.at(e, sizes, i) for i in which]
    later = [keys.later(e, sizes, i) for i in which] if sizes.listed else []
    state = e.at(e.times(h, chunk.queries), first)
    q = [e.at(chunk.q, e.times(e.at(state, i), sizes.row_bytes)) for i in range(width)]
    sums = [[e.variable(VF) for _ in rows] for _ in q]
    for place in (place for places in sums for place in places):
        e.put(e.vector(0.0), place)
    with e.loop(sizes.row_bytes, step=VECTOR_BYTES) as at:
        loaded = [e.load(e.at(row, at)) for row in rows]
        for row in later:
            e.prefetch(e.at(row, at))
        for i in range(0 if sizes.listed else ROWS):
            e.prefetch(e.at(keys.ahead, e.times(at, ROWS)), VECTOR_BYTES * i)
        for base, places in zip(q, sums, strict=True):
            query = e.load(e.at(base, at))
            for key, place in zip(loaded, places, strict=True):
                e.put(e.fma(query, key, e.get(place)), place)
    for i, places in enumerate(sums):
        begun = e.times(e.at(state, i), VECTOR_BYTES * 4)
        started = rows_started(e, [e.get(place) for place in places])
        at = e.times(e.b.sdiv(keys.first, e.number(ROWS)), VECTOR_BYTES)
        e.store(started, e.at(chunk.begun, begun, at))


def _turn(e: Emitter, sizes: _Sizes, chunk: _Chunk, keys: _Rows) -> None:
    """16 keys [16, d] to [d, 16]; of rows that are not seen the last one that is."""
    last = e.at(keys.count, -1)
    rows = [keys.at(e, sizes, e.smaller(e.number(i), last)) for i in range(LANES)]
    with e.loop(sizes.row_bytes, step=VECTOR_BYTES) as at:
        for i, column in enumerate(transposed(e, [e.at(row, at) for row in rows])):
            e.store(column, e.at(chunk.turned, e.times(at, LANES)), VECTOR_BYTES * i)


def _turned_tile(
    e: Emitter, sizes: _Sizes, chunk: _Chunk, where: tuple[Value, Value], first: Value, width: int
) -> None:
    """Logits of `width` queries over the 16 keys that were transposed."""
    h, block = where
    state = e.at(e.times(h, chunk.queries), first)
    q = [e.at(chunk.q, e.times(e.at(state, i), sizes.row_bytes)) for i in range(width)]
    halves: list[list[Value]] = []
    for odd in (0, 1):
        lanes = range(odd, LANES, 2)
        sums = [[e.variable(VF) for _ in lanes] for _ in q]
        for place in (place for places in sums for place in places):
            e.put(e.vector(0.0), place)
        with e.loop(sizes.row_bytes, step=VECTOR_BYTES) as at:
            keys = e.at(chunk.turned, e.times(at, LANES))
            for k, lane in enumerate(lanes):
                key = e.load(keys, VECTOR_BYTES * lane)
                for base, places in zip(q, sums, strict=True):
                    one = e.spread(e.load_one(e.at(base, at), 4 * lane))
                    e.put(e.fma(one, key, e.get(places[k])), places[k])
        halves.append([_folded(e, [e.get(place) for place in places]) for places in sums])
    for i, (even, uneven) in enumerate(zip(*halves, strict=True)):
        out = e.at(chunk.p, e.times(e.at(state, i), sizes.room_bytes), e.times(block, VECTOR_BYTES))
        e.store(e.b.fadd(even, uneven), out)


def _folded(e: Emitter, vectors: list[Value]) -> Value:
    """The i-th plus the (i + n/2)-th of n, and so on down to one."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [e.b.fadd(vectors[i], vectors[i + half]) for i in range(half)]
    return vectors[0]


def _softmax(e: Emitter, sizes: _Sizes, chunk: _Chunk, row: Value) -> None:
    """Logits of one query head to weights, their maximum and their sum."""
    query = e.b.sdiv(e.b.srem(row, chunk.queries), sizes.group)
    first = e.load_int(chunk.address, 8 * Job.FIRST)
    seen = e.load_int(e.at(e.word(Word.SEEN), e.times(e.at(first, query), 8)))
    start = e.at(chunk.p, e.times(row, sizes.room_bytes))
    if sizes.listed:
        _add_bias(e, chunk, start)
    peak, total = e.variable(VF), e.variable(VF)
    e.put(e.vector(float("-inf")), peak)
    e.put(e.vector(0.0), total)
    unknown = e.variable(VF)
    e.put(e.vector(0.0), unknown)

    def look(logits: Value) -> None:
        e.put(e.b.select(e.b.fcmp_ordered(">", logits, e.get(peak)), logits, e.get(peak)), peak)
        e.put(e.b.select(e.b.fcmp_unordered("uno", logits, logits), logits, e.get(unknown)), unknown)

    full = e.b.sdiv(seen, e.number(LANES))
    with e.loop(full) as i:
        look(e.load(e.at(start, e.times(i, VECTOR_BYTES))))
    with e.loop(chunk.blocks, full) as i:
        at = e.at(start, e.times(i, VECTOR_BYTES))
        keep = e.first_lanes(e.b.sub(seen, e.times(i, LANES)))
        logits = e.b.select(keep, e.load(at), e.vector(float("-inf")))
        e.store(logits, at)
        look(logits)
    known = e.b.fcmp_ordered("ord", e.get(unknown), e.get(unknown))
    m = e.reduce(e.b.select(known, e.get(peak), e.get(unknown)), e.maximum)
    anchor = e.maximum(m, e.vector(LOWEST))
    with e.loop(chunk.blocks) as i:
        at = e.at(start, e.times(i, VECTOR_BYTES))
        weights = exp(e, e.b.fsub(e.load(at), anchor))
        e.store(weights, at)
        e.put(e.b.fadd(e.get(total), weights), total)
    e.store_one(e.lane(m), e.at(chunk.m, e.times(row, 4)))
    e.store_one(e.lane(e.reduce(e.get(total), e.b.fadd)), e.at(chunk.l, e.times(row, 4)))


def _add_bias(e: Emitter, chunk: _Chunk, start: Value) -> None:
    """To the logits of one query head."""
    bias = e.load_int(chunk.address, 8 * Job.BIAS)
    some = e.b.icmp_signed("!=", bias, e.number(0))
    with e.loop(e.b.select(some, chunk.blocks, e.number(0))) as i:
        at = e.at(start, e.times(i, VECTOR_BYTES))
        e.store(e.b.fadd(e.load(at), e.load(e.at(bias, e.times(i, VECTOR_BYTES)))), at)


def _values(e: Emitter, sizes: _Sizes, chunk: _Chunk) -> None:
    side = _side(e, chunk, Job.VALUES, Job.VALUE_ROW, Job.VALUE_HEAD)
    outer = e.b.select(side.by_rows, e.number(1), sizes.heads)
    inner = e.b.select(side.by_rows, sizes.heads, e.number(1))
    size = e.times(e.times(sizes.heads, chunk.queries), sizes.row_bytes)
    with e.loop(chunk.visible, step=VALUE_BLOCK) as first:
        with e.loop(size, step=VECTOR_BYTES) as at:
            e.store(e.vector(0.0), e.at(chunk.part, at))
        last = e.smaller(e.at(first, VALUE_BLOCK), chunk.visible)
        with e.loop(outer) as x, e.loop(last, first, VALUE_ROWS) as row, e.loop(inner) as y:
            h = e.at(x, y)
            base, later = _block(e, sizes, side, e.b.sdiv(row, e.number(LANES)))
            ahead = later if sizes.listed else e.at(later, e.times(y, e.times(sizes.row_bytes, LANES)))
            count = e.smaller(e.number(VALUE_ROWS), e.b.sub(last, row))
            rows = _rows(e, sizes, side, h, base, ahead, count, row)

            def tile(first: Value, width: int, h: Value = h, rows: _Rows = rows) -> None:
                _weighted(e, sizes, chunk, h, rows, first, width)

            _tiles(e, chunk.queries, VALUE_TILE, tile)
        alone = e.b.icmp_signed("==", first, e.number(0))
        with e.loop(size, step=VECTOR_BYTES) as at:
            part = e.load(e.at(chunk.part, at))
            both = e.b.fadd(e.load(e.at(chunk.u, at)), part)
            e.store(e.b.select(alone, part, both), e.at(chunk.u, at))


def _weighted(
    e: Emitter, sizes: _Sizes, chunk: _Chunk, h: Value, rows: _Rows, first: Value, width: int
) -> None:
    wide = e.times(e.b.sdiv(sizes.row_bytes, e.number(4 * VECTOR_BYTES)), 4 * VECTOR_BYTES)
    for columns, start, stop in ((4, None, wide), (1, wide, sizes.row_bytes)):
        with e.loop(stop, start, columns * VECTOR_BYTES) as at:
            _weighted_tile(e, sizes, chunk, (h, first, at), rows, width, columns)


def _weighted_tile(
    e: Emitter,
    sizes: _Sizes,
    chunk: _Chunk,
    where: tuple[Value, Value, Value],
    rows: _Rows,
    width: int,
    columns: int,
) -> None:
    """Adds some rows to the sums of `width` queries, `columns` vectors of each from byte `at` on."""
    h, first, at = where
    state = e.at(e.times(h, chunk.queries), first)
    p = e.at(chunk.p, e.times(state, sizes.room_bytes), e.times(rows.first, 4))
    out = [e.at(chunk.part, e.times(e.at(state, i), sizes.row_bytes), at) for i in range(width)]
    sums = [[e.variable(VF) for _ in range(columns)] for _ in range(width)]
    for base, places in zip(out, sums, strict=True):
        for c, place in enumerate(places):
            e.put(e.load(base, c * VECTOR_BYTES), place)
    with e.loop(rows.count) as r:
        here, later = e.at(rows.at(e, sizes, r), at), e.at(rows.later(e, sizes, r), at)
        values = [e.load(here, c * VECTOR_BYTES) for c in range(columns)]
        for c in range(columns):
            e.prefetch(later, c * VECTOR_BYTES)
        for i, places in enumerate(sums):
            weight = e.spread(e.load_one(e.at(p, e.times(sizes.room_bytes, i), e.times(r, 4))))
            for value, place in zip(values, places, strict=True):
                e.put(e.fma(weight, value, e.get(place)), place)
    for base, places in zip(out, sums, strict=True):
        for c, place in enumerate(places):
            e.store(e.get(place), base, c * VECTOR_BYTES)


def _merge(e: Emitter, sizes: _Sizes, chunk: _Chunk, h: Value, m: Value) -> None:
    """One state into the slot that it is due to."""
    first = e.load_int(chunk.address, 8 * Job.FIRST)
    which = e.b.sdiv(m, sizes.group)
    slot = e.load_int(e.at(e.word(Word.SLOTS), e.times(e.at(first, which), 8)))
    head = e.at(e.times(h, sizes.group), e.b.srem(m, sizes.group))
    into = e.at(e.times(slot, e.times(sizes.heads, sizes.group)), head)
    state = e.at(e.times(h, chunk.queries), m)
    total = (e.word(Word.M), e.word(Word.L), e.word(Word.U), into)
    merge_row(e, total, (chunk.m, chunk.l, chunk.u, state), sizes.row_bytes)


def merge_row(e: Emitter, total: Sequence[Value], other: Sequence[Value], row_bytes: Value) -> None:
    """`state.merge` of one query head's state into another. Each: addresses of m, l and u, and the row."""
    m, l, u, i = total
    m2, l2, u2, k = other
    at, at2 = e.times(i, 4), e.times(k, 4)
    mine, theirs = e.spread(e.load_one(e.at(m, at))), e.spread(e.load_one(e.at(m2, at2)))
    both = e.maximum(mine, theirs)
    anchor = e.maximum(both, e.vector(LOWEST))
    keep, take = exp(e, e.b.fsub(mine, anchor)), exp(e, e.b.fsub(theirs, anchor))
    sums = [e.spread(e.load_one(e.at(base, x))) for base, x in ((l, at), (l2, at2))]
    e.store_one(e.lane(both), e.at(m, at))
    e.store_one(e.lane(e.fma(take, sums[1], e.b.fmul(keep, sums[0]))), e.at(l, at))
    row, row2 = e.at(u, e.times(i, row_bytes)), e.at(u2, e.times(k, row_bytes))
    with e.loop(row_bytes, step=VECTOR_BYTES) as c:
        into = e.at(row, c)
        e.store(e.fma(take, e.load(e.at(row2, c)), e.b.fmul(keep, e.load(into))), into)


def emit_fold(module: ir.Module) -> Value:
    """`fold(words)`: states, one after the other, into totals; the function."""
    e = Emitter(module, "fold")
    rows, row_bytes = e.word(FoldWord.ROWS), e.times(e.word(FoldWord.HEAD_DIM), 4)
    with e.loop(e.word(FoldWord.STATES)) as i, e.loop(rows) as row:
        total = (e.word(FoldWord.M), e.word(FoldWord.L), e.word(FoldWord.U), row)
        state = e.at(e.times(i, rows), row)
        one = (e.word(FoldWord.M_OF), e.word(FoldWord.L_OF), e.word(FoldWord.U_OF), state)
        merge_row(e, total, one, row_bytes)
    e.done()
    return e.function
