"""The objects that the demo applies, as a user would write them for few requests.

A real rollout asks for more evidence (see docs/guides/rollouts.md): the numbers
here are small so that every verdict falls within minutes on two cores.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import yaml

from .stack import POOL, ROOT, SERVING
from .tasks import probe_plan

CACHE = "chat"
PROBE_SEED = 1234
PROBE_COUNT = 12
LEASE_TTL_S = 10
SANE_TOKENS = 48
RUINOUS_TOKENS = 16


def _examples(number: int) -> list[dict[str, Any]]:
    """The shipped example objects of one file, parsed."""
    (path,) = (ROOT / "crds" / "examples").glob(f"{number}-*.yaml")
    return [made for made in yaml.safe_load_all(path.read_text()) if made]


def _example(number: int, name: str, **spec: Any) -> dict[str, Any]:
    """The example of a kind under another name with some fields of its spec replaced."""
    made = copy.deepcopy(_examples(number)[0])
    made["metadata"]["name"] = name
    made["spec"] |= spec
    return made


def tier_classes() -> list[dict[str, Any]]:
    """The shipped three kinds of memory. The GPU tier runs on the CPU device and says so."""
    return _examples(10)


def agent_pool(otlp_endpoint: str) -> dict[str, Any]:
    return _example(
        20,
        POOL,
        nodeSelector={"kvtier.dev/demo": "true"},
        telemetry={"otlpEndpoint": otlp_endpoint},
    )


def kv_cache(artifact_digest: str) -> dict[str, Any]:
    """SmolLM2's cache with fast tiers smaller than a long context, so that its rows use all three tiers.

    Chunks of 32 rows, since the demo's prompts are short: with the default of 256 a prompt would fit
    into one open chunk and nothing would ever move.
    """
    made = _example(
        40,
        CACHE,
        poolRef={"name": POOL},
        chunkTokens=32,
        tiers=[
            {"tierClassName": "gpu-sim", "budget": "8Mi", "role": "resident"},
            {"tierClassName": "cpu-dram", "budget": "3Mi", "role": "resident"},
            {"tierClassName": "nvme-local", "budget": "512Mi", "role": "backing"},
        ],
    )
    made["spec"]["model"]["artifactDigest"] = artifact_digest
    return made


def selector(name: str, tokens: int) -> dict[str, Any]:
    budget = {"tokens": tokens, "capPolicy": "truncate"}
    return _example(50, name, budget=budget, persistentRows={"sink": 4, "recent": 8})


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
    """Declared for few requests; what real ones need is printed by the demo. A step takes about 120, of
    which 48 are the candidate's and not compared, as the ratio of the 60th percentiles needs."""
    small = {"minSamples": 30, "designEffect": "1"}
    half = {"minSamples": 30, "sampleFraction": "35%"}
    made = _example(
        60,
        name,
        cacheRef={"name": CACHE},
        candidate={"selectorRef": {"name": selector_name}},
        stages=[
            {"name": "Shadow", "minDuration": "5s", "minSamples": 30, "sampleFraction": "100%"},
            {"name": "Canary", "trafficFraction": "60%", "minDuration": "5s", **half},
            {"name": "Ramp", "steps": ["65%"], "stepDuration": "5s", **half},
            {"name": "Full", "soak": "5s", "holdback": "30%", **half},
        ],
        gates=[
            {"name": "output", "metric": "outputRelativeError", "quantile": 60, "max": "0.75", **small},
            {"name": "tail", "metric": "tpotRatio", "quantile": 60, "max": "3", **small},
            {"name": "stall", "metric": "exposedStallFraction", "max": "0.5", **small},
            {
                "name": "quality",
                "metric": "taskScoreDrop",
                "max": "0.25",
                "probeRef": {"name": "golden"},
                "scope": "ProbeSet",
            },
        ],
        evidence={"settle": "6s", "warmup": "0s"},
        leaseTTL=f"{LEASE_TTL_S}s",
        progressDeadline="10m",
    )
    del made["spec"]["blastRadius"]
    return made
