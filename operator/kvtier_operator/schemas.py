"""Whether the cluster's CRDs know every field of this version, from what the API server publishes of them.

Why it exists: Helm installs CRDs and never upgrades them. An API server prunes what its CRD does not know
without a word, so an operator that is newer than its CRDs would lose what it writes down of a rollout. Fields
that only the cluster knows are of a newer version and harm nobody. Pure; it must not send anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_crds.generate import definition
from kvtier_crds.models import KINDS
from kvtier_crds.models.common import GROUP, VERSION
from kvtier_operator.ports import JsonObject

SHOWN = 5
"""Fields of one CRD that are named; of the others their number."""


def lacking(document: JsonObject) -> list[str]:
    """One sentence for each CRD that lacks a field, or a value of one. document: of our group, as OpenAPI v3.
    A kind that it does not hold is not judged, see `unpublished`."""
    schemas = _schemas(document)
    return [
        f"{kind.PLURAL}.{GROUP} is older than this operator and lacks {_shown(missing)}"
        for kind in KINDS
        if (found := schemas.get(_published_name(kind.KIND))) is not None
        and (missing := list(_missing(_wanted(definition(kind)), found, "")))
    ]


def unpublished(document: JsonObject) -> list[str]:
    """Kinds of ours that it does not hold, though a list may have said that they are installed."""
    schemas = _schemas(document)
    return [f"{kind.PLURAL}.{GROUP}" for kind in KINDS if _published_name(kind.KIND) not in schemas]


def _schemas(document: JsonObject) -> JsonObject:
    return (document.get("components") or {}).get("schemas") or {}


def _published_name(kind: str) -> str:
    return ".".join([*reversed(GROUP.split(".")), VERSION, kind])


def _wanted(crd: JsonObject) -> JsonObject:
    schema: JsonObject = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return {"properties": {name: schema["properties"][name] for name in ("spec", "status")}}


def _missing(wanted: JsonObject, found: JsonObject, path: str) -> Iterator[str]:
    known = found.get("properties") or {}
    for name, child in (wanted.get("properties") or {}).items():
        inner = f"{path}.{name}" if path else name
        if name not in known:
            yield inner
        else:
            yield from _missing(child, known[name], inner)
    for part, mark in (("items", "[]"), ("additionalProperties", "{}")):
        child, other = wanted.get(part), found.get(part)
        if isinstance(child, dict) and isinstance(other, dict):
            yield from _missing(child, other, f"{path}{mark}")
    values = found.get("enum")
    if values is not None:
        yield from (f"{path}={value}" for value in wanted.get("enum") or [] if value not in values)


def _shown(missing: list[str]) -> str:
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return ", ".join(missing[:SHOWN]) + more
