"""Brings up what the demo watches: API server, operator, two agents, as a cluster would.

There is no kubelet here. So this module does a kubelet's part and no more: it
creates Node and Pod objects, asks for Pod-bound tokens, and starts the agents
with the very arguments that the operator wrote into its DaemonSet.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.kvtier_localplane import Cluster, KubectlError, eventually
from tests.ports import free_port

from .processes import Child, installed

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "kvtier-system"
SERVING = "serving"
POOL = "default"
NODES = ("node-a", "node-b")


def say(text: str) -> None:
    """One line of progress with the time since the program started."""
    print(f"[{time.monotonic() - _START:6.1f}s] {text}", flush=True)


_START = time.monotonic()


def elapsed() -> float:
    """Seconds since the demo started."""
    return time.monotonic() - _START


@dataclass
class Stack:
    """Everything that runs; ``children`` are stopped in reverse order."""

    cluster: Cluster
    folder: Path
    otlp_endpoint: str
    children: dict[str, Child] = field(default_factory=dict)
    operator_generation: int = 0
    nodes: tuple[str, ...] = NODES

    # --- Kubernetes --------------------------------------------------------

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 60) -> str:
        return self.cluster.kubectl(*args, input=input, timeout=timeout).stdout

    def get(self, kind: str, name: str, namespace: str | None = SERVING) -> dict[str, Any]:
        """The object, or an empty dict when it is not there."""
        where = ["-n", namespace] if namespace else []
        try:
            found: dict[str, Any] = self.cluster.get(kind, name, *where)
        except KubectlError as error:
            if "(NotFound)" in str(error):
                return {}
            raise
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        """Server-side apply as a user would do it."""
        listing = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(listing))

    def install(self) -> None:
        """CRDs, RBAC and policy as files of the chart, applied as they are."""
        self.cluster.ensure_namespace(SYSTEM)
        self.cluster.ensure_namespace(SERVING)
        self.cluster.apply_files(sorted((ROOT / "crds").glob("*.yaml")))
        self.cluster.apply_files(sorted((ROOT / "charts" / "kvtier" / "rbac").glob("*.yaml")))

    def create_nodes(self) -> None:
        for name in self.nodes:
            labels = {"kubernetes.io/hostname": name, "kvtier.dev/demo": "true"}
            self.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})

    # --- processes ---------------------------------------------------------

    def start_operator(self) -> Child:
        """The operator under its own ServiceAccount, never as the admin."""
        self.operator_generation += 1
        name = f"operator-{self.operator_generation}"
        kubeconfig = self.cluster.service_account_kubeconfig(
            SYSTEM, "kvtier-operator", self.folder / f"{name}.kubeconfig"
        )
        tls = self.cluster.issue_certificate("kvtier-operator", self.folder / "tls-operator", server=False)
        child = Child(
            name,
            [
                *installed("kvtier-operator"),
                *("--kubeconfig", str(kubeconfig), "--namespace", SYSTEM, "--identity", name),
                *("--otlp-endpoint", self.otlp_endpoint, "--election-lease-seconds", "6"),
                *("--agent-tls-cert", str(tls.cert_file), "--agent-tls-key", str(tls.key_file)),
                *("--agent-tls-ca", str(self.cluster.ca_file)),
            ],
            self.folder,
        )
        self.children[name] = child
        child.wait_for("ready", 60)
        return child

    @property
    def operator(self) -> Child:
        return self.children[f"operator-{self.operator_generation}"]

    def socket_path(self, node: str) -> Path:
        return self.folder / "run" / node / "engine.sock"

    def start_agents(self) -> None:
        """A kubelet's part: Pods, Pod-bound tokens, processes with the DaemonSet's arguments."""
        daemon_set = eventually(lambda: self._owned_daemon_set(), timeout=60)
        template = daemon_set["spec"]["template"]["spec"]
        account = template["serviceAccountName"]
        eventually(lambda: self.get("serviceaccount", account), timeout=30)
        for node in self.nodes:
            self._start_agent(node, account, template["containers"][0]["args"])
        for node in self.nodes:
            self.children[f"agent-{node}"].wait_for("ready", 90)

    def _owned_daemon_set(self) -> dict[str, Any] | None:
        found: list[dict[str, Any]] = self.cluster.get("daemonsets", "-n", SERVING)["items"]
        return found[0] if found else None

    def _start_agent(self, node: str, account: str, template_args: list[str]) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"kvtier-agent-{node}", "namespace": SERVING},
            "spec": {
                "nodeName": node,
                "serviceAccountName": account,
                "automountServiceAccountToken": False,
                "containers": [{"name": "agent", "image": "kvtier/agent"}],
            },
        }
        self.apply(pod)
        kubeconfig = self.cluster.service_account_kubeconfig(
            SERVING,
            account,
            self.folder / f"agent-{node}.kubeconfig",
            bound_pod=f"kvtier-agent-{node}",
        )
        tls = self.cluster.issue_certificate(
            node, self.folder / f"tls-{node}", san_dns=(node,), san_ip=("127.0.0.1",)
        )
        port = free_port()
        args = place_arguments(
            template_args,
            {
                "--node-name": node,
                "--state-dir": str(self.folder / "state" / node),
                "--run-dir": str(self.folder / "run"),
                "--listen": f"127.0.0.1:{port}",
                "--advertise": f"127.0.0.1:{port}",
                "--tls-cert": str(tls.cert_file),
                "--tls-key": str(tls.key_file),
                "--tls-ca": str(self.cluster.ca_file),
                "--kubeconfig": str(kubeconfig),
                "--otlp-endpoint": self.otlp_endpoint,
                "--metrics-port": "0",
            },
            nvme_root=self.folder / "nvme",
        )
        self.children[f"agent-{node}"] = Child(f"agent-{node}", installed("kvtier-agent", *args), self.folder)

    def require_alive(self) -> None:
        for name, child in self.children.items():
            if not (name.startswith("operator-") and child is not self.operator):
                child.require_alive()

    def stop(self) -> None:
        for child in reversed(list(self.children.values())):
            child.stop()


def place_arguments(template: list[str], own: dict[str, str], nvme_root: Path) -> list[str]:
    """The DaemonSet's arguments with what only this machine knows put in place.

    ``own`` replaces flags of the template (which hold downward-API references
    or in-cluster paths); nvme tiers move under ``nvme_root``.
    """
    args: list[str] = []
    pending = list(template)
    while pending:
        word = pending.pop(0)
        flag, equals, value = word.partition("=")
        if not equals and flag.startswith("--") and pending and not pending[0].startswith("--"):
            value = pending.pop(0)
        if flag in own or flag == "--in-cluster":
            continue
        if flag == "--tier":
            tier = json.loads(value)
            if tier["medium"] == "nvme":
                tier["device"] = {"path": str(nvme_root)}
            value = json.dumps(tier)
        args += [flag, value] if value else [flag]
    for flag, value in own.items():
        args += [flag, value]
    return args


@contextlib.contextmanager
def stack(
    cluster: Cluster, otlp_endpoint: str, keep: Path | None = None, nodes: tuple[str, ...] = NODES
) -> Iterator[Stack]:
    """A stack whose processes and files are gone afterwards (files stay when ``keep`` is given)."""
    folder = keep or Path(tempfile.mkdtemp(prefix="kvtier-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvme").mkdir(exist_ok=True)
    running = Stack(cluster, folder, otlp_endpoint, nodes=nodes)
    try:
        yield running
    except BaseException:
        for child in running.children.values():
            print(child.tail(15), file=sys.stderr)
        raise
    finally:
        running.stop()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def until(what: str, probe: Callable[[], Any], timeout: float, running: Stack) -> Any:
    """Poll ``probe`` until it is truthy; fails early when a process of the stack has ended."""

    def look() -> Any:
        running.require_alive()
        return probe()

    return eventually(look, timeout=timeout, what=what)


def condition(obj: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition of an object, or an empty dict."""
    rows = obj.get("status", {}).get("conditions", [])
    return next((c for c in rows if c.get("type") == kind), {})


def number(text: Any) -> float | None:
    """A status figure as a float; None when it is absent or no number."""
    match = re.fullmatch(r"-?\d+(\.\d+)?([eE]-?\d+)?", str(text)) if text is not None else None
    return float(match.group(0)) if match else None
