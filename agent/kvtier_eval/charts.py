"""Plots as SVG inside the page: no script, no font and no address outside it.

Why it exists: a report is one file that opens anywhere. It must not know plans or results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_INK, _PALE, _MARK, _BASE = "#222", "#ccc", "#1f6feb", "#8a8a8a"
_ROW, _LEFT, _WIDE = 20, 190, 420


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its interval, all in [0, 1]. baseline: drawn in grey."""

    label: str
    value: float
    low: float
    high: float
    baseline: bool


@dataclass(frozen=True, slots=True)
class Point:
    """x and y must be positive to be drawn; both axes are logarithmic."""

    label: str
    x: float
    y: float
    baseline: bool


def intervals(bars: Sequence[Bar], title: str) -> str:
    """Rates with their intervals, one a line."""
    height = _ROW * len(bars) + 40
    parts = [_open(_LEFT + _WIDE + 60, height, title)]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + tick * _WIDE
        parts.append(_line(x, 8, x, height - 24, _PALE))
        parts.append(_text(x, height - 8, f"{tick:.0%}", "middle"))
    for at, bar in enumerate(bars):
        y = 18 + at * _ROW
        colour = _BASE if bar.baseline else _MARK
        parts.append(_text(_LEFT - 8, y + 4, bar.label, "end"))
        parts.append(_line(_LEFT + bar.low * _WIDE, y, _LEFT + bar.high * _WIDE, y, colour, 2))
        if not math.isnan(bar.value):
            parts.append(f'<circle cx="{_LEFT + bar.value * _WIDE:.1f}" cy="{y}" r="4" fill="{colour}"/>')
    return "".join([*parts, "</svg>"])


def scatter(points: Sequence[Point], title: str, x_name: str, y_name: str) -> str:
    """Both axes logarithmic; empty when there is nothing that can be drawn."""
    drawn = [one for one in points if one.x > 0 and one.y > 0]
    if not drawn:
        return ""
    wide, high, pad = 560, 300, 54
    left, right = _decades([one.x for one in drawn])
    low, top = _decades([one.y for one in drawn])
    parts = [_open(wide + pad + 110, high + pad, title)]
    for decade in range(left, right + 1):
        x = pad + (decade - left) / (right - left) * wide
        parts += [_line(x, 0, x, high, _PALE), _text(x, high + 16, f"1e{decade}", "middle")]
    for decade in range(low, top + 1):
        y = high - (decade - low) / (top - low) * high
        parts += [_line(pad, y, pad + wide, y, _PALE), _text(pad - 6, y + 4, f"1e{decade}", "end")]
    for one in drawn:
        x = pad + (math.log10(one.x) - left) / (right - left) * wide
        y = high - (math.log10(one.y) - low) / (top - low) * high
        colour = _BASE if one.baseline else _MARK
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 7, y + 4, one.label, "start"))
    parts.append(_text(pad + wide / 2, high + 36, x_name, "middle"))
    parts.append(_text(pad + 6, 12, y_name, "start"))
    return "".join([*parts, "</svg>"])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _open(width: float, height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'
