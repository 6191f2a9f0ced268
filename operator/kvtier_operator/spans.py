"""What records spans and sends them to a collector: the SDK of OpenTelemetry, and the ids that it gives.

Of its own, and imported only where spans have somewhere to go. It must not know what a span is about.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

from kvtier_operator.telemetry import forced_ids

EXPORT_TIMEOUT_MILLIS = 2000


class DerivedIdGenerator(IdGenerator):
    """Random ids, except for the root span of an attempt."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()

    def generate_trace_id(self) -> int:
        forced = forced_ids.get()
        return forced.trace_id if forced else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        forced = forced_ids.get()
        return forced.span_id if forced else self._random.generate_span_id()


def recording(
    otlp_endpoint: str, instance: str, version: str, processors: tuple[SpanProcessor, ...]
) -> TracerProvider:
    """Arguments as of `telemetry.build_telemetry`."""
    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": "kvtier-operator", "service.instance.id": instance, "service.version": version}
        ),
        id_generator=DerivedIdGenerator(),
    )
    for processor in processors:
        provider.add_span_processor(processor)
    if otlp_endpoint:
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
    return provider
