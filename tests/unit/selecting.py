"""Which objects the API server lists under a label and a field selector, for fakes of it."""

from __future__ import annotations

from typing import Any


def selected(obj: dict[str, Any], label_selector: str, field_selector: str) -> bool:
    """Selectors of the form `a=b,c=d`."""
    labels = obj["metadata"].get("labels") or {}
    wanted = dict(part.split("=") for part in label_selector.split(",") if part)
    fields = dict(part.split("=") for part in field_selector.split(",") if part)
    return wanted.items() <= labels.items() and all(_at(obj, path) == v for path, v in fields.items())


def _at(obj: Any, path: str) -> str:
    for name in path.split("."):
        obj = (obj or {}).get(name)
    return str(obj or "")
