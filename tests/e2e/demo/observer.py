"""Watches what a user could watch, once a second, and keeps it for the report.

Reads through the API as any client would; it never writes and decides nothing.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kubernetes import client, config

from .objects import CACHE
from .report import BytesPoint, GatePoint, Observations, RequestPoint, StagePoint
from .stack import SERVING, elapsed, number, say

GROUP, VERSION = "kvtier.dev", "v1alpha1"


class Observer:
    """A thread that polls rollouts, the cache and nodes; stops on ``close``."""

    def __init__(self, kubeconfig: Path, seen: Observations) -> None:
        api_client = config.new_client_from_config(str(kubeconfig))
        self._api = client.CustomObjectsApi(api_client)
        self.seen = seen
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, int, str]] = {}
        self._rollouts: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[tuple[float, str, str]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def rollout(self, name: str) -> dict[str, Any]:
        """The last seen object, or an empty dict."""
        with self._lock:
            return self._rollouts.get(name, {})

    def cache(self) -> dict[str, Any]:
        return self._api.get_namespaced_custom_object(GROUP, VERSION, SERVING, "kvcaches", CACHE)

    def nodes(self) -> list[dict[str, Any]]:
        return self._api.list_cluster_custom_object(GROUP, VERSION, "kvnodes")["items"]

    def stages_of(self, name: str) -> list[str]:
        """The stages a rollout was seen in, in order, repeats folded."""
        with self._lock:
            found = [stage for _, stage, _ in self.history.get(name, [])]
        return [s for i, s in enumerate(found) if i == 0 or found[i - 1] != s]

    def take_request(self, event: dict[str, Any]) -> None:
        self.seen.requests.append(
            RequestPoint(elapsed(), event["arm"], event["tokens"], event["seconds"], event["per_token"])
        )

    def _run(self) -> None:
        while not self._stop.wait(0.7):
            try:
                self._look()
            except Exception as error:  # the observer only reports; the scenarios decide
                say(f"observer: {type(error).__name__}: {str(error)[:120]}")

    def _look(self) -> None:
        items = self._api.list_namespaced_custom_object(GROUP, VERSION, SERVING, "kvrollouts")["items"]
        now = elapsed()
        for item in items:
            self._take(item, now)
        for node in self.nodes():
            for tier in node.get("status", {}).get("tiers", []):
                used = number(tier.get("used"))
                simulated = bool(tier.get("simulated"))
                name = str(tier.get("tierClassName") or tier.get("class"))
                self.seen.tiers.append(
                    BytesPoint(now, node["metadata"]["name"], name, int(used or 0), simulated)
                )

    def _take(self, item: dict[str, Any], now: float) -> None:
        name, status = item["metadata"]["name"], item.get("status", {})
        stage, step, phase = status.get("stage", "Off"), status.get("step", 0), status.get("phase", "Pending")
        with self._lock:
            self._rollouts[name] = item
            if self._last.get(name) != (stage, step, phase):
                self._last[name] = (stage, step, phase)
                self.history.setdefault(name, []).append((now, stage, phase))
                say(f"  {name}: {phase}, stage {stage}" + (f" step {step}" if stage == "Ramp" else ""))
        self.seen.stages.append(StagePoint(now, name, stage, phase))
        for gate in status.get("gates", []):
            self.seen.gates.append(
                GatePoint(
                    now,
                    name,
                    gate["name"],
                    gate.get("verdict", ""),
                    number(gate.get("value")),
                    number(gate.get("bound")),
                    number(gate.get("limit")),
                    stage,
                )
            )
