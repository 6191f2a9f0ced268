"""Tracing: one trace per rollout attempt, with ids that any later operator derives again.

A span here is short and is emitted as it ends; a span that stays open for a rollout's days would be lost
with the process. A normal retry (a conflict, a lost leadership) is no error of a span. This module must not
know what a rollout does; it turns (uid, attempt) into ids.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvtier_operator.ports import AgentUnreachable, Conflict, NotLeader

Attributes = Mapping[str, str | int | float | bool]

QUIET_ERRORS: tuple[type[BaseException], ...] = (Conflict, NotLeader)
EXPORT_TIMEOUT_MILLIS = 2000
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


_forced: ContextVar[AttemptTrace | None] = ContextVar("kvtier_forced_span_ids", default=None)


class DerivedIdGenerator(IdGenerator):
    """Random ids, except for the root span of an attempt."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()

    def generate_trace_id(self) -> int:
        forced = _forced.get()
        return forced.trace_id if forced else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        forced = _forced.get()
        return forced.span_id if forced else self._random.generate_span_id()


class Telemetry:
    """Implements `kvtier_operator.ports.TelemetryPort`. Holds the only tracer provider; nothing is global."""

    def __init__(self, provider: TracerProvider, *, recording: bool = True) -> None:
        """Without `recording` spans have ids, for those of agents to hang on, and no more."""
        self._provider = provider
        self._tracer = provider.get_tracer("kvtier_operator")
        self._recording = recording
        self._ids = RandomIdGenerator()

    @contextlib.contextmanager
    def span(
        self, name: str, attributes: Attributes | None = None, *, uid: str = "", attempt: int = 0
    ) -> Iterator[Span]:
        """A span that is current inside the block. An exception marks it as an error, unless it is one of
        the quiet ones that only mean "look again"."""
        context = trace_context(uid, attempt).context if uid else None
        if not self._recording:
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
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        ids = SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)
        span = NonRecordingSpan(ids)
        token = attach(trace.set_span_in_context(span, context))
        try:
            yield span
        finally:
            detach(token)

    def attempt_root(self, uid: str, attempt: int, attributes: Mapping[str, str]) -> str:
        """Emits the attempt's root span, at once and with no length of its own."""
        ids = trace_context(uid, attempt)
        token = _forced.set(ids)
        try:
            span = self._tracer.start_span("rollout attempt", context=Context(), attributes=dict(attributes))
        finally:
            _forced.reset(token)
        span.end()
        return ids.traceparent

    def shutdown(self) -> None:
        """Exports what is left; bounded by the exporter's timeout."""
        self._provider.shutdown()


def build_telemetry(
    *, otlp_endpoint: str, instance: str, version: str, processors: tuple[SpanProcessor, ...] = ()
) -> Telemetry:
    """A telemetry that sends spans by OTLP over gRPC to `otlp_endpoint` ("host:port", plain text inside the
    cluster, or "https://host:port"). Empty: spans go to `processors` only, and are not recorded without."""
    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": "kvtier-operator", "service.instance.id": instance, "service.version": version}
        ),
        id_generator=DerivedIdGenerator(),
    )
    for processor in processors:
        provider.add_span_processor(processor)
    if otlp_endpoint:
        # Imported here: it costs 20 MB that an operator without a collector need not hold.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(
            endpoint=otlp_endpoint,
            insecure=not otlp_endpoint.startswith("https://"),
            timeout=EXPORT_TIMEOUT_MILLIS / 1000,
        )
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=4096,
                schedule_delay_millis=500,
                export_timeout_millis=EXPORT_TIMEOUT_MILLIS,
            )
        )
    return Telemetry(provider, recording=bool(otlp_endpoint or processors))
