"""Who may get the candidate: the blast radius exactly, monotone in the fraction, one arm per session root."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.release.enforcement import CacheEnforcement, ServedArm, SessionFacts
from kvtier_core.release.fences import Judgement
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms

LADDER = ("0.05", "0.1", "0.25", "0.5", "0.98")
NAMES = st.text("abcde", min_size=1, max_size=3)
SETS = st.frozensets(NAMES, max_size=3)


def enforcement(fraction: str, radius: BlastRadius | None = None, rollout: str = "uid") -> CacheEnforcement:
    """One agent's, under a grant of one step."""
    terms = GrantTerms(
        fence=FenceToken(1, rollout, 1, "Ramp", 0),
        candidate_digest="sha256:cc",
        baseline_digest="sha256:bb",
        ttl_ms=60_000,
        traffic_fraction=Decimal(fraction),
        sample_fraction=Decimal("0.05"),
        blast_radius=radius or BlastRadius(),
        selector=None,
    )
    out = CacheEnforcement(lambda: 0)
    out.grant(terms, Judgement.ADVANCE, 0)
    return out


def facts(tenant: str, request_class: str, root: str, request: str) -> SessionFacts:
    return SessionFacts(tenant, request_class, root, request)


@settings(max_examples=150, deadline=None)
@given(
    NAMES, st.text(max_size=8), st.lists(st.text(max_size=6), min_size=1, max_size=5), st.sampled_from(LADDER)
)
def test_a_root_has_one_arm_on_every_agent_and_for_every_request(
    tenant: str, root: str, requests: list[str], fraction: str
) -> None:
    agents = [enforcement(fraction) for _ in range(3)]
    arms = {a.assign(facts(tenant, "chat", root, request)).arm for a in agents for request in requests}
    assert len(arms) == 1


@settings(max_examples=150, deadline=None)
@given(NAMES, st.text(max_size=8))
def test_a_root_that_has_the_candidate_keeps_it_as_the_fraction_grows(tenant: str, root: str) -> None:
    arms = [enforcement(f).assign(facts(tenant, "chat", root, "r")).arm for f in LADDER]
    had = [arm is ServedArm.CANDIDATE for arm in arms]
    assert had == sorted(had)


@settings(max_examples=200, deadline=None)
@given(SETS, SETS, NAMES, NAMES, st.text(max_size=6), st.sampled_from(("0.5", "1")))
def test_the_blast_radius_is_honoured_exactly(
    tenants: frozenset[str],
    classes: frozenset[str],
    tenant: str,
    request_class: str,
    root: str,
    fraction: str,
) -> None:
    """Outside it nothing is served, compared or counted; inside, the fraction alone decides."""
    got = enforcement(fraction, BlastRadius(tenants, classes)).assign(facts(tenant, request_class, root, "r"))
    inside = (not tenants or tenant in tenants) and (not classes or request_class in classes)
    assert got.in_radius is inside
    if not inside:
        assert (got.arm, got.sampled) == (ServedArm.BASELINE, False)
    else:
        assert got.arm is enforcement(fraction).assign(facts(tenant, request_class, root, "r")).arm


def test_another_rollout_draws_other_sessions() -> None:
    """Or the same users would meet every candidate first."""
    roots = [f"root-{i}" for i in range(4000)]

    def chosen(uid: str) -> set[str]:
        one = enforcement("0.1", rollout=uid)
        return {r for r in roots if one.assign(facts("t", "chat", r, r)).arm is ServedArm.CANDIDATE}

    first, second = chosen("a"), chosen("b")
    assert 300 < len(first) < 500
    assert len(first & second) < 80
