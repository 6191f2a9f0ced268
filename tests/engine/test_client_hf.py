"""The transformers adapter: the tokens of DynamicCache, and typed refusals of what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from kvtier_core.errors import Reason
from tests.engine.fake_agent import FINGERPRINT, FakeAgent

TOLERANCE = 1e-3


@pytest.fixture
def attached(tiny_model: Any) -> Iterator[Any]:
    with attach(tiny_model), torch.no_grad():
        yield tiny_model
    assert tiny_model.config._attn_implementation == "sdpa"


def open_cache(client: AttentionClient, model: Any, **change: Any) -> KvtierCache:
    fields: dict[str, Any] = {
        "namespace": "serving",
        "name": "cache",
        "model_fingerprint": FINGERPRINT,
        "config": model.config,
        "tenant": "alpha",
    }
    return KvtierCache(client, **(fields | change))


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 7, 255, 256, 257, 600], ids=str)
def test_logits_equal_sdpa_through_prefill_and_decode(
    client: AttentionClient, tiny_model: Any, n: int
) -> None:
    ids = prompt(n + 12, seed=n)
    reference = DynamicCache(config=tiny_model.config)
    with torch.no_grad():
        want = [tiny_model(ids[:, :n], cache=reference).logits]
        want += [tiny_model(ids[:, i : i + 1], cache=reference).logits for i in range(n, n + 12)]
        with attach(tiny_model), open_cache(client, tiny_model) as cache:
            got = [tiny_model(ids[:, :n], cache=cache).logits]
            got += [tiny_model(ids[:, i : i + 1], cache=cache).logits for i in range(n, n + 12)]
            assert cache.get_seq_length() == n + 12
            assert cache.get_mask_sizes(3, 0) == (n + 15, 0)
    for a, b in zip(got, want, strict=True):
        assert float((a - b).abs().max()) < TOLERANCE


def test_generate_gives_the_tokens_of_dynamic_cache(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any
) -> None:
    ids = prompt(300)
    want = tiny_model.generate(ids, max_new_tokens=40, do_sample=False)
    with attach(tiny_model), open_cache(client, tiny_model) as cache:
        got = tiny_model.generate(ids, cache=cache, max_new_tokens=40, do_sample=False)
        assert torch.equal(got, want)
        cache.report_outcome()
        (session,) = agent.sessions.values()
        frames = session.frames
        receipts = cache.take_receipts()
    assert agent.outcomes[0].output_tokens == 40
    assert agent.outcomes[0].last_token_seconds >= agent.outcomes[0].first_token_seconds > 0
    # Two blocks a layer in the first pass, then one frame a layer; steps grow by one; frontiers commit.
    assert frames[:4] == [(1, 0, 0, 256, 0), (1, 0, 256, 44, 0), (1, 1, 0, 256, 0), (1, 1, 256, 44, 0)]
    assert frames[6:] == [(s, y, 298 + s, 1, 298 + s) for s in range(2, 41) for y in range(3)]
    assert {r.exactness for r in receipts} == {"EXACT"}
    assert len(agent.closed) == 1


def test_each_layer_but_the_last_promises_the_next_unless_blocks_follow(
    client: AttentionClient, agent: FakeAgent, attached: Any
) -> None:
    promised: list[bool] = []

    def look(frame: Any, answer: Any) -> Any:
        promised.append(frame.next_layer_follows)
        return answer

    agent.misbehave = look
    with open_cache(client, attached) as cache:
        attached(prompt(300), cache=cache)
        attached(prompt(1), cache=cache)
    assert promised == [False] * 6 + [True, True, False]


def test_two_generations_go_on_in_one_cache(client: AttentionClient, attached: Any) -> None:
    ids = prompt(40)
    with open_cache(client, attached) as cache:
        once = attached.generate(ids, cache=cache, max_new_tokens=20, do_sample=False)
    with open_cache(client, attached) as cache:
        half = attached.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
        twice = attached.generate(half, cache=cache, max_new_tokens=12, do_sample=False)
    assert torch.equal(once, twice)


def masked(*hidden: int) -> Callable[[Any, KvtierCache], None]:
    """A pass with these positions masked."""

    def act(model: Any, cache: KvtierCache) -> None:
        mask = torch.ones(1, 6, dtype=torch.long)
        mask[0, list(hidden)] = 0
        model(prompt(6), attention_mask=mask, cache=cache)

    return act


REFUSED = [
    pytest.param(lambda m, c: m(prompt(4).repeat(2, 1), cache=c), "batch of 2", id="batch"),
    pytest.param(masked(4, 5), "not at the left", id="right-padding"),
    pytest.param(masked(2), "not at the left", id="hole"),
    pytest.param(masked(0, 1, 2, 3, 4, 5), "nothing but padding", id="all-padding"),
    pytest.param(
        lambda m, c: m.generate(prompt(4), cache=c, num_beams=2, max_new_tokens=4), "batch of 2", id="beams"
    ),
    pytest.param(lambda m, c: c.reorder_cache(torch.tensor([0])), "beam search", id="reorder"),
    pytest.param(lambda m, c: c.layers[0].crop(-1), "crop the cache", id="crop-a-layer"),
    pytest.param(lambda m, c: c.reset(), "reset", id="reset"),
    pytest.param(lambda m, c: c.batch_repeat_interleave(2), "one sequence", id="repeat"),
    pytest.param(lambda m, c: c.batch_select_indices(torch.tensor([0])), "one sequence", id="select"),
    pytest.param(lambda m, c: m(prompt(4), use_cache=False), "no KvtierCache", id="no-cache"),
    pytest.param(lambda m, c: m(prompt(4), cache=DynamicCache()), "no KvtierCache", id="other-cache"),
    pytest.param(
        lambda m, c: m(prompt(4), cache=c, attention_mask=torch.zeros(1, 1, 4, 4)),
        "mask of one's own",
        id="4d",
    ),
    pytest.param(lambda m, c: grad(m, c), "no_grad", id="gradients"),
]


def told(**arguments: Any) -> Callable[[Any, KvtierCache], None]:
    """A model whose attention is told more, as those with sinks, biases or windows are."""

    def act(model: Any, cache: KvtierCache) -> None:
        model(prompt(4), cache=cache, **arguments)

    return act


def bidirectional(model: Any, cache: KvtierCache) -> None:
    attention = model.model.layers[0].self_attn
    before, attention.is_causal = attention.is_causal, False
    try:
        model(prompt(4), cache=cache)
    finally:
        attention.is_causal = before


REFUSED += [
    pytest.param(told(s_aux=torch.zeros(6)), "s_aux", id="sinks"),
    pytest.param(told(sinks=torch.zeros(6)), "sinks", id="sinks-by-another-name"),
    pytest.param(told(position_bias=torch.zeros(1, 6, 4, 4)), "position_bias", id="bias"),
    pytest.param(told(indices=torch.zeros(1, 4, 2, dtype=torch.long)), "indices", id="selected-rows"),
    pytest.param(told(cu_seq_lens_q=torch.tensor([0, 2, 4])), "cu_seq_lens_q", id="packed"),
    pytest.param(told(sliding_window=128), "sliding_window", id="window"),
    pytest.param(told(softcap=30.0), "softcap", id="softcap"),
    pytest.param(told(is_causal=False), "only causal attention", id="not-causal"),
    pytest.param(bidirectional, "is_causal", id="a-module-that-is-not-causal"),
]


def grad(model: Any, cache: KvtierCache) -> None:
    with torch.enable_grad():
        model(prompt(4), cache=cache)


@pytest.mark.parametrize(("act", "text"), REFUSED)
def test_what_it_cannot_do_exactly_is_refused(
    client: AttentionClient, agent: FakeAgent, attached: Any, act: Any, text: str
) -> None:
    with open_cache(client, attached) as cache:
        with pytest.raises(KvtierError, match=text) as caught:
            act(attached, cache)
        assert caught.value.reason is Reason.UNSUPPORTED
        assert all(not s.frames for s in agent.sessions.values())


def test_positions_of_another_contract_are_refused(client: AttentionClient, attached: Any) -> None:
    with open_cache(client, attached) as cache:
        attached(prompt(4), cache=cache)
        with pytest.raises(KvtierError) as caught:
            attached(prompt(1), cache=cache, position_ids=torch.tensor([[9]]))
        assert caught.value.reason is Reason.POSITION_CONTRACT_MISMATCH


def test_another_scale_is_refused(client: AttentionClient, attached: Any) -> None:
    with open_cache(client, attached, score_scale=1.0) as cache, pytest.raises(KvtierError) as caught:
        attached(prompt(4), cache=cache)
    assert caught.value.reason is Reason.GEOMETRY_MISMATCH


def test_half_precision_is_refused(client: AttentionClient, attached: Any) -> None:
    with open_cache(client, attached) as cache:
        k = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
        with pytest.raises(KvtierError, match="float16"):
            cache.update(k, k, 0)
        k = torch.zeros(1, 2, 1, 32)
        with pytest.raises(KvtierError, match="heads of 32"):
            cache.update(k, k, 0)
        with pytest.raises(KvtierError, match="values of 32 beside keys of 64"):
            cache.update(torch.zeros(1, 2, 1, 64), k, 0)


def test_a_pass_that_stopped_half_way_cannot_go_on(
    client: AttentionClient, agent: FakeAgent, attached: Any
) -> None:
    with open_cache(client, attached) as cache:
        attached(prompt(4), cache=cache)
        boom = attached.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="stopped"):
            attached(prompt(1), cache=cache)
        boom.remove()
        with pytest.raises(KvtierError) as caught:
            attached(prompt(1), cache=cache)
        assert caught.value.reason is Reason.STEP_ORDER


def stop(*_: Any) -> None:
    raise RuntimeError("stopped")
