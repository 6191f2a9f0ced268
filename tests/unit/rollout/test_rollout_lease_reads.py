"""Leases that fall due together are read by two lists of their namespace, few of many one by one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents import renewal
from kvtier_operator.agents.heldleases import LIST_FROM, MAX_READS, SLOW_SECONDS, LeaseReads
from kvtier_operator.agents.renewal import LeaseRenewer
from kvtier_operator.lastreads import LastReads
from kvtier_operator.ports import AgentTarget, ApiError, JsonObject, Kind, Known, NotFound, ObjectKey
from tests.unit.rollout.rollout_world import Clock, World, held


def named(kind: Kind, space: str, index: int) -> JsonObject:
    metadata = {"namespace": space, "name": f"o-{index}", "uid": f"{kind}-{index}", "resourceVersion": "7"}
    return {"kind": kind.value, "metadata": metadata, "spec": {"cacheRef": {"name": f"o-{index}"}}}


class Server:
    """Both the API and the read cache: so many rollouts and caches in each namespace. Counts requests."""

    def __init__(self, **spaces: int) -> None:
        self.objects = {
            ObjectKey(kind, space, f"o-{index}"): named(kind, space, index)
            for space, count in spaces.items()
            for index in range(count)
            for kind in (Kind.KV_ROLLOUT, Kind.KV_CACHE)
        }
        self.asked: list[str] = []
        self.broken = ""
        self.takes = 0.0
        self.api = SimpleNamespace(get=self._get, list_all=self._list)

    def list_all(self, kind: Kind, namespace: str = "") -> list[JsonObject]:
        return [obj for key, obj in self.objects.items() if (key.kind, key.namespace) == (kind, namespace)]

    async def _get(self, key: ObjectKey, *, known: JsonObject | None) -> JsonObject:
        self.asked.append("get")
        if key not in self.objects:
            raise NotFound(404, "NotFound", str(key))
        return self.objects[key]

    async def _list(self, kind: Kind, namespace: str = "", *, known: Known) -> list[JsonObject]:
        self.asked.append("list")
        self.clock.seconds += self.takes
        if namespace == self.broken:
            raise ApiError(500, "InternalError", "not now")
        return self.list_all(kind, namespace)

    def reads(self) -> LeaseReads:
        self.noted = LastReads()
        self.clock = Clock()
        deps: Any = SimpleNamespace(api=self.api, store=self, clock=self.clock, reads=self.noted)
        return LeaseReads(deps)

    def get(self, key: ObjectKey) -> JsonObject | None:
        return self.objects.get(key)

    def due(self, space: str, count: int) -> list[JsonObject]:
        return self.list_all(Kind.KV_ROLLOUT, space)[:count]


@pytest.mark.parametrize(
    ("all_of_them", "due", "lists"),
    [
        pytest.param(20, 20, True, id="all"),
        pytest.param(4 * LIST_FROM, LIST_FROM, True, id="a-quarter"),
        pytest.param(4 * LIST_FROM + 1, LIST_FROM, False, id="less-than-a-quarter"),
        pytest.param(LIST_FROM - 1, LIST_FROM - 1, False, id="few"),
    ],
)
async def test_how_they_are_read(all_of_them: int, due: int, lists: bool) -> None:
    server = Server(a=all_of_them)
    found = await server.reads().read(server.due("a", due))
    assert server.asked == (["list"] * 2 if lists else ["get"] * 2 * due)
    assert [one is not None and one.rollout["metadata"]["name"] for one in found] == [
        f"o-{index}" for index in range(due)
    ]
    assert all(one is not None and one.cache["kind"] == "KVCache" for one in found)
    for key, obj in server.objects.items():
        assert server.noted.vouch(key, obj, 0.0) is (lists or key.name in {f"o-{i}" for i in range(due)})


async def test_what_a_list_does_not_hold_any_more_is_not_there() -> None:
    server = Server(a=LIST_FROM + 2)
    due = server.due("a", LIST_FROM + 2)
    del server.objects[ObjectKey(Kind.KV_CACHE, "a", "o-0")]
    del server.objects[ObjectKey(Kind.KV_ROLLOUT, "a", "o-1")]
    found = await server.reads().read(due)
    assert [one is None for one in found] == [True, True, *[False] * LIST_FROM]


@pytest.mark.parametrize("due", [LIST_FROM, 1], ids=["listed", "one-by-one"])
async def test_nobody_vouches_for_what_the_server_does_not_have_any_more(due: int) -> None:
    server = Server(a=LIST_FROM)
    reads = server.reads()
    await reads.read(server.due("a", due))
    cached = server.due("a", due)
    gone = ObjectKey(Kind.KV_ROLLOUT, "a", "o-0")
    assert server.noted.vouch(gone, cached[0], 0.0)
    del server.objects[gone]
    assert (await reads.read(cached))[0] is None
    assert not server.noted.vouch(gone, cached[0], 0.0)


async def test_a_namespace_that_cannot_be_listed_leaves_the_others_alone() -> None:
    server = Server(a=LIST_FROM, b=LIST_FROM, c=1)
    server.broken = "a"
    due = [*server.due("a", LIST_FROM), *server.due("b", LIST_FROM), *server.due("c", 1)]
    found = await server.reads().read(due)
    assert [one is None for one in found] == [*[True] * LIST_FROM, *[False] * (LIST_FROM + 1)]


@pytest.mark.parametrize(
    ("due", "sizes"),
    [
        pytest.param(MAX_READS + 3, [MAX_READS + 3], id="listed"),
        pytest.param(LIST_FROM - 1, [LIST_FROM - 1], id="few"),
    ],
)
def test_a_namespace_is_one_group_where_it_is_one_read(due: int, sizes: list[int]) -> None:
    server = Server(a=due)
    assert [len(group) for group in server.reads().groups(server.due("a", due))] == sizes


async def test_where_lists_come_too_late_objects_are_read_one_by_one_for_a_while() -> None:
    """Else no lease of the namespace would be renewed until all have ended."""
    due = 2 * MAX_READS + 1
    server = Server(a=due, b=LIST_FROM)
    reads, server.takes = server.reads(), 1.0
    all_due = [*server.due("a", due), *server.due("b", LIST_FROM)]
    await reads.read(server.due("a", due), within=1.5)
    groups = reads.groups(all_due)
    assert [len(group) for group in groups] == [MAX_READS, MAX_READS, 1, LIST_FROM]
    server.asked.clear()
    assert all(await reads.read(groups[0], within=1.5))
    assert server.asked == ["get"] * 2 * MAX_READS
    server.clock.seconds += SLOW_SECONDS
    assert [len(group) for group in reads.groups(all_due)] == [due, LIST_FROM]


async def granted() -> World:
    world = World()
    await world.until("Progressing", "Canary")
    await world.pass_()
    return world


async def test_of_more_leases_than_one_call_takes_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "MAX_ITEMS", 2)
    world = await granted()
    sizes: list[int] = []

    async def counted(node: Any, request: Any, **_: Any) -> control.RenewResponse:
        sizes.append(len(request.items))
        return control.RenewResponse()

    world.deps.agents.renew = counted  # type: ignore[method-assign]
    renewer = LeaseRenewer(world.deps)
    lease = renewal.HeldLease(world.rollout, 10.0, control.RenewItem(), (), world.clock.monotonic() - 0.1)
    target = AgentTarget("node-0", "uid", "here:1", "boot")
    await renewer._renew_node(target, [replace(lease) for _ in range(5)])
    assert sizes == [2, 2, 1]


async def test_leases_of_a_namespace_come_to_be_renewed_together() -> None:
    """Granted at different times; after some beats one call tells an agent of both."""
    world = await granted()
    second = world.add_rollout("second")
    status = {**world.status}
    renewer = LeaseRenewer(world.deps)
    await renewer.tick()
    world.clock.seconds += 1.2
    world.api.objects[second]["status"] = status
    world.api.objects[second]["metadata"]["resourceVersion"] = "950"
    sizes: list[int] = []
    renew = world.deps.agents.renew

    async def counted(node: Any, request: Any, **options: Any) -> Any:
        sizes.append(len(request.items))
        return await renew(node, request, **options)

    world.deps.agents.renew = counted  # type: ignore[method-assign]
    end = world.clock.seconds + 30
    while world.clock.seconds < end:
        world.clock.seconds += await renewer.tick()
    assert sizes[0] in (1, 2)
    assert set(sizes[-4:]) == {2}
    assert held(world) == ["node-0", "node-1"]


async def test_what_was_read_too_long_ago_is_not_renewed_by_it_and_read_again_soon() -> None:
    world = await granted()
    renewer = LeaseRenewer(world.deps)
    await renewer.tick()
    asked: list[float] = []
    list_of = world.deps.api.get

    async def slow(key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        answer = await list_of(key, known=known)
        if key == world.cache_key:
            asked.append(world.clock.seconds)
            world.clock.seconds += 2.0
        return answer

    world.deps.api.get = slow  # type: ignore[method-assign]
    world.clock.seconds += 3.5
    calls: list[int] = []
    renew = world.deps.agents.renew

    async def counted(node: Any, request: Any, **options: Any) -> Any:
        calls.append(len(request.items))
        return await renew(node, request, **options)

    world.deps.agents.renew = counted  # type: ignore[method-assign]
    wait = await renewer.tick()
    assert (len(asked), calls) == (1, [])
    world.deps.api.get = list_of  # type: ignore[method-assign]
    world.clock.seconds += wait + 0.5
    await renewer.tick()
    assert calls == [1, 1]
    assert held(world) == ["node-0", "node-1"]
