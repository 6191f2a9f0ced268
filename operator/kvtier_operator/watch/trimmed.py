"""What of a watched object is kept in memory: all that a reconcile may look at, and nothing else.

Of a thousand objects, who wrote which field takes more memory than the fields; a Node brings the list of its
images with each heartbeat; and half of the rest are the same names and short values, over and over. It must
not change what an object means.
"""

from __future__ import annotations

import sys
from typing import Any

from kvtier_operator.ports import JsonObject, Kind

_UNREAD = ("managedFields", "selfLink")
_OF_NODE = ("conditions",)


def trimmed(kind: Kind, obj: JsonObject) -> JsonObject:
    """A copy without the parts that nobody reads. Names and short values are the same objects everywhere."""
    metadata = obj["metadata"]
    kept = {**obj, "metadata": {name: value for name, value in metadata.items() if name not in _UNREAD}}
    if kind is Kind.NODE and "status" in obj:
        status = obj["status"] or {}
        kept["status"] = {name: status[name] for name in _OF_NODE if name in status}
    shared: JsonObject = _shared(kept)
    return shared


SHORT = 32
"""Characters. Longer texts are mostly digests and messages, each another one."""


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(name): _shared(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner) for inner in value]
    return sys.intern(value) if isinstance(value, str) and len(value) <= SHORT else value
