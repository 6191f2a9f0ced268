"""Batches through the transformers adapter: ragged prompts, one session each, the tokens of one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier.v1 import common_pb2
from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from kvtier_core.errors import Reason
from tests.engine.fake_agent import FINGERPRINT, FakeAgent, Refusal

LENGTHS = (5, 300, 1, 64)
NEW_TOKENS = 6


@pytest.fixture
def attached(tiny_model: Any) -> Iterator[Any]:
    with attach(tiny_model), torch.no_grad():
        yield tiny_model


def open_cache(client: AttentionClient, model: Any, **change: Any) -> KvtierCache:
    fields: dict[str, Any] = {
        "namespace": "serving",
        "name": "cache",
        "model_fingerprint": FINGERPRINT,
        "config": model.config,
        "tenant": "alpha",
    }
    return KvtierCache(client, **(fields | change))


def ragged(lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded at the left to the longest."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, n in enumerate(lengths):
        ids[index, longest - n :] = torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(index))
        mask[index, longest - n :] = 1
    return ids, mask


def alone(model: Any, ids: torch.Tensor, mask: torch.Tensor, index: int, **options: Any) -> torch.Tensor:
    row = ids[index : index + 1, mask[index].bool()]
    made: torch.Tensor = model.generate(row, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return made[0, row.shape[1] :]


def test_a_ragged_batch_has_the_tokens_of_dynamic_cache_and_of_each_alone(
    client: AttentionClient, agent: FakeAgent, tiny_model: Any
) -> None:
    ids, mask = ragged()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    want = tiny_model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    assert torch.equal(want, torch.stack([alone(tiny_model, ids, mask, i) for i in range(len(LENGTHS))])), (
        "the reference itself depends on the batch"
    )
    with attach(tiny_model):
        with open_cache(client, tiny_model, batch_size=len(LENGTHS)) as cache:
            got = tiny_model.generate(ids, attention_mask=mask, cache=cache, **options)[:, ids.shape[1] :]
            sessions = list(agent.sessions.values())
            receipts = cache.take_receipts()
        one_by_one = []
        for index in range(len(LENGTHS)):
            with open_cache(client, tiny_model) as cache:
                one_by_one.append(alone(tiny_model, ids, mask, index, cache=cache))
    assert torch.equal(got, want)
    assert torch.equal(got, torch.stack(one_by_one))
    # Padding was never sent: each session has the rows of its own sequence, from position 0.
    assert [s.k[0].shape[0] for s in sessions] == [n + NEW_TOKENS - 1 for n in LENGTHS]
    assert [s.frames[0] for s in sessions] == [(1, 0, 0, min(n, 256), 0) for n in LENGTHS]
    assert [s.frames[-1][:2] for s in sessions] == [(NEW_TOKENS, 2)] * len(LENGTHS)
    assert len(receipts) == 3 * sum(-(-n // 256) + NEW_TOKENS - 1 for n in LENGTHS)
    # One message a layer, of all sequences; the blocks of the long prompt come in a second one.
    assert sorted(agent.closed) == sorted(agent.closed)
    assert len(agent.closed) == 2 * len(LENGTHS)


def test_one_padded_sequence_is_the_same_as_without_padding(client: AttentionClient, attached: Any) -> None:
    ids, mask = ragged((5, 9))
    ids, mask = ids[:1], mask[:1]
    with open_cache(client, attached) as cache:
        padded = attached.generate(
            ids, attention_mask=mask, cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False
        )
    with open_cache(client, attached) as cache:
        bare = alone(attached, ids, mask, 0, cache=cache)
    assert torch.equal(padded[0, ids.shape[1] :], bare)


def test_a_batch_of_another_size_is_refused(client: AttentionClient, attached: Any) -> None:
    with open_cache(client, attached, batch_size=3) as cache:
        with pytest.raises(KvtierError, match="a batch of 2 in a cache of 3") as caught:
            attached(torch.full((2, 4), 5), cache=cache)
        assert caught.value.reason is Reason.UNSUPPORTED


def test_padding_that_changes_is_refused(client: AttentionClient, attached: Any) -> None:
    ids, mask = ragged((5, 9))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with open_cache(client, attached, batch_size=2) as cache:
        attached(ids, attention_mask=mask, position_ids=positions, cache=cache)
        with pytest.raises(KvtierError, match="the first pass's") as caught:
            attached(ids[:, -1:], position_ids=positions[:, -1:] + 1, cache=cache)
        assert caught.value.reason is Reason.UNSUPPORTED


def test_positions_that_count_padding_are_refused(client: AttentionClient, attached: Any) -> None:
    ids, mask = ragged((5, 9))
    with open_cache(client, attached, batch_size=2) as cache:
        with pytest.raises(KvtierError) as caught:
            attached(ids, attention_mask=mask, cache=cache)
        assert caught.value.reason is Reason.POSITION_CONTRACT_MISMATCH


def test_beams_are_refused_in_a_batch_as_well(client: AttentionClient, attached: Any) -> None:
    with open_cache(client, attached, batch_size=2) as cache:
        with pytest.raises(KvtierError, match="beam search") as caught:
            attached.generate(torch.full((1, 4), 5), cache=cache, num_beams=2, max_new_tokens=4)
        assert caught.value.reason is Reason.UNSUPPORTED


def test_a_sequence_that_is_refused_leaves_the_others_their_rows(
    client: AttentionClient, agent: FakeAgent, attached: Any
) -> None:
    with open_cache(client, attached, batch_size=3) as cache:
        attached(torch.full((3, 4), 5), cache=cache)
        second = cache.sessions[1].opened.session_id

        def refuse(frame: Any, answer: Any) -> Any:
            if frame.session_id == second:
                raise Refusal(common_pb2.NO_DESTINATION_CAPACITY, "all tiers full", None)  # type: ignore[arg-type]
            return answer

        agent.misbehave = refuse
        with pytest.raises(KvtierError, match="all tiers full"):
            attached(torch.full((3, 1), 5), cache=cache)
        assert [session.failure is None for session in cache.sessions] == [True, False, True]
        assert {s.k[0].shape[0] for s in agent.sessions.values()} == {5}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"batch_size": 0}, id="none"),
        pytest.param({"batch_size": 2, "session_root_id": "root"}, id="one-root-for-two"),
        pytest.param({"batch_size": 2, "session_root_ids": ["root"]}, id="too-few-roots"),
    ],
)
def test_a_batch_needs_a_root_for_each_sequence(
    client: AttentionClient, agent: FakeAgent, attached: Any, change: dict[str, Any]
) -> None:
    with pytest.raises(KvtierError) as caught:
        open_cache(client, attached, **change)
    assert caught.value.reason is Reason.BAD_ARGUMENT
    assert not agent.sessions


def test_a_batch_that_cannot_open_leaves_no_session(
    client: AttentionClient, agent: FakeAgent, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = client.open_session
    calls = []

    def second_fails(request: Any) -> Any:
        calls.append(request)
        if len(calls) == 2:
            raise KvtierError(Reason.QUEUE_FULL, "no more")
        return opens(request)

    monkeypatch.setattr(client, "open_session", second_fails)
    with pytest.raises(KvtierError, match="no more"):
        open_cache(client, attached, batch_size=2)
    assert len(agent.closed) == 1
    assert not agent.sessions
