"""The transformers adapter against a real agent process: typed refusals, arms, rollback, drain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvtier.v1 import common_pb2
from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from kvtier_client.pipe import Transport
from kvtier_core.errors import Reason
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import (
    CACHE,
    Agent,
    baseline_manifest,
    quest_candidate,
    running_agent,
    tiny_geometry,
)

pytestmark = pytest.mark.timeout(600)

CHUNK_BYTES = 256 * 2 * 2 * 64 * 4
# Three open chunks and one more in the gpu tier, two in the cpu tier: 1,000 tokens reach all three.
BUDGETS = {"gpu-sim": 4 * CHUNK_BYTES, "dram": 2 * CHUNK_BYTES, "nvme": 40 * (CHUNK_BYTES + 4096)}


@pytest.fixture(scope="module")
def manifest() -> RuntimeManifest:
    return baseline_manifest(tiny_geometry(layers=3), budgets=BUDGETS)


@pytest.fixture(scope="module")
def real_agent(manifest: RuntimeManifest) -> Iterator[Agent]:
    with running_agent() as started:
        started.apply_baseline(manifest)
        yield started


@pytest.fixture
def real_client(real_agent: Agent) -> Iterator[AttentionClient]:
    with AttentionClient(real_agent.socket_path) as connected:
        yield connected


@pytest.fixture
def open_cache(real_client: AttentionClient, tiny_model: Any) -> Callable[..., KvtierCache]:
    def opened(**change: Any) -> KvtierCache:
        fields: dict[str, Any] = {
            "namespace": CACHE.namespace,
            "name": CACHE.name,
            "model_fingerprint": declared_fingerprint(real_client, CACHE.namespace, CACHE.name),
            "config": tiny_model.config,
            "tenant": "alpha",
            "max_tokens": 2048,
        }
        return KvtierCache(real_client, **(fields | change))

    return opened


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (1, n), generator=torch.Generator().manual_seed(seed))


def test_generate_through_three_tiers_gives_dynamic_caches_tokens(
    open_cache: Callable[..., KvtierCache], tiny_model: Any
) -> None:
    ids = prompt(1000)
    want = tiny_model.generate(ids, max_new_tokens=24, do_sample=False)
    with attach(tiny_model), open_cache() as cache:
        assert torch.equal(tiny_model.generate(ids, cache=cache, max_new_tokens=24, do_sample=False), want)
        receipts = cache.take_receipts()
        outcome = cache.report_outcome()
    assert outcome.counted or outcome.why_not
    assert {tier for r in receipts for tier in r.bytes_by_tier} == {"gpu-sim", "dram", "nvme"}
    assert {r.exactness for r in receipts} == {"EXACT"}
    assert receipts[-1].simulated
    assert receipts[-1].frontier == 1023


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_a_ragged_batch_of_four_has_the_tokens_of_each_alone_and_of_dynamic_cache(
    real_agent: Agent, tiny_model: Any, transport: Transport
) -> None:
    """Twelve open chunks and two more in the gpu tier, two in the cpu tier, the rest in storage."""
    batch = common_pb2.CacheRef(namespace=CACHE.namespace, name="batch", uid="batch-uid")
    budgets = {**BUDGETS, "gpu-sim": 14 * CHUNK_BYTES}
    real_agent.apply_baseline(
        baseline_manifest(tiny_geometry(layers=3), cache=batch, budgets=budgets), cache=batch
    )
    lengths, new = (300, 270, 256, 40), 5
    ids, mask = torch.zeros(4, 300, dtype=torch.long), torch.zeros(4, 300, dtype=torch.long)
    for index, n in enumerate(lengths):
        ids[index, 300 - n :], mask[index, 300 - n :] = prompt(n, seed=index)[0], 1
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    want = tiny_model.generate(ids, attention_mask=mask, **options)[:, 300:]
    with AttentionClient(real_agent.socket_path, transport=transport) as client:
        fields: dict[str, Any] = {
            "namespace": batch.namespace,
            "name": batch.name,
            "model_fingerprint": declared_fingerprint(client, batch.namespace, batch.name),
            "config": tiny_model.config,
            "tenant": "alpha",
            "max_tokens": 512,
        }
        with attach(tiny_model), KvtierCache(client, batch_size=4, **fields) as cache:
            got = tiny_model.generate(ids, attention_mask=mask, cache=cache, **options)[:, 300:]
            receipts = cache.take_receipts()
            assert (cache.transport, bool(cache.why_grpc)) == (transport, transport == "grpc")
            assert cache.close() == sum(lengths) + 4 * (new - 1)
        assert torch.equal(got, want)
        assert {r.exactness for r in receipts} == {"EXACT"}
        assert {tier for r in receipts for tier in r.bytes_by_tier} == {"gpu-sim", "dram", "nvme"}
        for index, n in enumerate(lengths):
            with attach(tiny_model), KvtierCache(client, **fields) as cache:
                one = tiny_model.generate(ids[index : index + 1, 300 - n :], cache=cache, **options)
            assert torch.equal(one[0, n:], want[index])


REFUSED = [
    pytest.param({"model_fingerprint": "sha256:" + "0" * 64}, Reason.MODEL_MISMATCH, id="model"),
    pytest.param({"tenant": ""}, Reason.TENANT_MISMATCH, id="tenant"),
    pytest.param({"name": "nobody"}, Reason.CACHE_UNKNOWN, id="cache"),
    pytest.param({"uid": "older-uid"}, Reason.CACHE_UNKNOWN, id="re-created-cache"),
    pytest.param({"max_tokens": 10_000_000}, Reason.NO_DESTINATION_CAPACITY, id="too-long"),
    pytest.param({"score_scale": -1.0}, Reason.BAD_ARGUMENT, id="scale"),
    pytest.param({"probe": True, "forced_arm": "candidate"}, Reason.NO_CANDIDATE, id="no-candidate"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_the_agents_refusals_arrive_typed(
    open_cache: Callable[..., KvtierCache], change: dict[str, Any], reason: Reason
) -> None:
    with pytest.raises(KvtierError) as caught:
        open_cache(**change)
    assert caught.value.reason is reason
    assert caught.value.message
    assert caught.value.status


def test_another_geometry_is_refused(open_cache: Callable[..., KvtierCache], tiny_model: Any) -> None:
    config = type(tiny_model.config)(**(tiny_model.config.to_dict() | {"num_hidden_layers": 4}))
    with pytest.raises(KvtierError, match="layers 4") as caught:
        open_cache(config=config)
    assert caught.value.reason is Reason.GEOMETRY_MISMATCH


def test_a_context_past_its_declared_bound_is_refused(
    open_cache: Callable[..., KvtierCache], tiny_model: Any
) -> None:
    with attach(tiny_model), torch.no_grad(), open_cache(max_tokens=10) as cache:
        tiny_model(prompt(10), cache=cache)
        with pytest.raises(KvtierError, match="max_tokens 10"):
            tiny_model(prompt(1), cache=cache)


def test_a_candidate_answers_approximately_until_it_is_revoked(
    real_agent: Agent, manifest: RuntimeManifest, open_cache: Callable[..., KvtierCache], tiny_model: Any
) -> None:
    """After the rollback the session goes on, exactly, over the rows of its approximate history; a new one
    gets the exact run's tokens."""
    ids = prompt(600)
    want = tiny_model.generate(ids, max_new_tokens=6, do_sample=False)
    candidate = quest_candidate(manifest, tokens=128)
    real_agent.grant(manifest, candidate)
    with attach(tiny_model), torch.no_grad():
        with open_cache(probe=True, forced_arm="candidate") as cache:
            assert cache.arm == "candidate"
            tiny_model(ids, cache=cache)
            assert {r.exactness for r in cache.take_receipts()} == {"EXACT"}  # prefill reads every row
            tiny_model(prompt(1), cache=cache)
            steps = cache.take_receipts()
            assert {r.exactness for r in steps} == {"APPROXIMATE"}
            assert {r.manifest_digest for r in steps} == {candidate.digest()}
            assert all(r.rows_attended < r.frontier for r in steps)
            proof = real_agent.revoke()
            assert proof.baseline_digest == manifest.digest()
            tiny_model(prompt(1), cache=cache)
            after = cache.take_receipts()
            assert {r.exactness for r in after} == {"EXACT_OVER_APPROXIMATE_HISTORY"}
            assert {r.manifest_digest for r in after} == {manifest.digest()}
        with open_cache() as cache:
            got = tiny_model.generate(ids, cache=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, want)


def test_a_drained_agent_refuses_and_what_it_served_ends_typed(
    manifest: RuntimeManifest, tiny_model: Any
) -> None:
    with running_agent() as agent, AttentionClient(agent.socket_path, timeout=5.0) as client:
        agent.apply_baseline(manifest)
        with attach(tiny_model), torch.no_grad():
            cache = KvtierCache(
                client,
                namespace=CACHE.namespace,
                name=CACHE.name,
                model_fingerprint=declared_fingerprint(client, CACHE.namespace, CACHE.name),
                config=tiny_model.config,
                tenant="alpha",
                max_tokens=64,
                deadline_seconds=5.0,
            )
            tiny_model(prompt(4), cache=cache)
            assert agent.terminate() == 0
            with pytest.raises(KvtierError) as caught, cache:
                tiny_model(prompt(1), cache=cache)
        assert caught.value is cache.session.failure  # not the close that fails after it
        assert caught.value.reason in (Reason.DRAINING, Reason.SESSION_UNKNOWN)
        with pytest.raises(KvtierError) as caught:
            declared_fingerprint(client, CACHE.namespace, CACHE.name)
        assert caught.value.reason in (Reason.DRAINING, Reason.DEADLINE)
