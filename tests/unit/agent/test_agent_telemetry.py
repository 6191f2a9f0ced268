"""Spans are children of what came over the wire, steps link to the rollout, logs carry the ids."""

from __future__ import annotations

import json
import logging
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Tracer
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, StatusCode
from prometheus_client import CollectorRegistry

from kvtier_agent.attendframes import FrameCount, FrameDesk
from kvtier_agent.cachesession import FrameAnswer
from kvtier_agent.engine_port import ExactnessClass, FrameReceipt, FrameResult
from kvtier_agent.quickmetrics import ChildOf
from kvtier_agent.telemetry import JsonLogFormatter, Metrics, Telemetry, mark_error
from kvtier_core.release.enforcement import ServedArm

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ROLLOUT = "00-11111111111111111111111111111111-2222222222222222-03"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    return Telemetry("node-a", "serving/pool", "boot", "1", [SimpleSpanProcessor(exporter)])


def test_a_call_continues_the_callers_trace(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    with telemetry.rpc("Control.Grant", {"traceparent": PARENT}) as span:
        span.set_attribute("rpc.response.status_code", "FENCE_STALE")
    [done] = exporter.get_finished_spans()
    assert f"{done.context.trace_id:032x}" == TRACE
    assert done.parent is not None
    assert f"{done.parent.span_id:016x}" == "b7ad6b7169203331"
    assert done.status.status_code is StatusCode.UNSET
    assert done.resource.attributes["k8s.node.name"] == "node-a"


@pytest.mark.parametrize("junk", ["", "00-zz", "x" * 500, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_junk_begins_a_trace_of_its_own(
    telemetry: Telemetry, exporter: InMemorySpanExporter, junk: str
) -> None:
    with telemetry.rpc("Control.GetState", {"traceparent": junk}):
        pass
    [done] = exporter.get_finished_spans()
    assert done.parent is None


def test_only_failures_of_ours_are_errors(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    with telemetry.rpc("Control.Grant", {}) as span:
        mark_error(span, "internal")
    [done] = exporter.get_finished_spans()
    assert done.status.status_code is StatusCode.ERROR


def test_a_compared_step_links_to_the_rollout_and_holds_its_transfers(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    telemetry.step(
        session_traceparent=PARENT,
        rollout_traceparent=ROLLOUT,
        start_ns=1,
        attributes={"kvtier.step": 3},
        bytes_by_tier={"nvme": 4096, "dram": 64},
        stall_seconds=0.5,
    )
    transfer, step = exporter.get_finished_spans()
    assert (step.name, transfer.name) == ("attention.step", "tier.transfer")
    assert f"{step.context.trace_id:032x}" == TRACE
    [link] = step.links
    assert f"{link.context.trace_id:032x}" == "1" * 32
    assert transfer.parent is not None
    assert transfer.parent.span_id == step.context.span_id
    assert transfer.attributes is not None
    assert transfer.attributes["kvtier.transfer.bytes.nvme"] == 4096


def test_logs_are_json_with_the_current_ids(telemetry: Telemetry) -> None:
    record = logging.LogRecord("room", logging.WARNING, "f", 1, "said %s", ("this",), None)
    outside = json.loads(JsonLogFormatter().format(record))
    with telemetry.rpc("Control.Grant", {"traceparent": PARENT}):
        inside = json.loads(JsonLogFormatter().format(record))
    assert (outside["message"], outside["level"]) == ("said this", "warning")
    assert "trace_id" not in outside
    assert inside["trace_id"] == TRACE


class TestWithoutAnybodyToSendTo:
    """A call has ids, for its log lines, and no more."""

    def test_log_lines_of_a_call_carry_its_callers_trace(self) -> None:
        telemetry = Telemetry("node-a", "serving/pool", "boot", "1", [])
        record = logging.LogRecord("room", logging.WARNING, "f", 1, "said", (), None)
        with telemetry.rpc("Control.Grant", {"traceparent": PARENT}) as span:
            inside = json.loads(JsonLogFormatter().format(record))
            span.set_attribute("rpc.response.status_code", "OK")
            mark_error(span, "internal")
        outside = json.loads(JsonLogFormatter().format(record))
        assert inside["trace_id"] == TRACE
        assert inside["span_id"] not in ("b7ad6b7169203331", "0" * 16)
        assert not span.is_recording()
        assert "trace_id" not in outside

    @pytest.mark.parametrize("junk", ["", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
    def test_calls_of_nobody_have_traces_of_their_own(self, junk: str) -> None:
        telemetry = Telemetry("node-a", "serving/pool", "boot", "1", [])
        seen = set()
        for _ in range(3):
            with telemetry.rpc("Control.GetState", {"traceparent": junk}) as span:
                assert trace.get_current_span() is span and span.get_span_context().is_valid
                seen.add(span.get_span_context().trace_id)
        assert len(seen) == 3

    def test_a_call_that_fails_leaves_nothing_behind(self) -> None:
        telemetry = Telemetry("node-a", "serving/pool", "boot", "1", [])
        with pytest.raises(ZeroDivisionError), telemetry.rpc("Control.Grant", {}):
            raise ZeroDivisionError
        assert not trace.get_current_span().get_span_context().is_valid

    def test_no_span_is_made_of_anything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[str] = []
        start = Tracer.start_span

        def counted(tracer: Tracer, name: str, *rest: Any, **options: Any) -> Span:
            made.append(name)
            return start(tracer, name, *rest, **options)

        monkeypatch.setattr(Tracer, "start_span", counted)
        for processors, expected in (([], 0), ([SimpleSpanProcessor(InMemorySpanExporter())], 3)):
            made.clear()
            telemetry = Telemetry("node-a", "serving/pool", "boot", "1", processors)
            with telemetry.rpc("Control.GetState", {"traceparent": PARENT}):
                pass
            telemetry.step(
                session_traceparent=PARENT,
                rollout_traceparent=ROLLOUT,
                start_ns=1,
                attributes={"kvtier.step": 3},
                bytes_by_tier={"nvme": 4096},
                stall_seconds=0.5,
            )
            telemetry.shutdown()
            assert len(made) == expected


def test_metric_names_carry_units_and_labels_are_closed() -> None:
    metrics = Metrics(CollectorRegistry())
    families = list(metrics.registry.collect())
    assert families
    units = (
        "_seconds",
        "_bytes",
        "_total",
        "_steps",
        "_sessions",
        "_chunks",
        "_flight",
        "_failures",
        "_differences",
        "_info",
    )
    for family in families:
        assert family.name.startswith("kvtier_agent_")
        assert family.name.endswith(units), family.name
        assert family.documentation


def test_a_child_is_looked_up_once_and_counts_every_time() -> None:
    metrics = Metrics(CollectorRegistry())
    for _ in range(3):
        metrics.frame_seconds["baseline", "OK"].observe(0.25)
        metrics.tier_read_bytes["dram",].inc(7)
    metrics.tier_read_bytes["nvme",].inc(1)
    value = metrics.registry.get_sample_value
    labels = {"arm": "baseline", "code": "OK"}
    assert value("kvtier_agent_frame_duration_seconds_count", labels) == 3.0
    assert value("kvtier_agent_tier_read_bytes_total", {"tier_class": "dram"}) == 21.0

    looked_up: list[tuple[str, ...]] = []
    children = ChildOf(lambda *values: looked_up.append(values) or list(values))
    assert children["a", "b"] is children["a", "b"]
    assert looked_up == [("a", "b")]


def test_what_was_read_for_another_frame_is_not_counted_again() -> None:
    metrics = Metrics(CollectorRegistry())
    frames = FrameDesk(cast(Any, None), cast(Any, None), metrics, FrameCount(1, metrics))
    for shared in (None, {"nvme": 40}, {"nvme": 64}):
        receipt = FrameReceipt(
            exactness=ExactnessClass.EXACT,
            manifest_digest="sha256:m",
            support_digest="sha256:s",
            frontier=1,
            rows_attended=1,
            bytes_by_tier={"dram": 7, "nvme": 64},
            plan=("nvme:near",),
            simulated=False,
            stall_seconds=0.0,
            producer_digest="sha256:p",
            estimated_omitted_mass=float("nan"),
            fallback="",
            snapshot_generation=1,
            shared_bytes_by_tier=shared,
        )
        answer = FrameAnswer(FrameResult(b"", receipt, None, False), ServedArm.BASELINE, "", None)
        frames.observe(cast(Any, None), 1, answer, 0)
    read = {
        tier: metrics.registry.get_sample_value("kvtier_agent_tier_read_bytes_total", {"tier_class": tier})
        for tier in ("dram", "nvme")
    }
    assert read == {"dram": 21.0, "nvme": 64.0 + 24.0}
