"""Results on disk, one JSON line each, so that a run may die at any moment and go on where it was.

Why it exists: an evaluation takes hours. The first line names the plan; a line that was not finished is cut
off and its work done again. It must not know what a result says beyond its key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class WrongJournal(ValueError):
    """The file is of another plan, or no journal."""


def read(path: Path, digest: str) -> list[dict[str, Any]]:
    """Whole lines after the first; none of a file that is not there. WrongJournal."""
    if not path.exists():
        return []
    return _parsed(path.read_bytes(), path, digest)[0]


def _parsed(data: bytes, path: Path, digest: str) -> tuple[list[dict[str, Any]], int]:
    """The results, and how many bytes are whole lines."""
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].splitlines()
    if not lines:
        return [], 0
    try:
        head, *results = [json.loads(line) for line in lines]
    except ValueError as error:
        raise WrongJournal(f"{path.name}: {error}") from error
    if not isinstance(head, dict) or head.get("plan") != digest:
        raise WrongJournal(f"{path.name} holds results of another plan; use another --out or remove it")
    return results, whole


class Journal:
    """Appends results; each is on disk when `write` returns. A context manager."""

    def __init__(self, path: Path, digest: str) -> None:
        self.results, whole = _parsed(path.read_bytes(), path, digest) if path.exists() else ([], 0)
        self._file = path.open("ab")
        self._file.truncate(whole)
        if not whole:
            self._put({"plan": digest})

    def write(self, result: Mapping[str, Any]) -> None:
        self.results.append(dict(result))
        self._put(result)

    def _put(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
