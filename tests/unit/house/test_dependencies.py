"""What each installation brings along: declared where it is imported, and no torch for the operator."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[3]
OUR_PACKAGES = {
    "kvtier", "kvtier_crds", "kvtier_evidence", "kvtier_kernels", "kvtier_core",
    "kvtier_agent", "kvtier_client", "kvtier_eval", "kvtier_operator",
}  # fmt: skip

# Which extras a package may rely on, beside the base dependencies.
INSTALLED_WITH = {
    "crds/kvtier_crds": (),
    "proto/kvtier_evidence": ("operator", "agent"),
    "operator/kvtier_operator": ("operator",),
    "agent/kvtier_core": ("agent", "client"),
    "agent/kvtier_agent": ("agent",),
    "agent/kvtier_client": ("client",),
    "agent/kvtier_eval": ("eval",),
    "kernels/kvtier_kernels": ("agent", "client"),
}
# Imports that are guarded, since only another extra brings them.
OPTIONAL = {
    "kernels/kvtier_kernels": {"triton", "llvmlite"},
    "agent/kvtier_core": {"llvmlite"},
}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _project() -> dict[str, list[str]]:
    """Requirement strings by extra; the base dependencies under the empty name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return {"": project["dependencies"], **extras}


def _declared(*extras: str) -> set[str]:
    return {_canonical(Requirement(line).name) for extra in ("", *extras) for line in _project()[extra]}


def _imported_distributions(folder: Path) -> dict[str, str]:
    """Distribution name to the module that imports it, for every third-party import at any depth."""
    providers = importlib.metadata.packages_distributions()
    found = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                for distribution in _providers(name, providers):
                    found[distribution] = file.relative_to(REPOSITORY).as_posix()
    return found


def _providers(module: str, providers: dict[str, list[str]]) -> list[str]:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in OUR_PACKAGES or top == "tests":
        return []
    if top == "google":
        return ["protobuf"]
    if top == "opentelemetry":
        return [_opentelemetry(module)]
    return [_canonical(one) for one in providers.get(top, [top])][:1]


def _opentelemetry(module: str) -> str:
    """A namespace shared by many distributions."""
    if module.startswith("opentelemetry.sdk"):
        return "opentelemetry-sdk"
    if module.startswith("opentelemetry.exporter.otlp.proto.grpc"):
        return "opentelemetry-exporter-otlp-proto-grpc"
    return "opentelemetry-api"


@pytest.mark.parametrize("package", list(INSTALLED_WITH))
def test_a_package_imports_only_what_its_installation_declares(package: str) -> None:
    imported = _imported_distributions(REPOSITORY / package)
    for extra in INSTALLED_WITH[package] or ("",):
        declared = _declared(extra) | OPTIONAL.get(package, set())
        if "opentelemetry-sdk" in declared:
            declared |= {"opentelemetry-api"}
        if "pydantic" in declared:
            declared |= {"pydantic-core"}
        assert {name: file for name, file in imported.items() if name not in declared} == {}, (
            f"extra {extra!r}"
        )


def _closure(extra: str) -> set[str]:
    """Everything that an installation of kvtier[extra] brings on this machine, from installed metadata."""
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(line).name, option) for line in _project()[""] + _project()[extra]
               for option in ("", *Requirement(line).extras)]  # fmt: skip
    while pending:
        name, option = pending.pop()
        if (_canonical(name), option) in seen:
            continue
        seen.add((_canonical(name), option))
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": option}):
                pending += [(requirement.name, one) for one in ("", *requirement.extras)]
    return {name for name, _ in seen}


def test_the_operators_installation_has_no_torch_and_no_numpy() -> None:
    brought = _closure("operator")
    assert {"kopf", "grpcio", "pydantic"} <= brought
    assert brought & {"torch", "triton", "transformers", "scipy", "numpy"} == set()
    assert "torch" in _closure("agent")


_IMPORT_ALL = """
import importlib, pkgutil, sys

ABSENT = ("torch", "numpy", "triton", "transformers", "kvtier_core", "kvtier_kernels", "kvtier_agent")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ImportError(f"{name} is not there in an operator's installation")

sys.meta_path.insert(0, Absent())
count = 0
for root in ("kvtier_operator", "kvtier_crds"):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
print(count)
"""


def test_the_operator_starts_where_there_is_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_what_reads_the_model_is_pinned() -> None:
    """A machine whose model is converted already would never miss it: transformers imports these only when it
    reads a GGUF file."""
    lock = (REPOSITORY / "requirements" / "lock.txt").read_text()
    pinned = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    assert {"gguf", "accelerate", "transformers"} <= pinned
