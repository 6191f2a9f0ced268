"""What the command line accepts, and what it says when it does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier_operator import cli
from kvtier_operator.cli import options_from, parser


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    flags = []
    for flag in ("cert", "key", "ca"):
        path = tmp_path / f"{flag}.pem"
        path.write_text("pem")
        flags.append(f"--agent-tls-{flag}={path}")
    return ["--namespace=kvtier-system", *flags]


def test_the_smallest_command_line(files: list[str]) -> None:
    options = options_from(parser().parse_args(files))
    assert options.kubeconfig is None  # the pod's service account
    assert options.identity
    assert (options.metrics_port, options.liveness_port) == (None, None)
    assert options.election.duration == 15
    # The gate closes before others may lead, and there are tries left after one that failed.
    assert (
        options.election.renew + options.election.retry < options.election.duration - options.election.margin
    )


@pytest.mark.parametrize(
    "changed, words",
    [
        pytest.param(
            "--agent-tls-cert=/nowhere/a.crt", "--agent-tls-cert: no such file: /nowhere/a.crt", id="cert"
        ),
        pytest.param("--agent-tls-ca=/nowhere/ca.crt", "--agent-tls-ca: no such file", id="ca"),
        pytest.param(
            "--election-lease-seconds=5", "--election-lease-seconds: 5, must be at least 6", id="lease"
        ),
    ],
)
def test_what_cannot_be_used_is_named(files: list[str], changed: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options_from(parser().parse_args([*files, changed]))


def test_a_signal_before_the_loop_ends_the_process(files: list[str]) -> None:
    """By its own hand: as process 1 of a container it has no default action, and the signal would be lost."""
    program = (
        "import os, signal, sys\n"
        "from kvtier_operator import cli\n"
        "cli.options_from = lambda _: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(cli.main(sys.argv[1:]) or 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, *files], timeout=120, check=False)
    assert ended.returncode == 0


def test_spans_that_no_collector_takes_do_not_hold_up_the_end(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ends:
        def __init__(self, *_: object) -> None:
            self.ready = asyncio.Event()

        async def run(self, stop: asyncio.Event) -> None:
            return

    class Stuck:
        def shutdown(self) -> None:
            threading.Event().wait()

    monkeypatch.setattr(cli, "SPANS_SECONDS", 0.01)
    monkeypatch.setattr("kvtier_operator.app.Operator", Ends)
    monkeypatch.setattr("kvtier_operator.telemetry.build_telemetry", lambda **_: Stuck())
    monkeypatch.setattr(cli, "small_tls_buffers", lambda: None)
    monkeypatch.setattr(cli, "rare_collections", lambda: None)
    options = options_from(parser().parse_args(files))
    assert asyncio.run(asyncio.wait_for(cli.serve(options, ""), 60)) == 0


def test_sources_of_external_metrics_are_a_file(files: list[str], tmp_path: Path) -> None:
    assert options_from(parser().parse_args(files)).external is None
    sources = tmp_path / "sources.yaml"
    sources.write_text("prometheus: {url: 'https://prometheus.monitoring', tokenFile: /etc/token}\n")
    options = options_from(parser().parse_args([*files, f"--external-metrics={sources}"]))
    assert options.external is not None and options.external.prometheus is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("prometheus: {url: p}", "neither"), ("[", "not YAML"), ("a: 1", "unknown")],
    ids=["missing", "no-scheme", "not-yaml", "unknown-key"],
)
def test_a_file_of_sources_that_cannot_be_used_is_named(
    files: list[str], tmp_path: Path, text: str | None, words: str
) -> None:
    sources = tmp_path / "sources.yaml"
    if text is not None:
        sources.write_text(text)
    with pytest.raises(ValueError, match=f"--external-metrics: .*{words}"):
        options_from(parser().parse_args([*files, f"--external-metrics={sources}"]))


@pytest.mark.parametrize("seconds", [6, 15, 60])
def test_every_lease_leaves_a_try_before_the_gate_closes(files: list[str], seconds: int) -> None:
    timing = options_from(parser().parse_args([*files, f"--election-lease-seconds={seconds}"])).election
    jitter = 1 + timing.jitter
    assert (timing.renew + timing.retry) * jitter <= timing.duration - timing.margin
