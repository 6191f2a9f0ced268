"""The open evidence window as `status.window` has it, and back. It must not decide anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from kvtier_operator.rollout.state import DesignEffect, Window


def window_to_json(window: Window) -> dict[str, Any]:
    """Without what the status says of it elsewhere."""
    parts: dict[str, Any] = {
        "pairThresholds": [{"gate": gate, "value": value} for gate, value in window.pair_thresholds],
        "designEffects": [
            {"gate": one.gate, "k": one.k, "blocks": one.blocks, "meanBlock": one.mean_block}
            for one in window.effects
        ],
        "probeSets": [
            {"configMap": name, **({"digest": digest} if digest else {}), "size": size}
            for name, digest, size in window.probes
        ],
    }
    return {"openingFence": window.opening_fence, **{name: rows for name, rows in parts.items() if rows}}


def window_from_json(
    row: Mapping[str, Any] | None, *, opened_at: float, spec_hash: str, resumes: int
) -> Window | None:
    if not row:
        return None
    return Window(
        opening_fence=int(row["openingFence"]),
        opened_at=opened_at,
        spec_hash=spec_hash,
        resumes=resumes,
        pair_thresholds=tuple(
            (str(one["gate"]), str(one["value"])) for one in row.get("pairThresholds") or []
        ),
        effects=tuple(
            DesignEffect(str(one["gate"]), str(one["k"]), int(one["blocks"]), str(one["meanBlock"]))
            for one in row.get("designEffects") or []
        ),
        probes=tuple(
            (
                sys.intern(str(one["configMap"])),
                sys.intern(str(one.get("digest") or "")),
                int(one.get("size") or 0),
            )
            for one in row.get("probeSets") or []
        ),
    )
