"""Selections are graded behind their answers, by a bound that holds, on a sample that load cannot choose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier_core.errors import Reason
from kvtier_core.selectors.audit import AUDIT, STEP_SHARE, SessionAudit, audited
from kvtier_core.selectors.contract import NO_EVIDENCE, Query, Scope, Shape, Source
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.lifecycle.grades import AUDITS_AT_ONCE, BOUNDS, AuditBook
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.works import IndexWorks, Name
from kvtier_core.selectors.live import OUTSIDE_ROWS
from kvtier_kernels.state import AttentionState, LogitFrame
from tests.unit.core.builders import PAGE, SCALE, Driver, Rows, engine
from tests.unit.core.test_core_live_lifecycle import (
    FAMILIES,
    LAYERS,
    SCAN,
    SHAPE,
    TIERS,
    TOKENS,
    selector,
    served,
    told,
)
from tests.unit.selectors.lifecycle_doubles import Clock, Told, drain
from tests.unit.selectors.selector_cases import logits_of, query_of, rows_of

PIG = selector("magicPig", {"hashBits": 4, "tables": 10}, persistentRows={"sink": 2, "recent": 8})
STEPS = 12


def sampled_steps(session_id: str, first: int, count: int) -> list[tuple[int, int]]:
    """Steps and layers that are graded, by the rule."""
    works = IndexWorks(Clock(), runner=Told())
    name = Name("", "", "")
    audit = SessionAudit(works, name, SHAPE, session_id, b"s" * 32, range(LAYERS))
    return [
        (step, layer)
        for step in range(first, first + count)
        for layer in range(LAYERS)
        if audit.wants(step, layer)
    ]


@pytest.mark.parametrize("chosen", [*FAMILIES.values(), PIG], ids=[*FAMILIES, "magicPig"])
def test_a_sample_of_selections_is_graded_by_what_they_surely_read(tmp_path: Path, chosen: object) -> None:
    rows = Rows.random(TOKENS + STEPS)
    works = IndexWorks(Clock(), runner=Told())
    with engine(tmp_path, TIERS, indexes=works) as built:
        driver = Driver.open(built, rows, chosen, session_id="graded", audit=1.0)
        driver.forward(TOKENS)
        answers = []
        for _ in range(STEPS):
            drain(works)
            assert not works.audits.read() or len(works.audits.read()) == 1
            driver.forward(1, served(chosen))  # type: ignore[arg-type]
            answers.append(driver.answers[-LAYERS:])
        drain(works)
        grades = list(works.audits.read().values())
        wanted = [
            (step, layer)
            for step, layer in sampled_steps("graded", 1, STEPS)
            if not answers[step - 1][layer].receipt.fallback
        ]
        assert len(wanted) > 2, "this session's sample is empty"
        if chosen is SCAN:
            assert grades == [], "a scan certifies its own"
            return
        [found] = grades
        assert found.failures == {}
        assert found.graded == len(wanted)
        true = [
            true_mass(rows, layer, TOKENS + step - 1, chosen, told(answers[step - 1][layer]).index_covered)
            for step, layer in wanted
        ]
        assert 0.0 < found.total <= sum(true) + 1e-9, "never more than was read"
        assert found.total > 0.4 * sum(true), "a bound of some use"
        names = {state.name.family for state in works.states()}
        assert AUDIT in names, "what an audit holds is counted"
    assert works.memory.used == 0


def true_mass(rows: Rows, layer: int, position: int, chosen: object, covered: int) -> float:
    """The share of the attention that is read, of the query head with least, by the definition."""
    family = make_family(chosen, SHAPE, PAGE)  # type: ignore[arg-type]
    source, k, v = Source(b"", layer), rows.k[layer], rows.v[layer]
    learnt = covered if family.facts.incremental else min(covered, TOKENS)
    index = family.build(source, k[:learnt], v[:learnt], NO_EVIDENCE)
    if covered > learnt:
        index = family.append(index, k[learnt:covered], v[learnt:covered], NO_EVIDENCE)
    query = Query(
        rows.q[layer, position : position + 1],
        position + 1,
        source,
        tail=k[covered : position + 1],
        outside=OUTSIDE_ROWS,
    )
    selection = family.select(index, query)
    shares = []
    for head in range(SHAPE.query_heads):
        at = {Scope.QUERY_HEAD: head, Scope.KV_HEAD: head // SHAPE.group, Scope.LAYER: 0}[selection.scope]
        logits = rows.q[layer, position, head].double() @ k[: position + 1, head // SHAPE.group].double().T
        shares.append(float((logits * SCALE).softmax(-1).numpy()[selection.positions[at]].sum()))
    return min(shares)


def test_an_audit_changes_no_answer_and_is_not_waited_for(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS + STEPS)
    chosen = FAMILIES["quest"]
    outs = []
    for share in (0.0, 1.0):
        works = IndexWorks(Clock(), runner=Told())
        with engine(tmp_path / str(share), TIERS, indexes=works) as built:
            driver = Driver.open(built, rows, chosen, session_id="graded", audit=share)
            driver.forward(TOKENS)
            drain(works)
            outs.append(torch.cat([driver.forward(1, served(chosen)) for _ in range(STEPS)], dim=1))
            if share:
                [held] = [state for state in works.states() if state.name.family == AUDIT]
                assert held.ready == 1
            assert works.audits.read() == {}, "gradings wait for the works"
    assert torch.equal(outs[0], outs[1])


def test_no_room_for_a_scan_ends_the_audit_and_nothing_else(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS + STEPS)
    chosen = FAMILIES["quest"]
    works = IndexWorks(Clock(), memory=IndexMemory(60_000))
    with engine(tmp_path, TIERS, indexes=works) as built:
        driver = Driver.open(built, rows, chosen, session_id="graded", audit=1.0)
        driver.forward(TOKENS)
        for _ in range(STEPS):
            driver.forward(1, served(chosen))
            assert {answer.receipt.fallback for answer in driver.answers[-LAYERS:]} == {""}
        states = {state.name.family: state for state in works.states()}
        assert (states["quest"].ready, states[AUDIT].refused) == (1, 1)
        [grades] = works.audits.read().values()
        assert grades.failures == {Reason.QUOTA_EXCEEDED.value: len(sampled_steps("graded", 1, STEPS))}


def scanned(rows: int, q_heads: int = 6) -> tuple[IndexWorks, SessionAudit, torch.Tensor]:
    """An audit of 60 rows of which `rows` are known, in the scan or behind it."""
    shape = Shape(q_heads, 2, 16, 0.25)
    works = IndexWorks(Clock(), runner=Told())
    audit = SessionAudit(works, Name("c", "f", "d"), shape, "session", b"s" * 32, [1])
    k, _ = rows_of(3, 60)
    audit.append(1, 0, k[:rows])
    drain(works)
    return works, audit, k


def test_rows_that_no_scan_bounds_are_no_failure_of_the_selection() -> None:
    works, audit, _ = scanned(40)
    read_all_behind = np.arange(20, 60)
    left_out_behind = np.concatenate([np.arange(20, 50), np.arange(55, 60)])
    for positions in (read_all_behind, left_out_behind):
        audit.grade(1, query_of(1), 0.25, 60, [positions] * 2, None)
    drain(works)
    [grades] = works.audits.read().values()
    assert (grades.graded, grades.failures) == (1, {Reason.INDEX_FRONTIER_LAG.value: 1})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("estimated", [False, True], ids=["by-the-state", "by-bounds"])
def test_a_grade_is_never_more_than_the_share_that_was_read(seed: int, estimated: bool) -> None:
    works, audit, k = scanned(48)
    chance = np.random.default_rng(seed)
    lists = [np.sort(chance.choice(60, 25, replace=False)) for _ in range(6)]
    lists = [np.union1d(rows, np.arange(48, 60)) for rows in lists]
    q = query_of(seed)
    logits = logits_of(q, k)
    read = [logits[head][lists[head]] for head in range(6)]
    m = torch.tensor([[part.max() for part in read]], dtype=torch.float32)
    sums = torch.tensor([[np.exp(part - part.max()).sum() for part in read]], dtype=torch.float32)
    state = AttentionState(m, sums, torch.zeros(1, 6, 16), LogitFrame(0.25), estimated=estimated)
    audit.grade(1, q, 0.25, 60, lists, state)
    drain(works)
    [grades] = works.audits.read().values()
    shares = [np.exp(part).sum() / np.exp(logits[head]).sum() for head, part in enumerate(read)]
    assert 0.0 < grades.total <= min(shares)
    if not estimated:
        assert grades.total > 0.7 * min(shares)


def test_gradings_that_wait_are_bounded_and_counted() -> None:
    works, audit, _ = scanned(48)
    for _ in range(AUDITS_AT_ONCE + 3):
        audit.grade(1, query_of(1), 0.25, 60, [np.arange(60)] * 2, None)
    drain(works)
    [grades] = works.audits.read().values()
    assert (grades.graded, grades.failures) == (AUDITS_AT_ONCE, {Reason.QUEUE_FULL.value: 3})
    audit.grade(1, query_of(1), 0.25, 60, [np.arange(60)] * 2, None)
    audit.close()
    drain(works)
    assert works.audits.read()[Name("c", "f", "d")].graded == AUDITS_AT_ONCE + 1
    assert works.memory.used == 0


def test_the_histogram_is_by_upper_ends() -> None:
    book, name = AuditBook(), Name("c", "f", "d")
    for share in (0.0, 0.1, 0.11, 0.999, 1.0):
        book.graded(name, share)
    counts = book.read()[name].counts
    assert len(counts) == len(BOUNDS)
    assert counts == [2, 1, 0, 0, 0, 0, 0, 1, 1]


def test_samples_are_by_hash_and_monotone_in_the_share() -> None:
    names = [f"session-{number}" for number in range(400)]
    chosen = {share: {name for name in names if audited("d", name, share)} for share in (0.0, 0.1, 0.5, 1.0)}
    assert chosen[0.0] == set()
    assert chosen[1.0] == set(names)
    assert chosen[0.1] < chosen[0.5]
    assert 20 < len(chosen[0.1]) < 60
    steps = {step for name in names[:50] for step, _ in [*sampled_steps(name, 0, 40)]}
    share = np.mean([len(sampled_steps(name, 0, 40)) / 40 for name in names[:50]])
    assert abs(share - STEP_SHARE) < 0.05
    assert {step % LAYERS for step in steps} == set(range(LAYERS))


def test_keys_that_wait_with_a_grading_are_of_the_memory_of_indexes() -> None:
    """Given back when it is graded; where they do not fit, the selection is not graded, nothing is held."""
    works, audit, k = scanned(40)
    audit.append(1, 40, k[40:])
    waiting = works.memory.used
    behind = (60 - 32) * k[0].numel() * k.element_size()  # the scan ends with a block
    read_all = np.arange(60)
    audit.grade(1, query_of(1), 0.25, 60, [read_all] * 2, None)
    assert works.memory.used == waiting + behind
    drain(works)
    assert works.memory.used < waiting + behind
    (grades,) = works.audits.read().values()
    assert (grades.graded, grades.failures) == (1, {})
    works, audit, k = scanned(40)
    audit.append(1, 40, k[40:])
    works.memory.limit = 2 * works.memory.used
    audit.grade(1, query_of(1), 0.25, 60, [read_all] * 2, None)
    (grades,) = works.audits.read().values()
    assert (grades.graded, grades.failures) == (0, {Reason.QUOTA_EXCEEDED.value: 1})
    audit.close()
    assert works.memory.used == 0
