"""The demo's parts: a checker that cannot be talked into success, a receiver that keeps what it got."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.cluster.kvtier_localplane import eventually
from tests.e2e.demo.claims import Claim, Ledger
from tests.e2e.demo.otlp_sink import OtlpSink, trace_tree
from tests.e2e.demo.report import Observations, RequestPoint, StagePoint, write_report
from tests.e2e.demo.stack import ROOT, number, place_arguments
from tests.e2e.demo.tasks import make_tasks, probe_plan

A, B = Claim("a", "first"), Claim("b", "second")


def test_a_claim_that_nobody_reached_fails() -> None:
    ledger = Ledger((A, B))
    ledger.check("a", True, "seen")
    assert not ledger.all_hold
    assert [r.facts for r in ledger.results] == ["seen", "not reached"]


def test_a_claim_that_failed_once_stays_failed() -> None:
    ledger = Ledger((A,))
    ledger.check("a", False, "first look")
    assert ledger.check("a", True, "second look") is False
    assert ledger.results[0].facts == "first look"


def test_an_unplanned_claim_is_an_error() -> None:
    with pytest.raises(KeyError, match="never planned"):
        Ledger((A,)).check("z", True, "")


def test_all_claims_checked_hold() -> None:
    ledger = Ledger((A, B))
    assert ledger.check("a", True, "x") and ledger.check("b", True, "y")
    assert ledger.all_hold


def test_tasks_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    assert make_tasks(3, 5) == make_tasks(3, 5)
    assert make_tasks(3, 5) != make_tasks(4, 5)


def test_the_answer_of_a_task_stands_in_its_prompt() -> None:
    for task in make_tasks(11, 40):
        assert task.answer in task.prompt
        assert not task.prompt.endswith(task.answer)


def test_the_probe_plan_names_every_prompt_by_digest() -> None:
    plan = json.loads(probe_plan(9, 6))
    assert [p["digest"] for p in plan["prompts"]] == [t.digest for t in make_tasks(9, 6)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(["--log-level", "info"], ["--log-level", "info", "--node-name", "n"], id="kept"),
        pytest.param(["--node-name", "$(NODE_NAME)"], ["--node-name", "n"], id="replaced"),
        pytest.param(["--node-name=$(NODE_NAME)"], ["--node-name", "n"], id="replaced with ="),
    ],
)
def test_arguments_of_the_daemon_set_are_placed(template: list[str], expected: list[str]) -> None:
    assert place_arguments(template, {"--node-name": "n"}, Path("/x")) == expected


def test_nvme_tiers_move_under_the_demos_folder() -> None:
    tier = json.dumps({"className": "nvme-local", "medium": "nvme", "device": {"path": "/var/lib/x"}})
    flag, value = place_arguments([f"--tier={tier}"], {}, Path("/elsewhere"))
    assert flag == "--tier"
    assert json.loads(value)["device"] == {"path": "/elsewhere"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("0.25", 0.25, id="decimal"),
        pytest.param(None, None, id="absent"),
        pytest.param("inf", None, id="no bound yet"),
        pytest.param("1e-3", 0.001, id="exponent"),
    ],
)
def test_status_figures_become_numbers(text: str | None, value: float | None) -> None:
    assert number(text) == value


def test_the_receiver_keeps_spans_that_come_over_a_socket() -> None:
    with OtlpSink() as sink:
        resource = Resource.create({"service.name": "probe", "service.instance.id": "one"})
        provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=sink.endpoint, insecure=True, timeout=60)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span("outer", attributes={"kvtier.gate.verdict": "Pass"}) as outer:
            trace_id = trace.format_trace_id(outer.get_span_context().trace_id)
            for _ in range(3):
                with tracer.start_as_current_span("inner"):
                    pass
        provider.shutdown()
        spans = sink.spans(trace_id)
    assert {(s.name, s.service, s.instance) for s in spans} == {
        ("outer", "probe", "one"),
        ("inner", "probe", "one"),
    }
    lines = trace_tree(spans)
    assert "outer [probe] verdict=Pass" in lines[0]
    assert "  inner [probe] x3" in lines[1], lines


def test_the_report_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    seen = Observations()
    seen.stages.append(StagePoint(1.0, "r", "Shadow", "Progressing"))
    seen.requests.append(RequestPoint(1.0, "candidate", 4, 0.5, 0.1))
    ledger = Ledger((Claim("a", "<script> is escaped"),))
    ledger.check("a", False, "because & so")
    write_report(tmp_path / "deep" / "report.html", seen, ledger.results, 12.0)
    text = (tmp_path / "deep" / "report.html").read_text()
    assert "&lt;script&gt; is escaped" in text
    assert "FAILS" in text
    assert "<img" not in text
    assert "<link" not in text
    assert text.count("<svg") >= 3


def test_a_child_is_gone_when_its_parent_was_killed(tmp_path: Path) -> None:
    sleeper = 'import sys, time; print(\'{"event": "up"}\', flush=True); time.sleep(600)'
    parent = (
        "import os, signal, sys; from pathlib import Path; from tests.e2e.demo.processes import Child;"
        f"child = Child('c', [sys.executable, '-c', {sleeper!r}], Path({str(tmp_path)!r}));"
        "child.wait_for('up', 300); print(child.process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    pid = int(done.stdout.split()[-1])
    eventually(lambda: not Path(f"/proc/{pid}").exists() or _state(pid) == "Z", timeout=500)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"
