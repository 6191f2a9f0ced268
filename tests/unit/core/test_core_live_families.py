"""Families of the selectors' contract in an engine: through tiers, with what stands for rows left out, with
weights, by query head, and with a gate that sends a step back to the exact rows."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, PublishArm, StepAnswer, StepMode
from kvtier_core.selectors.contract import (
    NO_EVIDENCE,
    Evidence,
    FamilyFacts,
    Need,
    Query,
    Scope,
    Selection,
    Shape,
    Source,
)
from kvtier_core.selectors.families import registry
from kvtier_core.selectors.families.certified_scan import CertifiedScan
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.live import OUTSIDE_ROWS, LiveFamily
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
    cpu,
    engine,
    gpu,
    nvme,
)

SHAPE = Shape(QUERY_HEADS, KV_HEADS, HEAD_DIM, SCALE)
TOKENS = 4 * CHUNK + 3
TIERS = [gpu(4), cpu(3), nvme(64)]


def selector(family: str, parameters: dict[str, Any], tokens: int = 20, **more: Any) -> Selector:
    body = {
        "family": family,
        "parameters": parameters,
        "budget": {"tokens": tokens, "capPolicy": "truncate"},
        "persistentRows": {"sink": 2, "recent": 4},
    }
    return Selector.model_validate_json(json.dumps(body | more))


SPARQ = selector("sparq", {"dimensions": 4})
PLAIN = selector("sparq", {"dimensions": 4, "meanReallocation": False})
SCAN = selector("certifiedScan", {"maxOmittedMass": "0.2"})


def candidate(chosen: Selector) -> StepMode:
    return StepMode(PublishArm.CANDIDATE, False, chosen, CANDIDATE)


def selection_at(chosen: Selector, rows: Rows, layer: int, position: int, covered: int) -> Selection:
    """What the family says on its own: rows [0, covered) in the index, the others up to the query's own as
    its tail."""
    family = make_family(chosen, SHAPE, PAGE)
    source = Source(b"", layer)
    index = family.build(source, rows.k[layer, :covered], rows.v[layer, :covered], NO_EVIDENCE)
    query = Query(
        rows.q[layer, position : position + 1],
        position + 1,
        source,
        tail=rows.k[layer, covered : position + 1],
        outside=OUTSIDE_ROWS,
    )
    return family.select(index, query)


def covered_by(answer: StepAnswer) -> int:
    """Rows of the index that the answer was selected with."""
    assert answer.receipt.selection is not None
    return answer.receipt.selection.index_covered


def answer_of(selection: Selection, rows: Rows, layer: int, position: int, covered: int) -> torch.Tensor:
    """The family's answer in float64 [Hq, d], from its rows, weights and remainder by their definitions."""
    out = torch.empty(QUERY_HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(QUERY_HEADS):
        kv = head // SHAPE.group
        at = {Scope.QUERY_HEAD: head, Scope.KV_HEAD: kv, Scope.LAYER: 0}[selection.scope]
        chosen = torch.from_numpy(selection.positions[at])
        k, v = rows.k[layer, chosen, kv].double(), rows.v[layer, chosen, kv].double()
        logits = rows.q[layer, position, head].double() @ k.T * SCALE
        if selection.log_weight is not None:
            logits = logits + torch.from_numpy(selection.log_weight[at]).double()
        out[head] = logits.softmax(-1) @ v
    if selection.receipt.family == "sparq" and selection.remainder is not None:
        alpha = torch.tensor([float(share) for share in selection.receipt.detail["alpha"].split(",")])
        mean = rows.v[layer, :covered].double().mean(0).repeat_interleave(SHAPE.group, 0)
        out = alpha.double()[:, None] * out + (1 - alpha.double())[:, None] * mean
    return out


@pytest.mark.parametrize("chosen", [SPARQ, PLAIN, SCAN], ids=["sparq", "sparq-plain", "certifiedScan"])
def test_an_engine_answers_as_the_family_says_wherever_the_rows_lie(tmp_path: Path, chosen: Selector) -> None:
    rows = Rows.random(TOKENS + 3)
    outs = []
    for name, tiers in (("one", [gpu(64)]), ("three", TIERS), ("flash", [cpu(LAYERS), nvme(64)])):
        with engine(tmp_path / name, tiers) as built:
            driver = Driver.open(built, rows, chosen)
            driver.forward(TOKENS)
            before = len(driver.answers)
            outs.append(torch.cat([driver.forward(1, candidate(chosen)) for _ in range(3)], dim=1))
            for number, answer in enumerate(driver.answers[before:]):
                step, layer = divmod(number, LAYERS)
                covered = covered_by(answer)
                assert TOKENS + step + 1 - PAGE <= covered <= TOKENS + step
                selection = selection_at(chosen, rows, layer, TOKENS + step, covered)
                want = answer_of(selection, rows, layer, TOKENS + step, covered)
                torch.testing.assert_close(answer.out[0].double(), want, rtol=0, atol=5e-6)
                assert answer.receipt.exactness is ExactnessClass.APPROXIMATE
                assert answer.receipt.selected_rows == max(selection.receipt.got_rows)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_the_mass_that_is_left_out_is_in_the_receipt(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path, [gpu(64)]) as built:
        driver = Driver.open(built, rows, SCAN)
        driver.forward(TOKENS)
        driver.forward(1, candidate(SCAN))
        answers = driver.answers[-LAYERS:]
    stated = [answer.receipt.estimated_omitted_mass for answer in answers]
    wanted = [
        max(selection_at(SCAN, rows, layer, TOKENS, covered_by(answer)).receipt.omitted_mass or ())
        for layer, answer in enumerate(answers)
    ]
    assert stated == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("gate", "exact"),
    [
        ({"maxEstimatedOmittedMass": "1"}, False),
        ({"maxEstimatedOmittedMass": "0.0001"}, True),
        ({"minConfidence": "1"}, False),
    ],
    ids=["wide", "narrow", "sure"],
)
def test_an_uncertain_selection_is_answered_exactly_and_says_so(
    tmp_path: Path, gate: dict[str, str], exact: bool
) -> None:
    chosen = selector("certifiedScan", {"maxOmittedMass": "1"}, tokens=4, gate=gate)
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path, TIERS) as built:
        driver, plain = Driver.open(built, rows, chosen), Driver.open(built, rows)
        for one in (driver, plain):
            one.forward(TOKENS)
        out, exact_out = driver.forward(1, candidate(chosen)), plain.forward(1)
        receipts = [answer.receipt for answer in driver.answers[-LAYERS:]]
    assert torch.equal(out, exact_out) == exact
    assert {receipt.fallback for receipt in receipts} == ({Reason.GATE_FAILED.value} if exact else {""})
    assert {receipt.arm for receipt in receipts} == {PublishArm.EXACT if exact else PublishArm.CANDIDATE}


@dataclass(frozen=True)
class Wrapped:
    """A certified scan whose selections are changed on their way: what a sampling family or one with a list a
    query head answers."""

    inner: CertifiedScan
    how: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def facts(self) -> FamilyFacts:
        return replace(self.inner.facts, family="wrapped")

    def select(self, index: Any, query: Query) -> Selection:
        found = self.inner.select(index, query)
        if self.how == "weights":
            weights = tuple(np.float32(0.25) * (rows % 5).astype(np.float32) for rows in found.positions)
            return replace(found, log_weight=weights)
        if self.how == "layer":
            union = np.unique(np.concatenate(found.positions))
            return replace(found, scope=Scope.LAYER, positions=(union,), units=found.units[:1])
        each = []
        for head in range(SHAPE.query_heads):
            rows = found.positions[head // SHAPE.group]
            each.append(np.unique(np.append(rows[head % 3 :: 2], query.rows - 1)))
        return replace(found, scope=Scope.QUERY_HEAD, positions=tuple(each))


@pytest.mark.parametrize("how", ["weights", "layer", "queryHeads"])
def test_lists_weights_and_scopes_of_every_kind_are_attended(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(chosen: Selector, shape: Shape, page_tokens: int) -> Wrapped:
        return Wrapped(CertifiedScan.from_manifest(chosen, shape, page_tokens), how)

    monkeypatch.setitem(registry.FAMILIES, "certifiedScan", made)
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows, SCAN)
        driver.forward(TOKENS)
        driver.forward(1, candidate(SCAN))
        for layer, answer in enumerate(driver.answers[-LAYERS:]):
            covered = covered_by(answer)
            want = answer_of(selection_at(SCAN, rows, layer, TOKENS, covered), rows, layer, TOKENS, covered)
            torch.testing.assert_close(answer.out[0].double(), want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("seed", range(3))
def test_exact_steps_between_approximate_ones_are_exact_to_the_bit(tmp_path: Path, seed: int) -> None:
    """The same rows in both sessions: whatever a selector read before, an exact step reads all of them."""
    chance = random.Random(seed)
    rows = Rows.random(TOKENS + 16)
    with engine(tmp_path, TIERS) as built:
        flipping, exact = Driver.open(built, rows, SPARQ), Driver.open(built, rows)
        flipping.forward(TOKENS)
        exact.forward(TOKENS)
        modes = []
        for _ in range(16):
            approximate = chance.random() < 0.5
            out = flipping.forward(1, candidate(SPARQ) if approximate else None)
            assert torch.equal(out, exact.forward(1)) != approximate
            modes.append(approximate)
            classes = {answer.receipt.exactness for answer in flipping.answers[-LAYERS:]}
            wanted = ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY if any(modes) else ExactnessClass.EXACT
            assert classes == {ExactnessClass.APPROXIMATE if approximate else wanted}
            producers = {answer.receipt.producer_digest for answer in flipping.answers[-LAYERS:]}
            assert producers == {CANDIDATE} if any(modes) else len(producers) == 1
    assert any(modes) and not all(modes)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (selector("sparq", {"dimensions": 4}, gate={"minConfidence": "0.5"}), "no estimator of omitted mass"),
        (selector("dense", {}), "selector family 'dense' cannot run here; legal: "),
    ],
    ids=["no-estimator", "unknown"],
)
def test_what_cannot_be_kept_is_refused_before_it_runs(chosen: Selector, words: str) -> None:
    with pytest.raises(CoreError) as refused:
        LiveFamily(chosen, SHAPE, PAGE)
    assert refused.value.reason is Reason.MANIFEST_INVALID
    assert words in refused.value.message


def test_a_family_that_lacks_a_need_is_refused_by_name_and_runs_where_the_engine_sends_it() -> None:
    chosen = selector(
        "infLlm", {"unitTokens": 8, "representatives": 2}, persistentRows={"sink": 2, "recent": 8}
    )
    with pytest.raises(CoreError) as refused:
        LiveFamily(chosen, SHAPE, PAGE)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.facts == {"missing": "prefillQueries"}
    given = frozenset([Need.QUERY, Need.PREFILL_QUERIES])
    index = LiveFamily(chosen, SHAPE, PAGE, given).index(b"s" * 32, 1)
    rows = Rows.random(TOKENS)
    k, v, q = (part[1] for part in (rows.k, rows.v, rows.q))
    for first, last in ((0, TOKENS // 2), (TOKENS // 2, TOKENS - 1)):
        index.append(first, k[first:last], v[first:last], Evidence(queries=q[first:last]))
    found = index.select(q[-1:], TOKENS, SCALE, k[-1:])
    family, source = make_family(chosen, SHAPE, PAGE), Source(b"s" * 32, 1)
    assert found.covered == (TOKENS - 1) // PAGE * PAGE
    built = family.build(source, k[: found.covered], v[: found.covered], Evidence(queries=q[: found.covered]))
    want = family.select(built, Query(q[-1:], TOKENS, source, outside=OUTSIDE_ROWS))
    assert [rows.tolist() for rows in found.positions] == [want.positions[0].tolist()] * KV_HEADS
