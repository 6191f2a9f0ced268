"""An exact candidate beside the baseline on one engine: its sessions follow its placement, the others do not,
and nobody's answers change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from kvtier_agent.config import TierConfig
from kvtier_agent.core_engine import CoreEngine
from kvtier_agent.engine_port import FrameInput, FrameMode, FrameResult, SessionHandle, SessionTerms
from kvtier_agent.manifests import check_candidate, placed_terms
from kvtier_agent.tierdirs import NodeTiers
from kvtier_core.admission import Fallback as PlannedFallback
from kvtier_core.appends import Append
from kvtier_core.attend import Attended
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planner import Plan
from kvtier_core.promises import Promise
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import Fallback, Placement, RuntimeManifest, TierRole
from kvtier_evidence.window import WindowKey
from tests.engine.agent_process import baseline_manifest, default_tiers
from tests.unit.agent.agent_fakes import Bench

SLICES = Placement(policy="headGroups", parameters=Parameters({"stagingBytes": 16 << 20}))
MODEL = baseline_manifest().model.geometry
CHUNK = baseline_manifest().chunk_tokens
BUDGETS = {"gpu-sim": 2 << 20, "dram": 16 << 20, "nvme": 0}
TOKENS = 6 * CHUNK
EXACT = FrameMode(publish_candidate=False, compare=False, candidate=None, may_publish=lambda: False)


def running() -> RuntimeManifest:
    manifest = baseline_manifest(budgets=BUDGETS)
    resident = tuple(tier.model_copy(update={"role": TierRole.RESIDENT}) for tier in manifest.tiers)
    return manifest.model_copy(update={"tiers": resident})


def terms_of(baseline: RuntimeManifest, candidate: RuntimeManifest) -> GrantTerms:
    terms = GrantTerms(
        fence=FenceToken(2, "rollout", 1, "Canary", 0),
        candidate_digest=candidate.digest(),
        baseline_digest=baseline.digest(),
        ttl_ms=60_000,
        traffic_fraction=Decimal(1),
        sample_fraction=Decimal(0),
        blast_radius=BlastRadius(),
        selector=None,
    )
    return placed_terms(baseline, candidate, terms)


class Agent:
    """One engine that runs recency and was granted a candidate that moves slices of heads."""

    def __init__(self, folder: Path) -> None:
        configs = [TierConfig.parse(json.dumps(tier)) for tier in default_tiers(folder)]
        self.tiers = NodeTiers(configs, "uid-a")
        self.baseline = running()
        self.candidate = self.baseline.model_copy(update={"placement": SLICES})
        self.engine = CoreEngine(self.baseline, self.tiers.for_manifest(self.baseline))
        self.terms = terms_of(self.baseline, self.candidate)
        self.engine.check_candidate(self.terms)

    def mode(self, *, publish: bool = True, compare: bool = False, may: bool = True) -> FrameMode:
        return FrameMode(publish, compare, self.terms, lambda: may)

    def open(self, *, serves: bool) -> SessionHandle:
        return self.engine.open_session(
            SessionTerms("alpha", 0.125, TOKENS + 64, self.terms if serves else None, serves=serves)
        )

    def frame(self, session: SessionHandle, mode: FrameMode, step: int, first: int, rows: int) -> FrameResult:
        """Layer 0 of a step whose rows are those of every session at that place."""
        random = np.random.default_rng(first)
        k, v, q = (
            random.standard_normal((rows, heads, MODEL.head_dim), dtype=np.float32).tobytes()
            for heads in (MODEL.kv_heads, MODEL.kv_heads, MODEL.query_heads)
        )
        committed = first if step else 0
        return self.engine.step(
            FrameInput(session.session_id, session.generation, step, 0, first, k, v, first, q, committed),
            mode,
        )

    def prefill(self, session: SessionHandle, mode: FrameMode) -> FrameResult:
        for first in range(0, TOKENS, CHUNK):
            answer = self.frame(session, mode, 0, first, CHUNK)
        return answer


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    try:
        yield made
    finally:
        made.engine.close()
        made.tiers.close()


def test_sessions_of_both_run_by_their_own_plans_to_the_same_bits(agent: Agent) -> None:
    mine, theirs = agent.open(serves=True), agent.open(serves=False)
    candidate, baseline = agent.prefill(mine, agent.mode()), agent.prefill(theirs, EXACT)
    assert (candidate.receipt.plan_kind, baseline.receipt.plan_kind) == ("headGroups", "supportPartition")
    assert candidate.out == baseline.out
    assert candidate.from_candidate and not baseline.from_candidate
    assert candidate.receipt.manifest_digest == agent.candidate.digest()
    assert baseline.receipt.manifest_digest == agent.baseline.digest()
    assert {candidate.receipt.exactness.value, baseline.receipt.exactness.value} == {"EXACT"}


def test_a_comparison_is_of_two_plans_over_the_same_rows(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of an answer with itself: were the other plan wrong in one value, it would be seen."""
    session = agent.open(serves=False)
    agent.prefill(session, agent.mode(publish=False))
    shadow = agent.frame(session, agent.mode(publish=False, compare=True), 0, TOKENS, 1)
    assert shadow.comparison is not None and shadow.comparison.diff_norm == 0.0
    assert shadow.receipt.plan_kind == "supportPartition"
    assert not shadow.from_candidate
    attention = agent.engine._engine._plans.attention
    original = attention.exact

    def spoiled(plan: Plan, append: Append, query: Query, promise: Promise | None = None) -> Attended:
        answer = original(plan, append, query, promise)
        if plan.kind is PlanKind.HEAD_GROUPS:
            answer.out[0, 0, 0] += 0.5
        return answer

    monkeypatch.setattr(attention, "exact", spoiled)
    wrong = agent.frame(session, agent.mode(publish=False, compare=True), 0, TOKENS + 1, 1)
    assert wrong.comparison is not None and wrong.comparison.diff_norm == 0.5


@pytest.mark.parametrize(("value", "differs"), [(1e-30, True), (0.0, False)])
def test_a_difference_whose_square_underflows_is_a_difference(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, value: float, differs: bool
) -> None:
    session = agent.open(serves=False)
    agent.prefill(session, EXACT)
    attention = agent.engine._engine._plans.attention
    original = attention.exact

    def alike(plan: Plan, append: Append, query: Query, promise: Promise | None = None) -> Attended:
        answer = original(plan, append, query, promise)
        answer.out.zero_()
        if plan.kind is PlanKind.HEAD_GROUPS:
            answer.out[0, 0, 0] = value
        return answer

    monkeypatch.setattr(attention, "exact", alike)
    found = agent.frame(session, agent.mode(publish=False, compare=True), 0, TOKENS, 1)
    assert found.comparison is not None
    assert (found.comparison.diff_norm > 0.0) is differs


def test_without_permission_the_session_goes_on_by_the_baselines_plan(agent: Agent) -> None:
    session = agent.open(serves=True)
    agent.prefill(session, agent.mode())
    before = agent.frame(session, agent.mode(), 0, TOKENS, 1)
    refused = agent.frame(session, agent.mode(may=False), 0, TOKENS + 1, 1)
    after = agent.frame(session, EXACT, 0, TOKENS + 2, 1)
    assert before.from_candidate and before.receipt.plan_kind == "headGroups"
    assert not refused.from_candidate
    assert refused.receipt.manifest_digest == agent.baseline.digest()
    assert (after.receipt.plan_kind, after.from_candidate) == ("supportPartition", False)


def test_chunks_of_a_candidates_session_have_the_homes_of_its_placement(agent: Agent) -> None:
    rule = agent.engine._engine._store.placement.rule
    session = agent.open(serves=True)
    assert session.generation in rule._own
    agent.prefill(session, agent.mode())
    agent.frame(session, EXACT, 0, TOKENS, 1)
    assert session.generation not in rule._own
    other = agent.open(serves=True)
    agent.engine.close_session(other.session_id, other.generation)
    assert rule._own == {}


def test_the_candidate_becomes_the_baseline_and_sessions_go_on(agent: Agent) -> None:
    mine, theirs = agent.open(serves=True), agent.open(serves=False)
    agent.prefill(mine, agent.mode())
    expected = agent.prefill(theirs, EXACT)
    agent.engine.adopt(agent.candidate)
    assert agent.engine.live_manifest().digest() == agent.candidate.digest()
    answers = [agent.frame(session, EXACT, 0, TOKENS, 1) for session in (mine, theirs)]
    assert answers[0].out == answers[1].out != expected.out
    for answer in answers:
        assert answer.receipt.plan_kind == "headGroups"
        assert answer.receipt.manifest_digest == agent.candidate.digest()
    plan = agent.engine.plan()
    assert plan is not None and plan.policy == "headGroups"


@pytest.mark.parametrize(
    ("field", "value"),
    [("chunk_tokens", 512), ("tiers", running().tiers[:1])],
    ids=["chunk-tokens", "tiers"],
)
def test_an_engine_that_runs_takes_no_other_tiers_or_chunks(agent: Agent, field: str, value: object) -> None:
    other = agent.baseline.model_copy(update={field: value})
    with pytest.raises(CoreError) as refused:
        agent.engine.adopt(other)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert {"chunk_tokens": "chunkTokens"}.get(field, field) in refused.value.message
    assert terms_of(agent.baseline, other).own


@pytest.mark.parametrize(
    ("field", "value"),
    [("numerics_version", "f32-other/1"), ("device_kind", "H200")],
    ids=["numerics", "device"],
)
def test_what_no_engine_beside_could_change_is_refused(agent: Agent, field: str, value: object) -> None:
    other = agent.baseline.model_copy(update={field: value})
    terms = terms_of(agent.baseline, other)
    window = WindowKey("rollout", 1, "Shadow", 0, other.digest(), agent.baseline.digest(), "sha256:g", 2)
    with pytest.raises(CoreError) as refused:
        check_candidate(agent.baseline, other, terms, window)
    assert refused.value.reason is Reason.UNSUPPORTED
    named = {"numerics_version": "numericsVersion", "device_kind": "deviceKind"}[field]
    assert named in refused.value.message


def test_a_placement_that_no_policy_can_read_is_refused_at_the_grant(agent: Agent) -> None:
    other = agent.baseline.model_copy(update={"placement": Placement(policy="random")})
    window = WindowKey("rollout", 1, "Shadow", 0, other.digest(), agent.baseline.digest(), "sha256:g", 2)
    with pytest.raises(CoreError) as refused:
        check_candidate(agent.baseline, other, terms_of(agent.baseline, other), window)
    assert refused.value.reason is Reason.MANIFEST_INVALID


class TestNode:
    """The node around it: an adopted baseline needs no new engine, any other does."""

    async def bench(self, folder: Path) -> Bench:
        bench = Bench(folder)
        await bench.apply()
        return bench

    async def test_a_baseline_that_differs_in_placement_keeps_engine_and_sessions(
        self, tmp_path: Path
    ) -> None:
        bench = await self.bench(tmp_path)
        host = next(iter(bench.node.caches.values()))
        bench.baseline = bench.baseline.model_copy(update={"placement": SLICES})
        assert await bench.apply() == bench.baseline.digest()
        assert len(bench.engines) == 1
        assert next(iter(bench.node.caches.values())) is host
        assert host.baseline_digest == bench.baseline.digest()

    async def test_another_chunk_size_needs_a_new_engine(self, tmp_path: Path) -> None:
        bench = await self.bench(tmp_path)
        bench.baseline = bench.baseline.model_copy(update={"chunk_tokens": 512})
        await bench.apply()
        assert len(bench.engines) == 2

    async def test_a_grant_names_the_placement_that_its_sessions_follow(self, tmp_path: Path) -> None:
        bench = await self.bench(tmp_path)
        bench.candidate = bench.baseline.model_copy(update={"placement": SLICES})
        await bench.grant(gates=())
        lease = next(iter(bench.node.caches.values())).enforcement.lease()
        assert lease is not None
        assert lease.terms.placement == SLICES and lease.terms.lane


def test_a_candidate_of_another_contract_is_tried_under_its_own(agent: Agent) -> None:
    """Or its gates would compare the baseline with itself. A frame that is late says what the contract of its
    session allows."""
    contract = agent.baseline.contract.model_copy(update={"allowed_fallbacks": (Fallback.POSTPONE,)})
    assert contract != agent.baseline.contract
    candidate = agent.baseline.model_copy(update={"contract": contract})
    terms = replace(terms_of(agent.baseline, candidate), fallbacks=frozenset(contract.allowed_fallbacks))
    assert terms.lane and terms.lane != agent.terms.lane
    agent.engine.check_candidate(terms)
    mine = agent.engine.open_session(SessionTerms("alpha", 0.125, TOKENS + 64, terms, serves=True))
    theirs, moving = agent.open(serves=False), agent.open(serves=True)
    plans = agent.engine._engine._plans
    for planner in (plans.planner, *plans._lanes.values()):
        # A later try is declared to take so long; without that no contract's word for it counts.
        planner.terms = replace(planner.terms, retry=0.5)
    ended = {
        session: plans.late(
            CoreError(Reason.DEADLINE, "late"), PlanKind.HEAD_GROUPS, None, session.session_id
        ).facts["fallback"]
        for session in (mine, theirs, moving)
    }
    postponed = PlannedFallback.POSTPONE_FOR_EXACT_RETRY.value
    assert ended[mine] == postponed != ended[theirs] == ended[moving]
