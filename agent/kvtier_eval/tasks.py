"""Tasks from seeds: what a prompt asks, where the answer stands, and which tokens answer it.

Why it exists: an answer that depends on a few rows far back is where selectors fail, and a mean over text
hides it. Nothing is downloaded; the same seed gives the same prompts. It must not know models or selectors.

Facts are random and stand in the docstrings of `texts`. Positions of the answer are swept from 0.05 to 0.95
by a golden-ratio sequence, so that any number of prompts covers them evenly.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier_eval.models import Codec

_GOLDEN = 0.6180339887498949
CUE_TOKENS = 32
"""Tokens of a span that are repeated before its continuation is asked for, about 128 characters."""


COPIED_TOKENS = 8
"""Tokens of a continuation that count as copied."""


class Task(StrEnum):
    PASSKEY = "passkey"
    MULTI_KEY = "multiKey"
    LAST_WINS = "lastWins"
    APPENDED_NEEDLE = "appendedNeedle"
    TWO_HOP = "twoHop"
    COPY_SPAN = "copySpan"
    DROP_REPOSITION = "dropReposition"
    PERPLEXITY = "perplexity"

    @property
    def asks(self) -> bool:
        """Whether a prompt has an answer that is right or wrong."""
        return self is not Task.PERPLEXITY


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: the context; the query of its last token is the first that a selector answers. gold: the tokens
    that follow. evidence: rows [first, last) that the answer stands in, before anything is dropped. position:
    where the answer was put, 0 to 1. indexed: rows [0, indexed) are there when indexes are built, the others
    are appended. dropped: rows that leave after the prefill of [0, indexed); those behind move up."""

    task: Task
    ids: tuple[int, ...]
    gold: tuple[int, ...]
    evidence: tuple[tuple[int, int], ...]
    position: float
    indexed: int
    dropped: tuple[int, int] | None = None

    @property
    def needed(self) -> int:
        """Of a copied span its beginning is enough: a small model seldom copies much more without a slip."""
        return min(COPIED_TOKENS, len(self.gold)) if self.task is Task.COPY_SPAN else len(self.gold)


@dataclass(frozen=True, slots=True)
class Material:
    """What prompts are made of. filler: the tokens of a corpus."""

    codec: Codec
    filler: tuple[int, ...]


class PromptTooShort(ValueError):
    """The length holds no prompt of this task."""


def make_prompt(task: Task, material: Material, *, length: int, steps: int, seed: int, index: int) -> Prompt:
    """Prompt `index` of a task. length: of the context in tokens, met exactly but for what a frame's parts
    need. steps: tokens asked for where the task has no answer of its own length. PromptTooShort."""
    name = f"{task}/{length}/{seed}/{index}"
    draw = random.Random(hashlib.sha256(name.encode()).digest())
    position = 0.05 + 0.9 * ((0.5 + index * _GOLDEN) % 1.0)
    return _MAKERS[task](_Context(task, material, length, steps, position, draw))


class _Context:
    """The pieces of one prompt, put together once."""

    def __init__(
        self, task: Task, material: Material, length: int, steps: int, position: float, draw: random.Random
    ) -> None:
        self.task = task
        self.length = length
        self.steps = steps
        self.position = position
        self.draw = draw
        self.encode = material.codec.encode
        self.frame = material.codec.frame
        self._filler = material.filler

    def filler(self, count: int) -> list[int]:
        """`count` tokens from a random place; PromptTooShort when less than none is left, or the corpus
        ends."""
        if count < 0 or count > len(self._filler):
            raise PromptTooShort(f"{self.task} does not fit in {self.length} tokens ({count} of filler)")
        start = self.draw.randrange(len(self._filler) - count + 1)
        return list(self._filler[start : start + count])

    def number(self) -> str:
        return str(self.draw.randrange(10000, 100000))

    def chat(
        self,
        facts: list[tuple[float, str]],
        question: str,
        begin: str,
        gold: str,
        *,
        evidence: list[int],
        later: str = "",
    ) -> Prompt:
        """A message of filler with `facts` at their positions, the `question`, and the `begin`ning of an
        answer that `gold` goes on with. evidence: which facts. later: a message that arrives after indexes
        were built; it is evidence then."""
        before, after = (self.encode(part) if part else [] for part in self.frame)
        tail = self.encode("\n" + question) + after + self.encode(begin)
        arrives = self.encode(later) if later else []
        pieces = [self.encode(text) for _, text in facts]
        room = self.length - len(before) - len(tail) - len(arrives) - sum(map(len, pieces))
        filler = self.filler(room)
        ids = list(before)
        spans = [(0, 0)] * len(facts)
        done = 0
        for at in sorted(range(len(facts)), key=lambda one: facts[one][0]):
            end = max(done, min(room, round(facts[at][0] * room)))
            ids += filler[done:end]
            done = end
            spans[at] = (len(ids), len(ids) + len(pieces[at]))
            ids += pieces[at]
        ids += filler[done:]
        rows = tuple(spans[at] for at in evidence)
        indexed = len(ids)
        if arrives:
            rows = ((len(ids), len(ids) + len(arrives)),)
        ids += arrives + tail
        return Prompt(
            self.task,
            tuple(ids),
            tuple(self.encode(gold)),
            rows,
            self.position,
            indexed if arrives else len(ids) - 1,
        )


def _passkey(c: _Context) -> Prompt:
    key = c.number()
    fact = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    return c.chat([(c.position, fact)], "What is the pass key?", "The pass key is", f" {key}", evidence=[0])


def _multi_key(c: _Context) -> Prompt:
    """Up to 32 lines of a key and its value, after RULER; one is asked for."""
    count = max(4, min(32, (c.length - 160) // 24))
    names = c.draw.sample(range(1000, 10000), count)
    values = [c.number() for _ in names]
    asked = min(count - 1, int(c.position * count))
    facts = [
        ((at + 0.5) / count, f"\nkey-{name}: {value}\n")
        for at, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    name = names[asked]
    return c.chat(
        facts,
        f"What is the value of key-{name}? Answer with its line.",
        f"key-{name}:",
        f" {values[asked]}",
        evidence=[asked],
    )


def _last_wins(c: _Context) -> Prompt:
    """One key four times; only the last value is right, so content alone does not decide."""
    name = c.draw.randrange(1000, 10000)
    values = [c.number() for _ in range(4)]
    last = max(0.2, c.position)
    facts = [(last * (at + 1) / 4, f"\nkey-{name}: {value}\n") for at, value in enumerate(values)]
    return c.chat(
        facts,
        f"key-{name} was changed several times. What is its last value?",
        f"The last value of key-{name} is",
        f" {values[-1]}",
        evidence=[3],
    )


def _appended_needle(c: _Context) -> Prompt:
    """The fact comes in a later message, when the index is there already."""
    key = c.number()
    later = f"\nTool result:\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    return c.chat([], "What is the pass key?", "The pass key is", f" {key}", evidence=[], later=later)


def _two_hop(c: _Context) -> Prompt:
    """A variable that is another, whose value stands elsewhere; the answer begins with the first hop, which
    a small model seldom takes alone."""
    first, second = c.draw.sample([f"VAR{letter}{digit}" for letter in "ABCDEF" for digit in range(10)], 2)
    value = c.number()
    other = (c.position + 0.45) % 0.9 + 0.05
    facts = [(c.position, f"\n{first} = {value}.\n"), (other, f"\n{second} is equal to {first}.\n")]
    return c.chat(
        facts,
        f"What is the number that {second} is equal to?",
        f"{second} is equal to {first}, and {first} =",
        f" {value}",
        evidence=[0, 1],
    )


def _copy_span(c: _Context) -> Prompt:
    """The beginning of a passage again, after Graphcore's repetition task; what followed it is asked for."""
    span = CUE_TOKENS + c.steps
    room = c.length - CUE_TOKENS - 2
    if room < 2 * span:
        raise PromptTooShort(f"{c.task} does not fit in {c.length} tokens")
    text = c.filler(room)
    start = round(c.position * (room - span))
    passage = text[start : start + span]
    separator = c.encode("\n\n")[:2]
    ids = text + separator + passage[:CUE_TOKENS]
    gold = tuple(passage[CUE_TOKENS:])
    evidence = ((start + CUE_TOKENS, start + span),)
    return Prompt(c.task, tuple(ids), gold, evidence, c.position, len(ids) - 1)


def _drop_reposition(c: _Context) -> Prompt:
    """A tool result with a false key leaves the middle; what stands behind it moves up."""
    key, false = c.number(), c.number()
    before, after = (c.encode(part) if part else [] for part in c.frame)
    fact = c.encode(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
    tail = c.encode("\nWhat is the pass key?") + after + c.encode("The pass key is")
    lie = c.encode(f"\nTool result: the pass key is {false}.\n")
    kept = c.filler(c.length - len(before) - len(tail) - len(fact))
    gone = lie + c.filler(max(16, c.length // 8))
    at, middle = round(c.position * len(kept)), len(kept) // 2
    start = len(before) + middle + (len(fact) if at <= middle else 0)
    text = kept[:at] + fact + kept[at:]
    cut = start - len(before)
    ids = before + text[:cut] + gone + text[cut:]
    row = len(before) + at + (len(gone) if at > middle else 0)
    return Prompt(
        c.task,
        tuple(ids + tail),
        tuple(c.encode(f" {key}")),
        ((row, row + len(fact)),),
        c.position,
        len(ids),
        (start, start + len(gone)),
    )


def _perplexity(c: _Context) -> Prompt:
    text = c.filler(c.length + c.steps)
    return Prompt(c.task, tuple(text[: c.length]), tuple(text[c.length :]), (), c.position, c.length - 1)


_MAKERS: dict[Task, Callable[[_Context], Prompt]] = {
    Task.PASSKEY: _passkey,
    Task.MULTI_KEY: _multi_key,
    Task.LAST_WINS: _last_wins,
    Task.APPENDED_NEEDLE: _appended_needle,
    Task.TWO_HOP: _two_hop,
    Task.COPY_SPAN: _copy_span,
    Task.DROP_REPOSITION: _drop_reposition,
    Task.PERPLEXITY: _perplexity,
}
