"""`kvtier-crds`: writes the generated CRDs and the API reference, or checks that they are current.

Exit status: 0 done or current, 1 drift (the files are named on stderr), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_crds import docs, generate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvtier-crds", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    crds = commands.add_parser("generate", help="write the CustomResourceDefinitions")
    crds.add_argument("--out", type=Path, default=Path("crds"), help="folder (default: crds)")
    crds.add_argument("--check", action="store_true", help="write nothing; fail when a file is not current")
    reference = commands.add_parser("docs", help="write the API reference")
    reference.add_argument("--out", type=Path, default=Path("docs/reference/api.md"), help="file")
    reference.add_argument("--check", action="store_true", help="write nothing; fail when it is not current")
    args = parser.parse_args(argv)
    if args.command == "generate":
        return _generate(args.out, args.check)
    return _docs(args.out, args.check)


def _generate(folder: Path, check: bool) -> int:
    if not check:
        changed = generate.write_all(folder)
        print(f"{len(generate.render_all())} definitions in {folder}, {len(changed)} changed")
        return 0
    return _report([str(folder / name) for name in generate.drifted(folder)], "kvtier-crds generate")


def _docs(file: Path, check: bool) -> int:
    text = docs.render()
    if not check:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")
        return 0
    current = file.is_file() and file.read_text(encoding="utf-8") == text
    return _report([] if current else [str(file)], "kvtier-crds docs")


def _report(drifted: list[str], command: str) -> int:
    for name in drifted:
        print(f"{name} is not current: run {command}", file=sys.stderr)
    return 1 if drifted else 0


if __name__ == "__main__":
    raise SystemExit(main())
