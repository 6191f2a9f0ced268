"""What happened: a cache's rollouts in their order, the manifests it has had, a rollout's events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kubectl_kvtier.rollouts import status_of
from kubectl_kvtier.tables import table
from kvtier_crds.models import KVRollout
from kvtier_crds.models.common import short_digest

Json = dict[str, Any]
ROLE_LABEL = "kvtier.dev/role"


def rollout_facts(rollouts: Sequence[KVRollout]) -> list[Json]:
    """Oldest first."""
    made = []
    for one in sorted(rollouts, key=lambda it: (it.metadata.creation_timestamp, it.metadata.name)):
        status = status_of(one)
        back = status.rollback
        made.append(
            {
                "rollout": one.metadata.name,
                "created": one.metadata.creation_timestamp,
                "finished": status.finished_at,
                "phase": str(status.phase or ""),
                "attempt": status.attempt or 1,
                "candidate": status.candidate.digest if status.candidate else "",
                "baseline": status.baseline.digest if status.baseline else "",
                "fromStage": str(back.from_stage or "") if back else "",
                "cause": str(back.cause) if back else "",
                "gate": (back.gate or "") if back else "",
            }
        )
    return made


def revision_facts(revisions: Sequence[Json]) -> list[Json]:
    """ControllerRevisions by their number."""
    return [
        {
            "revision": one["metadata"]["name"],
            "number": int(one.get("revision") or 0),
            "role": (one["metadata"].get("labels") or {}).get(ROLE_LABEL, ""),
            "digest": str((one.get("data") or {}).get("digest", "")),
            "created": one["metadata"].get("creationTimestamp", ""),
        }
        for one in sorted(revisions, key=lambda it: int(it.get("revision") or 0))
    ]


def event_facts(events: Sequence[Json]) -> list[Json]:
    """In the order of their time."""
    made = [
        {
            "at": one.get("eventTime") or one["metadata"].get("creationTimestamp", ""),
            "type": one.get("type", ""),
            "reason": one.get("reason", ""),
            "note": one.get("note", ""),
        }
        for one in events
    ]
    return sorted(made, key=lambda one: one["at"])


def rollout_table(facts: Sequence[Json]) -> list[str]:
    return table(
        ("ROLLOUT", "CREATED", "PHASE", "ATTEMPT", "CANDIDATE", "BASELINE", "CAUSE", "FINISHED"),
        [
            (
                one["rollout"],
                one["created"],
                one["phase"] or "-",
                str(one["attempt"]),
                short_digest(one["candidate"]) or "-",
                short_digest(one["baseline"]) or "-",
                _cause(one),
                one["finished"] or "-",
            )
            for one in facts
        ],
    )


def revision_table(facts: Sequence[Json]) -> list[str]:
    return table(
        ("REVISION", "NUMBER", "ROLE", "DIGEST", "CREATED"),
        [
            (one["revision"], str(one["number"]), one["role"], short_digest(one["digest"]), one["created"])
            for one in facts
        ],
    )


def event_table(facts: Sequence[Json]) -> list[str]:
    return table(
        ("AT", "TYPE", "REASON", "NOTE"),
        [(str(one["at"]), one["type"], one["reason"], one["note"]) for one in facts],
    )


def _cause(one: Json) -> str:
    if not one["cause"]:
        return "-"
    gate = f" {one['gate']}" if one["gate"] else ""
    return f"{one['cause']}{gate} in {one['fromStage'] or 'Off'}"
