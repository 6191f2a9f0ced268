"""Frames of one or several sessions over one wire: blocks, order, a lost connection, and which wire it is.

It exists between a session and the wires: a prefill is cut into blocks, a few messages travel ahead of their
answers, and what a lost connection did not answer is asked again over another. It must not know how bytes
travel, nor a model.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvtier_client.errors import KvtierError
from kvtier_client.grpcwire import GrpcWire
from kvtier_client.localwire import LocalWire
from kvtier_client.loneframes import LoneFrames
from kvtier_client.rowevidence import RowEvidence
from kvtier_client.stream import AttendManyStream, AttendStream
from kvtier_client.wire import Answer, Frame, Sender, Wire, WireName
from kvtier_core.errors import Reason

log = logging.getLogger(__name__)
# How often one attend goes on over a new wire when its own is lost.
RECONNECTS = 2
# auto: the local channel where the agent offers one and it can be reached, else gRPC, and it says so.
Transport = Literal["auto", "local", "grpc"]


class Streams(Protocol):
    """Opens gRPC streams: the client."""

    def attend(self) -> AttendStream: ...

    def attend_many(self) -> AttendManyStream: ...


@dataclass(slots=True)
class Part:
    """What one session asks in one layer of one step; `out` and the blocks of its queries are filled in.

    q [N, Hq, d], k, v [N, Hk, d] float32, of positions [position, position + N). evidence: its states are of
    all N queries.
    """

    sender: Sender
    step: int
    layer: int
    position: int
    q: Tensor
    k: Tensor
    v: Tensor
    committed: int
    block: int
    next_layer_follows: bool = False
    evidence: RowEvidence | None = None
    out: Tensor | None = None
    failure: KvtierError | None = None

    def frame(self, lo: int, deadline_ms: int) -> Frame:
        """The block of queries that begins at `lo`, with its rows."""
        n = self.q.shape[0]
        hi = min(n, lo + self.block)
        q, k, v = self.q, self.k, self.v
        # After a block of several the same layer comes again.
        follows = self.next_layer_follows and hi - lo == n
        evidence = self.evidence
        if hi - lo != n:
            q, k, v = q[lo:hi], k[lo:hi], v[lo:hi]
            evidence = None if evidence is None else _of_block(evidence, lo, hi)
        return Frame(
            self.sender,
            self.step,
            self.layer,
            self.position + lo,
            q,
            k,
            v,
            self.committed,
            deadline_ms,
            follows,
            evidence,
        )

    def take(self, frame: Frame, answer: Answer) -> None:
        n = self.q.shape[0]
        if frame.q.shape[0] == n:
            self.out = answer.out
            return
        if self.out is None:
            self.out = torch.empty(self.q.shape, dtype=torch.float32)
        lo = frame.position - self.position
        self.out[lo : lo + frame.q.shape[0]].copy_(answer.out)


def deadline_ms_of(seconds: float) -> int:
    """A deadline as frames state it."""
    return max(1, int(seconds * 1000))


def _of_block(evidence: RowEvidence, lo: int, hi: int) -> RowEvidence | None:
    """What goes with queries [lo, hi): their states, and with the first block the surprisals."""
    hidden = None if evidence.hidden is None else evidence.hidden[lo:hi]
    surprisal = None if lo else evidence.surprisal
    if hidden is None and surprisal is None:
        return None
    return RowEvidence(hidden, evidence.hidden_layer, surprisal, evidence.surprisal_first)


Noted = Callable[[Part, Answer], None]
_Message = list[tuple[Part, Frame]]


class AttendPipe:
    """The frames' way of one or several sessions. Not thread-safe.

    `transport` names the wire that carries them now, and `why_grpc` why it is not the local channel.
    """

    def __init__(
        self, streams: Streams, senders: Sequence[Sender], transport: Transport, message_bytes: int
    ) -> None:
        """message_bytes: of the tensors of one message, at most. Raises KvtierError when a local channel is
        demanded and there is none."""
        self._streams = streams
        self._senders = list(senders)
        self._policy = transport
        self._message_bytes = message_bytes
        self._tokens = {one.opened.session_id: one.opened.local_channel.token for one in senders}
        self._reconnects_left = 0
        self.why_grpc = ""
        self._wire = self._connect()

    @property
    def transport(self) -> WireName:
        return self._wire.name

    @property
    def wire(self) -> Wire:
        return self._wire

    @property
    def lone(self) -> LoneFrames | None:
        """What carries a session's decode frames, if the wire has a way of their own."""
        return self._wire.lone

    def attend(self, parts: Sequence[Part], seconds: float, grace: float, noted: Noted) -> None:
        """Fills in each part's `out` or its `failure`; one that fails harms no other. seconds: of each frame,
        at the agent; grace: how much longer its answer is waited for. noted: told of each answer. Raises
        KvtierError when the wire fails: then no part can go on."""
        if self._wire.left_behind:
            # By a call that was interrupted: this one would take that one's answers for its own.
            self.renew()
        waiting: deque[_Message] = deque()
        self._reconnects_left = RECONNECTS
        timeout = seconds + grace
        deadline_ms = deadline_ms_of(seconds)
        if len(parts) == 1 and parts[0].q.shape[0] <= parts[0].block:
            messages: Iterable[_Message] = ([(parts[0], parts[0].frame(0, deadline_ms))],)
        else:
            messages = self._messages(parts, deadline_ms)
        for message in messages:
            frames = [frame for _, frame in message]
            while waiting and not self._wire.has_room(frames):
                self._collect(waiting, timeout, noted)
            waiting.append(message)
            try:
                self._wire.send(frames)
            except KvtierError:
                if not self._wire.lost:
                    raise
                # It goes out again with those that wait before it.
                self._collect(waiting, timeout, noted)
        while waiting:
            self._collect(waiting, timeout, noted)

    def renew(self) -> None:
        """Goes on over another wire, with nothing on its way."""
        self._wire.close()
        self._wire = self._connect()

    def close(self) -> None:
        """Never raises."""
        self._wire.close()

    def _messages(self, parts: Sequence[Part], deadline_ms: int) -> Iterator[_Message]:
        """Round by round a block of each session, in as few messages as the wire's bounds allow."""
        rounds = max(-(-part.q.shape[0] // part.block) for part in parts)
        for number in range(rounds):
            message: _Message = []
            size = 0
            for part in parts:
                lo = number * part.block
                if lo >= part.q.shape[0] or part.failure is not None:
                    continue
                frame = part.frame(lo, deadline_ms)
                full = size + frame.size > self._message_bytes
                if message and (full or len(message) == self._wire.max_frames):
                    yield message
                    message, size = [], 0
                message.append((part, frame))
                size += frame.size
            if message:
                yield message

    def _collect(self, waiting: deque[_Message], timeout: float, noted: Noted) -> None:
        answers = self._receive(waiting, timeout)
        for (part, frame), answer in zip(waiting.popleft(), answers, strict=True):
            if isinstance(answer, KvtierError):
                # A refused block ends its part: what follows it cannot continue the rows.
                part.failure = part.failure or answer
            elif part.failure is None:
                part.take(frame, answer)
                noted(part, answer)

    def _receive(self, waiting: Sequence[_Message], timeout: float) -> list[Answer | KvtierError]:
        """The answers to the first of the messages that wait. When the connection is lost they are asked
        again over another: the agent knows rows that it has by their bytes, and takes each once."""
        while True:
            try:
                return self._wire.receive(timeout)
            except KvtierError:
                if not self._wire.lost or self._reconnects_left == 0:
                    raise
                self._reconnects_left -= 1
                self._wire.close()
                self._wire = self._connect()
                for message in waiting:
                    self._wire.send([frame for _, frame in message])

    def _connect(self) -> Wire:
        if self._policy == "grpc":
            self.why_grpc = "asked for"
            return self._grpc()
        try:
            return self._local()
        except KvtierError as error:
            if self._policy == "local":
                raise
            # Exactness is the same on both; only a person who measures is surprised.
            self.why_grpc = str(error)
            log.warning("frames travel over gRPC: %s", error)
            return self._grpc()

    def _grpc(self) -> Wire:
        several = len(self._senders) > 1
        return GrpcWire(self._streams.attend_many() if several else self._streams.attend())

    def _local(self) -> Wire:
        for sender in self._senders:
            opened = sender.opened
            if not opened.HasField("local_channel"):
                refused = opened.local_channel_refused or "the agent offers no local channel"
                raise KvtierError(Reason.UNSUPPORTED, refused)
        offer = self._senders[0].opened.local_channel
        return LocalWire(self._senders, self._tokens, offer, self._message_bytes)
