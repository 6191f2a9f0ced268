"""SmolLM2 by every exact plan: DynamicCache's tokens, and the same bits whichever plan attends and wherever
rows lie while they are promoted, demoted and truncated between steps.

Three prompts of 512 and three of 2,000 tokens, which share a beginning and differ at their ends: one prefill
of the beginning serves all of them (forks), and one prefill serves every plan (truncation). Every plan
answers each prompt alone, and a batch of four with all of them. Up to 8,000 tokens and batches of 8 are in
the bench suite `exact-full`."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_client.hf import attach
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planner import StepPlanner
from kvtier_core.tiers.base import SlotRef
from kvtier_core.transactions import Transactions
from tests.engine.exactness import CHUNK_TOKENS, Generation, compare, kept_references, prompts
from tests.engine.moving import Listing, check_reads, listed, move_rows
from tests.engine.planned import LAYERS, PlannedCache, PlannedSession, copy_rows, engine_of
from tests.engine.smollm2 import load_smollm2

pytestmark = pytest.mark.timeout(600)

SHORT, LONG = 512, 2000
# Prompts of a length have their first tokens in common.
SHARED = {SHORT: 384, LONG: 1920}
NEW_TOKENS = 3
# Which of the new tokens each step makes: where one comes again, sessions were truncated back before it. The
# first cut opens a chunk again that the first step of the short prompts has filled.
SCHEDULE = (0, 1, 0, 1, 1, 2)
# Chunks that are demoted, and promoted, between two steps.
MOVES = 6
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

    @property
    def last(self) -> int:
        return int(self.ids[0, -1])


@torch.no_grad()
def next_logits(model: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    """[sequences, vocabulary] after `tokens`, one a sequence."""
    out = model(torch.tensor(tokens).unsqueeze(1), cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].clone()


@torch.no_grad()
def go_on(model: Any, cache: Any, token: int, steps: int) -> Generation:
    """`steps` greedy tokens after `token`."""
    logits: list[torch.Tensor] = []
    for _ in range(steps):
        logits.append(next_logits(model, cache, [token]))
        token = int(logits[-1].argmax(-1))
    return single(torch.stack(logits))


def single(logits: torch.Tensor, sequence: int = 0) -> Generation:
    """One sequence of logits [steps, sequences, vocabulary]."""
    mine = logits[:, sequence]
    return Generation(mine.argmax(-1).tolist(), mine, 0.0, 1.0)


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
            found[length, prompt.name] = go_on(model, cache, prompt.last, NEW_TOKENS)
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
            "host": {"ram": 1200, "flash": 64},
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


@torch.no_grad()
def play(
    model: Any, where: str, plan: str | None, sessions: list[PlannedSession], prompts: list[Prompt], seed: int
) -> torch.Tensor:
    """[NEW_TOKENS, sequences, vocabulary] by one plan. Between all steps chunks of the sessions are promoted
    and demoted, and before some of them the last rows are taken back and made once more; each step read its
    rows where the engine lists them. The sessions are as before afterwards."""
    rng, rows = random.Random(seed), prompts[0].rows
    cache = PlannedCache(sessions, rows)
    cache.use(plan)
    cache.receipts()
    fed, made = [[prompt.last for prompt in prompts]], list[torch.Tensor]()
    stands = 0
    try:
        for turn, at in enumerate(SCHEDULE):
            if at < stands:
                for session in sessions:
                    cut = session.truncate(rows + at)
                    assert (cut.changed, cut.rows) == (True, rows + at)
                cache._stand_at(rows + at)
            if turn:
                moved = move_rows(sessions, rng, MOVES, back=where == "host")
                assert min(moved.promoted, moved.demoted) > 0, moved
            listing = listed(sessions)
            with attach(model):
                logits = next_logits(model, cache, fed[at])
            for session in sessions:
                _check_step(session, plan, rows + at + 1, listing)
            stands = at + 1
            if at < len(made):
                assert torch.equal(logits, made[at]), f"other bits of token {at} after a truncation"
            else:
                made.append(logits)
                fed.append(logits.argmax(-1).tolist())
    finally:
        for session in sessions:
            session.truncate(rows)
    return torch.stack(made)


def _check_step(session: PlannedSession, plan: str | None, frontier: int, listing: Listing) -> None:
    receipts = list(session.receipts)
    session.receipts.clear()
    assert {(receipt.exactness.value, receipt.frontier) for receipt in receipts} == {("EXACT", frontier)}
    if plan is not None:
        assert {receipt.plan_kind for receipt in receipts} == {plan}
    if frontier % CHUNK_TOKENS:  # else chunks are sealed and make room, so that others move within the step
        check_reads(receipts, session, listing)


def check_bits(key: tuple[int, str], logits: torch.Tensor) -> None:
    """Those of the plan that came first."""
    assert torch.equal(logits, BITS.setdefault(key, logits)), f"other bits of {key}"


@pytest.mark.parametrize("name", NAMES)
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
    name: str,
) -> None:
    prompt = texts[length][NAMES.index(name)]
    seed = PLANS.index((where, plan))
    got = play(model, where, plan, [placements[where].sessions[length, name]], [prompt], seed)
    verdict = compare(wanted[length, name], single(got))
    assert verdict.holds, verdict
    check_bits((length, name), got)


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
    group = [*texts[length], texts[length][0]]
    sessions = [placements[where].sessions[length, name] for name in NAMES]
    twin = sessions[0].fork()
    try:
        got = play(model, where, plan, [*sessions, twin], group, seed=length)
    finally:
        twin.close()
    for at, prompt in enumerate(group):
        verdict = compare(wanted[length, prompt.name], single(got, at))
        assert verdict.holds, (prompt.name, verdict)
    assert torch.equal(got[:, 0], got[:, 3])
    check_bits((length, "batch"), got)


def wrong_chunk(real: Any) -> Any:
    """A planner's plans, but in one layer one chunk stands in another's place, out of the same tier."""

    def plan(planner: Any, append: Any, visible: int, **more: Any) -> Any:
        found = real(planner, append, visible, **more)
        if append.layer != LAYERS // 2:
            return found
        reads, by_tier = list(found.reads), dict[int, int]()
        for at, read in enumerate(reads[:-1]):
            if read.tier in by_tier:
                reads[at] = replace(reads[by_tier[read.tier]], chunk=read.chunk)
                return replace(found, reads=tuple(reads))
            by_tier[read.tier] = at
        raise AssertionError("no tier has two chunks")

    return plan


@pytest.mark.parametrize(("where", "plan"), PLANS, ids=IDS)
def test_a_plan_that_attends_a_wrong_chunk_is_noticed(
    model: Any,
    texts: dict[int, list[Prompt]],
    placements: dict[str, Served],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    plan: str | None,
) -> None:
    prompt, sound = texts[LONG][0], placements[where].sessions[LONG, NAMES[0]]
    if (LONG, NAMES[0]) not in BITS:
        check_bits((LONG, NAMES[0]), play(model, where, plan, [sound], [prompt], seed=1))
    session = sound.fork()
    monkeypatch.setattr(StepPlanner, "plan", wrong_chunk(StepPlanner.plan))
    # A state that was formed where the rows are says which blocks it has read: where the two are in storage,
    # which moves before this have settled, it is not even merged.
    noticed = "other bits|a state of producer flash is refused"
    try:
        with pytest.raises((AssertionError, CoreError), match=noticed):
            check_bits((LONG, NAMES[0]), play(model, where, plan, [session], [prompt], seed=1))
    finally:
        session.close()


def loses_rows(real: Any) -> Any:
    """A move that is published, but for the values of its chunk."""

    def run(transactions: Any, kind: Any, line: int, tier: int) -> None:
        real(transactions, kind, line, tier)
        directory = transactions._directory
        slot = SlotRef(int(directory.slot[line]), int(directory.slot_generation[line]))
        transactions._tiers[tier].view(slot)[1].zero_()

    return run


@pytest.mark.parametrize(
    ("broken", "why"),
    [(loses_rows, "other bits"), (lambda real: lambda *_: None, "promoted=0")],
    ids=["loses-rows", "does-nothing"],
)
def test_a_broken_move_is_noticed(
    model: Any,
    texts: dict[int, list[Prompt]],
    placements: dict[str, Served],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broken: Any,
    why: str,
) -> None:
    prompt, sound = texts[SHORT][0], placements["memory"].sessions[SHORT, NAMES[0]]
    key, plan = (SHORT, NAMES[0]), PlanKind.SUPPORT_PARTITION.value
    if key not in BITS:
        check_bits(key, play(model, "memory", plan, [sound], [prompt], seed=1))
    engine = engine_of(tmp_path, time.monotonic, hbm=80, ram=64)
    try:
        session = copy_rows(sound, engine, prompt.rows, SHORT + 64)
        monkeypatch.setattr(Transactions, "run", broken(Transactions.run))
        with pytest.raises(AssertionError, match=why):
            check_bits(key, play(model, "memory", plan, [session], [prompt], seed=1))
    finally:
        engine.stop()
