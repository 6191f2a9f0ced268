"""The evaluation plan that a gate's `probeRef` names: how many prompts it is, and what each is called.

Operator and evaluator read the same text: the operator to know size and digest of the set that a verdict is
about, the evaluator to run it. It must not know tokenizers, models, or where the text came from.

Section 4.5 of the evidence specification: a probe set is finite, each prompt counts once an attempt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_evidence.window import MAX_PROBES

VERSION = 1
TASKS = ("passkey", "multiKey", "lastWins", "appendedNeedle", "twoHop", "copySpan")
"""Tasks with an answer that is right or wrong. dropReposition is none: a session that was edited has no
selector, so both arms would be the same."""
MIN_LENGTH, MAX_LENGTH = 128, 131_072
MAX_STEPS = 512
MAX_ENTRIES = 64
MAX_SEED = 2**31 - 1
MIN_DEADLINE, MAX_DEADLINE = 60, 86_400
DEFAULT_DEADLINE = 14_400
MAX_TEXT = 1_048_576
_FIELDS = (
    "version",
    "model",
    "tasks",
    "lengths",
    "seeds",
    "promptsPerCell",
    "steps",
    "deadlineSeconds",
    "job",
)
_EXPLICIT_FIELDS = ("version", "model", "prompts", "task", "seed", "deadlineSeconds", "job")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_QUANTITY = re.compile(r"[1-9][0-9]{0,8}(m|Ki|Mi|Gi|Ti)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class PlanError(ValueError):
    """The message names the field, what stands there and what is legal."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a run finds the model. path: a folder of transformers, or a name that the evaluator knows. claim:
    the PersistentVolumeClaim that holds the folder, at `path` within it; empty: the image holds it. digest:
    of the weights, as the evaluator prints it; empty: not checked."""

    path: str
    claim: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """Prompts [0, count) of one task."""

    task: str
    length: int
    seed: int
    count: int

    def names(self) -> Iterator[str]:
        for index in range(self.count):
            yield f"{self.task}/{self.length}/{self.seed}/{index}"


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt that stands in the plan. text and answer are empty where only its digest is known: whoever
    serves has them."""

    digest: str
    text: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class JobNeeds:
    """What a Job asks its node for; Kubernetes quantities."""

    cpu: str = "1"
    memory: str = "4Gi"


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Either cells or prompts. model: None where no Job runs it, since whoever serves reports the scores.
    steps: tokens asked for where a task sets no number itself."""

    digest: str
    cells: tuple[Cell, ...] = ()
    prompts: tuple[GivenPrompt, ...] = ()
    model: ModelSource | None = None
    steps: int = 16
    deadline_seconds: int = DEFAULT_DEADLINE
    job: JobNeeds = JobNeeds()

    @property
    def size(self) -> int:
        return sum(cell.count for cell in self.cells) + len(self.prompts)


def plan_digest(text: str) -> str:
    """Of a plan's exact text."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def prompt_digest(name: str) -> str:
    """Of a prompt that is made from a seed: of its name, so that two evaluators never count it twice."""
    return hashlib.sha256(name.encode()).hexdigest()


def given_digest(text: str, answer: str) -> str:
    """Of a prompt that stands in the plan."""
    return hashlib.sha256(f"{text}\x00{answer}".encode()).hexdigest()


def parse_plan(text: str) -> ProbePlan:
    """PlanError names the first field that is wrong."""
    if len(text) > MAX_TEXT:
        raise PlanError(f"{len(text)} characters; legal: at most {MAX_TEXT}")
    try:
        body = json.loads(text)
    except ValueError as error:
        raise PlanError(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise PlanError("a plan is a JSON object")
    explicit = "prompts" in body
    legal = _EXPLICIT_FIELDS if explicit else _FIELDS
    unknown = sorted(set(body) - set(legal))
    if unknown:
        raise PlanError(f"{unknown[0]}: no such field; legal: {', '.join(legal)}")
    if body.get("version", VERSION) != VERSION:
        raise PlanError(f"version {body['version']!r}; legal: {VERSION}")
    model = _model(body["model"]) if body.get("model") is not None else None
    plan = ProbePlan(
        digest=plan_digest(text),
        cells=() if explicit else _cells(body),
        prompts=_prompts(body["prompts"], whole=model is not None) if explicit else (),
        model=model,
        steps=_integer(body.get("steps", 16), "steps", 1, MAX_STEPS),
        deadline_seconds=_integer(
            body.get("deadlineSeconds", DEFAULT_DEADLINE), "deadlineSeconds", MIN_DEADLINE, MAX_DEADLINE
        ),
        job=_job(body.get("job")),
    )
    if plan.size > MAX_PROBES:
        raise PlanError(f"{plan.size} prompts; legal: at most {MAX_PROBES}")
    return plan


def _cells(body: dict[str, Any]) -> tuple[Cell, ...]:
    tasks = _list(body, "tasks")
    for at, task in enumerate(tasks):
        if task not in TASKS:
            raise PlanError(f"tasks[{at}] {task!r}; legal: {', '.join(TASKS)}")
    lengths = [
        _integer(one, f"lengths[{at}]", MIN_LENGTH, MAX_LENGTH)
        for at, one in enumerate(_list(body, "lengths"))
    ]
    seeds = [_integer(one, f"seeds[{at}]", 0, MAX_SEED) for at, one in enumerate(_list(body, "seeds"))]
    count = _integer(body.get("promptsPerCell", 1), "promptsPerCell", 1, MAX_PROBES)
    return tuple(
        Cell(str(task), length, seed, count) for task in tasks for length in lengths for seed in seeds
    )


def _prompts(rows: Any, *, whole: bool) -> tuple[GivenPrompt, ...]:
    """whole: text and answer are needed, since somebody is to run them from here."""
    if not isinstance(rows, list) or not rows:
        raise PlanError("prompts: legal: a list of at least one")
    found: dict[str, GivenPrompt] = {}
    for at, row in enumerate(rows):
        where = f"prompts[{at}]"
        if not isinstance(row, dict):
            raise PlanError(f"{where}: legal: an object of prompt, answer and digest")
        text, answer = (_text(row.get(name, ""), f"{where}.{name}") for name in ("prompt", "answer"))
        if whole and not (text and answer):
            raise PlanError(f"{where}: prompt and answer must be given, since the plan names a model")
        if not text and not row.get("digest"):
            raise PlanError(f"{where}: digest must be given where prompt is not")
        digest = _text(row.get("digest") or given_digest(text, answer), f"{where}.digest")
        if digest in found:
            raise PlanError(f"{where}.digest {digest[:16]} repeats: each prompt counts once")
        found[digest] = GivenPrompt(digest, text, answer)
    return tuple(found.values())


def _model(raw: Any) -> ModelSource:
    if not isinstance(raw, dict) or set(raw) - {"path", "claimName", "digest"}:
        raise PlanError("model: legal: an object of path, claimName and digest")
    path = _text(raw.get("path", ""), "model.path")
    claim = _text(raw.get("claimName", ""), "model.claimName")
    digest = _text(raw.get("digest", ""), "model.digest")
    if not path or path.startswith("-") or ".." in path.split("/") or len(path) > 1024:
        raise PlanError(f"model.path {path!r}; legal: a path without '..' that does not begin with '-'")
    if claim and not _NAME.fullmatch(claim):
        raise PlanError(f"model.claimName {claim!r}; legal: the name of a PersistentVolumeClaim")
    if claim and path.startswith("/"):
        raise PlanError(f"model.path {path!r}; legal with claimName: relative to the volume")
    if digest and not _DIGEST.fullmatch(digest):
        raise PlanError(f"model.digest {digest!r}; legal: sha256: and 64 hexadecimal digits")
    return ModelSource(path, claim, digest)


def _job(raw: Any) -> JobNeeds:
    if raw is None:
        return JobNeeds()
    if not isinstance(raw, dict) or set(raw) - {"cpu", "memory"}:
        raise PlanError("job: legal: an object of cpu and memory")
    for name, value in raw.items():
        if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
            raise PlanError(f"job.{name} {value!r}; legal: a quantity such as '2', '500m' or '8Gi'")
    return JobNeeds(**raw)


def _list(body: dict[str, Any], name: str) -> Sequence[Any]:
    rows = body.get(name)
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_ENTRIES:
        raise PlanError(f"{name}: legal: a list of 1 to {MAX_ENTRIES}")
    for at, row in enumerate(rows):
        if row in rows[:at]:
            raise PlanError(f"{name}[{at}] {row!r} repeats: each prompt counts once")
    return rows


def _integer(value: Any, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlanError(f"{where} {value!r}; legal: {least} to {most}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{where} {value!r}; legal: text")
    return value
