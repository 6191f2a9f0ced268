"""Runs the operator in a thread of its own, as its shipped ServiceAccount, against a real API server.

Helpers here know kubectl and the operator's start and stop; what is asserted belongs to the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier_operator.app import Operator, Options
from kvtier_operator.election import Timing
from kvtier_operator.ports import AgentTls, Kind
from kvtier_operator.telemetry import build_telemetry
from kvtier_operator.watch.triggers import RECONCILED
from tests.cluster.kvtier_localplane import Cluster, eventually

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEM = "kvtier-system"
QUICK = Timing(duration=6.0, renew=1.0, retry=0.5, margin=2.0)


def install(cluster: Cluster) -> None:
    """CRDs, RBAC and policies, as the chart ships them. Idempotent."""
    cluster.ensure_namespace(SYSTEM)
    cluster.apply_files(sorted((REPOSITORY / "crds").glob("*.yaml")))
    cluster.apply_files(sorted((REPOSITORY / "charts" / "kvtier" / "rbac").glob("*.yaml")))


@dataclass
class RunningOperator:
    """`operator` may be asked from this thread for its metrics and its calm only."""

    operator: Operator
    spans: InMemorySpanExporter
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    stop_event: asyncio.Event
    errors: list[BaseException] = field(default_factory=list)

    def stop(self, timeout: float = 60.0) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.stop_event.set)
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the operator did not stop"
        if self.errors:
            raise self.errors[0]

    def leading(self) -> bool:
        election = self.operator.election
        return election is not None and election.leading_since() is not None

    def writes(self, *, without: Sequence[str] = ("Lease",)) -> dict[str, float]:
        """`kvtier_operator_api_writes_total` by "kind verb", all kinds but those."""
        return {
            f"{sample.labels['kind']} {sample.labels['verb']}": sample.value
            for metric in self.operator.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "kvtier_operator_api_writes_total" and sample.labels["kind"] not in without
        }

    def reconciles(self) -> dict[str, float]:
        """Runs that ended so far, by kind."""
        totals: dict[str, float] = {}
        for metric in self.operator.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name == "kvtier_operator_reconcile_duration_seconds_count":
                    kind = sample.labels["kind"]
                    totals[kind] = totals.get(kind, 0) + sample.value
        return totals

    def reconcile_everything(self) -> Callable[[], bool]:
        """Puts every known key into its queue; what is returned tells when each has run once more."""
        before = self.reconciles()
        counts = {kind: len(self.operator.store.list_all(kind)) for kind in RECONCILED}
        self.loop.call_soon_threadsafe(self.operator.enqueue_all)

        def done() -> bool:
            after = self.reconciles()
            return self.idle() and all(
                after.get(kind.value, 0) - before.get(kind.value, 0) >= count
                for kind, count in counts.items()
                if count and kind is not Kind.KV_ROLLOUT
            )

        return done

    def idle(self) -> bool:
        asked = asyncio.run_coroutine_threadsafe(_async(self.operator.idle), self.loop)
        return bool(asked.result(60))


async def _async(function: Any) -> Any:
    return function()


def start_operator(
    cluster: Cluster,
    folder: Path,
    identity: str,
    timing: Timing = QUICK,
    *,
    server: str = "",
    token_file: Path | None = None,
) -> RunningOperator:
    """server: URL of something that stands before the API server. token_file: who asks, as a pod has it."""
    kubeconfig = cluster.service_account_kubeconfig(
        SYSTEM, "kvtier-operator", folder / f"{identity}.kubeconfig"
    )
    config = json.loads(kubeconfig.read_text(encoding="utf-8"))
    if server:
        config["clusters"][0]["cluster"] = {"server": server}
    if token_file is not None:
        config["users"][0]["user"] = {"tokenFile": str(token_file)}
    kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    certificate = cluster.issue_certificate(f"operator-{identity}", folder / "operator-tls")
    spans = InMemorySpanExporter()
    telemetry = build_telemetry(
        otlp_endpoint="", instance=identity, version="test", processors=(SimpleSpanProcessor(spans),)
    )
    options = Options(
        kubeconfig=str(kubeconfig),
        namespace=SYSTEM,
        identity=identity,
        tls=AgentTls(certificate.cert_file, certificate.key_file, certificate.ca_file),
        election=timing,
    )
    started = threading.Event()
    box: dict[str, Any] = {}
    errors: list[BaseException] = []

    async def run() -> None:
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        box["operator"] = Operator(options, telemetry)
        started.set()
        await box["operator"].run(box["stop"])

    def target() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=target, name=f"operator-{identity}", daemon=True)
    thread.start()
    assert started.wait(60), "the operator did not start"
    if errors:
        raise errors[0]
    return RunningOperator(box["operator"], spans, thread, box["loop"], box["stop"], errors)


@contextlib.contextmanager
def operator(
    cluster: Cluster,
    folder: Path,
    identity: str,
    timing: Timing = QUICK,
    *,
    server: str = "",
    token_file: Path | None = None,
) -> Iterator[RunningOperator]:
    """A leading operator; the Lease of one that was killed before is waited for."""
    running = start_operator(cluster, folder, identity, timing, server=server, token_file=token_file)
    try:
        eventually(running.leading, 60, what=f"{identity} leads")
        yield running
    finally:
        running.stop()


def apply(cluster: Cluster, *manifests: dict[str, Any]) -> None:
    for manifest in manifests:
        cluster.apply(manifest)


def condition(obj: dict[str, Any], type: str) -> dict[str, Any]:
    """That condition, of the object's current generation; empty when there is none."""
    for found in (obj.get("status") or {}).get("conditions") or []:
        if found["type"] == type and found.get("observedGeneration") == obj["metadata"]["generation"]:
            return dict(found)
    return {}


def wait_condition(
    cluster: Cluster,
    resource: str,
    namespace: str,
    type: str,
    status: str,
    *,
    reason: str = "",
    timeout: float = 60.0,
) -> dict[str, Any]:
    """The object once its condition says so; the failure shows the object and its events."""

    def look() -> dict[str, Any] | None:
        obj = cluster.get(resource, "-n", namespace)
        found = condition(obj, type)
        good = found.get("status") == status and (not reason or found.get("reason") == reason)
        return obj if good else None

    def explain() -> str:
        shown = cluster.kubectl("get", resource, "-n", namespace, "-o", "yaml", check=False).stdout
        events = cluster.kubectl("get", "events", "-n", namespace, check=False).stdout
        return f"{shown}\n{events}"

    found = eventually(look, timeout, what=f"{resource} {type}={status} {reason}", on_failure=explain)
    assert found is not None
    return found


def tier_class(name: str, medium: str) -> dict[str, Any]:
    capabilities: dict[str, Any] = {
        "dmaSource": True,
        "dmaDestination": True,
        "codecs": [{"name": "identity", "lossless": True}],
        "layouts": ["kv-head-major-f32/1"],
        "persistence": "process",
        "tenantIsolation": "shared",
        "alignmentBytes": 64,
        "checksum": "xxh3",
        "visibility": "hostFence",
    }
    if medium != "nvme":
        capabilities |= {"kernelReadable": True, "partialAttention": True}
    spec: dict[str, Any] = {"medium": medium, "capabilities": capabilities}
    if medium == "gpu":
        spec["deviceKind"] = "simulated"
    return _object("TierClass", name, "", spec)


def agent_pool(name: str, namespace: str, tiers: Sequence[str] = ("gpu-sim", "cpu-dram")) -> dict[str, Any]:
    return _object(
        "AgentPool",
        name,
        namespace,
        {
            "image": "kvtier/agent:test",
            "nodeSelector": {"kvtier.dev/test-pool": name},
            "tiers": [{"tierClassName": tier, "capacity": "256Mi"} for tier in tiers],
        },
    )


def kv_cache(
    name: str,
    namespace: str,
    pool: str,
    tiers: Sequence[tuple[str, str]] = (("gpu-sim", "32Mi"), ("cpu-dram", "64Mi")),
    **spec: Any,
) -> dict[str, Any]:
    return _object(
        "KVCache",
        name,
        namespace,
        {
            "poolRef": {"name": pool},
            "model": {
                "artifactDigest": f"sha256:{'ab' * 32}",
                "checkpoint": "tiny",
                "geometry": {"layers": 2, "queryHeads": 4, "kvHeads": 2, "headDim": 16, "dtype": "float32"},
                "rope": {"theta": "10000", "interleaved": False},
                "positionContract": "postRope",
            },
            "tiers": [
                {"tierClassName": tier, "budget": budget, "role": "resident"} for tier, budget in tiers
            ],
            **spec,
        },
    )


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": "kvtier.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
