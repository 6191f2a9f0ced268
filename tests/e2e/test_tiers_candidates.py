"""Candidates with other tiers from end to end: the operator, a real API server, a real agent's process and an
engine with a model, in one run. One walks to its adoption, the other fails a gate and returns."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier_client.client import AttentionClient
from kvtier_client.hf import KvtierCache, attach
from tests.cluster.kvtier_localplane import Cluster, EventuallyError, eventually
from tests.e2e.demo import objects
from tests.e2e.demo.otlp_sink import OtlpSink
from tests.e2e.demo.stack import NODES, SERVING, Stack, condition, stack, until
from tests.engine.tinymodel import tiny_llama

pytestmark = pytest.mark.timeout(600)

CACHE = "tiny"
NODE = NODES[0]
NEW = 4
# A chunk of 32 rows of 3 layers takes 96 KiB. The fast tiers hold less than two prompts.
CHUNK = 32
FIRST = (("gpu-sim", "1Mi"), ("cpu-dram", "4Mi"), ("nvme-local", "32Mi"))
SECOND = (("gpu-sim", "2Mi"), ("cpu-dram", "6Mi"), ("nvme-local", "32Mi"))
# No session of TOO_LONG rows, which take 12 MiB, finds room in these.
SMALL = (("gpu-sim", "1Mi"), ("cpu-dram", "3Mi"), ("nvme-local", "4Mi"))
TOO_LONG = 4000
PATIENCE = 180.0
# Requests of one stage at full speed, and at a time.
ENOUGH, BATCH = 32, 4


def tiers(budgets: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("resident", "resident", "backing")
    return [
        {"tierClassName": name, "budget": size, "role": role}
        for (name, size), role in zip(budgets, roles, strict=True)
    ]


def kv_cache() -> dict[str, Any]:
    made = objects.kv_cache(f"sha256:{'7' * 64}")
    made["metadata"]["name"] = CACHE
    made["spec"]["model"] |= {
        "checkpoint": "tiny",
        "geometry": {"layers": 3, "queryHeads": 6, "kvHeads": 2, "headDim": 64, "dtype": "float32"},
        "rope": {"theta": "10000", "interleaved": False},
    }
    made["spec"] |= {"chunkTokens": CHUNK, "tiers": tiers(FIRST)}
    return made


def rollout(name: str, budgets: Sequence[tuple[str, str]], **canary: str) -> dict[str, Any]:
    """Made for few requests: what real ones need is in the guide."""
    small = {"minSamples": 6, "designEffect": "1"}
    half = {"minSamples": 6, "sampleFraction": "40%"}
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVRollout",
        "metadata": {"name": name, "namespace": SERVING},
        "spec": {
            "cacheRef": {"name": CACHE},
            "candidate": {"overrides": {"tiers": tiers(budgets)}},
            "stages": [
                {"name": "Shadow", "minDuration": "1s", "minSamples": 6, "sampleFraction": "100%"},
                {"name": "Canary", "trafficFraction": "50%", "minDuration": "1s", **half, **canary},
                {"name": "Ramp", "steps": ["60%"], "stepDuration": "1s", **half},
                {"name": "Full", "soak": "1s", "holdback": "40%", **half},
            ],
            "gates": [
                # On a busy machine a step may take as long as it likes: these are not what is shown here.
                {"name": "tail", "metric": "tpotRatio", "quantile": 60, "max": "1000", **small},
                {"name": "stall", "metric": "exposedStallFraction", "max": "0.99", **small},
            ],
            "evidence": {"settle": "1s", "warmup": "0s"},
            "errorBudget": {"falsePromotion": "0.2"},
            # Evidence is looked at after a sixth of it.
            "leaseTTL": "18s",
            "progressDeadline": "10m",
        },
    }


@dataclass
class Served:
    """One session that is still open: what it was asked, and what it has answered."""

    cache: KvtierCache
    prompt: Tensor
    logits: list[Tensor] = field(default_factory=list)
    manifests: list[set[str]] = field(default_factory=list)
    exactness: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> list[int]:
        return [int(each.argmax()) for each in self.logits]


class Engine:
    """A model over one agent, and what it answered before there was any candidate."""

    def __init__(self, running: Stack) -> None:
        self.model = tiny_llama()
        self.client = AttentionClient(running.socket_path(NODE))
        generator = torch.Generator().manual_seed(5)
        lengths = (40, 71, 36, 60)
        self.prompts = [torch.randint(2, 97, (1, size), generator=generator) for size in lengths]
        self.dynamic = [self._dynamic(prompt, 3 * NEW) for prompt in self.prompts]
        self.attached = attach(self.model)
        self.expected = [self._whole(prompt, 3 * NEW) for prompt in self.prompts]

    def about(self) -> Any:
        return self.client.describe_cache(SERVING, CACHE)

    def open(self, prompt: int, *, max_tokens: int = 0) -> Served:
        ids = self.prompts[prompt]
        cache = KvtierCache(
            self.client,
            namespace=SERVING,
            name=CACHE,
            model_fingerprint=self.about().model_fingerprint,
            config=self.model.config,
            tenant="alpha",
            session_root_id=uuid.uuid4().hex,
            max_tokens=max_tokens or ids.shape[1] + 3 * NEW,
        )
        return Served(cache, ids)

    @torch.no_grad()
    def step(self, served: Served, count: int = 1) -> None:
        for _ in range(count):
            ids = torch.tensor([[served.tokens[-1]]]) if served.logits else served.prompt
            answer = self.model(ids, cache=served.cache, use_cache=True, logits_to_keep=1)
            served.logits.append(answer.logits[0, -1].clone())
            receipts = served.cache.take_receipts()
            served.manifests.append({one.manifest_digest for one in receipts})
            served.exactness |= {one.exactness for one in receipts}

    def request(self, prompt: int, **terms: int) -> Served:
        """One whole request of whichever arm it is given; its answer is checked."""
        served = self.open(prompt, **terms)
        try:
            self.step(served, NEW)
            served.cache.report_outcome()
        finally:
            served.cache.close()
        self.check(served, prompt)
        return served

    def check(self, served: Served, prompt: int) -> None:
        """Bit by bit what the baseline answered before anything was tried, and so token by token."""
        wanted = self.expected[prompt][: len(served.logits)]
        assert all(torch.equal(one, other) for one, other in zip(served.logits, wanted, strict=True))
        assert served.exactness == {"EXACT"}

    def _whole(self, prompt: Tensor, tokens: int) -> list[Tensor]:
        served = self.open([one is prompt for one in self.prompts].index(True))
        self.step(served, tokens)
        served.cache.close()
        return served.logits

    @torch.no_grad()
    def _dynamic(self, prompt: Tensor, tokens: int) -> list[int]:
        """By transformers' own cache."""
        made = self.model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        return list(made[0, prompt.shape[1] :].tolist())

    def close(self) -> None:
        self.attached.detach()
        self.client.close()


@pytest.fixture(scope="module")
def running(control_plane: Cluster) -> Iterator[Stack]:
    with OtlpSink() as sink, stack(control_plane, sink.endpoint, nodes=(NODE,)) as made:
        made.install()
        made.create_nodes()
        made.start_operator()
        made.apply(*objects.tier_classes(), objects.agent_pool(sink.endpoint))
        made.start_agents()
        made.apply(kv_cache())
        until("the cache to serve", lambda: is_true(made, "BaselineVerified"), PATIENCE, made)
        yield made


@pytest.fixture(scope="module")
def engine(running: Stack) -> Iterator[Engine]:
    made = Engine(running)
    yield made
    made.close()


def is_true(running: Stack, kind: str) -> bool:
    return condition(running.get("kvcache", CACHE), kind).get("status") == "True"


def status(running: Stack, name: str) -> dict[str, Any]:
    found: dict[str, Any] = running.get("kvrollout", name).get("status") or {}
    return found


def serve_until(engine: Engine, running: Stack, done: Callable[[], bool]) -> dict[str, set[str]]:
    """Requests one after the other; the arms that were served by the stage in which their agent was, when it
    was in the same one before and after. A stage that has had enough of them gets a few now and then."""
    seen: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, f"{counts}: {seen}"
        running.require_alive()
        stage = engine.about().window.stage
        for _ in range(BATCH):
            served = engine.request(sum(counts.values()) % len(engine.prompts))
            counts[stage] += 1
            before, stage = stage, engine.about().window.stage
            if before == stage:
                seen.setdefault(stage, set()).add(served.cache.arm)
        if counts[stage] >= ENOUGH:
            with contextlib.suppress(EventuallyError):
                eventually(partial(_moved, engine, stage, done), timeout=2.0)
    return seen


def _moved(engine: Engine, stage: str, done: Callable[[], bool]) -> bool:
    return bool(engine.about().window.stage != stage) or done()


def test_one_is_adopted_and_one_fails_a_gate_and_returns(running: Stack, engine: Engine) -> None:
    assert [[int(one.argmax()) for one in each] for each in engine.expected] == engine.dynamic
    first = running.get("kvcache", CACHE)["status"]["baseline"]["digest"]

    # A session that is there from the beginning to the end, one token now and then.
    lasting = engine.open(1)
    engine.step(lasting)
    running.apply(rollout("wider", SECOND))

    def ended() -> bool:
        if len(lasting.logits) < NEW:
            engine.step(lasting)
        phase = status(running, "wider").get("phase")
        assert phase not in ("Invalid", "RollingBack", "RolledBack"), status(running, "wider")
        return bool(phase == "Completed")

    seen = serve_until(engine, running, ended)
    found = status(running, "wider")
    second = found["candidate"]["digest"]
    assert second != first
    assert set(seen) >= {"Shadow", "Canary", "Ramp", "Full"}, seen
    assert "candidate" not in seen["Shadow"]
    assert all(seen[stage] == {"baseline", "candidate"} for stage in ("Canary", "Ramp", "Full")), seen
    until("the adoption", lambda: engine.about().baseline_digest == second, PATIENCE, running)
    until("its proof", lambda: is_true(running, "BaselineVerified"), PATIENCE, running)
    engine.step(lasting)
    engine.check(lasting, 1)
    assert (lasting.manifests[0], lasting.manifests[-1]) == ({first}, {second})
    assert engine.request(0).manifests == [{second}] * NEW

    # The next one has too little room for what it is asked in Canary.
    running.apply(rollout("narrower", SMALL, minDuration="10m"))
    serve_until(engine, running, lambda: engine.about().window.stage == "Canary")
    third = status(running, "narrower")["candidate"]["digest"]
    opened = (engine.open(n % 4) for n in range(64))
    there = list(islice((served for served in opened if served.cache.arm == "candidate"), 5))
    for served in there:
        engine.step(served, 2)
    away = [served for served in there if third in served.manifests[-1]]
    assert away, "some are in the candidate's engine"

    def returned() -> bool:
        engine.request(0, max_tokens=TOO_LONG)
        return status(running, "narrower").get("phase") == "RolledBack"

    serve_until(engine, running, returned)
    found = status(running, "narrower")["rollback"]
    assert (found["cause"], found["gate"]) == ("GateFailed", "allocationFailures"), found
    assert (found["targetDigest"], found["agentsRestored"], found["agentsTotal"]) == (second, 1, 1), found
    for served in (*there, lasting):
        engine.step(served, 2)
        assert served.manifests[-1] == {second}
        engine.check(served, next(n for n, one in enumerate(engine.prompts) if one is served.prompt))
        served.cache.close()
    assert engine.about().candidate_digest == ""
