"""Who gets the candidate, and what is compared: stable hashes, recomputable by anyone.

A session's place in [0, 1) depends on the rollout, its tenant and its root id only, so raising the fraction
never takes the candidate away from a session that has it. Knows strings; no session object.

Sections 1 and 4.7 of the evidence specification; "Canary" in the release design.
"""

from __future__ import annotations

import hashlib
from typing import Final

_ASSIGN: Final = b"kvtier/assign/1"
_SAMPLE: Final = b"kvtier/sample/1"
_STEP: Final = b"kvtier/sample-step/1"
_CHOICE: Final = b"kvtier/representative-step/1"


def assign(rollout_uid: str, tenant: str, session_root_id: str) -> float:
    """Place of a session in [0, 1), a multiple of 2**-53."""
    return _unit(_ASSIGN, rollout_uid, tenant, session_root_id)


def is_candidate(rollout_uid: str, tenant: str, session_root_id: str, fraction: float) -> bool:
    """Whether a session is served by the candidate at `fraction`; monotone in it."""
    return assign(rollout_uid, tenant, session_root_id) < fraction


def sampled(rollout_uid: str, request_id: str, fraction: float) -> bool:
    """Whether a request is compared with the exact answer; independent of its arm, monotone in `fraction`."""
    return _unit(_SAMPLE, rollout_uid, request_id) < fraction


def step_sampled(rollout_uid: str, request_id: str, step: int, fraction: float) -> bool:
    """Whether a step of a compared request is compared; by hash, never by load.

    A compared request without one compared step counts as missing, so short requests want a fraction of 1.
    """
    return _unit(_STEP, rollout_uid, request_id, str(step)) < fraction


def step_rank(request_id: str, step: int) -> float:
    """Order in [0, 1) by which one compared step represents its request in the displayed histogram."""
    return _unit(_CHOICE, request_id, str(step))


def _unit(salt: bytes, *parts: str) -> float:
    h = hashlib.blake2b(digest_size=8, person=hashlib.blake2b(salt, digest_size=16).digest())
    for part in parts:
        data = part.encode()
        # Lengths first: ("ab", "c") and ("a", "bc") are different sessions.
        h.update(len(data).to_bytes(4, "big"))
        h.update(data)
    return (int.from_bytes(h.digest(), "big") >> 11) * 2.0**-53
