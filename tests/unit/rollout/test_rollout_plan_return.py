"""One pass of a return by itself: who is asked and who is missed, when all leases have ended, and what may be
called restored. Each case is one state and what agents have proved by then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvtier_operator.rollout.inputs import (
    AgentView,
    Approved,
    CacheView,
    CandidateView,
    Inputs,
    Plan,
    ProofView,
    Revoke,
)
from kvtier_operator.rollout.moves import MAX_MISSING
from kvtier_operator.rollout.returning import plan_return, plan_without_cache
from kvtier_operator.rollout.state import ManifestRef, Rollback, RolloutState
from kvtier_operator.rollout.vocabulary import Cause, Phase, Stage

FENCE, BASE = 5, ManifestRef("sha256:base", "chat-base")
BEGUN, END = 1000.0, 1011.0
"""Of a return, and of leases of 10 s that nobody renews since."""
PROOF = ProofView(FENCE, BASE.digest, "", 0, True)
MANY = MAX_MISSING + 4


def agents(count: int, silent: int = 0, **last: Any) -> tuple[AgentView, ...]:
    """All have proved the baseline but the last `silent`; last: what the proof of the last says instead."""
    found = [AgentView(f"n{i:02}", True, proof=PROOF if i < count - silent else None) for i in range(count)]
    if last:
        found[-1] = replace(found[-1], proof=replace(PROOF, **last))
    return tuple(found)


def names(count: int) -> tuple[str, ...]:
    return tuple(agent.node for agent in agents(count))[:MAX_MISSING]


def state(total: int, missing: tuple[str, ...], **other: Any) -> RolloutState:
    back = Rollback(
        Cause.GATE_FAILED, "", Stage.CANARY, 0, BASE.digest, BEGUN, total=total, missing=missing, **other
    )
    return RolloutState(phase=Phase.ROLLING_BACK, stage=Stage.EXACT_BASELINE, fence=FENCE, rollback=back)


def inputs(found: tuple[AgentView, ...], now: float = BEGUN + 1, **other: Any) -> Inputs:
    facts: dict[str, Any] = {"cache": CacheView("uid-cache", FENCE, BASE, None), "deleting": False, **other}
    return Inputs(
        now=now, uid="uid", name="quest", generation=1, spec=None, spec_error="", busy_with="",
        superseded_by="", candidate=CandidateView(), agents=found, lease_ttl=10.0, **facts,
    )  # fmt: skip


def back(plan: Plan) -> Rollback:
    assert plan.state.rollback is not None
    return plan.state.rollback


@dataclass(frozen=True)
class Said:
    """missing and total: as the status has them after the pass; wait: until the next."""

    phase: Phase
    revoked: bool
    missing: tuple[str, ...] = ()
    total: int = 2
    proved: bool = False
    wait: float = 0.0


DONE = Said(Phase.ROLLED_BACK, True, proved=True)
GOES_ON = Phase.ROLLING_BACK


@pytest.mark.parametrize(
    ("before", "found", "now", "said"),
    [
        pytest.param(state(2, names(2)), agents(2), BEGUN + 1, DONE, id="all-have-proved"),
        pytest.param(
            state(2, names(2)), agents(2, 1), BEGUN + 1, Said(GOES_ON, False, ("n01",), wait=0.5),
            id="one-says-nothing-yet",
        ),
        pytest.param(
            state(2, names(2)), agents(2, 1), END, Said(GOES_ON, True, ("n01",), wait=0.5),
            id="one-says-nothing-though-its-lease-has-ended",
        ),
        pytest.param(
            state(2, names(2)), agents(2, in_flight=1), BEGUN + 1, Said(GOES_ON, True, ("n01",), wait=0.5),
            id="steps-of-the-candidate-still-run",
        ),
        pytest.param(
            state(2, names(2)), agents(2, baseline_digest="?"), BEGUN + 1,
            Said(GOES_ON, True, ("n01",), wait=0.5), id="let-go-of-and-not-restored",
        ),
        pytest.param(
            state(2, names(2)), agents(1), BEGUN + 1, Said(GOES_ON, False, ("n01",), total=1, wait=2.0),
            id="one-has-vanished",
        ),
        pytest.param(
            state(2, names(2)), agents(1), END - 0.25, Said(GOES_ON, False, ("n01",), total=1, wait=0.25),
            id="one-has-vanished-and-its-lease-has-nearly-ended",
        ),
        pytest.param(
            state(2, names(2)), agents(1), END, Said(Phase.ROLLED_BACK, True, total=1, proved=True),
            id="one-has-vanished-and-its-lease-has-ended",
        ),
        pytest.param(
            state(2, ()), agents(1), BEGUN + 1, replace(DONE, total=1),
            id="one-has-vanished-that-had-let-go",
        ),
        pytest.param(
            state(0, ()), (), BEGUN + 1, Said(GOES_ON, False, total=0, wait=2.0), id="nobody-is-there",
        ),
        pytest.param(
            state(0, ()), (), END, Said(Phase.ROLLED_BACK, True, total=0), id="nobody-is-there-for-a-lease",
        ),
        pytest.param(
            state(MANY, names(MANY)), agents(MANY), BEGUN + 1, replace(DONE, total=MANY),
            id="many-have-proved",
        ),
        pytest.param(
            state(MANY, names(MANY)), agents(MANY - 1), BEGUN + 1,
            Said(GOES_ON, False, total=MANY, wait=2.0), id="of-many-one-has-vanished-that-was-not-named",
        ),
        pytest.param(
            state(MANY, names(MANY)), agents(MANY - 1), END,
            Said(Phase.ROLLED_BACK, True, total=MANY - 1, proved=True), id="and-its-lease-has-ended",
        ),
        pytest.param(
            state(MANY, ("gone", *names(MANY)[1:])), agents(MANY - 1), BEGUN + 1,
            Said(GOES_ON, False, ("gone",), total=MANY - 1, wait=2.0),
            id="of-many-one-has-vanished-that-was-named",
        ),
        pytest.param(
            state(MAX_MISSING, ()), agents(MAX_MISSING - 1), BEGUN + 1,
            replace(DONE, total=MAX_MISSING - 1), id="of-as-many-as-can-be-named-none-is-missed-by-number",
        ),
    ],
)  # fmt: skip
def test_a_pass_of_a_return(
    before: RolloutState, found: tuple[AgentView, ...], now: float, said: Said
) -> None:
    plan = plan_return(before, inputs(found, now))
    then = back(plan)
    assert plan.state.phase is said.phase
    assert (then.missing, then.total) == (said.missing, said.total)
    assert then.restored == sum(agent.proof == PROOF for agent in found)
    assert then.revoked_at == (now if said.revoked else 0.0)
    assert then.verified_at == (now if said.proved else 0.0)
    assert plan.state.finished_at == (now if said.phase is Phase.ROLLED_BACK else 0.0)
    assert plan.requeue_after == pytest.approx(said.wait)
    told = ["BaselineRestored"] if said.proved else ["CandidateRevoked"] if said.revoked else []
    assert [notice.reason for notice in plan.notices] == told
    asked = {rpc.node for rpc in plan.rpcs if isinstance(rpc, Revoke)}
    assert asked == {agent.node for agent in found if agent.proof != PROOF}
    assert not plan.release and not plan.withdraw


@pytest.mark.parametrize(
    ("cache_fence", "agent", "new"),
    [
        pytest.param(FENCE + 1, {}, FENCE + 2, id="of-the-cache"),
        pytest.param(FENCE, {"highest_fence": FENCE + 3}, FENCE + 4, id="of-an-agent"),
        pytest.param(FENCE, {"refusal": "FENCE_CONFLICT"}, FENCE + 1, id="used-by-another-command"),
    ],
)
def test_a_fence_that_has_moved_is_taken_anew_before_anybody_is_asked(
    cache_fence: int, agent: dict[str, Any], new: int
) -> None:
    before, (proved, silent) = state(2, names(2)), agents(2, 1)
    found = (proved, replace(silent, **agent))
    plan = plan_return(before, inputs(found, cache=CacheView("uid-cache", cache_fence, BASE, None)))
    assert plan.transition is not None
    assert (plan.transition.expected, plan.transition.new, plan.state.fence) == (cache_fence, new, new)
    assert (plan.rpcs, plan.state.rollback) == ((), before.rollback)


def test_the_moment_at_which_all_had_let_go_stays() -> None:
    before = state(2, names(2), revoked_at=BEGUN + 3)
    plan = plan_return(before, inputs(agents(2, 1), END + 5))
    assert back(plan).revoked_at == BEGUN + 3
    assert plan.notices == ()


def test_a_holder_that_only_this_process_remembers_is_missed_too() -> None:
    plan = plan_return(state(2, names(2)), inputs(agents(2), holders=frozenset({"n00", "gone"})))
    assert (plan.state.phase, back(plan).missing) == (Phase.ROLLING_BACK, ("gone",))


def test_steps_in_flight_are_summed() -> None:
    found = (*agents(1, in_flight=2), *agents(2, in_flight=3)[1:])
    assert back(plan_return(state(2, names(2)), inputs(found))).in_flight == 5


@pytest.mark.parametrize(
    ("found", "now", "released", "told"),
    [
        pytest.param(agents(2), BEGUN + 1, True, False, id="all-have-proved"),
        pytest.param(agents(2, 1), BEGUN + 1, False, False, id="one-may-hold-it"),
        pytest.param(agents(2, 1), END, True, True, id="leases-have-ended-and-one-has-not-proved"),
        pytest.param(agents(2, in_flight=1), BEGUN + 1, True, True, id="let-go-of-and-not-restored"),
    ],
)
def test_one_that_is_deleted_goes_when_nobody_can_hold_its_candidate(
    found: tuple[AgentView, ...], now: float, released: bool, told: bool
) -> None:
    plan = plan_return(state(2, names(2)), inputs(found, now, deleting=True))
    assert plan.release is released
    assert ("ReleasedUnproved" in [notice.reason for notice in plan.notices]) is told
    if released:
        assert (plan.rpcs, plan.requeue_after) == ((), 0.0)


@pytest.mark.parametrize("deleting", [False, True], ids=["stays", "deleted"])
def test_its_own_approval_is_withdrawn_before_it_has_ended(deleting: bool) -> None:
    cache = CacheView("uid-cache", FENCE, BASE, Approved("quest", "uid", "sha256:c", END))
    plan = plan_return(state(2, names(2)), inputs(agents(2), cache=cache, deleting=deleting))
    assert plan.withdraw and not plan.release
    assert plan.state.phase is Phase.ROLLING_BACK
    another = replace(cache, approved=Approved("other", "uid-other", "sha256:c", END))
    plan = plan_return(state(2, names(2)), inputs(agents(2), cache=another, deleting=deleting))
    assert not plan.withdraw and plan.release is deleting
    assert plan.state.phase is Phase.ROLLED_BACK


@pytest.mark.parametrize(
    ("reachable", "now", "wait"),
    [
        pytest.param(True, BEGUN + 1, 0.5, id="answers"),
        pytest.param(False, BEGUN + 1, 2.0, id="silent"),
        pytest.param(False, END - 0.5, 0.5, id="silent-and-its-lease-has-nearly-ended"),
        pytest.param(False, END, 2.0, id="silent-and-its-lease-has-ended"),
    ],
)
def test_how_soon_it_is_asked_again(reachable: bool, now: float, wait: float) -> None:
    *some, last = agents(2, 1)
    found = (*some, replace(last, reachable=reachable))
    assert plan_return(state(2, names(2)), inputs(found, now)).requeue_after == pytest.approx(wait)


def test_who_answers_and_has_proved_hurries_nobody() -> None:
    proved, silent = agents(2, 1)
    found = (proved, replace(silent, reachable=False))
    assert plan_return(state(2, names(2)), inputs(found)).requeue_after == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("there", "now", "over"),
    [
        pytest.param(True, BEGUN + 1, False, id="while-leases-last"),
        pytest.param(True, END - 0.5, False, id="nearly-ended"),
        pytest.param(True, END, True, id="leases-have-ended"),
        pytest.param(False, BEGUN + 1, True, id="the-cache-is-gone"),
    ],
)
@pytest.mark.parametrize("deleting", [False, True], ids=["stays", "deleted"])
def test_a_return_of_a_cache_that_is_deleted(there: bool, now: float, over: bool, deleting: bool) -> None:
    leaving = CacheView("uid-cache", FENCE, BASE, None, deleting=True) if there else None
    before = state(2, names(2))
    plan = plan_without_cache(before, inputs(agents(2, 1), now, cache=leaving, deleting=deleting))
    assert plan.state.phase is (Phase.ROLLED_BACK if over else Phase.ROLLING_BACK)
    assert plan.release is (over and deleting)
    then = back(plan)
    assert then.revoked_at == (now if over else 0.0)
    assert then.verified_at == 0.0, "nobody has proved anything"
    assert (then.missing, then.total) == ((), 0) if over else (names(2), 2)
    if not over:
        assert plan.requeue_after == pytest.approx(min(2.0, END - now))
