"""Traces, metrics and logs of the agent process; everything is created here and injected, nothing is global.

Names of attributes live in this file, labels of metrics are closed sets (never names or uids of objects). A
traceparent from outside is untrusted: junk is tolerated and never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier_agent.quickmetrics import ChildOf, Durations, Totals

AttributeValue = str | int | float | bool
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SHUTDOWN_MILLIS = 2000


class Telemetry:
    """Tracing of one process. Without a processor a call has ids, for its log lines, and no more."""

    def __init__(
        self, node: str, pool: str, boot_id: str, version: str, processors: Sequence[SpanProcessor]
    ) -> None:
        resource = Resource.create(
            {
                "service.name": "kvtier-agent",
                "service.version": version,
                "service.instance.id": boot_id,
                "k8s.node.name": node,
                "kvtier.pool": pool,
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvtier_agent", version)
        self._propagator = TraceContextTextMapPropagator()
        self._recording = bool(processors)
        self._ids = RandomIdGenerator()

    @contextmanager
    def rpc(self, method: str, metadata: Mapping[str, str]) -> Iterator[Span]:
        """A server span for one unary call, child of the caller's span. Refusals set the reason attribute;
        only INTERNAL is an error."""
        if not self._recording:
            with self._unrecorded(metadata.get("traceparent", "")) as bare:
                yield bare
            return
        with self._tracer.start_as_current_span(
            method,
            context=self._context(metadata.get("traceparent", "")),
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": f"kvtier.v1.{method}"},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span

    def step(
        self,
        *,
        session_traceparent: str,
        rollout_traceparent: str,
        start_ns: int,
        attributes: Mapping[str, AttributeValue],
        bytes_by_tier: Mapping[str, int],
        stall_seconds: float,
    ) -> None:
        """A finished compared step, in the request's trace, linked to the rollout's; the tiers' transfers of
        the step are one child span."""
        if not self._recording:
            return
        rollout = trace.get_current_span(self._context(rollout_traceparent)).get_span_context()
        links = [Link(rollout, {"kvtier.link": "rollout"})] if rollout.is_valid else []
        span = self._tracer.start_span(
            "attention.step",
            context=self._context(session_traceparent),
            links=links,
            attributes=dict(attributes),
            start_time=start_ns,
        )
        batch = self._tracer.start_span(
            "tier.transfer",
            context=trace.set_span_in_context(span, Context()),
            attributes={
                "kvtier.transfer.stall_seconds": stall_seconds,
                **{f"kvtier.transfer.bytes.{tier}": size for tier, size in bytes_by_tier.items()},
            },
            start_time=start_ns,
        )
        batch.end()
        span.end()

    def shutdown(self) -> None:
        """Flushes for a short while, then gives up."""
        self._provider.force_flush(_SHUTDOWN_MILLIS)
        self._provider.shutdown()

    @contextmanager
    def _unrecorded(self, traceparent: str) -> Iterator[Span]:
        caller = self._context(traceparent)
        parent = trace.get_current_span(caller).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        ids = SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False)
        span = NonRecordingSpan(ids)
        token = attach(trace.set_span_in_context(span, caller))
        try:
            yield span
        finally:
            detach(token)

    def _context(self, traceparent: str) -> Context:
        return self._propagator.extract({"traceparent": traceparent}, context=Context())


def mark_error(span: Span, message: str) -> None:
    """Only for failures of ours; a typed refusal is an answer."""
    span.set_status(Status(StatusCode.ERROR, message))


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Batches spans to an OTLP/gRPC endpoint; `http://` or no scheme is plain text, `https://` is TLS."""
    insecure = not endpoint.startswith("https://")
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=2)
    return BatchSpanProcessor(exporter, schedule_delay_millis=500, export_timeout_millis=2000)


class Metrics:
    """Prometheus metrics of the agent. Units are in the names; labels are bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.rpc_seconds = Histogram(
            "kvtier_agent_rpc_duration_seconds",
            "Duration of unary calls by method and code (OK or a refusal's reason)",
            ["method", "code"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.frame_seconds = Durations(
            "kvtier_agent_frame_duration_seconds",
            "From receipt of an attention frame to its answer",
            ["arm", "code"],
            _SECONDS,
            registry,
        ).children
        self.stall_seconds = Counter(
            "kvtier_agent_transfer_stall_seconds",
            "Exposed transfer stall of attention frames",
            registry=registry,
        )
        self.hidden_seconds = Counter(
            "kvtier_agent_transfer_hidden_seconds",
            "Transfer of attention frames that computation covered",
            registry=registry,
        )
        self.plan_failures = Counter(
            "kvtier_agent_plan_failures",
            "Plans of attention frames that ended without an answer, before another plan's",
            ["plan", "code"],
            registry=registry,
        )
        self.tier_read_bytes = Totals(
            "kvtier_agent_tier_read_bytes",
            "Bytes of rows read by attention frames, by tier class of this node",
            ["tier_class"],
            registry,
        ).children
        self.compared_steps = Counter(
            "kvtier_agent_compared_steps", "Steps answered twice for comparison", registry=registry
        )
        self.evidence_lost = Counter(
            "kvtier_agent_evidence_lost_steps",
            "Errors of compared steps that a late event loop has made missing values",
            registry=registry,
        )
        channel_look_seconds = Counter(
            "kvtier_agent_channel_look_seconds",
            "Looking for messages of local channels before sleeping, by whether one was seen",
            ["seen"],
            registry=registry,
        )
        self.channel_look_seconds = ChildOf(channel_look_seconds.labels)
        self.sessions = Gauge("kvtier_agent_sessions", "Open sessions", registry=registry)
        self.expired_sessions = Counter(
            "kvtier_agent_expired_sessions", "Sessions ended for want of frames", registry=registry
        )
        self.idle_demoted_chunks = Counter(
            "kvtier_agent_idle_demoted_chunks",
            "Chunks of idle sessions moved to slower tiers",
            registry=registry,
        )
        self.frames_in_flight = Gauge(
            "kvtier_agent_frames_in_flight", "Attention frames queued or running", registry=registry
        )
        self.loop_lag_seconds = Gauge(
            "kvtier_agent_event_loop_lag_seconds", "Lateness of the last housekeeping tick", registry=registry
        )
        self.tier_used_bytes = Gauge(
            "kvtier_agent_tier_used_bytes", "Bytes in use by tier class", ["tier_class"], registry=registry
        )
        self.manifest_differences = Gauge(
            "kvtier_agent_manifest_differences",
            "Caches that run another manifest than was applied or granted, or cannot say which",
            registry=registry,
        )
        self.registration_failures = Counter(
            "kvtier_agent_registration_failures",
            "Writes to the Kubernetes API that failed, by object",
            ["object"],
            registry=registry,
        )
        self.build_info = Gauge(
            "kvtier_agent_build_info", "Constant 1, labelled by version", ["version"], registry=registry
        )


class JsonLogFormatter(logging.Formatter):
    """One JSON object a line, with the ids of the current span."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = trace.format_trace_id(context.trace_id)
            line["span_id"] = trace.format_span_id(context.span_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str) -> None:
    """JSON lines on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
