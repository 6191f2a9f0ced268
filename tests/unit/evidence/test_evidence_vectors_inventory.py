"""No vector of the specification is lost: each of the 89 names a test in this folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FAMILIES = {
    "G": 7,
    "E": 17,
    "N": 7,
    "Q": 5,
    "R": 10,
    "M": 2,
    "P": 2,
    "S": 3,
    "D": 5,
    "A": 2,
    "B": 5,
    "L": 2,
    "T": 13,
    "X": 4,
    "K": 4,
    "Y": 1,
}
IDS = [f"{family}{n}" for family, count in FAMILIES.items() for n in range(1, count + 1)]
HERE = Path(__file__)
ID = re.compile(r"[A-Z][0-9]{1,2}(?![0-9])")


def names(tree: ast.Module) -> Iterator[str]:
    """Ids in keys and ids of tables, and in names of tests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from (part.upper() for part in node.name.split("_"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ID.match(node.value):
            yield node.value


@pytest.fixture(scope="module")
def tested() -> set[str]:
    found = set()
    for path in sorted(HERE.parent.glob("test_evidence_vectors_*.py")):
        if path != HERE:
            found |= {
                name[: match.end()]
                for name in names(ast.parse(path.read_text()))
                if (match := ID.match(name))
            }
    return found


def test_there_are_89() -> None:
    assert len(IDS) == 89


def test_every_vector_names_a_test(tested: set[str]) -> None:
    assert sorted(set(IDS) - tested) == []
