"""Runs a plan: each prompt once under full attention, then under every selector, written down as it goes.

Why it exists: the prefill is the dear part, so all selectors of a prompt share it, and all cells grow
together. A run killed at any moment loses the work of one prompt at most. It must not judge results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvtier_core.errors import CoreError
from kvtier_core.selectors.contract import Family
from kvtier_eval.forward import Decoder
from kvtier_eval.journal import Journal
from kvtier_eval.metrics import Collector, token_metrics
from kvtier_eval.plan import CellPlan, Plan, family_of
from kvtier_eval.prepare import Forced, Prepared, matched, prepare
from kvtier_eval.replay import Indexes, Replay, needs_of
from kvtier_eval.tasks import Material, PromptTooShort, Task, make_prompt

_LONG_RANGE_NATS = 0.5


class Progress(Protocol):
    def __call__(self, done: int, total: int, doing: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """done of total results. stopped: `go_on` said no before the end."""

    done: int
    total: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Group:
    task: Task
    length: int
    cells: tuple[CellPlan, ...]


def run(
    plan: Plan,
    decoder: Decoder,
    material: Material,
    journal: Journal,
    *,
    progress: Progress,
    go_on: Callable[[], bool],
) -> Outcome:
    """Does what `journal` does not hold yet. go_on: asked before each prompt and each selector."""
    done = {(one["cell"], one["prompt"]) for one in journal.results}
    total = len(plan.cells) * plan.settings.prompts
    for group, index in _order(plan):
        cells = [cell for cell in group.cells if (cell.id, index) not in done]
        if not cells:
            continue
        if not go_on():
            return Outcome(len(done), total, stopped=True)
        progress(len(done), total, f"{group.task}/{group.length} prompt {index}: full attention")
        families = {
            cell.id: family_of(plan.selector(cell.selector), cell.budget, plan.settings, decoder.shape)
            for cell in cells
        }
        try:
            prompt = make_prompt(
                group.task,
                material,
                length=group.length,
                steps=plan.settings.steps,
                seed=plan.settings.seed,
                index=index,
            )
        except PromptTooShort as error:
            for cell in cells:
                journal.write(_refusal(cell, index, "PromptTooShort", str(error)))
                done.add((cell.id, index))
            continue
        prepared = prepare(decoder, prompt, needs_of(list(families.values())))
        indexes = Indexes()
        for cell in cells:
            if not go_on():
                return Outcome(len(done), total, stopped=True)
            journal.write(_result(plan, decoder, cell, index, families[cell.id], prepared, indexes))
            done.add((cell.id, index))
            progress(len(done), total, f"{cell.id} prompt {index}")
    return Outcome(len(done), total, stopped=False)


def _order(plan: Plan) -> Iterator[tuple[_Group, int]]:
    """Prompt by prompt over all tasks, so that a run cut short has about as many of each."""
    named: dict[tuple[Task, int], list[CellPlan]] = {}
    for cell in plan.cells:
        named.setdefault((cell.task, cell.length), []).append(cell)
    groups = [_Group(task, length, tuple(cells)) for (task, length), cells in named.items()]
    for index in range(plan.settings.prompts):
        for group in groups:
            yield group, index


def _result(
    plan: Plan,
    decoder: Decoder,
    cell: CellPlan,
    index: int,
    family: Family,
    prepared: Prepared,
    indexes: Indexes,
) -> dict[str, Any]:
    settings = plan.settings
    collector = Collector(
        decoder.layers,
        decoder.shape,
        prepared.needle_heads,
        prepared.evidence,
        hot=settings.hot * max(1, cell.budget),
        page=settings.page_tokens,
    )
    seed = _seed(settings.seed, cell.id, index)

    def logs(along: Forced, noted: Collector | None) -> Tensor:
        replay = Replay(
            decoder,
            family,
            prepared,
            along,
            settings.setup,
            seed=seed,
            collector=noted,
            indexes=indexes,
            selector=cell.selector,
        )
        return replay.logs()

    own = prepared.own
    try:
        given = logs(own, collector)
        tokens = token_metrics(own.logs, given, own.targets)
        hits = leading(given, prepared)
        if hits is None:
            hits = matched(logs(prepared.gold, None), prepared.gold.targets)
    except CoreError as error:
        return _refusal(cell, index, error.reason.value, error.message)
    asks, size = prepared.prompt.task.asks, len(prepared.prompt.gold)
    made: dict[str, Any] = {
        "cell": cell.id,
        "prompt": index,
        "position": round(prepared.prompt.position, 4),
        "rows": prepared.mark + 1,
        "fullAnswers": prepared.answered if asks else None,
        "answers": hits >= prepared.prompt.needed if asks else None,
        "fullMatched": round(prepared.matched / size, 4),
        "matched": round(hits / size, 4),
        "kl": [round(one, 7) for one in tokens.kl],
        "top1": round(sum(tokens.top1) / len(tokens.top1), 4),
        "needleHeads": len(prepared.needle_heads),
        **collector.result(),
    }
    if prepared.short_losses is not None:
        full = token_metrics(own.logs, own.logs, own.targets).loss
        short = prepared.short_losses.tolist()
        gains = [one - other for one, other in zip(short, full, strict=True)]
        far = [at for at, gain in enumerate(gains) if gain > _LONG_RANGE_NATS]
        worse = [one - other for one, other in zip(tokens.loss, full, strict=True)]
        made |= {
            "fullLoss": round(sum(full) / len(full), 6),
            "lossGrowth": round(sum(worse) / len(worse), 6),
            "longRangeTokens": len(far),
            "longRangeGrowth": round(sum(worse[at] for at in far) / len(far), 6) if far else None,
        }
    if prepared.reprefill is not None:
        made["reprefillMatched"] = round(prepared.reprefill / size, 4)
    return made


def leading(given: Tensor, prepared: Prepared) -> int | None:
    """Leading tokens of the right answer that the selector gives, from its ln P `given` along full
    attention's own tokens. None: these do not tell, since it names the right one where full attention slips,
    and what stands behind the slip is another text."""
    right = prepared.gold.targets
    if prepared.gold is prepared.own:
        return matched(given, right)
    pairs = zip(right, prepared.own.targets, strict=True)
    known = 1 + next(at for at, (one, other) in enumerate(pairs) if one != other)
    hits = matched(given[:known], right[:known])
    return None if hits == known else hits


def _refusal(cell: CellPlan, index: int, reason: str, message: str) -> dict[str, Any]:
    return {"cell": cell.id, "prompt": index, "refused": reason, "message": message[:300]}


def _seed(seed: int, cell: str, index: int) -> int:
    """Of one prompt's draws."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{cell}/{index}".encode()).digest()[:4], "big") >> 2
