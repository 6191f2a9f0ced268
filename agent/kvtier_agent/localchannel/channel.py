"""One connection of an engine: a thread that reads a message, computes it and answers, one after the other.

Why a thread: on one node a hop over an event loop costs more than the socket. Everything that comes from the
peer is untrusted: what no honest engine sends ends this channel with a typed refusal, and no other. It must
not know where sockets lie.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from kvtier.local import frames as wire
from kvtier.local.looking import Receiver, compiled, seats
from kvtier.local.patience import Bounds, Patience
from kvtier.local.receipts import pack_answers, pack_ended, refusal
from kvtier_agent import attendframes
from kvtier_agent.cachesession import Session
from kvtier_agent.errors import to_detail
from kvtier_agent.localchannel.frames import Attachment, BrokenChannelError, FrameServer
from kvtier_agent.localchannel.loneframes import LoneFrames
from kvtier_agent.localchannel.rings import Rings
from kvtier_core.errors import CoreError, Reason

log = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 5.0
SEND_SECONDS = 5.0
# A claim waits for the session's other stream, and for the event loop.
_ATTACH_SECONDS = 10.0
# What an engine does between two layers takes as long where it has a GPU.
_LOOKS = Bounds(most=200_000)
MAX_ATTACHED = 64
# Room for more descriptors than are taken, so that a flood is seen as one.
_DESCRIPTORS = 4
_NANOS = 1_000_000_000
# Sequence, step and layer of a frame.
_Named = tuple[int, int, int]


class ChannelOffice(Protocol):
    """What a channel needs of the agent around it."""

    @property
    def boot_id(self) -> str: ...

    @property
    def idle_seconds(self) -> float: ...

    @property
    def frame_seconds(self) -> float:
        """The longest deadline of a frame."""

    @property
    def max_ring_bytes(self) -> int: ...

    def attach(self, token: bytes) -> Future[tuple[Session, bytes]]:
        """Claims the token's session; with the token of its next attachment. From any thread."""

    def release(self, session: Session) -> None:
        """From any thread."""


class Channel:
    """Owns its socket, rings and claims; `run` is the thread's whole life."""

    def __init__(
        self, connection: socket.socket, office: ChannelOffice, server: FrameServer, name: str
    ) -> None:
        self._connection = connection
        self._office = office
        self._server = server
        self.name = name
        self._attachments: list[Attachment] = []
        self._rings: Rings | None = None
        # While the channel has one session.
        self._lone: LoneFrames | None = None
        self._buffer = bytearray(wire.MAX_REQUEST_BYTES)
        # Its numbers may be read from any thread.
        self.patience = Patience(_LOOKS)
        self._clock_offset = 0
        self._ending: CoreError | None = None
        # Over what is sent, and over `_running`: the frames that compute now, until when.
        self._lock = threading.Lock()
        self._running: Sequence[_Named] | None = None
        self._running_until = 0.0

    def run(self) -> None:
        """Until the peer leaves, misbehaves or is idle, or `end` is called. Never raises."""
        why: CoreError | None = None
        try:
            self._handshake()
            self._timeout(socket.SO_RCVTIMEO, self._office.idle_seconds)
            # Here, since the first one of a process compiles.
            receiver = Receiver(self._connection, self._buffer, self.patience, compiled(), seats())
            while self._turn(receiver):
                pass
            why = self._ending
        except BrokenChannelError as broken:
            why = broken.refused
            log.info("%s ends: %s", self.name, why)
        except OSError as error:
            log.info("%s is lost: %s", self.name, error)
        except Exception:
            log.exception("%s failed", self.name)
            why = CoreError(Reason.INTERNAL, "internal failure; see the agent's log")
        finally:
            self._close(why)

    def end(self, why: CoreError) -> None:
        """From any thread: no further message is read; the one that computes is answered."""
        self._ending = why
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def answer_hung(self, now: float) -> None:
        """Called now and then: an engine that hangs far past the frames' deadline is answered for."""
        # Held by a thread that sends to a peer that does not read; the event loop does not wait for that.
        if not self._lock.acquire(blocking=False):
            return
        try:
            named = self._running
            if named is None or now < self._running_until + attendframes.ENGINE_GRACE_SECONDS:
                return
            self._running = None
            detail = to_detail(CoreError(Reason.DEADLINE, attendframes.HANGS))
            answers = [refusal(*one, detail) for one in named]
            with contextlib.suppress(OSError):
                self._connection.send(pack_answers(answers, time.monotonic_ns()), socket.MSG_DONTWAIT)
        finally:
            self._lock.release()

    # --- messages --------------------------------------------------------------------------------------

    def _handshake(self) -> None:
        self._timeout(socket.SO_RCVTIMEO, HANDSHAKE_SECONDS)
        self._timeout(socket.SO_SNDTIMEO, SEND_SECONDS)
        size, descriptors = self._receive_with_descriptors()
        try:
            kind, _, clock_ns = self._header(size)
            if kind is not wire.Kind.HELLO:
                raise _malformed(f"kind: {kind.name} before HELLO")
            hello = wire.unpack_hello(self._buffer, size)
            if len(descriptors) != 1:
                raise _malformed(f"{len(descriptors)} descriptors came with HELLO, one was due")
            # The peer's clock may stand elsewhere (time namespaces); what the way took is in the offset.
            self._clock_offset = time.monotonic_ns() - clock_ns
            session, next_token = self._claim(hello.token)
            self._attachments.append(Attachment.of(session, self._office.boot_id))
            try:
                self._rings = Rings(descriptors[0], hello.ring_bytes, self._office.max_ring_bytes)
            except CoreError as error:
                raise BrokenChannelError(error) from None
            self._lone = LoneFrames(self._server, self._attachments[0], self._rings)
        except wire.MalformedError as error:
            raise _malformed(str(error)) from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        welcome = wire.pack_attached(
            wire.Kind.WELCOME, wire.Attached(0, next_token, hello.ring_bytes), time.monotonic_ns()
        )
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._rings.answers]))]
        self._connection.sendmsg([welcome], passed)

    def _turn(self, receiver: Receiver) -> bool:
        """Reads one message and answers it; False at the end."""
        try:
            size = receiver.receive()
        except BlockingIOError:
            seconds = self._office.idle_seconds
            message = f"no frame came for {seconds:g} s, so the session is closed"
            raise BrokenChannelError(CoreError(Reason.SESSION_UNKNOWN, message)) from None
        except InterruptedError:
            return True
        if size == 0:
            return False
        now = time.monotonic()
        lone = self._lone
        if lone is not None and size == wire.LONE_MESSAGE.size:
            allowed = lone.begin(self._buffer, now, self._clock_offset)
            if allowed is not None:
                self._lone_frame(lone, allowed)
                return True
        one = wire.read_frame(self._buffer, size)
        if one is not None:
            self._frames((one[0],), one[1], now)
            return True
        try:
            kind, count, sent_ns = self._header(size)
            if kind is wire.Kind.FRAMES:
                self._frames(wire.unpack_frames(self._buffer, size, count), sent_ns, now)
            elif kind is wire.Kind.ATTACH:
                self._attach(wire.unpack_attach(self._buffer, size))
            else:
                raise _malformed(f"kind: {kind.name} is none of a request")
        except wire.MalformedError as error:
            raise _malformed(str(error)) from None
        return True

    def _frames(self, records: Sequence[wire.FrameRecord], sent_ns: int, now: float) -> None:
        rings = self._rings
        assert rings is not None
        started_ns = time.time_ns()
        # A frame waits in the socket while another is computed: its time counts from when it was sent. A
        # peer that lies about that shortens its own deadline.
        sent = (sent_ns + self._clock_offset) / _NANOS
        longest = self._office.frame_seconds
        received_at = min(now, max(sent, now - 2 * longest))
        turns = self._server.turns(records, self._attachments, rings)
        allowed = max([turn.record.deadline_ms / 1000 or longest for turn in turns])
        self._running_until = received_at + min(allowed, longest)
        self._running = [(turn.record.sequence, turn.record.step, turn.record.layer) for turn in turns]
        try:
            self._server.compute(turns, rings, received_at)
            with self._lock:
                late, self._running = self._running is None, None
                if not late:
                    answers = [self._server.answer(turn, rings) for turn in turns]
                    self._connection.send(pack_answers(answers, time.monotonic_ns()))
        finally:
            self._running = None
            for turn in turns:
                self._server.observe(turn, received_at, started_ns)

    def _lone_frame(self, lone: LoneFrames, allowed: float) -> None:
        """As `_frames`, of a message that has begun."""
        started_ns = time.time_ns()
        self._running_until = lone.received_at + allowed
        self._running = ((lone.sequence, lone.step, lone.layer),)
        try:
            lone.compute()
            with self._lock:
                late, self._running = self._running is None, None
                if not late:
                    self._connection.send(pack_answers((lone.answer(),), time.monotonic_ns()))
        finally:
            self._running = None
            lone.end(started_ns)

    def _attach(self, token: bytes) -> None:
        if len(self._attachments) >= MAX_ATTACHED:
            message = f"{MAX_ATTACHED} sessions are attached to this channel"
            raise BrokenChannelError(CoreError(Reason.QUEUE_FULL, message, {"bound": str(MAX_ATTACHED)}))
        session, next_token = self._claim(token)
        self._attachments.append(Attachment.of(session, self._office.boot_id))
        self._lone = None
        assert self._rings is not None
        attached = wire.Attached(len(self._attachments) - 1, next_token, self._rings.size)
        self._connection.send(wire.pack_attached(wire.Kind.ATTACHED, attached, time.monotonic_ns()))

    # --- parts -----------------------------------------------------------------------------------------

    def _claim(self, token: bytes) -> tuple[Session, bytes]:
        claiming = self._office.attach(token)
        try:
            return claiming.result(_ATTACH_SECONDS)
        except CoreError as error:
            raise BrokenChannelError(error) from None
        except TimeoutError:
            # Not cancelled: a claim that has just been made would be lost, and the session with it.
            claiming.add_done_callback(self._let_go)
            raise BrokenChannelError(CoreError(Reason.DEADLINE, "the agent did not attach in time")) from None

    def _let_go(self, claimed: Future[tuple[Session, bytes]]) -> None:
        """Of a claim that came after its channel had given up."""
        if not claimed.cancelled() and claimed.exception() is None:
            self._office.release(claimed.result()[0])

    def _header(self, size: int) -> tuple[wire.Kind, int, int]:
        if size > len(self._buffer):
            raise _malformed(f"length: {size} bytes, at most {len(self._buffer)} are a request")
        return wire.read_header(self._buffer, size)

    def _receive_with_descriptors(self) -> tuple[int, list[int]]:
        """The first message with what came along. The kernel closes what a later one brings."""
        room = socket.CMSG_SPACE(_DESCRIPTORS * 4)
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_TRUNC
        try:
            size, control, told, _ = self._connection.recvmsg_into([self._buffer], room, flags)
        except BlockingIOError:
            message = f"no HELLO within {HANDSHAKE_SECONDS:g} s"
            raise BrokenChannelError(CoreError(Reason.DEADLINE, message)) from None
        descriptors: list[int] = []
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                descriptors.extend(found)
        if size == 0 or told & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            if size == 0:
                raise ConnectionResetError(errno.ECONNRESET, "the peer left before HELLO")
            raise _malformed(f"over {_DESCRIPTORS} descriptors came with HELLO, one was due")
        return size, descriptors

    def _timeout(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        value = struct.pack("@qq", whole, max(1, int((seconds - whole) * 1_000_000)))
        self._connection.setsockopt(socket.SOL_SOCKET, option, value)

    def _close(self, why: CoreError | None) -> None:
        if why is not None:
            with contextlib.suppress(OSError):
                ended = pack_ended(to_detail(why), time.monotonic_ns())
                self._connection.send(ended, socket.MSG_DONTWAIT)
        try:
            with self._lock:
                self._connection.close()
            if self._rings is not None:
                self._rings.close()
        finally:
            # Whatever cannot be closed: a session that stays claimed could never be attached again.
            for attachment in self._attachments:
                self._office.release(attachment.session)


def _malformed(message: str) -> BrokenChannelError:
    return BrokenChannelError(CoreError(Reason.FRAME_INVALID, message))
