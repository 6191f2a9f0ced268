"""What every attention frame goes through, whatever brought it.

One stream a session, a place, a deadline, and what is observed of its answer. It knows no message and no
socket.
"""

from __future__ import annotations

import asyncio
import threading
import time

from kvtier_agent.cachesession import FrameAnswer, Session
from kvtier_agent.node import Node
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.errors import CoreError, Reason

TAKEOVER_SECONDS = 1.0
# An engine looks at a frame's deadline itself, between chunks; only one that hangs is later than this.
ENGINE_GRACE_SECONDS = 5.0
HANGS = "the engine does not answer; it may still take the frame's rows, so send it again unchanged"


class FrameCount:
    """Attention frames of this agent that are queued or running; bounded, and looked at by a drain. Counted
    from any thread."""

    def __init__(self, bound: int, metrics: Metrics) -> None:
        self._bound = bound
        self._lock = threading.Lock()
        self.count = 0
        metrics.frames_in_flight.set_function(lambda: self.count)

    def enter(self) -> CoreError | None:
        """Takes one place, or says why there is none."""
        with self._lock:
            if self.count >= self._bound:
                return CoreError(
                    Reason.QUEUE_FULL,
                    f"{self.count} frames are in flight on this agent",
                    {"bound": str(self._bound)},
                )
            self.count += 1
        return None

    def leave(self) -> None:
        with self._lock:
            self.count -= 1


class FrameDesk:
    """Shared by the streams and the local channels of one agent."""

    def __init__(self, node: Node, telemetry: Telemetry, metrics: Metrics, frames: FrameCount) -> None:
        self.node = node
        self.frames = frames
        self.metrics = metrics
        self._telemetry = telemetry

    @staticmethod
    def takeover() -> float:
        """Until when claims that begin now may wait, on the event loop's clock."""
        return asyncio.get_running_loop().time() + TAKEOVER_SECONDS

    async def claim(self, session: Session, until: float) -> None:
        """Makes the session this stream's; one at a time. A client that lost its stream comes with another
        before this end has noticed, so the old one is given a moment: all sessions of a message the same one,
        from `takeover`. BAD_ARGUMENT."""
        try:
            async with asyncio.timeout_at(until):
                while session.streaming:
                    session.stream_ended.clear()
                    await session.stream_ended.wait()
        except TimeoutError:
            raise CoreError(Reason.BAD_ARGUMENT, "the session has another open stream") from None
        session.streaming = True

    def release(self, session: Session) -> None:
        """On the event loop."""
        session.streaming = False
        session.stream_ended.set()

    def deadline(self, received_at: float, deadline_ms: int) -> float:
        """When the engine stops, on time.monotonic; a frame that waited past it is refused right here."""
        allowed = self.node.limits.frame_deadline_seconds
        if deadline_ms:
            allowed = min(allowed, deadline_ms / 1000)
        waited = time.monotonic() - received_at
        if waited > allowed:
            message = f"the frame waited {waited:.3f} s, its deadline was {allowed:.3f} s"
            raise CoreError(Reason.DEADLINE, message)
        return received_at + allowed

    def observe(self, session: Session, step: int, answer: FrameAnswer, started_ns: int) -> None:
        """Of an answer, from any thread."""
        receipt = answer.result.receipt
        if receipt.stall_seconds:
            self.metrics.stall_seconds.inc(receipt.stall_seconds)
        if receipt.hidden_seconds:
            self.metrics.hidden_seconds.inc(receipt.hidden_seconds)
        for plan, reason in receipt.failed_plans:
            self.metrics.plan_failures.labels(plan, reason).inc()
        shared = receipt.shared_bytes_by_tier or {}
        for tier, size in receipt.bytes_by_tier.items():
            self.metrics.tier_read_bytes[tier,].inc(size - shared.get(tier, 0))
        if answer.compared_error is None:
            return
        self.metrics.compared_steps.inc()
        self._telemetry.step(
            session_traceparent=session.traceparent,
            rollout_traceparent=session.host.rollout_traceparent,
            start_ns=started_ns,
            attributes={
                "kvtier.step": step,
                "kvtier.arm": answer.arm.value,
                "kvtier.exactness": receipt.exactness.value,
                "kvtier.rows_attended": receipt.rows_attended,
                "kvtier.step_error": answer.compared_error,
                "kvtier.plan.published": receipt.plan_kind,
                "kvtier.plan.failed": ",".join(":".join(one) for one in receipt.failed_plans),
            },
            bytes_by_tier=receipt.bytes_by_tier,
            stall_seconds=receipt.stall_seconds,
        )
