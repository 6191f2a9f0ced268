"""What a mutating call of Control carries, what it leaves on disk, and what a proof says.

Why it exists: the node orders commands and needs no wire for that. It must not know engines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvtier_agent.admission_wire import admission_text
from kvtier_agent.cachesession import CacheName
from kvtier_core.admission import UNDECLARED, AdmissionTerms
from kvtier_core.release.fences import CommandKind, FenceRecord
from kvtier_core.release.leases import FenceToken


@dataclass(frozen=True)
class ProofFacts:
    """Digests recomputed from the live configuration, over a nonce."""

    baseline_digest: str
    candidate_digest: str
    in_flight_candidate: int
    highest_fence: int
    nonce_digest: bytes


def proof_facts(
    baseline: str, candidate: str, in_flight: int, highest_fence: int, nonce: bytes, boot_id: str
) -> ProofFacts:
    """Of what was recomputed now; the nonce's digest is of all that a proof names."""
    joined = nonce + baseline.encode() + candidate.encode() + boot_id.encode()
    return ProofFacts(baseline, candidate, in_flight, highest_fence, hashlib.sha256(joined).digest())


@dataclass(frozen=True)
class Command:
    """What every mutating call carries. `content` leaves out nonce, deadline and boot id."""

    cache: CacheName
    fence: FenceToken
    boot_id: str
    content: str


def record_of(
    command: Command,
    kind: CommandKind,
    baseline: str,
    key_secret: str = "",
    admission: AdmissionTerms = UNDECLARED,
    place: str = "",
) -> FenceRecord:
    """What must be durable before the command is acknowledged."""
    return FenceRecord(
        uid=command.cache.uid,
        namespace=command.cache.namespace,
        name=command.cache.name,
        value=command.fence.value,
        kind=kind,
        content=command.content,
        baseline_digest=baseline,
        rollout_uid=command.fence.rollout_uid,
        key_secret=key_secret,
        admission=admission_text(admission),
        place=place,
    )
