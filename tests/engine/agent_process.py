"""Starts a real `kvtier-agent --no-kubernetes` with certificates of its own, and speaks Control to it.

For tests and benchmarks of whoever needs a live agent: a context manager that gives the engine socket, a
Control stub over mutual TLS, and commands with fences that grow by themselves. Everything is on the loopback
and in a temporary folder; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvtier.v1 import common_pb2, control_pb2, control_pb2_grpc, evidence_pb2
from kvtier_crds.manifest import (
    Budget,
    CapPolicy,
    Checksum,
    Contract,
    Dtype,
    Exactness,
    Fallback,
    Geometry,
    Medium,
    Model,
    PersistentRows,
    Placement,
    PositionContract,
    Rope,
    RuntimeManifest,
    Selector,
    Tenancy,
    Tier,
    TierRole,
)
from tests.cluster.kvtier_localplane.pki import Certificate, CertificateAuthority
from tests.engine.agent_forks import AgentForks, Fork

START_SECONDS = 150.0
CALL_SECONDS = 30.0
NODE = "node-a"
CACHE = common_pb2.CacheRef(namespace="serving", name="chat", uid="cache-uid-1")


class AgentStartError(AssertionError):
    """The process ended before it was ready; carries its standard error."""


def default_tiers(folder: Path, capacity: str = "256Mi") -> list[dict[str, Any]]:
    """A simulated gpu tier, a cpu tier and an nvme tier in a folder; the shape of `--tier`."""
    return [
        {"className": "gpu-sim", "medium": "gpu", "deviceKind": "simulated", "capacity": capacity},
        {"className": "dram", "medium": "cpu", "capacity": capacity},
        {"className": "nvme", "medium": "nvme", "capacity": capacity, "device": {"path": str(folder)}},
    ]


def tiny_geometry(layers: int = 2, query_heads: int = 6, kv_heads: int = 2, head_dim: int = 64) -> Geometry:
    return Geometry(
        layers=layers, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=Dtype.FLOAT32
    )


def baseline_manifest(
    geometry: Geometry | None = None,
    *,
    cache: common_pb2.CacheRef = CACHE,
    budgets: Mapping[str, int] | None = None,
    chunk_tokens: int = 256,
    page_tokens: int = 16,
    artifact_digest: str = "sha256:" + "a" * 64,
) -> RuntimeManifest:
    """An exact manifest over `default_tiers`; budgets in bytes by class name (0 leaves the tier out)."""
    sizes = {"gpu-sim": 64 << 20, "dram": 64 << 20, "nvme": 64 << 20, **(budgets or {})}
    kinds = {
        "gpu-sim": (Medium.GPU, TierRole.RESIDENT, Checksum.XXH3),
        "dram": (Medium.CPU, TierRole.BACKING, Checksum.XXH3),
        "nvme": (Medium.NVME, TierRole.BACKING, Checksum.XXH3),
    }
    return RuntimeManifest(
        device_kind="simulated",
        tenancy=Tenancy(namespace=cache.namespace, cache_uid=cache.uid),
        model=Model(
            artifact_digest=artifact_digest,
            checkpoint="tiny",
            geometry=geometry or tiny_geometry(),
            rope=Rope(theta="10000"),
            position_contract=PositionContract.POST_ROPE,
        ),
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        tiers=tuple(
            Tier(
                tier_class_name=name,
                medium=kinds[name][0],
                role=kinds[name][1],
                budget_bytes=size,
                codec="identity",
                checksum=kinds[name][2],
            )
            for name, size in sizes.items()
            if size
        ),
        placement=Placement(policy="recency"),
        contract=Contract(exactness=Exactness.EXACT, allowed_fallbacks=(Fallback.WIDEN,), tolerance="0.001"),
    )


def quest_candidate(
    baseline: RuntimeManifest, tokens: int = 128, *, sink: int = 16, recent: int = 64
) -> RuntimeManifest:
    """The baseline with a Quest selector; differs in selector and contract only."""
    selector = Selector(
        family="quest",
        budget=Budget(tokens=tokens, cap_policy=CapPolicy.TRUNCATE),
        persistent_rows=PersistentRows(sink=sink, recent=recent),
    )
    contract = Contract(
        exactness=Exactness.APPROXIMATE,
        allowed_fallbacks=baseline.contract.allowed_fallbacks,
        tolerance=baseline.contract.tolerance,
    )
    return baseline.model_copy(update={"selector": selector, "contract": contract})


@dataclass
class Agent:
    """A running agent. Control calls raise grpc.RpcError; `detail_of` reads the typed refusal."""

    process: subprocess.Popen[str] | Fork
    socket_path: Path
    control_address: str
    boot_id: str
    channel: grpc.Channel
    control: Any
    folder: Path
    node: str
    authority: CertificateAuthority
    fences: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def fence(self, value: int | None = None, **more: Any) -> common_pb2.Fence:
        """The next fence, or the one asked for."""
        return common_pb2.Fence(value=next(self.fences) if value is None else value, **more)

    def channel_of(self, certificate: Certificate) -> grpc.Channel:
        """To Control, as the holder of a certificate."""
        return _channel(self.control_address, self.node, certificate)

    def state(self) -> control_pb2.GetStateResponse:
        answer: control_pb2.GetStateResponse = self.control.GetState(
            control_pb2.GetStateRequest(), timeout=CALL_SECONDS
        )
        return answer

    def apply_baseline(
        self,
        manifest: RuntimeManifest,
        *,
        cache: common_pb2.CacheRef = CACHE,
        fence: common_pb2.Fence | None = None,
    ) -> control_pb2.ApplyBaselineResponse:
        answer: control_pb2.ApplyBaselineResponse = self.control.ApplyBaseline(
            control_pb2.ApplyBaselineRequest(
                cache=cache,
                fence=fence or self.fence(),
                boot_id=self.boot_id,
                manifest=manifest.canonical(),
                digest=manifest.digest(),
            ),
            timeout=CALL_SECONDS,
        )
        return answer

    def grant(
        self,
        baseline: RuntimeManifest,
        candidate: RuntimeManifest,
        *,
        stage: str = "Canary",
        ttl_ms: int = 600_000,
        traffic: str = "1",
        sample: str = "0",
        rollout_uid: str = "rollout-uid",
        gates: Sequence[control_pb2.GateLimit] = (),
        settle_ms: int = 1_000,
        cache: common_pb2.CacheRef = CACHE,
        fence: int | None = None,
    ) -> control_pb2.GrantRequest:
        """Grants and returns the request, so that a test can renew, repeat or read by its content."""
        token = self.fence(fence, rollout_uid=rollout_uid, attempt=1, stage=stage)
        request = control_pb2.GrantRequest(
            cache=cache,
            fence=token,
            boot_id=self.boot_id,
            manifest=candidate.canonical(),
            digest=candidate.digest(),
            baseline_digest=baseline.digest(),
            ttl_ms=ttl_ms,
            traffic_fraction=traffic,
            sample_fraction=sample,
            window=evidence_pb2.WindowKey(
                rollout_uid=rollout_uid,
                attempt=1,
                stage=stage,
                candidate_digest=candidate.digest(),
                baseline_digest=baseline.digest(),
                gates_digest="sha256:gates",
                opening_fence=token.value,
            ),
            gates=gates,
            settle_ms=settle_ms,
            nonce=os.urandom(16),
        )
        self.control.Grant(request, timeout=CALL_SECONDS)
        return request

    def revoke(
        self,
        *,
        reason: str = "IntentAbort",
        nonce: bytes = b"nonce",
        cache: common_pb2.CacheRef = CACHE,
        fence: common_pb2.Fence | None = None,
    ) -> control_pb2.Proof:
        request = control_pb2.RevokeRequest(
            cache=cache,
            fence=fence or self.fence(stage="ExactBaseline"),
            boot_id=self.boot_id,
            reason=reason,
            nonce=nonce,
        )
        proof: control_pb2.Proof = self.control.Revoke(request, timeout=CALL_SECONDS).proof
        return proof

    def prove(
        self, fence: int, *, nonce: bytes = b"nonce", cache: common_pb2.CacheRef = CACHE
    ) -> control_pb2.Proof:
        request = control_pb2.ProveRequest(cache=cache, fence=common_pb2.Fence(value=fence), nonce=nonce)
        proof: control_pb2.Proof = self.control.Prove(request, timeout=CALL_SECONDS).proof
        return proof

    def wait_for_indexes(self, sessions: int = 1) -> None:
        """Until so many sessions of the candidate have theirs, which are built beside the steps while nobody
        else needs the processor. To be asked after the first steps, with what the indexes are made of."""

        def ready() -> bool:
            indexes = [one for cache in self.state().caches for one in cache.indexes if one.of_candidate]
            return sum(one.ready for one in indexes) >= sessions

        until(ready)

    def terminate(self, timeout: float = 90.0) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.process.kill()
        self.process.wait(60)


def until(found: Callable[[], bool], seconds: float = 200.0) -> None:
    """Waits for a condition of another process; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def detail_of(error: grpc.RpcError) -> common_pb2.ErrorDetail:
    """The typed refusal of a failed call."""
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == "kvtier-error-bin":
            return common_pb2.ErrorDetail.FromString(value)
    raise AssertionError(f"no ErrorDetail in {error}") from error


_forks: list[AgentForks] = []


@contextlib.contextmanager
def forked_agents() -> Iterator[None]:
    """Inside, `running_agent` forks its agents; outside, and where it is told to, they start from nothing."""
    forks = AgentForks()
    _forks.append(forks)
    try:
        yield
    finally:
        _forks.remove(forks)
        forks.close()


@contextlib.contextmanager
def running_agent(
    *,
    tiers: Sequence[Mapping[str, Any]] | Callable[[Path], Sequence[Mapping[str, Any]]] = default_tiers,
    folder: Path | None = None,
    extra: Sequence[str] = (),
    node: str = NODE,
    node_uid: str | None = None,
    cluster: Sequence[str] = ("--no-kubernetes",),
    from_nothing: bool = False,
) -> Iterator[Agent]:
    """A live agent; on exit it is terminated, killed if that takes long. With `folder` its state survives,
    so a second call is a restart on the same node. `cluster`: how it reaches an API server, if at all;
    `node_uid`: empty to have it asked there. `from_nothing`: as a program of its own, never as a fork."""
    with contextlib.ExitStack() as stack:
        base = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv")))
        authority = CertificateAuthority("kvtier-test-ca", base / "pki")
        server = authority.issue(node, base / "pki", san_ip=["127.0.0.1"])
        operator = authority.issue("kvtier-operator", base / "pki", server=False)
        chosen = tiers(base / "nvme") if callable(tiers) else tiers
        arguments = agent_arguments(base, node, server, chosen, node_uid=node_uid, cluster=cluster)
        process = _start(base, [*arguments, *extra], [] if from_nothing else _forks)
        try:
            ready = _wait_ready(process, base / "agent.log")
            channel = stack.enter_context(_channel(ready["control"], node, operator))
            yield Agent(
                process=process,
                socket_path=Path(ready["socket"]),
                control_address=ready["control"],
                boot_id=ready["bootID"],
                channel=channel,
                control=control_pb2_grpc.ControlStub(channel),  # type: ignore[no-untyped-call]
                folder=base,
                node=node,
                authority=authority,
            )
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)
            if process.stdout is not None:
                process.stdout.close()


def exit_of(base: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Status and standard error of an agent that ends by itself; `base`: a folder, made for its log."""
    base.mkdir()
    process = _start(base, arguments, _forks)
    try:
        code = process.wait(START_SECONDS)
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
    return code, (base / "agent.log").read_text()


def agent_arguments(
    base: Path,
    node: str,
    server: Certificate,
    tiers: Sequence[Mapping[str, Any]],
    *,
    node_uid: str | None = None,
    cluster: Sequence[str] = ("--no-kubernetes",),
) -> list[str]:
    """The command line without the program."""
    uid = f"{node}-uid" if node_uid is None else node_uid
    arguments = [
        *("--node-name", node, "--pool", "serving/pool", *(("--node-uid", uid) if uid else ())),
        *("--state-dir", str(base / "state"), "--run-dir", str(base / "run")),
        *("--listen", "127.0.0.1:0", "--drain", "5", *cluster),
        *("--tls-cert", str(server.cert_file), "--tls-key", str(server.key_file)),
        *("--tls-ca", str(server.ca_file)),
    ]
    for tier in tiers:
        arguments += ["--tier", json.dumps(tier)]
    return arguments


def _start(base: Path, arguments: Sequence[str], forks: Sequence[AgentForks]) -> subprocess.Popen[str] | Fork:
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "kvtier_agent", *arguments]
    with open(base / "agent.log", "ab") as log:
        if forks:
            return forks[-1].start(arguments, environment, log)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)


def _wait_ready(process: subprocess.Popen[str] | Fork, log: Path) -> dict[str, Any]:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    stdout = process.stdout
    threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
    try:
        line = lines.get(timeout=START_SECONDS)
    except queue.Empty:
        line = ""
    if not line:
        process.kill()
        raise AgentStartError(f"no ready line; exit {process.wait(10)}; {log.read_text()[-4000:]}")
    ready: dict[str, Any] = json.loads(line)
    assert ready["event"] == "ready"
    return ready


def _channel(address: str, node: str, operator: Certificate) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        operator.ca_file.read_bytes(), operator.key_file.read_bytes(), operator.cert_file.read_bytes()
    )
    options = [("grpc.ssl_target_name_override", node)]
    return grpc.secure_channel(address, credentials, options)
