"""The objects of the bench of release control: pools, caches and rollouts in every stage. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Json = dict[str, Any]
GROUP = "/apis/kvtier.dev/v1alpha1"
PLAN = json.dumps({"prompts": [{"digest": "a"}, {"digest": "b"}]})
PROBES = f"sha256:{hashlib.sha256(PLAN.encode()).hexdigest()}"
SELECTORS = {"quest-64": 64, "quest-32": 32}
LONG = "10h"


class Role(StrEnum):
    """What one rollout of the load is for: where it comes to rest, or that it never does."""

    SHADOW = "Shadow"
    CANARY = "Canary"
    RAMP = "Ramp"
    FULL = "Full"
    COMPLETED = "Completed"
    ROLLED_BACK = "RolledBack"
    WALKING = "Walking"
    PENDING = "Pending"


ROLES = tuple(Role)
HOLDING = frozenset({Role.SHADOW, Role.CANARY, Role.RAMP, Role.FULL})


@dataclass(frozen=True)
class Sizes:
    """How much of everything. pool_size: agents of a pool; each cache lies on all agents of its pool."""

    caches: int
    agents: int
    pool_size: int = 5
    namespaces: int = 10

    @property
    def pools(self) -> int:
        return max(1, self.agents // self.pool_size)

    def pool_of_agent(self, index: int) -> int:
        return min(self.pools - 1, index // self.pool_size)

    def pool_of_cache(self, index: int) -> int:
        return index % self.pools

    def namespace(self, pool: int) -> str:
        return f"bench-{pool % min(self.namespaces, self.pools)}"

    @property
    def spaces(self) -> list[str]:
        return sorted({self.namespace(pool) for pool in range(self.pools)})


@dataclass(frozen=True)
class Named:
    """One cache and its rollout."""

    index: int
    namespace: str
    role: Role

    @property
    def cache(self) -> str:
        return f"cache-{self.index:04d}"

    @property
    def rollout(self) -> str:
        return f"rollout-{self.index:04d}"

    @property
    def cache_path(self) -> str:
        return f"{collection(self.namespace, 'kvcaches')}/{self.cache}"

    @property
    def rollout_path(self) -> str:
        return f"{collection(self.namespace, 'kvrollouts')}/{self.rollout}"


def all_named(sizes: Sizes) -> list[Named]:
    """Roles go round within each pool, so that every pool has all of them."""
    return [
        Named(index, sizes.namespace(sizes.pool_of_cache(index)), ROLES[index // sizes.pools % len(ROLES)])
        for index in range(sizes.caches)
    ]


def pool_name(index: int) -> str:
    return f"pool-{index:03d}"


def node_name(index: int) -> str:
    return f"node-{index:03d}"


def collection(namespace: str, plural: str) -> str:
    return f"{GROUP}/namespaces/{namespace}/{plural}"


def agent_pool(name: str, namespace: str) -> Json:
    spec = {
        "image": "kvtier/agent:bench",
        "nodeSelector": {"kvtier.dev/test-pool": name},
        "tiers": [{"tierClassName": tier, "capacity": "64Gi"} for tier in ("gpu-sim", "cpu-dram")],
    }
    return _object("AgentPool", name, namespace, spec)


def selector(name: str, namespace: str) -> Json:
    spec = {
        "family": "quest",
        "quest": {},
        "budget": {"tokens": SELECTORS[name], "capPolicy": "truncate"},
        "persistentRows": {"sink": 4, "recent": 8},
    }
    return _object("KVSelector", name, namespace, spec)


def probe_plan(namespace: str) -> Json:
    metadata = {"name": "golden", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"plan.json": PLAN}}


def cache(name: str, namespace: str, pool: str) -> Json:
    geometry = {"layers": 2, "queryHeads": 4, "kvHeads": 2, "headDim": 16, "dtype": "float32"}
    spec = {
        "poolRef": {"name": pool},
        "model": {
            "artifactDigest": f"sha256:{'ab' * 32}",
            "checkpoint": "tiny",
            "geometry": geometry,
            "rope": {"theta": "10000", "interleaved": False},
            "positionContract": "postRope",
        },
        "tiers": [
            {"tierClassName": tier, "budget": budget, "role": "resident"}
            for tier, budget in (("gpu-sim", "8Mi"), ("cpu-dram", "16Mi"))
        ],
        "contract": {"exactness": "approximate"},
    }
    return _object("KVCache", name, namespace, spec)


def rollout(name: str, namespace: str, of: str, role: Role, *, lease: str = "60s", step: str = "1s") -> Json:
    """Comes to rest where its role says; step: how long the others last."""
    last = {
        Role.SHADOW: ("minDuration", 0),
        Role.CANARY: ("minDuration", 1),
        Role.RAMP: ("stepDuration", 2),
        Role.FULL: ("soak", 3),
    }.get(role)
    stages: list[Json] = [
        {"name": "Shadow", "minDuration": step, "sampleFraction": "100%"},
        {"name": "Canary", "trafficFraction": "50%", "minDuration": step},
        {"name": "Ramp", "steps": ["50%"], "stepDuration": step},
        {"name": "Full", "soak": step, "holdback": "50%"},
    ]
    for stage in stages:
        stage["minSamples"] = 30
    if last is not None:
        stages[last[1]][last[0]] = LONG
    small: Json = {"quantile": 75, "minSamples": 30, "designEffect": "1"}
    spec = {
        "cacheRef": {"name": of},
        "candidate": {"selectorRef": {"name": "absent" if role is Role.PENDING else "quest-64"}},
        "stages": stages,
        "gates": [
            {"name": "output", "metric": "outputRelativeError", "max": "0.5", **small},
            {"name": "tail", "metric": "tpotRatio", "max": "2", **small},
            {"name": "stall", "metric": "exposedStallFraction", "max": "0.5", "minSamples": 30}
            | {"designEffect": "1"},
            {"name": "quality", "metric": "taskScoreDrop", "max": "0.25", "scope": "ProbeSet"}
            | {"probeRef": {"name": "golden"}},
        ],
        "evidence": {"settle": "1s", "warmup": "0s"},
        "leaseTTL": lease,
        "progressDeadline": "72h",
    }
    return _object("KVRollout", name, namespace, spec)


def at_rest(role: Role, status: Json) -> bool:
    """Whether the rollout is where its role says."""
    stage, phase = status.get("stage"), status.get("phase")
    match role:
        case Role.COMPLETED | Role.ROLLED_BACK:
            return phase == role
        case Role.PENDING:
            return phase == "Pending"
        case Role.WALKING:
            return phase in ("Progressing", "Completed")
        case _:
            return stage == role and phase == "Progressing"


def _object(kind: str, name: str, namespace: str, spec: Json) -> Json:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "kvtier.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
