"""One message of frames: checked, computed in the calling thread, answered. It knows no socket.

The same checks in the same order as on a gRPC stream, with the same reasons. What no honest engine sends ends
the channel: BrokenChannelError.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvtier.local.frames import EvidenceRecord, FrameRecord, evidence_place, spans_overlap, tag
from kvtier.local.receipts import AnswerPacker, refusal
from kvtier.v1 import attention_pb2
from kvtier_agent.attendframes import FrameDesk
from kvtier_agent.cacheframes import DEFECT
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import FrameAnswer, FrameWork, Session
from kvtier_agent.convert import check_frame_numbers, packed_answer
from kvtier_agent.engine_port import FrameInput
from kvtier_agent.errors import to_detail
from kvtier_agent.evidence_port import FrameEvidence
from kvtier_agent.localchannel.rings import FLOAT_BYTES, Rings
from kvtier_agent.localchannel.tokens import is_open
from kvtier_agent.rowevidence import RowEvidence, checked
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm

log = logging.getLogger(__name__)
DOUBLE_BYTES = 8
_EvidenceOf = Callable[[CacheHost], FrameEvidence]


class BrokenChannelError(Exception):
    """The peer is none of ours or has lost its mind; the channel ends with this refusal."""

    def __init__(self, refused: CoreError) -> None:
        super().__init__(str(refused))
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Attachment:
    """A session of a channel, with what each of its frames needs. Floats of a row of K, of a query and of a
    hidden state."""

    session: Session
    session_tag: bytes
    boot_tag: bytes
    row_floats: int
    query_floats: int
    layers: int
    hidden_floats: int = 0

    @classmethod
    def of(cls, session: Session, boot_id: str) -> Attachment:
        g = session.host.manifest.model.geometry
        return cls(
            session=session,
            session_tag=tag(session.handle.session_id),
            boot_tag=tag(boot_id),
            row_floats=g.kv_heads * g.head_dim,
            query_floats=g.query_heads * g.head_dim,
            layers=g.layers,
            hidden_floats=0 if session.handle.asked is None else session.handle.asked.hidden_size,
        )


@dataclass(slots=True)
class Turn:
    """A frame on its way: where its tensors lie, what became of it. Floats of all its rows of K, and of K, V
    and queries; surprisal: the first byte of its surprisals, of the frame's."""

    record: FrameRecord
    attachment: Attachment
    start: int
    end: int
    rows_floats: int
    frame_floats: int
    surprisal: int = 0
    entered: bool = False
    refused: CoreError | None = None
    answer: FrameAnswer | None = None


class FrameServer:
    """Answers the messages of one channel, one after the other."""

    def __init__(self, desk: FrameDesk, evidence_of: _EvidenceOf) -> None:
        """evidence_of: where what is seen of a cache's frames is told from the channel's thread."""
        self.desk = desk
        self._evidence_of = evidence_of
        self.packer = AnswerPacker()
        self._host: CacheHost | None = None
        self._told: FrameEvidence | None = None

    def turns(
        self, records: Sequence[FrameRecord], attachments: Sequence[Attachment], rings: Rings
    ) -> list[Turn]:
        """The frames of a message with their places in the rings; BrokenChannelError when a place is none."""
        found = []
        for record in records:
            if record.attachment >= len(attachments):
                message = f"attachment {record.attachment} of {len(attachments)}"
                raise BrokenChannelError(CoreError(Reason.FRAME_INVALID, message))
            attachment = attachments[record.attachment]
            rows_floats = record.rows * attachment.row_floats
            floats = 2 * rows_floats + record.queries * attachment.query_floats
            size, surprisal = FLOAT_BYTES * floats, 0
            if record.evidence is not None:
                states = FLOAT_BYTES * record.evidence.hidden * attachment.hidden_floats
                surprisal = evidence_place(size, states)
                size = surprisal + DOUBLE_BYTES * record.evidence.surprisals
            try:
                start, end = rings.span(record.offset, size)
            except CoreError as error:
                raise BrokenChannelError(error) from None
            found.append(Turn(record, attachment, start, end, rows_floats, floats, surprisal))
        if len(found) > 1 and spans_overlap((turn.start, turn.end) for turn in found):
            message = "offset: frames of one message overlap"
            raise BrokenChannelError(CoreError(Reason.FRAME_INVALID, message))
        return found

    def compute(self, turns: Sequence[Turn], rings: Rings, received_at: float) -> None:
        """Sets the answer or the refusal of each. Never raises: a defect is an INTERNAL of its frames."""
        if len(turns) == 1:
            self._compute_one(turns[0], rings, received_at)
            return
        works: dict[CacheHost, list[tuple[Turn, FrameWork]]] = {}
        sessions: set[str] = set()
        for turn in turns:
            try:
                work = self._work(turn, rings, received_at, sessions)
            except CoreError as error:
                turn.refused = error
                continue
            except Exception:
                log.exception("frame failed")
                turn.refused = CoreError(Reason.INTERNAL, DEFECT)
                continue
            works.setdefault(work.session.host, []).append((turn, work))
        for host, of_host in works.items():
            answers: Sequence[FrameAnswer | CoreError]
            try:
                answers = host.frames.attend_now([work for _, work in of_host], self.evidence(host))
            except Exception:
                log.exception("frames failed")
                answers = [CoreError(Reason.INTERNAL, DEFECT)] * len(of_host)
            for (turn, _), answer in zip(of_host, answers, strict=True):
                if isinstance(answer, CoreError):
                    turn.refused = answer
                else:
                    turn.answer = answer

    def _compute_one(self, turn: Turn, rings: Rings, received_at: float) -> None:
        """What a decode step of one sequence sends."""
        try:
            work = self._work(turn, rings, received_at, set())
            host = work.session.host
            answer = host.frames.attend_one_now(work, self.evidence(host))
        except CoreError as error:
            answer = error
        except Exception:
            log.exception("frame failed")
            answer = CoreError(Reason.INTERNAL, DEFECT)
        if isinstance(answer, CoreError):
            turn.refused = answer
        else:
            turn.answer = answer

    def evidence(self, host: CacheHost) -> FrameEvidence:
        """Of the cache that the last frames were of: a channel hardly ever has another."""
        if host is not self._host or self._told is None:
            self._host, self._told = host, self._evidence_of(host)
        return self._told

    def _work(self, turn: Turn, rings: Rings, received_at: float, sessions: set[str]) -> FrameWork:
        desk, record, attachment = self.desk, turn.record, turn.attachment
        refused = desk.frames.enter()
        if refused is not None:
            raise refused
        turn.entered = True
        # First of all: from here on the engine's process cannot change what is checked.
        tensors = rings.copy_out(turn.start, turn.end)
        session = attachment.session
        name = session.handle.session_id
        if record.boot_tag != attachment.boot_tag:
            desk.node.check_boot("of another boot")
        if record.session_tag != attachment.session_tag or not is_open(session):
            raise CoreError(Reason.SESSION_UNKNOWN, "this agent holds no such session")
        if record.generation != session.handle.generation:
            message = f"generation {record.generation} is not {session.handle.generation}"
            raise CoreError(Reason.GENERATION_STALE, message)
        if name in sessions:
            raise CoreError(Reason.BAD_ARGUMENT, "one message carries one frame of a session")
        sessions.add(name)
        deadline = desk.deadline(received_at, record.deadline_ms)
        if not 0 <= record.layer < attachment.layers or record.lowest < 0:
            check_frame_numbers(record, session.host.manifest)
        if record.extra:
            _read_extra(record.extra)
        if not record.queries:
            raise CoreError(Reason.FRAME_INVALID, "q is empty")
        rows = turn.rows_floats
        frame = FrameInput(
            session_id=name,
            generation=record.generation,
            step=record.step,
            layer=record.layer,
            first_row_position=record.first_row_position,
            k=tensors[:rows],
            v=tensors[rows : 2 * rows],
            first_query_position=record.first_query_position,
            q=tensors[2 * rows : turn.frame_floats],
            committed_frontier=record.committed_frontier,
            deadline=deadline,
            position_epoch=record.position_epoch,
            next_layer_follows=record.next_layer_follows,
            promise_later=True,
            evidence=None if record.evidence is None else _evidence(turn, record.evidence, tensors),
        )
        return FrameWork(session, frame, record.queries)

    def answer(self, turn: Turn, rings: Rings) -> bytes:
        """Writes the output to its ring and returns the record."""
        record = turn.record
        if turn.answer is None:
            assert turn.refused is not None
            return refusal(record.sequence, record.step, record.layer, to_detail(turn.refused))
        out = turn.answer.result.out
        rings.write(turn.start, out)
        return packed_answer(self.packer, record.sequence, record.step, record.layer, len(out), turn.answer)

    def observe(self, turn: Turn, received_at: float, started_ns: int) -> None:
        """After the answer has left: gives the frame's place back, begins what was promised, and measures."""
        if turn.entered:
            turn.entered = False
            self.desk.frames.leave()
        observe(
            self.desk,
            turn.attachment.session,
            turn.record.step,
            turn.answer,
            turn.refused,
            started_ns,
            received_at,
        )


def observe(
    desk: FrameDesk,
    session: Session,
    step: int,
    answer: FrameAnswer | None,
    refused: CoreError | None,
    started_ns: int,
    received_at: float,
) -> None:
    """After a frame's answer or refusal has left: begins what was promised, and measures."""
    code, arm = "OK", ServedArm.BASELINE
    if answer is not None:
        _go_on(answer)
        arm = answer.arm
        desk.observe(session, step, answer, started_ns)
    elif refused is not None:
        code = refused.reason.name
    desk.metrics.frame_seconds[arm, code].observe(time.monotonic() - received_at)


def _go_on(answer: FrameAnswer) -> None:
    """Whatever goes wrong with a promise costs no answer."""
    afterwards = answer.result.afterwards
    if afterwards is not None:
        try:
            afterwards()
        except Exception:
            log.exception("a promise failed")


def _evidence(turn: Turn, given: EvidenceRecord, tensors: NDArray[np.float32]) -> RowEvidence:
    """Of a frame whose numbers were copied out; refuses as gRPC's."""
    width = turn.attachment.hidden_floats
    if given.hidden and not width:
        message = "evidence.hidden was not asked for"
        raise CoreError(Reason.FRAME_INVALID, message, {"field": "evidence.hidden"})
    hidden = turn.frame_floats + given.hidden * width
    return checked(
        turn.attachment.session.handle.asked,
        turn.record.layer,
        turn.record.queries,
        hidden=tensors[turn.frame_floats : hidden],
        hidden_layer=given.hidden_layer,
        surprisal=tensors[turn.surprisal // FLOAT_BYTES :].view(np.float64).copy(),
        surprisal_first=given.surprisal_first,
    )


def _read_extra(extra: bytes) -> attention_pb2.AttendFrame:
    """Fields of AttendFrame that the record has no place for; FRAME_INVALID."""
    try:
        return attention_pb2.AttendFrame.FromString(extra)
    except DecodeError:
        raise CoreError(Reason.FRAME_INVALID, "extra bytes are no frame") from None
