"""Whose turn it is when several rollouts name one cache."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_operator.ports import ApiError, JsonObject, Kind
from kvtier_operator.rollout.rivals import busy_with, rivals_now, superseded_by
from tests.unit.selecting import selected


def rollout(
    name: str, age: int, phase: str = "", stage: str = "Off", cache: str = "chat", **more: Any
) -> Any:
    status: dict[str, Any] = {"phase": phase, "stage": stage, **more} if phase else {}
    created = f"2027-01-0{age}T00:00:00Z"
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": created},
        "spec": {"cacheRef": {"name": cache}},
        "status": status,
    }


ME = rollout("me", 5, "Pending")


@pytest.mark.parametrize(
    ("other", "busy"),
    [
        pytest.param(rollout("older", 1), "older", id="older-unseen"),
        pytest.param(rollout("older", 1, "Pending"), "older", id="older-waits"),
        pytest.param(rollout("younger", 9, "Pending"), "", id="younger-waits"),
        pytest.param(rollout("younger", 9, "Progressing", "Shadow"), "younger", id="younger-has-begun"),
        pytest.param(
            rollout("younger", 9, "Pending", revoking={"rollout": "x"}), "younger", id="clears-the-way"
        ),
        pytest.param(rollout("older", 1, "RollingBack", "ExactBaseline"), "older", id="still-returning"),
        pytest.param(rollout("older", 1, "RolledBack", "ExactBaseline"), "", id="returned"),
        pytest.param(rollout("older", 1, "Completed", "Full"), "", id="completed"),
        pytest.param(rollout("older", 1, "Invalid"), "", id="invalid"),
        pytest.param(rollout("younger", 9, "Hovering", "Canary"), "younger", id="unknown-phase"),
        pytest.param(rollout("older", 1, "Progressing", "Canary", cache="other"), "", id="other-cache"),
    ],
)
def test_who_goes_first(other: Any, busy: str) -> None:
    assert busy_with(ME, [ME, other]) == busy


def test_the_begun_one_is_named_before_the_older_one() -> None:
    older, begun = rollout("older", 1, "Pending"), rollout("begun", 9, "Progressing", "Canary")
    assert busy_with(ME, [older, begun, ME]) == "begun"


def test_of_two_that_have_begun_at_once_the_older_one_stays() -> None:
    older, younger = rollout("a", 1, "Progressing", "Shadow"), rollout("b", 2, "Progressing", "Shadow")
    assert superseded_by(younger, [older, younger], completed=False) == "a"
    assert superseded_by(older, [older, younger], completed=False) == ""


def test_a_completed_one_yields_to_any_that_has_begun() -> None:
    done, younger = rollout("done", 1, "Completed", "Full"), rollout("b", 2, "Progressing", "Shadow")
    assert superseded_by(done, [done, younger], completed=True) == "b"
    assert superseded_by(done, [done, rollout("c", 3, "Pending")], completed=True) == ""


def leaving(made: Any) -> Any:
    made["metadata"]["deletionTimestamp"] = "2027-01-09T00:00:00Z"
    return made


@pytest.mark.parametrize(
    ("other", "busy"),
    [
        pytest.param(leaving(rollout("older", 1, "Pending")), "", id="not-begun"),
        pytest.param(leaving(rollout("older", 1)), "", id="unseen"),
        pytest.param(leaving(rollout("b", 9, "Progressing", "Canary")), "b", id="holds"),
        pytest.param(leaving(rollout("b", 9, "RollingBack", "ExactBaseline")), "b", id="returns"),
        pytest.param(leaving(rollout("b", 9, "Pending", revoking={"rollout": "x"})), "b", id="revokes"),
    ],
)
def test_one_that_is_deleted_goes_first_only_where_agents_may_hold_a_candidate(other: Any, busy: str) -> None:
    assert busy_with(ME, [ME, other]) == busy


@pytest.mark.parametrize(
    ("other", "completed", "name"),
    [
        pytest.param(rollout("b", 1, "Progressing", "Canary"), False, "b", id="older"),
        pytest.param(rollout("b", 9, "Progressing", "Canary"), False, "", id="younger"),
        pytest.param(rollout("b", 9, "Progressing", "Canary"), True, "b", id="younger-than-an-approved"),
        pytest.param(rollout("b", 1, "RolledBack", "ExactBaseline"), False, "", id="returned"),
        pytest.param(rollout("b", 1, "Completed", "Full"), True, "", id="approved-itself"),
        pytest.param(rollout("b", 1, "Pending"), False, "", id="not-begun"),
        pytest.param(rollout("b", 1, "Progressing", "Canary", cache="other"), True, "", id="other-cache"),
    ],
)
def test_whom_one_that_has_begun_yields_to(other: Any, completed: bool, name: str) -> None:
    assert superseded_by(ME, [ME, other], completed=completed) == name


def test_of_several_that_one_yields_to_the_oldest_is_named() -> None:
    others = [rollout(f"r{age}", age, "Progressing", "Shadow") for age in (3, 2, 4)]
    assert superseded_by(ME, others, completed=False) == "r2"


class Server:
    """Lists what it has. refuses: a field selector, with this status."""

    def __init__(self, objects: list[Any], refuses: int = 0) -> None:
        self._objects, self._refuses = objects, refuses
        self.asked: list[str] = []

    async def list_all(
        self, kind: Kind, namespace: str = "", label_selector: str = "", field_selector: str = ""
    ) -> list[JsonObject]:
        assert (kind, namespace) == (Kind.KV_ROLLOUT, "serving")
        self.asked.append(field_selector)
        if field_selector and self._refuses:
            raise ApiError(self._refuses, "No", "field label not supported")
        return [obj for obj in self._objects if selected(obj, label_selector, field_selector)]


def in_serving(*arguments: Any, **more: Any) -> Any:
    made = rollout(*arguments, **more)
    made["metadata"]["namespace"] = "serving"
    return made


@pytest.mark.parametrize(
    ("refuses", "asked"),
    [
        pytest.param(0, ["spec.cacheRef.name=chat"], id="selected by the server"),
        pytest.param(400, ["spec.cacheRef.name=chat", ""], id="a definition of an earlier version"),
    ],
)
async def test_the_server_is_asked_for_those_of_one_cache(refuses: int, asked: list[str]) -> None:
    mine, other = in_serving("me", 5), in_serving("older", 1)
    server = Server([mine, other, in_serving("elsewhere", 1, cache="other")], refuses)
    assert await rivals_now(server, mine) == [other]  # type: ignore[arg-type]
    assert server.asked == asked


async def test_a_server_that_fails_is_not_taken_for_one_without_rivals() -> None:
    mine = in_serving("me", 5)
    with pytest.raises(ApiError):
        await rivals_now(Server([mine], 500), mine)  # type: ignore[arg-type]
