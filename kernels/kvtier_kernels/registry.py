"""All kernels' entries, found where they are: `ops/<folder>/spec.py` with `specs() -> (KernelSpec, ...)`.

It exists so that adding an op is adding a folder. It must not know what any op does.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import kvtier_kernels.ops
from kvtier_kernels.spec import KernelSpec


def registry() -> tuple[KernelSpec, ...]:
    """Entries in the order of their names. Raises ValueError when a name is there twice."""
    found: list[KernelSpec] = []
    for folder in kvtier_kernels.ops.__path__:
        for module in pkgutil.iter_modules([folder]):
            if module.ispkg and (Path(folder) / module.name / "spec.py").is_file():
                entry = importlib.import_module(f"kvtier_kernels.ops.{module.name}.spec")
                found.extend(entry.specs())
    names = [spec.name for spec in found]
    if len(set(names)) != len(names):
        raise ValueError(f"one name for two ops: {sorted(names)}")
    return tuple(sorted(found, key=lambda spec: spec.name))


def entry(name: str) -> KernelSpec:
    """The entry of that name. Raises KeyError."""
    for spec in registry():
        if spec.name == name:
            return spec
    raise KeyError(f"no kernel is named {name!r}")
