"""A rollout's trace as a tree, from an OTLP file or a Jaeger answer. Pure but for one HTTP GET.

It must not know what any span means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubectl_kvtier.outcomes import Exit, Failure

Json = dict[str, Any]
MAX_ANSWER = 64 << 20
_SHOWN = ("stage", "step", "gate", "verdict", "value", "limit", "result", "node", "tier", "bytes", "reason")
# What is raised where a document has another shape.
_NO_TRACE = (KeyError, TypeError, AttributeError, ValueError)
_SCALARS = ("stringValue", "intValue", "doubleValue", "boolValue")


@dataclass(frozen=True, slots=True)
class Span:
    """Times in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start: int
    end: int
    attributes: dict[str, str] = field(default_factory=dict)


def from_otlp(text: str) -> list[Span]:
    """Of OTLP/JSON: one export request, or one a line as a collector's file exporter writes them."""
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        return [span for document in documents for span in _spans(document)]
    except _NO_TRACE as error:
        raise Failure(Exit.FAILED, f"this is no OTLP/JSON: {_told(error)}") from error


def from_jaeger(answer: Json) -> list[Span]:
    """Of Jaeger's query API, `GET /api/traces/{id}`; its times are microseconds."""
    made = []
    for trace in answer.get("data") or []:
        services = {
            key: str(process.get("serviceName", ""))
            for key, process in (trace.get("processes") or {}).items()
        }
        for span in trace.get("spans") or []:
            parents = [
                ref["spanID"] for ref in span.get("references") or [] if ref.get("refType") == "CHILD_OF"
            ]
            start = int(span["startTime"]) * 1000
            made.append(
                Span(
                    trace_id=str(span["traceID"]).rjust(32, "0"),
                    span_id=str(span["spanID"]),
                    parent_id=parents[0] if parents else "",
                    name=str(span["operationName"]),
                    service=services.get(str(span.get("processID")), ""),
                    start=start,
                    end=start + int(span["duration"]) * 1000,
                    attributes={str(tag["key"]): str(tag["value"]) for tag in span.get("tags") or []},
                )
            )
    return made


async def fetch_jaeger(endpoint: str, trace_id: str, seconds: float) -> list[Span]:
    """Failure NOT_FOUND when it has no such trace, FAILED when it does not answer in time."""
    # Only this way of the two needs it.
    import aiohttp

    url = f"{endpoint.rstrip('/')}/api/traces/{trace_id}"
    try:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as response:
            body = await response.content.read(MAX_ANSWER)
            if response.status == 404:
                raise Failure(Exit.NOT_FOUND, f"{endpoint} has no trace {trace_id}")
            if response.status != 200:
                raise Failure(Exit.FAILED, f"{url}: HTTP {response.status}")
            return from_jaeger(json.loads(body))
    except _NO_TRACE as error:
        raise Failure(Exit.FAILED, f"{url}: this is no answer of Jaeger: {_told(error)}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Failure(Exit.FAILED, f"{url}: {str(error) or 'timed out'}") from error


def tree(spans: Sequence[Span], *, limit: int = 500) -> list[str]:
    """One line a span, children under their parents; equal siblings without children are folded. A span whose
    parent is not there is a root."""
    children: dict[str, list[Span]] = {}
    known = {span.span_id for span in spans}
    for span in sorted(spans, key=lambda one: (one.start, one.end, one.span_id)):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    origin = min((span.start for span in spans), default=0)
    lines = list(_walk(children, "", 0, origin, set()))
    if len(lines) > limit:
        return [*lines[:limit], f"... {len(lines) - limit} more lines, {len(spans)} spans in all"]
    return lines


def _walk(
    children: dict[str, list[Span]], parent: str, depth: int, origin: int, above: set[str]
) -> Iterator[str]:
    row = children.get(parent, [])
    at = 0
    while at < len(row):
        span = row[at]
        end = at + 1
        while end < len(row) and _label(row[end]) == _label(span) and row[end].span_id not in children:
            end += 1
        times = f" x{end - at}" if end - at > 1 else ""
        took = (span.end - span.start) / 1e6
        yield f"{(span.start - origin) / 1e9:9.2f}s  {'  ' * depth}{_label(span)}{times} ({took:.1f} ms)"
        # A damaged trace may hold a cycle.
        if span.span_id not in above:
            yield from _walk(children, span.span_id, depth + 1, origin, above | {span.span_id})
        at = end


def _label(span: Span) -> str:
    short = {key.rsplit(".", 1)[-1]: value for key, value in span.attributes.items()}
    facts = " ".join(f"{key}={short[key]}" for key in _SHOWN if key in short)
    return f"{span.name} [{span.service}] {facts}".rstrip()


def _told(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _line(number: int, line: str) -> Json:
    try:
        found: Json = json.loads(line)
    except ValueError as error:
        raise Failure(Exit.FAILED, f"line {number} is no OTLP/JSON: {error}") from error
    return found


def _spans(document: Json) -> Iterator[Span]:
    for resource in document.get("resourceSpans") or []:
        about = _attributes((resource.get("resource") or {}).get("attributes") or [])
        for scope in resource.get("scopeSpans") or []:
            for span in scope.get("spans") or []:
                yield Span(
                    trace_id=str(span["traceId"]).lower(),
                    span_id=str(span["spanId"]).lower(),
                    parent_id=str(span.get("parentSpanId") or "").lower(),
                    name=str(span.get("name", "")),
                    service=about.get("service.name", ""),
                    start=int(span["startTimeUnixNano"]),
                    end=int(span["endTimeUnixNano"]),
                    attributes=_attributes(span.get("attributes") or []),
                )


def _attributes(pairs: Iterable[Json]) -> dict[str, str]:
    made = {}
    for pair in pairs:
        value = pair.get("value") or {}
        found = next((value[kind] for kind in _SCALARS if kind in value), "")
        made[str(pair.get("key", ""))] = str(found)
    return made
