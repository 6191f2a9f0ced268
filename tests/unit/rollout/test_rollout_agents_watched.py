"""What agents say, one pass at a time: who is lost, has vanished, is left out or holds nothing any more, and
what is a reason to return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier_operator.rollout.agentwatch import (
    MAX_EXCLUDED,
    MAX_LOST,
    agents_against,
    exclude,
    holds,
    watch_agents,
)
from kvtier_operator.rollout.inputs import AgentView, CandidateView, Inputs, ProofView
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import (
    CandidateRef,
    ExcludedAgent,
    Holders,
    LostAgent,
    ManifestRef,
    RolloutState,
)
from kvtier_operator.rollout.vocabulary import CandidateClass, Cause, Phase, Stage
from tests.unit.rollout.machine_world import spec_of

FENCE, NOW, UID, DIGEST = 5, 2000.0, "uid", "sha256:candidate"
STATE = RolloutState(
    phase=Phase.PROGRESSING,
    stage=Stage.CANARY,
    fence=FENCE,
    baseline=ManifestRef("sha256:base", "base"),
    candidate=CandidateRef(DIGEST, "candidate", CandidateClass.APPROXIMATE),
    held_by_all=True,
)
HOLDER = AgentView(
    "holder",
    True,
    boot_id="boot",
    baseline_digest="sha256:base",
    running_baseline="sha256:base",
    candidate_digest=DIGEST,
    running_candidate=DIGEST,
    granted_fence=FENCE,
    granted_rollout=UID,
)
LATE = AgentView("late", True, boot_id="boot", refusal="NO_DESTINATION_CAPACITY")
LET_GO = ProofView(FENCE, "sha256:base", "", 0, True)
RESUMES, RETURNS = spec_of("a"), spec_of("a", policy="RollBack")


def inputs(*agents: AgentView, **other: Any) -> Inputs:
    return Inputs(
        now=NOW, uid=UID, name="quest", generation=1, spec=RESUMES, spec_error="", deleting=False, cache=None,
        busy_with="", superseded_by="", candidate=CandidateView(), agents=agents, lease_ttl=10.0, **other,
    )  # fmt: skip


MISMATCHES = ("MANIFEST_MISMATCH", "MANIFEST_INVALID", "NUMERICS_MISMATCH", "MODEL_MISMATCH")
CANNOT = (
    "NO_DESTINATION_CAPACITY", "TIER_INCAPABLE", "CANDIDATE_REFUSED", "NO_LEGAL_PATH", "UNSUPPORTED",
    "STAGING_TOO_SMALL", "ADMISSION_PINNED",
)  # fmt: skip


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        *(pytest.param({"refusal": one}, Cause.MANIFEST_MISMATCH, id=one) for one in MISMATCHES),
        *(pytest.param({"refusal": one}, Cause.INFEASIBLE_NODE, id=one) for one in CANNOT),
        pytest.param({"refusal": "QUEUE_FULL"}, None, id="a-refusal-that-passes"),
        pytest.param({}, None, id="holds-it"),
        pytest.param({"candidate_digest": "?"}, Cause.MANIFEST_MISMATCH, id="holds-another"),
        pytest.param({"candidate_digest": "?", "granted_fence": 4}, None, id="held-another-before"),
        pytest.param({"candidate_digest": "?", "reachable": False}, None, id="held-another-as-it-spoke-last"),
        pytest.param({"running_baseline": "?"}, Cause.MANIFEST_MISMATCH, id="runs-another-baseline"),
        pytest.param({"running_candidate": "?"}, Cause.MANIFEST_MISMATCH, id="runs-another-candidate"),
        pytest.param({"running_baseline": "", "running_candidate": ""}, None, id="cannot-say"),
        pytest.param({"running_baseline": None, "running_candidate": None}, None, id="an-older-agent"),
    ],
)
def test_whose_word_is_a_reason_to_return(agent: dict[str, Any], cause: Cause | None) -> None:
    found = agents_against(STATE, inputs(replace(HOLDER, **agent)), RESUMES)
    assert (found[0] if found else None) is cause


def test_one_that_is_left_out_is_no_reason_to_return() -> None:
    left_out = replace(STATE, excluded=(ExcludedAgent("late", LATE.refusal, "boot"),), excluded_count=1)
    assert agents_against(left_out, inputs(HOLDER, LATE), RESUMES) is None
    assert agents_against(left_out, inputs(HOLDER, replace(LATE, boot_id="next")), RESUMES) is not None


@pytest.mark.parametrize(
    ("spec", "silent", "leads", "phase", "lost"),
    [
        pytest.param(RETURNS, 11.0, 99.0, Phase.PROGRESSING, True, id="for-a-lease"),
        pytest.param(RETURNS, 10.9, 99.0, Phase.PROGRESSING, False, id="for-less-than-a-lease"),
        pytest.param(RETURNS, 11.0, 10.9, Phase.PROGRESSING, False, id="nobody-asked-for-so-long"),
        pytest.param(RETURNS, 11.0, 99.0, Phase.PAUSED, True, id="while-it-is-paused"),
        pytest.param(RETURNS, 11.0, 99.0, Phase.COMPLETED, False, id="of-an-approval"),
        pytest.param(RESUMES, 109.0, 999.0, Phase.PROGRESSING, False, id="for-less-than-ten"),
        pytest.param(RESUMES, 111.0, 999.0, Phase.PROGRESSING, True, id="for-ten-leases"),
    ],
)
def test_how_long_a_silent_holder_is_waited_for(
    spec: RolloutSpec, silent: float, leads: float, phase: Phase, lost: bool
) -> None:
    since = NOW - silent
    state = replace(STATE, phase=phase, lost=(LostAgent("holder", since),))
    quiet = inputs(replace(HOLDER, reachable=False), quiet_since=NOW - leads)
    found = agents_against(state, quiet, spec)
    assert (found is not None and found[0] is Cause.AGENT_LOST) is lost
    assert agents_against(state, replace(quiet, nows={since: since + 1.0}), spec) is None, "by its clock"


LEFT_OUT = (ExcludedAgent("late", LATE.refusal, "boot"),)


@pytest.mark.parametrize(
    ("before", "agents", "rows"),
    [
        pytest.param({}, (HOLDER, LATE), [("late", "boot")], id="came-late-and-refuses"),
        pytest.param({"held_by_all": False}, (HOLDER, LATE), [], id="was-there-from-the-start"),
        pytest.param({}, (LATE,), [], id="nobody-else-holds-it"),
        pytest.param({}, (HOLDER, replace(LATE, granted_rollout=UID)), [], id="holds-it"),
        pytest.param({}, (HOLDER, replace(LATE, returned_rollout=UID)), [], id="held-it"),
        pytest.param({}, (HOLDER, replace(LATE, refusal="QUEUE_FULL")), [], id="may-take-it-later"),
        pytest.param({"excluded": LEFT_OUT}, (HOLDER, LATE), [("late", "boot")], id="is-left-out-already"),
        pytest.param(
            {"excluded": LEFT_OUT}, (HOLDER, replace(LATE, refusal="", boot_id="2")), [("late", "boot")],
            id="has-restarted-and-not-answered",
        ),
        pytest.param(
            {"excluded": LEFT_OUT}, (HOLDER, replace(LATE, boot_id="2")), [("late", "2")],
            id="has-restarted-and-refuses-again",
        ),
        pytest.param(
            {"excluded": LEFT_OUT}, (HOLDER, replace(LATE, refusal="", granted_rollout=UID)), [],
            id="has-taken-it",
        ),
        pytest.param({"excluded": LEFT_OUT}, (HOLDER,), [], id="has-left-the-pool"),
    ],
)  # fmt: skip
def test_who_is_left_out(
    before: dict[str, Any], agents: tuple[AgentView, ...], rows: list[tuple[str, str]]
) -> None:
    written = replace(STATE, holders=Holders(("holder", "late"), 2), **before)
    written = replace(written, excluded_count=len(written.excluded))
    state = exclude(written, inputs(*agents))
    assert [(one.node, one.boot_id) for one in state.excluded] == rows
    assert state.excluded_count == len(rows)
    fresh = rows and [(one.node, one.boot_id) for one in written.excluded] != rows
    assert state.holders == (Holders(("holder",), 1) if fresh else written.holders)


def test_of_many_that_are_left_out_some_are_named_and_all_counted() -> None:
    late = [replace(LATE, node=f"late-{number}") for number in range(MAX_EXCLUDED + 2)]
    state = exclude(STATE, inputs(HOLDER, *late))
    assert (len(state.excluded), state.excluded_count) == (MAX_EXCLUDED, MAX_EXCLUDED + 2)
    again = exclude(state, inputs(HOLDER, *late))
    assert (again.excluded, again.excluded_count) == (state.excluded, state.excluded_count)


@pytest.mark.parametrize(
    ("agent", "before", "since"),
    [
        pytest.param({"reachable": False}, (), NOW, id="a-holder-falls-silent"),
        pytest.param({"reachable": False}, (LostAgent("holder", 7.0),), 7.0, id="it-is-silent-still"),
        pytest.param(
            {"reachable": False, "granted_rollout": ""}, (LostAgent("holder", 7.0),), 7.0,
            id="it-is-silent-and-nobody-knows-what-it-held",
        ),
        pytest.param({"reachable": False, "granted_rollout": "other"}, (), None, id="holds-nothing-of-this"),
        pytest.param({}, (LostAgent("holder", 7.0),), None, id="it-answers-again"),
    ],
)  # fmt: skip
def test_who_is_lost_since_when(
    agent: dict[str, Any], before: tuple[LostAgent, ...], since: float | None
) -> None:
    found = watch_agents(replace(STATE, lost=before), inputs(replace(HOLDER, **agent)), RESUMES)
    assert found.lost == (() if since is None else (LostAgent("holder", since),))


@pytest.mark.parametrize(
    ("agent", "counts"),
    [
        pytest.param({}, 1, id="under-this-fence"),
        pytest.param({"granted_fence": 3}, 1, id="under-an-earlier-one"),
        pytest.param({"granted_fence": 0}, 0, id="no-more"),
        pytest.param({"candidate_digest": "?"}, 0, id="another-candidate"),
    ],
)
def test_who_counts_as_granted(agent: dict[str, Any], counts: int) -> None:
    assert watch_agents(STATE, inputs(replace(HOLDER, **agent)), RESUMES).nodes_granted == counts


GONE = LostAgent("gone", NOW - 5)


@pytest.mark.parametrize(
    ("before", "agents", "other", "holders", "vanished"),
    [
        pytest.param({}, (HOLDER,), {}, ("holder",), (), id="says-that-it-holds-it"),
        pytest.param(
            {"holders": Holders(("gone", "holder"), 2)}, (HOLDER,), {}, ("holder",),
            (LostAgent("gone", NOW),), id="a-holder-has-left-the-pool",
        ),
        pytest.param(
            {}, (HOLDER,), {"holders": frozenset({"gone"})}, ("holder",), (LostAgent("gone", NOW),),
            id="one-that-only-this-process-remembers",
        ),
        pytest.param({"vanished": (GONE,)}, (HOLDER,), {}, ("holder",), (GONE,), id="its-lease-may-last"),
        pytest.param(
            {"vanished": (LostAgent("gone", NOW - 11),)}, (HOLDER,), {}, ("holder",), (),
            id="its-lease-has-ended",
        ),
        pytest.param(
            {"vanished": (LostAgent("gone", NOW - 11),)}, (HOLDER,), {"quiet_since": NOW - 10}, ("holder",),
            (LostAgent("gone", NOW - 11),), id="an-operator-before-may-have-renewed-it",
        ),
        pytest.param(
            {"vanished": (GONE,)}, (HOLDER, replace(HOLDER, node="gone")), {}, ("gone", "holder"), (),
            id="it-is-back",
        ),
        pytest.param(
            {"holders": Holders(("n",), 1)}, (AgentView("n", True, proof=LET_GO),), {}, (), (),
            id="has-let-go",
        ),
        pytest.param(
            {"holders": Holders(("n",), 1)}, (AgentView("n", True, proof=replace(LET_GO, fence=4)),), {},
            ("n",), (), id="had-let-go-before",
        ),
        pytest.param(
            {}, (replace(HOLDER, proof=LET_GO),), {}, ("holder",), (), id="had-let-go-and-was-granted-again",
        ),
        pytest.param(
            {"holders": Holders(("n",), 1)}, (AgentView("n", False),), {}, ("n",), (), id="is-silent",
        ),
    ],
)  # fmt: skip
def test_who_is_a_holder_and_who_has_vanished(
    before: dict[str, Any],
    agents: tuple[AgentView, ...],
    other: dict[str, Any],
    holders: tuple[str, ...],
    vanished: tuple[LostAgent, ...],
) -> None:
    found = watch_agents(replace(STATE, **before), inputs(*agents, **other), RESUMES)
    assert (found.holders, found.vanished) == (Holders(holders, len(holders)), vanished)


def test_more_vanish_than_can_be_kept_and_none_is_forgotten() -> None:
    names = tuple(f"gone-{number:02}" for number in range(MAX_LOST + 3))
    state = replace(STATE, holders=Holders(names, len(names)))
    found = watch_agents(state, inputs(HOLDER), RESUMES)
    kept = {one.node for one in found.vanished}
    assert len(kept) == MAX_LOST
    assert {*found.holders.names} == ({*names} - kept) | {"holder"}
    again = watch_agents(found, replace(inputs(HOLDER), now=NOW + 11), RESUMES)
    assert {one.node for one in again.vanished} == {*names} - kept
    assert again.holders == Holders(("holder",), 1)


KEPT = tuple(LostAgent(f"kept-{number}", NOW - 5) for number in range(MAX_LOST))


@pytest.mark.parametrize("known", ["written-down", "remembered"])
def test_one_that_finds_no_room_among_the_vanished_stays_a_holder(known: str) -> None:
    written = known == "written-down"
    state = replace(STATE, vanished=KEPT, holders=Holders(("fresh",), 1) if written else Holders())
    holders = frozenset() if written else frozenset({"fresh"})
    found = watch_agents(state, inputs(HOLDER, holders=holders), RESUMES)
    assert found.vanished == KEPT
    assert found.holders == Holders(("fresh", "holder"), 2)


def test_a_number_takes_the_place_of_a_name_which_is_a_holder_again() -> None:
    state = replace(STATE, vanished=KEPT, holders=Holders((), 4))
    found = watch_agents(state, inputs(HOLDER), RESUMES)
    assert found.vanished == (LostAgent("3 not named", NOW), *KEPT[:-1])
    assert found.holders == Holders((KEPT[-1].node, "holder"), 2)


def test_a_number_that_was_missed_before_is_waited_for_anew() -> None:
    """They are others: whoever was counted in it before is counted as a holder no more."""
    state = replace(STATE, vanished=(LostAgent("3 not named", NOW - 5),), holders=Holders((), 4))
    found = watch_agents(state, inputs(HOLDER), RESUMES)
    assert found.vanished == (LostAgent("3 not named", NOW),)


def test_one_that_is_remembered_too_is_missed_from_when_it_vanished() -> None:
    state = replace(STATE, vanished=(GONE,))
    found = watch_agents(state, inputs(HOLDER, holders=frozenset({"gone"})), RESUMES)
    assert found.vanished == (GONE,)


def test_who_was_sent_a_grant_and_did_not_say_so_is_a_holder() -> None:
    found = watch_agents(STATE, inputs(AgentView("n", False), holders=frozenset({"n"})), RESUMES)
    assert found.holders == Holders(("n",), 1)


@pytest.mark.parametrize(
    ("agent", "does"),
    [
        pytest.param({}, True, id="this-candidate-under-this-fence"),
        pytest.param({"granted_fence": FENCE - 1}, False, id="under-an-earlier-fence"),
        pytest.param({"granted_fence": FENCE + 1}, False, id="under-a-later-fence"),
        pytest.param({"candidate_digest": "?"}, False, id="another-candidate"),
    ],
)
def test_what_it_is_to_hold_the_candidate(agent: dict[str, Any], does: bool) -> None:
    assert holds(replace(HOLDER, **agent), STATE) is does
    assert not holds(replace(HOLDER, **agent), replace(STATE, candidate=None))


def test_those_that_are_missed_by_number_come_first() -> None:
    names = tuple(f"gone-{number:02}" for number in range(MAX_LOST))
    state = replace(STATE, holders=Holders(names, MAX_LOST + 4))
    found = watch_agents(state, inputs(HOLDER), RESUMES)
    assert found.vanished[0] == LostAgent("3 not named", NOW), "one of them is who says that it holds it"
    assert found.holders == Holders((names[-1], "holder"), 2)
