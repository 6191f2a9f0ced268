"""`kvtier-operator`: reads the command line, runs the operator, ends within seconds on SIGTERM.

Prints one JSON line {"event": "ready", ...} on stdout when everything has been listed. Exit status 0 after a
signal, 1 when a part failed for good (the kubelet starts it again).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier_operator.footprint import give_back, one_heap, rare_collections, small_tls_buffers
from kvtier_operator.logs import configure

if TYPE_CHECKING:
    from kvtier_operator.app import Operator, Options

_log = logging.getLogger(__name__)

SPANS_SECONDS = 5.0
"""For the last spans to leave: a collector that is gone must not hold up the process' end."""
LEVELS = ("debug", "info", "warning", "error")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kvtier-operator", description=__doc__, allow_abbrev=False)
    made.add_argument("--kubeconfig", default="", help="path; absent: the pod's service account")
    made.add_argument("--namespace", required=True, help="the operator's own, for its Lease")
    made.add_argument("--identity", default="", help="holder of the Lease; absent: host name and process id")
    made.add_argument("--agent-tls-cert", type=Path, required=True, help="client certificate (PEM)")
    made.add_argument("--agent-tls-key", type=Path, required=True, help="its private key (PEM)")
    made.add_argument("--agent-tls-ca", type=Path, required=True, help="CA of the agents' certificates (PEM)")
    made.add_argument("--otlp-endpoint", default="", help="host:port for spans; absent: none are sent")
    made.add_argument("--metrics-port", type=int, default=None, help="absent: not served; 0: a free one")
    made.add_argument("--liveness-port", type=int, default=None, help="absent: not served; 0: a free one")
    made.add_argument("--bind-address", default="0.0.0.0", help="of both ports")
    made.add_argument(
        "--election-lease-seconds", type=float, default=15.0, help="duration of the operator's Lease (>= 6)"
    )
    made.add_argument(
        "--external-metrics", type=Path, default=None, help="file of sources for external gates (YAML)"
    )
    made.add_argument("--log-level", choices=LEVELS, default="info")
    return made


def options_from(arguments: argparse.Namespace) -> Options:
    """Raises ValueError naming the argument that is wrong."""
    # Imported when it runs: the clients of the API server take two seconds, and help needs none of them.
    from kvtier_operator.app import Options
    from kvtier_operator.election import Timing
    from kvtier_operator.external.config import load
    from kvtier_operator.ports import AgentTls

    duration = arguments.election_lease_seconds
    if duration < 6:
        raise ValueError(f"--election-lease-seconds: {duration:g}, must be at least 6")
    for name in ("agent_tls_cert", "agent_tls_key", "agent_tls_ca"):
        path: Path = getattr(arguments, name)
        if not path.is_file():
            raise ValueError(f"--{name.replace('_', '-')}: no such file: {path}")
    sources: Path | None = arguments.external_metrics
    try:
        external = load(sources) if sources is not None else None
    except (OSError, ValueError) as error:
        raise ValueError(f"--external-metrics: {error}") from error
    return Options(
        kubeconfig=arguments.kubeconfig or None,
        namespace=arguments.namespace,
        identity=arguments.identity or f"{socket.gethostname()}_{os.getpid()}",
        tls=AgentTls(arguments.agent_tls_cert, arguments.agent_tls_key, arguments.agent_tls_ca),
        metrics_port=arguments.metrics_port,
        liveness_port=arguments.liveness_port,
        bind_address=arguments.bind_address,
        election=Timing(
            duration=duration, renew=duration / 3, retry=min(2.0, duration / 6), margin=duration / 3
        ),
        external=external,
    )


async def serve(options: Options, otlp_endpoint: str) -> int:
    """Runs until SIGTERM or SIGINT (0), or a failure (1)."""
    from kvtier_operator.app import Operator
    from kvtier_operator.telemetry import build_telemetry

    telemetry = build_telemetry(
        otlp_endpoint=otlp_endpoint,
        instance=options.identity,
        version=importlib.metadata.version("kvtier"),
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    operator = Operator(options, telemetry)
    small_tls_buffers()
    rare_collections()
    beside = [asyncio.create_task(_announce(operator, options)), asyncio.create_task(give_back())]
    try:
        await operator.run(stop)
    except Exception:
        _log.exception("the operator failed")
        return 1
    finally:
        for task in beside:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        # A thread of its own, since whoever ends waits for those of the loop.
        last = threading.Thread(target=telemetry.shutdown, name="last-spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, SPANS_SECONDS)
    return 0


async def _announce(operator: Operator, options: Options) -> None:
    await operator.ready.wait()
    print(json.dumps({"event": "ready", "identity": options.identity}), flush=True)


def _end_now(_number: int, _frame: object) -> None:
    sys.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    # Process 1 of a container has no default action: a signal before the loop would be lost, and the process
    # killed half a minute later, with the Lease.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_now)
    one_heap()
    configure(arguments.log_level)
    try:
        options = options_from(arguments)
    except ValueError as error:
        print(f"kvtier-operator: {error}", file=sys.stderr)
        return 2
    return asyncio.run(serve(options, arguments.otlp_endpoint))


if __name__ == "__main__":
    sys.exit(main())
