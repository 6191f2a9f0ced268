"""Two runtime manifests and what differs between them, field by field. Pure.

A manifest is trusted only after its bytes were hashed. It must not know where revisions come from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kubectl_kvtier.outcomes import Exit, Failure

Json = dict[str, Any]
SHORTEST_DIGEST = 6
_NAMES = ("name", "tierClassName", "className")


@dataclass(frozen=True, slots=True)
class Change:
    """before or after None: the field is not there."""

    path: str
    before: Any
    after: Any


def manifest_of(revision: Json) -> Json:
    """The manifest that a ControllerRevision holds. Failure FAILED when its bytes are not what it names."""
    content = revision.get("data") or {}
    data, digest = str(content.get("manifest", "")), str(content.get("digest", ""))
    actual = "sha256:" + hashlib.sha256(data.encode()).hexdigest()
    if actual != digest:
        name = revision["metadata"]["name"]
        raise Failure(
            Exit.FAILED, f"ControllerRevision {name} is damaged: it names {digest}, its bytes {actual}"
        )
    found: Json = json.loads(data)
    return found


def pick(revisions: Sequence[Json], wanted: str) -> Json:
    """By name of the revision, or by the first digits of the digest (at least 6)."""
    digits = wanted.removeprefix("sha256:")
    found = [
        one
        for one in revisions
        if one["metadata"]["name"] == wanted
        or (len(digits) >= SHORTEST_DIGEST and _digest(one).startswith(digits))
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(one["metadata"]["name"] for one in revisions)) or "none"
    problem = "is no revision" if not found else "names more than one revision"
    raise Failure(Exit.NOT_FOUND, f"{wanted} {problem} of this cache; there are: {known}")


def changes(before: Json, after: Json) -> list[Change]:
    """Sorted by path; items of a list are known by their name where they have one."""
    old, new = dict(_flat(before, "")), dict(_flat(after, ""))
    return [
        Change(path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


def lines(found: Sequence[Change]) -> list[str]:
    made = []
    for one in found:
        if one.before is not None:
            made.append(f"- {one.path}: {json.dumps(one.before)}")
        if one.after is not None:
            made.append(f"+ {one.path}: {json.dumps(one.after)}")
    return made


def _digest(revision: Json) -> str:
    return str((revision.get("data") or {}).get("digest", "")).removeprefix("sha256:")


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for at, child in enumerate(value):
            yield from _flat(child, f"{path}[{_name(child, at)}]")
    elif value is not None:
        yield path, value


def _name(item: Any, at: int) -> str:
    if isinstance(item, dict):
        for key in _NAMES:
            if isinstance(item.get(key), str):
                return str(item[key])
    return str(at)
