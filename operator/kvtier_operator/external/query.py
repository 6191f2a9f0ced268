"""A gate's `query`: which source, in which form, and the selectors or expressions in it.

The form decides what may follow from the metric, so it is written and never guessed: `counters(bad; total)`,
`buckets(selector)`, `exponential(selector)`, `point(expression; count)`; anything else is one expression, and
its value a point. It must not know how a source is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvtier_evidence.external import Form

_CALL = re.compile(r"(counters|buckets|exponential|point)\((.*)\)", re.DOTALL)
_BEGUN = re.compile(r"(counters|buckets|exponential|point)\s*\(")
_SOURCE = re.compile(r"(prometheus|otlp):\s*(.*)", re.DOTALL)
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:.]*)?\s*(\{(.*)\})?", re.DOTALL)
_MATCHER = re.compile(r"\s*([a-zA-Z_][\w.]*)\s*=\s*\"((?:[^\"\\]|\\.)*)\"\s*(,|$)")
_FORMS = {
    "counters": Form.COUNTER_PAIR,
    "buckets": Form.CLASSIC_HISTOGRAM,
    "exponential": Form.EXPONENTIAL_HISTOGRAM,
    "point": Form.EXPRESSION,
}
_PARTS = {"counters": 2, "buckets": 1, "exponential": 1, "point": 2}


class QueryError(ValueError):
    """A query that cannot be asked; the message names the legal forms."""


class Source(StrEnum):
    PROMETHEUS = "prometheus"
    OTLP = "otlp"


@dataclass(frozen=True)
class Query:
    """parts: selectors of counting forms; of a point its expression and, where declared, its count."""

    source: Source
    form: Form
    parts: tuple[str, ...]


def parse_query(text: str) -> Query:
    """Raises QueryError. A source may stand before it, with a colon: `otlp: counters(a; b)`."""
    source, rest = Source.PROMETHEUS, text.strip()
    if (named := _SOURCE.fullmatch(rest)) is not None:
        source, rest = Source(named[1]), named[2].strip()
    if not rest:
        raise QueryError("the query is empty")
    call = _CALL.fullmatch(rest)
    if call is None or not _balanced(call[2]):
        if (begun := _BEGUN.match(rest)) is not None:
            raise QueryError(f"{begun[1]}( has no end, or something stands behind it")
        if source is Source.OTLP:
            return Query(source, Form.GAUGE, (_selector(source, rest),))
        return Query(source, Form.EXPRESSION, (rest,))
    parts = tuple(part.strip() for part in _split(call[2]))
    if len(parts) != _PARTS[call[1]] or not all(parts):
        raise QueryError(
            f"{call[1]}() takes {_PARTS[call[1]]} part(s) with ';' between them: counters(bad; total), "
            "buckets(selector), exponential(selector), point(expression; count)"
        )
    form = _FORMS[call[1]]
    if form.counts or source is Source.OTLP:
        parts = tuple(_selector(source, part) for part in parts)
    return Query(source, form, parts)


def matchers(selector: str) -> tuple[str, dict[str, str]]:
    """Name and equal labels of a selector with equality matchers only. Raises QueryError."""
    found = _SELECTOR.fullmatch(selector.strip())
    if found is None or not (found[1] or found[3]):
        raise QueryError(f"not a selector of series: {selector}")
    labels, at, body = {}, 0, (found[3] or "").strip()
    while at < len(body):
        one = _MATCHER.match(body, at)
        if one is None:
            raise QueryError(f'only label="value" is understood here: {selector}')
        labels[one[1]] = re.sub(r"\\(.)", r"\1", one[2])
        at = one.end()
    return found[1] or "", labels


def _selector(source: Source, text: str) -> str:
    """Counts are read from raw series: no function, no range, no offset."""
    if _SELECTOR.fullmatch(text) is None or text.count("{") > 1:
        raise QueryError(f"counts are read from raw series, so only a selector stands here, not: {text}")
    if source is Source.OTLP:
        matchers(text)
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for one in _outside_quotes(text):
        depth += (one in "({[") - (one in ")}]")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, one in enumerate(_outside_quotes(text)):
        depth += (one in "({[") - (one in ")}]")
        if one == ";" and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _outside_quotes(text: str) -> str:
    """The same length, with everything in quotes blank."""
    return re.sub(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", lambda m: " " * len(m[0]), text)
