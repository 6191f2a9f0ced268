"""A message is received alike by who looks for it and by who sleeps: bytes, ends, errors and timeouts; and
who looks keeps nobody's interpreter, and no seat."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.local import looking
from kvtier.local.looking import Look, Receiver, Seats, _Word, compiled, cores
from kvtier.local.patience import Bounds, Patience
from tests.unit.agent.local_channel_rig import channel_rig

SECOND = 1_000_000_000
# Nothing that a test machine does takes the core from them, and a look ends by what is looked for.
PATIENT = Bounds(most=60 * SECOND, taken=60 * SECOND, burst=600 * SECOND)
SIZE = 64


def _native() -> Look:
    """Also on a machine of one core."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(looking, "cores", lambda: 2.0)
        made: Look | None = compiled.__wrapped__()
    assert made is not None
    return made


native = _native()
WAYS = pytest.mark.parametrize("look", [None, native], ids=["sleeps", "looks"])


class Pair:
    """Two ends; ours is received from."""

    def __init__(self, look: Look | None, bounds: Bounds = PATIENT, seats: int = 1) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.buffer, self.patience, self.seats = bytearray(SIZE), Patience(bounds), Seats(seats)
        # As after messages that came soon.
        self.patience.limit = bounds.most
        self.receiver = Receiver(self.ours, self.buffer, self.patience, look, self.seats)

    def timeout(self, microseconds: int) -> None:
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@qq", 0, microseconds))


@contextlib.contextmanager
def pair(look: Look | None, bounds: Bounds = PATIENT, seats: int = 1) -> Iterator[Pair]:
    made = Pair(look, bounds, seats)
    with made.ours, made.theirs:
        yield made


def finding(came: int, looked: int = 0, taken: int = 0) -> Look:
    """A look that finds that."""

    def look(address: int) -> int:
        words = (ctypes.c_int64 * 8).from_address(address)
        words[5:8] = looked, taken, time.monotonic_ns()
        return came

    return look


def looked_at(one: Pair) -> None:
    """Returns when somebody looks."""
    until = time.monotonic() + 30
    while one.seats.take():
        one.seats.give_back()
        assert time.monotonic() < until, "nobody looks"


@WAYS
@pytest.mark.parametrize("size", [1, SIZE, SIZE + 1, 3 * SIZE])
def test_a_message_is_received_with_its_whole_length(look: Look | None, size: int) -> None:
    sent = os.urandom(size)
    with pair(look) as one:
        one.theirs.send(sent)
        assert one.receiver.receive() == size
        assert one.buffer[: min(size, SIZE)] == sent[:SIZE]
        one.theirs.send(b"next")
        assert one.receiver.receive() == 4


@WAYS
def test_the_end_of_the_peer_is_an_empty_message(look: Look | None) -> None:
    with pair(look) as one:
        one.theirs.close()
        assert one.receiver.receive() == 0


@WAYS
def test_a_peer_that_leaves_messages_unread_resets_the_channel_once(look: Look | None) -> None:
    with pair(look) as one:
        one.ours.send(b"unread")
        one.theirs.close()
        with pytest.raises(ConnectionResetError):
            one.receiver.receive()
        assert one.receiver.receive() == 0


@WAYS
def test_a_message_that_does_not_come_in_time_is_none(look: Look | None) -> None:
    with pair(look, Bounds(most=1_000, first=1_000)) as one:
        one.timeout(1_000)
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                one.receiver.receive()
        assert one.patience.seen == 0
        one.theirs.send(b"late")
        assert one.receiver.receive() == 4
        assert one.seats.take()


def test_who_looked_in_vain_is_told_so_although_no_message_came() -> None:
    with pair(finding(-1), Bounds(most=1_000, first=1_000)) as one:
        one.timeout(1_000)
        with pytest.raises(BlockingIOError):
            one.receiver.receive()
        one.patience.look(time.monotonic_ns())
        assert one.patience.wasted == 1_000


ENDS: dict[str, tuple[Callable[[Pair], object], int]] = {
    "a message": (lambda one: one.theirs.send(b"seen"), 4),
    "the peer's end": (lambda one: one.theirs.close(), 0),
    "our own end": (lambda one: one.ours.shutdown(socket.SHUT_RD), 0),
}


@pytest.mark.parametrize("ends", ENDS)
def test_a_look_sees_what_comes_while_other_threads_run(ends: str) -> None:
    come, size = ENDS[ends]
    received: list[int] = []
    with pair(native) as one:
        # It looks for a minute: if it held the interpreter, this thread would not go on.
        thread = threading.Thread(target=lambda: received.append(one.receiver.receive()), daemon=True)
        thread.start()
        looked_at(one)
        come(one)
        thread.join(30)
        assert received == [size]
        words = one.receiver._words
        assert words[_Word.LOOKED] > 0 == words[_Word.TAKEN]
        assert one.seats.take()


def test_what_a_look_has_seen_is_told_when_the_next_wait_begins() -> None:
    """Whoever has received a message has somebody waiting."""
    with pair(finding(17, 400_000)) as one:
        assert one.receiver.receive() == 17
        assert one.patience.seen == 0
        one.seats.take()
        one.theirs.send(b"next")
        assert one.receiver.receive() == 4
        assert (one.patience.seen, one.patience.wasted) == (400_000, 0)
        one.theirs.send(b"last")
        assert one.receiver.receive() == 4
        assert one.patience.seen == 400_000


def test_a_look_sleeps_for_nothing() -> None:
    found: list[int] = []
    with pair(native) as one:
        words = one.receiver._words
        words[_Word.LIMIT], words[_Word.TAKEN_AFTER] = 1_000_000, 60 * SECOND
        # The socket has no timeout: a look that slept would not end.
        thread = threading.Thread(target=lambda: found.append(native(one.receiver._at)), daemon=True)
        thread.start()
        thread.join(30)
        assert found == [-1]


def test_a_look_for_nothing_ends_in_time_and_another_one_needs_credit() -> None:
    with pair(native, Bounds(most=2_000_000, taken=60 * SECOND, wasted_of=1_000_000)) as one:
        one.timeout(1)
        with pytest.raises(BlockingIOError):
            one.receiver.receive()
        began = time.monotonic_ns()
        assert one.patience.look(began) == 0
        assert one.patience.wasted == 2_000_000


def test_a_core_that_was_taken_is_left_alone_for_a_while() -> None:
    bounds = Bounds(most=500_000)
    with pair(finding(-1, 400_000, 1), bounds) as one:
        one.theirs.send(b"here")
        assert one.receiver.receive() == 4
        assert one.patience.wasted == 400_000
        assert one.patience.look(time.monotonic_ns()) == 0
        assert one.patience.look(time.monotonic_ns() + bounds.rest) == 500_000


def test_a_message_that_was_seen_on_a_core_that_was_taken_is_received() -> None:
    rests = replace(PATIENT, rest=60 * SECOND, longest_rest=60 * SECOND)
    with pair(finding(17, 400_000, 1), rests) as one:
        assert one.receiver.receive() == 17
        one.theirs.send(b"next")
        assert one.receiver.receive() == 4
        assert (one.patience.seen, one.patience.wasted) == (0, 400_000)


def test_only_so_many_look_at_a_time() -> None:
    looks: list[int] = []

    def look(address: int) -> int:
        looks.append(address)
        return -1

    with pair(look) as one:
        assert one.seats.take() and not one.seats.take()
        one.theirs.send(b"one")
        assert one.receiver.receive() == 3
        assert looks == [] and one.patience.wasted == 0


def test_an_interrupt_while_it_looks_gives_the_seat_back_and_leaves_the_message() -> None:
    def interrupted(address: int) -> int:
        raise KeyboardInterrupt

    with pair(interrupted) as one:
        one.theirs.send(b"one")
        with pytest.raises(KeyboardInterrupt):
            one.receiver.receive()
        assert one.seats.take()
        one.seats.give_back()
        assert one.ours.recv(SIZE) == b"one"


CPU_MAX = [
    ("max 100000", 8.0),
    ("400000 100000", 4.0),
    ("50000 100000", 0.5),
    ("1600000 100000", 8.0),
    ("nonsense", 8.0),
    (None, 8.0),
]


@pytest.mark.parametrize(("text", "count"), CPU_MAX, ids=[str(text) for text, _ in CPU_MAX])
def test_cores_are_those_of_the_mask_and_of_the_quota(
    text: str | None, count: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text + "\n")
    monkeypatch.setattr(looking, "_CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores() == count


@pytest.mark.parametrize(("of", "count"), [(0.5, 1), (1, 1), (2, 1), (7, 1), (8, 2), (64, 16)])
def test_a_quarter_of_the_cores_may_be_looked_with(
    of: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "cores", lambda: of)
    made = looking.seats.__wrapped__()
    assert [made.take() for _ in range(count + 1)] == [True] * count + [False]


@pytest.mark.parametrize("of", [0.5, 1.0, 1.9])
def test_nobody_looks_where_who_is_waited_for_needs_the_core(
    of: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "cores", lambda: of)
    assert compiled.__wrapped__() is None


def test_nobody_looks_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "cores", lambda: 8.0)
    monkeypatch.setattr(looking, "find_spec", lambda _: None)
    assert compiled.__wrapped__() is None


def test_an_agent_tells_how_long_its_channels_have_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a channel that has ended."""
    monkeypatch.setattr("kvtier_agent.localchannel.listener.WATCH_SECONDS", 0.001)
    with channel_rig(tmp_path) as rig:

        def told(seen: str) -> float | None:
            return rig.metrics.registry.get_sample_value(
                "kvtier_agent_channel_look_seconds_total", {"seen": seen}
            )

        opened = rig.opened()
        with rig.channel(opened) as channel:
            assert channel.works()
            [served] = rig.server._channels
            served.patience.came(2 * SECOND)
            served.patience.wasted += 3 * SECOND
            rig.settled(lambda: (told("yes") or 0) >= 2 and (told("no") or 0) >= 3, "what is told")
            served.patience.came(4 * SECOND)
        rig.settled(lambda: not rig.server.open_channels, "the end of the channel")
        assert 6 <= (told("yes") or 0) < 7 and 3 <= (told("no") or 0) < 4
        assert not rig.server._looked
