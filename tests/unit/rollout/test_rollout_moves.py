"""The moves by themselves: what a fence passes, what a return and a revocation write down, who holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier_evidence.carry import Carry
from kvtier_evidence.design import MIN_BLOCKS
from kvtier_evidence.metrics import METRICS
from kvtier_operator.rollout.holders import gone, holders_of, with_grants, without
from kvtier_operator.rollout.inputs import AgentView, Approved, CacheView, CandidateView, Inputs, Look
from kvtier_operator.rollout.moves import (
    CARRIED,
    MAX_MISSING,
    advance,
    begin_revocation,
    enter_step,
    excluded_now,
    lease_end,
    needs_refence,
    roll_back,
    tick_seconds,
)
from kvtier_operator.rollout.state import (
    DesignEffect,
    ExcludedAgent,
    GateStatus,
    Holders,
    LostAgent,
    ManifestRef,
    Revocation,
    RolloutState,
    Window,
)
from kvtier_operator.rollout.vocabulary import Blocker, Cause, Phase, Stage, Verdict
from tests.unit.rollout.machine_world import spec_of

NOW, UID = 2000.0, "uid"
BASE, OTHER = ManifestRef("sha256:base", "base"), ManifestRef("sha256:other", "other")
CACHE = CacheView("uid-cache", 5, OTHER, None)
MINE = Approved("quest", UID, "sha256:c", NOW + 60)
STATE = RolloutState(
    phase=Phase.PROGRESSING, stage=Stage.CANARY, fence=5, baseline=BASE, shares=2, window=Window(5, 1.0, "h")
)


def agents(*names: str, **facts: Any) -> tuple[AgentView, ...]:
    return tuple(AgentView(name, True, boot_id="boot", **facts) for name in names)


def inputs(found: tuple[AgentView, ...] = (), **other: Any) -> Inputs:
    facts: dict[str, Any] = {"cache": CACHE, "candidate": CandidateView(), **other}
    return Inputs(
        now=NOW, uid=UID, name="quest", generation=1, spec=None, spec_error="", deleting=False, busy_with="",
        superseded_by="", agents=found, lease_ttl=10.0, **facts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cache", "state", "agent", "new"),
    [(9, 5, 5, 10), (5, 9, 5, 10), (5, 5, 9, 10), (5, 5, 0, 6)],
    ids=["of-the-cache", "of-the-status", "of-an-agent", "all-agree"],
)
def test_a_fence_passes_whatever_anybody_has_seen(cache: int, state: int, agent: int, new: int) -> None:
    found = (*agents("a"), *agents("b", highest_fence=agent))
    told = inputs(found, cache=replace(CACHE, fence=cache))
    plan = advance(replace(STATE, fence=state), told, STATE, new_window=True)
    assert plan.transition is not None and plan.state.window is not None
    assert (plan.transition.expected, plan.transition.new) == (cache, new)
    assert (plan.state.fence, plan.state.window.opening_fence, plan.urgent) == (new, new, True)
    kept = advance(replace(STATE, fence=state), told, STATE)
    assert kept.state.window == STATE.window, "evidence goes on"


@pytest.mark.parametrize(
    ("approved", "phase", "clears"),
    [
        pytest.param(MINE, Phase.PROGRESSING, True, id="left-by-a-crash"),
        pytest.param(MINE, Phase.PAUSED, True, id="left-by-a-crash-and-paused"),
        pytest.param(MINE, Phase.COMPLETED, False, id="of-an-approval-that-goes-on"),
        pytest.param(MINE, Phase.ROLLING_BACK, False, id="withdrawn-when-agents-have-let-go"),
        pytest.param(replace(MINE, rollout_uid="x"), Phase.PROGRESSING, False, id="of-another"),
        pytest.param(None, Phase.PROGRESSING, False, id="none"),
    ],
)
def test_which_approval_a_fence_takes_away(approved: Approved | None, phase: Phase, clears: bool) -> None:
    told = inputs(cache=replace(CACHE, approved=approved))
    plan = advance(STATE, told, replace(STATE, phase=phase))
    assert plan.transition is not None and plan.transition.clear_approved is clears
    asked = advance(STATE, told, replace(STATE, phase=phase), clear_approved=True)
    assert asked.transition is not None and asked.transition.clear_approved


@pytest.mark.parametrize(
    ("cache", "agent", "moved"),
    [
        pytest.param(5, {}, False, id="all-agree"),
        pytest.param(6, {}, True, id="the-cache-has-another"),
        pytest.param(4, {}, True, id="the-cache-has-lost-it"),
        pytest.param(5, {"highest_fence": 5}, False, id="an-agent-has-the-same"),
        pytest.param(5, {"highest_fence": 6}, True, id="an-agent-has-a-higher-one"),
        pytest.param(5, {"refusal": "FENCE_CONFLICT"}, True, id="another-command-used-it"),
        pytest.param(5, {"refusal": "QUEUE_FULL"}, False, id="an-agent-is-busy"),
    ],
)
def test_when_another_fence_is_needed(cache: int, agent: dict[str, Any], moved: bool) -> None:
    told = inputs((*agents("a"), *agents("b", **agent)), cache=replace(CACHE, fence=cache))
    assert needs_refence(STATE, told) is moved
    assert not needs_refence(STATE, replace(told, cache=None))


def test_what_a_return_writes_down() -> None:
    older = Revocation("older", NOW - 1, 30.0, ("old-gone", "a"), 2)
    state = replace(
        STATE, step=1, revoking=older, grant_expires=9.0, lost=(LostAgent("a", 1.0),),
        vanished=(LostAgent("van", 1.0),), holders=Holders(("a", "gone"), 2),
    )  # fmt: skip
    plan = roll_back(state, inputs(agents("a", "b"), older_ttl=20.0), Cause.GATE_FAILED, "why", "gate")
    then, back = plan.state, plan.state.rollback
    assert back is not None and plan.transition is not None
    assert (back.from_stage, back.from_step, back.started_at, back.gate) == (Stage.CANARY, 1, NOW, "gate")
    assert (back.missing, back.total) == (("van", "gone", "old-gone", "a", "b"), 2)
    assert (back.lease_ttl, back.target_digest) == (30.0, BASE.digest)
    assert (then.phase, then.stage, then.step) == (Phase.ROLLING_BACK, Stage.EXACT_BASELINE, 0)
    assert (then.revoking, then.grant_expires, then.lost, then.vanished) == (None, 0.0, (), ())
    assert then.holders == Holders()
    assert (plan.rpcs, plan.transition.clear_approved) == ((), True)


@pytest.mark.parametrize(
    ("older", "told", "lasts"),
    [(None, 0.0, 0.0), (None, 20.0, 20.0), (30.0, 20.0, 30.0), (10.0, 20.0, 20.0)],
    ids=["its-own", "of-a-status-read-in-part", "of-the-older", "the-longer-of-both"],
)
def test_the_longest_lease_is_waited_for(older: float | None, told: float, lasts: float) -> None:
    revoking = None if older is None else Revocation("older", NOW, older)
    plan = roll_back(replace(STATE, revoking=revoking), inputs(older_ttl=told), Cause.INTENT_ABORT, "")
    assert plan.state.rollback is not None and plan.state.rollback.lease_ttl == lasts
    assert plan.transition is not None and plan.transition.clear_approved is (older is not None)


def test_a_return_without_a_recorded_baseline_is_to_that_of_the_cache() -> None:
    plan = roll_back(replace(STATE, baseline=None), inputs(), Cause.INTENT_ABORT, "")
    assert plan.state.rollback is not None and plan.state.rollback.target_digest == OTHER.digest


def test_a_revocation_names_who_has_vanished_first_and_counts_all() -> None:
    present = [f"n{number:02}" for number in range(MAX_MISSING)]
    found = begin_revocation(inputs(agents(*present)), "older", 30.0, ("gone", "n00"))
    assert found.nodes == ("gone", *present[:-1])
    assert (found.agents, found.lease_ttl, found.since) == (MAX_MISSING + 1, 30.0, NOW)


@pytest.mark.parametrize(
    ("spends", "own", "others", "shares"),
    [(True, 2, 0, 3), (True, 2, 7, 8), (False, 2, 7, 2)],
    ids=["its-own", "those-of-others-too", "a-step-that-passed"],
)
def test_which_share_of_the_budget_a_step_spends(spends: bool, own: int, others: int, shares: int) -> None:
    spec = spec_of("a")
    state = replace(
        STATE, shares=own, lost=(LostAgent("a", 1.0),), blocker=Blocker.NO_NODES, blocker_message="?",
        pending_since=3.0, excluded=(ExcludedAgent("x", "r", "b"),), excluded_count=1, overridden=True,
    )  # fmt: skip
    found = (*agents("a"), *agents("b", selected=False), replace(*agents("c"), reachable=False))
    told = inputs(found, candidate=CandidateView(prior_shares=others))
    plan = enter_step(state, told, spec, spec.ladder[2], "why", spend_share=spends, resumes=1)
    then = plan.state
    assert plan.transition is not None and then.window is not None
    assert (then.shares, plan.transition.shares) == (shares, shares if spends else 0)
    assert (then.stage, then.step, then.phase) == (Stage.RAMP, 0, Phase.PROGRESSING)
    assert (then.window.opening_fence, then.window.opened_at, then.window.resumes) == (6, NOW, 1)
    assert (then.lost, then.excluded, then.excluded_count, then.pending_since) == ((), (), 0, 0.0)
    assert (then.blocker, then.blocker_message, then.overridden) == (Blocker.NONE, "", False)
    assert then.holders == Holders(("a",), 1), "written down before they are granted it"


@pytest.mark.parametrize(
    ("agent", "count", "out"),
    [
        pytest.param({}, 1, {"named"}, id="named"),
        pytest.param({"node": "other"}, 1, set(), id="another"),
        pytest.param({"boot_id": "next"}, 1, set(), id="has-restarted"),
        pytest.param({"node": "other"}, 2, {"other"}, id="more-refused-than-are-named"),
        pytest.param({"node": "other", "granted_rollout": UID}, 2, set(), id="but-this-one-holds-it"),
        pytest.param({"node": "other", "returned_rollout": UID}, 2, set(), id="but-this-one-held-it"),
        pytest.param({"node": "other", "reachable": False}, 2, set(), id="but-this-one-is-silent"),
        pytest.param({"boot_id": "next"}, 2, set(), id="but-this-one-has-restarted"),
    ],
)
def test_who_is_left_out_still(agent: dict[str, Any], count: int, out: set[str]) -> None:
    (seen,) = agents("named")
    state = replace(STATE, excluded=(ExcludedAgent("named", "r", "boot"),), excluded_count=count)
    assert excluded_now(state, (replace(seen, **agent),), UID) == out


HELD = agents("a", granted_rollout=UID)


@pytest.mark.parametrize(
    ("written", "remembered", "missed"),
    [
        pytest.param(Holders(("a",), 1), (), (), id="nobody"),
        pytest.param(Holders(("a", "b"), 2), (), ("b",), id="a-name"),
        pytest.param(Holders(), ("b",), ("b",), id="one-that-is-remembered"),
        pytest.param(Holders(("b",), 4), (), ("2 not named", "b"), id="a-name-and-a-number"),
        pytest.param(Holders(("b",), 4), ("c", "d"), ("b", "c", "d"), id="whose-names-are-remembered"),
    ],
)
def test_which_holders_are_gone(
    written: Holders, remembered: tuple[str, ...], missed: tuple[str, ...]
) -> None:
    assert gone(written, UID, HELD, remembered) == missed


@pytest.mark.parametrize(
    ("written", "nodes", "then"),
    [
        pytest.param(Holders(), ("b",), Holders(("a", "b"), 2), id="a-new-one"),
        pytest.param(Holders(("a",), 1), ("a",), Holders(("a",), 1), id="who-has-it"),
        pytest.param(Holders(("z",), 1), ("b",), Holders(("z", "a", "b"), 3), id="after-who-is-gone"),
        pytest.param(Holders(("a",), 9), ("b",), Holders(("a", "b"), 10), id="of-more-than-are-named"),
    ],
)
def test_who_is_about_to_hold_it(written: Holders, nodes: tuple[str, ...], then: Holders) -> None:
    pool = (*HELD, *agents("b"))
    assert with_grants(written, UID, pool, (), nodes) == then


def test_holders_without_some() -> None:
    assert without(Holders(("a", "b"), 9), {"b", "c"}) == Holders(("a",), 8)
    assert holders_of({"a", "z", "b"}, (*HELD, *agents("b"))) == Holders(("z", "a", "b"), 3)


@pytest.mark.parametrize(("ttl", "seconds"), [(1.0, 1.0), (30.0, 5.0), (60.0, 10.0), (600.0, 10.0)])
def test_evidence_is_looked_at_six_times_in_a_lease_within_bounds(ttl: float, seconds: float) -> None:
    assert tick_seconds(replace(spec_of("a"), lease_ttl=ttl)) == seconds


@pytest.mark.parametrize(
    ("own", "least", "quiet", "wait"),
    [
        pytest.param(10.0, 0.0, 0.0, 11.0, id="its-own"),
        pytest.param(10.0, 100.0, 0.0, 110.0, id="a-longer-one"),
        pytest.param(100.0, 10.0, 0.0, 110.0, id="a-shorter-one"),
        pytest.param(10.0, 0.0, NOW + 5, 16.0, id="an-operator-before-may-have-renewed"),
    ],
)
def test_when_leases_have_ended(own: float, least: float, quiet: float, wait: float) -> None:
    told = replace(inputs(quiet_since=quiet), lease_ttl=own)
    assert lease_end(told, NOW, least) == pytest.approx(NOW + wait)
    waited = replace(told, now=NOW + 7, waited={NOW: 3.0})
    assert lease_end(waited, NOW, least) == pytest.approx(NOW + 4 + (wait if not quiet else 11.0))


def effect(gate: str, blocks: int) -> DesignEffect:
    return DesignEffect(gate, "2", blocks, "1")


@pytest.mark.parametrize(
    ("look_of", "blocks", "now", "kept"),
    [
        pytest.param(5, 7, MIN_BLOCKS, MIN_BLOCKS, id="enough-for-few"),
        pytest.param(5, 7, 8, 8, id="more-for-few"),
        pytest.param(5, 7, 6, 7, id="fewer-for-few"),
        pytest.param(5, MIN_BLOCKS + 9, MIN_BLOCKS, MIN_BLOCKS, id="newer-and-enough"),
        pytest.param(5, MIN_BLOCKS + 9, MIN_BLOCKS - 1, MIN_BLOCKS + 9, id="few-for-enough"),
        pytest.param(4, 7, MIN_BLOCKS, 7, id="of-another-window"),
        pytest.param(None, 7, 0, 7, id="no-look"),
    ],
)
def test_what_a_new_window_takes_from_the_one_before(
    look_of: int | None, blocks: int, now: int, kept: int
) -> None:
    window = Window(5, 1.0, "h", 0, (("a", "1"),), (effect("a", blocks),))
    own = next(name for name, metric in METRICS.items() if not metric.carried)
    gates = tuple(GateStatus(name, Verdict.PASS, "", name) for name in (own, *CARRIED))
    look = None
    if look_of is not None:
        measured = (effect("a", now), effect("b", 1))
        look = Look(look_of, NOW, (), Carry(), "", (("b", "3"), ("a", "2")), 0.0, measured)
    spec = spec_of("a")
    told = inputs(agents("a"), last_look=look)
    then = enter_step(replace(STATE, window=window, gates=gates), told, spec, spec.ladder[2], "why").state
    assert then.window is not None
    assert {one.name for one in then.gates} == {name for name, one in METRICS.items() if one.carried}
    taken = look_of == 5
    assert then.window.pair_thresholds == ((("a", "2"), ("b", "3")) if taken else (("a", "1"),))
    assert then.window.effects == (effect("a", kept), *((effect("b", 1),) if taken else ()))
    fresh = enter_step(replace(STATE, window=None), told, spec, spec.ladder[0], "why").state
    assert fresh.window is not None
    assert (fresh.window.pair_thresholds, fresh.window.effects) == ((), ())
