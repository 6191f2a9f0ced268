"""Pages of docs that name tests: what is in their tables, and which of the named tests exist.

It exists so that a page cannot promise a test that was renamed or deleted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def cases_of(page: Path, known: Collection[str]) -> list[str]:
    """The known cases that rows of the page's tables begin with, sorted, each as often as it comes. Asserts
    that such a row ends with a test, or with the reason why there is none."""
    found: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| "):
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        ids = [one for one in re.split(r",\s*", row[0]) if one in known]
        found += ids
        if ids:
            assert TEST.findall(row[-1]) or row[-1].startswith("no counterpart: "), row
    return sorted(found)


def missing_tests(page: Path, *, at_least: int) -> list[str]:
    """Tests that the page names and that are not there. Asserts that it names more than `at_least`."""
    named = TEST.findall(page.read_text(encoding="utf-8"))
    assert len(named) > at_least
    return [f"{path}::{name}" for path, name in named if name not in _functions_in(path)]


@cache
def _functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))
