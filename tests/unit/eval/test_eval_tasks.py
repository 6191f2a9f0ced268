"""Prompts: the same from the same seed, of the length asked for, with the answer where they say it is."""

from __future__ import annotations

import itertools
import re

import pytest

from kvtier_eval.tasks import CUE_TOKENS, Prompt, PromptTooShort, Task, make_prompt
from kvtier_eval.texts import stdlib_corpus
from tests.unit.eval.eval_cases import MATERIAL


def prompt_of(task: Task, index: int = 0, *, length: int = 900, seed: int = 3) -> Prompt:
    return make_prompt(task, MATERIAL, length=length, steps=12, seed=seed, index=index)


def text(ids: tuple[int, ...]) -> str:
    return bytes(ids).decode()


@pytest.mark.parametrize("task", list(Task))
def test_a_seed_is_a_prompt(task: Task) -> None:
    assert prompt_of(task) == prompt_of(task)
    assert prompt_of(task) != prompt_of(task, 1)
    assert prompt_of(task) != prompt_of(task, seed=4)


@pytest.mark.parametrize("task", list(Task))
def test_the_length_is_what_was_asked_for(task: Task) -> None:
    for index in range(6):
        prompt = prompt_of(task, index)
        first, last = prompt.dropped or (0, 0)
        assert len(prompt.ids) - (last - first) == 900
        assert 0 < prompt.indexed < len(prompt.ids)


@pytest.mark.parametrize("task", [task for task in Task if task not in (Task.PERPLEXITY, Task.TWO_HOP)])
def test_the_answer_stands_in_the_evidence(task: Task) -> None:
    for index in range(12):
        prompt = prompt_of(task, index)
        ((first, last),) = prompt.evidence
        assert text(prompt.gold).strip() in text(prompt.ids[first:last])


def test_positions_are_swept() -> None:
    """Any run of prompts covers [0.05, 0.95]: no gap is twice an even one."""
    found = sorted(prompt_of(Task.COPY_SPAN, index).position for index in range(20))
    assert found[0] >= 0.05 and found[-1] <= 0.95
    ends = [0.05, *found, 0.95]
    assert max(b - a for a, b in itertools.pairwise(ends)) < 2 * 0.9 / 20 + 1e-9


def test_the_evidence_is_where_the_position_says() -> None:
    for index in range(12):
        prompt = prompt_of(Task.PASSKEY, index)
        assert prompt.evidence[0][0] / len(prompt.ids) == pytest.approx(prompt.position, abs=0.12)


def test_a_key_that_is_repeated_has_other_values_before() -> None:
    prompt = prompt_of(Task.LAST_WINS)
    values = re.findall(r"\nkey-\d{4}: (\d{5})\n", text(prompt.ids))
    assert len(values) == 4 and len(set(values)) == 4
    assert text(prompt.gold).strip() == values[-1]


def test_a_second_hop_names_the_first() -> None:
    prompt = prompt_of(Task.TWO_HOP)
    first, second = (text(prompt.ids[a:b]) for a, b in prompt.evidence)
    name = first.split()[0]
    assert text(prompt.gold).strip() in first and text(prompt.gold).strip() not in second
    assert f"is equal to {name}." in second


def test_one_of_many_keys_is_asked_for() -> None:
    prompt = prompt_of(Task.MULTI_KEY)
    lines = dict(re.findall(r"\nkey-(\d{4}): (\d{5})\n", text(prompt.ids)))
    asked = re.findall(r"value of key-(\d{4})", text(prompt.ids))
    assert len(lines) == (900 - 160) // 24
    assert lines[asked[0]] == text(prompt.gold).strip()


def test_an_appended_needle_comes_after_the_index() -> None:
    prompt = prompt_of(Task.APPENDED_NEEDLE)
    assert prompt.evidence[0][0] == prompt.indexed
    assert text(prompt.gold).strip() not in text(prompt.ids[: prompt.indexed])


def test_what_is_dropped_holds_a_lie_and_nothing_of_the_answer() -> None:
    seen = set()
    for index in range(12):
        prompt = prompt_of(Task.DROP_REPOSITION, index)
        assert prompt.dropped is not None
        first, last = prompt.dropped
        gone = text(prompt.ids[first:last])
        left = text(prompt.ids[:first] + prompt.ids[last:])
        false = re.search(r"pass key is (\d{5})", gone)
        assert false and false[1] not in left
        assert text(prompt.gold).strip() in left and last <= prompt.indexed
        seen.add(prompt.evidence[0][0] > first)
    assert seen == {True, False}, "the answer stands before what is dropped, and behind it"


def test_a_copied_span_is_begun_again_at_the_end() -> None:
    prompt = prompt_of(Task.COPY_SPAN)
    first, last = prompt.evidence[0]
    assert prompt.ids[-CUE_TOKENS:] == prompt.ids[first - CUE_TOKENS : first]
    assert prompt.ids[first:last] == prompt.gold
    assert prompt.needed == 8


@pytest.mark.parametrize("task", [Task.MULTI_KEY, Task.COPY_SPAN, Task.PASSKEY, Task.DROP_REPOSITION])
def test_what_does_not_fit_is_refused(task: Task) -> None:
    with pytest.raises(PromptTooShort, match=task.value):
        prompt_of(task, length=64)


def test_the_corpus_is_the_same_each_time() -> None:
    corpus = stdlib_corpus(("argparse", "json"))
    assert corpus == stdlib_corpus(("argparse", "json"))
    assert len(corpus.text) > 5_000 and len(corpus.digest) == 64
