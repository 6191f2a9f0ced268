"""Plans of a step: each legal one is found and priced, the least cost wins, the others say why they lost."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.admission import Fallback, FallbackChoice, choose_fallback
from kvtier_core.placements.preference import RECENCY, PlacementPreference, PlanKind
from kvtier_core.planning.candidates import ORDER, Approximate, Candidate, Lost, Route, candidates
from kvtier_core.planning.choice import Decision, decide
from kvtier_core.planning.facts import (
    FRAME,
    Credits,
    DeclaredCost,
    Rates,
    StepFacts,
    Terms,
    TierFacts,
)
from kvtier_core.units import BytesPerSecond, FlopPerSecond

PARTITION, MOVED = PlanKind.SUPPORT_PARTITION, PlanKind.ALL_ROWS_MOVED
HEADS, ON_CPU = PlanKind.HEAD_GROUPS, PlanKind.REQUEST_ON_CPU
GPU, CPU, NVME = 0, 1, 2
PAYLOAD = 1 << 20
TIERS = (
    TierFacts("hbm", "gpu", in_place=True, source=True, by_head=True, read=BytesPerSecond(8.0 * PAYLOAD)),
    TierFacts("ram", "cpu", in_place=True, source=True, by_head=True, read=BytesPerSecond(4.0 * PAYLOAD)),
    TierFacts(
        "flash", "nvme", in_place=False, source=True, by_head=False, read=BytesPerSecond(2.0 * PAYLOAD)
    ),
)
# A chunk of 256 rows is attended in 1/8 s.
RATES = Rates(row_seconds=1.0 / (8 * 256))
BY_TIME = DeclaredCost()
PLENTY = Credits(staging_bytes=64 * PAYLOAD)


def facts(*where: int, last: int = 256, queries: int = 1) -> StepFacts:
    return StepFacts(where, last, 256, PAYLOAD, query_heads=8, kv_heads=4, head_dim=64, queries=queries)


def plans(
    step: StepFacts,
    tiers: tuple[TierFacts, ...] = TIERS,
    credits: Credits = PLENTY,
    rates: Rates = RATES,
    cost: DeclaredCost = BY_TIME,
) -> tuple[Candidate, ...]:
    return candidates(step, tiers, credits, rates, cost)


def of(step: StepFacts, kind: PlanKind, **changes: object) -> Candidate:
    return next(plan for plan in plans(step, **changes) if plan.kind is kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "kind", "seconds", "exposed", "moved", "staging"),
    [
        pytest.param((CPU, CPU), PARTITION, 0.25, 0.0, 0, 0, id="partition-in-place"),
        pytest.param((CPU, CPU), ON_CPU, 0.25, 0.0, 0, 0, id="on-cpu"),
        # Two blocks of 1/4 s each, then the last chunk's 1/8 s.
        pytest.param((CPU, CPU), MOVED, 0.625, 0.375, 2, 2, id="moved"),
        # Four heads of 1/8 s a transfer and 1/16 s of attention each.
        pytest.param((CPU, CPU), HEADS, 0.75, 0.5, 2, 4, id="heads-in-one-slice"),
        # One block of 1/2 s; the chunk in memory cannot go first, since the merge is ascending.
        pytest.param((NVME, GPU), PARTITION, 0.75, 0.5, 1, 1, id="partition-waits-for-storage"),
        pytest.param((GPU, GPU, NVME), PARTITION, 0.625, 0.25, 1, 1, id="storage-behind-attention"),
    ],
)
def test_prices_are_those_worked_by_hand(
    where: tuple[int, ...], kind: PlanKind, seconds: float, exposed: float, moved: int, staging: int
) -> None:
    plan = of(facts(*where), kind)
    assert plan.lost is None
    assert plan.seconds == pytest.approx(seconds)
    assert plan.exposed == pytest.approx(exposed)
    assert plan.cost == pytest.approx(seconds)
    assert (plan.moved, plan.staging) == (moved * PAYLOAD, staging * PAYLOAD)


def test_slices_are_as_many_heads_as_two_buffers_hold() -> None:
    two_heads = Credits(staging_bytes=2 * PAYLOAD)
    plan = of(facts(CPU, CPU), HEADS, credits=two_heads)
    assert (plan.group_heads, plan.staging, plan.lost) == (2, 2 * PAYLOAD, None)
    none = of(facts(CPU, CPU), HEADS, credits=Credits(staging_bytes=PAYLOAD // 2))
    assert none.lost is Lost.STAGING_TOO_SMALL


@pytest.mark.parametrize(
    ("staging", "buffers", "seconds"),
    [
        # Nothing is read while a block is attended; the next block is; of four, all but the first are there.
        pytest.param(PAYLOAD, 1, 4 * 0.625, id="one-block"),
        pytest.param(2 * PAYLOAD - 1, 1, 4 * 0.625, id="nearly-two"),
        pytest.param(2 * PAYLOAD, 2, 4 * 0.5 + 0.125, id="two"),
        pytest.param(64 * PAYLOAD, 8, 4 * 0.5 + 0.125, id="plenty"),
    ],
)
def test_a_stream_does_with_as_few_buffers_as_there_is_staging_for(
    staging: int, buffers: int, seconds: float
) -> None:
    for kind in (PARTITION, MOVED):
        plan = of(facts(*[NVME] * 4), kind, credits=Credits(staging, buffers=8))
        assert (plan.lost, plan.buffers, plan.staging) == (None, buffers, min(4, buffers) * PAYLOAD)
        assert plan.seconds == pytest.approx(seconds)
        none = of(facts(*[NVME] * 4), kind, credits=Credits(PAYLOAD - 1, buffers=8))
        assert none.lost is Lost.STAGING_TOO_SMALL


def without(tier: int, **changes: object) -> tuple[TierFacts, ...]:
    changed = dataclasses.replace(TIERS[tier], **changes)  # type: ignore[arg-type]
    return (*TIERS[:tier], changed, *TIERS[tier + 1 :])


@pytest.mark.parametrize(
    ("where", "tiers", "kind", "lost"),
    [
        pytest.param((GPU, CPU), TIERS, ON_CPU, Lost.REQUEST_SPLIT, id="rows-on-both-sides"),
        pytest.param((NVME, CPU), TIERS, ON_CPU, Lost.REQUEST_SPLIT, id="rows-in-storage"),
        pytest.param((NVME, CPU), TIERS, HEADS, Lost.TIER_INCAPABLE, id="storage-verifies-whole-blocks"),
        pytest.param(
            (CPU, CPU), without(CPU, in_place=False), ON_CPU, Lost.TIER_INCAPABLE, id="cpu-not-readable"
        ),
        pytest.param(
            (GPU, NVME), without(NVME, source=False), PARTITION, Lost.TIER_INCAPABLE, id="no-way-out"
        ),
        pytest.param((GPU, NVME), without(NVME, source=False), MOVED, Lost.TIER_INCAPABLE, id="not-moved"),
    ],
)
def test_a_plan_that_no_record_permits_says_so(
    where: tuple[int, ...], tiers: tuple[TierFacts, ...], kind: PlanKind, lost: Lost
) -> None:
    assert of(facts(*where), kind, tiers=tiers).lost is lost


def test_rows_that_may_not_be_attended_where_they_are_are_moved_or_streamed_past() -> None:
    plan = of(facts(GPU, CPU, NVME), PARTITION, tiers=without(CPU, in_place=False))
    assert [plan.route(tier) for tier in (GPU, CPU, NVME)] == [Route.IN_PLACE, Route.MOVED, Route.NEAR]


def chosen(decision: Decision) -> PlanKind:
    assert decision.chosen is not None
    assert isinstance(decision.chosen.kind, PlanKind)
    return decision.chosen.kind


def test_the_least_declared_cost_wins_and_each_other_says_why_it_lost() -> None:
    decision = decide(plans(facts(NVME, CPU, GPU)), Terms(slack=0.9))
    assert chosen(decision) is PARTITION
    assert decision.why() == {
        "requestOnCpu": "REQUEST_SPLIT",
        "allRowsMoved": "DEADLINE",
        "headGroups": "TIER_INCAPABLE",
        "selectedSupport": "UNDECLARED_APPROXIMATION",
    }
    assert decide(plans(facts(NVME, CPU, GPU)), Terms()).why()["allRowsMoved"] == "COST"


def test_a_declared_cost_may_be_other_than_time() -> None:
    dear_staging = DeclaredCost(second=0.0, moved_byte=1.0)
    decision = decide(plans(facts(CPU, CPU), cost=dear_staging), Terms())
    assert chosen(decision) is ON_CPU
    unmoved = decide(plans(facts(GPU, CPU), cost=dear_staging), Terms())
    assert chosen(unmoved) is PARTITION


def test_ties_go_by_order() -> None:
    assert chosen(decide(plans(facts(CPU)), Terms())) is ON_CPU
    assert chosen(decide(plans(facts(GPU)), Terms())) is PARTITION


def test_the_policy_of_the_cache_is_obeyed_before_cost() -> None:
    heads = PlacementPreference("headinfer", allowed=frozenset({HEADS, PARTITION}), prefer=HEADS)
    decision = decide(plans(facts(CPU, CPU)), Terms(), heads)
    assert chosen(decision) is HEADS
    assert decision.why()["supportPartition"] == "NOT_PREFERRED"
    assert decision.why()["allRowsMoved"] == "PLACEMENT_POLICY"
    late = decide(plans(facts(CPU, CPU)), Terms(slack=0.3), heads)
    assert chosen(late) is PARTITION
    tight = dataclasses.replace(heads, staging_bytes=PAYLOAD)
    assert decide(plans(facts(CPU, CPU)), Terms(), tight).why()["headGroups"] == "STAGING_TOO_SMALL"


@pytest.mark.parametrize("kind", ORDER)
def test_a_plan_may_be_forced(kind: PlanKind) -> None:
    decision = decide(plans(facts(CPU, CPU)), Terms(), forced=kind)
    assert chosen(decision) is kind
    illegal = decide(plans(facts(NVME, CPU)), Terms(), forced=HEADS)
    assert (illegal.chosen, illegal.fallback) == (None, Fallback.REJECT_NO_LEGAL_PATH)


def test_a_plan_that_failed_is_not_taken_again() -> None:
    decision = decide(plans(facts(NVME, GPU)), Terms(), failed=frozenset({PARTITION}))
    assert chosen(decision) is MOVED
    assert decision.why()["supportPartition"] == "FAILED"


def test_what_nobody_measured_is_taken_only_when_nothing_was() -> None:
    unmeasured = without(NVME, read=None)
    blind = decide(plans(facts(NVME, GPU), rates=Rates(None)), Terms(slack=1e-9))
    assert chosen(blind) is PARTITION
    cpu_unknown = without(CPU, read=None)
    assert decide(plans(facts(CPU, CPU), cpu_unknown), Terms()).why()["allRowsMoved"] == "UNMEASURED"
    assert chosen(decide(plans(facts(NVME, GPU), unmeasured), Terms())) is PARTITION


def test_many_queries_are_priced_by_arithmetic() -> None:
    rates = Rates(1e-9, FlopPerSecond(1e9))
    block = of(facts(GPU, queries=256), PARTITION, rates=rates)
    assert block.seconds == pytest.approx(4 * 256 * 256 * 8 * 64 / 1e9)


@pytest.mark.parametrize(
    ("terms", "action"),
    [
        pytest.param(Terms(slack=0.01), Fallback.REJECT_NO_LEGAL_PATH, id="nothing-listed"),
        pytest.param(
            Terms(slack=0.01, recompute=0.005, retry=0.001), Fallback.REJECT_NO_LEGAL_PATH, id="not-allowed"
        ),
        pytest.param(
            Terms(
                slack=0.01,
                recompute=0.005,
                retry=0.001,
                fallbacks=frozenset({Fallback.RECOMPUTE_EXACT, Fallback.POSTPONE_FOR_EXACT_RETRY}),
            ),
            Fallback.RECOMPUTE_EXACT,
            id="recompute-before-postpone",
        ),
        pytest.param(
            Terms(
                slack=0.01,
                recompute=0.5,
                retry=0.001,
                fallbacks=frozenset({Fallback.POSTPONE_FOR_EXACT_RETRY}),
            ),
            Fallback.POSTPONE_FOR_EXACT_RETRY,
            id="postpone",
        ),
        pytest.param(
            Terms(slack=0.01, fallbacks=frozenset({Fallback.ACCEPT_DECLARED_DEGRADED})),
            Fallback.REJECT_NO_LEGAL_PATH,
            id="an-exact-request-is-never-degraded",
        ),
        pytest.param(
            Terms(
                slack=0.01,
                exact=False,
                approximation_allowed=True,
                fallbacks=frozenset({Fallback.ACCEPT_DECLARED_DEGRADED}),
            ),
            Fallback.ACCEPT_DECLARED_DEGRADED,
            id="degraded-openly",
        ),
    ],
)
def test_without_a_plan_in_time_the_contract_decides(terms: Terms, action: Fallback) -> None:
    decision = decide(plans(facts(NVME, GPU)), terms)
    assert (decision.chosen, decision.fallback) == (None, action)
    assert decision.why()["supportPartition"] == "DEADLINE"


def test_without_a_deadline_a_path_that_is_not_there_is_still_none() -> None:
    assert choose_fallback(FallbackChoice(slack=math.inf)) is Fallback.REJECT_NO_LEGAL_PATH
    assert choose_fallback(FallbackChoice(slack=math.inf, retry=9.0)) is Fallback.POSTPONE_FOR_EXACT_RETRY


# Properties.

rates_of = st.builds(Rates, row_seconds=st.floats(1e-9, 1e-3), setup=st.floats(0.0, 1e-2))
bandwidths = st.floats(1e3, 1e10)
wheres = st.lists(st.sampled_from([GPU, CPU, NVME]), min_size=1, max_size=12).map(tuple)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[StepFacts, tuple[TierFacts, ...], Credits, Rates, DeclaredCost]:
    where = draw(wheres)
    if draw(st.booleans()):
        where = (*where, FRAME)
    tiers = tuple(
        dataclasses.replace(
            tier,
            in_place=draw(st.booleans()),
            source=draw(st.booleans()),
            read=draw(st.one_of(st.none(), bandwidths.map(BytesPerSecond))),
        )
        for tier in TIERS
    )
    step = facts(*where, last=draw(st.integers(1, 256)), queries=draw(st.sampled_from([1, 64])))
    cost = DeclaredCost(draw(st.floats(0.0, 2.0)), draw(st.sampled_from([0.0, 1e-9])), 0.0)
    return step, tiers, Credits(draw(st.integers(0, 32)) * PAYLOAD), draw(rates_of), cost


def legal(plan: Candidate, step: StepFacts, tiers: tuple[TierFacts, ...], credits: Credits) -> bool:
    """Said again, from the records."""
    routes = dict(plan.routes)
    if set(routes) != set(step.where) or plan.staging > credits.staging_bytes:
        return False
    for tier, route in routes.items():
        if tier == FRAME:
            continue
        if route is Route.IN_PLACE and not tiers[tier].in_place:
            return False
        if route in (Route.NEAR, Route.MOVED) and not tiers[tier].source:
            return False
        if route is Route.SLICED and not (tiers[tier].source and tiers[tier].by_head):
            return False
    return True


@given(worlds(), st.one_of(st.none(), st.floats(1e-6, 100.0)), st.sampled_from([None, *ORDER]))
def test_what_is_chosen_is_legal_in_time_and_nothing_cheaper_was_skipped(
    world: tuple[StepFacts, tuple[TierFacts, ...], Credits, Rates, DeclaredCost],
    slack: float | None,
    forced: PlanKind | None,
) -> None:
    step, tiers, credits, rates, cost = world
    found = candidates(step, tiers, credits, rates, cost)
    decision = decide(found, Terms(slack=slack), forced=forced)
    assert {plan.kind for plan in decision.considered} == {*ORDER, Approximate.SELECTED_SUPPORT}
    assert all((plan.lost is None) == (plan is decision.chosen) for plan in decision.considered)
    assert (decision.chosen is None) == (decision.fallback is not None)
    open_to = [plan for plan in found if plan.lost is None and (forced is None or plan.kind is forced)]
    anything_priced = any(plan.seconds is not None for plan in open_to)
    in_time = [
        plan
        for plan in open_to
        if (not anything_priced if plan.seconds is None else slack is None or plan.seconds <= slack)
    ]
    if decision.chosen is None:
        assert not in_time
        assert decision.fallback is Fallback.REJECT_NO_LEGAL_PATH
        return
    best = decision.chosen
    assert isinstance(best.kind, PlanKind)
    assert best in in_time
    assert legal(best, step, tiers, credits)
    priced = [plan.cost for plan in in_time if plan.cost is not None]
    if priced:
        assert best.cost == min(priced)
    again = decide(candidates(step, tiers, credits, rates, cost), Terms(slack=slack), forced=forced)
    assert again == decision


@given(worlds(), st.sampled_from([GPU, CPU, NVME]), st.floats(1.0, 8.0))
def test_more_bandwidth_never_makes_a_step_dearer(
    world: tuple[StepFacts, tuple[TierFacts, ...], Credits, Rates, DeclaredCost], tier: int, factor: float
) -> None:
    step, tiers, credits, rates, cost = world
    read = tiers[tier].read
    if read is None:
        return
    faster = list(tiers)
    faster[tier] = dataclasses.replace(tiers[tier], read=BytesPerSecond(read.value * factor))
    before = decide(candidates(step, tiers, credits, rates, cost), Terms())
    after = decide(candidates(step, tuple(faster), credits, rates, cost), Terms())
    assert (before.chosen is None) == (after.chosen is None)
    if before.chosen is None or before.chosen.cost is None:
        return
    assert after.chosen is not None
    assert after.chosen.cost is not None
    assert after.chosen.cost <= before.chosen.cost * (1 + 1e-12)


FALLBACKS = st.sets(st.sampled_from(list(Fallback))).map(frozenset)
INEXACT = {Fallback.ACCEPT_APPROXIMATE, Fallback.WIDEN_SEARCH, Fallback.ACCEPT_DECLARED_DEGRADED}


@given(worlds(), st.floats(0.0, 10.0), FALLBACKS, st.booleans(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_an_exact_request_never_reaches_an_approximate_plan(
    world: tuple[StepFacts, tuple[TierFacts, ...], Credits, Rates, DeclaredCost],
    slack: float,
    allowed: frozenset[Fallback],
    approximation: bool,
    recompute: float,
    retry: float,
) -> None:
    step, tiers, credits, rates, cost = world
    terms = Terms(slack, True, approximation, allowed, recompute, retry, selector=0.0)
    decision = decide(candidates(step, tiers, credits, rates, cost), terms, RECENCY)
    assert decision.fallback not in INEXACT
    if decision.chosen is not None:
        assert isinstance(decision.chosen.kind, PlanKind)
    if decision.fallback in (Fallback.RECOMPUTE_EXACT, Fallback.POSTPONE_FOR_EXACT_RETRY):
        assert decision.fallback in allowed
    assert math.isfinite(slack)
