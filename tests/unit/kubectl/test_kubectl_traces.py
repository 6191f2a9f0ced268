"""Traces of an OTLP file and of Jaeger give one tree; completion gives what may follow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kubectl_kvtier.cli import main, make_parser
from kubectl_kvtier.completion import SHELLS, complete, script
from kubectl_kvtier.outcomes import Exit, Failure
from kubectl_kvtier.traces import Span, fetch_jaeger, from_jaeger, from_otlp, tree

TRACE = "0af7651916cd43dd8448eb211c80319c"


def otlp(*spans: dict[str, object]) -> str:
    body = {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [{"key": "service.name", "value": {"stringValue": "kvtier-operator"}}]
                },
                "scopeSpans": [{"spans": list(spans)}],
            }
        ]
    }
    return json.dumps(body)


def one(span_id: str, parent: str, name: str, start: int, **attributes: str) -> dict[str, object]:
    return {
        "traceId": TRACE.upper(),
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(start * 10**9),
        "endTimeUnixNano": str(start * 10**9 + 5 * 10**6),
        "attributes": [
            {"key": f"kvtier.{key}", "value": {"stringValue": value}} for key, value in attributes.items()
        ],
    }


SPANS = [
    one("a1", "", "stage", 10, stage="Shadow"),
    one("b1", "a1", "rpc", 11, node="node-a"),
    one("b2", "a1", "rpc", 11, node="node-a"),
    one("c1", "gone", "gate", 12, gate="tail", verdict="Pass"),
]


def tags(span: dict[str, Any]) -> list[dict[str, str]]:
    return [{"key": pair["key"], "value": pair["value"]["stringValue"]} for pair in span["attributes"]]


def parents(span: dict[str, Any]) -> list[dict[str, str]]:
    above = span["parentSpanId"]
    return [{"refType": "CHILD_OF", "spanID": above}] if above else []


JAEGER = {
    "data": [
        {
            "processes": {"p1": {"serviceName": "kvtier-operator"}},
            "spans": [
                {
                    "traceID": TRACE,
                    "spanID": span["spanId"],
                    "operationName": span["name"],
                    "processID": "p1",
                    "references": parents(span),
                    "startTime": int(str(span["startTimeUnixNano"])) // 1000,
                    "duration": 5000,
                    "tags": tags(span),
                }
                for span in SPANS
            ],
        }
    ]
}
LINES = [
    "     0.00s  stage [kvtier-operator] stage=Shadow (5.0 ms)",
    "     1.00s    rpc [kvtier-operator] node=node-a x2 (5.0 ms)",
    "     2.00s  gate [kvtier-operator] gate=tail verdict=Pass (5.0 ms)",
]


@pytest.mark.parametrize(
    "spans",
    [from_otlp(otlp(*SPANS)), from_otlp("\n".join(otlp(span) for span in SPANS)), from_jaeger(JAEGER)],
    ids=["otlp", "otlp-lines", "jaeger"],
)
def test_one_trace_is_one_tree(spans: list[Span]) -> None:
    assert {span.trace_id for span in spans} == {TRACE}
    assert tree(spans) == LINES


def test_a_cycle_and_a_long_trace_end() -> None:
    ring = from_otlp(otlp(one("a1", "", "x", 1), one("b1", "b1", "y", 2)))
    assert len(tree(ring)) == 1
    assert tree(from_otlp(otlp(*SPANS)), limit=1)[-1] == "... 2 more lines, 4 spans in all"


def test_a_damaged_file_names_its_line() -> None:
    with pytest.raises(Failure, match="line 2"):
        from_otlp(otlp(SPANS[0]) + "\n{")


def test_the_command_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces.json"
    path.write_text(otlp(*SPANS), encoding="utf-8")
    assert main(["trace", TRACE, "--file", str(path)]) == Exit.OK
    assert capsys.readouterr().out.splitlines()[1:] == LINES
    assert main(["trace", "f" * 32, "--file", str(path)]) == Exit.NOT_FOUND


@pytest.mark.parametrize(
    "content,status",
    [
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "a"}]}]}]}', Exit.FAILED),
        (b"[1, 2]", Exit.FAILED),
        (b'{"resourceSpans": 5}', Exit.FAILED),
        (b"\xff\xfe", Exit.USAGE),
    ],
    ids=["no-id", "list", "number", "no-text"],
)
def test_a_file_of_another_shape_is_told(
    content: bytes, status: Exit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traces.json"
    path.write_bytes(content)
    assert main(["trace", TRACE, "--file", str(path)]) == status
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("kubectl kvtier: ") and told.err.count("\n") == 1


class _Jaeger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == f"/api/traces/{TRACE}"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(JAEGER).encode() if known else b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_jaeger_is_asked_over_http() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Jaeger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        assert tree(asyncio.run(fetch_jaeger(endpoint, TRACE, 5.0))) == LINES
        with pytest.raises(Failure) as caught:
            asyncio.run(fetch_jaeger(endpoint, "f" * 32, 5.0))
        assert caught.value.status is Exit.NOT_FOUND
        server.shutdown()
    with pytest.raises(Failure) as gone:
        asyncio.run(fetch_jaeger(endpoint, TRACE, 5.0))
    assert gone.value.status is Exit.FAILED


def names(plural: str) -> Sequence[str]:
    assert plural == "kvrollouts"
    return ["quest-a", "quest-b", "other"]


@pytest.mark.parametrize(
    "words,candidates",
    [
        (["st"], ["status", ":4"]),
        (["abort", "qu"], ["quest-a", "quest-b", ":4"]),
        (["-n", "serving", "promote", "o"], ["other", ":4"]),
        (["top", ""], ["caches", "nodes", ":4"]),
        (["status", "x", "-o", "j"], ["json", ":4"]),
        (["trace", "x", "--jae"], ["--jaeger", ":4"]),
        (["trace", "x", "--file", ""], [":0"]),
        (["lint", "-f", ""], [":0"]),
        (["completion", "z"], ["zsh", ":4"]),
        (["nosuch"], [":4"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_completion_gives_what_may_follow(words: list[str], candidates: list[str]) -> None:
    assert complete(make_parser(), words, names) == candidates


def test_every_command_is_offered() -> None:
    found = complete(make_parser(), [""], names)
    assert {
        "status",
        "explain",
        "history",
        "diff",
        "promote",
        "pause",
        "resume",
        "abort",
        "retry",
        "skip",
    } < set(found)
    assert {"top", "trace", "lint", "completion"} < set(found)
    assert not any(one.startswith("__") for one in found)


@pytest.mark.parametrize("shell", list(SHELLS))
def test_scripts_call_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == Exit.OK
    assert capsys.readouterr().out == script(shell)
    assert "kubectl-kvtier __complete" in script(shell)
