"""The gate between what a kernel used when it was recorded and what it uses now. Pure.

Rules: no spills; shared memory that a block of sm_90 has; registers and shared memory at most 10 % above the
baseline; every instruction the variant promises is there; baseline and registry list the same variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HEADROOM = 1.10
LIMITED = ("registers", "smem")
# What one block may have on sm_90; a kernel above it compiles and does not launch.
MOST_SMEM = 227 << 10
FIELDS = ("registers", "spill_stores", "spill_loads", "smem", "cp_async", "mma", "wgmma")


@dataclass(frozen=True)
class Finding:
    """One line of the diff; `fails` says whether the gate refuses it."""

    variant: str
    field: str
    before: int | None
    now: int | None
    fails: bool
    why: str

    def __str__(self) -> str:
        mark = "FAIL" if self.fails else "    "
        return (
            f"{mark} {self.variant:44} {self.field:13} {_n(self.before):>8} -> {_n(self.now):>8}  {self.why}"
        )


def judge(
    op: str,
    baseline: Mapping[str, Mapping[str, int]],
    measured: Mapping[str, Mapping[str, int]],
    absent: Mapping[str, list[str]],
) -> list[Finding]:
    """All differences of one op, failing ones marked. `absent`: promised instructions that are not there."""
    out: list[Finding] = []
    for id in sorted(baseline.keys() | measured.keys()):
        old, new, variant = baseline.get(id), measured.get(id), f"{op}/{id}"
        if new is None:
            out.append(Finding(variant, "variant", 1, None, True, "in the baseline, not in the registry"))
            continue
        for name in absent.get(id, []):
            out.append(Finding(variant, name, None, 0, True, "promised instruction is gone"))
        if new["smem"] > MOST_SMEM:
            out.append(Finding(variant, "smem", None, new["smem"], True, f"a block has {MOST_SMEM} bytes"))
        for field in ("spill_stores", "spill_loads"):
            if new[field]:
                out.append(Finding(variant, field, old[field] if old else None, new[field], True, "spills"))
        if old is None:
            out.append(Finding(variant, "variant", None, 1, True, "not recorded; run --record"))
            continue
        for field in FIELDS:
            before, now = old[field], new[field]
            if before == now or field.startswith("spill"):
                continue
            over = field in LIMITED and now > before * HEADROOM
            change = f"{(now / before - 1) * 100:+.1f} %" if before else "new"
            out.append(Finding(variant, field, before, now, over, change + (", limit +10 %" if over else "")))
    return out


def _n(x: int | None) -> str:
    return "-" if x is None else str(x)
