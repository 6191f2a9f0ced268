"""What a copy of a slot must not overtake: the last writer of its rows, and everyone who still reads them.

Why it exists: a store that starts before the model's kernels ended reads half-written rows, and a load that
starts before the last reader ended destroys rows under it (vllm#45704, vllm#47282). Events outlive a slot's
life: a kernel may still read a slot that was given up on the host. It must not know what a slot holds.
"""

from __future__ import annotations

from kvtier_core.tiers.streams import Event, Stream


class SlotEvents:
    """Per slot: the event after which its rows are final, and events of readers that have not passed yet."""

    def __init__(self) -> None:
        self._written: dict[int, Event] = {}
        self._readers: dict[int, list[Event]] = {}

    def written(self, slot: int, event: Event) -> None:
        self._written[slot] = event

    def read(self, slot: int, event: Event) -> None:
        pending = [item for item in self._readers.get(slot, ()) if not item.ready()]
        self._readers[slot] = [*pending, event]

    def before_reading(self, slot: int, stream: Stream) -> None:
        """`stream` reads the slot next: after its last writer."""
        event = self._written.get(slot)
        if event is not None:
            stream.wait(event)

    def before_writing(self, slot: int, stream: Stream) -> None:
        """`stream` writes the slot next: after its last writer and all its readers, of earlier lives too."""
        self.before_reading(slot, stream)
        for event in self._readers.pop(slot, ()):
            stream.wait(event)
