"""Several sessions whose frames travel together: one message for each layer of a step.

It exists so that a batch costs one crossing of the wire and not one for each sequence. Every sequence stays a
session of its own, with its own identity, rows, receipts and end. It knows no model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor

from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.grpcwire import FRAME_OVERHEAD, MAX_MESSAGE_BYTES
from kvtier_client.pipe import AttendPipe, Part
from kvtier_client.session import AttentionSession, SessionRequest, note
from kvtier_client.wire import WireName
from kvtier_core.errors import Reason


class AttentionBatch:
    """Opens a session for each request and owns them. Not thread-safe. Close it, or use it as a context
    manager. `sessions` are in the order of the requests."""

    def __init__(
        self,
        client: AttentionClient,
        requests: Sequence[SessionRequest],
        *,
        deadline_seconds: float = 30.0,
        grace_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """deadline_seconds, grace_seconds: of each frame, as in AttentionSession."""
        if not requests:
            raise KvtierError(Reason.BAD_ARGUMENT, "a batch of no session")
        self._seconds, self._grace = deadline_seconds, grace_seconds
        self._wire_failed = False
        self.sessions: list[AttentionSession] = []
        try:
            for request in requests:
                opened = AttentionSession(
                    client,
                    request,
                    deadline_seconds=deadline_seconds,
                    grace_seconds=grace_seconds,
                    clock=clock,
                    piped=False,
                )
                self.sessions.append(opened)
            wanted = sum(session.block_bytes for session in self.sessions)
            most = MAX_MESSAGE_BYTES - FRAME_OVERHEAD
            self._pipe = AttendPipe(client, self.sessions, client.transport, min(wanted, most))
        except BaseException:
            for session in self.sessions:
                with contextlib.suppress(KvtierError):
                    session.close()
            raise

    @property
    def transport(self) -> WireName:
        """What carries the frames now."""
        return self._pipe.transport

    @property
    def why_grpc(self) -> str:
        """Why it is not the local channel; empty when it is."""
        return self._pipe.why_grpc

    def attend(self, parts: Sequence[Part]) -> list[Tensor]:
        """The outputs of one layer for parts of different sessions (AttentionSession.part), [N, Hq, d] each.

        Raises the first KvtierError; a session whose frame was refused has it as `failure`, and the others'
        rows are in. When the wire itself fails no session can go on before its rows are taken back
        (`truncate`).
        """
        try:
            if self._wire_failed:
                # Parts come of sessions that can go on; what failed them all before does not.
                self._pipe.renew()
                self._wire_failed = False
            self._pipe.attend(parts, self._seconds, self._grace, note)
        except KvtierError as error:
            self._wire_failed = True
            for session in self.sessions:
                session.failure = session.failure or error
            raise
        outputs = []
        first: KvtierError | None = None
        for part in parts:
            if part.failure is not None:
                assert isinstance(part.sender, AttentionSession)
                part.sender.failure = part.failure
                first = first or part.failure
            elif part.out is not None:
                outputs.append(part.out)
        if first is not None:
            raise first
        return outputs

    def close(self) -> int:
        """Ends the wire and every session; rows released. Idempotent. Raises the first failure, after all
        were tried."""
        self._pipe.close()
        released, first = 0, None
        for session in self.sessions:
            try:
                released += session.close()
            except KvtierError as error:
                first = first or error
        if first is not None:
            raise first
        return released

    def __enter__(self) -> AttentionBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except KvtierError:
            # What ended the block matters more than an agent that is gone with its sessions.
            if error is None:
                raise
