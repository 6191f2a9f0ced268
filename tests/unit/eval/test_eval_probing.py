"""A probe set against an agent that is a table: what is reported, what never is, and when a run stops."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvtier_eval.probing import (
    REPEATED,
    Answer,
    Arm,
    Attempt,
    Lost,
    Patience,
    ProbePrompt,
    Scored,
    Totals,
    prompts_of,
    run_probes,
    totals,
)
from kvtier_eval.tasks import Task
from kvtier_evidence.probeplan import TASKS, PlanError, parse_plan, prompt_digest
from tests.unit.eval.eval_cases import MATERIAL

ATTEMPT = Attempt("rollout-uid", 1, "sha256:c")
OTHER = Attempt("rollout-uid", 2, "sha256:c")


def prompts(count: int, needed: int = 4) -> list[ProbePrompt]:
    return [
        ProbePrompt(f"p{at}", f"digest{at}", ((1, 2), (3,)), (4,) * needed, needed) for at in range(count)
    ]


@dataclass
class Table:
    """An agent: what each arm answers to each prompt, and which attempt a session belongs to."""

    exact: list[int]
    candidate: list[Answer]
    attempts: list[Attempt | None] = field(default_factory=list)
    refuses: str = ""
    reports: list[tuple[str, str, str, float]] = field(default_factory=list)
    opened: int = 0
    builds: float = 0.0
    """Seconds that an index takes; a shorter pause finds none."""
    pauses: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def open(self, arm: Arm, tokens: int) -> Iterator[_Session]:
        assert tokens == 7
        attempt = self.attempts[self.opened] if self.attempts else ATTEMPT
        self.opened += 1
        yield _Session(self, arm, attempt)


@dataclass
class _Session:
    table: Table
    arm: Arm
    attempt: Attempt | None

    def answer(self, prompt: ProbePrompt, pause: float = 0.0) -> Answer:
        at = int(prompt.name[1:])
        if self.arm is Arm.BASELINE:
            assert pause == 0.0, "the exact arm has no index"
            return Answer(self.table.exact[at])
        self.table.pauses.append(pause)
        if pause < self.table.builds:
            return Answer(4, 1, ("DEPENDENCY_UNPUBLISHED",))
        return self.table.candidate[at]

    def report(self, gate: str, probe_set: str, prompt: str, difference: float) -> str:
        assert self.arm is Arm.CANDIDATE
        self.table.reports.append((gate, probe_set, prompt, difference))
        return self.table.refuses


def go(
    table: Table, count: int, *, gates: tuple[str, ...] = ("quality",), any_attempt: bool = False
) -> Totals:
    expected = None if any_attempt else ATTEMPT
    found = run_probes(
        prompts(count), table, probe_set="sha256:p", gates=gates, expected=expected, told=lambda _: None
    )
    return found


def test_each_prompt_is_a_pair_of_shares() -> None:
    table = Table([4, 4, 2], [Answer(4, 3), Answer(1, 2), Answer(4, 1)])
    found = go(table, 3)
    assert table.reports == [
        ("quality", "sha256:p", "digest0", 0.0),
        ("quality", "sha256:p", "digest1", 0.75),
        ("quality", "sha256:p", "digest2", -0.5),
    ]
    assert (found.reported, found.lost, found.won, found.selected) == (3, 1, 1, 3)
    assert (found.mean_exact, found.mean_candidate) == (10 / 12, 9 / 12)
    assert found.complete


def test_every_gate_of_the_set_gets_the_pair_from_a_session_of_its_own() -> None:
    table = Table([4], [Answer(3, 1)])
    go(table, 1, gates=("quality", "strict"))
    assert [row[0] for row in table.reports] == ["quality", "strict"]
    assert table.opened == 3


def test_a_candidate_that_fell_back_at_every_step_is_no_evidence() -> None:
    table = Table([4, 4], [Answer(4, 0, ("SELECTOR_STALE",)), Answer(4, 1, ("SELECTOR_STALE",))])
    found = go(table, 2)
    assert [row[2] for row in table.reports] == ["digest1"]
    assert not found.complete
    assert found.not_measured == ("p0: steps fell back: SELECTOR_STALE",)


def test_a_candidate_that_its_own_gate_keeps_exact_is_measured_so() -> None:
    table = Table([4], [Answer(4, 0, ("GATE_FAILED",))])
    assert go(table, 1).complete
    assert table.reports == [("quality", "sha256:p", "digest0", 0.0)]


def test_a_prompt_waits_for_its_index_and_the_next_one_as_long() -> None:
    table = Table([4, 4, 4], [Answer(1, 3)] * 3, builds=0.9)
    assert go(table, 3).complete
    assert table.pauses == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]
    assert [row[3] for row in table.reports] == [0.75] * 3, "never what was answered without an index"


def test_an_index_that_is_not_there_in_time_makes_no_pair() -> None:
    table = Table([4], [Answer(4, 1)], builds=5.0)
    found = run_probes(
        prompts(1),
        table,
        probe_set="sha256:p",
        gates=("quality",),
        expected=ATTEMPT,
        told=lambda _: None,
        patience=Patience(limit=2.0),
    )
    assert (found.complete, table.reports) == (False, [])
    assert table.pauses == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert found.not_measured == ("p0: steps fell back: DEPENDENCY_UNPUBLISHED",)


def test_a_candidate_that_reads_all_rows_of_a_short_prompt_is_measured_and_told() -> None:
    found = go(Table([4], [Answer(4)]), 1)
    assert found.complete
    assert found.selected == 0


def test_a_lease_that_ends_while_a_prompt_is_answered_makes_no_pair() -> None:
    table = Table([4, 4], [Answer(4, 3), Answer(4, 1, ("LeaseExpired",), lost="LeaseExpired")])
    with pytest.raises(Lost, match="p1: the candidate's lease ended: LeaseExpired"):
        go(table, 2)
    assert [row[2] for row in table.reports] == ["digest0"]


@pytest.mark.parametrize(
    "attempts, any_attempt, message",
    [
        pytest.param([None], False, "holds no candidate", id="none"),
        pytest.param([OTHER], False, "attempt 2 of rollout rollout-uid", id="another-attempt"),
        pytest.param([ATTEMPT, OTHER], False, "attempt 2", id="changes-between-arms"),
        pytest.param([OTHER, ATTEMPT], True, "these probes are for attempt 2", id="the-first-that-it-met"),
    ],
)
def test_another_candidate_is_never_reported_for(
    attempts: list[Attempt | None], any_attempt: bool, message: str
) -> None:
    table = Table([4], [Answer(4, 1)], attempts=attempts)
    with pytest.raises(Lost, match=message):
        go(table, 1, any_attempt=any_attempt)
    assert table.reports == []


def test_a_prompt_that_was_reported_before_is_no_failure() -> None:
    assert go(Table([4], [Answer(4, 1)], refuses=REPEATED), 1).complete


def test_a_pair_that_the_agent_does_not_count_stops_the_run() -> None:
    with pytest.raises(Lost, match="the window of this session is no longer kept"):
        go(Table([4], [Answer(4, 1)], refuses="the window of this session is no longer kept"), 1)


def test_totals_of_nothing_are_zero_and_not_complete_of_one() -> None:
    assert totals([]).complete
    assert not totals([Scored("p", 1.0, 1.0, 0, "why")]).complete


def test_tasks_of_a_plan_are_those_that_ask_and_keep_a_selector() -> None:
    assert set(TASKS) == {task.value for task in Task if task.asks} - {Task.DROP_REPOSITION.value}


def test_prompts_of_a_grid_end_with_a_single_query_and_keep_their_names() -> None:
    body = {"tasks": list(TASKS), "lengths": [512], "seeds": [3], "promptsPerCell": 2, "steps": 8}
    plan = parse_plan(json.dumps(body))
    made = list(prompts_of(plan, MATERIAL))
    assert len(made) == plan.size
    names = [name for cell in plan.cells for name in cell.names()]
    assert [one.digest for one in made] == [prompt_digest(name) for name in names]
    for one in made:
        appended = one.name.startswith(Task.APPENDED_NEEDLE.value)
        assert len(one.passes) == (3 if appended else 2)
        assert len(one.passes[-1]) == 1
        assert sum(map(len, one.passes)) == 512
        assert 0 < one.needed <= len(one.gold)
    assert [one.passes for one in prompts_of(plan, MATERIAL)] == [one.passes for one in made]


def test_a_cell_that_holds_no_prompt_is_named() -> None:
    plan = parse_plan(json.dumps({"tasks": ["copySpan"], "lengths": [128], "seeds": [0], "steps": 512}))
    with pytest.raises(PlanError, match="copySpan/128/0/0"):
        list(prompts_of(plan, MATERIAL))


def test_given_prompts_are_encoded_whole() -> None:
    plan = parse_plan(json.dumps({"prompts": [{"prompt": "one two", "answer": " three"}]}))
    (made,) = prompts_of(plan, MATERIAL)
    ids = tuple(MATERIAL.codec.encode("one two"))
    assert made.passes == (ids[:-1], ids[-1:])
    assert made.gold == tuple(MATERIAL.codec.encode(" three"))
    assert made.digest == plan.prompts[0].digest
