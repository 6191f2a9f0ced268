"""Samples shared by the vocabulary's tests: the checked-in examples and a manifest with every field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvtier_crds.manifest import RuntimeManifest
from kvtier_crds.models import KINDS, KVCache, KVSelector, Resource, TierClass

ROOT = Path(__file__).resolve().parents[3]
CRDS = ROOT / "crds"
EXAMPLES = CRDS / "examples"
INVALID = CRDS / "invalid"
BY_KIND: dict[str, type[Resource]] = {kind.KIND: kind for kind in KINDS}
UID = "5f0c9a52-8a0c-4a3e-9a58-2f6f0f6f1f11"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def examples() -> list[dict[str, Any]]:
    return [document for path in sorted(EXAMPLES.glob("*.yaml")) for document in documents(path)]


def example(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in examples() if one["kind"] == kind and one["metadata"]["name"] == name)


def tier_classes() -> dict[str, TierClass]:
    found = [TierClass.model_validate(one) for one in examples() if one["kind"] == "TierClass"]
    return {one.metadata.name: one for one in found}


def cache(**spec: Any) -> KVCache:
    document = example("KVCache", "chat")
    document["spec"] |= spec
    return KVCache.model_validate(document)


def selector(**spec: Any) -> KVSelector:
    document = example("KVSelector", "quest-64")
    document["spec"] |= spec
    return KVSelector.model_validate(document)


def full_document() -> dict[str, Any]:
    """A manifest of the first schema in which no field is absent, null or empty, so that each can be
    changed."""
    return {
        "schema": "kvtier.dev/manifest/v1",
        "numericsVersion": "f32-chunk-merge/2",
        "deviceKind": "cuda-sm90",
        "tenancy": {"namespace": "serving", "cacheUID": UID},
        "model": {
            "artifactDigest": "sha256:" + "a1" * 32,
            "checkpoint": "step-12000",
            "adapters": [
                {"name": "legal", "digest": "sha256:" + "b2" * 32},
                {"name": "style", "digest": "sha256:" + "c3" * 32},
            ],
            "geometry": {"layers": 30, "queryHeads": 9, "kvHeads": 3, "headDim": 64, "dtype": "float32"},
            "rope": {
                "theta": "100000",
                "scaling": {"type": "yarn", "parameters": {"factor": "8", "originalContext": 8192}},
                "interleaved": True,
            },
            "positionContract": "postRope",
        },
        "pageTokens": 16,
        "chunkTokens": 256,
        "tiers": [
            {
                "tierClassName": "gpu-h200",
                "medium": "gpu",
                "role": "resident",
                "budgetBytes": 17179869184,
                "codec": "identity",
                "checksum": "xxh3",
            },
            {
                "tierClassName": "nvme-local",
                "medium": "nvme",
                "role": "backing",
                "budgetBytes": 1099511627776,
                "codec": "identity",
                "checksum": "blake3",
            },
        ],
        "placement": {"policy": "recency", "parameters": {"pinned": True, "window": 4096}},
        "selector": {
            "family": "quest",
            "parameters": {"pageTokens": 16},
            "budget": {"tokens": 64, "bytes": None, "units": None, "capPolicy": "truncate"},
            "persistentRows": {"sink": 4, "recent": 16},
            "denseLayers": [0, 1],
            "seed": 7,
            "gate": {"maxEstimatedOmittedMass": "0.05", "minConfidence": "0.9", "widenSteps": 1},
        },
        "contract": {
            "exactness": "approximate",
            "allowedFallbacks": ["widen", "degrade"],
            "tolerance": "0.001",
        },
    }


def bounded_document() -> dict[str, Any]:
    """The same in the second schema."""
    admission = {
        "pinnedBytes": 1 << 30,
        "stagingBytes": 1 << 28,
        "linkBytes": 1 << 26,
        "queue": 128,
        "policy": "earliestDeadline",
    }
    return full_document() | {"schema": "kvtier.dev/manifest/v2", "admission": admission}


def full_manifest() -> RuntimeManifest:
    return RuntimeManifest.model_validate(full_document())
