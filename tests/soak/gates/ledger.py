"""What has been simulated so far: one line per chunk of rollouts in a file that a later run goes on with.

A chunk is named by scenario and number and has a seed of its own, so its results do not depend on what ran
before it, in which process, or in which order. A line that was cut off is not counted.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.soak.gates import contrast
from tests.soak.gates.walk import End, Rollout, Scenario

CHUNK = 50
CONTRAST = "contrast: "


@dataclass
class Row:
    """Sums over a scenario's rollouts."""

    ends: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    units: dict[str, list[int]] = field(default_factory=dict)
    """By end: candidate units of the last step until then."""
    from_harm: list[int] = field(default_factory=list)
    """Of those rolled back: candidate units from the first harmful step on."""
    rollbacks_in: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    chunks: set[int] = field(default_factory=set)
    tallies: dict[str, contrast.Tally] = field(default_factory=dict)

    @property
    def rollouts(self) -> int:
        return self.ends.total()

    def take(self, line: dict[str, Any]) -> None:
        self.chunks.add(int(line["chunk"]))
        self.seconds += float(line["seconds"])
        self.ends.update(line.get("ends", {}))
        self.causes.update(line.get("causes", {}))
        for end, units in line.get("units", {}).items():
            self.units.setdefault(end, []).extend(units)
        self.from_harm.extend(line.get("fromHarm", []))
        for name, tally in line.get("tallies", {}).items():
            mine = self.tallies.setdefault(name, contrast.Tally())
            for what, count in tally.items():
                setattr(mine, what, getattr(mine, what) + count)


def seed_of(root: int, name: str, chunk: int) -> np.random.Generator:
    return np.random.default_rng([root, zlib.crc32(name.encode()), chunk])


def simulate_chunk(scenario: Scenario, root: int, chunk: int, rollouts: int = CHUNK) -> dict[str, Any]:
    """One line of the file but its seconds."""
    rng = seed_of(root, scenario.name, chunk)
    results = [Rollout(scenario, rng).run() for _ in range(rollouts)]
    units: dict[str, list[int]] = {}
    for one in results:
        units.setdefault(one.end, []).append(one.in_step)
    return {
        "scenario": scenario.name,
        "chunk": chunk,
        "ends": dict(Counter(str(one.end) for one in results)),
        "causes": dict(Counter(one.gate for one in results if one.gate)),
        "units": units,
        "fromHarm": [one.units for one in results if one.end is End.ROLLED_BACK],
    }


def contrast_chunk(share: float, root: int, chunk: int, rollouts: int = CHUNK) -> dict[str, Any]:
    name = contrast_name(share)
    tallies = contrast.run(seed_of(root, name, chunk), share, rollouts)
    return {"scenario": name, "chunk": chunk, "tallies": {rule: asdict(t) for rule, t in tallies.items()}}


def contrast_name(share: float) -> str:
    return f"{CONTRAST}{share:.2%} above"


def read(path: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else ()
    for text in lines:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        row = rows.setdefault(line["scenario"], Row())
        if line["chunk"] not in row.chunks:
            row.take(line)
    return rows


def append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(line, separators=(",", ":")) + "\n")
