# mypy: disable-error-code="import-untyped"
"""python -m kvtier_kernels.aot --check | --record: the gate on compiled kernels, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvtier_kernels.aot.compile import compile_variant, missing
from kvtier_kernels.aot.gate import FIELDS, judge
from kvtier_kernels.spec import registry

BASELINE = Path(__file__).with_name("baseline_sm90.json")


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when the gate holds, 1 when it does not."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_kernels.aot", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the checked-in baseline")
    what.add_argument("--record", action="store_true", help="write the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    args = parser.parse_args(argv)

    import triton

    measured: dict[str, dict[str, int]] = {}
    absent: dict[str, list[str]] = {}
    for spec in registry():
        for variant in spec.aot:
            got = compile_variant(spec, variant)
            key = f"{spec.name}/{variant.id}"
            measured[key] = got.as_dict()
            absent[key] = missing(variant, got)
    print(f"triton {triton.__version__}, sm_90a; resources only, nothing was timed")
    print(f"     {'variant':36}" + "".join(f"{f:>13}" for f in FIELDS))
    for key, row in measured.items():
        print(f"     {key:36}" + "".join(f"{row[f]:>13}" for f in FIELDS))

    if args.record:
        findings = judge({}, measured, absent)
        broken = [f for f in findings if f.fails and f.field != "variant"]
        for finding in broken:
            print(finding)
        if broken:
            return 1
        document = {"triton": triton.__version__, "target": "sm_90a", "variants": measured}
        args.baseline.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        print(f"recorded {len(measured)} variants")
        return 0
    document = json.loads(args.baseline.read_text())
    findings = judge(document["variants"], measured, absent)
    for finding in findings:
        print(finding)
    if document["triton"] != triton.__version__:
        print(f"note: the baseline was recorded with triton {document['triton']}")
    failed = sum(f.fails for f in findings)
    print("gate holds" if not failed else f"gate fails: {failed} findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
