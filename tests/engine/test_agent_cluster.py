"""A real agent beside a real API server (the chart's RBAC, a Pod-bound token) and a real collector."""

from __future__ import annotations

import contextlib
import json
import queue
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvtier.v1 import control_pb2
from kvtier_crds.models.kvnode import KVNode
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.engine.agent_process import CALL_SECONDS, baseline_manifest, quest_candidate, running_agent
from tests.engine.attention_driver import Engine
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)

REPOSITORY = Path(__file__).resolve().parents[2]
NODE = "agent-node-a"
ACCOUNT = "kvtier-agent-pool"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def kubeconfig(control_plane: Cluster, tmp_path: Path) -> Path:
    """What a kubelet and the operator would have made: a Node, a bound Pod, the pool's account and role."""
    control_plane.ensure_namespace("kvtier-system")
    control_plane.ensure_namespace("serving")
    control_plane.apply_files(sorted((REPOSITORY / "charts" / "kvtier" / "crds").glob("*.yaml")))
    control_plane.apply_files(sorted((REPOSITORY / "charts" / "kvtier" / "rbac").glob("*.yaml")))
    where = {"name": ACCOUNT, "namespace": "serving"}
    apply(
        control_plane,
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": where},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": where,
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "kvtier-agent",
            },
            "subjects": [{"kind": "ServiceAccount", **where}],
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": NODE, "namespace": "serving"},
            "spec": {
                "nodeName": NODE,
                "serviceAccountName": ACCOUNT,
                "containers": [{"name": "agent", "image": "kvtier/agent"}],
            },
        },
    )
    return control_plane.service_account_kubeconfig(
        "serving", ACCOUNT, tmp_path / "kubeconfig", bound_pod=NODE
    )


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    listing = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    cluster.kubectl("apply", "--server-side", "-f", "-", input=listing)


def test_registration_drain_and_return(control_plane: Cluster, kubeconfig: Path) -> None:
    uid = control_plane.get("node", NODE)["metadata"]["uid"]

    def kv_node(ready: Callable[[KVNode], bool]) -> KVNode:
        def found() -> KVNode | None:
            model = KVNode.model_validate(control_plane.get("kvnode", NODE))
            return model if model.status is not None and ready(model) else None

        result = eventually(found, 120)
        assert result is not None
        return result

    def lease() -> dict[str, Any]:
        spec: dict[str, Any] = control_plane.get("lease", f"kvnode-{NODE}", "-n", "serving")["spec"]
        return spec

    cluster = ("--kubeconfig", str(kubeconfig))
    with running_agent(node=NODE, node_uid="", cluster=cluster, from_nothing=True) as agent:
        assert [path.name for path in (agent.folder / "nvme").iterdir()] == [uid]
        manifest = baseline_manifest()
        agent.apply_baseline(manifest)
        digest = agent.state().manifest_set_digest
        node = kv_node(lambda node: node.status is not None and node.status.manifest_set_digest == digest)
        assert node.spec.address == agent.control_address
        assert node.status is not None
        assert node.status.boot_id == agent.boot_id
        assert node.status.condition("Ready").status.value == "True"  # type: ignore[union-attr]
        stored = control_plane.get("kvnode", NODE)
        [owner] = stored["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Node", uid)
        eventually(lambda: lease()["holderIdentity"] == agent.boot_id, 60)
        renewed = lease()["renewTime"]
        eventually(lambda: lease()["renewTime"] > renewed, 60)
        written = control_plane.get("kvnode", NODE)["metadata"]["resourceVersion"]

        request = agent.grant(manifest, quest_candidate(manifest))
        node = kv_node(lambda node: bool(node.status and node.status.candidates))
        assert node.status is not None
        [held] = node.status.candidates
        assert (held.fence, held.digest) == (request.fence.value, request.digest)
        agent.grant(manifest, quest_candidate(manifest), ttl_ms=3_000)
        # It leaves the status when the lease has ended, though nobody told the agent.
        kv_node(lambda node: not (node.status and node.status.candidates))
        after = control_plane.get("kvnode", NODE)["metadata"]["resourceVersion"]
        assert written != after
        assert agent.terminate() == 0
        node = kv_node(lambda node: True)
        assert node.status is not None
        assert node.status.condition("Draining").status.value == "True"  # type: ignore[union-attr]
        assert not lease().get("holderIdentity")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP endpoint that keeps spans."""

    def __init__(self) -> None:
        self.spans: queue.Queue[Span] = queue.Queue()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, name: str) -> Span:
        while True:
            span = self.spans.get(timeout=60)
            if span.name == name:
                return span


@contextlib.contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield kept, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_one_trace_from_the_operators_call_to_the_step() -> None:
    with collector() as (kept, endpoint):
        port = free_port()
        extra = ("--otlp-endpoint", endpoint, "--metrics-port", str(port))
        with running_agent(extra=extra) as agent, Engine(agent.socket_path) as engine:
            manifest = baseline_manifest()
            agent.apply_baseline(manifest)
            request = agent.grant(
                manifest, quest_candidate(manifest), stage="Shadow", traffic="0", sample="1"
            )
            metadata = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
            agent.control.Grant(request, timeout=CALL_SECONDS, metadata=metadata)
            session = engine.open(manifest, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
            session.forward(600)
            session.forward(1)
            step = kept.wait_for("attention.step")
            session.close()
            agent.control.GetState(control_pb2.GetStateRequest(), timeout=CALL_SECONDS, metadata=metadata)
            state = kept.wait_for("Control.GetState")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as scraped:
                metrics = scraped.read().decode()
        assert step.trace_id.hex() == "a" * 32
        [link] = step.links
        assert link.trace_id.hex() == TRACE
        assert state.trace_id.hex() == TRACE
        assert 'kvtier_agent_rpc_duration_seconds_count{code="OK",method="Control.Grant"}' in metrics
        assert "kvtier_agent_compared_steps_total 1.0" in metrics
