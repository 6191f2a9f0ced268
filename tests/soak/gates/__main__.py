"""Simulates rollouts through the production judge: `--rollouts N` per scenario, `--seconds S` at most.

Goes on where the file of results ends; `--fresh` begins again. Scenarios take turns by the time they have
taken, so cheap ones come far before costly ones are through. Prints the table and the claims; exit status 1
when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

from tests.soak.gates import contrast
from tests.soak.gates.claims import claims, news
from tests.soak.gates.ledger import CHUNK, Row, append, contrast_chunk, contrast_name, read, simulate_chunk
from tests.soak.gates.scenarios import ALL, BY_NAME
from tests.soak.gates.table import markdown

SINGLES = ("detect", "power")
MOST_OF_SINGLES = 2000
"""Quantiles of units, and other rules beside ours, need no more."""
FIRST = 100
"""So many of each row come before more of any."""
BUILD = Path(__file__).resolve().parents[3] / "build"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.gates", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000, help="of each scenario")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; run again to go on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--results", type=Path, default=BUILD / "gates.jsonl")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--markdown", type=Path, default=None, help="write the table there")
    options = parser.parse_args(arguments)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    rows = read(options.results)
    shares = {contrast_name(share): share for share in contrast.SHARES}
    names = [name for name in (*(one.name for one in ALL), *shares) if options.only in name]
    chunks = -(-options.rollouts // CHUNK)
    few = -(-min(options.rollouts, MOST_OF_SINGLES) // CHUNK)
    target = {name: few if name in shares or BY_NAME[name].group in SINGLES else chunks for name in names}
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        open_ = [name for name in names if len(rows.setdefault(name, Row()).chunks) < target[name]]
        if not open_:
            break
        name = min(open_, key=lambda one: (len(rows[one].chunks) * CHUNK >= FIRST, rows[one].seconds))
        chunk = next(i for i in range(target[name]) if i not in rows[name].chunks)
        begun = time.process_time()
        if name in shares:
            line = contrast_chunk(shares[name], options.seed, chunk)
        else:
            line = simulate_chunk(BY_NAME[name], options.seed, chunk)
        line["seconds"] = round(time.process_time() - begun, 4)
        append(options.results, line)
        rows[name].take(json.loads(json.dumps(line)))
    told = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    text = markdown({name: rows[name] for name in names if name in rows}, seed=options.seed, machine=told)
    print(text)
    found = claims({name: rows[name] for name in names if name in rows})
    for claim in found:
        print(f"{'held  ' if claim.held else 'MISSED'} {claim.name}: {claim.value}")
    for claim in news(found):
        print(f"not as docs/benchmarks/gates.md says: {claim.name}")
    if options.markdown is not None:
        options.markdown.write_text(text)
    return 1 if news(found) else 0


if __name__ == "__main__":
    sys.exit(main())
