"""A KVCache as the release machine looks at it. Pure."""

from __future__ import annotations

from kvtier_operator.ports import JsonObject
from kvtier_operator.rollout.inputs import Approved, CacheView
from kvtier_operator.rollout.spec import blast_radius
from kvtier_operator.rollout.state import ManifestRef
from kvtier_operator.rollout.status import parse_stamp


def cache_view(cache: JsonObject | None) -> CacheView | None:
    if cache is None:
        return None
    status, spec = cache.get("status") or {}, cache.get("spec") or {}
    baseline, approved = status.get("baseline"), status.get("approved")
    return CacheView(
        uid=cache["metadata"]["uid"],
        fence=int(status.get("fence") or 0),
        baseline=ManifestRef(baseline["digest"], baseline.get("revision", "")) if baseline else None,
        approved=Approved(
            rollout=approved.get("rollout", ""),
            rollout_uid=str(approved.get("evidence") or "").partition("/")[0],
            digest=approved["digest"],
            grant_expires=parse_stamp(approved.get("grantExpires")),
            radius=blast_radius(approved.get("blastRadius") or {}),
            holdback=str(approved.get("holdback") or ""),
            evidence=str(approved.get("evidence") or ""),
        )
        if approved
        else None,
        deleting="deletionTimestamp" in cache["metadata"],
        suspended=bool(spec.get("suspend")),
    )
