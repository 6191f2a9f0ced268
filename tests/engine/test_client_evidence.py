"""What the transformers adapter tells selectors: surprisals, hidden states and weights of the model itself,
when an agent asks for them and only then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtier.v1 import attention_pb2
from kvtier.weights import WeightsShape
from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from kvtier_client.hfevidence import ModelEvidence
from kvtier_core.errors import Reason
from kvtier_core.rope import RopeTable
from kvtier_core.rowevidence import Need
from tests.engine.fake_agent import FINGERPRINT, FakeAgent

KINDS = attention_pb2.EvidenceKind
CLOSE = 2e-4


@dataclass
class Told:
    """What came with the frames: surprisals by session, states by step and layer, queries likewise."""

    surprisal: dict[str, list[float]] = field(default_factory=dict)
    hidden: dict[tuple[int, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    queries: dict[tuple[int, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)

    def note(self, frame: Any, answer: Any) -> Any:
        key = (frame.step, frame.layer)
        self.queries[key] = np.frombuffer(frame.q, np.float32)
        given = frame.evidence
        if given.hidden:
            assert given.hidden_layer == frame.layer - 1
            self.hidden[key] = np.frombuffer(given.hidden, np.float32)
        if given.surprisal:
            self.parts.append(len(given.surprisal) // 8)
            known = self.surprisal.setdefault(frame.session_id, [])
            assert given.surprisal_first == len(known)
            known += np.frombuffer(given.surprisal, np.float64).tolist()
        return answer


@pytest.fixture
def told(agent: FakeAgent) -> Told:
    made = Told()
    agent.misbehave = made.note
    return made


@pytest.fixture
def attached(tiny_model: Any) -> Iterator[Any]:
    with attach(tiny_model) as made, torch.no_grad():
        yield made


def open_cache(client: AttentionClient, model: Any, attached: Any, **change: Any) -> KvtierCache:
    fields: dict[str, Any] = {
        "namespace": "serving",
        "name": "cache",
        "model_fingerprint": FINGERPRINT,
        "config": model.config,
        "tenant": "alpha",
        "evidence": attached.evidence,
    }
    return KvtierCache(client, **(fields | change))


def wanted(*kinds: int, layers: tuple[int, ...] = ()) -> attention_pb2.EvidenceWanted:
    return attention_pb2.EvidenceWanted(kinds=kinds, layers=layers)


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (1, n), generator=torch.Generator().manual_seed(seed))


def hooks_of(model: Any) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


@torch.no_grad()
def losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float64 [n] of a sequence's tokens, the first one's 0, by transformers' own way."""
    logs = model(ids, cache=DynamicCache(config=model.config)).logits[0].double().log_softmax(-1)
    rest = -logs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1, dtype=torch.float64), rest])


# --- surprisals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1], ids=["all-logits", "last-logits"])
def test_surprisals_are_those_of_the_models_own_logits(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, told: Told, keep: int
) -> None:
    """Once each, in order, a step behind their rows; the one of a generated token as soon as it is there."""
    ids = prompt(300)
    want = losses(tiny_model, ids)
    agent.wanted = wanted(KINDS.SURPRISAL)
    with attach(tiny_model) as made, torch.no_grad(), open_cache(client, tiny_model, made) as cache:
        tiny_model(ids[:, :280], cache=cache, logits_to_keep=keep)
        (known,) = told.surprisal.values()
        assert known == [0.0]
        for at in range(280, 300):
            tiny_model(ids[:, at : at + 1], cache=cache, logits_to_keep=keep)
            assert len(known) == at + 1
    torch.testing.assert_close(torch.tensor(known, dtype=torch.float64), want, rtol=CLOSE, atol=CLOSE)


def test_generated_tokens_have_surprisals_and_a_second_prompt_goes_on(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, told: Told
) -> None:
    agent.wanted = wanted(KINDS.SURPRISAL)
    with attach(tiny_model) as made, torch.no_grad(), open_cache(client, tiny_model, made) as cache:
        half = tiny_model.generate(prompt(30), cache=cache, max_new_tokens=8, do_sample=False)
        more = torch.cat([half, prompt(9, seed=5)], dim=1)
        whole = tiny_model.generate(more, cache=cache, max_new_tokens=6, do_sample=False)
    (known,) = told.surprisal.values()
    # The last token was never given back to the model, and what came before it in the last pass waits.
    want = losses(tiny_model, whole[:, :-1])
    assert len(known) == whole.shape[1] - 1
    torch.testing.assert_close(torch.tensor(known, dtype=torch.float64), want, rtol=CLOSE, atol=CLOSE)


def test_each_sequence_of_a_batch_has_its_own(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, told: Told
) -> None:
    lengths = (5, 40, 1)
    rows = [prompt(n, seed=n) for n in lengths]
    ids = torch.zeros(3, 40, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, 40 - row.shape[1] :] = row[0]
        mask[index, 40 - row.shape[1] :] = 1
    agent.wanted = wanted(KINDS.SURPRISAL, KINDS.PREVIOUS_HIDDEN_STATE, layers=(1, 2))
    with (
        attach(tiny_model) as made,
        torch.no_grad(),
        open_cache(client, tiny_model, made, batch_size=3) as cache,
    ):
        out = tiny_model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=False)
        names = [session.opened.session_id for session in cache.sessions]
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        whole = torch.cat([row, out[index : index + 1, 40:-1]], dim=1)
        known = torch.tensor(told.surprisal[name], dtype=torch.float64)
        torch.testing.assert_close(known, losses(tiny_model, whole), rtol=CLOSE, atol=CLOSE)


def test_a_long_prompts_surprisals_go_with_the_frames_of_several_layers(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_client.cacheevidence.MAX_SURPRISALS", 40)
    agent.wanted = wanted(KINDS.SURPRISAL)
    ids = prompt(100)
    with attach(tiny_model) as made, torch.no_grad(), open_cache(client, tiny_model, made) as cache:
        tiny_model(ids[:, :99], cache=cache)
        tiny_model(ids[:, 99:], cache=cache)
    (known,) = told.surprisal.values()
    assert len(known) == 100 and told.parts == [1, 40, 40, 19]
    want = losses(tiny_model, ids)
    torch.testing.assert_close(torch.tensor(known, dtype=torch.float64), want, rtol=CLOSE, atol=CLOSE)


def test_two_caches_of_one_model_are_told_of_their_own_passes(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, attached: Any, told: Told
) -> None:
    agent.wanted = wanted(KINDS.SURPRISAL)
    one, other = prompt(20, seed=1), prompt(25, seed=2)
    with open_cache(client, tiny_model, attached) as a, open_cache(client, tiny_model, attached) as b:
        for cache, ids in ((a, one), (b, other)):
            tiny_model(ids[:, :-2], cache=cache)
        for at in (-2, -1):
            for cache, ids in ((b, other), (a, one)):
                tiny_model(ids[:, at:][:, :1], cache=cache)
        names = [cache.session.opened.session_id for cache in (a, b)]
    attached.detach()
    for name, ids in zip(names, (one, other), strict=True):
        known = torch.tensor(told.surprisal[name], dtype=torch.float64)
        torch.testing.assert_close(known, losses(tiny_model, ids), rtol=CLOSE, atol=CLOSE)


def test_what_was_not_seen_is_never_made_up(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, attached: Any, told: Told
) -> None:
    """Embeddings instead of tokens: rows go on, surprisals end."""
    agent.wanted = wanted(KINDS.SURPRISAL)
    with open_cache(client, tiny_model, attached) as cache:
        tiny_model(prompt(10), cache=cache)
        tiny_model(prompt(1), cache=cache)
        tiny_model(inputs_embeds=torch.zeros(1, 1, 192), cache=cache)
        tiny_model(prompt(1), cache=cache)
        assert cache.get_seq_length() == 13
    (known,) = told.surprisal.values()
    assert len(known) == 11


# --- hidden states ---------------------------------------------------------------------------------------


def test_states_are_the_input_of_the_layer_before_at_each_decoded_token(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, told: Told
) -> None:
    ids = prompt(40)
    with torch.no_grad():
        reference = tiny_model(ids, cache=DynamicCache(config=tiny_model.config), output_hidden_states=True)
    agent.wanted = wanted(KINDS.PREVIOUS_HIDDEN_STATE, layers=(1, 2))
    with attach(tiny_model) as made, torch.no_grad(), open_cache(client, tiny_model, made) as cache:
        tiny_model(ids[:, :36], cache=cache)
        assert not told.hidden
        for at in range(36, 40):
            tiny_model(ids[:, at : at + 1], cache=cache)
    assert set(told.hidden) == {(step, layer) for step in range(2, 6) for layer in (1, 2)}
    for (step, layer), state in told.hidden.items():
        want = reference.hidden_states[layer - 1][0, 34 + step]
        torch.testing.assert_close(torch.tensor(state), want, rtol=CLOSE, atol=CLOSE)


# --- weights ---------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LONG_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def made_model(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "bias":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SMALL))
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.bias)
            torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 1.5)
        return model.eval()
    made = {
        "q-norm": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=24)),
        "other-norm": lambda: GemmaForCausalLM(GemmaConfig(**SMALL, head_dim=24)),
        "scaled-logits": lambda: CohereForCausalLM(CohereConfig(**SMALL)),
        "moving-rope": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, rope_parameters=LONG_ROPE)),
        "half": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)).to(torch.bfloat16),
    }
    return made[kind]().eval()


@pytest.mark.parametrize(
    ("kind", "weights", "surprisal"),
    [
        pytest.param("bias", True, True, id="bias"),
        pytest.param("q-norm", False, True, id="a-norm-behind-the-projection"),
        pytest.param("other-norm", False, True, id="another-norm"),
        pytest.param("scaled-logits", False, False, id="logits-scaled-behind-the-head"),
        pytest.param("moving-rope", False, True, id="angles-that-depend-on-the-length"),
        pytest.param("half", False, True, id="weights-that-are-not-float32"),
    ],
)
def test_a_model_gives_only_what_it_was_found_to_compute(kind: str, weights: bool, surprisal: bool) -> None:
    made = ModelEvidence(made_model(kind))
    assert (Need.WEIGHTS in made.gives, Need.SURPRISAL in made.gives) == (weights, surprisal)
    assert {Need.PREFILL_QUERIES, Need.PREVIOUS_HIDDEN_STATE} <= made.gives
    assert made.stated_size == 96
    if not weights:
        with pytest.raises(KvtierError) as refused:
            made.layers_given(FINGERPRINT, [1])
        assert refused.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize("kind", ["bias", "tiny"])
def test_weights_that_travel_make_the_queries_that_travel(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, told: Told, kind: str
) -> None:
    """Of its own input, a layer's weights give the very queries that it attends with."""
    model = tiny_model if kind == "tiny" else made_model(kind)
    g = model.config
    heads, width = g.num_attention_heads, g.hidden_size
    dim = getattr(g, "head_dim", None) or width // heads
    agent.wanted = wanted(KINDS.WEIGHTS, KINDS.PREVIOUS_HIDDEN_STATE, layers=(1,))
    ids = prompt(21)
    with torch.no_grad():
        states = model(ids, cache=DynamicCache(config=g), output_hidden_states=True).hidden_states
    with attach(model) as made, torch.no_grad():
        for _ in range(2):
            # The second session only names what the agent has by then.
            before = dict(agent.weights)
            with open_cache(client, model, made) as cache:
                model(ids[:, :20], cache=cache)
                model(ids[:, 20:], cache=cache)
            assert not before or before == agent.weights
    header, data = agent.weights[1]
    shape = WeightsShape(
        width, heads * dim, header.has_bias, header.norm_eps, header.frequencies, header.interleaved
    )
    assert (set(agent.weights), len(data)) == ({1}, shape.size_bytes)
    assert header.digest == shape.digest(FINGERPRINT, 1, data)
    assert header.has_bias == (kind == "bias")
    floats = torch.frombuffer(bytearray(data[: -8 * header.frequencies]), dtype=torch.float32)
    query, rest = floats[: width * heads * dim].view(width, -1), floats[width * heads * dim :]
    bias, norm = (rest[: heads * dim], rest[heads * dim :]) if header.has_bias else (0.0, rest)
    angles = torch.frombuffer(bytearray(data[-8 * header.frequencies :]), dtype=torch.float64)
    h = states[1][0, 20]
    normed = h * torch.rsqrt(h.square().mean() + header.norm_eps) * norm
    made_q = RopeTable(angles, header.interleaved).turned((normed @ query + bias).view(heads, dim), 20)
    sent = torch.tensor(told.queries[2, 1]).view(heads, dim)
    torch.testing.assert_close(made_q, sent, rtol=1e-3, atol=1e-3)


# --- hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "hooks"),
    [
        pytest.param((), 0, id="nothing"),
        pytest.param((KINDS.PREFILL_QUERIES, KINDS.FIXED_CONTEXT, KINDS.WEIGHTS), 0, id="no-pass-tells-it"),
        pytest.param((KINDS.PREVIOUS_HIDDEN_STATE,), 3, id="states"),
        pytest.param((KINDS.SURPRISAL,), 3, id="surprisals"),
        pytest.param((KINDS.SURPRISAL, KINDS.PREVIOUS_HIDDEN_STATE), 6, id="both"),
    ],
)
def test_hooks_are_in_a_model_only_while_a_session_asks(
    client: AttentionClient,
    agent: FakeAgent,
    tiny_model: Any,
    attached: Any,
    told: Told,
    kinds: tuple[int, ...],
    hooks: int,
) -> None:
    agent.wanted = wanted(*kinds, layers=(1, 2)) if kinds else None
    # transformers leaves some of its own after it was asked for hidden states.
    own = hooks_of(tiny_model)
    with open_cache(client, tiny_model, attached) as cache:
        assert hooks_of(tiny_model) == own + hooks
        with open_cache(client, tiny_model, attached):
            assert hooks_of(tiny_model) == own + hooks
        tiny_model(prompt(12), cache=cache)
        tiny_model(prompt(1), cache=cache)
        assert hooks_of(tiny_model) == own + hooks
    assert hooks_of(tiny_model) == own
    assert bool(told.hidden) == (KINDS.PREVIOUS_HIDDEN_STATE in kinds)
    assert bool(told.surprisal) == (KINDS.SURPRISAL in kinds)


def test_an_engine_says_what_it_gives(client: AttentionClient, agent: FakeAgent, tiny_model: Any) -> None:
    everything = [number for number in KINDS.values() if number]
    with attach(tiny_model) as made:
        for evidence, fixed, gives, size in (
            (made.evidence, 0, everything, 192),
            (made.evidence, 7, everything, 192),
            (None, None, [KINDS.PREFILL_QUERIES], 0),
        ):
            with open_cache(client, tiny_model, made, evidence=evidence, fixed_context=fixed):
                (session,) = agent.sessions.values()
                asked = session.request
                assert (sorted(asked.gives), asked.hidden_size) == (gives, size)
                assert asked.fixed_context_tokens == (fixed or 0)


def test_weights_that_an_agent_refuses_cost_the_session(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any, attached: Any
) -> None:
    agent.wanted = wanted(KINDS.WEIGHTS, KINDS.SURPRISAL, layers=(99,))
    own = hooks_of(tiny_model)
    with pytest.raises(IndexError):
        open_cache(client, tiny_model, attached)
    assert len(agent.closed) == 1 and hooks_of(tiny_model) == own
