"""A status of each kind as operator and agents report it, with what its columns must show."""

from __future__ import annotations

from typing import Any

OBSERVED = "2026-11-29T10:00:00Z"


def condition(type_: str, status: str, reason: str) -> dict[str, Any]:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": "told by a test",
        "lastTransitionTime": OBSERVED,
        "observedGeneration": 1,
    }


DIGEST = "sha256:" + "ab" * 32
STATUSES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "tc": ("gpu-sim", {"conditions": [condition("Accepted", "True", "Valid")]}, []),
    "ap": (
        "default",
        {
            "desired": 2,
            "ready": 1,
            "updated": 2,
            "conditions": [condition("Available", "False", "NotReady")],
        },
        ["2", "1", "2", "False"],
    ),
    "kvn": (
        "node-a",
        {
            "bootID": "b-1",
            "agentVersion": "0.1.0",
            "manifestSetDigest": DIGEST,
            "tiers": [
                {
                    "class": "gpu-sim",
                    "capacity": 1,
                    "used": 1,
                    "simulated": True,
                    "probes": {"oDirect": False},
                },
                {
                    "class": "nvme-local",
                    "state": "Failed",
                    "reason": "StorageUnavailable",
                    "message": "disk full",
                },
            ],
            "candidates": [
                {
                    "namespace": "serving",
                    "cache": "chat",
                    "cacheUID": "u-1",
                    "digest": DIGEST,
                    "stage": "Ramp",
                    "step": 2,
                    "fence": 17,
                }
            ],
            "conditions": [condition("Ready", "True", "Serving"), condition("Draining", "False", "No")],
        },
        ["default", "True", "False"],
    ),
    "kvc": (
        "chat",
        {
            "fence": 17,
            "servingNodes": 2,
            "baseline": {
                "digest": DIGEST,
                "short": "abababababab",
                "revision": "chat-6f8d",
                "budgets": [{"tierClassName": "cpu-dram", "bytes": 1 << 30}],
            },
            "approved": {
                "digest": DIGEST,
                "short": "cdcdcdcdcdcd",
                "rollout": "quest-on-chat",
                "blastRadius": {"tenants": ["beta"]},
                "holdback": "2%",
                "grantExpires": OBSERVED,
            },
            "ledger": [{"tierClassName": "gpu-sim", "budget": 1, "used": 1, "pinned": 0}],
            "plan": {"kappaCrit": "0.2", "predictedStall": "0.001", "inputs": {"rows": "1"}},
            "digestBudget": [{"digest": DIGEST, "attempts": 1}],
            "conditions": [condition("Ready", "True", "Proved")],
        },
        ["approximate", "abababababab", "cdcdcdcdcdcd", "2", "True"],
    ),
    "kvs": (
        "quest-64",
        {
            "guarantee": "upperBound",
            "needs": ["query"],
            "conditions": [condition("Accepted", "True", "Valid")],
        },
        ["quest", "upperBound", "True"],
    ),
    "kvr": (
        "quest-on-chat",
        {
            "phase": "RolledBack",
            "stage": "ExactBaseline",
            "step": 0,
            "attempt": 1,
            "fence": 17,
            "verdict": "Fail",
            "baseline": {"digest": DIGEST, "short": "abababababab", "revision": "chat-6f8d"},
            "candidate": {"digest": DIGEST, "short": "cdcdcdcdcdcd", "class": "approximate"},
            "gates": [
                {
                    "name": "tail",
                    "verdict": "Pass",
                    "reason": "BoundInsideLimit",
                    "value": "1.012",
                    "bound": "1.031",
                    "limit": "1.05",
                    "n": 18123,
                    "expectedN": 18000,
                    "k": "1.0",
                    "at": OBSERVED,
                }
            ],
            "schedule": {"dueAt": OBSERVED, "ranAt": OBSERVED, "lateBy": "15ms"},
            "rollback": {
                "cause": "GateFailed",
                "gate": "quality",
                "fromStage": "Canary",
                "targetDigest": DIGEST,
                "agentsRestored": 2,
                "agentsTotal": 2,
                "missing": [],
                "startedAt": OBSERVED,
                "verifiedAt": OBSERVED,
            },
            "lastIntent": {"seq": 4, "result": "Accepted"},
            "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
            "conditions": [condition("BaselineRestored", "True", "Proved")],
        },
        ["ExactBaseline", "0", "Fail", "cdcdcdcdcdcd", "abababababab"],
    ),
}
