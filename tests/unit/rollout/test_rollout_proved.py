"""What a proof must say before an agent counts as back on its baseline, or as rid of a candidate."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_operator.rollout.inputs import AgentView, ProofView
from kvtier_operator.rollout.moves import proved, revoked

FENCE, BASELINE = 5, "sha256:base"


def proof(**other: Any) -> ProofView:
    said = {
        "fence": FENCE,
        "baseline_digest": BASELINE,
        "candidate_digest": "",
        "in_flight": 0,
        "valid": True,
        **other,
    }
    return ProofView(**said)


@pytest.mark.parametrize(
    ("said", "is_proved", "is_revoked"),
    [
        pytest.param(proof(), True, True, id="all-of-it"),
        pytest.param(proof(fence=FENCE + 1), True, True, id="under-a-later-fence"),
        pytest.param(proof(fence=FENCE - 1), False, False, id="under-an-earlier-fence"),
        pytest.param(proof(valid=False), False, False, id="over-another-nonce"),
        pytest.param(proof(candidate_digest="sha256:c"), False, False, id="holds-a-candidate"),
        pytest.param(proof(in_flight=1), False, True, id="steps-still-run"),
        pytest.param(proof(baseline_digest="sha256:other"), False, True, id="another-baseline"),
        pytest.param(None, False, False, id="nothing-said"),
    ],
)
def test_what_a_proof_proves(said: ProofView | None, is_proved: bool, is_revoked: bool) -> None:
    agent = AgentView("node-0", True, proof=said)
    assert proved(agent, FENCE, BASELINE) is is_proved
    assert revoked(agent, FENCE) is is_revoked
