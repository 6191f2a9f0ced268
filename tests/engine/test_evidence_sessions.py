"""A small model in sessions of families that need evidence: a candidate that is revoked in the middle of an
answer, and engines that give less than a family needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach, geometry_of
from kvtier_client.session import AttentionSession, SessionRequest, StepReceipt
from kvtier_core.errors import Reason
from kvtier_core.rowevidence import Need
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import Agent, baseline_manifest, running_agent, tiny_geometry
from tests.engine.evidence_replay import FAMILIES, Recorder, candidate, recording, selector

pytestmark = pytest.mark.timeout(600)

PROMPT = 90
MAX_TOKENS = 400
LAYERS = 3


@pytest.fixture(scope="module")
def manifest() -> RuntimeManifest:
    return baseline_manifest(tiny_geometry(layers=LAYERS))


@pytest.fixture(scope="module")
def agent(manifest: RuntimeManifest) -> Iterator[Agent]:
    with running_agent() as started:
        started.apply_baseline(manifest)
        yield started


@pytest.fixture
def attached(tiny_model: Any) -> Iterator[Any]:
    with attach(tiny_model) as made, torch.no_grad():
        yield made


def open_cache(client: AttentionClient, model: Any, **change: Any) -> KvtierCache:
    fields: dict[str, Any] = {
        "namespace": "serving",
        "name": "chat",
        "model_fingerprint": declared_fingerprint(client, "serving", "chat"),
        "config": model.config,
        "tenant": "beta",
        "max_tokens": MAX_TOKENS,
    }
    return KvtierCache(client, **(fields | change))


def prompt() -> torch.Tensor:
    return torch.randint(2, 97, (1, PROMPT), generator=torch.Generator().manual_seed(6))


def decode(model: Any, cache: KvtierCache, token: torch.Tensor) -> torch.Tensor:
    out = model(token, cache=cache, logits_to_keep=1).logits[:, -1]
    return out.argmax(-1, keepdim=True)


def kinds(receipts: list[StepReceipt], layer: int) -> set[str]:
    return {one.exactness for one in receipts if one.layer == layer}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_candidate_revoked_in_the_middle_leaves_exact_steps_over_its_rows(
    agent: Agent, manifest: RuntimeManifest, tiny_model: Any, attached: Any, family: str
) -> None:
    """To the bit what an exact session computes over the same rows; and those rows stay the candidate's."""
    chosen = candidate(manifest, selector(family))
    agent.grant(manifest, chosen, rollout_uid=f"revoked-{family}")
    with AttentionClient(agent.socket_path) as client, recording() as recorder:
        with open_cache(client, tiny_model, evidence=attached.evidence) as cache:
            token = tiny_model(prompt(), cache=cache).logits[:, -1].argmax(-1, keepdim=True)
            cache.take_receipts()
            seen: list[StepReceipt] = []
            for _ in range(2):
                token = decode(tiny_model, cache, token)
            agent.wait_for_indexes()
            while "APPROXIMATE" not in kinds(seen, LAYERS - 1) or cache.get_seq_length() < PROMPT + 4:
                assert cache.get_seq_length() < MAX_TOKENS - 10, {one.fallback for one in seen}
                token = decode(tiny_model, cache, token)
                seen += cache.take_receipts()
            agent.revoke(reason="IntentAbort")
            first = cache.get_seq_length()
            for _ in range(4):
                token = decode(tiny_model, cache, token)
            after = cache.take_receipts()
            last = cache.get_seq_length()
        assert {one.exactness for one in after} == {"EXACT_OVER_APPROXIMATE_HISTORY"}
        assert {one.fallback for one in after} == {"IntentAbort"}
        assert {one.producer_digest for one in after} == {chosen.digest()}
        assert {one.manifest_digest for one in after} == {manifest.digest()}
        outs = [{layer: recorder.outs[step, layer] for layer in range(LAYERS)} for step in steps_of(after)]
        exact, receipts = exactly(client, tiny_model, recorder, first, last)
    for want, got in zip(exact, outs, strict=True):
        assert all(torch.equal(want[layer], got[layer]) for layer in range(LAYERS))
    # An exact session of the same tokens has rows of its own.
    assert {one.producer_digest for one in receipts} == {manifest.digest()}


def steps_of(receipts: list[StepReceipt]) -> list[int]:
    return sorted({one.step for one in receipts})


def exactly(
    client: AttentionClient, model: Any, recorder: Recorder, first: int, last: int
) -> tuple[list[dict[int, torch.Tensor]], list[StepReceipt]]:
    """Outputs of queries [first, last), one a step, by a session without a candidate over recorded rows."""
    geometry = geometry_of(model.config)
    rows = [recorder.rows(layer) for layer in range(LAYERS)]
    request = SessionRequest(
        namespace="serving",
        name="chat",
        tenant="beta",
        model_fingerprint=declared_fingerprint(client, "serving", "chat"),
        geometry=geometry,
        score_scale=geometry.head_dim**-0.5,
        session_root_id="exact",
        max_tokens=MAX_TOKENS,
    )
    made = []
    with AttentionSession(client, request) as session:
        spans = [(0, first), *((at, at + 1) for at in range(first, last))]
        for step, (low, high) in enumerate(spans, 1):
            outs = {}
            for layer, (k, v, q) in enumerate(rows):
                span = slice(low, high)
                outs[layer] = session.attend(step, layer, low, q[span], k[span], v[span], low)
            made.append(outs)
        return made[1:], session.take_receipts()


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        pytest.param("infinigen", ["previousHiddenState", "weights"], id="infinigen"),
        pytest.param("emLlm", ["surprisal"], id="emLlm"),
        pytest.param("infLlm", [], id="infLlm"),
        pytest.param("retrievalAttention", [], id="retrievalAttention"),
        pytest.param("squeezedAttention", [], id="squeezedAttention"),
    ],
)
def test_without_the_models_evidence_a_cache_gives_its_prompts_queries_and_context(
    agent: Agent, manifest: RuntimeManifest, tiny_model: Any, attached: Any, family: str, missing: list[str]
) -> None:
    agent.grant(manifest, candidate(manifest, selector(family)), rollout_uid=f"bare-{family}")
    with AttentionClient(agent.socket_path) as client:
        with open_cache(client, tiny_model) as cache:
            refused = cache.session.candidate_refused
            token = tiny_model(prompt(), cache=cache).logits[:, -1].argmax(-1, keepdim=True)
            for _ in range(3):
                token = decode(tiny_model, cache, token)
            receipts = cache.take_receipts()
        if not missing:
            assert refused is None and cache.arm == "candidate"
            return
        assert refused is not None and refused.reason is Reason.UNSUPPORTED
        assert refused.facts["missing"].split(",") == missing
        assert cache.arm == "baseline"
        assert {(one.exactness, one.fallback) for one in receipts} == {("EXACT", "UNSUPPORTED")}
        with pytest.raises(KvtierError) as probe:
            open_cache(client, tiny_model, probe=True, forced_arm="candidate")
        assert probe.value.facts["missing"].split(",") == missing


def test_a_context_that_may_change_has_no_family_of_fixed_ones(
    agent: Agent, manifest: RuntimeManifest, tiny_model: Any, attached: Any
) -> None:
    agent.grant(manifest, candidate(manifest, selector("squeezedAttention")), rollout_uid="changing")
    with (
        AttentionClient(agent.socket_path) as client,
        open_cache(client, tiny_model, fixed_context=None) as cache,
    ):
        refused = cache.session.candidate_refused
        assert refused is not None and refused.facts["missing"] == "fixedContext"


REASONS = {"UNSUPPORTED", "DEPENDENCY_UNPUBLISHED", "INDEX_FRONTIER_LAG"}


@pytest.mark.parametrize("family", ["emLlm", "infinigen", "squeezedAttention"])
def test_a_fork_and_a_crop_go_on_and_say_how(
    agent: Agent, manifest: RuntimeManifest, tiny_model: Any, attached: Any, family: str
) -> None:
    """What cannot be made again is exact with its reason; weights and states go on."""
    agent.grant(manifest, candidate(manifest, selector(family)), rollout_uid=f"edits-{family}")
    with (
        AttentionClient(agent.socket_path) as client,
        open_cache(client, tiny_model, evidence=attached.evidence) as cache,
    ):
        token = tiny_model(prompt(), cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        token = decode(tiny_model, cache, token)
        with cache.fork() as child:
            assert child.session.asked == cache.session.asked
            cache.crop(-1)
            for one in (child, cache):
                one.take_receipts()
                for _ in range(3):
                    token = decode(tiny_model, one, token)
                told = [receipt for receipt in one.take_receipts() if receipt.layer == LAYERS - 1]
                assert len(told) == 3
                exact = [receipt for receipt in told if receipt.exactness != "APPROXIMATE"]
                assert {receipt.fallback for receipt in exact} <= REASONS
    assert not attached.evidence.watching


@pytest.mark.parametrize("family", ["emLlm", "infinigen"])
def test_a_ragged_batch_tells_each_session_of_its_own_sequence(
    agent: Agent, manifest: RuntimeManifest, tiny_model: Any, attached: Any, family: str
) -> None:
    agent.grant(manifest, candidate(manifest, selector(family)), rollout_uid=f"batch-{family}")
    ids = torch.cat([prompt(), prompt().roll(7, 1)])
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    with (
        AttentionClient(agent.socket_path) as client,
        open_cache(client, tiny_model, evidence=attached.evidence, batch_size=2) as cache,
    ):
        assert cache.transport == "local"
        told: dict[int, list[StepReceipt]] = {}

        def approximate(generated: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """An index is made beside the steps: they go on until both have had one of the last layer."""
            if generated.shape[1] == PROMPT + 3:
                agent.wait_for_indexes(2)
            for at, session in enumerate(cache.sessions):
                told.setdefault(at, []).extend(session.take_receipts())
            ready = generated.shape[1] >= PROMPT + 60 and all(
                "APPROXIMATE" in kinds(told[at], LAYERS - 1) for at in range(2)
            )
            return torch.full((generated.shape[0],), ready)

        out = tiny_model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=MAX_TOKENS - PROMPT,
            min_new_tokens=MAX_TOKENS - PROMPT,
            do_sample=False,
            stopping_criteria=[approximate],
        )
        assert out.shape[0] == 2
        steps = out.shape[1] - PROMPT
        for at, length in enumerate((PROMPT, PROMPT - 11)):
            last = [one for one in told[at] if one.layer == LAYERS - 1]
            assert last[-1].frontier == length + steps - 1
            assert "APPROXIMATE" in {one.exactness for one in last}, {one.fallback for one in last}


def test_a_baselines_session_that_is_compared_is_asked_for_evidence_too(
    agent: Agent, manifest: RuntimeManifest, tiny_model: Any, attached: Any
) -> None:
    """Both answers are of one snapshot, so an index is made in sessions that the candidate does not serve."""
    agent.grant(
        manifest,
        candidate(manifest, selector("infinigen")),
        rollout_uid="shadow",
        stage="Shadow",
        traffic="0",
        sample="1",
    )
    with (
        AttentionClient(agent.socket_path) as client,
        open_cache(client, tiny_model, evidence=attached.evidence) as cache,
    ):
        assert cache.arm == "baseline" and cache.opened.sampled
        assert cache.session.asked >= {Need.WEIGHTS, Need.PREVIOUS_HIDDEN_STATE}
        token = tiny_model(prompt(), cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(4):
            token = decode(tiny_model, cache, token)
        assert {one.exactness for one in cache.take_receipts()} == {"EXACT"}
