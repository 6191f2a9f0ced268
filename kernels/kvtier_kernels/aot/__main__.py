# mypy: disable-error-code="import-untyped"
"""python -m kvtier_kernels.aot --check | --record [--op NAME]: the gate on compiled kernels, without GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvtier_kernels.aot.compile import compile_variant, missing
from kvtier_kernels.aot.gate import FIELDS, Finding, judge
from kvtier_kernels.registry import registry
from kvtier_kernels.spec import KernelSpec

BASELINES = Path(__file__).with_name("baseline_sm90")


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when the gate holds, 1 when it does not."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_kernels.aot", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the checked-in baselines")
    what.add_argument("--record", action="store_true", help="write the baselines")
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="a folder with a file an op")
    args = parser.parse_args(argv)

    import triton

    specs = [spec for spec in registry() if spec.aot and (not args.op or spec.name in args.op)]
    if unknown := set(args.op or ()) - {spec.name for spec in specs}:
        parser.error(f"no op with compilations is named {', '.join(sorted(unknown))}")
    print(f"triton {triton.__version__}, sm_90a; resources only, nothing was timed")
    print(f"     {'variant':44}" + "".join(f"{f:>13}" for f in FIELDS))
    findings: list[Finding] = []
    for spec in specs:
        findings += _op(spec, args.baselines / f"{spec.name}.json", triton.__version__, args.record)
    for finding in findings:
        print(finding)
    failed = sum(f.fails for f in findings)
    print("gate holds" if not failed else f"gate fails: {failed} findings")
    return 1 if failed else 0


def _op(spec: KernelSpec, baseline: Path, version: str, record: bool) -> list[Finding]:
    """Compiles an op's variants and judges them; when recording, writes them unless they break a rule."""
    measured: dict[str, dict[str, int]] = {}
    absent: dict[str, list[str]] = {}
    for variant in spec.aot:
        got = compile_variant(spec, variant)
        measured[variant.id] = got.as_dict()
        absent[variant.id] = missing(variant, got)
        print(f"     {spec.name + '/' + variant.id:44}" + "".join(f"{got.as_dict()[f]:>13}" for f in FIELDS))
    if record:
        broken = [f for f in judge(spec.name, measured, measured, absent) if f.fails]
        if not broken:
            document = {"triton": version, "target": "sm_90a", "variants": measured}
            baseline.parent.mkdir(exist_ok=True)
            baseline.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        return broken
    recorded: dict[str, Any] = {"triton": version, "variants": {}}
    if baseline.is_file():
        recorded = json.loads(baseline.read_text())
    if recorded["triton"] != version:
        print(f"note: {spec.name} was recorded with triton {recorded['triton']}")
    return judge(spec.name, recorded["variants"], measured, absent)


if __name__ == "__main__":
    sys.exit(main())
