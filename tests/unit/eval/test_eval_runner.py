"""A run that dies and goes on, a plan that cannot change, and a report that leaves nothing out."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier_core.errors import CoreError
from kvtier_eval import cli, provenance
from kvtier_eval.journal import Journal, WrongJournal, read
from kvtier_eval.models import Loaded
from kvtier_eval.plan import BASELINES, Missing, Plan, Settings, family_of
from kvtier_eval.report import LIMITS, QUICK, as_html, as_json
from kvtier_eval.runner import Outcome, run
from kvtier_eval.summary import Verdict, summarise
from kvtier_eval.tasks import Task
from tests.unit.eval.eval_cases import MATERIAL, SHAPE, SMALL, ByteCodec, small_plan, tiny_decoder, tiny_model

CELLS = len(BASELINES) + 1


def go(plan: Plan, path: Path, go_on: Callable[[], bool] = lambda: True) -> Outcome:
    with Journal(path, plan.digest) as journal:
        return run(plan, tiny_decoder(), MATERIAL, journal, progress=lambda *_: None, go_on=go_on)


class Killed(BaseException):
    """As a signal: nothing handles it."""


def test_a_run_that_was_killed_loses_no_finished_result(tmp_path: Path) -> None:
    plan = small_plan()
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert go(plan, whole) == Outcome(2 * CELLS, 2 * CELLS, stopped=False)
    asked = 0

    def dies() -> bool:
        nonlocal asked
        asked += 1
        if asked % 4 == 0:
            raise Killed
        return True

    kept = 0
    for _ in range(20):
        try:
            outcome = go(plan, broken, dies)
        except Killed:
            with broken.open("ab") as file:
                file.write(b'{"cell":"copySpan/160/full/0","pro')
            now = len(read(broken, plan.digest))
            assert now > kept
            kept = now
        else:
            assert not outcome.stopped
            break
    assert sorted(broken.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_run_stops_between_results_when_time_is_up(tmp_path: Path) -> None:
    plan = small_plan()
    answers = iter([True] * 4 + [False])
    outcome = go(plan, tmp_path / "r.jsonl", lambda: next(answers))
    assert outcome == Outcome(3, 2 * CELLS, stopped=True)
    report = summarise(plan, read(tmp_path / "r.jsonl", plan.digest))
    assert not report.complete
    assert {one.cell for one in report.not_run} == {cell.id for cell in plan.cells}
    assert {one.why for one in report.not_run} == {Missing.NOT_FINISHED}


def test_results_of_another_plan_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Journal(path, small_plan().digest).__exit__(None, None, None)
    other = small_plan(settings=SMALL.model_copy(update={"seed": 6}))
    with pytest.raises(WrongJournal, match="another plan"):
        Journal(path, other.digest)
    path.write_text("not json\n")
    with pytest.raises(WrongJournal, match="json"):
        read(path, other.digest)


@pytest.mark.parametrize(
    "change",
    [{"prompts": 3}, {"steps": 4}, {"seed": 6}, {"margin": 0.2}, {"sink": 3}, {"detail_every": 2}],
    ids=lambda change: next(iter(change)),
)
def test_a_plan_is_its_digest(change: dict[str, Any]) -> None:
    plan = small_plan()
    assert Plan.model_validate_json(plan.model_dump_json()).digest == plan.digest
    assert small_plan(settings=SMALL.model_copy(update=change)).digest != plan.digest


def test_families_that_refuse_are_named_with_their_words() -> None:
    plan = small_plan(families=("certifiedScan", "sparq", "nobody"))
    assert [one.cell.split("/")[2] for one in plan.not_run] == ["nobody"]
    assert plan.not_run[0].why is Missing.NO_FAMILY
    wide = dataclasses.replace(SHAPE, head_dim=8)
    with pytest.raises(CoreError, match="16 of a head dim of 8"):
        family_of(plan.selector("sparq"), 16, SMALL, wide)


def test_a_prompt_that_does_not_fit_is_refused_in_every_cell(tmp_path: Path) -> None:
    plan = small_plan(length=64)
    assert not go(plan, tmp_path / "r.jsonl").stopped
    report = summarise(plan, read(tmp_path / "r.jsonl", plan.digest))
    assert report.cells == () and report.complete
    assert {one.why for one in report.not_run} == {Missing.REFUSED_AT_RUN}
    assert all("PromptTooShort" in one.detail for one in report.not_run)


def result(cell: str, prompt: int, answers: bool, full: bool, **more: object) -> dict[str, Any]:
    part = {"mean": 0.5, "p10": 0.4, "p90": 0.6, "min": 0.1, "max": 0.9}
    return {
        "cell": cell,
        "prompt": prompt,
        "answers": answers,
        "fullAnswers": full,
        "matched": 1.0,
        "kl": [0.1, 0.3],
        "top1": 1.0,
        "excessByHead": [0.2, None, 0.8],
        "excess": part,
        "mass": part,
        "indexBytes": 10,
        "rowBytes": 20,
        "fetchedBytes": 5,
        "boundViolations": 0,
        **more,
    }


@pytest.mark.parametrize(
    "hits, quick, prompts, verdict",
    [
        pytest.param(50, False, 50, Verdict.HOLDS, id="all"),
        pytest.param(47, False, 50, Verdict.OPEN, id="near the margin"),
        pytest.param(30, False, 50, Verdict.FAILS, id="far below"),
        pytest.param(50, True, 50, Verdict.QUICK, id="quick"),
        pytest.param(20, False, 20, Verdict.TOO_FEW, id="twenty prompts"),
    ],
)
def test_a_verdict_needs_prompts_and_no_quick_run_has_one(
    hits: int, quick: bool, prompts: int, verdict: Verdict
) -> None:
    plan = small_plan(settings=SMALL.model_copy(update={"prompts": prompts}), quick=quick)
    cell = plan.cells[-1].id
    report = summarise(plan, [result(cell, at, at < hits, True) for at in range(prompts)])
    assert [one.verdict for one in report.cells] == [verdict]


def test_only_prompts_that_full_attention_answers_are_conditions() -> None:
    plan = small_plan(settings=SMALL.model_copy(update={"prompts": 6}))
    cell = plan.cells[-1].id
    pairs = [(True, True), (False, True), (True, False), (True, False), (False, False), (True, True)]
    report = summarise(plan, [result(cell, at, *pair) for at, pair in enumerate(pairs)])
    (one,) = report.cells
    assert one.rate and one.conditional and one.full and one.paired
    assert (one.rate.hits, one.rate.tries) == (4, 6)
    assert (one.conditional.hits, one.conditional.tries) == (2, 3)
    assert (one.full.hits, one.paired.only_first, one.paired.only_second) == (3, 2, 1)
    assert one.kl_mean == pytest.approx(0.2) and one.excess_min == pytest.approx(0.2)


def test_a_task_without_an_answer_has_losses_and_no_verdict(tmp_path: Path) -> None:
    plan = small_plan(tasks=(Task.PERPLEXITY,), length=600)
    go(plan, tmp_path / "r.jsonl")
    report = summarise(plan, read(tmp_path / "r.jsonl", plan.digest))
    full = next(one for one in report.cells if one.cell.selector == "full")
    bare = next(one for one in report.cells if one.cell.selector == "persistentOnly")
    assert full.loss_growth == pytest.approx(0.0, abs=1e-4)
    assert bare.loss_growth is not None and abs(bare.loss_growth) > 1e-2
    assert {one.verdict for one in report.cells} == {Verdict.NOT_ASKED}


@pytest.mark.parametrize("quick", [True, False])
def test_a_report_shows_every_cell_and_needs_nothing_outside(tmp_path: Path, quick: bool) -> None:
    plan = small_plan(quick=quick, families=("certifiedScan", "nobody"))
    go(plan, tmp_path / "r.jsonl")
    report = summarise(plan, read(tmp_path / "r.jsonl", plan.digest))
    page, body = as_html(report), json.loads(as_json(report))
    assert {one["cell"]["selector"] for one in body["cells"]} == {cell.selector for cell in plan.cells}
    assert body["notRun"][0]["cell"].startswith("copySpan/160/nobody")
    for words in (
        plan.digest,
        plan.stop_rule,
        LIMITS.split("(")[0],
        "nobody",
        *(c.selector for c in plan.cells),
    ):
        assert words in page
    assert (QUICK in page) is quick and (body["quick"] == QUICK) is quick
    assert page.count("<svg") == 2
    outside = re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    assert outside == []


class Clock:
    """Seconds that pass with each look."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def command(
    *words: str,
    step: float = 0.0,
    digest: str = "sha256:aa",
    code: str = "sha256:cc",
    clock: Clock | None = None,
) -> tuple[int, str]:
    err = io.StringIO()
    loaded = Loaded("tiny", digest, tiny_model(), ByteCodec())
    status = cli.main(
        list(words),
        clock=clock or Clock(step),
        spent=lambda: 41.6,
        loader=lambda _: loaded,
        coder=lambda: code,
        stderr=err,
    )
    return status, err.getvalue()


SMALLEST = (
    "--model", "tiny", "--tasks", "copySpan", "--budgets", "16", "--prompts", "1", "--lengths", "300",
    "--steps", "2", "--families", "certifiedScan",
)  # fmt: skip


def test_the_command_plans_runs_goes_on_and_reports(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    assert command("plan", *SMALLEST, *out)[0] == 0
    planned = (tmp_path / "plan.json").read_text()
    status, said = command("run", *SMALLEST, *out, "--minutes", "1", step=12.0)
    assert status == 3 and "the same command goes on" in said
    status, said = command("run", *SMALLEST, *out)
    assert status == 0 and "[####" in said
    assert (tmp_path / "plan.json").read_text() == planned, "a plan is never written twice"
    (tmp_path / "report.html").unlink()
    assert command("report", *out)[0] == 0
    assert "Cells without results" in (tmp_path / "report.html").read_text()


def test_a_quick_run_says_that_it_gives_no_verdict_and_ends_in_time(tmp_path: Path) -> None:
    """Each look at the clock costs 20 s here, as long as the longest piece of work on two quiet cores."""
    clock = Clock(20.0)
    status, said = command("run", *SMALLEST, "--quick", "--out", str(tmp_path), clock=clock)
    assert status == 0 and QUICK in said
    assert clock.now <= 300.0
    assert f"42 s of processors, {clock.now - 20:.0f} s in all" in said
    body = json.loads((tmp_path / "report.json").read_text())
    assert {one["verdict"] for one in body["cells"]} <= {Verdict.QUICK.value}
    assert any(one["why"] == Missing.NOT_FINISHED for one in body["notRun"])


def test_a_quick_run_has_no_verdict_however_many_prompts_it_had(tmp_path: Path) -> None:
    plan = small_plan(settings=SMALL.model_copy(update={"prompts": 50}), quick=True)
    found = [result(cell.id, at, True, True) for cell in plan.cells for at in range(50)]
    report = summarise(plan, found)
    assert report.complete and {one.verdict for one in report.cells} == {Verdict.QUICK}


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    command("plan", *SMALLEST, *out)
    status, said = command("run", *SMALLEST, *out, digest="sha256:bb")
    assert status == 2 and "another model" in said


def test_a_run_does_not_go_on_with_other_code(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    command("plan", *SMALLEST, *out)
    status, said = command("run", *SMALLEST, *out, code="sha256:dd")
    assert status == 2 and "other code" in said and not (tmp_path / "results.jsonl").exists()


def test_the_digest_of_the_code_is_of_what_computes_and_not_of_what_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = provenance.code_digest()
    copy = tmp_path / "kvtier_eval"
    shutil.copytree(Path(cli.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(provenance.kvtier_eval, "__path__", [str(copy)])
    assert provenance.code_digest() == before
    (copy / "report.py").write_text("")
    assert provenance.code_digest() == before
    (copy / "metrics.py").write_text("")
    assert provenance.code_digest() != before


def test_a_family_that_does_not_exist_is_named(tmp_path: Path) -> None:
    status, said = command("plan", *SMALLEST, "--families", "qwest", "--out", str(tmp_path))
    assert status == 2 and "qwest" in said and "quest" in said


def test_settings_bound_the_lag_of_an_index() -> None:
    with pytest.raises(ValueError, match="append_every"):
        _ = Settings(prompts=1, steps=1, seed=1, regime=SMALL.regime, recent=4, append_every=8).setup
