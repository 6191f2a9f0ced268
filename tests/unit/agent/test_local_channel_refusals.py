"""Peers that no engine of ours would be: each ends its own channel with a typed refusal, and no other."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.local import frames as wire
from kvtier.local import memory
from kvtier_agent.config import Limits
from kvtier_agent.localchannel.channel import MAX_ATTACHED
from tests.engine.raw_channel import RING, Ended, RawChannel, record, staging
from tests.unit.agent.local_channel_rig import (
    FRAME_BYTES,
    Attached,
    ChannelRig,
    channel_rig,
    open_descriptors,
    packed,
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path_factory.mktemp("channels"), Limits(session_idle_seconds=60.0)) as made:
        yield made


@pytest.fixture(scope="module")
def neighbour(rig: ChannelRig) -> Iterator[Attached]:
    """A channel that goes on whatever others do."""
    # What earlier tests left in cycles (servers of gRPC) would give its descriptors back in the midst.
    gc.collect()
    with rig.channel(rig.opened()) as channel:
        yield channel


@pytest.fixture(autouse=True)
def nothing_is_left_and_the_neighbour_works(rig: ChannelRig, neighbour: Attached) -> Iterator[None]:
    assert neighbour.works()
    before = open_descriptors()
    yield
    assert neighbour.works()
    rig.settled(lambda: rig.server.open_channels == 1, "the end of the broken channels")
    assert open_descriptors() == before
    rig.settled(lambda: rig.frames.count == 0, "the frames' places")


# --- attaching ---------------------------------------------------------------------------------------------

HELLOS: list[tuple[str, Callable[[RawChannel, bytes], object], str, str]] = [
    ("bad-token", lambda c, t: c.hello(b"\1" * 32), "SESSION_UNKNOWN", "token"),
    ("unsealed", lambda c, t: c.hello(t, seals=0), "BAD_ARGUMENT", "seals 0x0 lack"),
    (
        "may-shrink",
        lambda c, t: c.hello(t, seals=memory.F_SEAL_GROW | memory.F_SEAL_SEAL),
        "BAD_ARGUMENT",
        "lack 0x2",
    ),
    (
        "seals-may-change",
        lambda c, t: c.hello(t, seals=memory.F_SEAL_GROW | memory.F_SEAL_SHRINK),
        "BAD_ARGUMENT",
        "lack 0x1",
    ),
    ("too-small", lambda c, t: c.hello(t, size=4096, announced=8192), "BAD_ARGUMENT", "4096 bytes where"),
    ("too-large", lambda c, t: c.hello(t, size=8192, announced=4096), "BAD_ARGUMENT", "8192 bytes where"),
    ("empty-ring", lambda c, t: c.hello(t, announced=1), "BAD_ARGUMENT", "whole pages"),
    ("no-page", lambda c, t: c.hello(t, announced=4100), "BAD_ARGUMENT", "whole pages"),
    ("huge-ring", lambda c, t: c.hello(t, announced=1 << 40), "BAD_ARGUMENT", "whole pages"),
    ("endless-ring", lambda c, t: c.hello(t, announced=(1 << 64) - 4096), "BAD_ARGUMENT", "whole pages"),
    ("no-descriptor", lambda c, t: c.hello(t, descriptors=[]), "FRAME_INVALID", "0 descriptors"),
    ("a-file", lambda c, t: with_file(c, t), "BAD_ARGUMENT", "not a memory file|seals"),
    ("a-pipe", lambda c, t: with_pipe(c, t), "BAD_ARGUMENT", "not a memory file"),
    ("a-socket", lambda c, t: c.hello(t, descriptors=[c.socket.fileno()]), "BAD_ARGUMENT", "not a memory"),
    ("two-descriptors", lambda c, t: flood(c, t, 2), "FRAME_INVALID", "2 descriptors"),
    ("descriptor-flood", lambda c, t: flood(c, t, 253), "FRAME_INVALID", "over 4 descriptors"),
    ("frames-first", lambda c, t: raw(c, wire.header(wire.Kind.FRAMES, 0, 0, 0)), "FRAME_INVALID", "FRAMES"),
    ("attach-first", lambda c, t: raw(c, wire.pack_attach(t, 0)), "FRAME_INVALID", "ATTACH before HELLO"),
    ("empty", lambda c, t: raw(c, b"x"), "FRAME_INVALID", "length"),
    ("too-long", lambda c, t: raw(c, b"x" * (wire.MAX_REQUEST_BYTES + 1)), "FRAME_INVALID", "length"),
    ("short-hello", lambda c, t: raw(c, wire.header(wire.Kind.HELLO, 0, 1, 0)), "FRAME_INVALID", "length"),
]


def raw(channel: RawChannel, message: bytes) -> None:
    channel.send(message)
    channel.receive()


def with_file(channel: RawChannel, token: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(RING)
        channel.hello(token, descriptors=[file.fileno()])


def with_pipe(channel: RawChannel, token: bytes) -> None:
    ends = os.pipe()
    try:
        channel.hello(token, descriptors=[ends[0]])
    finally:
        for end in ends:
            os.close(end)


def flood(channel: RawChannel, token: bytes, count: int) -> None:
    descriptor, mapped = staging()
    try:
        channel.hello(token, descriptors=[descriptor] * count)
    finally:
        mapped.close()
        os.close(descriptor)


@pytest.mark.parametrize(("act", "reason", "text"), [pytest.param(*rest, id=name) for name, *rest in HELLOS])
def test_a_hello_that_is_none_is_refused(
    rig: ChannelRig, act: Callable[[RawChannel, bytes], object], reason: str, text: str
) -> None:
    opened = rig.opened()
    with RawChannel(opened.local_channel.socket) as channel, pytest.raises(Ended, match=text) as caught:
        act(channel, opened.local_channel.token)
    assert caught.value.reason == reason


def test_a_session_that_could_not_attach_is_free_for_another_stream(rig: ChannelRig) -> None:
    """Its token is used up; over gRPC it goes on."""
    opened = rig.opened()
    with RawChannel(opened.local_channel.socket) as channel, pytest.raises(Ended):
        channel.hello(opened.local_channel.token, seals=0)
    session = rig.session(opened)
    rig.settled(lambda: not session.streaming, "the claim's end")


def test_no_hello_in_time_ends_the_connection(rig: ChannelRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_agent.localchannel.channel.HANDSHAKE_SECONDS", 0.05)
    with RawChannel(rig.opened().local_channel.socket) as channel:
        with pytest.raises(Ended, match="no HELLO within") as caught:
            channel.receive()
        assert caught.value.reason == "DEADLINE"


def test_a_foreign_user_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with channel_rig(tmp_path, uids=lambda: frozenset({os.geteuid() + 1})) as rig:
        opened = rig.opened()
        with RawChannel(opened.local_channel.socket) as channel, pytest.raises(Ended) as caught:
            channel.receive()
        assert caught.value.reason == "TENANT_MISMATCH"
        assert f"uid {os.geteuid()}" in str(caught.value)


def test_a_token_of_another_namespace_attaches_nothing(rig: ChannelRig, tmp_path: Path) -> None:
    opened = rig.opened()
    host = rig.host
    name = host.name
    host.name = type(name)("elsewhere", name.name, name.uid)
    try:
        with RawChannel(opened.local_channel.socket) as channel, pytest.raises(Ended) as caught:
            channel.hello(opened.local_channel.token)
        assert caught.value.reason == "SESSION_UNKNOWN"
    finally:
        host.name = name


@pytest.mark.parametrize("namespace", ["..", "a/b", "", "UPPER", "x" * 64], ids=repr)
def test_a_namespace_that_names_no_folder_has_no_channels(rig: ChannelRig, namespace: str) -> None:
    host = rig.host
    name = host.name
    host.name = type(name)(namespace, name.name, name.uid)
    try:
        with pytest.raises(Exception, match="names no folder"):
            rig.opened()
    finally:
        host.name = name


def test_too_many_sessions_of_a_channel_end_it(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        for _ in range(MAX_ATTACHED - 1):
            channel.attach(rig.opened().local_channel.token)
        with pytest.raises(Ended) as caught:
            channel.attach(rig.opened().local_channel.token)
        assert caught.value.reason == "QUEUE_FULL"


def test_a_bad_token_on_a_channel_ends_it(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        with pytest.raises(Ended) as caught:
            channel.attach(b"\2" * 32)
        assert caught.value.reason == "SESSION_UNKNOWN"


# --- frames ------------------------------------------------------------------------------------------------

PLACES = [
    pytest.param({"offset": RING}, id="behind-the-ring"),
    pytest.param({"offset": RING - 64}, id="across-the-end"),
    pytest.param({"offset": (1 << 62)}, id="far-away"),
    pytest.param({"offset": -64}, id="negative"),
    pytest.param({"offset": 8}, id="unaligned"),
    pytest.param({"rows": 1 << 31}, id="endless-rows"),
    pytest.param({"queries": (1 << 32) - 1}, id="endless-queries"),
    pytest.param({"rows": 0, "queries": 0}, id="nothing"),
    pytest.param({"attachment": 1}, id="attachment-of-nobody"),
    pytest.param({"evidence": wire.EvidenceRecord(0, 0, (1 << 32) - 1, 0)}, id="endless-surprisals"),
    pytest.param({"evidence": wire.EvidenceRecord(0, 0, RING // 8, 0)}, id="surprisals-across-the-end"),
]


@pytest.mark.parametrize("change", PLACES)
def test_a_frame_whose_place_is_none_ends_the_channel(rig: ChannelRig, change: dict[str, object]) -> None:
    with rig.channel(rig.opened()) as channel:
        frame = channel.frame()
        for name, value in change.items():
            setattr(frame, name, value)
        channel.send(packed(frame))
        with pytest.raises(Ended) as caught:
            channel.answer()
        assert caught.value.reason == "FRAME_INVALID"


def test_frames_of_one_message_that_overlap_end_the_channel(rig: ChannelRig) -> None:
    other = rig.opened()
    with rig.channel(rig.opened()) as channel:
        channel.attach(other.local_channel.token)
        channel.send(packed(channel.frame(offset=0), channel.frame(offset=FRAME_BYTES - 64, attachment=1)))
        with pytest.raises(Ended, match="overlap") as caught:
            channel.answer(2)
        assert caught.value.reason == "FRAME_INVALID"


def good_message(channel: Attached) -> bytes:
    return packed(channel.frame())


def altered(change: Callable[[bytearray], object]) -> Callable[[bytes], bytes]:
    def alter(message: bytes) -> bytes:
        made = bytearray(message)
        change(made)
        return bytes(made)

    return alter


def set_length(made: bytearray) -> None:
    struct.pack_into("<I", made, 8, len(made))


BROKEN: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("magic", altered(lambda m: m.__setitem__(0, 0))),
    ("version", altered(lambda m: m.__setitem__(4, 2))),
    ("kind", altered(lambda m: m.__setitem__(6, 99))),
    ("answers-from-the-engine", altered(lambda m: m.__setitem__(6, int(wire.Kind.ANSWERS)))),
    ("length", altered(lambda m: m.__setitem__(8, 1))),
    ("count-none", altered(lambda m: struct.pack_into("<I", m, 12, 0))),
    ("count-too-many", altered(lambda m: struct.pack_into("<I", m, 12, 2))),
    ("count-endless", altered(lambda m: struct.pack_into("<I", m, 12, (1 << 32) - 1))),
    ("flags", altered(lambda m: struct.pack_into("<H", m, wire.HEADER.size + 2, 4))),
    ("evidence-without-a-record", altered(lambda m: struct.pack_into("<H", m, wire.HEADER.size + 2, 2))),
    ("extra-beyond", altered(lambda m: struct.pack_into("<I", m, wire.HEADER.size + 4, 1 << 31))),
    ("truncated", lambda m: m[:-1]),
    ("longer", lambda m: m + b"\0"),
    ("header-alone", lambda m: m[: wire.HEADER.size]),
    ("empty", lambda m: b"\0"),
    ("too-long", lambda m: m + b"\0" * wire.MAX_REQUEST_BYTES),
]


@pytest.mark.parametrize("alter", [pytest.param(alter, id=name) for name, alter in BROKEN])
def test_a_message_that_is_none_ends_the_channel(rig: ChannelRig, alter: Callable[[bytes], bytes]) -> None:
    with rig.channel(rig.opened()) as channel:
        channel.send(alter(good_message(channel)))
        with pytest.raises(Ended) as caught:
            channel.answer()
        assert caught.value.reason == "FRAME_INVALID"


def test_extra_bytes_that_are_no_message_are_refused_in_place(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        [answer] = channel.ask(channel.frame(extra=b"\xff\xff\xff"))
        assert "extra bytes" in answer.error.message
        assert channel.works()


def test_descriptors_after_hello_are_not_taken(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        descriptor, mapped = staging()
        try:
            channel.send(packed(channel.frame()), [descriptor] * 200)
        finally:
            mapped.close()
            os.close(descriptor)
        assert not channel.answer()[0].HasField("error")


def test_a_peer_that_reads_no_answers_holds_neither_the_loop_nor_others(
    rig: ChannelRig, neighbour: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers fill its socket; the channel ends when one could not be sent for a while."""
    monkeypatch.setattr("kvtier_agent.localchannel.channel.SEND_SECONDS", 5.0)
    monkeypatch.setattr("kvtier_agent.attendframes.ENGINE_GRACE_SECONDS", -60.0)
    with rig.channel(rig.opened()) as channel:
        [mine] = [one for one in rig.server._channels if one.name != neighbour_name(rig)]
        message = packed(channel.frame())
        channel.socket.setblocking(False)
        sending = 0
        while sending < 20:
            try:
                channel.socket.send(message)
                sending = 0
            except BlockingIOError:
                # Full on both ways: the agent's thread is in its send, and stays there.
                sending = sending + 1 if mine._lock.locked() else 0
                threading.Event().wait(0.002)
        # The house-keeping of the event loop, which looks at channels that hang.
        mine.answer_hung(time.monotonic())
        assert mine._lock.locked(), "it did not wait for the end of the send"
        # Else the neighbour's frame is called hung too, when the agent looks while it is computed.
        monkeypatch.setattr("kvtier_agent.attendframes.ENGINE_GRACE_SECONDS", 60.0)
        assert neighbour.works()
        rig.settled(lambda: rig.server.open_channels == 1, "the silent peer's end")


def neighbour_name(rig: ChannelRig) -> str:
    """The oldest channel that is open."""
    return next(iter(rig.server._channels)).name


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_whatever_comes_is_answered_or_ends_its_channel_typed(rig: ChannelRig, data: st.DataObject) -> None:
    """Mutated messages, spliced and random bytes, several on one channel."""
    with rig.channel(rig.opened()) as channel:
        for _ in range(data.draw(st.integers(1, 4))):
            kind = data.draw(st.sampled_from(["mutated", "random", "fields", "spliced"]))
            message = bytearray(good_message(channel))
            if kind == "random":
                message = bytearray(data.draw(st.binary(max_size=300)))
            elif kind == "mutated":
                for _ in range(data.draw(st.integers(1, 6))):
                    at = data.draw(st.integers(0, len(message) - 1))
                    message[at] = data.draw(st.integers(0, 255))
            elif kind == "spliced":
                cut = data.draw(st.integers(0, len(message)))
                message = message[:cut] + message[data.draw(st.integers(0, len(message))) :]
                if len(message) >= wire.HEADER.size and data.draw(st.booleans()):
                    set_length(message)
            else:
                number = st.integers(-(1 << 63), (1 << 63) - 1)
                frame = channel.frame()
                for name in ("step", "offset", "first_row_position", "deadline_ms", "generation"):
                    if data.draw(st.booleans()):
                        setattr(frame, name, data.draw(number))
                frame.rows = data.draw(st.integers(0, (1 << 32) - 1) | st.integers(0, 3))
                counts = st.integers(0, (1 << 32) - 1) | st.integers(0, 3)
                if data.draw(st.booleans()):
                    frame.evidence = wire.EvidenceRecord(
                        data.draw(st.integers(-2, 3)),
                        data.draw(counts),
                        data.draw(counts),
                        data.draw(number),
                    )
                message = bytearray(packed(frame))
            if not message:
                continue
            channel.send(bytes(message))
            ended = ""
            try:
                received, _ = channel.receive()
            except Ended as typed:
                ended = typed.reason
            if ended:
                assert ended == "FRAME_INVALID"
                return
            assert wire.read_header(received, len(received))[0] is wire.Kind.ANSWERS
        assert channel.works()


def test_many_broken_peers_at_once_leave_the_neighbour_alone(rig: ChannelRig, neighbour: Attached) -> None:
    rng = random.Random(7)
    peers = [rig.channel(rig.opened()) for _ in range(8)]
    try:
        for _ in range(20):
            for peer in peers:
                message = bytearray(good_message(peer))
                message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
                try:
                    peer.socket.send(bytes(message), socket.MSG_DONTWAIT)
                except OSError:
                    continue
            assert neighbour.works()
    finally:
        for peer in peers:
            peer.close()


def test_time_is_counted_from_a_clock_that_stands_elsewhere(rig: ChannelRig) -> None:
    """An engine in another time namespace: what counts is the way, not its clock."""
    opened = rig.opened()
    with RawChannel(opened.local_channel.socket) as bare:
        own, bare.ring = staging()
        elsewhere = time.monotonic_ns() - 3_600_000_000_000
        bare.send(wire.pack_hello(wire.Hello(opened.local_channel.token, RING), elsewhere), [own])
        os.close(own)
        received, [bare.answers_fd] = bare.receive()
        bare.attached.append(wire.unpack_attached(received, len(received)))
        later = time.monotonic_ns() - 3_600_000_000_000
        bare.send(wire.pack_frames([record(opened, bare.attached[0], deadline_ms=5_000)], later))
        assert not bare.answer()[0].HasField("error")
