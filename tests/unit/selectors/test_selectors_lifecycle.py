"""What the works of indexes promise one by one: their pace, order and bounds, what they count, and that no
index of anything else than was asked for is ever published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import Evidence, Index, Source
from kvtier_core.selectors.families import registry
from kvtier_core.selectors.growing import Growing, GrowingColumns
from kvtier_core.selectors.lifecycle.life import Block, Job, Kind, LayerLife, Stage
from kvtier_core.selectors.lifecycle.memory import IndexMemory, buffers
from kvtier_core.selectors.lifecycle.works import (
    APPENDS_IN_A_ROW,
    ATTEMPTS,
    IndexWorks,
    Name,
    Point,
)
from tests.unit.selectors.lifecycle_doubles import (
    BLOCK,
    Clock,
    Faults,
    RowFamily,
    RowList,
    Told,
    block_of,
    drain,
    life_of,
)
from tests.unit.selectors.selector_cases import SMALL, rows_of, selector

NAME = Name("cache", "rows", "digest")
GROWS = RowFamily(incremental=True)
LEARNS = RowFamily(incremental=False)


def begun(works: IndexWorks, family: RowFamily = GROWS, rows: int = 2 * BLOCK, layer: int = 0) -> LayerLife:
    """A layer of a session of its own, with rows that came."""
    life = life_of(family, layer)
    works.open(NAME, [life])
    works.arrive(life, block_of(0, rows))
    return life


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.1])
def test_builds_rest_for_what_their_share_leaves_to_others(share: float) -> None:
    clock, spent = Clock(), Clock()

    def work(point: Point) -> None:
        if point is Point.BUILT:
            # The processor was ours for half of the time that passed.
            clock.now += 0.4
            spent.now += 0.2

    works = IndexWorks(clock, runner=Told(), share=share, spent=spent, at=work)
    for layer in range(3):
        begun(works, layer=layer)
    rest = works.run_next()
    assert rest == pytest.approx(0.2 * (1 - share) / share)
    if rest:
        assert works.run_next() == pytest.approx(rest), "not a moment before"
        clock.now += rest / 2
        assert works.run_next() == pytest.approx(rest / 2)
    clock.now = 100.0
    assert works.run_next() is not None
    assert works.states()[0].ready == 2


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        IndexWorks(Clock(), share=share)


def test_appends_go_before_builds_but_not_for_ever() -> None:
    order: list[Kind] = []
    clock = Clock()
    works = IndexWorks(clock, runner=Told())
    grown = [begun(works) for _ in range(APPENDS_IN_A_ROW + 4)]
    drain(works)
    waiting = begun(works)
    for life in grown:
        works.arrive(life, block_of(2 * BLOCK, BLOCK))
    before = {id(life): life.covered for life in (*grown, waiting)}
    while works.run_next(unpaced=True) is not None:
        moved = [life for life in (*grown, waiting) if life.covered != before[id(life)]]
        assert len(moved) == 1
        order.append(Kind.BUILD if moved[0] is waiting else Kind.APPEND)
        before[id(moved[0])] = moved[0].covered
    assert order == [Kind.APPEND] * APPENDS_IN_A_ROW + [Kind.BUILD] + [Kind.APPEND] * 4


def test_the_queue_is_bounded_and_forgets_nobody() -> None:
    works = IndexWorks(Clock(), runner=Told(), most_waiting=2)
    lives = [begun(works) for _ in range(7)]
    drain(works)
    assert {life.covered for life in lives} == {2 * BLOCK}


@pytest.mark.parametrize(
    ("asked_at", "hidden", "exposed"),
    [(None, 3.0, 0.0), (0.0, 0.0, 5.0), (4.0, 2.0, 1.0)],
    ids=["nobody-asked", "asked-before-it-began", "asked-in-the-middle"],
)
def test_seconds_are_hidden_until_somebody_asks(
    asked_at: float | None, hidden: float, exposed: float
) -> None:
    clock = Clock()
    waiting: list[LayerLife] = []

    def work(point: Point) -> None:
        if point is Point.BUILT:
            if asked_at == 4.0:
                clock.now = 4.0
                works.missed(waiting[0])
            clock.now = 5.0

    works = IndexWorks(clock, runner=Told(), at=work)
    waiting.append(begun(works))
    if asked_at == 0.0:
        works.missed(waiting[0])
    clock.now = 2.0
    works.run_next()
    [state] = works.states("cache")
    assert (state.counted.hidden_seconds, state.counted.exposed_seconds) == (hidden, exposed)
    assert (state.counted.builds, state.counted.appends, state.ready) == (1, 0, 1)
    assert works.states("another") == []


def test_builds_in_a_steps_own_time_are_exposed() -> None:
    clock = Clock()

    def work(point: Point) -> None:
        clock.now += 1.0

    works = IndexWorks(clock, at=work)
    assert begun(works).covered == 2 * BLOCK
    [state] = works.states()
    assert state.counted.hidden_seconds == 0.0
    assert state.counted.exposed_seconds > 0.0


def test_an_index_of_the_whole_prompt_is_built_once_however_it_came() -> None:
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works, LEARNS, rows=5)
    assert works.run_next() is None, "a step may go on"
    works.arrive(life, block_of(5, 4))
    works.end_rows(life)
    drain(works)
    assert life.learnt == 9
    works.arrive(life, block_of(9, 6))
    assert works.run_next() is None
    works.end_rows(life)
    works.decode([life])
    drain(works)
    assert life.learnt == life.covered == 15
    assert isinstance(life.published and life.published.index, RowList)
    works.arrive(life, block_of(15, 2))
    drain(works)
    assert (life.learnt, life.covered) == (15, 16)
    assert [block.first for block in life.waiting] == [15]


@pytest.mark.parametrize("appendable", [True, False], ids=["appendable", "of-a-fixed-context"])
def test_a_prompt_that_was_learnt_before_the_first_decode_step_is_let_go(appendable: bool) -> None:
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works, RowFamily(incremental=False, appendable=appendable), rows=9)
    works.end_rows(life)
    drain(works)
    assert (life.learnt, life.waiting_bytes > 0) == (9, True), "more of the prompt may come"
    works.decode([life])
    assert life.waiting_bytes == 0
    assert works.memory.used == sum(life.held.values())


def test_a_prompt_of_which_every_row_is_read_is_not_learnt_from() -> None:
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works, LEARNS, rows=4)
    works.end_rows(life)
    assert works.run_next() is None
    works.arrive(life, block_of(4, 1))
    works.end_rows(life)
    drain(works)
    assert life.learnt == 5


def test_rows_that_wait_are_weighed_once_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step brings a row to every layer, and under the works' lock."""
    weighed: list[int] = []

    def weigh(block: Block) -> int:
        weighed.append(block.first)
        return 1

    monkeypatch.setattr(Block, "size", property(weigh))
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works, rows=1)
    for first in range(1, 200):
        works.arrive(life, block_of(first, 1))
    assert len(weighed) == 200
    assert works.memory.used == life.waiting_bytes == 200
    drain(works)
    assert life.waiting_bytes == 0


def test_rows_that_leave_no_room_end_the_sessions_indexes_with_the_numbers() -> None:
    memory = IndexMemory(3000)
    works = IndexWorks(Clock(), runner=Told(), memory=memory)
    lives = [life_of(LEARNS, layer) for layer in range(2)]
    works.open(NAME, lives)
    other = begun(works)
    works.arrive(lives[0], block_of(0, 100))
    assert lives[0].refused is None
    works.arrive(lives[1], block_of(0, 100))
    for life in lives:
        assert life.stage is Stage.REFUSED
        with pytest.raises(CoreError) as refused, works.lease(life):
            pass
        assert refused.value.reason is Reason.QUOTA_EXCEEDED
        assert refused.value.facts["limit"] == "3000"
    works.arrive(lives[0], block_of(100, 5))
    drain(works)
    assert other.stage is Stage.READY, "nobody else's index is touched"
    [state] = works.states()
    assert (state.ready, state.refused, state.counted.refusals) == (1, 1, {"QUOTA_EXCEEDED": 1})
    assert memory.used == state.index_bytes + state.waiting_bytes <= 3000


def test_an_index_that_leaves_no_room_is_seen_by_nobody() -> None:
    works = IndexWorks(Clock(), runner=Told(), memory=IndexMemory(200))
    life = begun(works)
    works.run_next()
    assert life.refused is not None
    assert life.refused.reason is Reason.QUOTA_EXCEEDED
    assert life.published is None
    assert works.memory.used == 0


@pytest.mark.parametrize("point", list(Point))
def test_a_fault_at_any_point_is_made_good_by_the_next_build(point: Point) -> None:
    faults = Faults()
    works = IndexWorks(Clock(), runner=Told(), at=faults)
    life = begun(works)
    for round_ in range(2 * ATTEMPTS):
        # Never so often in a row that it is given up.
        faults.arm(point, lambda: RuntimeError("a fault"))
        drain(works)
        rows = 2 * BLOCK + round_ * BLOCK
        assert life.covered == rows
        assert life.published is not None
        assert isinstance(life.published.index, RowList)
        assert life.published.index.rows.entries.tolist() == list(range(rows))
        works.arrive(life, block_of(rows, BLOCK))
    assert works.states()[0].counted.failures == 2 * ATTEMPTS


@pytest.mark.parametrize(
    ("error", "reason", "jobs"),
    [
        (CoreError(Reason.PQ_GEOMETRY, "no"), Reason.PQ_GEOMETRY, 1),
        (RuntimeError("out of memory"), Reason.INTERNAL, ATTEMPTS),
    ],
    ids=["what-a-family-refuses-is-asked-once", "what-fails-is-tried-again"],
)
def test_what_cannot_be_built_ends_in_a_reason(error: Exception, reason: Reason, jobs: int) -> None:
    tried = 0

    def fail(point: Point) -> None:
        nonlocal tried
        if point is Point.BUILT:
            tried += 1
            raise error

    works = IndexWorks(Clock(), runner=Told(), at=fail)
    life = begun(works)
    drain(works)
    assert tried == jobs
    assert life.refused is not None
    assert life.refused.reason is reason
    assert works.states()[0].counted.refusals == {reason.value: 1}
    assert works.memory.used == 0


def other_source(index: RowList) -> RowList:
    return replace(index, facts=replace(index.facts, source=Source(b"o" * 32, 0)))


MIXED: dict[str, tuple[Callable[[RowList], RowList], Reason]] = {
    "of-another-source": (other_source, Reason.IDENTITY_MISMATCH),
    "of-another-layer": (
        lambda index: replace(index, facts=replace(index.facts, source=Source(b"s" * 32, 1))),
        Reason.IDENTITY_MISMATCH,
    ),
    "of-other-positions": (
        lambda index: replace(index, facts=replace(index.facts, source=Source(b"s" * 32, 0, 3))),
        Reason.IDENTITY_MISMATCH,
    ),
    "of-another-selector": (
        lambda index: replace(index, facts=replace(index.facts, selector_digest="other")),
        Reason.SELECTOR_STALE,
    ),
    "of-half-of-the-rows": (
        lambda index: replace(index, facts=replace(index.facts, covered=index.facts.covered - 1)),
        Reason.COVERAGE_GAP,
    ),
    "of-more-rows": (
        lambda index: replace(index, facts=replace(index.facts, covered=index.facts.covered + 1)),
        Reason.COVERAGE_GAP,
    ),
}


@pytest.mark.parametrize(("mutate", "reason"), MIXED.values(), ids=MIXED.keys())
@pytest.mark.parametrize("kind", list(Kind))
def test_an_index_of_something_else_is_never_published(
    mutate: Callable[[RowList], RowList], reason: Reason, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works)
    if kind is Kind.APPEND:
        drain(works)
        works.arrive(life, block_of(2 * BLOCK, BLOCK))
    real = Job.run

    def run(job: Job) -> Index:
        made = real(job)
        assert isinstance(made, RowList)
        return mutate(made)

    monkeypatch.setattr(Job, "run", run)
    drain(works)
    assert life.published is None
    assert life.refused is not None
    assert life.refused.reason is reason


def test_an_append_under_an_epoch_that_was_seen_is_never_published(monkeypatch: pytest.MonkeyPatch) -> None:
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works)
    drain(works)
    works.arrive(life, block_of(2 * BLOCK, BLOCK))
    real = Job.run

    def run(job: Job) -> Index:
        made = real(job)
        assert isinstance(made, RowList)
        return replace(made, facts=replace(made.facts, epoch=1))

    monkeypatch.setattr(Job, "run", run)
    drain(works)
    assert life.refused is not None
    assert life.refused.reason is Reason.INDEX_STALE


def test_a_query_keeps_its_epoch_and_nothing_else_does() -> None:
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works)
    drain(works)
    session = works._of[id(life)]
    with works.lease(life) as (held, behind):
        assert behind is None
        works.arrive(life, block_of(2 * BLOCK, 64 * BLOCK))
        drain(works)
        assert life.covered == 66 * BLOCK
        both = works.memory.used
        assert isinstance(held.index, RowList)
        assert held.index.rows.entries.tolist() == list(range(2 * BLOCK))
        works.close(session)
        assert works.memory.used > 0, "the query reads on"
    assert both > 0
    assert works.memory.used == 0
    with pytest.raises(CoreError), works.lease(life):
        pass


@pytest.mark.parametrize("most", [BLOCK - 1, BLOCK])
def test_keys_behind_an_index_are_copied_only_where_a_query_may_need_them(most: int) -> None:
    """A prompt that waits for its append would be copied for every query, and under the works' lock."""
    works = IndexWorks(Clock(), runner=Told())
    life = begun(works)
    drain(works)
    works.arrive(life, block_of(2 * BLOCK, BLOCK))
    with works.lease(life, most) as (held, behind):
        assert held.covered == 2 * BLOCK
        assert (behind is not None) is (most >= BLOCK)


def test_a_build_of_a_session_that_ends_meanwhile_is_let_go() -> None:
    def end(point: Point) -> None:
        if point is Point.BUILT:
            works.close(session)

    works = IndexWorks(Clock(), runner=Told(), at=end)
    life = life_of(GROWS)
    session = works.open(NAME, [life])
    works.arrive(life, block_of(0, 2 * BLOCK))
    drain(works)
    assert life.published is None
    assert works.memory.used == 0
    works.forget("cache")
    assert works.states() == []


def test_every_buffer_counts_once() -> None:
    rows = Growing.of(np.zeros((10, 4), dtype=np.float32))
    columns = GrowingColumns((4,), np.int8).plus(np.zeros((4, 3), dtype=np.int8))
    tensor = torch.zeros(8, 2)
    whole = buffers((rows, rows.plus(np.zeros((1, 4), dtype=np.float32)), columns, tensor, tensor[2:]))
    assert sum(whole.values()) == rows.buffer[1] + columns.buffer[1] + 64
    assert sum(buffers([1, 2, 3]).values()) == 24


REAL: dict[str, tuple[dict[str, object], int]] = {
    "certifiedScan": ({"maxOmittedMass": "0.1"}, 8),
    "clusterKv": ({"tokensPerCluster": 8, "sealTokens": 16, "clustersPerSeal": 2}, 8),
    "emLlm": ({"window": 16, "gamma": "1", "maxEventTokens": 16}, 48),
    "infLlm": ({"unitTokens": 8, "representatives": 2}, 24),
    "magicPig": ({"hashBits": 4, "tables": 10}, 8),
    "pqcache": ({"subspaces": 2, "bits": 2}, 8),
    "quest": ({"pageTokens": 8}, 32),
    "retrievalAttention": ({"buildNeighbours": 8, "searchWidth": 16, "outDegree": 4}, 8),
    "sparq": ({"dimensions": 4}, 8),
    "squeezedAttention": ({"clusters": 4, "threshold": "0.1"}, 8),
}


@pytest.mark.parametrize("name", sorted(REAL))
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 89), max_size=5, unique=True), seed=st.integers(0, 99), jobs=st.randoms())
def test_the_works_build_what_the_family_builds_of_the_same_rows(
    name: str, cuts: list[int], seed: int, jobs: object
) -> None:
    """However rows come and whenever builds run: once everything ran, the index is that of the prompt, with
    whole blocks of later rows behind it."""
    parameters, tokens = REAL[name]
    declared = selector(name, parameters, {"tokens": tokens}, persistentRows={"sink": 4, "recent": 16})
    family = registry.make_family(declared, SMALL, 16)
    works = IndexWorks(Clock(), runner=Told())
    life = LayerLife(family, Source(b"s" * 32, 1), 16)
    works.open(Name("cache", name, family.digest), [life])
    k, v = rows_of(seed, 90)
    random = np.random.default_rng(seed)
    given_ = Evidence(
        queries=torch.from_numpy(random.standard_normal((90, 6, 16)).astype(np.float32)),
        surprisal=random.exponential(size=90),
    ).of(family.facts.needs)
    prompt = sorted(cuts)[len(cuts) // 2] if cuts else 70
    ends = sorted({*cuts, prompt, 90})
    first = 0
    for last in ends:
        block = block_of(first, last - first)
        works.arrive(life, replace(block, k=k[first:last], v=v[first:last], evidence=given_.cut(first, last)))
        if last == prompt:
            works.decode([life])
        if jobs.random() < 0.5:  # type: ignore[attr-defined]
            works.run_next(unpaced=True)
        first = last
    drain(works)
    assert life.refused is None, life.refused
    learnt = 0 if family.facts.incremental else prompt
    whole = 90 // 16 * 16
    covered = max(whole, learnt) if family.facts.appendable else learnt
    assert life.covered == covered
    start = learnt or covered
    want = family.build(life.source, k[:start], v[:start], given_.cut(0, start))
    if covered > start:
        want = family.append(want, k[start:covered], v[start:covered], given_.cut(start, covered))
    assert life.published is not None
    got = life.published.index.facts
    assert got.parts == want.facts.parts
    assert got.covered == want.facts.covered
