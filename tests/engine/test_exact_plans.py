"""SmolLM2 by every exact plan: DynamicCache's tokens, and the same bits whichever plan attends and wherever
rows lie while they are promoted, demoted and truncated between steps.

Three prompts of 512 and three of 2,000 tokens, which share a beginning and differ at their ends: one prefill
of the beginning serves all of them (forks), and one prefill serves every plan (truncation). Every plan
answers a batch of four with all three prompts, and one prompt alone, in turn. Up to 8,000 tokens and batches
of 8 are in the bench suite `exact-full`."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvtier_client.hf import attach
from kvtier_core.engine import CacheEngine
from kvtier_core.placements.preference import PlanKind
from tests.engine.exactness import Generation, compare, kept_references, prompts
from tests.engine.planned import PlannedCache, PlannedSession, copy_rows, engine_of, shuffle
from tests.engine.smollm2 import load_smollm2

pytestmark = pytest.mark.timeout(600)

SHORT, LONG = 512, 2000
# Prompts of a length have their first tokens in common.
SHARED = {SHORT: 384, LONG: 1920}
NEW_TOKENS = 3
NAMES = ("first", "second", "third")
# Where rows lie, and the plans that are legal there.
PLANS: list[tuple[str, str | None]] = [
    ("spread", None),
    ("spread", PlanKind.SUPPORT_PARTITION.value),
    ("spread", PlanKind.ALL_ROWS_MOVED.value),
    ("memory", PlanKind.HEAD_GROUPS.value),
    ("host", PlanKind.REQUEST_ON_CPU.value),
]
IDS = [f"{where}-{plan or 'chosen'}" for where, plan in PLANS]


@dataclass(frozen=True)
class Prompt:
    """ids [1, n]; the rows of all but the last token are there before a plan begins."""

    name: str
    ids: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.ids.shape[1]) - 1


@torch.no_grad()
def go_on(model: Any, cache: Any, tokens: list[int], steps: int, between: Any = None) -> Generation:
    """`steps` greedy tokens after `tokens`, one a sequence, whose logits are of the first sequence's; those
    of the others follow in `logits` [steps, sequences, vocabulary]."""
    logits, made = [], []
    last = tokens
    for _ in range(steps):
        if between is not None:
            between()
        rows = model(torch.tensor(last).unsqueeze(1), cache=cache, use_cache=True, logits_to_keep=1).logits[
            :, -1
        ]
        last = rows.argmax(-1).tolist()
        logits.append(rows.clone())
        made.append(last[0])
    return Generation(made, torch.stack(logits), 0.0, 1.0)


def single(generation: Generation, sequence: int = 0) -> Generation:
    """One sequence of a generation."""
    logits = generation.logits[:, sequence]
    return Generation(logits.argmax(-1).tolist(), logits, 0.0, 1.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_smollm2()[0]


@pytest.fixture(scope="module")
def texts() -> dict[int, list[Prompt]]:
    tokenizer = load_smollm2()[1]
    document, *tails = prompts(tokenizer, [SHARED[LONG], *[SHORT] * 3], seed=11)
    return {
        length: [
            Prompt(
                name, torch.cat((document[:, : SHARED[length]], tail[:, : length - SHARED[length]]), dim=1)
            )
            for name, tail in zip(NAMES, tails, strict=True)
        ]
        for length in (SHORT, LONG)
    }


@pytest.fixture(scope="module")
def wanted(model: Any, texts: dict[int, list[Prompt]]) -> dict[tuple[int, str], Generation]:
    ids = [prompt.ids for group in texts.values() for prompt in group]
    return kept_references("exact-plans", ids, NEW_TOKENS, lambda: _reference(model, texts))


@torch.no_grad()
def _reference(model: Any, texts: dict[int, list[Prompt]]) -> dict[tuple[int, str], Generation]:
    from transformers import DynamicCache

    found, seen = {}, 0
    document = DynamicCache(config=model.config)
    for length, group in texts.items():
        shared = SHARED[length]
        model(group[0].ids[:, seen:shared], cache=document, use_cache=True, logits_to_keep=1)
        seen = shared
        for prompt in group:
            cache = copy.deepcopy(document)
            model(prompt.ids[:, shared:-1], cache=cache, use_cache=True, logits_to_keep=1)
            last = int(prompt.ids[0, -1])
            found[length, prompt.name] = single(go_on(model, cache, [last], NEW_TOKENS))
    return found


@dataclass
class Served:
    """Sessions of one placement by (length, prompt), their rows in."""

    engine: CacheEngine
    sessions: dict[tuple[int, str], PlannedSession]


@torch.no_grad()
def prefilled(model: Any, engine: CacheEngine, texts: dict[int, list[Prompt]]) -> Served:
    """Through the tiers, block by block. What prompts share is prefilled once; their sessions are forks."""
    served = Served(engine, {})

    def feed(cache: PlannedCache, ids: torch.Tensor) -> None:
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)

    document, seen = PlannedSession.open(engine, LONG + 64), 0
    cache = PlannedCache([document])
    for length, group in texts.items():
        shared = SHARED[length]
        feed(cache, group[0].ids[:, seen:shared])
        seen = shared
        for prompt in group:
            branch = served.sessions[length, prompt.name] = document.fork()
            feed(PlannedCache([branch], shared), prompt.ids[:, shared:-1])
    document.close()
    return served


@pytest.fixture(scope="module")
def placements(
    model: Any, texts: dict[int, list[Prompt]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Served]]:
    folder = tmp_path_factory.mktemp("plans")
    with ExitStack() as stack, ThreadPoolExecutor(1) as reader:
        budgets = {
            "spread": {"hbm": 280, "ram": 200, "flash": 1200},
            "memory": {"hbm": 280, "ram": 1000},
            "host": {"ram": 1200},
        }
        engines = {
            name: engine_of(folder / name, time.monotonic, reader, **slots) for name, slots in budgets.items()
        }
        for engine in engines.values():
            stack.callback(engine.stop)
        with attach(model):
            spread = prefilled(model, engines["spread"], texts)
        found = {"spread": spread}
        for name in ("memory", "host"):
            found[name] = Served(
                engines[name],
                {
                    key: copy_rows(session, engines[name], key[0] - 1, key[0] + 64)
                    for key, session in spread.sessions.items()
                },
            )
        yield found


BITS: dict[tuple[int, str], torch.Tensor] = {}


def plays(
    model: Any, served: Served, where: str, plan: str | None, prompt: Prompt, length: int, seed: int
) -> Generation:
    """One prompt's tokens by one plan; its session is as before afterwards. The last token is taken
    back and generated once more."""
    session = served.sessions[length, prompt.name]
    rng = random.Random(seed)

    def between() -> None:
        if where != "host":
            shuffle(served.engine, rng, 12)

    cache = PlannedCache([session], prompt.rows)
    cache.use(plan)
    cache.receipts()
    with attach(model):
        first = go_on(model, cache, [int(prompt.ids[0, -1])], NEW_TOKENS, between)
        session.truncate(prompt.rows + NEW_TOKENS - 1)
        again = PlannedCache([session], prompt.rows + NEW_TOKENS - 1)
        again.use(plan)
        repeated = go_on(model, again, [first.tokens[-2]], 1, between)
    assert torch.equal(repeated.logits, first.logits[-1:])
    receipts = cache.receipts()
    assert {receipt.exactness.value for receipt in receipts} == {"EXACT"}
    if plan is not None:
        assert {receipt.plan_kind for receipt in receipts} == {plan}
    session.truncate(prompt.rows)
    return single(first)


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(("where", "plan"), PLANS, ids=IDS)
def test_tokens_are_dynamic_caches_and_bits_are_every_plans(
    model: Any,
    texts: dict[int, list[Prompt]],
    wanted: dict[tuple[int, str], Generation],
    placements: dict[str, Served],
    where: str,
    plan: str | None,
    length: int,
) -> None:
    turn = PLANS.index((where, plan))
    prompt = texts[length][turn % 3]
    got = plays(model, placements[where], where, plan, prompt, length, seed=turn)
    verdict = compare(wanted[length, prompt.name], got)
    assert verdict.holds, (prompt.name, verdict)
    bits = BITS.setdefault((length, prompt.name), got.logits)
    assert torch.equal(got.logits, bits), prompt.name


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(("where", "plan"), PLANS, ids=IDS)
def test_a_batch_of_four_is_answered_like_each_of_it_alone(
    model: Any,
    texts: dict[int, list[Prompt]],
    wanted: dict[tuple[int, str], Generation],
    placements: dict[str, Served],
    where: str,
    plan: str | None,
    length: int,
) -> None:
    """Three prompts and a fork of the first. A batch changes bits of the model's own products, so tokens are
    those of one alone up to near-ties, and bits those of the same batch by another plan."""
    served = placements[where]
    group = texts[length]
    sessions = [served.sessions[length, prompt.name] for prompt in group]
    twin = sessions[0].fork()
    rng = random.Random(length)
    try:
        cache = PlannedCache([*sessions, twin], group[0].rows)
        cache.use(plan)
        tokens = [int(prompt.ids[0, -1]) for prompt in (*group, group[0])]
        with attach(model):
            got = go_on(
                model,
                cache,
                tokens,
                NEW_TOKENS,
                None if where == "host" else lambda: shuffle(served.engine, rng, 12),
            )
        for at, prompt in enumerate((*group, group[0])):
            verdict = compare(wanted[length, prompt.name], single(got, at))
            assert verdict.holds, (prompt.name, verdict)
        assert torch.equal(got.logits[:, 0], got.logits[:, 3])
        bits = BITS.setdefault((length, "batch"), got.logits)
        assert torch.equal(got.logits, bits)
    finally:
        twin.close()
        for session, prompt in zip(sessions, group, strict=True):
            session.truncate(prompt.rows)
            session.receipts.clear()
