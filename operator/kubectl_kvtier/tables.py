"""Columns as kubectl prints them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines; nothing but the head when there are no rows."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def size(value: int | None) -> str:
    """Bytes with a binary unit: "1.5GiB"; "-" when unknown."""
    if value is None:
        return "-"
    amount, unit = float(value), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.0f}{_UNITS[unit]}" if amount >= 100 or unit == 0 else f"{amount:.1f}{_UNITS[unit]}"


def rate(value: int | None) -> str:
    return "-" if value is None else f"{size(value)}/s"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"
