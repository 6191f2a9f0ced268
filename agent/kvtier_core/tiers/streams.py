"""Work in device order: streams, and the events by which one stream waits for another.

Why it exists: a copy on a device starts when the device comes to it, not when it is asked for, so that what
it must not overtake has to be said as an event. The same small protocol covers CUDA, host memory and a
test's device whose delays are chosen. It must not know slots, tiers or attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's order."""

    def ready(self) -> bool:
        """Whether the device has passed it: everything before it in its stream has ended."""
        ...


class Stream(Protocol):
    """Work runs one after the other, in the order it was given; other streams run meanwhile."""

    def wait(self, event: Event) -> None:
        """What is given after this starts only once `event` has been passed. The caller does not wait."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Gives work that issues device operations; it may run any time later."""
        ...

    def record(self) -> Event:
        """An event after all work given so far."""
        ...


class PassedEvent:
    """An event of work that has ended."""

    def ready(self) -> bool:
        return True


class InlineStream:
    """Host memory: work ends before `run` returns, so that an event it is asked to wait for must have
    passed."""

    def wait(self, event: Event) -> None:
        if not event.ready():
            raise RuntimeError("an inline stream cannot wait for an event that has not passed")

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return PassedEvent()


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def ready(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A stream of one CUDA device. Events of other devices' streams may be waited for; other kinds may
    not."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
        elif not event.ready():
            raise RuntimeError("a CUDA stream waits for CUDA events only")

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event)


def stream_of(device: torch.device) -> Stream:
    """A stream of its own on a CUDA device; on the CPU device work runs inline."""
    if device.type == "cuda":
        return CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return InlineStream()
