"""Edits of a session's history from the engine's side: fork, truncate, drop, reposition.

They go as calls of their own beside the frames; each names the position epoch that this end knows, and what
was meant for other positions is refused. It must not know a model, nor keep a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.v1 import attention_pb2
from kvtier_client.errors import KvtierError
from kvtier_core.errors import Reason


@dataclass(frozen=True)
class Edited:
    """changed: False when nothing was asked for. next_position: where the session's next row stands; rows:
    that a query sees; chunks: that the session holds, over all layers."""

    changed: bool
    position_epoch: int
    next_position: int
    rows: int
    chunks: int


class Edits(Protocol):
    """Sends edits: the client."""

    def edit_session(
        self, request: attention_pb2.EditSessionRequest
    ) -> attention_pb2.EditSessionResponse: ...


@dataclass(frozen=True)
class EditTarget:
    """The session that is edited."""

    opened: attention_pb2.OpenSessionResponse
    tenant: str
    position_epoch: int
    deadline_seconds: float


def truncate(edits: Edits, target: EditTarget, to: int, anew: bool = False) -> Edited:
    """Rows at positions `to` and beyond are gone; also in the middle of a step, which it ends. anew: a change
    also where no row goes."""
    request = _request(target)
    request.truncate.to = to
    request.truncate.anew = anew
    return _edited(edits.edit_session(request))


def drop(edits: Edits, target: EditTarget, ranges: Sequence[tuple[int, int]]) -> Edited:
    """Rows at the half-open ranges of positions are seen no more, for good; no row moves."""
    request = _request(target)
    request.drop.SetInParent()
    for first, last in ranges:
        request.drop.ranges.add(first=first, last=last)
    return _edited(edits.edit_session(request))


def reposition(
    edits: Edits, target: EditTarget, moves: Sequence[tuple[int, int, int]] | None = None
) -> Edited:
    """Rows at [first, last) stand at `to` onwards, for each (first, last, to); None closes every gap. The
    next row stands behind the last that is seen."""
    request = _request(target)
    request.reposition.close_gaps = moves is None
    for first, last, to in moves or ():
        request.reposition.moves.add(first=first, last=last, to=to)
    return _edited(edits.edit_session(request))


def fork(
    edits: Edits, target: EditTarget, *, traceparent: str = "", local_channel_version: int = 0
) -> tuple[attention_pb2.OpenSessionResponse, Edited]:
    """Another session of the same rows: as it was opened, and where it stands."""
    request = _request(target)
    request.fork.SetInParent()
    request.fork.traceparent = traceparent
    request.fork.local_channel_version = local_channel_version
    answer = edits.edit_session(request)
    if not answer.HasField("child"):
        raise KvtierError(Reason.INTERNAL, "a fork was answered without its child")
    return answer.child, _edited(answer)


def _request(target: EditTarget) -> attention_pb2.EditSessionRequest:
    return attention_pb2.EditSessionRequest(
        session_id=target.opened.session_id,
        generation=target.opened.generation,
        boot_id=target.opened.boot_id,
        tenant=target.tenant,
        position_epoch=target.position_epoch,
        deadline_ms=max(1, int(target.deadline_seconds * 1000)),
    )


def _edited(answer: attention_pb2.EditSessionResponse) -> Edited:
    return Edited(
        changed=answer.changed,
        position_epoch=answer.position_epoch,
        next_position=answer.next_position,
        rows=answer.rows,
        chunks=answer.chunks,
    )


class SessionEdits(ABC):
    """The edits of an open session, for who holds it. After one its next frames state the new epoch."""

    failure: KvtierError | None
    position_epoch: int

    @abstractmethod
    def _edit_target(self) -> EditTarget:
        """The session as it is now; raises what ended it."""

    @abstractmethod
    def _editor(self) -> Edits:
        """Who sends edits."""

    @abstractmethod
    def _go_on(self) -> None:
        """Frames that were sent before an edit are answered by nobody any more."""

    def truncate(self, to: int) -> Edited:
        """Rows at positions `to` and beyond are gone; the next row stands at `to`. Also what a step that
        failed left is, half-way or before its first row was taken: after that the session goes on."""
        edited = truncate(self._editor(), self._edit_target(), to, anew=self.failure is not None)
        if edited.changed and self.failure is not None:
            self.failure = None
            self._go_on()
        return self._noted(edited)

    def drop(self, ranges: Sequence[tuple[int, int]]) -> Edited:
        """Rows at the half-open ranges of positions are seen no more, for good; no row moves."""
        return self._noted(drop(self._editor(), self._edit_target(), ranges))

    def reposition(self, moves: Sequence[tuple[int, int, int]] | None = None) -> Edited:
        """Rows at [first, last) stand at `to` onwards, for each (first, last, to); None closes every gap."""
        return self._noted(reposition(self._editor(), self._edit_target(), moves))

    def _noted(self, edited: Edited) -> Edited:
        self.position_epoch = edited.position_epoch
        return edited
