"""One decode frame over chunks of which some come from storage: its states, their receipts, its answer.

Why it exists: blocks may be read for one frame or for several at once, and may come in any order; what each
frame makes of them, checks of them and says of them is the same, with the same bits. It must not know who
reads, nor who else wants a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.appends import Append
from kvtier_core.arrivals import Block
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.neardata import NearProducer, Ran, query_digest, reduction_of
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planner import ChunkRead, Path
from kvtier_core.promises import IdentifiedRows
from kvtier_core.tiers.base import BlockIdentity
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom
from kvtier_kernels.ops.chunk_attention.keptstates import KeptStates
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun


@dataclass(frozen=True, slots=True, eq=False)
class StreamedLayer:
    """What frames of one layer have in common while its chunks lie where they lie. groups: reads as receipts
    of states hold them. blocks: those that come, in the groups' order, and copies: what names each of them.
    producer, scale: of the states. seconds: that the plan is predicted to take, None without a price. window:
    buffers of its stream."""

    groups: tuple[tuple[ChunkRead, ...], ...]
    blocks: tuple[Block, ...]
    copies: tuple[Copy, ...]
    lines: NDArray[np.int64]
    states: KeptStates
    producer: NearProducer
    scale: float
    kind: PlanKind
    seconds: float | None
    window: int


Copy = tuple[object, ...]
"""A copy at one life of its slot, and what it was verified to be: whose are equal are read once."""


def copy_of(block: Block) -> Copy:
    one = block.identity
    assert one is not None, "open chunks are attended in place"
    ref = block.ref
    return id(block.tier), ref.slot, ref.generation, one.replica_generation, one.logical, one.chunk_digest


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A frame: the query over rows [0, first position + 1) of the append's layer, its own row written.
    follow: called when the frame waits for storage, to begin what comes next behind its reads."""

    kept: StreamedLayer
    append: Append
    query: Query
    step: int
    follow: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Streamed:
    """As `Attended`, of a frame with chunks from storage. shared: of the bytes from each tier, those that
    were read for another frame."""

    out: Tensor
    stall_seconds: float
    hidden_seconds: float
    peak_buffer_bytes: int
    promised_bytes: int
    shared: dict[str, int] = field(default_factory=dict)


class StreamedFrame:
    """A frame that is being answered; chunks in memory are attended as it is made. The engine's lock is
    held."""

    def __init__(
        self, store: IdentifiedRows, clock: Callable[[], float], asked: Asked, room: DecodeRoom
    ) -> None:
        """room: for all states of the frame, until it is over."""
        kept, query, layout = asked.kept, asked.query, store.layout
        self.kept = kept
        self._store, self._clock, self._deadline = store, clock, query.deadline
        self._visible = query.first_position + 1
        self._reduction = reduction_of(kept.groups, asked.append, query, layout, store.tiers, self._visible)
        self._ran = Ran(query_digest(query.q), query.first_position, kept.scale)
        self._came: list[BlockIdentity | None] = [None] * len(kept.blocks)
        # Of groups and blocks: those before it are taken.
        self._group = self._first = 0
        self._looked = -1
        kept.states.begin(query.q, (self._visible - 1) % layout.chunk_tokens + 1, room)

    def take(self, first: int, runs: Sequence[ChunkRun], given: Sequence[BlockIdentity]) -> None:
        """Attends blocks [first, first + n) of the layer's. given: what their bytes were verified to be."""
        self.kept.states.take(first, runs)
        self._came[first : first + len(runs)] = given

    def reduce(self) -> bool:
        """Takes the states of all chunks up to the first that has not come; whether that is all of them.
        DEADLINE between groups; what `Reduction` refuses."""
        groups, layout = self.kept.groups, self._store.layout
        while self._group < len(groups):
            group = groups[self._group]
            read, first = group[0], self._first
            last = first + len(group)
            if self._looked != self._group:
                self._looked = self._group
                self.check_time()
            if read.path is Path.PARTIAL:
                first_row = read.chunk * layout.chunk_tokens
                self._reduction.own(read, min(layout.chunk_tokens, self._visible - first_row))
            else:
                blocks = [one for one in self._came[first:last] if one is not None]
                if len(blocks) < len(group):
                    return False
                formed = self.kept.states.states(first, last)
                name, whole = self._store.tiers[read.tier].name, [layout.chunk_tokens] * len(group)
                now = self._clock()
                receipt = self.kept.producer.receipt(name, blocks, whole, self._ran, formed, now)
                self._reduction.take(receipt, blocks)
                self._first = last
            self._group += 1
        return True

    def check_time(self) -> None:
        """DEADLINE."""
        if self._deadline is None or self._clock() <= self._deadline:
            return
        groups = self.kept.groups
        chunk = groups[min(self._group, len(groups) - 1)][0].chunk
        raise CoreError(
            Reason.DEADLINE,
            f"the deadline passed before chunk {chunk}",
            {"chunk": chunk, "chunks": sum(len(group) for group in groups)},
        )

    def output(self) -> Tensor:
        """The answer, of all states. What `Reduction.close` refuses."""
        self._reduction.close()
        return self.kept.states.output()
