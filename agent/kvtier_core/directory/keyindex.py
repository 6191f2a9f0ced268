"""From a key to its line: open addressing in small shards over one array of 64-bit entries.

Why it exists: a hash map of Python objects costs over 150 bytes a key and a table that doubles stops
everyone. A shard holds at most 4095 entries and grows by an eighth, so the longest pause is a few tens of
microseconds. It must not know blocks, tiers or states.

An entry is (tag << 32) | (line + 1), 0 for none. Of a key's 64-bit hash the upper half chooses the shard, the
lower is the tag; a tag's home within a shard of `size` entries is (tag * size) >> 32, so a shard in order of
homes is in order of tags. Collisions probe linearly; a removal closes its gap, so there are no tombstones to
sweep.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory.columns import Column
from kvtier_core.directory.ids import NO_LINE
from kvtier_core.errors import CoreError, Reason

SHARD_STRIDE = 4096
_FIRST_SIZE = 16
_FILL_AT_CAPACITY = 0.75
_LOW = 0xFFFFFFFF
_LOW64 = np.uint64(_LOW)
_32 = np.uint64(32)
_GROUP = np.arange(8, dtype=np.int64)
# With fewer new keys, adding them one by one is cheaper than laying a shard out anew.
_BULK = 48


class KeyIndex:
    """Keys of `width` bytes lie elsewhere, in `raw` by line; here are only tags and lines. Callers pass the
    key's hash: uniform over 64 bits, equal for equal keys."""

    def __init__(self, capacity: int, raw: mmap.mmap, width: int) -> None:
        per_shard = int(SHARD_STRIDE * _FILL_AT_CAPACITY)
        self._shards = max(1, -(-capacity // per_shard))
        self._most = SHARD_STRIDE - SHARD_STRIDE // 16
        entries = Column(self._shards * SHARD_STRIDE, "uint64")
        sizes, counts = Column(self._shards, "uint32"), Column(self._shards, "uint32")
        self._entries, self._cells = entries.array, entries.cells
        self._sizes, self._size_of = sizes.array, sizes.cells
        self._counts, self._count_of = counts.array, counts.cells
        self._sizes[:] = _FIRST_SIZE
        self._raw = raw
        self._width = width
        self._keys: NDArray[np.uint64] = np.frombuffer(raw, dtype=np.uint64, count=capacity * (width // 8))
        self._keys = self._keys.reshape(capacity, width // 8)

    def addresses(self) -> tuple[int, int, int, int]:
        """Of the entries, of the shards' sizes and of their counts; and how many shards there are."""
        arrays = self._entries.ctypes.data, self._sizes.ctypes.data, self._counts.ctypes.data
        return *arrays, self._shards

    def __len__(self) -> int:
        return int(self._counts.sum(dtype=np.int64))

    def find(self, hashed: int, key: bytes) -> int:
        """The key's line, or NO_LINE."""
        tag = hashed & _LOW
        shard = ((hashed >> 32) * self._shards) >> 32
        size = self._size_of[shard]
        base = shard * SHARD_STRIDE
        at = (tag * size) >> 32
        cells, raw, width = self._cells, self._raw, self._width
        while entry := cells[base + at]:
            if entry >> 32 == tag:
                line: int = (entry & _LOW) - 1
                if raw[line * width : (line + 1) * width] == key:
                    return line
            at += 1
            if at == size:
                at = 0
        return NO_LINE

    def find_many(self, hashed: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Lines of keys [n, width / 8] with hashes [n]; NO_LINE where there is none. In rounds: each looks at
        eight neighbouring entries of every key that is still open."""
        tags = hashed & _LOW64
        shards = ((hashed >> _32) * np.uint64(self._shards)) >> _32
        sizes = self._sizes[shards].astype(np.int64)
        bases = shards.astype(np.int64) * SHARD_STRIDE
        at = ((tags * sizes.astype(np.uint64)) >> _32).astype(np.int64)
        found = np.full(len(hashed), NO_LINE, dtype=np.int64)
        todo = np.arange(len(hashed))
        while len(todo):
            size = sizes[todo]
            places = at[todo, None] + _GROUP
            places -= np.where(places >= size[:, None], size[:, None], 0)
            entries = self._entries[places + bases[todo, None]]
            empty = entries == 0
            stops = empty | ((entries >> _32) == tags[todo, None])
            first = stops.argmax(axis=1)
            row = np.arange(len(todo))
            seen = entries[row, first]
            ended = empty[row, first]
            candidate = stops[row, first] & ~ended
            lines = (seen[candidate] & _LOW64).astype(np.int64) - 1
            asked = todo[candidate]
            same = (self._keys[lines] == keys[asked]).all(axis=1)
            found[asked[same]] = lines[same]
            done = ended
            done[candidate] = same
            step = np.where(candidate, first + 1, len(_GROUP))
            moved = at[todo] + step
            at[todo] = moved - np.where(moved >= size, size, 0)
            todo = todo[~done]
        return found

    def insert(self, hashed: int, line: int) -> None:
        """Adds a key that is not there. NO_DESTINATION_CAPACITY when its shard is full; nothing changed
        then."""
        tag = hashed & _LOW
        shard = ((hashed >> 32) * self._shards) >> 32
        count = self._count_of[shard]
        size = self._size_of[shard]
        if count * 5 >= size * 4:
            self._make_room(shard, count + 1)
            size = self._size_of[shard]
        self._place(shard * SHARD_STRIDE, size, tag, line)
        self._count_of[shard] = count + 1

    def _place(self, base: int, size: int, tag: int, line: int) -> None:
        cells = self._cells
        at = (tag * size) >> 32
        while cells[base + at]:
            at += 1
            if at == size:
                at = 0
        cells[base + at] = (tag << 32) | (line + 1)

    def insert_many(self, hashed: NDArray[np.uint64], lines: NDArray[np.int64]) -> None:
        """Adds keys that are not there and differ from each other, a shard at a time. NO_DESTINATION_CAPACITY
        before anything changed."""
        shards = (((hashed >> _32) * np.uint64(self._shards)) >> _32).astype(np.int64)
        added = np.bincount(shards, minlength=self._shards)
        full = np.flatnonzero((added > 0) & (self._counts + added > self._most))
        if len(full):
            raise self._full(int(full[0]))
        order = np.argsort(shards, kind="stable")
        ends = np.cumsum(added)
        fresh = (hashed << _32) | (lines + 1).astype(np.uint64)
        done = 0
        try:
            for shard in np.flatnonzero(added).tolist():
                mine = order[ends[shard] - added[shard] : ends[shard]]
                if len(mine) < _BULK:
                    for one in mine.tolist():
                        self.insert(int(hashed[one]), int(lines[one]))
                        done += 1
                    continue
                self._rebuild(shard, self._size_for(shard, self._count_of[shard] + len(mine)), fresh[mine])
                done += len(mine)
        except BaseException:
            # Memory may end at any shard. What others hold is theirs, so this call's keys go one by one.
            for one in order[:done].tolist():
                self.remove(int(hashed[one]), int(lines[one]))
            raise

    def remove(self, hashed: int, line: int) -> None:
        """Takes out the entry of that hash and line, which is there, and closes the gap behind it."""
        shard = ((hashed >> 32) * self._shards) >> 32
        size = self._size_of[shard]
        base = shard * SHARD_STRIDE
        cells = self._cells
        tag = hashed & _LOW
        wanted = (tag << 32) | (line + 1)
        hole = (tag * size) >> 32
        while (entry := cells[base + hole]) != wanted:
            if not entry:
                raise CoreError(Reason.INTERNAL, f"line {line} is not in the key index")
            hole = hole + 1 if hole + 1 < size else 0
        at = hole
        while True:
            at = at + 1 if at + 1 < size else 0
            entry = cells[base + at]
            if not entry:
                break
            home = ((entry >> 32) * size) >> 32
            # An entry may fill the hole only if its home does not lie behind it.
            if (at - home) % size >= (at - hole) % size:
                cells[base + hole] = entry
                hole = at
        cells[base + hole] = 0
        self._count_of[shard] -= 1

    def _make_room(self, shard: int, count: int) -> None:
        if count > self._most:
            raise self._full(shard)
        size = self._size_for(shard, count)
        if size > self._size_of[shard]:
            self._rebuild(shard, size, np.zeros(0, dtype=np.uint64))

    def _size_for(self, shard: int, count: int) -> int:
        """Grows by eighths until `count` fills at most four fifths; the stride is the end."""
        size: int = self._size_of[shard]
        while count * 5 > size * 4 and size < SHARD_STRIDE:
            size = min(SHARD_STRIDE, size + max(8, size // 8))
        return size

    def _full(self, shard: int) -> CoreError:
        return CoreError(
            Reason.NO_DESTINATION_CAPACITY,
            f"shard {shard} of the key index holds {self._count_of[shard]} keys and takes no more",
            {"shard": shard, "keys": self._count_of[shard]},
        )

    def _rebuild(self, shard: int, size: int, fresh: NDArray[np.uint64]) -> None:
        """Lays the shard's entries and `fresh` ones out anew in `size` places."""
        base = shard * SHARD_STRIDE
        old = self._entries[base : base + self._size_of[shard]]
        kept = np.sort(np.concatenate((old[old != 0], fresh)))
        homes = np.asarray(np.multiply(kept >> _32, np.uint64(size)) >> _32, dtype=np.int64)
        index = np.arange(len(kept))
        places = np.maximum.accumulate(homes - index) + index
        inside = int(np.searchsorted(places, size))
        laid = np.zeros(size, dtype=np.uint64)
        laid[places[:inside]] = kept[:inside]
        # The last ones run over the end, to the first free places.
        free = np.flatnonzero(laid == 0)[: len(kept) - inside]
        laid[free] = kept[inside:]
        target = self._entries[base : base + size]
        # A shard never shrinks. Whatever needs memory is behind us, so no key is lost when there is none.
        np.copyto(target, laid)
        self._size_of[shard] = size
        self._count_of[shard] = len(kept)

    def entries(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.uint64]]]:
        """Per shard: its number, the lines in it and their tags, for checks."""
        for shard in range(self._shards):
            base = shard * SHARD_STRIDE
            kept = self._entries[base : base + self._size_of[shard]]
            kept = kept[kept != 0]
            yield shard, (kept & _LOW64).astype(np.int64) - 1, kept >> _32

    def shard_of(self, hashed: int) -> int:
        return ((hashed >> 32) * self._shards) >> 32
