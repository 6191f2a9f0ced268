"""`kvtier-agent`: reads the command line and starts one agent; exits 2 naming the flag at fault, 3 when its
Node's uid cannot be learnt, 4 when something would not end. `kvtier-agent inspect` looks at one."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvtier_agent.config import AgentConfig, ConfigError, KubernetesMode
from kvtier_agent.telemetry import configure_logging

EXIT_BAD_ARGUMENT = 2
EXIT_NO_NODE = 3
EXIT_CUT_OFF = 4
INSPECT = "inspect"


def build_parser() -> argparse.ArgumentParser:
    """Every flag with its default; required ones say so."""
    parser = argparse.ArgumentParser(
        prog="kvtier-agent",
        description="Runs the KV cache tiers of one node and answers attention from them.",
        epilog="kvtier-agent inspect --help: look at what a running agent or a store holds",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--node-name", required=True, help="name of the Kubernetes Node and of the KVNode")
    add(
        "--node-uid",
        default="",
        help="names this agent's folder in each tier; empty: asked by the Pod's token",
    )
    add("--pool", required=True, metavar="NAMESPACE/NAME", help="the AgentPool of this agent")
    add("--state-dir", default="/var/lib/kvtier", help="durable manifests and fences")
    add("--run-dir", default="/run/kvtier", help="engine sockets: RUN_DIR/NODE/engine.sock")
    add("--listen", default="0.0.0.0:7443", metavar="HOST:PORT", help="control service (mutual TLS)")
    add("--advertise", default="", metavar="HOST:PORT", help="address in the KVNode; empty: as --listen")
    add("--tls-cert", required=True, metavar="FILE", help="certificate whose name is the node's")
    add("--tls-key", required=True, metavar="FILE", help="its private key")
    add("--tls-ca", required=True, metavar="FILE", help="CA of the operator's client certificate")
    add(
        "--operator-name",
        default="kvtier-operator",
        metavar="NAME",
        help="common name or DNS name of the operator's certificate; control answers no other",
    )
    add(
        "--tier",
        action="append",
        default=[],
        metavar="JSON",
        help='repeatable; className, medium, deviceKind, capacity, device {"path" | "cudaIndex"}, reserve, '
        "persistence (nvme: process, node, durable), endurance {driveWritesPerDay, targetFraction}, "
        "readBytesPerSecond, writeBytesPerSecond, "
        "queueDepth",
    )
    add(
        "--key-dir",
        default="",
        metavar="DIR",
        help="encrypt what lies on nvme tiers under the keys of this folder; empty: in plain text",
    )
    add(
        "--key-secrets",
        default="",
        metavar="DIR",
        help="a folder of keys for each Secret that a cache may name (spec.keySecretRef): DIR/SECRET/KEY",
    )
    add(
        "--index-cpu-share",
        default="0.25",
        metavar="SHARE",
        help="of one processor, for building selectors' indexes beside the steps: above 0, at most 1",
    )
    add(
        "--index-memory",
        default="1Gi",
        metavar="BYTES",
        help="for selectors' indexes and rows that wait for them; a session beyond it is exact",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--kubeconfig", default="", metavar="FILE", help="empty: in-cluster service account")
    where.add_argument("--no-kubernetes", action="store_true", help="serve without registering a KVNode")
    add("--otlp-endpoint", default="", metavar="HOST:PORT", help="OTLP over gRPC; empty: no traces")
    add("--metrics-port", type=int, default=0, help="Prometheus; 0: off")
    add(
        "--session-idle",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="a session is idle; what then, its cache says",
    )
    add("--drain", type=float, default=20.0, metavar="SECONDS", help="deadline of the drain at SIGTERM")
    levels = ["debug", "info", "warning", "error"]
    add("--log-level", default="info", choices=levels, help="of the JSON log on standard error")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM, or inspects; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [INSPECT]:
        from kvtier_agent.inspectcli import main as inspect

        return inspect(given[1:])
    parsed = build_parser().parse_args(given)
    configure_logging(parsed.log_level)
    try:
        config = AgentConfig.from_arguments(parsed)
        return asyncio.run(_serve(config))
    except ConfigError as error:
        sys.stderr.write(f"kvtier-agent: {error}\n")
        return EXIT_BAD_ARGUMENT


async def _serve(config: AgentConfig) -> int:
    """The exit status."""
    # One thread: bits must not depend on how a reduction is split, and two cores serve many agents.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from kvtier_agent.blockhost import blocks_of
    from kvtier_agent.core_engine import build_engine, prepare_process
    from kvtier_agent.evidence_windows import EvidenceWindows
    from kvtier_agent.indexworker import IndexWorker, make_works
    from kvtier_agent.keyfiles import MountedKeys
    from kvtier_agent.server import AgentServer, unregistered

    register = unregistered
    if config.kubernetes is not KubernetesMode.NONE:
        # The client's models take a second to import.
        from kvtier_agent.nodeuid import NodeUidError, find_node_uid
        from kvtier_agent.registration import make_registration as register
        from kvtier_agent.registration import transport_of

        if not config.node_uid:
            transport = transport_of(config)
            try:
                config = replace(config, node_uid=await find_node_uid(transport, config.node_name))
            except NodeUidError as error:
                sys.stderr.write(f"kvtier-agent: {error}\n")
                return EXIT_NO_NODE
            finally:
                await transport.close()
    prepare_process()
    logging.getLogger("grpc").setLevel(logging.WARNING)
    worker = IndexWorker()
    works = make_works(worker, config.index_share, config.index_memory)
    keys = MountedKeys(config.key_dir, config.key_secrets)
    engines = partial(build_engine, keys=keys, indexes=works)
    server = AgentServer(config, engines, EvidenceWindows, register, blocks_of, works)
    left = [*await server.run(), *worker.close(config.limits.end_seconds)]
    if left:
        # Threads that hang cannot be ended, and the interpreter would wait for them.
        logging.getLogger(__name__).error("ended without %s", ", ".join(left))
        logging.shutdown()
        os._exit(EXIT_CUT_OFF)
    return 0
