"""A plan of measured tiers, and its way to the operator's question."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2
from kvtier_agent.control_service import ControlService
from kvtier_agent.plan_report import PlanReporter, plan_message, reporter_of, tier_figures
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.computeprobe import ComputeFigures
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.nodeplan import NodePlan
from kvtier_core.receipts import TierStats
from kvtier_core.schedules import Schedule
from kvtier_core.units import GIB, MIB, BytesPerSecond, FlopPerSecond
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import Placement, TierRole
from tests.engine.agent_process import baseline_manifest
from tests.unit.agent.agent_fakes import Bench
from tests.unit.core.builders import FakeClock

LAYOUT = ChunkLayout(2, 256, 16)
FIGURES = ComputeFigures(1e-7, FlopPerSecond(5e10))
PLAN = NodePlan(0.25, "layerwiseTwoSlot", None, BytesPerSecond.gib(1), FlopPerSecond(5e10), 512, {"a": "b"})


def stats(
    name: str, medium: str, read: float, *, simulated: bool = False, capacity: int = 64 << 20
) -> TierStats:
    return TierStats(name, medium, simulated, capacity, 0, 0, read, read, {}, "Ready")


TIERS = (
    stats("gpu-sim", "gpu", 4.0 * GIB, simulated=True),
    stats("dram", "cpu", 4.0 * GIB),
    stats("nvme", "nvme", 100.0 * MIB, capacity=16 << 20),
)


@pytest.mark.parametrize(
    ("given", "role", "in_place", "slots", "rows"),
    [
        pytest.param(stats("a", "cpu", 1.0), TierRole.BACKING, True, 1024, True, id="host-memory"),
        pytest.param(stats("a", "gpu", 1.0), TierRole.RESIDENT, False, 1024, True, id="device"),
        pytest.param(
            stats("a", "gpu", 1.0, simulated=True), TierRole.RESIDENT, True, 1024, True, id="simulated"
        ),
        # Each block on flash has a header page of its own.
        pytest.param(stats("a", "nvme", 1.0), TierRole.BACKING, False, 963, True, id="flash"),
        pytest.param(stats("a", "cpu", 1.0), TierRole.STAGING, True, 1024, False, id="staging"),
    ],
)
def test_what_the_plan_needs_of_a_tier(
    given: TierStats, role: TierRole, in_place: bool, slots: int, rows: bool
) -> None:
    found = tier_figures(given, role, LAYOUT)
    assert (found.in_place, found.slots, found.rows) == (in_place, slots, rows)
    assert found.read == BytesPerSecond(1.0)


def test_a_tier_that_was_not_measured_has_no_bandwidth() -> None:
    found = tier_figures(stats("a", "cpu", 0.0), TierRole.BACKING, LAYOUT)
    assert (found.read, found.write) == (None, None)


def test_the_plan_is_of_the_manifests_placement_policy_and_travels_with_why_others_lost() -> None:
    manifest = baseline_manifest()
    placed = Placement(policy="headGroups", parameters=Parameters({"stagingBytes": 1 << 20}))
    plan = PlanReporter(manifest.model_copy(update={"placement": placed}), FIGURES).of(TIERS)
    assert plan is not None and plan.policy == "headGroups"
    message = plan_message(plan)
    assert (message.policy, message.schedule) == ("headGroups", plan.schedule)
    assert [(item.name, item.lost) for item in message.considered] == [
        (item.name, item.lost) for item in plan.considered
    ]
    told = {item.name: item for item in message.considered}
    assert told["nvme"].lost == "TIER_INCAPABLE" and not told["nvme"].HasField("seconds")


def test_a_policy_that_this_version_does_not_know_is_refused_when_the_cache_is_built() -> None:
    manifest = baseline_manifest().model_copy(update={"placement": Placement(policy="random")})
    with pytest.raises(CoreError) as error:
        PlanReporter(manifest, FIGURES)
    assert error.value.reason is Reason.MANIFEST_INVALID


def test_the_plan_is_of_the_tier_that_is_read_through_copies_and_of_its_measured_bandwidth() -> None:
    reporter = PlanReporter(baseline_manifest(), FIGURES)
    plan = reporter.of(TIERS)
    assert plan is not None and plan.stall is not None
    assert plan.inputs["awayTiers"] == "nvme"
    assert plan.link is not None and plan.link.value == pytest.approx(100.0 * MIB)
    cold = int(plan.inputs["coldTokens"])
    assert cold > 0
    # Every cold byte comes over the link, and no more of that time is hidden than there is to compute.
    fetch = cold * plan.bytes_per_token / plan.link.value
    assert fetch - int(plan.inputs["contextTokens"]) * 8 * 1e-7 <= plan.stall <= fetch * (1 + 1e-12)
    assert plan.schedule in list(Schedule)


def test_a_plan_is_made_anew_only_when_a_measurement_is_another() -> None:
    reporter = PlanReporter(baseline_manifest(), FIGURES)
    first = reporter.of(TIERS)
    used = [dataclasses.replace(tier, used_bytes=1 << 20, pinned_bytes=1) for tier in TIERS]
    assert reporter.of(used) is first
    slower = reporter.of([*TIERS[:2], stats("nvme", "nvme", 50.0 * MIB, capacity=16 << 20)])
    assert first is not None and slower is not None
    assert first.stall is not None and slower.stall is not None
    assert slower.stall == pytest.approx(2 * first.stall, rel=0.05)


def test_an_engine_that_could_not_measure_attention_has_no_plan() -> None:
    assert reporter_of(baseline_manifest(), FakeClock()).of(TIERS) is None


def test_absent_numbers_stay_absent_on_the_wire() -> None:
    full = plan_message(dataclasses.replace(PLAN, kappa=67.5))
    assert (full.predicted_stall_seconds, full.schedule, full.kappa_crit) == (0.25, "layerwiseTwoSlot", 67.5)
    assert (full.link_bytes_per_second, full.compute_flop_per_second) == (GIB, 5e10)
    assert (full.bytes_per_token, dict(full.inputs)) == (512, {"a": "b"})
    bare = plan_message(NodePlan(None, None, None, None, None, 512, {}))
    assert not bare.HasField("predicted_stall_seconds") and not bare.HasField("kappa_crit")
    assert (bare.schedule, bare.link_bytes_per_second, bare.compute_flop_per_second) == ("", 0.0, 0.0)
    nothing_waits = plan_message(dataclasses.replace(PLAN, stall=0.0))
    assert nothing_waits.HasField("predicted_stall_seconds")


class Caller:
    """A servicer context of a caller without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_the_state_that_an_agent_answers_holds_the_plan_of_its_engine(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.apply()
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    service = ControlService(bench.node, RpcScope(telemetry, Metrics(CollectorRegistry()), 5.0))

    async def state() -> control_pb2.CacheState:
        answer = await service.GetState(control_pb2.GetStateRequest(), Caller())  # type: ignore[arg-type]
        return answer.caches[0]

    assert not (await state()).HasField("plan")
    bench.engine.planned = PLAN
    assert (await state()).plan == plan_message(PLAN)
    await bench.close()
