"""A real OTLP/gRPC receiver on loopback that keeps what it was sent.

Stands where a collector stands in production, so exporters are tested over a
socket. Bounded: beyond ``limit`` spans it counts what it drops.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent import futures
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class Span:
    """One finished span as it arrived; times in seconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start: float
    end: float
    attributes: dict[str, str]
    links: tuple[str, ...]  # trace ids


def _text(pairs: Iterable[KeyValue]) -> dict[str, str]:
    out: dict[str, str] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        out[pair.key] = str(getattr(pair.value, kind)) if kind else ""
    return out


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """``with OtlpSink() as sink:`` then export to ``sink.endpoint``."""

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.dropped = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> OtlpSink:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=1).wait(3)

    def Export(self, request, context):
        for resource in request.resource_spans:
            about = _text(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._keep(about, span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def _keep(self, about: dict[str, str], span) -> None:
        item = Span(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            service=about.get("service.name", ""),
            instance=about.get("service.instance.id", ""),
            start=span.start_time_unix_nano / 1e9,
            end=span.end_time_unix_nano / 1e9,
            attributes=_text(span.attributes),
            links=tuple(link.trace_id.hex() for link in span.links),
        )
        with self._lock:
            if len(self._spans) < self._limit:
                self._spans.append(item)
            else:
                self.dropped += 1

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """A copy of what arrived, ordered by start time."""
        with self._lock:
            found = [s for s in self._spans if trace_id is None or s.trace_id == trace_id]
        return sorted(found, key=lambda s: (s.start, s.end))


_SHOWN = frozenset("verdict value limit stage step result node reason gate tier bytes".split())  # noqa: SIM905


def trace_tree(spans: list[Span], *, limit: int = 60) -> list[str]:
    """Lines of one trace as an indented tree; siblings that repeat are folded."""
    children: dict[str, list[Span]] = {}
    known = {s.span_id for s in spans}
    for span in spans:
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    origin = min((s.start for s in spans), default=0.0)
    lines: list[str] = []

    def label(span: Span) -> str:
        short = {k.rsplit(".", 1)[-1]: v for k, v in span.attributes.items()}
        facts = {k: v for k, v in short.items() if k in _SHOWN}
        tail = " ".join(f"{k}={v}" for k, v in sorted(facts.items()))
        return f"{span.name} [{span.service}] {tail}".rstrip()

    def walk(parent: str, depth: int) -> None:
        row = children.get(parent, [])
        i = 0
        while i < len(row) and len(lines) < limit:
            same = i + 1
            while same < len(row) and label(row[same]) == label(row[i]) and row[same].span_id not in children:
                same += 1
            times = f" x{same - i}" if same - i > 1 else ""
            lines.append(
                f"{row[i].start - origin:7.2f}s {'  ' * depth}{label(row[i])}{times} "
                f"({(row[i].end - row[i].start) * 1000:.1f} ms)"
            )
            walk(row[i].span_id, depth + 1)
            i = same

    walk("", 0)
    if len(lines) >= limit:
        lines.append(f"        ... {len(spans)} spans in all")
    return lines
