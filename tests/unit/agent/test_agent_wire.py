"""The wire and the rooms speak one vocabulary; a command's content leaves out what may differ."""

from __future__ import annotations

import importlib
from pathlib import Path

import grpc
import pytest

from kvtier.v1 import attention_pb2, common_pb2, control_pb2
from kvtier_agent import convert
from kvtier_agent.engine_port import ExactnessClass
from kvtier_agent.errors import STATUS_OF, status_of, to_detail
from kvtier_agent.evidence_convert import counts_message
from kvtier_agent.evidence_port import GateTerms
from kvtier_core.errors import CoreError, Reason
from kvtier_evidence.gates import Pair
from kvtier_evidence.window import WindowCounts
from tests.engine.agent_process import baseline_manifest


def test_reasons_of_core_and_wire_are_equal() -> None:
    wire = set(common_pb2.Reason.keys()) - {"REASON_UNSPECIFIED"}
    assert {reason.name for reason in Reason} == wire
    assert all(reason.name == reason.value for reason in Reason)


def test_every_reason_has_a_status_of_its_own_kind() -> None:
    assert set(STATUS_OF) == set(Reason)
    assert status_of(CoreError(Reason.FENCE_STALE, "")) is grpc.StatusCode.FAILED_PRECONDITION
    assert grpc.StatusCode.OK not in STATUS_OF.values()


def test_exactness_classes_are_the_wires() -> None:
    wire = set(attention_pb2.ExactnessClass.keys()) - {"EXACTNESS_UNSPECIFIED"}
    assert {exactness.value for exactness in ExactnessClass} == wire


def test_details_are_bounded() -> None:
    facts = {f"fact{i}": "x" * 1000 for i in range(40)}
    detail = to_detail(CoreError(Reason.QUEUE_FULL, "m" * 5000, facts))
    assert len(detail.facts) == 16
    assert max(len(value) for value in detail.facts.values()) == 256
    assert len(detail.message) == 1024
    assert detail.retry_after_ms > 0


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("nonce", b"other", True),
        ("boot_id", "other", True),
        ("ttl_ms", 2, False),
        ("sample_fraction", "0.2", False),
        ("digest", "sha256:00", False),
        ("approved", True, False),
    ],
)
def test_command_content(field: str, value: object, same: bool) -> None:
    request = control_pb2.GrantRequest(ttl_ms=1, nonce=b"n", boot_id="b", sample_fraction="0.1")
    before = convert.command_content(request)
    setattr(request, field, value)
    assert (convert.command_content(request) == before) is same


def test_a_gates_threshold_reaches_the_window_and_is_content() -> None:
    request = control_pb2.GrantRequest(traffic_fraction="0.1", sample_fraction="0", ttl_ms=1000)
    gate = request.gates.add(name="tail", metric="tpotRatio", quantile=99.0, limit="1.25")
    request.digest = request.baseline_digest = "sha256:" + "0" * 64
    before = convert.command_content(request)
    gate.pair_threshold = "0.031"
    assert convert.command_content(request) != before
    terms = convert.grant_terms(request, baseline_manifest())
    [told] = convert.window_terms(request, terms).gates
    assert told == GateTerms("tail", "tpotRatio", 99.0, "1.25", "0.031")


def test_content_differs_by_kind_of_command() -> None:
    fence = common_pb2.Fence(value=3)
    apply = control_pb2.ApplyBaselineRequest(fence=fence)
    remove = control_pb2.RemoveCacheRequest(fence=fence)
    assert convert.command_content(apply) != convert.command_content(remove)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer": 2}, "layer 2 must be in"),
        ({"layer": -1}, "layer -1 must be in"),
        ({"k": b"1234"}, "k has 4 bytes and v 0"),
        ({"q": b""}, "q has 0 bytes"),
        ({"q": b"123"}, "q has 3 bytes"),
        ({"committed_frontier": -1}, "committed_frontier must not be negative"),
        ({"deadline_ms": -5}, "deadline_ms must not be negative"),
    ],
    ids=["layer", "negative-layer", "k-and-v", "no-q", "torn-q", "frontier", "deadline"],
)
def test_frames_are_measured_before_anything_else(change: dict[str, object], says: str) -> None:
    fields = {"q": b"\0" * (6 * 64 * 4), **change}
    with pytest.raises(CoreError, match=says) as refused:
        convert.frame_input(attention_pb2.AttendFrame(**fields), baseline_manifest())  # type: ignore[arg-type]
    assert refused.value.reason is Reason.FRAME_INVALID


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"output_tokens": -1}, "output_tokens"),
        ({"output_tokens": 2, "first_token_seconds": float("nan")}, "finite"),
        ({"output_tokens": 2, "first_token_seconds": 2.0, "last_token_seconds": 1.0}, "before the first"),
    ],
    ids=["tokens", "nan", "order"],
)
def test_outcomes_no_engine_can_have_seen(fields: dict[str, float], says: str) -> None:
    with pytest.raises(CoreError, match=says):
        convert.outcome_of(attention_pb2.ReportOutcomeRequest(**fields))  # type: ignore[arg-type]


def test_a_probe_difference_out_of_range() -> None:
    request = attention_pb2.ReportOutcomeRequest()
    request.probe.difference = 1.5
    with pytest.raises(CoreError, match="must be in"):
        convert.outcome_of(request)


def test_counts_travel_whole() -> None:
    counts = WindowCounts(zero_tolerance={"illegalFallbacks": 2}, sessions_total=5, sessions_candidate=2)
    counts.of("tpotRatio", "candidate").histogram.add(0.05)
    counts.of("tpotRatio", "candidate").histogram.add(None)
    counts.of("tpotRatio", "candidate").above_up["tail"] = 1 << 32
    counts.probes["quality", "set", "p1"] = Pair.of(0.5)
    counts.probes["quality", "set", "p2"] = Pair.of(None)
    message = counts_message(counts)
    [metric] = message.metrics
    assert (metric.metric, metric.arm) == ("tpotRatio", "candidate")
    assert (metric.histogram.n, metric.histogram.missing, sum(metric.histogram.bins.values())) == (2, 1, 1)
    assert metric.above_up["tail"] == 1 << 32
    assert [(p.prompt_digest, p.missing) for p in message.probes] == [("p1", False), ("p2", True)]
    assert (message.sessions_total, message.zero_tolerance["illegalFallbacks"]) == (5, 2)


def test_the_wire_document_names_every_reason() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "wire.md").read_text()
    missing = [reason.name for reason in Reason if f"`{reason.name}`" not in text]
    assert not missing


@pytest.mark.parametrize("service", ["Attention", "Blocks", "Control"])
def test_every_method_of_a_service_is_answered_by_ours(service: str) -> None:
    """The generated base refuses what nobody wrote, and only when it is called."""
    names = {
        "Attention": ("kvtier_agent.attention_service", "attention_pb2_grpc"),
        "Blocks": ("kvtier_agent.blocks_service", "blocks_pb2_grpc"),
        "Control": ("kvtier_agent.control_service", "control_pb2_grpc"),
    }
    ours, generated = names[service]
    servicer = getattr(importlib.import_module(ours), f"{service}Service")
    base = getattr(importlib.import_module(f"kvtier.v1.{generated}"), f"{service}Servicer")
    methods = [name for name in vars(base) if not name.startswith("_")]
    assert methods
    assert [name for name in methods if getattr(servicer, name) is getattr(base, name)] == []
