"""What an agent tells of its caches: of those that are named, or of all; and its own facts always."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2
from kvtier_agent.cachehost import manifest_set_digest
from kvtier_agent.control_service import ControlService
from kvtier_agent.convert import cache_name
from kvtier_agent.engine_port import TierReport
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_agent.tierdirs import PACED, READY
from kvtier_agent.tiersums import add_report, with_engines
from kvtier_core.receipts import TierBytes
from tests.unit.agent.agent_fakes import NAME, Bench


class Caller:
    """A servicer context of a caller without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Rig:
    """An agent with three caches, `one`, `two` and `three`."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        telemetry = Telemetry("node-a", "serving/pool", self.bench.node.boot_id, "0", [])
        scope = RpcScope(telemetry, Metrics(CollectorRegistry()), 30.0)
        self.service = ControlService(self.bench.node, scope)

    async def start(self) -> None:
        for uid in ("one", "two", "three"):
            name = replace(cache_name(NAME), uid=uid)
            command = replace(self.bench.command(), cache=name)
            tenancy = self.bench.baseline.tenancy.model_copy(update={"cache_uid": uid})
            baseline = self.bench.baseline.model_copy(update={"tenancy": tenancy})
            await self.bench.node.apply_baseline(command, baseline.canonical(), baseline.digest())

    def use(self, uid: str, used: int) -> None:
        self.bench.engines[("one", "two", "three").index(uid)].used = used

    async def state(self, *uids: str) -> control_pb2.GetStateResponse:
        request = control_pb2.GetStateRequest(cache_uids=uids)
        return await self.service.GetState(request, Caller())  # type: ignore[arg-type]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    await made.start()
    yield made
    await made.bench.close()


@pytest.mark.parametrize(
    "named, told",
    [
        pytest.param((), ["one", "three", "two"], id="none"),
        pytest.param(("two",), ["two"], id="one"),
        pytest.param(("two", "one", "two"), ["one", "two"], id="some-and-one-twice"),
        pytest.param(("gone", "two"), ["two"], id="one-that-it-does-not-know"),
        pytest.param(("gone",), [], id="only-one-that-it-does-not-know"),
    ],
)
async def test_only_caches_that_are_named_are_told_of_and_as_ever(
    rig: Rig, named: tuple[str, ...], told: list[str]
) -> None:
    whole, answer = await rig.state(), await rig.state(*named)
    assert [cache.cache.uid for cache in answer.caches] == told
    assert list(answer.caches) == [cache for cache in whole.caches if cache.cache.uid in told]
    for one in (whole, answer):
        del one.caches[:]
        one.ClearField("stamp_ns")
    assert answer == whole


async def test_the_engine_of_a_named_cache_is_asked_and_no_other(rig: Rig) -> None:
    tier = "dram"
    for uid, used in (("one", 10), ("two", 20), ("three", 40)):
        rig.use(uid, used)

    async def used(*uids: str) -> tuple[list[int], int]:
        answer = await rig.state(*uids)
        of_node = sum(one.used_bytes for one in answer.tiers if one.tier_class == tier)
        return [cache.used_by_tier[tier] for cache in answer.caches], of_node

    assert await used("two") == ([20], 20)
    assert await used("one") == ([10], 30), "what the second said last still counts"
    assert await used() == ([10, 40, 20], 70)


async def test_the_name_of_all_baselines_follows_them(rig: Rig) -> None:
    def named() -> tuple[str, str]:
        return node.manifest_set_digest(), manifest_set_digest(
            {uid: host.baseline_digest for uid, host in node.caches.items()}
        )

    node = rig.bench.node
    seen = [named()]
    await node.remove_cache(replace(rig.bench.command(), cache=replace(cache_name(NAME), uid="two")))
    seen.append(named())
    node.caches["one"].baseline_digest = "sha256:other"
    seen.append(named())
    node.caches.clear()
    seen.append(named())
    assert [told == wanted for told, wanted in seen] == [True] * 4
    assert len(set(seen)) == 4


COUNTS = st.integers(0, 5)
BYTES = st.builds(TierBytes, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
REPORTS = st.builds(
    TierReport,
    st.sampled_from(["ram", "flash"]),
    st.just("cpu"),
    st.booleans(),
    COUNTS,
    COUNTS,
    COUNTS,
    st.floats(0, 4),
    st.floats(0, 4),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy")),
    st.sampled_from([READY, PACED, "Full: no room", "Broken: gone"]),
    BYTES,
)


@given(REPORTS, st.lists(REPORTS, max_size=5))
def test_the_sum_of_many_reports_is_that_of_one_after_another(
    node: TierReport, engines: Sequence[TierReport]
) -> None:
    total = node
    for one in engines:
        total = add_report(total, one)
    assert with_engines(node, engines) == total
    mine = [one for one in engines if one.class_name == node.class_name]
    assert total.used_bytes == node.used_bytes + sum(one.used_bytes for one in mine)
    assert total.capacity_bytes == node.capacity_bytes
