"""What the compiled kernels are handed: words of 64 bits, most of them addresses.

It stands apart so that it can be read where nothing is compiled.
"""

from __future__ import annotations

from enum import IntEnum

from kvtier_kernels.numerics import LANES as LANES

AHEAD = 1
"""Blocks of 16 rows between reading and prefetching. A table has as many entries beyond its last, one of rows
16 times as many: hints, whose memory is never read."""


class Word(IntEnum):
    """Arguments of `attend`. Addresses but for the sizes."""

    Q = 0  # float32 [B, Hk, G, d], times the scale
    JOBS = 1  # int64 [jobs, len(Job)]
    JOB_COUNT = 2
    QUERIES = 3  # int64: queries of the jobs, as Job.FIRST and Job.COUNT say
    SLOTS = 4  # int64: where each of these states is merged into
    SEEN = 5  # int64: how many rows of the chunk each of them sees, from its first
    HEADS = 6
    GROUP = 7
    HEAD_DIM = 8  # a multiple of 16
    M = 9  # float32 [slots, Hq]
    L = 10
    U = 11  # float32 [slots, Hq, d]
    SCRATCH = 12  # float32, `scratch_floats`
    ROOM = 13  # rows of the largest chunk, a multiple of 16


class Job(IntEnum):
    """One chunk of rows and the queries that attend it. Tables: int64 addresses of blocks of 16 rows, for
    `attend_listed` of rows, which then lie anywhere."""

    KEYS = 0
    VALUES = 1
    VISIBLE = 2  # rows that some query sees, at least 1
    FIRST = 3
    COUNT = 4
    KEY_ROW = 5  # bytes from row to row within a block
    KEY_HEAD = 6
    VALUE_ROW = 7
    VALUE_HEAD = 8
    BIAS = 9  # for `attend_listed`: float32 [whole blocks of 16] to add to logits; 0: none


class DecodeWord(IntEnum):
    """Arguments of `decode`. Addresses."""

    ATTEND = 0  # arguments of `attend`, of one query in slot 0
    QUERY = 1  # float32 [Hq, d]
    SCALE = 2  # float32
    OUT = 3  # float32 [Hq, d]


class BatchWord(IntEnum):
    """Arguments of `decode_begin` and `decode_end`. Addresses but for the count."""

    ATTEND = 0  # arguments of `attend`, query i in slot i
    COUNT = 1
    QUERIES = 2  # int64 [count]: addresses of float32 [Hq, d]
    SCALES = 3  # float32 [count]
    OUT = 4  # float32 [count, Hq, d]


class PageWord(IntEnum):
    """Arguments of `pages`. Addresses and bytes, but for counts."""

    PAGES = 0  # int32 [used]: ids
    USED = 1  # at least 1
    POOL = 2  # how many pages there are
    PER_PAGE = 3  # blocks of 16 rows
    CHUNKS = 4
    BLOCKS = 5  # of a chunk
    SPLIT = 6  # rows of a chunk
    LAST = 7  # rows of the last one
    TABLE = 8  # int64 [chunks, 2, blocks] and AHEAD more
    JOBS = 9  # int64 [chunks, len(Job)]
    WRONG = 10  # set to how many ids are none of the pool's
    SEEN = 11  # int64 [chunks]: rows of each
    KEYS = 12  # each four: the pool, bytes from page to page, from row to row, from head to head
    VALUES = 16
    SIZE = 20


def scratch_floats(heads: int, queries: int, head_dim: int, room: int) -> int:
    """Of the job with the most query heads per KV head, `queries`."""
    states = heads * queries
    return states * (3 * head_dim + room + 2 + LANES * 4) + LANES * (head_dim + 8)


class FoldWord(IntEnum):
    """Arguments of `fold`. Addresses but for the sizes."""

    STATES = 0
    ROWS = 1
    HEAD_DIM = 2  # a multiple of 16
    M_OF = 3  # float32 [states, rows]
    L_OF = 4
    U_OF = 5  # float32 [states, rows, d]
    M = 6  # float32 [rows]: what they are merged into
    L = 7
    U = 8


class CrewWord(IntEnum):
    """What a caller and its helpers share. Addresses but for numbers."""

    STOP = 0  # not 0: helpers end
    OPEN = 1  # not 0: chunks may be taken
    NEXT = 2  # the first chunk that nobody has taken
    INSIDE = 3  # helpers that may use the memory of a call
    WAKES = 4  # how many helpers are woken
    PATIENCE = 5  # how often a caller looks for helpers to leave before it gives up its processor
    SEMAPHORE = 6
    ATTEND = 7  # arguments of `attend` of all chunks, job i into slot i; no scratch
    FOLD = 8  # arguments of `fold` of these states
    QUERY = 9  # float32 [Hq, d]
    SCALE = 10  # float32
    FOLDED = (
        11  # whether states were folded; INSIDE does not say so, since who comes late looks in at any time
    )


class HelperWord(IntEnum):
    """Of one thread."""

    CREW = 0  # CrewWord's
    ATTEND = 1  # arguments of `attend` for this thread to fill in, but for its scratch
    HELPS = 2  # 1; 0 for the thread that called
