"""A journal in memory and an eraser of held tiers: slow, failing and hanging as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.transfer import EraseItem, TransferSink
from kvtier_core.transactions.deletion import JournalEntry
from tests.unit.core.txnbench import SIZE, BlockBench


class Paper:
    """A journal in memory; it can be slow or fail."""

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.held: list[Callable[[], None]] | None = None
        self.failures = 0

    def append(self, entry: JournalEntry, done: Callable[[CoreError | None], None]) -> None:
        def write() -> None:
            if self.failures:
                self.failures -= 1
                done(CoreError(Reason.STORAGE_UNAVAILABLE, "the journal's disk"))
                return
            self.entries.append(entry)
            done(None)

        if self.held is None:
            write()
        else:
            self.held.append(write)


class Shredder:
    """Erases what tiers hold, when told to; remembers what it was asked for."""

    def __init__(self, bench: BlockBench) -> None:
        self.bench = bench
        self.asked: list[tuple[int, EraseItem]] = []
        self.held: list[Callable[[bool], None]] | None = None
        self.failures = 0
        self.keep_undrained = False
        self.undrained: list[Callable[[], None]] = []

    def erase(self, tier: int, items: Sequence[EraseItem], deadline: float, sink: TransferSink) -> None:
        if self.failures:
            self.failures -= 1
            raise CoreError(Reason.QUEUE_FULL, "the tier's queue")
        for index, item in enumerate(items):
            self.asked.append((tier, item))

            def work(good: bool, index: int = index, item: EraseItem = item) -> None:
                if good and item.ref is not None:
                    self.bench.tiers[tier].data[item.ref.slot][:] = bytes(SIZE)
                sink.done(index, None if good else CoreError(Reason.DEADLINE, "the device hangs"))
                if good or not self.keep_undrained:
                    sink.drained(index)
                else:
                    self.undrained.append(lambda: sink.drained(index))

            if self.held is None:
                work(True)
            else:
                self.held.append(work)

    def run(self, good: bool = True) -> None:
        assert self.held is not None
        held, self.held = self.held, []
        for work in held:
            work(good)
