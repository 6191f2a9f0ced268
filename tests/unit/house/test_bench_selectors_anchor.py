"""The comparison with published figures: what six prompts give by chance, and rows for what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.bench_selectors_anchor import BUDGETS, OTHERS, PUBLISHED, Range, compared


def result(selector: str, budget: int, kl: float, mass: float, answers: bool = True) -> dict[str, Any]:
    return {
        "cell": f"passkey/1024/{selector}/{budget}",
        "kl": [kl - 0.001, kl + 0.001],
        "mass": {"mean": mass},
        "answers": answers,
    }


def test_the_range_is_of_means_of_six() -> None:
    spread = Range.of([0.0, 1.0] * 12)
    # The mean of six fair coins lies between 1/6 and 5/6 in 62 of 64 cases, and outside in 2.
    assert (spread.low, spread.high) == pytest.approx((1 / 6, 5 / 6))
    assert (spread.mean, spread.count) == (0.5, 24)
    assert Range.of([0.25]) == Range(0.25, 0.25, 0.25, 1)
    with pytest.raises(ValueError, match="no values"):
        Range.of([])


def test_published_figures_stand_beside_ours_and_refusals_count_nowhere() -> None:
    found = [result("quest-evaluation", 256, kl, 0.8, kl < 0.2) for kl in (0.1, 0.3)]
    found += [
        {"cell": "passkey/1024/quest/256", "refused": "X", "message": "y"},
        result("sparq", 32, 0.01, 0.9),
    ]
    made = {row.id: row for row in compared(found)}
    kl = made["selectors_anchor.b256.quest.evaluation.kl"]
    assert kl.value == pytest.approx(0.2) and kl.peer_value == 0.083
    assert made["selectors_anchor.b256.quest.evaluation.answered"].value == 1
    assert made["selectors_anchor.b256.quest.evaluation.answered"].unit == "of 2"
    assert made["selectors_anchor.b32.sparq.mass"].peer is None
    assert not any("b256.quest.kl" in name or "random" in name for name in made)
    assert len(made) == 2 * 7


def test_each_figure_has_a_budget() -> None:
    for figures in PUBLISHED.values():
        assert {len(values) for values in figures.values()} == {len(BUDGETS)}
    assert not set(OTHERS) & set(PUBLISHED)
