"""The evaluation on a real model: a copied number, with the figures that the study of selectors found."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_eval.forward import Decoder
from kvtier_eval.metrics import Collector, token_metrics
from kvtier_eval.models import SMOLLM2, load
from kvtier_eval.plan import SelectorPlan, Settings, family_of
from kvtier_eval.prepare import Prepared, prepare
from kvtier_eval.replay import Regime, Replay
from kvtier_eval.tasks import Material, Task, make_prompt
from kvtier_eval.texts import stdlib_corpus

SETTINGS = Settings(prompts=1, steps=8, seed=1, regime=Regime.OWN_ROWS)
BUDGET = 64


@pytest.fixture(scope="module")
def measured() -> tuple[Decoder, Prepared]:
    """A prompt of 384 tokens that full attention answers; the filler comes with Python, so one of three."""
    loaded = load(SMOLLM2)
    decoder = Decoder(loaded.model)
    material = Material(loaded.codec, tuple(loaded.codec.encode(stdlib_corpus(("argparse", "json")).text)))
    for index in (0, 1, 3):
        prompt = make_prompt(Task.PASSKEY, material, length=384, steps=8, seed=1, index=index)
        prepared = prepare(decoder, prompt, frozenset())
        if prepared.answered:
            return decoder, prepared
    raise AssertionError("full attention answers none of three")


def _replayed(
    measured: tuple[Decoder, Prepared], selector: SelectorPlan
) -> tuple[int, float, dict[str, Any]]:
    decoder, prepared = measured
    family = family_of(selector, BUDGET, SETTINGS, decoder.shape)
    collector = Collector(
        decoder.layers, decoder.shape, prepared.needle_heads, prepared.evidence, hot=2 * BUDGET
    )
    logs = Replay(decoder, family, prepared, prepared.own, SETTINGS.setup, seed=1, collector=collector).logs()
    got = token_metrics(prepared.own.logs, logs, prepared.own.targets)
    return got.matched, max(got.kl), collector.result()


def test_full_attention_answers_and_looks_at_the_needle(measured: tuple[Decoder, Prepared]) -> None:
    _, prepared = measured
    assert prepared.answered and prepared.needle_heads


def test_reading_every_row_changes_nothing(measured: tuple[Decoder, Prepared]) -> None:
    matched, kl, found = _replayed(measured, SelectorPlan(name="full", baseline="full"))
    assert matched == len(measured[1].prompt.gold) and kl < 1e-5
    assert found["mass"]["min"] == pytest.approx(1.0)


def test_a_certified_scan_answers_with_few_rows_and_its_bound_holds(
    measured: tuple[Decoder, Prepared],
) -> None:
    scan = SelectorPlan(name="scan", family="certifiedScan", parameters={"maxOmittedMass": "0.01"})
    matched, kl, found = _replayed(measured, scan)
    assert matched == len(measured[1].prompt.gold) and kl < 0.2
    assert found["boundViolations"] == 0
    assert 0.5 < found["certified"]["mean"] <= found["mass"]["mean"]


def test_the_latest_rows_alone_do_not_answer(measured: tuple[Decoder, Prepared]) -> None:
    matched, kl, found = _replayed(measured, SelectorPlan(name="recent", baseline="recent"))
    assert matched < len(measured[1].prompt.gold) and kl > 0.5
    assert found["mass"]["mean"] > 0.5, "which is why mass alone says nothing"
