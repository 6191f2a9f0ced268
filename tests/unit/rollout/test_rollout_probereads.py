"""A probe set's ConfigMap is read once for those who look together, and an edit is seen by the next look."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier_operator.ports import JsonObject, Kind, NotFound, ObjectKey
from kvtier_operator.rollout import probereads
from kvtier_operator.rollout.probereads import MAX_KEPT, SHARED_SECONDS, ProbeReads
from tests.unit.rollout.rollout_world import Clock

GOLDEN = ObjectKey(Kind.CONFIG_MAP, "serving", "golden")


class Api:
    """Counts reads; `prompts` None: the object does not exist."""

    def __init__(self) -> None:
        self.reads = 0
        self.travelled = 0
        self.prompts: int | None = 2

    async def get(self, key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        self.reads += 1
        if self.prompts is None:
            raise NotFound(404, "NotFound", str(key))
        version = str(self.prompts)
        if known is not None and known["metadata"]["resourceVersion"] == version:
            return known
        self.travelled += 1
        plan = json.dumps({"prompts": [{"digest": f"p{number}"} for number in range(self.prompts)]})
        return {"metadata": {"uid": "u", "resourceVersion": version}, "data": {"plan.json": plan}}


class Rig:
    def __init__(self) -> None:
        self.api, self.clock = Api(), Clock()
        self.reads = ProbeReads(self.api, self.clock)  # type: ignore[arg-type]

    async def size(self, reader: str, where: ObjectKey = GOLDEN) -> int:
        return (await self.reads.get(where, reader)).size


async def test_rollouts_that_look_together_share_a_reading() -> None:
    rig = Rig()
    assert [await rig.size(reader) for reader in "abc"] == [2, 2, 2]
    assert rig.api.reads == 1


async def test_an_edit_is_seen_by_the_next_look_of_who_saw_the_text_before() -> None:
    rig = Rig()
    await rig.size("a")
    rig.api.prompts = 3
    assert await rig.size("a") == 3
    rig.api.prompts = None
    assert await rig.size("a") == 0


async def test_a_text_travels_once_while_it_stays() -> None:
    rig = Rig()
    assert [await rig.size("a") for _ in range(3)] == [2, 2, 2]
    assert (rig.api.reads, rig.api.travelled) == (3, 1)
    rig.api.prompts = 3
    assert await rig.size("a") == 3
    assert (rig.api.reads, rig.api.travelled) == (4, 2)


async def test_a_reading_is_shared_for_a_moment_only() -> None:
    rig = Rig()
    await rig.size("a")
    rig.api.prompts = 3
    rig.clock.seconds += SHARED_SECONDS + 0.01
    assert await rig.size("b") == 3


async def test_who_may_be_shown_an_older_reading_is() -> None:
    rig = Rig()
    await rig.size("a")
    rig.api.prompts = 3
    rig.clock.seconds += 2 * SHARED_SECONDS
    assert (await rig.reads.get(GOLDEN, "b", 3 * SHARED_SECONDS)).size == 2
    assert (await rig.reads.get(GOLDEN, "b", 3 * SHARED_SECONDS)).size == 3, "but nobody twice"


async def test_a_plan_is_parsed_once_while_its_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    parsed: list[Any] = []
    original = probereads.probe_set
    monkeypatch.setattr(probereads, "probe_set", lambda obj: parsed.append(obj) or original(obj))
    for _ in range(4):
        await rig.size("a")
    assert (rig.api.reads, len(parsed)) == (4, 1)
    rig.api.prompts = 5
    await rig.size("a")
    assert len(parsed) == 2


async def test_what_is_kept_is_bounded() -> None:
    rig = Rig()
    for number in range(MAX_KEPT + 1):
        await rig.size("a", ObjectKey(Kind.CONFIG_MAP, "serving", f"set-{number}"))
    before = rig.api.reads
    await rig.size("b", ObjectKey(Kind.CONFIG_MAP, "serving", "set-0"))
    assert rig.api.reads == before + 1
