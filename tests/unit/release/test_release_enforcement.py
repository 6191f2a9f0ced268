"""Leases, assignment, publication: by table, and by a state machine against a model of intervals."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import (
    CacheEnforcement,
    LocalReturn,
    ReturnReason,
    ServedArm,
    SessionFacts,
)
from kvtier_core.release.fences import Judgement
from kvtier_core.release.leases import MAX_TTL_MS, BlastRadius, FenceToken, GrantTerms, since
from kvtier_evidence import assignment

MS = 1_000_000


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000 * MS

    def __call__(self) -> int:
        return self.now

    def advance_ms(self, ms: int) -> None:
        self.now += ms * MS


def terms(
    fence: int = 1,
    *,
    stage: str = "Canary",
    fraction: str = "1",
    sample: str = "0",
    ttl_ms: int = 1000,
    digest: str = "sha256:cc",
    radius: BlastRadius | None = None,
) -> GrantTerms:
    return GrantTerms(
        fence=FenceToken(fence, "rollout", 1, stage, 0),
        candidate_digest=digest,
        baseline_digest="sha256:bb",
        ttl_ms=ttl_ms,
        traffic_fraction=Decimal(fraction),
        sample_fraction=Decimal(sample),
        blast_radius=radius or BlastRadius(),
        selector=None,
    )


def facts(root: str = "root", tenant: str = "beta", **more: object) -> SessionFacts:
    return replace(SessionFacts(tenant, "chat", root, root), **more)  # type: ignore[arg-type]


def granted(clock: FakeClock, wanted: GrantTerms | None = None) -> CacheEnforcement:
    enforcement = CacheEnforcement(clock)
    enforcement.grant(wanted or terms(), Judgement.ADVANCE, clock())
    return enforcement


def test_a_lease_ends_by_time_alone_at_the_next_publication() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    session = enforcement.assign(facts())
    assert session.arm is ServedArm.CANDIDATE
    clock.advance_ms(999)
    assert enforcement.may_publish(session)
    clock.advance_ms(1)
    assert not enforcement.may_publish(session)
    assert enforcement.returned == LocalReturn(ReturnReason.LEASE_EXPIRED, 1, "rollout")
    assert enforcement.plan_step(session, "root", 3, False).fallback == "LeaseExpired"


def test_permission_planned_before_expiry_is_not_permission_after_it() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    session = enforcement.assign(facts())
    assert enforcement.plan_step(session, "root", 1, True).publish is ServedArm.CANDIDATE
    clock.advance_ms(5000)
    assert not enforcement.may_publish(session)


def test_renewal_extends_from_receipt_and_is_never_shorter() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    clock.advance_ms(600)
    lease = enforcement.renew(1, "sha256:cc", 1000, clock())
    assert lease.remaining_ms(clock()) == 1000
    late = enforcement.renew(1, "sha256:cc", 1000, clock() - 900 * MS)
    assert late.remaining_ms(clock()) == 1000


@pytest.mark.parametrize(
    ("fence", "digest", "ttl", "after_ms", "reason"),
    [
        pytest.param(1, "sha256:cc", 1000, 1000, Reason.LEASE_EXPIRED, id="ended"),
        pytest.param(2, "sha256:cc", 1000, 0, Reason.FENCE_CONFLICT, id="other-fence"),
        pytest.param(1, "sha256:dd", 1000, 0, Reason.FENCE_CONFLICT, id="other-candidate"),
        pytest.param(1, "sha256:cc", 1001, 0, Reason.BAD_ARGUMENT, id="longer-than-the-grant"),
        pytest.param(1, "sha256:cc", 0, 0, Reason.BAD_ARGUMENT, id="no-time"),
    ],
)
def test_renewal_refused(fence: int, digest: str, ttl: int, after_ms: int, reason: Reason) -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    clock.advance_ms(after_ms)
    with pytest.raises(CoreError) as refused:
        enforcement.renew(fence, digest, ttl, clock())
    assert refused.value.reason is reason


def test_a_repeated_grant_neither_extends_nor_revives() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    clock.advance_ms(400)
    assert enforcement.grant(terms(), Judgement.REPEAT, clock()).remaining_ms(clock()) == 600
    clock.advance_ms(600)
    with pytest.raises(CoreError) as refused:
        enforcement.grant(terms(), Judgement.REPEAT, clock())
    assert refused.value.reason is Reason.LEASE_EXPIRED
    assert enforcement.lease() is None


def test_a_new_life_of_the_agent_takes_the_same_grant_again() -> None:
    clock = FakeClock()
    reborn = CacheEnforcement(clock, LocalReturn(ReturnReason.BOOT_RESTART, 1, "rollout"))
    assert reborn.lease() is None
    assert reborn.grant(terms(), Judgement.REPEAT, clock()).valid(clock())
    assert reborn.returned is None


def test_a_grant_that_was_slow_to_become_durable_does_not_begin() -> None:
    clock = FakeClock()
    received = clock()
    clock.advance_ms(1000)
    enforcement = CacheEnforcement(clock)
    with pytest.raises(CoreError) as refused:
        enforcement.grant(terms(), Judgement.ADVANCE, received)
    assert refused.value.reason is Reason.LEASE_EXPIRED
    assert enforcement.lease() is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ttl_ms": 0}, "ttl_ms"),
        ({"ttl_ms": 3_600_001}, "ttl_ms"),
        ({"traffic_fraction": Decimal("1.01")}, "traffic_fraction"),
        ({"sample_fraction": Decimal("NaN")}, "sample_fraction"),
        ({"traffic_fraction": Decimal("0.1"), "fence": FenceToken(1, "r", 1, "Shadow")}, "traffic_fraction"),
    ],
    ids=["no-ttl", "ttl-too-long", "over-one", "not-a-number", "traffic-in-shadow"],
)
def test_bad_terms_name_the_field(change: dict[str, object], field: str) -> None:
    clock = FakeClock()
    with pytest.raises(CoreError) as refused:
        granted(clock, replace(terms(), **change))  # type: ignore[arg-type]
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert field in refused.value.message


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"ttl_ms": 1}, id="shortest"),
        pytest.param({"ttl_ms": MAX_TTL_MS}, id="longest"),
        pytest.param({"traffic_fraction": Decimal(0), "sample_fraction": Decimal(1)}, id="fractions"),
        pytest.param({"fence": FenceToken(1, "r", 1, "Shadow"), "traffic_fraction": Decimal(0)}, id="shadow"),
    ],
)
def test_terms_at_their_bounds_are_taken(change: dict[str, object]) -> None:
    clock = FakeClock()
    wanted = replace(terms(), **change)  # type: ignore[arg-type]
    lease = granted(clock, wanted).lease()
    assert lease is not None
    assert lease.remaining_ms(clock()) == wanted.ttl_ms
    assert lease.remaining_ms(lease.expires_ns + MS) == 0


@pytest.mark.parametrize(
    ("sent", "counts"),
    [
        pytest.param(0, 50, id="nobody-says"),
        pytest.param(40, 40, id="as-it-was-sent"),
        pytest.param(60, 50, id="never-later-than-its-arrival"),
    ],
)
def test_since_when_a_permission_counts(sent: int, counts: int) -> None:
    assert since(sent, 50) == counts


def test_a_revocation_is_the_last_word_though_the_lease_had_ended_by_itself() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    session = enforcement.assign(facts())
    clock.advance_ms(1000)
    assert enforcement.why_exact(session) == "LeaseExpired"
    enforcement.revoke("GateFailed")
    assert enforcement.returned is None
    assert enforcement.why_exact(session) == "GateFailed"
    enforcement.revoke("")
    assert enforcement.why_exact(session) == "Revoked"
    again = enforcement.grant(terms(2), Judgement.ADVANCE, clock())
    assert again.remaining_ms(clock()) == 1000
    clock.advance_ms(1000)
    assert enforcement.why_exact(session) == "LeaseExpired"


@pytest.mark.parametrize(
    ("radius", "arm"),
    [
        pytest.param(BlastRadius(), ServedArm.CANDIDATE, id="all"),
        pytest.param(BlastRadius(frozenset({"beta"})), ServedArm.CANDIDATE, id="tenant-inside"),
        pytest.param(BlastRadius(frozenset({"gamma"})), ServedArm.BASELINE, id="tenant-outside"),
        pytest.param(
            BlastRadius(frozenset({"beta"}), frozenset({"long"})), ServedArm.BASELINE, id="class-outside"
        ),
        pytest.param(
            BlastRadius(frozenset({"beta"}), frozenset({"chat"})), ServedArm.CANDIDATE, id="class-inside"
        ),
    ],
)
def test_blast_radius(radius: BlastRadius, arm: ServedArm) -> None:
    session = granted(FakeClock(), terms(radius=radius)).assign(facts())
    assert session.arm is arm
    assert session.in_radius is (arm is ServedArm.CANDIDATE)


def test_assignment_is_monotone_in_the_fraction_and_near_it() -> None:
    roots = [f"root-{i}" for i in range(2000)]
    chosen: list[set[str]] = []
    for fraction in ("0.05", "0.25", "0.5", "1"):
        enforcement = granted(FakeClock(), terms(fraction=fraction))
        chosen.append({r for r in roots if enforcement.assign(facts(r)).arm is ServedArm.CANDIDATE})
        assert abs(len(chosen[-1]) / len(roots) - float(fraction)) < 0.04
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3]


def test_sampling_does_not_depend_on_the_arm_and_steps_are_sampled_inside() -> None:
    enforcement = granted(FakeClock(), terms(fraction="0.5", sample="0.5"))
    sessions = [enforcement.assign(facts(f"r{i}")) for i in range(2000)]
    for arm in ServedArm:
        of_arm = [s.sampled for s in sessions if s.arm is arm]
        assert abs(sum(of_arm) / len(of_arm) - 0.5) < 0.06
    sampled = next(s for s in sessions if s.sampled)
    plans = [enforcement.plan_step(sampled, "r", step, False).compare for step in range(1000)]
    assert 400 < sum(plans) < 600
    assert enforcement.plan_step(sampled, "r", plans.index(False), True).compare


def test_shadow_compares_but_publishes_the_exact_answer() -> None:
    enforcement = granted(FakeClock(), terms(stage="Shadow", fraction="0", sample="1"))
    session = enforcement.assign(facts())
    plan = enforcement.plan_step(session, "root", 1, True)
    assert (plan.publish, plan.compare) == (ServedArm.BASELINE, True)
    assert not enforcement.may_publish(session)


@pytest.mark.parametrize(
    ("probe", "arm", "held", "expected"),
    [
        pytest.param(True, ServedArm.CANDIDATE, True, ServedArm.CANDIDATE, id="probe-on-candidate"),
        pytest.param(True, ServedArm.BASELINE, True, ServedArm.BASELINE, id="probe-on-baseline"),
        pytest.param(True, ServedArm.CANDIDATE, False, Reason.NO_CANDIDATE, id="probe-without-grant"),
        pytest.param(False, ServedArm.CANDIDATE, True, Reason.BAD_ARGUMENT, id="forced-without-probe"),
        pytest.param(True, None, True, ServedArm.BASELINE, id="probe-unforced"),
        pytest.param(True, ServedArm.BASELINE, False, ServedArm.BASELINE, id="probe-on-baseline-alone"),
        pytest.param(True, None, False, ServedArm.BASELINE, id="probe-unforced-without-grant"),
    ],
)
def test_probes(probe: bool, arm: ServedArm | None, held: bool, expected: ServedArm | Reason) -> None:
    clock = FakeClock()
    shadow = terms(stage="Shadow", fraction="0")
    enforcement = granted(clock, shadow) if held else CacheEnforcement(clock)
    asked = facts(probe=probe, forced_arm=arm)
    if isinstance(expected, Reason):
        with pytest.raises(CoreError) as refused:
            enforcement.assign(asked)
        assert refused.value.reason is expected
        return
    session = enforcement.assign(asked)
    assert session.arm is expected
    assert not session.in_radius
    assert enforcement.may_publish(session) is (expected is ServedArm.CANDIDATE)


def test_a_session_keeps_its_arm_through_stages_but_not_through_a_revocation() -> None:
    clock = FakeClock()
    enforcement = granted(clock, terms(1))
    session = enforcement.assign(facts())
    enforcement.grant(terms(2, stage="Ramp"), Judgement.ADVANCE, clock())
    assert enforcement.may_publish(session)
    enforcement.revoke("IntentAbort")
    assert not enforcement.may_publish(session)
    assert enforcement.plan_step(session, "root", 1, False).fallback == "IntentAbort"
    enforcement.grant(terms(3), Judgement.ADVANCE, clock())
    assert not enforcement.may_publish(session), "a session that fell back stays on the exact path"
    assert enforcement.may_publish(enforcement.assign(facts("new")))


def test_a_session_opened_before_the_grant_stays_exact() -> None:
    clock = FakeClock()
    enforcement = CacheEnforcement(clock)
    session = enforcement.assign(facts())
    enforcement.grant(terms(sample="1"), Judgement.ADVANCE, clock())
    plan = enforcement.plan_step(session, "root", 1, True)
    assert (plan.publish, plan.compare, plan.fallback) == (ServedArm.BASELINE, False, "")


@pytest.mark.parametrize(
    "other",
    [
        terms(2, digest="sha256:dd"),
        replace(terms(2, stage="Shadow", fraction="0"), fence=FenceToken(2, "rollout", 2, "Shadow", 0)),
        replace(terms(2), fence=FenceToken(2, "another", 1, "Canary", 0)),
    ],
    ids=["candidate", "attempt", "rollout"],
)
def test_another_candidate_takes_over_no_session_of_the_first(other: GrantTerms) -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    session = enforcement.assign(facts())
    enforcement.grant(other, Judgement.ADVANCE, clock())
    assert not enforcement.may_publish(session)
    assert enforcement.plan_step(session, "root", 1, False).fallback == "CandidateReplaced"


def test_expiry_between_two_grants_is_noticed_though_nobody_looked() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    session = enforcement.assign(facts())
    clock.advance_ms(1000)
    enforcement.grant(terms(2), Judgement.ADVANCE, clock())
    assert not enforcement.may_publish(session)


def test_steps_in_flight_are_counted_also_when_they_fail() -> None:
    enforcement = granted(FakeClock())
    with enforcement.candidate_step():
        assert enforcement.in_flight == 1
        with pytest.raises(RuntimeError), enforcement.candidate_step():
            raise RuntimeError
    assert enforcement.in_flight == 0


class LeaseMachine(RuleBasedStateMachine):
    """A candidate's answer leaves only inside an unbroken interval of permission of its own candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.enforcement = CacheEnforcement(self.clock)
        self.fence = 0
        self.digest = ""
        self.until = 0
        self.interval = 0
        self.sessions: list[tuple[object, int]] = []

    def held(self) -> bool:
        return self.clock.now < self.until

    @rule(ttl=st.integers(1, 500), digest=st.sampled_from(["sha256:c1", "sha256:c2"]))
    def grant(self, ttl: int, digest: str) -> None:
        self.fence += 1
        if not (self.held() and digest == self.digest):
            self.interval += 1
        wanted = terms(self.fence, ttl_ms=ttl, digest=digest)
        self.enforcement.grant(wanted, Judgement.ADVANCE, self.clock())
        self.digest, self.until = digest, self.clock.now + ttl * MS

    @rule(share=st.floats(0.01, 1))
    def renew(self, share: float) -> None:
        lease = self.enforcement.lease()
        if lease is None:
            with pytest.raises(CoreError):
                self.enforcement.renew(self.fence, self.digest, 1, self.clock())
            return
        ttl = max(1, int(lease.terms.ttl_ms * share))
        self.enforcement.renew(self.fence, self.digest, ttl, self.clock())
        self.until = max(self.until, self.clock.now + ttl * MS)

    @rule()
    def revoke(self) -> None:
        self.enforcement.revoke("GateFailed")
        self.until = 0

    @rule(ms=st.integers(1, 700))
    def wait(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @rule(root=st.integers(0, 1000))
    def open(self, root: int) -> None:
        session = self.enforcement.assign(facts(str(root)))
        assert (session.arm is ServedArm.CANDIDATE) == self.held()
        self.sessions.append((session, self.interval if self.held() else 0))

    @invariant()
    def publication_follows_the_interval(self) -> None:
        for session, interval in self.sessions:
            allowed = self.held() and interval == self.interval and interval > 0
            assert self.enforcement.may_publish(session) == allowed  # type: ignore[arg-type]

    @invariant()
    def the_lease_is_the_model(self) -> None:
        assert (self.enforcement.lease() is not None) == self.held()


LeaseMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


NARROWED = [
    pytest.param({"radius": BlastRadius(frozenset({"alpha"}))}, "OutOfRadius", id="tenant-outside"),
    pytest.param(
        {"radius": BlastRadius(frozenset(), frozenset({"long"}))}, "OutOfRadius", id="class-outside"
    ),
    pytest.param({"fraction": "0"}, "OutOfRadius", id="fraction-below"),
    pytest.param({"radius": BlastRadius(frozenset({"beta"}))}, "", id="still-inside"),
]


@pytest.mark.parametrize(("change", "fallback"), NARROWED)
def test_an_edit_that_reaches_less_far_reaches_open_sessions(change: dict[str, Any], fallback: str) -> None:
    """The same permission, granted again with another radius or fraction: whoever is outside now is exact
    from the next step on, published or not."""
    clock = FakeClock()
    enforcement = granted(clock)
    session = enforcement.assign(facts())
    assert session.arm is ServedArm.CANDIDATE
    again = enforcement.grant(terms(2, **change), Judgement.ADVANCE, clock())
    assert again.epoch == session.epoch
    plan = enforcement.plan_step(session, "root", 3, False)
    assert plan.fallback == fallback
    assert (plan.publish is ServedArm.CANDIDATE) is (not fallback)
    assert enforcement.may_publish(session) is (not fallback)


def test_a_compared_session_outside_a_narrowed_radius_is_compared_no_more() -> None:
    clock = FakeClock()
    enforcement = granted(clock, terms(fraction="0", sample="1"))
    session = enforcement.assign(facts())
    assert enforcement.plan_step(session, "root", 3, True).compare
    outside = BlastRadius(frozenset({"alpha"}))
    enforcement.grant(terms(2, fraction="0", sample="1", radius=outside), Judgement.ADVANCE, clock())
    plan = enforcement.plan_step(session, "root", 4, True)
    assert (plan.publish, plan.compare, plan.fallback) == (ServedArm.BASELINE, False, "")


def test_a_compared_session_is_compared_also_under_the_grant_of_the_next_stage() -> None:
    clock = FakeClock()
    enforcement = granted(clock, terms(stage="Shadow", fraction="0", sample="1"))
    session = enforcement.assign(facts())
    enforcement.grant(terms(2, fraction="0", sample="1"), Judgement.ADVANCE, clock())
    plan = enforcement.plan_step(session, "root", 4, True)
    assert (plan.publish, plan.compare, plan.fallback) == (ServedArm.BASELINE, True, "")


@pytest.mark.parametrize("arm", list(ServedArm))
def test_a_session_that_was_not_sampled_is_never_compared(arm: ServedArm) -> None:
    fraction = "1" if arm is ServedArm.CANDIDATE else "0"
    enforcement = granted(FakeClock(), terms(fraction=fraction, sample="0"))
    session = enforcement.assign(facts())
    assert session.arm is arm
    plans = [enforcement.plan_step(session, "root", step, step == 0) for step in range(64)]
    assert not any(plan.compare for plan in plans)


def test_whom_a_grant_still_reaches_is_found_once_for_each_session_and_kept_for_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step of each layer asks, and sessions come for as long as a grant lasts."""
    monkeypatch.setattr("kvtier_core.release.enforcement._MAX_REACHED", 3)
    clock = FakeClock()
    enforcement = granted(clock)
    sessions = [enforcement.assign(facts(f"root-{number}")) for number in range(10)]
    enforcement.grant(terms(2), Judgement.ADVANCE, clock())
    looked: list[str] = []
    below = assignment.is_candidate

    def counted(rollout: str, tenant: str, root: str, fraction: float) -> bool:
        looked.append(root)
        return below(rollout, tenant, root, fraction)

    monkeypatch.setattr(assignment, "is_candidate", counted)
    for session in sessions:
        assert enforcement.may_publish(session) and enforcement.may_publish(session)
        assert len(enforcement._reached) <= 3
    assert looked == [f"root-{number}" for number in range(10)]


def test_who_asks_for_the_last_return_first_learns_of_a_lease_that_has_ended() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    clock.advance_ms(1000)
    assert enforcement.returned == LocalReturn(ReturnReason.LEASE_EXPIRED, 1, "rollout")


def test_a_probe_is_of_the_candidate_whatever_the_radius() -> None:
    clock = FakeClock()
    enforcement = granted(clock)
    probe = enforcement.assign(facts(probe=True, forced_arm=ServedArm.CANDIDATE))
    nobody = BlastRadius(frozenset({"nobody"}))
    enforcement.grant(terms(2, fraction="0", radius=nobody), Judgement.ADVANCE, clock())
    assert enforcement.may_publish(probe)


def test_a_fraction_that_grows_keeps_who_was_below_it_and_takes_nobody_in() -> None:
    clock = FakeClock()
    enforcement = granted(clock, terms(fraction="0.3"))
    sessions = [enforcement.assign(facts(f"root-{number}")) for number in range(60)]
    enforcement.grant(terms(2, fraction="0.6"), Judgement.ADVANCE, clock())
    for session in sessions:
        assert enforcement.may_publish(session) is (session.arm is ServedArm.CANDIDATE)
    enforcement.grant(terms(3, fraction="0.1"), Judgement.ADVANCE, clock())
    left = [enforcement.may_publish(session) for session in sessions]
    below = [enforcement.assign(facts(f"root-{number}")).arm for number in range(60)]
    assert left == [arm is ServedArm.CANDIDATE for arm in below]
