"""The objects that the demo applies, as a user would write them for few requests.

A real rollout asks for more evidence (see docs/guides/rollouts.md): the numbers
here are small so that every verdict falls within minutes on two cores.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .stack import POOL, SERVING
from .tasks import probe_plan

API = "kvtier.dev/v1alpha1"
CACHE = "chat"
PROBE_SEED = 1234
PROBE_COUNT = 12
LEASE_TTL_S = 10
SANE_TOKENS = 48
RUINOUS_TOKENS = 16


def _object(kind: str, name: str, spec: dict[str, Any], namespace: str | None = SERVING) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec}


def tier_classes() -> list[dict[str, Any]]:
    """Three kinds of memory. The GPU tier runs on the CPU device and says so."""

    def capabilities(readable: bool, near: bool, persistence: str, visibility: str, checksum: str) -> Any:
        return {
            "kernelReadable": readable,
            "dmaSource": True,
            "dmaDestination": True,
            "partialAttention": near,
            "codecs": [{"name": "raw", "lossless": True}],
            "layouts": ["nhd"],
            "persistence": persistence,
            "tenantIsolation": "shared",
            "encryptionAtRest": "none",
            "alignmentBytes": 4096 if persistence == "node" else 64,
            "checksum": checksum,
            "visibility": visibility,
        }

    return [
        _object(
            "TierClass",
            "gpu-sim",
            {
                "medium": "gpu",
                "deviceKind": "simulated",
                "capabilities": capabilities(True, True, "process", "streamEvent", "xxh3"),
            },
            None,
        ),
        _object(
            "TierClass",
            "cpu-dram",
            {"medium": "cpu", "capabilities": capabilities(False, True, "process", "hostFence", "xxh3")},
            None,
        ),
        _object(
            "TierClass",
            "nvme-local",
            {"medium": "nvme", "capabilities": capabilities(False, False, "process", "hostFence", "xxh3")},
            None,
        ),
    ]


def agent_pool(nvme_path: str, otlp_endpoint: str) -> dict[str, Any]:
    return _object(
        "AgentPool",
        POOL,
        {
            "nodeSelector": {"kvtier.dev/demo": "true"},
            "image": "kvtier/agent:0.1.0",
            "stateDir": "/var/lib/kvtier",
            "tiers": [
                {"tierClassName": "gpu-sim", "capacity": "192Mi", "device": {"cudaIndex": 0}},
                {"tierClassName": "cpu-dram", "capacity": "192Mi"},
                {"tierClassName": "nvme-local", "capacity": "1Gi", "device": {"path": nvme_path}},
            ],
            "telemetry": {"otlpEndpoint": otlp_endpoint},
        },
    )


def kv_cache(artifact_digest: str) -> dict[str, Any]:
    """SmolLM2's cache with budgets smaller than a long context, so that its rows use all three tiers."""
    return _object(
        "KVCache",
        CACHE,
        {
            "poolRef": {"name": POOL},
            "model": {
                "artifactDigest": artifact_digest,
                "checkpoint": "SmolLM2-135M-Instruct",
                "geometry": {
                    "layers": 30,
                    "queryHeads": 9,
                    "kvHeads": 3,
                    "headDim": 64,
                    "dtype": "float32",
                },
                "rope": {"theta": "100000", "interleaved": False},
                "positionContract": "postRope",
            },
            "pageTokens": 16,
            "chunkTokens": 32,
            "tiers": [
                {"tierClassName": "gpu-sim", "budget": "12Mi", "role": "resident"},
                {"tierClassName": "cpu-dram", "budget": "4Mi", "role": "staging"},
                {"tierClassName": "nvme-local", "budget": "512Mi", "role": "backing"},
            ],
            "contract": {"exactness": "approximate", "allowedFallbacks": ["widen"], "tolerance": "0.001"},
        },
    )


def selector(name: str, tokens: int) -> dict[str, Any]:
    return _object(
        "KVSelector",
        name,
        {
            "family": "quest",
            "quest": {},
            "budget": {"tokens": tokens, "capPolicy": "truncate"},
            "persistentRows": {"sink": 4, "recent": 8},
            "denseLayers": [0, 1],
        },
    )


def probe_config() -> tuple[dict[str, Any], str]:
    """The ConfigMap a rollout names by probeRef, and the digest of its plan."""
    plan = probe_plan(PROBE_SEED, PROBE_COUNT)
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "golden", "namespace": SERVING},
        "data": {"plan.json": plan},
    }
    return made, "sha256:" + hashlib.sha256(plan.encode()).hexdigest()


def rollout(name: str, selector_name: str) -> dict[str, Any]:
    """Declared for few requests; what real ones need is printed by the demo."""
    small = {"quantile": 75, "minSamples": 30, "designEffect": "1"}
    return _object(
        "KVRollout",
        name,
        {
            "cacheRef": {"name": CACHE},
            "candidate": {"selectorRef": {"name": selector_name}},
            "stages": [
                {"name": "Shadow", "minDuration": "5s", "minSamples": 30, "sampleFraction": "100%"},
                {
                    "name": "Canary",
                    "trafficFraction": "50%",
                    "minDuration": "5s",
                    "minSamples": 30,
                    "sampleFraction": "50%",
                },
                {
                    "name": "Ramp",
                    "steps": ["55%"],
                    "stepDuration": "5s",
                    "minSamples": 30,
                    "sampleFraction": "50%",
                },
                {
                    "name": "Full",
                    "soak": "5s",
                    "holdback": "45%",
                    "minSamples": 30,
                    "sampleFraction": "50%",
                },
            ],
            "gates": [
                {"name": "output", "metric": "outputRelativeError", "max": "0.75", **small},
                {"name": "tail", "metric": "tpotRatio", "max": "2", **small},
                {
                    "name": "stall",
                    "metric": "exposedStallFraction",
                    "max": "0.5",
                    "minSamples": 30,
                    "designEffect": "1",
                },
                {
                    "name": "quality",
                    "metric": "taskScoreDrop",
                    "max": "0.25",
                    "probeRef": {"name": "golden"},
                    "scope": "ProbeSet",
                },
            ],
            "evidence": {"settle": "5s", "warmup": "0s"},
            "leaseTTL": f"{LEASE_TTL_S}s",
            "onLeaseExpired": "Resume",
            "progressDeadline": "10m",
        },
    )
