"""The client's end of a local channel: rings, blocks, a lost connection, fallbacks, an agent that lies."""

from __future__ import annotations

import array
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.local import frames as wire
from kvtier.local import memory
from kvtier.local.receipts import (
    ANSWER,
    AnswerPacker,
    ReceiptFacts,
    pack_answers,
    pack_ended,
    refusal,
)
from kvtier.v1 import attention_pb2, common_pb2
from kvtier_client.errors import KvtierError
from kvtier_client.localring import StagingRing, ring_bytes
from kvtier_client.localwire import LocalWire, receipt_of
from kvtier_client.pipe import AttendPipe
from kvtier_core.errors import Reason
from tests.unit.agent.local_channel_rig import (
    DIM,
    HEADS,
    KV_HEADS,
    SECONDS,
    ChannelRig,
    channel_rig,
    open_descriptors,
)
from tests.unit.agent.local_client_rig import WAYS, NoStreams, Sender, Way, ask, ask_alone, one_pipe, part

FACTS = ReceiptFacts(1, 1, "", "", "", 1, 1, (), (), True, 0.0, 0.0, "", 1, 1, "", 0.0, 0.0, 0, 0)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path) as made:
        yield made


@pytest.mark.parametrize("n", [1, 3, 256, 257, 1000], ids=str)
def test_blocks_travel_and_outputs_come_back(rig: ChannelRig, n: int) -> None:
    sender, pipe = one_pipe(rig)
    one = part(sender, n)
    ask(pipe, one)
    # The engine echoes queries.
    assert one.failure is None
    assert one.out is not None
    assert torch.equal(one.out, one.q)
    assert [frame.first_query_position for frame in rig.engine.frames] == list(range(0, n, 256))
    pipe.close()


def test_rows_that_are_not_contiguous_travel_as_they_are(rig: ChannelRig) -> None:
    sender, pipe = one_pipe(rig)
    one = part(sender, 5)
    one.q = torch.randn(HEADS, 5, DIM).transpose(0, 1)
    one.k = torch.randn(KV_HEADS, 5, DIM).transpose(0, 1)
    ask(pipe, one)
    assert one.out is not None
    assert torch.equal(one.out, one.q)
    [frame] = rig.engine.frames
    assert bytes(frame.k) == one.k.contiguous().numpy().tobytes()
    pipe.close()


@WAYS
def test_an_output_is_the_callers_own(rig: ChannelRig, way: Way) -> None:
    sender, pipe = one_pipe(rig)
    first, second = part(sender, seed=1), part(sender, seed=2)
    way(pipe, first)
    way(pipe, second)
    assert first.out is not None
    assert torch.equal(first.out, first.q)
    first.out += 1
    pipe.close()


def test_sessions_of_a_batch_share_messages(rig: ChannelRig) -> None:
    senders = [Sender(rig.opened()) for _ in range(5)]
    pipe = AttendPipe(NoStreams(), senders, "local", 1 << 20)
    lengths = (1, 300, 256, 700, 2)
    parts = [part(sender, n, seed=n) for sender, n in zip(senders, lengths, strict=True)]
    ask(pipe, *parts)
    for one in parts:
        assert one.out is not None
        assert torch.equal(one.out, one.q)
    assert rig.server.open_channels == 1
    pipe.close()


def test_a_channel_that_is_lost_is_replaced_and_what_was_not_answered_is_asked_again(rig: ChannelRig) -> None:
    sender, pipe = one_pipe(rig)
    ask(pipe, part(sender))
    channels = list(rig.server._channels)
    cut = threading.Event()

    def lose() -> None:
        if not cut.is_set():
            cut.set()
            channels[0]._connection.shutdown(socket.SHUT_RDWR)

    rig.engine.hook = lose
    one = part(sender, 600, seed=4)
    ask(pipe, one)
    assert one.out is not None
    assert torch.equal(one.out, one.q)
    assert pipe.transport == "local"
    assert cut.is_set()
    ask(pipe, part(sender))
    pipe.close()


@WAYS
def test_a_call_that_is_interrupted_leaves_its_answer_to_none_that_follows(
    rig: ChannelRig, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, pipe = one_pipe(rig)
    way(pipe, part(sender))

    def interrupted(_: LocalWire) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LocalWire, "received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            way(pipe, part(sender, seed=1))
    for seed in (2, 3):
        one = part(sender, seed=seed)
        way(pipe, one)
        assert one.out is not None
        assert torch.equal(one.out, one.q)
    assert pipe.transport == "local"
    pipe.close()


@WAYS
def test_an_agent_that_is_gone_is_draining(rig: ChannelRig, way: Way) -> None:
    sender, pipe = one_pipe(rig)
    rig.run(rig.server.close(SECONDS))
    with pytest.raises(KvtierError) as caught:
        way(pipe, part(sender))
    assert caught.value.reason is Reason.DRAINING
    pipe.close()


def test_frames_fall_back_to_grpc_only_where_that_is_said(
    rig: ChannelRig, caplog: pytest.LogCaptureFixture
) -> None:
    opened = rig.opened()
    opened.local_channel.token = b"\3" * 32
    streams = NoStreams()
    with caplog.at_level(logging.WARNING, logger="kvtier_client.pipe"):
        pipe = AttendPipe(streams, [Sender(opened)], "auto", 1 << 20)
    assert (pipe.transport, streams.asked) == ("grpc", 1)
    assert "attaches no session" in pipe.why_grpc
    assert "frames travel over gRPC: SESSION_UNKNOWN" in caplog.text
    pipe.close()
    with pytest.raises(KvtierError) as caught:
        AttendPipe(streams, [Sender(opened)], "local", 1 << 20)
    assert caught.value.reason is Reason.SESSION_UNKNOWN
    assert streams.asked == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param({}, "offers no local channel", id="an-older-agent"),
        pytest.param({"local_channel_refused": "UNSUPPORTED: no"}, "UNSUPPORTED: no", id="refused"),
    ],
)
def test_an_agent_without_channels_is_asked_over_grpc(change: dict[str, str], text: str) -> None:
    opened = attention_pb2.OpenSessionResponse(session_id="s", **change)  # type: ignore[arg-type]
    pipe = AttendPipe(NoStreams(), [Sender(opened)], "auto", 1 << 20)
    assert pipe.transport == "grpc"
    assert text in pipe.why_grpc
    with pytest.raises(KvtierError, match=text):
        AttendPipe(NoStreams(), [Sender(opened)], "local", 1 << 20)


def test_a_socket_that_is_not_there_is_draining() -> None:
    opened = attention_pb2.OpenSessionResponse(session_id="s")
    opened.local_channel.socket = "/nowhere/attend.sock"
    opened.local_channel.token = b"\0" * 32
    opened.local_channel.max_ring_bytes = 1 << 20
    before = open_descriptors()
    with pytest.raises(KvtierError) as caught:
        AttendPipe(NoStreams(), [Sender(opened)], "local", 1 << 16)
    assert caught.value.reason is Reason.DRAINING
    assert open_descriptors() == before


def test_a_client_leaves_no_descriptor(rig: ChannelRig) -> None:
    sender, pipe = one_pipe(rig)
    ask(pipe, part(sender))
    pipe.close()
    rig.settled(lambda: rig.server.open_channels == 0, "the channel's end")
    before = open_descriptors()
    for _ in range(10):
        sender, pipe = one_pipe(rig)
        ask(pipe, part(sender))
        pipe.close()
    rig.settled(lambda: rig.server.open_channels == 0, "the channels' end")
    assert open_descriptors() == before


# --- an agent that lies ------------------------------------------------------------------------------------


class LyingAgent:
    """Shakes hands and then answers each message with what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "attend.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen(8)
        self.seals = memory.OWNER_SEALS
        self.announced: int | None = None
        self.lie: Callable[[wire.FrameRecord], bytes | None] = lambda record: b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def offer(self) -> Sender:
        opened = attention_pb2.OpenSessionResponse(session_id="s", generation=1, boot_id="boot")
        opened.local_channel.socket = str(self.path)
        opened.local_channel.token = b"\0" * 32
        opened.local_channel.max_ring_bytes = 1 << 22
        return Sender(opened)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        received, control, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(64))
        for _, _, data in control:
            passed = array.array("i")
            passed.frombytes(data)
            for descriptor in passed:
                os.close(descriptor)
        size = wire.unpack_hello(received, len(received)).ring_bytes
        own = os.memfd_create("answers", os.MFD_ALLOW_SEALING)
        os.ftruncate(own, size)
        import fcntl

        fcntl.fcntl(own, memory.F_ADD_SEALS, self.seals)
        answered = wire.Attached(0, b"\1" * 32, self.announced or size)
        connection.sendmsg(
            [wire.pack_attached(wire.Kind.WELCOME, answered, 0)],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own]))],
        )
        os.close(own)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * wire.MAX_ANSWER_BYTES)
        while received := connection.recv(1 << 16):
            _, count, _ = wire.read_header(received, len(received))
            for record in wire.unpack_frames(received, len(received), count):
                told = self.lie(record)
                if told is None:
                    return
                connection.send(told)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(SECONDS)


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[LyingAgent]:
    made = LyingAgent(tmp_path)
    yield made
    made.close()


def told(sequence: int, out_bytes: int = HEADS * DIM * 4) -> bytes:
    return pack_answers([AnswerPacker().answer(sequence, 0, 0, out_bytes, FACTS)], 0)


def too_long() -> bytes:
    """A message beyond what a reader has room for, whose second answer would begin there."""
    tail = wire.MAX_ANSWER_BYTES - ANSWER.size
    first = ANSWER.pack(tail, 0, 0, 1, 1, 0, 1, *[0] * 8, *[0.0] * 4, *[bytes(32)] * 3) + bytes(tail)
    return pack_answers([first, told(2)[24:]], 0)


DETAIL = common_pb2.ErrorDetail(reason=common_pb2.STEP_ORDER, message="no")
LIES: list[tuple[str, Callable[[wire.FrameRecord], bytes], Reason]] = [
    ("another-number", lambda r: told(r.sequence + 1), Reason.IDENTITY_MISMATCH),
    ("two-answers", lambda r: pack_answers([told(1)[24:]] * 2, 0), Reason.IDENTITY_MISMATCH),
    ("no-answer", lambda r: pack_answers([], 0), Reason.IDENTITY_MISMATCH),
    ("short-output", lambda r: told(r.sequence, 8), Reason.FRAME_INVALID),
    ("long-output", lambda r: told(r.sequence, 1 << 40), Reason.FRAME_INVALID),
    ("junk", lambda r: b"junk", Reason.FRAME_INVALID),
    ("a-welcome", lambda r: wire.pack_attach(b"", 0), Reason.FRAME_INVALID),
    ("too-long", lambda r: too_long(), Reason.FRAME_INVALID),
    ("cut", lambda r: told(r.sequence)[:-3], Reason.FRAME_INVALID),
    ("typed-refusal", lambda r: pack_answers([refusal(r.sequence, 0, 0, DETAIL)], 0), Reason.STEP_ORDER),
    ("typed-end", lambda r: pack_ended(DETAIL, 0), Reason.STEP_ORDER),
    ("end-of-junk", lambda r: wire.header(wire.Kind.ENDED, 2, 1, 0) + b"\xff\xff", Reason.FRAME_INVALID),
]


@WAYS
@pytest.mark.parametrize(("lie", "reason"), [pytest.param(*rest, id=name) for name, *rest in LIES])
def test_an_answer_that_is_none_is_refused(
    liar: LyingAgent, lie: Callable[[wire.FrameRecord], bytes], reason: Reason, way: Way
) -> None:
    sender = liar.offer()
    pipe = AttendPipe(NoStreams(), [sender], "local", 1 << 16)
    liar.lie = lie
    one = part(sender)
    try:
        way(pipe, one)
        failed = one.failure
    except KvtierError as error:
        failed = error
    assert failed is not None
    assert failed.reason is reason
    pipe.close()


@WAYS
def test_a_late_answer_is_a_deadline(liar: LyingAgent, way: Way) -> None:
    release = threading.Event()
    sender = liar.offer()
    pipe = AttendPipe(NoStreams(), [sender], "local", 1 << 16)

    def hang(record: wire.FrameRecord) -> None:
        release.wait(SECONDS)

    liar.lie = hang
    with pytest.raises(KvtierError) as caught:
        way(pipe, part(sender), seconds=0.02)
    assert caught.value.reason is Reason.DEADLINE
    release.set()
    pipe.close()


@pytest.mark.parametrize(
    ("seals", "announced"),
    [
        pytest.param(memory.SIZE_SEALS, None, id="others-may-write"),
        pytest.param(0, None, id="unsealed"),
        pytest.param(memory.OWNER_SEALS, 4096, id="another-size"),
    ],
)
def test_an_answers_ring_that_is_not_safe_is_not_mapped(
    liar: LyingAgent, seals: int, announced: int | None
) -> None:
    liar.seals, liar.announced = seals, announced
    before = open_descriptors()
    with pytest.raises(KvtierError) as caught:
        AttendPipe(NoStreams(), [liar.offer()], "local", 1 << 16)
    assert caught.value.reason is Reason.FRAME_INVALID
    deadline = time.monotonic() + SECONDS
    while open_descriptors() > before and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    assert open_descriptors() <= before


changes = st.lists(st.tuples(st.integers(0, 235), st.integers(0, 255)), max_size=4)


@settings(max_examples=60, deadline=None)
@given(changed=changes, alone=st.booleans())
def test_whatever_an_agent_says_is_an_answer_or_a_typed_failure(
    tmp_path_factory: pytest.TempPathFactory, changed: list[tuple[int, int]], alone: bool
) -> None:
    message = bytearray(told(1))
    for at, value in changed:
        message[at % len(message)] = value
    liar = LyingAgent(tmp_path_factory.mktemp("liar"))
    liar.lie = lambda record: bytes(message)
    sender = liar.offer()
    pipe = AttendPipe(NoStreams(), [sender], "local", 1 << 16)
    one = part(sender)
    seen: list[Any] = []
    try:
        if alone:
            ask_alone(pipe, one, noted=seen.append)
        else:
            pipe.attend([one], SECONDS, 1.0, lambda part, answer: seen.append(answer))
        assert one.failure is not None or one.out is not None
        for answer in seen:
            receipt_of(answer) if isinstance(answer, bytes) else answer.receipt()
    except KvtierError:
        pass
    finally:
        pipe.close()
        liar.close()


# --- the ring ----------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.integers(1, 40)), max_size=60))
def test_spans_of_the_staging_ring_never_overlap_and_come_back(asked: list[int | None]) -> None:
    """None gives the oldest back; a number takes so many pages' hundredths."""
    ring = StagingRing(4096)
    live: list[tuple[int, int]] = []
    try:
        for size in asked:
            if size is None:
                if live:
                    ring.give_back()
                    live.pop(0)
                continue
            start = ring.place(64 * size)
            if start is None:
                assert live, "an empty ring has room for all that it holds"
                continue
            span = (start, start + 64 * size)
            assert start >= 0 and span[1] <= 4096
            assert not wire.spans_overlap([*live, span])
            ring.take(start, 64 * size)
            live.append(span)
        if not live:
            assert ring.place(4096) == 0
    finally:
        ring.close()
        ring.close()


def test_a_write_beyond_the_ring_is_a_defect_and_not_memory() -> None:
    ring = StagingRing(4096)
    with pytest.raises(ValueError, match="of a ring"):
        ring.write(4090, torch.zeros(4))
    ring.close()
    with pytest.raises(ValueError, match="of a ring"):
        ring.write(0, torch.zeros(1))


def test_rings_are_whole_pages_within_the_agents_bound() -> None:
    assert ring_bytes(1, 1 << 20) == 4096
    assert ring_bytes(5000, 1 << 20) == 8192
    assert ring_bytes(1 << 30, 10_000) == 8192
