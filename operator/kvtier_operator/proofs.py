"""Checks an agent's proof: that it answered this nonce, and what it says it runs. Pure."""

from __future__ import annotations

import hashlib
from enum import StrEnum

from kvtier.v1 import control_pb2 as control


class ProofVerdict(StrEnum):
    """HOLDS, or the first thing that is wrong."""

    HOLDS = "Holds"
    NONCE_MISMATCH = "NonceMismatch"
    BOOT_CHANGED = "BootChanged"
    DIGEST_MISMATCH = "DigestMismatch"
    CANDIDATE_HELD = "CandidateHeld"


def nonce_digest(nonce: bytes, baseline: str, candidate: str, boot_id: str) -> bytes:
    """SHA-256 over the four joined, as agents compute it (kvtier.v1.Proof)."""
    return hashlib.sha256(nonce + baseline.encode() + candidate.encode() + boot_id.encode()).digest()


def check_proof(
    proof: control.Proof, *, nonce: bytes, boot_id: str, baseline: str, candidate_allowed: bool
) -> ProofVerdict:
    """Whether `proof` shows that boot `boot_id` runs `baseline`. With `candidate_allowed`, a candidate may
    be held beside it (a rollout is running); for a restored baseline it may not."""
    expected = nonce_digest(nonce, proof.baseline_digest, proof.candidate_digest, proof.boot_id)
    if proof.nonce_digest != expected:
        return ProofVerdict.NONCE_MISMATCH
    if proof.boot_id != boot_id:
        return ProofVerdict.BOOT_CHANGED
    if proof.baseline_digest != baseline:
        return ProofVerdict.DIGEST_MISMATCH
    if proof.candidate_digest and not candidate_allowed:
        return ProofVerdict.CANDIDATE_HELD
    return ProofVerdict.HOLDS
