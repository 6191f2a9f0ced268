"""Scores a probe set on both arms of a running agent, and reports each pair.

Why it exists: a step's error says nothing of what compounds over a generation; only prompts with a right
answer do. Each prompt is answered once by the exact baseline and once by the candidate, in probe sessions,
which are out of all other evidence. A pair is reported only if the candidate answered it: where its lease
had ended, or its index was not there yet, there is none. It must not know the wire or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier_eval.tasks import Material, PromptTooShort, Task, make_prompt
from kvtier_evidence.probeplan import PlanError, ProbePlan, prompt_digest


class Arm(StrEnum):
    BASELINE = "baseline"
    CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """passes: token ids, one forward pass each; the last has one token, whose query is the first that a
    selector answers. gold: tokens of the right answer; the first `needed` decide."""

    name: str
    digest: str
    passes: tuple[tuple[int, ...], ...]
    gold: tuple[int, ...]
    needed: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.passes)) + self.needed


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whose evidence a pair is."""

    rollout_uid: str
    number: int
    candidate_digest: str


@dataclass(frozen=True, slots=True)
class Answer:
    """matched: leading tokens of the answer that are right. approximate: steps in which rows were left out.
    fallbacks: why steps of a candidate were exact, as receipts say. lost: why the agent took the candidate
    away while it answered; empty: it did not."""

    matched: int
    approximate: int = 0
    fallbacks: tuple[str, ...] = ()
    lost: str = ""

    @property
    def late(self) -> bool:
        """Whether a step was exact only since the session's index was not ready for it."""
        return bool(LATE.intersection(self.fallbacks))


class ProbeSession(Protocol):
    """One open probe session."""

    @property
    def attempt(self) -> Attempt | None:
        """None: no candidate was granted when it was opened."""

    def answer(self, prompt: ProbePrompt, pause: float = 0.0) -> Answer:
        """pause: seconds between the context and the first query that a selector answers."""

    def report(self, gate: str, probe_set: str, prompt: str, difference: float) -> str:
        """Why it was not counted; empty: it was."""


class Target(Protocol):
    """The agent that answers."""

    def open(self, arm: Arm, tokens: int) -> AbstractContextManager[ProbeSession]: ...


REPEATED = "ProbeRepeated"
LATE = frozenset({"DEPENDENCY_UNPUBLISHED", "INDEX_FRONTIER_LAG"})
"""Indexes are built beside the steps; a short answer may be over before its index is there."""
GATED = "GATE_FAILED"
"""The candidate's own gate: who declares one is served exactly where it fails."""
FIRST_PAUSE = 0.25


@dataclass
class Patience:
    """How long a prompt waits for its index: what the last one needed, and more when it was not enough."""

    limit: float = 60.0
    pause: float = 0.0

    def more(self) -> bool:
        """Whether a longer pause is allowed; it is taken then."""
        if self.pause >= self.limit:
            return False
        self.pause = min(self.limit, max(FIRST_PAUSE, 2 * self.pause))
        return True


class Lost(Exception):
    """The candidate is not what this run is for, or not there (any more); the same command may go on."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One prompt. exact, candidate: share of the answer's deciding tokens that are right, from the first on.
    why_not: why the pair is no evidence; empty: it was reported, or had been before."""

    name: str
    exact: float
    candidate: float
    approximate: int
    why_not: str = ""

    @property
    def difference(self) -> float:
        return self.exact - self.candidate


@dataclass(frozen=True, slots=True)
class Totals:
    """Means are over the prompts that are evidence. lost, won: prompts that only the exact arm, only the
    candidate answers in full. selected: prompts with a step that left rows out."""

    size: int
    reported: int
    mean_exact: float
    mean_candidate: float
    lost: int
    won: int
    selected: int
    not_measured: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return self.reported == self.size


def prompts_of(plan: ProbePlan, material: Material) -> Iterator[ProbePrompt]:
    """Every prompt of the plan. PlanError names a cell whose prompts do not fit."""
    for given in plan.prompts:
        yield _prompt(
            given.digest[:16],
            given.digest,
            tuple(material.codec.encode(given.text)),
            tuple(material.codec.encode(given.answer)),
        )
    for cell in plan.cells:
        task = Task(cell.task)
        for index, name in enumerate(cell.names()):
            try:
                made = make_prompt(
                    task, material, length=cell.length, steps=plan.steps, seed=cell.seed, index=index
                )
            except PromptTooShort as error:
                raise PlanError(f"{name}: {error}") from error
            # A fact that arrives when an index is there already has a pass of its own.
            first = (made.ids[: made.indexed],) if task is Task.APPENDED_NEEDLE else ()
            rest = made.ids[made.indexed :] if first else made.ids
            yield _prompt(name, prompt_digest(name), rest, made.gold, before=first, needed=made.needed)


def _prompt(
    name: str,
    digest: str,
    ids: tuple[int, ...],
    gold: tuple[int, ...],
    *,
    before: tuple[tuple[int, ...], ...] = (),
    needed: int = 0,
) -> ProbePrompt:
    if len(ids) < 2 or not gold:
        raise PlanError(f"{name}: a prompt needs two tokens and an answer of one")
    return ProbePrompt(name, digest, (*before, ids[:-1], ids[-1:]), gold, needed or len(gold))


def run_probes(
    prompts: Sequence[ProbePrompt],
    target: Target,
    *,
    probe_set: str,
    gates: Sequence[str],
    expected: Attempt | None,
    told: Callable[[Scored], None],
    patience: Patience | None = None,
) -> Totals:
    """Answers and reports every prompt. expected: None takes whatever candidate is there first, and only
    that. Lost when it goes; what was reported stays."""
    scored = []
    patience = patience or Patience()
    for prompt in prompts:
        with target.open(Arm.BASELINE, prompt.tokens) as session:
            expected = _same(expected, session)
            exact = session.answer(prompt)
        while True:
            with target.open(Arm.CANDIDATE, prompt.tokens) as session:
                expected = _same(expected, session)
                candidate = session.answer(prompt, patience.pause)
                if candidate.lost:
                    raise Lost(f"{prompt.name}: the candidate's lease ended: {candidate.lost}")
                if candidate.late and patience.more():
                    continue
                one = _scored(prompt, exact, candidate)
                if not one.why_not:
                    _count(session.report(gates[0], probe_set, prompt.digest, one.difference), prompt)
                break
        if not one.why_not:
            for gate in gates[1:]:
                # A session reports once.
                with target.open(Arm.CANDIDATE, prompt.tokens) as session:
                    expected = _same(expected, session)
                    _count(session.report(gate, probe_set, prompt.digest, one.difference), prompt)
        scored.append(one)
        told(one)
    return totals(scored)


def _same(expected: Attempt | None, session: ProbeSession) -> Attempt:
    found = session.attempt
    if found is None:
        raise Lost("the agent holds no candidate of this cache")
    if expected is not None and found != expected:
        raise Lost(
            f"the agent runs attempt {found.number} of rollout {found.rollout_uid} with candidate "
            f"{found.candidate_digest}; these probes are for attempt {expected.number} of "
            f"{expected.rollout_uid} with {expected.candidate_digest}"
        )
    return found


def _scored(prompt: ProbePrompt, exact: Answer, candidate: Answer) -> Scored:
    return Scored(
        prompt.name,
        exact.matched / prompt.needed,
        candidate.matched / prompt.needed,
        candidate.approximate,
        _unmeasured(candidate),
    )


def _unmeasured(answer: Answer) -> str:
    """A candidate whose index was late, or that fell back at every step by no gate of its own, has not shown
    what it selects."""
    others = set(answer.fallbacks) - {GATED}
    if not others or (answer.approximate and not answer.late):
        return ""
    return "steps fell back: " + ", ".join(sorted(others))


def _count(why_not: str, prompt: ProbePrompt) -> None:
    if why_not not in ("", REPEATED):
        raise Lost(f"{prompt.name}: the agent did not count it: {why_not}")


def totals(scored: Iterable[Scored]) -> Totals:
    rows = list(scored)
    good = [one for one in rows if not one.why_not]
    count = max(1, len(good))
    return Totals(
        size=len(rows),
        reported=len(good),
        mean_exact=sum(one.exact for one in good) / count,
        mean_candidate=sum(one.candidate for one in good) / count,
        lost=sum(one.exact == 1 > one.candidate for one in good),
        won=sum(one.candidate == 1 > one.exact for one in good),
        selected=sum(one.approximate > 0 for one in good),
        not_measured=tuple(f"{one.name}: {one.why_not}" for one in rows if one.why_not),
    )
