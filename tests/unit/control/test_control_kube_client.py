"""What the client sends, and how little of what is known already it asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from kvtier_operator.kube.client import MAX_SINGLE, METADATA_LIST, METADATA_ONLY, KubeClient
from kvtier_operator.kube.transport import Answer
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import JsonObject, Kind, NotFound, ObjectKey, add_op
from tests.unit.control.control_fakes import FakeClock

KEY = ObjectKey(Kind.KV_CACHE, "serving", "chat")
PATH = "/apis/kvtier.dev/v1alpha1/namespaces/serving/kvcaches"


def cache(version: str, uid: str = "u", **fields: Any) -> JsonObject:
    return {"kind": "KVCache", "metadata": {"name": "chat", "uid": uid, "resourceVersion": version}, **fields}


class Sent(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    accept: str
    content_type: str
    body: Any


class Transport:
    """A server that has one object, and gives its metadata to who asks for no more."""

    def __init__(self, obj: JsonObject | None) -> None:
        self.obj = obj
        self.sent: list[Sent] = []

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]],
        body: Any,
        accept: str,
        content_type: str,
        seconds: float,
    ) -> Answer:
        self.sent.append(Sent(method, path, dict(query), accept, content_type, body))
        answer = self.answer(self.sent[-1])
        return Answer(200 if self.obj else 404, json.dumps(answer).encode(), None)

    def answer(self, asked: Sent) -> JsonObject:
        answer: JsonObject = self.obj or {}
        if asked.accept == METADATA_ONLY:
            answer = {"kind": "PartialObjectMetadata", "metadata": answer.get("metadata")}
        return {"metadata": {}, "items": [answer]} if (asked.method, asked.path) == ("GET", PATH) else answer

    @property
    def accepted(self) -> list[str]:
        return [one.accept for one in self.sent]


def client(transport: Transport) -> KubeClient:
    metrics = Metrics(CollectorRegistry())
    return KubeClient(transport, gate=lambda: None, metrics=metrics, clock=FakeClock(), instance="test")


async def test_of_a_version_that_is_known_no_object_travels() -> None:
    transport = Transport(cache("7", spec={"tiers": []}))
    known = cache("7", spec={"tiers": []})
    assert await client(transport).get(KEY, known=known) is known
    assert transport.accepted == [METADATA_ONLY]


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(cache("6", spec={"tiers": [1]}), id="the-cache-is-behind"),
        pytest.param(cache("8", spec={"tiers": [1]}), id="the-cache-is-ahead"),
        pytest.param(cache("7", "other", spec={"tiers": [1]}), id="another-object-of-that-name"),
        pytest.param(None, id="nothing"),
    ],
)
async def test_of_any_other_the_servers_is_the_answer(known: JsonObject | None) -> None:
    transport = Transport(cache("7", spec={"tiers": []}))
    assert await client(transport).get(KEY, known=known) == transport.obj
    assert transport.accepted[-1] == "application/json"


async def test_what_is_known_and_gone_is_not_found() -> None:
    with pytest.raises(NotFound):
        await client(Transport(None)).get(KEY, known=cache("7"))


async def test_a_body_is_sent_as_it_is_and_a_list_by_its_selector() -> None:
    transport = Transport(cache("7"))
    api = client(transport)
    await api.compare_and_swap(KEY, [add_op("/status/fence", 3)])
    one = transport.sent[0]
    assert (one.method, one.path) == ("PATCH", f"{PATH}/chat/status")
    assert one.query == {"fieldManager": "kvtier-operator-cas"}
    assert one.content_type == "application/json-patch+json"
    assert one.body == [{"op": "add", "path": "/status/fence", "value": 3}]
    transport.obj = {"metadata": {}, "items": []}
    await api.list_all(Kind.KV_CACHE, "serving", "a=b c,d")
    assert transport.sent[1].path == PATH
    assert transport.sent[1].query == {"limit": "100", "labelSelector": "a=b c,d"}


def rollouts(count: int, version: str = "7") -> list[JsonObject]:
    return [
        {
            "kind": "KVRollout",
            "metadata": {
                "name": f"r-{n}",
                "namespace": "serving",
                "uid": f"u-{n}",
                "resourceVersion": version,
            },
            "spec": {"served": version},
        }
        for n in range(count)
    ]


class Collection(Transport):
    """Two pages of rollouts; told apart by `continue`."""

    def __init__(self, objects: list[JsonObject]) -> None:
        super().__init__({"metadata": {}})
        self.objects = {one["metadata"]["name"]: one for one in objects}

    def answer(self, asked: Sent) -> JsonObject:
        half = len(self.objects) // 2
        page = list(self.objects.values())
        page = page[half:] if "continue" in asked.query else page[:half]
        name = asked.query.get("fieldSelector", "").removeprefix("metadata.name=")
        if name:
            page = [one for one in self.objects.values() if one["metadata"]["name"] == name]
        if asked.accept == METADATA_LIST:
            page = [{"kind": "PartialObjectMetadata", "metadata": one["metadata"]} for one in page] or None
        return {"metadata": {} if "continue" in asked.query else {"continue": "more"}, "items": page}


@pytest.mark.parametrize(
    ("behind", "accepted"),
    [
        pytest.param(0, [METADATA_LIST] * 2, id="all-known"),
        pytest.param(
            MAX_SINGLE, [METADATA_LIST, *["application/json"] * MAX_SINGLE, METADATA_LIST], id="few-are-not"
        ),
        pytest.param(
            MAX_SINGLE + 1,
            [METADATA_LIST, "application/json", METADATA_LIST],
            id="a-page-of-which-many-are-not",
        ),
    ],
)
async def test_of_a_list_only_what_is_not_known_travels(behind: int, accepted: list[str]) -> None:
    served = rollouts(40)
    transport = Collection(served)
    cached = {ObjectKey(Kind.KV_ROLLOUT, "serving", one["metadata"]["name"]): one for one in rollouts(40)}
    for one in rollouts(behind, "6"):
        cached[ObjectKey(Kind.KV_ROLLOUT, "serving", one["metadata"]["name"])] = one
    found = await client(transport).list_all(Kind.KV_ROLLOUT, "serving", known=cached.get)
    assert [one["spec"] for one in found] == [one["spec"] for one in served]
    assert found[-1] is cached[ObjectKey(Kind.KV_ROLLOUT, "serving", "r-39")]
    assert transport.accepted == accepted


async def test_a_list_of_nothing_is_empty() -> None:
    assert await client(Collection([])).list_all(Kind.KV_ROLLOUT, "serving", known=lambda _key: None) == []


async def test_what_goes_while_it_is_listed_is_left_out() -> None:
    transport = Collection(rollouts(4))
    gone = transport.objects["r-1"]["metadata"]

    def known(key: ObjectKey) -> JsonObject | None:
        if key.name == gone["name"]:
            transport.objects.pop("r-1", None)
            return None
        return transport.objects[key.name]

    found = await client(transport).list_all(Kind.KV_ROLLOUT, "serving", known=known)
    assert [one["metadata"]["name"] for one in found[:1]] == ["r-0"]
    assert gone not in [one["metadata"] for one in found]
