"""What one attempt carries from look to look and from window to window.

Evidence of harm is carried, evidence of harmlessness is not, but for a probe set's result, which is tied to
digests and not to traffic. Small enough for a status: one cell per gate and step. Knows no storage.

Sections 5 and 9 ("Carry-over") of the evidence specification.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier_evidence.budgets import LOG_E_CAP, Cell
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.verdicts import Reason
from kvtier_evidence.window import WindowKey


@dataclass(frozen=True, slots=True)
class FailCause:
    """The Fail of an attempt: which gate, seen in which window. Sticky."""

    gate: str
    window: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class ProbePass:
    """A probe gate's Pass, tied to what was measured: candidate, probe set and limit."""

    candidate_digest: str
    probe_set_digest: str
    limit: str
    value: float | None
    bound: float | None
    n: int

    @staticmethod
    def of(gate: GateSpec, key: WindowKey, value: float | None, bound: float | None, n: int) -> ProbePass:
        return ProbePass(
            key.candidate_digest, gate.probe_set_digest, f"{gate.limit.normalize():f}", value, bound, n
        )

    def fits(self, gate: GateSpec, key: WindowKey) -> bool:
        """Whether it says anything of this gate: a wider limit is passed too, a narrower one is not."""
        return (
            self.candidate_digest == key.candidate_digest
            and self.probe_set_digest == gate.probe_set_digest
            and gate.limit >= type(gate.limit)(self.limit)
        )


@dataclass(frozen=True, slots=True)
class Carry:
    """State of one attempt's evidence; a new attempt begins with an empty one."""

    cells: tuple[Cell, ...] = ()
    """Evidence of harm of every cell begun; those of closed windows stay at their last value."""
    failed: FailCause | None = None
    mismatched: frozenset[str] = frozenset()
    """Windows whose split did not fit."""
    probe_passes: Mapping[str, ProbePass] = field(default_factory=dict)

    def with_cells(self, cells: Sequence[Cell], window: str) -> Carry:
        """The open window's cells replaced; those of other windows frozen."""
        frozen = [c for c in self.cells if c.window != window]
        return replace(self, cells=(*frozen, *cells))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for a status or an annotation."""
        return {
            "cells": [
                {"gate": c.gate, "window": c.window, "weight": c.weight, "logE": _finite(c.log_e)}
                for c in self.cells
            ],
            "failed": self.failed
            and {"gate": self.failed.gate, "window": self.failed.window, "reason": self.failed.reason.value},
            "mismatched": sorted(self.mismatched),
            "probePasses": {
                name: {
                    "candidateDigest": p.candidate_digest,
                    "probeSetDigest": p.probe_set_digest,
                    "limit": p.limit,
                    "value": p.value,
                    "bound": p.bound,
                    "n": p.n,
                }
                for name, p in self.probe_passes.items()
            },
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Carry:
        """Inverse of `to_dict`. Raises KeyError or ValueError on anything else."""
        failed = data.get("failed")
        return Carry(
            cells=tuple(
                # An attempt has dozens of them with the same few names.
                Cell(_name(c["gate"]), _name(c["window"]), float(c["weight"]), float(c["logE"]))
                for c in data["cells"]
            ),
            failed=failed and FailCause(failed["gate"], failed["window"], Reason(failed["reason"])),
            mismatched=frozenset(data["mismatched"]),
            probe_passes={
                name: ProbePass(
                    p["candidateDigest"], p["probeSetDigest"], p["limit"], p["value"], p["bound"], int(p["n"])
                )
                for name, p in data["probePasses"].items()
            },
        )


def _name(text: Any) -> str:
    return sys.intern(str(text))


def _finite(log_e: float) -> float:
    """JSON has no infinities; beyond the cap nothing changes a sum."""
    return log_e if math.isfinite(log_e) else math.copysign(LOG_E_CAP, log_e)
