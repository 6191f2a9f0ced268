"""`python -m tests.bench SUITE`: measures and writes build/bench/SUITE.json. `--list` names the suites.

Exit status: 0 measured, 1 a row is worse than its floor, 2 no such suite.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import bench
from tests.bench.rows import Row, markdown, table, with_table, write_report

PREFIX = "bench_"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "bench"


def suites() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(bench.__path__))
    return sorted(name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("suite", nargs="?", help="one of --list")
    parser.add_argument("--list", action="store_true", help="print the suites and end")
    parser.add_argument(
        "--markdown",
        type=Path,
        help="also write the table there: a page that has one is changed only where it stands",
    )
    parser.add_argument("--out", type=Path, help="file (default: build/bench/SUITE.json)")
    args, more = parser.parse_known_args(argv)
    if args.suite is not None and args.suite.replace("-", "_") in suites():
        args.suite = args.suite.replace("-", "_")
    if args.list or args.suite is None:
        print("\n".join(suites()))
        return 0
    if args.suite not in suites():
        print(f"no suite {args.suite!r}; there are: {', '.join(suites())}", file=sys.stderr)
        return 2
    page = None if args.markdown is None or not args.markdown.exists() else args.markdown.read_text("utf-8")
    if page is not None:
        # Before anything is measured.
        with_table(page, "")
    module = importlib.import_module(f"tests.bench.{PREFIX}{args.suite}")
    # A suite that takes arguments of its own reads them itself; the others take none.
    if more and not hasattr(module, "parser"):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    rows: list[Row] = list(module.rows(more) if hasattr(module, "parser") else module.rows())
    out = args.out or FOLDER / f"{args.suite}.json"
    write_report(out, rows)
    if args.markdown is not None:
        told = markdown(rows) + "\n"
        args.markdown.write_text(told if page is None else with_table(page, told), encoding="utf-8")
    print(table(rows))
    print(f"wrote {out}")
    return 1 if any(row.broken for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
