"""SmolLM2 in sessions of the families that need more than queries, over both wires: what each selects is what
it selects by itself of the same rows and evidence, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.hf import KvtierCache, attach
from kvtier_client.rowevidence import LayerGiven
from kvtier_client.session import AttentionSession, StepReceipt
from kvtier_core.identity import full_support_digest
from kvtier_core.rowevidence import Need
from kvtier_core.selectors.contract import Shape
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import Agent, baseline_manifest, running_agent
from tests.engine.evidence_replay import FAMILIES, Replay, candidate, recording, selector
from tests.engine.exactness import GEOMETRY, greedy, prompts
from tests.engine.smollm2 import load_smollm2

pytestmark = pytest.mark.timeout(600)

PROMPT = 150
NEW_TOKENS = 10
SELECTING = (1, 14, 29)
DENSE = tuple(layer for layer in range(30) if layer not in SELECTING)
SHAPE = Shape(9, 3, 64, 64**-0.5)
ASKED = {
    "retrievalAttention": {Need.PREFILL_QUERIES},
    "emLlm": {Need.PREFILL_QUERIES, Need.SURPRISAL},
    "infinigen": {Need.PREFILL_QUERIES, Need.PREVIOUS_HIDDEN_STATE, Need.WEIGHTS},
    "infLlm": {Need.PREFILL_QUERIES},
    "squeezedAttention": set(),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_smollm2()[0]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return prompts(load_smollm2()[1], [PROMPT])[0]


@pytest.fixture(scope="module")
def manifest() -> RuntimeManifest:
    return baseline_manifest(GEOMETRY)


@pytest.fixture(scope="module")
def agent(manifest: RuntimeManifest) -> Iterator[Agent]:
    with running_agent() as started:
        started.apply_baseline(manifest)
        yield started


@pytest.mark.parametrize("transport", ["local", "grpc"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_session_selects_what_the_family_selects_by_itself(
    agent: Agent, manifest: RuntimeManifest, model: Any, ids: torch.Tensor, family: str, transport: Any
) -> None:
    chosen = selector(family, dense=DENSE)
    agent.grant(manifest, candidate(manifest, chosen), rollout_uid=f"{family}-{transport}")
    with (
        AttentionClient(agent.socket_path, transport=transport) as client,
        attach(model) as attached,
        recording() as recorder,
        KvtierCache(
            client,
            namespace="serving",
            name="chat",
            model_fingerprint=declared_fingerprint(client, "serving", "chat"),
            config=model.config,
            tenant="beta",
            max_tokens=PROMPT + NEW_TOKENS,
            evidence=attached.evidence,
        ) as cache,
    ):
        assert cache.session.asked == ASKED[family]
        begun = greedy(model, cache, ids, 2)
        agent.wait_for_indexes()
        greedy(model, cache, torch.tensor([begun.tokens[-1:]]), NEW_TOKENS - 2)
        receipts = cache.take_receipts()
        weights = {layer: attached.evidence.layer_weights(layer) for layer in SELECTING}
    chosen_layers = [one for one in receipts if one.layer in SELECTING and one.step > 1]
    approximate = [one for one in chosen_layers if one.exactness == "APPROXIMATE"]
    assert approximate, Counter(one.fallback for one in chosen_layers)
    replays = {layer: Replay(chosen, SHAPE, recorder, layer, weights[layer]) for layer in SELECTING}
    unlike = []
    for one in approximate:
        assert one.selection is not None and one.selection.family == family
        alone = replays[one.layer].digest(PROMPT, one.frontier - 1, one.selection.index_covered)
        if one.support_digest != alone:
            unlike.append((one.step, one.layer))
        assert one.support_digest != full_support_digest(one.frontier)
    assert not unlike
    # What was not approximate waited for its index, and read every row.
    for one in chosen_layers:
        if one.exactness != "APPROXIMATE":
            assert one.fallback in ("DEPENDENCY_UNPUBLISHED", "INDEX_FRONTIER_LAG")
            assert one.support_digest == full_support_digest(one.frontier)
    assert _bytes_differ(approximate)


def test_weights_of_all_layers_travel_once_an_agent(
    agent: Agent, manifest: RuntimeManifest, model: Any
) -> None:
    agent.grant(manifest, candidate(manifest, selector("infinigen")), rollout_uid="weights")
    sent: list[int] = []
    give = AttentionSession.give_weights

    def counted(self: AttentionSession, layers: Sequence[LayerGiven]) -> int:
        sent.append(give(self, layers))
        return sent[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        AttentionClient(agent.socket_path) as client,
        attach(model) as attached,
    ):
        patch.setattr(AttentionSession, "give_weights", counted)
        fingerprint = declared_fingerprint(client, "serving", "chat")
        for _ in range(3):
            with KvtierCache(
                client,
                namespace="serving",
                name="chat",
                model_fingerprint=fingerprint,
                config=model.config,
                tenant="beta",
                max_tokens=64,
                evidence=attached.evidence,
            ) as cache:
                assert sorted(cache.session.asked_layers) == list(range(1, 30))
    # Query, norm and 32 angles of 29 layers; layer 0 is rehearsed from nothing. Three were given before.
    layer = 4 * (576 * 576 + 576) + 8 * 32
    assert sent[0] in (29 * layer, (29 - len(SELECTING)) * layer)
    assert sent[1:] == [0, 0]


def _bytes_differ(approximate: list[StepReceipt]) -> bool:
    """Whether selections follow the query: not all rows of one layer are the newest."""
    return len({one.support_digest for one in approximate}) > len(SELECTING)
