"""Many blocks of one store at a time: their lines and slots begun, then published.

Why it exists: one block after the other costs a put twice what its peers take. Here a batch is one call of
machine code over the directory's and the slots' arrays, which takes the leading blocks that are ordinary.
The rest, and all where nothing can be compiled, its caller stores block by block, with the same outcome. The
caller holds the lock of metadata. It must not know credits, deadlines or who stores.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

from kvtier_core.directory import Directory, StoreFacts
from kvtier_core.directory.compiled import UNLOCKED_FROM, Steps, Word
from kvtier_core.errors import CoreError
from kvtier_core.tiers.slots import SlotRef, SlotState, SlotTable

Slot = tuple[int, int]
"""(slot, its generation)."""
_INT32_END = 1 << 31
_FLOAT, _BITS = struct.Struct("f"), struct.Struct("i")
BATCH_FROM = 3
"""Blocks from which a call of machine code costs less than the plain steps."""


_PUBLISHED = (Word.LINES, Word.SLOTS, Word.GENERATIONS, Word.SUMS)


class Batches:
    """Stores into one tier."""

    def __init__(self, code: Steps, directory: Directory, tier: int, slots: SlotTable) -> None:
        self._directory = directory
        self._tier = tier
        self._slots = slots
        self._steps = code
        words = array("q", bytes(8 * len(Word)))
        for word, value in directory.addresses(tier).items():
            words[word] = value
        words[Word.SLOT_STATE], words[Word.SLOT_GENERATION] = slots.addresses()
        words[Word.SLOT_FREE_STATE] = SlotState.FREE
        words[Word.SLOT_RESERVED_STATE] = SlotState.RESERVED
        words[Word.SLOT_PUBLISHED_STATE] = SlotState.PUBLISHED
        self._words = words
        self._table = words.buffer_info()[0]

    def locate(self, keys: Sequence[bytes]) -> list[int]:
        """Lines of keys of 32 bytes, tombstoned ones too; NO_LINE where there is none."""
        if len(keys) < BATCH_FROM:
            return [self._directory.locate(key) for key in keys]
        code = self._steps
        joined = b"".join(keys)
        source, out = array("q", joined), array("q", bytes(8 * len(keys)))
        words = self._words
        words[Word.COUNT], words[Word.KEYS] = len(keys), source.buffer_info()[0]
        words[Word.OUT] = out.buffer_info()[0]
        (code.locate if len(keys) < UNLOCKED_FROM else code.locate_long)(self._table)
        return out.tolist()

    def begin(
        self, keys: Sequence[bytes], namespace: bytes, facts: StoreFacts
    ) -> tuple[list[int], list[Slot], list[Slot]]:
        """Lines and slots for the leading keys, which are not there and differ from each other: RESERVED,
        seen by nobody, as `begin_store` leaves them. As many as there are slots and lines for; who wants the
        rest asks one by one and hears why. Last, slots that were taken and are RESERVED for no line. Nothing
        is held when it raises."""
        if not _fits(facts):
            return [], [], self._slots.begin_many(namespace, len(keys))
        taken = self._slots.take_many(namespace, len(keys))
        lines, places = array("q"), list[Slot]()
        try:
            self._begin(keys, taken, facts, lines, places)
            return lines.tolist(), places, self._reserved(taken[len(lines) :])
        except BaseException:
            self.undo(zip(lines, places, strict=True), facts.txn)
            for slot in self._reserved(taken[len(lines) :]):
                self._slots.release(SlotRef(*slot))
            raise

    def _begin(
        self,
        keys: Sequence[bytes],
        taken: list[int],
        facts: StoreFacts,
        begun: array[int],
        places: list[Slot],
    ) -> None:
        """Adds to lines `begun` and their `places` what is begun, whatever then ends this."""
        code = self._steps
        count = len(taken)
        source, slots = array("q", b"".join(keys)), array("q", taken)
        lines, generations = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        words, directory = self._words, self._directory
        words[Word.COUNT], words[Word.KEYS] = count, source.buffer_info()[0]
        words[Word.LINES], words[Word.SLOTS] = lines.buffer_info()[0], slots.buffer_info()[0]
        words[Word.GENERATIONS] = generations.buffer_info()[0]
        words[Word.OWNER], words[Word.BLOCK_ROWS] = facts.namespace, facts.rows
        words[Word.BLOCK_PRODUCER], words[Word.COST_BITS] = facts.producer, _float_bits(facts.cost)
        words[Word.TICK], words[Word.TXN], words[Word.MAY_DROP] = facts.tick, facts.txn, facts.droppable
        step = code.begin if count < UNLOCKED_FROM else code.begin_long
        done = 0
        while done < count:
            words[Word.FIRST] = done
            words[Word.FREE], words[Word.USED], words[Word.WINDOW], words[Word.ISSUED] = directory.ends()
            with self._slots.lock:
                ended = step(self._table)
            directory.begun(ended - done, self._tier, facts.droppable, words[Word.FREE], words[Word.USED])
            begun.extend(lines[done:ended])
            places.extend(zip(taken[done:ended], generations[done:ended], strict=True))
            done = ended
            if done == count:
                break
            # A shard that must grow, columns that must show more, or a refusal.
            place = taken[done], self._slots.reserve_taken(taken[done])
            try:
                line = directory.begin_store(keys[done], facts, self._tier, *place)
            except CoreError:
                break
            begun.append(line)
            places.append(place)
            done += 1

    def _reserved(self, taken: Sequence[int]) -> list[Slot]:
        return [(slot, self._slots.reserve_taken(slot)) for slot in taken]

    def undo(self, begun: Iterable[tuple[int, Slot]], txn: int) -> int:
        """Takes back lines and slots that were begun, of which nobody was told; how many."""
        count = 0
        for line, slot in begun:
            self._directory.abort_store(line, self._tier, txn)
            self._slots.release(SlotRef(*slot))
            count += 1
        return count

    def publish(
        self,
        keys: Sequence[bytes],
        lines: Sequence[int],
        slots: Sequence[Slot],
        txn: int,
        sums: Sequence[int],
    ) -> list[int]:
        """Makes the leading blocks readable whose lines and slots are still the store's; the replica
        generations of their copies. Who wants the rest asks one by one and hears why not."""
        code, count = self._steps, len(keys)
        numbers, generations = zip(*slots, strict=True)
        inputs = (array("q", lines), array("q", numbers), array("q", generations), array("Q", sums))
        out, words = array("q", bytes(8 * count)), self._words
        words[Word.FIRST], words[Word.COUNT], words[Word.TXN] = 0, count, txn
        for word, each in zip(_PUBLISHED, inputs, strict=True):
            words[word] = each.buffer_info()[0]
        words[Word.OUT] = out.buffer_info()[0]
        with self._slots.lock:
            done = (code.publish if count < UNLOCKED_FROM else code.publish_long)(self._table)
        self._directory.published(keys[:done], lines[:done], self._tier)
        return out[:done].tolist()


def _fits(facts: StoreFacts) -> bool:
    """Whether the columns take these numbers; the plain way says which they do not."""
    return all(-_INT32_END <= number < _INT32_END for number in (facts.namespace, facts.rows, facts.producer))


def _float_bits(number: float) -> int:
    bits: int = _BITS.unpack(_FLOAT.pack(number))[0]
    return bits
