"""Families that need more than rows and queries, in an engine: they get what came, exact steps stay exact to
the bit, and rows of approximate steps say whose they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier_core.edits.requests import EditRequest, ForkRequest, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, PublishArm, SessionSpec, StepMode, StepReceipt, StepRequest
from kvtier_core.rowevidence import Evidence, LayerWeights, Need, Surprisal
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_crds.manifest import Selector
from tests.unit.core.builders import (
    CANDIDATE,
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SCALE,
    Driver,
    Rows,
    cpu,
    engine,
    gpu,
    nvme,
)
from tests.unit.core.test_core_live_families import selector
from tests.unit.selectors.lifecycle_doubles import Clock

TIERS = [gpu(4), cpu(3), nvme(64)]
PROMPT = 3 * CHUNK + 7
STEPS = 12
WIDTH = 24
EVERYTHING = frozenset(Need)
FAMILIES = {
    "retrievalAttention": selector(
        "retrievalAttention", {"buildNeighbours": 6, "searchWidth": 16, "outDegree": 6}
    ),
    "emLlm": selector("emLlm", {"window": 8, "gamma": "0.5", "maxEventTokens": 12}),
    "infinigen": selector("infinigen", {"partialDimensions": 6, "alpha": "1", "trainTokens": 16}),
    "infLlm": selector("infLlm", {"unitTokens": 6, "representatives": 2}),
    "squeezedAttention": selector("squeezedAttention", {"clusters": 10, "threshold": "0.004"}),
}
SELECTING = {family: (1,) if family == "infinigen" else (0, 1) for family in FAMILIES}


@dataclass
class Given(Driver):
    """A driver whose engine gives everything. Surprisals of a pass come with the next one, as a model knows
    them; late: none come."""

    surprise: np.ndarray = field(default_factory=lambda: np.random.default_rng(3).exponential(3.0, 1024))
    told: int = 0
    late: bool = True

    @classmethod
    def opened(
        cls, built: CacheEngine, rows: Rows, chosen: Selector | None, fixed_context: int | None = 0
    ) -> Given:
        spec = SessionSpec(
            "team-a",
            SCALE,
            int(rows.k.shape[1]),
            selector=chosen,
            candidate_digest=CANDIDATE if chosen else None,
            given=EVERYTHING,
            fixed_context=fixed_context,
        )
        return cls(built, rows, built.open_session(spec))

    def request(self, layer: int, first: int, last: int, **changes: object) -> StepRequest:
        generator = torch.Generator().manual_seed(1000 * layer + first)
        one = last - first == 1 and layer > 0
        states = torch.randn(1, WIDTH, generator=generator) if one else None
        fields: dict[str, object] = {
            "evidence": Evidence(
                queries=self.rows.q[layer, first:last], hidden=states, weights=weights(layer)
            ),
            "hidden_layer": layer - 1 if one else None,
        }
        if layer == 0 and self.late and self.step and "surprisal" not in changes:
            fields["surprisal"] = Surprisal(self.told, self.surprise[self.told : last])
            self.told = last
        return super().request(layer, first, last, **{**fields, **changes})

    def receipts(self, layers: tuple[int, ...]) -> list[StepReceipt]:
        """Of the last step, of these layers."""
        return [self.answers[len(self.answers) - LAYERS + layer].receipt for layer in layers]


def weights(layer: int) -> LayerWeights:
    generator = torch.Generator().manual_seed(50 + layer)
    return LayerWeights(
        query=torch.randn(WIDTH, QUERY_HEADS * HEAD_DIM, generator=generator),
        bias=None,
        norm_weight=torch.ones(WIDTH),
        norm_eps=1e-5,
        inv_freq=torch.arange(HEAD_DIM // 2, dtype=torch.float64) / 10,
    )


def mode(chosen: Selector) -> StepMode:
    return StepMode(PublishArm.CANDIDATE, False, chosen, CANDIDATE)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_exact_steps_between_approximate_ones_are_exact_to_the_bit(
    tmp_path: Path, family: str, seed: int
) -> None:
    chance = random.Random(f"{family}{seed}")
    chosen, layers = FAMILIES[family], SELECTING[family]
    rows = Rows.random(PROMPT + CHUNK + STEPS, seed)
    with engine(tmp_path, TIERS) as built:
        flipping, exact = Given.opened(built, rows, chosen), Given.opened(built, rows, None)
        flipping.forward(PROMPT)
        exact.forward(PROMPT)
        modes: list[bool] = []
        first: int | None = None
        for step in range(CHUNK + STEPS):
            approximate = chance.random() < 0.5 or step == STEPS
            if approximate and first is None:
                first = flipping.position
            out = flipping.forward(1, mode(chosen) if approximate else None)
            assert torch.equal(out, exact.forward(1)) != approximate
            modes.append(approximate)
            told = flipping.receipts(layers)
            wanted = ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY if any(modes) else ExactnessClass.EXACT
            if approximate:
                wanted = ExactnessClass.APPROXIMATE
            assert {receipt.exactness for receipt in told} == {wanted}
            assert {receipt.fallback for receipt in told} == {""}
            producers = {receipt.producer_digest for receipt in told}
            assert producers == {CANDIDATE} if any(modes) else CANDIDATE not in producers
        assert any(modes) and not all(modes) and first is not None
        # Rows that nobody else may read are no rows of an exact session, however alike the tokens.
        last = {
            kind: [one for one in built.list_chunks(*driver) if one.chunk == PROMPT // CHUNK]
            for kind, driver in (("flipping", _named(flipping)), ("exact", _named(exact)))
        }
        assert {one.producer_digest for one in last["flipping"]} == {CANDIDATE}
        assert len(last["exact"]) == LAYERS
        assert CANDIDATE not in {one.producer_digest for one in last["exact"]}


def _named(driver: Driver) -> tuple[str, int]:
    return driver.handle.session_id, driver.handle.generation


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_an_engine_cannot_give_is_named_when_the_session_is_opened(tmp_path: Path, family: str) -> None:
    chosen = FAMILIES[family]
    with engine(tmp_path, TIERS) as built:
        wanted = built.selectors.wanted(chosen)
        assert wanted.layers == SELECTING[family]
        assert wanted.refused(EVERYTHING, True) is None
        refused = wanted.refused(frozenset([Need.QUERY]), False)
        missing = sorted(wanted.needs) + (["fixedContext"] if wanted.fixed else [])
        assert refused is not None and refused.reason is Reason.UNSUPPORTED
        assert refused.facts == {"family": family, "missing": ",".join(missing)}
        assert all(name in refused.message for name in missing)
        if wanted.needs:
            with pytest.raises(CoreError) as error:
                built.open_session(SessionSpec("team-a", SCALE, 64, chosen, CANDIDATE))
            assert error.value.reason is Reason.UNSUPPORTED
            assert set(error.value.facts["missing"].split(",")) == set(wanted.needs)


def test_rows_wait_for_their_surprisals_and_their_steps_are_exact(tmp_path: Path) -> None:
    chosen = FAMILIES["emLlm"]
    rows = Rows.random(PROMPT + 4)
    with engine(tmp_path, TIERS) as built:
        driver, exact = Given.opened(built, rows, chosen), Given.opened(built, rows, None)
        driver.late = False
        for one in (driver, exact):
            one.forward(PROMPT)
        assert torch.equal(driver.forward(1, mode(chosen)), exact.forward(1))
        assert {receipt.fallback for receipt in driver.receipts((0, 1))} == {"DEPENDENCY_UNPUBLISHED"}
        driver.late = True
        assert not torch.equal(driver.forward(1, mode(chosen)), exact.forward(1))
        assert {receipt.fallback for receipt in driver.receipts((0, 1))} == {""}


def test_rows_that_wait_for_surprisals_are_in_the_memory_of_indexes(tmp_path: Path) -> None:
    """An engine that keeps them back costs the index of its own session, and nobody's memory."""
    chosen = FAMILIES["emLlm"]
    rows = Rows.random(PROMPT + 4)
    size = 4 * PROMPT * HEAD_DIM * (2 * KV_HEADS + QUERY_HEADS)
    for limit, fallback in ((3 * size, "DEPENDENCY_UNPUBLISHED"), (size, "QUOTA_EXCEEDED")):
        works = IndexWorks(Clock(), memory=IndexMemory(limit))
        folder = tmp_path / str(limit)
        with engine(folder, TIERS, indexes=works) as built:
            driver = Given.opened(built, rows, chosen)
            driver.late = False
            driver.forward(PROMPT)
            assert works.memory.used == (LAYERS * size if limit > LAYERS * size else 0)
            driver.forward(1, mode(chosen))
            assert {receipt.fallback for receipt in driver.receipts((0, 1))} == {fallback}
            driver.late = True
            driver.forward(1, mode(chosen))
            told = {receipt.fallback for receipt in driver.receipts((0, 1))}
            assert told == ({""} if limit > LAYERS * size else {fallback})
        assert works.memory.used == 0


@pytest.mark.parametrize("end", ["close", "truncate"])
def test_rows_that_wait_for_surprisals_go_with_their_session(tmp_path: Path, end: str) -> None:
    works = IndexWorks(Clock(), memory=IndexMemory())
    rows = Rows.random(PROMPT)
    with engine(tmp_path, TIERS, indexes=works) as built:
        driver = Given.opened(built, rows, FAMILIES["emLlm"])
        driver.forward(PROMPT)
        assert works.memory.used > 0
        name, generation = _named(driver)
        if end == "close":
            built.close_session(name, generation)
        else:
            built.edit_session(EditRequest(name, generation, Truncate(0), 1, None))
        assert works.memory.used == 0


WRONG = [
    pytest.param(Surprisal(5, np.ones(3)), "from row 5 on, those of rows [0, 0) are known", id="gap"),
    pytest.param(
        Surprisal(0, np.ones(PROMPT + 2)), f"to row {PROMPT + 2}, there are {PROMPT + 1}", id="more"
    ),
    pytest.param(Surprisal(0, np.array([0.0, np.nan])), "not a finite number", id="nan"),
    pytest.param(Surprisal(0, np.array([0.0, np.inf])), "not a finite number", id="infinite"),
    pytest.param(Surprisal(0, np.array([-1e-9])), "not a finite number of 0 or more", id="negative"),
    pytest.param(Surprisal(0, np.ones((2, 2))), "not a finite number", id="shape"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_surprisals_that_are_none_are_refused_and_the_session_goes_on(
    tmp_path: Path, given: Surprisal, words: str
) -> None:
    chosen = FAMILIES["emLlm"]
    rows = Rows.random(PROMPT + 2)
    with engine(tmp_path, TIERS) as built:
        driver = Given.opened(built, rows, chosen)
        driver.forward(PROMPT)
        request = driver.request(0, PROMPT, PROMPT + 1, surprisal=given)
        with pytest.raises(CoreError) as refused:
            built.step(request, mode(chosen))
        assert refused.value.reason is Reason.EVENT_BOUNDARY
        assert words in refused.value.message
        driver.forward(1, mode(chosen))
        assert {receipt.fallback for receipt in driver.receipts((0, 1))} == {""}


def test_a_repeat_brings_the_same_surprisals_and_others_are_refused(tmp_path: Path) -> None:
    chosen = FAMILIES["emLlm"]
    rows = Rows.random(PROMPT + 2)
    with engine(tmp_path, TIERS) as built:
        driver = Given.opened(built, rows, chosen)
        driver.forward(PROMPT)
        request = driver.request(0, PROMPT, PROMPT + 1)
        first = built.step(request, mode(chosen))
        again = built.step(request, mode(chosen))
        assert again.repeated and again.receipt.frontier == first.receipt.frontier
        other = driver.request(0, PROMPT, PROMPT + 1, surprisal=Surprisal(0, np.ones(4)))
        with pytest.raises(CoreError, match="other surprisals than before from row 0 on"):
            built.step(other, mode(chosen))


def test_an_index_of_a_fixed_context_ends_with_it(tmp_path: Path) -> None:
    """Rows [0, n) as stated, however many came with the first step; those behind are read by every query."""
    chosen = FAMILIES["squeezedAttention"].model_copy(update={"dense_layers": (0,)})
    rows = Rows.random(PROMPT + 8)
    with engine(tmp_path, TIERS) as built:
        stated = Given.opened(built, rows, chosen, fixed_context=CHUNK)
        whole = Given.opened(built, rows, chosen)
        longer = Given.opened(built, rows, chosen, fixed_context=PROMPT + 3)
        for one in (stated, whole, longer):
            one.forward(PROMPT)
        covered: dict[str, list[int]] = {"stated": [], "whole": [], "longer": []}
        fallbacks: list[str] = []
        for _ in range(5):
            for name, one in (("stated", stated), ("whole", whole), ("longer", longer)):
                one.forward(1, mode(chosen))
                (receipt,) = one.receipts((1,))
                if receipt.selection is None:
                    fallbacks.append(f"{name}:{receipt.fallback}")
                else:
                    covered[name].append(receipt.selection.index_covered)
    assert covered["stated"] == [CHUNK] * 5
    assert covered["whole"] == [PROMPT] * 5
    assert fallbacks == ["longer:INDEX_FRONTIER_LAG"] * 3
    assert covered["longer"] == [PROMPT + 3] * 2


@pytest.mark.parametrize(
    ("family", "context"),
    [
        pytest.param("emLlm", 0, id="surprisals"),
        pytest.param("squeezedAttention", PROMPT + 2, id="end-of-a-fixed-context"),
    ],
)
def test_exact_steps_in_memory_lose_nothing_that_comes_with_a_layer_that_reads_all(
    tmp_path: Path, family: str, context: int
) -> None:
    """Frames of layers without an index bring what those with one wait for."""
    chosen = FAMILIES[family].model_copy(update={"dense_layers": (0,)})
    rows = Rows.random(PROMPT + 5)
    with engine(tmp_path, [cpu(64)]) as built:
        driver = Given.opened(built, rows, chosen, context)
        driver.forward(PROMPT)
        for _ in range(3):
            driver.forward(1)
        driver.forward(1, mode(chosen))
        (receipt,) = driver.receipts((1,))
    assert (receipt.exactness, receipt.fallback) == (ExactnessClass.APPROXIMATE, "")


@pytest.mark.parametrize("family", ["retrievalAttention", "infinigen"])
def test_after_a_truncation_into_what_was_learnt_a_session_is_exact_and_says_why(
    tmp_path: Path, family: str
) -> None:
    """Queries of the prefill are not kept, so an index of what they made cannot be made again."""
    chosen, layers = FAMILIES[family], SELECTING[family]
    rows = Rows.random(PROMPT + 8)
    with engine(tmp_path, TIERS) as built:
        driver = Given.opened(built, rows, chosen)
        driver.forward(PROMPT)
        driver.forward(1, mode(chosen))
        cut(built, driver, PROMPT - 5)
        driver.forward(1, mode(chosen))
        for receipt in driver.receipts(layers):
            assert receipt.exactness is not ExactnessClass.APPROXIMATE
            assert receipt.fallback in ("UNSUPPORTED", "DEPENDENCY_UNPUBLISHED", "INDEX_FRONTIER_LAG")


@pytest.mark.parametrize("back", [1, 5])
@pytest.mark.parametrize("family", [name for name in sorted(FAMILIES) if name != "squeezedAttention"])
def test_after_a_truncation_behind_the_prompt_a_session_selects_as_one_that_never_went_further(
    tmp_path: Path, family: str, back: int
) -> None:
    """The end of an answer is taken back: what was learnt before stays, to the bit."""
    chosen, layers = FAMILIES[family], SELECTING[family]
    rows = Rows.random(PROMPT + 32)
    works = IndexWorks(Clock(), memory=IndexMemory())
    with engine(tmp_path, TIERS, indexes=works) as built:
        driver, never = Given.opened(built, rows, chosen), Given.opened(built, rows, chosen)
        for one, steps in ((driver, 24), (never, 24 - back)):
            one.forward(PROMPT)
            for _ in range(steps):
                one.forward(1)
        cut(built, driver, never.position)
        for _ in range(back):
            outs = [one.forward(1, mode(chosen)) for one in (driver, never)]
            told = [(one.exactness, one.fallback) for who in (driver, never) for one in who.receipts(layers)]
            assert set(told) == {(ExactnessClass.APPROXIMATE, "")}
            assert torch.equal(*outs)
        for one in (driver, never):
            built.close_session(*_named(one))
    assert works.memory.used == 0


@pytest.mark.parametrize(
    ("family", "fallback"),
    [("infinigen", ""), ("retrievalAttention", ""), ("infLlm", "UNSUPPORTED"), ("emLlm", "UNSUPPORTED")],
)
def test_a_long_truncation_costs_those_that_decided_about_rows_by_what_came_behind_them(
    tmp_path: Path, family: str, fallback: str
) -> None:
    """Units and events that rows behind them decided are undone, and their queries are not there any more;
    channels and graphs are of the prompt alone."""
    chosen, layers = FAMILIES[family], SELECTING[family]
    rows = Rows.random(PROMPT + 32)
    with engine(tmp_path, TIERS) as built:
        driver = Given.opened(built, rows, chosen)
        driver.forward(PROMPT)
        for _ in range(24):
            driver.forward(1)
        cut(built, driver, PROMPT + 4)
        driver.forward(1, mode(chosen))
        assert {receipt.fallback for receipt in driver.receipts(layers)} == {fallback}


def test_a_truncation_keeps_the_rows_that_wait_for_their_surprisals(tmp_path: Path) -> None:
    chosen = FAMILIES["emLlm"]
    rows = Rows.random(PROMPT + 4)
    works = IndexWorks(Clock(), memory=IndexMemory())
    with engine(tmp_path, TIERS, indexes=works) as built:
        driver, never = Given.opened(built, rows, chosen), Given.opened(built, rows, chosen)
        driver.forward(PROMPT)
        cut(built, driver, PROMPT - 9)
        never.forward(PROMPT - 9)
        for _ in range(3):
            outs = [one.forward(1, mode(chosen)) for one in (driver, never)]
            assert {receipt.fallback for one in (driver, never) for receipt in one.receipts((0, 1))} == {""}
            assert torch.equal(*outs)
        for one in (driver, never):
            built.close_session(*_named(one))
    assert works.memory.used == 0


def cut(built: CacheEngine, driver: Given, rows: int) -> None:
    built.edit_session(EditRequest(*_named(driver), Truncate(rows)))
    driver.position, driver.told = rows, min(driver.told, rows)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_fork_goes_on_with_what_its_parent_learnt(tmp_path: Path, family: str) -> None:
    """Both select the same rows of the same rows, nothing is built anew, and neither needs the other."""
    chosen, layers = FAMILIES[family], SELECTING[family]
    rows = Rows.random(PROMPT + 8)
    works = IndexWorks(Clock(), memory=IndexMemory())
    with engine(tmp_path, TIERS, indexes=works) as built:
        parent = Given.opened(built, rows, chosen)
        parent.forward(PROMPT)
        parent.forward(1, mode(chosen))
        (before,) = works.states()
        handle = built.fork_session(ForkRequest(*_named(parent)))
        child = Given(built, rows, handle, position=parent.position, step=parent.step, told=parent.told)
        for _ in range(2):
            assert torch.equal(parent.forward(1, mode(chosen)), child.forward(1, mode(chosen)))
            for mine, theirs in zip(parent.receipts(layers), child.receipts(layers), strict=True):
                assert mine.exactness is theirs.exactness is ExactnessClass.APPROXIMATE
                assert mine.selection is not None and theirs.selection is not None
                assert mine.selection.index_digest != theirs.selection.index_digest
                # What was read lately is each session's own.
                facts = [
                    replace(one, index_digest="", hot_bytes=0) for one in (mine.selection, theirs.selection)
                ]
                assert repr(facts[0]) == repr(facts[1])
        (after,) = works.states()
        assert after.counted.builds == before.counted.builds
        want = parent.forward(1, mode(chosen))
        built.close_session(*_named(parent))
        assert torch.equal(child.forward(1, mode(chosen)), want)
        built.close_session(*_named(child))
        (left,) = works.states()
        assert left.index_bytes == left.waiting_bytes == 0
    assert works.memory.used == 0


def test_a_fork_takes_along_what_waits_for_its_surprisals(tmp_path: Path) -> None:
    """Made between a prompt and its surprisals, it is refused where both copies of what waits do not fit."""
    chosen = FAMILIES["emLlm"]
    rows = Rows.random(PROMPT + 4)
    works = IndexWorks(Clock(), memory=IndexMemory())
    for limit in (1 << 40, 0):
        with engine(tmp_path / str(limit), TIERS, indexes=works) as built:
            parent = Given.opened(built, rows, chosen)
            parent.forward(PROMPT)
            works.memory.limit = limit or works.memory.used + 1
            handle = built.fork_session(ForkRequest(*_named(parent)))
            works.memory.limit = 1 << 40
            child = Given(built, rows, handle, position=parent.position, step=parent.step, told=parent.told)
            for one, fallback in ((child, "" if limit else "QUOTA_EXCEEDED"), (parent, "")):
                one.forward(1, mode(chosen))
                assert {receipt.fallback for receipt in one.receipts((0, 1))} == {fallback}
        assert works.memory.used == 0
