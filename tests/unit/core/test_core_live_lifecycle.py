"""Indexes that are built beside the steps of an engine: late, absent, refused or stale ones cost exactness
nothing, and every answer says which index it read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_core.edits.requests import EditRequest, ForkRequest, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.planning.facts import Rates
from kvtier_core.receipts import ExactnessClass, PublishArm, SelectionFacts, StepAnswer, StepMode
from kvtier_core.selectors.contract import NO_EVIDENCE, Query, Scope, Shape, Source
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_core.selectors.live import OUTSIDE_ROWS
from kvtier_crds.manifest import Fallback, Selector
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
    FakeClock,
    Rows,
    cpu,
    engine,
    gpu,
    nvme,
)
from tests.unit.selectors.lifecycle_doubles import Clock, Told, drain

SHAPE = Shape(QUERY_HEADS, KV_HEADS, HEAD_DIM, SCALE)
TOKENS = 2 * CHUNK + 3
TIERS = [gpu(4), cpu(3), nvme(64)]


def selector(family: str, parameters: dict[str, Any], tokens: int = 24, **more: Any) -> Selector:
    body = {
        "family": family,
        "parameters": parameters,
        "budget": {"tokens": tokens, "capPolicy": "truncate"},
        "persistentRows": {"sink": 2, "recent": 4},
    }
    return Selector.model_validate_json(json.dumps(body | more))


SPARQ = selector("sparq", {"dimensions": 4})
CLUSTERS = selector("clusterKv", {"tokensPerCluster": 8, "sealTokens": 16, "clustersPerSeal": 2})
QUEST = selector("quest", {"pageTokens": PAGE})
SCAN = selector("certifiedScan", {"maxOmittedMass": "0.2"})
FAMILIES = {"sparq": SPARQ, "clusterKv": CLUSTERS, "quest": QUEST, "certifiedScan": SCAN}


def served(chosen: Selector, **more: Any) -> StepMode:
    return StepMode(PublishArm.CANDIDATE, False, chosen, CANDIDATE, **more)


@contextmanager
def late_engine(
    folder: Path, limit: int = 1 << 40, **options: Any
) -> Iterator[tuple[CacheEngine, IndexWorks]]:
    """An engine whose indexes are built when the test says so."""
    works = IndexWorks(Clock(), runner=Told(), memory=IndexMemory(limit))
    with engine(folder, TIERS, indexes=works, **options) as built:
        yield built, works
    assert works.memory.used == 0, "an engine that stopped leaves nothing"


def last(driver: Driver) -> list[StepAnswer]:
    return driver.answers[-LAYERS:]


def told(answer: StepAnswer) -> SelectionFacts:
    assert answer.receipt.selection is not None
    return answer.receipt.selection


def fallbacks(driver: Driver) -> set[str]:
    return {answer.receipt.fallback for answer in last(driver)}


@pytest.mark.parametrize("chosen", FAMILIES.values(), ids=FAMILIES.keys())
def test_steps_are_exact_and_say_why_until_an_index_has_caught_up(tmp_path: Path, chosen: Selector) -> None:
    rows = Rows.random(TOKENS + OUTSIDE_ROWS + 8)
    with late_engine(tmp_path) as (built, works), engine(tmp_path / "plain", TIERS) as exact:
        driver, plain = Driver.open(built, rows, chosen), Driver.open(exact, rows)
        driver.forward(TOKENS)
        plain.forward(TOKENS)
        assert torch.equal(driver.forward(1, served(chosen)), plain.forward(1))
        assert fallbacks(driver) == {Reason.DEPENDENCY_UNPUBLISHED.value}
        assert {answer.receipt.arm for answer in last(driver)} == {PublishArm.EXACT}
        assert works.states()[0].building == 1
        drain(works)
        assert works.states()[0].ready == 1
        driver.forward(1, served(chosen))
        assert fallbacks(driver) == {""}
        start = told(last(driver)[0]).index_covered
        while driver.position + 1 - start <= OUTSIDE_ROWS:
            driver.forward(1, served(chosen))
            assert fallbacks(driver) == {""}
            assert [told(answer).unindexed for answer in last(driver)] == [driver.position - start] * LAYERS
        # One row more than may be read without the index.
        driver.forward(1, served(chosen))
        assert fallbacks(driver) == {Reason.INDEX_FRONTIER_LAG.value}
        drain(works)
        driver.forward(1, served(chosen))
        assert fallbacks(driver) == {""}
        assert works.states()[0].counted.failures == 0


def own_answer(answer: StepAnswer, rows: Rows, layer: int, position: int, chosen: Selector) -> torch.Tensor:
    """Attention in float64 over what the family selects with an index of the rows that the receipt names,
    whose first ones were the prompt: [Hq, d]."""
    covered = told(answer).index_covered
    family = make_family(chosen, SHAPE, PAGE)
    source, learnt = Source(b"", layer), min(covered, TOKENS)
    k, v = rows.k[layer], rows.v[layer]
    index = family.build(source, k[:learnt], v[:learnt], NO_EVIDENCE)
    if covered > learnt:
        more = slice(learnt, covered)
        index = family.append(index, k[more], v[more], NO_EVIDENCE)
    query = Query(
        rows.q[layer, position : position + 1],
        position + 1,
        source,
        tail=k[covered : position + 1],
        outside=OUTSIDE_ROWS,
    )
    selection = family.select(index, query)
    out = torch.empty(QUERY_HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(QUERY_HEADS):
        at = {Scope.QUERY_HEAD: head, Scope.KV_HEAD: head // SHAPE.group, Scope.LAYER: 0}[selection.scope]
        picked = torch.from_numpy(selection.positions[at])
        logits = rows.q[layer, position, head].double() @ k[picked, head // SHAPE.group].double().T * SCALE
        out[head] = logits.softmax(-1) @ v[picked, head // SHAPE.group].double()
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["clusterKv", "quest", "certifiedScan"])
def test_exact_and_approximate_steps_in_any_order_while_builds_run(
    tmp_path: Path, name: str, seed: int
) -> None:
    """Exact steps have the bits of a session that never had a selector; approximate ones are attention over
    what the published index selects; rows carry their producer from the first approximate step on."""
    chosen, chance = FAMILIES[name], random.Random(seed)
    rows = Rows.random(TOKENS + 24)
    epochs = [0] * LAYERS
    approximated = False
    with late_engine(tmp_path) as (built, works), engine(tmp_path / "plain", TIERS) as exact:
        driver, plain = Driver.open(built, rows, chosen), Driver.open(exact, rows)
        driver.forward(TOKENS)
        plain.forward(TOKENS)
        for _ in range(24):
            for _ in range(chance.choice([0, 0, 1, 2, 5])):
                works.run_next(unpaced=True)
            mode = served(chosen) if chance.random() < 0.6 else None
            position = driver.position
            out, want = driver.forward(1, mode), plain.forward(1)
            for layer, answer in enumerate(last(driver)):
                receipt = answer.receipt
                if receipt.exactness is not ExactnessClass.APPROXIMATE:
                    assert torch.equal(out[layer], want[layer]), "an exact answer is exact to the bit"
                    assert mode is None or receipt.fallback in {
                        Reason.DEPENDENCY_UNPUBLISHED.value,
                        Reason.INDEX_FRONTIER_LAG.value,
                    }
                    after = ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
                    assert receipt.exactness is (after if approximated else ExactnessClass.EXACT)
                    continue
                approximated = True
                assert mode is not None
                assert told(answer).index_epoch >= epochs[layer], "an index never goes back"
                epochs[layer] = told(answer).index_epoch
                own = own_answer(answer, rows, layer, position, chosen)
                torch.testing.assert_close(answer.out[0].double(), own, rtol=0, atol=5e-6)
                assert receipt.producer_digest == CANDIDATE
    assert approximated, "this seed approximates nothing"


def test_a_session_beyond_the_memory_for_indexes_is_exact_and_others_are_not(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS + 2)
    # Rows of one session, as they wait for a build, and not those of two.
    waiting = LAYERS * TOKENS * KV_HEADS * HEAD_DIM * 2 * 4
    with late_engine(tmp_path, int(waiting * 1.5)) as (built, works):
        first, second = Driver.open(built, rows, CLUSTERS), Driver.open(built, rows, CLUSTERS)
        for driver in (first, second):
            driver.forward(TOKENS)
        drain(works)
        for driver in (first, second):
            driver.forward(1, served(CLUSTERS))
        drain(works)
        for driver in (first, second):
            driver.forward(1, served(CLUSTERS))
        assert fallbacks(first) == {""}
        assert fallbacks(second) == {Reason.QUOTA_EXCEEDED.value}
        [state] = works.states()
        assert (state.ready, state.refused) == (1, 1)
        assert works.memory.used == state.index_bytes + state.waiting_bytes <= waiting * 1.5


@pytest.mark.parametrize("how", ["close", "truncate", "fork"])
def test_indexes_end_with_the_history_that_they_are_of(tmp_path: Path, how: str) -> None:
    rows = Rows.random(TOKENS + 4)
    with late_engine(tmp_path) as (built, works):
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        drain(works)
        used = works.memory.used
        assert used > 0
        if how == "close":
            driver.close()
            assert works.memory.used == 0
            return
        epoch = 1
        handle = driver.handle
        if how == "truncate":
            edit = Truncate(CHUNK)
            built.edit_session(EditRequest(handle.session_id, handle.generation, edit, position_epoch=epoch))
            at = CHUNK
        else:
            child = built.fork_session(
                ForkRequest(handle.session_id, handle.generation, "child", position_epoch=epoch)
            )
            handle, at = child, TOKENS
        assert works.states()[0].building == (1 if how == "truncate" else 0), "other rows, another index"
        drain(works)
        assert works.states()[0].ready == (2 if how == "fork" else 1)
        other = replace(driver, handle=handle, position=at, step=driver.step + 1, answers=[])
        other.forward(1)
        other.forward(1, served(QUEST))
        assert fallbacks(other) == {""}


def test_what_is_compared_is_what_is_served(tmp_path: Path) -> None:
    """Without an index the candidate serves the exact answer, so its error is none, and that is said."""
    rows = Rows.random(TOKENS + 2)
    with late_engine(tmp_path) as (built, works):
        driver = Driver.open(built, rows, QUEST)
        driver.forward(TOKENS)
        shadow = StepMode(PublishArm.EXACT, True, QUEST, CANDIDATE)
        driver.forward(1, shadow)
        for answer in last(driver):
            assert answer.comparison is not None
            assert (answer.comparison.diff_norm, answer.comparison.complete) == (0.0, True)
        drain(works)
        driver.forward(1, shadow)
        for answer in last(driver):
            assert answer.comparison is not None
            assert answer.comparison.diff_norm > 0.0
            assert not answer.comparison.complete


# Gates.


def gated(**gate: Any) -> Selector:
    return selector("certifiedScan", {"maxOmittedMass": "0"}, tokens=8, gate=gate)


@pytest.mark.parametrize(
    ("steps", "allowed", "passes"),
    [(0, True, False), (8, False, False), (1, True, False), (8, True, True)],
    ids=["no-steps", "not-in-the-contract", "too-few-steps", "enough"],
)
def test_a_search_widens_as_far_as_gate_and_contract_allow(
    tmp_path: Path, steps: int, allowed: bool, passes: bool
) -> None:
    rows = Rows.random(TOKENS + 1)
    chosen = gated(maxEstimatedOmittedMass="0.45", widenSteps=steps)
    with engine(tmp_path, TIERS) as built, engine(tmp_path / "plain", TIERS) as exact:
        driver, plain = Driver.open(built, rows, chosen), Driver.open(exact, rows)
        driver.forward(TOKENS)
        plain.forward(TOKENS)
        more = {"allowed": frozenset([Fallback.WIDEN])} if allowed else {}
        out, want = driver.forward(1, served(chosen, **more)), plain.forward(1)
        answers = last(driver)
    for layer, answer in enumerate(answers):
        facts = told(answer)
        assert facts.asked_tokens == 8, "what was asked is the declared budget"
        assert (facts.max_omitted_mass, facts.failed) == (0.45, not passes)
        assert math.isnan(facts.min_confidence)
        assert facts.got_rows == min(8 << facts.widened, facts.uncapped)
        assert (facts.omitted_mass <= 0.45) == passes
        assert answer.receipt.fallback == ("" if passes else Reason.GATE_FAILED.value)
        assert torch.equal(out[layer], want[layer]) != passes
        if passes:
            assert 1 <= facts.widened <= 4
        else:
            assert facts.widened == (steps if allowed else 0)


def test_a_search_does_not_widen_to_every_row(tmp_path: Path) -> None:
    """There the exact path begins, which B.8 tries next."""
    rows = Rows.random(TOKENS + 1)
    strict = gated(maxEstimatedOmittedMass="0", widenSteps=8)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows, strict)
        driver.forward(TOKENS)
        driver.forward(1, served(strict, allowed=frozenset([Fallback.WIDEN])))
        for answer in last(driver):
            assert answer.receipt.exactness is ExactnessClass.EXACT
            assert answer.receipt.rows_attended == TOKENS + 1


@pytest.mark.parametrize(
    ("allowed", "published"),
    [(frozenset({Fallback.DEGRADE}), True), (frozenset(), False)],
    ids=["degrade", "reject"],
)
def test_an_uncertain_selection_is_published_only_where_no_exact_way_ends_in_time_and_the_contract_says_so(
    tmp_path: Path, allowed: frozenset[Fallback], published: bool
) -> None:
    rows = Rows.random(TOKENS + 2)
    chosen = gated(maxEstimatedOmittedMass="0.0001")
    clock = FakeClock()
    # A row takes a second, so that no exact plan ends within the deadline.
    with engine(tmp_path, [gpu(64)], clock=clock, rates=Rates(1.0)) as built:
        driver = Driver.open(built, rows, chosen)
        driver.forward(TOKENS)
        mode = served(chosen, allowed=allowed)
        if not published:
            with pytest.raises(CoreError) as refused:
                driver.forward(1, mode, deadline=clock.now + 5.0)
            assert refused.value.reason is Reason.DEADLINE
            return
        driver.forward(1, mode, deadline=clock.now + 5.0)
        for answer in last(driver):
            receipt = answer.receipt
            assert (receipt.exactness, receipt.arm) == (ExactnessClass.APPROXIMATE, PublishArm.CANDIDATE)
            assert receipt.fallback == Reason.GATE_FAILED.value
            assert told(answer).failed
        # With time enough the exact answer comes first.
        driver.forward(1, mode)
        assert {answer.receipt.arm for answer in last(driver)} == {PublishArm.EXACT}


# Certificates.


@pytest.mark.parametrize("name", ["certifiedScan", "quest", "sparq"])
def test_a_certificate_is_a_bound_of_the_attention_that_was_read(tmp_path: Path, name: str) -> None:
    rows = Rows.random(TOKENS + 3)
    chosen = FAMILIES[name]
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows, chosen)
        driver.forward(TOKENS)
        for _ in range(3):
            position = driver.position
            driver.forward(1, served(chosen))
            for layer, answer in enumerate(last(driver)):
                stated = told(answer).certified_mass
                if name == "sparq":
                    assert math.isnan(stated), "no bound, and none is claimed"
                    continue
                most = least_mass(rows, layer, position, chosen, told(answer).index_covered)
                assert 0.0 <= stated <= most
                if name == "certifiedScan":
                    assert stated > 0.2


def least_mass(rows: Rows, layer: int, position: int, chosen: Selector, covered: int) -> float:
    """The share of the attention that the selection reads, of the query head with least, by the
    definition."""
    family = make_family(chosen, SHAPE, PAGE)
    source, k = Source(b"", layer), rows.k[layer]
    index = family.build(source, k[:covered], rows.v[layer, :covered], NO_EVIDENCE)
    query = Query(rows.q[layer, position : position + 1], position + 1, source, outside=OUTSIDE_ROWS)
    selection = family.select(index, query)
    shares = []
    for head in range(QUERY_HEADS):
        logits = rows.q[layer, position, head].double() @ k[: position + 1, head // SHAPE.group].double().T
        p = (logits * SCALE).softmax(-1).numpy()
        shares.append(float(np.sum(p[selection.positions[head // SHAPE.group]])))
    return min(shares) + 1e-12
