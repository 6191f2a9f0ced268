"""The evidence an attempt carries, as a bounded part of the status. Numbers travel as strings, never floats.

It must not know what the evidence says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtier_evidence.carry import Carry

MAX_CELLS = 48
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
        name: f"{value:.9g}" if name in _NUMBERS and isinstance(value, float) else value
        for name, value in row.items()
        if value is not None
    }


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)
