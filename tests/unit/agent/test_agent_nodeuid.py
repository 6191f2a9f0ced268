"""An agent learns its Node's uid, or says within a bounded time why it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_agent.nodeuid import NodeUidError, NodeUidReason, find_node_uid
from kvtier_agent.registration import KubeError

UID = "6f1c2d3e-0000-4000-8000-123456789abc"


class Api:
    """Answers in turn, the last one for ever; its clock moves only while somebody sleeps."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)
        self.paths: list[str] = []
        self.pauses: list[float] = []
        self.now = 100.0

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert body == {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        self.paths.append(path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def get(self, path: str) -> dict[str, Any]:
        raise AssertionError("nothing is read")

    async def apply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing is written")

    async def close(self) -> None: ...

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def find(self, seconds: float = 60.0) -> str:
        return await find_node_uid(
            self,
            "node-a",
            seconds=seconds,
            monotonic=lambda: self.now,
            sleep=self.sleep,
            jitter=lambda: 1.0,
        )


def review(uid: object = UID, name: object = "node-a") -> dict[str, Any]:
    """A SelfSubjectReview's answer; None leaves the extra out."""
    extra = {
        "authentication.kubernetes.io/pod-name": ["pod"],
        "authentication.kubernetes.io/node-name": [name],
        "authentication.kubernetes.io/node-uid": [uid],
    }
    kept = {key: values for key, values in extra.items() if values != [None]}
    return {"status": {"userInfo": {"username": "system:serviceaccount:a:b", "extra": kept}}}


async def test_the_uid_is_that_of_the_node_the_token_is_bound_to() -> None:
    api = Api(review())
    assert await api.find() == UID
    assert (api.paths, api.pauses) == (["/apis/authentication.k8s.io/v1/selfsubjectreviews"], [])


@pytest.mark.parametrize(
    "away",
    [KubeError(0, "refused"), KubeError(429, "busy"), KubeError(503, "starting"), TimeoutError()],
    ids=["no-answer", "overloaded", "starting", "hangs"],
)
async def test_a_server_that_comes_back_is_asked_again(away: Exception) -> None:
    api = Api(away, away, away, review())
    assert await api.find() == UID
    assert api.pauses == [0.5, 1.0, 2.0]


async def test_a_server_that_stays_away_is_given_up_in_time() -> None:
    api = Api(KubeError(0, "connection refused"))
    with pytest.raises(NodeUidError, match=r"in 60 s .*connection refused") as ended:
        await api.find()
    assert ended.value.reason is NodeUidReason.API_UNREACHABLE
    assert 50.0 <= api.now - 100.0 <= 60.0
    assert max(api.pauses) == 5.0


@pytest.mark.parametrize(
    ("answer", "reason", "says"),
    [
        (KubeError(403, "x"), NodeUidReason.NOT_ALLOWED, "or pass --node-uid"),
        (KubeError(401, "x"), NodeUidReason.NOT_ALLOWED, "is refused"),
        (KubeError(404, "odd"), NodeUidReason.ANSWER_INVALID, "odd"),
        (review(uid=None, name=None), NodeUidReason.TOKEN_UNBOUND, "bound to a Pod that runs"),
        (review(uid=None), NodeUidReason.TOKEN_UNBOUND, "node-name 'node-a', node-uid ''"),
        (review(name="node-b"), NodeUidReason.OTHER_NODE, "on Node node-b, not node-a; see --node-name"),
        (review(uid="../../etc"), NodeUidReason.ANSWER_INVALID, "'../../etc'"),
        (review(uid=7), NodeUidReason.TOKEN_UNBOUND, "node-uid ''"),
        ({"status": {"userInfo": {"username": "admin"}}}, NodeUidReason.TOKEN_UNBOUND, "node-name ''"),
        ({}, NodeUidReason.TOKEN_UNBOUND, "names no Node"),
    ],
    ids=[
        "forbidden",
        "unauthorized",
        "no-such-api",
        "not-bound",
        "no-such-node",
        "another-node",
        "a-path",
        "no-text",
        "no-extra",
        "empty",
    ],
)
async def test_an_answer_that_will_not_change_ends_it_at_once(
    answer: dict[str, Any] | Exception, reason: NodeUidReason, says: str
) -> None:
    api = Api(answer)
    with pytest.raises(NodeUidError) as ended:
        await api.find()
    assert ended.value.reason is reason
    assert says in str(ended.value)
    assert len(api.paths) == 1
