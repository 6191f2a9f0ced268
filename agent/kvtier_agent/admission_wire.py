"""A cache's declared admission: from the wire, to the wire, and in the fence record that a restart reads.

Why it exists: it comes with a baseline and shapes no answer, so it travels beside the manifest. It must not
know what it bounds.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from kvtier.v1 import control_pb2
from kvtier_core.admission import UNDECLARED, AdmissionPolicy, AdmissionTerms, Idle, IdleTerms
from kvtier_core.errors import CoreError, Reason


def admission_terms(request: control_pb2.ApplyBaselineRequest) -> AdmissionTerms:
    """BAD_ARGUMENT for a policy that there is not and for a limit that is not positive."""
    if not request.HasField("admission"):
        return UNDECLARED
    said = request.admission
    return AdmissionTerms(
        pinned=said.pinned_bytes if said.HasField("pinned_bytes") else None,
        staging=said.staging_bytes if said.HasField("staging_bytes") else None,
        link=said.link_bytes if said.HasField("link_bytes") else None,
        queue=said.queue or None,
        policy=_policy(said.policy),
        sessions=_sessions(said.sessions.idle, said.sessions.ttl_ms) if said.HasField("sessions") else None,
    )


def admission_message(terms: AdmissionTerms) -> control_pb2.CacheAdmission:
    return control_pb2.CacheAdmission(
        pinned_bytes=terms.pinned,
        staging_bytes=terms.staging,
        link_bytes=terms.link,
        queue=terms.queue or 0,
        policy=terms.policy.value if terms.policy is not None else "",
        sessions=_sessions_message(terms.sessions),
    )


def _sessions_message(terms: IdleTerms | None) -> control_pb2.CacheSessions | None:
    if terms is None:
        return None
    return control_pb2.CacheSessions(idle=terms.idle.value, ttl_ms=round(terms.ttl_seconds * 1000))


def admission_text(terms: AdmissionTerms) -> str:
    return "" if terms == UNDECLARED else json.dumps(asdict(terms), sort_keys=True)


def admission_of(text: str) -> AdmissionTerms:
    """Of a fence record. BAD_ARGUMENT for what this version does not know."""
    fields = json.loads(text) if text else {}
    try:
        said = fields.get("sessions")
        sessions = None if said is None else _sessions(said["idle"], round(said["ttl_seconds"] * 1000))
        policy = _policy(fields.get("policy") or "")
        return AdmissionTerms(**{**fields, "policy": policy, "sessions": sessions})
    except (TypeError, KeyError) as error:
        raise CoreError(Reason.BAD_ARGUMENT, f"admission: {error}") from error


def _sessions(idle: str, ttl_ms: int) -> IdleTerms:
    try:
        return IdleTerms(Idle(idle), ttl_ms / 1000)
    except ValueError:
        raise CoreError(Reason.BAD_ARGUMENT, f"sessions.idle {idle!r}; legal: {', '.join(Idle)}") from None


def _policy(name: str) -> AdmissionPolicy | None:
    if not name:
        return None
    try:
        return AdmissionPolicy(name)
    except ValueError:
        legal = ", ".join(AdmissionPolicy)
        raise CoreError(Reason.BAD_ARGUMENT, f"admission.policy {name!r}; legal: {legal}") from None
