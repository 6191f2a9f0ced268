"""`kvtier-eval`: writes a plan, runs it, reports it.

Why it exists: the three are apart so that a plan exists before its results. It must not compute anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError

from kvtier_eval import probecli
from kvtier_eval.journal import Journal, WrongJournal, read
from kvtier_eval.models import SMOLLM2, Loaded, load
from kvtier_eval.plan import CHOICES, Plan, Settings, make_plan
from kvtier_eval.provenance import code_digest
from kvtier_eval.replay import Regime
from kvtier_eval.report import QUICK, as_html, as_json
from kvtier_eval.summary import summarise
from kvtier_eval.tasks import Material, Task
from kvtier_eval.texts import stdlib_corpus

QUICK_SECONDS = 180.0
"""A quick run asks for the time before each prompt and each selector; the rest of 5 minutes is for what it
does then (30 s of a processor at most) and for the report."""
_QUICK_PROMPTS = 2
_OK, _WRONG, _CUT_SHORT = 0, 2, 3


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier-eval", description="Quality of KV selectors on a model.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="write down what will be measured, before it is")
    run = commands.add_parser("run", help="run a plan, or go on with it; without --plan one is made first")
    report = commands.add_parser("report", help="report.json and report.html from results")
    for one in (plan, run):
        one.add_argument("--model", required=True, metavar=f"DIR|{SMOLLM2}", help="a transformers folder")
        _choices(one)
    for one in (plan, run, report):
        one.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="plan.json, results.jsonl, reports"
        )
    run.add_argument(
        "--minutes", type=float, help="stop before the next prompt after so long; go on by the same"
    )
    probecli.add_parser(commands)
    return parser


def _choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="5 minutes on 2 cores; gives no verdict")
    parser.add_argument("--tasks", type=_list, help=", ".join(Task))
    parser.add_argument("--lengths", type=_list, help="tokens of context (default 1024)")
    parser.add_argument("--budgets", type=_list, help="rows of a KV head (default 64,256)")
    parser.add_argument("--families", type=_list, help="with variants: " + ", ".join(CHOICES))
    parser.add_argument("--prompts", type=int, help="of a cell (default 50)")
    parser.add_argument("--steps", type=int, default=16, help="tokens asked for in copySpan and perplexity")
    parser.add_argument("--seed", type=int, default=20250101)
    parser.add_argument("--regime", type=Regime, choices=list(Regime), default=Regime.OWN_ROWS)
    parser.add_argument("--dense-layers", type=_list, default=["0", "1"], help="layers that read every row")
    parser.add_argument("--threads", type=int, default=2)


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(
    arguments: Sequence[str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    spent: Callable[[], float] = time.process_time,
    loader: Callable[[str], Loaded] = load,
    coder: Callable[[], str] = code_digest,
    stderr: TextIO | None = None,
) -> int:
    """spent: seconds of processors that this process took.

    0: done. 2: refused, with the reason on stderr. 3: stopped before the end; the same command goes on."""
    parsed = build_parser().parse_args(arguments)
    err = sys.stderr if stderr is None else stderr
    if parsed.command == "probe":
        return probecli.main(parsed, out=sys.stdout, err=err, clock=clock, loader=loader)
    started = clock()
    try:
        if parsed.command == "report":
            plan = _read_plan(parsed.out)
            _write_report(parsed.out, plan, err)
            return _OK
        status = _measure(parsed, started, clock, loader, coder, err)
        err.write(f"{spent():.0f} s of processors, {clock() - started:.0f} s in all\n")
        return status
    except (FileNotFoundError, WrongJournal, ValidationError, ValueError) as error:
        err.write(f"kvtier-eval: {error}\n")
        return _WRONG


def _measure(
    parsed: argparse.Namespace,
    started: float,
    clock: Callable[[], float],
    loader: Callable[[str], Loaded],
    coder: Callable[[], str],
    err: TextIO,
) -> int:
    import torch

    from kvtier_eval.forward import Decoder
    from kvtier_eval.runner import run

    torch.set_num_threads(parsed.threads)
    loaded = loader(parsed.model)
    decoder = Decoder(loaded.model)
    corpus, code = stdlib_corpus(), coder()
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / "plan.json"
    if path.exists():
        plan = _read_plan(parsed.out)
        if plan.code_digest != code:
            raise ValueError(
                f"{path} was made with other code or libraries; go on from the commit of its plan"
            )
        if (plan.model_digest, plan.corpus_digest) != (loaded.digest, corpus.digest):
            raise ValueError(f"{path} was made for another model or another Python's text")
    else:
        plan = make_plan(
            model=loaded.name,
            model_digest=loaded.digest,
            corpus=corpus,
            code_digest=code,
            shape=decoder.shape,
            settings=_settings(parsed),
            tasks=[
                Task(one)
                for one in parsed.tasks or (["copySpan"] if parsed.quick else ["copySpan", "multiKey"])
            ],
            lengths=_numbers(parsed.lengths, [512] if parsed.quick else [1024]),
            budgets=_numbers(parsed.budgets, [128] if parsed.quick else [64, 256]),
            names=_families(parsed.families),
            quick=parsed.quick,
        )
        path.write_text(plan.model_dump_json(indent=1) + "\n")
    err.write(f"plan {plan.digest}: {len(plan.cells)} cells, {plan.settings.prompts} prompts each\n")
    if plan.quick:
        err.write(f"{QUICK}\n")
    if parsed.command == "plan":
        return _OK
    seconds = (
        parsed.minutes * 60 if parsed.minutes is not None else (QUICK_SECONDS if plan.quick else float("inf"))
    )
    material = Material(loaded.codec, tuple(loaded.codec.encode(corpus.text)))
    with Journal(parsed.out / "results.jsonl", plan.digest) as journal:
        outcome = run(
            plan,
            decoder,
            material,
            journal,
            progress=_Bar(err, clock),
            go_on=lambda: clock() - started < seconds,
        )
    _write_report(parsed.out, plan, err)
    if outcome.stopped and not plan.quick:
        err.write(f"stopped at {outcome.done} of {outcome.total} results; the same command goes on\n")
        return _CUT_SHORT
    return _OK


def _settings(parsed: argparse.Namespace) -> Settings:
    return Settings(
        prompts=parsed.prompts or (_QUICK_PROMPTS if parsed.quick else 50),
        steps=parsed.steps,
        seed=parsed.seed,
        regime=parsed.regime,
        dense_layers=tuple(_numbers(parsed.dense_layers, [])),
    )


def _families(given: list[str] | None) -> list[str]:
    unknown = sorted(set(given or []) - set(CHOICES))
    if unknown:
        raise ValueError(f"no family {', '.join(unknown)}; there are {', '.join(CHOICES)}")
    return list(CHOICES) if given is None else given


def _numbers(given: list[str] | None, default: list[int]) -> list[int]:
    return default if given is None else [int(one) for one in given]


def _read_plan(folder: Path) -> Plan:
    return Plan.model_validate_json((folder / "plan.json").read_text())


def _write_report(folder: Path, plan: Plan, err: TextIO) -> None:
    report = summarise(plan, read(folder / "results.jsonl", plan.digest))
    for name, text in (("report.json", as_json(report)), ("report.html", as_html(report))):
        (folder / name).write_text(text)
        err.write(f"{folder / name}\n")


class _Bar:
    """One line, rewritten on a terminal; about one line in ten seconds elsewhere."""

    def __init__(self, err: TextIO, clock: Callable[[], float]) -> None:
        self._err = err
        self._clock = clock
        self._started: tuple[float, int] | None = None
        self._said = float("-inf")

    def __call__(self, done: int, total: int, doing: str) -> None:
        now = self._clock()
        if self._started is None:
            self._started = (now, done)
        terminal = self._err.isatty()
        if not terminal and now - self._said < 10 and done < total:
            return
        self._said = now
        since, first = self._started
        left = (now - since) / (done - first) * (total - done) if done > first else float("nan")
        filled = 30 * done // max(1, total)
        eta = f"{left / 60:.0f} min left" if left == left else "..."
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {eta} {doing}"
        self._err.write(f"\r{line[:120]:<120}" if terminal else line + "\n")
        if terminal and done == total:
            self._err.write("\n")
        self._err.flush()
