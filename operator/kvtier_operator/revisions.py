"""Manifests kept as ControllerRevisions: content-addressed names, roles as labels. Pure.

The name is derived from cache and digest, so writing the same manifest twice is one object. A role is only a
label: `status.baseline` is the authority, and the labels are its backup when a status is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvtier_operator.ports import CACHE_UID_LABEL, ROLE_LABEL, JsonObject, Kind, ObjectKey

MANIFEST_FIELD = "manifest"


class Role(StrEnum):
    BASELINE = "baseline"
    CANDIDATE = "candidate"
    APPROVED = "approved"


class RevisionDamaged(Exception):
    """The bytes of a ControllerRevision do not hash to the digest it names."""


@dataclass(frozen=True)
class Revision:
    """A manifest in the cluster. `number` orders revisions of one cache, `data` is the canonical encoding."""

    key: ObjectKey
    digest: str
    role: Role
    number: int
    data: bytes


def revision_name(cache_name: str, digest: str) -> str:
    return f"{cache_name}-{digest.removeprefix('sha256:')[:12]}"


def selector_for(cache_uid: str) -> str:
    """The label selector of all revisions of one cache."""
    return f"{CACHE_UID_LABEL}={cache_uid}"


def revision_manifest(cache: JsonObject, data: bytes, digest: str, role: Role, number: int) -> JsonObject:
    """The object to apply server-side. Owned by the KVCache, so that it goes with it."""
    metadata = cache["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": Kind.CONTROLLER_REVISION.value,
        "metadata": {
            "name": revision_name(metadata["name"], digest),
            "namespace": metadata["namespace"],
            "labels": {
                ROLE_LABEL: role.value,
                CACHE_UID_LABEL: metadata["uid"],
                "app.kubernetes.io/managed-by": "kvtier-operator",
            },
            "ownerReferences": [
                {
                    "apiVersion": cache["apiVersion"],
                    "kind": cache["kind"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                }
            ],
        },
        "data": {MANIFEST_FIELD: data.decode(), "digest": digest},
        "revision": number,
    }


def read_revision(obj: JsonObject) -> Revision:
    """Raises RevisionDamaged; nothing else is trusted without its hash."""
    metadata, content = obj["metadata"], obj.get("data") or {}
    data = str(content.get(MANIFEST_FIELD, "")).encode()
    digest = str(content.get("digest", ""))
    actual = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if actual != digest:
        raise RevisionDamaged(f"ControllerRevision {metadata['name']}: bytes hash to {actual}, not {digest}")
    try:
        role = Role((metadata.get("labels") or {}).get(ROLE_LABEL, ""))
    except ValueError as error:
        raise RevisionDamaged(f"ControllerRevision {metadata['name']}: {error}") from error
    return Revision(
        key=ObjectKey(Kind.CONTROLLER_REVISION, metadata["namespace"], metadata["name"]),
        digest=digest,
        role=role,
        number=int(obj.get("revision") or 0),
        data=data,
    )


def undamaged(objects: Iterable[JsonObject]) -> list[Revision]:
    """Those that can be read; a damaged one says nothing of the others."""
    found = []
    for obj in objects:
        try:
            found.append(read_revision(obj))
        except RevisionDamaged:
            continue
    return found
