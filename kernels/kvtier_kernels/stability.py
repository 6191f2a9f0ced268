"""The table of docs/kernels.md that says on what the bits of each kernel depend, out of the ops' entries.

`python -m kvtier_kernels.stability FILE` writes it into the file, between its marks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_kernels.registry import registry
from kvtier_kernels.spec import KernelSpec

BEGIN, END = "<!-- stability: python -m kvtier_kernels.stability -->", "<!-- end of stability -->"


def table(specs: Sequence[KernelSpec]) -> str:
    """Markdown, a line an op, in their order."""
    head = "| op | why not on what else is in the call | why not on where rows lie | shown by |"
    lines = [head, "|---|---|---|---|"]
    for spec in specs:
        said = spec.stability
        shown = "each request alone" if said.alone is not None else "the reference, exactly"
        if said.alone is None and said.rounds:
            shown = "no test of its own"
        lines.append(f"| `{spec.name}` | {said.batch} | {said.placement} | {shown} |")
    return "\n".join(lines) + "\n"


def written(text: str, specs: Sequence[KernelSpec]) -> str:
    """The text with the table between its marks. ValueError without them."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"no {BEGIN} and {END}")
    return f"{before}{mark}\n{table(specs)}{end}{after}"


def main() -> None:
    [name] = sys.argv[1:]
    path = Path(name)
    path.write_text(written(path.read_text(encoding="utf-8"), registry()), encoding="utf-8")


if __name__ == "__main__":
    main()
