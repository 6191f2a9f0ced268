"""A cache's plan on its status: what agents say, whose is shown, and when it is written."""

from __future__ import annotations

import math

import pytest

from kvtier.v1 import control_pb2 as control
from kvtier_crds.models.kvcache import Plan
from kvtier_operator.ports import Conflict, JsonObject, Kind, ObjectKey
from kvtier_operator.reconcile.kvcache import KVCacheReconciler
from kvtier_operator.reconcile.kvcache_predicted import NodePlan, node_plan, plan_moved, plan_of
from tests.unit.control.control_fakes import Bench
from tests.unit.control.control_objects import agent_pool, kv_cache, tier_class

KEY = ObjectKey(Kind.KV_CACHE, "serving", "chat")
GIB = 1 << 30
INPUTS = {"contextTokens": "4096", "coldTokens": "3072", "prefillFlopPerToken": "not stated"}


def said(stall: float | None, schedule: str = "layerwiseTwoSlot", **numbers: float) -> control.PlanState:
    """An agent's words; the operands of vector C3.14 unless told otherwise."""
    facts = {"link_bytes_per_second": 24.0 * GIB, "compute_flop_per_second": 3e14, **numbers}
    return control.PlanState(
        predicted_stall_seconds=stall, schedule=schedule, bytes_per_token=16384, inputs=INPUTS, **facts
    )


def heard(stall: float | None, schedule: str = "layerwiseTwoSlot", **numbers: float) -> NodePlan:
    plan = node_plan(control.CacheState(plan=said(stall, schedule, **numbers)))
    assert plan is not None
    return plan


def shown(plans: dict[str, NodePlan], prefill: str | None = None) -> JsonObject:
    found = plan_of(plans, prefill)
    assert found is not None
    Plan.model_validate(found)
    return found


def test_what_an_agent_says_is_taken_over_as_it_is() -> None:
    assert heard(0.25) == NodePlan(0.25, "layerwiseTwoSlot", None, 24.0 * GIB, 3e14, 16384, INPUTS)


def test_the_policy_and_why_other_plans_lost_reach_the_status_within_its_bounds() -> None:
    plan = said(0.25)
    plan.policy = "flexGen"
    plan.considered.add(name="allOnGpu", lost="GPU_BUDGET", seconds=0.0125)
    plan.considered.add(name="allOnDisk", lost="UNMEASURED")
    for _ in range(20):
        plan.considered.add(name="x" * 99, lost="y" * 99, seconds=math.nan)
    found = node_plan(control.CacheState(plan=plan))
    assert found is not None
    status = shown({"a": found})
    assert status["policy"] == "flexGen"
    assert status["considered"][:2] == [
        {"name": "allOnGpu", "lost": "GPU_BUDGET", "seconds": "0.0125"},
        {"name": "allOnDisk", "lost": "UNMEASURED"},
    ]
    assert len(status["considered"]) == 12
    assert status["considered"][-1] == {"name": "x" * 63, "lost": "y" * 63}


@pytest.mark.parametrize("held", [None, control.CacheState(sessions=1)], ids=["no-cache", "no-plan"])
def test_an_agent_that_says_nothing_has_no_plan(held: control.CacheState | None) -> None:
    assert node_plan(held) is None
    assert plan_of({}, "1") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0], ids=str)
def test_a_number_that_is_none_counts_as_not_known(value: float) -> None:
    plan = heard(value, kappa_crit=value, link_bytes_per_second=value, compute_flop_per_second=value)
    assert (plan.stall, plan.kappa, plan.link, plan.flops) == (None, None, None, None)
    assert shown({"a": plan}, "1e9") == {
        "schedule": "layerwiseTwoSlot",
        "inputs": {**INPUTS, "node": "a", "prefillFlopPerToken": "1e9"},
    }


def test_what_a_status_cannot_hold_is_cut_off() -> None:
    talkative = control.PlanState(
        schedule="s" * 99, inputs={f"{i:02}" + "k" * 99: "v" * 99 for i in range(40)}
    )
    plan = node_plan(control.CacheState(plan=talkative))
    assert plan is not None
    assert len(shown({"n" * 99: plan}, "5")["inputs"]) == 16


@pytest.mark.parametrize(
    ("stalls", "node"),
    [
        pytest.param({"a": 0.1, "b": 0.3, "c": 0.2}, "b", id="longest-wait"),
        pytest.param({"a": 0.1, "b": None}, "a", id="a-number-before-none"),
        pytest.param({"a": None, "b": None}, "b", id="none-anywhere"),
        pytest.param({"b": 0.1, "a": 0.1}, "b", id="equal"),
        pytest.param({"a": 0.0, "b": None}, "a", id="nothing-waits"),
    ],
)
def test_the_node_where_a_token_waits_longest_is_shown_and_named(
    stalls: dict[str, float | None], node: str
) -> None:
    found = shown({name: heard(stall) for name, stall in stalls.items()})
    assert found["inputs"]["node"] == node
    assert found.get("predictedStall") == (None if stalls[node] is None else f"{stalls[node]:.5g}")


def test_kappa_is_the_specifications_where_the_spec_states_the_models_arithmetic() -> None:
    """C3.14: 16 KiB a token, 12.890625 GFLOP a token, 24 GiB/s, 300 TFLOP/s."""
    found = shown({"a": heard(0.25)}, "12890625000")
    assert float(found["kappaCrit"]) == pytest.approx(67.584, abs=5e-4)
    assert found["inputs"]["prefillFlopPerToken"] == "12890625000"
    assert "kappaCrit" not in shown({"a": heard(0.25)})
    assert "kappaCrit" not in shown({"a": heard(0.25, link_bytes_per_second=0.0)}, "12890625000")
    assert "kappaCrit" not in shown({"a": heard(0.25)}, "0")


BEFORE = {
    "kappaCrit": "100",
    "predictedStall": "0.2",
    "schedule": "layerwiseTwoSlot",
    "inputs": {**INPUTS, "node": "a"},
}


@pytest.mark.parametrize(
    ("change", "news"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"predictedStall": "0.209"}, False, id="stall-4.5-percent"),
        pytest.param({"predictedStall": "0.211"}, True, id="stall-5.5-percent"),
        pytest.param({"predictedStall": "0.189"}, True, id="stall-less"),
        pytest.param({"predictedStall": None}, True, id="stall-gone"),
        pytest.param({"kappaCrit": "104"}, False, id="kappa-4-percent"),
        pytest.param({"kappaCrit": "94"}, True, id="kappa-6-percent"),
        pytest.param({"schedule": "onDemandBlocks"}, True, id="schedule"),
        pytest.param({"policy": "flexGen"}, True, id="policy"),
        pytest.param({"considered": [{"name": "a", "lost": "COST"}]}, False, id="what-lost"),
        pytest.param({"inputs": {**INPUTS, "node": "a", "kvShares": "gpu 1"}}, True, id="another-choice"),
        pytest.param({"inputs": {**INPUTS, "node": "b"}}, False, id="another-node-as-slow"),
        pytest.param({"inputs": {**INPUTS, "node": "a", "serviceSeconds": "9"}}, False, id="a-detail"),
        pytest.param({"inputs": {**INPUTS, "node": "a", "coldTokens": "0"}}, True, id="another-spec"),
    ],
)
def test_what_is_news(change: JsonObject, news: bool) -> None:
    after = {name: value for name, value in {**BEFORE, **change}.items() if value is not None}
    assert plan_moved(BEFORE, after, ["a", "b"]) is news


def test_a_microsecond_a_token_is_no_news_and_a_node_that_left_is() -> None:
    nothing = {**BEFORE, "predictedStall": "0"}
    assert not plan_moved(nothing, {**BEFORE, "predictedStall": "9e-07"}, ["a"])
    assert plan_moved(nothing, {**BEFORE, "predictedStall": "2e-06"}, ["a"])
    assert plan_moved(BEFORE, BEFORE, ["b"])


# --- the reconcile --------------------------------------------------------------------------------------


class World:
    def __init__(self, **spec: str) -> None:
        self.bench = Bench()
        for kind in (tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"), agent_pool()):
            self.bench.api.add(kind)
        for node in ("a", "b"):
            self.bench.add_node(node)
        self.bench.api.add(kv_cache(**spec))
        self.plans = self.bench.agents.plans
        self.reconciler = KVCacheReconciler(self.bench.deps)

    async def plan(self) -> JsonObject | None:
        """What the status says once everything was looked at again, a minute later."""
        self.bench.clock.advance(61)
        for node in ("a", "b"):
            self.bench.renew(node)
        try:
            await self.reconciler.reconcile(KEY)
        except Conflict:
            self.bench.api.catch_up()
            await self.reconciler.reconcile(KEY)
        found: JsonObject | None = self.bench.api.objects[KEY]["status"].get("plan")
        return found


async def test_the_plan_comes_with_the_first_proof_and_costs_no_write_after() -> None:
    world = World(prefillFlopPerToken="12890625000")
    world.plans.update(a=said(0.1), b=said(0.4))
    first = await world.plan()
    assert first == {
        "kappaCrit": "67.584",
        "predictedStall": "0.4",
        "schedule": "layerwiseTwoSlot",
        "inputs": {**INPUTS, "node": "b", "prefillFlopPerToken": "12890625000"},
    }
    world.bench.api.writes.clear()
    for _ in range(3):
        assert await world.plan() == first
    assert world.bench.api.writes == []


async def test_only_news_is_written() -> None:
    world = World()
    world.plans.update(a=said(0.1), b=said(0.4))
    first = await world.plan()
    world.bench.api.writes.clear()
    world.plans.update(b=said(0.412))
    assert await world.plan() == first
    # As slow as the other by now: another node's name is no news by itself.
    world.plans.update(a=said(0.415))
    assert await world.plan() == first
    assert world.bench.api.writes == []
    world.plans.update(a=said(0.5))
    moved = await world.plan()
    assert moved is not None and (moved["predictedStall"], moved["inputs"]["node"]) == ("0.5", "a")
    assert len(world.bench.api.writes) == 1


async def test_a_plan_stays_while_nobody_can_be_asked_and_there_is_none_without_one_that_says_it() -> None:
    world = World()
    assert await world.plan() is None
    world.plans.update(a=said(0.1))
    first = await world.plan()
    assert first is not None
    world.bench.agents.down = {"a", "b"}
    assert await world.plan() == first
