"""Helpers of a crew: states of chunks by whoever comes, the same bits; who comes late harms nobody."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier_kernels.compiled import crew as crews
from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.crew import Crew, Listed
from kvtier_kernels.compiled.layout import CrewWord
from kvtier_kernels.ops.chunk_attention.decode import no_rows
from kvtier_kernels.ops.chunk_attention.jobs import Integers, one_each
from kvtier_kernels.ops.chunk_attention.runs import chunk_runs

HEADS, GROUP, D, ROWS = 3, 3, 64, 64
SCALE = 0.0813


class Made:
    """Chunks, and the totals of a query over the first n of them by the caller alone."""

    def __init__(self, chunks: int, d: int = D, group: int = GROUP) -> None:
        g = torch.Generator().manual_seed(chunks)
        keys, values = ([torch.randn(HEADS, ROWS, d, generator=g) for _ in range(chunks)] for _ in range(2))
        self.kept = chunk_runs(keys, values)
        self.q = torch.randn(HEADS * group, d, generator=g)
        work = one_each(np.concatenate([run.jobs for run in self.kept]), np.arange(chunks))
        self.jobs: Integers = work.jobs
        self.seen: Integers = work.seen

    def alone(self, n: int) -> tuple[Tensor, ...]:
        compiled = library()
        assert compiled is not None
        totals, only = no_rows(1, *self.q.shape), np.zeros(n, np.int64)
        q = (self.q * SCALE).view(1, HEADS, -1, self.q.shape[1])
        compiled.attend(q, self.jobs[:n], only, only, self.seen[:n], totals)
        return tuple(x[0] for x in totals)

    def by(self, crew: Crew, n: int) -> tuple[Tensor, ...] | None:
        totals = tuple(torch.full_like(x[0], torch.nan) for x in no_rows(1, *self.q.shape))
        listed = Listed(n, ROWS, self.jobs.ctypes.data, self.seen.ctypes.data)
        done = crew.attend(self.q, SCALE, HEADS, listed, totals)
        return totals if done else None


def same(got: tuple[Tensor, ...] | None, want: tuple[Tensor, ...]) -> bool:
    return got is not None and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("helpers", [1, 3])
@pytest.mark.parametrize("patience", [0, 10_000], ids=["gives-up-at-once", "waits"])
def test_calls_one_after_the_other_have_the_bits_of_the_caller_alone(helpers: int, patience: int) -> None:
    """Of many calls: a helper comes late to some, when they have ended and when the next one has begun."""
    few, many, other = Made(3), Made(40), Made(7, d=128, group=5)
    wants = [(made, n, made.alone(n)) for made in (few, many, other) for n in (1, 2, len(made.jobs))]
    with Crew(helpers) as crew:
        crew._crew[CrewWord.PATIENCE] = patience
        for _ in range(60):
            for made, n, want in wants:
                assert same(made.by(crew, n), want), n


def test_helpers_do_take_chunks() -> None:
    """A caller that takes no chunk itself is answered by its helper."""
    made, crew = Made(5), Crew(1)
    with crew:
        made.by(crew, 5)
        states = crew._kept[2]
        states[:] = np.nan
        words = crew._crew
        words[CrewWord.NEXT], words[CrewWord.OPEN] = 0, 1
        ended = threading.Event()
        crews._post(crew._semaphore)
        for _ in range(6_000):
            if words[CrewWord.NEXT] > 5 and not words[CrewWord.INSIDE]:
                break
            ended.wait(0.01)
        words[CrewWord.OPEN] = 0
        assert np.isfinite(states[: 5 * HEADS * GROUP]).all()


def test_two_callers_at_once_are_served_one_each_way() -> None:
    made = Made(20)
    want = made.alone(20)
    refused, wrong = [], []

    def call() -> None:
        for _ in range(100):
            got = made.by(crew, 20)
            (refused if got is None else [] if same(got, want) else wrong).append(got)

    with Crew(2) as crew:
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()
    assert not wrong


def test_a_closed_crew_has_no_threads_and_does_nothing() -> None:
    made, before = Made(4), threading.active_count()
    crew = Crew(2)
    assert threading.active_count() == before + 2
    assert same(made.by(crew, 4), made.alone(4))
    crew.close()
    crew.close()
    assert threading.active_count() == before
    assert made.by(crew, 4) is None


def test_a_crew_that_nobody_has_any_more_ends() -> None:
    before, crew = threading.active_count(), Crew(1)
    gone = weakref.ref(crew)
    del crew
    gc.collect()
    assert gone() is None and threading.active_count() == before


def test_without_compiled_kernels_there_are_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, before = Made(4), threading.active_count()
    monkeypatch.setattr(crews, "library", lambda: None)
    with Crew(3) as crew:
        assert threading.active_count() == before
        assert made.by(crew, 4) is None


@pytest.mark.parametrize("helpers", [0, -1])
def test_a_crew_is_of_somebody(helpers: int) -> None:
    with pytest.raises(ValueError, match="helpers"):
        Crew(helpers)
