"""Candidate steps: what is read, what is compared, whose rows they are, and the way back to exact."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_core.attend import Attention
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, PublishArm, StepAnswer, StepMode
from kvtier_core.selectors.base import Selection, build_family
from kvtier_core.selectors.live import LiveIndex
from kvtier_crds.manifest import Selector
from tests.unit.core.builders import (
    CANDIDATE,
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PAGE,
    QUERY_HEADS,
    SCALE,
    Driver,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    nvme,
)
from tests.unit.core.builders import quest as quest_selector

TOKENS = 5 * CHUNK + 3
TIERS = [gpu(4), cpu(3), nvme(64)]
QUEST = quest_selector(tokens=3 * PAGE, sink=2, recent=5)


def candidate(selector: Selector | None = QUEST, **changes: object) -> StepMode:
    fields = {"publish": PublishArm.CANDIDATE, "selector": selector, "candidate_digest": CANDIDATE}
    return StepMode(**{**fields, **changes})  # type: ignore[arg-type]


def shadow(selector: Selector = QUEST) -> StepMode:
    return StepMode(PublishArm.EXACT, True, selector, CANDIDATE)


def selected_reference(rows: Rows, layer: int, position: int, selector: Selector) -> torch.Tensor:
    """Attention in float64 over the rows that Quest selects for the query at `position`: [1, Hq, d]."""
    family = build_family(
        selector, page_tokens=PAGE, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    index = family.indexes(bytes(32), LAYERS)[layer]
    assert index is not None
    index.append(0, rows.k[layer, :position], rows.v[layer, :position])
    q = rows.q[layer, position : position + 1]
    selection = index.select(q, position + 1, 1.0, rows.k[layer, position : position + 1])
    group = QUERY_HEADS // KV_HEADS
    out = torch.empty(1, QUERY_HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(QUERY_HEADS):
        chosen = torch.from_numpy(selection.positions[head // group])
        k = rows.k[layer, chosen, head // group].double()
        v = rows.v[layer, chosen, head // group].double()
        out[0, head] = (q[0, head].double() @ k.T * SCALE).softmax(-1) @ v
    return out


def step(driver: Driver, mode: StepMode) -> list[StepAnswer]:
    before = len(driver.answers)
    driver.forward(1, mode)
    return driver.answers[before:]


@pytest.mark.parametrize(
    "tiers", [[gpu(64)], TIERS, [cpu(LAYERS), nvme(64)]], ids=["gpu", "three tiers", "flash"]
)
def test_an_approximate_answer_is_attention_over_the_selected_rows(
    tmp_path: Path, tiers: list[TierBudget]
) -> None:
    rows = Rows.random(TOKENS + 4)
    with engine(tmp_path, tiers) as built:
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        for offset in range(4):
            for layer, answer in enumerate(step(driver, candidate())):
                want = selected_reference(rows, layer, TOKENS + offset, QUEST)
                torch.testing.assert_close(answer.out.double(), want, rtol=0, atol=3e-6)
                assert answer.receipt.exactness is ExactnessClass.APPROXIMATE
                assert answer.receipt.manifest_digest == CANDIDATE
                assert answer.receipt.arm is PublishArm.CANDIDATE
                # At most the budget's open page, its other pages, sink and recent rows.
                assert answer.receipt.rows_attended <= 3 * PAGE + 2 + 5
                assert 0 < answer.receipt.selected_rows <= 2 * PAGE
                assert math.isnan(answer.receipt.estimated_omitted_mass)


def test_approximate_answers_do_not_depend_on_placement(tmp_path: Path) -> None:
    outs = []
    for name, tiers in (("a", [gpu(64)]), ("b", TIERS), ("c", [cpu(LAYERS), nvme(64)])):
        with engine(tmp_path / name, tiers) as built:
            driver = Driver.open(built, Rows.random(TOKENS + 6), QUEST)
            driver.forward(TOKENS)
            outs.append(torch.cat([driver.forward(1, candidate()) for _ in range(6)], dim=1))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_chunks_without_a_selected_row_are_not_read(tmp_path: Path) -> None:
    narrow = quest_selector(tokens=PAGE)
    with engine(tmp_path, [cpu(LAYERS), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(TOKENS + 2), narrow)
        driver.forward(TOKENS)
        exact = step(driver, StepMode())[0].receipt
        thin = step(driver, candidate(narrow))[0].receipt
    assert exact.bytes_by_tier["flash"] > 0
    assert "flash" not in thin.bytes_by_tier
    assert thin.plan == ("cpu:partial",)
    assert thin.rows_attended == (TOKENS + 2) - (TOKENS + 1) // PAGE * PAGE


def test_both_answers_of_a_comparison_use_one_snapshot_exact_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[object, ...], int]] = []
    exact, selected = Attention.exact, Attention.selected

    def spy(name: str, real: object) -> object:
        def run(self: Attention, plan: object, append: object, query: object, *rest: object) -> object:
            frontier = append.session.layers[append.layer].frontier  # type: ignore[attr-defined]
            place = tuple((read.chunk, read.line, read.tier) for read in plan.reads)  # type: ignore[attr-defined]
            calls.append((name, place, frontier))
            return real(self, plan, append, query, *rest)  # type: ignore[operator]

        return run

    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        monkeypatch.setattr(Attention, "exact", spy("exact", exact))
        monkeypatch.setattr(Attention, "selected", spy("selected", selected))
        answers = step(driver, shadow())
    assert [name for name, _, _ in calls] == ["exact", "selected"] * LAYERS
    for (_, all_chunks, frontier), (_, some, again) in zip(calls[::2], calls[1::2], strict=True):
        assert frontier == again == TOKENS
        assert set(some) < set(all_chunks)
    for layer, answer in enumerate(answers):
        comparison = answer.comparison
        assert comparison is not None
        want = selected_reference(rows, layer, TOKENS, QUEST)
        assert answer.receipt.arm is PublishArm.EXACT
        assert answer.receipt.exactness is ExactnessClass.EXACT
        assert comparison.frontier == TOKENS + 1
        assert comparison.exact_norm == pytest.approx(float(answer.out.double().norm()), rel=1e-5)
        assert comparison.diff_norm == pytest.approx(float((want - answer.out.double()).norm()), abs=1e-5)
        assert comparison.diff_norm > 0.01
        assert not comparison.complete
        assert comparison.exact_support_digest == answer.receipt.support_digest
        assert comparison.candidate_support_digest != comparison.exact_support_digest


def test_a_shadow_changes_no_bit_and_no_producer(tmp_path: Path) -> None:
    with engine(tmp_path / "a", TIERS) as built:
        plain = Driver.open(built, Rows.random(TOKENS + 5)).play(TOKENS, 5)
    with engine(tmp_path / "b", TIERS) as built:
        driver = Driver.open(built, Rows.random(TOKENS + 5), QUEST)
        shadowed = driver.play(TOKENS, 5, shadow())
        baseline = built.live_manifest().digest()
        assert {answer.receipt.producer_digest for answer in driver.answers} == {baseline}
        assert {answer.receipt.exactness for answer in driver.answers} == {ExactnessClass.EXACT}
    assert torch.equal(plain, shadowed)


def test_rows_after_the_first_approximate_step_are_the_candidates_in_all_layers(tmp_path: Path) -> None:
    dense = quest_selector(tokens=3 * PAGE, dense=(0,))
    rows = Rows.random(TOKENS + 2 * CHUNK)
    with engine(tmp_path, TIERS) as built:
        baseline = built.live_manifest().digest()
        driver = Driver.open(built, rows, dense)
        driver.forward(TOKENS)
        first = step(driver, candidate(dense))
        assert [answer.receipt.producer_digest for answer in first] == [CANDIDATE] * LAYERS
        # Layer 0 is dense and ran before any approximation of this history.
        assert first[0].receipt.exactness is ExactnessClass.EXACT
        assert first[1].receipt.exactness is ExactnessClass.APPROXIMATE
        second = step(driver, candidate(dense))
        assert second[0].receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
        for _ in range(2 * CHUNK - 3):
            after = step(driver, StepMode())
        for answer in after:
            assert answer.receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
            assert answer.receipt.arm is PublishArm.EXACT
            assert answer.receipt.manifest_digest == baseline
            assert answer.receipt.producer_digest == CANDIDATE
        producers = {
            (info.layer, info.chunk): info.producer_digest
            for info in built.list_chunks(driver.handle.session_id, driver.handle.generation)
        }
    switch = TOKENS // CHUNK
    assert {chunk for _, chunk in producers} == set(range(switch + 2))
    for (_, chunk), producer in producers.items():
        assert producer == (baseline if chunk < switch else CANDIDATE)


def test_after_a_return_answers_are_exact_over_the_rows_there_are(tmp_path: Path) -> None:
    """Here rows do not depend on answers, so the exact steps must equal those of an exact run."""
    rows = Rows.random(TOKENS + 6)
    with engine(tmp_path / "a", TIERS) as built:
        exact = Driver.open(built, rows).play(TOKENS, 6)
    with engine(tmp_path / "b", TIERS) as built:
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        approximate = torch.cat([driver.forward(1, candidate()) for _ in range(3)], dim=1)
        returned = torch.cat([driver.forward(1) for _ in range(3)], dim=1)
    assert torch.equal(returned, exact[:, TOKENS + 3 :])
    assert not torch.equal(approximate, exact[:, TOKENS : TOKENS + 3])


def test_a_candidate_that_reads_every_row_is_exact_and_says_so(tmp_path: Path) -> None:
    wide = quest_selector(tokens=100 * PAGE)
    with engine(tmp_path, TIERS) as built:
        baseline = built.live_manifest().digest()
        driver = Driver.open(built, Rows.random(TOKENS + 2), wide)
        driver.forward(TOKENS)
        for answer in step(driver, candidate(wide, compare=True)):
            assert answer.receipt.exactness is ExactnessClass.EXACT
            assert answer.receipt.arm is PublishArm.CANDIDATE
            assert answer.receipt.manifest_digest == CANDIDATE
            assert answer.receipt.producer_digest == baseline
            assert answer.comparison is not None
            assert answer.comparison.complete
            assert answer.comparison.diff_norm == 0.0


@pytest.mark.parametrize("block", [20, TOKENS - 1], ids=["blocks", "last block of one"])
def test_the_candidate_prefills_densely(tmp_path: Path, block: int) -> None:
    rows = Rows.random(TOKENS)
    with engine(tmp_path / "a", TIERS) as built:
        exact = Driver.open(built, rows).forward(TOKENS)
    with engine(tmp_path / "b", TIERS) as built:
        driver = Driver.open(built, rows, QUEST)
        baseline = built.live_manifest().digest()
        out = driver.forward(TOKENS, candidate(), block=block)
        assert {answer.receipt.exactness for answer in driver.answers} == {ExactnessClass.EXACT}
        assert {answer.receipt.producer_digest for answer in driver.answers} == {baseline}
    assert torch.equal(out, exact)


def test_a_lease_that_ended_while_computing_publishes_the_exact_answer(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path / "a", TIERS) as built:
        exact = Driver.open(built, rows).play(TOKENS, 1)
        baseline = built.live_manifest().digest()
    with engine(tmp_path / "b", TIERS) as built:
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        answers = step(driver, candidate(may_publish=lambda: False))
    for layer, answer in enumerate(answers):
        assert torch.equal(answer.out, exact[layer, TOKENS:])
        assert answer.receipt.fallback == "LEASE_EXPIRED"
        assert answer.receipt.arm is PublishArm.EXACT
        assert answer.receipt.exactness is ExactnessClass.EXACT
        assert answer.receipt.manifest_digest == answer.receipt.producer_digest == baseline


def test_the_exact_repeat_of_an_approximate_frame_is_exact(tmp_path: Path) -> None:
    """What an agent does with an answer whose permission ended before it could leave."""
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path / "a", TIERS) as built:
        exact = Driver.open(built, rows).play(TOKENS, 1)
    with engine(tmp_path / "b", TIERS) as built:
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        for layer in range(LAYERS):
            request = driver.request(layer, TOKENS, TOKENS + 1)
            assert built.step(request, candidate()).receipt.exactness is ExactnessClass.APPROXIMATE
            repeat = built.step(request)
            assert repeat.repeated
            assert torch.equal(repeat.out, exact[layer, TOKENS:])
            assert repeat.receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY


STALE = {
    "opened without a grant": (None, Reason.NO_CANDIDATE),
    "opened under another selector": (quest_selector(tokens=4 * PAGE), Reason.GENERATION_STALE),
}


@pytest.mark.parametrize(("opened", "reason"), STALE.values(), ids=STALE.keys())
def test_without_a_fresh_index_the_answer_is_exact_and_says_why(
    tmp_path: Path, opened: Selector | None, reason: Reason
) -> None:
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path / "a", TIERS) as built:
        exact = Driver.open(built, rows).play(TOKENS, 1)
    with engine(tmp_path / "b", TIERS) as built:
        driver = Driver.open(built, rows, opened)
        driver.forward(TOKENS)
        answers = step(driver, candidate(compare=True))
        assert torch.equal(torch.stack([answer.out for answer in answers]), exact[:, TOKENS:])
        for answer in answers:
            assert answer.receipt.fallback == reason.value
            assert answer.receipt.arm is PublishArm.EXACT
            assert answer.comparison is None
            assert answer.receipt.producer_digest == built.live_manifest().digest()


def test_a_candidate_needs_its_digest(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(8), QUEST)
        with pytest.raises(CoreError) as refused:
            driver.forward(4, candidate(candidate_digest=None))
        assert refused.value.reason is Reason.NO_CANDIDATE
        driver.forward(4)


def test_a_refused_frame_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    """The clock passes the deadline; the same frame then is accepted and selects as if nothing happened."""
    rows = Rows.random(TOKENS + 1)
    outs = []
    for late in (False, True):
        with engine(tmp_path / str(late), TIERS) as built:
            driver = Driver.open(built, rows, QUEST)
            driver.forward(TOKENS)
            if late:
                with pytest.raises(CoreError) as refused:
                    built.step(driver.request(0, TOKENS, TOKENS + 1, deadline=0.0), candidate())
                assert refused.value.reason is Reason.DEADLINE
            outs.append(driver.forward(1, candidate()))
    assert torch.equal(outs[0], outs[1])


def test_a_selection_that_is_not_honoured_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference above is only worth something if other rows give another answer."""
    real = LiveIndex.select

    def shifted(self: LiveIndex, q: torch.Tensor, rows: int, *more: Any, may_widen: bool) -> Selection:
        import dataclasses

        found = real(self, q, rows, *more)
        moved = tuple(np.unique(np.clip(rows_ - 1, 0, rows - 1)) for rows_ in found.positions)
        return dataclasses.replace(found, positions=moved)

    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        monkeypatch.setattr(LiveIndex, "select", shifted)
        out = driver.forward(1, candidate())
        monkeypatch.undo()
    want = selected_reference(rows, 0, TOKENS, QUEST)
    assert float((out[0].double() - want).abs().max()) > 1e-3
