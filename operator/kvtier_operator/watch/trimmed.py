"""What of a watched object is kept in memory: all that a reconcile may look at, and nothing else.

Of a thousand objects, who wrote which field takes more memory than the fields; a Node brings the list of its
images with each heartbeat; and half of the rest are the same names and short values, over and over. It must
not change what an object means.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from typing import Any

from kvtier_operator.packed import Packed
from kvtier_operator.ports import JsonObject, Kind

_UNREAD = ("managedFields", "selfLink")
_OF_NODE = ("conditions",)
OWN_ROWS = ("gates", "carry", "conditions")
"""Of a KVRollout's status, what its own run alone reads, by `rollout.status`."""


def trimmed(kind: Kind, obj: JsonObject) -> JsonObject:
    """A copy without the parts that nobody reads. Names and short values are the same objects everywhere."""
    metadata = obj["metadata"]
    kept = {**obj, "metadata": {name: value for name, value in metadata.items() if name not in _UNREAD}}
    if kind is Kind.NODE and "status" in obj:
        status = obj["status"] or {}
        kept["status"] = {name: status[name] for name in _OF_NODE if name in status}
    spec = kept.pop("spec", None)
    status = kept.get("status")
    packed: dict[str, Any] = {}
    if kind is Kind.KV_ROLLOUT and isinstance(status, dict):
        packed = {name: Packed(status[name]) for name in OWN_ROWS if status.get(name)}
        kept["status"] = {name: value for name, value in status.items() if name not in packed}
    shared: JsonObject = _shared(kept)
    if packed:
        shared["status"] |= packed
    if isinstance(spec, dict):
        shared["spec"] = {sys.intern(name): _alike(value) for name, value in spec.items()}
    return shared


SHORT = 32
"""Characters. Longer texts are mostly digests and messages, each another one."""

ALIKE = 512
"""Parts of specs that are kept to be shared, those that came last."""
_known: OrderedDict[str, Any] = OrderedDict()
_knowing = threading.Lock()


def _alike(value: Any) -> Any:
    """One object for all specs that say the same in this part: of a thousand rollouts most have stages and
    gates of others, of caches their model and tiers."""
    if not isinstance(value, dict | list):
        return _shared(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    with _knowing:
        if text in _known:
            _known.move_to_end(text)
            return _known[text]
        made = _known[text] = _shared(value)
        if len(_known) > ALIKE:
            _known.popitem(last=False)
        return made


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(name): _shared(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner) for inner in value]
    return sys.intern(value) if isinstance(value, str) and len(value) <= SHORT else value
