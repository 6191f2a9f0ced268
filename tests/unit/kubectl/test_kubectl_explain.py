"""The sentence of each phase, the tree around it, and where a rollout stands on its ladder."""

from __future__ import annotations

from typing import Any

import pytest

from kubectl_kvtier.explain import explain
from kubectl_kvtier.outcomes import Failure
from kubectl_kvtier.rollouts import Mark, current, following, read_rollout, span, steps, title
from kubectl_kvtier.tree import Look, tree
from kvtier_crds.models import KVNode
from tests.unit.crds.crds_samples import example
from tests.unit.kubectl.kubectl_samples import CANDIDATE, GOOD, NOW, SHORT, at, condition, document, rollout

BACK = {
    "cause": "GateFailed",
    "gate": "quality",
    "fromStage": "Canary",
    "fromStep": 0,
    "agentsRestored": 1,
    "agentsTotal": 2,
    "missing": ["node-b"],
}
# A look that changes nothing is not written: these times are old in any step that goes well.
LOOKED = {"dueAt": at(-895), "ranAt": at(-900)}
UNREAD = {"name": "stall", "verdict": "ProviderError", "reason": "AgentUnread", "message": "node-a: timeout"}

CASES: list[tuple[str, dict[str, Any], tuple[str, ...], bool, bool]] = [
    (
        "short of requests",
        {"schedule": LOOKED | {"stepStartedAt": at(4320 - 7200)}},
        (
            "stays in Canary (5%) and does not go to Ramp step 0 (10%) yet",
            "1 of 2 gates do not pass",
            "tail Insufficient (TooFewSamples): 800 of 18000 requests, bound 1.09 against 1.05",
            "not before 1h12m from now",
        ),
        False,
        False,
    ),
    (
        "a gate failed",
        {"gates": [GOOD, SHORT | {"verdict": "Fail", "reason": "Harm"}]},
        ("tail Fail (Harm)", "return to the exact baseline follows"),
        False,
        False,
    ),
    (
        "evidence cannot be read",
        {"gates": [SHORT, UNREAD]},
        ("stall ProviderError (AgentUnread): node-a: timeout; tail",),
        False,
        False,
    ),
    (
        "only time is missing",
        {"gates": [GOOD], "schedule": LOOKED | {"stepStartedAt": at(90 - 7200)}},
        ("all 1 gates pass, its minimum time ends in 1m30s",),
        False,
        False,
    ),
    (
        "nobody looks",
        {"gates": [GOOD], "schedule": LOOKED | {"stepStartedAt": at(-7200 - 900)}},
        ("nothing has held it for 15m00s, and no operator takes it on",),
        False,
        False,
    ),
    (
        "it is looked at in a moment",
        {"gates": [GOOD], "schedule": LOOKED | {"stepStartedAt": at(-7200 - 9)}},
        ("no reason is stated",),
        False,
        False,
    ),
    (
        "its cache is suspended",
        {
            "gates": [GOOD],
            "schedule": LOOKED | {"stepStartedAt": at(-9000)},
            "conditions": [condition("Progressing", "False", "CacheSuspended", "held")],
        },
        ("yet: CacheSuspended: held; all 1 gates pass.",),
        False,
        False,
    ),
    (
        "an agent is silent",
        {
            "schedule": LOOKED | {"stepStartedAt": at(-9000)},
            "unreachable": [{"node": "node-b", "since": at(-70)}],
        },
        (f"yet: no answer from node-b since {at(-70)}; 1 of 2 gates do not pass: tail",),
        False,
        False,
    ),
    (
        "paused",
        {"phase": "Paused", "lastIntent": {"seq": 4, "verb": "Pause", "result": "Accepted"}},
        ("is paused in Canary (5%) by intent seq 4", "`kubectl kvtier resume quest-on-chat`"),
        False,
        False,
    ),
    (
        "paused, and a later intent was refused",
        {"phase": "Paused", "lastIntent": {"seq": 5, "verb": "Promote", "result": "WrongStep"}},
        ("is paused in Canary (5%), and goes on",),
        False,
        False,
    ),
    (
        "waits for another",
        {
            "phase": "Pending",
            "stage": "Off",
            "schedule": {"pendingSince": at(-3600), "deadlineAt": at(7200)},
            "conditions": [
                condition(
                    "Progressing", "False", "CacheBusy", "KVCache chat has an unfinished rollout: other"
                )
            ],
        },
        (
            "has waited for 1h00m to begin: CacheBusy: KVCache chat has an unfinished rollout: other",
            "gives up in 2h00m",
        ),
        False,
        False,
    ),
    (
        "cannot run",
        {
            "phase": "Invalid",
            "stage": "Off",
            "conditions": [condition("Progressing", "False", "GateMissing", "no quality gate")],
        },
        ("cannot run until its spec is edited: GateMissing: no quality gate",),
        True,
        True,
    ),
    (
        "on its way back",
        {"phase": "RollingBack", "stage": "ExactBaseline", "rollback": BACK},
        (
            "returns to the exact baseline from Canary (GateFailed, gate quality): ",
            "1 of 2 agents have proved it; waits for node-b",
        ),
        False,
        True,
    ),
    (
        "back",
        {
            "phase": "RolledBack",
            "stage": "ExactBaseline",
            "rollback": BACK | {"agentsRestored": 2, "missing": [], "message": "quality 0.2 above 0.01"},
        },
        ("was rolled back from Canary", "quality 0.2 above 0.01; 2 of 2 agents proved"),
        True,
        True,
    ),
    (
        "released",
        {"phase": "Completed", "stage": "Full", "grantExpires": at(3600)},
        ("is complete; its candidate is approved, its grant ends in 1h00m",),
        True,
        False,
    ),
]


@pytest.mark.parametrize("name,status,parts,finished,negative", CASES, ids=[case[0] for case in CASES])
def test_a_sentence_says_why(
    name: str, status: dict[str, Any], parts: tuple[str, ...], finished: bool, negative: bool
) -> None:
    found = explain(rollout(**status), NOW)
    for part in parts:
        assert part in found.sentence
    assert found.sentence.endswith(".") and "\n" not in found.sentence
    assert (found.finished, found.negative) == (finished, negative)


def test_an_edit_that_nobody_has_seen_is_said() -> None:
    assert "generation 1 of 2" in explain(rollout(observedGeneration=1), NOW).sentence


def test_a_rollout_without_a_status_is_not_seen() -> None:
    made = document()
    del made["status"]
    assert "no operator has looked" in explain(read_rollout(made), NOW).sentence


def test_the_ladder_is_marked() -> None:
    marks = [(str(step.stage), step.index, step.mark) for step in steps(rollout(stage="Ramp", step=1))]
    assert marks == [
        ("Shadow", 0, Mark.PASSED),
        ("Canary", 0, Mark.PASSED),
        ("Ramp", 0, Mark.PASSED),
        ("Ramp", 1, Mark.CURRENT),
        ("Ramp", 2, Mark.AHEAD),
        ("Full", 0, Mark.AHEAD),
    ]
    after = following(rollout(stage="Ramp", step=1))
    assert after is not None and title(after) == "Ramp step 2 (50%)"
    assert following(rollout(stage="Full")) is None
    assert current(rollout(phase="Completed", stage="Full")) is None


@pytest.mark.parametrize(
    "declared,said",
    [(None, "Full (all but 2%)"), ("5%", "Full (all but 5%)"), ("0%", "Full (all)"), (0, "Full (all)")],
)
def test_what_full_leaves_out(declared: Any, said: str) -> None:
    made = document()
    full = made["spec"]["stages"][-1]
    full.pop("holdback")
    if declared is not None:
        full["holdback"] = declared
    assert title(steps(read_rollout(made))[-1]) == said


def test_the_step_that_was_left_is_marked() -> None:
    found = steps(rollout(phase="RolledBack", stage="ExactBaseline", rollback=BACK))
    assert [step.mark for step in found[:3]] == [Mark.PASSED, Mark.LEFT, Mark.AHEAD]


@pytest.mark.parametrize(
    "seconds,text", [(-3, "0s"), (59.9, "59s"), (61, "1m01s"), (3600, "1h00m"), (90000, "1d01h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def node(name: str) -> KVNode:
    made = example("KVNode", "node-a")
    made["metadata"]["name"] = made["spec"]["nodeName"] = name
    held = {
        "namespace": "serving",
        "cache": "chat",
        "cacheUID": "u",
        "digest": CANDIDATE,
        "stage": "Canary",
        "fence": 17,
    }
    made["status"] = {"candidates": [held]}
    return KVNode.model_validate(made)


def test_the_tree_shows_gates_nodes_and_the_reason() -> None:
    lines = tree(rollout(), [node("node-a")], NOW)
    text = "\n".join(lines)
    assert lines[0].startswith("KVRollout serving/quest-on-chat  Progressing  Canary")
    assert "● Canary (5%), at least 2h\n" in text and "✔ Shadow" in text and "○ Full" in text
    assert "n 800 of 18000" in text and "node-a: Canary step 0, fence 17" in text
    assert lines[-1] == explain(rollout(), NOW).sentence


@pytest.mark.parametrize("opened,said", [(-3600, "1h00m left"), (-7200 - 61, "passed 1m01s ago")])
def test_the_tree_tells_what_is_left_of_the_step(opened: int, said: str) -> None:
    made = rollout(schedule=LOOKED | {"stepStartedAt": at(opened)})
    assert f"● Canary (5%), at least 2h, {said}" in "\n".join(tree(made, [], NOW))


def test_the_tree_has_a_plain_and_a_coloured_form() -> None:
    plain = "\n".join(tree(rollout(), [], NOW, Look(unicode=False)))
    assert plain.isascii() and "* Canary" in plain
    assert "\x1b[33mInsufficient" in "\n".join(tree(rollout(), [], NOW, Look(colour=True)))


def test_a_status_of_another_version_is_an_error_that_names_the_field() -> None:
    with pytest.raises(Failure, match=r"status\.phase"):
        read_rollout(document(phase="Dancing"))


RETURNING = {"phase": "RollingBack", "stage": "ExactBaseline"}
LEAVING = BACK | {"cause": "ObjectDeleted", "startedAt": at(-30)}


@pytest.mark.parametrize(
    "status,finalizers,age,said",
    [
        pytest.param(
            RETURNING | {"rollback": LEAVING}, ["kvtier.dev/rollout"], 31,
            "quest-on-chat in serving is being deleted for 31s: kvtier.dev/rollout holds it: 1 of 2 agents "
            "have proved the exact baseline, not yet node-b; every lease has ended in 36s at the latest.",
            id="an-agent-is-waited-for",
        ),
        pytest.param(
            RETURNING | {"rollback": LEAVING | {"leaseTTL": "2m"}}, ["kvtier.dev/rollout"], 31,
            "every lease has ended in 1m42s at the latest.", id="a-longer-lease-may-be-out",
        ),
        pytest.param(
            RETURNING | {"rollback": LEAVING | {"startedAt": at(-166)}}, ["kvtier.dev/rollout"], 170,
            "not yet node-b; since no operator has done it for 1m40s, `kubectl kvtier uninstall -n serving`",
            id="leases-have-ended-and-nobody-lets-go",
        ),
        pytest.param(
            RETURNING | {"rollback": LEAVING | {"revokedAt": at(-5)}}, ["kvtier.dev/rollout"], 31,
            "no agent can hold its candidate, and an operator's next look lets it go.", id="revoked",
        ),
        pytest.param(
            {}, ["kvtier.dev/rollout"], 5,
            "its candidate is revoked first, and no operator has begun that yet.", id="not-begun",
        ),
        pytest.param(
            {}, ["kvtier.dev/rollout"], 605,
            "since no operator has done it for 10m05s, `kubectl kvtier uninstall -n serving`",
            id="no-operator",
        ),
        pytest.param(
            {"phase": "RolledBack", "stage": "ExactBaseline"}, ["example.com/audit"], 5,
            "is being deleted for 5s: example.com/audit holds it, not kvtier's to drop.", id="held-by-others",
        ),
    ],
)  # fmt: skip
def test_of_a_deletion_that_waits_it_says_who_holds_it_and_until_when(
    status: dict[str, Any], finalizers: list[str], age: float, said: str
) -> None:
    made = document(**status)
    made["metadata"] |= {"deletionTimestamp": at(-age), "finalizers": finalizers}
    made["spec"]["leaseTTL"] = "60s"
    found = explain(read_rollout(made), NOW)
    assert said in found.sentence and not found.finished
