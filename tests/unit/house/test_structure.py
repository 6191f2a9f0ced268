"""The order of the house: what must hold for every file, whoever wrote it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = (
    "crds/kvtier_crds",
    "proto/kvtier",
    "proto/kvtier_evidence",
    "kernels/kvtier_kernels",
    "agent/kvtier_core",
    "agent/kvtier_agent",
    "agent/kvtier_client",
    "agent/kvtier_eval",
    "operator/kvtier_operator",
)
LONGEST_FILE = 500


@cache
def _tracked() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=True
    ).stdout
    return tuple(REPOSITORY / name for name in listed.split("\0") if name and (REPOSITORY / name).is_file())


def _ours() -> list[Path]:
    """Modules of our packages that a person writes."""
    return [
        path
        for path in _tracked()
        if path.suffix == ".py" and _name(path).startswith(PACKAGES) and "_pb2" not in path.name
    ]


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def _grep(pattern: str, paths: list[Path]) -> list[str]:
    wanted = re.compile(pattern)
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if wanted.search(line):
                found.append(f"{_name(path)}:{number}: {line.strip()[:120]}")
    return found


def test_no_package_shadows_the_standard_library() -> None:
    shadows = {
        _name(path)
        for path in _tracked()
        if path.name == "__init__.py"
        and path.parent.name in sys.stdlib_module_names
        # Inside a package of ours the full name tells them apart.
        and not any(_name(path).startswith(package + "/") for package in PACKAGES)
    }
    assert not shadows


def test_every_module_says_why_it_exists() -> None:
    silent = [_name(path) for path in _ours() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [name for name in silent if not name.endswith("__init__.py")] == []


def test_no_file_is_two_nouns() -> None:
    lengths = {_name(path): len(path.read_text().splitlines()) for path in _ours()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_nothing_is_left_for_later() -> None:
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X"]
    unfinished = (
        rf"\b({'|'.join(words)})\b|Not" + r"ImplementedError|mark\.(skip|xfail)|pytest\.(skip|xfail)\("
    )
    code = [
        path
        for path in _tracked()
        if path.suffix in (".py", ".go", ".proto", ".yaml") and not path.name.endswith("_pb2_grpc.py")
    ]
    assert _grep(unfinished, code) == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    paths = [path for path in _tracked() if path.suffix not in (".sum", ".png", ".npz")]
    assert _grep(r"(?<![\w.$~])/(work|root|home)/[a-z]", paths) == []


def test_what_installs_names_no_address() -> None:
    """Registries are the machine's choice: names, versions and hashes are all that we give."""
    paths = [
        path for path in _tracked() if _name(path).startswith(("requirements/", "hack/", "Makefile", ".ci/"))
    ]
    paths.append(REPOSITORY / "pyproject.toml")
    assert _grep(r"://|\b[a-z0-9-]+\.(org|com|io|net)\b|--(extra-)?index-url|find-links", paths) == []


def test_every_pin_has_a_hash() -> None:
    for path in (REPOSITORY / "requirements").glob("*.txt"):
        pins = re.findall(r"^[a-z0-9](?:.*\\\n)*.*", path.read_text(), flags=re.MULTILINE)
        assert pins
        assert [pin for pin in pins if "==" not in pin or "--hash=sha256:" not in pin] == []


def test_names_of_test_files_are_unique() -> None:
    names = Counter(path.name for path in _tracked() if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_drift_check_sees_drift(tmp_path: Path) -> None:
    """On a copy of what it reads, with one byte changed in each kind of generated file. That the checked-in
    ones are current is for `make lint` to say."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("crds", "docs", "proto", "charts", "hack"):
        subprocess.run(["cp", "-r", name, str(copy)], cwd=REPOSITORY, timeout=500, check=True)
    (copy / ".venv").symlink_to(Path(sys.prefix))
    changed = ["crds/kvtier.dev_kvcaches.yaml", "charts/kvtier/crds/kvtier.dev_kvnodes.yaml"]
    changed += ["docs/reference/api.md", "proto/kvtier/v1/common_pb2.pyi"]
    changed += ["docs/reference/metrics.md", "charts/kvtier/monitoring/dashboard.json"]
    changed += ["charts/kvtier/monitoring/alerts.yaml"]
    for name in changed:
        with (copy / name).open("a") as file:
            file.write("\n")
    (copy / "charts/kvtier/crds/left-over.yaml").touch()
    done = subprocess.run(["hack/generate", "--check"], cwd=copy, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert all(f"./{name} is not current" in done.stderr for name in changed)
    assert "left-over.yaml" in done.stderr


@pytest.mark.parametrize("command", ["kvtier-agent", "kvtier-operator", "kvtier-crds"])
def test_every_command_starts(command: str) -> None:
    done = subprocess.run(
        [Path(sys.prefix) / "bin" / command, "--help"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


@pytest.mark.parametrize(
    ("package", "heavy"), [("kvtier_agent", "torch"), ("kvtier_operator", "kopf")], ids=["agent", "operator"]
)
def test_a_command_line_is_read_before_what_takes_seconds_to_import(package: str, heavy: str) -> None:
    """So help is there in half a second instead of three."""
    program = f"import sys, {package}.cli; sys.exit({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in _tracked():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            if not (path.parent / target).exists():
                broken.append(f"{_name(path)} -> {target}")
    assert broken == []
