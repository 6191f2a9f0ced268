"""Seeded prompts whose right answer is in the prompt: repeating a list of words.

A model that attends to the earlier repetitions continues the list; one whose
reads were thinned too far cannot. So the same prompts serve as traffic and as
the probe set, and a score needs no judge.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

WORDS = [
    "river",
    "stone",
    "candle",
    "monkey",
    "yellow",
    "garden",
    "winter",
    "bottle",
    "pepper",
    "silver",
    "window",
    "marble",
    "rocket",
    "basket",
    "lemon",
    "tiger",
    "purple",
    "hammer",
    "ocean",
    "ticket",
    "forest",
    "mirror",
    "button",
    "saddle",
    "copper",
    "engine",
    "pillow",
    "violin",
]  # a list of words reads better


@dataclass(frozen=True)
class Task:
    """A prompt and the text that continues the repetition."""

    prompt: str
    answer: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.prompt}\x00{self.answer}".encode()).hexdigest()


def make_tasks(seed: int, count: int, *, words: int = 10, repetitions: int = 4) -> list[Task]:
    """``count`` tasks, the same for the same arguments on every machine."""
    rng = random.Random(seed)
    tasks = []
    for _ in range(count):
        row = rng.sample(WORDS, words)
        cut = rng.randrange(3, words - 4)
        listing = " ".join(row)
        prompt = "Repeat: " + ". ".join([listing] * repetitions) + ". " + " ".join(row[:cut])
        tasks.append(Task(prompt, " " + " ".join(row[cut : cut + 3])))
    return tasks


def probe_plan(seed: int, count: int) -> str:
    """The evaluation plan a KVRollout names by probeRef, as the ConfigMap's JSON."""
    tasks = make_tasks(seed, count)
    return json.dumps(
        {
            "version": 1,
            "task": "repeat-words",
            "seed": seed,
            "prompts": [{"digest": t.digest, "prompt": t.prompt, "answer": t.answer} for t in tasks],
        },
        sort_keys=True,
    )
