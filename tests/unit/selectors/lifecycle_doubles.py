"""A family whose index is the list of its rows, and a runner that runs when it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    Edit,
    EditCost,
    Evidence,
    FamilyFacts,
    Guarantee,
    Index,
    IndexFacts,
    Need,
    Query,
    Scope,
    Selection,
    Shape,
    Source,
    Unit,
)
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.lifecycle.life import Block, LayerLife
from kvtier_core.selectors.lifecycle.works import IndexWorks, Point

SHAPE = Shape(2, 1, 2, 1.0)
BLOCK = 4


class Crash(BaseException):
    """The end of a thread, which no handler of errors takes for one of its own."""


@dataclass(frozen=True, slots=True)
class RowList:
    facts: IndexFacts
    rows: Growing
    built_over: int


class RowFamily:
    """Its rows are the numbers that their keys hold. omits_from: rows from which a query leaves some out."""

    def __init__(
        self,
        *,
        incremental: bool,
        appendable: bool = True,
        omits_from: int = 6,
        refuses: Reason | None = None,
    ) -> None:
        self.facts = FamilyFacts(
            family="rows",
            unit=Unit.ROW,
            scope=Scope.LAYER,
            needs=frozenset([Need.QUERY]),
            guarantee=Guarantee.HEURISTIC,
            appendable=appendable,
            edit=EditCost.REBUILD,
            incremental=incremental,
        )
        self.digest = f"rows-{incremental}-{appendable}"
        self.shape = SHAPE
        self.dense_layers: frozenset[int] = frozenset()
        self._omits_from = omits_from
        self._refuses = refuses

    def omits(self, rows: int) -> bool:
        return rows >= self._omits_from

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> RowList:
        if self._refuses is not None:
            raise CoreError(self._refuses, "this family builds nothing")
        facts = IndexFacts(self.digest, source, epoch=1, covered=len(k))
        return RowList(facts, Growing.of(numbers(k)), len(k))

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> RowList:
        assert isinstance(index, RowList)
        facts = replace(index.facts, epoch=index.facts.epoch + 1, covered=index.facts.covered + len(k))
        return RowList(facts, index.rows.plus(numbers(k)), index.built_over)

    def edit(self, index: Index, edit: Edit) -> RowList:
        assert isinstance(index, RowList) and edit.truncated and edit.first < index.facts.covered
        facts = replace(index.facts, epoch=index.facts.epoch + 1, covered=edit.first)
        return RowList(facts, index.rows.first(edit.first), index.built_over)

    def select(self, index: Index, query: Query) -> Selection:
        raise AssertionError("nobody selects here")


def numbers(k: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return k[:, 0, 0].numpy()


def block_of(first: int, count: int) -> Block:
    """Rows whose keys hold their own number."""
    k = torch.arange(first, first + count, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 2).clone()
    return Block(first, k, k.clone(), Evidence())


def life_of(family: RowFamily, layer: int = 0, source: bytes = b"s" * 32) -> LayerLife:
    return LayerLife(family, Source(source, layer), BLOCK)


class Told:
    """A Runner that only counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self, works: IndexWorks) -> None:
        self.woken += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Faults:
    """Raises once at a point of a job, when armed."""

    def __init__(self) -> None:
        self.at: Point | None = None
        self.error: Callable[[], BaseException] = lambda: RuntimeError("a fault")

    def arm(self, at: Point, error: Callable[[], BaseException]) -> None:
        self.at, self.error = at, error

    def __call__(self, point: Point) -> None:
        if point is self.at:
            self.at = None
            raise self.error()


def drain(works: IndexWorks) -> int:
    """Runs jobs until nothing is due; how many calls did something."""
    count = 0
    while works.run_next(unpaced=True) is not None:
        count += 1
        assert count < 10_000
    return count
