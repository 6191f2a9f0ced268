"""One thing that is wrong with a file, or that lint could not see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """ERROR: the API server or the operator would refuse it. NOTE: it needs what the files do not hold, or
    has no effect."""

    ERROR = "error"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """where: file and object. field: path in the object, empty for the whole of it."""

    severity: Severity
    where: str
    field: str
    message: str
