"""One decode frame alone on a channel: read, computed and answered with what is kept of its session.

Why it exists: a token asks once for each layer, and a frame's rows have gone through the processor's caches
between two of them, so that what a frame costs is above all how much of this process it touches. It refuses
nothing before the engine does: a message of any other kind, and a frame that would be refused, is left as it
came to the general way (`frames`), which says why. It knows no socket.
"""

from __future__ import annotations

import logging

import numpy as np

from kvtier.local.frames import LONE_MESSAGE, LONE_MESSAGE_IS
from kvtier.local.receipts import refusal
from kvtier_agent.cacheframes import DEFECT
from kvtier_agent.cachesession import FrameAnswer, FrameWork
from kvtier_agent.convert import packed_answer
from kvtier_agent.engine_port import FrameInput, FrameRoom, MakesRooms
from kvtier_agent.errors import to_detail
from kvtier_agent.localchannel.frames import Attachment, FrameServer, observe
from kvtier_agent.localchannel.rings import FLOAT_BYTES, Rings
from kvtier_core.errors import CoreError, Reason

log = logging.getLogger(__name__)
_unpack = LONE_MESSAGE.unpack_from


class LoneFrames:
    """Of a channel's first session; frames of it come one after the other."""

    def __init__(
        self,
        server: FrameServer,
        attachment: Attachment,
        rings: Rings,
    ) -> None:
        self._desk, self._packer, self._rings = server.desk, server.packer, rings
        self._evidence = server.evidence(attachment.session.host)
        self._attachment, self._session = attachment, attachment.session
        self._name = attachment.session.handle.session_id
        host = attachment.session.host
        self._attend, self._open = host.frames.attend_one_now, host.sessions
        self._rows = attachment.row_floats
        self._floats = 2 * attachment.row_floats + attachment.query_floats
        self._size = FLOAT_BYTES * self._floats
        # The message's beginning, attachment, extra bytes, rows, queries, generation and tags.
        self._is = (
            LONE_MESSAGE_IS,
            0,
            0,
            1,
            1,
            attachment.session.handle.generation,
            attachment.session_tag,
            attachment.boot_tag,
        )
        self._start = 0
        self.sequence = self.step = self.layer = 0
        self.received_at = 0.0
        # What an engine's room holds is read until the frame is answered, where no candidate serves.
        self._assignment = attachment.session.assignment
        engine = host.runner.engine
        made = engine.room() if self._assignment.epoch == 0 and isinstance(engine, MakesRooms) else None
        self._refills = made is not None
        self._use(made or self._arrays())
        self._frame: FrameInput | None = None
        self._answer: FrameAnswer | None = None
        self._refused: CoreError | None = None

    def _arrays(self) -> FrameRoom:
        floats, row = np.empty(self._floats, np.float32), self._rows
        return FrameRoom(floats, floats[:row], floats[row : 2 * row], floats[2 * row :])

    def _use(self, room: FrameRoom) -> None:
        """For the next frame."""
        self._room, self._memory = room, room.floats.data.cast("B")

    def begin(self, message: bytearray, now: float, clock_offset: int) -> float | None:
        """Takes a message of this kind, and the frame's place on the agent; seconds that it may take. None:
        it is the general way's, and nothing has happened. now: when it came; clock_offset: of the peer's
        clock to ours, ns."""
        (
            start,
            clock_ns,
            index,
            flags,
            extra,
            layer,
            rows,
            queries,
            generation,
            step,
            first_row,
            first_query,
            committed,
            deadline_ms,
            epoch,
            sequence,
            offset,
            session_tag,
            boot_tag,
        ) = _unpack(message)
        if (start, index, extra, rows, queries, generation, session_tag, boot_tag) != self._is:
            return None
        rings, desk = self._rings, self._desk
        if (
            flags > 1
            or not rings.has(offset, self._size)
            or not 0 <= layer < self._attachment.layers
            or (step < 0 or first_row < 0 or first_query < 0)
            or (committed < 0 or deadline_ms < 0 or epoch < 0)
            or self._open.get(self._name) is not self._session
            or self._session.assignment is not self._assignment
        ):
            return None
        longest = desk.node.limits.frame_deadline_seconds
        # As of any frame: its time counts from when it was sent, and no lie of the peer makes it longer.
        sent = (clock_ns + clock_offset) / 1e9
        earliest = now - 2 * longest
        received_at = sent if earliest <= sent <= now else earliest if sent < earliest else now
        allowed: float = deadline_ms / 1000
        if not deadline_ms or allowed > longest:
            allowed = longest
        if now - received_at > allowed or desk.frames.enter() is not None:
            return None
        # First of all: from here on the engine's process cannot change what is checked.
        room = self._room
        rings.copy_to(self._memory, offset)
        self._frame = FrameInput(
            self._name,
            generation,
            step,
            layer,
            first_row,
            room.k,
            room.v,
            first_query,
            room.q,
            committed,
            received_at + allowed,
            epoch,
            flags == 1,
            None,
            True,
        )
        self.received_at, self._start = received_at, offset
        self.sequence, self.step, self.layer = sequence, step, layer
        self._answer = self._refused = None
        return allowed

    def compute(self) -> None:
        """Never raises: a defect is an INTERNAL of the frame."""
        frame = self._frame
        assert frame is not None
        try:
            answer = self._attend(FrameWork(self._session, frame, 1), self._evidence)
        except CoreError as error:
            answer = error
        except Exception:
            log.exception("frame failed")
            answer = CoreError(Reason.INTERNAL, DEFECT)
        if isinstance(answer, CoreError):
            self._refused = answer
        else:
            self._answer = answer

    def answer(self) -> bytes:
        """Writes the output to its ring and returns the record."""
        answer = self._answer
        if answer is None:
            assert self._refused is not None
            return refusal(self.sequence, self.step, self.layer, to_detail(self._refused))
        out = answer.result.out
        self._rings.write(self._start, out)
        return packed_answer(self._packer, self.sequence, self.step, self.layer, len(out), answer)

    def end(self, started_ns: int) -> None:
        """After the answer has left."""
        self._desk.frames.leave()
        self._frame = None
        answer, refused = self._answer, self._refused
        self._answer = None
        if not self._refills:
            self._use(self._arrays())
        observe(self._desk, self._session, self.step, answer, refused, started_ns, self.received_at)
