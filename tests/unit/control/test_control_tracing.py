"""Ids of an attempt's trace, proofs, errors of the API server, and what a log line holds."""

from __future__ import annotations

import json
import logging

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvtier.v1 import control_pb2 as control
from kvtier_operator.kube.errors import error_for
from kvtier_operator.logs import JsonFormatter
from kvtier_operator.ports import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    NotLeader,
)
from kvtier_operator.proofs import ProofVerdict, check_proof, nonce_digest
from kvtier_operator.revisions import RevisionDamaged, Role, read_revision, revision_manifest
from kvtier_operator.telemetry import Telemetry, build_telemetry, current_traceparent, trace_context
from tests.unit.control.control_objects import kv_cache


@pytest.fixture
def spans() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    made = build_telemetry(
        otlp_endpoint="", instance="t", version="t", processors=(SimpleSpanProcessor(exporter),)
    )
    return made, exporter


def test_the_trace_of_an_attempt_is_derived_and_golden() -> None:
    assert trace_context("uid-1", 1) == trace_context("uid-1", 1)
    assert len({trace_context(uid, n).trace_id for uid in ("a", "b") for n in (1, 2)}) == 4
    # Golden: a restarted or upgraded operator must go on in the trace that the status names.
    assert (
        trace_context("7f1b8c1e-0000-4000-8000-000000000001", 1).traceparent
        == "00-5c860b36640fb514f0268adf3169929e-1220926cbe306eb7-01"
    )


def test_two_operators_write_one_trace_with_one_root(spans: tuple[Telemetry, InMemorySpanExporter]) -> None:
    telemetry, exporter = spans
    first = telemetry.attempt_root("uid-1", 2, {"kvtier.stage": "Shadow"})
    again = telemetry.attempt_root("uid-1", 2, {"kvtier.stage": "Shadow"})
    assert first == again
    with telemetry.span("stage Shadow", uid="uid-1", attempt=2):
        inside = current_traceparent()
        with telemetry.span("agent.Grant"):
            pass
    root, _, rpc, stage = exporter.get_finished_spans()
    ids = trace_context("uid-1", 2)
    assert (root.context.trace_id, root.context.span_id, root.parent) == (ids.trace_id, ids.span_id, None)
    assert stage.parent is not None
    assert stage.parent.span_id == ids.span_id
    assert rpc.parent is not None
    assert rpc.parent.span_id == stage.context.span_id
    assert {span.context.trace_id for span in (root, rpc, stage)} == {ids.trace_id}
    assert inside.split("-")[1] == f"{ids.trace_id:032x}"
    assert root.context.span_id != stage.context.span_id != rpc.context.span_id


def test_without_a_collector_agents_are_told_the_same_trace() -> None:
    """Their own collector may have the trace though the operator has none."""
    telemetry = build_telemetry(otlp_endpoint="", instance="t", version="t")
    assert current_traceparent() == ""
    with telemetry.span("stage Shadow", uid="uid-1", attempt=2) as stage:
        outer = current_traceparent()
        with telemetry.span("agent.Grant") as rpc:
            rpc.set_attribute("rpc.response.status_code", "OK")
            inner = current_traceparent()
        assert current_traceparent() == outer
    assert current_traceparent() == ""
    assert not stage.is_recording()
    trace_id = f"{trace_context('uid-1', 2).trace_id:032x}"
    version, flags = "00", "01"
    for told in (outer, inner):
        assert (told.split("-")[0], told.split("-")[1], told.split("-")[3]) == (version, trace_id, flags)
    assert outer != inner
    with pytest.raises(Conflict), telemetry.span("agent.Grant"):
        raise Conflict(409, "Conflict", "")
    assert current_traceparent() == ""


@pytest.mark.parametrize(
    "error, bad",
    [
        pytest.param(Conflict(422, "Invalid", ""), False, id="conflict"),
        pytest.param(NotLeader(""), False, id="not-leader"),
        pytest.param(ValueError("x"), True, id="defect"),
    ],
)
def test_only_a_defect_marks_a_span(
    spans: tuple[Telemetry, InMemorySpanExporter], error: Exception, bad: bool
) -> None:
    telemetry, exporter = spans
    with pytest.raises(type(error)), telemetry.span("reconcile"):
        raise error
    span = exporter.get_finished_spans()[0]
    assert (span.status.status_code is StatusCode.ERROR) is bad
    assert bool(span.events) is bad


def test_no_span_no_traceparent() -> None:
    assert current_traceparent() == ""


# --- Proofs ----------------------------------------------------------------------------------------------

NONCE = b"0123456789abcdef"


def proof(**changes: str) -> control.Proof:
    fields = {"boot_id": "boot", "baseline_digest": "sha256:a", "candidate_digest": ""} | changes
    made = control.Proof(**fields)
    made.nonce_digest = nonce_digest(NONCE, made.baseline_digest, made.candidate_digest, made.boot_id)
    return made


@pytest.mark.parametrize(
    "given, candidate_allowed, verdict",
    [
        pytest.param(proof(), False, ProofVerdict.HOLDS, id="holds"),
        pytest.param(proof(baseline_digest="sha256:b"), False, ProofVerdict.DIGEST_MISMATCH, id="digest"),
        pytest.param(proof(boot_id="other"), False, ProofVerdict.BOOT_CHANGED, id="boot"),
        pytest.param(proof(candidate_digest="sha256:c"), False, ProofVerdict.CANDIDATE_HELD, id="candidate"),
        pytest.param(proof(candidate_digest="sha256:c"), True, ProofVerdict.HOLDS, id="candidate-allowed"),
    ],
)
def test_a_proof_is_checked(given: control.Proof, candidate_allowed: bool, verdict: ProofVerdict) -> None:
    found = check_proof(
        given, nonce=NONCE, boot_id="boot", baseline="sha256:a", candidate_allowed=candidate_allowed
    )
    assert found is verdict


def test_a_proof_over_another_nonce_is_a_replay() -> None:
    found = check_proof(
        proof(), nonce=b"another", boot_id="boot", baseline="sha256:a", candidate_allowed=False
    )
    assert found is ProofVerdict.NONCE_MISMATCH


# --- Revisions -------------------------------------------------------------------------------------------


def test_a_revision_is_trusted_by_its_hash_only() -> None:
    import hashlib

    cache = kv_cache()
    cache["metadata"]["uid"] = "u"
    digest = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
    made = revision_manifest(cache, b"{}", digest, Role.BASELINE, 3)
    read = read_revision(made)
    assert (read.digest, read.role, read.number, read.data) == (digest, Role.BASELINE, 3, b"{}")
    made["data"]["manifest"] = "{ }"
    with pytest.raises(RevisionDamaged, match="bytes hash to"):
        read_revision(made)


# --- Errors of the API server -----------------------------------------------------------------------------


def body(reason: str, **details: object) -> bytes:
    return json.dumps({"kind": "Status", "reason": reason, "message": "m", "details": details}).encode()


@pytest.mark.parametrize(
    "status, data, creating, kind",
    [
        pytest.param(404, body("NotFound"), False, NotFound, id="404"),
        pytest.param(409, body("AlreadyExists"), True, AlreadyExists, id="409-create"),
        pytest.param(409, body("Conflict"), False, Conflict, id="409-update"),
        pytest.param(422, body("Invalid"), False, Conflict, id="422-failed-test"),
        pytest.param(422, body("Invalid", kind="KVCache", causes=[{}]), False, Invalid, id="422-schema"),
        pytest.param(403, body("Forbidden"), False, Forbidden, id="403"),
        pytest.param(401, b"not json", False, Forbidden, id="401"),
        pytest.param(500, b"", False, ApiError, id="500"),
    ],
)
def test_an_answer_becomes_a_typed_error(
    status: int, data: bytes, creating: bool, kind: type[ApiError]
) -> None:
    assert type(error_for(status, data, creating=creating)) is kind


@pytest.mark.parametrize("header, details, seconds", [("3", {}, 3.0), (None, {"retryAfterSeconds": 7}, 7.0)])
def test_a_busy_server_says_when_to_come_back(
    header: str | None, details: dict[str, object], seconds: float
) -> None:
    found = error_for(429, body("TooManyRequests", **details), creating=False, retry_after=header)
    assert found.retry_after_seconds == seconds


# --- Logs ------------------------------------------------------------------------------------------------


def test_a_log_line_is_json_with_its_span(spans: tuple[Telemetry, InMemorySpanExporter]) -> None:
    telemetry, _ = spans
    record = logging.LogRecord("kvtier_operator.x", logging.WARNING, "f", 1, "lost %s", ("it",), None)
    record.object = "KVCache/serving/chat"
    record.big = object()
    with telemetry.span("reconcile", uid="u", attempt=1):
        line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "lost it"
    assert line["object"] == "KVCache/serving/chat"
    assert line["trace_id"] == f"{trace_context('u', 1).trace_id:032x}"
    assert "big" not in line
