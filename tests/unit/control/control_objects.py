"""Objects as the API server would hand them out, small and valid."""

from __future__ import annotations

from typing import Any

from kvtier_operator.ports import JsonObject

API = "kvtier.dev/v1alpha1"


def tier_class(name: str = "gpu-sim", medium: str = "gpu") -> JsonObject:
    capabilities = {
        "codecs": [{"name": "identity", "lossless": True}],
        "layouts": ["kv-head-major-f32/1"],
        "persistence": "process",
        "tenantIsolation": "shared",
        "alignmentBytes": 64,
        "checksum": "xxh3",
        "visibility": "hostFence",
    }
    spec: JsonObject = {"medium": medium, "capabilities": capabilities}
    if medium == "gpu":
        spec["deviceKind"] = "simulated"
    return {"apiVersion": API, "kind": "TierClass", "metadata": {"name": name}, "spec": spec}


def agent_pool(name: str = "default", namespace: str = "serving", **spec: Any) -> JsonObject:
    return {
        "apiVersion": API,
        "kind": "AgentPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "image": "kvtier/agent:1",
            "tiers": [
                {"tierClassName": "gpu-sim", "capacity": "256Mi"},
                {"tierClassName": "cpu-dram", "capacity": "512Mi", "reserve": "64Mi"},
            ],
            **spec,
        },
    }


def with_meta(obj: JsonObject, **metadata: Any) -> JsonObject:
    base = {
        "uid": f"uid-{obj['metadata']['name']}",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return obj | {"metadata": obj["metadata"] | base | metadata}


def kv_cache(name: str = "chat", namespace: str = "serving", **spec: Any) -> JsonObject:
    return {
        "apiVersion": API,
        "kind": "KVCache",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "poolRef": {"name": "default"},
            "model": {
                "artifactDigest": f"sha256:{'ab' * 32}",
                "checkpoint": "tiny",
                "geometry": {"layers": 2, "queryHeads": 4, "kvHeads": 2, "headDim": 16, "dtype": "float32"},
                "rope": {"theta": "10000", "interleaved": False},
                "positionContract": "postRope",
            },
            "tiers": [
                {"tierClassName": "gpu-sim", "budget": "32Mi", "role": "resident"},
                {"tierClassName": "cpu-dram", "budget": "64Mi", "role": "resident"},
            ],
            **spec,
        },
    }


def kv_selector(name: str = "quest-64", family: str = "quest", namespace: str = "serving") -> JsonObject:
    spec: JsonObject = {"family": family, family: {}, "budget": {"tokens": 64, "capPolicy": "truncate"}}
    return {
        "apiVersion": API,
        "kind": "KVSelector",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def kv_rollout(
    name: str = "go", cache: str = "chat", phase: str = "Progressing", fence: int = 5
) -> JsonObject:
    return {
        "apiVersion": API,
        "kind": "KVRollout",
        "metadata": {"name": name, "namespace": "serving"},
        "spec": {"cacheRef": {"name": cache}, "candidate": {"selectorRef": {"name": "quest-64"}}},
        "status": {"phase": phase, "stage": "Shadow", "fence": fence},
    }


def conditions(obj: JsonObject) -> dict[str, tuple[str, str]]:
    """Type -> (status, reason)."""
    return {c["type"]: (c["status"], c["reason"]) for c in obj["status"]["conditions"]}
