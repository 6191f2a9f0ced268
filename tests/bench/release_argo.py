"""Argo Rollouts beside ours: from a measurement that failed to the abort that is written down.

One canary of Argo's with a metric that it asks us for; no kubelet and no ReplicaSet controller is there, so
this says for ReplicaSets that their pods are available. It must not know our own rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tests.bench.release_api import Admin, Json, until
from tests.bench.release_processes import end_with_parent
from tests.cluster.kvtier_localplane import Cluster, find_argo_rollouts
from tests.ports import free_port

SPACE = "argo"
NAME = "peer"
GROUP = f"/apis/argoproj.io/v1alpha1/namespaces/{SPACE}"
SETS = f"/apis/apps/v1/namespaces/{SPACE}/replicasets"
REPLICAS = 10
SECONDS = 300.0
CRDS = ("rollout", "analysis-run", "analysis-template", "cluster-analysis-template", "experiment")


@dataclass
class Argo:
    """One Rollout and what is seen of it. `good`: what the metric says; failed_at: when it first said no."""

    admin: Admin
    pid: int
    good: bool = True
    asked: int = 0
    failed_at: float = 0.0
    rollout: Json = field(default_factory=dict)
    sets: dict[str, Json] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    aborted_at: float = 0.0
    scaled_at: float = 0.0
    revision: int = 0

    async def round(self) -> float:
        """A new revision goes out as a canary, its metric fails, the abort is written: seconds from the
        answer that failed until the Rollout is Degraded and the canary's ReplicaSet has no replicas."""
        self.good, self.failed_at, self.aborted_at, self.scaled_at = True, 0.0, 0.0, 0.0
        self.revision += 1
        label = {"metadata": {"labels": {"app": NAME, "revision": str(self.revision)}}}
        # An aborted Rollout begins again with another template.
        await self.admin.merge(f"{GROUP}/rollouts/{NAME}", {"spec": {"template": label}})
        await until(self._canary_runs, SECONDS, lambda: f"no canary: {self.rollout.get('status')}")
        asked = self.asked
        await until(lambda: self.asked > asked, SECONDS, lambda: "nobody asks for the metric")
        self.good = False
        await until(
            lambda: bool(self.aborted_at and self.scaled_at), SECONDS, lambda: f"{self.rollout.get('status')}"
        )
        return max(self.aborted_at, self.scaled_at) - self.failed_at

    def seen_rollout(self, kind: str, obj: Json, now: float) -> None:
        self.rollout = obj
        status = obj.get("status") or {}
        if (
            self.failed_at
            and not self.aborted_at
            and status.get("abort")
            and status.get("phase") == "Degraded"
        ):
            self.aborted_at = now

    def seen_set(self, kind: str, obj: Json, now: float) -> None:
        name = obj["metadata"]["name"]
        if kind == "DELETED":
            self.sets.pop(name, None)
            return
        self.sets[name] = obj
        self.changed.set()
        mine = obj["spec"]["template"]["metadata"]["labels"].get("revision") == str(self.revision)
        if self.failed_at and not self.scaled_at and mine and obj["spec"]["replicas"] == 0:
            self.scaled_at = now

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        if not self.good and not self.failed_at:
            self.failed_at = time.monotonic()
        return web.json_response({"ok": 1 if self.good else 0})

    async def be_the_kubelets(self) -> None:
        """Says of each ReplicaSet that the pods it asks for are available, until cancelled."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            for name, obj in list(self.sets.items()):
                wanted, generation = int(obj["spec"]["replicas"]), obj["metadata"]["generation"]
                names = ("replicas", "fullyLabeledReplicas", "readyReplicas", "availableReplicas")
                status: Json = {"observedGeneration": generation, **dict.fromkeys(names, wanted)}
                told = obj.get("status") or {}
                if any((told.get(key) or 0) != value for key, value in status.items()):
                    await self.admin.merge(f"{SETS}/{name}/status", {"status": status})

    def _canary_runs(self) -> bool:
        status = self.rollout.get("status") or {}
        current = ((status.get("canary") or {}).get("currentBackgroundAnalysisRunStatus") or {}).get("status")
        mine = status.get("observedGeneration") == str(self.rollout["metadata"]["generation"])
        return mine and not status.get("abort") and current == "Running" and self._canary_has_pods()

    def _canary_has_pods(self) -> bool:
        return any(
            obj["spec"]["template"]["metadata"]["labels"].get("revision") == str(self.revision)
            and (obj.get("status") or {}).get("availableReplicas")
            for obj in self.sets.values()
        )


@contextlib.asynccontextmanager
async def argo(cluster: Cluster, admin: Admin, folder: Path) -> AsyncIterator[Argo]:
    """Built, installed and running, with one Rollout that is stable."""
    program, crds = await asyncio.to_thread(find_argo_rollouts)
    files = [crds / f"{name}-crd.yaml" for name in CRDS]
    await asyncio.to_thread(cluster.apply_files, files, timeout=SECONDS)
    await asyncio.to_thread(cluster.ensure_namespace, SPACE)
    async with contextlib.AsyncExitStack() as stack:
        process = _start(program, cluster, folder)
        stack.push_async_callback(asyncio.to_thread, _end, process)
        peer = Argo(admin, process.pid)
        port = await stack.enter_async_context(_serving(peer))
        tasks = [
            asyncio.create_task(admin.watch(f"{GROUP}/rollouts", peer.seen_rollout)),
            asyncio.create_task(admin.watch(SETS, peer.seen_set)),
            asyncio.create_task(peer.be_the_kubelets()),
        ]
        stack.push_async_callback(_cancel, tasks)
        await admin.create(f"{GROUP}/analysistemplates", _template(port))
        await admin.create(f"{GROUP}/rollouts", _rollout())
        await until(
            lambda: (peer.rollout.get("status") or {}).get("phase") == "Healthy",
            SECONDS,
            lambda: f"never healthy: {peer.rollout.get('status')}; {process.poll()=}; {_last_words(folder)}",
        )
        yield peer


def _start(program: Path, cluster: Cluster, folder: Path) -> subprocess.Popen[bytes]:
    argv = [
        *(str(program), f"--kubeconfig={cluster.admin_kubeconfig}", "--leader-elect=false"),
        *(f"--metricsPort={free_port()}", f"--healthzPort={free_port()}", "--loglevel=warn"),
        *("--namespaced", f"--namespace={SPACE}"),
    ]
    with (folder / "argo.log").open("ab") as log:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent
        )


def _last_words(folder: Path) -> str:
    return (folder / "argo.log").read_text(errors="replace")[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(15)


@contextlib.asynccontextmanager
async def _serving(peer: Argo) -> AsyncIterator[int]:
    application = web.Application()
    application.add_routes([web.get("/metric", peer.answer)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _template(port: int) -> Json:
    metric = {
        "name": "quality",
        "interval": "1s",
        "successCondition": "result == 1",
        "failureLimit": 0,
        "provider": {"web": {"url": f"http://127.0.0.1:{port}/metric", "jsonPath": "{$.ok}"}},
    }
    metadata = {"name": "quality", "namespace": SPACE}
    kind = "AnalysisTemplate"
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": kind,
        "metadata": metadata,
        "spec": {"metrics": [metric]},
    }


def _rollout() -> Json:
    canary = {
        "analysis": {"templates": [{"templateName": "quality"}]},
        "steps": [{"setWeight": 50}, {"pause": {}}],
    }
    container = {"name": "app", "image": "kvtier/peer:bench"}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Rollout",
        "metadata": {"name": NAME, "namespace": SPACE},
        "spec": {
            "replicas": REPLICAS,
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": {"app": NAME}},
            "template": {
                "metadata": {"labels": {"app": NAME, "revision": "0"}},
                "spec": {"containers": [container]},
            },
            "strategy": {"canary": canary},
        },
    }
