"""`kvtier-eval probe`: runs an evaluation plan against an agent and reports it as a rollout's task quality.

What the operator's Job runs is what a person types where no Job controller runs. It must not score.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from kvtier_eval.models import Loaded, load
from kvtier_eval.probing import Attempt, Lost, Patience, Scored, Totals, prompts_of, run_probes
from kvtier_eval.tasks import Material
from kvtier_eval.texts import stdlib_corpus
from kvtier_evidence.probeplan import PlanError, ProbePlan, parse_plan

DONE, REFUSED, INCOMPLETE = 0, 2, 3
"""2: running it again changes nothing. 3: it may."""
POLL_SECONDS = 1.0
_OURS_TO_MEND = frozenset(
    {"MODEL_MISMATCH", "GEOMETRY_MISMATCH", "TENANT_MISMATCH", "BAD_ARGUMENT", "UNSUPPORTED"}
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "probe", help="score a rollout's probe set on both arms of an agent, and report it as evidence"
    )
    add = parser.add_argument
    add("--plan", type=Path, required=True, metavar="FILE", help="what the probeRef's ConfigMap holds")
    add("--plan-digest", default="", help="refuse another plan than this (sha256:...)")
    add("--model", default="", metavar="DIR", help="instead of the plan's model.path")
    add("--model-root", type=Path, metavar="DIR", help="the folder that model.path is relative to")
    add("--socket", type=Path, required=True, metavar="FILE", help="RUN_DIR/NODE/engine.sock of an agent")
    add("--namespace", required=True, help="of the KVCache")
    add("--cache", required=True, help="name of the KVCache")
    add("--gate", action="append", required=True, help="a gate that the pairs count for; repeatable")
    add("--rollout-uid", default="", help="with --attempt and --candidate: report for these and no other")
    add("--attempt", type=int, default=0)
    add("--candidate", default="", metavar="DIGEST")
    add("--wait", type=float, default=120.0, metavar="SECONDS", help="for the agent to hold the candidate")
    add("--index-wait", type=float, default=60.0, metavar="SECONDS", help="most, for a prompt's index")
    add("--threads", type=int, default=1)


def main(
    parsed: argparse.Namespace,
    *,
    out: TextIO,
    err: TextIO,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    loader: Callable[[str], Loaded] = load,
) -> int:
    """One JSON line a prompt on `out`, the totals in the last. 0: every prompt is evidence now. 2: refused,
    and again it would be. 3: not all of them; the same command may do the rest."""
    import torch

    from kvtier_client.client import AttentionClient
    from kvtier_client.errors import KvtierError
    from kvtier_eval.probeagent import AgentTarget

    torch.set_num_threads(parsed.threads)
    try:
        plan = _plan(parsed)
        expected = _expected(parsed)
        loaded = loader(_model(parsed, plan))
        if plan.model is not None and plan.model.digest not in ("", loaded.digest):
            raise PlanError(f"model.digest {plan.model.digest}, and the weights here are {loaded.digest}")
        corpus = stdlib_corpus()
        filler = tuple(loaded.codec.encode(corpus.text)) if plan.cells else ()
        prompts = list(prompts_of(plan, Material(loaded.codec, filler)))
        with (
            AttentionClient(parsed.socket) as client,
            AgentTarget(client, loaded.model, parsed.namespace, parsed.cache, sleep) as target,
        ):
            _wait(target.attempt, expected, parsed.wait, clock, sleep)

            def told(one: Scored) -> None:
                out.write(json.dumps(_row(one)) + "\n")
                out.flush()

            found = run_probes(
                prompts,
                target,
                probe_set=plan.digest,
                gates=parsed.gate,
                expected=expected,
                told=told,
                patience=Patience(parsed.index_wait),
            )
    except (PlanError, OSError, ValueError) as error:
        err.write(f"kvtier-eval probe: {error}\n")
        return REFUSED
    except Lost as error:
        err.write(f"kvtier-eval probe: {error}\n")
        return INCOMPLETE
    except KvtierError as error:
        err.write(f"kvtier-eval probe: {error}\n")
        return REFUSED if error.reason.value in _OURS_TO_MEND else INCOMPLETE
    out.write(json.dumps(_totals(found, plan, loaded, corpus.digest if plan.cells else "")) + "\n")
    for row in found.not_measured:
        err.write(f"kvtier-eval probe: not measured: {row}\n")
    if found.complete and not found.selected:
        err.write("kvtier-eval probe: no step left rows out: these prompts say nothing of the selector\n")
    return DONE if found.complete else INCOMPLETE


def _plan(parsed: argparse.Namespace) -> ProbePlan:
    plan = parse_plan(parsed.plan.read_text())
    if parsed.plan_digest not in ("", plan.digest):
        raise PlanError(f"{parsed.plan} is {plan.digest}, not {parsed.plan_digest}: it was edited")
    if any(not (given.text and given.answer) for given in plan.prompts):
        raise PlanError("prompts: prompt and answer must be given: here are digests only")
    return plan


def _model(parsed: argparse.Namespace, plan: ProbePlan) -> str:
    if parsed.model:
        return str(parsed.model)
    if plan.model is None:
        raise PlanError("model: the plan names none; give --model")
    return str(parsed.model_root / plan.model.path) if parsed.model_root else plan.model.path


def _expected(parsed: argparse.Namespace) -> Attempt | None:
    given = (parsed.rollout_uid, parsed.attempt, parsed.candidate)
    if not any(given):
        return None
    if not all(given):
        raise PlanError("--rollout-uid, --attempt and --candidate are given together or not at all")
    return Attempt(*given)


def _wait(
    look: Callable[[], Attempt | None],
    expected: Attempt | None,
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Until the agent holds the candidate; Lost when it does not in time."""
    end = clock() + seconds
    while True:
        found = look()
        if found is not None and (expected is None or found == expected):
            return
        if clock() >= end:
            what = "no candidate" if found is None else f"attempt {found.number} of {found.rollout_uid}"
            raise Lost(f"the agent holds {what} after {seconds:g} s")
        sleep(POLL_SECONDS)


def _row(one: Scored) -> dict[str, object]:
    return {
        "prompt": one.name,
        "exact": round(one.exact, 4),
        "candidate": round(one.candidate, 4),
        "approximateSteps": one.approximate,
        **({"notMeasured": one.why_not} if one.why_not else {}),
    }


def _totals(found: Totals, plan: ProbePlan, loaded: Loaded, corpus: str) -> dict[str, object]:
    drop = found.mean_exact - found.mean_candidate
    return {
        "plan": plan.digest,
        "prompts": found.size,
        "reported": found.reported,
        "meanExact": round(found.mean_exact, 4),
        "meanCandidate": round(found.mean_candidate, 4),
        "meanDrop": 0.0 if math.isclose(drop, 0.0, abs_tol=1e-12) else round(drop, 4),
        "lost": found.lost,
        "won": found.won,
        "withRowsLeftOut": found.selected,
        "model": loaded.name,
        "modelDigest": loaded.digest,
        **({"fillerDigest": corpus} if corpus else {}),
    }
