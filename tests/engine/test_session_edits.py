"""Edits of a session through the wire and transformers: forks and cuts give the tokens of runs that never
were edited, drops and repositions those of a DynamicCache whose rows were edited by hand."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.v1 import attention_pb2, common_pb2
from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from kvtier_core.errors import Reason
from kvtier_core.rope import rope_table
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import Rope, RopeScaling
from tests.engine.agent_process import (
    CACHE,
    Agent,
    baseline_manifest,
    running_agent,
    tiny_geometry,
)
from tests.engine.exactness import CHUNK_BYTES as SMOL_CHUNK
from tests.engine.exactness import CHUNK_TOKENS, GEOMETRY, TOLERANCE, greedy, prompts
from tests.engine.smollm2 import load_smollm2

pytestmark = pytest.mark.timeout(600)

CHUNK_BYTES = 256 * 2 * 2 * 64 * 4
# Open chunks of a session and its fork, and one more; the rest goes down.
BUDGETS = {"gpu-sim": 7 * CHUNK_BYTES, "dram": 2 * CHUNK_BYTES, "nvme": 60 * (CHUNK_BYTES + 4096)}
NTK = common_pb2.CacheRef(namespace=CACHE.namespace, name="ntk", uid="ntk-uid")
CHAT = common_pb2.CacheRef(namespace="serving", name="chat", uid="chat-uid")
GUIDE = Path(__file__).parents[2] / "docs/guides/cache-operations.md"
SMOL = common_pb2.CacheRef(namespace=CACHE.namespace, name="smol", uid="smol-uid")
THETA_SMOLLM2 = "100000"
# Open chunks of a session and its fork in 30 layers; what is sealed is in all three tiers.
SMOL_BUDGETS = {"gpu-sim": 65 * SMOL_CHUNK, "dram": 10 * SMOL_CHUNK, "nvme": 90 * (SMOL_CHUNK + 4096)}


@pytest.fixture(scope="module")
def started() -> Iterator[Agent]:
    tiny = baseline_manifest(tiny_geometry(layers=3), budgets=BUDGETS)
    scaling = RopeScaling(type="dynamic")
    ntk = baseline_manifest(tiny_geometry(layers=3), cache=NTK, budgets=BUDGETS)
    ntk = ntk.model_copy(
        update={"model": ntk.model.model_copy(update={"rope": Rope(theta="10000", scaling=scaling)})}
    )
    smol = baseline_manifest(GEOMETRY, cache=SMOL, budgets=SMOL_BUDGETS, chunk_tokens=CHUNK_TOKENS)
    smol = smol.model_copy(
        update={"model": smol.model.model_copy(update={"rope": Rope(theta=THETA_SMOLLM2)})}
    )
    with running_agent() as agent:
        agent.apply_baseline(tiny)
        agent.apply_baseline(ntk, cache=NTK)
        agent.apply_baseline(smol, cache=SMOL)
        agent.apply_baseline(baseline_manifest(tiny_geometry(layers=3), cache=CHAT), cache=CHAT)
        yield agent


@pytest.fixture(scope="module", params=["local", "grpc"])
def channel(started: Agent, request: pytest.FixtureRequest) -> Iterator[AttentionClient]:
    with AttentionClient(started.socket_path, transport=request.param) as connected:
        yield connected


def opened(
    client: AttentionClient, model: Any, cache: common_pb2.CacheRef = CACHE, **change: Any
) -> KvtierCache:
    fields: dict[str, Any] = {
        "namespace": cache.namespace,
        "name": cache.name,
        "model_fingerprint": declared_fingerprint(client, cache.namespace, cache.name),
        "config": model.config,
        "tenant": "alpha",
        "max_tokens": 2048,
    }
    return KvtierCache(client, **(fields | change))


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(ids, cache=cache, use_cache=True).logits[0]
    return out


def test_a_fork_in_the_middle_gives_what_two_runs_give(channel: AttentionClient, tiny_model: Any) -> None:
    shared, first, second = prompt(700), prompt(30, 1), prompt(30, 2)
    with attach(tiny_model), opened(channel, tiny_model) as parent:
        logits(tiny_model, parent, shared)
        with parent.fork() as child:
            assert child.opened.session_id != parent.opened.session_id
            assert child.transport == channel.transport
            # Turn by turn, so that neither can see the other's rows.
            got = [
                (
                    logits(tiny_model, parent, first[:, at : at + 6]),
                    logits(tiny_model, child, second[:, at : at + 6]),
                )
                for at in range(0, 30, 6)
            ]
            kinds = {receipt.exactness for cache in (parent, child) for receipt in cache.take_receipts()}
        logits(tiny_model, parent, prompt(1))
        assert kinds == {"EXACT"}
        for index, tail in enumerate((first, second)):
            with opened(channel, tiny_model) as alone:
                logits(tiny_model, alone, shared)
                want = [logits(tiny_model, alone, tail[:, at : at + 6]) for at in range(0, 30, 6)]
            assert torch.equal(torch.cat(want), torch.cat([pair[index] for pair in got]))


def test_rows_that_were_cropped_come_again_the_same(channel: AttentionClient, tiny_model: Any) -> None:
    with attach(tiny_model), opened(channel, tiny_model) as cache:
        logits(tiny_model, cache, prompt(300))
        once = logits(tiny_model, cache, prompt(250, 1))
        cache.crop(-250)
        assert cache.get_seq_length() == 300
        assert torch.equal(logits(tiny_model, cache, prompt(250, 1)), once)
        cache.crop(0)
        assert cache.get_seq_length() == 550
        assert cache.session.position_epoch == 2


def test_a_batch_is_cropped_sequence_by_sequence(channel: AttentionClient, tiny_model: Any) -> None:
    ids, more = torch.cat((prompt(40), prompt(40, 1))), torch.cat((prompt(9, 2), prompt(9, 3)))
    mask = torch.ones(2, 49, dtype=torch.long)
    mask[1, :7] = 0
    with attach(tiny_model), torch.no_grad(), opened(channel, tiny_model, batch_size=2) as cache:
        places = (mask.cumsum(1) - 1).clamp_min(0)

        def go_on() -> torch.Tensor:
            out: torch.Tensor = tiny_model(
                more, cache=cache, attention_mask=mask, position_ids=places[:, 40:]
            ).logits
            return out

        tiny_model(ids, cache=cache, attention_mask=mask[:, :40], position_ids=places[:, :40])
        once = go_on()
        cache.crop(-9)
        assert torch.equal(go_on(), once)
        with pytest.raises(KvtierError, match="leaves 6 positions, padding included; legal: 7"):
            cache.crop(-43)
        with pytest.raises(KvtierError, match="a batch of 2"):
            cache.fork()


def test_prompt_lookup_takes_rows_back_and_decodes_greedily(
    channel: AttentionClient, tiny_model: Any
) -> None:
    ids = torch.cat((prompt(40), prompt(40)), dim=1)
    want = tiny_model.generate(ids, max_new_tokens=24, do_sample=False)
    with attach(tiny_model), opened(channel, tiny_model) as cache:
        got = tiny_model.generate(
            ids, cache=cache, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=4
        )
        assert cache.session.position_epoch > 1
    assert torch.equal(got, want)


def edit_by_hand(model: Any, cache: Any, first: int, last: int) -> None:
    """Cuts positions [first, last) out of a DynamicCache and turns what follows back by as many."""
    angle = (last - first) * model.model.rotary_emb.inv_freq.double()
    cos, sin = angle.cos(), angle.sin()
    half = cos.shape[0]
    for layer in cache.layers:
        tail = layer.keys[:, :, last:].double()
        a, b = tail[..., :half], tail[..., half:]
        turned = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).float()
        layer.keys = torch.cat((layer.keys[:, :, :first], turned), dim=2)
        layer.values = torch.cat((layer.values[:, :, :first], layer.values[:, :, last:]), dim=2)


def test_drop_and_reposition_are_the_edit_by_hand(channel: AttentionClient, tiny_model: Any) -> None:
    from transformers import DynamicCache

    ids, more = prompt(640), prompt(20, 5)
    by_hand = DynamicCache(config=tiny_model.config)
    logits(tiny_model, by_hand, ids)
    edit_by_hand(tiny_model, by_hand, 90, 600)
    want = logits(tiny_model, by_hand, more)
    with attach(tiny_model), opened(channel, tiny_model) as cache:
        logits(tiny_model, cache, ids)
        dropped = cache.drop([(90, 600)])
        assert (dropped.rows, dropped.next_position, cache.get_seq_length()) == (130, 640, 640)
        moved = cache.reposition()
        assert (moved.rows, moved.next_position, cache.get_seq_length()) == (130, 130, 130)
        # Two whole chunks of each of three layers stay: the second went with its rows.
        assert moved.chunks == 6
        cache.take_receipts()
        got = torch.cat((logits(tiny_model, cache, more[:, :13]), logits(tiny_model, cache, more[:, 13:])))
        receipts = cache.take_receipts()
        assert {receipt.exactness for receipt in receipts} == {"EXACT_OVER_EDITED_HISTORY"}
        assert {receipt.position_epoch for receipt in receipts} == {3}
        assert receipts[-1].frontier == 150
        # Taken back to before the edit, it is the history of an exact run again.
        cache.crop(-65)
        logits(tiny_model, cache, prompt(2))
        assert {receipt.exactness for receipt in cache.take_receipts()} == {"EXACT"}
    assert (got - want).abs().max() < 1e-4


def test_frames_for_other_positions_are_refused(started: Agent, tiny_model: Any) -> None:
    """An edit that this engine does not know of makes its frames stale, not wrong."""
    with (
        AttentionClient(started.socket_path) as client,
        attach(tiny_model),
        opened(client, tiny_model) as cache,
    ):
        logits(tiny_model, cache, prompt(20))
        behind = attention_pb2.EditSessionRequest(
            session_id=cache.opened.session_id,
            generation=cache.opened.generation,
            boot_id=cache.opened.boot_id,
            tenant="alpha",
            truncate=attention_pb2.TruncateEdit(to=20),
        )
        assert not client.edit_session(behind).changed
        behind.truncate.to = 10
        assert client.edit_session(behind).changed
        with pytest.raises(KvtierError, match="position_epoch 1 is not the session's 2") as refused:
            logits(tiny_model, cache, prompt(1))
        assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH


def test_a_pass_that_failed_half_way_is_cut_off_and_goes_on(started: Agent, tiny_model: Any) -> None:
    with (
        AttentionClient(started.socket_path) as client,
        attach(tiny_model),
        opened(client, tiny_model) as cache,
    ):
        logits(tiny_model, cache, prompt(30))
        session = cache.session
        rows = torch.randn(4, 2, 64), torch.randn(4, 2, 64)
        session.attend(cache.step + 1, 0, 30, torch.randn(4, 6, 64), *rows, 30)
        with pytest.raises(KvtierError):
            session.attend(cache.step + 1, 2, 30, torch.randn(4, 6, 64), *rows, 30)
        assert session.failure is not None
        session.truncate(30)
        assert session.failure is None
        got = logits(tiny_model, cache, prompt(5, 1))
        with opened(client, tiny_model) as alone:
            logits(tiny_model, alone, prompt(30))
            assert torch.equal(logits(tiny_model, alone, prompt(5, 1)), got)


def test_a_pass_whose_first_frame_was_refused_is_taken_back_and_goes_on(
    channel: AttentionClient, tiny_model: Any
) -> None:
    """No row of it was taken, so that no row goes; what was sent of it before is answered by nobody."""
    with attach(tiny_model), opened(channel, tiny_model) as cache:
        logits(tiny_model, cache, prompt(30))
        session = cache.session
        before = session.position_epoch
        session.position_epoch = 9
        with pytest.raises(KvtierError, match="position_epoch 9") as refused:
            logits(tiny_model, cache, prompt(5, 1))
        assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
        session.position_epoch = before
        with pytest.raises(KvtierError, match="position_epoch 9"):
            session.attend(cache.step, 0, 30, torch.randn(1, 6, 64), *torch.randn(2, 1, 2, 64), 30)
        assert cache.get_seq_length() == 30
        cache.crop(0)
        assert (session.failure, session.position_epoch) == (None, before + 1)
        assert session.truncate(30).changed is False, "nothing failed since, and no row goes"
        got = logits(tiny_model, cache, prompt(5, 1))
        assert {receipt.exactness for receipt in cache.take_receipts()} == {"EXACT"}
        with opened(channel, tiny_model) as alone:
            logits(tiny_model, alone, prompt(30))
            assert torch.equal(logits(tiny_model, alone, prompt(5, 1)), got)


def test_dynamic_ntk_may_drop_and_not_move(started: Agent, tiny_model: Any) -> None:
    with (
        AttentionClient(started.socket_path) as client,
        attach(tiny_model),
        opened(client, tiny_model, NTK) as cache,
    ):
        logits(tiny_model, cache, prompt(30))
        assert cache.drop([(3, 9)]).changed
        with pytest.raises(KvtierError, match=r"model\.rope\.scaling\.type 'dynamic'") as refused:
            cache.reposition()
        assert refused.value.reason is Reason.UNSUPPORTED
        logits(tiny_model, cache, prompt(2))


TABLES = [
    pytest.param({"rope_type": "default"}, id="default"),
    pytest.param({"rope_type": "default", "partial_rotary_factor": 0.5}, id="partial"),
    pytest.param({"rope_type": "linear", "factor": 4.0}, id="linear"),
    pytest.param(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        id="llama3",
    ),
    pytest.param({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, id="yarn"),
]


@pytest.mark.parametrize("parameters", TABLES)
def test_a_declared_table_is_transformers_own(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=192,
        num_attention_heads=6,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 50_000.0, **parameters},
    )
    want = LlamaRotaryEmbedding(config).inv_freq
    texts = {name: str(value) for name, value in parameters.items() if name != "rope_type"}
    model = baseline_manifest(tiny_geometry()).model.model_copy(
        update={
            "rope": Rope(
                theta="50000", scaling=RopeScaling(type=parameters["rope_type"], parameters=Parameters(texts))
            )
        }
    )
    got = rope_table(model).frequencies
    if "partial_rotary_factor" in parameters:
        # The plain Llama ignores it; models that do not, use this formula over the part.
        want = 50_000.0 ** -(torch.arange(0, 32, 2) / 32)
    assert torch.allclose(got.float(), want, rtol=1e-6, atol=0)


Change = Callable[[attention_pb2.EditSessionRequest], None]


def _both(request: attention_pb2.EditSessionRequest) -> None:
    request.reposition.close_gaps = True
    request.reposition.moves.add(first=0, last=1, to=0)


WRONG = [
    pytest.param(lambda r: None, Reason.BAD_ARGUMENT, "legal: truncate, fork, drop, reposition", id="none"),
    pytest.param(_both, Reason.BAD_ARGUMENT, "both moves and close_gaps", id="both"),
    pytest.param(lambda r: r.reposition.SetInParent(), Reason.BAD_ARGUMENT, "asks for nothing", id="nothing"),
    pytest.param(lambda r: setattr(r.truncate, "to", 99), Reason.BAD_ARGUMENT, "legal: 0 to 20", id="beyond"),
    pytest.param(
        lambda r: r.drop.ranges.add(first=5, last=5),
        Reason.BAD_ARGUMENT,
        r"drop.ranges\[0\] is \[5, 5\); legal: 0 <= first < last <= 20",
        id="empty-range",
    ),
    pytest.param(
        lambda r: r.reposition.moves.add(first=5, last=9, to=3),
        Reason.BAD_ARGUMENT,
        "reposition.moves is position 3 is taken.*legal: positions that ascend",
        id="taken",
    ),
    pytest.param(lambda r: setattr(r, "tenant", "beta"), Reason.TENANT_MISMATCH, "tenant", id="tenant"),
    pytest.param(lambda r: setattr(r, "boot_id", "older"), Reason.BOOT_ID_MISMATCH, "boot id", id="boot"),
    pytest.param(
        lambda r: setattr(r, "generation", 99), Reason.GENERATION_STALE, "generation", id="generation"
    ),
    pytest.param(lambda r: setattr(r, "deadline_ms", -1), Reason.BAD_ARGUMENT, "deadline_ms", id="deadline"),
    pytest.param(
        lambda r: setattr(r, "position_epoch", 7), Reason.POSITION_CONTRACT_MISMATCH, "epoch 7", id="epoch"
    ),
]


@pytest.mark.parametrize(("change", "reason", "message"), WRONG)
def test_a_wrong_edit_is_refused_by_field_and_changes_nothing(
    started: Agent, tiny_model: Any, change: Change, reason: Reason, message: str
) -> None:
    with (
        AttentionClient(started.socket_path) as client,
        attach(tiny_model),
        opened(client, tiny_model) as cache,
    ):
        logits(tiny_model, cache, prompt(20))
        request = attention_pb2.EditSessionRequest(
            session_id=cache.opened.session_id,
            generation=cache.opened.generation,
            boot_id=cache.opened.boot_id,
            tenant="alpha",
        )
        if reason not in (Reason.BAD_ARGUMENT,) or message == "deadline_ms":
            request.drop.ranges.add(first=0, last=1)
        change(request)
        with pytest.raises(KvtierError, match=message) as refused:
            client.edit_session(request)
        assert refused.value.reason is reason
        logits(tiny_model, cache, prompt(1))
        assert cache.take_receipts()[-1].position_epoch == 1


# SmolLM2.


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_smollm2()


def test_smollm2_forked_cut_and_edited(started: Agent, smollm2: tuple[Any, Any]) -> None:
    from transformers import DynamicCache

    model, tokenizer = smollm2
    (ids,) = prompts(tokenizer, [270])
    steps = 4
    plain = DynamicCache(config=model.config)
    want = greedy(model, plain, ids, 2 * steps)
    elsewhere = torch.tensor([[want.tokens[0] + 1]])
    with (
        AttentionClient(started.socket_path) as client,
        attach(model),
        opened(client, model, SMOL, max_tokens=512) as cache,
    ):
        begun = greedy(model, cache, ids, steps)
        last = torch.tensor([[begun.tokens[-1]]])
        with cache.fork() as child:
            # One side goes on, the other takes another token and goes its own way.
            other = greedy(model, child, elsewhere, steps)
            here = greedy(model, cache, last, steps)
        assert begun.tokens + here.tokens == want.tokens
        # What was generated since the fork, taken back and generated again.
        cache.crop(-steps)
        again = greedy(model, cache, last, steps)
        assert again.tokens == here.tokens and torch.equal(again.logits, here.logits)
        cache.crop(ids.shape[1] - cache.get_seq_length())
        cache.drop([(60, 250)])
        cache.reposition()
        edited = greedy(model, cache, last, steps)
    # The same by hand: back to the fork, and back to the prompt.
    plain.crop(-steps)
    assert other.tokens == greedy(model, copy.deepcopy(plain), elsewhere, steps).tokens
    plain.crop(ids.shape[1] - plain.get_seq_length())
    edit_by_hand(model, plain, 60, 250)
    kept = greedy(model, plain, last, steps)
    assert edited.tokens == kept.tokens
    assert (edited.logits - kept.logits).abs().max() < TOLERANCE


def test_an_unknown_session_is_told_so(started: Agent) -> None:
    with AttentionClient(started.socket_path) as client:
        described = client.describe_cache(CACHE.namespace, CACHE.name)
        request = attention_pb2.EditSessionRequest(session_id="nobody", boot_id=described.boot_id)
        with pytest.raises(KvtierError) as refused:
            client.edit_session(request)
    assert refused.value.reason is Reason.SESSION_UNKNOWN


def test_the_example_of_the_guide_runs_as_printed(
    started: Agent, tiny_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {
        "socket_path": started.socket_path,
        "model": tiny_model,
        "prompt": prompt(300),
        "question": prompt(12, 1),
    }
    exec(compile(example, str(GUIDE), "exec"), names)
    names["client"].close()
    assert capsys.readouterr().out.splitlines() == [
        "236 positions are left",
        "EXACT_OVER_EDITED_HISTORY",
    ]
