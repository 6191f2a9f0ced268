"""A device whose streams take as long as a test says, on a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier_core.tiers.streams import Event


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at: float | None = None

    def ready(self) -> bool:
        return self.at is not None and self.at <= self._device.now


@dataclass
class _Op:
    issued: float
    seconds: float = 0.0
    work: Callable[[], None] | None = None
    event: FakeEvent | None = None
    waits: bool = False


class FakeStream:
    """`seconds`: what each piece of work given with `run` takes; it shows its effect at its end. `deaf`: as
    if the code under test had forgotten to wait for other streams."""

    def __init__(self, device: FakeDevice, seconds: float, *, deaf: bool = False) -> None:
        self._device = device
        self.seconds = seconds
        self._deaf = deaf
        self.ops: deque[_Op] = deque()
        self.free_at = 0.0

    def wait(self, event: Event) -> None:
        if self._deaf:
            return
        assert isinstance(event, FakeEvent)
        self.ops.append(_Op(self._device.now, event=event, waits=True))

    def run(self, work: Callable[[], None]) -> None:
        self.kernel(self.seconds, work)

    def kernel(self, seconds: float, work: Callable[[], None]) -> None:
        self.ops.append(_Op(self._device.now, seconds=seconds, work=work))

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self.ops.append(_Op(self._device.now, event=event))
        self._device.advance(0.0)
        return event


class FakeDevice:
    """Its clock is what deadlines are read from: `device.clock`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._streams: list[FakeStream] = []

    def clock(self) -> float:
        return self.now

    def stream(self, seconds: float = 0.0, *, deaf: bool = False) -> FakeStream:
        made = FakeStream(self, seconds, deaf=deaf)
        self._streams.append(made)
        return made

    def advance(self, seconds: float) -> None:
        """Runs all work that ends within `seconds` from now, in the order in which it ends."""
        until = self.now + seconds
        while True:
            for stream in self._streams:
                self._settle(stream)
            ends = [
                (max(stream.free_at, stream.ops[0].issued) + stream.ops[0].seconds, place)
                for place, stream in enumerate(self._streams)
                if stream.ops and stream.ops[0].work is not None
            ]
            if not ends or min(ends)[0] > until:
                break
            end, place = min(ends)
            stream = self._streams[place]
            op = stream.ops.popleft()
            stream.free_at = end
            self.now = max(self.now, end)
            assert op.work is not None
            op.work()
        self.now = until

    def drain(self) -> None:
        """Runs everything that was given."""
        self.advance(1e6)
        assert not any(stream.ops for stream in self._streams), "a stream waits for what never comes"

    def _settle(self, stream: FakeStream) -> None:
        """Passes events and waits at the head of a stream; repeated, since one stream's event frees
        another."""
        while stream.ops and stream.ops[0].work is None:
            op = stream.ops[0]
            assert op.event is not None
            if op.waits:
                if op.event.at is None:
                    return
                stream.free_at = max(stream.free_at, op.event.at, op.issued)
            else:
                op.event.at = max(stream.free_at, op.issued)
            stream.ops.popleft()
            if not op.waits:
                for other in self._streams:
                    if other is not stream:
                        self._settle(other)
