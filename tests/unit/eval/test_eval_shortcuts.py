"""What a run does not do twice: indexes that no budget changes, and tokens that were replayed already. The
results must be the same bytes without these shortcuts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier_core.selectors.contract import NO_EVIDENCE, Family, Index, Query
from kvtier_core.selectors.families.registry import FAMILIES
from kvtier_eval import runner
from kvtier_eval.journal import Journal, read
from kvtier_eval.metrics import Traffic
from kvtier_eval.plan import BASELINES, CHOICES, Plan, family_of
from kvtier_eval.prepare import prepare
from kvtier_eval.replay import Indexes
from kvtier_eval.tasks import Task, make_prompt
from tests.unit.eval.eval_cases import MATERIAL, SHAPE, SMALL, small_plan, tiny_decoder
from tests.unit.selectors.selector_cases import SOURCE, query_of, rows_of

# Every selector twice: seconds of a processor, which a busy machine spreads over minutes.
pytestmark = pytest.mark.timeout(1200)

FIXED = {"retrievalAttention", "squeezedAttention"}
"""They refuse rows that come later."""


@pytest.fixture(autouse=True)
def _narrow_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's heads have fewer channels than infinigen keeps of 64."""
    monkeypatch.setitem(CHOICES, "infinigen", ("infinigen", {"partialDimensions": 5, "alpha": "4"}))


def lines(plan: Plan, path: Path) -> list[str]:
    with Journal(path, plan.digest) as journal:
        runner.run(plan, tiny_decoder(), MATERIAL, journal, progress=lambda *_: None, go_on=lambda: True)
    return sorted(map(repr, read(path, plan.digest)))


def everything(task: Task) -> Plan:
    one = SMALL.model_copy(update={"prompts": 1, "detail_every": 2})
    return small_plan(settings=one, tasks=(task,), length=300, families=tuple(CHOICES), budgets=(48, 80))


def test_every_family_and_variant_is_measured() -> None:
    assert {family for family, _ in CHOICES.values()} == set(FAMILIES)
    plan = everything(Task.COPY_SPAN)
    assert plan.not_run == ()
    assert {cell.selector for cell in plan.cells} == {kind.value for kind in BASELINES} | set(CHOICES)


@pytest.mark.parametrize("task", [Task.APPENDED_NEEDLE, Task.DROP_REPOSITION])
def test_sharing_indexes_over_budgets_changes_no_result(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = everything(task)
    shared = lines(plan, tmp_path / "shared.jsonl")
    built = 0

    def alone(
        self: Indexes, selector: object, layer: int, family: Family, build: Callable[[], Index]
    ) -> Index:
        nonlocal built
        built += 1
        return build()

    monkeypatch.setattr(Indexes, "of", alone)
    assert lines(plan, tmp_path / "alone.jsonl") == shared
    assert built > len(plan.cells)
    refused = {name for name in CHOICES for line in shared if f"/{name}/" in line and "'refused'" in line}
    assert refused == (set() if task is not Task.APPENDED_NEEDLE else FIXED)


def test_an_index_of_another_selector_is_not_handed_out() -> None:
    indexes, made = Indexes(), 0

    def build() -> Index:
        nonlocal made
        made += 1
        plan = everything(Task.COPY_SPAN)
        k, v = rows_of(made, 40, SHAPE)

        return family_of(plan.selector("sparq"), 48, SMALL, SHAPE).build(SOURCE, k, v, NO_EVIDENCE)

    plan = everything(Task.COPY_SPAN)
    small, large = (family_of(plan.selector("sparq"), budget, SMALL, SHAPE) for budget in (48, 80))
    first = indexes.of("sparq", 1, small, build)
    again = indexes.of("sparq", 1, large, build)
    assert made == 1
    assert (first.facts.selector_digest, again.facts.selector_digest) == (small.digest, large.digest)
    indexes.of("sparq", 2, small, build)
    indexes.of("other", 1, small, build)
    indexes.of("sparq", 1, small, build)
    assert made == 4


@pytest.mark.parametrize("task", [Task.COPY_SPAN, Task.PERPLEXITY])
def test_tokens_replayed_once_tell_what_a_second_replay_would(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(
        settings=SMALL.model_copy(update={"prompts": 2, "steps": 6}),
        tasks=(task,),
        length=540 if task is Task.PERPLEXITY else 240,
        families=("quest", "magicPig"),
        budgets=(64,),
    )
    quick = lines(plan, tmp_path / "quick.jsonl")
    monkeypatch.setattr(runner, "leading", lambda *_: None)
    assert lines(plan, tmp_path / "twice.jsonl") == quick


def test_a_selector_that_knows_better_than_full_attention_is_asked_again() -> None:
    """The right token where full attention slips: what follows is not on full attention's line."""
    prompt = make_prompt(Task.PASSKEY, MATERIAL, length=240, steps=6, seed=2, index=0)
    prepared = prepare(tiny_decoder(), prompt, frozenset())
    right, said = prepared.gold.targets, prepared.own.targets
    slip = next(at for at, (one, other) in enumerate(zip(right, said, strict=True)) if one != other)
    logs = torch.full((len(right), 256), -9.0)
    logs[torch.arange(len(right)), torch.tensor(right)] = -0.1
    assert runner.leading(logs, prepared) is None
    logs[slip, said[slip]] = 0.0
    assert runner.leading(logs, prepared) == slip


def test_a_family_that_reads_whole_pages_is_charged_for_them() -> None:
    plan = small_plan(families=("sparq", "sparq-sparF"), budgets=(16,))
    k, v = rows_of(3, 200, SHAPE)
    persistent = np.zeros(200, dtype=np.bool_)
    persistent[:2] = persistent[-8:] = True
    read_bytes = []

    for name in ("sparq", "sparq-sparF"):
        family = family_of(plan.selector(name), 16, SMALL, SHAPE)
        traffic = Traffic(SHAPE, hot=64, page=SMALL.page_tokens)
        found = family.select(family.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(4, SHAPE), 200, SOURCE))
        traffic.add(found, persistent)
        read_bytes.append((traffic.rows, [set((rows // 16).tolist()) for rows in found.positions]))
    (rows, chosen), (pages, _) = read_bytes
    assert rows == 2 * 16 * 2 * 16 * 4
    assert rows < pages <= sum(map(len, chosen)) * 16 * 2 * 16 * 4
