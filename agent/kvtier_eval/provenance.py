"""Which code computes results: a digest over its sources and the libraries under them.

Why it exists: a run takes hours and may go on days later; results of other code would mix unseen. What only
shows results is left out. It must not run anything.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import kvtier_core
import kvtier_eval
import kvtier_kernels

LIBRARIES = ("numpy", "torch", "transformers")
COMPUTES = (
    "baselines",
    "forward",
    "metrics",
    "plan",
    "prepare",
    "replay",
    "runner",
    "statistics",
    "tasks",
    "texts",
)
"""Modules of kvtier_eval that results depend on."""
SELECTS = ("errors", "rowevidence", *(f"selectors/{name}" for name in ("contract", "growing", "picking")))
"""Of kvtier_core, beside the families."""


def code_digest() -> str:
    """SHA-256 over the sources of the evaluation, the families and the kernels, and the versions of
    `LIBRARIES`."""
    own = Path(next(iter(kvtier_eval.__path__)))
    core = Path(next(iter(kvtier_core.__path__)))
    kernels = Path(next(iter(kvtier_kernels.__path__)))
    files = {f"eval/{name}": own / f"{name}.py" for name in COMPUTES}
    files |= {f"core/{name}": core / f"{name}.py" for name in SELECTS}
    files |= {f"family/{file.stem}": file for file in (core / "selectors" / "families").glob("*.py")}
    files |= {f"kernels/{file.relative_to(kernels)}": file for file in kernels.rglob("*.py")}
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}:{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    for library in LIBRARIES:
        total.update(f"{library} {metadata.version(library)}\n".encode())
    return "sha256:" + total.hexdigest()
