"""SmolLM2 by every exact plan at up to 8,000 tokens and in batches of 8, against transformers' DynamicCache.

It takes tens of minutes, so each result is kept in build/bench/exact_full when it is there, in a folder of
its numerics version, which decides about bits; a run that was ended goes on where it was, and `rows()` needs
all of them. Rule and prompts are those of
tests/engine/test_exact_plans.py: equal tokens or a listed near-tie, and the same bits by every plan, with
chunks promoted and demoted between steps."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kvtier_client.hf import attach
from kvtier_core.engine import CacheEngine
from kvtier_core.placements.preference import PlanKind
from kvtier_crds.manifest import NUMERICS_VERSION
from tests.bench.rows import Row
from tests.engine.exactness import Generation, compare, prompts
from tests.engine.planned import LAYERS, PlannedCache, PlannedSession, copy_rows, engine_of, shuffle
from tests.engine.smollm2 import load_smollm2

FOLDER = Path(__file__).resolve().parents[2] / "build/bench/exact_full" / NUMERICS_VERSION.replace("/", "-")
LENGTHS = (512, 2000, 4000, 8000)
BATCH, TAIL, NEW_TOKENS, MOVES = 8, 100, 16, 40
PLANS: dict[str, tuple[str | None, ...]] = {
    "spread": (None, PlanKind.SUPPORT_PARTITION.value, PlanKind.ALL_ROWS_MOVED.value),
    "memory": (PlanKind.ALL_ROWS_MOVED.value, PlanKind.HEAD_GROUPS.value),
    "host": (PlanKind.REQUEST_ON_CPU.value,),
}


def rows() -> Iterator[Row]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for length in LENGTHS:
        if any(not _path(length, where, plan).is_file() for where, plan in _cases()):
            _measure(length)
        yield from _rows(length)


def _cases() -> list[tuple[str, str | None]]:
    return [(where, plan) for where, plans in PLANS.items() for plan in plans]


def _path(length: int, where: str, plan: str | None) -> Path:
    return FOLDER / f"{length}-{where}-{plan or 'chosen'}.json"


def _rows(length: int) -> Iterator[Row]:
    found = {case: json.loads(_path(length, *case).read_text()) for case in _cases()}
    for batch in ("1", str(BATCH)):
        digests = {result[batch]["bits"] for result in found.values()}
        name = f"exact_full.{length}.batch_{batch}"
        yield Row(f"{name}.different_bits", len(digests) - 1, "plans", floor=0, lower_is_better=True)
        for (where, plan), result in found.items():
            one, case = result[batch], f"{name}.{where}_{plan or 'chosen'}"
            yield Row(f"{case}.equal_prompts", one["equal"], "prompts")
            yield Row(f"{case}.failing_prompts", one["failing"], "prompts", floor=0, lower_is_better=True)
            yield Row(f"{case}.per_token", one["seconds"], "s")
            yield Row(f"{case}.peak_buffers", one["peak_buffer_bytes"] / 2**20, "MiB")


@torch.no_grad()
def _measure(length: int) -> None:
    model, tokenizer = load_smollm2()
    document, *tails = prompts(tokenizer, [length - TAIL, *[TAIL] * BATCH], seed=length)
    wanted = _reference(model, length, document, tails)
    chunks = -(-length // 256) * LAYERS
    shared = chunks + 4 * LAYERS * BATCH
    budgets = {
        "spread": {
            "hbm": LAYERS * (BATCH + 2) // 2,
            "ram": chunks // 10 + LAYERS * (BATCH + 2),
            "flash": shared,
        },
        "memory": {"hbm": LAYERS * (BATCH + 2), "ram": shared},
        "host": {"ram": shared + LAYERS * (BATCH + 2)},
    }
    with (
        tempfile.TemporaryDirectory(dir=FOLDER) as folder,
        ThreadPoolExecutor(1) as reader,
        ExitStack() as stack,
    ):
        engine = engine_of(Path(folder), time.monotonic, reader, **budgets["spread"])
        stack.callback(engine.stop)
        with attach(model):
            first, sessions = _prefilled(model, engine, document, tails)
        for where, plans in PLANS.items():
            here, mine = engine, sessions
            with ExitStack() as inner:
                if where != "spread":
                    here = engine_of(Path(folder), time.monotonic, reader, **budgets[where])
                    inner.callback(here.stop)
                    mine = _copied(first, sessions, here, length)
                for plan in plans:
                    path = _path(length, where, plan)
                    if not path.is_file():
                        result = _play(model, here, mine, plan, tails, wanted, length, moves=where != "host")
                        path.write_text(json.dumps(result, indent=1))


def _reference(
    model: Any, length: int, document: torch.Tensor, tails: list[torch.Tensor]
) -> list[Generation]:
    from transformers import DynamicCache

    path = FOLDER / f"{length}-reference.pt"
    if not path.is_file():
        cache = DynamicCache(config=model.config)
        model(document, cache=cache, use_cache=True, logits_to_keep=1)
        made = []
        for tail in tails:
            own = copy.deepcopy(cache)
            model(tail[:, :-1], cache=own, use_cache=True, logits_to_keep=1)
            made.append(_tokens(model, own, [int(tail[0, -1])])[0][:, 0])
        torch.save(torch.stack(made), path)
    return [_generation(logits) for logits in torch.load(path, weights_only=True)]


def _generation(logits: torch.Tensor) -> Generation:
    return Generation(logits.argmax(-1).tolist(), logits, 0.0, 1.0)


def _tokens(model: Any, cache: Any, last: list[int], between: Any = None) -> tuple[torch.Tensor, float]:
    """Logits [NEW_TOKENS, sequences, vocabulary] of greedy steps, and seconds a step, moves left out."""
    found, seconds = [], 0.0
    for _ in range(NEW_TOKENS):
        if between is not None:
            between()
        started = time.perf_counter()
        step = torch.tensor(last).unsqueeze(1)
        logits = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        seconds += time.perf_counter() - started
        last = logits.argmax(-1).tolist()
        found.append(logits.clone())
    return torch.stack(found), seconds / NEW_TOKENS


def _prefilled(
    model: Any, engine: CacheEngine, document: torch.Tensor, tails: list[torch.Tensor]
) -> tuple[PlannedSession, list[PlannedSession]]:
    seen = int(document.shape[1])
    first = PlannedSession.open(engine, seen + TAIL + 64)
    model(document, cache=PlannedCache([first]), use_cache=True, logits_to_keep=1)
    sessions = []
    for tail in tails:
        branch = first.fork()
        model(tail[:, :-1], cache=PlannedCache([branch], seen), use_cache=True, logits_to_keep=1)
        sessions.append(branch)
    return first, sessions


def _copied(
    first: PlannedSession, sessions: list[PlannedSession], target: CacheEngine, length: int
) -> list[PlannedSession]:
    seen = length - TAIL
    document = copy_rows(first, target, seen, length + 64)
    made = [copy_rows(one, target, length - 1, length + 64, document.fork(), seen) for one in sessions]
    document.close()
    return made


def _play(
    model: Any,
    engine: CacheEngine,
    sessions: list[PlannedSession],
    plan: str | None,
    tails: list[torch.Tensor],
    wanted: list[Generation],
    length: int,
    *,
    moves: bool,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    rng = random.Random(length)

    def between() -> None:
        if not shuffle(engine, rng, MOVES):
            raise AssertionError("no chunk was promoted or demoted between two steps")

    for count in (1, BATCH):
        cache = PlannedCache(sessions[:count], length - 1)
        cache.use(plan)
        cache.receipts()
        with attach(model):
            last = [int(tail[0, -1]) for tail in tails[:count]]
            logits, seconds = _tokens(model, cache, last, between if moves else None)
        receipts = cache.receipts()
        verdicts = [compare(wanted[at], _generation(logits[:, at])) for at in range(count)]
        result[str(count)] = {
            "bits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
            "equal": sum(verdict.equal for verdict in verdicts),
            "failing": sum(not verdict.holds for verdict in verdicts),
            "near_ties": [
                {"prompt": at, "token": verdict.first_difference, "gap": verdict.gap}
                for at, verdict in enumerate(verdicts)
                if not verdict.equal
            ],
            "seconds": seconds,
            "plans": sorted({receipt.plan_kind for receipt in receipts}),
            "peak_buffer_bytes": max(receipt.peak_buffer_bytes for receipt in receipts),
            "hidden_seconds": sum(receipt.hidden_seconds for receipt in receipts),
            "exposed_seconds": sum(receipt.stall_seconds for receipt in receipts),
        }
        for session in sessions[:count]:
            session.truncate(length - 1)
    return result
