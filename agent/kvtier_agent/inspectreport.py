"""One report, once for people and once for programs.

Why it exists: both forms of an answer come from the same facts. It must not know what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """wrong: whether something needs attention. facts: JSON values. text: ends with a newline."""

    wrong: bool
    facts: dict[str, Any]
    text: str


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of aligned columns; numbers to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    right = [all(isinstance(row[at], int) for row in rows) for at in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def size(count: int) -> str:
    """Bytes as people read them: binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
