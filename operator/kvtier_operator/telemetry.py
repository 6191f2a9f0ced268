"""Tracing: one trace per rollout attempt, with ids that any later operator derives again.

A span here is short and is emitted as it ends; a span that stays open for a rollout's days would be lost
with the process. A normal retry (a conflict, a lost leadership) is no error of a span. This module must not
know what a rollout does; it turns (uid, attempt) into ids. What records and sends spans is imported only for
somebody to send them to (`spans`).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvtier_operator.ports import AgentUnreachable, Conflict, NotLeader

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attributes = Mapping[str, str | int | float | bool]

QUIET_ERRORS: tuple[type[BaseException], ...] = (Conflict, NotLeader)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True)
class AttemptTrace:
    """Ids of one rollout attempt's trace: 128 and 64 bits, never zero."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """W3C Trace Context, version 00, sampled."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @property
    def context(self) -> Context:
        """A context whose current span is the attempt's root, as if it came from another process."""
        remote = SpanContext(self.trace_id, self.span_id, is_remote=True, trace_flags=TraceFlags(1))
        return trace.set_span_in_context(NonRecordingSpan(remote), Context())


def trace_context(uid: str, attempt: int) -> AttemptTrace:
    """The trace of attempt `attempt` of the KVRollout with this uid: SHA-256 of both, so that a restarted
    operator goes on in the same trace."""
    digest = hashlib.sha256(f"kvtier.dev/rollout-attempt/v1|{uid}|{attempt}".encode()).digest()
    return AttemptTrace(
        trace_id=int.from_bytes(digest[:16], "big") or 1, span_id=int.from_bytes(digest[16:24], "big") or 1
    )


def current_traceparent() -> str:
    """Of the current span, for gRPC metadata; empty when there is none."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


forced_ids: ContextVar[AttemptTrace | None] = ContextVar("kvtier_forced_span_ids", default=None)
"""Of the span that is begun next, instead of random ones."""


class Telemetry:
    """Implements `kvtier_operator.ports.TelemetryPort`. Holds the only tracer provider; nothing is global."""

    def __init__(self, provider: TracerProvider | None) -> None:
        """Without a provider spans have ids, for those of agents to hang on, and no more."""
        self._provider = provider
        self._tracer = provider.get_tracer("kvtier_operator") if provider is not None else None

    @contextlib.contextmanager
    def span(
        self, name: str, attributes: Attributes | None = None, *, uid: str = "", attempt: int = 0
    ) -> Iterator[Span]:
        """A span that is current inside the block. An exception marks it as an error, unless it is one of
        the quiet ones that only mean "look again"."""
        context = trace_context(uid, attempt).context if uid else None
        if self._tracer is None:
            with self._unrecorded(context) as bare:
                yield bare
            return
        with self._tracer.start_as_current_span(
            name,
            context=context,
            kind=SpanKind.INTERNAL,
            attributes=dict(attributes or {}),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except QUIET_ERRORS as error:
                span.set_attribute("kvtier.retry", type(error).__name__)
                raise
            except AgentUnreachable as error:
                span.set_status(Status(StatusCode.ERROR, error.code))
                raise
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                span.record_exception(error)
                raise

    @contextlib.contextmanager
    def _unrecorded(self, context: Context | None) -> Iterator[Span]:
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else random.getrandbits(128) or 1
        ids = SpanContext(trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=_SAMPLED)
        span = NonRecordingSpan(ids)
        token = attach(trace.set_span_in_context(span, context))
        try:
            yield span
        finally:
            detach(token)

    def attempt_root(self, uid: str, attempt: int, attributes: Mapping[str, str]) -> str:
        """Emits the attempt's root span, at once and with no length of its own."""
        ids = trace_context(uid, attempt)
        if self._tracer is None:
            return ids.traceparent
        token = forced_ids.set(ids)
        try:
            span = self._tracer.start_span("rollout attempt", context=Context(), attributes=dict(attributes))
        finally:
            forced_ids.reset(token)
        span.end()
        return ids.traceparent

    def shutdown(self) -> None:
        """Exports what is left; bounded by the exporter's timeout."""
        if self._provider is not None:
            self._provider.shutdown()


def build_telemetry(
    *, otlp_endpoint: str, instance: str, version: str, processors: tuple[SpanProcessor, ...] = ()
) -> Telemetry:
    """A telemetry that sends spans by OTLP over gRPC to `otlp_endpoint` ("host:port", plain text inside the
    cluster, or "https://host:port"). Empty: spans go to `processors` only, and are not recorded without."""
    if not otlp_endpoint and not processors:
        return Telemetry(None)
    # Imported here: it costs 5 MB, and its exporter 20, that an operator without a collector need not hold.
    from kvtier_operator.spans import recording

    return Telemetry(recording(otlp_endpoint, instance, version, processors))
