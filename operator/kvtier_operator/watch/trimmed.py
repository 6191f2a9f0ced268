"""What of a watched object is kept in memory: all that a reconcile may look at, and nothing else.

Of a thousand objects, who wrote which field takes more memory than the fields; a Node brings the list of its
images with each heartbeat. It must not change what an object means.
"""

from __future__ import annotations

from kvtier_operator.ports import JsonObject, Kind

_UNREAD = ("managedFields", "selfLink")
_OF_NODE = ("conditions",)


def trimmed(kind: Kind, obj: JsonObject) -> JsonObject:
    """A copy without the parts that nobody reads; shares the others."""
    metadata = obj["metadata"]
    kept = {**obj, "metadata": {name: value for name, value in metadata.items() if name not in _UNREAD}}
    if kind is Kind.NODE and "status" in obj:
        status = obj["status"] or {}
        kept["status"] = {name: status[name] for name in _OF_NODE if name in status}
    return kept
