"""Which rows of a session a query sees and where they stand: a view, never bytes.

Why it exists: a row keeps its index and the rotation that its key was made with for good; dropping and
repositioning change only what is seen and by how much a key must turn further. Deltas are always taken
against the stored rotation and never chained (specification systems.md, D.1.2). It must not know tensors,
tiers or sessions.

Rows are indices [0, frontier). A row's position is what its query and key are rotated by. Without an edit
both are equal. Positions ascend with rows, strictly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first, last), one after the other. stored: the position that row `first` was rotated with;
    position: the one that it has now."""

    first: int
    last: int
    stored: int
    position: int

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def delta(self) -> int:
        return self.position - self.stored

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.position + self.rows

    def cut(self, first: int, last: int) -> Segment:
        """Its rows within [first, last), which must not be empty."""
        first, last = max(first, self.first), min(last, self.last)
        by = first - self.first
        return Segment(first, last, self.stored + by, self.position + by)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a chunk, counted from its start, whose keys turn by `delta` more."""

    chunk: int
    first: int
    last: int
    delta: int


Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PositionView:
    """segments: what is seen of rows [0, tail_row). From there on rows are seen, and stand at tail_position
    onwards, unturned. Canonical: equal views are equal values, and one that changes nothing is `UNEDITED`."""

    segments: tuple[Segment, ...] = ()
    tail_row: int = 0
    tail_position: int = 0

    @property
    def edited(self) -> bool:
        return bool(self.segments) or self.tail_row > 0 or self.tail_position > 0

    @property
    def shift(self) -> int:
        """Row minus position of the rows that come."""
        return self.tail_row - self.tail_position

    def next_position(self, frontier: int) -> int:
        return frontier - self.shift

    def upto(self, rows: int) -> tuple[Segment, ...]:
        """Segments of what is seen of rows [0, rows), ascending, the tail included."""
        seen = [part.cut(0, rows) for part in self.segments if part.first < rows]
        if rows > self.tail_row:
            seen.append(Segment(self.tail_row, rows, self.tail_position, self.tail_position))
        return tuple(seen)

    def count(self, rows: int) -> int:
        """How many of rows [0, rows) are seen."""
        return sum(part.rows for part in self.upto(rows))

    def pieces(self, chunk_tokens: int, rows: int) -> Iterator[Piece]:
        """What is seen of rows [0, rows), cut at chunks, ascending: one state each."""
        for part in self.upto(rows):
            first = part.first
            while first < part.last:
                chunk, at = divmod(first, chunk_tokens)
                last = min(part.last, (chunk + 1) * chunk_tokens)
                yield Piece(chunk, at, at + last - first, part.delta)
                first = last

    def hidden_chunks(self, chunk_tokens: int, rows: int) -> tuple[int, ...]:
        """Whole chunks of rows [0, rows) of which nothing is seen, ascending."""
        seen = {piece.chunk for piece in self.pieces(chunk_tokens, rows)}
        return tuple(chunk for chunk in range(rows // chunk_tokens) if chunk not in seen)

    # Edits. Each returns the view of a session with rows [0, frontier).

    def drop(self, frontier: int, ranges: Iterable[Range]) -> PositionView:
        """Hides rows that stand within the ranges; nobody moves. Ranges: half-open, canonical."""
        seen: list[Segment] = list(self.upto(frontier))
        for start, end in ranges:
            left: list[Segment] = []
            for part in seen:
                low, high = start - part.position + part.first, end - part.position + part.first
                for first, last in ((part.first, min(part.last, low)), (max(part.first, high), part.last)):
                    if first < last:
                        left.append(part.cut(first, last))
            seen = left
        return _canonical(seen, frontier, self.next_position(frontier))

    def reposition(self, frontier: int, moves: Sequence[tuple[int, int, int]]) -> PositionView:
        """Rows at [first, last) move to `to` onwards, for each (first, last, to) of ascending, disjoint
        moves; the next row stands behind the last that is seen. ValueError when positions would not ascend
        any more."""
        placed: list[Segment] = []
        for part in self.upto(frontier):
            at = part.position
            for start, end, to in moves:
                low, high = max(part.position, start), min(part.end, end)
                if low >= high:
                    continue
                if at < low:
                    placed.append(_between(part, at, low, at))
                placed.append(_between(part, low, high, to + low - start))
                at = high
            if at < part.end:
                placed.append(_between(part, at, part.end, at))
        for before, after in pairwise(placed):
            if after.position < before.end:
                raise ValueError(f"position {after.position} is taken by a row before it")
        return _canonical(placed, frontier, placed[-1].end if placed else 0)

    def compact(self, frontier: int) -> PositionView:
        """Closes every gap: eff(m) = m - sum(e - s) over drops that end at or before m."""
        at, placed = 0, []
        for part in self.upto(frontier):
            placed.append(replace(part, position=at))
            at += part.rows
        return _canonical(placed, frontier, at)

    def truncate(self, frontier: int, to: int) -> tuple[int, PositionView]:
        """Rows [0, row) stay, those that stand below position `to` and hidden ones between them; the next
        stands at `to`. Returns the row and the view."""
        kept = [
            part.cut(part.first, part.first + min(part.rows, to - part.position))
            for part in self.upto(frontier)
            if part.position < to
        ]
        row = kept[-1].last if kept else 0
        return row, _canonical(kept, row, to)

    def position_of(self, frontier: int, row: int) -> int | None:
        """Where a row stands, None when it is hidden."""
        parts = self.upto(frontier)
        index = bisect_right(parts, row, key=lambda part: part.first) - 1
        if index < 0 or row >= parts[index].last:
            return None
        return parts[index].position + row - parts[index].first


UNEDITED = PositionView()


def _between(part: Segment, low: int, high: int, to: int) -> Segment:
    """The rows of `part` that stand within [low, high), at `to` onwards."""
    found = part.cut(part.first + low - part.position, part.first + high - part.position)
    return replace(found, position=to)


def _canonical(parts: Sequence[Segment], frontier: int, next_position: int) -> PositionView:
    """Neighbours that turn alike are one; those at the end that do not turn belong to the tail."""
    joined: list[Segment] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and last.last == part.first and last.end == part.position and last.delta == part.delta:
            joined[-1] = replace(last, last=part.last)
        else:
            joined.append(part)
    if joined and joined[-1].last == frontier and joined[-1].end == next_position and not joined[-1].delta:
        tail = joined.pop()
        return PositionView(tuple(joined), tail.first, tail.position)
    return PositionView(tuple(joined), frontier, next_position)


def canonical_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Half-open ranges sorted, touching and overlapping ones joined, empty ones left out: what a set of drops
    at one point of a stream is, however it was asked for (D.1.3)."""
    joined: list[Range] = []
    for start, end in sorted(item for item in ranges if item[0] < item[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return tuple(joined)
