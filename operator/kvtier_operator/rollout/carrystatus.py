"""The evidence an attempt carries, as a bounded part of the status. Numbers travel as strings, never floats.

It must not know what the evidence says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtier_evidence.carry import Carry

MAX_CELLS = 48
_FORM = ".9g"
_NUMBERS = ("weight", "logE", "value", "bound")


def carry_to_json(carry: Carry) -> dict[str, Any]:
    """Empty when nothing is carried."""
    raw = bounded(carry, MAX_CELLS).to_dict()
    passes = [{"gate": name, **row} for name, row in sorted(raw["probePasses"].items())]
    body = {
        "cells": [_printed(cell) for cell in raw["cells"]],
        "failed": raw["failed"],
        "mismatched": raw["mismatched"],
        "probePasses": [_printed(row) for row in passes],
    }
    return {name: value for name, value in body.items() if value}


def carry_from_json(body: Mapping[str, Any] | None) -> Carry:
    if not body:
        return Carry()
    passes = {
        row["gate"]: {
            "candidateDigest": row["candidateDigest"],
            "probeSetDigest": row.get("probeSetDigest", ""),
            "limit": row["limit"],
            "value": _number(row.get("value")),
            "bound": _number(row.get("bound")),
            "n": row.get("n", 0),
        }
        for row in body.get("probePasses") or []
    }
    return Carry.from_dict(
        {
            "cells": body.get("cells") or [],
            "failed": body.get("failed"),
            "mismatched": body.get("mismatched") or [],
            "probePasses": passes,
        }
    )


def as_printed(carry: Carry, known: Carry) -> Carry:
    """With the evidence of each cell as a status has it, the same before and after it is written;
    `known` itself where that says the same, and its cells where they do."""
    cells = {(cell.gate, cell.window): cell for cell in known.cells}
    printed = []
    for cell in carry.cells:
        new = replace(cell, weight=_rounded(cell.weight), log_e=_rounded(cell.log_e))
        old = cells.get((cell.gate, cell.window))
        printed.append(old if old is not None and old == new else new)
    found = replace(carry, cells=tuple(printed))
    return known if found == known else found


def _rounded(value: float) -> float:
    return float(f"{value:{_FORM}}") if math.isfinite(value) else value


def bounded(carry: Carry, limit: int) -> Carry:
    """The cells with the most evidence of harm; what is left out was worth least."""
    if len(carry.cells) <= limit:
        return carry
    kept = sorted(carry.cells, key=lambda cell: -cell.weighted)[:limit]
    return replace(carry, cells=tuple(kept))


def slim_carry(carry: Carry, cells: int, passes: int, opened: str) -> Carry:
    """At most so many cells and probe results; of the mismatched windows, those whose label ends so."""
    kept = sorted(carry.probe_passes)[:passes]
    return replace(
        bounded(carry, cells),
        probe_passes={name: carry.probe_passes[name] for name in kept},
        mismatched=frozenset(label for label in carry.mismatched if label.endswith(opened)),
    )


def _printed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: f"{value:{_FORM}}" if name in _NUMBERS and isinstance(value, float) else value
        for name, value in row.items()
        if value is not None
    }


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)
