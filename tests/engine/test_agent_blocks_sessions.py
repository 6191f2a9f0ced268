"""Prompts that begin alike, through a real agent: rows that were computed once, and the same tokens with and
without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_client.blocks import BlocksClient, CacheName
from kvtier_client.blocksource import BlockSource
from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from kvtier_client.prefix import publish_prompt, start_from_blocks
from kvtier_core.errors import Reason
from tests.engine.agent_process import CACHE, Agent, baseline_manifest, running_agent, tiny_geometry
from tests.engine.block_server import source_of
from tests.engine.test_agent_blocks_process import kept_tiers

CHUNK, LAYERS = 64, 3
MANIFEST = baseline_manifest(
    tiny_geometry(layers=LAYERS),
    chunk_tokens=CHUNK,
    budgets={"gpu-sim": 0, "dram": 16 << 20, "nvme": 32 << 20},
)
SOURCE = dataclasses.replace(source_of(MANIFEST), layers=(0, LAYERS))
SYSTEM = torch.randint(2, 97, (1, 3 * CHUNK + 5), generator=torch.Generator().manual_seed(1))
NEW = {"max_new_tokens": 12, "do_sample": False}


class Client:
    """An engine process of one tenant."""

    def __init__(self, agent: Agent, model: Any, tenant: str) -> None:
        self.attention = AttentionClient(agent.socket_path)
        self.blocks = BlocksClient(
            agent.socket_path, CacheName(CACHE.namespace, CACHE.name, CACHE.uid), tenant, timeout=25.0
        )
        self._model, self._tenant = model, tenant

    def cache(self, **more: Any) -> KvtierCache:
        return KvtierCache(
            self.attention,
            namespace=CACHE.namespace,
            name=CACHE.name,
            uid=CACHE.uid,
            model_fingerprint=declared_fingerprint(self.attention, CACHE.namespace, CACHE.name),
            config=self._model.config,
            tenant=self._tenant,
            **more,
        )

    def answer(
        self, ids: torch.Tensor, *, start: bool, publish: bool = False, durable: bool = False
    ) -> tuple[int, torch.Tensor]:
        """(rows that were not computed, the tokens)."""
        prompt = ids[0].tolist()
        with attach(self._model), self.cache() as cache:
            rows = start_from_blocks(cache, self.blocks, SOURCE, prompt) if start else 0
            out = self._model.generate(ids, cache=cache, **NEW)
            if publish:
                stored = publish_prompt(cache, self.blocks, SOURCE, prompt, durable=durable)
                assert all(block.refusal is None for block in stored)
                assert all(block.durable is durable for block in stored)
            assert {receipt.exactness for receipt in cache.take_receipts()} == {"EXACT"}
            return rows, out

    def close(self) -> None:
        self.blocks.close()
        self.attention.close()


@contextmanager
def client_of(agent: Agent, model: Any, tenant: str = "alpha") -> Iterator[Client]:
    client = Client(agent, model, tenant)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with running_agent() as running:
        running.apply_baseline(MANIFEST)
        yield running


def followed_by(*tokens: int) -> torch.Tensor:
    return torch.cat((SYSTEM, torch.tensor([tokens])), dim=1)


def test_a_prompt_that_begins_like_another_starts_from_its_blocks_with_the_same_tokens(
    agent: Agent, tiny_model: Any
) -> None:
    with client_of(agent, tiny_model) as client:
        first, second = followed_by(7, 8, 9), followed_by(20, 21)
        want = [tiny_model.generate(ids, **NEW) for ids in (first, second)]
        rows, out = client.answer(first, start=True, publish=True)
        assert (rows, torch.equal(out, want[0])) == (0, True), "nothing was there yet"
        for ids, wanted in zip((first, second), want, strict=True):
            rows, out = client.answer(ids, start=True)
            assert (rows, torch.equal(out, wanted)) == (3 * CHUNK, True)
            rows, out = client.answer(ids, start=False)
            assert (rows, torch.equal(out, wanted)) == (0, True)
        other = torch.cat((SYSTEM[:, : 2 * CHUNK], SYSTEM[:, :40]), dim=1)
        rows, out = client.answer(other, start=True)
        assert (rows, torch.equal(out, tiny_model.generate(other, **NEW))) == (2 * CHUNK, True)
        # The last token is the model's to compute, also when all of its prompt is there.
        rows, out = client.answer(SYSTEM[:, : 3 * CHUNK], start=True)
        assert rows == 2 * CHUNK
        assert torch.equal(out, tiny_model.generate(SYSTEM[:, : 3 * CHUNK], **NEW))


def test_another_tenant_starts_from_nothing_and_lends_nothing(agent: Agent, tiny_model: Any) -> None:
    ids = followed_by(30)
    with client_of(agent, tiny_model, "beta") as mine, client_of(agent, tiny_model, "gamma") as theirs:
        mine.answer(ids, start=False, publish=True)
        assert mine.answer(ids, start=True)[0] == 3 * CHUNK
        assert theirs.answer(ids, start=True)[0] == 0
        with mine.cache() as cache:
            opened = cache.opened
            for call in (theirs.blocks.start_session, theirs.blocks.publish_session):
                with pytest.raises(KvtierError) as refused:
                    call(opened.session_id, opened.generation, SOURCE, ids[0].tolist())
                assert refused.value.reason is Reason.TENANT_MISMATCH


def test_rows_of_a_prompt_survive_the_agent_that_they_were_computed_by(
    tmp_path: Path, tiny_model: Any
) -> None:
    ids = followed_by(40, 41)
    with running_agent(tiers=kept_tiers, folder=tmp_path) as agent:
        agent.apply_baseline(MANIFEST)
        with client_of(agent, tiny_model) as client:
            _, want = client.answer(ids, start=True, publish=True, durable=True)
        agent.kill()
    with running_agent(tiers=kept_tiers, folder=tmp_path) as agent, client_of(agent, tiny_model) as client:
        rows, out = client.answer(ids, start=True)
        assert (rows, torch.equal(out, want)) == (3 * CHUNK, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"layers": (0, 1)}, Reason.BAD_ARGUMENT, id="one-layer"),
        pytest.param({"kv_heads": (0, 1)}, Reason.BAD_ARGUMENT, id="one-head"),
        pytest.param({"block_tokens": 32}, Reason.BAD_ARGUMENT, id="other-chunks"),
        pytest.param({"layout": "token-major/1"}, Reason.BAD_ARGUMENT, id="another-layout"),
        pytest.param({"checkpoint": "other"}, Reason.MODEL_MISMATCH, id="another-model"),
        pytest.param(
            {"producer": "sha256:" + "c" * 64, "branch": ("s",), "request_generation": 1},
            Reason.BAD_ARGUMENT,
            id="a-candidates",
        ),
    ],
)
def test_a_source_that_is_not_a_sessions_is_refused_by_its_field(
    agent: Agent, tiny_model: Any, change: dict[str, Any], reason: Reason
) -> None:
    source: BlockSource = dataclasses.replace(SOURCE, **change)
    with client_of(agent, tiny_model) as client, client.cache() as cache:
        with pytest.raises(KvtierError) as refused:
            client.blocks.start_session(
                cache.opened.session_id, cache.opened.generation, source, SYSTEM[0].tolist()
            )
        assert refused.value.reason is reason


def test_a_session_with_rows_starts_from_nothing_and_what_is_not_committed_is_not_published(
    agent: Agent, tiny_model: Any
) -> None:
    tokens: Sequence[int] = SYSTEM[0].tolist()
    with (
        client_of(agent, tiny_model) as client,
        attach(tiny_model),
        torch.no_grad(),
        client.cache() as cache,
    ):
        tiny_model(SYSTEM, cache=cache)
        with pytest.raises(KvtierError) as early:
            publish_prompt(cache, client.blocks, SOURCE, tokens)
        assert early.value.reason is Reason.NOT_VISIBLE
        with pytest.raises(KvtierError) as refused:
            start_from_blocks(cache, client.blocks, SOURCE, tokens)
        assert refused.value.reason is Reason.STEP_ORDER
        tiny_model(SYSTEM[:, :1], cache=cache)
        assert len(publish_prompt(cache, client.blocks, SOURCE, tokens)) == 3 * LAYERS
