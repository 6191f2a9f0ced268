"""Surprisals of a session's rows, which an engine knows only after the pass that made the rows.

Why it exists: -ln P(token) of a prompt's tokens comes out of the model behind its last layer, when the rows
of every layer are here already. Rows wait in this place until theirs are known, and then go to their index as
if both had come together. They are as many bytes as the context itself, so they are taken from the memory of
indexes: an engine that keeps surprisals back costs its own session's index and nobody's memory. It must not
know how an index uses them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import Evidence, Surprisal
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.lifecycle.memory import row_bytes

Append = Callable[[int, Tensor, Tensor, Evidence], None]


class Room(Protocol):
    """Memory of indexes and of rows that wait."""

    def take(self, count: int) -> bool:
        """Whether so many bytes fit; they are taken then."""

    def give_back(self, count: int) -> None:
        """What was taken."""


class LateEvidence:
    """One session's. known: rows whose surprisal is here. Not for several threads at once."""

    def __init__(self, layers: int, room: Room) -> None:
        self._log = Growing((), np.float64)
        self._room = room
        self._waiting: list[deque[tuple[int, Tensor, Tensor, Evidence]]] = [deque() for _ in range(layers)]
        self._given_up = False

    @property
    def known(self) -> int:
        return len(self._log)

    def take(self, given: Surprisal, rows: int) -> None:
        """Of rows [0, rows) at most. What is known already must come with the same bits, as it does when a
        frame is sent again. EVENT_BOUNDARY: a gap, rows that do not exist, numbers that are no -ln P, or
        others than before; nothing is taken then."""
        first, values, known = given.first, given.values, self.known
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
            raise CoreError(Reason.EVENT_BOUNDARY, "a surprisal is not a finite number of 0 or more")
        if not 0 <= first <= known:
            raise CoreError(
                Reason.EVENT_BOUNDARY,
                f"surprisals from row {first} on, those of rows [0, {known}) are known",
                {"known": known, "first": first},
            )
        if first + len(values) > rows:
            raise CoreError(
                Reason.EVENT_BOUNDARY,
                f"surprisals to row {first + len(values)}, there are {rows} rows",
                {"rows": rows},
            )
        repeated = min(known - first, len(values))
        if not np.array_equal(self._log.entries[first : first + repeated], values[:repeated]):
            raise CoreError(Reason.EVENT_BOUNDARY, f"other surprisals than before from row {first} on")
        self._log = self._log.plus(values[repeated:])

    def hold(self, layer: int, first: int, k: Tensor, v: Tensor, evidence: Evidence) -> bool:
        """Keeps copies of rows k, v [n, Hk, d] at [first, first + n) of a layer, behind those that wait.
        False, once, where there is no room for them: no row waits then, nor will until `cut`."""
        if self._given_up:
            return True
        if not self._room.take(row_bytes(k, v, evidence)):
            self.close()
            return False
        self._waiting[layer].append((first, k.clone(), v.clone(), evidence.kept()))
        return True

    def deliver(self, layer: int, append: Append) -> None:
        """Hands over those rows of the layer whose surprisals are all known, in order."""
        waiting = self._waiting[layer]
        while waiting:
            first, k, v, evidence = waiting[0]
            last = first + int(k.shape[0])
            if last > self.known:
                return
            waiting.popleft()
            # Before whoever takes them counts them, too.
            self._room.give_back(row_bytes(k, v, evidence))
            append(first, k, v, replace(evidence, surprisal=self._log.entries[first:last].copy()))

    def cut(self, rows: int, *, goes_on: bool = False) -> None:
        """Rows [rows, ...) are gone. goes_on: with the indexes for which the others wait; or they go, too."""
        self._log = self._log.first(min(rows, self.known))
        if not goes_on:
            self.close()
            self._given_up = False
            return
        for waiting in self._waiting:
            while waiting and waiting[-1][0] + int(waiting[-1][1].shape[0]) > rows:
                first, k, v, evidence = waiting.pop()
                held = row_bytes(k, v, evidence)
                inside = max(0, rows - first)
                if inside:
                    part = k[:inside].clone(), v[:inside].clone(), evidence.first(inside).kept()
                    held -= row_bytes(*part)
                    waiting.append((first, *part))
                self._room.give_back(held)

    def close(self) -> None:
        """No row waits any more."""
        self._given_up = True
        for waiting in self._waiting:
            for _, k, v, evidence in waiting:
                self._room.give_back(row_bytes(k, v, evidence))
            waiting.clear()

    def fork(self) -> tuple[LateEvidence, bool]:
        """For a session of the same rows; and whether there was room for those that wait: as in `hold`, none
        does otherwise."""
        other = LateEvidence(len(self._waiting), self._room)
        other._log, other._given_up = self._log, self._given_up
        for waiting, mine in zip(other._waiting, self._waiting, strict=True):
            for one in mine:
                if not self._room.take(row_bytes(*one[1:])):
                    other.close()
                    return other, False
                waiting.append(one)
        return other, True
