"""The row of a bench report, and how a report is written. It must not know what is measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One number with what it is held against.

    id: stable, lower case, dotted ("paged_decode.torch.tokens_per_s"). unit: of value, goal, floor and
    peer_value alike. goal: what we want; floor: what must hold at least (both None: only recorded). peer: the
    other implementation measured in the same run. lower_is_better turns both comparisons round.
    """

    id: str
    value: float
    unit: str
    goal: float | None = None
    floor: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        if not self.id or not self.unit:
            raise ValueError(f"a row needs an id and a unit: {self!r}")
        for number in (self.value, self.goal, self.floor, self.peer_value):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.id}: {number} is not a finite number")
        if (self.peer is None) != (self.peer_value is None):
            raise ValueError(f"{self.id}: peer and its value come together")

    @property
    def met(self) -> bool | None:
        """Whether the goal (without one: the floor) is reached; None when there is neither."""
        mark = self.goal if self.goal is not None else self.floor
        return None if mark is None else self._reaches(mark)

    @property
    def broken(self) -> bool:
        """Worse than the floor."""
        return self.floor is not None and not self._reaches(self.floor)

    def _reaches(self, mark: float) -> bool:
        return self.value <= mark if self.lower_is_better else self.value >= mark

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "floor": self.floor,
            "peer": self.peer,
            "peerValue": self.peer_value,
            "met": self.met,
        }


def write_report(path: Path, rows: Iterable[Row]) -> None:
    """Replaces the file in one step: a reader never sees half of it. Raises ValueError on a repeated id."""
    listed = list(rows)
    ids = [row.id for row in listed]
    if repeated := {one for one in ids if ids.count(one) > 1}:
        raise ValueError(f"ids that are there twice: {', '.join(sorted(repeated))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps([row.to_json() for row in listed], indent=1) + "\n", encoding="utf-8")
    staging.replace(path)


def table(rows: Iterable[Row]) -> str:
    """For a person: one line per row."""
    lines = []
    for row in rows:
        marks = [f"goal {row.goal:g}" if row.goal is not None else ""]
        marks.append(f"floor {row.floor:g}" if row.floor is not None else "")
        marks.append(f"{row.peer} {row.peer_value:g}" if row.peer is not None else "")
        verdict = "BELOW FLOOR" if row.broken else {True: "met", False: "not met", None: ""}[row.met]
        facts = ", ".join(mark for mark in marks if mark)
        lines.append(f"{row.id:44s} {row.value:12.6g} {row.unit:10s} {facts:40s} {verdict}".rstrip())
    return "\n".join(lines)


HEAD = ("| id | value | unit | goal | peer | | |", "|---|--:|---|--:|---|--:|---|")


def with_table(page: str, new: str) -> str:
    """The page with `new` in place of the table that it has. ValueError unless there is exactly one."""
    lines = page.splitlines()
    starts = [at for at, line in enumerate(lines) if line == HEAD[0]]
    if len(starts) != 1:
        raise ValueError(f"the page has {len(starts)} tables of rows, not one")
    end = starts[0]
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[: starts[0]], *new.splitlines(), *lines[end:]]) + "\n"


def markdown(rows: Iterable[Row]) -> str:
    """For a page of the documentation: one table, a line per row."""
    lines = list(HEAD)
    for row in rows:
        verdict = {True: "met", False: "**missed**", None: ""}[row.met]
        goal = "" if row.goal is None else f"{'<=' if row.lower_is_better else '>='} {row.goal:.4g}"
        peer = "" if row.peer_value is None else f"{row.peer_value:.4g}"
        lines.append(
            f"| {row.id} | {row.value:.4g} | {row.unit} | {goal} | {row.peer or ''} | {peer} | {verdict} |"
        )
    return "\n".join(lines)
